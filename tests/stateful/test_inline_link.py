"""The inline link: nothing moves by itself, and what hangs, dies or outlives its end does so as a process would."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from stateful_rig import TroubledStore, _stores

from orlop.core import NO_SALT, Namespace, Outcome, RegionLayout, ReqContext, TierJob, TransferKind, pack_key
from orlop.host.region import HostRegion
from orlop.testing.clock import FakeClock
from orlop.testing.inline_link import SCRIBBLE, CrankedPump, InlineWorker
from orlop.tiering.envelope import part_checksum
from orlop.tiering.io_messages import StoreSpec
from orlop.tiering.runner import RunnerOptions, TierRunner

LAYOUT = RegionLayout(slots=4, blocks_per_chunk=1, page_bytes=((64,),))
PAYLOAD_BYTES = LAYOUT.payload_bytes(0)
NAMESPACE = Namespace(b"n" * 16)
CONTEXT = ReqContext(1, "r")


class Bench:
    """A runner over a cranked pump, its region and its store."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.region = HostRegion.create(LAYOUT, prefault=False)
        self.store = _stores["bench"] = TroubledStore()
        self.runner = TierRunner(
            RunnerOptions("0:bench", threads=2),
            self.region,
            StoreSpec("stateful_rig:open_store", {"name": "bench"}),
            clock=self.clock,
            make_pump=partial(CrankedPump, clock=self.clock),
        )
        pump = self.runner._pump
        assert isinstance(pump, CrankedPump)
        self.pump = pump
        self.pump.receive()

    @property
    def worker(self) -> InlineWorker:
        assert self.pump.link is not None
        return self.pump.link.worker

    def fill(self, slot: int, text: bytes) -> None:
        part = self.region.view(slot, LAYOUT.part_bytes(0, 0))
        part[:] = text.ljust(len(part), b".")
        self.region.checksums[slot, 0] = part_checksum(part)

    def submit(self, job_id: int, kind: TransferKind, slot: int, key: bytes = b"k") -> None:
        slots = np.array([slot], dtype=np.int64)
        job = TierJob(job_id, kind, 0, (pack_key(key, 0),), slots, PAYLOAD_BYTES, NAMESPACE, NO_SALT, (CONTEXT,))
        submit = self.runner.submit_store if kind is TransferKind.STORE else self.runner.submit_load
        submit(job, now=self.clock.now)

    def turn(self) -> None:
        self.pump.send()
        while self.worker.begin() + self.worker.finish():
            pass
        self.pump.receive()

    def outcomes(self) -> dict[int, tuple[Outcome, bool]]:
        """What has been reported since the last call: each job's one outcome, and whether its slot is free."""
        return {r.job_id: (r.outcomes[0], r.released) for r in self.runner.get_finished_jobs()}

    def keep_one(self) -> None:
        self.fill(0, b"bytes")
        self.submit(1, TransferKind.STORE, 0)
        self.turn()
        assert self.outcomes() == {1: (Outcome.OK, True)}


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.region.close()
    del _stores["bench"]


def test_nothing_moves_before_each_crank_is_turned(bench: Bench) -> None:
    bench.fill(0, b"bytes")
    bench.submit(1, TransferKind.STORE, 0)
    assert not bench.worker.begin()
    bench.pump.send()
    assert not bench.worker.finish()
    assert bench.worker.begin() == 1
    assert not bench.store.kept
    assert bench.worker.finish() == 1
    assert len(bench.store.kept) == 1
    assert bench.outcomes() == {}
    bench.pump.receive()
    assert bench.outcomes() == {1: (Outcome.OK, True)}


def test_a_stuck_read_has_written_half_and_writes_the_rest_when_it_is_released(bench: Bench) -> None:
    bench.keep_one()
    bench.submit(2, TransferKind.LOAD, 3)
    bench.pump.send()
    bench.worker.begin(stuck=1)
    bench.turn()
    assert bench.outcomes() == {}
    assert bytes(bench.region.view(3, 1)) == SCRIBBLE
    bench.worker.release()
    bench.turn()
    assert bench.outcomes() == {2: (Outcome.OK, True)}
    assert bytes(bench.region.view(3, 5)) == b"bytes"


def test_a_stuck_verb_holds_one_hand_and_the_other_goes_on(bench: Bench) -> None:
    bench.keep_one()
    for job_id, slot in ((2, 1), (3, 2), (4, 3)):
        bench.submit(job_id, TransferKind.LOAD, slot)
    bench.pump.send()
    bench.worker.begin(stuck=1)
    bench.turn()
    assert bench.outcomes() == {3: (Outcome.OK, True), 4: (Outcome.OK, True)}


def test_what_a_killed_worker_held_is_reported_once_and_free(bench: Bench) -> None:
    bench.submit(2, TransferKind.LOAD, 1)
    bench.pump.send()
    bench.worker.begin(stuck=1)
    assert bench.pump.link is not None
    bench.pump.link.kill()
    bench.pump.receive()
    assert bench.outcomes() == {2: (Outcome.UNAVAILABLE, True)}
    assert bench.pump.restart()
    bench.turn()
    assert bench.outcomes() == {}


def test_one_that_outlives_being_killed_holds_its_slots_until_it_dies(bench: Bench) -> None:
    bench.submit(2, TransferKind.LOAD, 1)
    bench.pump.send()
    bench.worker.begin(stuck=1)
    assert bench.pump.link is not None
    bench.pump.link.outlives = True
    bench.pump.link.kill()
    bench.pump.receive()
    assert bench.outcomes() == {2: (Outcome.UNAVAILABLE, False)}
    assert not bench.pump.restart()
    bench.pump.receive()
    assert list(bench.runner.get_released_jobs()) == []
    assert bench.pump.dying is not None
    bench.pump.dying.die()
    bench.pump.receive()
    assert list(bench.runner.get_released_jobs()) == [2]
    assert bench.pump.restart()


def test_words_that_nobody_has_heard_die_with_the_worker(bench: Bench) -> None:
    bench.fill(0, b"bytes")
    bench.submit(1, TransferKind.STORE, 0)
    bench.pump.send()
    bench.worker.begin()
    bench.worker.finish()
    assert bench.pump.link is not None
    bench.pump.link.unheard = True
    bench.pump.link.kill()
    bench.pump.receive()
    assert bench.store.kept
    assert bench.outcomes() == {1: (Outcome.UNAVAILABLE, True)}


def test_a_shutdown_does_what_is_queued_and_reports_what_is_stuck(bench: Bench) -> None:
    bench.keep_one()
    bench.submit(2, TransferKind.LOAD, 1)
    bench.pump.send()
    bench.worker.begin(stuck=1)
    bench.fill(2, b"more")
    bench.submit(3, TransferKind.STORE, 2, b"l")
    bench.runner.shutdown(0.0)
    assert bench.outcomes() == {2: (Outcome.UNAVAILABLE, True), 3: (Outcome.OK, True)}


@pytest.mark.parametrize(("fault", "outcome"), [("full", Outcome.NO_SPACE), ("denied", Outcome.DENIED)])
def test_a_failure_that_raises_nothing_is_named_all_the_same(bench: Bench, fault: str, outcome: Outcome) -> None:
    bench.store.faults["write"].append(fault)
    bench.fill(0, b"bytes")
    bench.submit(1, TransferKind.STORE, 0)
    bench.turn()
    (result,) = bench.runner.get_finished_jobs()
    assert result.outcomes == (outcome,)
    assert result.reason == outcome
