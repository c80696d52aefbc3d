"""The engine alone: tokens, batching, prefix caching, preemption, abort."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from engine_doubles import engine, greedy, run_checked

from orlop.engine.blocks import BlockPool
from orlop.engine.llm import LLM, EngineConfig
from orlop.engine.sampling import SamplingParams
from orlop.engine.sequence import ROOT_DIGEST, Sequence
from orlop.errors import ConfigError, InvariantError, OrlopError

torch.set_num_threads(1)


def prompts(count, *, shared=40, longest=90, seed=0):
    source = random.Random(seed)
    system = [source.randrange(512) for _ in range(shared)]
    return [
        system[: source.randrange(shared + 1)] + [source.randrange(512) for _ in range(source.randrange(1, longest))]
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def expected():
    """Twelve prompts and what the plain twin generates for them."""
    twin = engine()
    work = prompts(12)
    return work, [greedy(twin, prompt, 5) for prompt in work]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 200, "max_step_tokens": 512},
        {"num_blocks": 200, "max_step_tokens": 7},
        {"num_blocks": 11, "max_step_tokens": 64},
        {"num_blocks": 200, "max_running": 1},
        {"num_blocks": 200, "prefix_caching": False},
        {"num_blocks": 90, "block_tokens": 4, "max_step_tokens": 33},
    ],
)
def test_tokens_do_not_depend_on_batching(expected, settings, async_scheduling):
    work, tokens = expected
    llm = engine(**settings, async_scheduling=async_scheduling)
    ids = [llm.add_request(prompt, 5) for prompt in work]
    results = run_checked(llm)
    assert [results[i].tokens for i in ids] == tokens
    assert llm.scheduler.pool.num_free == llm.scheduler.pool.capacity


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_preempted_sequences_compute_again_and_end_with_the_same_tokens(async_scheduling):
    twin = engine()
    work = prompts(4, shared=0, longest=30, seed=3)
    llm = engine(num_blocks=9, block_tokens=16, async_scheduling=async_scheduling)
    ids = [llm.add_request(prompt, 40) for prompt in work]
    results = run_checked(llm)
    assert llm.scheduler.num_preemptions > 0
    assert sum(r.preemptions for r in results.values()) == llm.scheduler.num_preemptions
    assert [results[i].tokens for i in ids] == [greedy(twin, prompt, 40) for prompt in work]


def test_a_prefix_is_computed_once_while_its_blocks_last():
    llm = engine()
    prompt = prompts(1, shared=0, longest=2)[0] * 64
    first, second = llm.generate([prompt], 2)[0], llm.generate([prompt], 2)[0]
    assert (first.device_hit_tokens, first.computed_tokens) == (0, 65)
    # Of 64 tokens 48 are found: the last block holds the token whose logits are wanted.
    assert (second.device_hit_tokens, second.computed_tokens) == (48, 17)
    assert first.tokens == second.tokens


def test_generated_tokens_fill_blocks_that_later_prompts_find():
    llm = engine(block_tokens=4)
    first = llm.generate([[1, 2, 3]], 6)[0]
    second = llm.generate([[1, 2, 3, *first.tokens, 7]], 1)[0]
    # The KV of the last generated token has never been computed.
    assert second.device_hit_tokens == 8


def hashes_of(prompt, block_tokens=16):
    return Sequence("r", prompt, SamplingParams(), block_tokens=block_tokens).block_hashes


def test_one_wrong_block_of_kv_changes_what_is_generated():
    llm = engine()
    changed = 0
    for prompt in prompts(8, shared=0, longest=200, seed=5):
        prompt = (prompt * 64)[:64]
        right = greedy(llm, prompt, 4)
        llm.generate([prompt], 1)
        for cache in llm.runner.kv_caches.values():
            cache[llm.scheduler.pool.cached((0, hashes_of(prompt)[1]))] = 0.0
        changed += llm.generate([prompt], 4)[0].tokens != right
        llm.reset_prefix_cache()
    assert changed >= 6


def test_hashes_are_chained_digests_that_every_process_agrees_on():
    seq = Sequence("r", range(10), SamplingParams(), block_tokens=4)
    first = hashlib.sha256(ROOT_DIGEST + np.arange(4, dtype="<i4").tobytes()).digest()
    second = hashlib.sha256(first + np.arange(4, 8, dtype="<i4").tobytes()).digest()
    assert list(seq.block_hashes) == [first, second]
    hashes = seq.block_hashes
    seq.append(10)
    seq.append(11)
    assert len(hashes) == 3
    assert hashes is seq.block_hashes


@pytest.mark.fault("B006")
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("steps_before", [0, 1, 2, 3])
def test_an_abort_frees_the_blocks_wherever_the_request_stands(async_scheduling, steps_before):
    llm = engine(max_step_tokens=32, max_running=2, async_scheduling=async_scheduling)
    work = prompts(4, shared=0, longest=100, seed=1)
    ids = [llm.add_request(prompt, 6) for prompt in work]
    for _ in range(steps_before):
        llm.step()
    ended = llm.abort(ids[1])
    assert ended is not None
    assert ended.aborted
    assert llm.abort(ids[1]) is None
    results = run_checked(llm)
    assert set(results) == {ids[0], ids[2], ids[3]}
    assert results[ids[3]].tokens == greedy(llm, work[3], 6)
    assert llm.scheduler.pool.num_free == llm.scheduler.pool.capacity


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_tokens_sampled_beyond_a_stop_token_are_discarded(async_scheduling):
    llm = engine(async_scheduling=async_scheduling)
    prompt = prompts(1)[0]
    tokens = greedy(llm, prompt, 8)
    stop = next(t for i, t in enumerate(tokens) if i >= 2 and t not in tokens[:i])
    request_id = llm.add_request(prompt, SamplingParams(8, stop_token_ids=[stop]))
    results = run_checked(llm)
    assert results[request_id].tokens == tokens[: tokens.index(stop) + 1]
    assert llm.scheduler.pool.num_free == llm.scheduler.pool.capacity


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_after_a_reset_nothing_from_before_is_found_and_running_requests_start_over(async_scheduling):
    llm = engine(async_scheduling=async_scheduling)
    work = prompts(3, shared=0, longest=100, seed=2)
    ids = [llm.add_request(prompt, 6) for prompt in work]
    for _ in range(3):
        llm.step()
    llm.reset_prefix_cache()
    for cache in llm.runner.kv_caches.values():
        cache.fill_(torch.nan)
    results = run_checked(llm)
    assert [results[i].tokens for i in ids] == [greedy(llm, prompt, 6) for prompt in work]
    assert all(r.preemptions == 1 for r in results.values())


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "says"),
    [
        ([], 1, "0 prompt tokens"),
        ([1], 0, "max_tokens=0"),
        ([1], "2", "max_tokens='2'"),
        ([1, 512], 1, "found token id 512, expected ids from 0 to 511"),
        ([-1], 1, "found token id -1"),
        ("hello", 1, "found the prompt 'hello', expected a list of token ids"),
        (b"hello", 1, "a list of token ids"),
        (3, 1, "found the prompt 3, expected text or a list of token ids"),
        ([1.5, 2], 1, "a list of token ids"),
        ([[1, 2]], 1, "a list of token ids"),
        ([None] * 100, 1, r"found the prompt \[None.{55}\.\.\.,"),
        ([1] * 100, 1, "num_blocks=8"),
    ],
)
def test_a_request_that_can_never_run_is_refused_before_it_is_queued(prompt, max_tokens, says):
    llm = engine(num_blocks=7)
    with pytest.raises(ConfigError, match=says):
        llm.add_request(prompt, max_tokens)
    assert not llm.has_work()


def test_an_id_that_is_running_is_refused_and_may_come_back_afterwards():
    llm = engine()
    llm.add_request([1, 2], 1, request_id="r")
    with pytest.raises(ConfigError, match="running"):
        llm.add_request([1, 2], 1, request_id="r")
    run_checked(llm)
    llm.add_request([1, 2], 1, request_id="r")
    assert set(run_checked(llm)) == {"r"}


def test_time_to_first_token_is_that_of_the_first_report():
    now = iter(range(100))
    from orlop.engine.llm import LLM

    llm = LLM(EngineConfig(idle_wait_s=0.0), clock=lambda: float(next(now)))
    llm.add_request([1, 2, 3], 3)  # reads 0
    results = [r for _ in range(3) for r in llm.step()]  # each step reads once: 1, 2, 3
    assert results[0].first_token_s == 1.0
    assert results[0].total_s == 4.0


# --- the block pool ---------------------------------------------------------------------------------------


def test_the_least_recently_used_cached_block_is_forgotten_first():
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for block, name in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.register(block, name)
    pool.free(blocks)  # the end of the prompt leaves first: c, b, a
    pool.take([pool.cached(b"a")])
    assert pool.unused(blocks[:2]) == 1
    pool.allocate(1)
    assert [pool.cached(name) for name in (b"a", b"b", b"c")] == [*blocks[:2], None]
    pool.allocate(1)
    assert [pool.cached(name) for name in (b"a", b"b")] == [blocks[0], None]
    assert pool.num_free == 0


def test_check_sees_a_block_that_was_freed_twice_and_one_that_leaked():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.check([blocks])
    with pytest.raises(InvariantError, match="use counts"):
        pool.check([])
    pool.free(blocks)
    pool.check([])
    pool._uses[blocks[0]] -= 1
    with pytest.raises(InvariantError, match=str(blocks[0])):
        pool.check([])


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(5)
    assert 0 not in pool.allocate(4)
    with pytest.raises(InvariantError):
        pool.allocate(1)


def test_a_kv_cache_beyond_the_memory_limit_is_refused_before_anything_is_made():
    with pytest.raises(ConfigError, match=r"num_blocks: found 999999999999 .* expected \d+ bytes at most.* lower"):
        LLM(EngineConfig(num_blocks=999_999_999_999))
    with pytest.raises(ConfigError, match="lower block_tokens"):
        LLM(EngineConfig(num_blocks=4, block_tokens=999_999_999_999))


def test_without_torch_the_public_name_says_which_extra_to_install():
    program = (
        "import sys; sys.modules['torch'] = None\nimport orlop\ntry:\n    from orlop import LLM\n"
        "except orlop.OrlopError as error:\n    print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "MissingExtra the embedded engine needs torch: pip install 'orlop[engine]'\n"


@pytest.mark.parametrize("prompts", ["hello", ["hello"], [1, 2, 3], [[1.5, 2]], [[1], [512]], 7, None])
def test_generate_refuses_what_are_no_prompts_and_leaves_nothing_queued(prompts):
    llm = engine()
    with pytest.raises(ConfigError, match="expected"):
        llm.generate(prompts, 2)
    assert not llm.has_work()
    assert [len(r.tokens) for r in llm.generate([[1], np.array([2, 3]), torch.tensor([4])], 2)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("name", "values", "least"),
    [
        ("num_blocks", [-1, 0, 1, 2.0, True, None], 2),
        ("block_tokens", [-1, 0, "16"], 1),
        ("max_step_tokens", [-1, 0], 1),
        ("max_running", [-1, 0], 1),
        ("idle_wait_s", [-0.1, float("nan"), "1"], 0),
        ("drain_deadline_s", [-1, float("inf")], 0),
    ],
)
def test_a_number_with_which_the_engine_would_stand_still_is_refused(name, values, least):
    for value in values:
        with pytest.raises(ConfigError, match=rf"{name}: found {value!r}, allowed: .* from {least} up"):
            EngineConfig(**{name: value})
    assert getattr(EngineConfig(**{name: least}), name) == least


def test_after_shutdown_no_request_is_taken():
    llm = engine()
    llm.shutdown()
    for ask in (lambda: llm.add_request([1], 1), lambda: llm.generate([[1]], 1), lambda: llm.generate([], 1)):
        with pytest.raises(OrlopError, match="shut down"):
            ask()
