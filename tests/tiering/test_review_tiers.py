"""Waits that ended late or in vain, with several tiers and several requests that share the leases.

In: the real scheduler half and TieringManager over tiers cranked by hand. Out: requests that go on as soon as what they
wait for is there. Never: a real store.
"""

from __future__ import annotations

import numpy as np
import pytest

from orlop.core import FIRST_GENERATION, KeyRun, ReqContext, TransferKind
from orlop.host.tier import HostTier
from orlop.testing.device import SlotMemory
from orlop.testing.doubles import Answers, ManualTier
from orlop.testing.request_runner import Status
from orlop.testing.rig import Rig, make_tiered_rig, plain_namespace
from orlop.tiering.manager import TierEntry, TieringManager, TieringOptions

STORE, LOAD = TransferKind.STORE, TransferKind.LOAD
PROMPT = list(range(16))
OTHER = list(range(500, 516))


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def async_scheduling(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def tiering(rig: Rig) -> TieringManager:
    assert isinstance(rig.manager.inner, TieringManager)
    return rig.manager.inner


def only_below(rig: Rig, *prompts: list[int]) -> None:
    """The prompts are in the tiers; host memory and device have forgotten them."""
    for prompt in prompts:
        rig.store(prompt)
    for i in range(4):
        rig.store(range(10**6 * (i + 1), 10**6 * (i + 1) + 2 * tiering(rig).host.slots))


@pytest.mark.parametrize("silent", [0, 1])
def test_a_tier_that_does_not_answer_hides_no_other(silent: int, async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=16, tiers=2, async_scheduling=async_scheduling)
    only_below(rig, PROMPT)
    rig.tiers[silent].answers = Answers.BY_HAND
    request = rig.runner.add([*PROMPT, 1])
    rig.runner.run(until=lambda: request.status is Status.FINISHED)
    assert request.was_external == 16
    rig.tiers[silent].answer()
    rig.finish()


def test_an_answer_that_comes_after_the_deadline_is_still_used(async_scheduling: bool) -> None:
    """The silent tier speaks while what the other one has is on its way."""
    rig = make_tiered_rig(slots=16, tiers=2, async_scheduling=async_scheduling)
    only_below(rig, PROMPT)
    rig.tiers[0].answers = Answers.BY_HAND
    rig.tiers[1].auto = False
    request = rig.runner.add([*PROMPT, 1])
    rig.runner.run(until=lambda: bool(rig.tiers[1].open_jobs()))
    rig.tiers[0].answer()
    for _ in range(3):
        rig.runner.step()
    assert request.status is Status.WAITING
    rig.tiers[1].auto = True
    rig.finish()
    assert request.was_external == 16


@pytest.mark.parametrize("ok", [True, False], ids=["stored", "failed"])
def test_who_waits_for_a_lease_hears_of_the_store_that_it_waits_for(ok: bool, async_scheduling: bool) -> None:
    """All leases are taken by a promotion that hangs; a store by somebody else is all that the other one waits for."""
    rig = make_tiered_rig(slots=8, async_scheduling=async_scheduling)
    only_below(rig, OTHER)
    rig.tiers[0].auto = False
    hog = rig.runner.add([*OTHER, 1])
    rig.runner.step()
    rig.runner.step()
    assert rig.tiers[0].open_jobs(LOAD)
    rig.hold(STORE)
    rig.runner.add(PROMPT)
    rig.runner.step()
    rig.runner.step()
    rig.runner.pool.reset()
    second = rig.runner.add([*PROMPT, 1])
    rig.runner.step()
    rig.runner.step()
    assert second.status is Status.WAITING
    if not ok:
        rig.device.fail_late(job.job_id for job in rig.device.stored_jobs)
    rig.unhold()
    rig.runner.run(10, until=lambda: second.status is Status.FINISHED)
    assert second.was_external == (16 if ok else 0)
    assert hog.status is Status.WAITING
    rig.tiers[0].auto = True
    rig.finish()


def test_leases_are_for_what_a_tier_has_not_for_what_was_asked(async_scheduling: bool) -> None:
    """A long prompt of which a tier has a little: the rest takes no lease and cuts nothing."""
    rig = make_tiered_rig(slots=16, async_scheduling=async_scheduling, blocks=128)
    only_below(rig, PROMPT)
    rig.tiers[0].answers = Answers.NEXT_POLL
    rig.tiers[0].auto = False
    request = rig.runner.add([*PROMPT, *range(7000, 7100)])
    rig.runner.run(10, until=lambda: bool(rig.tiers[0].open_jobs(LOAD)))
    assert request.status is Status.WAITING
    assert tiering(rig)._lease_budget == 4
    assert rig.scheduler.get_stats().get("promotions_cut", 0) == 0
    rig.tiers[0].auto = True
    rig.finish()
    assert request.was_external == 16


def test_events_tell_what_happened_last_last(async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=8, tiers=0, async_scheduling=async_scheduling, tiering={"events": True})
    rig.store(PROMPT)
    there: set[bytes] = set()
    manager = tiering(rig)
    original = manager.take_events

    def listen():  # type: ignore[no-untyped-def]
        for event in original():
            (there.update if event.stored else there.difference_update)(event.hashes)
        return ()

    manager.take_events = listen  # type: ignore[method-assign]
    rig.runner.reset(new_weights=False)
    rig.store(PROMPT)
    listen()
    ((_, _, readable),) = manager.host.chunks_in(np.arange(manager.host.slots))
    assert there == set(readable)
    rig.finish()


@pytest.mark.parametrize("ok", [True, False], ids=["ok", "failed"])
def test_who_asks_in_the_step_that_reads_the_report_hears_of_it(ok: bool, async_scheduling: bool) -> None:
    """(1) A promotion for one request is done; (2) another one asks and is told to wait; (3) the report is read."""
    rig = make_tiered_rig(slots=16, async_scheduling=async_scheduling, prefix_caching=False)
    only_below(rig, PROMPT)
    rig.tiers[0].auto = False
    first = rig.runner.add([*PROMPT, 1])
    rig.runner.run(5, until=lambda: bool(rig.tiers[0].open_jobs(LOAD)))
    second = rig.runner.add([*PROMPT, 2])
    if ok:
        rig.tiers[0].complete()
    else:
        rig.tiers[0].fail()
    rig.tiers[0].auto = True
    rig.runner.run(15, until=lambda: first.status is second.status is Status.FINISHED)
    assert first.was_external + second.was_external >= (16 if ok else 0)
    rig.finish()


def test_who_waits_looks_again_when_the_ready_part_of_its_prefix_has_left() -> None:
    tier = ManualTier(SlotMemory())
    manager = TieringManager(HostTier(8), [TierEntry(tier)], plain_namespace, FIRST_GENERATION, TieringOptions((4096,)))
    writer, waiter = ReqContext(1, "writer"), ReqContext(2, "waiter")
    manager.on_new_request(writer)
    manager.on_new_request(waiter)
    run = KeyRun(0, [bytes([i]) * 16 for i in range(3)], 0, 3)

    def store(part: KeyRun) -> None:
        reservation = manager.prepare_store(part, writer, now=0.0).reservation
        assert reservation is not None
        manager.complete_store(reservation, True, now=0.0)

    store(run.part(0, 2))
    tier.claims_more = lambda key: key == run.packed()[2]
    assert manager.lookup_prefix(run, waiter, now=0.0, since=0.0)[:2] == (2, 3)
    manager.want(run, waiter, now=0.0)
    store(run.part(2, 3))
    manager.host.discard(0, run.hashes[:2])
    before = manager.answer_version(waiter)
    manager.on_schedule_end(now=0.0)
    assert manager.answer_version(waiter)[0] > before[0]


def test_another_window_of_one_group_leaves_the_wants_of_the_others() -> None:
    tier = ManualTier(SlotMemory())
    options = TieringOptions((4096, 4096))
    manager = TieringManager(HostTier(16), [TierEntry(tier)], plain_namespace, FIRST_GENERATION, options)
    waiter = ReqContext(1, "waiter")
    manager.on_new_request(waiter)
    tier.claims_more = lambda key: True
    full, window = (KeyRun(g, [bytes([i]) * 16 for i in range(4)], 0, 4) for g in (0, 1))
    manager.lookup_prefix(full, waiter, now=0.0, since=0.0)
    manager.lookup_each(window, waiter, now=0.0, since=0.0)
    manager.want(full, waiter, now=0.0)
    manager.want(window.part(2, 4), waiter, now=0.0)
    manager.on_schedule_end(now=0.0)
    assert manager.host.leased == 6
    manager.want(full.part(0, 3), waiter, now=0.0)
    manager.want(window.part(1, 3), waiter, now=0.0)
    manager.on_schedule_end(now=0.0)
    manager.check()
    assert manager.host.leased == 3 + 2


def test_waiting_for_more_than_may_be_leased_costs_no_lookup_per_step(async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=16, async_scheduling=async_scheduling, blocks=128)
    rig.hold(STORE)
    prompt = list(range(48))
    rig.runner.add(prompt)
    rig.runner.step()
    rig.runner.step()
    rig.runner.pool.reset()
    second = rig.runner.add([*prompt, 1])
    rig.runner.step()
    before = rig.manager.count("lookup_prefix")
    for _ in range(20):
        rig.runner.step()
    assert second.status is Status.WAITING
    assert rig.manager.count("lookup_prefix") == before
    rig.unhold()
    rig.runner.run(10, until=lambda: second.status is Status.FINISHED)
    assert second.was_external == 48
    rig.finish()


def test_a_prefix_that_the_device_serves_stays_in_host_memory_too(async_scheduling: bool) -> None:
    """It is of use, though host memory is never asked for it: what nobody used leaves first."""
    rig = make_tiered_rig(slots=8, tiers=0, async_scheduling=async_scheduling)
    rig.runner.add(PROMPT)
    rig.runner.run()
    rig.runner.add(OTHER)
    rig.runner.run()
    hit = rig.runner.add([*PROMPT, 1])
    rig.runner.run()
    assert hit.was_external == 0
    rig.store(range(900, 908))
    again = rig.runner.add([*PROMPT, 2])
    rig.finish()
    assert again.was_external == 16


def test_counters_of_both_halves_add_up_where_they_share_a_name() -> None:
    rig = make_tiered_rig(tiers=0)
    tiering(rig).counters["surprises"] = 3
    rig.scheduler._surprise("of this test")
    assert rig.scheduler.get_stats()["surprises"] == 4


def test_a_lookup_that_is_never_answered_is_forgotten_with_its_request(async_scheduling: bool) -> None:
    rig = make_tiered_rig(async_scheduling=async_scheduling)
    rig.tiers[0].answers = Answers.BY_HAND
    for i in range(3):
        rig.runner.add(range(100 * i, 100 * i + 16))
    rig.finish()
    assert not tiering(rig)._asks
    rig.tiers[0].answer()
    rig.store(PROMPT)
    rig.finish()


def test_who_waits_for_room_to_promote_hears_that_it_was_not_needed() -> None:
    """(1) There is no slot for the promotion; (2) there is one, and the chunk comes into it by a store."""
    tier = ManualTier(SlotMemory())
    manager = TieringManager(HostTier(4), [TierEntry(tier)], plain_namespace, FIRST_GENERATION, TieringOptions((4096,)))
    writer, waiter = ReqContext(1, "writer"), ReqContext(2, "waiter")
    manager.on_new_request(writer)
    manager.on_new_request(waiter)
    filler = KeyRun(0, [bytes([i]) * 16 for i in range(4)], 0, 4)
    full = manager.prepare_store(filler, writer, now=0.0).reservation
    assert full is not None
    run = KeyRun(0, [b"x" * 16], 0, 1)
    tier.claims_more = lambda key: key in run.packed()
    assert manager.lookup_prefix(run, waiter, now=0.0, since=0.0)[:2] == (0, 1)
    manager.want(run, waiter, now=0.0)
    manager.on_schedule_end(now=0.0)
    assert not tier.open_jobs(LOAD)
    manager.complete_store(full, False, now=0.0)
    mine = manager.prepare_store(run, writer, now=0.0).reservation
    assert mine is not None
    manager.complete_store(mine, True, now=0.0)
    before = manager.answer_version(waiter)
    manager.on_schedule_end(now=0.0)
    assert manager.answer_version(waiter)[0] > before[0]
