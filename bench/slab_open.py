"""How long a slab of half a million chunks takes to open, and what its index keeps in memory.

In: ``--chunks``, ``--short`` for a tenth of them, ``--directory``. Out: CPU seconds of an open with a warm page cache,
bytes of memory per chunk in the I/O process and on the engine's side. Never: a cell read; the cells are holes in sparse
files.

    PYTHONPATH=src python bench/slab_open.py
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
import tracemalloc

import numpy as np

from orlop.stores.disk import format as fmt
from orlop.stores.disk.format import SegmentShape
from orlop.stores.disk.lanes import LANE_FILE
from orlop.stores.disk.recovery import segment_paths
from orlop.stores.disk.slab import segment_bytes, shape_for
from orlop.stores.disk.store import DiskStore
from orlop.tiering.base import KeyChange
from orlop.tiering.io_messages import Keys
from orlop.tiering.key_index import key_name
from orlop.tiering.known_keys import KnownKeys

CELL_BYTES = 68 << 10
ROUNDS = 5


def build(path: str, chunks: int) -> int:
    """A lane whose index is full and whose cells are holes; the bound it needs."""
    bound = chunks * (CELL_BYTES + fmt.RECORD_BYTES) * 9 // 8
    os.makedirs(f"{path}/0")
    with open(f"{path}/0/{LANE_FILE}", "wb") as file:
        file.write(fmt.pack_lane(bytes(16)))
    done = number = 0
    while done < chunks:
        shape = shape_for(number, CELL_BYTES, segment_bytes(bound))
        assert shape is not None
        write_segment(path, shape, done, min(shape.cells, chunks - done))
        done += min(shape.cells, chunks - done)
        number += 1
    return bound


def write_segment(path: str, shape: SegmentShape, first: int, count: int) -> None:
    cells_path, index_path = segment_paths(f"{path}/0", shape.number)
    with open(cells_path, "wb") as file:
        file.truncate(shape.cells_bytes)
    keys = [bytes(16) + (first + i).to_bytes(32, "big") + bytes(4) for i in range(count)]
    now_us = int(time.time() * 1e6)
    numbers = range(first + 1, first + count + 1)
    fields = fmt.Fields(
        numbers,
        range(now_us, now_us - count, -1),
        [key_name(key) for key in keys],
        numbers,
        shape.cell_bytes,
        range(shape.place(0), shape.place(count)),
    )
    with open(index_path, "wb") as file:
        file.write(fmt.pack_segment(shape))
        file.write(fmt.pack_records(fields, keys))
        file.truncate(shape.index_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=500_000)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--directory", default=tempfile.gettempdir())
    options = parser.parse_args()
    chunks = options.chunks // 10 if options.short else options.chunks
    with tempfile.TemporaryDirectory(prefix="orlop-bench-", dir=options.directory) as path:
        bound = build(path, chunks)
        cpu, wall = [], []
        for _ in range(ROUNDS):
            began, began_cpu = time.perf_counter(), time.process_time()
            store = DiskStore(path, max_bytes=bound, direct_io="off")
            cpu.append(time.process_time() - began_cpu)
            wall.append(time.perf_counter() - began)
            assert store.stats()["chunks"] == chunks, store.stats()
            store.close()
        tracemalloc.start()
        store = DiskStore(path, max_bytes=bound, direct_io="off")
        kept, peak = tracemalloc.get_traced_memory()
        known = KnownKeys()
        before = tracemalloc.get_traced_memory()[0]

        def tell(change: KeyChange) -> None:
            known.take(Keys(change.added.tobytes(), b"", reset=True, more=False))

        store.watch(tell)
        engine_side = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert isinstance(known.find(bytes(16), [bytes(36)], True), bytes)
        store.close()
    print(f"{platform.platform()}, {os.cpu_count()} cores; Python {platform.python_version()}, numpy {np.__version__}")
    print(f"{chunks:,} chunks, index {chunks * fmt.RECORD_BYTES >> 20} MiB, page cache warm, {ROUNDS} opens")
    print(f"CPU {statistics.median(cpu):.2f} s ({min(cpu):.2f}-{max(cpu):.2f}), wall {statistics.median(wall):.2f} s")
    print(f"memory per chunk: I/O process {kept / chunks:.0f} bytes (peak while opening {peak / chunks:.0f}), ", end="")
    print(f"engine's side {engine_side / chunks:.0f} bytes")


if __name__ == "__main__":
    main()
