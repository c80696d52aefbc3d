"""The block tables of all sequences: one table per KV group, over one pool of blocks.

In: sequences that grow, windows that move on. Out: blocks in tables, prefixes that are there already. Never: a choice
of who gets blocks and who gives them up.

A table has one entry per block of tokens, from the first token on. In a sliding-window group the entries wholly
behind the window are the null block: nothing is kept there, nothing is read there::

    tokens        0  . . . . . . . . . . . . . . . . . computed
    full group    [ 7 | 3 | 9 | 4 | 8 ]
    window group  [ 0 | 0 | 0 | 5 | 2 ]                 the next token sees back to somewhere in block 5

So a prefix can be used up to a length for which the full groups have every block and the window groups the last ones.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from orlop.engine.blocks import NULL_BLOCK, BlockPool
from orlop.engine.sequence import Sequence


class BlockTables:
    """``windows``: of each KV group the last tokens that it sees, None for all; full groups come first."""

    def __init__(
        self, pool: BlockPool, windows: Seq[int | None], block_tokens: int, *, prefix_caching: bool = True
    ) -> None:
        self.pool = pool
        self.windows = tuple(windows)
        self.block_tokens = block_tokens
        self.prefix_caching = prefix_caching

    @property
    def has_windows(self) -> bool:
        return any(window is not None for window in self.windows)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """The most blocks that a sequence of ``num_tokens`` ever needs at once, computed ``step_tokens`` at a time."""
        whole = self.blocks_for(num_tokens)
        return sum(whole if w is None else min(whole, self.blocks_for(w + step_tokens) + 1) for w in self.windows)

    # --- prefixes that are there ----------------------------------------------------------------------------

    def find_hit(self, seq: Sequence, max_blocks: int) -> int:
        """Blocks of the longest cached prefix that every group can serve. Takes nothing."""
        if not self.prefix_caching:
            return 0
        hashes = seq.block_hashes
        hit = min(max_blocks, len(hashes))
        for group, window in enumerate(self.windows):
            if window is None:
                hit = next((i for i in range(hit) if self.pool.cached((group, hashes[i])) is None), hit)
        longer = -1
        while hit != longer:  # each window group may lower it, and the others have to agree
            longer = hit
            for group, window in enumerate(self.windows):
                if window is not None:
                    hit = self._window_hit(group, window, hashes, hit)
        return hit

    def _window_hit(self, group: int, window: int, hashes: Seq[bytes], hit: int) -> int:
        """The longest prefix of at most ``hit`` blocks whose last blocks this group has."""
        while hit:
            needed = range(hit - 1, self._first_needed(window, hit * self.block_tokens) - 1, -1)
            missing = next((i for i in needed if self.pool.cached((group, hashes[i])) is None), None)
            if missing is None:
                break
            hit = missing
        return hit

    def _first_needed(self, window: int | None, computed: int) -> int:
        """The first block that the token after ``computed`` tokens attends to."""
        return 0 if window is None else max(0, computed - window + 1) // self.block_tokens

    # --- growing ----------------------------------------------------------------------------------------------

    def room_needed(self, seq: Sequence, upto: int, computed: int, hit: int = 0) -> int:
        """Free blocks that ``grow`` would use up."""
        cached = [block for table in self._hit_tables(seq, computed, hit) for block in table if block != NULL_BLOCK]
        return sum(map(sum, self._wanted(seq, upto, computed, hit))) + self.pool.unused(cached)

    def grow(self, seq: Sequence, upto: int, computed: int, hit: int = 0) -> tuple[list[int], ...]:
        """Tables for tokens below ``upto``, of which ``computed`` need no computing; the new entries per group.

        ``hit``: of a sequence without blocks, those of its prefix that are there already.
        """
        wanted = self._wanted(seq, upto, computed, hit)
        for table, found in zip(seq.block_ids, self._hit_tables(seq, computed, hit), strict=True):
            self.pool.take(found)
            table += found
        fresh = iter(self.pool.allocate(sum(map(sum, wanted))))
        new = tuple([next(fresh) if real else NULL_BLOCK for real in group] for group in wanted)
        for table, blocks in zip(seq.block_ids, new, strict=True):
            table += blocks
        return new

    def recycle(self, seq: Sequence) -> None:
        """Free the blocks that no token of ``seq`` will attend to any more."""
        for window, table in zip(self.windows, seq.block_ids, strict=True):
            last = min(self._first_needed(window, seq.num_computed_tokens), len(table)) - 1
            while last >= 0 and table[last] != NULL_BLOCK:
                self.pool.free([table[last]])
                table[last] = NULL_BLOCK
                last -= 1

    def drop(self, seq: Sequence) -> None:
        """Free all blocks of ``seq``, which computes from the start if it computes again."""
        for table in seq.block_ids:
            self.pool.free(table)
        seq.forget_computed()

    def register(self, seq: Sequence) -> None:
        """Make blocks findable whose tokens are all known and all computed (or handed over)."""
        if not self.prefix_caching:
            return
        full = min(seq.num_computed_tokens // self.block_tokens, len(seq.block_hashes))
        for index in range(seq.num_registered_blocks, full):
            for group, table in enumerate(seq.block_ids):
                if table[index] != NULL_BLOCK:
                    self.pool.register(table[index], (group, seq.block_hashes[index]))
        seq.num_registered_blocks = max(seq.num_registered_blocks, full)

    def _hit_tables(self, seq: Sequence, computed: int, hit: int) -> list[list[int]]:
        """The cached blocks of the first ``hit`` positions; null where a window has passed them already."""
        tables = []
        for group, window in enumerate(self.windows):
            first = min(self._first_needed(window, computed), hit)
            found = [self.pool.cached((group, block_hash)) for block_hash in seq.block_hashes[first:hit]]
            tables.append([NULL_BLOCK] * first + [block for block in found if block is not None])
        return tables

    def _wanted(self, seq: Sequence, upto: int, computed: int, hit: int) -> list[list[bool]]:
        """Per group, of each new position whether it needs a block."""
        stop = self.blocks_for(upto)
        return [
            [i >= self._first_needed(window, computed) for i in range(max(len(table), hit), stop)]
            for window, table in zip(self.windows, seq.block_ids, strict=True)
        ]
