"""What a decision about host memory costs, counted in lines of Python and bytes, not in seconds.

In: the real host tier under the real manager, small and large. Out: work that follows what is moved, not how much is
there. Never: a clock.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from orlop.core import FIRST_GENERATION, KeyRun, ReqContext
from orlop.host.tier import HostTier
from orlop.testing.rig import plain_namespace
from orlop.tiering.manager import TieringManager, TieringOptions

SIZES = (1_000, 64_000)


def run_of(seed: int, chunks: int) -> KeyRun:
    return KeyRun(0, [seed.to_bytes(8, "big") + i.to_bytes(8, "big") for i in range(chunks)], 0, chunks)


def manager_of(slots: int) -> TieringManager:
    manager = TieringManager(HostTier(slots), (), plain_namespace, FIRST_GENERATION, TieringOptions((4096,)))
    manager.on_new_request(CONTEXT)
    return manager


CONTEXT = ReqContext(1, "r")


def store(manager: TieringManager, run: KeyRun) -> int:
    """Store what there is room for; how many chunks that is."""
    plan = manager.prepare_store(run, CONTEXT, now=0.0)
    if plan.reservation is None:
        return 0
    manager.complete_store(plan.reservation, True, now=0.0)
    return len(plan.reservation.slots)


def lines_and_bytes(work: Callable[[], Any]) -> tuple[int, int]:
    """How many lines of Python ``work`` runs, and how many bytes it holds at most at one time."""
    work()  # what earlier calls have put off is done once
    count = 0

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return on_line

    before = sys.gettrace()
    sys.settrace(on_line)
    try:
        work()
    finally:
        sys.settrace(before)
    return count, min(_most_bytes(work) for _ in range(3))  # another thread may hold some at one time


def _most_bytes(work: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def full_and_pinned(slots: int) -> TieringManager:
    manager = manager_of(slots)
    for start in range(0, slots, 1000):
        run = run_of(start, 1000)
        assert store(manager, run) == 1000
        manager.prepare_load(run, CONTEXT, now=0.0)
    return manager


@pytest.mark.fault("B185")
def test_a_store_refused_for_want_of_room_costs_the_same_at_any_size() -> None:
    costs = []
    for slots in SIZES:
        manager = full_and_pinned(slots)
        costs.append(lines_and_bytes(lambda manager=manager: store(manager, run_of(10**9, 8))))
        assert manager.counters["allocation_failures"] == 5
    assert costs[0][0] == costs[1][0], "lines that a refusal runs"
    assert costs[1][1] < costs[0][1] + SIZES[0], "bytes that a refusal takes for a while"


@pytest.mark.fault("B185")
def test_the_one_chunk_that_may_leave_is_found_at_any_size() -> None:
    costs = []
    for slots in SIZES:
        manager = full_and_pinned(slots)
        last = manager._open[max(manager._open)].reservation
        manager.host.unhold(last.slots[-1:])
        seeds = iter(range(10**9, 10**9 + 5))

        def one(manager: TieringManager = manager, seeds: Any = seeds) -> None:
            assert store(manager, run_of(next(seeds), 1)) == 1

        costs.append(lines_and_bytes(one))
    assert abs(costs[0][0] - costs[1][0]) < 20
    assert costs[1][1] < costs[0][1] + SIZES[0]


@pytest.mark.fault("B190")
def test_a_store_that_must_evict_costs_by_what_it_evicts_and_not_by_how_much_is_there() -> None:
    per_chunk = {}
    for slots in SIZES:
        for full in (False, True):
            manager = manager_of(slots)
            for start in range(0, slots if full else slots // 2, 100):
                store(manager, run_of(start, 100))
            seeds = iter(range(10**9, 10**9 + 5))

            def some(manager: TieringManager = manager, seeds: Any = seeds) -> None:
                assert store(manager, run_of(next(seeds), 50)) == 50

            per_chunk[slots, full] = lines_and_bytes(some)[0] / 50
    assert abs(per_chunk[1_000, True] - per_chunk[64_000, True]) < 10, per_chunk
    assert per_chunk[64_000, True] < per_chunk[64_000, False] + 40, per_chunk


def test_the_count_would_see_a_walk() -> None:
    """A walk in Python shows in the lines, one in an array in the bytes."""
    few, many = (lines_and_bytes(lambda n=n: [None for _ in range(n) if _ < 0] and None) for n in SIZES)
    walk = [lines_and_bytes(lambda n=n: np.flatnonzero(np.zeros(n, np.int64))) for n in SIZES]
    assert few != many
    assert walk[1][1] > walk[0][1] + 100 * SIZES[0]
