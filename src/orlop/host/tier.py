"""From key to slot, and who leaves when the host tier is full.

In: runs of keys and slot numbers. Out: slots, and how far a run is readable. Never: the bytes of a chunk, a clock, a
thread, a file, a decision whether a chunk is worth keeping.

One dict per KV group maps the engine's own hash object to the slot of its chunk, readable or being written; so asking
how far a run is readable is one C-level map over one dict, and to publish a chunk no key is looked up. ``slots.py``
keeps the life of each slot, and a policy chooses among those that may leave.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, repeat
from operator import ne

import numpy as np

from orlop.core import Int64Array, KeyRun
from orlop.errors import InvariantError
from orlop.host.columns import numbers_of
from orlop.host.policies.base import EvictionPolicy
from orlop.host.policies.lru import LRU
from orlop.host.slots import READY, RESERVED, RETIRED, Change, Slots, SlotState

__all__ = ["HostTier", "SlotState"]

FIRST_BATCH, LAST_BATCH, GROWTH = 16, 4096, 4
EVICTED_KEPT = 65536
FEW = 64
"""Up to so many slots, one by one is about as fast as in bulk or faster."""

Table = dict[bytes, int]


class HostTier:
    """Chunks in ``slots`` slots, plain integers from 0. Engine's thread only; no call waits.

    ``policy`` None means LRU. ``usable``: only slots below it are handed out until ``grow``; default all.
    Arrays of slots are one-dimensional int64 and name a slot once per call. A call that raises ``InvariantError``
    because of its arguments has changed nothing.

    ``evictions`` grows whenever a READY chunk loses its key, so answers may have become worse; ``arrivals`` whenever
    chunks become READY; ``room`` whenever a slot becomes free or evictable, so that a declined ``reserve`` may
    succeed now.
    """

    def __init__(self, slots: int, policy: EvictionPolicy | None = None, *, usable: int | None = None) -> None:
        self._books = Slots(slots, slots if usable is None else usable)
        self._policy = LRU(slots) if policy is None else policy
        self._slot: defaultdict[int, Table] = defaultdict(dict)
        """By group, the slots of keys that are RESERVED or READY."""
        self._key = [b""] * slots
        """What a RESERVED or READY slot holds; of other slots what they held last."""
        self._group_of, self._group = numbers_of(slots)
        self._evicted: deque[tuple[int, list[bytes]]] = deque()
        self._evicted_kept = 0
        self.evictions = 0
        self.arrivals = 0
        self.room = 0

    @property
    def slots(self) -> int:
        """All slots, pre-faulted or not."""
        return self._books.slots

    @property
    def usable(self) -> int:
        """Slots that are handed out: those below this number."""
        return self._books.usable

    @property
    def free(self) -> int:
        """Slots that can be had without an eviction."""
        return len(self._books.free)

    @property
    def leased(self) -> int:
        """Slots with at least one lease."""
        return self._books.leased

    @property
    def being_read(self) -> int:
        """READY slots with at least one hold: those that a load or a cascade is reading."""
        return self._books.held - self._books.reserved - self._books.retired_held

    def grow(self, usable: int) -> None:
        """Slots below ``usable`` are pre-faulted now. ``ValueError`` if that is fewer than before or more than all."""
        if self._books.grow(usable):
            self.room += 1

    # --- what is there ------------------------------------------------------------------------------

    def ready_prefix(self, run: KeyRun) -> int:
        """How many leading chunks of ``run`` are READY."""
        there, ready = self._slot[run.group].__contains__, 0
        for part in _growing_parts(run):
            if self._books.reserved:
                ready += len(self._ready_lead(part))
            else:  # what is there is READY: the slots, which cost half as much again, need no look
                missing = bytes(map(there, part.keys())).find(0)
                ready += missing if missing >= 0 else len(part)
            if ready < part.stop - run.start:
                break
        return ready

    def ready_slots(self, run: KeyRun) -> Int64Array:
        """The slots of the leading READY chunks, int64; shorter than ``run`` where one is missing."""
        found = []
        for part in _growing_parts(run):
            found.append(self._ready_lead(part))
            if len(found[-1]) < len(part):
                break
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _ready_lead(self, run: KeyRun) -> Int64Array:
        slots = self.slots_of(run)
        gaps = np.flatnonzero(self._books.state[slots] != READY)
        return slots[: gaps[0]] if gaps.size else slots

    def slot_state(self, group: int, block_hash: bytes) -> SlotState | None:
        """RESERVED or READY; None where the key is not there."""
        slot = self._slot[group].get(block_hash)
        return None if slot is None else SlotState(self._books.state_of[slot])

    def states(self, run: KeyRun) -> bytes:
        """One byte per key: 0 absent, 1 RESERVED, 2 READY."""
        return self._books.state[self.slots_of(run)].tobytes()

    def slots_of(self, run: KeyRun) -> Int64Array:
        """Per key its slot, RESERVED or READY, or -1; int64."""
        return np.fromiter(map(self._slot[run.group].get, run.keys(), repeat(-1)), np.int64, len(run))

    def holds_of(self, slots: Int64Array) -> Int64Array:
        """How often each slot is held; int64."""
        holds: Int64Array = self._books.holds[slots]
        return holds

    def counts(self) -> Mapping[SlotState, int]:
        """How many slots are in each state; together all slots, those not pre-faulted yet being FREE."""
        books = self._books
        free = books.slots - books.reserved - books.ready - books.retired
        return {
            SlotState.FREE: free,
            SlotState.RESERVED: books.reserved,
            SlotState.READY: books.ready,
            SlotState.RETIRED: books.retired,
        }

    def coming(self, n: int) -> list[int]:
        """The slots of READY chunks that would leave next, ``n`` at most, about in that order; nothing changes."""
        return self._books.leaving(self._policy.coming(n), n)

    def ready_among(self, slots: Int64Array) -> Int64Array:
        """Those of ``slots`` that are READY."""
        ready: Int64Array = slots[self._books.state[slots] == READY]
        return ready

    def chunks_in(self, slots: Int64Array) -> Iterator[tuple[int, Int64Array, list[bytes]]]:
        """Per group those of ``slots`` that are READY, and the hashes of what they hold."""
        for group, part in self._by_group(self.ready_among(slots)):
            yield group, part, self._keys_of(part.tolist())

    # --- coming in ------------------------------------------------------------------------------------

    def room_for(self, n: int) -> bool:
        """Whether ``n`` slots could be had now, free ones and evictable ones together.

        ``reserve`` may still decline where the only room is the prefix that the new chunks extend.
        """
        need = n - len(self._books.free)
        return need <= 0 or self._books.can_evict(need)

    def reserve(self, run: KeyRun, chunks: Sequence[int]) -> Int64Array | None:
        """Slots for ``chunks``: absolute chunk indexes of ``run``, ascending, none of them there. All or nothing.

        Free slots go first; beyond them exactly as many chunks are evicted as are missing, never one that the
        new chunks extend. The slots, int64 in the order of ``chunks``, are RESERVED with one hold: the
        writer's. None: no room, and nothing has changed. ``InvariantError``: a key is there already.
        """
        if not len(chunks):
            return np.empty(0, np.int64)
        pieces = [run.part(start, stop) for start, stop in _pieces(chunks)]
        keys = pieces[0].keys() if len(pieces) == 1 else list(chain.from_iterable(map(KeyRun.keys, pieces)))
        self._require_absent(run.group, keys)
        outer = [self._resident(run.group, run.hashes[p.start - 1]) if p.start else -1 for p in pieces]
        if not self._make_room(len(keys), [p for p in outer if p >= 0]):
            return None
        taken = self._books.take(len(keys))
        slots = np.array(taken, np.int64)
        self._books.reserve(slots, _parents(slots, pieces, outer))
        self._group[slots] = run.group
        self._note_reserved(run.group, taken, keys)
        self._adopt(pieces)
        return slots

    def reserve_each(self, group: int, keys: Sequence[bytes], extended: Sequence[bytes]) -> list[int] | None:
        """As ``reserve``, for short runs of one group: ``keys[i]`` extends ``extended[i]``, or nothing if empty.

        None also where this would not do: a key is there already or stands twice among them, or extends another of
        them that is not the one before it.
        """
        table, new = self._slot[group], set(keys)
        if len(new) < len(keys) or not table.keys().isdisjoint(new):
            return None
        firsts = [0, *compress(range(1, len(keys)), map(ne, extended[1:], keys))] if keys else []
        outer = [extended[i] for i in firsts]
        if not new.isdisjoint(outer):
            return None
        parents = list(map(table.get, outer, repeat(-1)))
        if not self._make_room(len(keys), [p for p in parents if p >= 0]):
            return None
        taken = self._books.reserve_each(len(keys), firsts, parents)
        _exhaust(map(self._group_of.__setitem__, taken, repeat(group)))
        self._note_reserved(group, taken, keys)
        return taken

    def _note_reserved(self, group: int, slots: list[int], keys: Sequence[bytes]) -> None:
        self._slot[group].update(zip(keys, slots, strict=True))
        _exhaust(map(self._key.__setitem__, slots, keys))

    def publish(self, slots: Int64Array) -> None:
        """RESERVED to READY: readable from now on. Holds stay. Slots that were RETIRED meanwhile stay so."""
        slots = self._without_retired(slots, RESERVED)
        if not slots.size:
            return
        change = self._books.publish(slots)
        for group, part in self._by_group(slots):
            self._note_ready(group, part)
        self._changed(change)

    def publish_and_unhold(self, slots: Int64Array) -> None:
        """``publish``, then ``unhold``: the writer is done."""
        numbers = slots.tolist()
        few = 0 < len(numbers) <= FEW and len(set(map(self._group_of.__getitem__, numbers))) == 1
        change = self._books.publish_and_unhold(numbers) if few else None
        if change is None:
            self.publish(slots)
            self.unhold(slots)
            return
        self._note_ready(self._group_of[numbers[0]], slots)
        self._changed(change)

    def _note_ready(self, group: int, slots: Int64Array) -> None:
        self._policy.insert(group, self._keys_of(slots.tolist()), slots)
        self.arrivals += len(slots)

    def touch(self, run: KeyRun) -> None:
        """The READY chunks of ``run`` were of use; the first ends up as the most recent."""
        present = self.ready_among(self.slots_of(run))
        if present.size:
            self._policy.touch(present)

    def touch_slots(self, slots: Int64Array) -> None:
        """As ``touch``, for slots of READY chunks in the order of their run."""
        if slots.size:
            self._policy.touch(slots)

    # --- holds and leases -------------------------------------------------------------------------------

    def hold(self, slots: Int64Array) -> None:
        """One more job may touch the slots; a held slot is not evicted. ``InvariantError`` for a FREE slot."""
        self._withdraw(self._books.hold(slots))

    def unhold(self, slots: Int64Array) -> None:
        """One job less. A RETIRED slot without holds and leases becomes FREE. ``InvariantError`` below zero."""
        self._changed(self._books.unhold(slots))

    def lease(self, slots: Int64Array) -> None:
        """Like ``hold``, for a request that waits; counted apart."""
        self._withdraw(self._books.lease(slots))

    def unlease(self, slots: Int64Array) -> None:
        """Like ``unhold``, for a lease."""
        self._changed(self._books.unlease(slots))

    # --- going out --------------------------------------------------------------------------------------

    def abandon(self, slots: Int64Array) -> None:
        """Drop the keys of RESERVED or READY slots: RETIRED while held or leased, else FREE. RETIRED ones stay so."""
        self._drop(self._without_retired(slots, RESERVED, READY))

    def discard(self, group: int, hashes: Iterable[bytes]) -> None:
        """Drop these keys where they are there, being written or readable. Holds and leases stay."""
        found = {self._resident(group, h) for h in hashes} - {-1}
        self._drop(np.array(sorted(found), np.int64))

    def clear(self) -> None:
        """Drop every key. Holds and leases stay, and keep their slots RETIRED until they are given back."""
        state = self._books.state
        self._drop(np.flatnonzero((state == RESERVED) | (state == READY)))

    def take_evicted(self) -> list[tuple[int, bytes]]:
        """``(group, hash)`` of READY chunks that lost their key since the last call, in no order;
        the last 65536 of them."""
        evicted = [(group, key) for group, keys in self._evicted for key in keys]
        self._evicted.clear()
        self._evicted_kept = 0
        return evicted

    # --- the recount --------------------------------------------------------------------------------------

    def check(self, holds: Mapping[int, int] | None = None, leases: Mapping[int, int] | None = None) -> None:
        """Recount from nothing; ``InvariantError`` where the books do not add up.

        ``holds`` and ``leases``, slot to count, are what the caller believes to have taken and not given back.
        """
        self._books.check()
        seen: set[int] = set()
        for group, table in self._slot.items():
            for key, slot in table.items():
                if self._key[slot] is not key or self._group[slot] != group or slot in seen:
                    raise InvariantError(f"group {group}: key {key.hex()} and slot {slot} disagree")
                seen.add(slot)
        resident = np.flatnonzero((self._books.state == RESERVED) | (self._books.state == READY))
        _equal("slots that the tables name", sorted(seen), resident.tolist())
        may_leave = np.flatnonzero(self._books.reasons == 0).tolist()
        _equal("the policy's candidates", sorted(self._policy.candidates()), may_leave)
        for word, given, book in (("holds", holds, self._books.holds), ("leases", leases, self._books.leases)):
            if given is not None:
                counted = {int(s): int(book[s]) for s in np.flatnonzero(book)}
                _equal(word, counted, {s: n for s, n in given.items() if n})

    # --- below ----------------------------------------------------------------------------------------------

    def _resident(self, group: int, block_hash: bytes) -> int:
        return self._slot[group].get(block_hash, -1)

    def _require_absent(self, group: int, keys: Sequence[bytes]) -> None:
        table = self._slot[group]
        if not table.keys().isdisjoint(keys):
            there = next(k for k in keys if k in table)
            raise InvariantError(f"group {group}: found key {there.hex()} in the tier, expected only absent keys")

    def _make_room(self, n: int, extended: list[int]) -> bool:
        """Evict until ``n`` slots are free, sparing the slots that will be ``extended`` by the new chunks.

        True: there is room, and the extended slots count their new children. False: nothing has changed.
        """
        self._withdraw(self._books.keep(extended))
        need = n - len(self._books.free)
        if need <= 0:
            return True
        if not self._books.can_evict(need):
            self._offer(self._books.unkeep(extended))
            return False
        self._evict(need)
        return True

    def _evict(self, n: int) -> None:
        """Free ``n`` slots one by one, each parent a candidate as soon as its last child is gone."""
        reasons_of, parent_of, policy = self._books.reasons_of, self._books.parent_of, self._policy
        pop, replace = policy.pop, policy.replace
        victims: list[int] = []
        joined = 0
        slot = joins = -1
        try:
            for _ in range(n):
                slot = pop() if joins < 0 else replace(joins, slot)
                joins = -1
                if reasons_of[slot]:
                    raise InvariantError(f"{type(policy).__name__} chose slot {slot}, which may not leave")
                reasons_of[slot] = 1
                victims.append(slot)
                parent = parent_of[slot]
                if parent >= 0:
                    left = reasons_of[parent] - 1
                    reasons_of[parent] = left
                    if left:
                        if self._books.state[parent] == READY:  # not while it is written once more
                            policy.inherit(parent, slot)
                    else:
                        joined += 1
                        joins = parent
        finally:
            if joins >= 0:
                policy.inherit(joins, slot)
                policy.offer((joins,))
            gone = np.array(victims, np.int64)
            self._books.vacate(gone, joined)
            self._forget_ready(gone)

    def _forget_ready(self, slots: Int64Array) -> None:
        for group, part in self._by_group(slots):
            keys = self._keys_of(part.tolist())
            _remove(self._slot[group], keys)
            self._note_evicted(group, keys)
        self.evictions += len(slots)

    def _note_evicted(self, group: int, keys: list[bytes]) -> None:
        # By the batch, because a tuple for each key would cost more than forgetting it.
        self._evicted.append((group, keys))
        self._evicted_kept += len(keys)
        while self._evicted_kept > EVICTED_KEPT:
            group, oldest = self._evicted.popleft()
            surplus = self._evicted_kept - EVICTED_KEPT
            self._evicted_kept -= len(oldest)
            if surplus < len(oldest):
                self._evicted.appendleft((group, oldest[surplus:]))
                self._evicted_kept += len(oldest) - surplus

    def _drop(self, slots: Int64Array) -> None:
        if not slots.size:
            return
        was_ready = self._books.state[slots] == READY
        ready, reserved = slots[was_ready], slots[~was_ready]
        self._policy.forget(ready)
        self._forget_ready(ready)
        for group, part in self._by_group(reserved):
            _remove(self._slot[group], self._keys_of(part.tolist()))
        self._changed(self._books.drop(slots))

    def _adopt(self, runs: Sequence[KeyRun]) -> None:
        """Chunks that lost the chunk they extend, and now see it come back, are its children again."""
        for run in runs:
            if run.stop >= len(run.hashes):
                continue
            child = self._resident(run.group, run.hashes[run.stop])
            if child >= 0 and self._books.parent_of[child] < 0:
                self._books.adopt(child, self._slot[run.group][run.hashes[run.stop - 1]])

    def _without_retired(self, slots: Int64Array, *expected: int) -> Int64Array:
        state = self._books.state[slots]
        right = state == expected[0]
        for other in expected[1:]:
            right |= state == other
        if np.count_nonzero(right) == len(slots):
            return slots
        wrong = np.flatnonzero(~right & (state != RETIRED))
        if wrong.size:
            raise InvariantError(
                f"found slot {slots[wrong[0]]} {SlotState(state[wrong[0]]).name}, "
                f"expected {' or '.join(SlotState(s).name for s in expected)}"
            )
        kept: Int64Array = slots[right]
        return kept

    def _by_group(self, slots: Int64Array) -> Iterator[tuple[int, Int64Array]]:
        groups = self._group[slots]
        if groups.size and np.count_nonzero(groups != groups[0]) == 0:
            yield int(groups[0]), slots
        else:
            for group in np.unique(groups).tolist():
                yield group, slots[groups == group]

    def _keys_of(self, slots: Sequence[int]) -> list[bytes]:
        return list(map(self._key.__getitem__, slots))

    def _offer(self, slots: Sequence[int]) -> None:
        if slots:
            self._policy.offer(slots)

    def _withdraw(self, slots: Sequence[int]) -> None:
        if slots:
            self._policy.withdraw(slots)

    def _changed(self, change: Change) -> None:
        self._offer(change.joined)
        if change.opened:
            self.room += 1


def _growing_parts(run: KeyRun) -> Iterator[KeyRun]:
    """A run in parts, the first of them small: most of what is asked for is missing early, or not at all."""
    start, size = run.start, FIRST_BATCH
    while start < run.stop:
        stop = min(start + size, run.stop)
        yield run.part(start, stop)
        start, size = stop, min(GROWTH * size, LAST_BATCH)


def _pieces(chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """``start, stop`` of each stretch of neighbouring indexes in an ascending sequence."""
    first, last = int(chunks[0]), int(chunks[-1])
    if last - first + 1 == len(chunks):
        yield first, last + 1
        return
    previous = first
    for chunk in map(int, chunks[1:]):
        if chunk != previous + 1:
            yield first, previous + 1
            first = chunk
        previous = chunk
    yield first, previous + 1


def _parents(slots: Int64Array, runs: Sequence[KeyRun], outer: list[int]) -> Int64Array:
    """Each slot's parent: the one before it in its run, or what the run as a whole extends."""
    parents: Int64Array = np.empty_like(slots)
    parents[1:] = slots[:-1]
    at = 0
    for run, parent in zip(runs, outer, strict=True):
        parents[at] = parent
        at += len(run)
    return parents


def _remove(table: Table, keys: Collection[bytes]) -> None:
    _exhaust(map(table.__delitem__, keys))


def _exhaust(calls: Iterator[object]) -> None:
    """Make calls that are only worth their effect, without Python between two of them."""
    deque(calls, maxlen=0)


def _equal(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise InvariantError(f"the host tier does not add up: {what}: found {found}, expected {expected}")
