"""What the kernel says of other processes.

In: process ids. Out: their children, and whether they end. Never: a signal.
"""

from __future__ import annotations

import os
import select
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Children of ``pid``, by the kernel's own lists, one per thread that started them."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text(encoding="ascii").split()]


def is_gone(pid: int, timeout_s: float = 30.0) -> bool:
    """Whether the process ends by itself within the limit; asks the kernel, which tells through a pidfd."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], timeout_s)[0])
    finally:
        os.close(fd)
