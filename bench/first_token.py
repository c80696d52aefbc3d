"""Time to first token of a prompt whose KV is 100 MB, from host memory and from files after a restart.

In: ``--rounds``, ``--short``. Out: medians and spreads, ratios to recompute, and each way's limit. Never: a
figure of one round alone.

Method: the embedded engine with a seeded float32 model on the CPU. In each round, in turn: the prompt is computed; it
is found on the device; the device forgets and it is loaded from host memory; a new engine (and with it a new host
tier and a new I/O process) on the same directory loads it from files, whose pages the system still has in its cache.

The limit of a way is the bytes of the prompt over the bandwidth measured in the same round (memcpy page by page for
host memory; for files, reading the same files with as many threads, then that memcpy), plus three empty steps, plus the
time to first token of the prompt found on the device (the forward of its last tokens).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orlop import LLM, EngineConfig
from orlop.engine.model import ModelConfig

MODEL = ModelConfig(hidden=512, layers=8, heads=8, kv_heads=8, head_dim=64, intermediate=1024)
PROMPT_TOKENS = 3200
PROMPT_BYTES = PROMPT_TOKENS * MODEL.kv_bytes_per_token
GOAL = 1.5
THREADS = 4
PAGE_BYTES = 64 << 10
WAYS = ("recompute", "device", "host", "files after a restart")


def engine_config() -> EngineConfig:
    return EngineConfig(model=MODEL, num_blocks=PROMPT_TOKENS // 16 + 40)


def offload(path: Path) -> dict[str, Any]:
    files = {"path": str(path), "bytes": 4 * PROMPT_BYTES, "threads": THREADS}
    return {"host": 2 * PROMPT_BYTES, "files": files, "weights_id": "bench"}


def first_token_s(llm: LLM, prompt: list[int], loaded: int) -> float:
    """Serve the prompt and let its transfers settle; ``loaded``: tokens that must have come by the connector."""
    request_id = llm.add_request(prompt, 2)
    result = next(r for r in llm.run() if r.request_id == request_id)
    if result.loaded_tokens < loaded:
        raise SystemExit(f"found {result.loaded_tokens} tokens loaded, expected {loaded} or more: this round is void")
    assert result.first_token_s is not None
    return result.first_token_s


def empty_step_s(llm: LLM) -> float:
    times = []
    for _ in range(50):
        start = time.perf_counter()
        llm.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def memcpy_s(nbytes: int) -> float:
    """Seconds that a plain memcpy, page by page, takes for ``nbytes``."""
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    start = time.perf_counter()
    for offset in range(0, nbytes, PAGE_BYTES):
        ctypes.memmove(target.ctypes.data + offset, source.ctypes.data + offset, PAGE_BYTES)
    return time.perf_counter() - start


def read_files_s(path: Path) -> float:
    """Seconds that reading every file below ``path`` takes with ``THREADS`` threads, scaled to the prompt's bytes."""
    files = [file for file in path.rglob("*") if file.is_file() and file.stat().st_size > PAGE_BYTES]
    buffers = [bytearray(file.stat().st_size) for file in files]

    def read(pair: tuple[Path, bytearray]) -> int:
        with open(pair[0], "rb", buffering=0) as file:
            return file.readinto(pair[1]) or 0

    with ThreadPoolExecutor(THREADS) as pool:
        start = time.perf_counter()
        nbytes = sum(pool.map(read, zip(files, buffers, strict=True)))
        return (time.perf_counter() - start) * PROMPT_BYTES / nbytes


def one_round(number: int, path: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds to first token per way, and each way's limit."""
    prompt = [random.Random(number).randrange(MODEL.vocab_size) for _ in range(PROMPT_TOKENS)]
    most = PROMPT_TOKENS - 16
    times = {}
    bare = LLM(engine_config())
    times["recompute"] = first_token_s(bare, prompt, 0)
    bare.shutdown()
    llm = LLM(engine_config(), offload=offload(path))
    first_token_s(llm, prompt, 0)
    times["device"] = first_token_s(llm, prompt, 0)
    llm.scheduler.forget_prefixes()
    times["host"] = first_token_s(llm, prompt, most)
    empty = empty_step_s(llm)
    llm.shutdown()
    again = LLM(engine_config(), offload=offload(path))
    times["files after a restart"] = first_token_s(again, prompt, most)
    again.shutdown()
    copy, fixed = memcpy_s(PROMPT_BYTES), 3 * empty + times["device"]
    return times, {"host": copy + fixed, "files after a restart": read_files_s(path) + copy + fixed}


def shown(values: list[float]) -> str:
    return f"{statistics.median(values) * 1e3:.1f} ({min(values) * 1e3:.1f} to {max(values) * 1e3:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--short", action="store_true", help="three rounds")
    options = parser.parse_args()
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    limits: dict[str, list[float]] = {way: [] for way in WAYS[2:]}
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads; {PROMPT_TOKENS} tokens, {PROMPT_BYTES / 1e6:.0f} MB"
    )
    for number in range(3 if options.short else options.rounds):
        with tempfile.TemporaryDirectory() as directory:
            seconds, limit = one_round(number, Path(directory))
        for way, took in seconds.items():
            times[way].append(took)
        for way, least in limit.items():
            limits[way].append(least)
    print(f"{'way':<24}{'ms to first token':<30}{'of recompute':<14}{'limit ms':<30}{'of the limit (goal 1.5)'}")
    for way in WAYS:
        row = f"{way:<24}{shown(times[way]):<30}"
        row += f"{statistics.median(t / r for t, r in zip(times[way], times['recompute'], strict=True)):<14.3f}"
        if way in limits:
            ratio = statistics.median(t / least for t, least in zip(times[way], limits[way], strict=True))
            row += f"{shown(limits[way]):<30}{ratio:.2f}: {'reached' if ratio <= GOAL else 'not reached'}"
        print(row)


if __name__ == "__main__":
    main()
