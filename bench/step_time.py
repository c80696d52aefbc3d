"""Whether a store that sleeps 30 s per operation makes any step of the engine longer.

In: ``--rounds``, ``--short``. Out: step times (median, p99, longest) without a connector, with host memory, with a
store below it that answers at once, and with one that sleeps; and how often a step waited. Never: an assertion.

Method: the embedded engine with a seeded float32 model serves the same prompts the four ways in turn. Prompts share
prefixes and the device and host memory are small, so that lookups, stores and loads happen in most steps. A step's
time is that of ``LLM.step``; steps with nothing to compute are left out. ``waited``: steps in whose scheduling part
(everything but the model's forward) the thread gave up its core by itself, as it does to wait for I/O or a lock.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import platform
import random
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from orlop import LLM, EngineConfig
from orlop.engine.model import ModelConfig
from orlop.testing.slow_store import SlowStore

MODEL = ModelConfig(hidden=128, layers=2)
SLEEP_S = 30.0
WAYS = ("no connector", "host", "answers at once", "sleeps 30 s")


class Quick(SlowStore):
    """Has nothing, keeps nothing, and says so at once."""

    def __init__(self) -> None:
        super().__init__(0.0)


class Sleeping(SlowStore):
    """Says the same, each time after ``SLEEP_S``."""

    def __init__(self) -> None:
        super().__init__(SLEEP_S)


def settings(way: str) -> dict[str, Any] | None:
    if way == WAYS[0]:
        return None
    stores = {WAYS[2]: "step_time:Quick", WAYS[3]: "step_time:Sleeping"}
    tiers = [{"type": stores[way]}] if way in stores else []
    return {"host": "2MiB", "blocks_per_chunk": 1, "weights_id": "bench", "tiers": tiers}


def steps(way: str, prompts: list[list[int]]) -> tuple[list[float], int]:
    """Seconds of every step that computed something, and how many of them waited outside of the forward."""
    llm = LLM(EngineConfig(model=MODEL, num_blocks=192, max_step_tokens=128), offload=settings(way))
    times, waited = [], 0
    forward_waits = _count_in(llm.runner, "_compute")
    for prompt in prompts:
        llm.add_request(prompt, 8)
    gc.collect()
    gc.freeze()
    while llm.scheduler.has_unfinished:
        before, inside = _waits(), forward_waits[0]
        start = time.perf_counter()
        llm.step()
        took = time.perf_counter() - start
        if forward_waits[1]:
            times.append(took)
            waited += _waits() - before > forward_waits[0] - inside
        forward_waits[1] = 0
    gc.unfreeze()
    llm.shutdown()
    return times, waited


def _waits() -> int:
    """How often the calling thread has given up its core by itself."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _count_in(owner: Any, name: str) -> list[int]:
    """Wrap a method: waits in it altogether, and whether it did something since the second entry was cleared."""
    call: Callable[..., Any] = getattr(owner, name)
    counts = [0, 0]

    def wrapper(work: Any) -> Any:
        before = _waits()
        result = call(work)
        counts[0] += _waits() - before
        counts[1] = int(bool(work))
        return result

    setattr(owner, name, wrapper)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--short", action="store_true", help="three rounds of half the requests")
    options = parser.parse_args()
    rounds, requests = (3, options.requests // 2) if options.short else (options.rounds, options.requests)
    logging.getLogger("orlop").setLevel(logging.ERROR)  # what the breaker says of such stores is not news here
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads; {requests} prompts"
    )
    rows: dict[str, list[tuple[float, float, float, int, int]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        rng = random.Random(number)
        roots = [[rng.randrange(MODEL.vocab_size) for _ in range(256)] for _ in range(16)]
        prompts = [rng.choice(roots) + [rng.randrange(MODEL.vocab_size) for _ in range(32)] for _ in range(requests)]
        for way in WAYS:
            times, waited = steps(way, prompts)
            times.sort()
            p99 = times[int(len(times) * 0.99)]
            rows[way].append((statistics.median(times), p99, times[-1], waited, len(times)))
    print(f"{'below the device':<18}{'median ms':<12}{'p99 ms':<28}{'longest ms':<28}{'waited'}")
    for way in WAYS:
        medians, p99s, longest, waits, counts = zip(*rows[way], strict=True)
        print(
            f"{way:<18}{statistics.median(medians) * 1e3:<12.2f}{_shown(p99s):<28}{_shown(longest):<28}"
            f"{sum(waits)} of {sum(counts)}"
        )


def _shown(values: tuple[float, ...]) -> str:
    """Median, and the range over the rounds, in ms."""
    return f"{statistics.median(values) * 1e3:.2f} ({min(values) * 1e3:.2f} to {max(values) * 1e3:.2f})"


if __name__ == "__main__":
    main()
