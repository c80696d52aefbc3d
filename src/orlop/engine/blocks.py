"""The device's blocks: who uses them, and which of them can be found again by what they hold.

In: keys of full blocks, requests for room. Out: block ids. Never: a tensor; it hands out numbers, and what
is in the blocks is the runner's business.

A block is in one of three states: used (its count is above 0), free and cached (it can be found by its key
until somebody needs the room), free and empty. Block 0 is the null block: a placeholder that is never handed out, and
that nobody uses, however often it stands in a table.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from orlop.errors import InvariantError

NULL_BLOCK = 0


class BlockPool:
    """``num_blocks`` blocks, the null block included, with prefix caching and LRU eviction."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"found {num_blocks} device blocks, expected 2 or more (block 0 holds nothing)")
        self.num_blocks = num_blocks
        self._uses = [0] * num_blocks
        self._key: list[Hashable] = [None] * num_blocks
        self._by_key: dict[Hashable, int] = {}
        # Oldest first; the order is that of eviction.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def capacity(self) -> int:
        """Blocks that can be in use at once."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def cached(self, key: Hashable) -> int | None:
        """The block that holds what ``key`` names, if there is one. Takes nothing."""
        return self._by_key.get(key)

    def unused(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` (all different) nobody uses: so many free ones ``take`` would use up."""
        return sum(1 for block in blocks if self._uses[block] == 0)

    def take(self, blocks: Iterable[int]) -> None:
        """Use blocks that are there already (a prefix hit)."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self._uses[block] == 0:
                del self._free[block]
            self._uses[block] += 1

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks to be written; the least recently used cached ones are forgotten for it."""
        if count > len(self._free):
            raise InvariantError(f"found {len(self._free)} free blocks, {count} were asked for without looking")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._uses[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """One user less for each. The end of a prompt leaves before its start, which more prompts share."""
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            self._uses[block] -= 1
            if self._uses[block] == 0:
                self._free[block] = None

    def register(self, block: int, key: Hashable) -> None:
        """``block`` holds what ``key`` names. Where another block does already, that one stays the answer."""
        if key not in self._by_key and self._key[block] is None:
            self._by_key[key] = block
            self._key[block] = key

    def forget_all(self) -> None:
        """Nothing is found by its key any more; who uses blocks keeps them."""
        self._by_key.clear()
        self._key = [None] * self.num_blocks

    def check(self, users: Iterable[Sequence[int]]) -> None:
        """Recount from the block tables of all ``users``; ``InvariantError`` where the books differ."""
        counted = [0] * self.num_blocks
        for blocks in users:
            for block in blocks:
                counted[block] += block != NULL_BLOCK
        if counted != self._uses:
            wrong = [b for b in range(self.num_blocks) if counted[b] != self._uses[b]]
            raise InvariantError(f"blocks {wrong}: use counts differ from the block tables of all sequences")
        free = {block for block in range(1, self.num_blocks) if counted[block] == 0}
        if free != set(self._free):
            raise InvariantError(f"blocks {sorted(free ^ set(self._free))}: free list differs from unused blocks")
        keys = {key: block for block, key in enumerate(self._key) if key is not None}
        if keys != self._by_key:
            raise InvariantError("the prefix cache differs from the keys of its blocks")

    def _forget(self, block: int) -> None:
        key = self._key[block]
        if key is not None:
            del self._by_key[key]
            self._key[block] = None
