"""The embedded engine's scheduler: who computes how many tokens in the next step, and in which blocks.

In: sequences, what steps report, a connector's scheduler half (or None). Out: one ``ScheduledStep`` after the
other. Never: a tensor, a clock of its own, a wait.

The rules, in the order in which they are applied:

1. Running sequences come first, oldest first. One that finds no block for its tokens takes the blocks of a
   loaded sequence that waits, then of the youngest running one, which then computes again from the start.
2. Then waiting ones, oldest first, as long as tokens of the step's budget are left. Each is looked up on the
   device, then at the connector: "ask again" skips it for this step; a load takes blocks and keeps it out of
   the batch until the load is reported; otherwise it joins the batch with as many tokens as the budget has.
3. A sequence that finds no room ends the round, so that nobody overtakes it for ever. Where nothing runs, loaded
   sequences behind it give their blocks back: loads alone can never fill the device for good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from orlop.core import Blocks, OffloadingConnectorMetadata, Request, WorkerOutput
from orlop.engine.sequence import Sequence, Status
from orlop.engine.tables import BlockTables
from orlop.errors import InvariantError


class SchedulerHalf(Protocol):
    """The calls the engine makes to a connector's scheduler half."""

    def on_new_request(self, request: Request) -> None: ...

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]: ...

    def update_state_after_alloc(self, request: Request, blocks: Blocks, num_external_tokens: int) -> None: ...

    # A core.SchedulerOutput; mypy would want its attributes writable with exactly the types named there.
    def build_connector_meta(self, scheduler_output: Any) -> OffloadingConnectorMetadata: ...

    def update_connector_output(self, output: WorkerOutput) -> None: ...

    def request_finished(self, request: Request) -> tuple[bool, object]: ...

    def has_pending_push_work(self) -> bool: ...

    def reset_cache(self) -> object: ...

    def get_stats(self) -> Mapping[str, float]: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Allocated:
    """The blocks of one sequence after an allocation, one list per KV group."""

    block_ids: tuple[list[int], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.block_ids


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A sequence that computes for the first time."""

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class CachedRequests:
    """Sequences that have computed before, as parallel lists.

    ``new_block_ids[i]`` are blocks added in this step (None: none), or all of them for resumed sequences.
    """

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of one sequence to compute: positions ``start .. start + len(token_ids) - 1``.

    ``block_ids`` are its block tables at this step, one per KV group. A token id of -1 is the one that the sequence
    sampled in the step before, which has not been reported yet. ``samples``: the last token's logits give a new token.
    ``num_preemptions`` tells this stay in the batch from later ones.
    """

    sequence: Sequence
    start: int
    token_ids: list[int]
    block_ids: tuple[list[int], ...]
    samples: bool
    num_preemptions: int


@dataclass(slots=True)
class ScheduledStep:
    """What one step computes. Filled by ``Scheduler.schedule`` and not changed afterwards."""

    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequests = field(default_factory=CachedRequests)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    preempted_req_ids: set[str] | None = None
    finished_req_ids: set[str] = field(default_factory=set)
    work: list[Work] = field(default_factory=list)
    connector_metadata: OffloadingConnectorMetadata | None = None


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step has to say: ``sampled`` has one token per work that samples, by request id."""

    sampled: dict[str, int]
    connector_output: WorkerOutput = field(default_factory=WorkerOutput)


class Scheduler:
    """Continuous batching with chunked prefill, prefix caching, preemption and a connector.

    Every ``schedule`` is followed, at once or one step later, by the ``update`` of that step.
    """

    def __init__(
        self,
        tables: BlockTables,
        *,
        max_step_tokens: int,
        max_running: int,
        connector: SchedulerHalf | None = None,
    ) -> None:
        self.tables = tables
        self.pool = tables.pool
        self.block_tokens = tables.block_tokens
        self.max_step_tokens = max_step_tokens
        self.max_running = max_running
        self.connector = connector
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.ended_while_loading: dict[str, Sequence] = {}
        self.num_preemptions = 0
        self._finished_ids: set[str] = set()
        self._preempted_ids: set[str] = set()

    # --- requests come and go -----------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)
        if self.connector is not None:
            self.connector.on_new_request(seq)

    def abort(self, request_id: str) -> Sequence | None:
        """End a request wherever it stands; None where it is not there (any more)."""
        for seq in self.waiting + self.running:
            if seq.request_id == request_id:
                seq.aborted = True
                self._finish(seq)
                return seq
        return None

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def forget_prefixes(self) -> None:
        """Nothing computed or loaded so far is used again: whoever holds such blocks starts over."""
        for seq in self.running + [s for s in self.waiting if s.status is Status.LOADED]:
            self._preempt(seq)
        self.pool.forget_all()

    # --- one step: decide ---------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep:
        step = ScheduledStep()
        self._schedule_running(step)
        self._schedule_waiting(step)
        step.finished_req_ids, self._finished_ids = self._finished_ids, set()
        step.preempted_req_ids, self._preempted_ids = self._preempted_ids, set()
        if self.connector is not None:
            step.connector_metadata = self.connector.build_connector_meta(step)
        # Only now: while the connector looks, num_computed_tokens is that of before this step.
        for work in step.work:
            self._hand_over(work)
        return step

    def _schedule_running(self, step: ScheduledStep) -> None:
        index = 0
        while index < len(self.running) and step.total_num_scheduled_tokens < self.max_step_tokens:
            seq = self.running[index]
            count = min(seq.num_uncomputed_tokens, self.max_step_tokens - step.total_num_scheduled_tokens)
            if count == 0:
                index += 1
                continue
            new_blocks = self._grow_or_make_room(seq, count)
            if new_blocks is None:
                break  # it was the youngest, and has been preempted itself
            self._schedule_sequence(step, seq, count, new_blocks)
            index += 1

    def _schedule_waiting(self, step: ScheduledStep) -> None:
        if self._preempted_ids:
            return  # the device is full: whoever came in now would push somebody out again
        for seq in list(self.waiting):
            if step.total_num_scheduled_tokens >= self.max_step_tokens or len(self.running) >= self.max_running:
                return
            if not self._may_start(seq):
                continue
            start = self._resume_loaded if seq.status is Status.LOADED else self._admit
            if not start(step, seq):
                return

    def _may_start(self, seq: Sequence) -> bool:
        """False while a load writes its blocks, or those of an earlier life of its id, or nothing is left to do."""
        is_loading = seq.status is Status.WAITING_FOR_LOAD or seq.request_id in self.ended_while_loading
        return not is_loading and seq.num_uncomputed_tokens > 0

    def _admit(self, step: ScheduledStep, seq: Sequence) -> bool:
        """Start a sequence that holds no blocks, or its load; False where there is no room for it."""
        # At least the last token is computed, since its logits are wanted.
        max_hit_blocks = (seq.num_tokens + seq.num_placeholders - 1) // self.block_tokens
        hit = self.tables.find_hit(seq, max_hit_blocks)
        num_local = hit * self.block_tokens
        num_external = self._ask_connector(seq, num_local, max_hit_blocks * self.block_tokens)
        if num_external is None:
            return True  # ask again in a later step, and go on with others
        count = min(
            seq.num_tokens + seq.num_placeholders - num_local, self.max_step_tokens - step.total_num_scheduled_tokens
        )
        held = num_local + num_external
        upto = held if num_external else num_local + count
        if not self._find_room(lambda: self.tables.room_needed(seq, upto, held, hit), seq):
            return False
        self.tables.grow(seq, upto, held, hit)
        seq.num_computed_tokens = num_local
        seq.num_registered_blocks = hit
        seq.device_hit_tokens += num_local
        self._tell_allocated(seq, num_external)
        if num_external:
            seq.num_loading_tokens = num_external
            seq.status = Status.WAITING_FOR_LOAD
        else:
            self._start(step, seq, count)
        return True

    def _ask_connector(self, seq: Sequence, num_local: int, max_hit: int) -> int | None:
        """Tokens beyond ``num_local`` that are loaded, in whole blocks; None: not known yet."""
        if self.connector is None:
            return 0
        num_external, is_async = self.connector.get_num_new_matched_tokens(seq, num_local)
        if num_external is None:
            return None
        if not is_async or seq.load_failed:
            # A load that has to be waited for is not taken, since computing is what it would block; nor is a second
            # one after a failure, so that a bad tier cannot hold a request.
            return 0
        return max(0, min(num_external, max_hit - num_local)) // self.block_tokens * self.block_tokens

    def _resume_loaded(self, step: ScheduledStep, seq: Sequence) -> bool:
        """Start a sequence whose load has ended; False where there is no room for its next tokens."""
        count = min(seq.num_uncomputed_tokens, self.max_step_tokens - step.total_num_scheduled_tokens)
        computed = seq.num_computed_tokens
        if not self._find_room(lambda: self.tables.room_needed(seq, computed + count, computed), seq):
            return False
        self.tables.grow(seq, computed + count, computed)
        self._tell_allocated(seq, 0)
        self._start(step, seq, count)
        return True

    def _start(self, step: ScheduledStep, seq: Sequence, count: int) -> None:
        self.waiting.remove(seq)
        self.running.append(seq)
        seq.status = Status.RUNNING
        self._schedule_sequence(step, seq, count, seq.tables(), starts=True)

    def _schedule_sequence(
        self,
        step: ScheduledStep,
        seq: Sequence,
        count: int,
        new_blocks: tuple[list[int], ...],
        *,
        starts: bool = False,
    ) -> None:
        """Enter ``count`` tokens of ``seq`` into the step."""
        if not seq.was_scheduled:
            seq.was_scheduled = True
            step.scheduled_new_reqs.append(NewRequest(seq.request_id, new_blocks, seq.num_computed_tokens))
        else:
            cached = step.scheduled_cached_reqs
            cached.req_ids.append(seq.request_id)
            cached.new_block_ids.append(new_blocks if any(new_blocks) else None)
            cached.num_computed_tokens.append(seq.num_computed_tokens)
            if starts:
                cached.resumed_req_ids.add(seq.request_id)
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + count
        known = seq.tokens[start:end]
        step.work.append(
            Work(
                sequence=seq,
                start=start,
                token_ids=known + [-1] * (count - len(known)),
                block_ids=seq.tables(),
                samples=end == seq.num_tokens + seq.num_placeholders,
                num_preemptions=seq.num_preemptions,
            )
        )
        step.num_scheduled_tokens[seq.request_id] = count
        step.total_num_scheduled_tokens += count

    def _hand_over(self, work: Work) -> None:
        seq, count = work.sequence, len(work.token_ids)
        seq.num_computed_tokens += count
        seq.num_in_flight_tokens += count
        seq.computed_tokens += count
        seq.num_placeholders += work.samples
        self.tables.register(seq)

    # --- one step: learn ----------------------------------------------------------------------------------

    def update(self, step: ScheduledStep, report: StepReport) -> list[Sequence]:
        """Take in what a step reports; the sequences that ended by it."""
        ended = []
        for work in step.work:
            seq = work.sequence
            if seq.num_preemptions == work.num_preemptions and seq.status is not Status.FINISHED:
                seq.num_in_flight_tokens -= len(work.token_ids)
            if not work.samples:
                continue
            seq.num_placeholders -= 1
            if seq.status is Status.FINISHED:
                continue  # sampled beyond the end, before the end was known
            # Also after a preemption: the token was sampled from the right KV and stays.
            seq.append(report.sampled[seq.request_id])
            self.tables.register(seq)
            if seq.has_ended:
                self._finish(seq)
                ended.append(seq)
        self._learn_transfers(report.connector_output)
        return ended

    def _learn_transfers(self, output: WorkerOutput) -> None:
        if self.connector is None or not output:
            return
        self.connector.update_connector_output(output)
        loading = {s.request_id: s for s in self.waiting if s.status is Status.WAITING_FOR_LOAD}
        for request_id in output.finished_recving:
            if (ended := self.ended_while_loading.pop(request_id, None)) is not None:
                self.tables.drop(ended)
            elif (seq := loading.get(request_id)) is not None:
                self._end_load(seq, ok=request_id not in output.failed_recving)

    def _end_load(self, seq: Sequence, *, ok: bool) -> None:
        """A failed load leaves blocks to be computed, or none: window groups have none where they would begin."""
        if ok:
            seq.num_computed_tokens += seq.num_loading_tokens
            seq.loaded_tokens += seq.num_loading_tokens
            self.tables.register(seq)
        seq.num_loading_tokens = 0
        seq.load_failed = not ok
        seq.status = Status.LOADED
        if not ok and self.tables.has_windows:
            self.tables.drop(seq)
            seq.status = Status.WAITING

    def _finish(self, seq: Sequence) -> None:
        was_loading = seq.status is Status.WAITING_FOR_LOAD
        (self.running if seq.status is Status.RUNNING else self.waiting).remove(seq)
        seq.status = Status.FINISHED
        self._finished_ids.add(seq.request_id)
        if self.connector is not None:
            self.connector.request_finished(seq)
        if was_loading:
            self.ended_while_loading[seq.request_id] = seq  # its blocks are being written
        else:
            self.tables.drop(seq)

    # --- room ---------------------------------------------------------------------------------------------

    def _grow_or_make_room(self, seq: Sequence, count: int) -> tuple[list[int], ...] | None:
        """New blocks for ``count`` more tokens of a running sequence; None where it had to give way itself."""
        computed = seq.num_computed_tokens
        self.tables.recycle(seq)
        while self.pool.num_free < self.tables.room_needed(seq, computed + count, computed):
            victim = self._last_loaded() or self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return None
        return self.tables.grow(seq, computed + count, computed)

    def _find_room(self, needed: Callable[[], int], seq: Sequence) -> bool:
        """Whether ``needed`` blocks are free for a waiting sequence; where nothing runs, loaded ones give way."""
        while self.pool.num_free < needed():
            victim = self._last_loaded()
            if self.running or victim is None or victim is seq:
                return False
            self._preempt(victim)
        return True

    def _last_loaded(self) -> Sequence | None:
        return next((s for s in reversed(self.waiting) if s.status is Status.LOADED), None)

    def _preempt(self, seq: Sequence) -> None:
        """Take a sequence's blocks; it computes from the start again, before those that came later."""
        self.tables.drop(seq)
        self.num_preemptions += 1
        seq.num_preemptions += 1
        self._preempted_ids.add(seq.request_id)
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self.waiting.insert(0, seq)
        seq.status = Status.PREEMPTED

    # --- help ---------------------------------------------------------------------------------------------

    def _tell_allocated(self, seq: Sequence, num_external: int) -> None:
        if self.connector is not None:
            self.connector.update_state_after_alloc(seq, Allocated(seq.tables()), num_external)

    def check(self, unreported: Iterable[ScheduledStep] = ()) -> None:
        """Recount blocks and tokens in flight; ``InvariantError`` where the books differ. For tests.

        ``unreported``: steps that were scheduled and whose ``update`` is still to come.
        """
        holders = [*self.running, *self.waiting, *self.ended_while_loading.values()]
        self.pool.check(table for seq in holders for table in seq.block_ids)
        in_flight: Counter[tuple[str, int]] = Counter()
        for work in (work for step in unreported for work in step.work):
            in_flight[work.sequence.request_id, work.num_preemptions] += len(work.token_ids)
        for seq in self.running + self.waiting:
            counted = in_flight[seq.request_id, seq.num_preemptions]
            if seq.num_in_flight_tokens != counted:
                found = f"found {seq.num_in_flight_tokens} tokens in flight, counted {counted}"
                raise InvariantError(f"request {seq.request_id}: {found}")
