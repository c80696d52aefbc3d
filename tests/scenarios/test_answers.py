"""Offloading changes no answer: what a request says after loads, interruptions and evictions is what it says cold.

In: engines with and without trouble. Out: equal tokens, and blocks that hold what their keys stand for (the device
double compares every block that a step attends to). Never: a real model.
"""

from __future__ import annotations

import random

import pytest

from orlop.core import Lookup, TransferKind
from orlop.testing.doubles import DictManager
from orlop.testing.rig import FULL, HYBRID, PAIRS, make_rig, make_tiered_rig

STORE, LOAD = TransferKind.STORE, TransferKind.LOAD
GEOMETRIES = pytest.mark.parametrize("geometry", [FULL, PAIRS, HYBRID], ids=["full", "pairs", "hybrid"])


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def async_scheduling(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@GEOMETRIES
@pytest.mark.parametrize("after", [2, 3])
@pytest.mark.fault("B004")
def test_an_interrupted_prefill_stores_what_its_keys_say(geometry: object, after: int, async_scheduling: bool) -> None:
    rig = make_rig(geometry, async_scheduling=async_scheduling, token_budget=8)  # type: ignore[arg-type]
    rig.device.crank_chance = 0.0
    request = rig.runner.add(range(40), 6)
    for _ in range(after):
        rig.runner.step()
    rig.runner.preempt(request.request_id)
    rig.runner.pool.reset()
    rig.device.crank_chance = 1.0
    rig.runner.run()
    rig.runner.pool.reset()
    again = rig.runner.add(range(40), 6)
    rig.finish()
    assert again.was_external >= 32
    assert again.token_ids == request.token_ids


@GEOMETRIES
@pytest.mark.fault("B030")
def test_a_second_run_that_is_all_hits_answers_as_the_first(geometry: object, async_scheduling: bool) -> None:
    """Copies come late by up to several steps, in both directions."""
    prompts = [[(7 * i + j) % 50 for j in range(20 + i)] for i in range(20)]
    rig = make_rig(geometry, async_scheduling=async_scheduling, blocks=400, seed=5)  # type: ignore[arg-type]
    rig.device.crank_chance = 0.3
    runs = []
    for _ in range(2):
        requests = [rig.runner.add(prompt, 5) for prompt in prompts]
        rig.runner.run()
        rig.runner.pool.reset()
        runs.append([r.token_ids for r in requests])
    assert runs[0] == runs[1]
    assert all(r.was_external >= 16 for r in requests)
    rig.device.crank_chance = 1.0
    rig.finish()


@GEOMETRIES
@pytest.mark.fault("B139")
@pytest.mark.fault("B141")
@pytest.mark.fault("B146")
def test_failed_loads_are_neither_used_nor_shared(geometry: object, async_scheduling: bool) -> None:
    """Three of ten loads fail on one rank; the device's prefix cache must not share what they did not fill."""
    dice = random.Random(7)
    rig = make_rig(geometry, async_scheduling=async_scheduling, ranks=2, blocks=300)  # type: ignore[arg-type]
    shared = list(range(24))
    cold = [rig.store([*shared, i], 4).token_ids for i in range(8)]
    rig.device.fail = lambda job, rank: job.kind is LOAD and rank == 1 and dice.random() < 0.3
    for _ in range(5):
        requests = [rig.runner.add([*shared, i], 4) for i in range(8)]
        rig.runner.run()
        rig.runner.pool.reset()
        assert [r.token_ids for r in requests] == cold
    assert rig.scheduler.get_stats()["load_jobs_failed"] > 0
    rig.finish()


@pytest.mark.fault("B020")
def test_a_long_shared_prefix_with_changing_ends_is_restored_whole(async_scheduling: bool) -> None:
    rig = make_tiered_rig(HYBRID, slots=200, tiers=1, async_scheduling=async_scheduling, blocks=300)
    shared = list(range(160))
    ends = {"a": [1, 2, 3, 4, 5], "b": [9, 8, 7], "c": []}
    first = {name: rig.store([*shared, *end, 77], 8).token_ids for name, end in ends.items()}
    for name in "abcacb":
        again = rig.runner.add([*shared, *ends[name], 77], 8)
        rig.runner.run()
        rig.runner.pool.reset()
        assert again.was_external >= 160
        assert again.token_ids == first[name]
    rig.finish()


@pytest.mark.parametrize("gone", [0, 2, 5, 9])
def test_a_hit_ends_where_one_group_has_lost_a_chunk(gone: int, async_scheduling: bool) -> None:
    """The window group lost one chunk: only hits whose window needs it are cut."""
    rig = make_rig(HYBRID, async_scheduling=async_scheduling)
    first = rig.store(range(41))
    assert isinstance(rig.manager.inner, DictManager)
    lost = first.block_hashes[gone]
    rig.manager.inner.verdict = lambda group, h: Lookup.MISS if (group, h) == (1, lost) else None
    again = rig.runner.add(range(41))
    rig.runner.run()
    assert again.was_external == (36 if gone == 9 else 40)
    rig.finish()


@pytest.mark.parametrize("lost_chunk", [0, 3])
def test_a_hole_in_the_full_group_ends_the_hit_for_all(lost_chunk: int, async_scheduling: bool) -> None:
    rig = make_rig(HYBRID, async_scheduling=async_scheduling)
    first = rig.store(range(41))
    assert isinstance(rig.manager.inner, DictManager)
    lost = first.block_hashes[lost_chunk]
    rig.manager.inner.verdict = lambda group, h: Lookup.MISS if (group, h) == (0, lost) else None
    again = rig.runner.add(range(41))
    rig.runner.run()
    assert again.was_external == 4 * lost_chunk
    rig.finish()
