"""What a run counts adds up, also where requests are preempted, and where the run is stopped at any step."""

from __future__ import annotations

import pytest

from orlop.cli.replay import RunRequest, replay
from orlop.cli.summary import NothingLoaded, Scaled, figures_of
from orlop.engine.llm import LLM, EngineConfig

OFFLOAD = {"host": "8MiB", "blocks_per_chunk": 1}


def workload(rounds=3, tenants=6, prompt=150, max_tokens=20):
    """Each tenant's prompt comes back, longer by a block each time."""
    return [
        RunRequest(
            f"{tenant}.{turn}", [tenant, *((tenant * 7 + i * i) % 500 for i in range(prompt + 16 * turn))], max_tokens
        )
        for turn in range(rounds)
        for tenant in range(tenants)
    ]


def run(requests, *, num_blocks, offload=OFFLOAD, concurrency=4, stop_after=None):
    """The report, and the tokens of loads that were in flight when the run was stopped."""
    llm = LLM(EngineConfig(num_blocks=num_blocks, drain_deadline_s=60), offload=offload)
    steps, cut_off = 0, 0

    def must_stop():
        nonlocal steps, cut_off
        steps += 1
        cut_off = sum(seq.num_loading_tokens for seq in llm.scheduler.waiting)
        return steps == stop_after

    report = replay(llm, requests, concurrency=concurrency, must_stop=must_stop)
    return report, cut_off if report.interrupted else 0


def sum_of_tiers(report):
    return sum(report.tokens_loaded_by_tier.values())


def test_prompts_and_answers_are_what_was_computed_found_and_loaded():
    requests = workload()
    report, _ = run(requests, num_blocks=64)
    assert (len(report.tokens), report.stopped, report.preemptions) == (len(requests), 0, 0)
    assert report.loaded_tokens == sum_of_tiers(report) > 0
    assert report.prompt_tokens == sum(len(r.prompt) for r in requests)
    assert report.generated_tokens == 20 * len(requests)
    assert report.needed_tokens == report.prompt_tokens + report.generated_tokens - len(requests)
    assert report.computed_tokens + report.device_hit_tokens + report.loaded_tokens == report.needed_tokens


@pytest.mark.parametrize("offload", [OFFLOAD, None])
def test_what_a_preemption_took_is_counted_as_done_again(offload):
    requests = workload(max_tokens=60)
    report, _ = run(requests, num_blocks=30, offload=offload, concurrency=6)
    assert report.preemptions > 0
    assert report.loaded_tokens == sum_of_tiers(report)
    assert report.needed_tokens == report.prompt_tokens + report.generated_tokens - len(requests)
    # Each preempted request had a token or more, and at most all of its own.
    assert (
        report.preemptions <= report.repeated_tokens <= report.preemptions * max(len(r.prompt) + 60 for r in requests)
    )


def test_wherever_a_run_is_stopped_its_rows_add_up():
    requests = workload()
    whole, _ = run(requests, num_blocks=40)
    for stop_after in range(1, 200, 7):
        report, cut_off = run(requests, num_blocks=40, stop_after=stop_after)
        if not report.interrupted:
            break
        assert report.loaded_tokens == sum_of_tiers(report)
        assert len(report.tokens) + report.stopped <= len(requests)
        assert report.needed_tokens <= report.prompt_tokens + report.generated_tokens - len(report.tokens)
        if not report.preemptions:
            assert report.repeated_tokens == cut_off
    assert report.needed_tokens <= whole.needed_tokens


def test_the_figures_of_a_run_say_how_many_requests_they_are_of():
    report, _ = run(workload(), num_blocks=64, stop_after=40)
    figures = figures_of(report)
    assert figures["requests"] == len(report.tokens) > 0
    assert 1 <= figures["requests_stopped"] == report.stopped <= 4


@pytest.mark.parametrize(
    ("requests", "options", "why"),
    [
        (workload(prompt=2, rounds=1), {}, "short_prompts"),
        (workload(prompt=30, rounds=1), {}, "all_new"),
        (workload(prompt=30), {"num_blocks": 200}, "on_device"),
        (workload(), {}, None),
        (workload(prompt=30, rounds=1), {"stop_after": 2}, None),
        (workload(prompt=15, rounds=1), {"stop_after": 2}, "short_prompts"),
    ],
)
def test_why_nothing_was_loaded_is_said(requests, options, why):
    report, _ = run(requests, **{"num_blocks": 40} | options)
    found = NothingLoaded.of(report, requests, chunk_tokens=16)
    assert (found and found.why) == why
    assert (report.loaded_tokens > 0) == (why is None and not report.interrupted)


def test_a_trace_is_scaled_where_its_prompts_or_answers_are_not_as_long_as_recorded():
    as_recorded = RunRequest("a", [1] * 40, 8, recorded=(40, 8))
    own = RunRequest("b", [1] * 3, 5)
    assert Scaled.of([as_recorded, own]) is None
    assert Scaled.of([as_recorded, RunRequest("c", [1] * 10, 8, recorded=(320, 8))]) == Scaled(360, 50, 16, 16)
    assert Scaled.of([RunRequest("d", [1] * 40, 4, recorded=(40, 8))]) == Scaled(40, 40, 8, 4)
