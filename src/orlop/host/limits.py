"""What the machine can give: memory, by everything that bounds it.

In: a layout, and the kernel's own pages on limits. Out: limits and the bytes that are left under them, or an error
with these numbers. Never: an allocation, a change of a limit.
"""

from __future__ import annotations

import mmap
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orlop.core import PAGE_BYTES, RegionLayout
from orlop.errors import ResourceError

_ROUNDING_BYTES = 3 * PAGE_BYTES
"""Of a region's bytes those that do not grow with its slots."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Something that bounds memory: a name for messages, its bytes, and those that are left under it now."""

    name: str
    limit_bytes: int
    available_bytes: int


def check_room(layout: RegionLayout, total_bytes: int, *, pinned: bool = False) -> None:
    """``ResourceError`` with the numbers where the machine cannot give a region its ``total_bytes``."""
    least = min(memory_limits(pinned=pinned), key=lambda limit: limit.available_bytes, default=None)
    if least is None or total_bytes <= least.available_bytes:
        return
    slots_bytes = layout.slots * layout.slot_bytes
    fitting = max(0, least.available_bytes - _ROUNDING_BYTES) * slots_bytes // total_bytes
    if fitting < layout.slot_bytes:
        advice = f"one chunk has {layout.slot_bytes} bytes: free memory, or raise that limit"
    else:
        advice = f"set {settable_bytes(fitting)} or less, or raise that limit"
    raise ResourceError(
        f"host.bytes: found {legible_bytes(slots_bytes)}, expected at most {legible_bytes(least.available_bytes)}, "
        f"which is what is free here ({least.name}); {advice}"
    )


def free_bytes() -> int | None:
    """The least that is left under any limit now; None where nothing tells."""
    return min((limit.available_bytes for limit in memory_limits()), default=None)


def memory_limit_bytes(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The most memory that this process may ever use: the machine's, or less where something else bounds it."""
    limits = memory_limits(proc=proc, cgroups=cgroups)
    return min((limit.limit_bytes for limit in limits), default=sys.maxsize)


def legible_bytes(nbytes: int) -> str:
    """Three digits and a unit of powers of 1000: ``21.3 GB``."""
    unit, size = _unit(nbytes, 1)
    value = nbytes / size
    digits = 0 if size == 1 or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def settable_bytes(nbytes: int) -> str:
    """As a setting is written: at most ``nbytes``, and not less by more than a tenth."""
    unit, size = _unit(nbytes, 10)
    return f"{nbytes // size}{unit}"


def _unit(nbytes: int, least: int) -> tuple[str, int]:
    """The largest unit of which ``nbytes`` holds ``least`` or more, else the byte."""
    units = {"PB": 10**15, "TB": 10**12, "GB": 10**9, "MB": 10**6, "kB": 1000}
    return next(((unit, size) for unit, size in units.items() if nbytes >= least * size), ("B", 1))


def memory_limits(
    *, pinned: bool = False, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> list[Limit]:
    """What bounds this process' memory; what cannot be read bounds nothing."""
    limits = [*_meminfo_limit(proc), *_cgroup_limits(proc, cgroups), *_rlimit(resource.RLIMIT_AS, "RLIMIT_AS", proc)]
    if pinned:
        limits += _rlimit(resource.RLIMIT_MEMLOCK, "RLIMIT_MEMLOCK", proc)
    return limits


def _meminfo_limit(proc: Path) -> Iterator[Limit]:
    found = {line.split(":")[0]: line.split()[1] for line in _lines(proc / "meminfo") if line.endswith(" kB")}
    if "MemTotal" in found and "MemAvailable" in found:
        total, available = (int(found[name]) * 1024 for name in ("MemTotal", "MemAvailable"))
        yield Limit("MemAvailable of /proc/meminfo", total, available)


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[Limit]:
    """Memory limits of our cgroup and of all above it, version 1 and 2."""
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _up(cgroups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _up(
                cgroups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )


def _up(root: Path, path: str, limit_file: str, usage_file: str, cache_field: str) -> Iterator[Limit]:
    """One limit per directory from ``path`` up to the mount; a container may see the mount only."""
    here = root / path.lstrip("/")
    for directory in [here, *here.parents]:
        limit = _lines(directory / limit_file)
        usage = _lines(directory / usage_file)
        if limit and usage and limit[0].isdigit():
            cache = [int(line.split()[1]) for line in _lines(directory / "memory.stat") if line.startswith(cache_field)]
            available = int(limit[0]) - int(usage[0]) + sum(cache[:1])
            yield Limit(str(directory / limit_file), int(limit[0]), available)
        if directory == root:
            return


def _rlimit(which: int, name: str, proc: Path) -> Iterator[Limit]:
    soft, _ = resource.getrlimit(which)
    if soft == resource.RLIM_INFINITY:
        return
    used_pages = int(_lines(proc / "self/statm")[0].split()[0]) if which == resource.RLIMIT_AS else 0
    yield Limit(name, soft, soft - used_pages * mmap.PAGESIZE)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
