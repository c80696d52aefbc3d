"""Waits that ended late or in vain, with several tiers and several requests that share the leases.

In: the real scheduler half and TieringManager over tiers cranked by hand. Out: requests that go on as soon as what they
wait for is there. Never: a real store.
"""

from __future__ import annotations

import pytest

from orlop.core import TransferKind
from orlop.testing.doubles import Answers
from orlop.testing.request_runner import Status
from orlop.testing.rig import Rig, make_tiered_rig
from orlop.tiering.manager import TieringManager

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
    assert there == set(manager.host._ready[0])
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
