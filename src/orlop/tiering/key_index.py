"""Names of keys in 64 bits, and a map from them that is small: for a store's own index and for the engine's copy of it.

In: whole keys (namespace digest, then packed OffloadKey), small numbers to keep under them. Out: the numbers. Never: a
key itself, a lock, a file.

Most of the map is a sorted array of names beside an array of values, 16 bytes per key. What has changed since is a
dictionary, which is merged into new arrays once it has grown to an eighth of them. Two keys with the same name stand
for each other: with a million keys that is one chance in forty million, it costs a miss, and it is found where the
chunk is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

UInt64Array = npt.NDArray[np.uint64]

NOTHING = -1
LEAST_MERGE = 4096
FIRST_PROBE = 32
LARGEST_PROBE = 1024


def key_name(key: bytes) -> int:
    """64 bits that stand for a whole key; never 0."""
    return xxhash.xxh3_64_intdigest(key) or 1


def names_of(digest: bytes, keys: Sequence[bytes]) -> list[int]:
    """``key_name`` of each packed key of a namespace."""
    digest_of = xxhash.xxh3_64_intdigest
    return [digest_of(digest + key) or 1 for key in keys]


def probe(keys: Sequence[bytes], stop_at_miss: bool, contains: Callable[[Sequence[bytes]], bytes]) -> bytes:
    """One byte per key, 1 or 0, as ``contains`` says; with ``stop_at_miss`` up to the first 0.

    Most runs miss early or are there in whole: it begins small and doubles while everything is there.
    """
    found = bytearray()
    size = FIRST_PROBE if stop_at_miss else len(keys)
    while len(found) < len(keys):
        found += contains(keys[len(found) : len(found) + size])
        if stop_at_miss and (miss := found.find(0)) >= 0:
            return bytes(found[: miss + 1])
        size = min(2 * size, LARGEST_PROBE)
    return bytes(found)


class KeyIndex:
    """Names to values from 0 up. One thread changes it; others may look, and see each change whole or not at all.

    ``elsewhere`` is given what merges the changes, a piece of work of some milliseconds with a million names, and has
    it done on another thread; without it the thread that changes does that.
    """

    def __init__(self, elsewhere: Callable[[Callable[[], None]], object] | None = None) -> None:
        self._elsewhere = elsewhere
        self._state = _State(np.empty(0, np.uint64), np.empty(0, np.int64), {}, {})

    def load(self, names: UInt64Array, values: npt.NDArray[np.int64]) -> None:
        """Forget all and hold these; ``names`` distinct, in any order."""
        order = np.argsort(names)
        self._state = _State(names[order], values[order], {}, {})

    def get(self, names: Sequence[int]) -> list[int]:
        """The value of each name, ``NOTHING`` where there is none. Cost: logarithmic per name, and vectorised."""
        base, values, merging, changed = self._state
        if changed:
            lately = list(map(changed.get, names))
            if None not in lately:
                return lately  # type: ignore[return-value]
        found = [NOTHING] * len(names)
        if len(base) and names:
            at, same = _search(base, names)
            found = np.where(same, values[at], NOTHING).tolist()
        for changes in (merging, changed):
            if changes:
                found = [changes.get(name, value) for name, value in zip(names, found, strict=True)]
        return found

    def has(self, names: Sequence[int]) -> bytes:
        """One byte per name: 1 where there is a value. As ``get``, and cheaper."""
        base, _, merging, changed = self._state
        found = _search(base, names)[1].tobytes() if len(base) and names else bytes(len(names))
        for changes in (merging, changed):
            if changes:
                found = bytes([changes.get(name, was - 1) != NOTHING for name, was in zip(names, found, strict=True)])
        return found

    def set(self, name: int, value: int) -> None:
        """Keep ``value`` under ``name``; ``NOTHING`` forgets it."""
        self.set_all((name,), (value,))

    def set_all(self, names: Iterable[int], values: Iterable[int]) -> None:
        """As ``set`` of each."""
        base, _, merging, changed = self._state
        changed.update(zip(names, values, strict=True))
        if len(changed) > max(LEAST_MERGE, len(base) >> 3) and not merging:
            self._begin_merge()
            if self._elsewhere is None:
                self._merge()
            else:
                self._elsewhere(self._merge)

    def items(self) -> tuple[UInt64Array, npt.NDArray[np.int64]]:
        """All names, sorted, and their values. From the thread that changes, and not while another one merges."""
        if self._state.changed:
            self._begin_merge()
            self._merge()
        return self._state.names, self._state.values

    def __len__(self) -> int:
        return len(self.items()[0])

    def _begin_merge(self) -> None:
        names, values, _, changed = self._state
        self._state = _State(names, values, changed, {})

    def _merge(self) -> None:
        """What was changed before the merge began goes into the arrays; what has been changed since stays."""
        base, values, merging, changed = self._state
        names = np.fromiter(merging.keys(), np.uint64, len(merging))
        news = np.fromiter(merging.values(), np.int64, len(merging))
        order = np.argsort(names)
        names, news = names[order], news[order]
        if len(base):
            at = np.minimum(np.searchsorted(base, names), len(base) - 1)
            stays = np.ones(len(base), np.bool_)
            stays[at[base[at] == names]] = False
            base, values = base[stays], values[stays]
        names, news = names[news != NOTHING], news[news != NOTHING]
        where = np.searchsorted(base, names)
        self._state = _State(np.insert(base, where, names), np.insert(values, where, news), {}, changed)


class _State(NamedTuple):
    """Sorted arrays; what is being merged into them; what has changed since. Each counts before the one before it."""

    names: UInt64Array
    values: npt.NDArray[np.int64]
    merging: dict[int, int]
    changed: dict[int, int]


def _search(base: UInt64Array, names: Sequence[int]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Where in ``base``, which is sorted and not empty, each name is or would be near; whether it is there."""
    wanted = np.array(names, np.uint64)
    at = np.minimum(np.searchsorted(base, wanted), len(base) - 1)
    return at, base[at] == wanted
