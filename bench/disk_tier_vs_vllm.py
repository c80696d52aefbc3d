"""The slab beside the disk itself and vLLM's file tier: GB/s of stores and loads, the engine's thread idle and busy.

In: ``--short`` for a small form, ``--rounds``, ``--mib`` and ``--chunk`` for one between, ``--directory`` on the disk
to measure, ``--memory`` on a file system in memory (either may be empty), ``--json`` for the figures, ``--profile`` for
where the time goes. Out: a table of medians with their spread and of ratios within one run. Never: an assertion about a
rate, anything left behind.

Method. Four are measured in turn, round after round (A B C D A B C D ...): the limit of the machine (fio with direct
I/O and the block size of a chunk, the better of two depths; a loop of vectored direct calls where fio is missing), the
slab in its I/O process, the same without checksums, and the file tier of vLLM as its package has it, on a view of the
same size. The slab has room for four times of what is stored. Same bytes, jobs of 32 chunks, eight jobs in flight, the
default threads of each. Loads come right after the stores of the same round and go past the page cache; on a memory
file system everything is in memory. "Busy": the
engine's thread does units of pure Python of about 0.4 ms, one after the other, and looks for reports in between. The
first round warms up and does not count.

``--profile`` counts instead what the slab costs in CPU time, which other programs on the machine disturb less than
rates: microseconds per chunk of the I/O process, of the threads that Orlop has beside the engine's, and of the calls on
the engine's thread itself, and how often the I/O process gave its core away per job.

    PYTHONPATH=src python bench/disk_tier_vs_vllm.py --short
    PYTHONPATH=src python bench/disk_tier_vs_vllm.py --profile
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from damage_vs_vllm import vllm_file_tier
from io_threads_or_process import Unit, cpu_name
from orlop.core import Namespace, Outcome, RegionLayout, TierJob, TransferKind
from orlop.host.region import HostRegion
from orlop.stores.disk.store import DiskStore
from orlop.tiering import envelope
from orlop.tiering.io_messages import StoreSpec
from orlop.tiering.runner import RunnerOptions, TierRunner

JOB_CHUNKS = 32
IN_FLIGHT = 8
NAMESPACE = Namespace(b"bench".ljust(16, b"\0"))
STORE, LOAD = TransferKind.STORE, TransferKind.LOAD
Rates = dict[tuple[TransferKind, str], float]


@dataclass(frozen=True)
class Size:
    """How much is moved: ``total_bytes`` per verb and round, through a host view of ``view_bytes``."""

    chunk_bytes: int
    total_bytes: int
    view_bytes: int

    @property
    def jobs(self) -> int:
        return self.total_bytes // (self.chunk_bytes * JOB_CHUNKS)

    def slots(self, number: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Where in the view the chunks of a job lie."""
        first = number * JOB_CHUNKS % (self.view_bytes // self.chunk_bytes)
        return np.arange(first, first + JOB_CHUNKS, dtype=np.int64)


class Tier:
    """What is measured: takes jobs, says how many have ended since the last call."""

    def submit(self, kind: TransferKind, number: int) -> None:
        raise NotImplementedError

    def finished(self) -> int:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def unchecked_store(**kwargs: Any) -> DiskStore:
    """Made in the I/O process: from then on it takes every checksum for 0."""
    envelope.digest = lambda view: 0  # type: ignore[assignment]
    return DiskStore(**kwargs)


class Slab(Tier):
    def __init__(self, path: str, size: Size, checksums: bool = True) -> None:
        slots = size.view_bytes // size.chunk_bytes
        self._size = size
        self._region = HostRegion.create(RegionLayout(slots, 1, ((size.chunk_bytes,),)), prefault=False)
        rng = np.random.default_rng(0)
        for slot in range(slots):
            self._region.slots[slot] = np.frombuffer(rng.bytes(size.chunk_bytes), np.uint8)
            self._region.checksums[slot] = envelope.part_checksum(self._region.slots[slot]) if checksums else 0
        factory = "orlop.stores.disk.store:DiskStore" if checksums else "disk_tier_vs_vllm:unchecked_store"
        self._runner = TierRunner(
            RunnerOptions("bench", queue_bytes=1 << 40, load_queue_bytes=1 << 40),
            self._region,
            StoreSpec(factory, {"path": path, "max_bytes": 4 * size.total_bytes}),
        )
        if trouble := self._runner.wait_ready(30.0):
            raise SystemExit(trouble)
        self._ids = iter(range(1 << 30))

    @property
    def io_pid(self) -> int:
        pid = self._runner.io_pid
        assert pid is not None
        return pid

    def submit(self, kind: TransferKind, number: int) -> None:
        keys = tuple((number * JOB_CHUNKS + i).to_bytes(32, "big") + bytes(4) for i in range(JOB_CHUNKS))
        job = TierJob(next(self._ids), kind, 0, keys, self._size.slots(number), self._size.chunk_bytes, NAMESPACE)
        submit = self._runner.submit_load if kind is LOAD else self._runner.submit_store
        submit(job, now=time.monotonic())

    def finished(self) -> int:
        results = self._runner.get_finished_jobs()
        for result in results:
            if result.outcomes.count(Outcome.OK) != JOB_CHUNKS:
                raise SystemExit(f"a job failed: {result.reason or set(result.outcomes)}")
        return len(results)

    def close(self) -> None:
        self._runner.shutdown(30.0)
        self._region.close()


class VllmFiles(Tier):
    """vLLM's own file tier over a view of the same size; imported late, since the program runs without it too."""

    def __init__(self, path: str, size: Size) -> None:
        from vllm.v1.kv_offload.base import ReqContext, make_offload_key
        from vllm.v1.kv_offload.tiering.base import TransferJob

        slots = size.view_bytes // size.chunk_bytes
        view = np.frombuffer(mmap.mmap(-1, size.view_bytes), np.uint8).reshape(slots, size.chunk_bytes)
        view[:] = np.frombuffer(np.random.default_rng(0).bytes(size.chunk_bytes), np.uint8)
        self._size = size
        self._job, self._key, self._context = TransferJob, make_offload_key, ReqContext(req_id="bench")
        self._tier = vllm_file_tier(path, view, "bench")
        self._ids = iter(range(1 << 30))

    def submit(self, kind: TransferKind, number: int) -> None:
        keys = [self._key((number * JOB_CHUNKS + i).to_bytes(32, "little"), 0) for i in range(JOB_CHUNKS)]
        job = self._job(next(self._ids), keys, self._size.slots(number), kind is LOAD, self._context)
        (self._tier.submit_load if kind is LOAD else self._tier.submit_store)(job)

    def finished(self) -> int:
        results = list(self._tier.get_finished_jobs())
        if not all(result.success for result in results):
            raise SystemExit("a job of the peer failed")
        return len(results)

    def close(self) -> None:
        self._tier.shutdown()


def move(tier: Tier, kind: TransferKind, size: Size, unit: Unit | None) -> float:
    """All jobs of one verb; GB/s."""
    began = time.perf_counter()
    submitted = done = 0
    while done < size.jobs:
        while submitted < size.jobs and submitted - done < IN_FLIGHT:
            tier.submit(kind, submitted)
            submitted += 1
        if unit is not None:
            unit()
        else:
            time.sleep(0.0005)
        done += tier.finished()
    return size.jobs * JOB_CHUNKS * size.chunk_bytes / (time.perf_counter() - began) / 1e9


def measure(directory: str, make: Callable[[str, Size], Tier], size: Size, unit: Unit) -> Rates:
    """Fresh for each verb's pair: stores beside an idle thread, loads; then the same beside a busy one."""
    rates: Rates = {}
    for beside, busy in (("idle", None), ("busy", unit)):
        path = tempfile.mkdtemp(prefix="orlop-bench-", dir=directory)
        tier = make(path, size)
        try:
            for kind in (STORE, LOAD):
                rates[kind, beside] = move(tier, kind, size, busy)
        finally:
            tier.close()
            shutil.rmtree(path)
    return rates


# --- where the time goes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cpu:
    """What some threads have used so far: seconds, ticks in user and in kernel mode, times the core was given away."""

    seconds: float
    user: int
    system: int
    switches: int

    @classmethod
    def of(cls, pid: int, but: int = -1) -> Cpu:
        """All threads of a process but one; Linux only."""
        seconds, user, system, switches = 0.0, 0, 0, 0
        for thread in os.listdir(f"/proc/{pid}/task"):
            if int(thread) == but:
                continue
            path = f"/proc/{pid}/task/{thread}"
            with open(f"{path}/schedstat") as file:
                seconds += int(file.read().split()[0]) / 1e9
            with open(f"{path}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            user, system = user + int(fields[11]), system + int(fields[12])
            with open(f"{path}/status") as file:
                switches += sum(int(line.split()[1]) for line in file if line.startswith("voluntary_ctxt_switches"))
        return cls(seconds, user, system, switches)

    def since(self, before: Cpu) -> Cpu:
        return Cpu(
            self.seconds - before.seconds,
            self.user - before.user,
            self.system - before.system,
            self.switches - before.switches,
        )


class Timed(Tier):
    """Another tier, and the CPU time of its calls on the engine's thread."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.seconds = 0.0

    def submit(self, kind: TransferKind, number: int) -> None:
        began = time.thread_time()
        self._tier.submit(kind, number)
        self.seconds += time.thread_time() - began

    def finished(self) -> int:
        began = time.thread_time()
        done = self._tier.finished()
        self.seconds += time.thread_time() - began
        return done


def profile(directory: str, where: str, size: Size, unit: Unit) -> None:
    """One row per verb, beside an idle and a busy engine's thread."""
    for beside, busy in (("idle", None), ("busy", unit)):
        path = tempfile.mkdtemp(prefix="orlop-bench-", dir=directory)
        slab = Slab(path, size)
        try:
            for kind in (STORE, LOAD):
                timed = Timed(slab)
                before = Cpu.of(slab.io_pid), Cpu.of(os.getpid(), os.getpid())
                rate = move(timed, kind, size, busy)
                io = Cpu.of(slab.io_pid).since(before[0])
                beside_engine = Cpu.of(os.getpid(), os.getpid()).since(before[1])
                chunks, share = size.jobs * JOB_CHUNKS, io.system / max(1, io.user + io.system)
                print(
                    f"{where:<7} {size.chunk_bytes >> 10:>5} KiB {kind:<6} {beside:<5}"
                    f" {io.seconds / chunks * 1e6:>11.1f} {share:>9.2f} {io.switches / size.jobs:>9.1f}"
                    f" {beside_engine.seconds / chunks * 1e6:>14.2f} {timed.seconds / chunks * 1e6:>9.2f} {rate:>6.2f}"
                )
        finally:
            slab.close()
            shutil.rmtree(path)


# --- the limit ----------------------------------------------------------------------------------------------


def limit(directory: str, size: Size, direct: bool) -> Rates:
    """What the disk gives to whoever asks best."""
    measure_one = fio if shutil.which("fio") else bare
    path = tempfile.mkdtemp(prefix="orlop-bench-", dir=directory)
    try:
        rates = {kind: measure_one(f"{path}/file", kind, size, direct) for kind in (STORE, LOAD)}
    finally:
        shutil.rmtree(path)
    return {(kind, beside): rate for kind, rate in rates.items() for beside in ("idle", "busy")}


def fio(path: str, kind: TransferKind, size: Size, direct: bool) -> float:
    best = 0.0
    for depth in (8, 32):
        command = ["fio", "--name=limit", f"--filename={path}", f"--size={size.total_bytes}", "--output-format=json"]
        command += [f"--bs={size.chunk_bytes}", f"--iodepth={depth}", f"--direct={int(direct)}"]
        command += ["--ioengine=libaio" if direct else "--ioengine=psync", "--fallocate=posix"]
        command += ["--rw=write" if kind is STORE else "--rw=read"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        best = max(best, job["write" if kind is STORE else "read"]["bw_bytes"] / 1e9)
    return best


def bare(path: str, kind: TransferKind, size: Size, direct: bool) -> float:
    """Four threads of vectored calls over a preallocated file."""
    flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
    fd = os.open(path, flags, 0o600)
    os.posix_fallocate(fd, 0, size.total_bytes)
    count = max(1, min(16, (4 << 20) // size.chunk_bytes))
    step = count * size.chunk_bytes
    steps = iter(range(0, size.total_bytes - step + 1, step))
    lock = threading.Lock()

    def work() -> None:
        buffer = memoryview(mmap.mmap(-1, step))
        call = os.pwritev if kind is STORE else os.preadv
        while True:
            with lock:
                offset = next(steps, None)
            if offset is None:
                return
            call(fd, [buffer], offset)

    threads = [threading.Thread(target=work) for _ in range(4)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    return size.total_bytes / (time.perf_counter() - began) / 1e9


# --- the table ----------------------------------------------------------------------------------------------


def compare(directory: str, size: Size, rounds: int, unit: Unit, direct: bool) -> dict[str, list[Rates]]:
    contenders: dict[str, Callable[[], Rates]] = {
        "limit": lambda: limit(directory, size, direct),
        "slab": lambda: measure(directory, Slab, size, unit),
        "unchecked": lambda: measure(directory, lambda path, s: Slab(path, s, checksums=False), size, unit),
    }
    try:
        import vllm.v1.kv_offload.tiering.fs.manager  # noqa: F401

        contenders["vllm"] = lambda: measure(directory, VllmFiles, size, unit)
    except ImportError:
        print("vLLM is not installed: its columns are left out", file=sys.stderr)
    seen: dict[str, list[Rates]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            rates = run()
            if turn:
                seen[name].append(rates)
    return seen


def show(where: str, size: Size, seen: dict[str, list[Rates]]) -> None:
    for kind in (STORE, LOAD):
        for beside in ("idle", "busy"):
            columns = {name: [rates[kind, beside] for rates in rounds] for name, rounds in seen.items()}
            cells = "".join(
                f" {statistics.median(v):>6.2f} ({min(v):.2f}-{max(v):.2f})" if v else f"{'':>20}"
                for v in (columns.get(name, []) for name in ("limit", "slab", "unchecked", "vllm"))
            )
            ratios = "".join(f" {ratio(columns, name):>9}" for name in ("limit", "vllm", "unchecked"))
            print(f"{where:<7} {size.chunk_bytes >> 10:>5} KiB {kind:<6} {beside:<5}{cells}{ratios}")


def ratio(columns: dict[str, list[float]], name: str) -> str:
    """The median of the ratios of each round."""
    pairs = list(zip(columns["slab"], columns.get(name, []), strict=False))
    return f"{statistics.median(a / b for a, b in pairs):.2f}" if pairs else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="one round of little, to see that it works")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=2048, help="what is moved per verb and round")
    parser.add_argument("--chunk", type=int, choices=(64, 2048), help="KiB; without it both sizes")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--memory", default="/dev/shm", help="on a file system in memory; empty: left out")
    parser.add_argument("--json", help="a file for the figures")
    parser.add_argument("--profile", action="store_true", help="CPU time per chunk, and who needs it, instead of rates")
    options = parser.parse_args()
    rounds = 1 if options.short else options.rounds
    total = (64 if options.short else options.mib) << 20
    unit = Unit()
    print(f"{platform.platform()}, {os.cpu_count()} cores, {cpu_name()}; load {os.getloadavg()[0]:.1f}")
    if options.profile:
        print(f"Python {platform.python_version()}, {total >> 20} MiB per row")
        print("CPU microseconds per chunk; system: share in the kernel; switches: of the I/O process per job\n")
        print("where       chunk verb   beside I/O process    system  switches  other threads  calls on  GB/s")
    else:
        print(f"Python {platform.python_version()}, {rounds} rounds of {total >> 20} MiB after one that warms up; GB/s")
        print_head()
    figures = []
    for where, directory in (("disk", options.directory), ("memory", options.memory)):
        if not directory:
            continue
        for chunk_bytes in (64 << 10, 2 << 20) if options.chunk is None else (options.chunk << 10,):
            size = Size(chunk_bytes, total, (64 << 20) if chunk_bytes < 1 << 20 else (512 << 20))
            if options.profile:
                profile(directory, where, size, unit)
                continue
            seen = compare(directory, size, rounds, unit, direct=where == "disk")
            show(where, size, seen)
            figures.append({"where": where, "chunk_bytes": chunk_bytes, "seen": _plain(seen)})
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


def print_head() -> None:
    print(f"limit: {'fio' if shutil.which('fio') else 'a loop of direct calls, since fio is not installed'}\n")
    print(
        "where       chunk verb   beside  limit (spread)      slab (spread)       no checksum         vLLM"
        "            slab to: limit      vLLM no checksum"
    )


def _plain(seen: dict[str, list[Rates]]) -> dict[str, list[dict[str, float]]]:
    return {
        name: [{f"{kind} {beside}": rate for (kind, beside), rate in rates.items()} for rates in rounds]
        for name, rounds in seen.items()
    }


if __name__ == "__main__":
    main()
