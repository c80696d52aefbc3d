"""Full-attention and sliding-window layers in one model: tables, prefixes, and what goes through a connector."""

from __future__ import annotations

import random

import pytest
import torch
from engine_doubles import engine, greedy, run_checked
from patience import PATIENT

from orlop.engine.blocks import NULL_BLOCK, BlockPool
from orlop.engine.model import ModelConfig
from orlop.engine.sampling import SamplingParams
from orlop.engine.sequence import Sequence
from orlop.engine.tables import BlockTables
from orlop.errors import ConfigError

torch.set_num_threads(1)

WINDOW = 20
MIXED = ModelConfig(layers=3, windows=(None, WINDOW, WINDOW))
WINDOWED = ModelConfig(layers=2, windows=(WINDOW, WINDOW))
both_schedulings = pytest.mark.parametrize("async_scheduling", [False, True])


def numbers(count, seed):
    source = random.Random(seed)
    return [source.randrange(512) for _ in range(count)]


# --- tables -----------------------------------------------------------------------------------------------


def tables(num_blocks=40, windows=(None, 10), block_tokens=4):
    return BlockTables(BlockPool(num_blocks), windows, block_tokens)


def sequence(num_tokens, seed=0):
    return Sequence("r", numbers(num_tokens, seed), SamplingParams(), block_tokens=4, num_groups=2)


def computed(all_tables, seq, num_tokens):
    """As the scheduler does it: grow for the tokens, count them, make them findable."""
    all_tables.recycle(seq)
    all_tables.grow(seq, num_tokens, seq.num_computed_tokens)
    seq.num_computed_tokens = num_tokens
    all_tables.register(seq)


@pytest.mark.fault("B072")
def test_blocks_behind_the_window_are_freed_and_the_table_keeps_its_length():
    t, seq = tables(), sequence(40)
    for upto in (12, 24, 36):
        computed(t, seq, upto)
    # The next step may attend from token 24 - 10 + 1 = 15 on: block 3.
    assert [block == NULL_BLOCK for block in seq.block_ids[1]] == [True] * 3 + [False] * 6
    assert NULL_BLOCK not in seq.block_ids[0]
    t.recycle(seq)
    # Token 36 sees back to token 27: block 6.
    assert [block == NULL_BLOCK for block in seq.block_ids[1]] == [True] * 6 + [False] * 3
    t.pool.check(seq.block_ids)
    t.drop(seq)
    assert t.pool.num_free == t.pool.capacity


def test_a_prefix_needs_all_blocks_of_a_full_group_and_the_last_ones_of_a_window():
    t, first = tables(), sequence(40)
    for upto in (12, 24, 36):
        computed(t, first, upto)
    t.drop(first)
    second = sequence(40)
    assert t.find_hit(second, 9) == 9
    # A hit of 9 blocks needs blocks 6 to 8 of the window group, one of 5 needs 2 to 4, one of 2 needs both.
    for group, lost, left in [(1, 2, 9), (1, 7, 7), (1, 6, 6), (0, 5, 2), (0, 3, 2), (0, 1, 1), (1, 0, 0)]:
        t.pool._forget(t.pool.cached((group, second.block_hashes[lost])))
        assert t.find_hit(second, 9) == left, (group, lost)


def test_a_hit_takes_no_block_that_a_longer_load_will_pass():
    t, first = tables(), sequence(40)
    computed(t, first, 16)
    t.drop(first)
    second = sequence(40)
    assert t.find_hit(second, 9) == 4
    # 16 tokens are there and 16 more will be loaded: of the window, tokens 23 and on are needed.
    assert t.room_needed(second, 32, 32, 4) == 4 + 4 + 3
    t.grow(second, 32, 32, 4)
    assert [block == NULL_BLOCK for block in second.block_ids[1]] == [True] * 5 + [False] * 3
    t.pool.check(second.block_ids)


def test_the_same_block_is_not_found_for_another_group():
    t, seq = tables(), sequence(8)
    computed(t, seq, 8)
    assert set(seq.block_ids[0]).isdisjoint(seq.block_ids[1])
    assert t.pool.cached((0, seq.block_hashes[0])) == seq.block_ids[0][0]
    assert t.pool.cached((1, seq.block_hashes[0])) == seq.block_ids[1][0]


def test_a_window_model_runs_what_a_full_one_of_its_size_cannot():
    windowed = engine(model=WINDOWED, num_blocks=9, block_tokens=4, max_step_tokens=8)
    (result,) = windowed.generate([numbers(150, 1)], 50)
    assert result.tokens == greedy(engine(model=WINDOWED), numbers(150, 1), 50)
    with pytest.raises(ConfigError, match=r"need 51 device blocks, found 8"):
        engine(num_blocks=9, block_tokens=4, max_step_tokens=8).generate([numbers(150, 1)], 51)


# --- the engine -------------------------------------------------------------------------------------------


@both_schedulings
@pytest.mark.parametrize("model", [MIXED, WINDOWED])
@pytest.mark.parametrize(
    "settings",
    [{"num_blocks": 300}, {"num_blocks": 300, "max_step_tokens": 7}, {"num_blocks": 66, "max_step_tokens": 32}],
)
def test_tokens_do_not_depend_on_batching(model, settings, async_scheduling):
    twin = engine(model=model)
    shared = numbers(60, 0)
    work = [shared[: 9 * i] + numbers(i + 1, i) for i in range(8)] * 2
    llm = engine(model=model, block_tokens=4, async_scheduling=async_scheduling, **settings)
    ids = [llm.add_request(prompt, 30) for prompt in work]
    results = run_checked(llm)
    assert [results[i].tokens for i in ids] == [greedy(twin, prompt, 30) for prompt in work[:8]] * 2
    if len(settings) > 1:  # prompts that start in one step cannot find each other
        assert sum(r.device_hit_tokens for r in results.values()) > 0
    assert llm.scheduler.pool.num_free == llm.scheduler.pool.capacity
    if model is MIXED and settings["num_blocks"] == 66:
        assert llm.scheduler.num_preemptions > 0


# --- through Orlop's own connector --------------------------------------------------------------------------


def offloading(tmp_path, model, host_blocks=400, **settings):
    block_bytes = 4 * model.kv_bytes_per_token
    offload = {
        "host": {"bytes": host_blocks * max(block_bytes, 4096)},
        "blocks_per_chunk": settings.pop("blocks_per_chunk", 1),
        "io_process": False,
        "tiers": [{"type": "files", "path": str(tmp_path / "files"), "bytes": "64MiB", "deadline": dict(PATIENT)}],
    }
    return engine(offload=offload, model=model, **{"block_tokens": 4, "idle_wait_s": 0.0005, **settings})


def run_and_recount(llm):
    results = {}
    while llm.has_work():
        results |= {r.request_id: r for r in llm.step()}
        llm.check()
        llm.connector.check()
    return results


@both_schedulings
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("model", [MIXED, WINDOWED])
def test_what_a_small_device_dropped_is_loaded_again_in_every_group(
    tmp_path, model, blocks_per_chunk, async_scheduling
):
    twin = engine(model=model)
    talks = [numbers(100, seed) for seed in range(4)]
    num_blocks = 70 if model is MIXED else 26
    settings = {"num_blocks": num_blocks, "max_step_tokens": 32, "async_scheduling": async_scheduling}
    with offloading(tmp_path, model, blocks_per_chunk=blocks_per_chunk, **settings) as llm:
        loaded = 0
        for turn in (60, 80, 100):
            for talk in talks:
                request_id = llm.add_request(talk[:turn], 4)
                result = run_and_recount(llm)[request_id]
                assert result.tokens == greedy(twin, talk[:turn], 4)
                loaded += result.loaded_tokens
        assert loaded > 4 * 60
        assert llm.connector.get_stats().get("surprises", 0) == 0


@pytest.mark.parametrize("model", [MIXED, WINDOWED])
def test_a_later_engine_loads_the_last_window_and_all_of_the_full_layers(tmp_path, model):
    prompt = numbers(200, 5)
    with offloading(tmp_path, model, num_blocks=150) as llm:
        (first,) = llm.generate([prompt], 5)
    with offloading(tmp_path, model, num_blocks=150) as llm:
        (second,) = llm.generate([prompt], 5)
        bytes_loaded = llm.connector.get_stats()["load_bytes"]
    assert second.tokens == first.tokens
    assert (second.loaded_tokens, second.computed_tokens) == (196, 4 + 4)
    page = 4 * 2 * 2 * 16 * 4  # one layer's: tokens, K and V, KV heads, head_dim, float32
    full, window = (1, 2) if model is MIXED else (0, 2)
    # Token 196 sees back to token 177: blocks 44 to 48.
    assert bytes_loaded == full * 49 * page + window * 5 * page


@pytest.mark.fault("B076")
@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_at_every_length_around_the_window_a_later_engine_goes_on_in_the_same_way(tmp_path, blocks_per_chunk):
    twin = engine(model=MIXED)
    lengths = [length for n in (WINDOW, 2 * WINDOW) for length in (n - 5, n - 4, n - 1, n, n + 1, n + 3, n + 4, n + 5)]
    work = [numbers(length, length) for length in lengths]
    with offloading(tmp_path, MIXED, num_blocks=300, blocks_per_chunk=blocks_per_chunk) as llm:
        llm.generate(work, 1)
    with offloading(tmp_path, MIXED, num_blocks=300, blocks_per_chunk=blocks_per_chunk) as llm:
        results = llm.generate(work, 6)
    assert [r.tokens for r in results] == [greedy(twin, prompt, 6) for prompt in work]
    chunk = 4 * blocks_per_chunk
    # Whole chunks are stored and whole blocks loaded; the last token is computed.
    expected = [min(length // chunk * chunk, (length - 1) // 4 * 4) for length in lengths]
    assert [r.loaded_tokens for r in results] == expected


@both_schedulings
def test_after_a_failed_load_a_window_model_computes_from_the_start(tmp_path, async_scheduling):
    prompt = numbers(200, 5)
    with offloading(tmp_path, MIXED, num_blocks=150, async_scheduling=async_scheduling) as llm:
        (first,) = llm.generate([prompt], 5)
        llm.scheduler.forget_prefixes()
        request_id = llm.add_request(prompt, 5)
        while not any(seq.status == "waiting_for_load" for seq in llm.scheduler.waiting):
            llm.step()
        llm.reset_prefix_cache()  # outdates the load
        result = run_and_recount(llm)[request_id]
    assert result.tokens == first.tokens
    assert result.loaded_tokens in (0, 196)  # what was copied before the worker heard of the reset stays good
