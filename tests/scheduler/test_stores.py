"""Stores: what is offered, when it is read, and what becomes of lost, failed and repeated reports.

In: the real scheduler half over a dictionary for a manager. Out: which chunks are stored, and with whose bytes.
Never: a load, but to look at what was stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

from orlop.core import NO_SALT, Geometry, JobReport, KVGroup, ReqContext, TransferKind, WorkerOutput
from orlop.scheduler.request import RequestState
from orlop.scheduler.stores import StorePlanner
from orlop.testing.device import always, never, only
from orlop.testing.doubles import DictManager
from orlop.testing.request_runner import EngineRequest, Status
from orlop.testing.rig import FULL, HYBRID, PAIRS, Rig, make_rig

STORE, LOAD = TransferKind.STORE, TransferKind.LOAD
PROMPT = list(range(16))


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def async_scheduling(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def stored_tokens(rig: Rig, tokens: Sequence[int]) -> int:
    """How much of a prompt comes back from below once the device has forgotten it."""
    rig.runner.pool.reset()
    again = rig.runner.add([*tokens, 10**6])
    rig.finish()
    return again.was_external


def until_ended(rig: Rig) -> None:
    rig.runner.run(until=lambda: not rig.runner.running and not rig.runner.waiting)


def dictionary(rig: Rig) -> DictManager:
    assert isinstance(rig.manager.inner, DictManager)
    return rig.manager.inner


# --- what is stored -------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [31, 32, 33, 64, 65, 100])
@pytest.mark.fault("B048")
@pytest.mark.fault("B050")
def test_every_full_block_of_every_prefill_step_is_stored(prompt: int, async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling, token_budget=32)
    rig.store(range(prompt))
    again = rig.runner.add(range(prompt))
    rig.finish()
    assert again.was_external == (prompt - 1) // 4 * 4


@pytest.mark.parametrize("local", [0, 4, 8, 16, 20])
@pytest.mark.fault("B049")
def test_only_whole_chunks_are_stored_whatever_the_device_had(local: int, async_scheduling: bool) -> None:
    rig = make_rig(PAIRS, async_scheduling=async_scheduling)
    if local:
        rig.runner.add(range(local))
        rig.runner.run()
    request = rig.runner.add(range(21), 20)
    rig.finish()
    chunks = sum(len(part.slots) // 2 for job in rig.device.stored_jobs for part in job.transfers)
    assert chunks == 40 // 8
    assert stored_tokens(rig, request.token_ids[:40]) == 40


@pytest.mark.fault("B042")
def test_all_complete_chunks_are_found_after_a_short_answer_to_a_long_prompt(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling, blocks=300, token_budget=64)
    request = rig.store(range(217 * 4), 5)
    table = dictionary(rig).table
    assert all((0, h) in table and table[0, h].ready for h in request.block_hashes[:218])
    assert stored_tokens(rig, request.token_ids[: 218 * 4]) == 218 * 4


def test_a_budget_of_chunks_per_step_delays_stores_and_drops_none(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling, options={"max_chunks_per_step": 1})
    request = rig.store(range(32), 12)
    assert all(len(job.transfers[0].slots) == 1 for job in rig.device.stored_jobs)
    assert stored_tokens(rig, request.token_ids[:40]) == 40


def test_without_offload_decode_only_the_prompt_is_stored(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling, options={"offload_decode": False})
    request = rig.store(range(18), 12)
    assert stored_tokens(rig, request.token_ids[:28]) == 16


def test_answers_are_stored_as_they_are_said(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling)
    request = rig.store(range(3), 26)
    assert stored_tokens(rig, request.token_ids[:28]) == 28


@pytest.mark.fault("B093")
def test_declined_chunks_are_offered_again_and_leave_no_hole(async_scheduling: bool) -> None:
    rig = make_rig(manager=DictManager(4), async_scheduling=async_scheduling)
    request = rig.runner.add(range(40), 50)
    inner = dictionary(rig)
    rig.runner.step()
    rig.hold(STORE)
    inner.room = False
    for _ in range(12):
        rig.runner.step()
    offers = rig.manager.count("prepare_store")
    assert offers <= 5, "a declined chunk is offered when a block is handed out, not in every step"
    inner.room = True
    inner._free += range(100, 200)
    rig.unhold()
    rig.runner.run()
    assert stored_tokens(rig, request.token_ids[:88]) == 88


@pytest.mark.fault("B091")
def test_one_declined_store_does_not_touch_the_others_of_the_step(async_scheduling: bool) -> None:
    rig = make_rig(manager=DictManager(8), async_scheduling=async_scheduling)
    requests = [rig.runner.add(range(100 * i, 100 * i + 8), 16) for i in range(3)]
    inner = dictionary(rig)
    declined: list[object] = []
    original = inner.prepare_store

    def picky(run, context, *, now):  # type: ignore[no-untyped-def]
        inner.room = context.req_id != "r0"
        declined.append(context.req_id)
        return original(run, context, now=now)

    inner.prepare_store = picky  # type: ignore[method-assign]
    inner._free += range(100, 200)
    rig.runner.run()
    inner.prepare_store = original  # type: ignore[method-assign]
    inner.room = True
    assert "r0" in declined
    assert [stored_tokens(rig, r.token_ids[:20]) for r in requests] == [0, 20, 20]


@pytest.mark.fault("B047")
def test_what_is_accepted_is_submitted_even_if_the_request_ends_in_that_step(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling)
    rig.runner.add(PROMPT, 1)
    rig.finish()
    accepted = [c for c in rig.manager.calls if c.name == "complete_store"]
    assert sum(len(c.what.slots) for c in accepted) == 4
    assert {s for job in rig.device.stored_jobs for s in job.transfers[0].slots.tolist()} == {
        s for c in accepted for s in c.what.slots.tolist()
    }


def test_a_block_shared_in_the_step_that_computes_it_is_stored_after_that_step(async_scheduling: bool) -> None:
    """B hits blocks that A computes in the same step, and B's store comes first: it must not read them early."""
    rig = make_rig(async_scheduling=async_scheduling)
    inner = dictionary(rig)
    inner.room = False
    first = rig.runner.add(PROMPT, 9)
    rig.runner.step()
    rig.runner.preempt(first.request_id)
    rig.runner.pool.reset()
    rig.runner.step()
    inner.room = True
    second = rig.runner.add([*PROMPT, 1, 2], 2)
    rig.runner.step()
    assert second.local_tokens == 16
    assert [job.req_id for job in rig.runner.last_meta.store_jobs] == [second.request_id]
    assert all(job.after_compute for job in rig.runner.last_meta.store_jobs)
    rig.finish()
    assert stored_tokens(rig, PROMPT) == 16


# --- sliding windows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [7, 8, 9, 16, 17])
@pytest.mark.fault("B076")
def test_a_window_group_comes_back_right_at_every_length_around_the_window(tokens: int, async_scheduling: bool) -> None:
    rig = make_rig(HYBRID, async_scheduling=async_scheduling)
    first = rig.store(range(tokens), 12)
    again = rig.runner.add(range(tokens), 12)
    rig.finish()
    assert again.was_external == (tokens - 1) // 4 * 4
    assert again.token_ids == first.token_ids


@pytest.mark.fault("B072")
@pytest.mark.fault("B079")
def test_recycled_positions_and_null_blocks_are_never_stored(async_scheduling: bool) -> None:
    """Stores find no room until the window has moved on: what lies behind it is passed over for good."""
    rig = make_rig(HYBRID, async_scheduling=async_scheduling, token_budget=8)
    inner = dictionary(rig)
    inner.room = False
    request = rig.runner.add(range(40), 9)
    rig.runner.run(until=lambda: request.num_computed_tokens >= 41)
    assert 0 in request.block_ids[1]
    inner.room = True
    rig.runner.run()
    window_keys = {h for group, h in inner.table if group == 1}
    assert window_keys, "nothing of the window group was stored"
    assert window_keys <= set(request.block_hashes[8:]), "a chunk behind the window was stored"
    rig.finish()


@pytest.mark.fault("B079")
@pytest.mark.parametrize(
    ("table", "stored"), [([0, 0, 17, 0, 23], [23]), ([4, 0, 17, 18, 19], [17, 18, 19]), ([0] * 5, [])]
)
def test_nothing_up_to_a_placeholder_in_a_window_is_stored(table: list[int], stored: list[int]) -> None:
    """Whatever the window says: a hole means that what lies before it is of no use."""
    geometry = Geometry((KVGroup(0, 4, 64, ("layer",)),), 4, 1)
    request = EngineRequest("r", list(range(20)), 4, 1, block_hashes=[bytes([i]) * 16 for i in range(5)])
    state = RequestState(request, ReqContext(1, "r", NO_SALT), geometry)
    state.groups[0].block_ids = table
    state.tokens_filled = 20
    manager = DictManager()
    manager.on_new_request(state.context)
    plan = StorePlanner(geometry, manager, True).plan([state], 99, 0.0)
    assert [b for _, stores in plan.jobs for s in stores for b in s.transfer.block_ids.tolist()] == stored
    assert state.groups[0].cursor == 5


def test_a_window_block_is_read_before_its_position_is_recycled(async_scheduling: bool) -> None:
    """The fence of a window group's store is there from its creation: the block is freed before the request ends."""
    rig = make_rig(HYBRID, async_scheduling=async_scheduling, blocks=24, token_budget=8)
    rig.device.crank_chance = 0.0
    request = rig.runner.add(range(16), 24)
    rig.runner.run(until=lambda: request.num_computed_tokens > 30)
    other = rig.runner.add(range(100, 130), 2)
    rig.runner.run(until=lambda: other.ended)
    rig.device.crank_chance = 1.0
    rig.finish()
    rig.runner.pool.reset()


# --- preemption and lives ------------------------------------------------------------------------------------------


@pytest.mark.fault("B018")
def test_a_preempted_requests_stores_are_read_before_its_blocks_are_written(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling, blocks=18)
    rig.device.crank_chance = 0.0
    first = rig.runner.add(range(32), 30)
    rig.runner.step()
    pending = rig.device.waiting(STORE)
    assert pending
    rig.runner.preempt(first.request_id)
    rig.runner.step()
    assert set(pending) <= set(rig.runner.last_meta.jobs_to_flush)
    rig.runner.waiting.remove(first)
    second = rig.runner.add(range(100, 160), 2)
    rig.runner.run(until=lambda: second.ended)
    rig.runner.waiting.append(first)
    rig.device.crank_chance = 1.0
    rig.finish()
    assert stored_tokens(rig, range(32)) == 32
    assert stored_tokens(rig, first.token_ids[:60]) == 60, "recomputed blocks are storable again"


@pytest.mark.fault("B002")
def test_the_store_cursor_goes_back_with_the_block_list(async_scheduling: bool) -> None:
    rig = make_rig(PAIRS, async_scheduling=async_scheduling, token_budget=20)
    rig.device.fail = only(STORE)
    request = rig.runner.add(range(16), 20)
    for _ in range(3):
        rig.runner.step()
    assert not dictionary(rig).table, "the stores of before the preemption have failed"
    rig.device.fail = never
    rig.runner.preempt(request.request_id)
    rig.runner.pool.reset()
    rig.runner.token_budget = 5
    for _ in range(6):
        rig.runner.step()
    rig.runner.run()
    assert stored_tokens(rig, request.token_ids[:32]) == 32


@pytest.mark.parametrize("order", list(itertools.permutations(["old report", "finish", "new report"])))
@pytest.mark.fault("B003")
def test_reports_of_two_lives_of_one_id_in_every_order(order: tuple[str, ...], async_scheduling: bool) -> None:
    """The id's first life has a store open; it comes back and stores more; three events come in any order."""
    rig = make_rig(async_scheduling=async_scheduling)
    inner = dictionary(rig)
    rig.hold(STORE)
    rig.runner.add(PROMPT, 1, req_id="x")
    until_ended(rig)
    old = {job.job_id for job in rig.device.stored_jobs}
    rig.runner.pool.reset()
    second = rig.runner.add(range(100, 108), 60, req_id="x")
    rig.runner.step()
    new = {job.job_id for job in rig.device.stored_jobs} - old
    assert old
    assert new
    held = old | new
    rig.device.hold = lambda job, rank: job.job_id in held
    actions: dict[str, Callable[[], None]] = {
        "old report": lambda: held.difference_update(old),
        "new report": lambda: held.difference_update(new),
        "finish": lambda: rig.runner.abort("x"),
    }
    for event in order:
        actions[event]()
        for _ in range(2):
            rig.runner.step()
    held.clear()
    rig.finish()
    assert second.status is Status.ABORTED
    assert [rig.manager.names(life).count("on_request_finished") for life in rig.manager.lives] == [1, 1]
    assert all(inner.table[0, h].ready for h in second.block_hashes[:2])


@pytest.mark.parametrize("order", list(itertools.permutations(["old report", "resume", "finish"])))
@pytest.mark.fault("B003")
def test_a_report_from_before_a_preemption_in_every_order(order: tuple[str, ...], async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling)
    rig.hold(STORE)
    request = rig.runner.add(PROMPT, 40, req_id="x")
    rig.runner.step()
    old = {job.job_id for job in rig.device.stored_jobs}
    rig.device.hold = lambda job, rank: job.job_id in old
    rig.runner.preempt("x")
    for event in order:
        match event:
            case "old report":
                old.clear()
            case "resume":
                rig.runner.run(50, until=lambda: request.ended or request.status is Status.RUNNING or bool(old))
            case "finish":
                rig.runner.abort("x")
        rig.runner.step()
    old.clear()
    rig.finish()


# --- reports --------------------------------------------------------------------------------------------------------


@pytest.mark.fault("B007")
def test_a_lost_report_is_settled_at_its_deadline_and_its_slots_stay_retired(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling, ranks=4, options={"store_deadline_s": 1.0})
    rig.device.lose = lambda job, rank: rank == 2 and job.req_id == "r0"
    rig.runner.add(PROMPT, 1)
    until_ended(rig)
    free = rig.runner.pool.free_blocks
    assert free == rig.runner.pool.size - 1, "device blocks are free at once, fenced"
    assert rig.scheduler.has_pending_push_work()
    steps = rig.runner.run()
    assert steps <= 110
    assert rig.lives() == [1]
    assert not any(entry.ready for entry in dictionary(rig).table.values()), "an unconfirmed store was published"
    assert len(rig.manager.retired) == 1, "the slots are not used again"
    assert rig.scheduler.get_stats()["store_deadlines_passed"] == 1
    requests = [rig.runner.add(range(50 * i, 50 * i + 9), 2) for i in range(1, 51)]
    rig.runner.run()
    assert all(r.status is Status.FINISHED for r in requests)


def test_a_report_after_the_deadline_frees_the_slots_and_publishes_nothing(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling, options={"store_deadline_s": 0.2})
    rig.hold(STORE)
    rig.runner.add(PROMPT, 1)
    rig.runner.run()
    assert rig.manager.retired
    rig.unhold()
    rig.runner.step()
    rig.runner.step()
    assert not rig.manager.retired
    assert not rig.scheduler._block_id_to_pending_jobs
    assert not dictionary(rig).table
    rig.finish()


@pytest.mark.parametrize("fails_on", [0, 1])
@pytest.mark.fault("B157")
def test_a_store_that_fails_on_any_rank_publishes_nothing(fails_on: int, async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling, ranks=2)
    rig.device.fail = only(STORE, rank=fails_on)
    rig.store(PROMPT)
    assert not dictionary(rig).table
    rig.device.fail = never
    assert stored_tokens(rig, PROMPT) == 0
    assert stored_tokens(rig, PROMPT) == 16, "the next one stores it again"


@pytest.mark.fault("B157")
def test_nothing_is_published_before_the_last_rank_has_reported(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling, ranks=2)
    rig.device.hold = only(STORE, rank=1)
    rig.device.repeat = always
    rig.runner.add(PROMPT, 1)
    for _ in range(5):
        rig.runner.step()
    assert not any(entry.ready for entry in dictionary(rig).table.values()), "a repeat was taken for another rank's"
    rig.unhold()
    rig.finish()
    assert all(entry.ready for entry in dictionary(rig).table.values())


def test_unknown_stale_and_repeated_reports_are_counted_and_ignored(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling)
    rig.store(PROMPT)
    seen = rig.scheduler.get_stats().get("reports_ignored", 0)
    foreign = (JobReport(1, 0, False), JobReport(999, 0, True), JobReport(1, 7, True))
    rig.scheduler.update_connector_output(WorkerOutput(foreign), now=rig.clock.now)
    rig.scheduler.check()
    assert rig.scheduler.get_stats()["reports_ignored"] == seen + 3
    assert stored_tokens(rig, PROMPT) == 16


@pytest.mark.fault("B034")
def test_a_chunk_that_another_request_is_writing_is_not_skipped(async_scheduling: bool) -> None:
    """R2's offer finds R1's stores in flight; R1's fail; R2 must store them after all."""
    rig = make_rig(async_scheduling=async_scheduling, prefix_caching=False)
    rig.hold(STORE)
    rig.runner.add(PROMPT, 1, req_id="one")
    until_ended(rig)
    failing = {job.job_id for job in rig.device.stored_jobs}
    dictionary(rig).valid_until = 0.0
    second = rig.runner.add(PROMPT, 20, req_id="two", skip_reading_prefix_cache=True)
    rig.runner.step()
    rig.device.fail_late(failing)
    rig.unhold()
    rig.runner.run()
    assert stored_tokens(rig, second.token_ids[:32]) == 32


GROUPS = Geometry((KVGroup(0, 8), KVGroup(1, 4, sliding_window=12)), 4, 1)


def test_groups_of_different_block_sizes_come_back_together(async_scheduling: bool) -> None:
    rig = make_rig(GROUPS, async_scheduling=async_scheduling, ranks=2)
    request: EngineRequest = rig.store(range(30), 10)
    again = rig.runner.add(request.token_ids[:38])
    rig.finish()
    assert again.was_external == 32
    assert FULL.hit_alignment == 4
