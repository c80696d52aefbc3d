"""Managers for the walk: a plain one of two dicts, and a watch that can be put on any.

In: what an OffloadingManager is called with. Out: reservations, and AssertionErrors where the scheduler half breaks the
contract or a slot is used twice. Never: a tier, a thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mock_worker import MockWorker

from orlop.core import (
    FIRST_GENERATION,
    KeyRun,
    Lookup,
    Namespace,
    PrefixAnswer,
    ReqContext,
    Reservation,
    StorePlan,
    TransferKind,
)
from orlop.host.tier import HostTier
from orlop.tiering.base import OffloadingManager
from orlop.tiering.manager import TieringManager, TieringOptions

Key = tuple[int, bytes]


class PlainManager(OffloadingManager):
    """Host memory as two dicts: readable keys, oldest first, and keys being written. Obvious and slow."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._free = list(range(slots))
        self._ready: OrderedDict[Key, int] = OrderedDict()
        self._writing: dict[Key, int] = {}
        self._pins: dict[int, int] = {}
        self._open: dict[Reservation, int] = {}
        """Reservation -> number of resets when it was given."""
        self._retired: set[Reservation] = set()
        self._resets = 0
        self._came = self._went = 0

    def on_new_request(self, context: ReqContext) -> None:
        pass

    def on_request_finished(self, context: ReqContext) -> None:
        pass

    def lookup_each(self, run: KeyRun, context: ReqContext, *, now: float, since: float) -> Sequence[Lookup]:
        return [Lookup.HIT if (run.group, h) in self._ready else Lookup.MISS for h in run.keys()]

    def lookup_prefix(self, run: KeyRun, context: ReqContext, *, now: float, since: float) -> PrefixAnswer:
        ready = next((i for i, h in enumerate(run.keys()) if (run.group, h) not in self._ready), len(run))
        return PrefixAnswer(ready, ready, float("inf"))

    def want(self, run: KeyRun, context: ReqContext, *, now: float) -> None:
        raise AssertionError("nothing is ever pending here")

    def answer_version(self, context: ReqContext) -> tuple[int, int]:
        return self._came, self._went

    def touch(self, run: KeyRun, context: ReqContext) -> None:
        for block_hash in reversed(run.keys()):
            if (run.group, block_hash) in self._ready:
                self._ready.move_to_end((run.group, block_hash))

    def prepare_load(self, run: KeyRun, context: ReqContext, *, now: float) -> Reservation:
        n = self.lookup_prefix(run, context, now=now, since=now).ready
        part = run.part(run.start, run.start + n)
        self.touch(part, context)
        slots = [self._ready[run.group, h] for h in part.keys()]
        return self._reserve(TransferKind.LOAD, part, list(range(part.start, part.stop)), slots, context)

    def prepare_store(self, run: KeyRun, context: ReqContext, *, now: float) -> StorePlan:
        chunks: list[int] = []
        slots: list[int] = []
        settled = run.stop
        for chunk in range(run.start, run.stop):
            key = (run.group, run.hashes[chunk])
            if key in self._ready:
                continue
            slot = None if key in self._writing else self._take_slot()
            if slot is None:
                settled = chunk
                break
            self._writing[key] = slot
            chunks.append(chunk)
            slots.append(slot)
        if not chunks:
            return StorePlan(None, settled)
        return StorePlan(self._reserve(TransferKind.STORE, run, chunks, slots, context), settled)

    def _take_slot(self) -> int | None:
        if not self._free:
            victim = next((k for k, s in self._ready.items() if not self._pins.get(s)), None)
            if victim is None:
                return None
            self._went += 1
            self._free.append(self._ready.pop(victim))
        return self._free.pop()

    def _reserve(
        self, kind: TransferKind, run: KeyRun, chunks: list[int], slots: list[int], context: ReqContext
    ) -> Reservation:
        for slot in slots:
            self._pins[slot] = self._pins.get(slot, 0) + 1
        hashes = tuple(run.hashes[c] for c in chunks)
        made = Reservation(0, kind, context, run.group, hashes, np.array(chunks, np.int64), np.array(slots, np.int64))
        self._open[made] = self._resets
        return made

    def complete_load(self, reservation: Reservation, *, now: float) -> None:
        self._give_back(reservation)

    def complete_store(self, reservation: Reservation, success: bool, *, now: float, released: bool = True) -> None:
        fresh = self._open[reservation] == self._resets
        for block_hash in reservation.hashes if fresh else ():
            slot = self._writing.pop((reservation.group, block_hash))
            if success:
                self._ready[reservation.group, block_hash] = slot
                self._came += 1
        if released:
            self._give_back(reservation)
        else:
            self._retired.add(reservation)

    def release(self, reservation: Reservation) -> None:
        self._retired.remove(reservation)
        self._give_back(reservation)

    def _give_back(self, reservation: Reservation) -> None:
        del self._open[reservation]
        readable = set(self._ready.values())
        for slot in reservation.slots.tolist():
            self._pins[slot] -= 1
            if not self._pins[slot] and slot not in readable:
                self._free.append(slot)

    def on_schedule_end(self, *, now: float) -> None:
        pass

    def reset_cache(self, generation: bytes, *, now: float) -> None:
        self._resets += 1
        self._went += 1
        self._free += [s for s in self._ready.values() if not self._pins.get(s)]
        self._ready.clear()
        self._writing.clear()

    def get_stats(self) -> Mapping[str, float]:
        return {}

    def shutdown(self, *, now: float, deadline_s: float) -> None:
        pass

    def check(self, open_reservations: Sequence[Reservation]) -> None:
        """Every slot is in one place, and the open reservations are those that the scheduler half has."""
        assert set(open_reservations) == set(self._open), "reservations taken and known differ"
        pinned = {s for r in self._open for s in r.slots.tolist()}
        places = [*self._free, *(set(self._ready.values()) | pinned)]
        assert sorted(places) == list(range(self._slots)), "a slot is lost, or in two places"


class Watch:
    """Mixed in before a manager: tells the mock worker what slots stand for, and the scheduler half off."""

    worker: MockWorker
    lives: set[int]
    ended: set[int]

    def watch(self, worker: MockWorker) -> None:
        self.worker, self.lives, self.ended = worker, set(), set()

    def _must_live(self, context: ReqContext) -> None:
        assert context.life in self.lives, f"life {context.life}: called before on_new_request"
        assert context.life not in self.ended, f"life {context.life}: called after on_request_finished"

    def on_new_request(self, context: ReqContext) -> None:
        assert context.life not in self.lives, f"life {context.life} began twice"
        self.lives.add(context.life)
        super().on_new_request(context)  # type: ignore[misc]

    def on_request_finished(self, context: ReqContext) -> None:
        self._must_live(context)
        self.ended.add(context.life)
        super().on_request_finished(context)  # type: ignore[misc]

    def lookup_prefix(self, run: KeyRun, context: ReqContext, **when: float) -> Any:
        self._must_live(context)
        return super().lookup_prefix(run, context, **when)  # type: ignore[misc]

    def prepare_load(self, run: KeyRun, context: ReqContext, *, now: float) -> Reservation:
        self._must_live(context)
        reservation: Reservation = super().prepare_load(run, context, now=now)  # type: ignore[misc]
        for slot, block_hash in zip(reservation.slots.tolist(), reservation.hashes, strict=True):
            assert self.worker.slot_key[slot] == (run.group, block_hash), f"slot {slot} is not that chunk's"
        return reservation

    def prepare_store(self, run: KeyRun, context: ReqContext, *, now: float) -> StorePlan:
        self._must_live(context)
        plan: StorePlan = super().prepare_store(run, context, now=now)  # type: ignore[misc]
        if plan.reservation is not None:
            in_use = self.worker.slots_in_use()
            for slot, block_hash in zip(plan.reservation.slots.tolist(), plan.reservation.hashes, strict=True):
                assert slot not in in_use, f"slot {slot} is reserved while job {in_use[slot].job_id} may touch it"
                self.worker.slot_key[slot] = (run.group, block_hash)
        return plan


class WatchedPlainManager(Watch, PlainManager):
    """The plain manager under watch."""


class WatchedTieringManager(Watch, TieringManager):
    """The real manager under watch."""


def plain_manager(slots: int) -> WatchedPlainManager:
    return WatchedPlainManager(slots)


def tiering_manager(slots: int) -> WatchedTieringManager:
    """The real manager over a real host tier without secondary tiers, for up to two KV groups."""
    options = TieringOptions(payload_bytes=(4096, 4096))

    def namespace(generation: bytes) -> Namespace:
        return Namespace(generation, generation)

    return WatchedTieringManager(HostTier(slots), [], namespace, FIRST_GENERATION, options)
