"""The end of a connector: with transfers open, twice, without its I/O process, and under signals.

In: engines in the middle of their work. Out: an end in bounded time that leaves nothing. Never: a thread of ours that
keeps a process, a child, a file in shared memory, a temporary file after the next start.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from byte_engine import FULL, HYBRID, Engine
from processes import children_of, is_gone, left_of, shared_memory_of
from real_stores import chunk_files, leftovers

from orlop.core import KVGroup

CHILD = Path(__file__).with_name("real_child.py")
PROMPT = list(range(1000, 1041))


def numbers(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10**6) for _ in range(count)]


def in_full_swing(engine: Engine) -> None:
    """Stores, loads and promotions open at once, as far as a few steps can bring it about."""
    for seed in itertools.count():
        engine.runner.add(numbers(seed % 12, 50), 4)
        engine.runner.step()
        if seed > 8 and engine.connector.has_pending_push_work():
            return


def our_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("orlop-")}


@pytest.mark.fault("B208")
@pytest.mark.parametrize(
    ("groups", "io_process"), [(FULL, True), (HYBRID, False)], ids=["full-process", "hybrid-threads"]
)
def test_a_shutdown_with_transfers_open_leaves_nothing_and_a_second_one_does_nothing(
    tmp_path: Path, groups: tuple[KVGroup, ...], io_process: bool
) -> None:
    before, held_before = our_threads(), shared_memory_of([os.getpid()])
    engine = Engine(tmp_path, "open", groups, 2, io_process=io_process)
    in_full_swing(engine)
    pid = engine.manager.tiers[0].tier.io_pid  # type: ignore[attr-defined]
    held = shared_memory_of([os.getpid(), *([pid] if pid else [])]) - held_before
    engine.shutdown()
    engine.shutdown()
    assert pid is None or not Path(f"/proc/{pid}").exists()
    for thread in our_threads() - before:
        thread.join(60)
        assert not thread.is_alive(), f"{thread.name} outlives the shutdown"
    assert not left_of(held)
    with Engine(tmp_path, "open", groups, 2, io_process=io_process) as engine:  # the region's name is free again
        engine.serve(PROMPT)
        assert engine.serve(PROMPT).was_external == 40
    assert not leftovers(tmp_path)
    assert {p.stat().st_size for p in chunk_files(tmp_path)} == {3 * 4096}


def test_the_scheduler_half_may_be_shut_down_first(tmp_path: Path) -> None:
    engine = Engine(tmp_path, "order", FULL, 1)
    in_full_swing(engine)
    engine.connector.shutdown()
    for worker in engine.workers:
        worker.shutdown()
        worker.shutdown()


def test_hooks_after_a_shutdown_raise_nothing_and_promise_nothing(tmp_path: Path) -> None:
    engine = Engine(tmp_path, "after", FULL, 1)
    engine.serve(PROMPT)
    in_full_swing(engine)
    engine.shutdown()
    engine.connector.check()
    assert not engine.connector.has_pending_push_work()
    engine.connector.get_stats()
    list(engine.connector.take_events())


def test_a_shutdown_without_its_io_process_ends_too(tmp_path: Path) -> None:
    engine = Engine(tmp_path, "killed", FULL, 1)
    in_full_swing(engine)
    engine.kill_io()
    engine.shutdown()
    with Engine(tmp_path, "killed", FULL, 1) as engine:
        engine.serve(PROMPT)
    assert not leftovers(tmp_path)


# --- signals -------------------------------------------------------------------------------------------------------


def start_child(path: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, str(CHILD), str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


@pytest.mark.crash
@pytest.mark.fault("B208")
@pytest.mark.parametrize("how", ["twice", "then killed", "during start"])
def test_signals_to_the_whole_group_leave_nothing(tmp_path: Path, how: str) -> None:
    child = start_child(tmp_path)
    assert child.stdout is not None
    if how != "during start":
        for _ in range(12):
            assert child.stdout.readline(), "the engine ended by itself"
    helpers = children_of(child.pid)
    held = shared_memory_of([child.pid, *helpers])
    os.killpg(child.pid, signal.SIGTERM)
    os.killpg(child.pid, signal.SIGTERM)
    if how == "then killed":
        os.kill(child.pid, signal.SIGKILL)
    told = child.communicate(timeout=60)[0].splitlines()
    if how == "twice":
        assert child.returncode == 0
        assert told[-1] == "down"
    assert all(is_gone(pid) for pid in helpers), "an I/O process outlives its engine"
    assert not left_of(held)
    with Engine(tmp_path, "next", FULL, 1) as engine:
        engine.serve(PROMPT)
        assert engine.serve(PROMPT).was_external == 40
    assert not leftovers(tmp_path)
