"""Requests that decode share store jobs: what is theirs together, and what stays each one's own.

In: requests of one length, which fill their chunks in the same steps, over the real TieringManager. Out: passes only if
chunks travel together and lives, fences and failures are told apart. Never: a real copy.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from orlop.core import Geometry, KVGroup, TransferJob, TransferKind, WorkerOutput
from orlop.host.tier import SlotState
from orlop.scheduler.turns import LOT
from orlop.testing.request_runner import EngineRequest, Status
from orlop.testing.rig import FULL, HYBRID, PAIRS, Rig, make_tiered_rig

pytestmark = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])

STORE = TransferKind.STORE
PROMPT_TOKENS = 9
"""Two chunks of four tokens and one more; the next chunk fills after three tokens that are decoded."""


def make(
    requests: int,
    *,
    async_scheduling: bool,
    max_tokens: int = 40,
    geometry: Geometry = FULL,
    blocks: int = 200,
    **options: Any,
) -> tuple[Rig, list[Any]]:
    """Requests that have nothing in common, all of them decoding, with their prompts stored."""
    rig = make_tiered_rig(
        geometry, slots=200, tiers=1, blocks=blocks, token_budget=64, async_scheduling=async_scheduling, options=options
    )
    added = [rig.runner.add(range(100 * i, 100 * i + PROMPT_TOKENS), max_tokens) for i in range(requests)]
    rig.runner.run(until=lambda: all(r.num_computed_tokens >= PROMPT_TOKENS for r in added))
    rig.runner.run(until=lambda: not rig.scheduler._jobs)
    return rig, added


def until_shared(rig: Rig, lives: int) -> TransferJob:
    """Step until a job stores a chunk each of so many lives."""
    found: list[TransferJob] = []

    def look() -> bool:
        found.extend(j for j in rig.runner.last_meta.store_jobs if is_shared(j) and len(j.transfers[0].slots) == lives)
        return bool(found)

    rig.runner.run(100, until=look)
    assert found, f"no job of {lives} lives in a hundred steps"
    return found[0]


def is_shared(job: TransferJob) -> bool:
    return job.kind is STORE and not job.req_id


def first_shared(job: TransferJob, rank: int, *, seen: list[int]) -> bool:
    """A knob for the first shared job that comes."""
    if is_shared(job) and not seen:
        seen.append(job.job_id)
    return job.job_id in seen


def stored_chunks(rig: Rig, request: EngineRequest) -> int:
    """Leading chunks of a request that host memory has."""
    tier = rig.manager.inner.host  # type: ignore[attr-defined]
    return sum(tier.slot_state(0, h) is not None and tier.slot_state(0, h).name == "READY" for h in hashes(request))


def hashes(request: EngineRequest) -> list[bytes]:
    return list(request.block_hashes[: (request.num_tokens - 1) // 4])


def test_requests_that_fill_a_chunk_in_the_same_step_share_a_job(async_scheduling: bool) -> None:
    rig, requests = make(3, async_scheduling=async_scheduling)
    job = until_shared(rig, 3)
    assert job.req_id == ""
    (part,) = job.transfers
    assert part.block_ids.tolist() == [request.block_ids[0][2] for request in requests]
    rig.runner.run(until=lambda: job.job_id not in rig.scheduler._jobs)
    assert [stored_chunks(rig, request) for request in requests] == [3, 3, 3]
    to_tier = [call.what for call in rig.tiers[0].calls if call.name == "submit_store"]
    assert any(len(order.keys) == len(order.contexts) == 3 for order in to_tier), "the tier gets them in one job too"
    rig.finish()


def test_no_more_share_a_job_than_allowed(async_scheduling: bool) -> None:
    rig, _ = make(5, async_scheduling=async_scheduling, max_joint_chunks=2)
    until_shared(rig, 2)
    assert sorted(len(job.transfers[0].slots) for job in rig.runner.last_meta.store_jobs) == [1, 2, 2]
    rig.finish()


def test_who_ends_fences_its_own_blocks_and_waits_for_the_shared_job(async_scheduling: bool) -> None:
    rig, requests = make(3, async_scheduling=async_scheduling)
    rig.hold(STORE)
    job = until_shared(rig, 3)
    ends, *others = requests
    block = ends.block_ids[0][2]
    rig.runner.abort(ends.request_id)
    assert rig.scheduler._jobs[job.job_id].fenced == (block,), "the others' blocks are not free, so nobody gets them"
    for _ in range(3):
        rig.runner.step()
    assert rig.lives() == [], "its chunk may still be published"
    rig.unhold()
    rig.runner.run(until=lambda: job.job_id not in rig.scheduler._jobs)
    assert rig.lives() == [1]
    assert [r.status for r in others] == [Status.RUNNING] * 2
    rig.finish()


@pytest.mark.fault("B007")
def test_a_shared_job_that_fails_costs_its_chunks_and_nothing_else(async_scheduling: bool) -> None:
    rig, requests = make(3, async_scheduling=async_scheduling)
    rig.device.fail = partial(first_shared, seen=[])
    rig.finish()
    assert all(request.status is Status.FINISHED for request in requests)
    assert [stored_chunks(rig, request) for request in requests] == [len(hashes(r)) - 1 for r in requests]
    assert rig.scheduler.get_stats()["stores_failed"] == 3


def test_a_lost_report_of_a_shared_job_is_settled_at_its_deadline(async_scheduling: bool) -> None:
    rig, requests = make(3, async_scheduling=async_scheduling, store_deadline_s=0.2)
    rig.device.lose = partial(first_shared, seen=[])
    rig.runner.run()
    rig.runner.check_drained()
    rig.manager.check_all_ended()
    assert all(request.status is Status.FINISHED for request in requests)
    assert rig.scheduler.get_stats()["store_deadlines_passed"] == 1
    assert rig.scheduler.get_stats()["slots_retired"] == 3


def test_a_reset_outdates_a_shared_job_for_all_its_lives(async_scheduling: bool) -> None:
    rig, requests = make(3, async_scheduling=async_scheduling)
    rig.hold(STORE)
    job = until_shared(rig, 3)
    rig.runner.reset()
    assert rig.scheduler._jobs[job.job_id].lives == ()
    rig.unhold()
    rig.finish()
    assert [stored_chunks(rig, request) for request in requests] == [0, 0, 0]


def test_requests_that_fill_the_same_chunk_store_it_once(async_scheduling: bool) -> None:
    """The same text in two requests: who comes second finds it being written, and is not kept from going on."""
    rig = make_tiered_rig(slots=200, blocks=200, token_budget=64, async_scheduling=async_scheduling)
    requests = [rig.runner.add(range(PROMPT_TOKENS), 12) for _ in range(2)] + [rig.runner.add(range(50, 59), 12)]
    rig.finish()
    assert [stored_chunks(rig, request) for request in requests] == [5, 5, 5]
    stored = [key for job in rig.device.stored_jobs for part in job.transfers for key in part.slots.tolist()]
    assert len(stored) == 10, "ten different chunks"


def test_who_says_the_same_again_keeps_few_others_from_sharing(async_scheduling: bool) -> None:
    """Chunks of sixteen tokens, so that the second finds each one stored or being written when it is its last."""
    geometry = Geometry((KVGroup(0, 4),), 4, 4)
    rig = make_tiered_rig(
        geometry,
        slots=400,
        blocks=900,
        token_budget=400,
        async_scheduling=async_scheduling,
        options={"gather_steps": 8},
    )
    for i in [*range(15), 0]:
        rig.runner.add(range(100 * i, 100 * i + PROMPT_TOKENS), 80)
    rig.finish()
    stores = rig.device.stored_jobs
    assert sum(len(job.transfers[0].slots) for job in stores) == 15 * 5 * geometry.blocks_per_chunk
    assert sum(is_shared(job) for job in stores) >= 5
    assert len(stores) <= 5 * 6, "five chunks: three shared jobs each, or two and what one half of a half stores alone"


@pytest.mark.parametrize("geometry", [FULL, PAIRS], ids=["full", "pairs"])
def test_what_decoding_fills_is_stored_in_every_so_manieth_step(geometry: Any, async_scheduling: bool) -> None:
    rig = make_tiered_rig(
        geometry, slots=200, blocks=200, token_budget=64, async_scheduling=async_scheduling, options={"gather_steps": 8}
    )
    request = rig.runner.add(range(17), 60)
    rig.runner.step()
    rig.runner.step()
    planned: list[int] = []
    for step in range(40):
        rig.runner.step()
        if rig.runner.last_meta.store_jobs:
            planned.append(step)
    assert len(planned) > 1
    assert all(later - earlier >= 8 for earlier, later in pairwise(planned)), planned
    rig.finish()
    per_chunk = 4 * geometry.blocks_per_chunk
    ready = request.block_hashes[geometry.blocks_per_chunk - 1 :: geometry.blocks_per_chunk]
    host = rig.manager.inner.host  # type: ignore[attr-defined]
    assert sum(host.slot_state(0, h) is not None for h in ready) == (request.num_tokens - 1) // per_chunk


def test_a_prompt_does_not_wait_for_the_gathering_of_others(async_scheduling: bool) -> None:
    rig, _ = make(2, async_scheduling=async_scheduling, gather_steps=1000)
    late = rig.runner.add(range(500, 650), 30)  # more tokens than a step computes
    rig.runner.run(10, until=lambda: late.num_computed_tokens >= 150)
    rig.runner.run(10, until=lambda: stored_chunks(rig, late) >= 37)
    assert stored_chunks(rig, late) == 37
    rig.finish()


def test_what_was_gathered_is_stored_when_its_request_ends(async_scheduling: bool) -> None:
    rig, requests = make(2, async_scheduling=async_scheduling, gather_steps=1000)
    rig.finish()
    assert [stored_chunks(rig, request) for request in requests] == [len(hashes(r)) for r in requests]


def test_a_preempted_request_stores_what_it_computes_again(async_scheduling: bool) -> None:
    rig, requests = make(2, async_scheduling=async_scheduling, gather_steps=8)
    rig.runner.run(until=lambda: requests[0].num_computed_tokens > 14)
    rig.runner.preempt(requests[0].request_id)
    rig.finish()
    assert [stored_chunks(rig, request) for request in requests] == [len(hashes(r)) for r in requests]


def test_nothing_is_gathered_beside_a_sliding_window(async_scheduling: bool) -> None:
    """Blocks behind a window are recycled: they are read while they are there."""
    rig = make_tiered_rig(
        HYBRID, slots=200, blocks=200, token_budget=64, async_scheduling=async_scheduling, options={"gather_steps": 8}
    )
    request = rig.runner.add(range(9), 40)
    rig.finish()
    host = rig.manager.inner.host  # type: ignore[attr-defined]
    for group in (0, 1):
        assert all(host.slot_state(group, h) is not None for h in hashes(request))


@pytest.mark.fault("B169")
def test_who_shares_a_job_with_a_distrusted_life_stores_its_chunk_again(async_scheduling: bool) -> None:
    """One request's blocks were not filled by whom they were to be: the others of the job lose nothing by it."""
    rig, requests = make(3, async_scheduling=async_scheduling)
    rig.hold(STORE)
    until_shared(rig, 3)
    distrusted = WorkerOutput(invalid_block_ids=frozenset(requests[0].block_ids[0][:1]))
    rig.scheduler.update_connector_output(distrusted, now=rig.clock.now)
    rig.unhold()
    rig.finish()
    assert rig.scheduler.get_stats()["store_jobs_failed"] == 1
    assert [stored_chunks(rig, request) for request in requests] == [len(hashes(r)) for r in requests]


def test_a_request_that_has_ended_is_let_go(async_scheduling: bool) -> None:
    """Jobs wait in the list of deadlines for long after they are over; what their requests have is not kept by it."""
    rig, _ = make(3, async_scheduling=async_scheduling)
    until_shared(rig, 3)
    rig.finish()
    kept = [job.lives for job in rig.scheduler._store_deadlines]
    assert kept
    assert not any(kept)


# --- a few chunks of each ---------------------------------------------------------------------------------------

RUNS: dict[str, Any] = {"gather_steps": 16, "max_joint_chunks": 64}
"""Four tokens fill a chunk, so that at its turn each request has some four."""
each_size = pytest.mark.parametrize("geometry", [FULL, PAIRS], ids=["single blocks", "pairs of blocks"])


def until_runs(rig: Rig, lives: int, chunks: int = 2) -> TransferJob:
    """Step until a job stores so many chunks or more of each of so many lives."""
    found: list[TransferJob] = []

    def look() -> bool:
        for job in rig.runner.last_meta.store_jobs:
            runs = list(runs_of(rig, job).values()) if is_shared(job) else []
            if len(runs) == lives and all(len(run) >= chunks for run in runs):
                found.append(job)
        return bool(found)

    rig.runner.step()  # beyond what the prompts have filled
    rig.runner.run(200, until=look)
    assert found, f"no job of {chunks} chunks of each of {lives} lives in two hundred steps"
    return found[0]


def runs_of(rig: Rig, job: TransferJob) -> dict[str, list[int]]:
    """The chunks of each request that a shared job of this step stores, in the order of its blocks."""
    slots = job.transfers[0].slots[:: rig.scheduler.geometry.blocks_per_chunk]
    ended = [call.what for call in rig.manager.calls if call.name == "complete_store"]
    known = [*ended, *rig.scheduler.open_reservations()]
    reservation = next(r for r in reversed(known) if np.array_equal(r.slots, slots))
    runs: dict[str, list[int]] = {}
    for context, chunk in zip(reservation.contexts, reservation.chunks.tolist(), strict=True):
        runs.setdefault(context.req_id, []).append(chunk)
    return runs


def blocks_of(rig: Rig, request: EngineRequest, chunks: list[int]) -> list[int]:
    n = rig.scheduler.geometry.blocks_per_chunk
    return [block for chunk in chunks for block in request.block_ids[0][chunk * n : (chunk + 1) * n]]


def all_stored(rig: Rig, requests: list[Any]) -> bool:
    """Whether host memory has every chunk that the requests have computed."""
    n = rig.scheduler.geometry.blocks_per_chunk
    host = rig.manager.inner.host  # type: ignore[attr-defined]
    return all(host.slot_state(0, h) is SlotState.READY for r in requests for h in hashes(r)[n - 1 :: n])


@each_size
def test_at_their_turn_requests_store_runs_in_one_job(geometry: Geometry, async_scheduling: bool) -> None:
    options = {**RUNS, "gather_steps": 16 * geometry.blocks_per_chunk}
    rig, requests = make(3, async_scheduling=async_scheduling, max_tokens=80, geometry=geometry, **options)
    job = until_runs(rig, 3, 3)
    runs = runs_of(rig, job)
    assert list(runs) == [request.request_id for request in requests]
    first = PROMPT_TOKENS // geometry.chunk_tokens(0)
    assert all(run == list(range(first, run[-1] + 1)) for run in runs.values())
    (part,) = job.transfers
    expected = [block for request in requests for block in blocks_of(rig, request, runs[request.request_id])]
    assert part.block_ids.tolist() == expected
    assert part.offsets.tolist() == [*range(geometry.blocks_per_chunk)] * sum(map(len, runs.values()))
    rig.finish()
    assert all_stored(rig, requests)
    stores = len(rig.device.stored_jobs)
    assert stores < len(hashes(requests[0])) // geometry.blocks_per_chunk, f"{stores} jobs, no fewer than chunks of one"


@each_size
def test_who_ends_fences_all_its_blocks_of_a_run_and_no_others(geometry: Geometry, async_scheduling: bool) -> None:
    options = {**RUNS, "gather_steps": 16 * geometry.blocks_per_chunk}
    rig, requests = make(3, async_scheduling=async_scheduling, max_tokens=80, geometry=geometry, **options)
    rig.hold(STORE)
    job = until_runs(rig, 3)
    runs = runs_of(rig, job)
    fenced: list[int] = []
    for ends in (requests[1], requests[2]):
        fenced += blocks_of(rig, ends, runs[ends.request_id])
        rig.runner.abort(ends.request_id)
        assert rig.scheduler._jobs[job.job_id].fenced == tuple(fenced)
    rig.unhold()
    rig.finish()
    assert all_stored(rig, requests)


@pytest.mark.fault("B169")
def test_who_shares_a_job_with_a_distrusted_life_stores_all_its_run_again(async_scheduling: bool) -> None:
    rig, requests = make(3, async_scheduling=async_scheduling, max_tokens=80, **RUNS)
    rig.hold(STORE)
    job = until_runs(rig, 3, 3)
    runs = runs_of(rig, job)
    distrusted = WorkerOutput(invalid_block_ids=frozenset(requests[1].block_ids[0][:1]))
    rig.scheduler.update_connector_output(distrusted, now=rig.clock.now)
    lives = rig.scheduler._live
    assert [lives[r.request_id].groups[0].cursor for r in requests] == [
        runs[requests[0].request_id][0],
        0,
        runs[requests[2].request_id][0],
    ]
    rig.unhold()
    rig.finish()
    assert rig.scheduler.get_stats()["store_jobs_failed"] == 1
    assert all_stored(rig, requests)


def test_a_job_of_runs_that_fails_costs_these_and_nothing_else(async_scheduling: bool) -> None:
    rig, requests = make(3, async_scheduling=async_scheduling, max_tokens=80, **RUNS)
    rig.device.fail = partial(first_shared, seen=[])
    runs = runs_of(rig, until_runs(rig, 3))
    rig.finish()
    lost = [len(run) for run in runs.values()]
    assert rig.scheduler.get_stats()["stores_failed"] == sum(lost)
    assert [stored_chunks(rig, r) for r in requests] == [
        len(hashes(r)) - n for r, n in zip(requests, lost, strict=True)
    ]


def test_a_preempted_request_has_its_run_read_first_and_stores_the_rest_later(async_scheduling: bool) -> None:
    rig, requests = make(3, async_scheduling=async_scheduling, max_tokens=80, **RUNS)
    rig.device.crank_chance = 0.0
    job = until_runs(rig, 3)
    rig.runner.preempt(requests[1].request_id)
    rig.runner.step()
    assert job.job_id in rig.runner.last_meta.jobs_to_flush
    assert rig.device.unreported() == [], "it has been read, and says so"
    rig.device.crank_chance = 1.0
    rig.finish()
    assert all_stored(rig, requests)


def test_who_is_preempted_waits_for_no_turn(async_scheduling: bool) -> None:
    """What it had gathered is gone with its blocks; its turn would find others, perhaps not loaded yet."""
    rig, requests = make(3, async_scheduling=async_scheduling, max_tokens=80, gather_steps=1000)
    rig.runner.run(until=lambda: len(list(rig.scheduler._gathered)) == 3)
    rig.runner.preempt(requests[1].request_id)
    rig.runner.step()
    assert list(rig.scheduler._gathered) == [requests[0].request_id, requests[2].request_id]
    rig.finish()
    assert all_stored(rig, requests)


def test_who_ends_waits_for_no_turn_and_is_owed_what_it_gathered(async_scheduling: bool) -> None:
    rig, requests = make(3, async_scheduling=async_scheduling, max_tokens=80, gather_steps=1000)
    rig.runner.run(until=lambda: requests[0].num_computed_tokens == 22)
    rig.runner.abort(requests[1].request_id)
    assert list(rig.scheduler._gathered) == [requests[0].request_id, requests[2].request_id]
    rig.runner.step()
    (job,) = rig.runner.last_meta.store_jobs
    assert (job.req_id, len(job.transfers[0].slots)) == (requests[1].request_id, 3)
    rig.finish()
    assert all_stored(rig, requests)


def test_a_reset_outdates_runs_and_what_was_gathered(async_scheduling: bool) -> None:
    rig, requests = make(3, async_scheduling=async_scheduling, max_tokens=80, **RUNS)
    rig.hold(STORE)
    job = until_runs(rig, 3)
    blocks = job.transfers[0].block_ids.tolist()
    rig.runner.run(until=lambda: len(list(rig.scheduler._gathered)) == 3)
    rig.runner.reset()
    assert rig.scheduler._jobs[job.job_id].lives == ()
    assert sorted(rig.scheduler._jobs[job.job_id].fenced) == sorted(blocks), "all of them may be handed out"
    assert list(rig.scheduler._gathered) == []
    before = len(rig.device.stored_jobs)
    rig.unhold()
    rig.finish()
    assert len(rig.device.stored_jobs) == before
    assert [stored_chunks(rig, request) for request in requests] == [0, 0, 0]


@pytest.mark.fault("B007")
def test_a_lost_report_of_runs_is_settled_at_its_deadline(async_scheduling: bool) -> None:
    rig, requests = make(3, async_scheduling=async_scheduling, max_tokens=80, store_deadline_s=0.2, **RUNS)
    rig.device.lose = partial(first_shared, seen=[])
    job = until_runs(rig, 3)
    chunks = sum(len(run) for run in runs_of(rig, job).values())
    rig.runner.run(until=lambda: job.job_id not in rig.scheduler._jobs)
    assert rig.scheduler._overdue[job.job_id].fenced == tuple(job.transfers[0].block_ids.tolist())
    rig.runner.run()
    rig.runner.check_drained()
    rig.manager.check_all_ended()
    assert all(request.status is Status.FINISHED for request in requests)
    assert rig.scheduler.get_stats()["store_deadlines_passed"] == 1
    assert rig.scheduler.get_stats()["slots_retired"] == chunks


def handed_out(rig: Rig) -> set[int]:
    """Blocks that requests got in the last step while they were running."""
    cached = rig.runner.last_output.scheduled_cached_reqs
    return {block for ids in cached.new_block_ids if ids for group in ids for block in group}


def test_a_block_of_a_run_that_goes_to_a_decoding_request_is_read_first(async_scheduling: bool) -> None:
    """Nobody comes or ends in that step: what the decoding ones get is noted because there are fences at all."""
    rig, requests = make(3, async_scheduling=async_scheduling, max_tokens=60, blocks=40, **RUNS)
    rig.device.crank_chance = 0.0
    until_runs(rig, 3)
    rig.runner.abort(requests[1].request_id)
    rig.runner.step()
    claimed = 0
    while not claimed:
        assert not rig.scheduler._owed
        fences = {block: set(jobs) for block, jobs in rig.scheduler._block_id_to_pending_jobs.items()}
        rig.runner.step()
        output = rig.runner.last_output
        assert not output.scheduled_new_reqs
        assert not output.preempted_req_ids
        for block in handed_out(rig) & fences.keys():
            claimed += 1
            assert fences[block] <= set(rig.runner.last_meta.jobs_to_flush)
        assert all(request.status is Status.RUNNING for request in (requests[0], requests[2])), "no block was claimed"
    rig.device.crank_chance = 1.0
    rig.finish()
    assert all_stored(rig, requests)


def test_an_owed_run_is_read_before_a_decoding_request_gets_its_blocks_in_the_same_step(async_scheduling: bool) -> None:
    """No fence stands when the step begins: the run is planned in the very step that hands out its blocks."""
    rig = make_tiered_rig(
        slots=200,
        blocks=17,
        token_budget=64,
        async_scheduling=async_scheduling,
        options={"gather_steps": 1000, "max_joint_chunks": 64},
    )
    first, second = (rig.runner.add(range(100 * i, 100 * i + PROMPT_TOKENS), 30) for i in range(2))
    ends = rig.runner.add(range(500, 501 + PROMPT_TOKENS), 30)
    rig.runner.run(until=lambda: first.num_computed_tokens == second.num_computed_tokens == 20)
    assert rig.runner.pool.free_blocks == 0
    assert not rig.scheduler._block_id_to_pending_jobs
    run = ends.block_ids[0][2:5]
    rig.runner.abort(ends.request_id)
    rig.device.crank_chance = 0.0
    rig.runner.step()
    (job,) = rig.runner.last_meta.store_jobs
    assert job.transfers[0].block_ids.tolist() == run
    assert handed_out(rig) & set(run), "its blocks are the only ones that are free"
    assert job.job_id in rig.runner.last_meta.jobs_to_flush
    rig.device.crank_chance = 1.0
    rig.finish()
    assert all_stored(rig, [first, second, ends])


def test_prompts_that_arrive_take_nobody_along_who_gathers(async_scheduling: bool) -> None:
    rig, requests = make(2, async_scheduling=async_scheduling, max_tokens=60, gather_steps=1000)
    before = len(rig.device.stored_jobs)
    late = []
    for i in range(10):
        late.append(rig.runner.add(range(1000 * i + 500, 1000 * i + 517), 1))
        for _ in range(4):
            rig.runner.step()
    assert all(request.status is Status.RUNNING for request in requests)
    theirs = {block for request in requests for block in request.block_ids[0]}
    jobs = rig.device.stored_jobs[before:]
    assert len(jobs) == len(late)
    assert not any(theirs & set(job.transfers[0].block_ids.tolist()) for job in jobs)
    assert list(rig.scheduler._gathered) == [request.request_id for request in requests]
    rig.finish()
    assert all_stored(rig, [*requests, *late])


def test_an_id_that_comes_back_has_its_own_blocks_and_its_own_turn(async_scheduling: bool) -> None:
    """Its earlier life still drains, with a run in a shared job and some more gathered."""
    rig, requests = make(3, async_scheduling=async_scheduling, max_tokens=80, **RUNS)
    rig.hold(STORE)
    job = until_runs(rig, 3)
    rig.runner.run(until=lambda: len(list(rig.scheduler._gathered)) == 3)
    old = requests[1]
    run = blocks_of(rig, old, runs_of(rig, job)[old.request_id])
    rig.runner.abort(old.request_id)
    new = rig.runner.add(range(700, 700 + PROMPT_TOKENS), 60, req_id=old.request_id)
    assert old.request_id not in list(rig.scheduler._gathered)
    rig.runner.run(until=lambda: old.request_id in list(rig.scheduler._gathered))
    assert set(run) <= set(rig.scheduler._jobs[job.job_id].fenced)
    learned = rig.scheduler._live[new.request_id].groups[0].block_ids
    assert learned
    assert learned == new.block_ids[0][: len(learned)]
    rig.runner.abort(requests[2].request_id)
    rig.unhold()
    rig.finish()
    assert all_stored(rig, [requests[0], old, new])
    assert len(rig.lives()) == 4


def test_many_that_wait_have_their_turns_in_several_steps(async_scheduling: bool) -> None:
    """So that what a long time has gathered is not all copied at once."""
    rig = make_tiered_rig(
        slots=1000,
        blocks=1000,
        token_budget=1000,
        max_num_seqs=100,
        async_scheduling=async_scheduling,
        options={"gather_steps": 8, "max_joint_chunks": 64},
    )
    requests = [rig.runner.add(range(100 * i, 100 * i + PROMPT_TOKENS), 40) for i in range(LOT + 6)]
    rig.runner.run(until=lambda: all(request.num_computed_tokens >= PROMPT_TOKENS for request in requests))
    turns: list[list[str]] = []
    for _ in range(30):
        rig.runner.step()
        runs = [runs_of(rig, job) for job in rig.runner.last_meta.store_jobs]
        turns += [[req_id for run in runs for req_id in run]] if runs else []
    names = [request.request_id for request in requests]
    assert turns[0] == names[:LOT]
    assert turns[1][:6] == names[LOT:], "who had no turn yet comes first"
    assert all(len(turn) <= LOT for turn in turns)
    rig.finish()
    assert all_stored(rig, requests)


def test_many_beside_a_sliding_window_lose_nothing_behind_it(async_scheduling: bool) -> None:
    """A window of five tokens moves on from a chunk of four while lots of others would have their turns."""
    geometry = Geometry((KVGroup(0, 4), KVGroup(1, 4, sliding_window=5)), 4, 1)
    count = 5 * LOT
    rig = make_tiered_rig(
        geometry,
        slots=20 * count,
        tiers=0,
        blocks=20 * count,
        token_budget=9 * count,
        max_num_seqs=count,
        async_scheduling=async_scheduling,
        options={"gather_steps": 64, "max_joint_chunks": 64},
    )
    rig.runner.checks.clear()  # they recount thousands of blocks
    requests = [rig.runner.add(range(100 * i, 100 * i + PROMPT_TOKENS), 8) for i in range(count)]
    rig.finish()
    host = rig.manager.inner.host  # type: ignore[attr-defined]
    for group in (0, 1):
        assert all(host.slot_state(group, h) is SlotState.READY for request in requests for h in hashes(request))


@pytest.mark.fault("B169")
def test_whoever_waits_for_its_turn_waits_on_beside_one_that_is_distrusted(async_scheduling: bool) -> None:
    rig, requests = make(3, async_scheduling=async_scheduling, gather_steps=1000)
    rig.runner.run(until=lambda: all(r.num_computed_tokens > 14 for r in requests))
    waiting = list(rig.scheduler._gathered)
    assert waiting
    distrusted = WorkerOutput(invalid_block_ids=frozenset(requests[0].block_ids[0][-1:]))
    rig.scheduler.update_connector_output(distrusted, now=rig.clock.now)
    assert list(rig.scheduler._gathered) == waiting
    rig.finish()
    assert [stored_chunks(rig, request) for request in requests] == [len(hashes(r)) for r in requests]
