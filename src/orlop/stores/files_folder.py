"""The directory of the files store, for the store and for tools beside it: what lies where.

In: a path. Out: chunks with key, size and age, the bytes of one, who has the directory open; without what dead writers
left, where that is asked for. Never: a file made, a use noted, a lock that a writer would wait for.

    <path>/<digest>.json                  a namespace in clear, for people and tools
    <path>/v1/tmp/<token>.lock            one per writer, locked as long as its process lives
    <path>/v1/tmp/<token>-<n>             a file being written
    <path>/v1/<namespace>/<xxx>/<key>     a chunk: header, payload; xxx is the start of the key's XXH3

Files appear whole and under their final name, and whoever has one open can read it to its end. So everything here may
run beside engines that use the directory; a chunk that goes meanwhile is a chunk less.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import xxhash

from orlop.core import DIGEST_BYTES, align_up
from orlop.stores.posix import entries, try_lock
from orlop.tiering.base import StoredChunk

LAYOUT_VERSION = "v1"
LOCK_SUFFIX = ".lock"
LEFTOVER_AGE_S = 3600.0
"""After which a file that nobody has written to is taken for left over, where locks do not tell."""
_FAN_OUT_DIGITS = 3


class FilesFolder:
    """The directory ``path`` of a files store. Any method from any thread; they block."""

    kind = "files"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.root = self.path / LAYOUT_VERSION
        self.tmp = self.root / "tmp"

    @classmethod
    def lies_in(cls, path: Path) -> bool:
        """Whether ``path`` is the directory of such a store."""
        return os.path.isdir(path / LAYOUT_VERSION)

    def path_of(self, key: bytes) -> str:
        """Where the chunk of ``key`` lies, or would lie."""
        tail = key[DIGEST_BYTES:]
        fan_out = xxhash.xxh3_64_hexdigest(tail)[:_FAN_OUT_DIGITS]
        return f"{self.root}/{key[:DIGEST_BYTES].hex()}/{fan_out}/{tail.hex()}"

    def scan(self, now: float | None = None) -> Iterator[StoredChunk]:
        """All chunks of all namespaces. ``now``: wall-clock seconds; ``nbytes`` includes the header."""
        for key, entry in self.chunks():
            with suppress(OSError):
                found = entry.stat()
                yield StoredChunk(key, found.st_size, max(0.0, (now or time.time()) - found.st_mtime))

    def read(self, key: bytes) -> bytearray:
        """Header and payload of a chunk. ``OSError`` where it has gone or cannot be read."""
        # O_NONBLOCK: anything but a regular file must not block the opening.
        fd = os.open(self.path_of(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb", buffering=0) as file:
            content = bytearray(os.fstat(fd).st_size)
            view, done = memoryview(content), 0
            while done < len(content) and (moved := file.readinto(view[done:])):
                done += moved
            return content[:done]

    def remove(self, key: bytes) -> bool:
        """Whether the chunk was there and is gone now. ``OSError`` where it stays."""
        try:
            os.unlink(self.path_of(key))
        except FileNotFoundError:
            return False
        return True

    def settle(self) -> None:
        """Nothing to do: a removal that a power cut undoes brings back a chunk as it was."""

    def flaws(self) -> Counter[str]:
        """Nothing: what is wrong here is wrong with a chunk."""
        return Counter()

    def engines(self) -> int:
        """How many writers have the directory open now; those on other hosts count where the locks reach there."""
        locks = (e for e in entries(self.tmp) if e.name.endswith(LOCK_SUFFIX))
        return sum(_is_locked(entry.path) for entry in locks)

    def collect(self) -> int:
        """Remove what dead writers left half written, and empty directories; bytes freed.

        ``OSError``: not allowed here; what is left does no harm.
        """
        for directory in (self.root, self.tmp):
            if directory.exists() and not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))
        freed = sum(self.collect_leftovers())
        for _ in self.walk(remove_empty=True):
            pass
        return freed

    def collect_leftovers(self, own: str = "", age_s: float = LEFTOVER_AGE_S, now: float | None = None) -> list[int]:
        """Remove files whose writers are dead; the bytes of each. ``own``: the token of the writer that asks.

        Where locks do not tell, those go that nobody has written to for ``age_s`` seconds before ``now`` (wall clock).
        """
        by_token: dict[str, list[str]] = {}
        for entry in entries(self.tmp):
            by_token.setdefault(re.split(r"[-.]", entry.name)[0], []).append(entry.path)
        by_token.pop(own, None)
        cutoff = (time.time() if now is None else now) - age_s
        return [nbytes for token, paths in by_token.items() for nbytes in self._collect(token, paths, cutoff)]

    def _collect(self, token: str, paths: list[str], cutoff: float) -> list[int]:
        lock_path = f"{self.tmp}/{token}{LOCK_SUFFIX}"
        files = [path for path in paths if path != lock_path]
        try:
            fd = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe may lie there
        except OSError:
            return _remove(files, cutoff)
        try:
            locked = try_lock(fd)
            if not locked:
                return _remove(files, cutoff) if locked is None else []
            # The lock file last: without it the others would have to wait for their age.
            collected = _remove(files)
            _remove([lock_path])
            return collected
        finally:
            os.close(fd)

    def chunks(self) -> Iterator[tuple[bytes, os.DirEntry[str]]]:
        return ((key, entry) for key, entry in self.walk() if key is not None)

    def walk(self, *, remove_empty: bool = False) -> Iterator[tuple[bytes | None, os.DirEntry[str]]]:
        """Every file of the layout, one fan-out directory at a time; the key is None where the name is not ours.

        ``remove_empty``: directories found empty are removed on the way.
        """
        for namespace in entries(self.root):
            if namespace.name == "tmp":
                continue
            if not _is_hex(namespace.name, 2 * DIGEST_BYTES):
                yield None, namespace
                continue
            for fan_out in entries(namespace.path):
                if not fan_out.is_dir(follow_symlinks=False):
                    yield None, fan_out
                    continue
                files = list(entries(fan_out.path))
                for entry in files:
                    yield self._key_of(namespace.name, fan_out.name, entry), entry
                if remove_empty and not files:
                    _rmdir(fan_out.path)
            if remove_empty:
                _rmdir(namespace.path)

    def _key_of(self, namespace: str, fan_out: str, entry: os.DirEntry[str]) -> bytes | None:
        if not _is_hex(entry.name) or len(fan_out) != _FAN_OUT_DIGITS or not entry.is_file(follow_symlinks=False):
            return None
        key = bytes.fromhex(namespace + entry.name)
        return key if self.path_of(key) == entry.path else None


def _is_locked(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe may lie there
    except OSError:
        return False
    try:
        return try_lock(fd) is False
    finally:
        os.close(fd)


def _remove(paths: Iterable[str], cutoff: float = float("inf")) -> list[int]:
    """Remove files last written to before ``cutoff`` (wall-clock seconds); the bytes of each that is gone."""
    removed = []
    for path in paths:
        with suppress(OSError):
            found = os.lstat(path)
            if found.st_mtime < cutoff:
                os.unlink(path)
                removed.append(align_up(found.st_size))
    return removed


def tree_bytes(path: str) -> int:
    """Whole pages of a file, or of all files below a directory."""
    try:
        found = os.lstat(path)
    except OSError:
        return 0
    if stat.S_ISDIR(found.st_mode):
        return sum(tree_bytes(entry.path) for entry in entries(path))
    return align_up(found.st_size)


def _rmdir(path: str) -> None:
    with suppress(OSError):
        os.rmdir(path)


def _is_hex(name: str, length: int | None = None) -> bool:
    return re.fullmatch(r"(?:[0-9a-f]{2})+", name) is not None and length in (None, len(name))
