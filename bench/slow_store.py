"""The longest call on the engine's thread over a store that sleeps 30 s per operation.

In: ``--short`` for fewer rounds. Out: a table of the longest hook call and of the time in hooks per step, three ways
in turn in one run: nothing below host memory, a store that answers at once, one that sleeps; with the limit of 5 ms.
Never: an assertion about time; it prints what it saw.

Method: the request runner drives the real scheduler half, TieringManager and runner with its I/O process; the device
is a double, so that what is timed is the hooks alone. Garbage collection is as in an engine that freezes what it has
loaded: ``gc.freeze()`` after start. A tier has threads, and waking one can cost the engine's thread its turn whatever
the store does; the store that answers at once shows how much of the longest call that is. The interpreter's switch
interval bounds it: 2 ms as in ``orlop run``, or what ``--switch-interval`` says (Python's own is 5 ms).
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

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


def run(sleep_s: float | None, requests: int) -> tuple[float, float, int]:
    """Longest hook call in ms, median ms in hooks per step, and steps; ``sleep_s`` None: no tier."""
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
    longest, per_step = time_hooks(half)
    runner = RequestRunner(half, geometry, blocks=256, token_budget=512, clock=RealClock(), step_s=0.002)
    runner.check = lambda: None  # type: ignore[method-assign]
    rng = random.Random(0)
    roots = [[rng.randrange(1000) for _ in range(512)] for _ in range(8)]
    steps: list[float] = []
    gc.collect()
    gc.freeze()
    for _ in range(requests):
        runner.add(rng.choice(roots) + [rng.randrange(1000) for _ in range(64)], 8)
        for _ in range(4):
            per_step.clear()
            runner.step()
            steps.append(sum(per_step))
    worst = max(longest)
    manager.shutdown(now=time.monotonic(), deadline_s=0.5)
    region.close()
    gc.unfreeze()
    return worst * 1e3, statistics.median(steps) * 1e3, len(steps)


def time_hooks(half: Any) -> tuple[list[float], list[float]]:
    """Wrap every hook; all durations, and a list that the caller empties per step."""
    every: list[float] = []
    step: list[float] = []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                every.append(took)
                step.append(took)

        return wrapper

    for name in HOOKS:
        setattr(half, name, timed(getattr(half, name)))
    return every, step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--switch-interval", type=float, default=0.002, metavar="SECONDS")
    options = parser.parse_args()
    sys.setswitchinterval(options.switch_interval)
    rounds, requests = (3, 100) if options.short else (7, 300)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}, "
        f"switch interval {options.switch_interval * 1e3:g} ms"
    )
    ways = {"nothing": None, "a store that answers at once": 0.0, "a store that sleeps 30 s": 30.0}
    results: dict[str, list[tuple[float, float, int]]] = {name: [] for name in ways}
    logging.getLogger("orlop").setLevel(logging.ERROR)  # what the breaker says of such stores is not news here
    run(None, 20)
    for _ in range(rounds):
        for name, sleep_s in ways.items():
            results[name].append(run(sleep_s, requests))
    print(f"{'below host memory':<32}{'longest call ms: median (each round)':<60}{'hooks per step ms':<20}")
    longest = {}
    for name, rows in results.items():
        worst = sorted(row[0] for row in rows)
        longest[name] = statistics.median(worst)
        shown = f"{longest[name]:.2f} ({', '.join(f'{w:.2f}' for w in worst)})"
        print(f"{name:<32}{shown:<60}{statistics.median(row[1] for row in rows):<20.3f}")
    nothing, quick, slow = longest.values()
    print(f"ratio of the sleeping store to nothing {slow / nothing:.2f}, to the quick one {slow / quick:.2f}")
    worst_of_all = max(row[0] for row in results["a store that sleeps 30 s"])
    verdict = "kept" if worst_of_all < LIMIT_MS else "exceeded"
    print(f"limit {LIMIT_MS:g} ms for the sleeping store, longest call of all rounds {worst_of_all:.2f}: {verdict}")


if __name__ == "__main__":
    main()
