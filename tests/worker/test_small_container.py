"""Copies where little is to be had: one core, no /dev/shm, no kernel gather. As many calls, one pass, two threads.

In: the real backend and region. Out: what a copy takes, counted. Never: a time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest

from orlop.core import GroupTransfer, KVGroup, RegionLayout, TransferJob, TransferKind
from orlop.host.region import HostRegion
from orlop.worker.cpu import STAGE_BYTES, CpuCopyBackend, VectoredMover, kernel_can_gather

BLOCKS, BLOCK_BYTES = 256, 256 << 10
GROUP = KVGroup(0, 16, layers=("kv",))
EVERYTHING = GroupTransfer(0, np.arange(BLOCKS), np.arange(BLOCKS)[::-1].copy(), np.zeros(BLOCKS, np.int64))


@pytest.mark.fault("B183")
@pytest.mark.skipif(not kernel_can_gather(), reason="process_vm_readv is missing or refused here")
def test_64_mib_in_pieces_are_a_few_calls_and_no_copy_between() -> None:
    calls, held = copied(vectored=True)
    assert calls <= 2 * 8, "a call per 8 MiB and direction at most"
    assert held < 1 << 20, "nothing is staged"


@pytest.mark.fault("B183")
def test_where_the_kernel_refuses_the_copy_between_is_bounded() -> None:
    _, held = copied(vectored=False)
    assert held < 3 * STAGE_BYTES, "a stage of each direction"


def copied(vectored: bool) -> tuple[int, int]:
    """Kernel calls, and the most bytes of Python and numpy at once, of a store and a load of everything."""
    device = np.arange(BLOCKS * BLOCK_BYTES // 8, dtype=np.uint64).view(np.uint8).reshape(BLOCKS, BLOCK_BYTES)
    expected = device.copy()
    region = HostRegion.create(RegionLayout(BLOCKS, 1, ((BLOCK_BYTES,),)), prefault=False)
    backend = CpuCopyBackend([GROUP], region, 0, vectored=vectored)
    backend.register({"kv": device})
    calls = 0
    if vectored:
        mover = backend._mover
        assert isinstance(mover, VectoredMover)
        kernel = mover._call

        def count(*arguments: Any) -> int:
            nonlocal calls
            calls += 1
            return int(kernel(*arguments))

        mover._call = count
    tracemalloc.start()
    try:
        backend.copy(TransferJob(1, "r", TransferKind.STORE, (EVERYTHING,)))
        device[:] = 0
        backend.copy(TransferJob(2, "r", TransferKind.LOAD, (EVERYTHING,)))
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        region.close()
    assert np.array_equal(device, expected)
    return calls, held


ON_ONE_CORE = """
import os, threading
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numpy as np
from orlop.core import GroupTransfer, KVGroup, RegionLayout, TransferJob, TransferKind
from orlop.host.region import HostRegion
from orlop.worker.cpu import CpuCopyBackend
from orlop.worker.worker import CopyWorker

region = HostRegion.create(RegionLayout(64, 1, ((65536,),)), prefault=False)
device = np.full((64, 65536), 7, np.uint8)
backend = CpuCopyBackend([KVGroup(0, 16, layers=("kv",))], region, 0)
backend.register({"kv": device})
worker = CopyWorker(backend)
ids = np.arange(64)
for job_id, kind in enumerate((TransferKind.STORE, TransferKind.LOAD)):
    worker.submit(TransferJob(job_id, "r", kind, (GroupTransfer(0, ids, ids, np.zeros(64, np.int64)),)))
    assert worker.drain(60.0)
    device[:] = device if kind is TransferKind.LOAD else 0
assert [result.ok for result in worker.get_finished()] == [True, True]
assert (device == 7).all()
print(sum(thread.name.startswith("orlop-") for thread in threading.enumerate()))
print([line for line in open("/proc/self/maps") if "/dev/shm" in line])
"""


@pytest.mark.fault("B183")
def test_on_one_core_there_are_two_copy_threads_and_nothing_in_dev_shm() -> None:
    said = subprocess.run(
        [sys.executable, "-c", ON_ONE_CORE], capture_output=True, text=True, timeout=120, env=dict(os.environ)
    )
    assert said.returncode == 0, said.stderr
    threads, left = said.stdout.splitlines()
    assert int(threads) <= 2 + 1, "one per direction, whatever there is in cores; the region may have one"
    assert left == "[]"
