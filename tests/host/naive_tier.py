"""The judge of the host tier: the same calls on plain dictionaries, slow and obvious.

In: keys, chunk by chunk. Out: which keys leave. Never: a slot number, an array, a line shared with the tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Key = tuple[int, bytes]


@dataclass(eq=False)
class Chunk:
    """One chunk that takes a slot. ``used`` None: not readable yet."""

    key: Key | None
    parent: Chunk | None = None
    used: int | None = None
    holds: int = 0
    leases: int = 0


class NaiveTier:
    """LRU over leaves in ``slots`` slots."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.chunks: list[Chunk] = []
        self.clock = 0
        self.evicted: list[Key] = []

    def find(self, key: Key) -> Chunk | None:
        return next((c for c in self.chunks if c.key == key), None)

    def states(self, keys: Sequence[Key]) -> bytes:
        return bytes(0 if c is None else 1 if c.used is None else 2 for c in map(self.find, keys))

    def leaves(self, spared: Sequence[Chunk] = ()) -> list[Chunk]:
        parents = {id(c.parent) for c in self.chunks} | {id(c) for c in spared}
        return [
            c
            for c in self.chunks
            if c.key and c.used is not None and not c.holds and not c.leases and id(c) not in parents
        ]

    def evictable(self, spared: Sequence[Chunk] = ()) -> int:
        trial = NaiveTier(self.slots)
        trial.chunks = list(self.chunks)
        while leaves := trial.leaves(spared):
            trial.chunks.remove(leaves[0])
        return len(self.chunks) - len(trial.chunks)

    def room_for(self, n: int) -> bool:
        return self.slots - len(self.chunks) + self.evictable() >= n

    def reserve(self, keys: Sequence[Key], chunks: Sequence[int]) -> bool:
        spared = [c for i in chunks if i and (c := self.find(keys[i - 1]))]
        if not self.make_room(len(chunks), spared):
            return False
        for i in chunks:
            self.chunks.append(Chunk(keys[i], self.find(keys[i - 1]) if i else None, holds=1))
        for i in chunks:
            after = self.find(keys[i + 1]) if i + 1 < len(keys) else None
            if after and after.parent is None:
                after.parent = self.find(keys[i])
        return True

    def reserve_each(self, keys: Sequence[Key], extended: Sequence[Key | None]) -> bool:
        """Short runs; ``extended[i]``, where there is one, is what ``keys[i]`` extends."""
        follows = [i > 0 and outer == keys[i - 1] for i, outer in enumerate(extended)]
        elsewhere = {outer for outer, yes in zip(extended, follows, strict=True) if not yes}
        if len(set(keys)) < len(keys) or set(keys) & elsewhere or any(self.find(key) for key in keys):
            return False
        spared = [self.find(key) for key in extended if key]
        if not self.make_room(len(keys), [c for c in spared if c]):
            return False
        for key, outer in zip(keys, extended, strict=True):
            self.chunks.append(Chunk(key, self.find(outer) if outer else None, holds=1))
        return True

    def make_room(self, n: int, spared: Sequence[Chunk]) -> bool:
        if self.slots - len(self.chunks) + self.evictable(spared) < n:
            return False
        while self.slots - len(self.chunks) < n:
            victim = min(self.leaves(spared), key=lambda c: c.used or 0)
            if victim.parent and victim.parent.used is not None:
                victim.parent.used = max(victim.parent.used, victim.used or 0)
            self.chunks.remove(victim)
            assert victim.key
            self.evicted.append(victim.key)
        return True

    def publish(self, chunks: Sequence[Chunk]) -> None:
        for chunk in reversed(chunks):
            if chunk.key:
                self.clock += 1
                chunk.used = self.clock

    def touch(self, keys: Sequence[Key]) -> None:
        for key in reversed(keys):
            chunk = self.find(key)
            if chunk and chunk.used is not None:
                self.clock += 1
                chunk.used = self.clock

    def drop(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if chunk.key and chunk.used is not None:
                self.evicted.append(chunk.key)
            chunk.key = chunk.parent = None
            for other in self.chunks:
                if other.parent is chunk:
                    other.parent = None
        self.sweep()

    def sweep(self) -> None:
        self.chunks = [c for c in self.chunks if c.key or c.holds or c.leases]
