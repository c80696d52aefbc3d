"""The directory of the files store, for the store and for tools beside it: what lies where.

In: a path. Out: chunks with key, size and age, the bytes of one, who has the directory open. Never: a file made, a use
noted, a lock that a writer would wait for.

    <path>/<digest>.json                  a namespace in clear, for people and tools
    <path>/v1/tmp/<token>.lock            one per writer, locked as long as its process lives
    <path>/v1/tmp/<token>-<n>             a file being written
    <path>/v1/<namespace>/<xxx>/<key>     a chunk: header, payload; xxx is the start of the key's XXH3

Files appear whole and under their final name, and whoever has one open can read it to its end. So everything here may
run beside engines that use the directory; a chunk that goes meanwhile is a chunk less.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import xxhash

from orlop.core import DIGEST_BYTES
from orlop.stores.posix import entries, try_lock
from orlop.tiering.base import StoredChunk

LAYOUT_VERSION = "v1"
_FAN_OUT_DIGITS = 3
_LOCK_SUFFIX = ".lock"


class FilesFolder:
    """The directory ``path`` of a files store. Any method from any thread; they block."""

    kind = "files"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.root = self.path / LAYOUT_VERSION

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
        locks = (e for e in entries(self.root / "tmp") if e.name.endswith(_LOCK_SUFFIX))
        return sum(_is_locked(entry.path) for entry in locks)

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


def _rmdir(path: str) -> None:
    with suppress(OSError):
        os.rmdir(path)


def _is_hex(name: str, length: int | None = None) -> bool:
    return re.fullmatch(r"(?:[0-9a-f]{2})+", name) is not None and length in (None, len(name))
