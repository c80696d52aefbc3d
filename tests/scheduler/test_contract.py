"""The contract between engine, scheduler half and manager: finish, abort, fences, drain, reset.

In: the real scheduler half, driven by the request runner. Out: the promises of the lifecycle. Never: a mock
of the half under test.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orlop.core import TransferKind, WorkerOutput
from orlop.testing.device import only
from orlop.testing.request_runner import Status
from orlop.testing.rig import FULL, HYBRID, PAIRS, Rig, make_rig

STORE, LOAD = TransferKind.STORE, TransferKind.LOAD
PROMPT = list(range(16))


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def async_scheduling(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def last_life(rig: Rig) -> int:
    return max(rig.manager.lives)


# --- how a life ends ------------------------------------------------------------------------------------


def finish_with_stores_pending(rig: Rig) -> None:
    rig.hold(STORE)
    rig.runner.add(PROMPT, 3)
    rig.runner.run(until=lambda: not rig.runner.running and not rig.runner.waiting)


def abort_while_waiting(rig: Rig) -> None:
    rig.runner.add(PROMPT)
    rig.runner.abort("r0")


def abort_in_the_step_it_was_scheduled(rig: Rig) -> None:
    rig.runner.add(PROMPT, 5)
    rig.runner.step()
    rig.runner.abort("r0")


def abort_while_loading(rig: Rig) -> None:
    rig.store(PROMPT)
    rig.hold(LOAD)
    request = rig.runner.add(PROMPT)
    rig.runner.step()
    assert request.status is Status.WAITING_FOR_LOAD
    rig.runner.abort(request.request_id)


def preempt_then_finish(rig: Rig) -> None:
    rig.hold(STORE)
    rig.runner.add(PROMPT, 6)
    for _ in range(4):
        rig.runner.step()
    rig.runner.preempt("r0")
    rig.runner.run(until=lambda: not rig.runner.running and not rig.runner.waiting)


def decline_all_stores(rig: Rig) -> None:
    rig.manager.inner.room = False  # type: ignore[attr-defined]
    rig.runner.add(PROMPT, 3)
    rig.runner.run()


def reset_while_draining(rig: Rig) -> None:
    finish_with_stores_pending(rig)
    rig.runner.reset()


def reset_while_running(rig: Rig) -> None:
    rig.hold(STORE)
    rig.runner.add(PROMPT, 9)
    rig.runner.step()
    rig.runner.reset()
    rig.runner.run(until=lambda: not rig.runner.running and not rig.runner.waiting)


ENDINGS = [
    finish_with_stores_pending,
    abort_while_waiting,
    abort_in_the_step_it_was_scheduled,
    abort_while_loading,
    preempt_then_finish,
    decline_all_stores,
    reset_while_draining,
    reset_while_running,
]


@pytest.mark.fault("B005")
@pytest.mark.parametrize("ending", ENDINGS, ids=lambda f: f.__name__)
def test_no_offload_call_after_on_request_finished(ending: Callable[[Rig], None], async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling)
    ending(rig)
    assert rig.scheduler._jobs or rig.lives(), "nothing is pending and nobody was told"
    rig.unhold()
    rig.finish()
    outdated = ending in (reset_while_draining, reset_while_running)
    for life in rig.manager.lives:
        names = rig.manager.names(life)
        assert names.count("on_request_finished") == 1
        after = names[names.index("on_request_finished") + 1 :]
        assert after == [] or (outdated and set(after) == {"complete_store"})


def test_the_callback_waits_for_the_last_pending_store(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling)
    finish_with_stores_pending(rig)
    for _ in range(5):
        rig.runner.step()
    assert rig.lives() == []
    assert rig.scheduler.has_pending_push_work()
    rig.unhold()
    rig.runner.run()
    assert rig.lives() == [last_life(rig)]
    rig.finish()


def test_shutdown_ends_every_life_once() -> None:
    rig = make_rig()
    finish_with_stores_pending(rig)
    rig.runner.add(range(100, 130), 9)
    rig.runner.add(range(200, 220), 9)
    rig.runner.step()
    rig.scheduler.shutdown(now=rig.clock.now)
    assert sorted(rig.lives()) == sorted(rig.manager.lives)
    assert not rig.manager.open
    assert not rig.scheduler._req_status


# --- reset ---------------------------------------------------------------------------------------------------


@pytest.mark.fault("B016")
def test_reset_cache_finalizes_finished_request_with_pending_store(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling)
    finish_with_stores_pending(rig)
    life = last_life(rig)
    assert rig.lives() == []
    rig.runner.reset()
    names = [call.name for call in rig.manager.calls if call.life == life or call.name == "reset_cache"]
    assert names.index("on_request_finished") < names.index("reset_cache")
    assert not rig.scheduler._req_status
    assert rig.scheduler.has_pending_push_work(), "the jobs in flight still count"
    rig.unhold()
    rig.finish()
    again = rig.runner.add(PROMPT)
    rig.finish()
    assert again.was_external == 0, "something from before the reset was served"


def test_a_reset_serves_nothing_from_before_and_strands_nobody(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling)
    rig.store(PROMPT)
    rig.hold()
    loading = rig.runner.add(PROMPT, 4)
    rig.runner.step()
    running = rig.runner.add(range(50, 70), 20)
    rig.runner.step()
    rig.runner.reset()
    rig.unhold()
    before = len(rig.device.stored_jobs)
    rig.finish()
    stored = {job.req_id for job in rig.device.stored_jobs[before:]}
    assert running.request_id not in stored, "a life that holds old KV has stored something"
    assert loading.was_external == 0, "a load from before the reset was taken for good"
    rig.runner.pool.reset()
    again = [rig.runner.add(r.prompt) for r in (loading, running)]
    rig.finish()
    assert [r.was_external for r in again] == [12, 0]


# --- drain ---------------------------------------------------------------------------------------------------


def test_flush_all_jobs_when_no_requests_remain(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling)
    rig.device.crank_chance = 0.0
    rig.runner.add(PROMPT, 3)
    rig.runner.run(until=lambda: not rig.runner.running and not rig.runner.waiting)
    for _ in range(5):
        rig.runner.step()
        assert rig.runner.last_meta.jobs_to_flush == ()
        assert rig.scheduler.has_pending_push_work()
    rig.device.crank(STORE)
    rig.finish()
    assert not rig.scheduler.has_pending_push_work()
    rig.runner.pool.reset()
    rig.device.crank_chance = 1.0
    again = rig.runner.add(PROMPT)
    rig.finish()
    assert again.was_external == 12


# --- loads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", ["completes", "fails", "is_aborted", "is_reset"])
@pytest.mark.parametrize("herd", [2, 8])
@pytest.mark.fault("B063")
def test_concurrent_lookups_of_the_same_prefix(fate: str, herd: int, async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling, token_budget=256)
    rig.store(PROMPT)
    rig.hold(LOAD)
    requests = [rig.runner.add([*PROMPT, 100 + i], 2) for i in range(herd)]
    for _ in range(3):
        rig.runner.step()
    assert len(rig.loads()) == 1, "one prefix is loaded once"
    assert [r.status for r in requests] == [Status.WAITING_FOR_LOAD] + [Status.WAITING] * (herd - 1)
    match fate:
        case "fails":
            rig.device.fail_late(rig.loads())
            rig.device.fail = only(LOAD)
        case "is_aborted":
            rig.runner.abort(requests[0].request_id)
        case "is_reset":
            rig.runner.reset()
    rig.unhold()
    at_once = fate in ("is_aborted", "is_reset")
    for _ in range(1 if at_once else 3 if async_scheduling else 2):
        rig.runner.step()
    assert all(r.status is not Status.WAITING for r in requests), "somebody did not go on in the next schedule"
    rig.finish()
    if fate == "completes":
        assert len(rig.loads()) == 1
        assert [r.was_external for r in requests] == [16] + [0] * (herd - 1)
        assert [r.local_tokens for r in requests[1:]] == [16] * (herd - 1)


@pytest.mark.fault("B008")
def test_abort_loading_requests(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling, blocks=256, ranks=2)
    for i in range(10):
        rig.store(range(100 * i, 100 * i + 16))
    free = rig.runner.pool.free_blocks
    rig.device.crank_chance = 0.0
    requests = [rig.runner.add([*range(100 * i, 100 * i + 16), 7]) for i in range(10)]
    rig.runner.step()
    assert all(r.status is Status.WAITING_FOR_LOAD for r in requests)
    for request in requests:
        rig.runner.abort(request.request_id)
    rig.runner.step()
    assert rig.runner.pool.free_blocks == free - 40, "blocks that a load is writing stay allocated"
    assert len(rig.lives()) == 10, "the callback of the aborted ones waits for their loads"
    rig.device.crank(LOAD, rank=0)
    rig.runner.step()
    rig.runner.step()
    assert rig.runner.pool.free_blocks == free - 40, "one rank is still writing"
    rig.device.crank(LOAD, rank=1)
    rig.finish()
    assert rig.runner.pool.free_blocks == free
    assert rig.manager.count("prepare_load") == rig.manager.count("complete_load") == 10


# --- fences ----------------------------------------------------------------------------------------------------------


@pytest.mark.fault("B019")
def test_fence_at_update_state_after_alloc(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling, blocks=6)
    rig.store(PROMPT)
    rig.device.crank_chance = 0.0
    rig.runner.add(range(100, 116), 1)
    rig.runner.run(until=lambda: not rig.runner.running and not rig.runner.waiting)
    pending = rig.device.waiting(STORE)
    fenced = set(rig.scheduler._block_id_to_pending_jobs)
    assert pending
    loading = rig.runner.add([*PROMPT, 200])
    rig.runner.step()
    assert loading.status is Status.WAITING_FOR_LOAD
    reused = fenced & set(loading.block_ids[0])
    assert reused, "the set-up hands out a block that a store still reads"
    assert set(pending) <= set(rig.runner.last_meta.jobs_to_flush)
    rig.device.crank_chance = 1.0
    rig.finish()
    rig.runner.pool.reset()
    again = rig.runner.add(range(100, 116))
    rig.finish()
    assert again.was_external == 12


@pytest.mark.fault("B019")
def test_fence_for_blocks_that_somebody_else_fills(async_scheduling: bool) -> None:
    """Blocks handed out with 0 external tokens, to a request that appears in no scheduler output."""
    rig = make_rig(async_scheduling=async_scheduling)
    rig.device.crank_chance = 0.0
    rig.runner.add(PROMPT)
    rig.runner.run(until=lambda: not rig.runner.running and not rig.runner.waiting)
    block = next(iter(rig.scheduler._block_id_to_pending_jobs))
    other = rig.runner.add(range(50, 60))
    now = rig.clock.now
    assert rig.scheduler.get_num_new_matched_tokens(other, 0, now=now) == (0, False)

    class Handed:
        def get_block_ids(self) -> tuple[list[int], ...]:
            return ([block],)

    rig.scheduler.update_state_after_alloc(other, Handed(), 0, now=now)
    rig.runner.abort(other.request_id)
    rig.runner.step()
    assert set(rig.device.waiting(STORE)) == set(), "the store has not been ordered before the other's write"
    assert rig.runner.last_meta.jobs_to_flush
    rig.finish()


@pytest.mark.fault("B169")
def test_what_somebody_else_has_not_filled_yet_is_not_stored(async_scheduling: bool) -> None:
    """An engine counts tokens as computed while another connector still loads them; here their request is aborted."""
    rig = make_rig(async_scheduling=async_scheduling)
    other = rig.runner.add(PROMPT)
    now = rig.clock.now
    assert rig.scheduler.get_num_new_matched_tokens(other, 0, now=now) == (0, False)

    class Handed:
        def get_block_ids(self) -> tuple[list[int], ...]:
            return ([1, 2, 3, 4],)

    rig.scheduler.update_state_after_alloc(other, Handed(), 0, now=now)
    other.num_computed_tokens = 12
    rig.runner.abort(other.request_id)
    rig.finish()
    assert rig.device.stored_jobs == []


@pytest.mark.fault("B169")
def test_stores_of_blocks_that_somebody_else_failed_to_fill_are_dropped_and_made_again(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling)
    rig.hold(STORE)
    request = rig.runner.add(PROMPT, 6)
    for _ in range(3):
        rig.runner.step()
    assert rig.device.stored_jobs
    failed = WorkerOutput(failed_block_ids=frozenset(request.block_ids[0][1:2]))
    rig.scheduler.update_connector_output(failed, now=rig.clock.now)
    rig.unhold()
    rig.finish()
    stats = rig.scheduler.get_stats()
    assert stats["store_jobs_failed"] == 1
    rig.runner.pool.reset()
    again = rig.runner.add([*PROMPT, 1])
    rig.finish()
    assert again.was_external == 16


def test_prefix_hits_are_no_reason_for_a_fence(async_scheduling: bool) -> None:
    rig = make_rig(async_scheduling=async_scheduling)
    rig.device.crank_chance = 0.0
    rig.runner.add(PROMPT)
    rig.runner.run(until=lambda: not rig.runner.running and not rig.runner.waiting)
    again = rig.runner.add([*PROMPT, 1, 2])
    rig.runner.step()
    assert again.local_tokens == 16
    assert rig.runner.last_meta.jobs_to_flush == ()
    rig.device.crank_chance = 1.0
    rig.finish()


@pytest.mark.parametrize("geometry", [FULL, PAIRS, HYBRID], ids=["full", "pairs", "hybrid"])
def test_request_finished_with_pending_stores_populates_fence(geometry: object, async_scheduling: bool) -> None:
    rig = make_rig(geometry, async_scheduling=async_scheduling)  # type: ignore[arg-type]
    rig.device.crank_chance = 0.0
    request = rig.runner.add(PROMPT)
    seen: list[set[int]] = []
    original = rig.scheduler.request_finished

    def finished(req: object, *, now: float) -> tuple[bool, None]:
        seen.append({b for table in request.block_ids for b in table if b})
        return original(req, now=now)  # type: ignore[arg-type]

    rig.scheduler.request_finished = finished  # type: ignore[method-assign]
    rig.runner.run(until=lambda: request.ended)
    jobs = rig.device.stored_jobs
    read = {int(block) for job in jobs for part in job.transfers for block in part.block_ids}
    assert read == seen[0]
    fences = rig.scheduler._block_id_to_pending_jobs
    assert set(fences) == read
    assert {i for ids in fences.values() for i in ids} == {job.job_id for job in jobs}
    rig.device.crank_chance = 1.0
    rig.finish()


def test_last_chunk_block_reallocated_in_the_next_step(async_scheduling: bool) -> None:
    """The chunk of tokens 4 .. 7 fills in the step whose output ends the request."""
    rig = make_rig(async_scheduling=async_scheduling, blocks=4)
    rig.device.crank_chance = 0.0
    request = rig.runner.add(range(7), 2)
    rig.runner.step()
    last_block = request.block_ids[0][1]
    rig.runner.run(until=lambda: request.ended)
    assert request.num_tokens == 9
    assert rig.scheduler.has_pending_push_work()
    other = rig.runner.add(range(100, 110), 2)
    rig.runner.step()
    assert last_block in other.block_ids[0], "the set-up hands the block out in the very next step"
    last = [job for job in rig.runner.last_meta.store_jobs if job.req_id == request.request_id]
    assert [part.block_ids.tolist() for job in last for part in job.transfers] == [[last_block]]
    assert {job.job_id for job in last} <= set(rig.runner.last_meta.jobs_to_flush)
    assert not any(job.after_compute for job in last)
    rig.device.crank_chance = 1.0
    rig.finish()
    rig.runner.pool.reset()
    again = rig.runner.add([*request.token_ids[:8], 1])
    rig.finish()
    assert again.was_external == 8


def test_the_last_sampled_tokens_chunk_is_never_stored(async_scheduling: bool) -> None:
    """Token 7 is sampled last: its KV was never computed, so the chunk of tokens 4 .. 7 is not complete."""
    rig = make_rig(async_scheduling=async_scheduling)
    request = rig.runner.add(range(7), 1)
    rig.finish()
    assert request.num_tokens == 8
    assert [job.transfers[0].slots.size for job in rig.device.stored_jobs] == [1]


def test_an_abort_stores_nothing_that_is_still_in_flight() -> None:
    """Its chunks found no room when they were computed; they would find some now, but no rank has reported them."""
    rig = make_rig(async_scheduling=True)
    rig.manager.inner.room = False  # type: ignore[attr-defined]
    request = rig.runner.add(range(8), 9)
    rig.runner.step()
    assert (request.num_computed_tokens, request.num_in_flight_tokens) == (8, 8)
    rig.manager.inner.room = True  # type: ignore[attr-defined]
    rig.runner.abort(request.request_id)
    rig.finish()
    assert rig.device.stored_jobs == []
