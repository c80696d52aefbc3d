"""The embedded engine's door: prompts in, tokens out.

In: an ``EngineConfig``, prompts as token ids, settings of a connector (or None). Out: ``Result``s. Never: text,
sampling other than greedy, a server.

    llm = LLM(EngineConfig(num_blocks=64), offload={"host": "64MiB"})
    results = llm.generate([[1, 2, 3]], max_tokens=8)
    llm.shutdown()

One step: the scheduler decides, the runner executes, the scheduler learns what came of it. With asynchronous
scheduling the next step is decided and executed before it learns, so the scheduler always works one report
behind, as it does beside a real device. Everything happens on the caller's thread.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from torch import Tensor

from orlop.config import OrlopConfig
from orlop.core import EngineSpec, KVGroup
from orlop.engine.batching import ScheduledStep, Scheduler, SchedulerHalf, StepReport
from orlop.engine.blocks import NULL_BLOCK, BlockPool
from orlop.engine.model import Model, ModelConfig
from orlop.engine.runner import Runner, WorkerHalf
from orlop.engine.sequence import HASH_NAME, Sequence
from orlop.errors import ConfigError, OrlopError
from orlop.host.limits import memory_limit_bytes

Connect = Callable[[EngineSpec, dict[str, Tensor]], tuple[WorkerHalf, SchedulerHalf]]
"""From what the engine says of itself and its KV tensors to the two halves of a connector."""


class StepObserver(Protocol):
    """Who is told the time after every step; an ``orlop.observe`` Observer is one."""

    def tick(self, now: float) -> None: ...

    def publish(self, now: float) -> None: ...


_instances = itertools.count()

LEAST_BLOCKS = 2
"""The null block and one that holds something."""
SHOWN_CHARACTERS = 60
"""Of a prompt that is none, in a message."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """``num_blocks`` device blocks of ``block_tokens`` tokens each (one of them is the null block).

    ``max_step_tokens``: the most tokens one step computes; longer prompts are computed in parts.
    ``max_running``: the most sequences in one step. ``idle_wait_s``: how long a step that had nothing to compute
    waits before the next one. ``drain_deadline_s``: how long ``shutdown`` steps on for transfers.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    num_blocks: int = 512
    block_tokens: int = 16
    max_step_tokens: int = 512
    max_running: int = 16
    prefix_caching: bool = True
    async_scheduling: bool = False
    idle_wait_s: float = 0.0005
    drain_deadline_s: float = 3.0

    def __post_init__(self) -> None:
        """``ConfigError`` for a number that would end in an engine which never gets anywhere."""
        for name, least in (
            ("num_blocks", LEAST_BLOCKS),
            ("block_tokens", 1),
            ("max_step_tokens", 1),
            ("max_running", 1),
        ):
            found = getattr(self, name)
            if not _is_whole(found) or found < least:
                raise ConfigError(f"{name}: found {found!r}, allowed: a whole number from {least} up")
        for name in ("idle_wait_s", "drain_deadline_s"):
            found = getattr(self, name)
            if not isinstance(found, int | float) or not 0 <= found < math.inf:
                raise ConfigError(f"{name}: found {found!r}, allowed: seconds from 0 up")


@dataclass(frozen=True, slots=True)
class Result:
    """One request when it ended. Times in seconds from its arrival; ``first_token_s`` None: it got none.

    Prompt and generated tokens were computed, found on the device or loaded; what was computed again after a
    preemption counts each time.
    """

    request_id: str
    tokens: tuple[int, ...]
    num_prompt_tokens: int
    computed_tokens: int
    device_hit_tokens: int
    loaded_tokens: int
    first_token_s: float | None
    total_s: float
    preemptions: int
    aborted: bool


class LLM:
    """An engine of one process and one rank. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        offload: OrlopConfig | Mapping[str, Any] | None = None,
        *,
        connect: Connect | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``offload``: settings of an ``OffloadingConnector``; ``connect``: another way to make the two halves."""
        self.config = config or EngineConfig()
        self._clock = clock
        _refuse_too_large(self.config)
        self.runner = Runner(Model(self.config.model), self.config.num_blocks, self.config.block_tokens)
        if connect is None and offload is not None:
            connect = _offloading(offload)
        self.connector: SchedulerHalf | None = None
        if connect is not None:
            self.runner.connector, self.connector = connect(self.spec(), self.runner.kv_caches)
        self.scheduler = Scheduler(
            BlockPool(self.config.num_blocks),
            block_tokens=self.config.block_tokens,
            max_step_tokens=self.config.max_step_tokens,
            max_running=self.config.max_running,
            prefix_caching=self.config.prefix_caching,
            connector=self.connector,
        )
        self._unreported: deque[tuple[ScheduledStep, StepReport]] = deque()
        self._max_unreported = 1 if self.config.async_scheduling else 0
        self._live: set[str] = set()
        self._ids = itertools.count()
        self._is_shut_down = False
        self.observer: StepObserver | None = None
        """Told the time after every step, and when ``run`` has nothing left to do."""

    def spec(self) -> EngineSpec:
        """What this engine says of itself to a connector."""
        c = self.config
        caches = self.runner.kv_caches
        return EngineSpec(
            instance=f"engine-{os.getpid()}-{next(_instances)}",
            groups=(KVGroup(0, c.block_tokens, layers=tuple(caches)),),
            tokens_per_hash=c.block_tokens,
            identity={
                "engine": "orlop.engine",
                "model": asdict(c.model),
                "dtype": "float32",
                "block_tokens": c.block_tokens,
                "hash": HASH_NAME,
                "layout": "blocks, kv, heads, tokens, head_dim",
            },
            device_cache_bytes=sum(t.numel() * t.element_size() for t in caches.values()),
            null_block_id=NULL_BLOCK,
            prefix_caching=c.prefix_caching,
        )

    # --- requests -----------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Seq[int],
        max_tokens: int,
        *,
        request_id: str | None = None,
        stop_token: int | None = None,
    ) -> str:
        """Queue a prompt of token ids; its request id. ``ConfigError`` where it could never run.

        Any sequence of whole numbers is a prompt, an integer array too. ``OrlopError`` after ``shutdown``.
        """
        self._refuse_after_shutdown()
        request_id = request_id if request_id is not None else f"request-{next(self._ids)}"
        prompt = _token_ids(request_id, prompt)
        self._refuse_impossible(request_id, prompt, max_tokens)
        self._live.add(request_id)
        self.scheduler.add(
            Sequence(
                request_id,
                prompt,
                max_tokens,
                block_tokens=self.config.block_tokens,
                arrival_s=self._clock(),
                stop_token=stop_token,
            )
        )
        return request_id

    def abort(self, request_id: str) -> Result | None:
        """End a request now, whatever it is doing; what it got so far, None where there is no such request."""
        seq = self.scheduler.abort(request_id)
        return self._result(seq) if seq is not None else None

    def generate(self, prompts: Seq[Seq[int]], max_tokens: int) -> list[Result]:
        """Run prompts to their end, all queued at once; results in the order of the prompts.

        Raises what ``add_request`` raises, and then none of the prompts is queued.
        """
        self._refuse_after_shutdown()
        if not isinstance(prompts, Iterable) or isinstance(prompts, str):
            raise ConfigError(f"prompts: found {prompts!r}, expected a list of prompts, each a list of token ids")
        ids: list[str] = []
        try:
            for prompt in prompts:
                ids.append(self.add_request(prompt, max_tokens))
        except OrlopError:
            for request_id in ids:
                self.abort(request_id)
            raise
        by_id = {result.request_id: result for result in self.run()}
        return [by_id[request_id] for request_id in ids]

    def run(self) -> list[Result]:
        """Step until there is no request and no transfer left; the results in the order in which they ended."""
        results = []
        while self.has_work():
            results += self.step()
        if self.observer is not None:
            self.observer.publish(self._clock())
        return results

    def has_work(self) -> bool:
        """Whether another step has something to do: for a request, or for transfers that are not settled."""
        return self.scheduler.has_unfinished or self._has_transfers() or bool(self._unreported)

    # --- steps --------------------------------------------------------------------------------------------

    def step(self) -> list[Result]:
        """One step; the requests that ended by it."""
        step = self.scheduler.schedule()
        self._unreported.append((step, self.runner.execute(step)))
        ended: list[Sequence] = []
        # Nothing follows the last step of all, so its report is not left lying.
        while len(self._unreported) > (self._max_unreported if step.work else 0):
            ended += self._learn(*self._unreported.popleft())
        if not step.work and not ended and self.config.idle_wait_s:
            time.sleep(self.config.idle_wait_s)
        if self.observer is not None:
            self.observer.tick(self._clock())
        return [self._result(seq) for seq in ended]

    def _learn(self, step: ScheduledStep, report: StepReport) -> list[Sequence]:
        now = self._clock()
        for work in step.work:
            if work.samples and work.sequence.first_token_s is None:
                work.sequence.first_token_s = now
        return self.scheduler.update(step, report)

    def reset_prefix_cache(self) -> None:
        """Serve nothing from before, here and in the connector; running requests compute from the start again."""
        self.scheduler.forget_prefixes()
        if self.connector is not None:
            self.connector.reset_cache()

    def shutdown(self) -> None:
        """Abort what runs, step on for transfers up to the drain deadline, end the connector. Idempotent."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        for request_id in list(self._live):
            self.abort(request_id)
        deadline = self._clock() + self.config.drain_deadline_s
        while self.has_work() and self._clock() < deadline:
            self.step()
        # Copies first: what they still write to host memory, the tiers below it may still keep.
        if self.runner.connector is not None:
            self.runner.connector.shutdown()
        if self.connector is not None:
            self.connector.shutdown()

    def check(self) -> None:
        """Recount the books of the scheduler and its blocks; ``InvariantError`` where they differ. For tests."""
        self.scheduler.check(step for step, _ in self._unreported)

    # --- help ---------------------------------------------------------------------------------------------

    def logits_after(self, tokens: list[int]) -> Tensor:
        """Float32 logits (vocabulary,) of the token after ``tokens``, without any cache."""
        return self.runner.logits_after(tokens)

    def _has_transfers(self) -> bool:
        return bool(self.scheduler.ended_while_loading) or (
            self.connector is not None and self.connector.has_pending_push_work()
        )

    def _refuse_after_shutdown(self) -> None:
        if self._is_shut_down:
            raise OrlopError("found an engine that is shut down, expected a running one; make a new LLM")

    def _refuse_impossible(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        if request_id in self._live:
            raise ConfigError(f"request {request_id}: found an id that is running, expected a new one")
        if not prompt or not _is_whole(max_tokens) or max_tokens < 1:
            found = f"{len(prompt)} prompt tokens and max_tokens={max_tokens!r}"
            raise ConfigError(f"request {request_id}: found {found}, expected 1 or more of each")
        vocab_size = self.config.model.vocab_size
        unknown = next((token for token in prompt if not 0 <= token < vocab_size), None)
        if unknown is not None:
            raise ConfigError(
                f"request {request_id}: found token id {unknown}, expected ids from 0 to {vocab_size - 1}"
            )
        needed = -(-(len(prompt) + max_tokens) // self.config.block_tokens)
        if needed > self.scheduler.pool.capacity:
            raise ConfigError(
                f"request {request_id}: {len(prompt)} prompt tokens and {max_tokens} to generate need {needed} device "
                f"blocks, found {self.scheduler.pool.capacity}; give the engine num_blocks={needed + 1} or more"
            )

    def _result(self, seq: Sequence) -> Result:
        self._live.discard(seq.request_id)
        return Result(
            request_id=seq.request_id,
            tokens=tuple(seq.generated),
            num_prompt_tokens=seq.num_prompt_tokens,
            computed_tokens=seq.computed_tokens,
            device_hit_tokens=seq.device_hit_tokens,
            loaded_tokens=seq.loaded_tokens,
            first_token_s=None if seq.first_token_s is None else seq.first_token_s - seq.arrival_s,
            total_s=self._clock() - seq.arrival_s,
            preemptions=seq.num_preemptions,
            aborted=seq.aborted,
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token_ids(request_id: str, prompt: Iterable[Any]) -> list[int]:
    """The prompt as plain numbers; ``ConfigError`` for text and for what is not a row of whole numbers."""
    try:
        if isinstance(prompt, str | bytes):
            raise TypeError
        return [operator.index(token) for token in prompt]
    except TypeError:
        found = repr(prompt)
        found = found if len(found) <= SHOWN_CHARACTERS else found[:SHOWN_CHARACTERS] + "..."
        raise ConfigError(
            f"request {request_id}: found the prompt {found}, expected a list of token ids (whole numbers); "
            "the engine has no tokenizer"
        ) from None


def _refuse_too_large(config: EngineConfig) -> None:
    """``ConfigError`` for a KV cache that this process can never have."""
    block_bytes = config.block_tokens * config.model.kv_bytes_per_token
    found, limit = config.num_blocks * block_bytes, memory_limit_bytes()
    if found > limit:
        fit = limit // block_bytes
        lower = f"num_blocks (orlop run: --device-blocks) to {fit} or less"
        if fit < LEAST_BLOCKS:
            lower = "block_tokens (orlop run: --block-tokens)"
        raise ConfigError(
            f"num_blocks: found {config.num_blocks} device blocks of {block_bytes} bytes, a KV cache of {found} "
            f"bytes, expected {limit} bytes at most, the memory limit of this process; lower {lower}"
        )


def _offloading(settings: OrlopConfig | Mapping[str, Any]) -> Connect:
    """A ``Connect`` for Orlop's own connector: worker first, then its tensors, then the scheduler half."""
    from orlop.connector import OffloadingConnector

    def connect(spec: EngineSpec, kv_caches: dict[str, Tensor]) -> tuple[WorkerHalf, SchedulerHalf]:
        worker = OffloadingConnector.worker(settings, spec)
        try:
            worker.register_kv_caches(kv_caches)
            return worker, OffloadingConnector.scheduler(settings, spec)
        except BaseException:
            worker.shutdown()
            raise

    return connect
