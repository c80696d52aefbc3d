"""Threads beside the engine's stand behind it, the I/O process too; the engine's own thread stays as it was."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest

from orlop.background import start_thread
from orlop.core import RegionLayout
from orlop.host.region import HostRegion
from orlop.tiering.io_messages import StoreSpec
from orlop.tiering.runner import RunnerOptions, TierRunner

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no SCHED_BATCH")


def policies_by_name() -> dict[str, int]:
    return {
        thread.name: os.sched_getscheduler(thread.native_id)
        for thread in threading.enumerate()
        if thread.native_id is not None
    }


def test_a_thread_stands_behind_the_one_that_starts_it() -> None:
    before = os.sched_getscheduler(0)
    seen: SimpleQueue[int] = SimpleQueue()
    start_thread(lambda put: put(os.sched_getscheduler(0)), seen.put, name="beside").join()
    assert seen.get(timeout=60) == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == before


def test_where_the_system_forbids_it_the_thread_works_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not in this sandbox")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    seen: SimpleQueue[str] = SimpleQueue()
    start_thread(seen.put, "ran", name="beside").join()
    assert seen.get(timeout=60) == "ran"


@pytest.mark.fault("B187")
def test_a_runner_its_threads_and_its_io_process_stand_behind_the_engine(tmp_path: Path) -> None:
    region = HostRegion.create(RegionLayout(4, 1, ((4096,),)))
    spec = StoreSpec("orlop.stores.files:FilesStore", {"path": str(tmp_path), "max_bytes": 1 << 30})
    runner = TierRunner(RunnerOptions("0:files"), region, spec)
    try:
        assert runner.wait_ready(60) is None
        assert runner.io_pid is not None
        threads = [int(tid) for tid in os.listdir(f"/proc/{runner.io_pid}/task")]
        assert {os.sched_getscheduler(tid) for tid in threads} == {os.SCHED_BATCH}
        ours = policies_by_name()
        assert ours["orlop-0:files-send"] == ours["orlop-0:files-own"] == os.SCHED_BATCH
        assert ours[threading.current_thread().name] != os.SCHED_BATCH
    finally:
        runner.shutdown(10)
        region.close()
