"""A chunk store that takes its time over every verb, or never answers: a mount whose server is slow, or gone.

In: how long. Out: nothing is ever there, nothing is ever kept. Never: an exception.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from orlop.core import Outcome
from orlop.tiering.base import ChunkStore, StoredChunk


class SlowStore(ChunkStore):
    """Each verb blocks for ``seconds``; None: for good."""

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = seconds

    def _take_time(self) -> None:
        threading.Event().wait(self._seconds)

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        self._take_time()
        return [False] * len(keys)

    def read_into(
        self, keys: Sequence[bytes], headers: Sequence[memoryview], views: Sequence[memoryview]
    ) -> Sequence[Outcome]:
        self._take_time()
        return [Outcome.MISSING] * len(keys)

    def write(
        self, keys: Sequence[bytes], headers: Sequence[memoryview], views: Sequence[memoryview]
    ) -> Sequence[Outcome]:
        self._take_time()
        return [Outcome.NO_SPACE] * len(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        self._take_time()
        return 0

    def scan(self) -> Iterator[StoredChunk]:
        return iter(())
