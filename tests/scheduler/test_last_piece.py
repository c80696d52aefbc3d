"""A prompt whose last piece needs no block of its own: what it fills is stored at once, as the rest of the prompt is.

In: prompts that are computed in pieces, over the real TieringManager, with decode that gathers for long. Out: passes
only if all chunks of the prompt are stored while the request has hardly begun to decode. Never: a look at bytes.
"""

from __future__ import annotations

import pytest

from orlop.core import KeyRun
from orlop.testing.rig import make_tiered_rig


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("token_budget", [2, 3, 6, 7])
def test_the_last_chunk_of_a_prompt_does_not_wait_for_a_turn(token_budget: int, async_scheduling: bool) -> None:
    rig = make_tiered_rig(
        tiers=0, token_budget=token_budget, async_scheduling=async_scheduling, options={"gather_steps": 64}
    )
    request = rig.runner.add(range(8), 100)
    rig.runner.run(until=lambda: request.num_tokens >= 12)
    host = rig.manager.inner.host  # type: ignore[attr-defined]
    assert host.ready_prefix(KeyRun(0, request.block_hashes, 0, 2)) == 2
    rig.finish()
