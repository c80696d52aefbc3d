"""Which device blocks pending stores still read.

In: store jobs whose blocks may be handed out again, and the blocks that a step hands out. Out: the jobs that the
worker must have read before that step writes. Never: a wait, a decision about requests.

A race as a numbered story: (1) the store of R1's block 7 is pending; (2) R1 ends and the engine frees block 7;
(3) the engine hands block 7 to R2, whose forward will overwrite it. Between (2) and (3) block 7 stands in this
table; at (3) ``claim`` names the job, and the worker reads the block before R2's forward runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from orlop.core import Int64Array
from orlop.scheduler.request import Job


class FenceTable:
    """Block id -> ids of pending store jobs that read it. Block ids are of one pool for all groups."""

    def __init__(self, null_block_id: int) -> None:
        self._null = null_block_id
        self.pending: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self.pending)

    def raise_for(self, job: Job, block_ids: Int64Array) -> None:
        """Put ``job`` under these blocks, in addition to those it stands under already."""
        have = set(job.fenced)
        # A block may be named twice: chunks of two lives may begin with the same blocks and end with others.
        fresh = [b for b in dict.fromkeys(block_ids.tolist()) if b != self._null and b not in have]
        for block_id in fresh:
            self.pending.setdefault(block_id, set()).add(job.job_id)
        job.fenced += tuple(fresh)

    def lower(self, job: Job) -> None:
        """The job has read its blocks, or is ordered before whatever comes: it guards nothing any more."""
        for block_id in job.fenced:
            jobs = self.pending[block_id]
            jobs.discard(job.job_id)
            if not jobs:
                del self.pending[block_id]
        job.fenced = ()

    def claim(self, handed_out: Collection[int]) -> Iterable[int]:
        """Ids of the jobs that stand under any of these blocks."""
        if not self.pending:
            return ()
        hit = self.pending.keys() & handed_out
        return {job_id for block_id in hit for job_id in self.pending[block_id]}
