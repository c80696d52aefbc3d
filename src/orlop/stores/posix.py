"""What stores on a POSIX file system share: vectored calls, alignment, locks, and words for what went wrong.

In: descriptors, buffers, errors of the system. Out: all bytes moved, a lock that dies with its process, an outcome per
error and one log line per kind of it. Never: a layout on disk, a decision about a chunk.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from orlop.core import PAGE_BYTES, Outcome

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)
NO_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)

_OUTCOMES = {
    errno.EACCES: Outcome.DENIED,
    errno.EPERM: Outcome.DENIED,
    errno.EROFS: Outcome.DENIED,
    errno.ENOSPC: Outcome.NO_SPACE,
    errno.EDQUOT: Outcome.NO_SPACE,
    errno.ETIMEDOUT: Outcome.TIMEOUT,
}
_SAY_AGAIN_S = 300.0


class Complaints:
    """Says the first failure of each kind, and again only after a while; ``who`` begins each line. Any thread."""

    def __init__(self, who: str, clock: Callable[[], float]) -> None:
        self._who = who
        self._clock = clock
        self._lock = threading.Lock()
        self._said: dict[str, float] = {}

    def hear(self, verb: str, error: OSError) -> Outcome:
        """The outcome that ``error`` stands for."""
        kind = f"{verb}: {named(error)}"
        with self._lock:
            now = self._clock()
            new = now - self._said.get(kind, -_SAY_AGAIN_S) >= _SAY_AGAIN_S
            if new:
                self._said[kind] = now
        if new:
            log.warning("%s: %s failed (%s); further ones are counted", self._who, verb, named(error))
        return _OUTCOMES.get(error.errno or 0, Outcome.IO_ERROR)


def move_all(
    move: Callable[[int, list[memoryview], int], int], fd: int, buffers: Sequence[memoryview], offset: int = 0
) -> None:
    """One vectored call for all, and more where it moved less (2 GiB is the kernel's most)."""
    left = list(buffers)
    missing = sum(map(len, left))
    while missing:
        moved = move(fd, left, offset)
        if moved == 0:
            raise EOFError
        offset += moved
        missing -= moved
        if not missing:
            return
        done = 0
        while moved >= len(left[done]):
            moved -= len(left[done])
            done += 1
        left[: done + 1] = [left[done][moved:]]


def in_the_way(path: Path) -> Path:
    """The part of ``path`` that is there and is no directory."""
    return next((part for part in (path, *path.parents) if os.path.lexists(part) and not part.is_dir()), path)


def aligned(*buffers: memoryview) -> bool:
    """Whether direct I/O can take the buffers: addresses and lengths multiples of a page."""
    return all(
        len(buffer) % PAGE_BYTES == 0 and _address(buffer) % PAGE_BYTES == 0 for buffer in buffers if len(buffer)
    )


def try_lock(fd: int) -> bool | None:
    """Whether the lock is ours now; None where the file system knows no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def named(error: OSError) -> str:
    return f"{errno.errorcode.get(error.errno or 0, 'unknown errno')}: {error.strerror or error}"


def entries(directory: str | Path) -> Iterator[os.DirEntry[str]]:
    """The entries of a directory; none where it cannot be read."""
    try:
        with os.scandir(directory) as entries:
            yield from entries
    except OSError:
        return


def _address(buffer: memoryview) -> int:
    if buffer.readonly:
        address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
        return address
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))  # a fifth of the time
