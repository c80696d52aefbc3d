"""The longest call on the engine's thread over a store that sleeps 30 s per operation.

In: ``--short`` for fewer rounds. Out: a table of the longest hook call and of the time in hooks per step, three ways
in turn in one run: nothing below host memory, a store that answers at once, one that sleeps; with the limit of 5 ms.
Never: an assertion about time; it prints what it saw.

Method: the request runner drives the real scheduler half, TieringManager and runner with its I/O process; the device
is a double, so that what is timed is the hooks alone. Garbage is not collected meanwhile: the request runner keeps all
its requests, and a pass over them takes several ms in whatever call it falls. Two times of each call are shown: by the
clock, with whatever other programs on the machine took from it; and its own, which leaves out what the kernel gave to
somebody else while the thread wanted to run (a call without a voluntary switch counts with its time on the core, one
that waited for anything by the clock).
``--switch-interval`` sets the interpreter's (5 ms by itself).
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
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from orlop.core import FIRST_GENERATION, Geometry, KVGroup, Namespace, RegionLayout
from orlop.host.region import HostRegion
from orlop.host.tier import HostTier
from orlop.scheduler.scheduler import OffloadingConnectorScheduler, SchedulerOptions
from orlop.testing.clock import FakeClock
from orlop.testing.request_runner import RequestRunner
from orlop.tiering.io_messages import StoreSpec
from orlop.tiering.manager import TierEntry, TieringManager, TieringOptions
from orlop.tiering.runner import RunnerOptions, TierRunner

LIMIT_MS = 5.0
HOOKS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "has_pending_push_work",
)


class RealClock(FakeClock):
    """The machine's clock; a step takes as long as it takes."""

    def __init__(self) -> None:
        super().__init__(time.monotonic())

    def advance(self, seconds: float) -> float:
        time.sleep(seconds)
        self.now = time.monotonic()
        return self.now


class Run(NamedTuple):
    """Times in ms: the longest hook call by the clock and by its own time, the median time in hooks per step."""

    longest: float
    longest_own: float
    per_step: float


def run(sleep_s: float | None, requests: int) -> Run:
    """One round; ``sleep_s`` None: no tier."""
    layout = RegionLayout(slots=256, blocks_per_chunk=4, page_bytes=((4096,),))
    region = HostRegion.create(layout)
    geometry = Geometry((KVGroup(0, 16),), 16, 4)
    tiers = []
    if sleep_s is not None:
        spec = StoreSpec("orlop.testing.slow_store:SlowStore", {"seconds": sleep_s})
        tiers = [TierEntry(TierRunner(RunnerOptions("0:slow"), region, spec))]
    options = TieringOptions((layout.payload_bytes(0),), usable_slots=lambda: region.usable_slots)
    manager = TieringManager(HostTier(layout.slots, usable=0), tiers, lambda g: Namespace(g), FIRST_GENERATION, options)
    half = OffloadingConnectorScheduler(geometry, manager, SchedulerOptions())
    calls, per_step = time_hooks(half)
    runner = RequestRunner(half, geometry, blocks=256, token_budget=512, clock=RealClock(), step_s=0.002)
    runner.check = lambda: None  # type: ignore[method-assign]
    rng = random.Random(0)
    roots = [[rng.randrange(1000) for _ in range(512)] for _ in range(8)]
    steps: list[float] = []
    gc.collect()
    gc.disable()
    for _ in range(requests):
        runner.add(rng.choice(roots) + [rng.randrange(1000) for _ in range(64)], 8)
        for _ in range(4):
            per_step.clear()
            runner.step()
            steps.append(sum(per_step))
    longest, longest_own = (max(times) * 1e3 for times in zip(*calls, strict=True))
    manager.shutdown(now=time.monotonic(), deadline_s=0.5)
    region.close()
    gc.enable()
    return Run(longest, longest_own, statistics.median(steps) * 1e3)


def time_hooks(half: Any) -> tuple[list[tuple[float, float]], list[float]]:
    """Wrap every hook: seconds of every call by the clock and by its own time, and a list that the caller empties."""
    every: list[tuple[float, float]] = []
    step: list[float] = []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            waits, on_core = _waits(), time.thread_time()
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                on_core = time.thread_time() - on_core
                every.append((took, took if _waits() > waits else min(took, on_core)))
                step.append(took)

        return wrapper

    for name in HOOKS:
        setattr(half, name, timed(getattr(half, name)))
    return every, step


def _waits() -> int:
    """How often the calling thread has given up its core by itself."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--switch-interval", type=float, default=sys.getswitchinterval(), metavar="SECONDS")
    options = parser.parse_args()
    sys.setswitchinterval(options.switch_interval)
    rounds, requests = (3, 100) if options.short else (7, 300)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}, "
        f"switch interval {options.switch_interval * 1e3:g} ms"
    )
    ways = {"nothing": None, "a store that answers at once": 0.0, "a store that sleeps 30 s": 30.0}
    results: dict[str, list[Run]] = {name: [] for name in ways}
    logging.getLogger("orlop").setLevel(logging.ERROR)  # what the breaker says of such stores is not news here
    run(None, 20)
    for _ in range(rounds):
        for name, sleep_s in ways.items():
            results[name].append(run(sleep_s, requests))
    print(f"{'below host memory':<30}{'longest call ms':<34}{'longest own ms':<34}{'hooks per step ms'}")
    for name, rows in results.items():
        times = (_shown([row.longest for row in rows]), _shown([row.longest_own for row in rows]))
        print(f"{name:<30}{times[0]:<34}{times[1]:<34}{statistics.median(row.per_step for row in rows):.3f}")
    nothing, _, slow = (statistics.median(row.longest for row in rows) for rows in results.values())
    print(f"ratio of the sleeping store to nothing, longest call by the clock: {slow / nothing:.2f}")
    for what in ("longest", "longest_own"):
        worst = max(getattr(row, what) for row in results["a store that sleeps 30 s"])
        verdict = "kept" if worst < LIMIT_MS else "exceeded"
        print(f"limit {LIMIT_MS:g} ms for the sleeping store, {what} of all rounds {worst:.2f}: {verdict}")


def _shown(values: list[float]) -> str:
    """Median, and each round."""
    return f"{statistics.median(values):.2f} ({', '.join(f'{v:.2f}' for v in sorted(values))})"


if __name__ == "__main__":
    main()
