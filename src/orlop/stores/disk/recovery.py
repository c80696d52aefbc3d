"""What a lane holds, read from its index files alone.

In: a device, the directory of a lane. Out: its segments with their open files, what is in them, what is wrong with it.
Never: a look into a cell, an end for a damage; what is damaged is counted and left out.

Records are read by the thousand and judged in arrays, so that half a million take less than a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from orlop.core import PAGE_BYTES
from orlop.stores.disk.device import Device, File
from orlop.stores.disk.format import (
    RECORD_BYTES,
    RECORDS_OFFSET,
    Flaw,
    ForeignVersion,
    Records,
    SegmentShape,
    check_records,
    unpack_segment,
)
from orlop.stores.disk.slab import Found

BATCH = 8192
DAY_US = 86_400_000_000
_NAME = re.compile(r"(\d{8,})\.(cells|index)")


@dataclass(slots=True)
class FoundSegment:
    """A segment as it lies on disk."""

    shape: SegmentShape
    cells: File
    index: File
    found: Found


@dataclass(slots=True)
class FoundLane:
    """``next_number``: larger than that of any file there. ``foreign``: numbers of segments of other versions."""

    segments: list[FoundSegment] = field(default_factory=list)
    flaws: list[Flaw] = field(default_factory=list)
    next_number: int = 0
    next_sequence: int = 1
    foreign: list[int] = field(default_factory=list)


def segment_paths(directory: str, number: int) -> tuple[str, str]:
    """The cells file and the index file of a segment."""
    return f"{directory}/{number:08d}.cells", f"{directory}/{number:08d}.index"


def segment_numbers(names: list[str]) -> dict[int, set[str]]:
    """The numbers among the names of a lane's files, and which of the two files each has."""
    numbers: dict[int, set[str]] = {}
    for name in names:
        if match := _NAME.fullmatch(name):
            numbers.setdefault(int(match[1]), set()).add(match[2])
    return numbers


def recover(device: Device, directory: str, now_us: int) -> FoundLane:
    """Read a lane. What is half a segment, or none, is removed. ``OSError``: the directory cannot be read at all."""
    lane = FoundLane()
    for number, files in segment_numbers(device.names(directory)).items():
        lane.next_number = max(lane.next_number, number + 1)
        cells_path, index_path = segment_paths(directory, number)
        segment = None
        if len(files) == 2:
            try:
                segment = _read_segment(device, cells_path, index_path, number, now_us, lane)
            except ForeignVersion:
                lane.foreign.append(number)
                continue
            except OSError:  # cannot be read now: left out, and left there
                lane.flaws.append(Flaw.SEGMENT)
                continue
        if segment is not None:
            lane.segments.append(segment)
            continue
        lane.flaws.append(Flaw.SEGMENT)
        for path in (cells_path, index_path):
            with suppress(OSError):  # a read-only directory keeps it, and it is left out again next time
                device.remove(path)
    for segment in lane.segments:
        if len(segment.found.sequences):
            lane.next_sequence = max(lane.next_sequence, int(segment.found.sequences.max()) + 1)
    return lane


def _read_segment(
    device: Device, cells_path: str, index_path: str, number: int, now_us: int, lane: FoundLane
) -> FoundSegment | None:
    index = device.open(index_path)
    shape, damaged = unpack_segment(read_bytes(index, 0, PAGE_BYTES))
    if shape is None or shape.number != number:
        return None
    lane.flaws += [Flaw.SUPERBLOCK] * damaged
    cells = device.open(cells_path)
    return FoundSegment(shape, cells, index, _read_found(index, cells, shape, now_us, lane.flaws))


def read_bytes(file: File, offset: int, nbytes: int) -> memoryview:
    """So many bytes from there on, or as many as there are."""
    buffer = memoryview(bytearray(max(0, min(nbytes, file.size() - offset))))
    if len(buffer):
        file.read([buffer], offset)
    return buffer


def read_records(
    index: File, shape: SegmentShape, flaws: list[Flaw]
) -> Iterator[tuple[int, Records, np.ndarray[tuple[int], np.dtype[np.intp]]]]:
    """The first cell, the records of a batch and the indexes of those that count; what does not goes to ``flaws``."""
    if index.size() < shape.recency_offset:
        flaws.append(Flaw.INDEX_SHORT)
    for first in range(0, shape.cells, BATCH):
        count = min(BATCH, shape.cells - first)
        raw = read_bytes(index, RECORDS_OFFSET + first * RECORD_BYTES, count * RECORD_BYTES)
        raw = raw[: len(raw) - len(raw) % RECORD_BYTES]
        if not len(raw):
            return
        records, kept, wrong = check_records(raw, shape, first)
        flaws += wrong
        yield first, records, kept


def _read_found(index: File, cells: File, shape: SegmentShape, now_us: int, flaws: list[Flaw]) -> Found:
    there = cells.size() // shape.cell_bytes
    if there < shape.cells:
        flaws.append(Flaw.CELLS_SHORT)
    batches = []
    last_use = np.zeros(shape.extents, np.int64)
    recency = read_bytes(index, shape.recency_offset, 8 * shape.extents)
    known = np.frombuffer(recency[: len(recency) - len(recency) % 8], "<u8")
    last_use[: len(known)] = np.where(known > now_us + DAY_US, now_us, known).astype(np.int64)
    for first, records, kept in read_records(index, shape, flaws):
        kept = kept[first + kept < there]
        chosen = records[kept]
        written = np.where(chosen["time_us"] > now_us + DAY_US, now_us, chosen["time_us"]).astype(np.int64)
        np.maximum.at(last_use, (first + kept) // shape.extent_cells, written)
        batches.append(
            Found(
                (first + kept).astype(np.int64),
                chosen["name"].astype(np.uint64),
                chosen["header_checksum"].astype(np.uint64),
                (shape.cell_bytes - chosen["length"]).astype(np.uint16),
                chosen["sequence"].astype(np.uint64),
            )
        )
    return Found(
        np.concatenate([np.empty(0, np.int64), *(b.cells for b in batches)]),
        np.concatenate([np.empty(0, np.uint64), *(b.names for b in batches)]),
        np.concatenate([np.empty(0, np.uint64), *(b.header_checksums for b in batches)]),
        np.concatenate([np.empty(0, np.uint16), *(b.slack for b in batches)]),
        np.concatenate([np.empty(0, np.uint64), *(b.sequences for b in batches)]),
        last_use,
    )
