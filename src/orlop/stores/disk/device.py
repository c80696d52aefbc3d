"""Files of the slab as it uses them: preallocated, vectored, with direct I/O where the file system has it.

In: paths, buffers, offsets. Out: bytes moved, or an ``OSError``. Never: what the bytes mean.

A double of these two classes records what is written and cuts the power; so nothing else in this package writes to a
file that holds chunks or their index.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from orlop.core import PAGE_BYTES
from orlop.stores.posix import NO_DIRECT_IO, aligned, entries, move_all

O_DIRECT = getattr(os, "O_DIRECT", 0)
IOV_MAX = 1024
_BLOCK_BYTES = 512


class File:
    """One open file. Calls move everything or raise: ``EOFError`` where a read meets the end."""

    def __init__(self, path: str, device: Device) -> None:
        self.path = path
        self._device = device
        self._fd = self._direct_fd = -1
        self._fd, self.writable = _open(path)
        if device.direct:
            with suppress(OSError):  # buffered I/O does
                self._direct_fd = os.open(path, (os.O_RDWR if self.writable else os.O_RDONLY) | os.O_CLOEXEC | O_DIRECT)

    def read(self, buffers: Sequence[memoryview], offset: int) -> None:
        self._move(os.preadv, buffers, offset)

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        if not self.writable:
            self._reopen()
        try:
            self._move(os.pwritev, buffers, offset)
        except EOFError as error:
            raise OSError(errno.EIO, "a write wrote nothing") from error

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def is_linked(self) -> bool:
        """Whether it still has a name; False once somebody has removed it."""
        return os.fstat(self._fd).st_nlink > 0

    def close(self) -> None:
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                with suppress(OSError):
                    os.close(fd)
        self._fd = self._direct_fd = -1

    def __del__(self) -> None:
        # A call may still be inside when its owner lets go of a file; the descriptor lives until that call is over.
        self.close()

    def _reopen(self) -> None:
        """A file system that was read-only may not be any more."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(fd, self._fd, inheritable=False)
        os.close(fd)
        self.writable = True

    def _move(
        self, move: Callable[[int, list[memoryview], int], int], buffers: Sequence[memoryview], offset: int
    ) -> None:
        for start in range(0, len(buffers), IOV_MAX):
            part = buffers[start : start + IOV_MAX]
            self._move_part(move, part, offset)
            if len(part) < len(buffers):
                offset += sum(map(len, part))

    def _move_part(
        self, move: Callable[[int, list[memoryview], int], int], buffers: Sequence[memoryview], offset: int
    ) -> None:
        if not (self._device.direct and self._direct_fd >= 0 and offset % PAGE_BYTES == 0 and _look_aligned(buffers)):
            move_all(move, self._fd, buffers, offset)
            return
        try:
            move_all(move, self._direct_fd, buffers, offset)
        except OSError as error:
            if error.errno not in NO_DIRECT_IO:
                raise
            move_all(move, self._fd, buffers, offset)
            if aligned(*buffers):
                self._device.fall_back(error)


class Device:
    """Makes, opens, lists and removes files. Any thread.

    ``direct``: whether direct I/O is used; ``on_fall_back`` hears why it is not any more, once.
    """

    def __init__(self, direct: bool, on_fall_back: Callable[[OSError], None]) -> None:
        self.direct = direct
        self._on_fall_back = on_fall_back
        self._lock = threading.Lock()

    def create(self, path: str, nbytes: int) -> File:
        """A new file of zeros with its space taken. ``OSError``: there is none, and no file."""
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError:
            self.remove(path)
            raise
        finally:
            os.close(fd)
        return self.open(path)

    def open(self, path: str) -> File:
        return File(path, self)

    def remove(self, path: str) -> None:
        """Gone or not there."""
        with suppress(FileNotFoundError):
            os.unlink(path)

    def names(self, directory: str) -> list[str]:
        """The files of a directory, sorted; none where it cannot be read."""
        with suppress(OSError):
            return sorted(os.listdir(directory))
        return []

    def used_bytes(self, path: str) -> int:
        """What the file system counts for a directory and all below it; 0 for what is not there."""
        return used_bytes(path)

    def fall_back(self, error: OSError) -> None:
        """Direct I/O failed where buffered I/O works: go on with that."""
        with self._lock:
            direct, self.direct = self.direct, False
        if direct:
            self._on_fall_back(error)


def used_bytes(path: str) -> int:
    """As ``Device.used_bytes``."""
    try:
        total = os.lstat(path).st_blocks * _BLOCK_BYTES
    except OSError:
        return 0
    for entry in entries(path):
        if entry.is_dir(follow_symlinks=False):
            total += used_bytes(entry.path)
        else:
            with suppress(OSError):
                total += entry.stat(follow_symlinks=False).st_blocks * _BLOCK_BYTES
    return total


def try_direct_io(path: str) -> OSError | None:
    """Write a page to a new file ``path`` past the page cache and read it back; why that does not work, if not."""
    page, back = (memoryview(mmap.mmap(-1, PAGE_BYTES)) for _ in range(2))
    page[:] = os.urandom(PAGE_BYTES)
    try:
        fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_CLOEXEC | O_DIRECT, 0o666)
        try:
            move_all(os.pwritev, fd, [page])
            move_all(os.preadv, fd, [back])
        finally:
            os.close(fd)
    except OSError as error:
        return error
    except EOFError:
        return OSError(errno.EIO, "the bytes that were written did not come back")
    finally:
        with suppress(OSError):
            os.unlink(path)
    return None if page == back else OSError(errno.EIO, "the bytes that were written did not come back")


def _look_aligned(buffers: Sequence[memoryview]) -> bool:
    """Whether direct I/O is worth a try: all lengths and the first address. The kernel looks at the others."""
    return not any(length % PAGE_BYTES for length in set(map(len, buffers))) and aligned(*buffers[:1])


def _open(path: str) -> tuple[int, bool]:
    """A descriptor, for reading alone where nothing else is allowed."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC), True
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False
