"""A device whose blocks are real bytes, moved by real worker halves.

In: step messages, and which tokens of which request each step computes. Out: one WorkerOutput per rank and step; an
AssertionError as soon as a byte is not what its key or its position stands for. Never: a model; a queue of its own:
what moves, moves in the worker halves' threads, in the host region and in the tiers.

One position of a block is one cell of 16 bytes per layer and rank: the digest of the token prefix that ends there, its
last two bytes replaced by layer and rank. So every cell of every block, slot and file says which tokens, layer and
rank it is of, and a block hash (which is that digest) says what all bytes under it have to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from orlop.core import (
    DIGEST_BYTES,
    Geometry,
    JobReport,
    OffloadingConnectorMetadata,
    RegionLayout,
    TransferJob,
    TransferKind,
    WorkerOutput,
)
from orlop.testing.device import Forward, Lineage

Cells = npt.NDArray[np.uint8]


class WorkerHalf(Protocol):
    """What an engine's worker calls of one rank's connector."""

    def handle_preemptions(self, meta: OffloadingConnectorMetadata) -> None: ...
    def start_load_kv(self, meta: OffloadingConnectorMetadata) -> None: ...
    def wait_for_save(self, meta: OffloadingConnectorMetadata) -> None: ...
    def get_finished(self) -> WorkerOutput: ...


class HostMemory(Protocol):
    """The host region, as far as the device looks into it."""

    @property
    def layout(self) -> RegionLayout: ...
    @property
    def slots(self) -> npt.NDArray[np.uint8]: ...


class ByteDevice:
    """All ranks of one engine, for ``RequestRunner(device=...)``.

    ``kv_caches[rank]`` maps layer names to uint8 arrays (blocks, tokens_per_block, 16), to be registered with that
    rank's worker half before the first step. ``stores_checked`` and ``loads_checked`` count chunks' blocks compared.
    """

    def __init__(self, geometry: Geometry, *, ranks: int = 1, blocks: int = 64) -> None:
        self.geometry = geometry
        self.ranks = ranks
        self.lineage = Lineage()
        self.weights = 0
        self.stores_checked = 0
        self.loads_checked = 0
        self.kv_caches: list[dict[str, Cells]] = [
            {
                layer: np.full((blocks, group.tokens_per_block, DIGEST_BYTES), 0xEE, np.uint8)
                for group in geometry.groups
                for layer in group.layers
            }
            for _ in range(ranks)
        ]
        self._layers = [layer for group in geometry.groups for layer in group.layers]
        self._halves: Sequence[WorkerHalf] = ()
        self._memory: HostMemory | None = None
        self._jobs: dict[int, TransferJob] = {}
        self._hashes: dict[int, Any] = {}
        self._wanted: dict[int, tuple[int, int, list[bytes]]] = {}

    def attach(self, halves: Sequence[WorkerHalf], memory: HostMemory) -> None:
        """The worker halves, one per rank, and the region they share."""
        self._halves = halves
        self._memory = memory

    def expect(self, block_id: int, group: int, index: int, digests: list[bytes]) -> None:
        """From now on block ``block_id`` is block ``index`` of the request with ``digests``, in ``group``."""
        self._wanted[block_id] = (group, index, digests)

    def execute(self, meta: OffloadingConnectorMetadata, forwards: Sequence[Forward]) -> list[WorkerOutput]:
        """One step on all ranks, in the order of an engine's worker."""
        for job in (*meta.store_jobs, *meta.load_jobs):
            self._jobs[job.job_id] = job
        for half in self._halves:
            half.handle_preemptions(meta)
            half.start_load_kv(meta)
        self._forward(forwards)
        for half in self._halves:
            half.wait_for_save(meta)
        outputs = [half.get_finished() for half in self._halves]
        for rank, output in enumerate(outputs):
            self._check_loads(rank, output)
        return outputs

    def delivered(self, reports: Iterable[JobReport]) -> None:
        """Part of the runner's interface; slots are guarded by the real books here."""

    # --- compute ----------------------------------------------------------------------------------------

    def _forward(self, forwards: Sequence[Forward]) -> None:
        for forward in forwards:
            for rank in range(self.ranks):
                self._attend(rank, forward)
                self._write(rank, forward)
            self._sample(forward)

    def _sample(self, forward: Forward) -> None:
        """The next token of a request whose last one this step computes."""
        if forward.start + forward.count == len(forward.digests):
            last = forward.digests[-1]
            forward.digests.append(self.lineage.extend(last, self.lineage.sample(last)))

    def _write(self, rank: int, forward: Forward) -> None:
        for group in self.geometry.groups:
            for position in range(forward.start, forward.start + forward.count):
                block = forward.tables[group.index][position // group.tokens_per_block]
                assert block != self.geometry.null_block_id, f"{forward.req_id} computes into the null block"
                for layer in group.layers:
                    cells = self._cells([forward.digests[position]], layer, rank)
                    self.kv_caches[rank][layer][block, position % group.tokens_per_block] = cells[0]

    def _attend(self, rank: int, forward: Forward) -> None:
        """All that the step attends to and does not compute itself is right. Shared blocks are right once computed."""
        for group in self.geometry.groups:
            size = group.tokens_per_block
            first = 0 if group.sliding_window is None else max(0, forward.start - group.sliding_window + 1)
            for index in range(first // size, forward.start // size):
                block = forward.tables[group.index][index]
                digests = forward.digests[index * size : (index + 1) * size]
                self._check_block(rank, group.index, block, digests, f"{forward.req_id} at {forward.start}")

    # --- checks -----------------------------------------------------------------------------------------

    def check_slots(self, slots: Iterable[int], group: int, hashes: Iterable[bytes]) -> None:
        """Each slot holds, on every rank, the chunk that its key stands for. For slots that nobody writes."""
        assert self._memory is not None
        layout = self._memory.layout
        spec = self.geometry.groups[group]
        tokens = self.geometry.chunk_tokens(group)
        for slot, block_hash in zip(slots, hashes, strict=True):
            digests = list(self.lineage.span(block_hash, tokens))
            for rank in range(self.ranks):
                start = layout.part_offset(rank, group)
                part = self._memory.slots[slot, start : start + layout.part_bytes(rank, group)]
                pages = part.reshape(self.geometry.blocks_per_chunk, len(spec.layers), spec.tokens_per_block, -1)
                for column, layer in enumerate(spec.layers):
                    right = self._cells(digests, layer, rank)
                    found = pages[:, column].reshape(tokens, DIGEST_BYTES)
                    assert np.array_equal(found, right), f"slot {slot}, rank {rank}, {layer}: bytes of another key"
            self.stores_checked += 1

    def _check_loads(self, rank: int, output: WorkerOutput) -> None:
        for report in output.reports:
            job = self._jobs[report.job_id]
            if job.kind is not TransferKind.LOAD or not report.ok:
                continue
            for part in job.transfers:
                for block in part.block_ids.tolist():
                    group, index, digests = self._wanted[block]
                    size = self.geometry.groups[group].tokens_per_block
                    right = digests[index * size : (index + 1) * size]
                    self._check_block(rank, group, block, right, f"load {job.job_id} of {job.req_id}")
                    self.loads_checked += 1

    def _check_block(self, rank: int, group: int, block: int, digests: list[bytes], who: str) -> None:
        for layer in self.geometry.groups[group].layers:
            right = self._cells(digests, layer, rank)
            found = self.kv_caches[rank][layer][block]
            assert np.array_equal(found, right), f"{who}, rank {rank}, {layer}: block {block} holds other tokens' bytes"

    def _cells(self, digests: Sequence[bytes], layer: str, rank: int) -> Cells:
        cells = np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), DIGEST_BYTES).copy()
        cells[:, -2] = self._layers.index(layer)
        cells[:, -1] = rank
        return cells
