"""A SecondaryTierManager over any ChunkStore: bounded queues, breaker, counters, exactly one report per job.

In: jobs and lookups on the engine's thread; a StoreSpec, the host region. Out: reports and answers on the engine's
thread. Never: on the engine's thread a file, a socket, or a lock that I/O may hold; a deadline of a job (those are the
manager's); a look into a chunk.

::

    engine's thread                                    I/O worker (a process, or threads)
    submit, lookup -------- memory, as a rule -----------> queues, threads, store
      | no room, no worker                                      |
      posted--> sender thread: waits, sends ------------->      |
    get_*   <-------------- memory, as a rule ----------- reports, answers
      arrived <-- owner thread: starts the worker again, <------+
                  settles what a dead one owes, takes what nobody takes

The engine's thread never waits for the other two: it posts and collects by itself where no lock is held, and else
leaves it to them. What is on its way is in ``Pump``'s tables until the worker reports it or the worker is dead,
whichever is first: taken out once, reported once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from orlop.background import start_thread
from orlop.core import (
    CacheEvent,
    Namespace,
    Outcome,
    ReqContext,
    TierAnswer,
    TierJob,
    TierResult,
    TransferKind,
    unpack_key,
)
from orlop.counting import ASYNC_BOUNDS, SYNC_BOUNDS, Histogram, Stats
from orlop.errors import ConfigError
from orlop.host.region import HostRegion
from orlop.tiering.base import SecondaryTierManager
from orlop.tiering.breaker import Breaker, BreakerOptions, BreakerState
from orlop.tiering.events import EventLog
from orlop.tiering.io_links import Link, ProcessLink, open_link
from orlop.tiering.io_messages import (
    OUTCOME_CODES,
    OUTCOMES,
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
from orlop.tiering.key_index import key_name
from orlop.tiering.known_keys import KnownKeys

log = logging.getLogger(__name__)

SEND_BATCH = 256
MOST_KEYS_AT_ONCE = 2048
"""A longer message is packed by the sender: on the engine's thread it would take most of a millisecond."""
KILL_GRACE_S = 1.0
"""How long a killed I/O process may take to die; one that waits in the kernel for a dead mount takes longer."""

LOG_EVERY_S = 10.0

QUEUE_FULL, BREAKER_OPEN, SHUT_DOWN = REFUSALS = ("queue_full", "breaker_open", "shut_down")
"""Why something is not even tried."""


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Settings of one tier's runner. Sizes in bytes, times in seconds.

    ``queue_bytes`` and ``load_queue_bytes`` bound what is submitted and not reported, by kind of job; one job that
    is larger than its bound goes when nothing else is there. ``most_lookups`` bounds unanswered lookups;
    one that is older than ``lookup_limit_s`` is answered with nothing found and counts as a time-out.
    ``load_wait_s`` and ``store_wait_s``: a transfer that waited longer for its turn is not tried. ``max_retired``:
    slots retired past their deadline above which the breaker opens. ``restart_s`` is the first pause before a dead
    I/O process is started again, doubled up to ``max_restart_s`` until one lives for longer than that.
    ``most_posted``: messages on their way to the worker above which touches are dropped. ``events``: cache events are
    kept until somebody takes them.
    """

    name: str
    threads: int = 4
    lookup_threads: int = 2
    queue_bytes: int = 256 << 20
    load_queue_bytes: int = 1 << 30
    most_lookups: int = 1024
    most_posted: int = 4096
    lookup_limit_s: float = 5.0
    load_wait_s: float = 5.0
    store_wait_s: float = 30.0
    max_retired: int = 64
    breaker: BreakerOptions = field(default_factory=BreakerOptions)
    restart_s: float = 0.1
    max_restart_s: float = 30.0
    events: bool = False

    def io_options(self) -> IoOptions:
        """The part of it that the worker needs."""
        return IoOptions(self.name, self.threads, self.lookup_threads, self.load_wait_s, self.store_wait_s, self.events)


@dataclass(slots=True)
class _Open:
    """A submitted job until it is reported. ``forgotten``: a clear has come since."""

    job: TierJob
    ticket: int
    forgotten: bool = False

    @property
    def nbytes(self) -> int:
        return len(self.job.keys) * self.job.payload_bytes


@dataclass(slots=True)
class _Asked:
    """A lookup until it is answered."""

    keys: int
    ticket: int
    at: float


class TierRunner(SecondaryTierManager):
    """One secondary tier. Starts its I/O worker at once and returns without waiting for it.

    ``clock`` is the monotonic clock whose readings the caller passes as ``now``. ``notify`` is called on a thread
    of the runner whenever a report or an answer has come; it must return at once. ``make_pump`` stands in for ``Pump``
    where somebody else turns the crank.
    """

    def __init__(
        self,
        options: RunnerOptions,
        region: HostRegion,
        store: StoreSpec,
        *,
        io_process: bool = True,
        clock: Callable[[], float] = time.monotonic,
        notify: Callable[[], None] | None = None,
        make_pump: Callable[..., Pump] | None = None,
    ) -> None:
        self.name = options.name
        self._options = options
        self._clock = clock
        self._breaker = Breaker(options.breaker, self._on_breaker)
        self._open: dict[int, _Open] = {}
        self._open_bytes = {TransferKind.STORE: 0, TransferKind.LOAD: 0}
        self._asked: dict[int, _Asked] = {}
        self._results: list[TierResult] = []
        self._answers: list[TierAnswer] = []
        self._released: list[int] = []
        self._counters: Counter[str] = Counter()
        self._seconds = {TransferKind.STORE: 0.0, TransferKind.LOAD: 0.0}
        self._store_stats: Mapping[str, float] = {}
        self._hung = 0
        self._clears = 0
        self._clearing = False
        self._namespace: Namespace | None = None
        self._sync_delays = Histogram(SYNC_BOUNDS)
        self._answer_delays = Histogram(ASYNC_BOUNDS)
        self._events = EventLog(options.name)
        self._announced: dict[int, bytes] = {}
        """Keys of the events' namespace that were said to be stored and not to have left, by name; else empty."""
        self._events_of: bytes | None = None
        """Digest of the namespace that the events are about."""
        self._closed = False
        self._was_closed = True
        self._told: str | None = None
        self._log_again = float("-inf")
        make_pump = make_pump or Pump
        self._pump = make_pump(options, region, store, io_process=io_process, notify=notify)

    # --- start -------------------------------------------------------------------------------------

    def wait_ready(self, timeout_s: float) -> str | None:
        """None once the store is open; else one line on why it is not. Waits; for start-up only.

        ``ConfigError``: it can never work with these settings. What is told here the caller says; the runner does not
        log it once more.
        """
        if not self._pump.wait_ready(timeout_s):
            return f"the store did not open within {timeout_s:g} s"
        trouble = self._pump.not_ready
        if trouble is None:
            return None
        self._told = trouble.text
        if trouble.permanent:
            raise ConfigError(trouble.text)
        return trouble.text

    def wait_counted(self, timeout_s: float) -> bool:
        """Whether the store knows by then what it holds, so that ``get_stats`` says so. Waits; for start-up only."""
        known = self._pump.wait_counted(timeout_s)
        self._crank(self._clock())
        return known

    @property
    def io_pid(self) -> int | None:
        """The I/O process while one is there; None between two of them, and in thread mode. For tools and tests."""
        return self._pump.io_pid()

    # --- lookups -----------------------------------------------------------------------------------

    def lookup_prefix(
        self,
        lookup_id: int,
        keys: Sequence[bytes],
        context: ReqContext,
        *,
        namespace: Namespace,
        stop_at_miss: bool = True,
        now: float,
    ) -> TierAnswer | None:
        start = self._clock()
        answer = self._ask(lookup_id, keys, namespace, stop_at_miss, now)
        self._sync_delays.observe(self._clock() - start)
        return answer

    def _ask(
        self, lookup_id: int, keys: Sequence[bytes], namespace: Namespace, stop_at_miss: bool, now: float
    ) -> TierAnswer | None:
        self._crank(now)
        self._namespace = namespace
        self._counters["chunks_queried"] += len(keys)
        reason, ticket = "", None
        if self._closed:
            reason = SHUT_DOWN
        elif len(self._asked) >= self._options.most_lookups:
            reason = QUEUE_FULL
        elif keys and (ticket := self._breaker.admit(now)) is None:
            reason = BREAKER_OPEN
        if ticket is None:
            if reason:
                self._counters[f"lookups_refused_{reason}"] += 1
            return TierAnswer(lookup_id, bytes(len(keys)))
        found = None if self._clearing else self._pump.known.find(namespace.digest, keys, stop_at_miss)
        if found is not None:
            self._counters["chunks_hit"] += found.count(1)
            self._breaker.succeeded(ticket, now, transfer=False)
            return TierAnswer(lookup_id, found)
        self._asked[lookup_id] = _Asked(len(keys), ticket, now)
        self._pump.post(Ask(lookup_id, tuple(keys), namespace.digest, stop_at_miss))
        return None

    def get_answers(self) -> Sequence[TierAnswer]:
        self._crank(self._clock())
        answers, self._answers = self._answers, []
        return answers

    # --- jobs --------------------------------------------------------------------------------------

    def submit_store(self, job: TierJob, *, now: float) -> None:
        self._submit(job, self._options.queue_bytes, "stores_refused", now)

    def submit_load(self, job: TierJob, *, now: float) -> None:
        self._submit(job, self._options.load_queue_bytes, "loads_refused", now)

    def _submit(self, job: TierJob, bound: int, refused: str, now: float) -> None:
        self._crank(now)
        self._namespace = job.namespace
        self._turn_events_to(job.namespace.digest)
        if not job.keys:
            self._results.append(TierResult(job.job_id, ()))
            return
        entry = _Open(job, -1)
        queued = self._open_bytes[job.kind]
        kind = reason = ""
        if self._closed:
            kind, reason = SHUT_DOWN, "the tier is shut down"
        elif queued and queued + entry.nbytes > bound:
            kind, reason = QUEUE_FULL, f"the queue is full: {queued} of {bound} bytes"
        elif (ticket := self._breaker.admit(now)) is None:
            kind, reason = BREAKER_OPEN, "the breaker is open"
        else:
            entry.ticket = ticket
        if reason:
            self._counters[f"{refused}_{kind}"] += 1
            self._counters[f"chunks_{refused}_{kind}"] += len(job.keys)
            self._results.append(TierResult(job.job_id, (Outcome.UNAVAILABLE,) * len(job.keys), reason=reason))
            return
        self._open[job.job_id] = entry
        self._open_bytes[job.kind] += entry.nbytes
        self._pump.post(job)

    def get_finished_jobs(self) -> Sequence[TierResult]:
        self._crank(self._clock())
        results, self._results = self._results, []
        return results

    def get_released_jobs(self) -> Sequence[int]:
        self._crank(self._clock())
        released, self._released = self._released, []
        return released

    # --- the rest of the contract --------------------------------------------------------------------

    def touch(self, keys: Sequence[bytes], context: ReqContext) -> None:
        if self._namespace is None or self._closed or self._breaker.state is not BreakerState.CLOSED:
            return
        if self._pump.posted() < self._options.most_posted:
            self._pump.post(Touch(tuple(keys), self._namespace.digest))

    def on_schedule_end(self, *, now: float) -> None:
        self._crank(now)
        while self._asked:
            lookup_id, oldest = next(iter(self._asked.items()))
            if now - oldest.at <= self._options.lookup_limit_s:
                return
            del self._asked[lookup_id]
            self._counters["lookups_timed_out"] += 1
            self._answers.append(TierAnswer(lookup_id, bytes(oldest.keys)))
            self._breaker.failed(oldest.ticket, now, "lookups are not answered")

    def note_hung(self, count: int, *, now: float) -> None:
        more = count > self._hung
        self._hung = count
        if count > self._options.max_retired:
            self._breaker.trip(now, f"{count} slots are past their deadline")
        elif more:
            self._breaker.stalled(now, "jobs are past their deadline")

    def get_stats(self) -> Stats:
        """Counters since the start; gauges are ``queue_bytes``, ``load_queue_bytes``, ``open_*``, ``breaker_state``.

        ``read_<outcome>`` and ``written_<outcome>`` count chunks, ``damaged_<reason>`` those that did not verify;
        what was not even tried is ``stores_refused_<why>``, ``loads_refused_<why>`` (jobs, and with ``chunks_``
        before it chunks) and ``lookups_refused_<why>``. ``lookup_sync_seconds`` and ``lookup_async_seconds`` are
        histograms: the time of a call, and until its answer came. ``store_<name>`` is the store's own.
        ``breaker_state``: 0 closed, 1 half-open, 2 open.
        """
        load, store = TransferKind.LOAD, TransferKind.STORE
        return {
            **{f"store_{name}": value for name, value in self._store_stats.items()},
            **self._counters,
            **self._sync_delays.stats("lookup_sync_seconds"),
            **self._answer_delays.stats("lookup_async_seconds"),
            "read_seconds": self._seconds[load],
            "written_seconds": self._seconds[store],
            "queue_bytes": self._open_bytes[store],
            "load_queue_bytes": self._open_bytes[load],
            "open_jobs": len(self._open),
            "open_lookups": len(self._asked),
            "breaker_state": int(self._breaker.state),
            "breaker_opened": self._breaker.opened,
            "event_overflows": self._events.overflows,
            "io_restarts": self._pump.restarts,
        }

    def take_events(self, namespace: Namespace) -> Sequence[CacheEvent]:
        self._crank(self._clock())
        self._turn_events_to(namespace.digest)
        return self._events.take()

    def clear(self) -> None:
        """What was asked for before is answered with nothing found; the worker removes the bytes."""
        self._clears += 1
        self._clearing = True
        now = self._clock()
        for lookup_id, asked in self._asked.items():
            self._answers.append(TierAnswer(lookup_id, bytes(asked.keys)))
            self._breaker.withdraw(asked.ticket, now)
        self._asked.clear()
        for entry in self._open.values():
            entry.forgotten = True
        if self._announced:
            self._announced.clear()
            self._events.cleared()
        self._pump.post(Clear(self._clears))

    def shutdown(self, deadline_s: float) -> None:
        """Waits, for ``deadline_s`` and the moment that killing takes. Reports are there to be read afterwards."""
        if self._closed:
            return
        self._closed = True
        self._pump.shutdown(deadline_s)
        self._crank(self._clock())

    # --- what has come --------------------------------------------------------------------------------

    def _crank(self, now: float) -> None:
        self._pump.collect()
        arrived = self._pump.arrived
        while arrived:
            message = arrived.popleft()
            if isinstance(message, _Settled):
                self._take_report(message.report, now, message.released)
            elif isinstance(message, Answer):
                self._take_answer(message, now)
            elif isinstance(message, NotReady):
                self._breaker.trip(now, message.text)
            elif isinstance(message, Removed):
                self._note_removed(key_name(message.key))
            elif isinstance(message, Keys):
                for name in np.frombuffer(message.removed, np.uint64).tolist():
                    self._note_removed(name)
            elif isinstance(message, Cleared):
                self._clearing = self._clearing and message.number != self._clears
            elif isinstance(message, StoreStats):
                self._store_stats = message.values
            elif isinstance(message, _Released):
                self._released.append(message.job_id)

    def _take_report(self, report: Report, now: float, released: bool) -> None:
        entry = self._open.pop(report.job_id, None)
        if entry is None:
            self._counters["unknown_reports"] += 1
            return
        kind = entry.job.kind
        self._open_bytes[kind] -= entry.nbytes
        count = len(report.codes)
        all_well = report.codes.count(0) == count  # the code of OK
        outcomes = (Outcome.OK,) * count if all_well else tuple(OUTCOMES[code] for code in report.codes)
        if entry.forgotten:
            gone = Outcome.MISSING if kind is TransferKind.LOAD else Outcome.UNAVAILABLE
            outcomes = tuple(gone if outcome is Outcome.OK else outcome for outcome in outcomes)
        self._count(report, kind, outcomes)
        if self._options.events:
            self._note_outcomes(entry.job, outcomes)
        if not self._closed:
            self._judge(report, entry, outcomes, now)
        self._results.append(
            TierResult(report.job_id, outcomes, report.nbytes, report.seconds, report.reason, released)
        )

    def _judge(self, report: Report, entry: _Open, outcomes: Sequence[Outcome], now: float) -> None:
        if report.failed:
            self._log_failure(report, entry.job.kind, now)
            self._breaker.failed(entry.ticket, now, report.reason)
        elif Outcome.UNAVAILABLE in outcomes:  # overtaken by a clear
            self._breaker.withdraw(entry.ticket, now)
        else:
            self._breaker.succeeded(entry.ticket, now)

    def _count(self, report: Report, kind: TransferKind, outcomes: Sequence[Outcome]) -> None:
        verb = "read" if kind is TransferKind.LOAD else "written"
        self._counters[f"{verb}_bytes"] += report.nbytes
        self._seconds[kind] += report.seconds
        kept = outcomes.count(Outcome.OK)
        for outcome, n in ((Outcome.OK, kept),) if kept == len(outcomes) else Counter(outcomes).items():
            self._counters[f"{verb}_{outcome}"] += n
        for reason in report.damaged:
            self._counters[f"damaged_{reason}"] += 1

    def _take_answer(self, answer: Answer, now: float) -> None:
        asked = self._asked.pop(answer.lookup_id, None)
        if asked is None:
            self._counters["late_answers"] += 1
            return
        self._answers.append(TierAnswer(answer.lookup_id, answer.found))
        self._answer_delays.observe(now - asked.at)
        self._counters["chunks_hit"] += answer.found.count(1)
        if answer.trouble:
            self._counters["lookups_failed"] += 1
            self._breaker.failed(asked.ticket, now, answer.trouble)
        else:
            self._breaker.succeeded(asked.ticket, now, transfer=False)

    def _note_outcomes(self, job: TierJob, outcomes: Sequence[Outcome]) -> None:
        """Events of what a job found: what was kept is there, what could not be read is not."""
        if job.namespace.digest != self._events_of:
            return
        if job.kind is TransferKind.LOAD:
            for key, outcome in zip(job.keys, outcomes, strict=True):
                if outcome in (Outcome.MISSING, Outcome.CORRUPT):
                    self._note_removed(key_name(job.namespace.digest + key))
            return
        kept = [key for key, outcome in zip(job.keys, outcomes, strict=True) if outcome is Outcome.OK]
        named = {key_name(job.namespace.digest + key): key for key in kept}
        fresh = {name: key for name, key in named.items() if name not in self._announced}
        self._announced.update(fresh)
        if not self._events.stored(job.group, [key[:-4] for key in fresh.values()]):
            self._announced.clear()

    def _note_removed(self, name: int) -> None:
        """An event for a key that has left, where it was said to be there."""
        key = self._announced.pop(name, None)
        if key is None:
            return
        block_hash, group = unpack_key(key)
        if not self._events.removed(group, [block_hash]):
            self._announced.clear()

    def _turn_events_to(self, digest: bytes) -> None:
        """Events are about this namespace from now on: what was stored in another is not found any more."""
        if self._options.events and self._events_of not in (None, digest):
            self._announced.clear()
            self._events.cleared()
        self._events_of = digest

    def _log_failure(self, report: Report, kind: TransferKind, now: float) -> None:
        if now < self._log_again:
            return
        self._log_again = now + LOG_EVERY_S
        log.warning("tier %s: a %s failed: %s", self.name, kind, report.reason)

    def _on_breaker(self, state: BreakerState, reason: str) -> None:
        """One line when it opens, one when it closes; probes in between, and what was told at start, are silent."""
        if state is BreakerState.CLOSED:
            log.warning("tier %s: in service again", self.name)
        elif state is BreakerState.OPEN and self._was_closed and reason != self._told:
            log.warning("tier %s: out of service (%s); requests go on without it", self.name, reason)
        self._was_closed = state is BreakerState.CLOSED


# --- between the engine's thread and the worker ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Settled:
    """A report, of the worker or in its place, and whether the slots are free."""

    report: Report
    released: bool = True


@dataclass(frozen=True, slots=True)
class _Released:
    job_id: int


Posted = TierJob | Ask | Touch | Clear | Bye


class Pump:
    """What lies between the engine's thread and the worker, with two threads: a sender, and an owner who restarts.

    ``_lock`` guards the link; the engine's thread takes it in ``shutdown`` only. ``_sending`` is held while the link is
    written to, perhaps for long, ``_taking`` while what has come is taken from it, so that nobody closes it meanwhile;
    the engine's thread goes on without where another one has them. The tables of what the worker owes need no lock:
    whoever takes an entry out of one reports it.

    A signal's exception comes at the end of a call. So the engine's thread takes both inside of the ``try`` that gives
    them back, without a call between, and gives back what it may not have: one that it kept would lock the owner out.
    """

    def __init__(
        self,
        options: RunnerOptions,
        region: HostRegion,
        spec: StoreSpec,
        *,
        io_process: bool,
        notify: Callable[[], None] | None,
    ) -> None:
        self.arrived: deque[_Settled | _Released | Answer | NotReady | Keys | Cleared | Removed | StoreStats] = deque()
        self._posted: queue.SimpleQueue[Posted | Callable[[], None]] = queue.SimpleQueue()
        self.known = KnownKeys(self._posted.put)
        """Of a store that tells them; written under ``_taking``, read on the engine's thread."""
        self.restarts = 0
        self._options = options
        self._region = region
        self._spec = spec
        self._io_process = io_process
        self._listener = notify
        self._lock = threading.Lock()
        self._sending = threading.RLock()  # one that knows whose it is: see shutdown
        self._taking = threading.RLock()
        self._left_to_sender = 0
        self._passed_on = 0
        self._link: Link | None = None
        self._jobs: dict[int, TierJob] = {}
        self._asks: dict[int, Ask] = {}
        self._clear: Clear | None = None
        self._pid = os.getpid()
        self._bye_taken = False
        self._given_up = False
        self._stopping = threading.Event()
        self._first_try = threading.Event()
        self._settled = threading.Event()
        self._decided = threading.Event()
        self._counted = threading.Event()
        self.not_ready: NotReady | None = None
        self._start()

    def _start(self) -> None:
        self._sender = start_thread(self._send, name=f"orlop-{self._options.name}-send")
        # It starts the I/O process, which thereby stands behind the engine too.
        self._owner = start_thread(self._own, name=f"orlop-{self._options.name}-own")

    def _open_link(self) -> Link:
        options = replace(self._options.io_options(), tell=self._listener is not None)
        return open_link(self._spec, options, self._region, process=self._io_process)

    # --- engine's thread ------------------------------------------------------------------------------

    def post(self, message: Posted) -> None:
        """Send it at once, if nothing is in the way that was posted before; the sender does where that cannot be."""
        if not self._post_now(message):
            self._left_to_sender += 1
            self._posted.put(message)

    def _post_now(self, message: Posted) -> bool:
        if self._left_to_sender != self._passed_on or isinstance(message, Bye | Clear):
            return False
        if len(message.keys) > MOST_KEYS_AT_ONCE:
            return False
        try:
            if not self._sending.acquire(blocking=False):
                return False
            link = self._link
            if link is None:
                return False
            self._remember(message)
            try:
                posted = link.post(_word(message))
            except Exception:  # a fault of ours, which the sender meets again and tells
                posted = False
            if not posted:
                # What somebody has reported meanwhile is done.
                return isinstance(message, TierJob | Ask) and not self._forget(message)
        finally:
            try:  # noqa: SIM105
                self._sending.release()
            except RuntimeError:  # another thread's
                pass
        if self._link is not link and self._forget(message):  # its owner has buried it and has not seen this
            self._report_for(message, "the I/O process has ended", released=True)
        return True

    def collect(self) -> None:
        """Take what has come, unless the owner is at it."""
        try:
            link = self._link if self._taking.acquire(blocking=False) else None
            if link is not None:
                for message in link.collect():
                    self._take(message)
        finally:
            try:  # noqa: SIM105
                self._taking.release()
            except RuntimeError:  # another thread's
                pass

    def posted(self) -> int:
        return self._posted.qsize()

    def io_pid(self) -> int | None:
        link = self._link
        return link.pid if isinstance(link, ProcessLink) else None

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether it is known by then if the store is open; ``not_ready`` says why it is not."""
        return self._decided.wait(timeout_s)

    def wait_counted(self, timeout_s: float) -> bool:
        """Whether the store has said by then all that it holds."""
        return self._counted.wait(timeout_s)

    def shutdown(self, deadline_s: float) -> None:
        if os.getpid() != self._pid:
            return  # a fork has neither our threads nor our child
        for lock in (self._sending, self._taking):
            with contextlib.suppress(RuntimeError):  # not ours, as a rule
                lock.release()  # a signal's handler has come here from the middle of a call that has it
        self._stopping.set()
        self._posted.put(Bye())
        if not self._settled.wait(deadline_s):
            with self._lock:
                self._given_up = True
                link = self._link
            if link is not None:
                link.kill()
            self._settled.wait()
        self._sender.join()

    # --- sender ---------------------------------------------------------------------------------------

    def _send(self) -> None:
        self._first_try.wait()
        while not self._bye_taken:
            self._pass_on(self._posted.get())

    def _notify(self) -> None:
        if self._listener is not None:
            self._listener()

    def _pass_on(self, first: Posted | Callable[[], None]) -> None:
        gathered = [first]
        while len(gathered) < SEND_BATCH and not self._posted.empty():
            gathered.append(self._posted.get())
        batch: list[Posted] = []
        for message in gathered:
            if callable(message):
                self._work(message)
            else:
                batch.append(message)
        if not batch:
            return
        with self._lock:
            link = self._link
            for message in batch:
                self._remember(message)
            if link is None:
                self._settle("no I/O worker is running", released=True)
        if link is None:
            self._notify()
        else:
            self._send_all(link, batch)
        self._passed_on += len(batch)

    def _work(self, left: Callable[[], None]) -> None:
        """What the engine's thread has left to this one; it must not end it."""
        try:
            left()
        except Exception:  # no memory: what is known stays as it is, and right
            log.exception("tier %s: work beside the engine failed", self._options.name)

    def _send_all(self, link: Link, batch: Sequence[Posted]) -> None:
        with self._sending:
            try:
                link.send([_word(message) for message in batch])
            except OSError:
                log.debug("tier %s: the I/O process is gone; its owner settles", self._options.name)
            except Exception:  # a fault of ours: what was not sent would never be reported
                log.exception("tier %s: a message could not be sent; starting the worker again", self._options.name)
                link.kill()

    def _remember(self, message: Posted) -> None:
        if isinstance(message, TierJob):
            self._jobs[message.job_id] = message
        elif isinstance(message, Ask):
            self._asks[message.lookup_id] = message
        elif isinstance(message, Clear):
            self._clear = message
        elif isinstance(message, Bye):
            self._bye_taken = True

    def _forget(self, message: Posted) -> bool:
        """Take back what was remembered; False where somebody has reported it meanwhile."""
        if isinstance(message, TierJob):
            return self._jobs.pop(message.job_id, None) is not None
        return isinstance(message, Ask) and self._asks.pop(message.lookup_id, None) is not None

    # --- owner ----------------------------------------------------------------------------------------

    def _own(self) -> None:
        try:
            self._live_on()
        finally:  # after a fault of ours too: nobody may wait for a thread that is gone
            with self._lock:
                link, self._link = self._link, None
                self._settle("the runner has lost its own thread", released=False)
            if link is not None:
                link.kill()
            self._first_try.set()
            self._settled.set()

    def _live_on(self) -> None:
        pause_s = self._options.restart_s
        while True:
            began = time.monotonic()
            was_ready = self._live_once()
            self._first_try.set()
            if was_ready and time.monotonic() - began > self._options.max_restart_s:
                pause_s = self._options.restart_s
            if self._stopping.wait(pause_s):
                break
            pause_s = min(2 * pause_s, self._options.max_restart_s)
            self.restarts += 1

    def _live_once(self) -> bool:
        """One life of the worker, from start to death; whether its store was open."""
        link = self._begin()
        if link is None:
            return False
        was_ready = self._receive_all(link)
        held = self._bury(link, was_ready)
        if held is not None:
            self._outlive(link, held)
        with self._sending, self._taking:
            link.close()
        return was_ready

    def _begin(self) -> Link | None:
        try:
            link = self._open_link()
        except Exception as e:  # no memory, no descriptors, no process: comes back like a dead one
            self._not_started(f"the I/O process cannot be started: {type(e).__name__}: {e}")
            return None
        self._publish(link)
        return link

    def _bury(self, link: Link, was_ready: bool) -> list[int] | None:
        """Report what a worker that has ended owes; the jobs whose slots it still may touch, None where it is gone."""
        with self._taking:
            self.known.drop()
        gone = link.end(KILL_GRACE_S)
        reason = "the tier was shut down before it was done" if self._stopping.is_set() else link.epitaph()
        with self._taking:
            self._take_all(link.take())
            self.known.drop()
            with self._lock:
                self._link = None
                jobs = self._settle(reason, released=gone)
        held = None if gone else jobs
        if not self._stopping.is_set():
            log.warning("tier %s: %s; starting it again", self._options.name, reason)
            if not was_ready:
                self._not_started(reason)
        self._notify()
        return held

    def _publish(self, link: Link) -> None:
        """From here on the sender uses it. A clear that an earlier worker did not finish goes first."""
        with self._sending:
            with self._lock:
                self._link = link
                clear = self._clear
                unwanted = self._bye_taken or self._given_up
            if unwanted:
                link.kill()
            elif clear is not None:
                with contextlib.suppress(OSError):
                    link.send([clear])
        self._first_try.set()

    def _receive_all(self, link: Link) -> bool:
        was_ready = False
        while True:
            try:
                messages = link.receive()
            except EOFError:
                return was_ready
            with self._taking:
                was_ready |= self._take_all([*messages, *link.take()])

    def _take_all(self, messages: Sequence[FromWorker]) -> bool:
        """Whether its store is open as of now."""
        for message in messages:
            self._take(message)
        self._notify()
        return any(isinstance(message, Ready) for message in messages)

    def _take(self, message: FromWorker) -> None:
        if isinstance(message, Report):
            if self._jobs.pop(message.job_id, None) is not None:
                self.arrived.append(_Settled(message))
        elif isinstance(message, Answer):
            if self._asks.pop(message.lookup_id, None) is not None:
                self.arrived.append(message)
        elif isinstance(message, Cleared):
            with self._lock:
                if self._clear is not None and self._clear.number == message.number:
                    self._clear = None
            self.arrived.append(message)
        elif isinstance(message, Keys):
            self.known.take(message)
            if self._options.events and message.removed:
                self.arrived.append(message)
        elif isinstance(message, Ready):
            self.not_ready = None
            self._decided.set()
        elif isinstance(message, NotReady):
            self._not_started(message.text, permanent=message.permanent)
        else:
            if isinstance(message, StoreStats) and message.complete:
                self._counted.set()
            self.arrived.append(message)

    def _not_started(self, text: str, *, permanent: bool = False) -> None:
        trouble = self.not_ready = NotReady(text, permanent)
        self._decided.set()
        self.arrived.append(trouble)

    def _settle(self, reason: str, *, released: bool) -> list[int]:
        """Report all that the worker owes, in its place; the ids of the jobs."""
        settled = []
        for owed in (self._jobs, self._asks):
            with contextlib.suppress(KeyError):  # until there is none; the engine's thread may add and take meanwhile
                while True:
                    number, message = owed.popitem()
                    self._report_for(message, reason, released=released)
                    if isinstance(message, TierJob):
                        settled.append(number)
        return settled

    def _report_for(self, message: Posted, reason: str, *, released: bool) -> None:
        """In the worker's place, once the message is out of its table."""
        if isinstance(message, TierJob):
            codes = bytes([OUTCOME_CODES[Outcome.UNAVAILABLE]]) * len(message.keys)
            self.arrived.append(_Settled(Report(message.job_id, codes, reason=reason, failed=True), released))
        elif isinstance(message, Ask):
            self.arrived.append(Answer(message.lookup_id, bytes(len(message.keys)), reason))

    def _outlive(self, link: Link, held: Sequence[int]) -> None:
        """What could not be ended may still touch its slots: wait with this thread, not with the engine's."""
        self._settled.set()  # all has been said; the sender answers whatever comes meanwhile
        link.wait_gone()
        self._settled.clear()
        self._let_go(held)

    def _let_go(self, held: Sequence[int]) -> None:
        self.arrived.extend(_Released(job_id) for job_id in held)
        self._notify()


def _word(message: Posted) -> ToWorker:
    """What travels of a posted message."""
    if not isinstance(message, TierJob):
        return message
    return Transfer(
        message.job_id,
        message.kind is TransferKind.LOAD,
        message.group,
        message.keys,
        tuple(message.slots.tolist()),
        message.payload_bytes,
        message.namespace.digest,
        message.namespace.generation,
        message.salt,
    )
