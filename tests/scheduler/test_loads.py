"""Lookups and loads: when to wait, what to promise, and what becomes of a load that fails or never starts.

In: the real scheduler half over a dictionary for a manager. Out: answers, load jobs, requests that end. Never: tiers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest

from orlop.core import Geometry, KeyRun, KVGroup, Lookup, PrefixAnswer, TransferKind
from orlop.scheduler.prefix import Lookups, find_hit
from orlop.scheduler.request import GroupState
from orlop.testing.device import only
from orlop.testing.doubles import DictManager
from orlop.testing.request_runner import Status
from orlop.testing.rig import FULL, HYBRID, Rig, make_rig

STORE, LOAD = TransferKind.STORE, TransferKind.LOAD
PROMPT = list(range(16))
HIT, PENDING, RETRY, MISS = Lookup.HIT, Lookup.HIT_PENDING, Lookup.RETRY, Lookup.MISS


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def async_scheduling(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def dictionary(rig: Rig) -> DictManager:
    assert isinstance(rig.manager.inner, DictManager)
    return rig.manager.inner


# --- when to wait ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verdict", [RETRY, PENDING])
def test_a_request_is_deferred_while_its_prefix_may_still_come(verdict: Lookup, async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling)
    inner = dictionary(rig)
    inner.verdict = lambda group, h: verdict
    request = rig.runner.add(PROMPT)
    for _ in range(20):
        rig.runner.step()
    assert request.status is Status.WAITING
    assert request.asked == 20
    assert rig.manager.count("lookup_prefix") == 1, "with nothing changed, nothing is looked up again"
    assert rig.manager.count("want") == 1
    inner.verdict = lambda group, h: MISS
    inner.version += 1
    rig.finish()
    assert request.status is Status.FINISHED


@pytest.mark.fault("B043")
def test_a_chunk_being_stored_is_waited_for_and_then_loaded(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling)
    rig.hold(STORE)
    rig.runner.add(PROMPT)
    rig.runner.step()
    rig.runner.step()
    rig.runner.pool.reset()
    second = rig.runner.add([*PROMPT, 1])
    for _ in range(3):
        rig.runner.step()
    assert second.status is Status.WAITING
    rig.unhold()
    rig.finish()
    assert second.was_external == 16


@pytest.mark.fault("B043")
def test_a_chunk_whose_store_fails_is_computed(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling)
    rig.hold(STORE)
    rig.runner.add(PROMPT)
    rig.runner.step()
    rig.runner.step()
    rig.runner.pool.reset()
    second = rig.runner.add([*PROMPT, 1])
    rig.runner.step()
    assert second.status is Status.WAITING
    rig.device.fail_late(job.job_id for job in rig.device.stored_jobs)
    rig.unhold()
    rig.finish()
    assert second.was_external == 0
    assert second.status is Status.FINISHED


def test_waiting_ends_at_the_answers_deadline(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling)
    inner = dictionary(rig)
    inner.valid_until = rig.clock.now + 1.0
    inner.verdict = lambda group, h: RETRY if rig.clock.now < inner.valid_until else MISS
    rig.runner.add(PROMPT)
    assert 100 <= rig.runner.run() <= 110


def test_a_request_that_must_not_read_caches_is_never_looked_up(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling)
    rig.store(PROMPT)
    before = rig.manager.count("lookup_prefix")
    request = rig.runner.add([*PROMPT, 1], skip_reading_prefix_cache=True)
    rig.finish()
    assert request.was_external == 0
    assert rig.manager.count("lookup_prefix") == before
    assert rig.scheduler.get_stats().get("queries", 0) == 1


# --- what to promise ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [4, 5, 8, 9, 16, 17])
def test_the_last_token_is_always_computed(tokens: int, async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling)
    rig.store(range(20))
    request = rig.runner.add(range(tokens))
    rig.finish()
    assert request.was_external == (tokens - 1) // 4 * 4


@pytest.mark.fault("B054")
def test_tokens_loaded_are_tokens_not_computed(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling, blocks=600, token_budget=4096)
    rig.store(range(510 * 4))
    rig.runner.add([*range(510 * 4), 1])
    computed = 0
    while not rig.runner.idle:
        computed += sum(rig.runner.step().num_scheduled_tokens.values())
    assert rig.device.copies[LOAD] == 510
    assert computed == 1
    rig.finish()


def test_a_load_says_which_tier_had_its_tokens(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling)
    rig.store(range(16))
    assert rig.scheduler.load_origins(rig.runner.add([*range(100, 110)])) == {}
    request = rig.runner.add([*range(16), 1])
    while not rig.device.copies[LOAD]:
        rig.runner.step()
    assert rig.scheduler.load_origins(request) == {"host": 16}
    rig.finish()
    assert rig.scheduler.load_origins(request) == {}


def test_an_answer_that_is_never_used_takes_nothing(async_scheduling: bool) -> None:
    """There is no room on the device for what was promised, until another request ends."""
    rig = make_rig(async_scheduling=async_scheduling, blocks=12)
    rig.store(range(32))
    rig.runner.add(range(100, 116), 12)
    rig.runner.step()
    request = rig.runner.add(range(33))
    for _ in range(5):
        rig.runner.step()
    assert request.status is Status.WAITING
    assert request.asked == 5
    assert rig.manager.count("prepare_load") == 0
    rig.finish()
    assert request.was_external == 32


def test_an_abort_before_the_allocation_leaves_no_pin(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling, blocks=12)
    rig.store(range(32))
    blocker = rig.runner.add(range(100, 116), 12)
    rig.runner.step()
    request = rig.runner.add(range(33))
    rig.runner.step()
    rig.runner.abort(request.request_id)
    rig.finish()
    assert blocker.status is Status.FINISHED
    assert not any(entry.pins for entry in dictionary(rig).table.values())


@pytest.mark.fault("B095")
def test_a_hit_that_is_gone_at_the_allocation_costs_a_recompute(async_scheduling: bool) -> None:
    """The manager breaks its promise; the load is doomed, reported as failed, and the request computes."""
    rig = make_rig(async_scheduling=async_scheduling)
    rig.store(PROMPT)
    inner = dictionary(rig)
    original = inner.prepare_load

    def forgetful(run, context, *, now):  # type: ignore[no-untyped-def]
        inner.table.pop((run.group, run.hashes[2]), None)
        return original(run, context, now=now)

    inner.prepare_load = forgetful  # type: ignore[method-assign]
    request = rig.runner.add([*PROMPT, 1])
    rig.finish()
    assert request.status is Status.FINISHED
    assert request.was_external == 0
    assert rig.scheduler.get_stats()["surprises"] == 1
    assert len(rig.loads()) == 1


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("geometry", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.fault("B148")
def test_a_failed_load_is_computed_and_not_tried_again(geometry: Geometry, rank: int, async_scheduling: bool) -> None:
    rig = make_rig(geometry, async_scheduling=async_scheduling, ranks=2)
    rig.store(PROMPT)
    rig.device.fail = only(LOAD, rank=rank)
    requests = [rig.runner.add([*PROMPT, i], 2) for i in range(3)]
    rig.runner.run(100)
    rig.runner.check_drained()
    assert all(r.status is Status.FINISHED for r in requests)
    assert len(rig.loads()) == len(set(rig.loads())) <= 3, "each request tries at most once"
    rig.finish()


@pytest.mark.fault("B058")
def test_a_failed_load_on_an_idle_engine_goes_on_by_itself(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling)
    rig.store(PROMPT)
    rig.device.fail = only(LOAD)
    request = rig.runner.add([*PROMPT, 1])
    steps = rig.runner.run(10)
    assert request.status is Status.FINISHED
    assert steps <= 7


@pytest.mark.parametrize("order", ["load first", "store first"])
@pytest.mark.fault("B001")
def test_a_preempted_request_comes_back_while_its_first_stores_are_open(order: str, async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling, blocks=60, token_budget=12)
    request = rig.runner.add(range(24), 4)
    rig.runner.step()
    for _ in range(3):
        if request.num_computed_tokens < 24:
            rig.hold(STORE)
        rig.runner.step()
    rig.runner.preempt(request.request_id)
    rig.runner.pool.reset()
    stores = set(rig.scheduler._jobs)
    assert stores, "the set-up leaves a store open"
    inner = dictionary(rig)
    for group_hash, entry in inner.table.items():
        if not entry.ready:
            pending = group_hash
            inner.verdict = lambda group, h, p=pending: MISS if (group, h) == p else None  # type: ignore[misc]
    inner.version += 1
    rig.device.hold = lambda job, rank: job.kind is (STORE if order == "load first" else LOAD)
    for _ in range(6):
        rig.runner.step()
    rig.unhold()
    rig.finish()
    cold = make_rig().store(range(24), 4)
    assert request.token_ids == cold.token_ids


@pytest.mark.parametrize("cycles", [50])
@pytest.mark.fault("B009")
def test_aborts_in_every_state_leave_all_counters_at_zero(cycles: int, async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling, blocks=128)
    rig.store(PROMPT)
    for cycle in range(cycles):
        rig.device.hold = only(LOAD)
        request = rig.runner.add([*PROMPT, cycle], 3)
        for _ in range(cycle % 5):
            rig.runner.step()
        rig.runner.abort(request.request_id)
        rig.unhold()
        rig.runner.run()
        rig.runner.pool.reset()
    rig.finish()
    assert not any(entry.pins for entry in dictionary(rig).table.values())
    again = rig.runner.add([*PROMPT, 10**6])
    rig.finish()
    assert again.was_external == 16


@pytest.mark.parametrize("state", ["queued", "looked up", "in a chunked prefill", "loading"])
@pytest.mark.fault("B006")
def test_aborting_one_of_many_queued_requests_stores_only_what_was_computed(state: str, async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling, blocks=40, token_budget=16, max_num_seqs=2)
    rig.store(range(64))
    requests = [rig.runner.add(range(64 * i, 64 * i + 60), 2) for i in range(8)]
    rig.device.hold = only(LOAD)
    match state:
        case "queued":
            rig.runner.abort(requests[5].request_id)
        case "looked up":
            rig.runner.step()
            rig.runner.abort(requests[3].request_id)
        case "in a chunked prefill":
            rig.runner.run(until=lambda: 0 < requests[1].num_computed_tokens < 60)
            rig.runner.abort(requests[1].request_id)
        case "loading":
            rig.runner.step()
            assert requests[0].status is Status.WAITING_FOR_LOAD
            rig.runner.abort(requests[0].request_id)
    rig.unhold()
    rig.finish()
    assert sum(r.status is Status.ABORTED for r in requests) == 1


# --- windows, against a brute-force model ------------------------------------------------------------------------


def brute_force(window_chunks: int, verdicts: Sequence[Lookup]) -> tuple[int, int]:
    """The longest hit whose last ``window_chunks`` chunks are readable, and the longest that may become so."""

    def longest(enough: Lookup) -> int:
        for stop in range(len(verdicts), 0, -1):
            if all(v >= enough for v in verdicts[max(0, stop - window_chunks) : stop]):
                return stop
        return 0

    return longest(HIT), longest(RETRY)


@pytest.mark.parametrize("window_chunks", [1, 2, 3])
@pytest.mark.parametrize("length", range(1, 7))
@pytest.mark.fault("B035")
def test_window_hits_equal_those_of_a_brute_force_model(window_chunks: int, length: int) -> None:
    geometry = Geometry((KVGroup(0, 4, sliding_window=window_chunks * 4 - 2),), 4, 1)
    state = GroupState(0, 1)
    state.hashes = [bytes([i]) * 16 for i in range(length)]
    for verdicts in itertools.product([HIT, PENDING, MISS], repeat=length):

        def each(run: KeyRun, verdicts: Sequence[Lookup] = verdicts) -> Sequence[Lookup]:
            return [verdicts[i] for i in range(run.start, run.stop)]

        def prefix(run: KeyRun) -> PrefixAnswer:
            raise AssertionError("a window group asks for each key")

        hit = find_hit(geometry, [state], 0, length * 4, Lookups(prefix, each, math.inf, math.inf))
        ready, hope = brute_force(window_chunks, verdicts)
        assert (hit.ready_tokens // 4, max(hit.hope_tokens, hit.ready_tokens) // 4) == (ready, max(hope, ready)), (
            verdicts
        )


@pytest.mark.fault("B035")
def test_a_pending_suffix_behind_a_miss_is_no_reason_to_wait(async_scheduling: bool) -> None:
    geometry = Geometry((KVGroup(0, 4, sliding_window=8),), 4, 1)
    rig = make_rig(geometry, async_scheduling=async_scheduling)
    first = rig.store(range(17))
    answers = dict(zip(first.block_hashes, [HIT, HIT, MISS, PENDING], strict=False))
    dictionary(rig).verdict = lambda group, h: answers.get(h)
    request = rig.runner.add(range(17))
    rig.runner.step()
    assert (request.status, request.external_tokens) == (Status.WAITING_FOR_LOAD, 8)
    rig.finish()


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 9, 40])
@pytest.mark.fault("B076")
def test_two_requests_of_one_prefix_load_it_right_whatever_window_and_chunk(
    window: int, blocks_per_chunk: int, async_scheduling: bool
) -> None:
    geometry = Geometry((KVGroup(0, 4), KVGroup(1, 4, sliding_window=window)), 4, blocks_per_chunk)
    rig = make_rig(geometry, async_scheduling=async_scheduling)
    rig.store(range(25))
    both = [rig.runner.add([*range(25), last]) for last in (1, 2)]
    rig.finish()
    assert both[0].was_external == 24
    assert rig.scheduler.counters["surprises"] == 0


@pytest.mark.parametrize(
    ("groups", "tokens_per_hash", "found"),
    [
        ((KVGroup(0, 4, sliding_window=0),), 4, "found a window of 0 tokens"),
        ((KVGroup(0, 4, sliding_window=-3),), 4, "found a window of -3 tokens"),
        ((KVGroup(0, 0),), 4, "found 0 tokens per block"),
        ((KVGroup(0, 4),), 0, "found 0 tokens per hash"),
        ((KVGroup(0, 6),), 4, "found 6 tokens per block"),
        ((KVGroup(1, 4),), 4, "found group 1 in place 0"),
        ((), 4, "found no KV group"),
    ],
)
@pytest.mark.fault("B099")
def test_groups_that_cannot_be_offloaded_are_refused(
    groups: tuple[KVGroup, ...], tokens_per_hash: int, found: str
) -> None:
    with pytest.raises(ValueError, match=found):
        Geometry(groups, tokens_per_hash, 1)


@pytest.mark.fault("B061")
def test_two_loaded_requests_that_fill_the_device_do_not_take_turns_for_ever(async_scheduling: bool) -> None:
    rig = make_rig(blocks=14, token_budget=3, prefix_caching=False, async_scheduling=async_scheduling)
    prompts = [range(100 * n, 100 * n + 28) for n in (1, 2)]
    for prompt in prompts:
        rig.store(prompt[:25])
    both = [rig.runner.add(prompt, 2) for prompt in prompts]
    rig.finish(max_steps=100)
    assert all(request.was_external >= 24 for request in both)
