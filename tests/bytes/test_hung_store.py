"""A store that never answers: requests end, nothing waits, and the process ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("hung_child.py")


@pytest.mark.fault("B109")
@pytest.mark.fault("B067")
@pytest.mark.parametrize("where", ["process", "threads"])
def test_an_engine_over_a_store_that_never_answers_serves_its_requests_and_exits(where: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CHILD.parent), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, str(CHILD), where], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    word, overdue, _ = done.stdout.split()[-3:]
    assert word == "ended"
    assert int(overdue) > 0, "no job met the hung store, so nothing was shown"
