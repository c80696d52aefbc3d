"""The directory of the slab, for tools beside it: what lies where, whether it is well, what may be removed.

In: a path. Out: chunks with key, size and age, the bytes of one, who has a lane, what is wrong with the index. Never: a
lane taken for longer than one call, a change in a lane that an engine has.

An engine that runs may fill a cell again while a tool reads it. It zeroes the record of a cell before it fills it, and
each record has a number of its own; so what lies between two looks at one and the same record is that chunk, and
anything else is a chunk that has gone.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from orlop.stores.disk import format as fmt
from orlop.stores.disk.device import Device, File
from orlop.stores.disk.format import RECORD, RECORD_BYTES, RECORDS_OFFSET, Flaw, ForeignVersion, SegmentShape
from orlop.stores.disk.lanes import LANE_FILE, directory_lock, hold_idle, is_held, lane_numbers
from orlop.stores.disk.recovery import read_bytes, read_records, recover, segment_numbers, segment_paths
from orlop.tiering.base import StoredChunk
from orlop.tiering.key_index import KeyIndex, key_name


class DiskFolder:
    """The directory ``path`` of a slab. One thread; calls block. ``scan`` first: the others know what it saw."""

    kind = "disk"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = self.root = Path(path)
        self._root = os.path.abspath(path)
        self._device = Device(False, lambda error: None)
        self._places = KeyIndex()
        self._segments: list[tuple[int, SegmentShape]] = []
        self._flaws: list[Flaw] = []
        self._unsynced: set[str] = set()
        """Index files with zeroed records that may not be on the disk yet."""

    @classmethod
    def lies_in(cls, path: Path) -> bool:
        """Whether ``path`` is the directory of such a store."""
        return any((path / str(number) / LANE_FILE).is_file() for number in lane_numbers(str(path)))

    def scan(self, now: float | None = None) -> Iterator[StoredChunk]:
        """All chunks of all lanes. ``now``: wall-clock seconds; ``nbytes`` are those of the cell."""
        now_us = int((now or time.time()) * 1e6)
        self._segments, self._flaws = [], []
        for lane in lane_numbers(self._root):
            for number in segment_numbers(self._device.names(f"{self._root}/{lane}")):
                with suppress(OSError, EOFError):  # it has gone meanwhile
                    yield from self._scan_segment(lane, number, now_us)

    def flaws(self) -> Counter[str]:
        """What the last ``scan`` left out, by the names of the counters: no chunk to serve."""
        return Counter(f"damaged_{flaw}" for flaw in self._flaws)

    def read(self, key: bytes) -> bytearray:
        """Header and payload of a chunk. ``OSError`` where it has gone or cannot be read."""
        lane, shape, cell = self._find(key)
        cells_path, index_path = segment_paths(f"{self._root}/{lane}", shape.number)
        index, cells = self._device.open(index_path), self._device.open(cells_path)
        before = self._record(index, cell)
        length = int(np.frombuffer(before, RECORD)["length"][0])
        content = bytearray(read_bytes(cells, cell * shape.cell_bytes, length))
        if self._record(index, cell) != before or fmt.key_of(np.frombuffer(before, RECORD)[0]) != key:
            raise FileNotFoundError(errno.ENOENT, "the chunk has gone", str(self.path))
        return content

    def remove(self, key: bytes) -> bool:
        """Whether the chunk was there and is gone now. ``OSError`` where it stays: an engine has its lane."""
        try:
            lane, shape, cell = self._find(key)
        except FileNotFoundError:
            return False
        with directory_lock(self._root), hold_idle(self._root, lane) as held:
            if not held:
                raise OSError(errno.EBUSY, f"an engine has lane {lane}", str(self.path))
            index = self._device.open(segment_paths(f"{self._root}/{lane}", shape.number)[1])
            if fmt.key_of(np.frombuffer(self._record(index, cell), RECORD)[0]) != key:
                return False
            index.write([memoryview(bytes(RECORD_BYTES))], RECORDS_OFFSET + cell * RECORD_BYTES)
            self._unsynced.add(index.path)
        return True

    def settle(self) -> None:
        """What was removed stays removed after a power cut too. ``OSError``."""
        while self._unsynced:
            with suppress(FileNotFoundError):
                self._device.open(self._unsynced.pop()).sync()

    def engines(self) -> int:
        """How many engines have a lane now."""
        with directory_lock(self._root):
            return sum(is_held(self._root, lane) for lane in lane_numbers(self._root))

    def collect(self) -> int:
        """Remove halves of segments, and segments that hold no chunk, from lanes that no engine has; bytes freed.

        ``OSError``: not allowed here; what is left does no harm.
        """
        before = self._device.used_bytes(self._root)
        with directory_lock(self._root):
            for lane in lane_numbers(self._root):
                with hold_idle(self._root, lane) as held:
                    if not held:
                        continue
                    directory = f"{self._root}/{lane}"
                    for segment in recover(self._device, directory, int(time.time() * 1e6)).segments:
                        if not len(segment.found.cells):
                            for path in segment_paths(directory, segment.shape.number):
                                self._device.remove(path)
        return before - self._device.used_bytes(self._root)

    def _scan_segment(self, lane: int, number: int, now_us: int) -> Iterator[StoredChunk]:
        index = self._device.open(segment_paths(f"{self._root}/{lane}", number)[1])
        try:
            shape, _ = fmt.unpack_segment(read_bytes(index, 0, fmt.RECORDS_OFFSET))
        except ForeignVersion:
            return
        if shape is None or shape.number != number:
            self._flaws.append(Flaw.SEGMENT)
            return
        base = len(self._segments) << fmt.PLACE_BITS
        self._segments.append((lane, shape))
        recency = read_bytes(index, shape.recency_offset, 8 * shape.extents)
        last_use = np.frombuffer(recency[: len(recency) // 8 * 8], "<u8")
        for first, records, kept in read_records(index, shape, self._flaws):
            for i in kept.tolist():
                key, extent = fmt.key_of(records[i]), (first + i) // shape.extent_cells
                used_us = int(records[i]["time_us"])
                if extent < len(last_use):
                    used_us = max(used_us, int(last_use[extent]))
                self._places.set(key_name(key), base | (first + i))
                yield StoredChunk(key, shape.cell_bytes, max(0.0, (now_us - used_us) / 1e6))

    def _find(self, key: bytes) -> tuple[int, SegmentShape, int]:
        [place] = self._places.get([key_name(key)])
        if place < 0:
            raise FileNotFoundError(errno.ENOENT, "no such chunk", str(self.path))
        lane, shape = self._segments[place >> fmt.PLACE_BITS]
        return lane, shape, place & ((1 << fmt.PLACE_BITS) - 1)

    def _record(self, index: File, cell: int) -> bytes:
        record = bytes(read_bytes(index, RECORDS_OFFSET + cell * RECORD_BYTES, RECORD_BYTES))
        return record.ljust(RECORD_BYTES, b"\0")
