"""A random walk of requests through vLLM's real Scheduler over our scheduler half.

In: a seed and sizes. Out: what was seen, after every request has ended and every book is empty. Never: a real
clock, a thread, randomness of its own (all of it comes from the seed).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm_adapter import VOCABULARY, EngineSizes, Joined, build_scheduler, make_request
from vllm_mock_worker import Dice, MockWorker, Prefix, Sightings, answer, windows_of
from vllm_watch import WatchedManager

from orlop.core import OffloadingConnectorMetadata
from orlop.scheduler.scheduler import OffloadingConnectorScheduler, SchedulerOptions

SETTLE_STEPS = 3000


@dataclass(frozen=True)
class Plan:
    """One walk: everything but the seed that decides it. Chances are per step."""

    sizes: EngineSizes
    requests: int = 500
    slots: int = 96
    blocks_per_chunk: int = 1
    ranks: int = 1
    outputs_late: int = 0
    """How many further steps are scheduled before a step's output is processed."""
    dice: Dice = field(default_factory=Dice)
    add: float = 0.35
    abort: float = 0.04
    soft_reset: float = 0.004
    hard_reset: float = 0.01
    longest_step_s: float = 1.0
    answers: tuple[int, ...] = (1, 2, 10, 20, 40)
    """How many tokens a request says at most."""
    gather_steps: int = 1
    max_joint_chunks: int = 16


@dataclass
class Living:
    """A request that has not ended, as the walk knows it."""

    request: Request
    prompt: list[int]
    output_tokens: int
    text: Prefix
    hashes_known: int = 0


class Walk:
    """Adds, aborts, resets and steps, checking everything after every step."""

    def __init__(self, plan: Plan, seed: int, folder: Path, manager: WatchedManager) -> None:
        self.plan, self.rng = plan, random.Random(seed)
        self.now = 1000.0
        self.worker = MockWorker(
            blocks=plan.sizes.blocks,
            slots=plan.slots,
            blocks_per_chunk=plan.blocks_per_chunk,
            windows=windows_of(plan.sizes.windowed),
            ranks=plan.ranks,
            rng=random.Random(seed + 1),
            dice=plan.dice,
        )
        self.manager = manager
        manager.watch(self.worker)
        self.half = OffloadingConnectorScheduler(
            plan.sizes.geometry(plan.blocks_per_chunk),
            manager,
            SchedulerOptions(ranks=plan.ranks, gather_steps=plan.gather_steps, max_joint_chunks=plan.max_joint_chunks),
        )
        joined = Joined(self.half, lambda: self.now, lambda: self.rng.randbytes(16))
        self.scheduler = build_scheduler(plan.sizes, joined, folder)
        self.seen: Sightings = self.worker.seen
        self.documents = [self.tokens(400) for _ in range(4)]
        self.living: dict[str, Living] = {}
        self.late: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.added = 0
        self.used_ids: set[str] = set()
        self.ended = 0

    # --- the whole walk -------------------------------------------------------------------------

    def run(self) -> Sightings:
        """All requests from the first to the last book closed."""
        while self.added < self.plan.requests or self.living:
            self._stir()
            self.step()
        return self.finish()

    def finish(self) -> Sightings:
        """Step until every request has ended, the engine has nothing left, and every book is empty."""
        self._settle()
        self._check_nothing_is_left()
        return self.seen

    def step(self) -> None:
        """One engine step: schedule, execute, process an output that is due, check."""
        self.now += self.rng.uniform(0.005, self.plan.longest_step_s)
        output = self.scheduler.schedule()
        self.seen.add("preempted", len(output.preempted_req_ids or ()))
        self.seen.add("resumed", len(output.scheduled_cached_reqs.resumed_req_ids))
        message = output.kv_connector_metadata.message
        self.seen.add("stored_at_preemption", self._stored_at_preemption(message, output.preempted_req_ids or ()))
        made = self.worker.execute(output, message)
        made.kv_connector_output = self._maybe_empty(self.worker.reports())
        self.late.append((output, made))
        self._check_running()
        while len(self.late) > (self.plan.outputs_late if self.scheduler.has_requests() else 0):
            self._process_one()
        self._check_books()

    def _stored_at_preemption(self, message: OffloadingConnectorMetadata, preempted: Collection[str]) -> int:
        """Jobs of a step that store what requests had filled that lose their blocks in it."""
        at_once = [self.half._jobs[job.job_id] for job in message.store_jobs if not job.after_compute]
        return sum(any(not s.finished and s.context.req_id in preempted for s in job.lives) for job in at_once)

    def _process_one(self) -> None:
        if self.rng.random() < self.plan.abort:
            self._abort()
        output, made = self.late.popleft()
        self.scheduler.update_from_output(output, made)
        for req_id in [r for r, living in self.living.items() if living.request.is_finished()]:
            self._end(req_id)
        for living in self.living.values():
            self._learn(living)

    def _maybe_empty(self, said: KVConnectorOutput | None) -> KVConnectorOutput | None:
        """In-process the hook is skipped where nothing is said; over processes it is called all the same."""
        return KVConnectorOutput() if said is None and self.rng.random() < 0.3 else said

    # --- what comes from outside ------------------------------------------------------------------

    def _stir(self) -> None:
        if self.added < self.plan.requests and len(self.living) < 24 and self.rng.random() < self.plan.add:
            for _ in range(self.rng.choice((1, 1, 1, 4))):
                self._add()
        if self.rng.random() < self.plan.abort:
            self._abort()
        if self.rng.random() < self.plan.soft_reset * (5 if self._loading() else 1):
            self.worker.begin_epoch(all_void=False)
            self.scheduler.reset_prefix_cache(reset_connector=True)
            self.seen.add("soft_resets")
        if self.rng.random() < self.plan.hard_reset:
            self._hard_reset()

    def tokens(self, count: int) -> list[int]:
        """Tokens that nobody has seen before."""
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def _add(self) -> None:
        document = self.rng.choice(self.documents)
        shared = document[: self.rng.choice((0, 16, 33, 64, 128, 200, 256, 320, 400))]
        prompt = shared + self.tokens(self.rng.choice((1, 5, 16, 40)))
        stops = self.tokens(25) if self.rng.random() < 0.3 else ()
        self.add(self._free_id(), prompt, self.rng.choice(self.plan.answers), stops)

    def add(self, req_id: str, prompt: list[int], output_tokens: int, stop_tokens: Sequence[int] = ()) -> None:
        """One request joins; it ends after ``output_tokens`` tokens or with the first stop token."""
        request = make_request(req_id, prompt, output_tokens, stop_tokens)
        self.added += 1
        self.used_ids.add(req_id)
        living = Living(request, prompt, request.max_tokens, Prefix(prompt))
        self.living[request.request_id] = living
        self._learn(living)
        self.scheduler.add_request(request)

    def _free_id(self) -> str:
        """Mostly a new id, now and then one whose earlier life may still drain."""
        reused = f"r{self.rng.randrange(self.added + 1)}"
        on_the_way = any(reused in output.num_scheduled_tokens for output, _ in self.late)
        if self.rng.random() < 0.2 and reused not in self.scheduler.requests and not on_the_way:
            self.seen.add("reused_ids", reused in self.used_ids)
            return reused
        return f"r{self.added}" if f"r{self.added}" not in self.scheduler.requests else f"x{self.added}"

    def _abort(self) -> None:
        if not self.living:
            return
        loading = self._loading()
        req_id = self.rng.choice(loading if loading and self.rng.random() < 0.5 else list(self.living))
        status = self.living[req_id].request.status
        self.seen.add(f"aborted_{status.name.lower()}")
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
        self._end(req_id)

    def _loading(self) -> list[str]:
        waits = RequestStatus.WAITING_FOR_REMOTE_KVS
        return [r for r, living in self.living.items() if living.request.status is waits]

    def _hard_reset(self) -> None:
        """As after new weights: outputs processed, everybody preempted, nothing from before may be read."""
        while self.late:
            self._process_one()
        if any(r.status is RequestStatus.WAITING_FOR_REMOTE_KVS for r in self.scheduler.requests.values()):
            return  # vLLM refuses while loads hold blocks
        if any(r.is_finished() for r in self.scheduler.requests.values()):
            return
        if self.scheduler.kv_holding_waiting:
            return
        self.worker.begin_epoch(all_void=True)
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        self.seen.add("hard_resets")

    def _end(self, req_id: str) -> None:
        """Compare what the request has answered with what the model says without any cache."""
        living = self.living.pop(req_id)
        said = list(living.request.output_token_ids)
        right = answer(living.prompt, len(said))
        assert said == right, f"{req_id} answered {said}, without a cache it answers {right}"
        status = living.request.status
        assert status is not RequestStatus.FINISHED_LENGTH_CAPPED or len(said) == living.output_tokens
        self.seen.add(f"ended_{status.name.lower()}")
        self.ended += 1

    def _learn(self, living: Living) -> None:
        text = living.text
        text.extend(living.request.all_token_ids[len(text) :])
        living.hashes_known = self.worker.learn_hashes(text, living.request.block_hashes, living.hashes_known)

    # --- what must hold --------------------------------------------------------------------------------

    def _check_running(self) -> None:
        """Whatever runs, scheduled or not: all it has computed is where its block table says."""
        for request in self.scheduler.running:
            row = self.worker.rows[request.request_id]
            tables: Sequence[list[int]] = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
            for group, table in enumerate(tables):
                self.worker.check_cells(request.request_id, row.text, group, table, request.num_computed_tokens)

    def _check_books(self) -> None:
        self.half.check()
        self.manager.check(self.half.open_reservations())

    def _settle(self) -> None:
        for _ in range(SETTLE_STEPS):
            if not self.scheduler.has_requests() and not self.late:
                break
            self.step()
        assert not self.scheduler.has_requests(), "the engine still has work long after the last request"
        assert not self.half.has_pending_push_work()
        for _ in range(SETTLE_STEPS):  # reports that come after their deadline find their way when somebody comes by
            if not self.worker.transfers and not self.late:
                break
            self.step()

    def _check_nothing_is_left(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        assert self.ended == self.added
        assert not self.living
        assert not self.scheduler.requests
        assert self.manager.ended == self.manager.lives, "some life has had no on_request_finished"
        assert not self.half.open_reservations()
        assert not self.scheduler.deferred_frees
        assert pool.get_num_free_blocks() == self.plan.sizes.blocks - 1
        self._check_books()
