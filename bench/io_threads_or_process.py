"""Threads of the engine's process, or a process of their own: who moves chunks faster beside a busy engine?

In: a directory on the disk to measure, ``--short``. Out: a table of GB/s of both, beside an idle and a busy main
thread, and what the I/O costs the main thread. Never: more than about 20 seconds on a machine that has nothing else to
do, or anything left in the directory.

Method: one TierRunner over a FilesStore with direct I/O, once with ``io_process=False``, once with True; jobs of
4 MiB, a bounded number in flight, four I/O threads. "Busy" means that the main thread does units of pure Python of
about 0.4 ms, as a scheduler step does, one after the other, and looks for reports in between. The price of the I/O is
the 99th percentile of a unit, against the same units with no I/O at all. Bytes are verified in both directions, so
the rates hold the hashing too. Two cores or more are needed to see anything.

    PYTHONPATH=src python bench/io_threads_or_process.py [DIRECTORY] [--short]
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import xxhash

from orlop.core import Namespace, Outcome, RegionLayout, TierJob, TransferKind
from orlop.host.region import HostRegion
from orlop.tiering.envelope import part_checksum
from orlop.tiering.io_messages import StoreSpec
from orlop.tiering.runner import RunnerOptions, TierRunner

CHUNK_KIB = (64, 512)
REGION_BYTES = 64 << 20
JOB_BYTES = 4 << 20
MOST_BYTES = 2 << 30
"""Of files; a disk that is faster than this writes them again."""
IN_FLIGHT = 8
PHASE_S = 0.8
BUDGET_S = 20.0
"""Past it no further size of chunk is begun."""
UNIT_S = 0.0004
NAMESPACE = Namespace(b"bench".ljust(16, b"\0"))


@dataclass(frozen=True)
class Phase:
    """What one phase moved, and the lengths of the busy units during it, in seconds."""

    gb_per_s: float
    units: list[float]

    @property
    def p99_ms(self) -> float:
        return float(np.percentile(self.units, 99)) * 1e3 if self.units else float("nan")


class Unit:
    """A piece of pure Python of about ``UNIT_S`` on this machine."""

    def __init__(self) -> None:
        self._rounds = 1000
        best = min(self() for _ in range(50))
        self._rounds = max(1, int(self._rounds * UNIT_S / best))

    def __call__(self) -> float:
        began = time.perf_counter()
        total = 0
        for i in range(self._rounds):
            total += i & 7
        return time.perf_counter() - began


class Bed:
    """A region full of bytes with their checksums, and a runner over a fresh directory."""

    def __init__(self, directory: str, chunk_bytes: int, *, io_process: bool) -> None:
        self.path = tempfile.mkdtemp(prefix="orlop-bench-", dir=directory)
        self.chunk_bytes = chunk_bytes
        self.job_chunks = JOB_BYTES // chunk_bytes
        slots = REGION_BYTES // chunk_bytes
        self.region = HostRegion.create(RegionLayout(slots, 1, ((chunk_bytes,),)), prefault=False)
        rng = np.random.default_rng(0)
        for slot in range(slots):
            self.region.slots[slot] = np.frombuffer(rng.bytes(chunk_bytes), np.uint8)
            self.region.checksums[slot] = part_checksum(self.region.slots[slot])
        self.came = threading.Semaphore(0)
        self.runner = TierRunner(
            RunnerOptions("bench", queue_bytes=1 << 40, load_queue_bytes=1 << 40),
            self.region,
            StoreSpec("orlop.stores.files:FilesStore", {"path": self.path, "max_bytes": 2 * MOST_BYTES}),
            io_process=io_process,
            notify=self.came.release,
        )
        trouble = self.runner.wait_ready(30.0)
        if trouble:
            raise SystemExit(trouble)
        self._ids = iter(range(1 << 30))

    def close(self) -> None:
        self.runner.shutdown(10.0)
        self.region.close()
        shutil.rmtree(self.path)

    def submit(self, kind: TransferKind, number: int) -> None:
        """Job ``number`` of its kind: always the same keys and, of the region, always the same slots."""
        n = self.job_chunks
        jobs = self.region.layout.slots // n
        slots = np.arange(n, dtype=np.int64) + (number % jobs) * n
        keys = tuple((number * n + i).to_bytes(32, "big") + bytes(4) for i in range(n))
        job = TierJob(next(self._ids), kind, 0, keys, slots, self.chunk_bytes, NAMESPACE)
        now = time.monotonic()
        (self.runner.submit_load if kind is TransferKind.LOAD else self.runner.submit_store)(job, now=now)

    def finished(self) -> int:
        """Reports since the last call; ends the program where a chunk failed."""
        results = self.runner.get_finished_jobs()
        for result in results:
            if set(result.outcomes) != {Outcome.OK}:
                raise SystemExit(f"a job failed: {result.reason or set(result.outcomes)}")
        return len(results)


def run(bed: Bed, kind: TransferKind, first: int, last: int, unit: Unit | None) -> tuple[Phase, int]:
    """Jobs ``first, first + 1, ...`` (of ``last`` in all, again from 0) for ``PHASE_S``; the phase and jobs done."""
    units: list[float] = []
    began = time.perf_counter()
    submitted = done = 0
    while time.perf_counter() - began < PHASE_S or done < submitted:
        while submitted - done < IN_FLIGHT and time.perf_counter() - began < PHASE_S:
            bed.submit(kind, (first + submitted) % last)
            submitted += 1
        if unit is None:
            bed.came.acquire(timeout=1.0)
        else:
            units.append(unit())
        done += bed.finished()
    seconds = time.perf_counter() - began
    return Phase(done * JOB_BYTES / seconds / 1e9, units), done


@contextmanager
def open_bed(directory: str, chunk_kib: int, *, io_process: bool) -> Iterator[Bed]:
    bed = Bed(directory, chunk_kib << 10, io_process=io_process)
    try:
        yield bed
    finally:
        bed.close()


def measure(directory: str, chunk_kib: int, unit: Unit, *, io_process: bool) -> dict[tuple[str, str], Phase]:
    """Writes and reads, beside an idle and a busy main thread."""
    phases: dict[tuple[str, str], Phase] = {}
    with open_bed(directory, chunk_kib, io_process=io_process) as bed:
        most = MOST_BYTES // JOB_BYTES
        written = 0
        for beside in ("idle", "busy"):
            phases[beside, "write"], n = run(bed, TransferKind.STORE, written, most, unit if beside == "busy" else None)
            written = min(most, written + n)
        for beside in ("idle", "busy"):
            phases[beside, "read"], _ = run(bed, TransferKind.LOAD, 0, written, unit if beside == "busy" else None)
    return phases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--short", action="store_true", help="the smaller chunks alone")
    options = parser.parse_args()
    unit = Unit()
    alone = [unit() for _ in range(1000)]
    began = time.perf_counter()
    print(f"{platform.platform()}, {os.cpu_count()} cores, {cpu_name()}")
    print(f"Python {platform.python_version()}, numpy {np.__version__}, xxhash {xxhash.VERSION}")
    median_ms, p99_ms = np.percentile(alone, (50, 99)) * 1e3
    print(f"a unit of busy work alone: median {median_ms:.2f} ms, p99 {p99_ms:.2f} ms; load {os.getloadavg()[0]:.1f}")
    print()
    print("chunk    verb   beside   threads GB/s  process GB/s  ratio   unit p99 ms: threads  process")
    for chunk_kib in CHUNK_KIB[:1] if options.short else CHUNK_KIB:
        if time.perf_counter() - began > BUDGET_S:
            print(f"{chunk_kib:>3} KiB  left out: {BUDGET_S:g} s are over, the machine has other things to do")
            continue
        threads = measure(options.directory, chunk_kib, unit, io_process=False)
        process = measure(options.directory, chunk_kib, unit, io_process=True)
        for (beside, verb), t in threads.items():
            p = process[beside, verb]
            price = f"{t.p99_ms:>21.2f} {p.p99_ms:>8.2f}" if t.units else ""
            print(
                f"{chunk_kib:>3} KiB  {verb:<6} {beside:<6} {t.gb_per_s:>13.2f} {p.gb_per_s:>13.2f} "
                f"{p.gb_per_s / t.gb_per_s:>6.1f} {price}"
            )
    print(f"\n{time.perf_counter() - began:.0f} s in all")


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"


if __name__ == "__main__":
    main()
