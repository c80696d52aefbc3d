"""When a request that decodes is looked at for chunks to store, and the blocks that it gets until then.

In: ids of requests, blocks that steps hand out, and each step. Out: those whose turn it is, and their blocks. Never: a
decision what is stored.

Most steps hand blocks to some requests and fill no chunk. What they cost is a look at a table that is small enough to
stay in the processor's caches; the books of a request, which have left them since, are met once per turn.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import islice

EVERY = 16
"""Turns are taken in every so manieth step."""
LOT, PARTS = 64, 8
"""At most so many requests, or such a part of all that wait, have their turn in one step: what is gathered is not all
copied at once."""

SINCE, COMPUTED, BLOCKS = 0, 1, 2
"""Where things stand in the array of one that waits."""

BlockIds = tuple[list[int], ...]
"""Device blocks, by KV group."""


class Turns:
    """Requests that wait for their turn, for ``steps`` steps or a few more, in the order in which they came.

    With one step nobody waits: what is noted in a step has its turn in it, all of it. One that waits is one flat array:
    the step since which it does, the tokens that were computed when it was last noted, and its blocks, each
    as ``block id * groups + group``. Objects of their own would cost a miss each, in every note.
    """

    def __init__(self, steps: int, groups: int = 1) -> None:
        self._steps = steps
        self._groups = groups
        self._every = min(EVERY, steps)
        self._step = 0
        self._turns: dict[str, array[int]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._turns)

    def note(self, req_id: str, block_ids: BlockIds, computed: int = 0) -> None:
        """Blocks for a request on top of ``computed`` tokens; it waits from now on unless it does already."""
        if not self.add(req_id, block_ids, computed):
            self._turns[req_id] = array("q", [self._step, computed])
            self.add(req_id, block_ids, computed)

    def add(self, req_id: str, block_ids: BlockIds, computed: int) -> bool:
        """As ``note``, for one that waits; False, and nothing is noted, for one that does not."""
        turn = self._turns.get(req_id)
        if turn is None:
            return False
        turn[COMPUTED] = computed
        if self._groups == 1:
            turn.extend(*block_ids)
        else:
            turn.extend(block_id * self._groups + i for i, ids in enumerate(block_ids) for block_id in ids)
        return True

    def computed(self, req_id: str) -> int:
        """Tokens that were computed when a request was last noted; 0 for one that does not wait."""
        turn = self._turns.get(req_id)
        return turn[COMPUTED] if turn is not None else 0

    def take(self, req_id: str) -> BlockIds:
        """The blocks noted for a request, nothing where none were; it waits no more."""
        turn = self._turns.pop(req_id, None)
        if turn is None:
            return ()
        noted, groups = turn[BLOCKS:].tolist(), self._groups
        if groups == 1:
            return (noted,)
        return tuple([block // groups for block in noted if block % groups == i] for i in range(groups))

    def next_step(self) -> list[str]:
        """Those whose turn this step is. They wait until they are taken."""
        self._step += 1
        if self._step % self._every:
            return []
        if self._steps == 1:
            return list(self._turns)
        most, latest = max(LOT, len(self._turns) // PARTS), self._step - self._steps
        return [req_id for req_id, turn in islice(self._turns.items(), most) if turn[SINCE] <= latest]
