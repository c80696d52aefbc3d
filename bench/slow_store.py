"""The longest call on the engine's thread over a store that sleeps 30 s per operation, beside none below host memory.

In: ``--short`` for fewer rounds. Out: a table of the longest hook call and of the time in hooks per step, both ways in
turn in one run, with the limit of 5 ms. Never: an assertion about time; it prints what it saw.

Method: the request runner drives the real scheduler half, TieringManager and runner with its I/O process; the device
is a double, so that what is timed is the hooks alone. Garbage collection is as in an engine that freezes what it has
loaded: ``gc.freeze()`` after start.
"""

from __future__ import annotations

import argparse
import gc
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


def run(slow: bool, requests: int) -> tuple[float, float, int]:
    """Longest hook call in ms, median ms in hooks per step, and steps."""
    layout = RegionLayout(slots=256, blocks_per_chunk=4, page_bytes=((4096,),))
    region = HostRegion.create(layout)
    geometry = Geometry((KVGroup(0, 16),), 16, 4)
    tiers = []
    if slow:
        spec = StoreSpec("orlop.testing.slow_store:SlowStore", {"seconds": 30.0})
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
    rounds, requests = (3, 100) if parser.parse_args().short else (7, 300)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}")
    results: dict[bool, list[tuple[float, float, int]]] = {False: [], True: []}
    run(False, 20)
    for _ in range(rounds):
        for slow in (False, True):
            results[slow].append(run(slow, requests))
    print(f"{'below host memory':<28}{'longest call ms (median, all)':<44}{'hooks per step ms':<20}")
    for slow, label in ((False, "nothing"), (True, "a store that sleeps 30 s")):
        worst = sorted(r[0] for r in results[slow])
        shown = ", ".join(f"{w:.2f}" for w in worst)
        hooks = statistics.median(r[1] for r in results[slow])
        print(f"{label:<28}{f'{statistics.median(worst):.2f} ({shown})':<44}{hooks:<20.3f}")
    with_store, without = (statistics.median(r[0] for r in results[s]) for s in (True, False))
    print(f"ratio {with_store / without:.2f}; limit {LIMIT_MS} ms: {'kept' if with_store < LIMIT_MS else 'NOT kept'}")


if __name__ == "__main__":
    main()
