"""Slots in one line, the oldest first, each with a mark by which it is found.

In: slots and marks. Out: the order, and the first slot with a mark. Never: a meaning of a mark, a decision who leaves.

New ones are put at the end; who is taken out leaves a hole. A place is a byte of a ``bytearray``, so looking for the
first of a mark is one search through memory, over a hundred thousand places in some microseconds, and it never begins
before the place where the last one ended: so slots that may not leave cost nothing. When the end is reached the holes
are closed, once in as many additions as there are slots, in one pass over arrays (about a millisecond for 100,000).
"""

from __future__ import annotations

import numpy as np

from orlop.core import Int64Array
from orlop.host.columns import UInt8Array, bytes_of, numbers_of

MARKS = 8
"""Marks are numbers below it; 0 is the one that holes have too."""
SPARE = 1024

_NONE: Int64Array = np.empty(0, np.int64)


class Line:
    """A line for slots ``0 .. slots - 1``. ``hand`` is a place of the user's, carried along when holes are closed."""

    def __init__(self, slots: int) -> None:
        self.hand = 0
        self.end = 0
        self._length = 2 * slots + SPARE
        self.marks, self.mark_at = bytes_of(self._length)
        self.slot_at, self._slots = numbers_of(self._length, -1)
        self.place_of, self.places = numbers_of(slots)
        """Of a slot that was taken out: the hole that it left, until something is added."""
        self._low = [0] * MARKS
        """Per mark a place before which nothing has it."""

    def add(self, slots: Int64Array, marks: UInt8Array | None = None) -> None:
        """Put slots that are not in the line at its end, the first of them last; a mark for each, or 0."""
        end, stop = self.end, self.end + len(slots)
        if stop > self._length:
            self._close_holes()
            end, stop = self.end, self.end + len(slots)
        self.places[slots] = np.arange(stop - 1, end - 1, -1)
        self._slots[end:stop] = slots[::-1]
        if marks is not None:
            self.mark_at[end:stop] = marks[::-1]
        self.end = stop

    def take(self, slots: Int64Array) -> None:
        """Take slots out."""
        places = self.places[slots]
        self._slots[places] = -1
        self.mark_at[places] = 0

    def take_at(self, place: int) -> int:
        """Take out and return the slot at a place; ``put`` may fill the hole before anything is added."""
        slot = self.slot_at[place]
        self.slot_at[place] = -1
        self.marks[place] = 0
        return slot

    def put(self, slot: int, hole: int, mark: int) -> None:
        """Move a slot of the line to a hole."""
        self.take_at(self.place_of[slot])
        self.place_of[slot] = hole
        self.slot_at[hole] = slot
        self.mark(slot, mark)

    def mark(self, slot: int, mark: int) -> None:
        place = self.place_of[slot]
        self.marks[place] = mark
        if place < self._low[mark]:
            self._low[mark] = place

    def mark_all(self, slots: Int64Array, marks: UInt8Array) -> None:
        """A mark for each of some slots, at least one."""
        places = self.places[slots]
        self.mark_at[places] = marks
        lowest = int(places.min())
        for mark in set(marks.tobytes()):
            self._low[mark] = min(self._low[mark], lowest)

    def first(self, mark: int) -> int:
        """The place of the oldest slot with a mark above 0; -1 where there is none."""
        place = self.marks.find(mark, self._low[mark], self.end)
        self._low[mark] = place if place >= 0 else self.end
        return place

    def before(self, place: int, mark: int) -> Int64Array:
        """The slots with a mark before ``place`` (-1: all with it), the newest first, as ``add`` wants them."""
        stop, low = self.end if place < 0 else place, self._low[mark]
        start = self.marks.find(mark, low, stop)
        if start < 0:
            self._low[mark] = max(low, stop)
            return _NONE
        self._low[mark] = start
        found: Int64Array = self._slots[start:stop][self.mark_at[start:stop] == mark][::-1]
        return found

    def slots_with(self, mark: int, start: int = 0, stop: int | None = None) -> Int64Array:
        """The slots with a mark in a stretch of places, the oldest first."""
        stretch = slice(start, self.end if stop is None else stop)
        found: Int64Array = self._slots[stretch][self.mark_at[stretch] == mark]
        return found

    def _close_holes(self) -> None:
        kept = np.flatnonzero(self._slots[: self.end] >= 0)
        slots, marks, count = self._slots[kept], self.mark_at[kept], len(kept)
        self._slots[: self.end] = -1
        self.mark_at[: self.end] = 0
        self._slots[:count] = slots
        self.mark_at[:count] = marks
        self.places[slots] = np.arange(count)
        self.hand = int(np.searchsorted(kept, self.hand))
        self._low = np.searchsorted(kept, self._low).tolist()
        self.end = count
