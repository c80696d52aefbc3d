"""What a tier has, as the engine's side knows it: the names of its keys, told by the store itself.

In: ``Keys`` messages, one after the other; whole keys on the engine's thread. Out: which of them the tier
has, at once. Never: a lock, a wait, a key that the store did not name; an answer while it does not know them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from orlop.tiering.io_messages import Keys
from orlop.tiering.key_index import NOTHING, KeyIndex, UInt64Array, names_of, probe


class KnownKeys:
    """16 bytes per key, and some for what has changed lately. One thread at a time tells, another one asks.

    ``elsewhere``: as of ``KeyIndex``.
    """

    def __init__(self, elsewhere: Callable[[Callable[[], None]], object] | None = None) -> None:
        self._elsewhere = elsewhere
        self._index: KeyIndex | None = None
        self._coming: list[UInt64Array] | None = None

    def take(self, message: Keys) -> None:
        """From a thread that receives. A reset takes some time with many keys."""
        added = np.frombuffer(message.added, np.uint64)
        if message.reset:
            self._index, self._coming = None, []
        if self._coming is not None:
            self._coming.append(added)
            if not message.more:
                names = np.concatenate(self._coming)
                index = KeyIndex(self._elsewhere)
                index.load(names, np.zeros(len(names), np.int64))
                self._index, self._coming = index, None
        elif self._index is not None:
            removed = np.frombuffer(message.removed, np.uint64)
            self._index.set_all(added.tolist(), [0] * len(added))
            self._index.set_all(removed.tolist(), [NOTHING] * len(removed))

    def drop(self) -> None:
        """Who told is gone."""
        self._index = self._coming = None

    def find(self, digest: bytes, keys: Sequence[bytes], stop_at_miss: bool) -> bytes | None:
        """From the engine's thread: one byte per packed key of a namespace; None where that is not known here."""
        index = self._index
        if index is None:
            return None
        return probe(keys, stop_at_miss, lambda part: index.has(names_of(digest, part)))
