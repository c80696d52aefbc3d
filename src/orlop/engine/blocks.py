"""The device's blocks: who uses them, and which of them can be found again by what they hold.

In: hashes of full blocks, requests for room. Out: block ids. Never: a tensor; it hands out numbers, and what
is in the blocks is the runner's business.

A block is in one of three states: used (its count is above 0), free and cached (it can be found by its hash
until somebody needs the room), free and empty. Block 0 is the null block: a placeholder that is never handed out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from orlop.errors import InvariantError

NULL_BLOCK = 0


class BlockPool:
    """``num_blocks`` blocks, the null block included, with prefix caching and LRU eviction."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"found {num_blocks} device blocks, expected 2 or more (block 0 holds nothing)")
        self.num_blocks = num_blocks
        self._uses = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        # Oldest first; the order is that of eviction.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def capacity(self) -> int:
        """Blocks that can be in use at once."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of ``hashes``. Takes nothing."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def room_needed(self, prefix: Sequence[int], num_new: int) -> int:
        """Free blocks that taking ``prefix`` and allocating ``num_new`` would use up."""
        return num_new + sum(1 for block in prefix if self._uses[block] == 0)

    def take(self, blocks: Iterable[int]) -> None:
        """Use blocks that are there already (a prefix hit)."""
        for block in blocks:
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
            self._uses[block] -= 1
            if self._uses[block] == 0:
                self._free[block] = None

    def register(self, block: int, block_hash: bytes) -> None:
        """``block`` holds what ``block_hash`` names. Where another block does already, that one stays the answer."""
        if block_hash not in self._by_hash and self._hash[block] is None:
            self._by_hash[block_hash] = block
            self._hash[block] = block_hash

    def forget_all(self) -> None:
        """Nothing is found by its hash any more; who uses blocks keeps them."""
        self._by_hash.clear()
        self._hash = [None] * self.num_blocks

    def check(self, users: Iterable[Sequence[int]]) -> None:
        """Recount from the block tables of all ``users``; ``InvariantError`` where the books differ."""
        counted = [0] * self.num_blocks
        for blocks in users:
            for block in blocks:
                counted[block] += 1
        if counted != self._uses:
            wrong = [b for b in range(self.num_blocks) if counted[b] != self._uses[b]]
            raise InvariantError(f"blocks {wrong}: use counts differ from the block tables of all sequences")
        free = {block for block in range(1, self.num_blocks) if counted[block] == 0}
        if free != set(self._free):
            raise InvariantError(f"blocks {sorted(free ^ set(self._free))}: free list differs from unused blocks")
        names = {block: name for block, name in enumerate(self._hash) if name is not None}
        if {name: block for block, name in names.items()} != self._by_hash:
            raise InvariantError("the prefix cache differs from the hashes of its blocks")

    def _forget(self, block: int) -> None:
        block_hash = self._hash[block]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hash[block] = None
