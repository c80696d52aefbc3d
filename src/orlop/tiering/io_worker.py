"""The work loop beside the stores: queues, threads, envelopes; the same in the I/O process and in threads.

In: messages of ``io_messages``, the host region, a StoreSpec. Out: exactly one report per transfer and one answer
per lookup while it lives, through ``send``. Never: a socket, a policy, a retry, an exception that ends a thread
for the sake of a store.

::

    Ask ------> lookup queue --> lookup threads --> store.contains, in growing batches up to the first miss
    Transfer -> parts of up to 4 MiB or 32 chunks
                load queue  \\
                             > I/O threads, loads first, several parts at once where many wait
                store queue /    --> read_into, verify | build headers, write
    Clear ----> all queues emptied, running parts waited for --> scan, delete

Stores never take the last I/O thread, so that a slow write delays no load (where there is more than one). A store
that cannot be built answers every job with why, and is tried again by the next one: the breaker on the other side
makes that rare.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice

import numpy as np
import numpy.typing as npt

from orlop.background import start_thread
from orlop.core import Namespace, Outcome
from orlop.errors import ConfigError, EnvelopeError, MissingExtra, OrlopError, StoreError
from orlop.host.region import HostRegion
from orlop.tiering import envelope
from orlop.tiering.base import ChunkStore, KeyChange
from orlop.tiering.io_messages import (
    OUTCOME_CODES,
    Answer,
    Ask,
    Bye,
    Clear,
    Cleared,
    FromWorker,
    IoOptions,
    Keys,
    NotReady,
    Ready,
    Removed,
    Report,
    StoreSpec,
    StoreStats,
    Touch,
    ToWorker,
    Transfer,
)
from orlop.tiering.key_index import probe

log = logging.getLogger(__name__)

PART_BYTES = 4 << 20
PART_CHUNKS = 32
BATCH_PARTS = 2
"""Of parts that are as large as they may be, so many go by one call where more are waiting than there are threads."""
KEYS_PER_MESSAGE = 65_536
MOST_TOUCHES = 256
STATS_EVERY_S = 1.0
COUNT_AGAIN_S = 0.02
CLEAR_RETRY_S = 1.0
DELETE_BATCH = 256
LINE_CHARACTERS = 1000

KEPT_REASONS = frozenset(
    {envelope.Reason.VERSION, envelope.Reason.FOREIGN_NAMESPACE, envelope.Reason.FOREIGN_GENERATION}
)
"""What verifies as somebody else's, or as another version's, is a miss and stays."""

SOURCE_REASON = "source_checksum"
"""What was to be stored does not match the region's own table."""

FAILURES = frozenset({Outcome.NO_SPACE, Outcome.DENIED, Outcome.IO_ERROR, Outcome.TIMEOUT, Outcome.UNAVAILABLE})
"""Outcomes that count against a store."""


def outcome_of(error: BaseException) -> Outcome:
    """What an exception of a store means for the keys of its call."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return Outcome.NO_SPACE
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return Outcome.DENIED
    return Outcome.TIMEOUT if isinstance(error, TimeoutError) else Outcome.IO_ERROR


def one_line(error: BaseException) -> str:
    """For a log; the words of an error of ours are enough without the name of its class."""
    text = str(error) if isinstance(error, OrlopError) and str(error) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0][:LINE_CHARACTERS]


class _Job:
    """A transfer that is being worked on, and what is known of it so far."""

    __slots__ = (
        "alike",
        "began",
        "codes",
        "damaged",
        "failed",
        "left",
        "nbytes",
        "reason",
        "received",
        "step",
        "transfer",
    )

    def __init__(self, transfer: Transfer, now: float) -> None:
        self.transfer = transfer
        self.alike = transfer._replace(job_id=0, keys=(), slots=())
        """Equal for jobs whose parts may go by one call."""
        self.step = max(1, min(PART_CHUNKS, PART_BYTES // max(1, transfer.payload_bytes)))
        """The most chunks of one part."""
        self.left = -(-len(transfer.keys) // self.step)
        self.codes = bytearray(len(transfer.keys))
        self.nbytes = 0
        self.reason = ""
        self.failed = False
        self.damaged: tuple[str, ...] = ()
        self.received = now
        self.began = 0.0
        """When its first part began; 0 before."""


class _Part:
    """Chunks ``start .. stop - 1`` of a job."""

    __slots__ = ("job", "start", "stop")

    def __init__(self, job: _Job, start: int, stop: int) -> None:
        self.job = job
        self.start = start
        self.stop = stop

    @property
    def count(self) -> int:
        return self.stop - self.start


class _Batch:
    """Parts that go by one call of the store, perhaps of several jobs that differ in their keys and slots alone."""

    __slots__ = ("keys", "load", "parts", "slots", "transfer")

    def __init__(self, parts: list[_Part]) -> None:
        self.parts = parts
        self.transfer = parts[0].job.transfer if parts else _NO_TRANSFER
        self.load = self.transfer.load
        self.keys: list[bytes] = []
        self.slots: list[int] = []
        for part in parts:
            self.keys += part.job.transfer.keys[part.start : part.stop]
            self.slots += part.job.transfer.slots[part.start : part.stop]

    @property
    def count(self) -> int:
        return len(self.keys)


class IoWorker:
    """One store and its threads. ``handle`` may be called from one thread at a time and never waits for I/O.

    ``send`` is called from any of the worker's threads and returns at once. ``ended`` is called once, after the
    last message: after ``Bye`` has been obeyed, or because a thread died of a fault of this program. ``clock`` is
    monotonic seconds.
    """

    def __init__(
        self,
        spec: StoreSpec,
        options: IoOptions,
        region: HostRegion,
        send: Callable[[FromWorker], None],
        ended: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._options = options
        self._region = region
        self._send = send
        self._ended = ended
        self._clock = clock
        self._parts = [region.layout.parts(group) for group in range(region.layout.groups)]
        self._store: ChunkStore | None = None
        self._building = threading.Lock()
        # One lock for the queues and counts below, never held during I/O, and one bell per kind of thread.
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._asked = threading.Condition(self._lock)
        self._clearing = threading.Condition(self._lock)
        self._loads: deque[_Part] = deque()
        self._stores: deque[_Part] = deque()
        self._touches: deque[Touch] = deque()
        self._asks: deque[Ask] = deque()
        self._loading = 0
        self._storing = 0
        self._clears: deque[Clear] = deque()
        self._closing = False
        self._abandoned = False
        self._next_stats = 0.0
        self._threads: list[threading.Thread] = []

    # --- from outside -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads; the first thing one of them does is to build the store."""
        self._spawn(self._build_first, "build")
        for i in range(max(1, self._options.threads)):
            self._spawn(self._move_parts, f"io-{i}")
        for i in range(max(1, self._options.lookup_threads)):
            self._spawn(self._answer_asks, f"lookup-{i}")
        self._spawn(self._clear_when_told, "clear")

    def handle(self, message: ToWorker) -> None:
        """Take one message; nothing once the worker is abandoned."""
        if self._abandoned:
            return
        if isinstance(message, Transfer):
            self._take_transfer(message)
        elif isinstance(message, Ask):
            self._take_ask(message)
        elif isinstance(message, Touch):
            with self._lock:
                if len(self._touches) < MOST_TOUCHES:
                    self._touches.append(message)
                    self._work.notify()
        elif isinstance(message, Clear):
            self._take_clear(message)
        elif isinstance(message, Bye):
            with self._lock:
                self._closing = True
                self._wake_all()
            start_thread(self._guard, self._finish, name="orlop-io-finish")

    def join(self, timeout_s: float | None = None) -> bool:
        """Whether, at latest after ``timeout_s`` (None: however long), no thread of this worker touches the region."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def abandon(self) -> None:
        """Start nothing any more; threads end when what they are in the middle of ends."""
        with self._lock:
            self._closing = self._abandoned = True
            for queue in (self._loads, self._stores, self._touches, self._asks, self._clears):
                queue.clear()
            self._wake_all()

    def _wake_all(self) -> None:
        for bell in (self._work, self._asked, self._clearing):
            bell.notify_all()

    # --- taking messages ----------------------------------------------------------------------------

    def _take_transfer(self, transfer: Transfer) -> None:
        count = len(transfer.keys)
        job = _Job(transfer, self._clock())
        with self._lock:
            if not self._clears:
                queue = self._loads if transfer.load else self._stores
                queue.extend(_Part(job, i, min(i + job.step, count)) for i in range(0, count, job.step))
                self._work.notify(job.left)
                return
        self._forget(transfer)

    def _forget(self, transfer: Transfer) -> None:
        """Answer a transfer that a clear has overtaken."""
        outcome = Outcome.MISSING if transfer.load else Outcome.UNAVAILABLE
        codes = bytes([OUTCOME_CODES[outcome]]) * len(transfer.keys)
        self._send(Report(transfer.job_id, codes, reason="the tier is being cleared"))

    def _take_ask(self, ask: Ask) -> None:
        with self._lock:
            if not self._clears:
                self._asks.append(ask)
                self._asked.notify()
                return
        self._send(Answer(ask.lookup_id, bytes(len(ask.keys))))

    def _take_clear(self, clear: Clear) -> None:
        with self._lock:
            self._clears.append(clear)
            parts = [*self._loads, *self._stores]
            asks = list(self._asks)
            for queue in (self._loads, self._stores, self._asks, self._touches):
                queue.clear()
            self._clearing.notify()
        for part in parts:
            outcome = Outcome.MISSING if part.job.transfer.load else Outcome.UNAVAILABLE
            self._part_done(part, [outcome] * part.count, "the tier is being cleared", tried=False)
        for ask in asks:
            self._send(Answer(ask.lookup_id, bytes(len(ask.keys))))

    # --- transfers ----------------------------------------------------------------------------------

    def _move_parts(self) -> None:
        headers = _Headers()
        while (work := self._next_work()) is not None:
            self._do(work, headers)

    def _do(self, work: _Batch | Touch, headers: _Headers) -> None:
        if isinstance(work, Touch):
            self._touch(work)
            return
        try:
            self._move(work, headers)
        finally:
            self._leave(work)
        with self._lock:
            idle = not (self._loads or self._stores or self._loading or self._storing)
        self._maybe_stats(idle=idle)

    def _next_work(self) -> _Batch | Touch | None:
        """The next parts, loads first; None once there is nothing left to wait for."""
        with self._lock:
            while (work := self._take_work()) is None:
                if self._closing and not self._stores and not self._clears:
                    return None
                self._work.wait()
            return work

    def _take_work(self) -> _Batch | Touch | None:
        """What may be begun now. Under the lock."""
        if self._loads:
            self._loading += 1
            return _take_batch(self._loads, len(self._loads) // self._options.threads)
        hands = max(1, self._options.threads - 1)
        if self._stores and self._storing < hands:
            self._storing += 1
            return _take_batch(self._stores, -(-len(self._stores) // hands))  # nobody waits for them
        return self._touches.popleft() if self._touches else None

    def _leave(self, batch: _Batch) -> None:
        with self._lock:
            if batch.load:
                self._loading -= 1
            else:
                self._storing -= 1
                if self._stores:
                    self._work.notify()  # one more may store
            if self._clears:
                self._clearing.notify()
            if self._closing:
                self._work.notify_all()

    def _move(self, batch: _Batch, headers: _Headers) -> None:
        now = self._clock()
        limit_s = self._options.load_wait_s if batch.load else self._options.store_wait_s
        for part in batch.parts:
            part.job.began = part.job.began or now
        late = [part for part in batch.parts if now - part.job.received > limit_s]
        for part in late:
            self._part_done(part, [Outcome.TIMEOUT] * part.count, f"waited more than {limit_s:g} s in the queue")
        if late:
            batch = _Batch([part for part in batch.parts if part not in late])
            if not batch.parts:
                return
        damaged: dict[int, str] = {}
        try:
            store = self._get_store()
        except BaseException as e:
            outcomes, reason = [Outcome.UNAVAILABLE] * batch.count, f"the store cannot be opened: {one_line(e)}"
        else:
            call = self._load_batch if batch.load else self._store_batch
            try:
                outcomes, reason = call(store, batch, headers, damaged), ""
            except BaseException as e:  # whatever a store raises is that job's trouble alone
                if len(batch.parts) > 1:
                    for part in batch.parts:
                        self._move(_Batch([part]), headers)
                    return
                outcomes, reason = [outcome_of(e)] * batch.count, one_line(e)
        start = 0
        for part in batch.parts:
            stop = start + part.count
            why = [damaged[i] for i in range(start, stop) if i in damaged] if damaged else ()
            self._part_done(part, outcomes[start:stop], reason, why)
            start = stop

    def _load_batch(
        self, store: ChunkStore, batch: _Batch, headers: _Headers, damaged: dict[int, str]
    ) -> list[Outcome]:
        """``damaged``: why chunks did not verify, by their numbers in the batch."""
        keys, slots, transfer = batch.keys, batch.slots, batch.transfer
        digest, parts = transfer.digest, self._parts[transfer.group]
        names = [digest + key for key in keys]
        namespace = Namespace(digest, transfer.generation)
        with self._views(slots, transfer.payload_bytes) as views:
            heads = headers.read.pages[: len(keys)]
            outcomes = _checked(store.read_into(names, heads, views), len(keys))
            there: Sequence[int] = range(len(keys))
            if outcomes.count(Outcome.OK) < len(keys):
                there = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.OK]
                damaged |= {i: envelope.Reason.LENGTH for i, o in enumerate(outcomes) if o is Outcome.CORRUPT}
            odd = there and headers.read.unlike(
                there, views, namespace=namespace, keys=keys, payload_bytes=transfer.payload_bytes, parts=parts
            )
            for i in odd:
                outcomes[i], why = self._judge(transfer, namespace, keys[i], heads[i], views[i])
                damaged |= {i: why} if why else {}
            # Whoever reads the slots next, a device or another tier, finds the checksums of what is there now.
            sums = headers.read.part_checksums(len(keys), len(parts))
            if outcomes.count(Outcome.OK) == len(keys):
                self._region.checksums[slots] = sums
                return outcomes
            good = [i for i in there if outcomes[i] is Outcome.OK]
            self._region.checksums[[slots[i] for i in good]] = sums[good]
        broken = [name for name, outcome in zip(names, outcomes, strict=True) if outcome is Outcome.CORRUPT]
        if broken:
            _delete_quietly(store, broken)
        return outcomes

    def _judge(
        self, transfer: Transfer, namespace: Namespace, key: bytes, header: memoryview, payload: memoryview
    ) -> tuple[Outcome, str]:
        """What becomes of a chunk that is not exactly as we would have written it, and why."""
        try:
            envelope.verify(
                header,
                payload,
                namespace=namespace,
                key=key,
                payload_bytes=transfer.payload_bytes,
                parts=self._parts[transfer.group],
            )
        except EnvelopeError as e:
            return (Outcome.MISSING if e.reason in KEPT_REASONS else Outcome.CORRUPT), str(e.reason)
        return Outcome.OK, ""

    def _store_batch(
        self, store: ChunkStore, batch: _Batch, headers: _Headers, damaged: dict[int, str]
    ) -> list[Outcome]:
        """As ``_load_batch``."""
        keys, slots, transfer = batch.keys, batch.slots, batch.transfer
        sums = self._region.checksums[slots]
        with self._views(slots, transfer.payload_bytes) as views:
            seen, told = envelope.part_checksums(views, self._parts[transfer.group]), sums.tolist()
            if seen == told:
                return self._write(store, transfer, keys, views, sums, headers)
            # Others were never whole, or somebody wrote to a pinned slot: nothing to keep, nothing to remove.
            outcomes = [Outcome.CORRUPT] * len(keys)
            whole = [i for i in range(len(keys)) if seen[i] == told[i]]
            damaged |= dict.fromkeys(set(range(len(keys))).difference(whole), SOURCE_REASON)
            if whole:
                some = [keys[i] for i in whole], [views[i] for i in whole], sums[whole]
                for i, outcome in zip(whole, self._write(store, transfer, *some, headers), strict=True):
                    outcomes[i] = outcome
        return outcomes

    def _write(
        self,
        store: ChunkStore,
        transfer: Transfer,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        part_checksums: npt.NDArray[np.uint64],
        headers: _Headers,
    ) -> list[Outcome]:
        heads = headers.new.build(
            keys,
            namespace=Namespace(transfer.digest, transfer.generation),
            salt=transfer.salt,
            payload_bytes=transfer.payload_bytes,
            part_checksums=part_checksums,
        )
        return _checked(store.write([transfer.digest + key for key in keys], heads, views), len(keys))

    @contextmanager
    def _views(self, slots: Sequence[int], nbytes: int) -> Iterator[list[memoryview]]:
        """Views of slots that are let go of afterwards, so that nobody touches a slot whose job is over."""
        views = [self._region.view(slot, nbytes) for slot in slots]
        try:
            yield views
        finally:
            try:
                for view in views:
                    view.release()
            except BufferError:
                # A store that still has an array over one breaks its contract; its outcomes count all the same.
                for view in views:
                    with suppress(BufferError):
                        view.release()

    def _part_done(
        self,
        part: _Part,
        outcomes: Sequence[Outcome],
        reason: str = "",
        damaged: Sequence[str] = (),
        *,
        tried: bool = True,
    ) -> None:
        job = part.job
        kept = outcomes.count(Outcome.OK)
        all_well = kept == part.count
        codes = bytes(kept) if all_well else bytes(OUTCOME_CODES[outcome] for outcome in outcomes)
        failures = FAILURES.intersection(outcomes) if tried and not all_well else ()
        with self._lock:
            job.codes[part.start : part.stop] = codes
            job.nbytes += kept * job.transfer.payload_bytes
            job.failed |= bool(failures)
            job.reason = job.reason or reason or ", ".join(sorted(failures))
            job.damaged += tuple(damaged)
            job.left -= 1
            if job.left:
                return
        self._send(_report(job, self._clock()))

    # --- lookups ------------------------------------------------------------------------------------

    def _answer_asks(self) -> None:
        while (ask := self._next_ask()) is not None:
            self._answer(ask)

    def _answer(self, ask: Ask) -> None:
        try:
            answer = Answer(ask.lookup_id, self._probe(self._get_store(), ask))
        except BaseException as e:  # a lookup that fails finds nothing
            answer = Answer(ask.lookup_id, bytes(len(ask.keys)), one_line(e))
        self._send(answer)
        self._maybe_stats()

    def _next_ask(self) -> Ask | None:
        with self._lock:
            while not self._asks:
                if self._closing:
                    return None
                self._asked.wait()
            return self._asks.popleft()

    def _probe(self, store: ChunkStore, ask: Ask) -> bytes:
        def contains(keys: Sequence[bytes]) -> bytes:
            there = store.contains([ask.digest + key for key in keys])
            if len(there) != len(keys):
                raise StoreError(f"contains: found {len(there)} answers, expected {len(keys)}")
            return bytes(map(bool, there))

        return probe(ask.keys, ask.stop_at_miss, contains)

    def _touch(self, touch: Touch) -> None:
        try:
            self._get_store().touch([touch.digest + key for key in touch.keys])
        except BaseException as e:  # costs the keys some recency and nobody an answer
            log.debug("tier %s: touch: %s", self._options.name, one_line(e))

    # --- clear --------------------------------------------------------------------------------------

    def _clear_when_told(self) -> None:
        """Runs each clear once no part is running: one that still writes could bring back what is removed."""
        while (clear := self._next_clear()) is not None:
            while not self._cleared():
                with self._lock:
                    if self._clearing.wait_for(lambda: self._closing, CLEAR_RETRY_S):
                        self._clears.clear()
                        self._work.notify_all()
                        return
            self._clear_done(clear)

    def _clear_done(self, clear: Clear) -> None:
        with self._lock:
            if self._clears:
                self._clears.popleft()
            self._work.notify_all()
        self._send(Cleared(clear.number))

    def _cleared(self) -> bool:
        try:
            _delete_all(self._get_store())
        except BaseException as e:
            log.warning("tier %s: clear: %s; nothing is served, trying again", self._options.name, one_line(e))
            return False
        return True

    def _next_clear(self) -> Clear | None:
        with self._lock:
            while not self._clears or self._loading or self._storing:
                if self._closing and not self._clears:
                    return None
                self._clearing.wait()
            return self._clears[0]

    # --- the store and the threads ------------------------------------------------------------------

    def _build_first(self) -> None:
        try:
            store = self._get_store()
        except BaseException as e:
            self._send(NotReady(one_line(e), isinstance(e, ConfigError | MissingExtra)))
        else:
            self._say_what_it_holds(store)

    def _say_what_it_holds(self, store: ChunkStore) -> None:
        """Once it knows: a store may still be looking through its directory."""
        with contextlib.suppress(Exception):  # what it counts is no reason to fail
            while not (found := StoreStats(dict(store.stats()))).complete and not self._closing:
                time.sleep(COUNT_AGAIN_S)
            self._send(found)

    def _get_store(self) -> ChunkStore:
        if self._store is not None:
            return self._store
        with self._building:
            if self._store is None:
                store = self._spec.build()
                store.watch(self._tell_keys)
                if self._options.events:
                    store.watch_removals(lambda key: self._send(Removed(key)))
                self._store = store
                self._send(Ready())
            return self._store

    def _tell_keys(self, change: KeyChange) -> None:
        """In pieces that are small on the wire; a store says its changes one after the other, so they stay together."""
        count = max(len(change.added), len(change.removed), 1)
        for start in range(0, count, KEYS_PER_MESSAGE):
            stop = start + KEYS_PER_MESSAGE
            added, removed = change.added[start:stop].tobytes(), change.removed[start:stop].tobytes()
            self._send(Keys(added, removed, reset=change.reset and start == 0, more=stop < count))

    def _maybe_stats(self, *, idle: bool = False) -> None:
        """Now and then, and when nothing is left to move, so that the last word is right."""
        now = self._clock()
        with self._lock:
            if self._store is None or (now < self._next_stats and not idle):
                return
            self._next_stats = now + STATS_EVERY_S
        try:
            self._send(StoreStats(dict(self._store.stats())))
        except BaseException as e:
            log.debug("tier %s: stats: %s", self._options.name, one_line(e))

    def _spawn(self, target: Callable[[], None], name: str) -> None:
        self._threads.append(start_thread(self._guard, target, name=f"orlop-{name}"))

    def _guard(self, target: Callable[[], None]) -> None:
        """A thread that dies of a fault of ours ends the worker: half a worker would lose jobs silently."""
        try:
            target()
        except BaseException:
            log.exception("tier %s: a thread of the I/O worker died", self._options.name)
            self._ended()

    def _finish(self) -> None:
        self.join()
        if self._store is not None:
            try:
                self._store.close()
            except BaseException as e:
                log.warning("tier %s: close: %s", self._options.name, one_line(e))
        self._ended()


_NO_TRANSFER = Transfer(-1, False, 0, (), (), 0, b"", b"", b"")


def _take_batch(queue: deque[_Part], share: int) -> _Batch:
    """The first part and, of ``share`` in all, those right behind it that may go with it."""
    parts = [queue.popleft()]
    job, count = parts[0].job, parts[0].count
    while queue and len(parts) < share and queue[0].job.alike == job.alike:
        count += queue[0].count
        if count > BATCH_PARTS * job.step:
            break
        parts.append(queue.popleft())
    return _Batch(parts)


def _report(job: _Job, now: float) -> Report:
    return Report(
        job.transfer.job_id,
        bytes(job.codes),
        job.nbytes,
        now - job.began if job.began else 0.0,
        job.reason or ", ".join(sorted(set(job.damaged))),
        job.failed,
        job.damaged,
    )


def _checked(outcomes: Sequence[Outcome], count: int) -> list[Outcome]:
    """A store that answers for more or fewer keys than it was asked has answered for none."""
    if len(outcomes) != count:
        raise StoreError(f"found {len(outcomes)} outcomes, expected {count}, one per key")
    found = list(outcomes)
    return found if found.count(Outcome.OK) == count else list(map(Outcome, found))


def _delete_quietly(store: ChunkStore, names: Sequence[bytes]) -> None:
    try:
        store.delete(names)
    except BaseException as e:  # what cannot be removed does not verify next time either
        log.debug("removing %d damaged chunks: %s", len(names), one_line(e))


def _delete_all(store: ChunkStore) -> None:
    """Batch by batch: a scan may see what is removed meanwhile, never miss what was there before it began."""
    chunks = store.scan()
    while batch := [chunk.key for chunk in islice(chunks, DELETE_BATCH)]:
        store.delete(batch)


class _Headers:
    """Room for the headers of one batch, of one thread."""

    def __init__(self) -> None:
        self.new = envelope.NewHeaders(BATCH_PARTS * PART_CHUNKS)
        self.read = envelope.ReadHeaders(BATCH_PARTS * PART_CHUNKS)
