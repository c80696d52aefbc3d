"""Blocks that another connector did not fill, reported when the request that rests on them has lost its blocks.

In: the real scheduler half over a dictionary, its hooks called one by one. Out: what is readable. Never: a device.
"""

from __future__ import annotations

import pytest
from test_review_hooks import Said, blocks, make, report, step, stored

from orlop.core import WorkerOutput


@pytest.mark.parametrize("then", ["still there", "preempted", "preempted and resumed at once"])
def test_what_was_computed_on_top_of_unfilled_blocks_is_not_stored_although_nobody_stores_those(then: str) -> None:
    """The chunks that another connector was to bring are in host memory already, so no store reads their blocks."""
    scheduler, _ = make()
    stored(scheduler, Said("first", num_tokens=9).key(2), ([1, 2, 3],))
    request = Said(num_tokens=13, num_prompt_tokens=13).key(3)
    scheduler.on_new_request(request, now=0.0)
    (job,) = step(scheduler, {"r": (([11, 12, 13, 14],), 8, 5)}).store_jobs
    assert job.transfers[0].block_ids.tolist() == [13], "the first two are there"
    if then == "preempted":
        step(scheduler, preempted={"r"})
    elif then == "preempted and resumed at once":
        assert scheduler.get_num_new_matched_tokens(request, 0, now=0.0) == (None, False), "its own store is open"
        scheduler.update_state_after_alloc(request, blocks([21, 22, 23, 24]), 0, now=0.0)
        step(scheduler, more={"r": (([21, 22, 23, 24],), 0, 13)}, preempted={"r"}, resumed={"r"})
    scheduler.update_connector_output(WorkerOutput(invalid_block_ids=frozenset([12])), now=0.0)
    report(scheduler, job)
    again = Said("again", num_tokens=13).key(3)
    assert scheduler.get_num_new_matched_tokens(again, 0, now=0.0) == (8, True)
    scheduler.check()
