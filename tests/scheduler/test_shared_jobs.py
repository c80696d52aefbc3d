"""Requests that decode share store jobs: what is theirs together, and what stays each one's own.

In: requests of one length, which fill their chunks in the same steps, over the real TieringManager. Out: passes only if
chunks travel together and lives, fences and failures are told apart. Never: a real copy.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from orlop.core import Geometry, KVGroup, TransferJob, TransferKind, WorkerOutput
from orlop.testing.request_runner import EngineRequest, Status
from orlop.testing.rig import FULL, HYBRID, PAIRS, Rig, make_tiered_rig

pytestmark = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])

STORE = TransferKind.STORE
PROMPT_TOKENS = 9
"""Two chunks of four tokens and one more; the next chunk fills after three tokens that are decoded."""


def make(requests: int, *, async_scheduling: bool, max_tokens: int = 40, **options: Any) -> tuple[Rig, list[Any]]:
    """Requests that have nothing in common, all of them decoding, with their prompts stored."""
    rig = make_tiered_rig(
        slots=200, tiers=1, blocks=200, token_budget=64, async_scheduling=async_scheduling, options=options
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
    late = rig.runner.add(range(500, 517), 30)
    rig.runner.run(10, until=lambda: late.num_computed_tokens >= 17)
    rig.runner.run(10, until=lambda: stored_chunks(rig, late) >= 4)
    assert stored_chunks(rig, late) == 4
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
