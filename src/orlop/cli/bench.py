"""``orlop bench tier``: what a disk can do, what a slab on it reaches, and what to make of the two.

In: a directory on the disk, the size of a chunk. Out: rates of plain calls and of the real tier through its I/O
process, advice, as a table or JSON. Never: more bytes at a time than it was told and than a quarter of what is free,
anything that stays (but where the process is killed), a claim about what a rate must be.

Both write before they read, with several threads and past the page cache where the disk lets them.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from orlop.cli.stopping import STOPPED, stop_signals
from orlop.core import FIRST_GENERATION, PAGE_BYTES, Namespace, Outcome, RegionLayout, TierJob, TransferKind
from orlop.errors import ConfigError
from orlop.host.limits import legible_bytes
from orlop.host.region import HostRegion
from orlop.stores.disk.device import O_DIRECT, try_direct_io
from orlop.stores.posix import named
from orlop.tiering import envelope
from orlop.tiering.io_messages import StoreSpec
from orlop.tiering.runner import RunnerOptions, TierRunner

THREADS, JOB_CHUNKS, JOBS_AT_ONCE = 4, 32, 8
"""As a tier has them by default; a job is a promotion or a cascade of a prefix."""
CALL_BYTES = 4 << 20
HOST_BYTES = 128 << 20
"""Of host memory at most, but for one chunk."""
LEAST_BYTES, MOST_CHUNK_BYTES = 16 << 20, 256 << 20
SLOW_BYTES_PER_S, FAIR_PART = 100e6, 0.6
PATIENCE_S = 60.0
NAMESPACE = Namespace(b"orlop bench tier", FIRST_GENERATION)

MustStop = Callable[[], bool]


@dataclass(slots=True)
class Rate:
    """What was moved in what time."""

    nbytes: int = 0
    seconds: float = 0.0

    @property
    def per_s(self) -> float:
        return self.nbytes / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Measured:
    """Writes and reads; ``direct``: past the page cache."""

    direct: bool
    write: Rate = field(default_factory=Rate)
    read: Rate = field(default_factory=Rate)


def run_bench_tier(path: Path, chunk_bytes: int, most_bytes: int, seconds: float, as_json: bool) -> int:
    """Measure for about four times ``seconds``; the exit code."""
    nbytes = _room(path, chunk_bytes, most_bytes)
    with stop_signals() as must_stop, _directory(path) as work:
        disk = measure_disk(work / "plain", nbytes, seconds, must_stop)
        orlop = None if must_stop() else measure_tier(work / "tier", chunk_bytes, nbytes, seconds, must_stop)
        interrupted = must_stop()
    told = [] if orlop is None or interrupted else advice(disk, orlop, chunk_bytes)
    if as_json:
        said = {"disk": _plain(disk), "orlop": _plain(orlop) if orlop is not None else None, "advice": told}
        print(json.dumps({"path": str(path), "chunk_bytes": chunk_bytes, "interrupted": interrupted} | said))
    else:
        _print(path, chunk_bytes, disk, orlop, told)
        if interrupted:
            print("stopped before the end")
    return STOPPED if interrupted else 0


def _room(path: Path, chunk_bytes: int, most_bytes: int) -> int:
    """How much to move each way; ``ConfigError`` where that cannot be."""
    if not path.is_dir():
        raise ConfigError(f"{path}: found no such directory, expected one on the disk to measure")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{path}: found no permission to write there; run as its owner, or change its mode")
    if chunk_bytes % PAGE_BYTES or not PAGE_BYTES <= chunk_bytes <= MOST_CHUNK_BYTES:
        most = legible_bytes(MOST_CHUNK_BYTES)
        raise ConfigError(f"--chunk: found {chunk_bytes}, allowed: multiples of {PAGE_BYTES} up to {most}")
    free = shutil.disk_usage(path).free
    nbytes = min(most_bytes, free // 4)
    least = max(LEAST_BYTES, 4 * chunk_bytes)
    if nbytes < least:
        found = f"{legible_bytes(free)} free and --bytes {legible_bytes(most_bytes)}"
        raise ConfigError(
            f"{path}: found {found}, expected 4 times {legible_bytes(least)} free, and --bytes that large"
        )
    return nbytes


@contextmanager
def _directory(path: Path) -> Iterator[Path]:
    work = Path(tempfile.mkdtemp(prefix=".orlop-bench-", dir=path))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


# --- the disk alone -------------------------------------------------------------------------------------------


def measure_disk(path: Path, nbytes: int, seconds: float, must_stop: MustStop) -> Measured:
    """Plain calls of ``THREADS`` threads over one preallocated file."""
    direct = try_direct_io(f"{path}.probe") is None
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (O_DIRECT if direct else 0), 0o600)
    try:
        os.unlink(path)
        size = nbytes // CALL_BYTES * CALL_BYTES
        os.posix_fallocate(fd, 0, size)
        measured = Measured(direct)
        measured.write = _from_threads(lambda view, at: os.pwritev(fd, [view], at), size, seconds, must_stop)
        began = time.monotonic()
        os.fdatasync(fd)
        measured.write.seconds += time.monotonic() - began
        if not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        measured.read = _from_threads(
            lambda view, at: os.preadv(fd, [view], at), measured.write.nbytes, seconds, must_stop
        )
        return measured
    except OSError as error:
        raise ConfigError(f"{path.parent.parent}: found it failing ({named(error)}); mend the disk") from error
    finally:
        os.close(fd)


def _from_threads(call: Callable[[memoryview, int], int], size: int, seconds: float, must_stop: MustStop) -> Rate:
    rate, lock, trouble = Rate(), threading.Lock(), list[OSError]()
    offsets = iter(range(0, size, CALL_BYTES))
    views = [memoryview(mmap.mmap(-1, CALL_BYTES)) for _ in range(THREADS)]
    for view in views:
        view[:] = os.urandom(CALL_BYTES)
    began = time.monotonic()

    def work(view: memoryview) -> None:
        while time.monotonic() - began < seconds and not must_stop() and not trouble:
            with lock:
                at = next(offsets, None)
            if at is None:
                return
            try:
                moved = call(view, at)
            except OSError as error:
                trouble.append(error)
                return
            with lock:
                rate.nbytes += moved

    threads = [threading.Thread(target=work, args=(view,)) for view in views]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if trouble:
        raise trouble[0]
    rate.seconds = time.monotonic() - began
    return rate


# --- the tier -------------------------------------------------------------------------------------------------


def measure_tier(path: Path, chunk_bytes: int, nbytes: int, seconds: float, must_stop: MustStop) -> Measured:
    """The slab through its I/O process, with chunks that are verified as ever."""
    memory = min(HOST_BYTES, nbytes)
    job_chunks = max(1, min(JOB_CHUNKS, memory // JOBS_AT_ONCE // chunk_bytes))
    jobs_at_once = max(1, min(JOBS_AT_ONCE, memory // (job_chunks * chunk_bytes)))
    slots = job_chunks * jobs_at_once
    region = HostRegion.create(RegionLayout(slots, 1, ((chunk_bytes,),)), prefault=False)
    rng = np.random.default_rng(0)
    for slot in range(slots):
        region.slots[slot] = np.frombuffer(rng.bytes(chunk_bytes), np.uint8)
        region.checksums[slot] = envelope.part_checksum(region.slots[slot])
    bound = max(64 << 20, 2 * nbytes + 8 * (chunk_bytes + envelope.HEADER_BYTES))
    spec = StoreSpec("orlop.stores.disk.store:DiskStore", {"path": str(path), "max_bytes": bound})
    runner = TierRunner(
        RunnerOptions("bench", threads=THREADS, queue_bytes=1 << 40, load_queue_bytes=1 << 40), region, spec
    )
    try:
        if trouble := runner.wait_ready(PATIENCE_S):
            raise ConfigError(f"{path.parent.parent}: {trouble}")
        mover = _Mover(runner, chunk_bytes, job_chunks, jobs_at_once)
        measured = Measured(try_direct_io(f"{path}/probe") is None)
        most = max(1, nbytes // (job_chunks * chunk_bytes))
        measured.write = mover.move(TransferKind.STORE, most, seconds, must_stop)
        written = measured.write.nbytes // (job_chunks * chunk_bytes)
        measured.read = mover.move(TransferKind.LOAD, written, seconds, must_stop)
        return measured
    finally:
        runner.shutdown(PATIENCE_S)
        region.close()


class _Mover:
    """Keeps ``jobs_at_once`` jobs in flight, each of ``job_chunks`` chunks in slots of its own."""

    def __init__(self, runner: TierRunner, chunk_bytes: int, job_chunks: int, jobs_at_once: int) -> None:
        self._runner, self._chunk_bytes, self._job_chunks = runner, chunk_bytes, job_chunks
        self._jobs_at_once = jobs_at_once
        self._next_id = 0

    def move(self, kind: TransferKind, jobs: int, seconds: float, must_stop: MustStop) -> Rate:
        submit = self._runner.submit_load if kind is TransferKind.LOAD else self._runner.submit_store
        free, in_flight, number, done = list(range(self._jobs_at_once)), dict[int, int](), 0, 0
        began = now = time.monotonic()
        while True:
            while free and number < jobs and now - began < seconds and not must_stop():
                place = free.pop()
                in_flight[self._next_id] = place
                submit(self._job(kind, number, place), now=now)
                number += 1
            if not in_flight:
                return Rate(done * self._job_chunks * self._chunk_bytes, time.monotonic() - began)
            time.sleep(0.0005)
            for result in self._runner.get_finished_jobs():
                if set(result.outcomes) != {Outcome.OK}:
                    raise ConfigError(
                        f"found a tier that fails ({result.reason or set(result.outcomes)}); mend the disk"
                    )
                free.append(in_flight.pop(result.job_id))
                done += 1
            now = time.monotonic()
            if now - began > seconds + PATIENCE_S:
                raise ConfigError(
                    f"found a disk that does not answer for {PATIENCE_S:.0f} s; mend it, or name another path"
                )

    def _job(self, kind: TransferKind, number: int, place: int) -> TierJob:
        keys = tuple((number * self._job_chunks + i).to_bytes(32, "big") + bytes(4) for i in range(self._job_chunks))
        slots = np.arange(place * self._job_chunks, (place + 1) * self._job_chunks, dtype=np.int64)
        self._next_id += 1
        return TierJob(self._next_id - 1, kind, 0, keys, slots, self._chunk_bytes, NAMESPACE)


# --- what to make of it ---------------------------------------------------------------------------------------


def advice(disk: Measured, orlop: Measured, chunk_bytes: int) -> list[str]:
    """What the figures say, in plain words."""
    said = []
    if not disk.direct:
        said.append(
            "This file system takes no direct I/O: what is stored crowds the page cache, and rates are partly those of "
            "memory. A directory on a local disk (ext4, xfs) does better."
        )
    if min(disk.write.per_s, disk.read.per_s) < SLOW_BYTES_PER_S:
        said.append(
            f"This disk moves less than {legible_bytes(int(SLOW_BYTES_PER_S))}/s: computing may be faster than "
            "loading. Name a faster disk, or compare with 'orlop run' before you rely on it."
        )
    parts = [ours.per_s / theirs.per_s for ours, theirs in _pairs(disk, orlop) if theirs.per_s]
    if parts and min(parts) < FAIR_PART:
        said.append(f"Orlop reaches {min(parts):.0%} of the disk. {_why(chunk_bytes)}")
    if parts and not said:
        said.append(f"Orlop reaches {min(1.0, *parts):.0%} of plain calls or more: nothing to do.")
    return said


def _pairs(disk: Measured, orlop: Measured) -> list[tuple[Rate, Rate]]:
    return [(orlop.write, disk.write), (orlop.read, disk.read)]


def _why(chunk_bytes: int) -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if chunk_bytes < 1 << 20:
        return "Larger chunks move more per call: raise 'blocks_per_chunk', and measure again with that '--chunk'."
    if cores < 2 * THREADS:
        return f"Copies and checksums take CPU, and there are {cores} cores: give the I/O process some of its own."
    return "The disk may have been busy with something else: measure again; then try 'threads' of the tier."


def _plain(measured: Measured) -> dict[str, object]:
    fields = asdict(measured)
    for verb, rate in (("write", measured.write), ("read", measured.read)):
        fields[verb] |= {"bytes_per_s": rate.per_s}
    return fields


def _print(path: Path, chunk_bytes: int, disk: Measured, orlop: Measured | None, told: list[str]) -> None:
    console = Console()
    table = Table("", "writes", "reads", "direct I/O", title=f"{path}, chunks of {legible_bytes(chunk_bytes)}")
    for name, row in (("the disk", disk), ("Orlop on it", orlop)):
        if row is not None:
            rates = (f"{legible_bytes(int(rate.per_s))}/s" if rate.nbytes else "-" for rate in (row.write, row.read))
            table.add_row(name, *rates, "yes" if row.direct else "no")
    console.print(table)
    for line in told:
        console.print(line, soft_wrap=True, highlight=False)
