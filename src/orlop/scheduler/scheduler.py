"""OffloadingConnectorScheduler: the calls that an engine's scheduler makes, each a short recipe.

In: the engine's hooks, with ``now`` read once per hook by the caller. Out: answers, and one step message per step.
Never: a clock, a thread, a file, a wait; an exception for a request's sake (a surprise costs that request a
recompute and raises a counter).

Once per step, also when nothing is scheduled, ``build_connector_meta`` does the step's work: it keeps deadlines,
notes which device blocks were handed out, plans the stores of lives whose turn it is, and names the pending stores
that must have read their blocks before this step writes. A running request in whose step nothing of that happens
costs one entry of one flat pass over the engine's own ``new_block_ids``: a chunk can only have filled if the engine
handed a block to the request since, so no token is counted anywhere.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, islice

import numpy as np

from orlop.core import (
    NO_SALT,
    Blocks,
    CacheEvent,
    Geometry,
    GroupTransfer,
    JobReport,
    OffloadingConnectorMetadata,
    ReqContext,
    Request,
    Reservation,
    SchedulerOutput,
    TransferJob,
    TransferKind,
    WorkerOutput,
)
from orlop.counting import ASYNC_BOUNDS, SIZE_BOUNDS, Histogram, Stats
from orlop.errors import InvariantError
from orlop.scheduler.fences import FenceTable
from orlop.scheduler.prefix import Lookups, find_hit, needed_chunks
from orlop.scheduler.request import Job, RequestState
from orlop.scheduler.stores import PlannedStore, StorePlanner
from orlop.scheduler.turns import Turns
from orlop.tiering.base import OffloadingManager

FEW = 256
"""The list of deadlines keeps at most so many jobs that are over, and as many more as are not."""
EVERY_CHUNK = 1 << 62
"""The budget of a life that has ended: what is not stored now never is."""

COPY_COUNTERS = {kind: (f"{kind}_bytes", f"{kind}_seconds") for kind in TransferKind}
"""Bytes moved, and seconds spent on it."""
FROM_THE_START = ("chunks_queried host", "chunks_hit host", "chunks_loaded host", "tokens_loaded host")
"""Counters that are there before they count: what host memory has never had is 0, not unknown."""


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """What the scheduler half is told of engine and settings.

    ``ranks``: workers that report each job. ``prefix_caching``: the device shares blocks between requests.
    ``store_deadline_s``: a device store unreported for so long is settled as failed. ``lookup_wait_s`` and
    ``promotion_wait_s`` are the manager's limits, at which its answers may change. ``max_chunks_per_step``: at
    most so many chunks are offered for storing in one step; the rest follows in the next. ``max_joint_chunks``: at
    most so many chunks of several requests share a store job; a fence waits for the whole of it. ``gather_steps``: so
    many steps, or a few more, a request that decodes gathers what it fills before it is stored; none where a group has
    a sliding window, behind which blocks are recycled. ``look_ahead``: for at most so many requests that the engine has
    not come to, tiers are asked and promotions begun; 0 where that brings nothing.
    """

    ranks: int = 1
    offload_decode: bool = True
    prefix_caching: bool = True
    store_deadline_s: float = 30.0
    lookup_wait_s: float = 0.2
    promotion_wait_s: float = 5.0
    max_chunks_per_step: int = 2048
    max_joint_chunks: int = 16
    gather_steps: int = 1
    look_ahead: int = 0


class OffloadingConnectorScheduler:
    """The scheduler half of the connector. One per engine; all calls come from the engine's thread."""

    def __init__(self, geometry: Geometry, manager: OffloadingManager, options: SchedulerOptions | None = None) -> None:
        self.geometry = geometry
        self.manager = manager
        self.options = options or SchedulerOptions()
        self.counters: defaultdict[str, float] = defaultdict(float, dict.fromkeys(FROM_THE_START, 0.0))
        self._sizes = {kind: Histogram(SIZE_BOUNDS) for kind in TransferKind}
        self._answer_delays = Histogram(ASYNC_BOUNDS)
        self._planner = StorePlanner(geometry, manager, self.options.offload_decode, self.options.max_joint_chunks)
        self._live: dict[str, RequestState] = {}
        self._req_status: dict[int, RequestState] = {}
        """Every life that has not had its ``on_request_finished``, live or draining, by life number."""
        self._jobs: dict[int, Job] = {}
        """Unsettled jobs; what the drain waits for."""
        self._overdue: dict[int, Job] = {}
        """Stores settled as failed at their deadline whose last rank has still not reported."""
        self._store_deadlines: deque[Job] = deque()
        """Stores in the order of submission, which is that of their deadlines; settled ones are left out in time."""
        self._next_deadline = math.inf
        """No store's deadline is earlier."""
        self._fences = FenceTable(geometry.null_block_id)
        self._chunks_being_loaded: list[dict[bytes, int]] = [{} for _ in geometry.groups]
        self._owed: dict[int, RequestState] = {}
        """Finished lives with a chunk that the next step may still store."""
        self._unreached: dict[int, RequestState] = {}
        """Lives that the engine has added and not asked about yet, by arrival; empty without look-ahead."""
        self._unplanned: dict[int, RequestState] = {}
        """Live ones to look at again next step: the step's budget ran out, or their prompt is not computed yet."""
        gather_steps = 1 if any(g.sliding_window for g in geometry.groups) else self.options.gather_steps
        self._gathered = Turns(gather_steps, len(geometry.groups))
        """Live requests that decode and have got blocks since their last turn."""
        self._current_batch_load_jobs: list[TransferJob] = []
        self._current_batch_jobs_to_flush: set[int] = set()
        self._current_batch_allocated_block_ids: set[int] = set()
        self._current_batch_loads_to_fail: list[int] = []
        self._device_is_old = False
        self._next_life = 1
        self._next_job = 1

    @property
    def _block_id_to_pending_jobs(self) -> Mapping[int, set[int]]:
        return self._fences.pending

    # --- a request's way ------------------------------------------------------------------------------

    def on_new_request(self, request: Request, *, now: float) -> None:
        """A request is added. Optional: the first hook that names a request begins its life as well."""
        if request.request_id in self._live:
            self._surprise("on_new_request for a live id")
            self.request_finished(self._live[request.request_id].req, now=now)
        state = self._begin_life(request)
        if self.options.look_ahead:
            self._unreached[state.context.life] = state

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, *, now: float
    ) -> tuple[int | None, bool]:
        """How many tokens beyond ``num_computed_tokens`` can be loaded, and that the load is asynchronous.

        ``(None, False)``: ask again in a later step. Asked again with nothing changed, it answers from memory.
        """
        state = self._life_of(request)
        if self._unreached.pop(state.context.life, None) is not None and state.since is not None:
            state.since = now  # waits count from the engine's own first ask
            state.waited_for_load = None
            state.forget_answer()
        return self._ask(state, num_computed_tokens, now)

    def _ask(self, state: RequestState, num_computed_tokens: int, now: float) -> tuple[int | None, bool]:
        """The answer for ``get_num_new_matched_tokens``: the one given before, where nothing has changed since."""
        if state.asked_computed != num_computed_tokens or state.answer is None or self._is_stale(state, now):
            state.asked_computed = num_computed_tokens
            state.answer_hashes = len(state.req.block_hashes)
            state.answer_version = self.manager.answer_version(state.context)
            state.answer_until = math.inf
            state.answer_load = None
            state.answer = self._find_answer(state, num_computed_tokens, now)
            self._time_answer(state, now)
        return state.answer

    def update_state_after_alloc(
        self, request: Request, blocks: Blocks, num_external_tokens: int, *, now: float
    ) -> None:
        """The engine has allocated ``blocks``; ``num_external_tokens`` of them are to be loaded."""
        state = self._life_of(request)
        state.forget_answer()
        block_ids = blocks.get_block_ids()
        self._take_blocks(state, block_ids, state.asked_computed)
        state.load_base = state.asked_computed  # with 0 tokens too: another connector may be loading the rest
        if state.queried:
            state.queried = False
            self._count_query(state)
        if num_external_tokens > 0:
            state.since = None
            self._start_load(state, num_external_tokens, now)

    def load_origins(self, request: Request) -> Mapping[str, int]:
        """Tokens of the request's latest load by the tier that had them (``host`` or its name); empty without one."""
        state = self._live.get(request.request_id)
        return state.load_origins if state is not None else {}

    def request_finished(self, request: Request, *, now: float) -> tuple[bool, None]:
        """The request ends, for any reason; its blocks are freed right after. Never delays that."""
        state = self._live.get(request.request_id)
        if state is None:
            return False, None
        self._forget_live(state)
        state.req = request
        state.finished = True
        if state.waits_since is not None:
            self._answer_delays.observe(now - state.waits_since)
        self._note_final_tokens(state)
        for job in self._stores_of(state):
            self._fences.raise_for(job, job.blocks_of(state))
        if self._planner.is_behind(state):
            self._owed[state.context.life] = state
        self._end_life_if_drained(state)
        return False, None

    # --- a step ----------------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: SchedulerOutput, *, now: float) -> OffloadingConnectorMetadata:
        """The step message. Once per step, also when nothing is scheduled."""
        if now >= self._next_deadline:
            self._expire_stores(now)
        store_jobs: list[TransferJob] = []
        if scheduler_output.preempted_req_ids:
            store_jobs += self._note_preempted(scheduler_output.preempted_req_ids, now)
        urgent = self._note_scheduled(scheduler_output)
        if self._owed:
            store_jobs += self._plan_owed(now)
        if self._fences or self._current_batch_jobs_to_flush:
            self._flush_claimed()
        store_jobs += self._plan_live(urgent, scheduler_output.num_scheduled_tokens, now)
        if self._unreached:
            self._look_ahead(now)
        self.manager.on_schedule_end(now=now)
        return self._take_message(store_jobs)

    def update_connector_output(self, output: WorkerOutput, *, now: float) -> None:
        """What ranks have completed or failed; may come late, repeated, or not at all."""
        if output.invalid_block_ids:
            self._distrust(output.invalid_block_ids)
        for report in output.reports:
            job = self._jobs.get(report.job_id) or self._overdue.get(report.job_id)
            if job is None or report.rank not in job.waiting:
                self.counters["reports_ignored"] += 1
                continue
            job.waiting.discard(report.rank)
            job.failed = job.failed or not report.ok
            self._count_copy(job.kind, report)
            if not job.waiting:
                self._job_reported(job, now)

    def has_pending_push_work(self) -> bool:
        """Whether the engine must keep stepping: some job is unsettled, or something is owed."""
        return bool(self._jobs or self._owed or self._current_batch_loads_to_fail) or self.manager.has_pending_work()

    @property
    def is_idle(self) -> bool:
        """Whether no request is alive or draining, and nothing is on its way."""
        return not self._req_status and not self.has_pending_push_work()

    # --- the whole ---------------------------------------------------------------------------------------

    def reset_cache(self, generation: bytes, *, now: float, device_cleared: bool = True) -> None:
        """Nothing from before is served. ``generation``: 16 fresh random bytes. Nothing blocks.

        ``device_cleared`` False: the engine could not forget the device's own prefix cache, because requests hold
        blocks of it. Then nothing is stored of a life that starts on top of such blocks, until a reset clears them.
        """
        self.counters["resets"] += 1
        self._device_is_old = not device_cleared
        for state in [s for s in self._req_status.values() if s.finished]:
            self._end_life(state)
        self._owed.clear()
        self.manager.reset_cache(generation, now=now)
        for job in self._jobs.values():
            job.lives = ()
            job.failed = True
            if job.kind is TransferKind.LOAD:
                self._current_batch_loads_to_fail.append(job.job_id)
            else:
                self._fences.raise_for(job, job.block_ids)
        self._current_batch_load_jobs = [job._replace(doomed=True) for job in self._current_batch_load_jobs]
        for state in self._live.values():
            self._learn_blocks(state)
            state.transfer_jobs.clear()
            state.forget_answer()
            state.since = None
            state.waits_since = None
            state.tainted = state.tainted or self._holds_computed(state)
        self._unplanned.clear()
        for table in self._chunks_being_loaded:
            table.clear()

    def take_events(self) -> Sequence[CacheEvent]:
        """Events of the manager since the last call."""
        return self.manager.take_events()

    def get_stats(self) -> Stats:
        """Counters and histograms of this half and of the manager; gauges of what is in flight.

        ``jobs_overdue_at``: the deadline of the oldest store that some rank still has not reported, where there is one.
        """
        stats: dict[str, float] = dict(self.manager.get_stats())
        for name, count in self.counters.items():
            stats[name] = stats.get(name, 0) + count
        for kind, sizes in self._sizes.items():
            stats.update(sizes.stats(f"{kind}_size_bytes"))
        stats.update(self._answer_delays.stats("lookup_async_seconds"))
        stats["jobs_in_flight"] = len(self._jobs)
        stats["jobs_overdue"] = len(self._overdue)
        stats["fenced_blocks"] = len(self._fences)
        if self._overdue:
            stats["jobs_overdue_at"] = next(iter(self._overdue.values())).deadline
        return stats

    def shutdown(self, *, now: float) -> None:
        """Unsettled device jobs fail, their keys are dropped; every life ends. The tiers are the caller's to drain."""
        for job in list(self._jobs.values()):
            self._settle(job, ok=False, released=False, now=now)
        self._unreached.clear()
        for state in list(self._req_status.values()):
            self._forget_live(state)
            state.finished = True
            self._end_life(state)

    # --- lives -------------------------------------------------------------------------------------------

    def _life_of(self, request: Request) -> RequestState:
        state = self._live.get(request.request_id)
        if state is None:
            return self._begin_life(request)
        if state.req is not request:
            state.req = request
        return state

    def _begin_life(self, request: Request) -> RequestState:
        salt = getattr(request, "cache_salt", None)
        digest = hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=16).digest() if salt else NO_SALT
        context = ReqContext(self._next_life, request.request_id, digest)
        self._next_life += 1
        state = RequestState(request, context, self.geometry)
        self._live[request.request_id] = state
        self._req_status[context.life] = state
        self.manager.on_new_request(context)
        return state

    def _forget_live(self, state: RequestState) -> None:
        """The engine's hooks no longer mean this life."""
        self._live.pop(state.context.req_id, None)
        self._unplanned.pop(state.context.life, None)
        self._unreached.pop(state.context.life, None)
        self._learn_blocks(state)

    def _end_life_if_drained(self, state: RequestState) -> None:
        if state.finished and not state.transfer_jobs and state.context.life not in self._owed:
            self._end_life(state)

    def _end_life(self, state: RequestState) -> None:
        """The one place where a life ends: no call with its context follows."""
        if self._req_status.pop(state.context.life, None) is not None:
            self._owed.pop(state.context.life, None)
            self.manager.on_request_finished(state.context)

    def _note_final_tokens(self, state: RequestState) -> None:
        """What of a finished life is computed for good.

        The KV of the last sampled token has never been computed. What steps in flight compute does not count
        before they are reported, and what a load was to bring never does.
        """
        request = state.req
        in_flight = getattr(request, "num_in_flight_tokens", 0)
        tokens = min(request.num_computed_tokens - in_flight, request.num_tokens - 1)
        if state.load_base is not None:
            tokens = min(tokens, state.load_base)
        state.tokens_filled = max(0, tokens)
        # Windows have moved on with every step in flight, the last of which computes at least one token.
        state.tokens_before_step = max(state.tokens_filled, request.num_computed_tokens - 1)
        state.learn_keys()

    @staticmethod
    def _holds_computed(state: RequestState) -> bool:
        return state.req.num_computed_tokens > 0 or any(g.block_ids for g in state.groups)

    # --- lookups -----------------------------------------------------------------------------------------

    def _is_stale(self, state: RequestState, now: float) -> bool:
        """Whether the cached answer may no longer be what a fresh lookup would give."""
        assert state.answer is not None
        if state.answer_load is not None:
            return not self._is_wanted_load(state.answer_load)
        if now >= state.answer_until or state.answer_hashes != len(state.req.block_hashes):
            return True
        came, went = self.manager.answer_version(state.context)
        promises_tokens = bool(state.answer[0])
        return came != state.answer_version[0] or (promises_tokens and went != state.answer_version[1])

    def _find_answer(self, state: RequestState, on_device: int, now: float) -> tuple[int | None, bool]:
        if not self._may_load(state):
            return 0, False
        state.queried = True
        limit = self._load_limit(state, on_device)
        if limit <= on_device:
            return 0, False
        state.learn_keys()
        if state.since is None:
            state.since = now
            self.counters["queries"] += 1
        context, since = state.context, state.since
        lookups = Lookups(
            lambda run: self.manager.lookup_prefix(run, context, now=now, since=since),
            lambda run: self.manager.lookup_each(run, context, now=now, since=since),
            retry_until=since + self.options.lookup_wait_s,
            pending_until=since + self.options.promotion_wait_s,
        )
        hit = find_hit(self.geometry, state.groups, on_device, limit, lookups)
        state.answer_until = hit.valid_until
        if hit.hope_tokens > hit.ready_tokens:
            self._want(state, on_device, hit.hope_tokens, now)
            return None, False
        if hit.ready_tokens <= on_device:
            return 0, False
        if self._is_being_loaded(state, on_device, hit.ready_tokens):
            state.answer_load = state.waited_for_load
            return None, False
        return hit.ready_tokens - on_device, True

    def _look_ahead(self, now: float) -> None:
        """Ask on behalf of requests that the engine has no tokens left for in this step, the earliest ones.

        What tiers hold of them is then in host memory, or on its way, when the engine comes to them. Only so many at a
        time, or promotions would push each other out before use; each only until its answer is there.
        """
        for state in list(islice(self._unreached.values(), self.options.look_ahead)):
            if not state.looked_ahead:
                state.looked_ahead = self._ask(state, 0, now)[0] is not None

    def _time_answer(self, state: RequestState, now: float) -> None:
        """The time from the first "ask again" to an answer, once it is there."""
        assert state.answer is not None
        if state.answer[0] is None:
            state.waits_since = state.waits_since if state.waits_since is not None else now
        elif state.waits_since is not None:
            self._answer_delays.observe(now - state.waits_since)
            self.counters["pending_deadlines_passed"] += now - state.waits_since >= self.options.promotion_wait_s
            state.waits_since = None

    def _count_query(self, state: RequestState) -> None:
        """What a request that gets its blocks had asked for: its tokens that the device lacks, and their chunks."""
        on_device = state.asked_computed
        self.counters["tokens_queried"] += state.req.num_tokens - on_device
        limit = self._load_limit(state, on_device)
        for spec in self.geometry.groups if limit > on_device else ():
            first, stop = needed_chunks(self.geometry, spec, on_device, limit)
            self.counters["chunks_queried host"] += stop - first

    @staticmethod
    def _may_load(state: RequestState) -> bool:
        return not (state.load_failed or getattr(state.req, "skip_reading_prefix_cache", False))

    def _load_limit(self, state: RequestState, on_device: int) -> int:
        """The most tokens a hit may reach: whole blocks, and the last token is always computed."""
        limit = state.req.num_tokens - 1
        if state.max_load_tokens is not None:
            limit = min(limit, on_device + state.max_load_tokens)
        return limit - limit % self.geometry.hit_alignment

    def _want(self, state: RequestState, on_device: int, tokens: int, now: float) -> None:
        for spec, group in zip(self.geometry.groups, state.groups, strict=True):
            first, stop = needed_chunks(self.geometry, spec, on_device, tokens)
            self.manager.want(group.run(first, stop), state.context, now=now)

    def _is_being_loaded(self, state: RequestState, on_device: int, tokens: int) -> bool:
        """Whether another life is loading this prefix right now, so that the device will have it.

        A life waits so at most once: whatever became of that load, it goes on in the next schedule.
        """
        if self.options.prefix_caching and state.waited_for_load is None:
            state.waited_for_load = self._overlapping_load(state, on_device, tokens)
        return self._is_wanted_load(state.waited_for_load)

    def _overlapping_load(self, state: RequestState, on_device: int, tokens: int) -> int | None:
        """The load that is bringing the first or the last chunk that this life would load."""
        for spec, group, loading in zip(self.geometry.groups, state.groups, self._chunks_being_loaded, strict=True):
            first, stop = needed_chunks(self.geometry, spec, on_device, tokens)
            if first == stop:
                continue
            job_id = loading.get(group.hashes[first], loading.get(group.hashes[stop - 1]))
            if self._is_wanted_load(job_id):
                return job_id
        return None

    def _is_wanted_load(self, job_id: int | None) -> bool:
        """Whether this load is in flight and its blocks will stay on the device: neither aborted nor reset."""
        job = self._jobs.get(job_id) if job_id is not None else None
        return job is not None and bool(job.lives) and not job.lives[0].finished

    # --- loads --------------------------------------------------------------------------------------------

    def _start_load(self, state: RequestState, num_external_tokens: int, now: float) -> None:
        on_device = state.asked_computed
        tokens = on_device + num_external_tokens
        transfers: list[GroupTransfer] = []
        reservations: list[Reservation] = []
        short = False
        for spec, group in zip(self.geometry.groups, state.groups, strict=True):
            first, stop = needed_chunks(self.geometry, spec, on_device, tokens)
            stop = max(first, min(stop, len(group.hashes)))
            reservation = self.manager.prepare_load(group.run(first, stop), state.context, now=now)
            transfer, complete = self._load_transfer(state, group.index, reservation, first, on_device, tokens)
            reservations.append(reservation)
            transfers.append(transfer)
            short = short or not complete
        if short:
            self._surprise("fewer chunks readable than promised")
        job = self._new_job(TransferKind.LOAD, (state,), tuple(reservations), transfers, math.inf)
        for reservation, loading in zip(reservations, self._chunks_being_loaded, strict=True):
            loading.update(dict.fromkeys(reservation.hashes, job.job_id))
        # By the group that has most to load: the others lack what lies before their windows.
        widest = max(reservations, key=lambda r: len(r.slots) * self.geometry.chunk_tokens(r.group))
        state.load_origins = self._origins(widest, num_external_tokens)
        self._count_origins(state.load_origins)
        self._count_chunks(reservations)
        self._current_batch_load_jobs.append(
            TransferJob(job.job_id, state.context.req_id, TransferKind.LOAD, tuple(transfers), doomed=short)
        )

    def _origins(self, reservation: Reservation, num_tokens: int) -> Mapping[str, int]:
        """Tokens of a load by the tier that had them: whole chunks for secondary tiers, the rest was in host memory."""
        origins: dict[str, int] = {}
        per_chunk = self.geometry.chunk_tokens(reservation.group)
        for name, chunks in reservation.origins.items():
            origins[name] = min(chunks * per_chunk, num_tokens)
            num_tokens -= origins[name]
        return {**origins, "host": num_tokens}

    def _count_origins(self, origins: Mapping[str, int]) -> None:
        self.counters["tokens_loaded"] += sum(origins.values())
        for name, tokens in origins.items():
            self.counters[f"tokens_loaded {name}"] += tokens

    def _count_chunks(self, reservations: Collection[Reservation]) -> None:
        """Chunks that are loaded, of all groups, by the tier that had them."""
        for reservation in reservations:
            from_host = len(reservation.slots)
            for name, chunks in reservation.origins.items():
                self.counters[f"chunks_loaded {name}"] += chunks
                from_host -= chunks
            self.counters["chunks_hit host"] += from_host
            self.counters["chunks_loaded host"] += from_host

    def _load_transfer(
        self, state: RequestState, index: int, reservation: Reservation, first: int, on_device: int, tokens: int
    ) -> tuple[GroupTransfer, bool]:
        """The blocks to fill in one group, and whether every one of them has a slot."""
        spec, group = self.geometry.groups[index], state.groups[index]
        n = self.geometry.blocks_per_chunk
        begin = on_device
        if spec.sliding_window is not None:
            begin = max(begin, tokens - spec.sliding_window + 1)
        start = begin // spec.tokens_per_block
        wanted = -(-tokens // spec.tokens_per_block)
        stop = min(wanted, len(group.block_ids), (first + len(reservation.slots)) * n)
        positions = np.arange(start, max(start, stop), dtype=np.int64)
        block_ids = np.array(group.block_ids[start : max(start, stop)], dtype=np.int64)
        real = block_ids != self.geometry.null_block_id
        positions = positions[real]
        slots = reservation.slots[positions // n - first]
        return GroupTransfer(index, block_ids[real], slots, positions % n), stop == wanted

    # --- jobs ----------------------------------------------------------------------------------------------

    def _new_job(
        self,
        kind: TransferKind,
        lives: tuple[RequestState, ...],
        reservations: tuple[Reservation, ...],
        transfers: Collection[GroupTransfer],
        deadline: float,
    ) -> Job:
        parts = [t.block_ids for t in transfers]
        block_ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
        job = Job(self._next_job, kind, lives, reservations, self.options.ranks, deadline, block_ids)
        self._next_job += 1
        self._jobs[job.job_id] = job
        for state in lives:
            state.transfer_jobs.add(job.job_id)
        return job

    def _count_copy(self, kind: TransferKind, report: JobReport) -> None:
        """Bytes that a rank has moved, and what its engine has waited for: failed and late copies did that too."""
        nbytes, seconds = COPY_COUNTERS[kind]
        self.counters[nbytes] += report.nbytes
        self.counters[seconds] += report.seconds
        if report.nbytes:
            self._sizes[kind].observe(report.nbytes)
        if report.fence_waits:
            self.counters["fence_waits"] += report.fence_waits
            self.counters["fence_wait_seconds"] += report.fence_wait_s

    def _distrust(self, block_ids: Collection[int]) -> None:
        """Blocks that another was to fill before a step, and did not: what is being stored of the lives that hold them
        is not what its keys say. The engine computes those tokens again, and then they are offered again.
        """
        for req_id in list(self._gathered):  # what was noted as computed there is not known to be so any more
            self._learn_blocks(self._live[req_id])
            self._await_turn(self._live[req_id])
        bad = set(block_ids)
        for state in self._req_status.values():
            if any(not bad.isdisjoint(group.block_ids) for group in state.groups):
                for group in state.groups:
                    group.cursor = 0
                for job in self._stores_of(state):
                    self._fail_store(job)
        for job in self._jobs.values():
            if not bad.isdisjoint(job.rests_on):
                self._fail_store(job)

    def _stores_of(self, state: RequestState) -> list[Job]:
        jobs = map(self._jobs.__getitem__, state.transfer_jobs)
        return [job for job in jobs if job.kind is TransferKind.STORE]

    @staticmethod
    def _fail_store(job: Job) -> None:
        """What the job stores is dropped; lives that share it offer their chunks again: nothing is wrong with those."""
        job.failed = True
        if len(job.lives) > 1:
            (reservation,) = job.reservations
            for state, chunk in zip(job.lives, reservation.chunks.tolist(), strict=True):
                group = state.groups[reservation.group]
                group.cursor = min(group.cursor, chunk)

    def _job_reported(self, job: Job, now: float) -> None:
        """Every rank has reported."""
        if self._overdue.pop(job.job_id, None) is not None:
            for reservation in job.reservations:
                self.manager.release(reservation)
            self._fences.lower(job)
            return
        self._settle(job, ok=not job.failed, released=True, now=now)
        self._fences.lower(job)

    def _settle(self, job: Job, ok: bool, released: bool, now: float) -> None:
        """The job is over for everybody who waited for it."""
        del self._jobs[job.job_id]
        if not ok:
            self.counters[f"{job.kind}_jobs_failed"] += 1
        if job.kind is TransferKind.STORE:
            for reservation in job.reservations:
                self.manager.complete_store(reservation, ok, now=now, released=released)
            if not released:
                self._overdue[job.job_id] = job
        else:
            self._settle_load(job, ok, now)
        self._leave_life(job)

    def _leave_life(self, job: Job) -> None:
        for state in job.lives:
            state.transfer_jobs.discard(job.job_id)
            if state.finished:
                self._end_life_if_drained(state)
        job.lives = ()  # the list of deadlines keeps jobs that are over, and is not to keep requests

    def _settle_load(self, job: Job, ok: bool, now: float) -> None:
        for reservation in job.reservations:
            self.manager.complete_load(reservation, now=now)
            loading = self._chunks_being_loaded[reservation.group]
            for block_hash in reservation.hashes:
                if loading.get(block_hash) == job.job_id:
                    del loading[block_hash]
        for state in job.lives:
            if ok:
                state.load_base = None
            else:
                state.load_failed = True

    def _expire_stores(self, now: float) -> None:
        """Settle the stores whose report is missing at their deadline."""
        while self._store_deadlines:
            job = self._store_deadlines[0]
            if job.job_id in self._jobs:
                if job.deadline > now:
                    self._next_deadline = job.deadline
                    return
                self.counters["store_deadlines_passed"] += 1
                self._fences.raise_for(job, job.block_ids)
                self._settle(job, ok=False, released=False, now=now)
            self._store_deadlines.popleft()
        self._next_deadline = math.inf

    # --- the step's recipe, line by line ------------------------------------------------------------------------

    def _note_preempted(self, req_ids: Collection[str], now: float) -> list[TransferJob]:
        """Preempted requests lose their blocks in this step: their pending stores go first, and what they have filled
        since their last turn, which the engine would compute again.
        """
        states = [state for req_id in req_ids if (state := self._live.get(req_id)) is not None]
        for state in states:
            self._current_batch_jobs_to_flush.update(job.job_id for job in self._stores_of(state))
            # By now the engine counts no token of it as computed. The KV of the last one known never was.
            computed = self._gathered.computed(state.context.req_id)
            state.tokens_filled = max(0, min(computed, state.req.num_tokens - 1))
            self._learn_blocks(state)
        jobs = self._store_at_once(states, now)  # beside a window nobody waits, and nothing was noted
        for state in states:
            self._leave_blocks(state)
            state.rewind()
            self._unplanned.pop(state.context.life, None)
        return jobs

    def _note_scheduled(self, output: SchedulerOutput) -> list[RequestState]:
        """Note the blocks handed out. The lives that fill chunks of their prompts; the others wait for their turn."""
        scheduled = output.num_scheduled_tokens
        urgent: list[RequestState] = []
        for new in output.scheduled_new_reqs:
            state = self._live.get(new.req_id)
            if state is None:
                self._hand_out(new.block_ids, new.num_computed_tokens)
            else:
                self._take_blocks(state, new.block_ids, new.num_computed_tokens)
                self._note_start(state, new.num_computed_tokens)
                self._note_tokens(state, new.num_computed_tokens, scheduled.get(new.req_id, 0))
                urgent.append(state)
        cached = output.scheduled_cached_reqs
        req_ids, new_block_ids, resumed = cached.req_ids, cached.new_block_ids, cached.resumed_req_ids
        touched = len(urgent)
        all_decode = output.total_num_scheduled_tokens == len(scheduled)
        may_claim = bool(self._owed or self._fences)
        for i in compress(range(len(new_block_ids)), new_block_ids):  # None for most requests, skipped without Python
            block_ids, req_id, computed = new_block_ids[i], req_ids[i], cached.num_computed_tokens[i]
            tokens = 1 if all_decode else scheduled.get(req_id, 0)
            if tokens <= 1 and self._gathered.add(req_id, block_ids, computed):  # by far most: it decodes and waits
                touched += 1
                if may_claim:
                    self._hand_out(block_ids, 0)
                continue
            state = self._live.get(req_id)
            if state is None:
                self._hand_out(block_ids, 0)
                continue
            touched += 1
            if resumed and req_id in resumed:
                self._take_blocks(state, block_ids, computed)
                self._note_start(state, computed)
            else:
                self._gathered.note(req_id, block_ids, computed)
                if may_claim:
                    self._hand_out(block_ids, 0)
                if tokens <= 1:
                    continue
            self._note_tokens(state, computed, tokens)
            urgent.append(state)
        self.counters["states_touched"] += touched
        return urgent

    def _take_blocks(self, state: RequestState, block_ids: tuple[list[int], ...], computed: int) -> None:
        """``block_ids`` are all blocks of the life; those beyond ``computed`` tokens are handed out in this step."""
        self._learn_blocks(state)
        self._leave_blocks(state)  # it may have been preempted and resumed since the last step
        for group, ids in zip(state.groups, block_ids, strict=True):
            group.block_ids = list(ids)
        self._hand_out(block_ids, computed)

    def _learn_blocks(self, state: RequestState) -> None:
        """Take over the blocks that were noted for a live request; it waits for its turn no more."""
        for group, ids in zip(state.groups, self._gathered.take(state.context.req_id), strict=False):
            group.block_ids += ids

    def _leave_blocks(self, state: RequestState) -> None:
        """Its blocks are told no more, and what is being stored of it rests on them all the same."""
        if stores := self._stores_of(state):
            held = {block_id for group in state.groups for block_id in group.block_ids}
            for job in stores:
                job.rests_on |= held

    def _await_turn(self, state: RequestState) -> None:
        self._gathered.note(state.context.req_id, tuple([] for _ in state.groups))

    def _hand_out(self, block_ids: tuple[list[int], ...], computed: int) -> None:
        """Blocks beyond ``computed`` tokens will be written, also those of a request that no hook has named."""
        for spec, ids in zip(self.geometry.groups, block_ids, strict=True):
            self._current_batch_allocated_block_ids.update(ids[computed // spec.tokens_per_block :])

    def _note_start(self, state: RequestState, computed: int) -> None:
        """A life starts, or starts again, on top of ``computed`` tokens that the device has."""
        state.end_wait()
        if computed == 0:
            state.tainted = False
        elif self._device_is_old:
            state.tainted = True

    @staticmethod
    def _note_tokens(state: RequestState, computed: int, scheduled: int) -> None:
        state.tokens_before_step = computed
        state.tokens_filled = computed + scheduled

    def _plan_owed(self, now: float) -> list[TransferJob]:
        """Last chunks of finished lives. Their blocks are free: what is handed out now is read first."""
        states = list(self._owed.values())
        self._owed.clear()
        jobs = self._store_at_once(states, now)
        for state in states:
            self._end_life_if_drained(state)
        return jobs

    def _store_at_once(self, states: Collection[RequestState], now: float) -> list[TransferJob]:
        """All that is left to store of lives whose blocks are free: they are read before this step may write them."""
        plan = self._planner.plan(states, EVERY_CHUNK, now)
        return [self._store_job(lives, stores, now, at_once=True) for lives, stores in plan.jobs]

    def _plan_live(
        self, urgent: Collection[RequestState], scheduled: Mapping[str, int], now: float
    ) -> list[TransferJob]:
        """Stores of live requests: those that fill chunks of their prompts, and those that decode in their turn.

        So what decoding fills is several chunks of each and of many requests, which share jobs.
        """
        due = self._gathered.next_step()
        if not (due or urgent or self._unplanned):
            return []
        again = [*self._unplanned.values(), *urgent]
        waited = dict.fromkeys([*self._unplanned.values(), *map(self._live.__getitem__, due)])
        for state in urgent:
            waited.pop(state, None)
            self._learn_blocks(state)
        for state in waited:
            self._learn_blocks(state)
            # Windows have moved on since its stores were last planned; draft tokens that were rejected count no more.
            computed = state.req.num_computed_tokens
            state.tokens_before_step = max(state.tokens_filled, computed)
            state.tokens_filled = computed + scheduled.get(state.context.req_id, 0)
        plan = self._planner.plan([*waited, *urgent], self.options.max_chunks_per_step, now)
        # The next piece of a prompt may fill a chunk without a block of its own.
        in_prompt = (state for state in again if state.tokens_filled < state.req.num_prompt_tokens)
        self._unplanned = {state.context.life: state for state in [*plan.cut, *in_prompt]}
        for state in plan.late:
            self._await_turn(state)
        return [self._store_job(lives, stores, now) for lives, stores in plan.jobs]

    def _store_job(
        self, lives: tuple[RequestState, ...], planned: Collection[PlannedStore], now: float, at_once: bool = False
    ) -> TransferJob:
        """The job that stores what was planned of some lives; ``at_once`` where their blocks are free."""
        transfers = tuple(p.transfer for p in planned)
        reservations = tuple(p.reservation for p in planned)
        job = self._new_job(TransferKind.STORE, lives, reservations, transfers, now + self.options.store_deadline_s)
        self._store_deadlines.append(job)
        self._next_deadline = min(self._next_deadline, job.deadline)
        if len(self._store_deadlines) > 2 * len(self._jobs) + FEW:
            self._store_deadlines = deque(j for j in self._store_deadlines if j.job_id in self._jobs)
        for transfer in transfers:
            if at_once or self.geometry.groups[transfer.group].sliding_window is not None:
                self._fences.raise_for(job, transfer.block_ids)
        # A live request's blocks may be filled by this very step even where its own tokens are older: another
        # request of the step computes them and the prefix cache shares them already.
        req_id = lives[0].context.req_id if lives[0] is lives[-1] else ""
        return TransferJob(job.job_id, req_id, TransferKind.STORE, transfers, after_compute=not at_once)

    def _flush_claimed(self) -> None:
        """Pending stores whose blocks this step may write must be read first; then they guard nothing more."""
        flush = self._current_batch_jobs_to_flush
        flush.update(self._fences.claim(self._current_batch_allocated_block_ids))
        for job_id in flush:
            job = self._jobs.get(job_id) or self._overdue.get(job_id)
            if job is not None:
                self.counters["stores_flushed"] += 1
                self._fences.lower(job)

    def _take_message(self, store_jobs: list[TransferJob]) -> OffloadingConnectorMetadata:
        message = OffloadingConnectorMetadata(
            tuple(self._current_batch_load_jobs),
            tuple(store_jobs),
            tuple(sorted(self._current_batch_jobs_to_flush)),
            tuple(self._current_batch_loads_to_fail),
        )
        self._current_batch_load_jobs = []
        self._current_batch_jobs_to_flush = set()
        self._current_batch_allocated_block_ids = set()
        self._current_batch_loads_to_fail = []
        return message

    def _surprise(self, what: str) -> None:
        self.counters["surprises"] += 1
        self.counters[f"surprise: {what}"] += 1

    # --- the books --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Recount from nothing; ``InvariantError`` where the books do not add up."""
        for life, state in self._req_status.items():
            _require(state.context.life == life, f"life {life} stands under a foreign number")
            in_flight = bool(state.transfer_jobs) or life in self._owed
            _require(not state.finished or in_flight, f"life {life} has ended with nothing in flight and is still here")
            _require(state.finished or self._live.get(state.context.req_id) is state, f"life {life} is lost")
            for job_id in state.transfer_jobs:
                job = self._jobs.get(job_id)
                _require(job is not None and state in job.lives, f"life {life} counts job {job_id} of another")
        for job_id, job in self._jobs.items():
            _require(bool(job.waiting), f"job {job_id} waits for no rank and is unsettled")
            counted = all(job_id in state.transfer_jobs for state in job.lives)
            _require(counted, f"job {job_id} is not counted by each of its lives")
        fenced: dict[int, set[int]] = {}
        for job in [*self._jobs.values(), *self._overdue.values()]:
            for block_id in job.fenced:
                fenced.setdefault(block_id, set()).add(job.job_id)
        _require(fenced == self._fences.pending, "the fence table does not equal the fences of the jobs")
        for table in self._chunks_being_loaded:
            for job_id in table.values():
                job = self._jobs.get(job_id)
                _require(job is not None and job.kind is TransferKind.LOAD, f"load {job_id} is over and still listed")
        for owed in (self._owed, self._unplanned):
            _require(all(life in self._req_status for life in owed), "a gone life is still owed a store")
        _require(self._live.keys() >= set(self._gathered), "a request waits for its turn that is not live")
        _require(all(s.finished for s in self._owed.values()), "a live request is owed a last chunk")
        unreached = self._unreached.items()
        _require(
            all(self._req_status.get(life) is s and not s.finished for life, s in unreached), "a gone life is awaited"
        )

    def open_reservations(self) -> list[Reservation]:
        """Reservations that this half will still complete or release; for the manager's own check."""
        jobs = [*self._jobs.values(), *self._overdue.values()]
        return [r for job in jobs for r in job.reservations]


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise InvariantError(what)
