"""The books of a lane: which cell holds which chunk, which are free, who leaves when none is.

In: shapes of segments, names of keys, what is being read or written. Out: places to write to, places to read from,
extents that leave. Never: a file, a lock, a clock, a thread; the store calls it under its own lock.

::

    segment   cells of one size; numbered within the lane
    extent    neighbouring cells that are filled in order and evicted together; numbered across the lane

              allocate               last cell given out, or closed          take_victim           release
      FREE ------------> OPEN --------------------------------> CLOSED -----------------> LEAVING --------> FREE
                                                                  | the policy may choose it while nobody
                                                                  | has it pinned

A chunk that is removed leaves a hole, which is filled when its extent comes round again; an extent with nothing but
holes is free at once. So the free space of a slab always comes in whole extents, however random its removals were.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orlop.core import PAGE_BYTES, Int64Array, align_up
from orlop.errors import InvariantError
from orlop.host.policies.base import EvictionPolicy
from orlop.stores.disk.format import PLACE_BITS, SegmentShape
from orlop.tiering.key_index import NOTHING, KeyIndex, UInt64Array

CELL_MASK = (1 << PLACE_BITS) - 1
EXTENT_BYTES = 4 << 20
LEAST_EXTENTS = 16
SMALL_SEGMENT_BYTES = 4 << 20
MakePolicy = Callable[[int], EvictionPolicy]


NONE, FREE, OPEN, CLOSED, LEAVING = range(5)
"""States of an extent. NONE: a number that no segment has. No enumeration: they are looked at for every chunk."""


def shape_for(number: int, cell_bytes: int, most_bytes: int) -> SegmentShape | None:
    """The largest segment of so large cells whose two files are ``most_bytes`` at most; None where there is none."""
    cells = max(0, most_bytes - 2 * PAGE_BYTES) // (cell_bytes + 128)
    while cells > 0:
        extent_cells = max(1, min(EXTENT_BYTES // cell_bytes, cells // LEAST_EXTENTS))
        shape = SegmentShape(number, cell_bytes, cells - cells % extent_cells, extent_cells)
        if shape.nbytes <= most_bytes:
            return shape
        cells -= max(1, -(-(shape.nbytes - most_bytes) // cell_bytes))
    return None


def segment_bytes(bound: int) -> int:
    """What a segment takes of a bound: a sixty-fourth, of a small bound up to an eighth."""
    return max(bound // 64, min(bound // 8, SMALL_SEGMENT_BYTES))


@dataclass(eq=False, slots=True)
class Segment:
    """One segment's chunks, by cell. A name of 0 is an empty cell. ``first``: the number of its first extent."""

    shape: SegmentShape
    first: int
    names: UInt64Array
    header_checksums: UInt64Array
    slack: npt.NDArray[np.uint16]
    """Bytes of each cell that its chunk does not fill."""
    used: npt.NDArray[np.int32]
    """Chunks per extent."""
    recency_changed: bool = False

    def cells_of(self, extent: int) -> slice:
        start = (extent - self.first) * self.shape.extent_cells
        return slice(start, start + self.shape.extent_cells)


@dataclass(frozen=True, slots=True)
class Victim:
    """An extent that leaves, and the names it held."""

    segment: Segment
    extent: int
    names: list[int]


class Run(NamedTuple):
    """Neighbouring cells of one segment, and which chunks of a call lie, or shall lie, in them: one after the other."""

    segment: Segment
    cell: int
    members: Sequence[int]

    @property
    def cells(self) -> slice:
        return slice(self.cell, self.cell + len(self.members))

    @property
    def extents(self) -> range:
        """Those that the cells lie in."""
        size, first = self.segment.shape.extent_cells, self.segment.first
        return range(first + self.cell // size, first + (self.cell + len(self.members) - 1) // size + 1)


class Chunk(NamedTuple):
    """Where a chunk lies."""

    place: int
    segment: Segment
    cell: int
    extent: int

    @property
    def nbytes(self) -> int:
        return self.segment.shape.cell_bytes - int(self.segment.slack[self.cell])


@dataclass(slots=True)
class Found:
    """What recovery knows of one segment: one entry per chunk, and the last use of each extent, microseconds."""

    cells: npt.NDArray[np.int64]
    names: UInt64Array
    header_checksums: UInt64Array
    slack: npt.NDArray[np.uint16]
    sequences: UInt64Array
    last_use_us: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))


class Slab:
    """The books. ``make_policy(slots)`` builds the policy that ranks extents."""

    def __init__(self, make_policy: MakePolicy) -> None:
        self.segments: dict[int, Segment] = {}
        self.index = KeyIndex()
        self.nbytes = 0
        """Of all segments, both files of each."""
        self.last_us = 0
        """The newest time that was given out."""
        self._make_policy = make_policy
        self._policy = make_policy(1)
        self._state = np.zeros(1, np.uint8)
        self._pins = np.zeros(1, np.int32)
        self._owner = np.full(1, -1, np.int64)
        self._last_use_us = np.zeros(1, np.int64)
        self._offered = 0
        self._chunks = 0
        self._free: dict[int, list[int]] = {}
        """Per size of cell a heap of extents that were free when they were put there."""
        self._open: dict[int, tuple[int, int]] = {}
        """Per size of cell the extent that is being filled, and how many of its cells are given out."""

    # --- segments -----------------------------------------------------------------------------------------

    def add(self, shape: SegmentShape, found: Found | None = None) -> Segment:
        """A new segment, or one that was found; the chunks of a found one are put in by ``settle``."""
        first = self._numbers(shape.extents)
        n = shape.cells
        segment = Segment(
            shape,
            first,
            np.zeros(n, np.uint64),
            np.zeros(n, np.uint64),
            np.zeros(n, np.uint16),
            np.zeros(shape.extents, np.int32),
        )
        self.segments[shape.number] = segment
        self.nbytes += shape.nbytes
        extents = slice(first, first + shape.extents)
        self._owner[extents] = shape.number
        self._last_use_us[extents] = found.last_use_us if found is not None else 0
        self._state[extents] = FREE
        if found is None:
            self._free.setdefault(shape.cell_bytes, []).extend(range(first, first + shape.extents))
            heapq.heapify(self._free[shape.cell_bytes])
        return segment

    def settle(self, found: Sequence[tuple[Segment, Found]]) -> list[int]:
        """Put in what recovery found, each key once: its highest sequence number. The places of the others."""
        names = np.concatenate([f.names for _, f in found]) if found else np.empty(0, np.uint64)
        places = [s.shape.place(0) + f.cells for s, f in found]
        all_places = np.concatenate(places) if places else np.empty(0, np.int64)
        sequences = np.concatenate([f.sequences for _, f in found]) if found else np.empty(0, np.uint64)
        order = np.lexsort((sequences, names))
        last = np.ones(len(order), np.bool_)
        last[:-1] = names[order][1:] != names[order][:-1]
        kept = np.zeros(len(order), np.bool_)
        kept[order[last]] = True
        start = 0
        for segment, f in found:
            mine = kept[start : start + len(f.cells)]
            start += len(f.cells)
            cells = f.cells[mine]
            segment.names[cells] = f.names[mine]
            segment.header_checksums[cells] = f.header_checksums[mine]
            segment.slack[cells] = f.slack[mine]
            segment.used += np.bincount(cells // segment.shape.extent_cells, minlength=len(segment.used)).astype(
                np.int32
            )
            self._chunks += len(cells)
            extents = segment.first + np.flatnonzero(segment.used)
            self._state[extents] = CLOSED
            free = segment.first + np.flatnonzero(segment.used == 0)
            heap = self._free.setdefault(segment.shape.cell_bytes, [])
            heap.extend(free.tolist())
            heapq.heapify(heap)
        self.index.load(names[kept], all_places[kept])
        self._rebuild_policy(len(self._state))
        used = self._last_use_us[self._state == CLOSED]
        self.last_us = max(self.last_us, int(used.max()) if len(used) else 0)
        doubles: list[int] = all_places[~kept].tolist()
        return doubles

    def can_remove(self, segment: Segment) -> bool:
        """Whether nobody reads or writes any of it."""
        return not self._pins[segment.first : segment.first + segment.shape.extents].any()

    def remove(self, segment: Segment) -> list[int]:
        """Forget a segment that ``can_remove``; the names it held."""
        extents = np.arange(segment.first, segment.first + segment.shape.extents)
        for extent in extents.tolist():
            if self._state[extent] in (OPEN, CLOSED):
                self._leave_policy(extent)
        gone = self._drop(segment, slice(0, segment.shape.cells))
        size = segment.shape.cell_bytes
        self._state[extents] = NONE
        self._owner[extents] = -1
        self._free[size] = [e for e in self._free.get(size, []) if self._owner[e] >= 0]
        heapq.heapify(self._free[size])
        if size in self._open and self._owner[self._open[size][0]] < 0:
            del self._open[size]
        del self.segments[segment.shape.number]
        self.nbytes -= segment.shape.nbytes
        return gone

    def newest_number(self) -> int:
        return max(self.segments, default=-1)

    def oldest_segment(self) -> Segment | None:
        """Of those that can be removed, the one whose last use is longest ago."""
        segments = [s for s in self.segments.values() if self.can_remove(s)]
        return min(segments, key=self._segment_last_use, default=None)

    def _segment_last_use(self, segment: Segment) -> int:
        return int(self._last_use_us[segment.first : segment.first + segment.shape.extents].max())

    def oldest_use_us(self) -> int:
        """The last use of the extent in use that was used longest ago; now, where there is none."""
        used = self._last_use_us[(self._state == OPEN) | (self._state == CLOSED)]
        return int(used.min()) if len(used) else self.last_us

    # --- chunks -------------------------------------------------------------------------------------------

    def find(self, names: Sequence[int]) -> list[Chunk | None]:
        return [None if place == NOTHING else self.at(place) for place in self.index.get(names)]

    def find_runs(self, names: Sequence[int]) -> list[Run]:
        """Where those lie that are there, in the order of their places; members are indexes of ``names``."""
        found = np.array(self.index.get(names), np.int64)
        order = np.argsort(found, kind="stable")[np.count_nonzero(found == NOTHING) :]
        if not len(order):
            return []
        places = found[order]
        starts = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist()]
        members = order.tolist()
        return [
            Run(self.segments[place >> PLACE_BITS], place & CELL_MASK, members[start:stop])
            for start, stop, place in zip(starts, [*starts[1:], len(members)], places[starts].tolist(), strict=True)
        ]

    def at(self, place: int) -> Chunk:
        segment = self.segments[place >> PLACE_BITS]
        cell = place & CELL_MASK
        return Chunk(place, segment, cell, segment.first + cell // segment.shape.extent_cells)

    def allocate(self, cell_bytes: int, names: Sequence[int], now_us: int) -> list[Run]:
        """Cells for as many of ``names`` as there is room for without an eviction, side by side where possible.

        Members are indexes of ``names``, from 0 on. The extents of each run are pinned; ``publish`` or nothing, then
        ``unpin``.
        """
        runs: list[Run] = []
        given = 0
        while given < len(names):
            opened = self._open.get(cell_bytes) or self._open_extent(cell_bytes, names[given], now_us)
            if opened is None:
                break
            extent, filled = opened
            segment = self.segments[int(self._owner[extent])]
            size = segment.shape.extent_cells
            take = min(size - filled, len(names) - given)
            run = Run(segment, segment.cells_of(extent).start + filled, range(given, given + take))
            if runs and runs[-1].segment is segment and runs[-1].cells.stop == run.cell:
                last = runs.pop()
                run = Run(segment, last.cell, range(last.members[0], given + take))
            runs.append(run)
            self._pins[extent] += 1
            self._open[cell_bytes] = (extent, filled + take)
            if filled + take == size:
                self._close(cell_bytes)
            given += take
        return runs

    def publish(
        self, run: Run, names: Sequence[int], header_checksums: Sequence[int], slack: int | Sequence[int]
    ) -> list[Chunk]:
        """A run is readable: what its cells hold, one after the other. Where those keys lay before, pinned once."""
        segment, cells = run.segment, run.cells
        segment.names[cells] = names
        segment.header_checksums[cells] = header_checksums
        segment.slack[cells] = slack
        size = segment.shape.extent_cells
        for i in range(cells.start // size, (cells.stop - 1) // size + 1):
            segment.used[i] += min(cells.stop, (i + 1) * size) - max(cells.start, i * size)
        self._chunks += len(names)
        start = segment.shape.place(cells.start)
        places = range(start, start + len(names))
        known = self.index.get(names)
        if max(known) == NOTHING and len(set(names)) == len(names):
            self.index.set_all(names, places)
            return []
        return self._replace(names, known, places)

    def _replace(self, names: Sequence[int], known: Sequence[int], places: Sequence[int]) -> list[Chunk]:
        """Put names into the index of which some are there, or are the same; where those lay, pinned once."""
        before = []
        given: dict[int, int] = {}
        for name, was, place in zip(names, known, places, strict=True):
            was = given.get(name, was)
            if was != NOTHING:
                before.append(self.at(was))
                self.pin([before[-1].extent])
                self._clear_cell(before[-1])
            self.index.set(name, place)
            given[name] = place
        return before

    def forget(self, chunk: Chunk, name: int) -> bool:
        """The chunk is gone; False where the key lies elsewhere by now. Its extent must be pinned."""
        if self.index.get([name])[0] != chunk.place:
            return False
        self.index.set(name, NOTHING)
        self._clear_cell(chunk)
        return True

    def pin(self, extents: Sequence[int]) -> None:
        """Nothing of these leaves until ``unpin``; one that comes twice is pinned twice."""
        for extent in extents:
            self._pins[extent] += 1
            if self._pins[extent] == 1 and self._state[extent] == CLOSED:
                self._policy.withdraw([extent])
                self._offered -= 1

    def unpin(self, extents: Sequence[int]) -> None:
        for extent in extents:
            self._pins[extent] -= 1
            if self._pins[extent] == 0 and self._state[extent] == CLOSED:
                self._offer(extent)

    def touch(self, extents: Sequence[int], now_us: int) -> None:
        """Of use now, the first of them last: it begins the prefix that the others extend."""
        distinct = list(dict.fromkeys(extents))
        if not distinct:
            return
        self._policy.touch(np.array(distinct, np.int64))
        newest = self.next_us(now_us, len(distinct))
        for i, extent in enumerate(distinct):
            self._last_use_us[extent] = newest - i
            self.segments[int(self._owner[extent])].recency_changed = True

    def next_us(self, now_us: int, count: int = 1) -> int:
        """The last of ``count`` times, each larger than any before."""
        self.last_us = max(self.last_us + count, now_us)
        return self.last_us

    # --- eviction -----------------------------------------------------------------------------------------

    def take_victim(self) -> Victim | None:
        """Choose an extent and forget its chunks; it is free after ``release``. None where all are in use."""
        if not self._offered:
            self._close_all()
        if not self._offered:
            return None
        extent = self._policy.pop()
        self._offered -= 1
        self._state[extent] = LEAVING
        segment = self.segments[int(self._owner[extent])]
        return Victim(segment, extent, self._drop(segment, segment.cells_of(extent)))

    def release(self, victim: Victim) -> None:
        """Nothing on disk names the victim's chunks any more."""
        self._free_extent(victim.extent)

    def recency(self, segment: Segment) -> bytes:
        """The last use of each of its extents, as it lies on disk."""
        extents = slice(segment.first, segment.first + segment.shape.extents)
        return self._last_use_us[extents].astype("<u8").tobytes()

    def last_use_us(self, chunk: Chunk) -> int:
        return int(self._last_use_us[chunk.extent])

    def chunks(self) -> int:
        return self._chunks

    def free_cells(self, cell_bytes: int) -> int:
        """Cells that can be given out without an eviction."""
        free = sum(
            int((self._state[s.first : s.first + s.shape.extents] == FREE).sum()) * s.shape.extent_cells
            for s in self.segments.values()
            if s.shape.cell_bytes == cell_bytes
        )
        if cell_bytes in self._open:
            extent, filled = self._open[cell_bytes]
            free += self.segments[int(self._owner[extent])].shape.extent_cells - filled
        return free

    def check(self, idle: bool = True) -> None:
        """Recount from nothing. ``idle``: nobody reads or writes."""
        names, places = self.index.items()
        held = {int(n): s.shape.place(int(c)) for s in self.segments.values() for c, n in _filled(s)}
        if held != dict(zip(names.tolist(), places.tolist(), strict=True)):
            raise InvariantError(f"found {len(names)} keys in the index, expected the {len(held)} of the cells")
        if self._chunks != len(held):
            raise InvariantError(f"found {self._chunks} chunks in the books, expected the {len(held)} of the cells")
        offered = set(self._policy.candidates())
        expected = set(np.flatnonzero((self._state == CLOSED) & (self._pins == 0)).tolist())
        if offered != expected or self._offered != len(expected):
            raise InvariantError(f"offered extents differ: {sorted(offered ^ expected)}; count {self._offered}")
        for segment in self.segments.values():
            used = np.add.reduceat(segment.names != 0, np.arange(0, segment.shape.cells, segment.shape.extent_cells))
            if (used != segment.used).any():
                raise InvariantError(f"segment {segment.shape.number}: chunks per extent do not add up")
            states = self._state[segment.first : segment.first + segment.shape.extents]
            if (used[states == FREE] != 0).any() or (states == NONE).any():
                raise InvariantError(f"segment {segment.shape.number}: a free extent holds a chunk")
            free = {e for e in self._free[segment.shape.cell_bytes] if self._state[e] == FREE}
            if not set((segment.first + np.flatnonzero(states == FREE)).tolist()) <= free:
                raise InvariantError(f"segment {segment.shape.number}: a free extent is lost")
        if idle and (self._pins.any() or (self._state == LEAVING).any()):
            raise InvariantError("something is pinned, or leaving, and nobody is there")

    # --- extents ------------------------------------------------------------------------------------------

    def _open_extent(self, cell_bytes: int, name: int, now_us: int) -> tuple[int, int] | None:
        heap = self._free.get(cell_bytes, [])
        while heap:
            extent = heapq.heappop(heap)
            if self._state[extent] != FREE or self.segments[int(self._owner[extent])].shape.cell_bytes != cell_bytes:
                continue
            self._state[extent] = OPEN
            self._policy.insert(0, [name.to_bytes(8, "little")], np.array([extent], np.int64))
            self._last_use_us[extent] = self.next_us(now_us)
            self._open[cell_bytes] = (extent, 0)
            return extent, 0
        return None

    def _close(self, cell_bytes: int) -> None:
        extent, _ = self._open.pop(cell_bytes)
        self._state[extent] = CLOSED
        if not self._pins[extent]:
            self._offer(extent)

    def _close_all(self) -> None:
        """Extents that are not full leave too, where nothing else can."""
        for cell_bytes, (extent, _) in list(self._open.items()):
            if not self._pins[extent]:
                self._close(cell_bytes)

    def _offer(self, extent: int) -> None:
        """A closed extent that nobody uses: free at once where it holds nothing."""
        segment = self.segments[int(self._owner[extent])]
        if segment.used[extent - segment.first]:
            self._policy.offer([extent])
            self._offered += 1
        else:
            self._policy.forget(np.array([extent], np.int64))
            self._free_extent(extent)

    def _leave_policy(self, extent: int) -> None:
        if self._state[extent] == CLOSED and not self._pins[extent]:
            self._offered -= 1
        self._policy.forget(np.array([extent], np.int64))

    def _free_extent(self, extent: int) -> None:
        self._state[extent] = FREE
        heapq.heappush(self._free.setdefault(self._cell_bytes(extent), []), extent)

    def _cell_bytes(self, extent: int) -> int:
        return self.segments[int(self._owner[extent])].shape.cell_bytes

    def _clear_cell(self, chunk: Chunk) -> None:
        self._chunks -= 1
        chunk.segment.names[chunk.cell] = 0
        chunk.segment.used[chunk.extent - chunk.segment.first] -= 1

    def _drop(self, segment: Segment, cells: slice) -> list[int]:
        """Forget the chunks of some cells; their names."""
        names = segment.names[cells]
        gone: list[int] = names[names != 0].tolist()
        self._chunks -= len(gone)
        self.index.set_all(gone, [NOTHING] * len(gone))
        segment.names[cells] = 0
        size = segment.shape.extent_cells
        segment.used[cells.start // size : cells.stop // size] = 0
        return gone

    def _numbers(self, count: int) -> int:
        """The first of ``count`` extent numbers in a row that nobody has."""
        start = 0
        for segment in sorted(self.segments.values(), key=lambda s: s.first):
            if segment.first - start >= count:
                break
            start = segment.first + segment.shape.extents
        if start + count > len(self._state):
            self._enlarge(max(start + count, 2 * len(self._state)))
        return start

    def _enlarge(self, size: int) -> None:
        more = size - len(self._state)
        self._state = np.concatenate([self._state, np.zeros(more, np.uint8)])
        self._pins = np.concatenate([self._pins, np.zeros(more, np.int32)])
        self._owner = np.concatenate([self._owner, np.full(more, -1, np.int64)])
        self._last_use_us = np.concatenate([self._last_use_us, np.zeros(more, np.int64)])
        self._rebuild_policy(size)

    def _rebuild_policy(self, size: int) -> None:
        """A policy has a fixed number of slots: build a larger one and tell it all in the order of last use."""
        self._policy = self._make_policy(size)
        known = np.flatnonzero((self._state == OPEN) | (self._state == CLOSED))
        known = known[np.argsort(-self._last_use_us[known], kind="stable")].astype(np.int64)
        hashes = [self._hash_of(extent) for extent in known.tolist()]
        self._policy.insert(0, hashes, known)
        offered = known[(self._state[known] == CLOSED) & (self._pins[known] == 0)].tolist()
        self._policy.offer(offered)
        self._offered = len(offered)

    def _hash_of(self, extent: int) -> bytes:
        segment = self.segments[int(self._owner[extent])]
        return int(segment.names[segment.cells_of(extent).start]).to_bytes(8, "little")


def _filled(segment: Segment) -> Iterator[tuple[int, int]]:
    cells = np.flatnonzero(segment.names)
    return zip(cells.tolist(), segment.names[cells].tolist(), strict=True)


def cell_bytes_for(nbytes: int) -> int:
    """The size of cell for a chunk of so many bytes."""
    return max(PAGE_BYTES, align_up(nbytes))
