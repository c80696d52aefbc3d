"""Least recently used leaves first.

In: the calls of ``EvictionPolicy``. Out: the candidate whose chunk was used longest ago. Never: see the contract.

Each use gives a slot a tick, a number that only grows. Candidates wait in a heap of ``tick << 32 | slot``. A use
changes the tick and leaves the heap alone, so that touching a long run is one array assignment: an entry in the
heap is a lower bound of its slot's present key. ``pop`` looks at the lowest entry. If its slot is no candidate the
entry is dropped; if the slot was used since, the entry goes back with the present key; otherwise it is the least
recently used candidate, because every other one's key is at least its entry, and that is higher.

A slot has one entry at most, also after it was withdrawn, reused and offered again: ticks only grow, so an old entry
is still a lower bound. The heap therefore never exceeds the number of slots, and each stale entry is met once per
use that made it stale. If one ``pop`` meets many (a sixteenth of the heap), all keys are sorted anew in one array
operation, which costs about as much as the repairs so far; a pop stays below 10 ms for 100,000 candidates all of
which were used since the last one.

A parent whose last child has left is often the next victim: where its key is below every entry, it is chosen without
entering the heap, so that peeling a chain from its end costs no walk through the heap.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heappop, heappush, heappushpop

import numpy as np

from orlop.core import Int64Array
from orlop.host.columns import bytes_of, numbers_of
from orlop.host.policies.base import EvictionPolicy

SLOT_BITS = 32
SLOT_MASK = (1 << SLOT_BITS) - 1
FEW_REPAIRS = 64


class LRU(EvictionPolicy):
    """Recency in ticks; a chunk is at least as recent as every chunk that extended it and was evicted."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._tick = 0
        self._tick_of, self._ticks = numbers_of(slots)
        self._offered, self._offers = bytes_of(slots)
        self._queued = bytearray(slots)
        self._heap: list[int] = []

    def insert(self, group: int, hashes: Sequence[bytes], slots: Int64Array) -> None:
        self.touch(slots)

    def touch(self, slots: Int64Array) -> None:
        last = self._tick + len(slots)
        self._ticks[slots] = np.arange(last, self._tick, -1)
        self._tick = last

    def offer(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._offered[slot] = 1
            if self._queued[slot]:
                continue
            self._queued[slot] = 1
            heappush(self._heap, self._tick_of[slot] << SLOT_BITS | slot)

    def withdraw(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._offered[slot] = 0

    def forget(self, slots: Int64Array) -> None:
        self._offers[slots] = 0

    def pop(self) -> int:
        repairs = 0
        entry = heappop(self._heap)
        while True:
            slot = entry & SLOT_MASK
            if not self._offered[slot]:
                self._queued[slot] = 0
                entry = heappop(self._heap)
                continue
            key = self._tick_of[slot] << SLOT_BITS | slot
            if key == entry:
                self._queued[slot] = self._offered[slot] = 0
                return slot
            entry = heappushpop(self._heap, key)
            repairs += 1
            if repairs > FEW_REPAIRS and repairs > len(self._heap) >> 4:
                heappush(self._heap, entry)
                self._sort()
                entry = heappop(self._heap)

    def inherit(self, parent: int, child: int) -> None:
        if self._tick_of[parent] < self._tick_of[child]:
            self._tick_of[parent] = self._tick_of[child]

    def replace(self, parent: int, child: int) -> int:
        tick_of = self._tick_of
        tick = tick_of[child]
        if tick_of[parent] < tick:
            tick_of[parent] = tick
        else:
            tick = tick_of[parent]
        if not self._heap or tick << SLOT_BITS | parent < self._heap[0]:
            return parent
        self.offer((parent,))
        return self.pop()

    def coming(self, n: int) -> Sequence[int]:
        slots = np.flatnonzero(self._offers)
        if len(slots) > n:
            slots = slots[np.argpartition(self._ticks[slots], n)[:n]]
        found: list[int] = slots[np.argsort(self._ticks[slots])].tolist()
        return found

    def candidates(self) -> Collection[int]:
        found: list[int] = np.flatnonzero(self._offers).tolist()
        return found

    def _sort(self) -> None:
        """Every candidate with its present key; a sorted list is a heap."""
        slots = np.flatnonzero(self._offers)
        keys = self._ticks[slots] << SLOT_BITS | slots
        keys.sort()
        self._heap = keys.tolist()
        self._queued[:] = self._offered
