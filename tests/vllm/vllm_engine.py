"""A real vLLM engine in this process, with or without the connector, and what its answers are compared with.

In: a checkpoint, settings. Out: answers with the lead of each token over the second best. Never: a comparison beyond
a tie: where two correct runs differ in rounding, the tokens after it are those of two different texts.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patience import PATIENT

BLOCK_TOKENS = 32
DEVICE_BLOCKS = 40
MODEL_TOKENS = 512
TIE = 1e-4
PATIENCE_S = 60.0

Prompt = Sequence[int]


@dataclass(frozen=True)
class Answer:
    """Tokens, and by how much each led over the second best (in log probability)."""

    tokens: tuple[int, ...]
    leads: tuple[float, ...]


def assert_same(found: Answer, expected: Answer, what: object) -> bool:
    """Equal tokens, or equal up to a tie, which is where it ends; whether there was one."""
    for i, (a, b) in enumerate(zip(found.tokens, expected.tokens, strict=False)):
        if a != b:
            lead = min(found.leads[i], expected.leads[i])
            assert lead < TIE, f"{what}: token {i} is {a}, expected {b}, which led by {lead:.2g}"
            return True
    assert len(found.tokens) == len(expected.tokens), f"{what}: another number of tokens"
    return False


def patient(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A busy machine changes what is waited for, not what is found: no deadline of copies, tiers, the drain passes."""
    tiers = {name: {"deadline": PATIENT, **settings[name]} for name in ("files", "disk") if name in settings}
    return {"store_deadline": PATIENCE_S, "drain_deadline": PATIENCE_S, **settings, **tiers}


def text(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(10, 310) for _ in range(tokens)]


def conversations(seed: int, people: int = 6, turns: int = 3, words: int = 96) -> list[list[list[int]]]:
    """``[turn][person]``: each turn's prompt is the one before and more; all of them together exceed the device."""
    rng = random.Random(seed)
    rows = [text(rng, words) for _ in range(people)]
    said = [rows]
    for _ in range(turns - 1):
        rows = [row + text(rng, words) for row in rows]
        said.append(rows)
    return said


class Engine:
    """One engine in this process. ``settings`` None: no connector."""

    def __init__(self, model: Path, settings: Mapping[str, Any] | None = None, **options: Any) -> None:
        from vllm import LLM

        if settings is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "OrlopConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": patient({"blocks_per_chunk": 2, **settings}),
            }
        chosen = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": MODEL_TOKENS,
            "num_gpu_blocks_override": DEVICE_BLOCKS,
            "block_size": BLOCK_TOKENS,
            "max_num_seqs": 8,
            "disable_log_stats": False,
            "seed": 0,
        }
        self._llm = LLM(str(model), **{**chosen, **options})
        self.engine = self._llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.connector = self.scheduler.connector
        self._ids = itertools.count()
        self._preempted: dict[str, int] = {}

    def ask(self, prompts: Sequence[Prompt], max_tokens: int = 12) -> list[Answer]:
        """All prompts at once; answers in their order, and the books checked after every step."""
        ids = [self.add(prompt, max_tokens) for prompt in prompts]
        ended = self.finish()
        return [ended[req_id] for req_id in ids]

    def add(
        self,
        prompt: Prompt,
        max_tokens: int = 12,
        lora: Any = None,
        prompt_logprobs: int | None = None,
        **params: Any,
    ) -> str:
        """Queue one prompt; its id. ``params`` go into the prompt, such as ``cache_salt``."""
        from vllm import SamplingParams

        req_id = f"r{next(self._ids)}"
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=2, prompt_logprobs=prompt_logprobs
        )
        self.engine.add_request(req_id, {"prompt_token_ids": list(prompt), **params}, sampling, lora_request=lora)
        return req_id

    def step(self) -> dict[str, Answer]:
        """One step; the requests that ended with it."""
        ended = {}
        for output in self.engine.step():
            if output.finished:
                ended[output.request_id] = _answer(output.outputs[0])
        self._preempted.update((r.request_id, r.num_preemptions) for r in self.scheduler.requests.values())
        self.check()
        return ended

    def finish(self) -> dict[str, Answer]:
        """Step until no request is left. A request that hangs fails here."""
        ended: dict[str, Answer] = {}
        deadline = time.monotonic() + PATIENCE_S
        while self.engine.has_unfinished_requests():
            ended.update(self.step())
            assert time.monotonic() < deadline, f"requests hang: {list(self.scheduler.requests)}"
        return ended

    def settle(self) -> None:
        """Step on until every transfer is, as vLLM's own loop does."""
        deadline = time.monotonic() + PATIENCE_S
        while (self.connector and self.connector.has_pending_push_work()) or self.scheduler.requests:
            self.core.step_fn()
            assert time.monotonic() < deadline, "transfers do not settle"
        self.check()

    def check(self) -> None:
        if self.connector is not None:
            self.connector.check()

    def forget_device(self) -> None:
        """The device's own prefix cache forgets; what was offloaded stays."""
        assert self.scheduler.kv_cache_manager.reset_prefix_cache()

    @property
    def preemptions(self) -> int:
        """How often a request has lost its blocks to another."""
        return sum(self._preempted.values())

    def stats(self) -> Mapping[str, float]:
        return self.connector._half.get_stats()

    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def close(self) -> None:
        self.engine.engine_core.shutdown()


@contextmanager
def engine(*args: Any, **options: Any) -> Iterator[Engine]:
    made = Engine(*args, **options)
    try:
        yield made
    finally:
        made.close()


class Reference:
    """What a model says with no connector and nothing cached: asked in one engine, remembered."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._said: dict[tuple[tuple[int, ...], int], Answer] = {}

    def answers(self, prompts: Sequence[Prompt], max_tokens: int = 12) -> list[Answer]:
        keys = [(tuple(prompt), max_tokens) for prompt in prompts]
        new = [key for key in dict.fromkeys(keys) if key not in self._said]
        if new:
            with engine(self._model, enable_prefix_caching=False, num_gpu_blocks_override=400) as plain:
                self._said.update(zip(new, plain.ask([prompt for prompt, _ in new], max_tokens), strict=True))
        return [self._said[key] for key in keys]


def _answer(output: Any) -> Answer:
    leads = []
    for row in output.logprobs:
        best = sorted((entry.logprob for entry in row.values()), reverse=True)
        leads.append(best[0] - best[1])
    return Answer(tuple(output.token_ids), tuple(leads))
