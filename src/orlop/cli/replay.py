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
    """One request to run: the prompt's token ids and how many tokens to generate. ``where``: the line it came from.

    ``recorded``: tokens of the prompt and of the answer as a trace has them, where it is of one.
    """

    request_id: str
    prompt: list[int]
    max_tokens: int
    where: str = ""
    recorded: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run of a workload. ``tokens`` by request id, of those that ended; ``stats``: the connector's counters.

    All else is of the requests that ended and the ``stopped`` ones together. ``needed_tokens``: of prompts and answers,
    but the last of each, and of a stopped request as far as it came. They were computed, found on the device or loaded;
    what these come to beyond them was lost to a preemption, or never used. Times in seconds: ``total_s`` from the first
    request to the end of the last, ``first_token_s`` per request that got a token, from when it was handed to the
    engine.
    """

    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    stopped: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    needed_tokens: int = 0
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
    def repeated_tokens(self) -> int:
        """Computed, found or loaded once more or for nothing."""
        return self.computed_tokens + self.device_hit_tokens + self.loaded_tokens - self.needed_tokens

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
    stopped: list[Result] = []
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
        ended = {result.request_id for result in results}
        running = [r.request_id for r in requests[:num_started] if r.request_id not in ended]
        stopped = [so_far for request_id in running if (so_far := llm.abort(request_id)) is not None]
    finally:
        llm.shutdown()
    stats = dict(llm.connector.get_stats()) if llm.connector is not None else {}
    begun = results + stopped
    return RunReport(
        tokens={r.request_id: r.tokens for r in results},
        stopped=len(stopped),
        prompt_tokens=sum(r.num_prompt_tokens for r in begun),
        generated_tokens=sum(len(r.tokens) for r in begun),
        needed_tokens=sum(r.needed_tokens for r in begun),
        computed_tokens=sum(r.computed_tokens for r in begun),
        device_hit_tokens=sum(r.device_hit_tokens for r in begun),
        loaded_tokens=int(stats.get("tokens_loaded", 0)),  # also by loads that a stop has cut off
        preemptions=sum(r.preemptions for r in begun),
        first_token_s=tuple(r.first_token_s for r in begun if r.first_token_s is not None),
        total_s=total_s,
        interrupted=interrupted,
        stats=stats,
    )
