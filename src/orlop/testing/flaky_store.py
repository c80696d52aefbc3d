"""A files store that fails half of its operations: a disk, or a mount, that is about to give up.

In: what a files store is given. Out: its answers; of every second call an exception, or an I/O error for some of its
keys. Never: a wrong byte, a wait; two calls in a row that fail.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from orlop.core import Outcome
from orlop.errors import StoreError
from orlop.stores.files import FilesStore
from orlop.tiering.base import ChunkStore, StoredChunk

Views = Sequence[memoryview]


class FlakyStore(ChunkStore):
    """``FilesStore`` that fails every second time, in one of two ways by a coin."""

    def __init__(self, **settings: Any) -> None:
        self._files = FilesStore(**settings)
        self._source = random.Random(0)
        self._calls = itertools.count()

    def _fails(self, verb: str) -> bool:
        """Whether single keys of this call fail; raises where all of it does."""
        if next(self._calls) % 2 == 0:
            return False
        if self._source.random() < 0.5:
            raise StoreError(f"found {verb} failing, as it does every second time; expected it to be lived with")
        return True

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        self._fails("contains")
        return self._files.contains(keys)

    def read_into(self, keys: Sequence[bytes], headers: Views, views: Views) -> Sequence[Outcome]:
        fails = self._fails("read")
        return self._spoilt(self._files.read_into(keys, headers, views), fails)

    def write(self, keys: Sequence[bytes], headers: Views, views: Views) -> Sequence[Outcome]:
        fails = self._fails("write")
        return self._spoilt(self._files.write(keys, headers, views), fails)

    def _spoilt(self, outcomes: Sequence[Outcome], fails: bool) -> Sequence[Outcome]:
        if not fails:
            return outcomes
        return [Outcome.IO_ERROR if self._source.random() < 0.5 else outcome for outcome in outcomes]

    def delete(self, keys: Sequence[bytes]) -> int:
        self._fails("delete")
        return self._files.delete(keys)

    def scan(self) -> Iterator[StoredChunk]:
        return self._files.scan()

    def close(self) -> None:
        self._files.close()
