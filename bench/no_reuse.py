"""What offloading costs where it can gain nothing: throughput of prompts that share no prefix, with and without it.

In: ``--rounds``, ``--short``. Out: tokens per second each way, with the spread, and the ratio to no connector. Never: a
verdict from one round.

Method: the embedded engine with a seeded float32 model on the CPU serves the same prompts, all different, without a
connector, with host memory, and with host memory and files, in turn (A B C A B C ...), each in a new engine. The time
is that from the first request to the last token; what still drains afterwards is not in it. Host memory holds less than
a round stores, so it evicts.

What offloading costs depends on how much a model computes for a byte of its KV cache, so there are two models.
``slice`` has two layers of the shape of Qwen2.5-0.5B: 30,000 floating-point operations per byte, as most models that
are served have or more. ``tiny`` has 2.4 million weights and 1,200 operations per byte: what every step, request and
byte costs shows there at its largest.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from orlop import LLM, EngineConfig
from orlop.engine.model import ModelConfig


@dataclass(frozen=True)
class Work:
    """A model, the prompts of one round, and the bytes of host memory that they are too much for."""

    model: ModelConfig
    requests: int
    host: str


WORKS = {
    "slice": Work(ModelConfig(hidden=896, layers=2, heads=14, kv_heads=2, head_dim=64, intermediate=4864), 16, "8MiB"),
    "tiny": Work(ModelConfig(hidden=256, layers=4, heads=8, kv_heads=4, head_dim=32, intermediate=512), 128, "128MiB"),
}
PROMPT_TOKENS, GENERATED = 384, 32
GOAL = 0.98
WAYS = ("no connector", "host", "host and files")


def settings(way: str, host: str, path: Path) -> dict[str, Any] | None:
    if way == WAYS[0]:
        return None
    files = {"files": {"path": str(path), "bytes": "4GB"}} if way == WAYS[2] else {}
    return {"host": host, "weights_id": "bench", **files}


def tokens_per_second(way: str, work: Work, prompts: list[list[int]]) -> float:
    with tempfile.TemporaryDirectory() as directory:
        llm = LLM(EngineConfig(model=work.model, num_blocks=512), offload=settings(way, work.host, Path(directory)))
        for prompt in prompts:
            llm.add_request(prompt, GENERATED)
        start, ended = time.perf_counter(), 0
        while ended < len(prompts):
            ended += len(llm.step())
        took = time.perf_counter() - start
        llm.shutdown()
    return len(prompts) * (PROMPT_TOKENS + GENERATED) / took


def measure(work: Work, rounds: int, ways: Sequence[str] = WAYS) -> dict[str, list[float]]:
    """Tokens per second of every round, by way; every second round the other way round."""
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        rng = random.Random(number)
        prompts = [[rng.randrange(work.model.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(work.requests)]
        for way in ways if number % 2 == 0 else tuple(reversed(ways)):
            rates[way].append(tokens_per_second(way, work, prompts))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=(*WORKS, "both"), default="both")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--short", action="store_true", help="three rounds")
    options = parser.parse_args()
    rounds = 3 if options.short else options.rounds
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads; prompts of {PROMPT_TOKENS} tokens, {GENERATED} generated each"
    )
    for name in WORKS if options.model == "both" else (options.model,):
        work = WORKS[name]
        print(
            f"{name}: {work.requests} prompts, {rounds} rounds, {work.model.kv_bytes_per_token} bytes of KV per token"
        )
        rates = measure(work, rounds)
        for way in WAYS:
            ratios = [rate / bare for rate, bare in zip(rates[way], rates[WAYS[0]], strict=True)]
            print(
                f"  {way:<16}{statistics.median(rates[way]):8.0f} tokens/s ({min(rates[way]):.0f} to "
                f"{max(rates[way]):.0f})  ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to "
                f"{max(ratios):.3f}), goal {GOAL}",
                flush=True,
            )


if __name__ == "__main__":
    main()
