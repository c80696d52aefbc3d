"""The CPU copy backend, and the reference for every other.

In: KV tensors in this process's memory, the slots of the host region, jobs. Out: copied bytes, and
the checksum of every chunk stored. Never: a decision, a queue, a thread of its own, an import of torch.

A job is a few thousand pages that lie anywhere on both sides. What Python can call per page loses the
GIL per page, and beside a busy thread waits for it 5 ms each time. So a job is moved by as few calls as
possible: ``process_vm_readv`` on this very process takes 1,024 source and 1,024 destination runs, copies
each byte once and needs no staging. Where the kernel or a sandbox refuses it, numpy gathers and
scatters through a bounded stage. bench/copies.py measures both.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from orlop.core import GroupTransfer, Int64Array, KVGroup, TransferJob, TransferKind
from orlop.errors import ConfigError, CopyError
from orlop.worker.base import CopyBackend
from orlop.worker.layout import GroupPages, SlotMemory, checked, group_pages, part_of, rows, runs, whole_slots

STORE_BATCH_BYTES = 8 << 20
"""Copied, then hashed while still in the cache; also bounds how long hashing holds the GIL (below 1 ms)."""

STAGE_BYTES = 16 << 20
CALL_BYTES = 256 << 20
"""About so much per kernel call: below the kernel's limit of 2 GiB, long enough to be worth the call."""

PLAN_RUNS = 500
"""Runs are planned so many at a time: on longer arrays numpy lets go of the GIL in every operation."""

HASH_STEP_BYTES = 64 << 10
"""xxhash lets go of the GIL for longer buffers, which may cost 5 ms per chunk beside a busy thread."""

IOV_MAX = 1024

Slots = npt.NDArray[np.uint8]
"""uint8 (slots, slot_bytes). Holding the array keeps the region mapped, also when its owner closes it."""


class Mover(Protocol):
    """Moves the bytes of one transfer, to the device or from it."""

    def move(self, to_device: bool, t: GroupTransfer, pages: GroupPages, part_offset: int) -> None: ...


class CpuCopyBackend(CopyBackend):
    """Copies between KV tensors in host memory and the host region, for one rank.

    ``num_blocks`` is needed only where tensors do not have one row per block in their first dimension
    (see ``layout.group_pages``). ``verify_loads`` compares whole chunks with their checksum before they
    are loaded, at the price of reading them twice. ``vectored`` None: use the kernel's gather if it works.

    ``copy`` may be called by several threads at once for jobs that share no block and no slot.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        memory: SlotMemory,
        rank: int,
        *,
        num_blocks: int | None = None,
        verify_loads: bool = False,
        vectored: bool | None = None,
    ) -> None:
        self._groups = tuple(groups)
        self._layout = memory.layout
        self._slots, self._checksums = memory.slots, memory.checksums
        self._rank = rank
        self._num_blocks = num_blocks
        self._verify_loads = verify_loads
        self._bound: tuple[Mapping[str, Any], tuple[GroupPages, ...]] = ({}, ())
        use_kernel = kernel_can_gather() if vectored is None else vectored
        self._mover: Mover = VectoredMover(memory.slots) if use_kernel else StagedMover(memory.slots)

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Learn the tensors; ``ConfigError`` for an unknown layout or bytes that differ from the region's layout."""
        for layer, value in kv_caches.items():
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                _refuse_foreign(layer, tensor)
        pages = tuple(group_pages(kv_caches, g, self._num_blocks) for g in self._groups)
        counted = tuple(p.page_bytes for p in pages)
        expected = self._layout.page_bytes[self._rank]
        if counted != expected:
            raise ConfigError(
                f"rank {self._rank}: found {counted} bytes per block in the KV tensors, expected {expected} as in the "
                "host region's layout, per KV group; make the region from the page_bytes() of these tensors"
            )
        self._bound = dict(kv_caches), pages

    def forget(self) -> None:
        self._bound = {}, ()

    def copy(self, job: TransferJob) -> int:
        """Move one job's bytes; ``CopyError`` where it must not or cannot be done."""
        _held, pages = self._bound  # pages are addresses: the tensors stay as long as this copy needs them
        if not pages:
            raise CopyError(f"job {job.job_id}: found no KV tensors registered, expected register() before copies")
        transfers = checked(job, self._layout, pages)
        if job.kind is TransferKind.STORE:
            for t in transfers:
                self._store(t, pages[t.group])
        else:
            for t in transfers:
                self._load(job, t, pages[t.group])
        return sum(len(t.block_ids) * pages[t.group].page_bytes for t in transfers)

    def _store(self, t: GroupTransfer, pages: GroupPages) -> None:
        layout = self._layout
        part_offset = layout.part_offset(self._rank, t.group)
        chunks = max(1, STORE_BATCH_BYTES // layout.part_bytes(self._rank, t.group))
        for batch in _batches(t, chunks * layout.blocks_per_chunk):
            self._mover.move(False, batch, pages, part_offset)
            for slot in batch.slots[:: layout.blocks_per_chunk].tolist():
                self._checksums[slot, self._rank] = self._checksum(slot, t.group)

    def _load(self, job: TransferJob, t: GroupTransfer, pages: GroupPages) -> None:
        layout = self._layout
        if self._verify_loads:
            for slot in whole_slots(t, layout.blocks_per_chunk).tolist():
                if self._checksum(slot, t.group) != int(self._checksums[slot, self._rank]):
                    raise CopyError(
                        f"job {job.job_id}: found other bytes in slot {slot} than its checksum says, expected those "
                        "that were stored; the memory or a writer of that slot is at fault"
                    )
        self._mover.move(True, t, pages, layout.part_offset(self._rank, t.group))

    def _checksum(self, slot: int, group: int) -> int:
        layout = self._layout
        start = layout.part_offset(self._rank, group)
        part = memoryview(self._slots[slot])[start : start + layout.part_bytes(self._rank, group)]
        state = xxhash.xxh3_64()
        for at in range(0, len(part), HASH_STEP_BYTES):
            state.update(part[at : at + HASH_STEP_BYTES])
        return state.intdigest()


def _batches(t: GroupTransfer, blocks: int) -> list[GroupTransfer]:
    return [part_of(t, at, at + blocks) for at in range(0, len(t.block_ids), blocks)]


def _refuse_foreign(layer: str, tensor: Any) -> None:
    device = getattr(tensor, "device", "cpu")
    if getattr(device, "type", device) != "cpu":
        raise ConfigError(f"layer {layer!r}: found a tensor on {device}, expected one on the CPU")
    if isinstance(tensor, np.ndarray) and not tensor.flags.writeable:
        raise ConfigError(f"layer {layer!r}: found a read-only array, expected one that loads can write to")


# --- the kernel's gather -----------------------------------------------------------------------------


class VectoredMover:
    """Moves runs with ``process_vm_readv`` on this process: one copy per byte, 1,024 runs per call."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._call = _process_vm_readv()

    def move(self, to_device: bool, t: GroupTransfer, pages: GroupPages, part_offset: int) -> None:
        call = _Gather(self._call)
        for few in _batches(t, max(1, min(PLAN_RUNS // len(pages.pieces), CALL_BYTES // pages.page_bytes))):
            found = runs(few, pages, part_offset, self._slots.strides[0])
            host = found.host + self._slots.ctypes.data
            target, source = (found.device, host) if to_device else (host, found.device)
            call.add(target, source, found.nbytes)
        call.send()


class _Gather:
    """Collects runs and copies them in calls of at most ``IOV_MAX`` runs and about ``CALL_BYTES``."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._target = np.empty((IOV_MAX, 2), np.int64)
        self._source = np.empty((IOV_MAX, 2), np.int64)
        self._runs = 0
        self._nbytes = 0

    def add(self, target: Int64Array, source: Int64Array, nbytes: Int64Array) -> None:
        for at in range(0, len(nbytes), IOV_MAX):
            self._add(target[at : at + IOV_MAX], source[at : at + IOV_MAX], nbytes[at : at + IOV_MAX])

    def _add(self, target: Int64Array, source: Int64Array, nbytes: Int64Array) -> None:
        total = int(nbytes.sum())
        if self._runs + len(nbytes) > IOV_MAX or self._nbytes + total > CALL_BYTES:
            self.send()
        new = slice(self._runs, self._runs + len(nbytes))
        self._target[new, 0], self._target[new, 1] = target, nbytes
        self._source[new, 0], self._source[new, 1] = source, nbytes
        self._runs, self._nbytes = new.stop, self._nbytes + total

    def send(self) -> None:
        runs, expected = self._runs, self._nbytes
        self._runs = self._nbytes = 0
        moved = self._call(os.getpid(), self._target.ctypes.data, runs, self._source.ctypes.data, runs, 0)
        if moved != expected:
            why = os.strerror(ctypes.get_errno()) if moved < 0 else "memory that is not mapped"
            raise CopyError(f"found {moved} of {expected} bytes copied, expected all: {why}")


def _process_vm_readv() -> Any:
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype = ctypes.c_ssize_t
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    call.argtypes = [ctypes.c_int, pointer, count, pointer, count, count]
    return call


def kernel_can_gather() -> bool:
    """Whether ``process_vm_readv`` works here: absent outside Linux, refused by some sandboxes."""
    try:
        call = _process_vm_readv()
    except (AttributeError, OSError):
        return False
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    local = np.array([[target.ctypes.data, 32], [target.ctypes.data + 32, 32]], np.int64)
    remote = np.array([[source.ctypes.data + 32, 32], [source.ctypes.data, 32]], np.int64)
    moved = call(os.getpid(), local.ctypes.data, 2, remote.ctypes.data, 2, 0)
    return bool(moved == 64 and np.array_equal(target, np.roll(source, 32)))


# --- numpy's gather and scatter ------------------------------------------------------------------------


class StagedMover:
    """Moves rows with numpy through a stage of at most ``STAGE_BYTES``, one per thread."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._local = threading.local()

    def move(self, to_device: bool, t: GroupTransfer, pages: GroupPages, part_offset: int) -> None:
        for r in rows(t, pages, part_offset):
            device = _device_rows(r.piece.address, r.piece.block_stride, r.piece.nbytes, pages.blocks)
            host = self._slots[:, r.column : r.column + r.piece.nbytes]
            step = max(1, STAGE_BYTES // r.piece.nbytes)
            for at in range(0, len(r.slots), step):
                block_ids, slots = r.block_ids[at : at + step], r.slots[at : at + step]
                if to_device:
                    device[block_ids] = host[slots]
                else:
                    host[slots] = self._gathered(device, block_ids)

    def _gathered(self, source: npt.NDArray[np.uint8], ids: Int64Array) -> npt.NDArray[np.uint8]:
        """``source[ids]``, in the stage where numpy can: ``take`` would copy all of a strided source first."""
        if not source.flags.c_contiguous or len(ids) * source.shape[1] > STAGE_BYTES:
            return source[ids]
        if not hasattr(self._local, "stage"):
            self._local.stage = np.empty(STAGE_BYTES, np.uint8)
        stage: npt.NDArray[np.uint8] = self._local.stage[: len(ids) * source.shape[1]].reshape(len(ids), -1)
        return np.take(source, ids, 0, out=stage, mode="clip")


def _device_rows(address: int, stride: int, nbytes: int, blocks: int) -> npt.NDArray[np.uint8]:
    """A piece of every block as uint8 (blocks, nbytes), over the tensor's own memory; the backend holds the tensor."""
    memory = (ctypes.c_uint8 * ((blocks - 1) * stride + nbytes)).from_address(address)
    flat = np.frombuffer(memoryview(memory), np.uint8)
    return np.lib.stride_tricks.as_strided(flat, (blocks, nbytes), (stride, 1))
