"""What the engine promises a connector: which calls, in which order, and which blocks it leaves alone."""

from __future__ import annotations

import random

import pytest
import torch
from engine_doubles import DictConnector, engine, greedy, run_checked

torch.set_num_threads(1)

PROMPT = [7 * i % 512 for i in range(70)]


@pytest.fixture(scope="module")
def tokens():
    """Ten tokens that follow ``PROMPT``."""
    return greedy(engine(), PROMPT, 10)


def stored_pages(*prompts):
    connector = DictConnector()
    llm = engine(connector)
    llm.generate(prompts, 1)
    return connector.pages


both_schedulings = pytest.mark.parametrize("async_scheduling", [False, True])


@both_schedulings
def test_a_stored_prefix_is_loaded_by_another_engine_and_gives_the_same_tokens(tokens, async_scheduling):
    connector = DictConnector(stored_pages(PROMPT))
    llm = engine(connector, async_scheduling=async_scheduling)
    llm.add_request(PROMPT, 10)
    (result,) = run_checked(llm).values()
    assert result.tokens == tokens
    assert (result.loaded_tokens, result.computed_tokens) == (64, 6 + 9)
    assert connector.ended == ["request-0"]


def test_a_prompt_that_is_wholly_stored_leaves_one_block_to_compute():
    pages = stored_pages([*PROMPT[:64], 1])
    llm = engine(DictConnector(pages))
    llm.add_request(PROMPT[:64], 2)
    (result,) = run_checked(llm).values()
    assert result.loaded_tokens == 48
    assert result.tokens == greedy(llm, PROMPT[:64], 2)


def test_the_calls_of_a_load_come_in_the_order_of_the_contract():
    connector = DictConnector(stored_pages(PROMPT), load_steps=2)
    llm = engine(connector)
    llm.add_request(PROMPT, 1, request_id="r")
    run_checked(llm)
    step = [("meta",), ("preemptions",), ("load",), ("save",), ("finished",)]
    assert connector.calls == [
        ("ask", "r", 0),
        ("alloc", "r", 64),
        *step,
        *step,
        ("output", ("r",)),
        ("alloc", "r", 0),
        *step,
    ]


def test_connector_metadata_is_built_in_a_step_without_any_request():
    connector = DictConnector()
    engine(connector).step()
    assert [call[0] for call in connector.calls] == ["meta", "preemptions", "load", "save", "finished"]


@pytest.mark.fault("B058")
@both_schedulings
def test_a_failed_load_is_computed_although_nothing_else_happens(tokens, async_scheduling):
    connector = DictConnector(stored_pages(PROMPT), failing={"r"})
    llm = engine(connector, async_scheduling=async_scheduling)
    llm.add_request(PROMPT, 10, request_id="r")
    result = run_checked(llm)["r"]
    assert result.tokens == tokens
    assert (result.loaded_tokens, connector.loads_of["r"]) == (0, 1)


def test_a_failed_load_keeps_the_part_that_was_on_the_device(tokens):
    connector = DictConnector(stored_pages(PROMPT), failing={"r"})
    llm = engine(connector)
    llm.generate([PROMPT[:33]], 1)
    llm.add_request(PROMPT, 10, request_id="r")
    result = run_checked(llm)["r"]
    assert result.tokens == tokens
    assert result.device_hit_tokens == 32


def test_a_request_that_is_not_decided_yet_holds_up_nobody_behind_it():
    connector = DictConnector(undecided={"first"})
    llm = engine(connector)
    llm.add_request(PROMPT, 2, request_id="first")
    llm.add_request(PROMPT[::-1], 2, request_id="second")
    ended = [r.request_id for _ in range(4) for r in llm.step()]
    assert ended == ["second"]
    connector.undecided.clear()
    assert set(run_checked(llm)) == {"first"}


@pytest.mark.fault("B060")
def test_a_load_is_noticed_although_older_requests_are_still_in_the_queue():
    connector = DictConnector(stored_pages(PROMPT), undecided={"old"})
    llm = engine(connector)
    llm.add_request(PROMPT[::-1], 1, request_id="old")
    llm.add_request(PROMPT, 1, request_id="young")
    ended = [r.request_id for _ in range(3) for r in llm.step()]
    assert ended == ["young"]
    llm.abort("old")


@both_schedulings
def test_blocks_of_a_running_load_stay_allocated_when_its_request_is_aborted(async_scheduling):
    connector = DictConnector(stored_pages(PROMPT), hold_loads=True)
    llm = engine(connector, num_blocks=10, async_scheduling=async_scheduling)
    llm.add_request(PROMPT, 1, request_id="r")
    for _ in range(3):
        llm.step()
    assert llm.abort("r").aborted
    assert connector.ended == ["r"]
    other = llm.add_request([3] * 90, 4)
    for _ in range(5):
        llm.step()
        llm.check()
        assert llm.scheduler.pool.num_free == 9 - 4
    connector.hold_loads = False
    results = run_checked(llm)
    assert results[other].tokens == greedy(llm, [3] * 90, 4)
    assert llm.scheduler.pool.num_free == 9


def test_an_id_that_comes_back_while_its_aborted_load_runs_waits_for_the_report(tokens):
    connector = DictConnector(stored_pages(PROMPT), hold_loads=True)
    llm = engine(connector)
    llm.add_request(PROMPT, 10, request_id="r")
    llm.step()
    llm.abort("r")
    llm.add_request(PROMPT, 10, request_id="r")
    llm.step()
    assert connector.loads_of["r"] == 1
    connector.hold_loads = False
    assert run_checked(llm)["r"].tokens == tokens
    assert connector.loads_of["r"] == 2
    assert connector.ended == ["r", "r"]


@pytest.mark.fault("B061")
@both_schedulings
def test_loaded_requests_that_fill_the_device_give_way_to_each_other(async_scheduling):
    first = [1, *[5 * i % 512 for i in range(255)]]
    second = [2, *[3 * i % 512 for i in range(255)]]
    pages = stored_pages(first[:129], second[:129])
    connector = DictConnector(pages)
    # Both loads take 8 blocks and fill the device, then each prompt needs 8 more and one for its tokens.
    llm = engine(connector, num_blocks=18, async_scheduling=async_scheduling)
    ids = [llm.add_request(prompt, 4) for prompt in (first, second)]
    results = run_checked(llm, max_steps=200)
    assert [results[i].tokens for i in ids] == [greedy(llm, prompt, 4) for prompt in (first, second)]
    assert llm.scheduler.num_preemptions > 0


def test_a_loaded_request_that_waits_gives_way_before_a_running_one_does():
    runs, waits = PROMPT[:60], [*PROMPT[16:32], *PROMPT[:40]]
    connector = DictConnector(stored_pages(waits[:17]))
    llm = engine(connector, num_blocks=7)
    llm.add_request(runs, 25, request_id="runs")
    llm.step()
    llm.add_request(waits, 2, request_id="waits")
    results = run_checked(llm, max_steps=200)
    assert (results["runs"].preemptions, results["waits"].preemptions) == (0, 1)
    assert results["runs"].tokens == greedy(llm, runs, 25)
    assert results["waits"].tokens == greedy(llm, waits, 2)


@pytest.mark.fault("B062")
@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_a_loaded_request_that_needs_one_more_block_is_not_stuck_behind_another_load(order):
    prompts = {"a": [1, *PROMPT[:63]], "b": [2, *PROMPT[:47]]}
    connector = DictConnector(stored_pages(*([*p, 5] for p in prompts.values())))
    llm = engine(connector, num_blocks=7)
    for request_id in order:
        llm.add_request(prompts[request_id], 3, request_id=request_id)
    results = run_checked(llm, max_steps=200)
    assert {i: r.tokens for i, r in results.items()} == {i: greedy(llm, p, 3) for i, p in prompts.items()}


@pytest.mark.fault("B063")
def test_sharers_of_a_loaded_prefix_find_it_on_the_device_once_it_is_there(tokens):
    connector = DictConnector(stored_pages(PROMPT))
    llm = engine(connector)
    llm.add_request(PROMPT, 10, request_id="first")
    llm.step()
    for i in range(5):
        llm.add_request(PROMPT, 10, request_id=f"sharer-{i}")
    results = run_checked(llm)
    assert {r.tokens for r in results.values()} == {tokens}
    assert connector.loads_of == {"first": 1}


@both_schedulings
def test_a_reset_reaches_the_connector_and_loaded_requests_compute(tokens, async_scheduling):
    connector = DictConnector(stored_pages(PROMPT))
    llm = engine(connector, async_scheduling=async_scheduling)
    llm.add_request(PROMPT, 10, request_id="r")
    while not any(s.status == "loaded" for s in llm.scheduler.waiting):
        llm.step()
    llm.reset_prefix_cache()
    assert connector.resets == 1
    result = run_checked(llm)["r"]
    assert result.tokens == tokens
    assert result.computed_tokens == 70 + 9


def test_the_engine_steps_on_while_transfers_are_pending():
    connector = DictConnector()
    llm = engine(connector)
    assert not llm.has_work()
    connector.pending = True
    assert llm.has_work()


def test_shutdown_drains_no_longer_than_its_deadline_and_only_once():
    now = [0.0]

    def clock():
        now[0] += 0.25
        return now[0]

    from orlop.engine.llm import LLM, EngineConfig

    connector = DictConnector(hold_loads=True)
    llm = LLM(
        EngineConfig(drain_deadline_s=3.0, idle_wait_s=0.0, num_blocks=64),
        connect=connector.connect,
        clock=clock,
    )
    llm.add_request(PROMPT, 10)
    connector.pending = True
    llm.shutdown()
    llm.shutdown()
    assert connector.is_shut_down == [True, True]  # each half once
    assert connector.ended == ["request-0"]
    assert 3.0 <= now[0] <= 10.0


@both_schedulings
@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_ends_with_right_tokens_and_empty_books(seed, async_scheduling):
    source = random.Random(seed)
    twin = engine(block_tokens=4)
    bases = [[source.randrange(512) for _ in range(60)] for _ in range(3)]
    connector = DictConnector(load_steps=source.randrange(1, 4))
    llm = engine(
        connector,
        num_blocks=40,
        block_tokens=4,
        max_step_tokens=source.choice([5, 16, 64]),
        async_scheduling=async_scheduling,
    )
    asked, results, aborted = {}, {}, set()
    for number in range(40):
        prompt = [*source.choice(bases)[: source.randrange(1, 60)], source.randrange(4)]
        asked[llm.add_request(prompt, 5, request_id=f"r{number}")] = prompt
        if source.random() < 0.2:
            connector.failing.add(f"r{number}")
        if source.random() < 0.2:
            connector.undecided.add(f"r{number}")
        for _ in range(source.randrange(4)):
            results |= {r.request_id: r for r in llm.step()}
            llm.check()
        if source.random() < 0.15:
            victim = source.choice(list(asked))
            if llm.abort(victim) is not None:
                aborted.add(victim)
        if source.random() < 0.05:
            llm.scheduler.forget_prefixes()
        connector.undecided = {u for u in connector.undecided if source.random() < 0.7}
    connector.undecided.clear()
    results |= run_checked(llm)
    assert set(results) == set(asked) - aborted
    for request_id, result in results.items():
        assert result.tokens == greedy(twin, asked[request_id], 5), request_id
    assert sorted(connector.ended) == sorted(asked)
    assert llm.scheduler.pool.num_free == llm.scheduler.pool.capacity
    assert sum(r.loaded_tokens for r in results.values()) > 0
