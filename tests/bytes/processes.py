"""What the kernel says of other processes.

In: process ids. Out: their children, what they hold of /dev/shm, and whether they end. Never: a signal.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Children of ``pid``, by the kernel's own lists, one per thread that started them."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text(encoding="ascii").split()]


def is_gone(pid: int, timeout_s: float = 60.0) -> bool:
    """Whether the process ends by itself within the limit; asks the kernel, which tells through a pidfd."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], timeout_s)[0])
    finally:
        os.close(fd)


def shared_memory_of(pids: Iterable[int]) -> set[str]:
    """Files of /dev/shm that these processes have mapped or open; nobody else's, whatever happens on the machine."""
    held: set[str] = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
            held |= {line[line.index("/dev/shm/") :] for line in maps.splitlines() if "/dev/shm/" in line}
        with suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # closed meanwhile
                    held.add(os.readlink(fd))
    return {path for path in held if path.startswith("/dev/shm/")}


def left_of(shared_memory: Iterable[str]) -> list[str]:
    """Those that still have a name."""
    return [path for path in shared_memory if os.path.lexists(path)]
