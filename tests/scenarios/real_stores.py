"""Chunk stores that break a promise, for tests of what stands above them, and a look at what a files tier keeps.

In: the settings of a ``module:Class`` tier. Out: stores that lie, lose or dawdle in one way each. Never: an exception
that a store is allowed to raise; those have tests beside the runner.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from orlop.core import Outcome
from orlop.errors import ConfigError
from orlop.stores.files import FilesStore
from orlop.tiering.base import ChunkStore, StoredChunk

Views = Sequence[memoryview]


class MemoryStore(ChunkStore):
    """Keeps chunks in a dict; subclasses break it in one way each."""

    def __init__(self, **settings: Any) -> None:
        self.kept: dict[bytes, tuple[bytes, bytes]] = {}

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [key in self.kept for key in keys]

    def read_into(self, keys: Sequence[bytes], headers: Views, views: Views) -> Sequence[Outcome]:
        return [self._read(*chunk) for chunk in zip(keys, headers, views, strict=True)]

    def _read(self, key: bytes, header: memoryview, view: memoryview) -> Outcome:
        if key not in self.kept:
            return Outcome.MISSING
        header[:], view[:] = self.kept[key]
        return Outcome.OK

    def write(self, keys: Sequence[bytes], headers: Views, views: Views) -> Sequence[Outcome]:
        self.kept.update({k: (bytes(h), bytes(v)) for k, h, v in zip(keys, headers, views, strict=True)})
        return [Outcome.OK] * len(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        return sum(self.kept.pop(key, None) is not None for key in keys)

    def scan(self) -> Iterator[StoredChunk]:
        for key, (header, view) in list(self.kept.items()):
            yield StoredChunk(key, len(header) + len(view), 0.0)


class SaysOkAndKeepsNothing(MemoryStore):
    """Every write succeeds, every key is there, every read succeeds; nothing was kept, nothing is filled in."""

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [True] * len(keys)

    def write(self, keys: Sequence[bytes], headers: Views, views: Views) -> Sequence[Outcome]:
        return [Outcome.OK] * len(keys)

    def read_into(self, keys: Sequence[bytes], headers: Views, views: Views) -> Sequence[Outcome]:
        return [Outcome.OK] * len(keys)


class KeepsOtherBytes(MemoryStore):
    """One bit of each payload is kept wrong."""

    def _read(self, key: bytes, header: memoryview, view: memoryview) -> Outcome:
        outcome = super()._read(key, header, view)
        if outcome is Outcome.OK:
            view[len(view) // 31] ^= 1
        return outcome


class GivesOtherKeysBytes(MemoryStore):
    """Each key is answered with the whole chunk of some other key."""

    def _read(self, key: bytes, header: memoryview, view: memoryview) -> Outcome:
        if key in self.kept:
            others = [k for k in self.kept if k != key]
            return super()._read(others[hash(key) % len(others)] if others else b"", header, view)
        return Outcome.MISSING


class SaysMissingAboutAll(MemoryStore):
    """Every key is there until it is read."""

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [True] * len(keys)

    def _read(self, key: bytes, header: memoryview, view: memoryview) -> Outcome:
        return Outcome.MISSING


class AnswersTooFew(MemoryStore):
    """One answer is missing from every list."""

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return super().contains(keys)[1:]

    def read_into(self, keys: Sequence[bytes], headers: Views, views: Views) -> Sequence[Outcome]:
        return super().read_into(keys, headers, views)[1:]


class LosesAPart(FilesStore):
    """Files whose group 1 loses its chunks from ``LosesAPart.first_lost`` on between the check and the read."""

    order: ClassVar[list[bytes]] = []
    first_lost: ClassVar[int] = 10**9

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        there = super().contains(keys)
        part = [key for key in keys if key.endswith(bytes([0, 0, 0, 1]))]
        self.delete(part[self.first_lost :])
        return there


class Gated(FilesStore):
    """Files whose reads and writes wait for their gate; both are open until a test closes them."""

    may_read: ClassVar[threading.Event] = threading.Event()
    may_write: ClassVar[threading.Event] = threading.Event()
    waiting: ClassVar[threading.Semaphore] = threading.Semaphore(0)
    """Released once by each call that finds its gate closed."""

    @classmethod
    def open_both(cls) -> None:
        cls.may_read.set()
        cls.may_write.set()
        cls.waiting = threading.Semaphore(0)

    def _pass(self, gate: threading.Event) -> None:
        if not gate.is_set():
            self.waiting.release()
        assert gate.wait(60), "nobody opened the gate"

    def read_into(self, keys: Sequence[bytes], headers: Views, views: Views) -> Sequence[Outcome]:
        self._pass(self.may_read)
        return super().read_into(keys, headers, views)

    def write(self, keys: Sequence[bytes], headers: Views, views: Views) -> Sequence[Outcome]:
        self._pass(self.may_write)
        return super().write(keys, headers, views)


def chunk_files(path: Path) -> list[Path]:
    """The files of all chunks below a files tier's directory, by name."""
    return sorted(p for p in (path / "v1").rglob("*") if p.is_file() and p.parent.name != "tmp")


def leftovers(path: Path) -> list[Path]:
    """Temporary files below a files tier's directory; the locks of writers are none."""
    return [p for p in (path / "v1" / "tmp").glob("*") if p.suffix != ".lock"]


class RaisesAtStart(MemoryStore):
    """Cannot be made."""

    def __init__(self, **settings: Any) -> None:
        raise OSError("the server refuses the connection")


class Picky(MemoryStore):
    """Says of its own settings that they can never work."""

    def __init__(self, **settings: Any) -> None:
        raise ConfigError("found no moon, expected a full one")


class HangsAtStart(MemoryStore):
    """Is never done being made."""

    def __init__(self, **settings: Any) -> None:
        threading.Event().wait()
