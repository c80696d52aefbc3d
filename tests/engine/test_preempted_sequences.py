"""A device far too small for what decodes on it: what a preemption takes comes back from host memory.

In: the embedded engine with Orlop's own connector and host memory alone. Out: the same tokens, counted as computed only
once but for what no whole chunk holds. Never: a time.
"""

from __future__ import annotations

import random

import pytest
import torch
from engine_doubles import engine

from orlop.engine.model import ModelConfig
from orlop.scheduler.turns import Turns

torch.set_num_threads(1)

MAX_TOKENS = 60
MAX_STEPS = 200_000
SMALL = {"num_blocks": 32, "block_tokens": 4}
"""One of five requests has room to the end, and two have not."""
OFFLOAD = {"host": {"bytes": "4MiB"}, "blocks_per_chunk": 1, "io_process": False}
MIXED = ModelConfig(layers=2, windows=(None, 20))


def prompts():
    source = random.Random(5)
    return [[source.randrange(512) for _ in range(source.randrange(6, 20))] for _ in range(5)]


def run(**settings):
    """Results in the order of the prompts, preemptions, and the connector's counts; books recounted in every step."""
    with engine(**{"idle_wait_s": 0.0005, **settings}) as llm:
        if llm.connector is not None:
            llm.connector._clock = lambda: 0.0  # who waits for a copy does so until it is there, however long it takes
        ids = [llm.add_request(prompt, MAX_TOKENS) for prompt in prompts()]
        results = {}
        for _ in range(MAX_STEPS):
            if not llm.has_work():
                break
            results |= {r.request_id: r for r in llm.step()}
            llm.check()
            if llm.connector is not None:
                llm.connector.check()
        assert not llm.has_work()
        assert llm.scheduler.pool.num_free == llm.scheduler.pool.capacity
        stats = {} if llm.connector is None else dict(llm.connector.get_stats())
        return [results[i] for i in ids], llm.scheduler.num_preemptions, stats


@pytest.fixture(scope="module")
def expected():
    """What a device says that has room for all."""
    results, preemptions, _ = run(num_blocks=200, block_tokens=4)
    assert preemptions == 0
    return [result.tokens for result in results]


def computed(results):
    return sum(result.computed_tokens for result in results)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_what_decoding_filled_is_loaded_after_a_preemption_and_not_computed_again(
    expected, async_scheduling, monkeypatch
):
    monkeypatch.setattr("orlop.connector.GATHER_STEPS", 1000)  # nobody's turn comes
    settings = {**SMALL, "async_scheduling": async_scheduling, "offload": OFFLOAD, "prefix_caching": False}
    results, preemptions, stats = run(**settings)
    assert [result.tokens for result in results] == expected
    assert preemptions >= 4
    assert stats.get("surprises", 0) == 0
    needed = sum(len(prompt) + MAX_TOKENS - 1 for prompt in prompts())
    # A part of a chunk of each, or one that had just filled, and with asynchronous scheduling what was in flight.
    assert needed <= computed(results) <= needed + 6 * preemptions
    monkeypatch.setattr(Turns, "computed", lambda self, req_id: 0)
    plain, _, _ = run(**settings)
    assert [result.tokens for result in plain] == expected
    assert computed(plain) >= needed + 100, "until one of them ends, four have lost what they had said by then"
    assert computed(plain) > computed(results)


VARIANTS = {
    "pairs of blocks": {"offload": {**OFFLOAD, "blocks_per_chunk": 2}, "async_scheduling": True},
    "small host memory": {"offload": {**OFFLOAD, "host": {"bytes": 40 * 4096}}},
    "pieces": {"max_step_tokens": 7, "async_scheduling": True},
    "window": {"model": MIXED, "num_blocks": 50},
    "window, steps in flight": {"model": MIXED, "num_blocks": 50, "async_scheduling": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_many_preemptions_change_no_token(variant, expected):
    results, preemptions, stats = run(**{**SMALL, "offload": OFFLOAD, **VARIANTS[variant]})
    assert preemptions >= 3
    assert stats["tokens_loaded host"] > 0 or variant == "small host memory"
    assert stats.get("surprises", 0) == 0
    if "model" in VARIANTS[variant]:
        expected = [result.tokens for result in run(num_blocks=300, block_tokens=4, model=MIXED)[0]]
    assert [result.tokens for result in results] == expected
