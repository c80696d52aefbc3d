"""The request runner and the device double by themselves: an engine without any offloading.

In: a scheduler half that offloads nothing, or one that breaks the contract on purpose. Out: engines that
finish, and violations that are seen. Never: the real scheduler half.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from orlop.core import Geometry, GroupTransfer, KVGroup, OffloadingConnectorMetadata, TransferJob, TransferKind
from orlop.testing.request_runner import RequestRunner, Status

FULL = Geometry((KVGroup(0, 4),), 4, 1)
HYBRID = Geometry((KVGroup(0, 4), KVGroup(1, 8, sliding_window=16)), 4, 1)


class NoOffloading:
    """A scheduler half that never has anything to say; a test sets ``metas`` to make it say wrong things."""

    def __init__(self) -> None:
        self.metas: list[OffloadingConnectorMetadata] = []
        self.finished: list[str] = []
        self.reports: list[Any] = []
        self._req_status: dict[str, Any] = {}
        self._jobs: dict[int, Any] = {}
        self._block_id_to_pending_jobs: dict[int, Any] = {}
        self._chunks_being_loaded: set[bytes] = set()

    def on_new_request(self, request: Any, *, now: float) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int, *, now: float) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int, *, now: float) -> None: ...

    def build_connector_meta(self, scheduler_output: Any, *, now: float) -> OffloadingConnectorMetadata:
        return self.metas.pop(0) if self.metas else OffloadingConnectorMetadata()

    def update_connector_output(self, output: Any, *, now: float) -> None:
        self.reports += output.reports

    def request_finished(self, request: Any, *, now: float) -> tuple[bool, None]:
        self.finished.append(request.request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        return False

    def reset_cache(self, generation: bytes, *, now: float, device_cleared: bool = True) -> None: ...

    def take_events(self) -> tuple[()]:
        return ()

    def get_stats(self) -> dict[str, float]:
        return {}

    def check(self) -> None: ...


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def async_scheduling(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def store(job_id: int, block: int, slot: int = 0, **flags: bool) -> TransferJob:
    part = GroupTransfer(0, np.array([block]), np.array([slot]), np.array([0]))
    return TransferJob(job_id, "x", TransferKind.STORE, (part,), **flags)


@pytest.mark.parametrize("geometry", [FULL, HYBRID], ids=["full", "hybrid"])
def test_requests_run_to_their_end_and_give_all_blocks_back(geometry: Geometry, async_scheduling: bool) -> None:
    half = NoOffloading()
    runner = RequestRunner(half, geometry, async_scheduling=async_scheduling, token_budget=10)
    requests = [runner.add(range(n), max_tokens=5) for n in (1, 4, 17, 32, 33)]
    runner.run()
    runner.check_drained()
    assert [len(r.output_token_ids) for r in requests] == [5] * 5
    assert sorted(half.finished) == sorted(r.request_id for r in requests)


def test_preemption_abort_and_tight_memory_change_no_token(async_scheduling: bool) -> None:
    roomy = RequestRunner(NoOffloading(), FULL)
    wanted = [roomy.add(range(i, i + 12), max_tokens=20) for i in range(3)]
    roomy.run()
    runner = RequestRunner(NoOffloading(), FULL, blocks=14, async_scheduling=async_scheduling)
    requests = [runner.add(range(i, i + 12), max_tokens=20) for i in range(3)]
    victim = runner.add(range(50, 60), max_tokens=20)
    runner.run(until=lambda: requests[0].num_computed_tokens > 20)
    runner.abort(victim.request_id)
    runner.preempt("r0")
    runner.run()
    runner.check_drained()
    assert victim.status is Status.ABORTED
    assert [r.output_token_ids for r in requests] == [r.output_token_ids for r in wanted]
    assert max(r.epoch for r in requests) > 0


def test_the_prefix_cache_of_the_device_is_used(async_scheduling: bool) -> None:
    runner = RequestRunner(NoOffloading(), HYBRID, async_scheduling=async_scheduling)
    runner.add(range(40))
    runner.run()
    again = runner.add(range(40))
    runner.run(until=lambda: again.status is Status.RUNNING or again.ended)
    assert again.local_tokens == 32
    runner.run()
    runner.check_drained()


def test_async_tokens_in_flight_are_told_and_come_late() -> None:
    runner = RequestRunner(NoOffloading(), FULL, async_scheduling=True)
    request = runner.add(range(8), max_tokens=4)
    runner.step()
    assert (request.num_computed_tokens, request.num_in_flight_tokens, request.num_tokens) == (8, 8, 8)
    runner.step()
    assert (request.num_computed_tokens, request.num_in_flight_tokens, request.num_tokens) == (9, 1, 9)
    runner.run()


def test_overwriting_a_block_that_a_store_has_not_read_is_seen() -> None:
    half = NoOffloading()
    runner = RequestRunner(half, FULL, blocks=4)
    runner.device.crank_chance = 0.0
    half.metas = [OffloadingConnectorMetadata(store_jobs=(store(1, 1, after_compute=True),))]
    runner.add(range(8))
    runner.step()
    runner.add(range(100, 111))
    with pytest.raises(AssertionError, match="before store 1"):
        runner.run()


def test_a_flush_reads_the_block_in_time() -> None:
    half = NoOffloading()
    runner = RequestRunner(half, FULL, blocks=4)
    runner.device.crank_chance = 0.0
    half.metas = [
        OffloadingConnectorMetadata(store_jobs=(store(1, 1, after_compute=True),)),
        OffloadingConnectorMetadata(jobs_to_flush=(1,)),
    ]
    first = runner.add(range(8))
    runner.step()
    runner.add(range(100, 111))
    runner.run()
    runner.device.check_chunk(0, first.block_hashes[0], runner.device.memory.chunk(0), "the store")
    with pytest.raises(AssertionError, match="other tokens"):
        runner.device.check_chunk(0, first.block_hashes[1], runner.device.memory.chunk(0), "the store")


def test_two_jobs_on_one_slot_are_seen() -> None:
    half = NoOffloading()
    runner = RequestRunner(half, FULL)
    runner.device.hold = lambda job, rank: True
    half.metas = [OffloadingConnectorMetadata(store_jobs=(store(1, 1, after_compute=True),)) for _ in range(2)]
    half.metas[1] = OffloadingConnectorMetadata(store_jobs=(store(2, 2, after_compute=True),))
    runner.add(range(8), max_tokens=3)
    with pytest.raises(AssertionError, match="still uses"):
        runner.run()


def test_each_rank_reports_once_and_a_repeat_comes_a_step_later() -> None:
    half = NoOffloading()
    runner = RequestRunner(half, FULL, ranks=2)
    runner.device.repeat = lambda job, rank: rank == 1
    half.metas = [OffloadingConnectorMetadata(store_jobs=(store(1, 1, after_compute=True),))]
    runner.add(range(8), max_tokens=3)
    runner.run()
    assert sorted((r.job_id, r.rank) for r in half.reports) == [(1, 0), (1, 1), (1, 1)]
