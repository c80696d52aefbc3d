"""What chunks that share a reservation extend, and what extends them: nothing leaves host memory before its children.

In: chunks in the middle of a stored prompt that host memory has lost. Out: passes only if a chunk that is stored in
their place is again what the chunk after it extends. Never: a look at bytes.
"""

from __future__ import annotations

import pytest

from orlop.core import KeyRun
from orlop.testing.rig import make_tiered_rig


@pytest.mark.parametrize("lost", [(1,), (1, 3), (0, 2, 4)])
def test_a_chunk_that_comes_back_is_again_what_the_one_after_it_extends(lost: tuple[int, ...]) -> None:
    rig = make_tiered_rig(slots=20, tiers=0, token_budget=4)
    prompt = list(range(25))
    request = rig.store(prompt)
    tier = rig.manager.inner.host  # type: ignore[attr-defined]
    tier.discard(0, [request.block_hashes[chunk] for chunk in lost])
    rig.store(prompt)  # in pieces of one chunk each
    slots = tier.slots_of(KeyRun(0, request.block_hashes, 0, 6)).tolist()
    assert min(slots) >= 0
    assert [tier._books.parent_of[slot] for slot in slots] == [-1, *slots[:5]]
