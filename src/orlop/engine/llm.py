"""The embedded engine's door: prompts in, tokens and text out.

In: a model directory, or a seeded model; an ``EngineConfig``; prompts as text or token ids; settings of a connector
(or None). Out: ``Result``s, whole or token by token. Never: a server, a thread of its own.

    with LLM("path/to/model", EngineConfig(num_blocks=512), offload={"host": "1GiB"}) as llm:
        for result in llm.generate(["The orlop is"], SamplingParams(max_tokens=32)):
            print(result.text)

One step: the scheduler decides, the runner executes, the scheduler learns what came of it. With asynchronous
scheduling the next step is decided and executed before it learns, so the scheduler always works one report
behind, as it does beside a real device. Everything happens on the caller's thread.
"""

from __future__ import annotations

import itertools
import operator
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, Self

from torch import Tensor

from orlop.config import OrlopConfig
from orlop.core import EngineSpec, KVGroup
from orlop.engine.batching import ScheduledStep, Scheduler, SchedulerHalf, StepReport
from orlop.engine.blocks import NULL_BLOCK, BlockPool
from orlop.engine.checkpoint import Checkpoint
from orlop.engine.model import Model, ModelConfig
from orlop.engine.runner import Runner, WorkerHalf
from orlop.engine.sampling import MAX_SEED, SamplingParams, is_number, is_whole
from orlop.engine.sequence import HASH_NAME, Sequence, Status
from orlop.engine.tables import BlockTables
from orlop.engine.text import Text
from orlop.errors import ConfigError, OrlopError
from orlop.host.limits import memory_limit_bytes
from orlop.tiering.namespace import weights_identity

Connect = Callable[[EngineSpec, dict[str, Tensor]], tuple[WorkerHalf, SchedulerHalf]]
"""From what the engine says of itself and its KV tensors to the two halves of a connector."""

Prompt = str | Seq[int]
"""Text, or token ids: any sequence of whole numbers, an integer array too."""


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

    ``model``: the seeded model that runs where no directory is given; of a directory it becomes what is there.
    ``max_step_tokens``: the most tokens one step computes; longer prompts are computed in parts.
    ``max_running``: the most sequences in one step. ``idle_wait_s``: how long a step that had nothing to compute
    waits before the next one. ``drain_deadline_s``: how long ``shutdown``, and ``generate`` after its last token,
    step on for transfers.
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
        if not isinstance(self.model, ModelConfig):
            raise ConfigError(
                f"model: found {self.model!r}, expected a ModelConfig; a directory is LLM's first argument"
            )
        for name, least in (
            ("num_blocks", LEAST_BLOCKS),
            ("block_tokens", 1),
            ("max_step_tokens", 1),
            ("max_running", 1),
        ):
            found = getattr(self, name)
            if not is_whole(found, least):
                raise ConfigError(f"{name}: found {found!r}, allowed: a whole number from {least} up")
        for name in ("idle_wait_s", "drain_deadline_s"):
            found = getattr(self, name)
            if not is_number(found):
                raise ConfigError(f"{name}: found {found!r}, allowed: seconds from 0 up")


@dataclass(frozen=True, slots=True)
class Result:
    """One request when it ended. Times in seconds from its arrival; ``first_token_s`` None: it got none.

    ``text`` is that of ``tokens``, None where the model has no tokenizer. ``finish_reason``: ``length`` (all
    ``max_tokens``), ``stop`` (a stop or end token, which is the last of ``tokens``) or ``abort``. ``needed_tokens``
    were computed, found on the device or loaded: those of prompt and answer but the last one, of an aborted request as
    far as it came. What a preemption takes is computed, found or loaded once more, and counts each time.
    """

    request_id: str
    tokens: tuple[int, ...]
    text: str | None
    finish_reason: str
    num_prompt_tokens: int
    computed_tokens: int
    device_hit_tokens: int
    loaded_tokens: int
    needed_tokens: int
    first_token_s: float | None
    total_s: float
    preemptions: int

    @property
    def aborted(self) -> bool:
        return self.finish_reason == "abort"


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one request: ``tokens`` and their ``text``; with the last piece comes its ``result``.

    ``text`` is empty where there is no tokenizer, and where a character is still incomplete.
    """

    request_id: str
    tokens: tuple[int, ...]
    text: str
    result: Result | None = None


class LLM:
    """An engine of one process and one rank. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        model: str | os.PathLike[str] | EngineConfig | None = None,
        config: EngineConfig | None = None,
        offload: OrlopConfig | Mapping[str, Any] | None = None,
        *,
        connect: Connect | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``model``: a directory in the Hugging Face format; None, or an ``EngineConfig``: its seeded model.

        ``offload``: settings of an ``OffloadingConnector``; ``connect``: another way to make the two halves.
        ``ConfigError`` for a model that cannot be run and for settings that can never work.
        """
        if isinstance(model, EngineConfig):
            if config is not None:
                raise ConfigError("found two EngineConfigs, expected one; give it first, or after a model directory")
            model, config = None, model
        config = config or EngineConfig()
        checkpoint = Checkpoint.open(model) if model is not None else None
        self.config = config if checkpoint is None else replace(config, model=checkpoint.config)
        self._clock = clock
        room_bytes = _room_beside_kv_cache(self.config)
        self._end_tokens = frozenset() if checkpoint is None else checkpoint.end_tokens
        self.text = Text(None if checkpoint is None else checkpoint.tokenizer())
        net = Model(self.config.model) if checkpoint is None else checkpoint.load(room_bytes)
        self._weights_identity = None if checkpoint is None else weights_identity(checkpoint.directory)
        self.runner = Runner(net, self.config.num_blocks, self.config.block_tokens)
        self.scheduler = self._new_scheduler()
        if connect is None and offload is not None:
            connect = _offloading(offload)
        self.connector: SchedulerHalf | None = None
        if connect is not None:
            self.runner.connector, self.connector = connect(self.spec(), self.runner.kv_caches)
            self.scheduler.connector = self.connector
        self._unreported: deque[tuple[ScheduledStep, StepReport]] = deque()
        self._max_unreported = 1 if self.config.async_scheduling else 0
        self._live: set[str] = set()
        self._unclaimed: list[Result] = []
        """Of requests that ended while somebody else's were stepped for."""
        self._ids = itertools.count()
        self._is_shut_down = False
        self._has_drained = False
        self.observer: StepObserver | None = None
        """Told the time after every step, and that it is the last one for now."""

    def _new_scheduler(self) -> Scheduler:
        c = self.config
        tables = BlockTables(
            BlockPool(c.num_blocks), tuple(c.model.layer_groups), c.block_tokens, prefix_caching=c.prefix_caching
        )
        return Scheduler(tables, max_step_tokens=c.max_step_tokens, max_running=c.max_running)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def spec(self) -> EngineSpec:
        """What this engine says of itself to a connector."""
        c = self.config
        names = c.model.layer_names()
        tensors = {t.data_ptr(): t.numel() * t.element_size() for t in self.runner.kv_caches.values()}
        return EngineSpec(
            instance=f"engine-{os.getpid()}-{next(_instances)}",
            groups=tuple(
                KVGroup(index, c.block_tokens, sliding_window=window, layers=tuple(names[layer] for layer in layers))
                for index, (window, layers) in enumerate(c.model.layer_groups.items())
            ),
            tokens_per_hash=c.block_tokens,
            identity={
                "engine": "orlop.engine",
                "model": asdict(c.model),
                "weights": self._weights_identity,
                "dtype": "float32",
                "block_tokens": c.block_tokens,
                "hash": HASH_NAME,
                "layout": "blocks, tokens, kv, heads, head_dim",
            },
            device_cache_bytes=sum(tensors.values()),
            null_block_id=NULL_BLOCK,
            prefix_caching=c.prefix_caching,
        )

    # --- requests -----------------------------------------------------------------------------------------

    def add_request(
        self, prompt: Prompt, params: SamplingParams | int | None = None, *, request_id: str | None = None
    ) -> str:
        """Queue a prompt; its request id. ``params``: how to sample, or just the most tokens to generate.

        ``ConfigError`` where it could never run, ``OrlopError`` after ``shutdown``.
        """
        self._refuse_after_shutdown()
        request_id = request_id if request_id is not None else f"request-{next(self._ids)}"
        try:
            tokens = self.text.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
            params = _params(params)
            self._refuse_impossible(request_id, tokens, params)
        except ConfigError as error:
            raise ConfigError(f"request {request_id}: {error}") from error
        self._live.add(request_id)
        self.scheduler.add(
            Sequence(
                request_id,
                tokens,
                params,
                block_tokens=self.config.block_tokens,
                num_groups=len(self.runner.windows),
                arrival_s=self._clock(),
                seed=secrets.randbelow(MAX_SEED) if params.seed is None else params.seed,
                end_tokens=self._end_tokens,
            )
        )
        return request_id

    def abort(self, request_id: str) -> Result | None:
        """End a request now, whatever it is doing; what it got so far, None where there is no such request."""
        seq = self.scheduler.abort(request_id)
        return self._result(seq) if seq is not None else None

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | int | Seq[SamplingParams | int] | None = None
    ) -> list[Result]:
        """Run prompts to their end, all queued at once; results in the order of the prompts.

        ``params``: those of all, or one per prompt. A single text is one prompt. A request that somebody aborts, from a
        signal handler, has no result here. Steps on for transfers that are not settled, up to the drain deadline.
        Raises what ``add_request`` raises, and then none of the prompts is queued.
        """
        ids = self._add_all(prompts, params)
        wanted = set(ids)
        by_id: dict[str, Result] = {}
        while not wanted.isdisjoint(self._live):
            ended = self._step()
            by_id |= {result.request_id: result for result in ended if result.request_id in wanted}
            self._unclaimed += [result for result in ended if result.request_id not in wanted]
        deadline = self._clock() + self.config.drain_deadline_s
        # A step beyond the end may be unreported; beside requests of others it is theirs to report.
        while self._has_transfers() or (self._unreported and not self.scheduler.has_unfinished):
            if self._clock() >= deadline:
                break
            self._unclaimed += self._step()
        return [by_id[request_id] for request_id in ids if request_id in by_id]

    def stream(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | int | Seq[SamplingParams | int] | None = None
    ) -> Iterator[Piece]:
        """Like ``generate``, but every piece as soon as it is known, those of a step in the order of the prompts.

        Who leaves the iterator early aborts what is left. A request that somebody aborts has no last piece.
        """
        ids = self._add_all(prompts, params)
        pieces = self._pieces({seq.request_id: seq for seq in self.scheduler.waiting if seq.request_id in ids})
        next(pieces)
        return pieces

    def _pieces(self, sequences: dict[str, Sequence]) -> Iterator[Piece]:
        texts = {request_id: self.text.pieces() for request_id in sequences}
        told = dict.fromkeys(sequences, 0)
        try:
            yield Piece("", (), "")  # nobody's: from here on it cleans up, also where no piece is ever taken
            while sequences:
                ended = {result.request_id: result for result in self._unclaimed + self._step()}
                self._unclaimed = [result for request_id, result in ended.items() if request_id not in sequences]
                for request_id, seq in list(sequences.items()):
                    result = ended.get(request_id)
                    if result is None and seq.status is Status.FINISHED and not seq.aborted:
                        result = self._result(seq)  # whoever stepped between two pieces was handed it
                    new = tuple(seq.generated[told[request_id] :])
                    told[request_id] += len(new)
                    if result is not None or seq.aborted:
                        del sequences[request_id]
                    text = texts[request_id].add(new)
                    if result is not None:
                        text += texts[request_id].rest(result.text)
                    if new or result is not None:
                        yield Piece(request_id, new, text, result)
        finally:
            for request_id in sequences:
                self.abort(request_id)

    def _add_all(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | int | Seq[SamplingParams | int] | None
    ) -> list[str]:
        """Queue all prompts or none."""
        self._refuse_after_shutdown()
        if isinstance(prompts, str):
            prompts = [prompts]
        if not isinstance(prompts, Iterable):
            raise ConfigError(f"prompts: found {prompts!r}, expected a text or a list of texts or lists of token ids")
        each = list(prompts)
        if not isinstance(params, Seq):
            params = [_params(params)] * len(each)
        if len(params) != len(each):
            raise ConfigError(f"params: found {len(params)} for {len(each)} prompts, expected one each, or one for all")
        ids: list[str] = []
        try:
            for prompt, own in zip(each, params, strict=True):
                ids.append(self.add_request(prompt, own))  # type: ignore[arg-type]
        except BaseException:  # a prompt's own, and Ctrl-C, too
            for request_id in ids:
                self.abort(request_id)
            raise
        return ids

    def run(self) -> list[Result]:
        """Step until there is no request and no transfer left; the results in the order in which they ended."""
        results = []
        while self.has_work():
            results += self.step()
        return results

    def has_work(self) -> bool:
        """Whether another step has something to do or to hand out: for a request, or for unsettled transfers."""
        return (self._is_busy() and not self._has_drained) or bool(self._unclaimed)

    # --- steps --------------------------------------------------------------------------------------------

    def step(self) -> list[Result]:
        """One step; the requests that ended by it, and those that ended while others were generated for.

        After ``shutdown`` nothing is computed, and only the latter are left.
        """
        unclaimed, self._unclaimed = self._unclaimed, []
        return unclaimed + self._step()

    def _step(self) -> list[Result]:
        if self._has_drained:
            return []
        step = self.scheduler.schedule()
        self._unreported.append((step, self.runner.execute(step)))
        ended: list[Sequence] = []
        # Nothing follows the last step of all, so its report is not left lying.
        while len(self._unreported) > (self._max_unreported if step.work else 0):
            ended += self._learn(*self._unreported.popleft())
        if not step.work and not ended and self.config.idle_wait_s:
            time.sleep(self.config.idle_wait_s)
        if self.observer is not None:
            self._observe(self.observer, may_be_last=bool(ended) or not step.work)
        return [self._result(seq) for seq in ended]

    def _observe(self, observer: StepObserver, may_be_last: bool) -> None:
        """Nothing that happened stays untold because no further step comes."""
        if may_be_last and not self._is_busy():
            observer.publish(self._clock())
        else:
            observer.tick(self._clock())

    def _learn(self, step: ScheduledStep, report: StepReport) -> list[Sequence]:
        now = self._clock()
        for work in step.work:
            if work.samples and work.sequence.first_token_s is None:
                work.sequence.first_token_s = now
        return self.scheduler.update(step, report)

    def reset_prefix_cache(self) -> None:
        """Serve nothing from before, here and in the connector; running requests compute from the start again."""
        self.scheduler.forget_prefixes()
        if self.connector is not None and not self._has_drained:
            self.connector.reset_cache()

    def shutdown(self) -> None:
        """Abort what runs, step on for transfers up to the drain deadline, end the connector. Idempotent."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        for request_id in list(self._live):
            self.abort(request_id)
        deadline = self._clock() + self.config.drain_deadline_s
        while self._is_busy() and self._clock() < deadline:
            self._step()
        self._has_drained = True
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

    def _is_busy(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._unreported) or self._has_transfers()

    def _has_transfers(self) -> bool:
        return bool(self.scheduler.ended_while_loading) or (
            self.connector is not None and self.connector.has_pending_push_work()
        )

    def _refuse_after_shutdown(self) -> None:
        if self._is_shut_down:
            raise OrlopError("found an engine that is shut down, expected a running one; make a new LLM")

    def _refuse_impossible(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        if not isinstance(request_id, str):
            raise ConfigError("found an id that is no text, expected one")
        if request_id in self._live:
            raise ConfigError("found an id that is running, expected a new one")
        if not prompt:
            raise ConfigError("found 0 prompt tokens, expected 1 or more")
        model, tokens = self.config.model, len(prompt) + params.max_tokens
        unknown = next((token for token in prompt if not 0 <= token < model.vocab_size), None)
        if unknown is not None:
            raise ConfigError(f"found token id {unknown}, expected ids from 0 to {model.vocab_size - 1}")
        wanted = f"{len(prompt)} prompt tokens and {params.max_tokens} to generate"
        if model.max_positions is not None and tokens > model.max_positions:
            raise ConfigError(
                f"{wanted} make {tokens}, the model has positions for {model.max_positions}; shorten the prompt or "
                "lower max_tokens"
            )
        needed = self.scheduler.tables.most_blocks(tokens, self.config.max_step_tokens)
        if needed > self.scheduler.pool.capacity:
            raise ConfigError(
                f"{wanted} need {needed} device blocks, found {self.scheduler.pool.capacity}; "
                f"give the engine num_blocks={needed + 1} or more"
            )

    def _result(self, seq: Sequence) -> Result:
        self._live.discard(seq.request_id)
        return Result(
            request_id=seq.request_id,
            tokens=tuple(seq.generated),
            text=self.text.decode(seq.generated),
            finish_reason="abort" if seq.aborted else "stop" if seq.has_stopped else "length",
            num_prompt_tokens=seq.num_prompt_tokens,
            computed_tokens=seq.computed_tokens,
            device_hit_tokens=seq.device_hit_tokens,
            loaded_tokens=seq.loaded_tokens,
            needed_tokens=seq.num_needed_tokens,
            first_token_s=None if seq.first_token_s is None else seq.first_token_s - seq.arrival_s,
            total_s=self._clock() - seq.arrival_s,
            preemptions=seq.num_preemptions,
        )


def _params(params: SamplingParams | int | None) -> SamplingParams:
    if params is None:
        return SamplingParams()
    return params if isinstance(params, SamplingParams) else SamplingParams(max_tokens=params)


def _token_ids(prompt: Iterable[Any]) -> list[int]:
    """The prompt as plain numbers; ``ConfigError`` for what is not a row of whole numbers."""
    try:
        if isinstance(prompt, bytes):
            raise TypeError
        return [operator.index(token) for token in prompt]
    except TypeError:
        found = repr(prompt)
        found = found if len(found) <= SHOWN_CHARACTERS else found[:SHOWN_CHARACTERS] + "..."
        raise ConfigError(f"found the prompt {found}, expected text or a list of token ids (whole numbers)") from None


def _room_beside_kv_cache(config: EngineConfig) -> int:
    """Bytes that this process may have beside its KV cache; ``ConfigError`` where that one alone is too large."""
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
    return limit - found


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
