"""A device double whose blocks carry what they hold, and the slot memory beside it.

In: step messages, and which tokens of which request each step computes. Out: one WorkerOutput per rank
and step; an AssertionError as soon as a block is read, written or moved that must not be. Never: a real
byte, a thread, a clock.

One position of a block holds the digest of the token prefix that ends there, so a block "is right" when
it holds the digests of its request's positions. A block hash of the engine is that same digest, which lets
anyone say what the bytes under a key have to be::

    tokens      t0   t1   t2   t3 | t4 ...          digest(p) = blake2b(digest(p - 1), token p)
    block       d0   d1   d2   d3 | d4 ...          block hash = d3

Copies are *cranked*: submitted jobs lie in a queue per rank and direction until somebody turns the crank
(a test by hand, every step by itself, or a seeded coin). The device enforces, per rank: a block is not
written while a submitted store has not read it; a load fills a block with just what its request needs
there; a step sees right content in all it attends to; a slot is not written while anybody else uses it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from orlop.core import (
    DIGEST_BYTES,
    Geometry,
    JobReport,
    OffloadingConnectorMetadata,
    TransferJob,
    TransferKind,
    WorkerOutput,
)

Predicate = Callable[[TransferJob, int], bool]
"""Says of one job on one rank whether a knob applies to it."""


def never(job: TransferJob, rank: int) -> bool:
    """The setting of a knob that is off."""
    return False


def always(job: TransferJob, rank: int) -> bool:
    """The setting of a knob that is fully on."""
    return True


def only(kind: TransferKind, *, rank: int | None = None) -> Predicate:
    """A knob for jobs of one direction, on one rank or on all."""
    return lambda job, at: job.kind is kind and rank in (None, at)


class Lineage:
    """Digests of token prefixes, and which digest each one extends."""

    def __init__(self) -> None:
        self._parent: dict[bytes, bytes] = {}

    def root(self, salt: str | None = None) -> bytes:
        """The digest of the empty prefix, different for each salt."""
        return hashlib.blake2b(b"root" + (salt or "").encode(), digest_size=DIGEST_BYTES).digest()

    def extend(self, parent: bytes, token: int) -> bytes:
        """The digest of ``parent``'s prefix and one more token."""
        digest = hashlib.blake2b(parent + token.to_bytes(8, "big"), digest_size=DIGEST_BYTES).digest()
        self._parent[digest] = parent
        return digest

    def span(self, end: bytes, length: int) -> tuple[bytes, ...]:
        """The ``length`` digests that lead up to ``end`` and include it."""
        digests = [end]
        while len(digests) < length:
            digests.append(self._parent[digests[-1]])
        return tuple(reversed(digests))

    @staticmethod
    def sample(digest: bytes) -> int:
        """The token that this model's greedy decoding says after a prefix."""
        return int.from_bytes(digest[:4], "big")


@dataclass(slots=True)
class Page:
    """What one block, or one block's room in a slot, holds.

    ``cells[i]`` is the digest at the block's position ``i`` (empty: never written). ``weights`` is the oldest
    version of the weights that wrote any of it.
    """

    group: int = -1
    cells: list[bytes] = field(default_factory=list)
    weights: int = 0

    def copy(self) -> Page:
        return Page(self.group, list(self.cells), self.weights)


class SlotMemory:
    """The bytes of host memory: a Page per slot, rank and offset, and who is using which slot.

    A claim is a promise that its owner may still read (or write) the slots. Overlapping claims of which one
    writes are refused, which is how a slot that was given out again too early is found.
    """

    def __init__(self) -> None:
        self.pages: dict[int, dict[tuple[int, int], Page]] = {}
        self._claims: dict[object, tuple[frozenset[int], bool]] = {}

    def claim(self, owner: object, slots: Iterable[int], *, write: bool) -> None:
        """``owner`` uses ``slots`` from now on."""
        wanted = frozenset(slots)
        assert owner not in self._claims, f"{owner} claims slots a second time"
        for other, (held, writes) in self._claims.items():
            clash = wanted & held if write or writes else frozenset()
            if clash and not self._same_job(owner, other):
                raise AssertionError(f"{owner} (write={write}) gets slots {sorted(clash)} that {other} still uses")
        self._claims[owner] = (wanted, write)

    def let_go(self, owner: object) -> None:
        """``owner`` has stopped using its slots; unknown owners are fine."""
        self._claims.pop(owner, None)

    def owners(self) -> list[object]:
        """Who still uses slots."""
        return list(self._claims)

    @staticmethod
    def _same_job(one: object, other: object) -> bool:
        return isinstance(one, DeviceClaim) and isinstance(other, DeviceClaim) and one.job_id == other.job_id

    def put(self, slot: int, rank: int, offset: int, page: Page) -> None:
        """One block's bytes arrive in a slot."""
        self.pages.setdefault(slot, {})[rank, offset] = page.copy()

    def get(self, slot: int, rank: int, offset: int) -> Page:
        """One block's bytes as they lie in a slot; an empty Page where nothing was written."""
        return self.pages.get(slot, {}).get((rank, offset), Page())

    def chunk(self, slot: int) -> dict[tuple[int, int], Page]:
        """All that a slot holds, copied."""
        return {where: page.copy() for where, page in self.pages.get(slot, {}).items()}

    def fill(self, slot: int, chunk: dict[tuple[int, int], Page]) -> None:
        """Replace all that a slot holds."""
        self.pages[slot] = {where: page.copy() for where, page in chunk.items()}


BLOCK_BYTES = 4096
COPY_S = 0.25
"""What every copy reports: so many bytes for each block where it went well, and so many seconds."""


class DeviceClaim(NamedTuple):
    """The owner of a claim for one device job on one rank."""

    job_id: int
    rank: int


@dataclass(slots=True)
class Forward:
    """The share of one request in one step: positions ``start .. start + count - 1``.

    ``tables[g]`` is the request's block table of group g at that time; ``digests`` is the request's own list,
    which grows as the device samples.
    """

    req_id: str
    start: int
    count: int
    tables: tuple[tuple[int, ...], ...]
    digests: list[bytes]


@dataclass(slots=True)
class _Copy:
    job: TransferJob
    weights: int
    """The version of the weights when it was submitted."""
    flushed: bool = False


class Device:
    """All ranks of one engine. Knobs are predicates over ``(job, rank)`` and may be set at any time.

    ``hold``: its reports wait. ``fail``: its copy raises. ``lose``: its report never comes. ``repeat``: its
    report comes twice (the second time in a later step). ``reorder``: reports of a step are shuffled.
    ``crank_chance``: the chance of each queue's head to be copied, tried again until it fails once per step;
    1.0 copies all at once, 0.0 leaves the crank to the test. ``loads_before_forward``: a load may be copied
    before the forward of its step.
    """

    def __init__(
        self, geometry: Geometry, *, ranks: int = 1, blocks: int = 64, memory: SlotMemory | None = None, seed: int = 0
    ) -> None:
        self.geometry = geometry
        self.ranks = ranks
        self.memory = memory or SlotMemory()
        self.lineage = Lineage()
        self.weights = 0
        self.hold: Predicate = never
        self.fail: Predicate = never
        self.lose: Predicate = never
        self.repeat: Predicate = never
        self.reorder = False
        self.crank_chance = 1.0
        self.loads_before_forward = False
        self.copies = {TransferKind.STORE: 0, TransferKind.LOAD: 0}
        """Blocks copied on rank 0, per direction."""
        self.loaded_jobs: list[TransferJob] = []
        """Every load job ever submitted."""
        self.stored_jobs: list[TransferJob] = []
        """Every store job ever submitted."""
        self._random = random.Random(seed)
        self._blocks = [[Page() for _ in range(blocks)] for _ in range(ranks)]
        self._queues: dict[tuple[int, TransferKind], list[_Copy]] = {
            (rank, kind): [] for rank in range(ranks) for kind in TransferKind
        }
        self._done: list[list[tuple[TransferJob, bool]]] = [[] for _ in range(ranks)]
        self._again: list[list[JobReport]] = [[] for _ in range(ranks)]
        self._outdated: set[int] = set()
        self._wanted: dict[int, tuple[int, int, list[bytes]]] = {}

    # --- what the engine says ------------------------------------------------------------------------

    def expect(self, block_id: int, group: int, index: int, digests: list[bytes]) -> None:
        """From now on block ``block_id`` is block ``index`` of the request with ``digests``, in ``group``."""
        self._wanted[block_id] = (group, index, digests)

    def execute(self, meta: OffloadingConnectorMetadata, forwards: Sequence[Forward]) -> list[WorkerOutput]:
        """One step on all ranks, in the order of an engine's worker."""
        flushes = set(meta.jobs_to_flush)
        self._outdated.update(meta.loads_to_fail)
        late = [job.job_id for job in meta.store_jobs if job.after_compute and job.job_id in flushes]
        assert not late, f"jobs {late} are to be read before the step and are computed by it"
        for rank in range(self.ranks):
            self._submit(rank, (job for job in meta.store_jobs if not job.after_compute))
            self._flush(rank, flushes)
            self._submit(rank, meta.load_jobs)
            if self.loads_before_forward:
                self._turn(rank, TransferKind.LOAD)
        self.loaded_jobs += meta.load_jobs
        self.stored_jobs += meta.store_jobs
        self._forward(forwards)
        for rank in range(self.ranks):
            self._submit(rank, (job for job in meta.store_jobs if job.after_compute))
            for kind in TransferKind:
                self._turn(rank, kind)
        return [self._collect(rank) for rank in range(self.ranks)]

    def delivered(self, reports: Iterable[JobReport]) -> None:
        """The scheduler half has been handed these reports: their slots are no longer ours."""
        for report in reports:
            self.memory.let_go(DeviceClaim(report.job_id, report.rank))

    # --- the crank -----------------------------------------------------------------------------------

    def crank(self, kind: TransferKind, count: int | None = None, *, rank: int | None = None) -> int:
        """Copy the first ``count`` jobs of a direction (None: all), on one rank or on all; how many were copied."""
        copied = 0
        for at in range(self.ranks) if rank is None else (rank,):
            queue = self._queues[at, kind]
            for _ in range(len(queue) if count is None else min(count, len(queue))):
                self._copy(at, queue.pop(0))
                copied += 1
        return copied

    def fail_late(self, job_ids: Iterable[int]) -> None:
        """Jobs that were copied and not reported yet turn out to have failed."""
        self._outdated.update(job_ids)

    def waiting(self, kind: TransferKind, rank: int = 0) -> list[int]:
        """Ids of submitted jobs that nobody has copied yet."""
        return [copy.job.job_id for copy in self._queues[rank, kind]]

    def unreported(self, rank: int = 0) -> list[int]:
        """Ids of copied jobs whose reports wait."""
        return [job.job_id for job, _ in self._done[rank]]

    def _turn(self, rank: int, kind: TransferKind) -> None:
        while self._queues[rank, kind] and self._random.random() < self.crank_chance:
            self.crank(kind, 1, rank=rank)

    def _submit(self, rank: int, jobs: Iterable[TransferJob]) -> None:
        for job in jobs:
            slots = [int(slot) for part in job.transfers for slot in part.slots]
            self.memory.claim(DeviceClaim(job.job_id, rank), slots, write=job.kind is TransferKind.STORE)
            null = self.geometry.null_block_id
            moved = [int(block) for part in job.transfers for block in part.block_ids]
            assert null not in moved, f"job {job.job_id} of {job.req_id} moves the null block"
            self._queues[rank, job.kind].append(_Copy(job, self.weights))

    def _flush(self, rank: int, job_ids: set[int]) -> None:
        queue = self._queues[rank, TransferKind.STORE]
        due = [copy for copy in queue if copy.job.job_id in job_ids]
        queue[:] = [copy for copy in queue if copy.job.job_id not in job_ids]
        for copy in due:
            copy.flushed = True
            self._copy(rank, copy)

    def _copy(self, rank: int, copy: _Copy) -> None:
        job = copy.job
        failed = self.fail(job, rank)
        for part in job.transfers if not failed else ():
            for block, slot, offset in zip(
                part.block_ids.tolist(), part.slots.tolist(), part.offsets.tolist(), strict=True
            ):
                if job.kind is TransferKind.STORE:
                    self.memory.put(slot, rank, offset, self._blocks[rank][block])
                else:
                    self._load(rank, copy, part.group, block, self.memory.get(slot, rank, offset))
                if rank == 0:
                    self.copies[job.kind] += 1
        self._done[rank].append((job, not failed and not job.doomed))

    def _load(self, rank: int, copy: _Copy, group: int, block: int, page: Page) -> None:
        who = f"load {copy.job.job_id} of {copy.job.req_id}, rank {rank}, block {block}"
        assert page.group == group, f"{who}: found bytes of group {page.group}, expected group {group}"
        wanted_group, index, digests = self._wanted[block]
        assert wanted_group == group, f"{who}: the block belongs to group {wanted_group}"
        size = self.geometry.groups[group].tokens_per_block
        right = digests[index * size : (index + 1) * size]
        assert page.cells == right, f"{who}: found other tokens' bytes than those of its block {index}"
        if copy.weights == self.weights:
            assert page.weights == self.weights, f"{who}: found bytes of weights {page.weights}, now {self.weights}"
        self._about_to_write(rank, block, who)
        self._blocks[rank][block] = page.copy()

    # --- compute ---------------------------------------------------------------------------------------

    def _forward(self, forwards: Sequence[Forward]) -> None:
        for forward in forwards:
            for rank in range(self.ranks):
                self._write(rank, forward)
        for forward in forwards:
            for rank in range(self.ranks):
                self._attend(rank, forward)
            end = forward.start + forward.count
            if end == len(forward.digests):
                last = forward.digests[-1]
                forward.digests.append(self.lineage.extend(last, self.lineage.sample(last)))

    def _write(self, rank: int, forward: Forward) -> None:
        end = forward.start + forward.count
        for group in self.geometry.groups:
            size, table = group.tokens_per_block, forward.tables[group.index]
            for index in range(forward.start // size, -(-end // size)):
                block = table[index]
                assert block != self.geometry.null_block_id, f"{forward.req_id} computes into the null block"
                self._about_to_write(rank, block, f"the forward of {forward.req_id}")
                first, last = max(forward.start, index * size), min(end, (index + 1) * size)
                page = self._blocks[rank][block]
                if first == index * size:
                    page = self._blocks[rank][block] = Page(group.index, [], self.weights)
                assert page.group == group.index, f"{forward.req_id}: block {block} changed its group"
                page.cells[first - index * size :] = forward.digests[first:last]
                page.weights = min(page.weights, self.weights)

    def _attend(self, rank: int, forward: Forward) -> None:
        end = forward.start + forward.count
        for group in self.geometry.groups:
            size, table = group.tokens_per_block, forward.tables[group.index]
            first = 0 if group.sliding_window is None else max(0, forward.start - group.sliding_window + 1)
            for index in range(first // size, -(-end // size)):
                right = forward.digests[index * size : min(end, (index + 1) * size)]
                page = self._blocks[rank][table[index]]
                found = page.cells[: len(right)] if page.group == group.index else []
                assert found == right, (
                    f"{forward.req_id}, rank {rank}, group {group.index}: block {index} (id {table[index]}) "
                    f"does not hold positions {index * size} .. {min(end, (index + 1) * size) - 1} at step "
                    f"{forward.start} + {forward.count}"
                )

    def _about_to_write(self, rank: int, block: int, who: str) -> None:
        for kind in TransferKind:
            for copy in self._queues[rank, kind]:
                assert all(block not in part.block_ids for part in copy.job.transfers), (
                    f"{who} overwrites block {block} on rank {rank} before {kind} {copy.job.job_id} of "
                    f"{copy.job.req_id} is done with it"
                )

    # --- what a key stands for ----------------------------------------------------------------------------

    def check_chunk(self, group: int, block_hash: bytes, chunk: dict[tuple[int, int], Page], who: str) -> None:
        """``chunk`` (by rank and offset) holds on every rank just the bytes that the key stands for."""
        size, count = self.geometry.groups[group].tokens_per_block, self.geometry.blocks_per_chunk
        digests = self.lineage.span(block_hash, size * count)
        for rank in range(self.ranks):
            for offset in range(count):
                page = chunk.get((rank, offset), Page())
                right = list(digests[offset * size : (offset + 1) * size])
                assert page.group == group, f"{who}: rank {rank} block {offset} is of group {page.group}, not {group}"
                assert page.cells == right, f"{who}: rank {rank} block {offset} holds other tokens' bytes"
                assert page.weights == self.weights, f"{who}: rank {rank} block {offset} was computed by old weights"

    # --- reports -----------------------------------------------------------------------------------------

    def _collect(self, rank: int) -> WorkerOutput:
        ready: list[tuple[TransferJob, bool]] = []
        kept: list[tuple[TransferJob, bool]] = []
        for job, ok in self._done[rank]:
            (kept if self.hold(job, rank) else ready).append((job, ok))
        self._done[rank] = kept
        ready = [(job, ok) for job, ok in ready if not self.lose(job, rank)]
        if self.reorder:
            self._random.shuffle(ready)
        ready = [(job, ok and job.job_id not in self._outdated) for job, ok in ready]
        reports = [_said(job, rank, ok) for job, ok in ready]
        again, self._again[rank] = self._again[rank], []
        self._again[rank] += [_said(job, rank, ok) for job, ok in ready if self.repeat(job, rank)]
        loads = [(job, ok) for job, ok in ready if job.kind is TransferKind.LOAD]
        unfilled = (block for job, ok in loads if not ok for part in job.transfers for block in part.block_ids.tolist())
        return WorkerOutput(
            reports=tuple(reports + again),
            finished_recving=frozenset(job.req_id for job, _ in loads),
            failed_recving=frozenset(job.req_id for job, ok in loads if not ok),
            failed_block_ids=frozenset(unfilled),
        )


def _said(job: TransferJob, rank: int, ok: bool) -> JobReport:
    blocks = sum(len(part.block_ids) for part in job.transfers)
    return JobReport(job.job_id, rank, ok, nbytes=BLOCK_BYTES * blocks if ok else 0, seconds=COPY_S)
