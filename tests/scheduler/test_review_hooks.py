"""Hooks called in ways that an engine may, and that the request runner does not.

In: the real scheduler half over a dictionary, its hooks called one by one. Out: jobs, fences, answers. Never: a device.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from orlop.core import FIRST_GENERATION, JobReport, OffloadingConnectorMetadata, TransferJob, WorkerOutput
from orlop.host.tier import HostTier
from orlop.scheduler.scheduler import OffloadingConnectorScheduler, SchedulerOptions
from orlop.testing.doubles import DictManager
from orlop.testing.rig import FULL, HYBRID, PAIRS, plain_namespace
from orlop.tiering.manager import TieringManager, TieringOptions

Tables = tuple[list[int], ...]


@dataclass
class Said:
    """A request as far as the scheduler half reads it."""

    request_id: str = "r"
    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_prompt_tokens: int = 0
    cache_salt: str | None = None
    block_hashes: list[bytes] = field(default_factory=list)

    def key(self, hashes: int) -> Said:
        self.block_hashes += [bytes([len(self.block_hashes) + i]) * 16 for i in range(hashes - len(self.block_hashes))]
        return self


def make(geometry: Any = FULL, **options: Any) -> tuple[OffloadingConnectorScheduler, DictManager]:
    manager = DictManager()
    return OffloadingConnectorScheduler(geometry, manager, SchedulerOptions(**options)), manager


def blocks(*ids: list[int]) -> Any:
    return SimpleNamespace(get_block_ids=lambda: ids)


def step(
    scheduler: OffloadingConnectorScheduler,
    new: dict[str, tuple[Tables, int, int]] | None = None,
    more: dict[str, tuple[Tables | None, int, int]] | None = None,
    preempted: Collection[str] = (),
    resumed: Collection[str] = (),
) -> OffloadingConnectorMetadata:
    """One step; requests by id with their blocks, computed tokens, and tokens scheduled."""
    new, more = new or {}, more or {}
    tokens = {r: n for r, (_, _, n) in [*new.items(), *more.items()]}
    output = SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=r, block_ids=ids, num_computed_tokens=computed)
            for r, (ids, computed, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(more),
            resumed_req_ids=set(resumed),
            new_block_ids=[ids for ids, _, _ in more.values()],
            num_computed_tokens=[computed for _, computed, _ in more.values()],
        ),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        preempted_req_ids=set(preempted),
    )
    return scheduler.build_connector_meta(output, now=0.0)


def report(scheduler: OffloadingConnectorScheduler, *jobs: TransferJob) -> None:
    scheduler.update_connector_output(WorkerOutput(tuple(JobReport(j.job_id, 0, True) for j in jobs)), now=0.0)


def stored_blocks(meta: OffloadingConnectorMetadata, group: int) -> list[int]:
    return [b for job in meta.store_jobs for t in job.transfers if t.group == group for b in t.block_ids.tolist()]


def stored(scheduler: OffloadingConnectorScheduler, request: Said, tables: Tables) -> None:
    """The whole of ``request`` is in the manager, and the request is gone."""
    scheduler.on_new_request(request, now=0.0)
    meta = step(scheduler, {request.request_id: (tables, 0, request.num_tokens)})
    report(scheduler, *meta.store_jobs)
    scheduler.request_finished(request, now=0.0)
    report(scheduler, *step(scheduler).store_jobs)
    assert not scheduler.has_pending_push_work()


def test_blocks_behind_the_window_of_a_later_step_in_flight_are_not_stored() -> None:
    """Two steps are in flight at the abort; the second one has recycled what lay behind the window of the first."""
    scheduler, manager = make(HYBRID)
    request = Said(num_tokens=36).key(8)
    scheduler.on_new_request(request, now=0.0)
    manager.room = False
    step(scheduler, {"r": (([*range(1, 10)], [*range(21, 30)]), 0, 34)})
    step(scheduler, more={"r": (None, 34, 1)})
    # Tokens 0 .. 27 lie behind the window of this step: the last of their blocks, 27, is handed to somebody else.
    step(scheduler, more={"r": (None, 35, 1)}, new={"x": (([40], [27]), 0, 4)})
    request.num_computed_tokens, request.num_in_flight_tokens = 36, 2
    scheduler.request_finished(request, now=0.0)
    manager.room = True
    meta = step(scheduler)
    assert stored_blocks(meta, 0) == [*range(1, 9)]
    assert stored_blocks(meta, 1) == [28]


@pytest.mark.parametrize("geometry", [FULL, PAIRS], ids=["full", "pairs"])
@pytest.mark.parametrize("taken", [1, 3, 5, 7, 10])
def test_every_token_that_the_engine_counts_as_loaded_is_loaded(geometry: Any, taken: int) -> None:
    """The engine may take fewer tokens than answered, and in no whole number of blocks."""
    scheduler, _ = make(geometry)
    stored(scheduler, Said("first", num_tokens=17).key(4), ([1, 2, 3, 4, 5],))
    request = Said(num_tokens=17).key(4)
    assert scheduler.get_num_new_matched_tokens(request, 0, now=0.0) == (16, True)
    scheduler.update_state_after_alloc(request, blocks([11, 12, 13, 14, 15]), taken, now=0.0)
    (job,) = step(scheduler).load_jobs
    assert not job.doomed
    assert job.transfers[0].block_ids.tolist() == [11, 12, 13, 14][: -(-taken // 4)]


def test_blocks_handed_to_a_request_that_no_hook_has_named_are_fenced() -> None:
    scheduler, _ = make()
    request = Said(num_tokens=9).key(2)
    scheduler.on_new_request(request, now=0.0)
    (job,) = step(scheduler, {"r": (([1, 2, 3],), 0, 9)}).store_jobs
    scheduler.request_finished(request, now=0.0)
    assert step(scheduler, {"unknown": (([1],), 0, 4)}).jobs_to_flush == (job.job_id,)


def test_blocks_handed_on_to_a_running_request_that_no_hook_has_named_are_fenced() -> None:
    scheduler, _ = make()
    request = Said(num_tokens=9).key(2)
    scheduler.on_new_request(request, now=0.0)
    (job,) = step(scheduler, {"r": (([1, 2, 3],), 0, 9)}).store_jobs
    scheduler.request_finished(request, now=0.0)
    assert step(scheduler, more={"unknown": (([2],), 4, 4)}).jobs_to_flush == (job.job_id,)


def test_tokens_that_the_engine_takes_back_do_not_fill_a_chunk() -> None:
    """Draft tokens were scheduled and rejected; when the chunk's key comes, its last token is not computed yet."""
    scheduler, _ = make()
    request = Said(num_tokens=2, num_prompt_tokens=2)
    scheduler.on_new_request(request, now=0.0)
    assert not step(scheduler, {"r": (([1, 2],), 0, 4)}).store_jobs
    request.num_computed_tokens, request.num_tokens = 3, 4
    request.key(1)
    assert not step(scheduler).store_jobs, "three tokens are computed and this step computes none"
    (job,) = step(scheduler, more={"r": (([3],), 3, 6)}).store_jobs
    assert job.transfers[0].block_ids.tolist() == [1]


def test_a_reset_between_an_allocation_and_its_step_fails_the_load() -> None:
    scheduler, _ = make()
    stored(scheduler, Said("first", num_tokens=9).key(2), ([1, 2, 3],))
    request = Said(num_tokens=9).key(2)
    assert scheduler.get_num_new_matched_tokens(request, 0, now=0.0) == (8, True)
    scheduler.update_state_after_alloc(request, blocks([11, 12, 13]), 8, now=0.0)
    scheduler.reset_cache(bytes(16), now=0.0)
    (job,) = step(scheduler).load_jobs
    assert job.doomed, "the workers do not know the job yet, so loads_to_fail does not reach it"


def test_a_load_that_was_never_answered_is_doomed_and_not_an_error() -> None:
    tiering = TieringManager(HostTier(8), [], plain_namespace, FIRST_GENERATION, TieringOptions((4096,)))
    scheduler = OffloadingConnectorScheduler(FULL, tiering)
    request = Said(num_tokens=40)
    request.skip_reading_prefix_cache = True  # type: ignore[attr-defined]
    assert scheduler.get_num_new_matched_tokens(request, 16, now=0.0) == (0, False)
    scheduler.update_state_after_alloc(request, blocks(list(range(1, 9))), 8, now=0.0)
    (job,) = step(scheduler).load_jobs
    assert job.doomed
    assert scheduler.get_stats()["surprises"] == 1


def test_a_salt_that_no_encoding_can_write_is_a_salt_all_the_same() -> None:
    scheduler, _ = make()
    scheduler.on_new_request(Said(cache_salt="\ud800"), now=0.0)
    assert scheduler.get_num_new_matched_tokens(Said(num_tokens=9).key(2), 0, now=0.0) == (0, False)


# --- preempted while it gathers ---------------------------------------------------------------------------------------


def decoding(prompt: int = 3, **options: Any) -> tuple[OffloadingConnectorScheduler, DictManager, Said]:
    """A request that has computed ``prompt`` tokens of a first block, has said one, and gathers from now on."""
    scheduler, manager = make(**{"gather_steps": 1000, **options})
    request = Said(num_tokens=prompt, num_prompt_tokens=prompt)
    scheduler.on_new_request(request, now=0.0)
    step(scheduler, {"r": (([1],), 0, prompt)})
    says(request, computed=prompt, known=prompt + 1)
    return scheduler, manager, request


def says(request: Said, *, computed: int, known: int) -> None:
    request.num_computed_tokens, request.num_tokens = computed, known
    request.key(known // 4)


@pytest.mark.parametrize(("known", "stored"), [(8, [1]), (9, [1, 2]), (12, [1, 2])])
def test_draft_tokens_that_were_rejected_since_its_last_block_are_not_stored_at_a_preemption(
    known: int, stored: list[int]
) -> None:
    """The engine counted drafts as computed when it gave the last block; the token that it keeps came instead of one.

    Of what is known, the KV of the last token has never been computed, whatever stands in its place.
    """
    scheduler, _, request = decoding()
    step(scheduler, more={"r": (([2],), 3, 1)})
    step(scheduler, more={"r": (([3, 4],), 12, 1)})
    says(request, computed=0, known=known)
    meta = step(scheduler, preempted={"r"})
    assert stored_blocks(meta, 0) == stored
    assert not any(job.after_compute for job in meta.store_jobs)


@pytest.mark.parametrize("computed", [4, 6, 7, 8])
def test_tokens_that_the_engine_takes_back_with_a_later_block_are_not_stored_at_a_preemption(computed: int) -> None:
    scheduler, _, request = decoding()
    step(scheduler, more={"r": (([2, 3],), 8, 1)})
    step(scheduler, more={"r": (([4],), computed, 1)})
    says(request, computed=0, known=13)
    assert stored_blocks(step(scheduler, preempted={"r"}), 0) == [1, 2][: computed // 4]


def test_a_request_that_is_preempted_before_it_has_said_anything_stores_nothing() -> None:
    scheduler, _ = make(gather_steps=1000)
    scheduler.on_new_request(Said(num_tokens=0), now=0.0)
    assert not step(scheduler, preempted={"r", "nobody"}).store_jobs
    assert not scheduler._live["r"].groups[0].block_ids
    scheduler.check()


def test_what_has_no_key_yet_at_a_preemption_is_not_stored_and_not_lost() -> None:
    """Keys come late with asynchronous scheduling; what had none is computed again, and stored then."""
    scheduler, manager, request = decoding()
    step(scheduler, more={"r": (([2],), 4, 1)})
    step(scheduler, more={"r": (([3],), 8, 1)})
    request.num_computed_tokens, request.num_tokens = 0, 9
    request.key(1)
    meta = step(scheduler, preempted={"r"})
    assert stored_blocks(meta, 0) == [1]
    report(scheduler, *meta.store_jobs)
    request.key(2)
    assert scheduler.get_num_new_matched_tokens(request, 0, now=0.0) == (4, True)
    scheduler.update_state_after_alloc(request, blocks([11, 12, 13]), 4, now=0.0)
    report(scheduler, *step(scheduler).load_jobs)
    scheduler.update_state_after_alloc(request, blocks([11, 12, 13]), 0, now=0.0)
    meta = step(scheduler, more={"r": (([11, 12, 13],), 4, 5)}, resumed={"r"})
    assert stored_blocks(meta, 0) == [12]
    assert len(manager.table) == 2


def test_a_preemption_orders_its_reads_before_blocks_that_the_same_step_hands_to_a_running_request() -> None:
    scheduler, _, request = decoding()
    other = Said("s", num_tokens=5, num_prompt_tokens=5, block_hashes=[b"another's" * 2])
    scheduler.on_new_request(other, now=0.0)
    report(scheduler, *step(scheduler, {"s": (([21, 22],), 0, 5)}).store_jobs)
    step(scheduler, more={"r": (([2],), 4, 1)})
    step(scheduler, more={"r": (([3],), 8, 1)})
    says(request, computed=0, known=10)
    assert not scheduler._fences
    meta = step(scheduler, more={"s": (([2],), 8, 1)}, preempted={"r"})
    (job,) = meta.store_jobs
    assert not job.after_compute
    assert job.transfers[0].block_ids.tolist() == [1, 2]
    assert meta.jobs_to_flush == (job.job_id,)
    scheduler.check()


def test_one_that_is_back_in_the_step_that_tells_of_its_preemption_stores_what_it_computes_now() -> None:
    """A reset of the device's prefix cache preempts between two steps; by its step it has blocks that hold nothing."""
    scheduler, _, request = decoding()
    step(scheduler, more={"r": (([2],), 4, 1)})
    step(scheduler, more={"r": (([3],), 8, 1)})
    says(request, computed=0, known=10)
    assert scheduler.get_num_new_matched_tokens(request, 0, now=0.0) == (0, False)
    scheduler.update_state_after_alloc(request, blocks([2, 4, 5]), 0, now=0.0)
    meta = step(scheduler, more={"r": (([2, 4, 5],), 0, 10)}, preempted={"r"}, resumed={"r"})
    (job,) = meta.store_jobs
    assert job.after_compute
    assert job.transfers[0].block_ids.tolist() == [2, 4]
    scheduler.check()


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_a_step_in_which_not_all_decode_tells_prompts_from_those_who_gather(tokens: int) -> None:
    """One with nothing scheduled beside one with two tokens are as many tokens as requests, and not all one each."""
    scheduler, _, request = decoding()
    prompt = Said("p", num_tokens=40, num_prompt_tokens=40).key(10)
    scheduler.on_new_request(prompt, now=0.0)
    report(scheduler, *step(scheduler, {"p": (([31, 32],), 0, 7)}).store_jobs)
    says(request, computed=4, known=5)
    prompt.num_computed_tokens = 7
    meta = step(scheduler, more={"r": (([2],), 4, tokens), "p": (([33],), 7, 2)})
    assert stored_blocks(meta, 0) == [32], "the prompt does not wait"
    assert "r" in list(scheduler._gathered) or tokens == 2
    scheduler.check()
