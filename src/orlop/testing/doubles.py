"""Managers and tiers for tests: cranked by hand, and strict about the contract.

In: the calls of ``tiering.base``. Out: what a test told them to answer, a record of every call, and an
AssertionError as soon as a caller breaks the contract. Never: a file, a thread, a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from orlop.core import (
    CacheEvent,
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
    unpack_key,
)
from orlop.testing.device import Device, Page, SlotMemory
from orlop.tiering.base import OffloadingManager, SecondaryTierManager


class Call(NamedTuple):
    """One recorded call: its name, the life it was for (None: nobody's), and its main argument."""

    name: str
    life: int | None
    what: Any = None


class Answers(StrEnum):
    """When a ManualTier answers lookups."""

    AT_ONCE = "at once"
    NEXT_POLL = "next poll"
    BY_HAND = "by hand"


@dataclass(slots=True)
class _Asked:
    lookup_id: int
    keys: tuple[bytes, ...]
    namespace: Namespace
    life: int
    stop_at_miss: bool


class ManualTier(SecondaryTierManager):
    """A secondary tier that does what the test says.

    ``auto``: jobs end well by themselves when they are next asked for. ``answers``: when lookups are answered.
    ``store_outcome`` and ``load_outcome`` say what becomes of each key. ``claims_more``: keys it says it has
    though it has not. ``stored`` maps (namespace digest, packed key) to the chunk.
    """

    def __init__(
        self,
        memory: SlotMemory,
        *,
        name: str = "0:manual",
        device: Device | None = None,
        auto: bool = False,
        answers: Answers = Answers.AT_ONCE,
    ) -> None:
        self.name = name
        self.memory = memory
        self.device = device
        self.auto = auto
        self.answers = answers
        self.stored: dict[tuple[bytes, bytes], dict[tuple[int, int], Page]] = {}
        self.claims_more: Callable[[bytes], bool] = lambda key: False
        self.store_outcome: Callable[[bytes], Outcome] = lambda key: Outcome.OK
        self.load_outcome: Callable[[bytes], Outcome] = lambda key: Outcome.OK
        self.calls: list[Call] = []
        self.lives: dict[int, bool] = {}
        """Each life that was announced, and whether it is still open."""
        self.jobs: dict[int, TierJob] = {}
        """Submitted and neither reported nor released."""
        self.hung = 0
        self._asked: dict[int, _Asked] = {}
        self._answers: list[TierAnswer] = []
        self._results: list[TierResult] = []
        self._released: list[int] = []
        self._reported: set[int] = set()

    # --- the crank -----------------------------------------------------------------------------------

    @property
    def open_lookups(self) -> list[int]:
        """Lookups that nobody has answered."""
        return list(self._asked)

    def open_jobs(self, kind: TransferKind | None = None) -> list[int]:
        """Jobs that nobody has reported, oldest first."""
        return [i for i, job in self.jobs.items() if i not in self._reported and kind in (None, job.kind)]

    def hanging_jobs(self) -> list[int]:
        """Jobs that were reported with ``released=False`` and not released."""
        return [i for i in self.jobs if i in self._reported]

    def loaded_keys(self) -> list[bytes]:
        """Every key of every load submitted so far, repeats included."""
        return [key for call in self.calls if call.name == "submit_load" for key in call.what.keys]

    def answer(self, lookup_id: int | None = None) -> None:
        """Answer one open lookup, or all of them."""
        for asked in list(self._asked.values()) if lookup_id is None else [self._asked[lookup_id]]:
            del self._asked[asked.lookup_id]
            self._answers.append(self._find(asked))

    def complete(self, job_id: int | None = None) -> None:
        """Do one open job, or all of them, and report what ``store_outcome`` or ``load_outcome`` says."""
        for number in self.open_jobs() if job_id is None else [job_id]:
            job = self.jobs.pop(number)
            outcomes = tuple(self._move(job, key, int(slot)) for key, slot in zip(job.keys, job.slots, strict=True))
            self._report(TierResult(number, outcomes, nbytes=job.payload_bytes * outcomes.count(Outcome.OK)))
            self.memory.let_go((self.name, number))

    def fail(self, job_id: int | None = None, outcome: Outcome = Outcome.IO_ERROR, *, released: bool = True) -> None:
        """Report one open job, or all, as failed; with ``released=False`` its slots stay in use."""
        for number in self.open_jobs() if job_id is None else [job_id]:
            job = self.jobs[number]
            self._report(TierResult(number, (outcome,) * len(job.keys), reason="as told", released=released))
            if released:
                self._let_go(number)

    def release(self, job_id: int | None = None) -> None:
        """Let go of jobs that were reported with ``released=False``."""
        for number in self.hanging_jobs() if job_id is None else [job_id]:
            self._released.append(number)
            self._let_go(number)

    def _let_go(self, number: int) -> None:
        del self.jobs[number]
        self.memory.let_go((self.name, number))

    def _report(self, result: TierResult) -> None:
        assert result.job_id not in self._reported, f"job {result.job_id} is reported twice"
        self._reported.add(result.job_id)
        self._results.append(result)

    def _move(self, job: TierJob, key: bytes, slot: int) -> Outcome:
        place = (job.namespace.digest, key)
        if job.kind is TransferKind.STORE:
            outcome = self.store_outcome(key)
            if outcome is Outcome.OK:
                self.stored[place] = self.memory.chunk(slot)
            return outcome
        outcome = self.load_outcome(key)
        if outcome is Outcome.OK and place not in self.stored:
            outcome = Outcome.MISSING
        if outcome is Outcome.OK:
            self.memory.fill(slot, self.stored[place])
        elif outcome is Outcome.CORRUPT:
            self.stored.pop(place, None)
        return outcome

    def _find(self, asked: _Asked) -> TierAnswer:
        found = bytearray()
        for key in asked.keys:
            found.append((asked.namespace.digest, key) in self.stored or self.claims_more(key))
            if asked.stop_at_miss and not found[-1]:
                break
        return TierAnswer(asked.lookup_id, bytes(found))

    # --- the contract --------------------------------------------------------------------------------------

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
        self._live("lookup_prefix", context, tuple(keys))
        asked = _Asked(lookup_id, tuple(keys), namespace, context.life, stop_at_miss)
        if self.answers is Answers.AT_ONCE:
            return self._find(asked)
        self._asked[lookup_id] = asked
        return None

    def get_answers(self) -> Sequence[TierAnswer]:
        if self.answers is Answers.NEXT_POLL:
            self.answer()
        answers, self._answers = self._answers, []
        return answers

    def submit_store(self, job: TierJob, *, now: float) -> None:
        self._submit("submit_store", job)
        for key, slot in zip(job.keys, job.slots, strict=True):
            if self.device is not None:
                block_hash, group = unpack_key(key)
                self.device.check_chunk(group, block_hash, self.memory.chunk(int(slot)), f"cascade {job.job_id}")

    def submit_load(self, job: TierJob, *, now: float) -> None:
        self._submit("submit_load", job)

    def _submit(self, name: str, job: TierJob) -> None:
        for context in dict.fromkeys(job.contexts or (None,)):
            self._live(name, context, job)
        assert job.job_id not in self.jobs, f"job {job.job_id} is submitted twice"
        assert job.job_id not in self._reported, f"job {job.job_id} is submitted again after its report"
        self.memory.claim((self.name, job.job_id), job.slots.tolist(), write=job.kind is TransferKind.LOAD)
        self.jobs[job.job_id] = job

    def get_finished_jobs(self) -> Sequence[TierResult]:
        if self.auto:
            self.complete()
        results, self._results = self._results, []
        return results

    def get_released_jobs(self) -> Sequence[int]:
        released, self._released = self._released, []
        return released

    def touch(self, keys: Sequence[bytes], context: ReqContext) -> None:
        self._live("touch", context, tuple(keys))

    def on_new_request(self, context: ReqContext) -> None:
        assert context.life not in self.lives, f"life {context.life} begins a second time"
        self.lives[context.life] = True
        self.calls.append(Call("on_new_request", context.life))

    def on_request_finished(self, context: ReqContext) -> None:
        self._live("on_request_finished", context, None)
        self.lives[context.life] = False

    def note_hung(self, count: int, *, now: float) -> None:
        self.hung = count

    def get_stats(self) -> Mapping[str, float]:
        return {}

    def clear(self) -> None:
        self.calls.append(Call("clear", None))
        self.stored.clear()

    def shutdown(self, deadline_s: float) -> None:
        self.calls.append(Call("shutdown", None))
        self.fail(outcome=Outcome.UNAVAILABLE)

    def _live(self, name: str, context: ReqContext | None, what: Any) -> None:
        self.calls.append(Call(name, context.life if context else None, what))
        if context is not None:
            assert context.life in self.lives, f"{name} for life {context.life}, which never began"
            assert self.lives[context.life], f"{name} for life {context.life} after on_request_finished"

    def check_all_ended(self) -> None:
        """Every life that was announced has been ended."""
        open_lives = [life for life, is_open in self.lives.items() if is_open]
        assert not open_lives, f"lives {open_lives} were never ended"


@dataclass(slots=True)
class _Open:
    """A reservation that has not been given back, and how many resets there were when it was made."""

    reservation: Reservation
    resets: int


class RecordingManager(OffloadingManager):
    """Any manager, with every call recorded and the caller held to the contract.

    With a ``device``, each chunk that becomes readable, and each that is about to be loaded, is compared
    with what its key stands for.
    """

    def __init__(self, inner: OffloadingManager, device: Device | None = None) -> None:
        self.inner = inner
        self.device = device
        self.calls: list[Call] = []
        self.lives: dict[int, bool] = {}
        """Each life that began, and whether it is still open."""
        self.open: dict[int, _Open] = {}
        """Reservations to complete, by number."""
        self.retired: dict[int, Reservation] = {}
        """Stores completed with ``released=False`` and not released."""
        self._resets = 0
        self._stored_in_step = False

    def count(self, name: str, life: int | None = None) -> int:
        """How often ``name`` was called, for one life or for all."""
        return sum(call.name == name and life in (None, call.life) for call in self.calls)

    def names(self, life: int) -> list[str]:
        """The names of all calls for a life, in order."""
        return [call.name for call in self.calls if call.life == life]

    def on_new_request(self, context: ReqContext) -> None:
        assert context.life not in self.lives, f"life {context.life} begins a second time"
        self.calls.append(Call("on_new_request", context.life))
        self.lives[context.life] = True
        self.inner.on_new_request(context)

    def on_request_finished(self, context: ReqContext) -> None:
        self._live("on_request_finished", context)
        self.lives[context.life] = False
        self.inner.on_request_finished(context)

    def lookup_prefix(self, run: KeyRun, context: ReqContext, *, now: float, since: float) -> PrefixAnswer:
        self._live("lookup_prefix", context, run)
        return self.inner.lookup_prefix(run, context, now=now, since=since)

    def lookup_each(self, run: KeyRun, context: ReqContext, *, now: float, since: float) -> Sequence[Lookup]:
        self._live("lookup_each", context, run)
        return self.inner.lookup_each(run, context, now=now, since=since)

    def want(self, run: KeyRun, context: ReqContext, *, now: float) -> None:
        self._live("want", context, run)
        self.inner.want(run, context, now=now)

    def answer_version(self, context: ReqContext) -> tuple[int, int]:
        return self.inner.answer_version(context)

    def touch(self, run: KeyRun, context: ReqContext, *, now: float) -> None:
        self._live("touch", context, run)
        self.inner.touch(run, context, now=now)

    def prepare_load(self, run: KeyRun, context: ReqContext, *, now: float) -> Reservation:
        self._live("prepare_load", context, run)
        assert not self._stored_in_step, "a load is prepared after a store of the same step"
        reservation = self.inner.prepare_load(run, context, now=now)
        assert list(reservation.hashes) == list(run.keys())[: len(reservation.hashes)], "pinned other keys than asked"
        self._opened(reservation, TransferKind.LOAD, context)
        self._verify(reservation, "load")
        return reservation

    def prepare_store(self, run: KeyRun, context: ReqContext, *, now: float) -> StorePlan:
        self._live("prepare_store", context, run)
        self._stored_in_step = True
        plan = self.inner.prepare_store(run, context, now=now)
        if plan.reservation is not None:
            self._opened(plan.reservation, TransferKind.STORE, context)
        return plan

    def prepare_joint_store(self, offer: JointOffer, *, now: float) -> Reservation | None:
        for context in dict.fromkeys(offer.contexts):
            self._live("prepare_joint_store", context, offer)
        together = [life for life, _ in groupby(context.life for context in offer.contexts)]
        assert len(together) == len(set(together)), "chunks of one life are scattered"
        self._stored_in_step = True
        reservation = self.inner.prepare_joint_store(offer, now=now)
        if reservation is not None:
            assert list(reservation.hashes) == list(offer.hashes), "reserved for other keys than offered"
            self._opened(reservation, TransferKind.STORE, *offer.contexts)
        return reservation

    def complete_load(self, reservation: Reservation, *, now: float) -> None:
        self._completed("complete_load", reservation, TransferKind.LOAD)
        self.inner.complete_load(reservation, now=now)

    def _store_completed(self, reservation: Reservation, success: bool) -> None:
        opened = self._completed("complete_store", reservation, TransferKind.STORE)
        if success and opened.resets == self._resets:
            self._verify(reservation, "store")

    def complete_store(self, reservation: Reservation, success: bool, *, now: float, released: bool = True) -> None:
        self._store_completed(reservation, success)
        if not released:
            assert not success, f"store {reservation.number} succeeded and is still being written"
            self.retired[reservation.number] = reservation
        self.inner.complete_store(reservation, success, now=now, released=released)

    def release(self, reservation: Reservation) -> None:
        self.calls += [Call("release", context.life, reservation) for context in dict.fromkeys(reservation.contexts)]
        assert self.retired.pop(reservation.number, None) is reservation, (
            f"release of {reservation.number}: not retired"
        )
        self.inner.release(reservation)

    def on_schedule_end(self, *, now: float) -> None:
        self.calls.append(Call("on_schedule_end", None))
        self._stored_in_step = False
        for opened in self.open.values():
            if opened.resets == self._resets:
                for context in opened.reservation.contexts:
                    who = f"life {context.life} has ended while its {opened.reservation} may still publish"
                    assert self.lives[context.life], who
        self.inner.on_schedule_end(now=now)

    def has_pending_work(self) -> bool:
        return self.inner.has_pending_work()

    def reset_cache(self, generation: bytes, *, now: float) -> None:
        self.calls.append(Call("reset_cache", None, generation))
        self._resets += 1
        self.inner.reset_cache(generation, now=now)

    def take_events(self) -> Sequence[CacheEvent]:
        return self.inner.take_events()

    def get_stats(self) -> Mapping[str, float]:
        return self.inner.get_stats()

    def flush(self, *, now: float) -> bool:
        return self.inner.flush(now=now)

    def shutdown(self, *, now: float, deadline_s: float) -> None:
        self.calls.append(Call("shutdown", None))
        self.inner.shutdown(now=now, deadline_s=deadline_s)

    def check(self) -> None:
        """The inner manager's own recount, where it has one."""
        check = getattr(self.inner, "check", None)
        if check is not None:
            check()

    def check_all_ended(self) -> None:
        """Every life has ended and every reservation was given back."""
        open_lives = [life for life, is_open in self.lives.items() if is_open]
        assert not open_lives, f"lives {open_lives} were never ended"
        assert not self.open, f"reservations {sorted(self.open)} were never completed"

    def _live(self, name: str, context: ReqContext, what: Any = None) -> None:
        self.calls.append(Call(name, context.life, what))
        assert context.life in self.lives, f"{name} for life {context.life}, which never began"
        assert self.lives[context.life], f"{name} for life {context.life} after on_request_finished"

    def _opened(self, reservation: Reservation, kind: TransferKind, *contexts: ReqContext) -> None:
        assert reservation.kind is kind
        assert reservation.contexts == contexts
        assert reservation.number not in self.open, f"reservation {reservation.number} is made twice"
        assert len(set(reservation.slots.tolist())) == len(reservation.hashes), "slots and keys do not match"
        self.open[reservation.number] = _Open(reservation, self._resets)

    def _completed(self, name: str, reservation: Reservation, kind: TransferKind) -> _Open:
        self.calls += [Call(name, context.life, reservation) for context in dict.fromkeys(reservation.contexts)]
        opened = self.open.pop(reservation.number, None)
        assert opened is not None, f"{name} of {reservation.number}: not open (completed twice?)"
        assert opened.reservation is reservation, f"{name} of {reservation.number}: another object than was handed out"
        assert reservation.kind is kind
        for context in reservation.contexts if opened.resets == self._resets else ():
            assert self.lives[context.life], f"{name} for life {context.life} after on_request_finished"
        return opened

    def _verify(self, reservation: Reservation, who: str) -> None:
        if self.device is None:
            return
        for block_hash, slot in zip(reservation.hashes, reservation.slots.tolist(), strict=True):
            chunk = self.device.memory.chunk(slot)
            self.device.check_chunk(reservation.group, block_hash, chunk, f"{who} {reservation.number} slot {slot}")


@dataclass(slots=True)
class _Entry:
    slot: int
    ready: bool = False
    pins: int = 0


class DictManager(OffloadingManager):
    """The plain twin of a manager with host memory alone: a dictionary, least recently used leaves first.

    ``verdict`` may overrule the answer for a key; ``wants`` declines chunks. ``room`` False: stores find none.
    """

    def __init__(self, slots: int = 1000) -> None:
        self.slots = slots
        self.table: dict[tuple[int, bytes], _Entry] = {}
        self.verdict: Callable[[int, bytes], Lookup | None] = lambda group, block_hash: None
        self.room = True
        self.version = 0
        self.valid_until = float("inf")
        self._free = list(range(slots))
        self._numbers = 0
        self._pinned: dict[int, list[_Entry]] = {}

    def on_new_request(self, context: ReqContext) -> None:
        pass

    def on_request_finished(self, context: ReqContext) -> None:
        pass

    def lookup_prefix(self, run: KeyRun, context: ReqContext, *, now: float, since: float) -> PrefixAnswer:
        answers = self.lookup_each(run, context, now=now, since=since)
        ready = next((i for i, answer in enumerate(answers) if answer is not Lookup.HIT), len(answers))
        reach = next((i for i, answer in enumerate(answers) if answer is Lookup.MISS), len(answers))
        return PrefixAnswer(ready, reach, self.valid_until)

    def lookup_each(self, run: KeyRun, context: ReqContext, *, now: float, since: float) -> Sequence[Lookup]:
        return [self._answer(run.group, block_hash) for block_hash in list(run.keys())]

    def _answer(self, group: int, block_hash: bytes) -> Lookup:
        told = self.verdict(group, block_hash)
        if told is not None:
            return told
        entry = self.table.get((group, block_hash))
        if entry is None:
            return Lookup.MISS
        return Lookup.HIT if entry.ready else Lookup.HIT_PENDING

    def want(self, run: KeyRun, context: ReqContext, *, now: float) -> None:
        pass

    def answer_version(self, context: ReqContext) -> tuple[int, int]:
        return self.version, self.version

    def touch(self, run: KeyRun, context: ReqContext, *, now: float) -> None:
        for block_hash in list(run.keys()):
            entry = self.table.pop((run.group, block_hash), None)
            if entry is not None:
                self.table[run.group, block_hash] = entry

    def prepare_load(self, run: KeyRun, context: ReqContext, *, now: float) -> Reservation:
        entries = []
        for block_hash in list(run.keys()):
            entry = self.table.get((run.group, block_hash))
            if entry is None or not entry.ready:
                break
            entry.pins += 1
            entries.append(entry)
        chunks = list(range(run.start, run.start + len(entries)))
        made = self._reserve(TransferKind.LOAD, run, context, chunks, [entry.slot for entry in entries])
        self._pinned[made.number] = entries
        return made

    def prepare_store(self, run: KeyRun, context: ReqContext, *, now: float) -> StorePlan:
        chunks, slots, settled = [], [], run.stop
        for chunk in range(run.start, run.stop):
            key = (run.group, run.hashes[chunk])
            if key in self.table:
                if not self.table[key].ready:
                    settled = min(settled, chunk)
                continue
            slot = self._take()
            if slot is None:
                settled = min(settled, chunk)
                break
            self.table[key] = _Entry(slot)
            chunks.append(chunk)
            slots.append(slot)
        self.version += bool(chunks)
        made = self._reserve(TransferKind.STORE, run, context, chunks, slots) if chunks else None
        return StorePlan(made, settled)

    def _take(self) -> int | None:
        if not self.room:
            return None
        if not self._free:
            victim = next((k for k, entry in self.table.items() if entry.ready and not entry.pins), None)
            if victim is not None:
                self._free.append(self.table.pop(victim).slot)
        return self._free.pop() if self._free else None

    def _reserve(
        self, kind: TransferKind, run: KeyRun, context: ReqContext, chunks: list[int], slots: list[int]
    ) -> Reservation:
        self._numbers += 1
        hashes = tuple(run.hashes[chunk] for chunk in chunks)
        where = np.array(chunks, dtype=np.int64), np.array(slots, dtype=np.int64)
        return Reservation(self._numbers, kind, (context,), run.group, hashes, *where)

    def complete_load(self, reservation: Reservation, *, now: float) -> None:
        for block_hash, entry in zip(reservation.hashes, self._pinned.pop(reservation.number), strict=True):
            entry.pins -= 1
            if not entry.pins and self.table.get((reservation.group, block_hash)) is not entry:
                self._free.append(entry.slot)

    def complete_store(self, reservation: Reservation, success: bool, *, now: float, released: bool = True) -> None:
        self.version += 1
        for block_hash, slot in zip(reservation.hashes, reservation.slots.tolist(), strict=True):
            key = reservation.group, block_hash
            entry = self.table.get(key)
            current = entry is not None and entry.slot == slot
            if entry is not None and current and success:
                entry.ready = True
                continue
            if current:
                del self.table[key]
            if released:
                self._free.append(slot)

    def release(self, reservation: Reservation) -> None:
        self._free += reservation.slots.tolist()

    def on_schedule_end(self, *, now: float) -> None:
        pass

    def reset_cache(self, generation: bytes, *, now: float) -> None:
        self.version += 1
        for key, entry in list(self.table.items()):
            if entry.ready and not entry.pins:
                self._free.append(entry.slot)
            del self.table[key]

    def shutdown(self, *, now: float, deadline_s: float) -> None:
        pass
