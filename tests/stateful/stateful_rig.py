"""Real scheduler half, manager, host tier, runner and I/O worker over stores that misbehave, on one thread.

In: a Setup. Out: a Rig: an engine to step, devices and stores to trouble, cranks to turn. Never: a thread, real time, a
file; a choice of its own (what happens next is the caller's, from one seed).

The device double's pages are written into a real host region as bytes, so that what a tier stores is sealed in a real
envelope and what it brings is verified by the real code; a page that comes back is read out of the bytes again.
"""

from __future__ import annotations

import errno
import random
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from orlop.core import (
    DIGEST_BYTES,
    FIRST_GENERATION,
    PAGE_BYTES,
    Geometry,
    Namespace,
    Outcome,
    RegionLayout,
    ReqContext,
    TierAnswer,
    TierJob,
    TierResult,
    TransferKind,
    unpack_key,
)
from orlop.errors import StoreError
from orlop.host.policies import load_policy
from orlop.host.region import HostRegion
from orlop.host.tier import HostTier
from orlop.scheduler.scheduler import OffloadingConnectorScheduler, SchedulerOptions
from orlop.testing.clock import FakeClock
from orlop.testing.device import Device, Page, SlotMemory
from orlop.testing.doubles import RecordingManager
from orlop.testing.inline_link import CrankedPump, InlineLink, InlineWorker
from orlop.testing.request_runner import RequestRunner
from orlop.testing.rig import plain_namespace
from orlop.tiering.base import ChunkStore, SecondaryTierManager, StoredChunk
from orlop.tiering.breaker import BreakerOptions
from orlop.tiering.envelope import part_checksum
from orlop.tiering.io_messages import StoreSpec
from orlop.tiering.manager import TierEntry, TieringManager, TieringOptions
from orlop.tiering.runner import RunnerOptions, TierRunner

# --- bytes ----------------------------------------------------------------------------------------------

HEAD = struct.Struct("<iIQ")
"""Of a page: its group, rank and number of cells in one word, its weights."""


class RegionMemory(SlotMemory):
    """Slots whose pages are bytes of a host region, with the checksums that a worker half would write."""

    def __init__(self, geometry: Geometry, ranks: int, slots: int) -> None:
        super().__init__()
        longest = max(group.tokens_per_block for group in geometry.groups)
        self.page_bytes = HEAD.size + DIGEST_BYTES * longest
        self._longest = longest
        self._blocks = geometry.blocks_per_chunk
        self._ranks = ranks
        layout = RegionLayout(slots, self._blocks, ((self.page_bytes,) * len(geometry.groups),) * ranks)
        self.region = HostRegion.create(layout, prefault=False)

    def put(self, slot: int, rank: int, offset: int, page: Page) -> None:
        view = self._view(slot, rank, offset)
        body = HEAD.pack(page.group, rank << 16 | len(page.cells), page.weights) + b"".join(page.cells)
        view[: len(body)] = body
        self.region.checksums[slot, rank] = self.checksum(slot, rank)

    def checksum(self, slot: int, rank: int) -> int:
        """That of what a rank's part holds now."""
        layout = self.region.layout
        start = layout.part_offset(rank, 0)
        return part_checksum(self.region.view(slot, layout.slot_bytes)[start : start + layout.part_bytes(rank, 0)])

    def get(self, slot: int, rank: int, offset: int) -> Page:
        view = self._view(slot, rank, offset)
        group, word, weights = HEAD.unpack_from(view)
        cells = word & 0xFFFF
        if word >> 16 != rank or cells > self._longest:
            return Page()
        body = bytes(view[HEAD.size : HEAD.size + DIGEST_BYTES * cells])
        return Page(group, [body[i : i + DIGEST_BYTES] for i in range(0, len(body), DIGEST_BYTES)], weights)

    def chunk(self, slot: int) -> dict[tuple[int, int], Page]:
        return {(r, o): self.get(slot, r, o) for r in range(self._ranks) for o in range(self._blocks)}

    def fill(self, slot: int, chunk: dict[tuple[int, int], Page]) -> None:
        raise NotImplementedError("tiers fill slots with bytes here")

    def _view(self, slot: int, rank: int, offset: int) -> memoryview:
        layout = self.region.layout
        start = layout.part_offset(rank, 0) + offset * self.page_bytes
        return self.region.view(slot, layout.slot_bytes)[start : start + self.page_bytes]


# --- a store --------------------------------------------------------------------------------------------

ERRORS: tuple[BaseException, ...] = (
    OSError(errno.ENOSPC, "no room"),
    OSError(errno.EIO, "bad disk"),
    PermissionError(errno.EACCES, "not yours"),
    TimeoutError("too slow"),
    StoreError("the store has failed"),
    ValueError("a fault of the store's own"),
    MemoryError("no memory"),
    SystemExit(3),
    KeyboardInterrupt(),
)
FAULTS = {
    "contains": ("raises", "all", "none", "miscounts"),
    "read": ("raises", "half", "missing", "corrupt", "denied", "no-op", "bit", "header bit", "other", "miscounts"),
    "write": ("raises", "full", "half", "denied", "no-op", "bit", "other", "zeros", "miscounts"),
    "delete": ("raises",),
}
"""Per verb, what it can do other than what it was asked for."""


class TroubledStore(ChunkStore):
    """A dictionary that does something else when told: each verb takes the next entry of its ``faults``.

    ``chance`` of a call to do something else by itself, of ``dice``.
    """

    def __init__(self, dice: random.Random | None = None) -> None:
        self.chance = 0.0
        self.dice = dice or random.Random(0)
        self.kept: dict[bytes, tuple[bytes, bytes]] = {}
        self.faults: dict[str, deque[str]] = {verb: deque() for verb in FAULTS}
        self.refuses_to_open = False
        self.engine_is_inside = False
        """Whether the engine is in the middle of a call: then nobody may be here."""
        self.happened: Counter[str] = Counter()
        self._raised = 0

    def _fault(self, verb: str) -> str:
        assert not self.engine_is_inside, f"the engine's thread waits for {verb}"
        fault = self.faults[verb].popleft() if self.faults[verb] else ""
        if not fault and self.dice.random() < self.chance:
            fault = self.dice.choice(FAULTS[verb])
        if fault:
            self.happened[f"{verb} {fault}"] += 1
        if fault == "raises":
            self._raised += 1
            error = ERRORS[self._raised % len(ERRORS)]
            raise type(error)(*error.args)
        return fault

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        fault = self._fault("contains")
        if fault in ("all", "none"):
            return [fault == "all"] * len(keys)
        return [key in self.kept for key in keys][fault == "miscounts" :]

    def read_into(
        self, keys: Sequence[bytes], headers: Sequence[memoryview], views: Sequence[memoryview]
    ) -> Sequence[Outcome]:
        fault = self._fault("read")
        if fault in ("missing", "corrupt", "denied"):
            return [Outcome(fault)] * len(keys)
        if fault == "no-op":
            return [Outcome.OK] * len(keys)
        outcomes = []
        for i, (key, header, view) in enumerate(zip(keys, headers, views, strict=True)):
            if fault == "half" and i == len(keys) // 2:
                raise OSError(errno.EIO, "half of it")
            found = self.kept.get(key)
            if fault == "other":
                found = next((kept for other, kept in self.kept.items() if other != key), found)
            if found is None:
                outcomes.append(Outcome.MISSING)
                continue
            header[:], view[:] = found
            if fault.endswith("bit"):
                where = header if fault.startswith("header") else view
                where[HEAD.size + 1] ^= 4
            outcomes.append(Outcome.OK)
        return outcomes[fault == "miscounts" :]

    def write(
        self, keys: Sequence[bytes], headers: Sequence[memoryview], views: Sequence[memoryview]
    ) -> Sequence[Outcome]:
        fault = self._fault("write")
        if fault in ("full", "denied"):
            return [Outcome.NO_SPACE if fault == "full" else Outcome.DENIED] * len(keys)
        kept = len(keys) // 2 if fault == "half" else len(keys)
        for key, header, view in zip(keys[:kept], headers, views, strict=False):
            body = bytearray(view)
            if fault == "bit":
                body[HEAD.size + 2] ^= 16
            if fault == "other":
                header, body = next(iter(self.kept.values()), (header, body))  # type: ignore[assignment]
            if fault == "zeros":
                body = bytearray(len(body))
            if fault != "no-op":
                self.kept[key] = bytes(header), bytes(body)
        outcomes = [Outcome.OK] * kept + [Outcome.NO_SPACE] * (len(keys) - kept)
        return outcomes[fault == "miscounts" :]

    def delete(self, keys: Sequence[bytes]) -> int:
        self._fault("delete")
        return sum(self.kept.pop(key, None) is not None for key in keys)

    def scan(self) -> Iterator[StoredChunk]:
        return iter([StoredChunk(key, len(body), 0.0) for key, (_, body) in self.kept.items()])


_stores: dict[str, TroubledStore] = {}


def open_store(name: str) -> ChunkStore:
    """The factory named in a StoreSpec."""
    store = _stores[name]
    if store.refuses_to_open:
        raise OSError(errno.EIO, "the store does not open")
    return store


# --- a tier, watched --------------------------------------------------------------------------------------


class WatchedTier(SecondaryTierManager):
    """A tier between manager and runner that holds both to the contract, and cranks.

    A job's slots are claimed from its submission until the runner has said that they are let go; the worker may touch
    them only in between. What a tier says it has brought is compared with what its key stands for.
    """

    def __init__(
        self, memory: RegionMemory, device: Device, clock: FakeClock, options: RunnerOptions, dice: random.Random
    ) -> None:
        self.name = options.name
        self.store = _stores[self.name] = TroubledStore(dice)
        self.hang_chance = 0.0
        self.memory = memory
        self.device = device
        self.auto = True
        self.lives: dict[int, bool] = {}
        self.jobs: dict[int, TierJob] = {}
        """Submitted and not let go of."""
        self.reported: set[int] = set()
        self.hanging: set[int] = set()
        """Reported, and not let go of."""
        self.asked: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.resets = 0
        """How many resets there were: what was asked for before the last one is nobody's."""
        self.to_hang = 0
        """How many of the next verbs hang."""
        self.patience = 0
        self._dead_steps = self._closed_steps = self._hung_steps = 0
        self._resets_of: dict[int, int] = {}
        self.runner = TierRunner(
            options,
            memory.region,
            StoreSpec("stateful_rig:open_store", {"name": self.name}),
            clock=clock,
            make_pump=partial(CrankedPump, clock=clock, touched=self._touched),
        )
        pump = self.runner._pump
        assert isinstance(pump, CrankedPump)
        self.pump = pump

    def _touched(self, job_id: int) -> None:
        assert job_id in self.jobs, f"{self.name}: the worker touches the slots of job {job_id}, which were let go of"

    # --- cranks -----------------------------------------------------------------------------------------

    @property
    def link(self) -> InlineLink | None:
        return self.pump.link

    @property
    def worker(self) -> InlineWorker | None:
        return self.pump.link.worker if self.pump.link else None

    def turn(self) -> None:
        """Everything that can move moves, there and back."""
        self.pump.send()
        worker = self.worker
        while worker is not None and self._begin(worker) + worker.finish():
            pass
        self.pump.receive()

    def turn_once(self, *, last_first: bool) -> None:
        """One turn of each crank."""
        self.pump.send()
        if self.worker is not None:
            self._begin(self.worker)
            self.worker.finish(last_first=last_first)
        self.pump.receive()

    def _begin(self, worker: InlineWorker) -> int:
        if self.store.dice.random() < self.hang_chance:
            self.to_hang += 1
        began = worker.begin(stuck=self.to_hang)
        self.counts["stuck verbs"] += min(began, self.to_hang)
        self.to_hang = max(0, self.to_hang - began)
        return began

    def recover(self, steps: int) -> None:
        """Once per step: after ``steps`` of them a dead worker is started again, after more what hangs comes back."""
        dead = self.link is None and self.pump.dying is None
        self._dead_steps = self._dead_steps + 1 if dead else 0
        if self._dead_steps > steps:
            self.pump.restart()
        self._closed_steps = self._closed_steps + 1 if self.store.refuses_to_open else 0
        if self._closed_steps > 2 * steps:
            self.store.refuses_to_open = False
        self._hung_steps = self._hung_steps + 1 if self.hangs else 0
        if self._hung_steps > self.patience:
            self.release()

    @property
    def hangs(self) -> bool:
        """Whether some verb hangs, or is going to."""
        stuck = self.worker is not None and any(begun.stuck for begun in self.worker.begun)
        return stuck or self.to_hang > 0 or self.pump.dying is not None

    def release(self) -> None:
        """Verbs that hang come back; a worker that has outlived its end is gone."""
        self.to_hang = 0
        if self.worker:
            self.counts["released verbs"] += self.worker.release()
        if self.pump.dying is not None:
            self.pump.dying.die()
            self.pump.receive()

    def kill(self, *, outlives: bool, unheard: bool) -> None:
        """The I/O process is killed, and its owner sees it."""
        link = self.link
        assert link is not None
        link.outlives, link.unheard = outlives, unheard
        link.kill()
        while self.link is not None:
            self.pump.receive()
        self.counts["killed workers"] += 1
        self.counts["killed workers that outlive it"] += self.pump.dying is not None

    def heal(self) -> None:
        """From now on the store does what it is told, and a worker is there."""
        self.auto = True
        self.to_hang = 0
        self.hang_chance = self.store.chance = 0.0
        self.store.refuses_to_open = False
        for faults in self.store.faults.values():
            faults.clear()
        self.pump.receive()
        self.pump.restart()

    # --- the contract -----------------------------------------------------------------------------------

    def lookup_prefix(
        self,
        lookup_id: int,
        keys: Sequence[bytes],
        context: ReqContext,
        *,
        namespace: Namespace,
        stop_at_miss: bool = True,
        now: float,
    ) -> TierAnswer | None:
        self._live("lookup_prefix", context)
        answer = self.runner.lookup_prefix(
            lookup_id, keys, context, namespace=namespace, stop_at_miss=stop_at_miss, now=now
        )
        if answer is None:
            self.asked.add(lookup_id)
        return answer

    def get_answers(self) -> Sequence[TierAnswer]:
        answers = self.runner.get_answers()
        for answer in answers:
            assert answer.lookup_id in self.asked, f"{self.name}: lookup {answer.lookup_id} is answered twice"
            self.asked.discard(answer.lookup_id)
        return answers

    def submit_store(self, job: TierJob, *, now: float) -> None:
        for key, slot in zip(job.keys, job.slots.tolist(), strict=True):
            self._check(key, slot, f"cascade {job.job_id}")
        self._submit(job)
        self.runner.submit_store(job, now=now)

    def submit_load(self, job: TierJob, *, now: float) -> None:
        self._submit(job)
        self.runner.submit_load(job, now=now)

    def _submit(self, job: TierJob) -> None:
        for context in job.contexts or (None,):
            self._live(f"submit {job.kind}", context)
        assert job.job_id not in self._resets_of, f"job {job.job_id} is submitted twice"
        self.memory.claim((self.name, job.job_id), job.slots.tolist(), write=job.kind is TransferKind.LOAD)
        self.jobs[job.job_id] = job
        self._resets_of[job.job_id] = self.resets
        self.counts[f"submit {job.kind}"] += 1
        self.counts["chunks submitted before they leave"] += len(job.keys) if not job.contexts else 0

    def get_finished_jobs(self) -> Sequence[TierResult]:
        results = self.runner.get_finished_jobs()
        for result in results:
            assert result.job_id in self._resets_of, f"{self.name}: job {result.job_id} was never submitted"
            assert result.job_id not in self.reported, f"{self.name}: job {result.job_id} is reported twice"
            job = self.jobs[result.job_id]
            assert len(result.outcomes) == len(job.keys)
            self.reported.add(result.job_id)
            self._check_brought(job, result)
            if result.released:
                self._let_go(result.job_id)
            else:
                self.hanging.add(result.job_id)
                self.counts["reported while held"] += 1
        return results

    def _check_brought(self, job: TierJob, result: TierResult) -> None:
        region = self.memory.region
        for key, slot, outcome in zip(job.keys, job.slots.tolist(), result.outcomes, strict=True):
            self.counts[f"{job.kind} {outcome}"] += 1
            # What was asked for before a reset is right for what was then: only the bytes of today can be judged.
            if job.kind is TransferKind.LOAD and outcome is Outcome.OK and self._resets_of[job.job_id] == self.resets:
                self._check(key, slot, f"promotion {job.job_id}")
                for rank in range(region.layout.ranks):
                    assert region.checksums[slot, rank] == self.memory.checksum(slot, rank), f"slot {slot}: checksum"

    def get_released_jobs(self) -> Sequence[int]:
        released = self.runner.get_released_jobs()
        for job_id in released:
            assert job_id in self.hanging, f"{self.name}: job {job_id} is let go of, and was not held"
            self.hanging.remove(job_id)
            self._let_go(job_id)
            self.counts["released late"] += 1
        return released

    def _let_go(self, job_id: int) -> None:
        del self.jobs[job_id]
        self.memory.let_go((self.name, job_id))

    def _check(self, key: bytes, slot: int, who: str) -> None:
        block_hash, group = unpack_key(key)
        self.device.check_chunk(group, block_hash, self.memory.chunk(slot), f"{self.name}: {who} slot {slot}")

    def touch(self, keys: Sequence[bytes], context: ReqContext) -> None:
        self._live("touch", context)
        self.runner.touch(keys, context)

    def on_new_request(self, context: ReqContext) -> None:
        assert context.life not in self.lives, f"life {context.life} begins a second time"
        self.lives[context.life] = True
        self.runner.on_new_request(context)

    def on_request_finished(self, context: ReqContext) -> None:
        self._live("on_request_finished", context)
        self.lives[context.life] = False
        self.runner.on_request_finished(context)

    def _live(self, name: str, context: ReqContext | None) -> None:
        if context is not None:
            assert context.life in self.lives, f"{name} for life {context.life}, which never began"
            assert self.lives[context.life], f"{name} for life {context.life} after on_request_finished"

    def on_schedule_end(self, *, now: float) -> None:
        self.runner.on_schedule_end(now=now)

    def note_hung(self, count: int, *, now: float) -> None:
        self.runner.note_hung(count, now=now)

    def get_stats(self) -> Mapping[str, float]:
        return self.runner.get_stats()

    def clear(self) -> None:
        self.runner.clear()

    def shutdown(self, deadline_s: float) -> None:
        self.runner.shutdown(deadline_s)


# --- all of it ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """One engine and its tiers. Times in seconds."""

    geometry: Geometry
    ranks: int = 1
    blocks_per_group: int = 60
    slots: int = 40
    policy: str = "lru"
    tiers: int = 1
    async_scheduling: bool = False
    token_budget: int = 16
    prefix_caching: bool = True
    skip_empty_outputs: bool = True
    loads_before_forward: bool = False
    offload_decode: bool = True
    max_chunks_per_step: int = 2048
    max_promotions_per_step: int = 2048
    look_ahead: int = 0
    max_joint_chunks: int = 16
    gather_steps: int = 1
    store_deadline_s: float = 2.0
    lookup_s: float = 0.2
    promotion_s: float = 1.0
    cascade_s: float = 1.0
    keep_tiers_on_reset: bool = False
    store_after: int = 1
    evicted: tuple[bool, ...] = (False, False)
    """Per tier whether it is written on eviction."""
    evicted_chunks: int = 4
    threads: int = 2
    max_retired: int = 64
    queue_chunks: int = 64
    pace: int = 1
    """Steps after each act."""
    arrivals: float = 0.0
    """The chance that a request comes by itself before a step."""
    faults: float = 0.0
    """The chance that a call of a store fails or lies by itself."""
    hangs: float = 0.0
    """The chance that a verb hangs by itself."""
    hung_steps: int = 30
    """Steps after which what hangs comes back by itself."""
    crank_chance: float = 1.0
    seed: int = 0

    @property
    def blocks(self) -> int:
        """Device blocks, the null block included."""
        return self.blocks_per_group * len(self.geometry.groups)


@dataclass
class Rig:
    """What ``make`` has put together."""

    setup: Setup
    clock: FakeClock
    device: Device
    memory: RegionMemory
    tiers: list[WatchedTier]
    manager: TieringManager
    recorded: RecordingManager
    scheduler: OffloadingConnectorScheduler
    engine: RequestRunner
    watch: list[Callable[[], None]] = field(default_factory=list)

    def close(self) -> None:
        """Let go of the memory."""
        self.memory.region.close()
        for tier in self.tiers:
            _stores.pop(tier.name, None)


def make(setup: Setup) -> Rig:
    """A Rig with nothing wrong yet."""
    clock = FakeClock()
    dice = random.Random(setup.seed)
    memory = RegionMemory(setup.geometry, setup.ranks, setup.slots)
    device = Device(setup.geometry, ranks=setup.ranks, blocks=setup.blocks, memory=memory, seed=setup.seed)
    device.loads_before_forward = setup.loads_before_forward
    device.crank_chance = setup.crank_chance
    payload = memory.region.layout.payload_bytes(0)
    assert payload == setup.ranks * PAGE_BYTES
    runner_options = {
        "threads": setup.threads,
        "lookup_threads": 1,
        "queue_bytes": setup.queue_chunks * payload,
        "load_queue_bytes": setup.queue_chunks * payload,
        "load_wait_s": setup.promotion_s,
        "store_wait_s": setup.cascade_s,
        "max_retired": setup.max_retired,
        "breaker": BreakerOptions(failures=3, open_s=0.1, max_open_s=0.4),
    }
    tiers = [
        WatchedTier(memory, device, clock, RunnerOptions(f"{i}:troubled", **runner_options), dice)  # type: ignore[arg-type]
        for i in range(setup.tiers)
    ]
    for tier in tiers:
        tier.store.chance, tier.hang_chance, tier.patience = setup.faults, setup.hangs, setup.hung_steps
    entries = [
        TierEntry(
            tier,
            lookup_s=setup.lookup_s,
            promotion_s=setup.promotion_s,
            cascade_s=setup.cascade_s,
            store_after=setup.store_after,
            store=not evicted,
            evicted_bytes=setup.evicted_chunks * payload if evicted else 0,
        )
        for tier, evicted in zip(tiers, setup.evicted, strict=False)
    ]
    options = TieringOptions(
        (payload,) * len(setup.geometry.groups),
        keep_tiers_on_reset=setup.keep_tiers_on_reset,
        max_promotions_per_step=setup.max_promotions_per_step,
    )
    host = HostTier(setup.slots, load_policy(setup.policy, setup.slots))
    manager = TieringManager(host, entries, plain_namespace, FIRST_GENERATION, options)
    recorded = RecordingManager(manager, device)
    scheduler = OffloadingConnectorScheduler(
        setup.geometry,
        recorded,
        SchedulerOptions(
            ranks=setup.ranks,
            offload_decode=setup.offload_decode,
            prefix_caching=setup.prefix_caching,
            store_deadline_s=setup.store_deadline_s,
            lookup_wait_s=setup.lookup_s,
            promotion_wait_s=setup.promotion_s,
            max_chunks_per_step=setup.max_chunks_per_step,
            max_joint_chunks=setup.max_joint_chunks,
            gather_steps=setup.gather_steps,
            look_ahead=setup.look_ahead,
        ),
    )
    engine = RequestRunner(
        scheduler,
        setup.geometry,
        blocks=setup.blocks,
        ranks=setup.ranks,
        token_budget=setup.token_budget,
        async_scheduling=setup.async_scheduling,
        prefix_caching=setup.prefix_caching,
        clock=clock,
        step_s=0.02,
        device=device,
        skip_empty_outputs=setup.skip_empty_outputs,
        checks=(lambda: manager.check(scheduler.open_reservations()),),
    )
    return Rig(setup, clock, device, memory, tiers, manager, recorded, scheduler, engine)
