"""When a request that decodes is looked at for chunks to store, and the blocks that it gets until then.

In: ids of requests, blocks that steps hand out, and each step. Out: those whose turn it is, and their blocks. Never: a
decision what is stored.

Most steps hand blocks to some requests and fill no chunk. What they cost is a look at a table that is small enough to
stay in the processor's caches; the books of a request, which have left them since, are met once per turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

EVERY = 8
"""Turns are taken in every so manieth step."""
LOT, PARTS = 64, 8
"""At most so many requests, or such a part of all that wait, have their turn in one step: what is gathered is not all
copied at once."""

BlockIds = tuple[list[int], ...]
"""Device blocks, by KV group."""


class Turns:
    """Requests that wait for their turn, for ``steps`` steps or a few more, in the order in which they came.

    With one step nobody waits: what is noted in a step has its turn in it, all of it.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._every = min(EVERY, steps)
        self._step = 0
        self._since: dict[str, int] = {}
        self._blocks: dict[str, BlockIds] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._since)

    def note(self, req_id: str, block_ids: Iterable[list[int]]) -> None:
        """Blocks for a request, which waits from now on unless it does already. The lists are copied."""
        noted = self._blocks.get(req_id)
        if noted is None:
            self._blocks[req_id] = tuple(map(list, block_ids))
            self._since[req_id] = self._step
        else:
            for have, ids in zip(noted, block_ids, strict=True):
                have += ids

    def take(self, req_id: str) -> BlockIds:
        """The blocks noted for a request, nothing where none were; it waits no more."""
        self._since.pop(req_id, None)
        return self._blocks.pop(req_id, ())

    def next_step(self) -> list[str]:
        """Those whose turn this step is. They wait until they are taken."""
        self._step += 1
        if self._step % self._every:
            return []
        if self._steps == 1:
            return list(self._since)
        most, latest = max(LOT, len(self._since) // PARTS), self._step - self._steps
        return [req_id for req_id, since in islice(self._since.items(), most) if since <= latest]
