"""S3-FIFO: most chunks are used once, so a tenth of the room is enough to find out which are not.

In: the calls of ``EvictionPolicy``. Out: a candidate of the small queue that was not used again, or the oldest of the
main one that was not used lately. Never: see the contract.

Source: J. Yang, Y. Zhang, Z. Qiu, Y. Yue, K. V. Rashmi, "FIFO Queues are All You Need for Cache Eviction", SOSP 2023.
A new chunk joins the small queue, and the main one at once where it left the small one not long ago. At its old end, a
chunk of the small queue that was used more than once moves to the main one; one of the main queue that was used goes
back to its new end with one use less (three are counted at most); others leave.

What differs: at the old end of the small queue, a chunk that may not leave moves to the main one as well: somebody
holds it, or has stored what extends it, which is a use. In the main queue it keeps its place. A parent whose child left
the main queue goes there, to the child's place; within a queue it takes the child's place if that is newer.

Both queues stand in one line: the mark tells them apart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

import numpy as np

from orlop.core import Int64Array
from orlop.host.columns import UInt8Array, bytes_of, numbers_of
from orlop.host.policies.base import EvictionPolicy
from orlop.host.policies.line import Line
from orlop.host.policies.prints import prints

SMALL_SHARE = 10
MOST_USES = 3
SMALL_LEAVES, SMALL_MOVES, MAIN_LEAVES, MAIN_STAYS = 1, 2, 3, 4
"""What happens to a chunk at the old end. 0: nothing, it may not leave the main queue."""


def _marks() -> UInt8Array:
    """``[main, offered, uses]`` to mark."""
    table = np.full((2, 2, MOST_USES + 1), SMALL_MOVES, np.uint8)
    table[0, 1, :2] = SMALL_LEAVES
    table[1, :, 0] = 0, MAIN_LEAVES
    table[1, :, 1:] = MAIN_STAYS
    return table


_MARKS = _marks()
_MARK_OF = _MARKS.tobytes()


class S3FIFO(EvictionPolicy):
    """Two queues, and what has left the small one."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._line = Line(slots)
        self._main_of, self._mains = bytes_of(slots)
        self._offered, self._offers = bytes_of(slots)
        self._uses_of, self._uses = bytes_of(slots)
        self._print_of, self._prints = numbers_of(slots)
        self._small_most = max(1, slots // SMALL_SHARE)
        self._small = 0
        """Chunks in the small queue."""
        self._main_offered = 0
        """Candidates in the main queue."""
        self._left: OrderedDict[int, None] = OrderedDict()
        self._left_most = slots - self._small_most

    def insert(self, group: int, hashes: Sequence[bytes], slots: Int64Array) -> None:
        numbers = prints(group, hashes)
        self._prints[slots] = numbers
        back = np.fromiter(map(self._left.__contains__, numbers.tolist()), np.uint8, len(slots))
        for number in numbers[back != 0].tolist():
            self._left.pop(number, None)
        self._mains[slots] = back
        self._uses[slots] = 0
        self._small += len(slots) - int(np.count_nonzero(back))
        self._line.add(slots, self._marks_of(slots))

    def touch(self, slots: Int64Array) -> None:
        self._uses[slots] = np.minimum(self._uses[slots] + 1, MOST_USES)
        if slots.size:
            self._line.mark_all(slots, self._marks_of(slots))

    def offer(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._set_offered(slot, 1)

    def withdraw(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._set_offered(slot, 0)

    def forget(self, slots: Int64Array) -> None:
        self._line.take(slots)
        self._main_offered -= int(np.count_nonzero(self._offers[slots] & self._mains[slots]))
        self._small -= len(slots) - int(np.count_nonzero(self._mains[slots]))
        self._offers[slots] = 0

    def pop(self) -> int:
        line = self._line
        if self._small >= self._small_most or not self._main_offered:
            place = line.first(SMALL_LEAVES)
            if place >= 0 or not self._main_offered:
                moving = line.before(place, SMALL_MOVES)
                if moving.size:
                    self._move(moving)
                    place = line.first(SMALL_LEAVES)  # the same slot, though holes may have been closed
            if place >= 0:
                return self._leave_small(place)
        slot = line.take_at(self._oldest_of_main())
        self._offered[slot] = 0
        self._main_offered -= 1
        return slot

    def inherit(self, parent: int, child: int) -> None:
        line, main = self._line, self._main_of[child]
        if self._main_of[parent] < main:
            self._small -= 1
            self._main_of[parent] = 1
        elif self._main_of[parent] > main or line.place_of[parent] > line.place_of[child]:
            return
        line.put(parent, line.place_of[child], self._mark_of(parent))

    def replace(self, parent: int, child: int) -> int:
        place, mains = self._line.place_of[parent], self._main_of[parent] | self._main_of[child]
        follows = place == self._line.place_of[child] + 1 and not mains
        if follows and self._uses_of[parent] < 2 and self._small >= self._small_most:
            return self._leave_small(place)  # stored with the child, which was the first of the small queue
        self.inherit(parent, child)
        self._set_offered(parent, 1)
        return self.pop()

    def coming(self, n: int) -> Sequence[int]:
        marks = (SMALL_LEAVES, MAIN_LEAVES, MAIN_STAYS, SMALL_MOVES)
        if self._small < self._small_most:
            marks = (MAIN_LEAVES, MAIN_STAYS, SMALL_LEAVES, SMALL_MOVES)
        slots = np.concatenate([self._line.slots_with(mark) for mark in marks])
        found: list[int] = slots[self._offers[slots] != 0][:n].tolist()
        return found

    def candidates(self) -> Collection[int]:
        found: list[int] = np.flatnonzero(self._offers).tolist()
        return found

    def _leave_small(self, place: int) -> int:
        slot = self._line.take_at(place)
        self._offered[slot] = 0
        self._small -= 1
        self._left[self._print_of[slot]] = None
        if len(self._left) > self._left_most:
            self._left.popitem(last=False)
        return slot

    def _set_offered(self, slot: int, offered: int) -> None:
        self._offered[slot] = offered
        if self._main_of[slot]:
            self._main_offered += 2 * offered - 1
        self._line.mark(slot, self._mark_of(slot))

    def _mark_of(self, slot: int) -> int:
        return _MARK_OF[self._main_of[slot] << 3 | self._offered[slot] << 2 | self._uses_of[slot]]

    def _marks_of(self, slots: Int64Array) -> UInt8Array:
        marks: UInt8Array = _MARKS[self._mains[slots], self._offers[slots], self._uses[slots]]
        return marks

    def _move(self, slots: Int64Array) -> None:
        """From the old end of the small queue to the new end of the main one."""
        self._line.take(slots)
        self._mains[slots] = 1
        self._uses[slots] = 0
        self._small -= len(slots)
        self._main_offered += int(np.count_nonzero(self._offers[slots]))
        self._line.add(slots, self._marks_of(slots))

    def _oldest_of_main(self) -> int:
        """The place of who leaves the main queue; those before it go to its new end. Only while it has a candidate."""
        line = self._line
        while (place := line.first(MAIN_LEAVES)) < 0:  # a round in which all are used: nobody changes places
            used = line.before(-1, MAIN_STAYS)
            self._uses[used] -= 1
            line.mark_all(used, self._marks_of(used))
        used = line.before(place, MAIN_STAYS)
        if used.size:
            line.take(used)
            self._uses[used] -= 1
            line.add(used, self._marks_of(used))
            place = line.first(MAIN_LEAVES)
        return place
