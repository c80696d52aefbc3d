"""What offloading costs vLLM where it can gain nothing: throughput of prompts that share no prefix.

In: a Python environment with vLLM 0.32 (its CPU build will do) and this package; ``--rounds``, ``--short``, ``--tier``.
Out: tokens per second each way, with the spread, and the ratio to vLLM without a connector. Never: a verdict from
one round; a hit (a round with one is void).

    python bench/vllm_no_reuse_vs_vllm.py [--short]

Method: vLLM in this process over a small float32 checkpoint, without a connector and with OrlopConnector, host memory
and a tier (``disk`` or ``files``), serves the same prompts, all different, in turn (A B A B ...), each time in a new
engine, every second pair the other way round. An engine first serves eight prompts that are not counted. The time is
that from the first request to the last token; what still drains afterwards is not in it. Host memory holds fewer
chunks than a round stores, so it evicts, and so does the tier.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "vllm"))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that its counters can be read
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the other core is for the copies and the I/O process
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import vllm
import vllm_models
from vllm_engine import Engine, engine, text

import orlop.vllm

PROMPT_TOKENS, GENERATED = 384, 32
GOAL = 0.97
WITHOUT, WITH = "no connector", "OrlopConnector"


WARM_UP = 8


def settings(way: str, tier: str, folder: Path) -> dict[str, Any] | None:
    if way == WITHOUT:
        return None
    return {"host": "4MB", tier: {"path": str(folder), "bytes": "4MB"}, "blocks_per_chunk": "auto"}


def serve_s(engine: Engine, prompts: Sequence[Sequence[int]]) -> float:
    """Seconds of the engine's own loop, without the checks that a test makes after every step."""
    for prompt in prompts:
        engine.add(prompt, GENERATED)
    start = time.perf_counter()
    while engine.engine.has_unfinished_requests():
        engine.engine.step()
    return time.perf_counter() - start


def tokens_per_second(model: Path, offload: dict[str, Any] | None, prompts: Sequence[Sequence[int]]) -> float:
    sizes = {"num_gpu_blocks_override": 160, "max_num_seqs": 8, "max_model_len": 1024}
    with engine(model, offload, **sizes) as served:
        serve_s(served, prompts[:WARM_UP])
        took = serve_s(served, prompts[WARM_UP:])
        if offload is not None:
            served.settle()
            refuse_another_workload(served.stats())
    return (len(prompts) - WARM_UP) * (PROMPT_TOKENS + GENERATED) / took


def refuse_another_workload(stats: Mapping[str, float]) -> None:
    loaded, stored, evicted = (sum_of(stats, name) for name in ("tokens_loaded", "store_bytes", "host_evictions"))
    if loaded or not stored or not evicted:
        raise SystemExit(
            f"found {loaded:.0f} tokens loaded, {stored:.0f} bytes stored and {evicted:.0f} chunks evicted, expected "
            "none, many and many: this round is void"
        )


def measure(model: Path, tier: str, rounds: int, requests: int) -> dict[str, list[float]]:
    """Tokens per second of every round, by way."""
    rates: dict[str, list[float]] = {WITHOUT: [], WITH: []}
    for number in range(rounds):
        rng = random.Random(number)
        prompts = [text(rng, PROMPT_TOKENS) for _ in range(WARM_UP + requests)]
        for way in sorted(rates, reverse=bool(number % 2)):
            with tempfile.TemporaryDirectory(prefix="orlop-bench-") as folder:
                rates[way].append(tokens_per_second(model, settings(way, tier, Path(folder)), prompts))
    return rates


def sum_of(stats: Mapping[str, float], name: str) -> float:
    """Of a counter by itself, or of all its labels."""
    return float(stats.get(name, sum(value for key, value in stats.items() if key.startswith(f"{name} "))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--tier", choices=("disk", "files", "both"), default="both", help="below host memory")
    parser.add_argument("--short", action="store_true", help="two rounds of a third of the requests")
    options = parser.parse_args()
    rounds, requests = (2, options.requests // 3) if options.short else (options.rounds, options.requests)
    orlop.vllm.register()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, "
        f"vLLM {vllm.__version__}, {torch.get_num_threads()} threads; {rounds} rounds of {requests} prompts of "
        f"{PROMPT_TOKENS} tokens, {GENERATED} generated each; {time.strftime('%Y-%m-%d')}"
    )
    with tempfile.TemporaryDirectory(prefix="orlop-bench-") as directory:
        model = vllm_models.make_llama(Path(directory) / "model")
        for tier in ("disk", "files") if options.tier == "both" else (options.tier,):
            print(f"host and {tier}")
            rates = measure(model, tier, rounds, requests)
            ratios = [ours / bare for ours, bare in zip(rates[WITH], rates[WITHOUT], strict=True)]
            for way, values in rates.items():
                print(f"  {way:<16}{statistics.median(values):8.0f} tokens/s ({min(values):.0f} to {max(values):.0f})")
            middle = statistics.median(ratios)
            said = "reached" if middle >= GOAL else "not reached"
            print(f"  ratio {middle:.3f} ({min(ratios):.3f} to {max(ratios):.3f}), goal {GOAL}: {said}", flush=True)


if __name__ == "__main__":
    main()
