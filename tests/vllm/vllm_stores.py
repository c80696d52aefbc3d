"""Chunk stores that fail, for a tier of a real engine.

In: the settings of a ``module:Class`` tier. Out: a files store of which every second operation fails. Never: a wrong
byte.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from orlop.core import Outcome
from orlop.errors import StoreError
from orlop.stores.files import FilesStore

Views = Sequence[memoryview]


class HalfFails(FilesStore):
    """Of writes and reads every second chunk fails, and of calls every fifth as a whole."""

    def __init__(self, path: str, max_bytes: int) -> None:
        super().__init__(path, max_bytes=max_bytes)
        self._calls = itertools.count(1)

    def read_into(self, keys: Sequence[bytes], headers: Views, views: Views) -> Sequence[Outcome]:
        self._maybe_fail()
        return self._half(super().read_into(keys, headers, views))

    def write(self, keys: Sequence[bytes], headers: Views, views: Views) -> Sequence[Outcome]:
        self._maybe_fail()
        return self._half(super().write(keys, headers, views))

    def _maybe_fail(self) -> None:
        if next(self._calls) % 5 == 0:
            raise StoreError("every fifth call fails")

    def _half(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        first = next(self._calls)
        return [Outcome.IO_ERROR if (first + i) % 2 else outcome for i, outcome in enumerate(outcomes)]
