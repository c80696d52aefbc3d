"""The CPU backend passes the suite, with both ways of moving bytes and with numpy and torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from orlop.core import KVGroup, RegionLayout, TransferKind
from orlop.errors import ConfigError, CopyError
from orlop.host.region import HostRegion
from orlop.testing.copy_backends import CopyBackendSuite, PlainMemory, chunk, ids, job
from orlop.tiering.envelope import part_checksum
from orlop.worker import cpu
from orlop.worker.cpu import CpuCopyBackend, kernel_can_gather
from orlop.worker.layout import SlotMemory, page_bytes

needs_kernel = pytest.mark.skipif(not kernel_can_gather(), reason="process_vm_readv is missing or refused here")


class TestStaged(CopyBackendSuite):
    def backend(
        self, groups: Sequence[KVGroup], memory: SlotMemory, rank: int, num_blocks: int | None = None
    ) -> CpuCopyBackend:
        return CpuCopyBackend(groups, memory, rank, num_blocks=num_blocks, vectored=False)


@needs_kernel
class TestVectored(CopyBackendSuite):
    def backend(
        self, groups: Sequence[KVGroup], memory: SlotMemory, rank: int, num_blocks: int | None = None
    ) -> CpuCopyBackend:
        return CpuCopyBackend(groups, memory, rank, num_blocks=num_blocks, vectored=True)


class TestTorch(CopyBackendSuite):
    def backend(
        self, groups: Sequence[KVGroup], memory: SlotMemory, rank: int, num_blocks: int | None = None
    ) -> CpuCopyBackend:
        return CpuCopyBackend(groups, memory, rank, num_blocks=num_blocks, verify_loads=True)

    def place(self, array: Any) -> Any:
        return torch.from_numpy(array.copy())

    def fetch(self, tensor: Any) -> Any:
        return np.array(tensor.numpy())

    def overwrite(self, tensor: Any, array: Any) -> None:
        tensor.copy_(torch.from_numpy(np.ascontiguousarray(array)))


GROUP = KVGroup(0, 16, layers=("a",))


def world(tensor: Any, slots: int = 8, blocks_per_chunk: int = 2, **more: Any) -> tuple[CpuCopyBackend, PlainMemory]:
    layout = RegionLayout(slots, blocks_per_chunk, (page_bytes({"a": tensor}, [GROUP]),))
    memory = PlainMemory(layout, np.random.default_rng(0))
    backend = CpuCopyBackend([GROUP], memory, 0, **more)
    backend.register({"a": tensor})
    return backend, memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32, torch.int8])
@pytest.mark.fault("B235")
def test_any_dtype_keeps_its_bits(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 256, (6, 2, 3, 4, 8), dtype=torch.uint8)
    tensor = raw.clone().view(dtype)
    backend, memory = world(tensor)
    backend.copy(job(1, TransferKind.STORE, chunk(0, [4, 1], 3)))
    assert memory.slots[3, : 2 * 192].tobytes() == raw[4].numpy().tobytes() + raw[1].numpy().tobytes()
    tensor.view(torch.uint8).zero_()
    backend.copy(job(2, TransferKind.LOAD, chunk(0, [0, 5], 3)))
    back = tensor.view(torch.uint8)
    assert torch.equal(back[0], raw[4])
    assert torch.equal(back[5], raw[1])
    assert not back[1:5].any()


@pytest.mark.parametrize("vectored", [pytest.param(True, marks=needs_kernel), False])
def test_jobs_larger_than_one_call_and_one_batch(vectored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "STORE_BATCH_BYTES", 5_000)
    monkeypatch.setattr(cpu, "STAGE_BYTES", 1_000)
    monkeypatch.setattr(cpu, "CALL_BYTES", 20_000)
    monkeypatch.setattr(cpu, "PLAN_RUNS", 100)
    monkeypatch.setattr(cpu, "IOV_MAX", 130)
    rng = np.random.default_rng(1)
    array = rng.integers(0, 256, (3_000, 64), np.uint8)
    tensor = array.copy()
    backend, memory = world(tensor, slots=1_400, vectored=vectored)
    blocks = np.concatenate((np.arange(600), 600 + rng.permutation(2_400)[:1_800])).reshape(-1, 2)
    slots = np.concatenate((np.arange(300), 300 + rng.permutation(1_100)[:900]))
    whole = [chunk(0, b, s) for b, s in zip(blocks, slots.tolist(), strict=True)]
    t = type(whole[0])(
        0,
        np.concatenate([w.block_ids for w in whole]),
        np.concatenate([w.slots for w in whole]),
        np.concatenate([w.offsets for w in whole]),
    )
    backend.copy(job(1, TransferKind.STORE, t))
    for b, s in zip(blocks, slots.tolist(), strict=True):
        assert memory.slots[s, :128].tobytes() == array[b].tobytes()
        assert int(memory.checksums[s, 0]) == xxhash.xxh3_64_intdigest(array[b].tobytes())
    tensor[:] = 0
    backend.copy(job(2, TransferKind.LOAD, t))
    expected = np.zeros_like(array)
    expected[blocks.ravel()] = array[blocks.ravel()]
    assert np.array_equal(tensor, expected)


def test_a_checksum_of_a_part_longer_than_one_step_is_that_of_the_whole() -> None:
    array = np.random.default_rng(0).integers(0, 256, (4, 150_001), np.uint8)
    backend, memory = world(array)
    backend.copy(job(1, TransferKind.STORE, chunk(0, [2, 0], 1)))
    assert int(memory.checksums[1, 0]) == xxhash.xxh3_64_intdigest(array[[2, 0]].tobytes())


@pytest.mark.fault("B028")
def test_a_load_that_verifies_refuses_bytes_that_changed_in_the_slot() -> None:
    array = np.random.default_rng(0).integers(0, 256, (4, 100), np.uint8)
    backend, memory = world(array, verify_loads=True)
    backend.copy(job(1, TransferKind.STORE, chunk(0, [2, 0], 1)))
    backend.copy(job(2, TransferKind.LOAD, chunk(0, [1, 3], 1)))
    memory.slots[1, 150] ^= 1
    before = array.copy()
    with pytest.raises(CopyError, match="slot 1"):
        backend.copy(job(3, TransferKind.LOAD, chunk(0, [0, 2], 1)))
    assert np.array_equal(array, before)


def test_an_empty_transfer_moves_nothing() -> None:
    backend, _ = world(np.zeros((4, 100), np.uint8))
    for kind in TransferKind:
        assert backend.copy(job(1, kind, chunk(0, ids(), 1))) == 0


def test_a_read_only_array_and_a_tensor_elsewhere_are_refused() -> None:
    array = np.zeros((4, 100), np.uint8)
    array.flags.writeable = False
    with pytest.raises(ConfigError, match="read-only"):
        world(array)
    with pytest.raises(ConfigError, match="expected one on the CPU"):
        world(torch.empty((4, 100), dtype=torch.uint8, device="meta"))


@needs_kernel
def test_a_copy_that_the_kernel_cuts_short_is_an_error() -> None:
    """Memory that is not there: the call moves fewer bytes than asked and says so."""
    call = cpu._Gather(cpu._process_vm_readv())
    target, source = np.zeros(64, np.uint8), np.ones(64, np.uint8)
    call.add(ids(target.ctypes.data, target.ctypes.data + 32), ids(source.ctypes.data, 8), ids(32, 32))
    with pytest.raises(CopyError, match="found 32 of 64 bytes"):
        call.send()


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.fault("B207")
def test_the_real_region_and_one_that_its_owner_closed_early(plain: bool) -> None:
    rng = np.random.default_rng(0)
    tensor = rng.integers(0, 256, (40, 5_000), np.uint8)
    region = HostRegion.create(RegionLayout(4, 3, ((7,), (5_000,))), plain=plain, prefault=False)
    backend = CpuCopyBackend([GROUP], region, rank=1)
    backend.register({"a": tensor})
    expected = tensor[[9, 2, 5]].copy()
    backend.copy(job(1, TransferKind.STORE, chunk(0, [9, 2, 5], 3)))
    assert region.slots[3, 4096 : 4096 + 15_000].tobytes() == expected.tobytes()
    assert int(region.checksums[3, 1]) == part_checksum(expected.tobytes())
    region.close()
    backend.copy(job(2, TransferKind.LOAD, chunk(0, [0, 1, 2], 3)))
    assert np.array_equal(tensor[:3], expected)
