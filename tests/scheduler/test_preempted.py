"""What a request has filled since its last turn when it is preempted: stored in that very message, and nothing else.

In: requests that decode and gather for long, preempted by hand or for want of blocks, over the real TieringManager.
Out: passes only if what was computed is stored before anybody writes its blocks, and comes back; the rig compares the
bytes of every chunk that is published. Never: a real copy.
"""

from __future__ import annotations

from typing import Any

import pytest

from orlop.core import Geometry, KVGroup, TransferJob, TransferKind, WorkerOutput
from orlop.host.tier import SlotState
from orlop.testing.device import only
from orlop.testing.doubles import DictManager
from orlop.testing.request_runner import EngineRequest, Status
from orlop.testing.rig import FULL, HYBRID, PAIRS, Rig, make_rig, make_tiered_rig

pytestmark = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])

STORE = TransferKind.STORE
PROMPT_TOKENS = 9
GATHER: dict[str, Any] = {"gather_steps": 1000, "max_joint_chunks": 64}
"""Nobody's turn comes: what decoding fills is stored at a preemption, at the end, or not at all."""
UNEQUAL = Geometry((KVGroup(0, 4), KVGroup(1, 8)), 4, 1)
"""Two groups of full attention whose blocks differ in size."""
geometries = pytest.mark.parametrize("geometry", [FULL, PAIRS, UNEQUAL], ids=["single blocks", "pairs", "two groups"])


def make(
    requests: int, geometry: Geometry = FULL, *, max_tokens: int = 60, options: Any = None, **rig: Any
) -> tuple[Rig, list[EngineRequest]]:
    """Requests that have nothing in common and decode, with their prompts stored."""
    settings = {"slots": 300, "blocks": 200, "token_budget": 64, "tiers": 0, **rig}
    made = make_tiered_rig(geometry, options=GATHER | (options or {}), **settings)
    added = [made.runner.add(range(100 * i, 100 * i + PROMPT_TOKENS), max_tokens) for i in range(requests)]
    made.runner.run(until=lambda: all(r.num_computed_tokens >= PROMPT_TOKENS for r in added))
    made.runner.run(until=lambda: not made.scheduler._jobs)
    return made, added


def until_computed(rig: Rig, request: EngineRequest, tokens: int) -> None:
    rig.runner.run(until=lambda: request.num_computed_tokens == tokens)


def preempt(rig: Rig, *requests: EngineRequest) -> list[TransferJob]:
    """Preempt them together; the jobs of that step's message that are read before it may write anything.

    The device's prefix cache forgets them, so that what they had does not come back from there.
    """
    for request in requests:
        rig.runner.preempt(request.request_id)
    rig.runner.step()
    rig.runner.pool.reset()
    return at_once(rig)


def at_once(rig: Rig) -> list[TransferJob]:
    return [job for job in rig.runner.last_meta.store_jobs if not job.after_compute]


def chunk_hashes(rig: Rig, request: EngineRequest, group: int) -> list[bytes]:
    hashes_per_chunk = rig.scheduler.geometry.hashes_per_chunk(group)
    return list(request.block_hashes[hashes_per_chunk - 1 :: hashes_per_chunk])


def ready(rig: Rig, request: EngineRequest, group: int = 0) -> list[int]:
    """Numbers of the chunks of a request that host memory has."""
    host = rig.manager.inner.host  # type: ignore[attr-defined]
    states = [host.slot_state(group, h) for h in chunk_hashes(rig, request, group)]
    return [chunk for chunk, state in enumerate(states) if state is SlotState.READY]


def all_stored(rig: Rig, *requests: EngineRequest) -> bool:
    """Whether host memory has every chunk that the requests have computed."""
    return all(
        len(ready(rig, r, g.index)) == (r.num_tokens - 1) // rig.scheduler.geometry.chunk_tokens(g.index)
        for r in requests
        for g in rig.scheduler.geometry.groups
    )


def until_lost(rig: Rig, request: EngineRequest) -> None:
    """Preempted, and host memory loses all of it before it comes back."""
    preempt(rig, request)
    rig.runner.waiting.remove(request)
    rig.runner.run(until=lambda: not rig.scheduler._jobs)
    for group in rig.scheduler.geometry.groups:
        rig.manager.inner.host.discard(group.index, request.block_hashes)  # type: ignore[attr-defined]
    rig.runner.waiting.append(request)


# --- what is stored ---------------------------------------------------------------------------------------------


@geometries
def test_what_it_has_filled_is_stored_in_the_message_of_its_preemption(
    geometry: Geometry, async_scheduling: bool
) -> None:
    rig, (stays, goes) = make(2, geometry, async_scheduling=async_scheduling)
    until_computed(rig, goes, 34)
    tables = [list(table) for table in goes.block_ids]
    jobs = preempt(rig, goes)
    read = {part.group: part.block_ids.tolist() for job in jobs for part in job.transfers}
    for group in geometry.groups:
        size = geometry.chunk_tokens(group.index) // group.tokens_per_block
        first, stop = (tokens // geometry.chunk_tokens(group.index) for tokens in (PROMPT_TOKENS, 32))
        assert read[group.index] == tables[group.index][first * size : stop * size]
    assert {job.req_id for job in jobs} == {goes.request_id}, "nobody else is looked at for it"
    assert list(rig.scheduler._gathered) == [stays.request_id]
    rig.finish()
    assert all_stored(rig, stays, goes)


def test_several_that_are_preempted_together_share_a_job(async_scheduling: bool) -> None:
    rig, requests = make(4, async_scheduling=async_scheduling)
    until_computed(rig, requests[0], 22)
    tables = [list(request.block_ids[0]) for request in requests]
    (job,) = preempt(rig, requests[3], requests[1])
    assert set(job.transfers[0].block_ids.tolist()) == {*tables[1][2:5], *tables[3][2:5]}
    rig.finish()
    assert all_stored(rig, *requests)


@geometries
@pytest.mark.parametrize("tokens", range(32, 41))
def test_it_comes_back_from_host_memory_and_computes_little(
    tokens: int, geometry: Geometry, async_scheduling: bool
) -> None:
    """What it had beyond its last whole chunk; or that one as well, until the next block has told that it is full."""
    rig, (request,) = make(1, geometry, async_scheduling=async_scheduling)
    until_computed(rig, request, tokens)
    preempt(rig, request)
    rig.runner.run(until=lambda: request.status is Status.RUNNING)
    assert request.local_tokens == 0
    assert 0 <= tokens - request.was_external <= max(geometry.chunk_tokens(g.index) for g in geometry.groups)
    rig.finish()
    assert all_stored(rig, request)


def test_its_blocks_are_read_before_those_who_pushed_it_out_write_them(async_scheduling: bool) -> None:
    """The device is full: its blocks are handed to others in the step of the preemption, and no copy is early."""
    rig, requests = make(4, async_scheduling=async_scheduling, blocks=25)
    *stay, goes = requests
    rig.device.crank_chance = 0.0
    until_computed(rig, goes, 24)
    table = list(goes.block_ids[0])
    rig.runner.step()
    assert rig.runner.last_output.preempted_req_ids == {goes.request_id}
    (job,) = at_once(rig)
    run = job.transfers[0].block_ids.tolist()
    assert run == table[2:5]
    assert {request.block_ids[0][-1] for request in stay} == {*table[5:], *run[1:]}, "the set-up hands out its blocks"
    assert job.job_id in rig.runner.last_meta.jobs_to_flush
    rig.device.crank_chance = 1.0
    rig.finish()
    assert all_stored(rig, *requests)


def test_its_blocks_are_read_before_whoever_gets_them_later_writes_them(async_scheduling: bool) -> None:
    rig, (stays, goes) = make(2, async_scheduling=async_scheduling, blocks=20)
    until_computed(rig, goes, 26)
    rig.device.crank_chance = 0.0
    (job,) = preempt(rig, goes)
    run = set(job.transfers[0].block_ids.tolist())
    assert job.job_id not in rig.runner.last_meta.jobs_to_flush, "nobody has got its blocks yet"
    assert rig.device.waiting(STORE) == [job.job_id]
    assert run <= rig.scheduler._block_id_to_pending_jobs.keys()
    rig.runner.waiting.remove(goes)  # it shall not come back before
    while not run & set(stays.block_ids[0]):
        assert job.job_id not in rig.runner.last_meta.jobs_to_flush
        assert stays.status is Status.RUNNING, "its blocks were not handed out"
        rig.runner.step()
    assert job.job_id in rig.runner.last_meta.jobs_to_flush
    rig.runner.waiting.append(goes)
    rig.device.crank_chance = 1.0
    rig.finish()
    assert all_stored(rig, stays, goes)


def test_on_several_ranks_nothing_is_published_before_the_last_one(async_scheduling: bool) -> None:
    rig, (request,) = make(1, async_scheduling=async_scheduling, ranks=2)
    until_computed(rig, request, 22)
    rig.device.hold = only(STORE, rank=1)
    preempt(rig, request)
    for _ in range(3):
        rig.runner.step()
    assert ready(rig, request) == [0, 1]
    assert request.status is Status.PREEMPTED, "it waits for its own chunks"
    rig.unhold()
    rig.runner.run(until=lambda: request.status is Status.RUNNING)
    assert ready(rig, request)[:5] == [0, 1, 2, 3, 4]
    rig.finish()


# --- what is not ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"offload_decode": False}, {"gather_steps": 1}], ids=["no decode", "no gathering"])
def test_what_is_not_to_be_stored_or_is_stored_already_is_not_stored_then(
    options: dict[str, Any], async_scheduling: bool
) -> None:
    rig, (request,) = make(1, async_scheduling=async_scheduling, options=options)
    until_computed(rig, request, 22)
    assert preempt(rig, request) == []
    rig.finish()


def test_a_limit_of_its_own_holds_at_its_preemption_too(async_scheduling: bool) -> None:
    rig, _ = make(1, async_scheduling=async_scheduling)
    request = rig.runner.add(range(500, 509), 60, kv_transfer_params={"max_offload_tokens": 14})
    until_computed(rig, request, 30)
    (job,) = preempt(rig, request)
    assert len(job.transfers[0].slots) == 1
    rig.finish()
    assert ready(rig, request) == [0, 1, 2]


@pytest.mark.parametrize("token_budget", [1, 2, 5])
@pytest.mark.parametrize("geometry", [FULL, UNEQUAL], ids=["one group", "two groups"])
def test_wherever_it_is_preempted_while_it_computes_its_output_again_only_what_it_has_computed_is_stored(
    geometry: Geometry, token_budget: int, async_scheduling: bool
) -> None:
    """All of its chunks have their keys, and its pieces, down to one token, have blocks that are not full."""
    rig, (request,) = make(1, geometry, async_scheduling=async_scheduling)
    until_computed(rig, request, 30)
    for steps in range(1, 24 // token_budget + 3):
        until_lost(rig, request)
        rig.runner.token_budget = token_budget
        rig.runner.run(until=lambda: request.status is Status.RUNNING)
        for _ in range(steps - 1):
            rig.runner.step()
        computed = request.num_computed_tokens
        preempt(rig, request)
        rig.runner.run(until=lambda: not rig.scheduler._jobs)
        for group in geometry.groups:
            found = ready(rig, request, group.index)
            assert found == [*range(len(found))]
            assert len(found) * geometry.chunk_tokens(group.index) <= computed
            assert computed - len(found) * geometry.chunk_tokens(group.index) <= 8 + token_budget
        rig.runner.token_budget = 64
        rig.runner.run(until=lambda: request.status is Status.RUNNING and request.num_computed_tokens >= 30)
    rig.finish()
    assert all_stored(rig, request)


def test_what_it_computes_again_is_stored_piece_by_piece(async_scheduling: bool) -> None:
    """Its output as its prompt: it is not for its turn to wait that is computed in pieces of several tokens."""
    rig, (request, decodes) = make(2, async_scheduling=async_scheduling)
    until_computed(rig, request, 42)
    until_lost(rig, request)
    rig.runner.token_budget = 8
    rig.runner.run(until=lambda: request.status is Status.RUNNING)
    rig.runner.run(until=lambda: request.num_computed_tokens >= 36)
    assert decodes.status is Status.RUNNING
    rig.runner.run(6, until=lambda: len(ready(rig, request)) >= 8)
    rig.finish()


def test_behind_a_sliding_window_nothing_is_read_at_a_preemption(async_scheduling: bool) -> None:
    """Its chunks are stored as they fill; what lies behind the window holds other tokens by now."""
    rig, (stays, goes) = make(2, HYBRID, async_scheduling=async_scheduling)
    until_computed(rig, goes, 38)
    assert 0 in goes.block_ids[1]
    assert ready(rig, goes, 1)[-1] == 8
    assert preempt(rig, goes) == []
    rig.finish()
    assert all_stored(rig, stays, goes)


@pytest.mark.parametrize("device_cleared", [True, False])
def test_what_was_computed_on_top_of_old_weights_is_not_stored_at_a_preemption(
    device_cleared: bool, async_scheduling: bool
) -> None:
    rig, (request,) = make(1, async_scheduling=async_scheduling)
    until_computed(rig, request, 22)
    rig.runner.reset(device_cleared=device_cleared)
    until_computed(rig, request, 34)
    assert list(rig.scheduler._gathered) == [request.request_id], "the set-up has blocks noted since the reset"
    assert preempt(rig, request) == []
    if not device_cleared:
        rig.runner.reset()
    rig.finish()
    assert all_stored(rig, request), "what it computed anew is the new weights'"


# --- blocks that somebody else was to fill ----------------------------------------------------------------------


@pytest.mark.fault("B169")
@pytest.mark.parametrize("whose", ["its own", "another's"])
def test_after_blocks_were_not_filled_nothing_noted_before_is_stored(whose: str, async_scheduling: bool) -> None:
    rig, (other, request) = make(2, async_scheduling=async_scheduling)
    until_computed(rig, request, 22)
    bad = (request if whose == "its own" else other).block_ids[0][3]
    rig.scheduler.update_connector_output(WorkerOutput(invalid_block_ids=frozenset({bad})), now=rig.clock.now)
    assert preempt(rig, request) == []
    rig.finish()
    assert all_stored(rig, other, request)


@pytest.mark.fault("B169")
def test_after_blocks_were_not_filled_what_the_engine_counts_since_is_stored(async_scheduling: bool) -> None:
    rig, (request,) = make(1, async_scheduling=async_scheduling)
    until_computed(rig, request, 22)
    failed = WorkerOutput(invalid_block_ids=frozenset(request.block_ids[0][3:4]))
    rig.scheduler.update_connector_output(failed, now=rig.clock.now)
    until_computed(rig, request, 26)
    preempt(rig, request)
    rig.runner.run(until=lambda: request.status is Status.RUNNING)
    assert request.was_external == 24
    rig.finish()
    assert all_stored(rig, request)


@pytest.mark.fault("B169")
@pytest.mark.parametrize("gone", [False, True], ids=["lives", "has ended"])
def test_blocks_reported_as_not_filled_one_step_late_drop_what_their_preempted_request_stored(
    gone: bool, async_scheduling: bool
) -> None:
    """The life holds no block any more; the job that reads them knows whose they were. Who shares it stores again."""
    rig, (stays, shares, goes) = make(3, async_scheduling=async_scheduling)
    rig.hold(STORE)
    until_computed(rig, goes, 22)
    bad = goes.block_ids[0][3]
    (job,) = preempt(rig, shares, goes)
    assert bad in job.transfers[0].block_ids.tolist()
    if gone:
        rig.runner.abort(goes.request_id)
    late = WorkerOutput(invalid_block_ids=frozenset({bad}))
    rig.scheduler.update_connector_output(late, now=rig.clock.now)
    rig.unhold()
    rig.runner.run(until=lambda: job.job_id not in rig.scheduler._jobs)
    assert ready(rig, goes) == [0, 1], "what was read from them was published"
    assert rig.scheduler.get_stats()["store_jobs_failed"] == 1
    rig.finish()
    assert all_stored(rig, stays, shares)
    assert gone or all_stored(rig, goes)


# --- what may come after it -------------------------------------------------------------------------------------


def test_it_ends_before_the_step_that_tells_of_its_preemption(async_scheduling: bool) -> None:
    """A reset preempts between two steps, and the client may go away before the next one."""
    rig, (stays, goes) = make(2, async_scheduling=async_scheduling)
    until_computed(rig, goes, 22)
    rig.runner.preempt(goes.request_id)
    rig.runner.abort(goes.request_id)
    rig.runner.step()
    assert rig.runner.last_output.preempted_req_ids == {goes.request_id}
    assert at_once(rig) == []
    assert rig.lives() == [2], "nothing is left to wait for"
    rig.finish()
    assert all_stored(rig, stays)


@pytest.mark.parametrize("fate", ["is stored", "fails", "is lost"])
def test_it_ends_while_what_it_filled_is_being_stored(fate: str, async_scheduling: bool) -> None:
    rig, (stays, goes) = make(2, async_scheduling=async_scheduling, options={"store_deadline_s": 0.3})
    until_computed(rig, goes, 22)
    rig.hold(STORE)
    (job,) = preempt(rig, goes)
    run = set(job.transfers[0].block_ids.tolist())
    rig.runner.abort(goes.request_id)
    rig.runner.step()
    assert rig.lives() == [], "its chunks may still be published"
    assert set(rig.scheduler._jobs[job.job_id].fenced) == run, "its blocks are fenced, and no others"
    if fate == "fails":
        rig.device.fail_late([job.job_id])
    if fate == "is lost":
        rig.device.lose = lambda job_, rank: job_.job_id == job.job_id
    rig.unhold()
    rig.runner.run(until=lambda: rig.lives() == [2])
    assert ready(rig, goes) == ([0, 1, 2, 3, 4] if fate == "is stored" else [0, 1])
    rig.finish()
    assert all_stored(rig, stays)


def test_its_id_comes_back_while_what_it_filled_is_being_stored(async_scheduling: bool) -> None:
    rig, (stays, old) = make(2, async_scheduling=async_scheduling)
    until_computed(rig, old, 22)
    rig.hold(STORE)
    (job,) = preempt(rig, old)
    rig.runner.abort(old.request_id)
    new = rig.runner.add(range(700, 700 + PROMPT_TOKENS), 40, req_id=old.request_id)
    until_computed(rig, new, 22)
    assert rig.scheduler._jobs[job.job_id].lives[0].req is old
    second = preempt(rig, new)
    assert [len(j.transfers[0].slots) for j in second] == [3]
    rig.unhold()
    rig.finish()
    assert all_stored(rig, stays, new)
    assert ready(rig, old) == [0, 1, 2, 3, 4]
    assert sorted(rig.lives()) == [1, 2, 3]


def test_it_is_preempted_again_and_again_and_stores_each_chunk_once(async_scheduling: bool) -> None:
    rig, (request,) = make(1, async_scheduling=async_scheduling)
    stored = 0
    for tokens in range(14, 60, 6):
        until_computed(rig, request, tokens)
        stored += sum(len(job.transfers[0].slots) for job in preempt(rig, request))
        rig.runner.run(until=lambda: request.status is Status.RUNNING)
        assert request.local_tokens == 0
        assert request.external_tokens >= tokens - 4, "all of before is there"
    rig.finish()
    slots = [s for job in rig.device.stored_jobs for part in job.transfers for s in part.slots.tolist()]
    assert len(slots) == len(set(slots)) == (request.num_tokens - 1) // 4
    assert stored >= 8


@pytest.mark.parametrize("when", ["before its message", "after its message"])
def test_a_reset_lets_nothing_of_it_be_served(when: str, async_scheduling: bool) -> None:
    rig, (request,) = make(1, async_scheduling=async_scheduling)
    until_computed(rig, request, 22)
    rig.hold(STORE)
    if when == "before its message":
        rig.runner.preempt(request.request_id)
        rig.runner.reset()
        rig.runner.step()
        assert at_once(rig) == []
    else:
        (job,) = preempt(rig, request)
        rig.runner.reset()
        assert rig.scheduler._jobs[job.job_id].lives == ()
    rig.unhold()
    rig.runner.run(until=lambda: request.status is Status.RUNNING)
    assert request.was_external == 0
    rig.finish()
    assert all_stored(rig, request), "what it computed anew is the new weights'"


def test_what_could_not_be_stored_is_computed_and_stored_again(async_scheduling: bool) -> None:
    rig, (stays, goes) = make(2, async_scheduling=async_scheduling)
    until_computed(rig, goes, 22)
    rig.device.fail = only(STORE)
    (job,) = preempt(rig, goes)
    rig.runner.run(until=lambda: job.job_id not in rig.scheduler._jobs)
    rig.device.fail = lambda job, rank: False
    assert rig.scheduler.get_stats()["stores_failed"] == 3
    assert ready(rig, goes) == [0, 1]
    rig.runner.run(until=lambda: goes.status is Status.RUNNING)
    assert goes.was_external == 8
    rig.runner.run(until=lambda: not rig.scheduler._jobs)
    assert ready(rig, goes)[:5] == [0, 1, 2, 3, 4], "offered again as soon as they are computed again"
    rig.finish()
    assert all_stored(rig, stays, goes)


def test_what_finds_no_room_is_offered_again_once_it_is_back(async_scheduling: bool) -> None:
    rig = make_rig(manager=DictManager(), async_scheduling=async_scheduling, options=GATHER)
    request = rig.runner.add(range(PROMPT_TOKENS), 40)
    until_computed(rig, request, 22)
    rig.runner.run(until=lambda: not rig.scheduler._jobs)
    manager = rig.manager.inner
    assert isinstance(manager, DictManager)
    manager.room = False
    assert preempt(rig, request) == []
    manager.room = True
    rig.runner.run(until=lambda: request.status is Status.RUNNING)
    rig.runner.run(until=lambda: not rig.scheduler._jobs)
    assert all(manager.table[0, block_hash].ready for block_hash in request.block_hashes[:5])
    rig.finish()
