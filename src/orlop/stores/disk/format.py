"""The bytes of the slab: superblocks, index records, recency, as docs/internals/disk-format.md writes them down.

In: fields. Out: bytes. And back, with a verdict. Never: a file, a decision about a chunk.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from orlop.core import DIGEST_BYTES, PAGE_BYTES, align_up

VERSION = 1
LANE_MAGIC = b"\x89ORLANE\n"
SEGMENT_MAGIC = b"\x89ORSEGM\n"
SEALED_BYTES = 128
COPY_OFFSETS = (0, PAGE_BYTES // 2)
RECORD_BYTES = 128
RECORDS_OFFSET = PAGE_BYTES
MAX_KEY_BYTES = 70
PLACE_BITS = 40

RECORD = np.dtype(
    [
        ("checksum", "<u8"),
        ("sequence", "<u8"),
        ("time_us", "<u8"),
        ("name", "<u8"),
        ("header_checksum", "<u8"),
        ("length", "<u8"),
        ("place", "<u8"),
        ("key_bytes", "<u2"),
        ("key", "u1", (MAX_KEY_BYTES,)),
    ]
)
Records = npt.NDArray[np.void]
Column = int | Sequence[int] | npt.NDArray[np.int64]

_LANE = struct.Struct("<8sII16s")
_SEGMENT = struct.Struct("<8sIIQQQ")


class Flaw(StrEnum):
    """What may be wrong with what is on disk; names of counters."""

    RECORD_CHECKSUM = "record_checksum"
    RECORD_PLACE = "record_place"
    SUPERBLOCK = "superblock"
    SEGMENT = "segment"
    INDEX_SHORT = "index_short"
    CELLS_SHORT = "cells_short"


class ForeignVersion(Exception):
    """A superblock of another version: not ours to read."""


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """What a segment's superblock says. ``cell_bytes`` a multiple of 4096, ``cells`` one of ``extent_cells``."""

    number: int
    cell_bytes: int
    cells: int
    extent_cells: int

    @property
    def extents(self) -> int:
        return self.cells // self.extent_cells

    @property
    def cells_bytes(self) -> int:
        """Length of the cells file."""
        return self.cells * self.cell_bytes

    @property
    def recency_offset(self) -> int:
        return RECORDS_OFFSET + align_up(self.cells * RECORD_BYTES)

    @property
    def index_bytes(self) -> int:
        """Length of the index file."""
        return self.recency_offset + align_up(8 * self.extents)

    @property
    def nbytes(self) -> int:
        """Both files."""
        return self.cells_bytes + self.index_bytes

    def place(self, cell: int) -> int:
        return self.number << PLACE_BITS | cell

    def is_sane(self) -> bool:
        return (
            self.cell_bytes > 0
            and self.cell_bytes % PAGE_BYTES == 0
            and self.extent_cells > 0
            and 0 < self.cells < 1 << PLACE_BITS
            and self.cells % self.extent_cells == 0
        )


def checksum(data: bytes | memoryview) -> int:
    """XXH3-64."""
    return xxhash.xxh3_64_intdigest(data)


# --- superblocks --------------------------------------------------------------------------------------------


def pack_lane(namespace: bytes) -> bytes:
    """The page of a lane's superblock."""
    return _page(_LANE.pack(LANE_MAGIC, VERSION, 0, namespace))


def unpack_lane(page: bytes | memoryview) -> tuple[bytes | None, int]:
    """The namespace, None where no copy is whole; and how many copies are not. Raises ``ForeignVersion``."""
    body, damaged = _unseal(page, LANE_MAGIC)
    return (None if body is None else _LANE.unpack_from(body)[3]), damaged


def pack_segment(shape: SegmentShape) -> bytes:
    """The page of a segment's superblock."""
    body = _SEGMENT.pack(SEGMENT_MAGIC, VERSION, shape.extent_cells, shape.number, shape.cell_bytes, shape.cells)
    return _page(body)


def unpack_segment(page: bytes | memoryview) -> tuple[SegmentShape | None, int]:
    """As ``unpack_lane``."""
    body, damaged = _unseal(page, SEGMENT_MAGIC)
    if body is None:
        return None, damaged
    _, _, extent_cells, number, cell_bytes, cells = _SEGMENT.unpack_from(body)
    shape = SegmentShape(number, cell_bytes, cells, extent_cells)
    return (shape if shape.is_sane() else None), damaged


def _page(fields: bytes) -> bytes:
    body = fields.ljust(SEALED_BYTES - 8, b"\0")
    copy = (checksum(body).to_bytes(8, "little") + body).ljust(PAGE_BYTES // 2, b"\0")
    return copy * 2


def _unseal(page: bytes | memoryview, magic: bytes) -> tuple[bytes | None, int]:
    damaged, body = 0, None
    for offset in COPY_OFFSETS:
        sealed = bytes(page[offset : offset + SEALED_BYTES])
        if (
            len(sealed) < SEALED_BYTES
            or int.from_bytes(sealed[:8], "little") != checksum(sealed[8:])
            or sealed[8:16] != magic
        ):
            damaged += 1
        elif body is None:
            body = sealed[8:]
    if body is not None and (version := int.from_bytes(body[8:12], "little")) != VERSION:
        raise ForeignVersion(f"found version {version}, expected {VERSION}")
    return body, damaged


# --- records ------------------------------------------------------------------------------------------------


def pack_records(fields: Fields, keys: Sequence[bytes]) -> bytes:
    """Records, one after the other; each field has one value per key, or one for all."""
    records = np.zeros(len(keys), RECORD)
    for name, values in zip(Fields._fields, fields, strict=True):
        records[name] = values
    records["key_bytes"] = list(map(len, keys))
    records["key"].view(f"S{MAX_KEY_BYTES}")[:, 0] = keys
    raw = records.view(np.uint8).data
    starts = range(0, len(raw), RECORD_BYTES)
    records["checksum"] = [checksum(raw[start + 8 : start + RECORD_BYTES]) for start in starts]
    return records.tobytes()


class Fields(NamedTuple):
    """Those of ``RECORD`` between checksum and key, in their order."""

    sequence: Column
    time_us: Column
    name: Column
    header_checksum: Column
    length: Column
    place: Column


def check_records(raw: memoryview, shape: SegmentShape, first: int) -> tuple[Records, npt.NDArray[np.intp], list[Flaw]]:
    """All records in ``raw``, which begins with that of cell ``first``; the indexes of those that count; all flaws."""
    records = np.frombuffer(raw, RECORD)
    filled = np.flatnonzero(np.frombuffer(raw, "<u8").reshape(len(records), -1).any(axis=1))
    told = records["checksum"][filled].tolist()
    digest, size = xxhash.xxh3_64_intdigest, RECORD_BYTES
    found = [digest(raw[i * size + 8 : i * size + size]) for i in filled.tolist()]
    whole = np.fromiter((a == b for a, b in zip(told, found, strict=True)), np.bool_, len(told))
    flaws = [Flaw.RECORD_CHECKSUM] * int(len(whole) - whole.sum())
    kept = filled[whole]
    right = (
        (records["place"][kept] == (shape.number << PLACE_BITS) + (first + kept).astype(np.uint64))
        & (records["length"][kept] <= shape.cell_bytes)
        & (records["length"][kept] + PAGE_BYTES > shape.cell_bytes)
        & (records["key_bytes"][kept] > 0)
        & (records["key_bytes"][kept] <= MAX_KEY_BYTES)
        & (records["name"][kept] != 0)
    )
    flaws += [Flaw.RECORD_PLACE] * int(len(right) - right.sum())
    return records, kept[right], flaws


def key_of(record: Any) -> bytes:
    """The key of one record."""
    return bytes(record["key"][: record["key_bytes"]])


def namespace_of(key: bytes) -> bytes:
    """The digest that a key begins with."""
    return key[:DIGEST_BYTES]
