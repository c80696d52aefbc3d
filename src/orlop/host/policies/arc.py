"""ARC: chunks used once and chunks used again, and a border between them that what has left moves.

In: the calls of ``EvictionPolicy``. Out: the least recently used candidate of the side that is over its share. Never:
see the contract.

Source: N. Megiddo, D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. T1 has chunks that
were used once since they came, T2 those that were used again, each in the order of use; B1 and B2 remember what left
either. A chunk that comes back from B1 says that T1 was too small, one from B2 that T2 was; it goes to T2.

What differs: room is made before it is known for whom, so the paper's case of a tie (a chunk of B2 comes while T1 has
just its share) is decided like the others. Where a side has nobody who may leave, the other gives. A parent whose child
left takes the child's place if that is the better one, so that what is left of a used chain counts like its end.

Both sides stand in one line: the mark tells them apart, and 0 is who may not leave.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

import numpy as np

from orlop.core import Int64Array
from orlop.host.columns import bytes_of, numbers_of
from orlop.host.policies.base import EvictionPolicy
from orlop.host.policies.line import Line
from orlop.host.policies.prints import prints

T1, T2 = 1, 2


class ARC(EvictionPolicy):
    """``share`` is how many chunks T1 should have, the paper's p."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.share = 0.0
        self._line = Line(slots)
        self._side_of, self._sides = bytes_of(slots)
        self._offered, self._offers = bytes_of(slots)
        self._print_of, self._prints = numbers_of(slots)
        self._count = [0, 0, 0]
        """How many chunks each side has; the first item is nobody's."""
        self._left = tuple(OrderedDict[int, None]() for _ in range(3))
        """B1 and B2, by side."""

    def insert(self, group: int, hashes: Sequence[bytes], slots: Int64Array) -> None:
        numbers = prints(group, hashes)
        self._prints[slots] = numbers
        self._sides[slots] = T1
        self._count[T1] += len(slots)
        known = numbers.tolist()
        if not all(ghosts.keys().isdisjoint(known) for ghosts in self._left):
            back = [slot for slot, number in zip(slots.tolist(), known, strict=True) if self._comes_back(number)]
            self._sides[back] = T2
            self._count[T1] -= len(back)
            self._count[T2] += len(back)
        self._line.add(slots)
        self._trim()

    def touch(self, slots: Int64Array) -> None:
        once = len(slots) - int(np.count_nonzero(self._sides[slots] == T2))
        self._count[T1] -= once
        self._count[T2] += once
        self._sides[slots] = T2
        self._line.take(slots)
        self._line.add(slots, self._offers[slots] * T2)

    def offer(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._offered[slot] = 1
            self._line.mark(slot, self._side_of[slot])

    def withdraw(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._offered[slot] = 0
            self._line.mark(slot, 0)

    def forget(self, slots: Int64Array) -> None:
        self._line.take(slots)
        self._offers[slots] = 0
        again = int(np.count_nonzero(self._sides[slots] == T2))
        self._count[T2] -= again
        self._count[T1] -= len(slots) - again

    def pop(self) -> int:
        line = self._line
        side = T1 if self._count[T1] > self.share else T2
        place = line.first(side)
        if place < 0:
            side = T1 + T2 - side
            place = line.first(side)
        return self._leave(place, side)

    def inherit(self, parent: int, child: int) -> None:
        side, line = self._side_of[child], self._line
        if self._side_of[parent] < side:
            self._side_of[parent] = side
            self._count[T1] -= 1
            self._count[T2] += 1
        elif self._side_of[parent] > side or line.place_of[parent] > line.place_of[child]:
            return
        line.put(parent, line.place_of[child], 0)

    def replace(self, parent: int, child: int) -> int:
        place, side = self._line.place_of[parent], self._side_of[parent]
        follows = place == self._line.place_of[child] + 1 and side == self._side_of[child]
        if follows and side == (T1 if self._count[T1] > self.share else T2):
            return self._leave(place, side)  # stored or used with the child, which was the first of its side
        self.inherit(parent, child)
        self._offered[parent] = 1
        self._line.mark(parent, self._side_of[parent])
        return self.pop()

    def coming(self, n: int) -> Sequence[int]:
        sides = (T1, T2) if self._count[T1] > self.share else (T2, T1)
        found: list[int] = np.concatenate([self._line.slots_with(side) for side in sides])[:n].tolist()
        return found

    def candidates(self) -> Collection[int]:
        return self.coming(self.slots)

    def _leave(self, place: int, side: int) -> int:
        slot = self._line.take_at(place)
        self._offered[slot] = 0
        self._count[side] -= 1
        self._left[side][self._print_of[slot]] = None
        return slot

    def _comes_back(self, number: int) -> bool:
        """Move the border for a chunk that was here before; False for one that is new, or forgotten."""
        _, once, again = self._left
        if number in once:
            self.share = min(self.slots, self.share + max(1.0, len(again) / len(once)))
            del once[number]
            return True
        if number in again:
            self.share = max(0.0, self.share - max(1.0, len(once) / len(again)))
            del again[number]
            return True
        return False

    def _trim(self) -> None:
        """T1 and B1 have as many as there are slots at most, all four twice as many. Who leaves changes neither sum."""
        _, once, again = self._left
        _, recent, frequent = self._count
        while len(once) > self.slots - recent:
            once.popitem(last=False)
        while len(again) > 2 * self.slots - recent - frequent - len(once):
            again.popitem(last=False)
