"""What the machine can still give: memory, by everything that bounds it.

In: a layout, and the kernel's own pages on limits. Out: limits with the bytes that are left under them, or an error
with these numbers. Never: an allocation, a change of a limit.
"""

from __future__ import annotations

import mmap
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orlop.core import RegionLayout
from orlop.errors import ResourceError


@dataclass(frozen=True, slots=True)
class Limit:
    """Something that bounds a new region: a name for the message, and the bytes that are left under it."""

    name: str
    available_bytes: int


def check_room(layout: RegionLayout, total_bytes: int, *, pinned: bool = False) -> None:
    """``ResourceError`` with the numbers where the machine cannot give a region its ``total_bytes``."""
    for limit in memory_limits(pinned=pinned):
        if total_bytes > limit.available_bytes:
            fit = max(0, limit.available_bytes // layout.slot_bytes)
            raise ResourceError(
                f"found {limit.available_bytes} bytes left under {limit.name}, expected {total_bytes} for "
                f"{layout.slots} slots of {layout.slot_bytes} bytes; lower the host tier's size (about {fit} slots "
                "fit) or raise the limit"
            )


def memory_limits(
    *, pinned: bool = False, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> list[Limit]:
    """What bounds this process' memory now; what cannot be read bounds nothing."""
    limits = [*_meminfo_limit(proc), *_cgroup_limits(proc, cgroups), *_rlimit(resource.RLIMIT_AS, "RLIMIT_AS", proc)]
    if pinned:
        limits += _rlimit(resource.RLIMIT_MEMLOCK, "RLIMIT_MEMLOCK", proc)
    return limits


def _meminfo_limit(proc: Path) -> Iterator[Limit]:
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            yield Limit("MemAvailable of /proc/meminfo", int(line.split()[1]) * 1024)


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
            yield Limit(str(directory / limit_file), int(limit[0]) - int(usage[0]) + sum(cache[:1]))
        if directory == root:
            return


def _rlimit(which: int, name: str, proc: Path) -> Iterator[Limit]:
    soft, _ = resource.getrlimit(which)
    if soft == resource.RLIM_INFINITY:
        return
    used_pages = int(_lines(proc / "self/statm")[0].split()[0]) if which == resource.RLIMIT_AS else 0
    yield Limit(name, soft - used_pages * mmap.PAGESIZE)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
