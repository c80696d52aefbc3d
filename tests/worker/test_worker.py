"""The worker half: every job ends once, fences hold, one job's trouble stays its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from threading import Event, Thread, current_thread
from typing import Any

import numpy as np
import pytest

from orlop.core import (
    JobReport,
    KVGroup,
    OffloadingConnectorMetadata,
    RegionLayout,
    TransferJob,
    TransferKind,
    WorkerOutput,
)
from orlop.errors import ConfigError
from orlop.testing.copy_backends import PlainMemory, chunk
from orlop.worker.base import CopyBackend
from orlop.worker.cpu import CpuCopyBackend
from orlop.worker.worker import CopyWorker, OffloadingConnectorWorker, OutputMerger

WAIT_S = 60.0
"""Long enough that only a fault reaches it."""

GROUP = KVGroup(0, 16, layers=("a", "b"))


class CrankedBackend(CopyBackend):
    """The real CPU backend behind a gate per job: a held job copies nothing until the test opens its gate."""

    def __init__(self, real: CopyBackend) -> None:
        self.real = real
        self.gates: dict[int, Event] = {}
        self.entered: dict[int, Event] = {}
        self.errors: dict[int, BaseException] = {}
        self.order: list[int] = []
        self.forwards = 0
        self.tokens: dict[int, Any] = {}
        self.last_token: Any = None

    def hold(self, *job_ids: int) -> None:
        for job_id in job_ids:
            self.gates[job_id] = Event()
            self.entered[job_id] = Event()

    def let(self, *job_ids: int) -> None:
        for job_id in job_ids:
            self.gates[job_id].set()

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        self.real.register(kv_caches)

    def forget(self) -> None:
        self.real.forget()

    def compute_done(self) -> Any:
        return self.forwards

    def wait_for(self, token: Any) -> None:
        self.last_token = token

    def copy(self, job: TransferJob) -> int:
        self.tokens[job.job_id] = self.last_token
        if job.job_id in self.gates:
            self.entered[job.job_id].set()
            assert self.gates[job.job_id].wait(WAIT_S)
        self.order.append(job.job_id)
        if job.job_id in self.errors:
            raise self.errors[job.job_id]
        return self.real.copy(job)


class Bench:
    """One rank: tensors of 40 blocks, slots for 16 chunks of 2 blocks, the real worker half."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.tensors = self.new_tensors(rng)
        self.memory = PlainMemory(RegionLayout(16, 2, ((200,),)), rng)
        self.backend = CrankedBackend(CpuCopyBackend([GROUP], self.memory, 0))
        self.backend.register(self.tensors)
        self.flushing = Event()
        self.copies = CopyWorker(self.backend, clock=self.clock)
        self.half = OffloadingConnectorWorker(self.copies, self.backend, rank=0)
        self.reports: list[JobReport] = []

    def clock(self) -> float:
        """Off the copy threads only a flush that must wait reads it, under the worker's lock."""
        if not current_thread().name.startswith("orlop-"):
            self.flushing.set()
        return time.perf_counter()

    @staticmethod
    def new_tensors(rng: np.random.Generator) -> dict[str, Any]:
        return {k: rng.integers(0, 256, (40, 100), np.uint8) for k in "ab"}

    def step(
        self, loads: tuple[TransferJob, ...] = (), stores: tuple[TransferJob, ...] = (), flush: tuple[int, ...] = ()
    ) -> WorkerOutput:
        """One engine step without anything to compute."""
        meta = OffloadingConnectorMetadata(loads, stores, flush)
        self.half.handle_preemptions(meta)
        self.half.start_load_kv(meta)
        self.backend.forwards += 1
        self.half.wait_for_save(meta)
        return self.collect()

    def collect(self) -> WorkerOutput:
        output = self.half.get_finished()
        self.reports += output.reports
        return output

    def collect_next(self) -> WorkerOutput:
        """Wait until any job has ended, then collect."""
        with self.copies._ended:
            assert self.copies._ended.wait_for(lambda: self.copies._finished, WAIT_S)
        return self.collect()

    def settle(self) -> WorkerOutput:
        """Wait for every open job, then collect."""
        assert self.copies.drain(WAIT_S)
        return self.collect()

    def slot(self, slot: int) -> bytes:
        return self.memory.slots[slot, :400].tobytes()

    def blocks(self, *block_ids: int) -> bytes:
        return b"".join(self.tensors[k][b].tobytes() for b in block_ids for k in "ab")


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.backend.let(*bench.backend.gates)
    bench.half.shutdown(WAIT_S)
    assert bench.copies.let_go


def store(job_id: int, blocks: tuple[int, int], slot: int, after_compute: bool = False) -> TransferJob:
    return TransferJob(job_id, f"r{job_id}", TransferKind.STORE, (chunk(0, blocks, slot),), after_compute)


def load(job_id: int, blocks: tuple[int, int], slot: int, req_id: str | None = None, **more: Any) -> TransferJob:
    return TransferJob(job_id, req_id or f"r{job_id}", TransferKind.LOAD, (chunk(0, blocks, slot),), **more)


def test_a_store_and_a_load_come_back_as_reports(bench: Bench) -> None:
    bench.step(stores=(store(1, (7, 3), 5),))
    expected = bench.blocks(7, 3)
    bench.settle()
    assert bench.slot(5) == expected
    bench.step(loads=(load(2, (0, 9), 5),))
    output = bench.settle()
    assert bench.blocks(0, 9) == expected
    assert [(r.job_id, r.rank, r.ok, r.nbytes) for r in bench.reports] == [(1, 0, True, 400), (2, 0, True, 400)]
    assert output.finished_recving == {"r2"}
    assert not output.failed_recving
    assert not output.failed_block_ids


@pytest.mark.fault("B018")
def test_a_preempted_request_s_store_has_read_its_blocks_before_they_are_overwritten(bench: Bench) -> None:
    bench.backend.hold(1, 2)
    bench.step(stores=(store(1, (10, 11), 0), store(2, (12, 13), 1)))
    expected = bench.blocks(12, 13)
    bench.backend.entered[1].wait(WAIT_S)
    returned = Event()

    def next_step() -> None:
        bench.half.handle_preemptions(OffloadingConnectorMetadata(jobs_to_flush=(2,)))
        bench.tensors["a"][12:14] = 0
        returned.set()

    engine = Thread(target=next_step)
    engine.start()
    assert bench.flushing.wait(WAIT_S)
    bench.backend.let(1)
    assert bench.backend.entered[2].wait(WAIT_S)
    assert not returned.is_set()
    bench.backend.let(2)
    assert returned.wait(WAIT_S)
    engine.join(WAIT_S)
    bench.settle()
    assert bench.slot(1) == expected
    assert bench.half.fence_waits == 1
    assert bench.half.fence_wait_s > 0
    assert sum(report.fence_waits for report in bench.reports) == 1, "said with one report, and never again"
    assert sum(report.fence_wait_s for report in bench.reports) == bench.half.fence_wait_s
    bench.step(stores=(store(3, (14, 15), 2),))
    bench.settle()
    assert bench.reports[-1].fence_waits == 0


@pytest.mark.fault("B018")
def test_a_store_that_comes_with_its_own_flush_reads_before_this_step_writes(bench: Bench) -> None:
    expected = bench.blocks(20, 21)
    job = store(1, (20, 21), 3, after_compute=True)
    meta = OffloadingConnectorMetadata(store_jobs=(job,), jobs_to_flush=(1,))
    bench.half.handle_preemptions(meta)
    bench.tensors["a"][20:22] = 0
    bench.half.start_load_kv(meta)
    bench.half.wait_for_save(meta)
    bench.settle()
    assert bench.slot(3) == expected
    assert bench.backend.order == [1]


def test_a_flush_waits_for_its_own_stores_only_and_brings_them_forward(bench: Bench) -> None:
    bench.backend.hold(1, 2, 3)
    bench.step(stores=tuple(store(i, (2 * i, 2 * i + 1), i) for i in (1, 2, 3, 4)))
    assert bench.backend.entered[1].wait(WAIT_S)
    flushed = Thread(target=bench.half.handle_preemptions, args=(OffloadingConnectorMetadata(jobs_to_flush=(4, 99)),))
    flushed.start()
    assert bench.flushing.wait(WAIT_S)
    bench.backend.let(1)
    flushed.join(WAIT_S)
    assert not flushed.is_alive()
    assert bench.backend.order == [1, 4]
    bench.backend.let(2, 3)
    bench.settle()
    assert bench.backend.order == [1, 4, 2, 3]


def test_unknown_and_finished_ids_are_done_and_cost_no_wait(bench: Bench) -> None:
    bench.step(stores=(store(1, (1, 2), 0),))
    bench.settle()
    bench.backend.hold(2)
    bench.step(loads=(load(2, (3, 4), 0),), flush=(1, 77))
    bench.step(flush=(2,))
    assert bench.half.fence_waits == 0


@pytest.mark.fault("B021")
@pytest.mark.fault("B030")
def test_stores_of_this_step_s_compute_are_submitted_after_it_and_ordered_behind_it(bench: Bench) -> None:
    late, early = store(1, (1, 2), 0, after_compute=True), store(2, (3, 4), 1)
    meta = OffloadingConnectorMetadata(store_jobs=(late, early))
    bench.half.handle_preemptions(meta)
    assert bench.copies.drain(WAIT_S)
    assert bench.backend.order == [2]
    bench.tensors["a"][1:3] = 77
    bench.backend.forwards += 1
    bench.half.wait_for_save(meta)
    bench.settle()
    assert bench.slot(0) == bench.blocks(1, 2)
    assert bench.backend.tokens == {2: 0, 1: 1}


def test_a_step_without_wait_for_save_hands_its_stores_to_the_next(bench: Bench) -> None:
    bench.half.handle_preemptions(OffloadingConnectorMetadata(store_jobs=(store(1, (1, 2), 0, after_compute=True),)))
    expected = bench.blocks(1, 2)
    bench.half.handle_preemptions(OffloadingConnectorMetadata(jobs_to_flush=(1,)))
    bench.tensors["a"][1:3] = 0
    bench.settle()
    assert bench.slot(0) == expected


def test_a_job_seen_again_in_a_later_message_runs_once(bench: Bench) -> None:
    jobs = (store(1, (1, 2), 0), store(2, (3, 4), 1, after_compute=True))
    for _ in range(3):
        bench.step(loads=(load(3, (5, 6), 2),), stores=jobs)
    bench.settle()
    assert sorted(bench.backend.order) == [1, 2, 3]
    assert sorted(r.job_id for r in bench.reports) == [1, 2, 3]


def test_loads_do_not_queue_behind_stores(bench: Bench) -> None:
    bench.step(stores=(store(1, (1, 2), 0),))
    bench.settle()
    bench.backend.hold(2)
    bench.step(stores=(store(2, (3, 4), 1), store(3, (5, 6), 2)), loads=(load(4, (7, 8), 0),))
    output = bench.collect_next()
    assert output.finished_recving == {"r4"}
    assert bench.blocks(7, 8) == bench.slot(0)


@pytest.mark.fault("B149")
@pytest.mark.parametrize("error", [OSError("device gone"), MemoryError(), SystemExit(1)], ids=lambda e: str(type(e)))
def test_each_job_fails_alone_and_says_which_blocks_it_did_not_fill(
    bench: Bench, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    bench.step(stores=tuple(store(i, (2 * i, 2 * i + 1), i) for i in range(4)))
    bench.settle()
    bench.backend.errors = {10: error, 12: error, 20: error}
    with caplog.at_level(logging.WARNING):
        bench.step(loads=tuple(load(10 + i, (20 + 2 * i, 21 + 2 * i), i) for i in range(4)))
        output = bench.settle()
        bench.step(stores=(store(20, (0, 1), 9), store(21, (2, 3), 10)))
        bench.settle()
    assert output.finished_recving == {"r10", "r11", "r12", "r13"}
    assert output.failed_recving == {"r10", "r12"}
    assert output.failed_block_ids == {20, 21, 24, 25}
    assert {r.job_id: r.ok for r in bench.reports if r.job_id >= 10} == {
        10: False, 11: True, 12: False, 13: True, 20: False, 21: True,
    }  # fmt: skip
    assert bench.half.failed_jobs == 3
    assert len(caplog.records) == 2, "once per kind: one for loads, one for stores"


@pytest.mark.fault("B149")
def test_a_refused_load_fails_and_the_next_one_runs(bench: Bench) -> None:
    bench.step(loads=(load(1, (39, 40), 0), load(2, (1, 2), 16), load(3, (3, 4), 1)))
    output = bench.settle()
    assert output.failed_recving == {"r1", "r2"}
    assert output.failed_block_ids == {39, 40, 1, 2}
    assert output.finished_recving == {"r1", "r2", "r3"}


def test_a_doomed_load_is_reported_failed_though_its_copy_succeeds(bench: Bench) -> None:
    bench.step(loads=(load(1, (3, 4), 0, doomed=True),))
    output = bench.settle()
    assert output.finished_recving == output.failed_recving == {"r1"}
    assert output.failed_block_ids == {3, 4}
    assert [r.ok for r in bench.reports] == [False]


def test_a_load_that_a_reset_outdated_is_reported_failed_once_its_copy_has_ended(bench: Bench) -> None:
    bench.backend.hold(1)
    bench.step(loads=(load(1, (3, 4), 0), load(2, (5, 6), 1)))
    meta = OffloadingConnectorMetadata(loads_to_fail=(1, 99))
    bench.half.handle_preemptions(meta)
    assert not bench.collect(), "its blocks are still being written"
    bench.backend.let(1)
    output = bench.settle()
    assert output.finished_recving == {"r1", "r2"}
    assert output.failed_recving == {"r1"}
    assert output.failed_block_ids == {3, 4}
    bench.half.handle_preemptions(OffloadingConnectorMetadata(loads_to_fail=(2,)))
    assert not bench.collect(), "reported already"


def test_a_request_with_two_loads_is_finished_when_neither_writes_any_more(bench: Bench) -> None:
    bench.backend.hold(2)
    bench.backend.errors = {1: OSError("gone")}
    bench.step(loads=(load(1, (3, 4), 0, "r"), load(2, (5, 6), 1, "r")))
    assert bench.backend.entered[2].wait(WAIT_S)
    output = bench.collect()
    assert [r.job_id for r in bench.reports] == [1]
    assert not output.finished_recving
    bench.backend.let(2)
    output = bench.settle()
    assert output.finished_recving == output.failed_recving == {"r"}
    assert output.failed_block_ids == {3, 4}
    assert not bench.collect()


@pytest.mark.fault("B207")
def test_a_shutdown_drains_both_directions_before_anything_is_released(bench: Bench) -> None:
    bench.backend.errors = {3: OSError("gone")}
    bench.backend.hold(0, 50)
    stores = tuple(store(i, (i % 20, 20 + i % 20), i % 16) for i in range(50))
    loads = tuple(load(50 + i, (i % 20, 20 + i % 20), i % 16) for i in range(50))
    bench.step(loads=loads, stores=stores)
    shutdown = Thread(target=bench.half.shutdown, args=(WAIT_S,))
    shutdown.start()
    bench.backend.let(0, 50)
    shutdown.join(WAIT_S)
    assert not shutdown.is_alive()
    assert bench.copies.let_go
    output = bench.collect()
    assert sorted(r.job_id for r in bench.reports) == list(range(100))
    assert [r.job_id for r in bench.reports if not r.ok] == [3]
    assert len(output.finished_recving) == 50


@pytest.mark.fault("B207")
def test_what_a_shutdown_cuts_off_ends_as_failed_once_and_the_region_is_not_let_go(bench: Bench) -> None:
    bench.backend.hold(1, 2)
    bench.step(stores=(store(1, (1, 2), 0), store(3, (3, 4), 1)), loads=(load(2, (5, 6), 2),))
    for job_id in (1, 2):
        assert bench.backend.entered[job_id].wait(WAIT_S)
    bench.half.shutdown(0.0)
    assert not bench.copies.let_go
    output = bench.collect()
    assert {r.job_id: r.ok for r in bench.reports} == {1: False, 2: False, 3: False}
    assert output.failed_recving == {"r2"}
    bench.backend.let(1, 2)
    for thread in bench.copies._threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert bench.copies.let_go
    assert not bench.collect()
    assert 3 not in bench.backend.order


def test_a_job_after_the_shutdown_ends_as_failed(bench: Bench) -> None:
    bench.half.shutdown(WAIT_S)
    output = bench.step(loads=(load(1, (1, 2), 0),), stores=(store(2, (3, 4), 1),), flush=(2,))
    assert [(r.job_id, r.ok) for r in output.reports] == [(2, False), (1, False)]
    assert output.failed_recving == {"r1"}


@pytest.mark.fault("B015")
def test_sleep_drains_and_lets_go_and_wake_finds_the_new_tensors(bench: Bench) -> None:
    bench.step(stores=tuple(store(i, (2 * i, 2 * i + 1), i) for i in range(10)))
    expected = bench.blocks(*range(20))
    assert bench.half.suspend(WAIT_S)
    assert len(bench.collect().reports) == 10
    old, bench.tensors = bench.tensors, bench.new_tensors(np.random.default_rng(1))
    before = {k: v.copy() for k, v in old.items()}
    asleep = bench.step(loads=(load(50, (0, 1), 0),)) or bench.settle()
    assert asleep.failed_recving == {"r50"}
    bench.half.rebind(bench.tensors)
    bench.step(loads=tuple(load(60 + i, (2 * i, 2 * i + 1), i) for i in range(10)))
    assert not bench.settle().failed_recving
    assert bench.blocks(*range(20)) == expected
    assert all(np.array_equal(old[k], before[k]) for k in old)


@pytest.mark.fault("B015")
def test_tensors_are_not_let_go_while_a_copy_is_open(bench: Bench) -> None:
    bench.backend.hold(1)
    bench.step(stores=(store(1, (1, 2), 0),))
    assert not bench.half.suspend(0.0)
    with pytest.raises(ConfigError, match="still open"):
        bench.half.rebind(bench.tensors, deadline_s=0.0)
    bench.backend.let(1)
    assert bench.settle().reports[0].ok


def test_a_device_that_cannot_say_what_is_computed_fails_the_job_not_the_step(bench: Bench) -> None:
    def broken() -> Any:
        raise RuntimeError("no events left")

    bench.backend.compute_done = broken  # type: ignore[method-assign]
    bench.step(loads=(load(1, (1, 2), 0),), stores=(store(2, (3, 4), 1),), flush=(2,))
    assert {r.job_id: r.ok for r in bench.reports} == {1: False, 2: False}


# --- several ranks ---


def received(*req_ids: str, failed: Mapping[str, set[int]] | None = None) -> WorkerOutput:
    failed = failed or {}
    blocks = frozenset().union(*failed.values())
    return WorkerOutput((), frozenset((*req_ids, *failed)), frozenset(failed), blocks)


def test_a_load_is_finished_when_every_rank_has_said_so() -> None:
    merger = OutputMerger(3)
    assert not merger.merge([received("x", "y"), received("x"), WorkerOutput()])
    assert merger.merge([WorkerOutput(), received("y"), received("x")]).finished_recving == {"x"}
    assert merger.pending == {"y"}
    assert merger.merge([WorkerOutput(), WorkerOutput(), received("y")]).finished_recving == {"y"}
    assert not merger.pending


@pytest.mark.fault("B149")
def test_a_load_that_failed_on_any_rank_has_failed_and_names_its_blocks() -> None:
    merger = OutputMerger(2)
    assert not merger.merge([received(failed={"x": {3, 4}}), received("y")])
    output = merger.merge([received("y"), received("x")])
    assert output.finished_recving == {"x", "y"}
    assert output.failed_recving == {"x"}
    assert output.failed_block_ids == {3, 4}
    assert not merger.merge([received("x"), WorkerOutput()])
    assert merger.merge([WorkerOutput(), received("x")]).failed_recving == set(), "an id that comes back starts anew"


def test_a_rank_that_is_one_load_ahead_is_not_taken_for_another_rank() -> None:
    merger = OutputMerger(2)
    assert not merger.merge([received("x"), WorkerOutput()])
    assert not merger.merge([received(failed={"x": {5}}), WorkerOutput()])
    assert merger.merge([WorkerOutput(), received("x")]).finished_recving == {"x"}
    second = merger.merge([WorkerOutput(), received("x")])
    assert second.failed_recving == {"x"}
    assert second.failed_block_ids == {5}
    assert not merger.pending


def test_reports_of_all_ranks_pass_through_in_order() -> None:
    outputs = [WorkerOutput((JobReport(1, 0, True),)), WorkerOutput((JobReport(1, 1, False),))]
    assert OutputMerger(2).merge(outputs).reports == (JobReport(1, 0, True), JobReport(1, 1, False))
    with pytest.raises(ValueError, match="expected 2"):
        OutputMerger(2).merge(outputs[:1])
