"""SIEVE: a hand goes from the oldest to the newest and takes whom nobody has used since it last came by.

In: the calls of ``EvictionPolicy``. Out: the next candidate that was not used. Never: see the contract.

Source: Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson, K. V. Rashmi, "SIEVE is Simpler than LRU: an Efficient Turn-Key
Eviction Algorithm for Web Caches", NSDI 2024. A use sets a bit and moves nothing; new ones come in at the new end; the
hand stays where it took the last one, so what it has spared is not looked at again before it has gone round.

What differs: the hand clears the bit of whom it passes also where that one may not leave, so that held chunks age like
others. A parent whose child was taken stands in the child's place if that is newer, at the hand: a chain that nobody
uses is peeled from its end in one go. A parent with a bit of its own is spared for another round.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from orlop.core import Int64Array
from orlop.host.policies.base import EvictionPolicy
from orlop.host.policies.line import Line

CANDIDATE, USED = 1, 2
"""Bits of a mark."""


class Sieve(EvictionPolicy):
    """One line in the order of arrival."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._line = Line(slots)

    def insert(self, group: int, hashes: Sequence[bytes], slots: Int64Array) -> None:
        self._line.add(slots)

    def touch(self, slots: Int64Array) -> None:
        self._line.mark_at[self._line.places[slots]] |= USED

    def offer(self, slots: Sequence[int]) -> None:
        marks, place_of = self._line.marks, self._line.place_of
        for slot in slots:
            marks[place_of[slot]] |= CANDIDATE

    def withdraw(self, slots: Sequence[int]) -> None:
        marks, place_of = self._line.marks, self._line.place_of
        for slot in slots:
            marks[place_of[slot]] &= USED

    def forget(self, slots: Int64Array) -> None:
        self._line.take(slots)

    def pop(self) -> int:
        line = self._line
        place = line.marks.find(CANDIDATE, line.hand, line.end)
        while place < 0:  # twice at most: after a whole round nobody has a bit
            self._pass(line.end)
            line.hand = 0
            place = line.marks.find(CANDIDATE, 0, line.end)
        self._pass(place)
        return line.take_at(place)

    def inherit(self, parent: int, child: int) -> None:
        line = self._line
        hole, place = line.place_of[child], line.place_of[parent]
        if place < hole:
            line.put(parent, hole, line.marks[place])

    def replace(self, parent: int, child: int) -> int:
        line = self._line
        marks, hole, place = line.marks, line.place_of[child], line.place_of[parent]
        if place == hole + 1 and not marks[place] and line.hand == hole:
            line.hand = place  # the chunk that was stored just before: the next one, if it was not used
            return line.take_at(place)
        return super().replace(parent, child)

    def coming(self, n: int) -> Sequence[int]:
        line, marks = self._line, (CANDIDATE, CANDIDATE | USED)
        stretches = ((line.hand, line.end), (0, line.hand))
        slots = [line.slots_with(mark, start, stop) for mark in marks for start, stop in stretches]
        found: list[int] = np.concatenate(slots)[:n].tolist()
        return found

    def candidates(self) -> Collection[int]:
        return self.coming(self.slots)

    def _pass(self, place: int) -> None:
        """The hand goes on to a place, and those between lose their bit."""
        hand = self._line.hand
        if place > hand + 1 or self._line.marks[hand]:
            passed = self._line.mark_at[hand:place]
            np.bitwise_and(passed, CANDIDATE, out=passed)
        self._line.hand = place
