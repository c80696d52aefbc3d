"""How fast the CPU copy backend moves pages, as a ratio to a plain memcpy loop over the same pages.

In: nothing (``--seconds`` bounds the run). Out: a table on stdout. Never: a file, a network.

Method: one layer of KV pages and a host region of chunks of 8 blocks, blocks and slots permuted at random,
all memory touched before. Per page size and direction the candidates run in turn (A B C A B C ...), and
the median of the rounds is shown. ``memcpy`` is one ctypes memmove per page beside an idle main thread,
also for the rows "busy": there another thread runs Python without ever letting go of the GIL by itself,
which is worse than any engine. ``store`` includes the checksum of every chunk, memcpy does not.

    PYTHONPATH=src python bench/copies.py
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from orlop.core import GroupTransfer, KVGroup, RegionLayout, TransferJob, TransferKind
from orlop.host.region import HostRegion
from orlop.worker.cpu import CpuCopyBackend, kernel_can_gather
from orlop.worker.layout import group_pages, rows

JOB_BYTES = 64 << 20
BLOCKS_PER_CHUNK = 8
PAGE_BYTES = (16 << 10, 64 << 10, 512 << 10)
GROUP = KVGroup(0, 16, layers=("layer",))


@contextmanager
def busy_thread() -> Iterator[None]:
    """A thread that runs Python until told to stop."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(50))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def candidates(page: int, kind: TransferKind) -> dict[str, Callable[[], object]]:
    """The same job by memcpy and by every mover that works here."""
    blocks = JOB_BYTES // page
    rng = np.random.default_rng(0)
    tensor = np.ones((2 * blocks, page), np.uint8)
    region = HostRegion.create(RegionLayout(blocks // BLOCKS_PER_CHUNK, BLOCKS_PER_CHUNK, ((page,),)), prefault=False)
    region.slots[:] = 1
    transfer = GroupTransfer(
        0,
        rng.permutation(2 * blocks)[:blocks],
        np.repeat(rng.permutation(region.layout.slots), BLOCKS_PER_CHUNK),
        np.tile(np.arange(BLOCKS_PER_CHUNK), region.layout.slots),
    )
    job = TransferJob(1, "bench", kind, (transfer,))
    found: dict[str, Callable[[], object]] = {"memcpy": memcpy_loop(tensor, region, transfer, kind)}
    for name, vectored in (("vectored", True), ("staged", False)):
        if not vectored or kernel_can_gather():
            backend = CpuCopyBackend([GROUP], region, 0, vectored=vectored)
            backend.register({"layer": tensor})
            found[name] = lambda backend=backend: backend.copy(job)  # type: ignore[misc]
    return found


def memcpy_loop(
    tensor: np.ndarray, region: HostRegion, transfer: GroupTransfer, kind: TransferKind
) -> Callable[[], object]:
    """One memmove per page, addresses made before."""
    pairs: list[tuple[int, int]] = []
    for r in rows(transfer, group_pages({"layer": tensor}, GROUP), 0):
        device = r.piece.address + r.block_ids * r.piece.block_stride
        host = region.slots.ctypes.data + r.slots * region.layout.slot_bytes + r.column
        ends = (device, host) if kind is TransferKind.LOAD else (host, device)
        pairs += zip(ends[0].tolist(), ends[1].tolist(), strict=True)
    page = tensor.shape[1]

    def loop() -> None:
        for target, source in pairs:
            ctypes.memmove(target, source, page)

    return loop


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(found: dict[str, Callable[[], object]], until: float) -> Iterator[tuple[str, str, float]]:
    """``(who, beside, GB/s)``, the median of at least three rounds."""
    spent: dict[tuple[str, str], list[float]] = {}
    for run in found.values():
        run()
    while len(next(iter(spent.values()), [])) < 3 or time.perf_counter() < until:
        for name, run in found.items():
            spent.setdefault((name, "idle"), []).append(seconds(run))
        with busy_thread():
            for name, run in found.items():
                if name != "memcpy":
                    spent.setdefault((name, "busy"), []).append(seconds(run))
    for (name, beside), times in spent.items():
        yield name, beside, JOB_BYTES / statistics.median(times) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=20.0, help="bound of the whole run")
    parser.add_argument("--short", action="store_true", help="half the time")
    options = parser.parse_args()
    seconds_each = options.seconds * (0.5 if options.short else 1.0) / (len(PAGE_BYTES) * 2)
    print(f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}; GB/s and ratio to memcpy")
    for page in PAGE_BYTES:
        for kind in TransferKind:
            started = time.perf_counter()
            results = list(measure(candidates(page, kind), started + seconds_each))
            baseline = results[0][2]
            for name, beside, rate in results:
                print(f"{page >> 10:4d} KiB {kind.value:5s} {name:8s} {beside:4s} {rate:6.2f} {rate / baseline:5.2f}")


if __name__ == "__main__":
    main()
