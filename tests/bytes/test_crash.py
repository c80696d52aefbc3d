"""kill -9 of an engine at any moment, and its restart: no wrong byte, nothing left, what was published is found."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import children_of, is_gone, left_of, shared_memory_of

CHILD = Path(__file__).with_name("crash_child.py")
ROUNDS = int(os.environ.get("CRASH_ROUNDS", "6"))


def start(path: Path, seed: int, count: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(CHILD), str(path), str(seed), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def published(store: Path) -> list[Path]:
    """The chunks that lie there under their names."""
    return [path for path in store.rglob("*") if path.is_file() and len(path.name) == 40]


@pytest.mark.crash
@pytest.mark.fault("B202")
@pytest.mark.fault("B108")
def test_an_engine_killed_at_any_moment_leaves_nothing_wrong_and_nothing_behind(tmp_path: Path) -> None:
    rng = random.Random(5)
    store = tmp_path / "store"
    for life in range(ROUNDS):
        child = start(store, life, 0)
        assert child.stdout is not None
        output = map(str.strip, child.stdout)
        assert next(output) == "started"
        for _ in range(rng.randrange(0, 60)):
            assert next(output).isdigit(), "the engine ended by itself"
        while life == 0 and not published(store):
            assert next(output).isdigit(), "the engine ended by itself"
        children = children_of(child.pid)
        held = shared_memory_of([child.pid, *children])
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait(60) == -signal.SIGKILL
        assert children, "an engine with a files tier has an I/O process"
        assert all(is_gone(pid) for pid in children), "an I/O process outlives its engine"
        assert not left_of(held), "shared memory is left"
        child.stdout.close()

    last = start(store, 1000, 60)
    told = last.communicate(timeout=120)[0].splitlines()
    assert last.returncode == 0, told[-3:]
    word, found = told[-1].split()
    assert word == "found"
    assert int(found) > 0, "what earlier lives published was not asked for"
    leftovers = [p for p in store.rglob("*") if p.is_file() and len(p.name) != 40 and not p.name.endswith(".json")]
    assert not leftovers, "temporary files of dead writers are left"
