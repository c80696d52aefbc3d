"""TieringManager: who holds which chunk, and what moves between host memory and the tiers below it.

In: the scheduler half's calls, with ``now``. Out: answers, reservations, and jobs for secondary tiers. Never: a clock,
a thread, a file, a socket; bytes; a wait; an exception for a request's sake.

A chunk's way down: ``complete_store`` makes it readable and gives it to every tier that admits it; each such job holds
the slots until the tier reports. A tier that is written on eviction gets it when its slot is about to be given away
(``write_back``).

A chunk's way up: a lookup that host memory cannot answer asks the tiers for the whole run at once; ``want`` notes what
the request will wait for; ``on_schedule_end`` reserves slots, gives load jobs to the tiers, and leases the chunks to
those who wait. Leases are granted whole or not at all, hold at most half of the slots together, and end when the
request loads, ends, or has waited for its limit.

Deadlines. A job that a tier has not reported in time is settled as failed: its keys are dropped and its slots are
retired until the tier says that it has let go. So a tier that never answers costs slots, and neither a drain nor a
request waits for it.

HIT holds within a step: slots are reserved (and so evicted) by ``prepare_store``, which the scheduler half calls when
all lookups of the step are done, and in ``on_schedule_end``.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from orlop.core import (
    NO_SALT,
    CacheEvent,
    Int64Array,
    JointOffer,
    KeyRun,
    Lookup,
    Namespace,
    Outcome,
    PrefixAnswer,
    ReqContext,
    Reservation,
    StorePlan,
    TierAnswer,
    TierJob,
    TierResult,
    TransferKind,
)
from orlop.counting import CHUNK_BOUNDS, Histogram, Stats
from orlop.errors import InvariantError
from orlop.host.tier import HostTier, SlotState
from orlop.tiering.admission import StoreAfter
from orlop.tiering.base import OffloadingManager, SecondaryTierManager
from orlop.tiering.events import EventLog
from orlop.tiering.write_back import WriteBack

ABSENT, WRITING, READY = 0, 1, 2
NOWHERE = -1
FEW = 256
"""A list of deadlines keeps at most so many entries of what is over, and as many more as are not."""
TOUCH_AGAIN_S = 30.0
MOST_TOUCHES_PER_STEP = 1024
"""A tier is told of the use of a chunk that host memory serves at most so often, and of so many chunks in one step."""
MAX_ASKS_PER_GROUP = 8
"""A life asks the tiers so often per group at most; then what is not readable is a miss."""


@dataclass(frozen=True, slots=True)
class TierEntry:
    """A secondary tier and what the settings say of it.

    ``store``: chunks are cascaded to it as soon as they are readable. ``evicted_bytes``: where above 0, when they are
    about to leave host memory instead, and so many bytes at a time at most.
    """

    tier: SecondaryTierManager
    store: bool = True
    evicted_bytes: int = 0
    store_after: int = 1
    lookup_s: float = 0.2
    promotion_s: float = 5.0
    cascade_s: float = 30.0


@dataclass(frozen=True, slots=True)
class TieringOptions:
    """``payload_bytes[group]``: bytes of a chunk at rest. ``store_after``: host memory takes a chunk at its n-th offer.

    ``max_promotions_per_step``: chunks for which slots are reserved in one step. ``max_retired_share``: share of the
    slots that hung jobs may hold before their tier is told. ``usable_slots``: how many slots are ready for use.
    """

    payload_bytes: tuple[int, ...]
    store_after: int = 1
    keep_tiers_on_reset: bool = False
    max_promotions_per_step: int = 2048
    events: bool = False
    usable_slots: Callable[[], int] | None = None


class TieringManager(OffloadingManager):
    """The OffloadingManager over a host tier and any number of secondary tiers, none included."""

    def __init__(
        self,
        host: HostTier,
        tiers: Sequence[TierEntry],
        namespace: Callable[[bytes], Namespace],
        generation: bytes,
        options: TieringOptions,
    ) -> None:
        self.host = host
        self.tiers = tuple(tiers)
        self.options = options
        self.counters: defaultdict[str, float] = defaultdict(float)
        self._namespace_of = namespace
        self._namespace = namespace(generation)
        self._lookup_wait_s = max((t.lookup_s for t in tiers), default=0.0)
        self._promotion_wait_s = max((t.promotion_s for t in tiers), default=5.0)
        self._host_admission = StoreAfter(options.store_after)
        self._tier_admission = [StoreAfter(t.store_after) for t in tiers]
        self._takers = [i for i, entry in enumerate(tiers) if entry.store or entry.evicted_bytes]
        """Tiers that are given what is stored, at once or when it leaves."""
        self._lives: dict[int, _Life] = {}
        self._asks: dict[int, _Ask] = {}
        """Unanswered lookups at tiers, by lookup id."""
        self._open: dict[int, _Open] = {}
        """Reservations that the scheduler half has not given back, by number."""
        self._writers = np.full(host.slots, None, dtype=object)
        """Per slot the ``_Writer`` that fills it, so that those who wait for it learn of its end."""
        self._transfer_jobs: dict[int, _Job] = {}
        self._active = {
            f"{word}_{what}_active {entry.tier.name}": 0
            for entry in tiers
            for word in ("promotion", "cascade")
            for what in ("jobs", "chunks")
        }
        """What of them is in flight, by direction and tier, under the names of ``get_stats``."""
        self._allocations = Histogram(CHUNK_BOUNDS)
        self._overdue: dict[int, _Job] = {}
        """Jobs settled without their tier's word; their slots are retired until it comes."""
        self._deadlines: list[tuple[float, int]] = []
        self._noting: dict[int, _Life] = {}
        """Lives with something left to lease or to promote, in the order of their first want."""
        self._lease_ends: list[tuple[float, int]] = []
        self._lease_budget = 0
        self._brought_by = np.zeros(host.slots, dtype=np.int8)
        """Per slot 1 + the index of the tier that filled it and that no load has been credited to yet."""
        self._touched_at = np.full(host.slots, -math.inf)
        """Per slot when the tiers were last told that what it holds is of use."""
        self._touches_left = MOST_TOUCHES_PER_STEP
        payload = max(options.payload_bytes)
        self._write_back = WriteBack(
            host, {i: max(1, e.evicted_bytes // payload) for i, e in enumerate(tiers) if e.evicted_bytes}
        )
        self._log = EventLog("host")
        self._evictions_noted = 0
        self._grows = options.usable_slots if host.usable < host.slots else None
        """How many slots there are by now, until all are."""
        self._next_number = 1

    # --- lives ----------------------------------------------------------------------------------------------

    def on_new_request(self, context: ReqContext) -> None:
        self._lives[context.life] = _Life(context)
        for entry in self.tiers:
            entry.tier.on_new_request(context)

    def on_request_finished(self, context: ReqContext) -> None:
        life = self._lives.pop(context.life, None)
        if life is None:
            self.counters["surprises"] += 1
            return
        self._drop_wants(life)
        for ask in life.asks.values():
            self._forget_answers(ask)
        for entry in self.tiers:
            entry.tier.on_request_finished(context)

    # --- lookups --------------------------------------------------------------------------------------------

    def answer_version(self, context: ReqContext) -> tuple[int, int]:
        return self._lives[context.life].progress, self.host.evictions

    def lookup_prefix(self, run: KeyRun, context: ReqContext, *, now: float, since: float) -> PrefixAnswer:
        ready = self.host.ready_prefix(run)
        if ready == len(run):
            return PrefixAnswer(ready, ready, math.inf)
        rest = run.part(run.start + ready, run.stop)
        if self._ends_here(rest, context, now, since):
            return PrefixAnswer(ready, ready, math.inf)
        verdicts = self._verdicts(rest, context, now, since, stop_at_miss=True)
        misses = np.flatnonzero(verdicts == Lookup.MISS)
        reach = ready + (int(misses[0]) if len(misses) else len(rest))
        return PrefixAnswer(ready, reach, self._valid_until(verdicts[: reach - ready], since))

    def _ends_here(self, run: KeyRun, context: ReqContext, now: float, since: float) -> bool:
        """Whether nobody has, or writes, the first chunk of ``run``; told apart because most prompts are new."""
        if self.host.slot_state(run.group, run.hashes[run.start]) is not None:
            return False
        life = self._lives.get(context.life)
        if not self.tiers or life is None:
            return True
        ask = self._ask_for(run, run.start, run.stop, life, now, since, stop_at_miss=True)
        return ask is None or (ask.answered and ask.source_of(run.start) == NOWHERE)

    def lookup_each(self, run: KeyRun, context: ReqContext, *, now: float, since: float) -> Sequence[Lookup]:
        verdicts = self._verdicts(run, context, now, since, stop_at_miss=False)
        return [Lookup(v) for v in verdicts.tolist()]

    def _valid_until(self, verdicts: np.ndarray[tuple[int], np.dtype[np.int8]], since: float) -> float:
        if (verdicts == Lookup.RETRY).any():
            return since + self._lookup_wait_s
        return since + self._promotion_wait_s if (verdicts == Lookup.HIT_PENDING).any() else math.inf

    def _verdicts(
        self, run: KeyRun, context: ReqContext, now: float, since: float, stop_at_miss: bool
    ) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
        """One ``Lookup`` per key; tiers are asked for the first stretch that nobody has asked them for."""
        states = np.frombuffer(self.host.states(run), dtype=np.uint8)
        waits = now < since + self._promotion_wait_s
        verdicts = np.full(len(run), Lookup.MISS, dtype=np.int8)
        verdicts[states == READY] = Lookup.HIT
        if waits:
            verdicts[states == WRITING] = Lookup.HIT_PENDING
        if not self.tiers or context.life not in self._lives:
            return verdicts
        absent = states == ABSENT
        life = self._lives[context.life]
        where = np.flatnonzero(absent)
        ask = life.asks.get(run.group)
        if len(where):
            stop = run.stop if stop_at_miss else run.start + int(where[-1]) + 1
            ask = self._ask_for(run, run.start + int(where[0]), stop, life, now, since, stop_at_miss)
        if ask is None:
            return verdicts
        # The overlap of the run with what was asked; beyond it nothing is known and nothing hoped for.
        low, high = max(run.start, ask.start), min(run.stop, ask.stop)
        if low >= high:
            return verdicts
        here = slice(low - run.start, high - run.start)
        if not ask.answered and now >= since + self._lookup_wait_s:
            ask.closed = True  # goes on with what the other tiers have; a late answer still counts
            for tier in ask.open.values():
                self.counters[f"lookup_deadlines_passed {self.tiers[tier].tier.name}"] += 1
        if not ask.answered:
            verdicts[here][absent[here]] = Lookup.RETRY
        elif waits:
            held = ask.source[low - ask.start : high - ask.start] != NOWHERE
            verdicts[here][absent[here] & held] = Lookup.HIT_PENDING
        return verdicts

    def _ask_for(
        self,
        run: KeyRun,
        first: int,
        stop: int,
        life: _Life,
        now: float,
        since: float,
        stop_at_miss: bool,
    ) -> _Ask | None:
        """The life's question about chunks ``first .. stop - 1``: the standing one where it covers the first of them.

        ``first`` is absent here.
        """
        ask = life.asks.get(run.group)
        if ask is not None and (ask.covers(first) or not ask.answered):
            return ask
        if now >= since + self._lookup_wait_s or life.asks_made[run.group] >= MAX_ASKS_PER_GROUP:
            return ask
        life.asks_made[run.group] += 1
        if ask is not None:
            self._forget_answers(ask)
        ask = _Ask(life, run.part(first, stop), len(self.tiers))
        life.asks[run.group] = ask
        keys = run.part(first, stop).packed()
        for index, entry in enumerate(self.tiers):
            lookup_id = self._number()
            answer = entry.tier.lookup_prefix(
                lookup_id, keys, life.context, namespace=self._namespace, stop_at_miss=stop_at_miss, now=now
            )
            self.counters[f"chunks_queried {entry.tier.name}"] += len(keys)
            if answer is None:
                self._asks[lookup_id] = ask
                ask.open[lookup_id] = index
            else:
                self._take_found(ask, index, answer.found)
        return ask

    def _forget_answers(self, ask: _Ask) -> None:
        """Nobody waits for what tiers have not answered of it, and a tier may never answer."""
        for lookup_id in ask.open:
            del self._asks[lookup_id]

    def want(self, run: KeyRun, context: ReqContext, *, now: float) -> None:
        life = self._lives[context.life]
        if WRITING in self.host.states(run):
            self._listen(life, self.host.slots_of(run))
        wanted = life.wants.get(run.group)
        covered = wanted is not None and wanted.start <= run.start and run.stop <= wanted.stop
        wants = {**life.wants, run.group: run}
        if life.admitted and not covered:
            self._drop_wants(life)
        life.wants = wants
        life.need, life.need_at = self._need(life), self.host.arrivals
        self._noting[context.life] = life
        if life.wait_until is None:
            life.wait_until = now + self._promotion_wait_s
            heapq.heappush(self._lease_ends, (life.wait_until, context.life))
            if len(self._lease_ends) > 2 * len(self._lives) + FEW:
                waits = ((other.wait_until, number) for number, other in self._lives.items())
                self._lease_ends = sorted((until, number) for until, number in waits if until is not None)

    def touch(self, run: KeyRun, context: ReqContext, *, now: float) -> None:
        self.host.touch(run)
        if self.tiers:
            self._touch_below(run, self.host.slots_of(run), context, now)

    def _touch_below(self, run: KeyRun, slots: Int64Array, context: ReqContext, now: float) -> None:
        """Tell the tiers of chunks that are of use here, or what is hot would be the oldest there; the start first.

        ``slots[i]`` holds chunk ``run.start + i``, -1: it is not there.
        """
        due = np.flatnonzero((slots >= 0) & (now - self._touched_at[slots] >= TOUCH_AGAIN_S))[: self._touches_left]
        if not len(due) or context.life not in self._lives:
            return
        self._touches_left -= len(due)
        self._touched_at[slots[due]] = now
        tail = run.group.to_bytes(4, "big")
        keys = [run.hashes[run.start + i] + tail for i in due.tolist()]
        for entry in self.tiers:
            entry.tier.touch(keys, context)

    # --- device transfers ---------------------------------------------------------------------------------------

    def prepare_load(self, run: KeyRun, context: ReqContext, *, now: float) -> Reservation:
        slots = self.host.ready_slots(run)
        stop = run.start + len(slots)
        self.host.hold(slots)
        self.host.touch_slots(slots)
        if self.tiers:
            self._touch_below(run, slots, context, now)
        life = self._lives.get(context.life)
        if life is not None:
            self._drop_wants(life)
        chunks = np.arange(run.start, stop, dtype=np.int64)
        brought = self._brought_by[slots]
        origins = {e.tier.name: int((brought == i + 1).sum()) for i, e in enumerate(self.tiers)}
        self._brought_by[slots] = 0
        reservation = self._reserve(TransferKind.LOAD, context, run, chunks, slots, origins)
        self._open[reservation.number] = _Open(reservation)
        return reservation

    def complete_load(self, reservation: Reservation, *, now: float) -> None:
        if self._close(reservation):
            self.host.unhold(reservation.slots)

    def prepare_store(self, run: KeyRun, context: ReqContext, *, now: float) -> StorePlan:
        absent, settled = self._look_over(run, context, now)
        if absent and self.options.store_after > 1:
            admitted = self._host_admission.admit([run.hashes[c] for c in absent])
            self.counters["stores_skipped"] += len(absent) - sum(admitted)
            absent = [c for c, yes in zip(absent, admitted, strict=True) if yes]
        if not absent:
            return StorePlan(None, settled)
        self._allocations.observe(len(absent))
        slots = self._reserve_most(run, absent)
        if len(slots) < len(absent):
            self.counters["allocation_failures"] += 1
            settled = min(settled, absent[len(slots)])
            absent = absent[: len(slots)]
        if not absent:
            return StorePlan(None, settled)
        chunks = np.array(absent, dtype=np.int64)
        reservation = self._reserve(TransferKind.STORE, context, run, chunks, slots, {})
        self._note_writing(reservation, now)
        return StorePlan(reservation, settled)

    def prepare_joint_store(self, offer: JointOffer, *, now: float) -> Reservation | None:
        if self.options.store_after > 1:
            return None
        taken = self.host.reserve_each(offer.group, offer.hashes, offer.extends)
        if taken is None:
            return None
        chunks, slots = np.array(offer.chunks, dtype=np.int64), np.array(taken, dtype=np.int64)
        contexts, hashes = tuple(offer.contexts), tuple(offer.hashes)
        reservation = Reservation(self._number(), TransferKind.STORE, contexts, offer.group, hashes, chunks, slots)
        self._allocations.observe(len(taken))
        self._note_writing(reservation, now)
        return reservation

    def _note_writing(self, reservation: Reservation, now: float) -> None:
        """A store's slots are its own until it is completed."""
        slots, writer = reservation.slots, _Writer()
        self._open[reservation.number] = _Open(reservation, writer)
        self._writers[slots] = writer
        if self.tiers:
            self._write_back.filled(slots)
            self._brought_by[slots] = 0
            self._touched_at[slots] = now

    def complete_store(self, reservation: Reservation, success: bool, *, now: float, released: bool = True) -> None:
        opened = self._open.get(reservation.number)
        if opened is None or opened.settled:
            self.counters["surprises"] += 1
            return
        opened.settled = True
        if not opened.outdated:
            self._end_writing(opened.writer, reservation.slots)
            if success:
                self._publish(reservation, now)
                return
            self.host.abandon(reservation.slots)
            self.counters["stores_failed"] += len(reservation.slots)
        if released:
            self.release(reservation)

    def _publish(self, reservation: Reservation, now: float) -> None:
        """What a store has written is readable, and tiers get it before its slots may be given away."""
        self._note_stored(reservation.group, reservation.hashes)
        if not self._takers:
            self.host.publish_and_unhold(reservation.slots)
        else:
            self.host.publish(reservation.slots)
            self._cascade(reservation, now)
            self.host.unhold(reservation.slots)
        del self._open[reservation.number]

    def release(self, reservation: Reservation) -> None:
        if self._close(reservation):
            self.host.unhold(reservation.slots)

    def _look_over(self, run: KeyRun, context: ReqContext, now: float) -> tuple[list[int], int]:
        """The chunks of an offer that are not there, and the index of the first that somebody else is writing."""
        states = np.frombuffer(self.host.states(run), dtype=np.uint8)
        if (states == READY).any():
            self.touch(run, context, now=now)  # of use to the device just now, wherever it got them from
        writing = np.flatnonzero(states == WRITING)
        settled = run.start + int(writing[0]) if len(writing) else run.stop
        return (np.flatnonzero(states == ABSENT) + run.start).tolist(), settled

    def _reserve_most(self, run: KeyRun, absent: list[int]) -> Int64Array:
        """Slots for as many leading chunks of ``absent`` as there is room for."""
        slots = self.host.reserve(run, absent)
        low, high = 0, len(absent) - 1
        while slots is None and low < high:
            middle = (low + high + 1) // 2
            if self.host.room_for(middle):
                low = middle
            else:
                high = middle - 1
        if slots is None and high > 0:
            slots = self.host.reserve(run, absent[:high])
        return slots if slots is not None else np.empty(0, dtype=np.int64)

    def _reserve(
        self,
        kind: TransferKind,
        context: ReqContext,
        run: KeyRun,
        chunks: Int64Array,
        slots: Int64Array,
        origins: Mapping[str, int],
    ) -> Reservation:
        first, stop = (int(chunks[0]), int(chunks[-1]) + 1) if len(chunks) else (0, 0)
        neighbours = stop - first == len(chunks)
        hashes = tuple(run.hashes[first:stop] if neighbours else [run.hashes[c] for c in chunks.tolist()])
        return Reservation(self._number(), kind, (context,), run.group, hashes, chunks, slots, origins)

    def _close(self, reservation: Reservation) -> bool:
        """Take the reservation off the books; False where it was given back before."""
        if self._open.pop(reservation.number, None) is None:
            self.counters["surprises"] += 1
            return False
        return True

    def _end_writing(self, writer: _Writer | None, slots: Int64Array) -> None:
        """Slots are no longer being written: those who wait for them look again."""
        self._writers[slots] = None
        self._wake_waiters(writer)

    def _wake_waiters(self, writer: _Writer | None) -> None:
        for life_number in writer.waiters if writer is not None else ():
            life = self._lives.get(life_number)
            if life is not None:
                life.progress += 1

    # --- cascades -------------------------------------------------------------------------------------------------

    def _cascade(self, reservation: Reservation, now: float) -> None:
        """Each tier gets what it admits, in a job for each salt, since a job's chunks have one."""
        tail = reservation.group.to_bytes(4, "big")
        keys = tuple(h + tail for h in reservation.hashes)
        contexts = reservation.contexts
        for index in self._takers:
            chosen = [i for i, yes in enumerate(self._tier_admission[index].admit(keys)) if yes]
            for salt, where in _by_salt(contexts, chosen):
                everything = len(where) == len(keys)
                slots = reservation.slots if everything else reservation.slots[where]
                if index in self._write_back:
                    self._write_back.readable(index, slots, salt)
                    continue
                chosen_keys = keys if everything else tuple(keys[i] for i in where)
                theirs = contexts if everything or len(contexts) == 1 else tuple(contexts[i] for i in where)
                self._submit_store(index, reservation.group, chosen_keys, slots, salt, theirs, now)

    def _submit_store(
        self,
        tier: int,
        group: int,
        keys: tuple[bytes, ...],
        slots: Int64Array,
        salt: bytes,
        contexts: tuple[ReqContext, ...],
        now: float,
    ) -> None:
        job = TierJob(
            self._number(),
            TransferKind.STORE,
            group,
            keys,
            slots,
            self.options.payload_bytes[group],
            self._namespace,
            self._salt(salt),
            contexts,
        )
        self.host.hold(slots)
        self._track(job, tier, now + self.tiers[tier].cascade_s)
        self.tiers[tier].tier.submit_store(job, now=now)

    def _write_ahead(self, now: float) -> None:
        """What is about to leave goes to the tiers that are written on eviction: work of nobody's request."""
        for tier in self._write_back.tiers:
            slots = self._write_back.to_write(tier)
            for group, part, hashes in self.host.chunks_in(slots) if len(slots) else ():
                self._write_back.sent(tier, part)
                tail = group.to_bytes(4, "big")
                keys = [block_hash + tail for block_hash in hashes]
                for salt, where in self._write_back.by_salt(part):
                    chosen = tuple(keys[i] for i in where)
                    self._submit_store(tier, group, chosen, part[where], salt, (), now)

    def _salt(self, salt: bytes) -> bytes:
        """The digest of the salt at rest, keyed with the namespace, so that equal salts differ between namespaces."""
        if salt == NO_SALT:
            return NO_SALT
        return hashlib.blake2b(salt, digest_size=16, key=self._namespace.digest).digest()

    # --- a step's end: reports, deadlines, promotions ---------------------------------------------------------------

    def on_schedule_end(self, *, now: float) -> None:
        if self._grows is not None:
            self._grow(self._grows())
        for index, entry in enumerate(self.tiers):
            self._read_reports(index, entry.tier, now)
        if self._deadlines or self._lease_ends:
            self._keep_deadlines(now)
        if self._noting:
            self._serve_wants(now)
        if self.tiers:
            self._write_ahead(now)
        for entry in self.tiers:
            entry.tier.on_schedule_end(now=now)
        self._touches_left = MOST_TOUCHES_PER_STEP

    def _grow(self, usable: int) -> None:
        self.host.grow(usable)
        if usable == self.host.slots:
            self._grows = None

    def _read_reports(self, index: int, tier: SecondaryTierManager, now: float) -> None:
        for answer in tier.get_answers():
            self._take_answer(tier, answer)
        for result in tier.get_finished_jobs():
            self._take_result(result, now)
        for job_id in tier.get_released_jobs():
            job = self._overdue.pop(job_id, None)
            if job is None:
                self.counters["reports_ignored"] += 1
            else:
                self._let_go(job, now)

    def _let_go(self, job: _Job, now: float) -> None:
        """A tier's late word: it no longer touches the slots of a job that was settled without it."""
        self.host.unhold(job.order.slots)
        self.tiers[job.tier].tier.note_hung(self._hung_slots(job.tier), now=now)

    def _take_answer(self, tier: SecondaryTierManager, answer: TierAnswer) -> None:
        ask = self._asks.pop(answer.lookup_id, None)
        if ask is None:
            self.counters["reports_ignored"] += 1
            return
        self._take_found(ask, ask.open.pop(answer.lookup_id), answer.found)
        ask.life.need_at = -1
        if ask.answered:
            ask.life.progress += 1

    def _take_found(self, ask: _Ask, index: int, found: bytes) -> None:
        ask.take(index, found)
        self.counters[f"chunks_hit {self.tiers[index].tier.name}"] += found.count(1)

    def _take_result(self, result: TierResult, now: float) -> None:
        late = self._overdue.get(result.job_id)
        if late is not None:
            self._count_moved(late, result)
            if result.released:
                del self._overdue[result.job_id]
                self._let_go(late, now)
            return
        job = self._take_job(result.job_id)
        if job is None:
            self.counters["reports_ignored"] += 1
            return
        self._count_moved(job, result)
        outcomes = result.outcomes
        if len(outcomes) != len(job.order.keys):
            self.counters["surprises"] += 1
            outcomes = (Outcome.IO_ERROR,) * len(job.order.keys)
        ok = np.fromiter((o is Outcome.OK for o in outcomes), dtype=np.bool_, count=len(outcomes))
        self._settle(job, ok, result.released, now)

    def _count_moved(self, job: _Job, result: TierResult) -> None:
        """What a job has moved, once, however late its report comes."""
        if job.reported:
            self.counters["reports_ignored"] += 1
            return
        job.reported = True
        name = self.tiers[job.tier].tier.name
        self.counters[f"{'read' if job.writer else 'write'}_bytes {name}"] += result.nbytes
        self.counters[f"{'read' if job.writer else 'write'}_seconds {name}"] += result.seconds

    def _settle(self, job: _Job, ok: np.ndarray[tuple[int], np.dtype[np.bool_]], released: bool, now: float) -> None:
        """The job is over for everybody who waited for it; its slots are given back once it has let go."""
        failed = len(ok) - int(ok.sum())
        name = self.tiers[job.tier].tier.name
        if job.writer is not None:
            self.counters[f"chunks_promoted {name}"] += len(ok) - failed
            if not job.outdated:
                self._settle_promotion(job, job.writer, ok)
        else:
            self.counters[f"chunks_cascaded {name}"] += len(ok) - failed
            if job.is_write_back:
                slots, gone = job.order.slots, job.outdated or not released
                self._write_back.settled(job.tier, slots, slots[~ok], gone=gone)
            if not released and not job.outdated:
                self.host.abandon(job.order.slots)
        if failed:
            self.counters[f"{job.word}_failures {name}"] += failed
            self.counters[f"{job.word}_jobs_failed {name}"] += 1
        if released:
            self.host.unhold(job.order.slots)
        else:
            job.overdue_at = now
            self._overdue[job.order.job_id] = job

    def _settle_promotion(self, job: _Job, writer: _Writer, ok: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        slots = job.order.slots
        bad = [job.order.keys[i][:-4] for i in np.flatnonzero(~ok)]
        for life_number in writer.waiters:
            life = self._lives.get(life_number)
            if life is not None:
                life.give_up(job.order.group, bad)
        self._end_writing(writer, slots)
        if ok.any():
            self.host.publish(slots[ok])
            self._brought_by[slots[ok]] = job.tier + 1
            self._note_stored(job.order.group, tuple(job.order.keys[i][:-4] for i in np.flatnonzero(ok)))
        if not ok.all():
            self.host.abandon(slots[~ok])

    def _keep_deadlines(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, job_id = heapq.heappop(self._deadlines)
            job = self._take_job(job_id)
            if job is not None:
                self.counters["tier_deadlines_passed"] += 1
                self.counters[f"{job.word}_deadlines_passed {self.tiers[job.tier].tier.name}"] += 1
                self._settle(job, np.zeros(len(job.order.keys), dtype=np.bool_), released=False, now=now)
                self.tiers[job.tier].tier.note_hung(self._hung_slots(job.tier), now=now)
        while self._lease_ends and self._lease_ends[0][0] <= now:
            _, life_number = heapq.heappop(self._lease_ends)
            life = self._lives.get(life_number)
            if life is not None and life.wait_until is not None and life.wait_until <= now:
                self._drop_wants(life)

    def _hung_slots(self, tier: int) -> int:
        return sum(len(j.order.slots) for j in self._overdue.values() if j.tier == tier)

    def _serve_wants(self, now: float) -> None:
        """Lease and promote, first come first served; what does not fit now is looked at again next step."""
        room = self.options.max_promotions_per_step
        for life in list(self._noting.values()):
            if life.need_at != self.host.arrivals:
                before, life.need, life.need_at = life.need, self._need(life), self.host.arrivals
                # What it waits for may have come by somebody else's doing before it could lease it.
                life.progress += life.need < before
            if not life.admitted and not self._admit(life):
                continue
            if life.no_room_at == self.host.room:
                continue
            room = self._promote(life, room, now)
            if room <= 0:
                return

    def _admit(self, life: _Life) -> bool:
        """Grant the life its leases as a number, whole or not at all; cut what could never be granted."""
        if any(not ask.answered for ask in life.asks.values()):
            return False
        need = life.need
        cap = self.host.slots // 2
        if need > cap:
            self._cut(life, cap)
            return False
        if self._lease_budget + need > cap:
            return False
        self._lease_budget += need
        life.budget = need
        life.admitted = True
        return True

    def _need(self, life: _Life) -> int:
        """Chunks of its wants beyond the ready prefix that are there or can come."""
        need = 0
        for group, run in life.wants.items():
            coming = np.frombuffer(self.host.states(run), dtype=np.uint8) != ABSENT
            ask = life.asks.get(group)
            if ask is not None:
                low, high = max(run.start, ask.start), max(run.start, ask.start, min(run.stop, ask.stop))
                coming[low - run.start : high - run.start] |= ask.source[low - ask.start : high - ask.start] != NOWHERE
            need += int(np.count_nonzero(coming[self.host.ready_prefix(run) :]))
        return need

    def _cut(self, life: _Life, cap: int) -> None:
        """More than may ever be leased: what tiers have beyond is given up, and the life looks again.

        Where the device is writing all of it, nothing is given up: it comes without a lease too.
        """
        share = cap // len(life.wants)
        cut = False
        for group, run in life.wants.items():
            ask = life.asks.get(group)
            start = run.start + self.host.ready_prefix(run) + share
            if ask is not None and start < run.stop:
                cut = ask.give_up_from(start) or cut
        if not cut:
            return
        self.counters["promotions_cut"] += 1
        self._drop_wants(life)
        life.progress += 1

    def _promote(self, life: _Life, room: int, now: float) -> int:
        """Submit promotions of an admitted life within ``room`` chunks; what is left of the room."""
        complete, lost = True, False
        for run in life.wants.values():
            states = np.frombuffer(self.host.states(run), dtype=np.uint8)
            ask = life.asks.get(run.group)
            absent = [run.start + int(i) for i in np.flatnonzero(states == ABSENT)]
            # What was readable at the last look may have left since, and what was being written may have failed.
            lost = lost or any(ask is None or ask.source_of(chunk) == NOWHERE for chunk in absent)
            for tier, chunks in self._by_tier(ask, absent):
                take = chunks[:room]
                if not take or not self._submit_promotion(life, run, tier, take, now):
                    complete = False
                    break
                room -= len(take)
                complete = complete and len(take) == len(chunks)
        self._lease_present(life)
        life.progress += lost
        if complete:
            self._noting.pop(life.context.life, None)
        return room

    def _by_tier(self, ask: _Ask | None, absent: list[int]) -> Iterable[tuple[int, list[int]]]:
        """Stretches of ``absent`` with the tier that holds them, in the order of the chunks."""
        stretch: list[int] = []
        tier = NOWHERE
        for chunk in absent:
            source = ask.source_of(chunk) if ask is not None else NOWHERE
            if source != tier and stretch:
                yield tier, stretch
                stretch = []
            tier = source
            if source != NOWHERE:
                stretch.append(chunk)
        if stretch:
            yield tier, stretch

    def _submit_promotion(self, life: _Life, run: KeyRun, tier: int, chunks: list[int], now: float) -> bool:
        slots = self.host.reserve(run, chunks)
        if slots is None:
            self.counters["promotion_allocation_failures"] += 1
            life.no_room_at = self.host.room
            return False
        entry = self.tiers[tier]
        tail = run.group.to_bytes(4, "big")
        job = TierJob(
            self._number(),
            TransferKind.LOAD,
            run.group,
            tuple(run.hashes[c] + tail for c in chunks),
            slots,
            self.options.payload_bytes[run.group],
            self._namespace,
            self._salt(life.context.salt),
            (life.context,),
        )
        writer = _Writer()
        self._write_back.filled(slots)
        self._writers[slots] = writer
        self._touched_at[slots] = now
        self._track(job, tier, now + entry.promotion_s, writer)
        entry.tier.submit_load(job, now=now)
        return True

    def _lease_present(self, life: _Life) -> None:
        """Lease what of the wants is being written or readable beyond the ready prefix, and listen for its end."""
        for run in life.wants.values():
            slots = self.host.slots_of(run)[self.host.ready_prefix(run) :]
            slots = slots[slots >= 0]
            fresh = np.setdiff1d(slots, life.leased, assume_unique=True)[: life.budget - len(life.leased)]
            self.host.lease(fresh)
            life.leased = np.concatenate([life.leased, fresh])
            self._listen(life, slots)

    def _listen(self, life: _Life, slots: Int64Array) -> None:
        """The life looks again when the writing of any of these slots (-1: none) has ended."""
        for writer in {id(w): w for w in self._writers[slots[slots >= 0]] if w is not None}.values():
            writer.waiters.add(life.context.life)

    def _drop_wants(self, life: _Life) -> None:
        """The one place where leases end."""
        self._noting.pop(life.context.life, None)
        self._lease_budget -= life.budget
        if len(life.leased):
            self.host.unlease(life.leased)
        life.forget_wants()

    def _track(self, order: TierJob, tier: int, deadline: float, writer: _Writer | None = None) -> None:
        job = self._transfer_jobs[order.job_id] = _Job(order, tier, writer)
        self._note_active(job, 1)
        heapq.heappush(self._deadlines, (deadline, order.job_id))
        if len(self._deadlines) > 2 * len(self._transfer_jobs) + FEW:
            self._deadlines = sorted(entry for entry in self._deadlines if entry[1] in self._transfer_jobs)

    def _take_job(self, job_id: int) -> _Job | None:
        """Take a job in flight off the books; None where there is none."""
        job = self._transfer_jobs.pop(job_id, None)
        if job is not None:
            self._note_active(job, -1)
        return job

    def _note_active(self, job: _Job, change: int) -> None:
        name = self.tiers[job.tier].tier.name
        self._active[f"{job.word}_jobs_active {name}"] += change
        self._active[f"{job.word}_chunks_active {name}"] += change * len(job.order.keys)

    # --- the whole ----------------------------------------------------------------------------------------------------

    def has_pending_work(self) -> bool:
        return bool(self._transfer_jobs) or any(e.tier.has_pending_work() for e in self.tiers)

    def reset_cache(self, generation: bytes, *, now: float) -> None:
        for life in self._lives.values():
            self._drop_wants(life)
            life.asks.clear()
            life.progress += 1
        self._asks.clear()
        for opened in self._open.values():
            opened.outdated = True
        for job in self._transfer_jobs.values():
            job.outdated = True
        self._writers.fill(None)
        self._write_back.forget()
        self.host.clear()
        if not self.options.keep_tiers_on_reset:
            self._namespace = self._namespace_of(generation)

    def take_events(self) -> Sequence[CacheEvent]:
        if self.host.evictions != self._evictions_noted:
            self._note_evictions()
        if not self.options.events:
            return ()
        events = self._log.take()
        for entry in self.tiers:
            events.extend(entry.tier.take_events(self._namespace))
        return events

    def get_stats(self) -> Stats:
        """Also what the tiers say of themselves; of what both count, the word of this side, which is the same for
        every kind of tier.

        ``tier_jobs_overdue_at``: when the oldest job whose tier still holds its slots was given up, if there is one.
        """
        stats: dict[str, float] = {}
        for entry in self.tiers:
            stats.update({f"{name} {entry.tier.name}": value for name, value in entry.tier.get_stats().items()})
        stats.update(self.counters)
        stats.update(self._active)
        stats.update(self._allocations.stats("allocation_chunks"))
        for index in self._write_back.tiers:
            stats[f"chunks_unwritten {self.tiers[index].tier.name}"] = self._write_back.unwritten(index)
            stats[f"evictions_unwritten {self.tiers[index].tier.name}"] = self._write_back.lost[index]
        stats["slots"] = self.host.slots
        stats["event_overflows host"] = self._log.overflows
        for state, count in self.host.counts().items():
            stats[f"slots_{state.name.lower()}"] = count
        stats["slots_leased"] = self.host.leased
        stats["slots_being_read"] = self.host.being_read
        stats["host_evictions"] = self.host.evictions
        stats["tier_jobs_in_flight"] = len(self._transfer_jobs)
        stats["tier_jobs_overdue"] = len(self._overdue)
        if self._overdue:
            stats["tier_jobs_overdue_at"] = next(iter(self._overdue.values())).overdue_at
        return stats

    def flush(self, *, now: float) -> bool:
        for index in self._write_back.tiers:
            self._read_reports(index, self.tiers[index].tier, now)
        self._keep_deadlines(now)
        self._write_back.write_all()
        self._write_ahead(now)
        return any(self._write_back.on_the_way.values())

    def shutdown(self, *, now: float, deadline_s: float) -> None:
        for entry in self.tiers:  # one after the other, so each has its share of the time
            entry.tier.shutdown(deadline_s / len(self.tiers))
        for index, entry in enumerate(self.tiers):
            self._read_reports(index, entry.tier, now)

    def check(self, open_reservations: Iterable[Reservation] | None = None) -> None:
        """Recount holds and leases from nothing; ``open_reservations``: those the scheduler half still has."""
        holds: Counter[int] = Counter()
        leases: Counter[int] = Counter()
        for opened in self._open.values():
            holds.update(opened.reservation.slots.tolist())
        for job in [*self._transfer_jobs.values(), *self._overdue.values()]:
            holds.update(job.order.slots.tolist())
        for life in self._lives.values():
            leases.update(life.leased.tolist())
        self.host.check(holds, leases)
        budget = sum(life.budget for life in self._lives.values())
        if budget != self._lease_budget or budget > self.host.slots // 2:
            raise InvariantError(f"found a lease budget of {self._lease_budget}, expected {budget}, at most half")
        on_the_way: Counter[int] = Counter()
        for job in self._transfer_jobs.values():
            on_the_way[job.tier] += len(job.order.keys) if job.is_write_back else 0
        self._write_back.check(on_the_way)
        if open_reservations is not None:
            theirs = {r.number for r in open_reservations}
            if theirs != set(self._open):
                raise InvariantError(f"open reservations differ: {sorted(theirs ^ set(self._open))}")
        writers = {id(o.writer) for o in self._open.values()} | {id(j.writer) for j in self._transfer_jobs.values()}
        if any(id(w) not in writers for w in self._writers if w is not None):
            raise InvariantError("a slot is marked as being written by somebody who is gone")
        marked, reserved = sum(w is not None for w in self._writers), self.host.counts()[SlotState.RESERVED]
        if marked != reserved:
            raise InvariantError(f"found {marked} slots marked as being written, expected {reserved}")
        for number, life in self._lives.items():
            if len(life.leased) > life.budget or (life.budget and not life.admitted):
                raise InvariantError(f"life {number} has leases that it was not granted")
        if not self._noting.keys() <= self._lives.keys():
            raise InvariantError("a gone life still waits for promotions")
        asks = {lookup_id: ask for life in self._lives.values() for ask in life.asks.values() for lookup_id in ask.open}
        if asks != self._asks:
            raise InvariantError(f"lookups {sorted(asks.keys() ^ self._asks.keys())} are waited for by nobody")
        if not self._transfer_jobs.keys() <= {job_id for _, job_id in self._deadlines}:
            raise InvariantError("a job between tiers has no deadline")

    def _note_stored(self, group: int, hashes: tuple[bytes, ...]) -> None:
        if self.options.events:
            self._note_evictions()  # first, because a chunk may have left before it came back
            self._log.stored(group, hashes)

    def _note_evictions(self) -> None:
        gone: dict[int, list[bytes]] = {}
        for group, block_hash in self.host.take_evicted():
            gone.setdefault(group, []).append(block_hash)
        left, self._evictions_noted = self.host.evictions - self._evictions_noted, self.host.evictions
        if not self.options.events:
            return
        if left > sum(map(len, gone.values())):
            self._log.cleared()  # more than host memory remembers
            return
        for group, hashes in gone.items():
            self._log.removed(group, hashes)

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number


class _Writer:
    """A transfer that fills slots, and the lives that wait for it."""

    __slots__ = ("waiters",)

    def __init__(self) -> None:
        self.waiters: set[int] = set()


@dataclass(slots=True)
class _Open:
    """A reservation on the books. ``settled``: completed, and only kept because somebody may still write."""

    reservation: Reservation
    writer: _Writer | None = None
    settled: bool = False
    outdated: bool = False


@dataclass(slots=True)
class _Job:
    """A tier's job on the books; ``writer`` stands for a promotion, None for a cascade."""

    order: TierJob
    tier: int
    writer: _Writer | None
    outdated: bool = False
    reported: bool = False
    overdue_at: float = math.inf
    """When it was settled while its tier still held its slots."""

    @property
    def word(self) -> str:
        return "promotion" if self.writer else "cascade"

    @property
    def is_write_back(self) -> bool:
        return not self.order.contexts


class _Ask:
    """One life's question to all tiers about one stretch of keys, asked once.

    ``source[i]`` is the first tier, in order, that has chunk ``start + i``; NOWHERE where none has, or where a
    promotion from it has failed. ``closed``: the life waits no longer for tiers that have not answered.
    """

    __slots__ = ("closed", "life", "open", "run", "source", "start", "stop")

    def __init__(self, life: _Life, run: KeyRun, tiers: int) -> None:
        self.life = life
        self.run = run
        self.start, self.stop = run.start, run.stop
        self.open: dict[int, int] = {}
        self.closed = False
        self.source = np.full(len(run), NOWHERE, dtype=np.int8)

    @property
    def answered(self) -> bool:
        return self.closed or not self.open

    def covers(self, chunk: int) -> bool:
        return self.start <= chunk < self.stop

    def take(self, tier: int, found: bytes) -> None:
        """A tier's answer; an earlier tier in the order keeps what it has."""
        has = np.flatnonzero(np.frombuffer(found, dtype=np.uint8)[: len(self.source)])
        better = (self.source[has] == NOWHERE) | (self.source[has] > tier)
        self.source[has[better]] = tier

    def source_of(self, chunk: int) -> int:
        return int(self.source[chunk - self.start]) if self.covers(chunk) else NOWHERE

    def give_up(self, hashes: Iterable[bytes]) -> None:
        """What a tier failed to bring is not asked for again at once."""
        bad = set(hashes)
        for i, block_hash in enumerate(self.run.keys()):
            if block_hash in bad:
                self.source[i] = NOWHERE

    def give_up_from(self, chunk: int) -> bool:
        """Forget what tiers have from ``chunk`` on; whether they had anything."""
        beyond = self.source[max(0, chunk - self.start) :]
        had = bool((beyond != NOWHERE).any())
        beyond[:] = NOWHERE
        return had


_NO_SLOTS: Int64Array = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class _Life:
    """What the manager knows of one life that it has not been told the end of."""

    context: ReqContext
    progress: int = 0
    asks: dict[int, _Ask] = field(default_factory=dict)
    asks_made: Counter[int] = field(default_factory=Counter)
    wants: dict[int, KeyRun] = field(default_factory=dict)
    wait_until: float | None = None
    admitted: bool = False
    need: int = 0
    """Leases that its wants ask for, as of ``host.arrivals`` equal to ``need_at``; -1: not counted since."""
    need_at: int = -1
    budget: int = 0
    no_room_at: int = -1
    """``host.room`` when there was last no room for its promotions."""
    leased: Int64Array = field(default_factory=lambda: _NO_SLOTS)

    def give_up(self, group: int, hashes: Sequence[bytes]) -> None:
        ask = self.asks.get(group)
        if ask is not None and hashes:
            ask.give_up(hashes)

    def forget_wants(self) -> None:
        self.wants = {}
        self.wait_until = None
        self.admitted = False
        self.need = 0
        self.need_at = -1
        self.budget = 0
        self.no_room_at = -1
        self.leased = _NO_SLOTS


def _by_salt(contexts: Sequence[ReqContext], chosen: list[int]) -> Iterable[tuple[bytes, list[int]]]:
    """Each salt with the indexes of those chosen chunks whose lives have it; one context stands for all."""
    if not chosen:
        return ()
    if len({context.salt for context in contexts}) == 1:
        return ((contexts[0].salt, chosen),)
    where: defaultdict[bytes, list[int]] = defaultdict(list)
    for i in chosen:
        where[contexts[i].salt].append(i)
    return where.items()
