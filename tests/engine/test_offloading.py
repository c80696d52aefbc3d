"""The engine with Orlop's own connector: tokens, books and drain, with host memory alone and with a tier below it."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from engine_doubles import engine, greedy
from patience import PATIENT

from orlop.errors import OrlopError

torch.set_num_threads(1)

MAX_STEPS = 50_000


@pytest.fixture(params=["host", "files", "disk"])
def settings(request, tmp_path):
    """A host tier of 40 blocks, alone or above a tier whose I/O runs in the engine's process."""
    settings = {"host": {"bytes": 40 * 4 * 512}, "blocks_per_chunk": 2, "io_process": False}
    if request.param != "host":
        tier = {"type": request.param, "path": str(tmp_path / request.param), "bytes": "64MiB"}
        settings["tiers"] = [{**tier, "deadline": dict(PATIENT)}]
    return settings


@pytest.fixture
def make(settings):
    """Engines with offload that are shut down at the end."""
    made = []

    def make_engine(**options):
        # An idle step sleeps, as outside of tests: one that only spins would starve the threads that it waits for.
        llm = engine(offload=settings, **{"idle_wait_s": 0.0005, **options})
        made.append(llm)
        return llm

    yield make_engine
    for llm in made:
        llm.shutdown()


def run_checked(llm):
    results = {}
    for _ in range(MAX_STEPS):
        if not llm.has_work():
            return results
        results |= {r.request_id: r for r in llm.step()}
        llm.check()
        llm.connector.check()
    raise AssertionError(f"after {MAX_STEPS} steps still waiting: {llm.scheduler.waiting}")


def conversation_turns(source, conversations=4, turns=3):
    """Prompts whose turns extend each other, in turn, more than the device holds."""
    system = [source.randrange(512) for _ in range(12)]
    talks = [list(system) for _ in range(conversations)]
    for _ in range(turns):
        for talk in talks:
            talk += [source.randrange(512) for _ in range(source.randrange(5, 20))]
            yield list(talk)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_device_that_is_far_too_small_generates_the_same_tokens(make, async_scheduling):
    llm = make(num_blocks=24, block_tokens=4, async_scheduling=async_scheduling)
    loaded = 0
    for prompt in conversation_turns(random.Random(1)):
        request_id = llm.add_request(prompt, 5)
        result = run_checked(llm)[request_id]
        assert result.tokens == greedy(llm, prompt, 5)
        loaded += result.loaded_tokens
    assert loaded > 0
    assert not llm.connector.has_pending_push_work()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_with_aborts_and_resets(make, seed, async_scheduling):
    source = random.Random(seed)
    llm = make(num_blocks=24, block_tokens=4, max_step_tokens=32, async_scheduling=async_scheduling)
    asked, results, aborted = {}, {}, set()
    for number, prompt in enumerate([*conversation_turns(source), *conversation_turns(source)]):
        asked[llm.add_request(prompt, 5, request_id=f"r{number}")] = prompt
        for _ in range(source.randrange(8)):
            results |= {r.request_id: r for r in llm.step()}
            llm.check()
            llm.connector.check()
        if source.random() < 0.2:
            victim = source.choice(list(asked))
            if llm.abort(victim) is not None:
                aborted.add(victim)
        if source.random() < 0.1:
            llm.reset_prefix_cache()
    results |= run_checked(llm)
    assert set(results) == set(asked) - aborted
    for request_id, result in results.items():
        assert result.tokens == greedy(llm, asked[request_id], 5), request_id
    assert llm.scheduler.pool.num_free == llm.scheduler.pool.capacity


def test_after_a_reset_with_other_weights_nothing_of_the_old_ones_is_loaded(make):
    llm = make(num_blocks=24, block_tokens=4)
    prompt = [9] * 60
    llm.generate([prompt], 2)
    llm.runner.model._head = llm.runner.model._head.flip(0)
    llm.runner.model._layers.reverse()
    llm.reset_prefix_cache()
    (result,) = llm.generate([prompt], 4)
    assert (result.loaded_tokens, result.device_hit_tokens) == (0, 0)
    assert result.tokens == greedy(llm, prompt, 4)


@pytest.mark.parametrize("settings", ["files", "disk"], indirect=True)
def test_an_engine_that_comes_later_starts_from_the_tier(make):
    prompt = [7 * i % 512 for i in range(60)]
    first = make(num_blocks=24, block_tokens=4)
    expected = first.generate([prompt], 5)[0]
    first.shutdown()
    (result,) = make(num_blocks=24, block_tokens=4).generate([prompt], 5)
    assert result.tokens == expected.tokens
    assert result.loaded_tokens == 56


def test_a_start_that_is_refused_leaves_no_worker_behind(settings):
    before = threading.active_count()
    with pytest.raises(OrlopError, match=r"host\.bytes"):
        engine(offload=settings | {"host": {"bytes": 1}})
    assert threading.active_count() == before
