"""What a slab of many chunks costs: memory per chunk, and golden bytes of its format."""

from __future__ import annotations

import importlib.util
import tracemalloc
from pathlib import Path

import pytest

from orlop.stores.disk import format as fmt
from orlop.stores.disk.format import SegmentShape
from orlop.stores.disk.store import DiskStore
from orlop.tiering.key_index import key_name

BENCH = Path(__file__).parents[3] / "bench" / "slab_open.py"


def test_an_opened_index_keeps_less_than_200_bytes_per_chunk(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("slab_open", BENCH)
    assert spec is not None
    assert spec.loader is not None
    slab_open = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(slab_open)
    chunks = 50_000
    bound = slab_open.build(str(tmp_path), chunks)
    tracemalloc.start()
    try:
        store = DiskStore(tmp_path, max_bytes=bound, direct_io="off")
        kept, peak = tracemalloc.get_traced_memory()
        assert store.stats()["chunks"] == chunks
        keys = [bytes(16) + n.to_bytes(32, "big") + bytes(4) for n in range(0, chunks, 7)]
        assert all(store.contains(keys))
        assert not any(store.contains([bytes(16) + b"x" * 32 + bytes(4)]))
        store.check()
        store.close()
    finally:
        tracemalloc.stop()
    assert kept < 100 * chunks
    assert peak < 200 * chunks + (16 << 20)  # and a few batches of records while opening


@pytest.mark.fault("B036")
def test_golden_bytes_of_version_1() -> None:
    """Written down, so that a later version cannot change them by mistake."""
    lane = fmt.pack_lane(bytes(range(16)))
    assert len(lane) == 4096
    assert lane[:2048] == lane[2048:]
    assert lane[:64].hex() == LANE
    shape = SegmentShape(7, 69632, 240, 15)
    segment = fmt.pack_segment(shape)
    assert segment[:64].hex() == SEGMENT
    assert fmt.unpack_segment(segment) == (shape, 0)
    key = bytes(range(16)) + b"h" * 32 + bytes(4)
    assert key_name(key) == NAME
    record = fmt.pack_records(
        fmt.Fields(
            sequence=3,
            time_us=1_700_000_000_000_000,
            name=key_name(key),
            header_checksum=0x1122334455667788,
            length=69632,
            place=shape.place(5),
        ),
        [key],
    )
    assert record.hex() == RECORD
    assert (shape.recency_offset, shape.index_bytes, shape.cells_bytes) == (36864, 40960, 16711680)


LANE = (
    "c8b3bd9ba7d66642894f524c414e450a0100000000000000000102030405060708090a0b0c0d0e0f0000000000000000"
    "00000000000000000000000000000000"
)
SEGMENT = (
    "6980906d5d07dbfb894f525345474d0a010000000f00000007000000000000000010010000000000f000000000000000"
    "00000000000000000000000000000000"
)
NAME = 0x84016D37E435BA79
RECORD = (
    "37eb7011d52a7749030000000000000000401e18240a060079ba35e4376d018488776655443322110010010000000000"
    "05000000000700003400000102030405060708090a0b0c0d0e0f68686868686868686868686868686868686868686868"
    "6868686868686868686800000000000000000000000000000000000000000000"
)
