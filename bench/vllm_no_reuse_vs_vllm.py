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

What offloading costs depends on how much a model computes for a byte of its KV cache: ``slice`` is two layers of the
shape of Qwen2.5-0.5B, ``tiny`` the checkpoint of the tests, which makes tens of thousands of tokens a second and shows
what every step, request and byte costs at its largest.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[1] / "tests" / folder) for folder in ("vllm", "bytes"))
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


@dataclass(frozen=True)
class Work:
    """Sizes of a checkpoint, prompts of a round, and the bytes that host memory and the tier below hold of them."""

    sizes: Mapping[str, int]
    requests: int
    kept: str


SLICE = {
    "hidden_size": 896,
    "num_hidden_layers": 2,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 4864,
}
WORKS = {"slice": Work(SLICE, 24, "8MB"), "tiny": Work({}, 192, "4MB")}


def settings(way: str, tier: str, kept: str, folder: Path) -> dict[str, Any] | None:
    if way == WITHOUT:
        return None
    below = {"path": str(folder), "bytes": kept, "deadline": {}}  # as users have it, not as patient as tests are
    return {"host": kept, tier: below, "blocks_per_chunk": "auto"}


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


def measure(model: Path, tier: str, kept: str, rounds: int, requests: int) -> dict[str, list[float]]:
    """Tokens per second of every round, by way."""
    rates: dict[str, list[float]] = {WITHOUT: [], WITH: []}
    for number in range(rounds):
        rng = random.Random(number)
        prompts = [text(rng, PROMPT_TOKENS) for _ in range(WARM_UP + requests)]
        for way in sorted(rates, reverse=bool(number % 2)):
            with tempfile.TemporaryDirectory(prefix="orlop-bench-") as folder:
                rates[way].append(tokens_per_second(model, settings(way, tier, kept, Path(folder)), prompts))
    return rates


def sum_of(stats: Mapping[str, float], name: str) -> float:
    """Of a counter by itself, or of all its labels."""
    return float(stats.get(name, sum(value for key, value in stats.items() if key.startswith(f"{name} "))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--model", choices=(*WORKS, "both"), default="both")
    parser.add_argument("--tier", choices=("disk", "files", "both"), default="both", help="below host memory")
    parser.add_argument("--short", action="store_true", help="two rounds, of tiny with a third of the requests")
    options = parser.parse_args()
    rounds = 2 if options.short else options.rounds
    orlop.vllm.register()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, "
        f"vLLM {vllm.__version__}, {torch.get_num_threads()} threads; prompts of {PROMPT_TOKENS} tokens, {GENERATED} "
        f"generated each, {rounds} rounds; {time.strftime('%Y-%m-%d')}"
    )
    for name in WORKS if options.model == "both" else (options.model,):
        work = WORKS[name]
        requests = work.requests // 3 if options.short and name == "tiny" else work.requests
        with tempfile.TemporaryDirectory(prefix="orlop-bench-") as directory:
            model = vllm_models.make_llama(Path(directory) / "model", **work.sizes)
            for tier in ("disk", "files") if options.tier == "both" else (options.tier,):
                print(f"{name}, {requests} prompts, host and {tier}")
                show(measure(model, tier, work.kept, rounds, requests))


def show(rates: Mapping[str, Sequence[float]]) -> None:
    ratios = [ours / bare for ours, bare in zip(rates[WITH], rates[WITHOUT], strict=True)]
    for way, values in rates.items():
        print(f"  {way:<16}{statistics.median(values):8.0f} tokens/s ({min(values):.0f} to {max(values):.0f})")
    middle = statistics.median(ratios)
    said = "reached" if middle >= GOAL else "not reached"
    print(f"  ratio {middle:.3f} ({min(ratios):.3f} to {max(ratios):.3f}), goal {GOAL}: {said}", flush=True)


if __name__ == "__main__":
    main()
