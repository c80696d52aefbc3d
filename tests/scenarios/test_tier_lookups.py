"""Lookups and promotions with tiers below: deadlines, progress, and what waiting may cost.

In: the real scheduler half and TieringManager over tiers cranked by hand. Out: requests that go on in bounded time.
Never: a real store.
"""

from __future__ import annotations

import pytest

from orlop.core import Outcome, TransferKind
from orlop.testing.device import only
from orlop.testing.doubles import Answers, ManualTier
from orlop.testing.request_runner import EngineRequest, Status
from orlop.testing.rig import FULL, HYBRID, Rig, make_tiered_rig
from orlop.tiering.manager import TieringManager

STORE, LOAD = TransferKind.STORE, TransferKind.LOAD
PROMPT = list(range(16))


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def async_scheduling(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def tiering(rig: Rig) -> TieringManager:
    assert isinstance(rig.manager.inner, TieringManager)
    return rig.manager.inner


def only_below(rig: Rig, *prompts: list[int], fillers: int = 4) -> None:
    """The prompts end up in the tiers; host memory and device have forgotten them."""
    for prompt in prompts:
        rig.store(prompt)
    slots = tiering(rig).host.slots
    for i in range(fillers):
        rig.store(range(10**6 * (i + 1), 10**6 * (i + 1) + 4 * max(1, slots // 2)))
    for tier in rig.tiers:
        tier.calls.clear()


def promotions(tier: ManualTier) -> list[bytes]:
    return tier.loaded_keys()


def test_what_is_below_comes_back_through_host_memory(async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=16, async_scheduling=async_scheduling)
    only_below(rig, PROMPT)
    request = rig.runner.add([*PROMPT, 1])
    rig.finish()
    assert request.was_external == 16
    assert len(promotions(rig.tiers[0])) == 4


def test_a_window_group_comes_back_from_below(async_scheduling: bool) -> None:
    rig = make_tiered_rig(HYBRID, slots=24, async_scheduling=async_scheduling, blocks=128)
    only_below(rig, PROMPT)
    request = rig.runner.add([*PROMPT, 1])
    rig.finish()
    assert request.was_external == 16


@pytest.mark.fault("B005")
def test_a_promotion_noted_for_a_request_that_ends_in_that_step_is_dropped(async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=16, async_scheduling=async_scheduling)
    only_below(rig, PROMPT)
    request = rig.runner.add([*PROMPT, 1])
    assert rig.scheduler.get_num_new_matched_tokens(request, 0, now=rig.clock.now) == (None, False)
    rig.runner.abort(request.request_id)
    rig.runner.step()
    assert promotions(rig.tiers[0]) == []
    rig.finish()


@pytest.mark.fault("B056")
def test_a_store_that_is_never_reported_delays_sharers_by_a_bounded_time(async_scheduling: bool) -> None:
    rig = make_tiered_rig(
        async_scheduling=async_scheduling, options={"store_deadline_s": 2.0}, entry={"promotion_s": 1.0}
    )
    rig.device.lose = lambda job, rank: job.req_id == "r0"
    rig.runner.add(PROMPT)
    rig.runner.step()
    rig.runner.step()
    rig.runner.pool.reset()
    sharers = [rig.runner.add([*PROMPT, i]) for i in range(2)]
    rig.runner.step()
    assert all(r.status is Status.WAITING for r in sharers)
    steps = rig.runner.run(until=lambda: all(r.ended for r in sharers))
    assert steps <= 120
    rig.finish()
    assert rig.scheduler.get_stats()["store_deadlines_passed"] >= 1


@pytest.mark.fault("B057")
def test_new_prompts_do_not_wait_for_more_than_the_first_miss(async_scheduling: bool) -> None:
    rig = make_tiered_rig(async_scheduling=async_scheduling, blocks=800, token_budget=4096, slots=16)
    rig.tiers[0].answers = Answers.NEXT_POLL
    requests = [rig.runner.add(range(1000 * i, 1000 * i + 64)) for i in range(10)]
    rig.runner.run(until=lambda: all(r.first_step is not None for r in requests))
    assert max(r.first_step for r in requests if r.first_step is not None) <= 2
    lookups = [c for c in rig.tiers[0].calls if c.name == "lookup_prefix"]
    assert len(lookups) == 10, "one question per request, not one per key or step"
    rig.finish()


@pytest.mark.fault("B067")
@pytest.mark.fault("B057")
def test_a_tier_that_does_not_answer_holds_nobody_beyond_the_limit(async_scheduling: bool) -> None:
    rig = make_tiered_rig(async_scheduling=async_scheduling, entry={"lookup_s": 0.2})
    tier = rig.tiers[0]
    tier.answers = Answers.BY_HAND
    request = rig.runner.add(PROMPT)
    steps = rig.runner.run(until=lambda: request.first_step is not None)
    assert 20 <= steps <= 22
    assert len(tier.open_lookups) == 1
    tier.answer()
    rig.finish()
    assert request.status is Status.FINISHED


@pytest.mark.fault("B058")
def test_a_late_answer_wakes_an_idle_engine(async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=16, async_scheduling=async_scheduling)
    only_below(rig, PROMPT)
    rig.tiers[0].answers = Answers.BY_HAND
    request = rig.runner.add([*PROMPT, 1])
    for _ in range(5):
        rig.runner.step()
    assert not rig.runner.idle
    rig.tiers[0].answer()
    rig.tiers[0].answers = Answers.AT_ONCE
    steps = rig.runner.run(20, until=lambda: request.ended)
    assert request.was_external == 16
    assert steps <= 8


@pytest.mark.fault("B057")
def test_a_tier_is_asked_once_per_request_also_where_it_has_a_part(async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=16, async_scheduling=async_scheduling)
    only_below(rig, PROMPT)
    tier = rig.tiers[0]
    request = rig.runner.add([*PROMPT, 1])
    for place in [place for place in tier.stored if place[1][:-4] in request.block_hashes[2:4]]:
        del tier.stored[place]
    rig.finish()
    assert request.was_external == 8
    assert sum(call.name == "lookup_prefix" for call in tier.calls) == 1


# --- requests that the engine has not come to ------------------------------------------------------------------


def busy_rig(look_ahead: int, prompts: int, async_scheduling: bool) -> tuple[Rig, list[EngineRequest]]:
    """Prompts that only the tier has arrive while one long prompt takes every token of 20 steps."""
    asked = [list(range(100 * i, 100 * i + 16)) for i in range(prompts)]
    rig = make_tiered_rig(
        slots=64, blocks=256, token_budget=8, async_scheduling=async_scheduling, options={"look_ahead": look_ahead}
    )
    only_below(rig, *asked)
    rig.runner.add(range(7000, 7160), 1)
    rig.runner.step()
    return rig, [rig.runner.add([*prompt, 1]) for prompt in asked]


@pytest.mark.fault("B186")
def test_promotions_begin_while_others_use_up_the_token_budget(async_scheduling: bool) -> None:
    rig, requests = busy_rig(8, 3, async_scheduling)
    rig.runner.step()
    wanted = {h + bytes(4) for r in requests for h in r.block_hashes[:4]}
    assert set(promotions(rig.tiers[0])) == wanted, "the step after the arrival begins to read"
    for _ in range(5):
        rig.runner.step()
    assert all(r.first_step is None and r.status is Status.WAITING for r in requests)
    assert len(promotions(rig.tiers[0])) == len(wanted), "each chunk is read once"
    rig.finish()
    assert [r.was_external for r in requests] == [16] * 3
    assert len(promotions(rig.tiers[0])) == len(wanted)


@pytest.mark.fault("B186")
def test_only_so_many_requests_are_looked_ahead_for(async_scheduling: bool) -> None:
    rig, requests = busy_rig(2, 10, async_scheduling)
    for _ in range(10):
        rig.runner.step()
    assert all(r.first_step is None for r in requests)
    first_two = {h + bytes(4) for r in requests[:2] for h in r.block_hashes[:4]}
    assert set(promotions(rig.tiers[0])) == first_two
    looked = sum(call.name == "lookup_prefix" for call in rig.manager.calls)
    rig.runner.step()
    assert sum(call.name == "lookup_prefix" for call in rig.manager.calls) == looked, (
        "what is answered is not asked again"
    )
    rig.runner.abort(requests[0].request_id)
    rig.runner.step()
    assert len(promotions(rig.tiers[0])) == 12, "one that leaves makes room for the next"
    rig.finish()
    assert [r.was_external for r in requests[1:]] == [16] * 9


@pytest.mark.fault("B186")
def test_a_request_is_given_its_full_wait_when_the_engine_comes_to_it(async_scheduling: bool) -> None:
    """What was promoted for it in vain has left again: its wait counts from the engine's own first ask."""
    rig, (request,) = busy_rig(8, 1, async_scheduling)
    for _ in range(5):
        rig.runner.step()
    assert len(promotions(rig.tiers[0])) == 4
    rig.clock.advance(60.0)
    tiering(rig).host.clear()
    rig.finish()
    assert request.was_external == 16
    assert len(promotions(rig.tiers[0])) == 8


@pytest.mark.fault("B137")
@pytest.mark.parametrize("outcome", [Outcome.MISSING, Outcome.CORRUPT, Outcome.IO_ERROR, Outcome.TIMEOUT])
@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_chunk_that_cannot_be_read_is_a_miss_at_once(bad: int, outcome: Outcome, async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=16, async_scheduling=async_scheduling)
    only_below(rig, PROMPT)
    tier = rig.tiers[0]
    request = rig.runner.add([*PROMPT, 1])
    broken = request.block_hashes[bad]
    tier.load_outcome = lambda key: outcome if key[:-4] == broken else Outcome.OK
    steps = rig.runner.run(30, until=lambda: request.ended)
    assert steps <= 12
    assert request.was_external == 4 * bad, "what lies before the bad chunk is still used"
    assert promotions(tier).count(broken + bytes(4)) <= 2
    rig.finish()


@pytest.mark.fault("B148")
@pytest.mark.parametrize("herd", [1, 8])
@pytest.mark.parametrize("bad", [0, 2, 3])
def test_an_index_that_promises_what_is_gone_is_not_believed_twice(bad: int, herd: int, async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=16, async_scheduling=async_scheduling, token_budget=256)
    only_below(rig, PROMPT)
    tier = rig.tiers[0]
    requests = [rig.runner.add([*PROMPT, i]) for i in range(herd)]
    gone = requests[0].block_hashes[bad] + bytes(4)
    for place in [place for place in tier.stored if place[1] == gone]:
        del tier.stored[place]
    tier.claims_more = lambda key: key == gone
    tier.store_outcome = lambda key: Outcome.NO_SPACE if key == gone else Outcome.OK
    steps = rig.runner.run(60, until=lambda: all(r.ended for r in requests))
    assert steps <= 20
    assert promotions(tier).count(gone) <= 2 * herd
    rig.finish()


@pytest.mark.fault("B010")
def test_a_timed_out_read_keeps_its_slots_until_it_has_let_go(async_scheduling: bool) -> None:
    """The slot memory refuses any second user of the slots that the hung read may still write."""
    rig = make_tiered_rig(slots=16, async_scheduling=async_scheduling, entry={"promotion_s": 1.0})
    only_below(rig, PROMPT)
    tier = rig.tiers[0]
    tier.auto = False
    request = rig.runner.add([*PROMPT, 1])
    steps = rig.runner.run(until=lambda: request.first_step is not None)
    assert 95 <= steps <= 110
    hung = tier.open_jobs(LOAD)
    assert hung
    for i in range(6):
        rig.runner.add(range(5000 + 100 * i, 5024 + 100 * i))
    rig.runner.run(until=lambda: not rig.runner.waiting and not rig.runner.running)
    assert tier.hung >= 4
    for job in hung:
        tier.complete(job)
    tier.auto = True
    rig.finish()
    assert tier.hung == 0, "the late word has freed the slots"


def test_a_tier_that_never_answers_ends_neither_the_drain_nor_a_request(async_scheduling: bool) -> None:
    rig = make_tiered_rig(async_scheduling=async_scheduling, auto=False, entry={"cascade_s": 1.0})
    rig.runner.add(PROMPT)
    steps = rig.runner.run(200)
    assert steps <= 110
    assert not rig.scheduler.has_pending_push_work()
    rig.finish()


@pytest.mark.fault("B060")
def test_a_finished_promotion_is_noticed_whatever_its_place_in_the_queue(async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=200, async_scheduling=async_scheduling, blocks=400, token_budget=8, max_num_seqs=2)
    for i in range(10):
        rig.store(range(100 * i, 100 * i + 16))
    rig.store(range(10**6, 10**6 + 4 * 199))
    requests = [rig.runner.add([*range(100 * i, 100 * i + 16), 7], 3) for i in range(10)]
    rig.runner.run(until=lambda: all(r.ended for r in requests))
    assert [r.was_external for r in requests] == [16] * 10
    rig.finish()


@pytest.mark.fault("B063")
def test_a_herd_on_one_prefix_below_reads_it_once_and_goes_on_together(async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=40, async_scheduling=async_scheduling, blocks=300, token_budget=1024, max_num_seqs=64)
    only_below(rig, list(range(64)))
    herd = [rig.runner.add([*range(64), i]) for i in range(50)]
    rig.runner.run(until=lambda: all(r.first_step is not None for r in herd))
    tier = rig.tiers[0]
    assert len(promotions(tier)) == len(set(promotions(tier))) == 16
    assert len(rig.loads()) <= 2
    first = [r.first_step for r in herd if r.first_step is not None]
    assert max(first) - min(first) <= 3
    rig.finish()


@pytest.mark.fault("B061")
def test_loaded_requests_that_fill_the_device_give_way(async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=200, async_scheduling=async_scheduling, blocks=65, token_budget=64)
    a, b = list(range(100)), list(range(1000, 1150))
    rig.store(a)
    rig.store(b)
    first = rig.runner.add([*a, *range(2000, 2100)])
    second = rig.runner.add([*b, *range(3000, 3050)])
    rig.finish()
    assert first.status is second.status is Status.FINISHED


@pytest.mark.fault("B037")
@pytest.mark.fault("B194")
def test_polling_a_growing_prefix_leaves_no_lease_behind(async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=40, async_scheduling=async_scheduling, blocks=60)
    only_below(rig, list(range(24)))
    host = tiering(rig).host
    tier = rig.tiers[0]
    tier.auto = False
    request = rig.runner.add([*range(24), 1])
    for poll in range(50):
        rig.runner.step()
        if poll % 10 == 9 and tier.open_jobs(LOAD):
            tier.complete(tier.open_jobs(LOAD)[0])
    assert host.leased <= 6
    tier.auto = True
    rig.finish()
    assert host.leased == 0
    assert request.status is Status.FINISHED


@pytest.mark.fault("B194")
@pytest.mark.parametrize("end", ["served by the device", "aborted after the answer", "aborted while it waits"])
def test_every_end_of_a_lookup_gives_its_leases_back(end: str, async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=20, async_scheduling=async_scheduling, blocks=100)
    rig.store(range(40))
    host = tiering(rig).host
    for i in range(30):
        if end == "served by the device":
            rig.runner.add([*range(40), i])
            rig.runner.run()
        elif end == "aborted after the answer":
            request = rig.runner.add([*range(40), i])
            rig.scheduler.get_num_new_matched_tokens(request, 0, now=rig.clock.now)
            rig.runner.abort(request.request_id)
        else:
            rig.device.hold = only(LOAD)
            request = rig.runner.add([*range(40), i])
            rig.runner.step()
            rig.runner.abort(request.request_id)
            rig.unhold()
            rig.runner.run()
        assert host.leased == 0
    rig.store(range(9000, 9080))
    again = rig.runner.add([*range(9000, 9080), 1])
    rig.finish()
    assert again.was_external == 80, "the pool can still be filled with new data"


@pytest.mark.fault("B194")
def test_an_abort_during_the_promotion_gives_the_leases_back(async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=16, async_scheduling=async_scheduling)
    only_below(rig, PROMPT)
    tier = rig.tiers[0]
    tier.auto = False
    request = rig.runner.add([*PROMPT, 1])
    rig.runner.step()
    rig.runner.step()
    assert tiering(rig).host.leased == 4
    rig.runner.abort(request.request_id)
    assert tiering(rig).host.leased == 0
    rig.runner.step()
    tier.auto = True
    rig.finish()


@pytest.mark.fault("B199")
def test_salted_requests_leave_no_lock_behind(async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=24, async_scheduling=async_scheduling, blocks=200)
    for salt in ("a", "b", None):
        rig.store(PROMPT, cache_salt=salt)
    for i in range(20):
        for salt in ("a", "b", None):
            done = rig.runner.add([*PROMPT, i], cache_salt=salt)
            gone = rig.runner.add([*PROMPT, i + 100], cache_salt=salt)
            rig.scheduler.get_num_new_matched_tokens(gone, 0, now=rig.clock.now)
            rig.runner.abort(gone.request_id)
            rig.runner.run()
            rig.runner.pool.reset()
            assert done.was_external == 16
    rig.store(range(5000, 5000 + 4 * 24))
    again = rig.runner.add([*range(5000, 5000 + 4 * 24), 1])
    rig.finish()
    assert again.was_external == 4 * 24, "some slot is locked for good"


def test_salts_do_not_share_below(async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=16, async_scheduling=async_scheduling)
    rig.store(PROMPT, cache_salt="a")
    other = rig.runner.add([*PROMPT, 1], cache_salt="b")
    rig.finish()
    assert other.was_external == 0
    assert FULL.groups[0].sliding_window is None
