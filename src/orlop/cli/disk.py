"""What ``orlop doctor`` looks at for a tier: its directory, the room in it, direct I/O and how fast the disk is.

In: a tier's settings. Out: ``Finding``s. Never: a directory made, a file with a name for longer than one call (so a
killed doctor leaves none), more than ``PROBE_BYTES`` or ``PROBE_S`` of I/O each way, a look inside a store.
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from orlop.cli.machine import FAIL, OK, WARN, Finding
from orlop.config import FILES_BYTES_AT_LEAST, TIER_TYPES, TierConfig
from orlop.host.limits import legible_bytes, settable_bytes

PROBE_BYTES, PROBE_S, CALL_BYTES = 64 << 20, 1.0, 4 << 20
SLOW_BYTES_PER_S = 100e6
COUNTING_S = 3.0
"""How long a store's files are counted before the count is called a lower bound."""


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Bytes per second of one thread, ``CALL_BYTES`` per call, past the page cache where ``direct``."""

    direct: bool
    write: float
    read: float


def check_tier(key: str, tier: TierConfig) -> Iterator[Finding]:
    """The directory of the tier whose settings begin with ``key``."""
    if tier.type not in TIER_TYPES or tier.path is None or tier.bytes is None:
        yield Finding(OK, key, f"a store of your own ({tier.type}); it knows itself what it needs")
        return
    path = Path(tier.path)
    place = next((p for p in (path, *path.parents) if os.path.lexists(p)), path)
    if not place.is_dir():
        yield Finding(FAIL, f"{key}.path", f"{place} is not a directory", "name another path")
        return
    writable = os.access(place, os.R_OK | os.W_OK | os.X_OK)
    if not writable and (place != path or tier.write != "off" or not os.access(place, os.R_OK | os.X_OK)):
        yield Finding(FAIL, f"{key}.path", f"no permission in {place}", "change its owner or mode, or the path")
        return
    yield Finding(OK, f"{key}.path", str(path) if place == path else f"{path}, not there yet: will be made in {place}")
    yield _room(key, tier.bytes, path, place)
    if writable:
        yield _speed(f"{key} disk", tier, place)


def _room(key: str, bound: int, path: Path, place: Path) -> Finding:
    free = shutil.disk_usage(place).free
    used, counted_all = _bytes_below(path, time.monotonic() + COUNTING_S)
    found = f"bound {legible_bytes(bound)}, {'' if counted_all else 'at least '}{legible_bytes(used)} in use, "
    found += f"{legible_bytes(free)} free on the disk"
    room = free + used
    if room < FILES_BYTES_AT_LEAST:
        return Finding(FAIL, f"{key}.bytes", found, "make room on the disk, or name another path")
    if room < bound and counted_all:
        advice = f"set {settable_bytes(room)} or less: a disk that is full before the bound costs failed stores"
        return Finding(WARN, f"{key}.bytes", found, advice)
    return Finding(OK, f"{key}.bytes", found)


def _bytes_below(path: Path, deadline: float) -> tuple[int, bool]:
    """Bytes of the files below ``path``, and whether all were counted by the deadline (monotonic seconds)."""
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(directory, name)).st_size
            except OSError:
                continue  # evicted meanwhile
        if time.monotonic() > deadline:
            return total, False
    return total, True


def _speed(key: str, tier: TierConfig, place: Path) -> Finding:
    try:
        speed = measure(place, direct=tier.direct_io != "off")
    except OSError as error:
        return Finding(FAIL, key, f"writing to {place} fails: {error.strerror}", "mend the disk, or name another path")
    rates = f"writes {legible_bytes(int(speed.write))}/s, reads {legible_bytes(int(speed.read))}/s"
    found = f"{rates}, {'direct I/O' if speed.direct else 'through the page cache'}"
    if tier.direct_io == "on" and not speed.direct:
        return Finding(FAIL, key, f"{found}; direct_io is 'on'", "set direct_io to 'auto', or name another path")
    if min(speed.write, speed.read) < SLOW_BYTES_PER_S:
        return Finding(WARN, key, found, "computing may be faster than this disk: measure, or name another path")
    if tier.direct_io == "auto" and not speed.direct:
        return Finding(WARN, key, found, "this file system takes no direct I/O; what is stored crowds the page cache")
    return Finding(OK, key, found)


def measure(directory: Path, *, direct: bool) -> DiskSpeed:
    """Write to a file in ``directory`` and read it back; buffered where direct I/O is refused. ``OSError`` else."""
    if direct and hasattr(os, "O_DIRECT"):
        try:
            return _measure(directory, os.O_DIRECT)
        except OSError:
            pass  # refused, or the disk itself is in trouble: the other way tells
    return _measure(directory, 0)


def _measure(directory: Path, flags: int) -> DiskSpeed:
    name = directory / f".orlop-doctor-{secrets.token_hex(8)}"
    fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        os.unlink(name)
        size = min(PROBE_BYTES, shutil.disk_usage(directory).free // 4 // CALL_BYTES * CALL_BYTES)
        with mmap.mmap(-1, CALL_BYTES) as page_aligned:
            page_aligned.write(os.urandom(CALL_BYTES))
            written, write = _rate(max(size, CALL_BYTES), lambda at: _write(fd, page_aligned, at, sync=not flags))
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            _, read = _rate(written, lambda at: os.preadv(fd, [page_aligned], at))
        return DiskSpeed(bool(flags), write, read)
    finally:
        os.close(fd)


def _write(fd: int, data: mmap.mmap, at: int, *, sync: bool) -> int:
    written = os.pwrite(fd, data, at)
    if sync:  # each time, so that the time limit sees what the disk does and not what the page cache takes
        os.fdatasync(fd)
    return written


def _rate(size: int, call: Callable[[int], int]) -> tuple[int, float]:
    """Bytes moved, at most ``size`` and for about ``PROBE_S``, and bytes per second."""
    began, done = time.monotonic(), 0
    while done < size and time.monotonic() - began < PROBE_S:
        done += call(done)
    return done, done / (time.monotonic() - began)
