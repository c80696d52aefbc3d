"""Runs requests through an embedded engine and says what became of them.

In: ``RunRequest``s, an engine. Out: a ``RunReport``. Never: a table, an exit code.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the engine brings torch, and whoever hands one in has it
    from orlop.engine.llm import LLM, Result


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One request to run: the prompt's token ids and how many tokens to generate. ``where``: the line it came from."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    where: str = ""


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run of a workload. ``tokens`` by request id; ``stats`` are the connector's counters after the drain.

    Times in seconds: ``total_s`` from the first request to the end of the last, ``first_token_s`` per request that
    got a token, from when it was handed to the engine.
    """

    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    prompt_tokens: int = 0
    computed_tokens: int = 0
    device_hit_tokens: int = 0
    loaded_tokens: int = 0
    preemptions: int = 0
    first_token_s: tuple[float, ...] = ()
    total_s: float = 0.0
    interrupted: bool = False
    stats: Mapping[str, float] = field(default_factory=dict)

    def first_token_percentile_s(self, percent: float) -> float | None:
        """The smallest time that ``percent`` of the requests did not exceed; None where none got a token."""
        if not self.first_token_s:
            return None
        ordered = sorted(self.first_token_s)
        return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]

    @property
    def tokens_loaded_by_tier(self) -> dict[str, int]:
        """Loaded tokens by where they were found: ``host``, or a tier's name such as ``1:files``."""
        prefix = "tokens_loaded "
        return {name.removeprefix(prefix): int(value) for name, value in self.stats.items() if name.startswith(prefix)}


def replay(
    llm: LLM,
    requests: Sequence[RunRequest],
    *,
    concurrency: int,
    tell: Callable[[int], None] = lambda num_ended: None,
    must_stop: Callable[[], bool] = lambda: False,
    keep: Callable[[Result], None] = lambda result: None,
) -> RunReport:
    """Run ``requests`` in order, ``concurrency`` at a time, then shut the engine down.

    ``tell`` is called with the number of requests that have ended, ``keep`` with each as it ends. ``must_stop`` is
    asked between steps; once it says so the run ends with what was done.
    """
    started, interrupted = time.monotonic(), False
    results: list[Result] = []
    num_started = 0
    try:
        while len(results) < len(requests) and not (interrupted := must_stop()):
            while num_started < len(requests) and num_started - len(results) < concurrency:
                request = requests[num_started]
                llm.add_request(request.prompt, request.max_tokens, request_id=request.request_id)
                num_started += 1
            for result in llm.step():
                results.append(result)
                keep(result)
            tell(len(results))
        total_s = time.monotonic() - started
    finally:
        llm.shutdown()
    return RunReport(
        tokens={r.request_id: r.tokens for r in results},
        prompt_tokens=sum(r.num_prompt_tokens for r in results),
        computed_tokens=sum(r.computed_tokens for r in results),
        device_hit_tokens=sum(r.device_hit_tokens for r in results),
        loaded_tokens=sum(r.loaded_tokens for r in results),
        preemptions=sum(r.preemptions for r in results),
        first_token_s=tuple(r.first_token_s for r in results if r.first_token_s is not None),
        total_s=total_s,
        interrupted=interrupted,
        stats=dict(llm.connector.get_stats()) if llm.connector is not None else {},
    )
