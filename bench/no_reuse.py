"""What offloading costs where it can gain nothing: throughput of prompts that share no prefix, with and without it.

In: ``--rounds``, ``--short``. Out: tokens per second each way, with the spread, and the ratio to no connector. Never: a
verdict from one round.

Method: the embedded engine with a seeded float32 model on the CPU serves the same prompts, all different, without a
connector, with host memory, and with host memory and files, in turn (A B C A B C ...), each in a new engine. The time
is that from the first request to the last token; what still drains afterwards is not in it.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from orlop import LLM, EngineConfig
from orlop.engine.model import ModelConfig

MODEL = ModelConfig(hidden=256, layers=4, heads=8, kv_heads=4, head_dim=32, intermediate=512)
PROMPT_TOKENS, GENERATED = 384, 32
GOAL = 0.98
WAYS = ("no connector", "host", "host and files")


def settings(way: str, path: Path) -> dict[str, Any] | None:
    if way == WAYS[0]:
        return None
    files = {"files": {"path": str(path), "bytes": "4GB"}} if way == WAYS[2] else {}
    return {"host": "128MiB", "weights_id": "bench", **files}


def tokens_per_second(way: str, prompts: list[list[int]]) -> float:
    with tempfile.TemporaryDirectory() as directory:
        llm = LLM(EngineConfig(model=MODEL, num_blocks=512), offload=settings(way, Path(directory)))
        for prompt in prompts:
            llm.add_request(prompt, GENERATED)
        start, ended = time.perf_counter(), 0
        while ended < len(prompts):
            ended += len(llm.step())
        took = time.perf_counter() - start
        llm.shutdown()
    return len(prompts) * (PROMPT_TOKENS + GENERATED) / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--short", action="store_true", help="three rounds of half the requests")
    options = parser.parse_args()
    rounds, requests = (3, options.requests // 2) if options.short else (options.rounds, options.requests)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads; {requests} prompts of {PROMPT_TOKENS} tokens, {GENERATED} generated each"
    )
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds):
        rng = random.Random(number)
        prompts = [[rng.randrange(MODEL.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(requests)]
        for way in WAYS:
            rates[way].append(tokens_per_second(way, prompts))
    for way in WAYS:
        ratios = [rate / bare for rate, bare in zip(rates[way], rates[WAYS[0]], strict=True)]
        print(
            f"{way:<16}{statistics.median(rates[way]):8.0f} tokens/s ({min(rates[way]):.0f} to {max(rates[way]):.0f})  "
            f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), goal {GOAL}"
        )


if __name__ == "__main__":
    main()
