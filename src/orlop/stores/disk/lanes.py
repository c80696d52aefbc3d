"""Lanes: how several engines of one host share a directory under one bound.

In: the directory, a namespace. Out: a lane that is ours until the process ends, the bytes that the file system counts,
room that idle lanes give back. Never: a look into a segment, a touch of a lane that an engine has.

Whoever takes a lane, makes a segment or retires those of idle lanes holds the lock of the directory. A lane is taken by
locking its file ``lane``; both locks end with the process that holds them.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from orlop.core import PAGE_BYTES
from orlop.errors import StoreError
from orlop.stores.disk.device import used_bytes
from orlop.stores.disk.format import ForeignVersion, pack_lane, unpack_lane
from orlop.stores.disk.recovery import segment_numbers, segment_paths
from orlop.stores.posix import entries, try_lock

LANE_FILE = "lane"
WISH_FILE = "wish"
LOCK_FILE = "lock"
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)


class Lane:
    """A lane of ours: its directory, and the lock on it until ``close``."""

    def __init__(self, root: str, number: int, fd: int, damaged: int) -> None:
        self.root = root
        self.number = number
        self.directory = f"{root}/{number}"
        self.damaged = damaged
        """Copies of its superblock that were not whole."""
        self._fd = fd

    def is_linked(self) -> bool:
        """Whether it is still there; False once somebody has removed the directory."""
        return self._fd >= 0 and os.fstat(self._fd).st_nlink > 0

    def wish(self, wanted: bool) -> None:
        """Say, or say no more, that this lane has less than its share and needs room."""
        path = f"{self.directory}/{WISH_FILE}"
        with suppress(OSError):
            if not wanted:
                os.unlink(path)
            elif not os.path.exists(path):
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))

    def close(self) -> None:
        if self._fd >= 0:
            self.wish(False)
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


@contextmanager
def directory_lock(root: str) -> Iterator[None]:
    """One at a time takes lanes, makes segments, retires others'. ``StoreError``: there are no locks here."""
    path = f"{root}/{LOCK_FILE}"
    try:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def lane_numbers(root: str) -> list[int]:
    return sorted(int(entry.name) for entry in entries(root) if entry.name.isdigit() and entry.is_dir())


def take_lane(root: str, namespace: bytes) -> Lane:
    """The lowest free lane of ``namespace``, else the lowest free one, else a new one. ``OSError``, ``StoreError``."""
    with directory_lock(root):
        free: list[tuple[bool, int, int, int]] = []
        numbers = lane_numbers(root)
        try:
            for number in numbers:
                if (fd := _lock_lane(root, number)) is None:
                    continue
                try:
                    found, damaged = _read_lane(fd)
                except ForeignVersion:
                    os.close(fd)
                    continue
                free.append((found != namespace, number, fd, damaged))
            if not free:
                free.append(_make_lane(root, next(n for n in range(len(numbers) + 1) if n not in numbers)))
        finally:
            free.sort()
            for _, _, fd, _ in free[1:]:
                os.close(fd)
        foreign, number, fd, damaged = free[0]
        lane = Lane(root, number, fd, damaged)
        if foreign or damaged:
            with suppress(OSError):  # a read-only directory can still be read from
                os.pwrite(fd, pack_lane(namespace), 0)
        return lane


def _lock_lane(root: str, number: int) -> int | None:
    """The lane's file, locked by us; None where an engine has it, or where it cannot be opened."""
    path = f"{root}/{number}/{LANE_FILE}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            return None
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
    locked = try_lock(fd)
    if locked:
        return fd
    os.close(fd)
    if locked is None:
        raise StoreError(
            f"path: found no locks on the file system of {root}, expected a local one; use type 'files' there"
        )
    return None


def _make_lane(root: str, number: int) -> tuple[bool, int, int, int]:
    os.makedirs(f"{root}/{number}", exist_ok=True)
    fd = _lock_lane(root, number)
    if fd is None:
        raise StoreError(f"path: found lane {number} of {root} not to be had, expected a directory to write to")
    return True, number, fd, 0


def _read_lane(fd: int) -> tuple[bytes | None, int]:
    """Namespace and damaged copies. A new file is not damaged."""
    page = os.pread(fd, PAGE_BYTES, 0)
    return unpack_lane(page) if page else (None, 0)


# --- the bound ----------------------------------------------------------------------------------------------


def others_alive(root: str, own: int) -> tuple[int, bool]:
    """How many other lanes engines have, and whether one of those wishes for room. Under the lock."""
    alive, wish = 0, False
    for number in lane_numbers(root):
        if number == own:
            continue
        if not is_held(root, number):
            continue
        alive += 1
        wish = wish or os.path.exists(f"{root}/{number}/{WISH_FILE}")
    return alive, wish


@dataclass(frozen=True, slots=True, order=True)
class IdleSegment:
    """In the order in which they are retired: other namespaces and versions first, then by last use."""

    ours: bool
    last_use_us: int
    lane: int
    number: int


def retire_idle(root: str, own: int, namespace: bytes, wanted_bytes: int, older_than_us: int) -> int:
    """Remove segments of lanes nobody has until ``wanted_bytes`` are free; how many bytes are. Under the lock.

    Those of our own namespace go only where their last use is before ``older_than_us``.
    """
    with _idle_lanes(root, own, namespace) as lanes:
        idle = sorted(
            IdleSegment(ours, _last_use_us(f"{root}/{number}", n), number, n)
            for number, ours in lanes.items()
            for n in segment_numbers(os.listdir(f"{root}/{number}"))
        )
        before = used_bytes(root)
        freed = 0
        for segment in idle:
            if freed >= wanted_bytes or (segment.ours and segment.last_use_us >= older_than_us):
                break
            for path in segment_paths(f"{root}/{segment.lane}", segment.number):
                with suppress(OSError):
                    os.unlink(path)
            freed = before - used_bytes(root)
        for number in lanes:
            _remove_empty(f"{root}/{number}")
    return freed


@contextmanager
def hold_idle(root: str, number: int) -> Iterator[bool]:
    """Whether the lane is ours for the moment, because no engine has it. Under the lock of the directory."""
    fd = _lock_lane(root, number)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


def is_held(root: str, number: int) -> bool:
    """Whether an engine has the lane. Under the lock of the directory."""
    with hold_idle(root, number) as idle:
        return not idle


@contextmanager
def _idle_lanes(root: str, own: int, namespace: bytes) -> Iterator[dict[int, bool]]:
    """Lanes that nobody has, locked for as long as we are at it, and whether each is of our namespace."""
    held: dict[int, bool] = {}
    fds: list[int] = []
    try:
        for number in lane_numbers(root):
            fd = None if number == own else _lock_lane(root, number)
            if fd is None:
                continue
            fds.append(fd)
            try:
                held[number] = _read_lane(fd)[0] == namespace
            except ForeignVersion:
                held[number] = False
        yield held
    finally:
        for fd in fds:
            os.close(fd)


def _last_use_us(directory: str, number: int) -> int:
    try:
        return os.stat(segment_paths(directory, number)[1]).st_mtime_ns // 1000
    except OSError:
        return 0


def _remove_empty(directory: str) -> None:
    """A lane without segments goes; anything else in it stays, and keeps it."""
    names = set(os.listdir(directory))
    if names <= {LANE_FILE, WISH_FILE}:
        with suppress(OSError):
            for name in names:
                os.unlink(f"{directory}/{name}")
            os.rmdir(directory)
