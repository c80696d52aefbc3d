"""A small model of an engine's scheduler that drives the scheduler half as an engine does.

In: requests, and when to abort, preempt or reset. Out: steps, up to the end of all requests and of all
transfers; an AssertionError when the connector's contract is broken. Never: a model, a thread, real time.

It has what the contract is about: a block pool with reference counts and prefix caching, waiting and running
queues, chunked prefill under a token budget, preemption of the last running request when blocks run out,
asynchronous loads, KV groups with recycled sliding-window blocks, several ranks, and asynchronous
scheduling::

    sync    schedule 1, execute 1, hand in 1, schedule 2, execute 2, hand in 2, ...
    async   schedule 1, execute 1, schedule 2, execute 2, hand in 1, schedule 3, execute 3, hand in 2, ...

What a step computes is written by the ``Device`` double when the step is executed; a sampled token is
known there at once, and to the scheduler only when the step is handed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from orlop.core import CacheEvent, Geometry, JobReport, OffloadingConnectorMetadata, WorkerOutput
from orlop.testing.clock import FakeClock
from orlop.testing.device import Device, Forward, Lineage


class SchedulerHalf(Protocol):
    """The hooks of OffloadingConnectorScheduler that an engine calls, and the fences that tests look at."""

    @property
    def _block_id_to_pending_jobs(self) -> Mapping[int, set[int]]: ...
    def on_new_request(self, request: Any, *, now: float) -> None: ...
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int, *, now: float
    ) -> tuple[int | None, bool]: ...
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int, *, now: float) -> None: ...
    def build_connector_meta(self, scheduler_output: Any, *, now: float) -> OffloadingConnectorMetadata: ...
    def update_connector_output(self, output: WorkerOutput, *, now: float) -> None: ...
    def request_finished(self, request: Any, *, now: float) -> tuple[bool, Any]: ...
    def has_pending_push_work(self) -> bool: ...
    def reset_cache(self, generation: bytes, *, now: float, device_cleared: bool = True) -> None: ...
    def take_events(self) -> Sequence[CacheEvent]: ...
    def get_stats(self) -> Mapping[str, float]: ...
    def check(self) -> None: ...


class Status(StrEnum):
    WAITING = "waiting"
    WAITING_FOR_LOAD = "waiting_for_load"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    ABORTED = "aborted"


NEVER = 10**9
"""As a count of cached blocks: what such a request has computed is not to be shared."""

ENDED = (Status.FINISHED, Status.ABORTED)


@dataclass(eq=False)
class EngineRequest:
    """One request as the engine keeps it, with vLLM's attribute names where the connector reads them.

    ``digests[p]`` is the digest of tokens 0 .. p as the device knows them: up to one token ahead of
    ``token_ids``. ``block_ids[g]`` is the block table of group g. ``was_external``: tokens that loads have
    brought. ``stop_after``: it stops by itself after so many tokens, which no scheduler can foresee, so with
    asynchronous scheduling a step too many is in flight. ``admitted``: whether it has been in a scheduler
    output since it was added.
    """

    request_id: str
    prompt: list[int]
    max_tokens: int
    groups: int
    stop_after: int | None = None
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_output_placeholders: int = 0
    token_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    block_ids: list[list[int]] = field(default_factory=list)
    epoch: int = 0
    local_tokens: int = 0
    external_tokens: int = 0
    was_external: int = 0
    loading: bool = False
    load_failed: bool = False
    admitted: bool = False
    num_cached: list[int] = field(default_factory=list)
    asked: int = 0
    first_step: int | None = None
    """The step that computed its first token."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def output_token_ids(self) -> list[int]:
        """What it has said so far."""
        return self.token_ids[len(self.prompt) :]

    @property
    def ended(self) -> bool:
        return self.status in ENDED


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """A request's block tables after an allocation, prefix hits included."""

    ids: tuple[list[int], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.ids


@dataclass(frozen=True, slots=True)
class NewRequest:
    """An entry of ``scheduled_new_reqs``."""

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass(slots=True)
class CachedRequests:
    """The parallel lists of requests that were scheduled before."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class StepOutput:
    """What the scheduler decided for one step."""

    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequests = field(default_factory=CachedRequests)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    preempted_req_ids: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Share:
    """One request's part of a dispatched step: its tokens, and the index of the token it samples (or None)."""

    request: EngineRequest
    epoch: int
    count: int
    samples: int | None


class BlockPool:
    """Device blocks: reference counts, a free list in order of use, and the prefix cache. Block 0 is null."""

    def __init__(self, blocks: int, *, prefix_caching: bool = True) -> None:
        self.size = blocks
        self.refs = [0] * blocks
        self._free: dict[int, None] = dict.fromkeys(range(1, blocks))
        self._cached: dict[tuple[int, bytes], int] = {}
        self._key_of: dict[int, tuple[int, bytes]] = {}
        self._prefix_caching = prefix_caching

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def cached(self, group: int, block_hash: bytes) -> int | None:
        """The block that holds these tokens, if the prefix cache knows one."""
        return self._cached.get((group, block_hash))

    def take(self, count: int) -> list[int]:
        """Hand out blocks, least recently used first; what they cached is forgotten."""
        taken = []
        for _ in range(count):
            block = next(iter(self._free))
            del self._free[block]
            self._forget(block)
            self.refs[block] = 1
            taken.append(block)
        return taken

    def share(self, block: int) -> None:
        """One more user of a block that the prefix cache knows."""
        self._free.pop(block, None)
        self.refs[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """One user less of each block; null blocks are skipped."""
        for block in blocks:
            if block == 0:
                continue
            assert self.refs[block] > 0, f"block {block} is given back by nobody who has it"
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self._free[block] = None

    def cache(self, block: int, group: int, block_hash: bytes) -> None:
        """Block ``block`` holds these tokens, from the end of this step on."""
        if self._prefix_caching and (group, block_hash) not in self._cached and block not in self._key_of:
            self._cached[group, block_hash] = block
            self._key_of[block] = (group, block_hash)

    def reset(self) -> None:
        """Forget what is cached; blocks in use stay in use."""
        self._cached.clear()
        self._key_of.clear()

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._cached[key]

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Recount the references from all block tables."""
        refs = [0] * self.size
        for table in tables:
            for block in table:
                refs[block] += block != 0
        assert refs == self.refs, "block references do not add up"
        assert set(self._free) == {b for b in range(1, self.size) if not refs[b]}, "the free list is wrong"


class RequestRunner:
    """The engine. ``scheduler`` is the scheduler half under test; its hooks are called in an engine's order.

    ``blocks``: device blocks, the null block included. ``token_budget``: tokens per step. ``async_scheduling``:
    a queue of depth two. ``step_s``: how far the clock moves per step. ``skip_empty_outputs``: an engine in one
    process does not call ``update_connector_output`` for nothing. ``checks`` are called after every step.
    """

    def __init__(
        self,
        scheduler: SchedulerHalf,
        geometry: Geometry,
        *,
        blocks: int = 64,
        ranks: int = 1,
        token_budget: int = 64,
        max_num_seqs: int = 16,
        async_scheduling: bool = False,
        prefix_caching: bool = True,
        clock: FakeClock | None = None,
        step_s: float = 0.01,
        device: Device | None = None,
        skip_empty_outputs: bool = True,
        checks: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.scheduler = scheduler
        self.geometry = geometry
        self.async_scheduling = async_scheduling
        self.clock = clock or FakeClock()
        self.step_s = step_s
        self.device = device or Device(geometry, ranks=ranks, blocks=blocks)
        self.pool = BlockPool(blocks, prefix_caching=prefix_caching)
        self.token_budget = token_budget
        self.max_num_seqs = max_num_seqs
        self.requests: dict[str, EngineRequest] = {}
        self.waiting: deque[EngineRequest] = deque()
        self.running: list[EngineRequest] = []
        self.steps = 0
        self.last_meta = OffloadingConnectorMetadata()
        self.last_output = StepOutput()
        self.drop_output: Callable[[JobReport], bool] = lambda report: False
        """Which reports get lost between the worker and the scheduler half."""
        self.checks = list(checks)
        self._depth = 2 if async_scheduling else 1
        self._queue: deque[tuple[list[_Share], list[WorkerOutput]]] = deque()
        self._held: list[EngineRequest] = []
        self._preempted: set[str] = set()
        self._recving: dict[str, list[set[int]]] = {}
        self._resets = 0
        self._skip_empty = skip_empty_outputs

    # --- what a client or operator does ------------------------------------------------------------------

    def add(
        self,
        prompt_tokens: Sequence[int],
        max_tokens: int = 1,
        *,
        req_id: str | None = None,
        cache_salt: str | None = None,
        skip_reading_prefix_cache: bool = False,
        stop_after: int | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> EngineRequest:
        """A request arrives. An id may come back once its earlier stay has ended and is no longer loading."""
        req_id = req_id or f"r{len(self.requests)}"
        old = self.requests.get(req_id)
        assert old is None or (old.ended and old not in self._held), f"{req_id} is still here"
        request = EngineRequest(req_id, list(prompt_tokens), max_tokens, len(self.geometry.groups))
        request.cache_salt = cache_salt
        request.stop_after = stop_after
        request.kv_transfer_params = kv_transfer_params
        request.skip_reading_prefix_cache = skip_reading_prefix_cache
        request.block_ids = [[] for _ in self.geometry.groups]
        request.num_cached = [0 for _ in self.geometry.groups]
        request.token_ids = list(prompt_tokens)
        digest = self.device.lineage.root(cache_salt)
        for token in prompt_tokens:
            digest = self.device.lineage.extend(digest, token)
            request.digests.append(digest)
        self._key(request)
        self.requests[req_id] = request
        self.waiting.append(request)
        self.scheduler.on_new_request(request, now=self.clock.now)
        return request

    def abort(self, req_id: str) -> None:
        """A client goes away, whatever the request is doing."""
        request = self.requests[req_id]
        if not request.ended:
            self._end(request, Status.ABORTED)

    def preempt(self, req_id: str) -> None:
        """A running request loses its blocks before the next step, and may come back from the step after."""
        request = self.requests[req_id]
        assert request.status is Status.RUNNING, f"{req_id} is {request.status}, expected running"
        self._preempt(request)

    def reset(self, generation: bytes | None = None, *, new_weights: bool = True, device_cleared: bool = True) -> None:
        """The connector forgets everything, and the prefix cache too, unless the engine cannot clear it."""
        self._resets += 1
        self.device.weights += new_weights
        generation = generation or self._resets.to_bytes(16, "little")
        if not device_cleared:
            self.scheduler.reset_cache(generation, now=self.clock.now, device_cleared=False)
            return
        self.pool.reset()
        for request in self.requests.values():
            request.num_cached = [NEVER if request.num_computed_tokens else 0] * request.groups
        self.scheduler.reset_cache(generation, now=self.clock.now)

    # --- running -----------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """No request left, no output outstanding, nothing pending."""
        live = self.waiting or self.running or self._held
        return not (live or any(shares for shares, _ in self._queue) or self.scheduler.has_pending_push_work())

    def run(self, max_steps: int = 1000, *, until: Callable[[], bool] | None = None) -> int:
        """Step until all requests have ended and nothing is pending (or ``until`` holds); the steps it took."""
        for step in range(max_steps):
            if until() if until else self.idle:
                return step
            self.step()
        if until() if until else self.idle:
            return max_steps
        raise AssertionError(f"not done after {max_steps} steps: {self.describe()}")

    def step(self) -> StepOutput:
        """Schedule one step, execute it, and hand in the output that is due."""
        output, shares = self._schedule()
        now = self.clock.now
        meta = self.scheduler.build_connector_meta(output, now=now)
        forwards = [self._forward(share) for share in shares]
        for share in shares:
            share.request.num_computed_tokens += share.count
            share.request.num_in_flight_tokens += share.count
        self.last_meta, self.last_output = meta, output
        self._queue.append((shares, self.device.execute(meta, forwards)))
        while len(self._queue) >= self._depth:
            self._hand_in(*self._queue.popleft())
        self.steps += 1
        self.clock.advance(self.step_s)
        self.check()
        return output

    def describe(self) -> str:
        """One line on who is where."""
        live = [f"{r.request_id}:{r.status}@{r.num_computed_tokens}" for r in (*self.running, *self.waiting)]
        pending = self.scheduler.has_pending_push_work()
        return f"{live}, holding {[r.request_id for r in self._held]}, pending push work {pending}"

    def check(self) -> None:
        """All that can be recounted after any step."""
        holders = [*self.running, *self.waiting, *self._held]
        self.pool.check(table for request in holders for table in request.block_ids)
        self.scheduler.check()
        for check in self.checks:
            check()

    def check_drained(self) -> None:
        """After ``run()``: every table of the scheduler half is empty and every block is free.

        Fences of stores whose report got lost stay until the blocks are handed out again.
        """
        assert self.idle, self.describe()
        for name in ("_req_status", "_jobs", "_chunks_being_loaded"):
            table = getattr(self.scheduler, name)
            left = any(table) if isinstance(table, list) else bool(table)
            assert not left, f"{name} is left with {table}"
        fences = self.scheduler._block_id_to_pending_jobs
        fencing = {job_id for jobs in fences.values() for job_id in jobs}
        lost = set(getattr(self.scheduler, "_overdue", ()))
        assert fencing <= lost, f"fences of jobs {sorted(fencing - lost)} are left"
        assert self.pool.free_blocks == self.pool.size - 1, "device blocks leaked"

    # --- scheduling --------------------------------------------------------------------------------------

    def _schedule(self) -> tuple[StepOutput, list[_Share]]:
        output = StepOutput()
        shares: list[_Share] = []
        budget = self._schedule_running(output, shares)
        if not self._preempted:
            self._schedule_waiting(output, shares, budget)
        if not shares and not self.running:
            self._unblock()
        output.preempted_req_ids, self._preempted = self._preempted, set()
        return output, shares

    def _schedule_running(self, output: StepOutput, shares: list[_Share]) -> int:
        budget = self.token_budget
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            count = min(self._wanted(request), budget)
            if not count:
                index += 1
                continue
            new_blocks = self._allocate(request, request.num_computed_tokens + count)
            while new_blocks is None:
                holders = self._loaded_holders()
                if self.running[-1] is request and holders:
                    self._drop_loaded(holders[-1])  # else the two could take turns for ever
                else:
                    self._preempt(self.running[-1])
                if index >= len(self.running):
                    return budget
                new_blocks = self._allocate(request, request.num_computed_tokens + count)
            cached = output.scheduled_cached_reqs
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append(new_blocks if any(new_blocks) else None)
            cached.num_computed_tokens.append(request.num_computed_tokens)
            self._share(request, count, output, shares)
            budget -= count
            index += 1
        return budget

    def _schedule_waiting(self, output: StepOutput, shares: list[_Share], budget: int) -> None:
        passed: list[EngineRequest] = []
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            request = self.waiting.popleft()
            admitted = self._admit(request, output, shares, budget)
            if admitted is None:
                self.waiting.appendleft(request)
                break
            if admitted == 0:
                passed.append(request)
            budget -= admitted
        self.waiting.extendleft(reversed(passed))

    def _admit(self, request: EngineRequest, output: StepOutput, shares: list[_Share], budget: int) -> int | None:
        """Tokens scheduled for a waiting request, 0 to pass over it, None when there is no room."""
        if request.status is Status.WAITING_FOR_LOAD:
            if request.loading:
                return 0
            self._end_load(request)
        hits: list[list[int]] = []
        external = 0
        if request.num_computed_tokens == 0:
            local, hits = self._local_hit(request)
            request.asked += 1
            answer, is_async = self.scheduler.get_num_new_matched_tokens(request, local, now=self.clock.now)
            if answer is None:
                return 0
            external = answer
            assert external >= 0
            assert external == 0 or is_async, "loads are asynchronous"
            assert local + external < request.num_tokens, f"{request.request_id}: nothing would be left to compute"
            request.local_tokens, request.external_tokens = local, external
        else:
            local = request.num_computed_tokens
        count = 0 if external else min(request.num_tokens - local, budget)
        new_blocks = self._allocate(request, local + external + count, hits=hits, computed=local + external)
        if new_blocks is None:
            return None
        blocks = RequestBlocks(tuple(list(table) for table in request.block_ids))
        self.scheduler.update_state_after_alloc(request, blocks, external, now=self.clock.now)
        request.num_computed_tokens = local + external
        if external:
            request.status, request.loading = Status.WAITING_FOR_LOAD, True
            return 0
        self._announce(request, blocks, output)
        request.status = Status.RUNNING
        self.running.append(request)
        self._share(request, count, output, shares)
        return count

    def _announce(self, request: EngineRequest, blocks: RequestBlocks, output: StepOutput) -> None:
        if not request.admitted:
            request.admitted = True
            output.scheduled_new_reqs.append(NewRequest(request.request_id, blocks.ids, request.num_computed_tokens))
            return
        cached = output.scheduled_cached_reqs
        cached.req_ids.append(request.request_id)
        cached.resumed_req_ids.add(request.request_id)
        cached.new_block_ids.append(blocks.ids)
        cached.num_computed_tokens.append(request.num_computed_tokens)

    def _share(self, request: EngineRequest, count: int, output: StepOutput, shares: list[_Share]) -> None:
        end = request.num_computed_tokens + count
        samples = end if end == request.num_tokens + request.num_output_placeholders else None
        request.num_output_placeholders += samples is not None
        request.first_step = self.steps if request.first_step is None else request.first_step
        output.num_scheduled_tokens[request.request_id] = count
        output.total_num_scheduled_tokens += count
        shares.append(_Share(request, request.epoch, count, samples))
        self._cache_blocks(request, end)

    def _wanted(self, request: EngineRequest) -> int:
        """Tokens it could compute in this step; none once the last one it may say is on its way."""
        on_the_way = request.num_tokens + request.num_output_placeholders
        if on_the_way >= request.num_prompt_tokens + request.max_tokens:
            return 0
        return on_the_way - request.num_computed_tokens

    def _forward(self, share: _Share) -> Forward:
        request = share.request
        tables = tuple(tuple(table) for table in request.block_ids)
        return Forward(request.request_id, request.num_computed_tokens, share.count, tables, request.digests)

    def _unblock(self) -> None:
        """Requests that hold loaded blocks and cannot go on give them back, the last one first."""
        holders = self._loaded_holders()
        if len(holders) > 1 or (holders and self.waiting[0] is not holders[0]):
            self._drop_loaded(holders[-1])

    def _loaded_holders(self) -> list[EngineRequest]:
        return [r for r in self.waiting if not r.loading and any(r.block_ids)]

    def _drop_loaded(self, request: EngineRequest) -> None:
        self._drop_blocks(request)
        request.status, request.load_failed = Status.WAITING, False

    # --- blocks ------------------------------------------------------------------------------------------

    def _local_hit(self, request: EngineRequest) -> tuple[int, list[list[int]]]:
        """How many tokens the device's prefix cache has, and the blocks, null where a window needs none."""
        if request.skip_reading_prefix_cache:
            return 0, [[] for _ in self.geometry.groups]
        align = self.geometry.hit_alignment
        length = (request.num_tokens - 1) // align * align
        while length:
            hits = [self._group_hit(request, group.index, length) for group in self.geometry.groups]
            if all(hit is not None for hit in hits):
                return length, [hit for hit in hits if hit is not None]
            length -= align
        return 0, [[] for _ in self.geometry.groups]

    def _group_hit(self, request: EngineRequest, group: int, length: int) -> list[int] | None:
        table = []
        first = self._first_needed(group, length)
        for index in range(length // self.geometry.groups[group].tokens_per_block):
            block = 0 if index < first else self.pool.cached(group, self._hash(request, group, index))
            if block is None:
                return None
            table.append(block)
        return table

    def _first_needed(self, group: int, computed: int) -> int:
        spec = self.geometry.groups[group]
        if spec.sliding_window is None:
            return 0
        return max(0, computed - spec.sliding_window + 1) // spec.tokens_per_block

    def _allocate(
        self, request: EngineRequest, upto: int, *, hits: list[list[int]] | None = None, computed: int | None = None
    ) -> tuple[list[int], ...] | None:
        """Blocks for tokens below ``upto``; the new ids per group, or None (and nothing taken) for want of room."""
        computed = request.num_computed_tokens if computed is None else computed
        needs = []
        for group in self.geometry.groups:
            self._recycle(request, group.index, computed)
            have = max(len(request.block_ids[group.index]), len(hits[group.index]) if hits else 0)
            want = -(-upto // group.tokens_per_block)
            needs.append([i >= self._first_needed(group.index, computed) for i in range(have, want)])
        found = [b for table in hits or () for b in table if b]
        taken_from_free = sum(1 for block in set(found) if not self.pool.refs[block])
        if sum(map(sum, needs)) + taken_from_free > self.pool.free_blocks:
            return None
        for block in found:
            self.pool.share(block)
        new: list[list[int]] = []
        for group in self.geometry.groups:
            table = request.block_ids[group.index]
            if hits and not table:
                table += hits[group.index]
                request.num_cached[group.index] = len(table)
            new.append([])
            for real in needs[group.index]:
                block = self.pool.take(1)[0] if real else 0
                if real:
                    self.device.expect(block, group.index, len(table), request.digests)
                table.append(block)
                new[-1].append(block)
        return tuple(new)

    def _recycle(self, request: EngineRequest, group: int, computed: int) -> None:
        table = request.block_ids[group]
        for index in range(min(self._first_needed(group, computed), len(table)) - 1, -1, -1):
            if table[index] == 0:
                break
            self.pool.give_back([table[index]])
            table[index] = 0

    def _cache_blocks(self, request: EngineRequest, computed: int) -> None:
        for group in self.geometry.groups:
            upto = min(computed, request.num_tokens) // group.tokens_per_block
            for index in range(request.num_cached[group.index], upto):
                block = request.block_ids[group.index][index]
                if block:
                    self.pool.cache(block, group.index, self._hash(request, group.index, index))
            request.num_cached[group.index] = max(upto, request.num_cached[group.index])

    def _hash(self, request: EngineRequest, group: int, index: int) -> bytes:
        per_block = self.geometry.groups[group].tokens_per_block // self.geometry.tokens_per_hash
        return request.block_hashes[(index + 1) * per_block - 1]

    def _key(self, request: EngineRequest) -> None:
        size = self.geometry.tokens_per_hash
        while (len(request.block_hashes) + 1) * size <= request.num_tokens:
            request.block_hashes.append(request.digests[(len(request.block_hashes) + 1) * size - 1])

    def _drop_blocks(self, request: EngineRequest) -> None:
        for table in request.block_ids:
            self.pool.give_back(reversed(table))
            table.clear()
        request.num_cached = [0 for _ in self.geometry.groups]
        request.num_computed_tokens = request.num_in_flight_tokens = 0

    # --- ends --------------------------------------------------------------------------------------------

    def _preempt(self, request: EngineRequest) -> None:
        self.running.remove(request)
        self._drop_blocks(request)
        request.status = Status.PREEMPTED
        request.epoch += 1
        self.waiting.appendleft(request)
        self._preempted.add(request.request_id)

    def _end(self, request: EngineRequest, status: Status) -> None:
        request.status = status
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        delay, _ = self.scheduler.request_finished(request, now=self.clock.now)
        assert delay is False, "blocks are never held by the connector"
        if request.loading:
            self._held.append(request)
        else:
            self._drop_blocks(request)

    def _end_load(self, request: EngineRequest) -> None:
        """The load of a waiting request has been reported by all ranks.

        After a failed load a window group has null blocks where it would have to compute: it starts over.
        """
        if request.load_failed:
            request.load_failed = False
            request.num_computed_tokens = request.local_tokens
            if not request.local_tokens or any(group.sliding_window for group in self.geometry.groups):
                self._drop_blocks(request)
        else:
            request.was_external += request.external_tokens
            self._cache_blocks(request, request.num_computed_tokens)
        request.status = Status.WAITING

    # --- outputs -----------------------------------------------------------------------------------------

    def _hand_in(self, shares: list[_Share], outputs: list[WorkerOutput]) -> None:
        for share in shares:
            self._hand_in_tokens(share)
        reports = tuple(report for output in outputs for report in output.reports)
        self.device.delivered(reports)
        reports = tuple(report for report in reports if not self.drop_output(report))
        finished, failed = self._aggregate(outputs)
        merged = WorkerOutput(
            reports=reports,
            finished_recving=finished,
            failed_recving=failed,
            failed_block_ids=frozenset().union(*(output.failed_block_ids for output in outputs)),
        )
        if merged or not self._skip_empty:
            self.scheduler.update_connector_output(merged, now=self.clock.now)
        for req_id in finished:
            self._loaded(self.requests[req_id], failed=req_id in failed)
        self.scheduler.take_events()
        self.scheduler.get_stats()

    def _hand_in_tokens(self, share: _Share) -> None:
        request = share.request
        if request.epoch == share.epoch:
            request.num_in_flight_tokens -= share.count
        if share.samples is None or request.ended:
            return
        request.num_output_placeholders -= 1
        assert request.num_tokens == share.samples, f"{request.request_id}: a token comes out of turn"
        request.token_ids.append(Lineage.sample(request.digests[share.samples - 1]))
        self._key(request)
        if len(request.output_token_ids) in (request.max_tokens, request.stop_after):
            self._end(request, Status.FINISHED)

    def _aggregate(self, outputs: list[WorkerOutput]) -> tuple[frozenset[str], frozenset[str]]:
        """Requests whose load every rank has ended by now, and those among them where some rank failed."""
        for rank, output in enumerate(outputs):
            for req_id in output.finished_recving:
                told = self._recving.setdefault(req_id, [set(), set()])
                assert rank not in told[0], f"rank {rank} has reported the load of {req_id} twice"
                told[0].add(rank)
                if req_id in output.failed_recving:
                    told[1].add(rank)
        finished = [req_id for req_id, told in self._recving.items() if len(told[0]) == self.device.ranks]
        failed = [req_id for req_id in finished if self._recving[req_id][1]]
        for req_id in finished:
            del self._recving[req_id]
        return frozenset(finished), frozenset(failed)

    def _loaded(self, request: EngineRequest, *, failed: bool) -> None:
        request.loading = False
        request.load_failed = failed
        if request in self._held:
            self._held.remove(request)
            self._drop_blocks(request)
