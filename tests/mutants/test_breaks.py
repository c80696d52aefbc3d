"""The tests can fail: each break of ``breaks.py`` turns the test that it names red.

In: the source tree and the list of breaks. Out: one pytest per break, on a patched copy of the source.
Never: a change to the source tree itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from breaks import BREAKS, Break

RUNNER = Path(__file__).parent / "run_breaks.py"
TESTS_FAILED = 1
BROKEN_PATCH = ("NameError", "SyntaxError", "ImportError", "AttributeError", "UnboundLocalError", "IndentationError")

Results = dict[str, tuple[int, str]]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Exit code and output of pytest for each break that is selected in this run."""
    params = (i.callspec.params.get("broken") for i in request.session.items if hasattr(i, "callspec"))
    names = [broken.name for broken in params if isinstance(broken, Break)]
    command = [sys.executable, "-W", "ignore", str(RUNNER), str(tmp_path_factory.mktemp("breaks")), *names]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: (code, log) for name, (code, log) in json.loads(done.stdout).items()}


@pytest.mark.parametrize("broken", BREAKS, ids=lambda b: b.name)
def test_a_break_turns_its_test_red(broken: Break, results: Results) -> None:
    code, log = results[broken.name]
    assert code == TESTS_FAILED, f"{broken.test} did not see it:\n{log[-2000:]}"
    assert not any(error in log for error in BROKEN_PATCH), log[-2000:]


def test_each_named_test_of_the_contract_has_a_break() -> None:
    named = {
        "test_no_offload_call_after_on_request_finished",
        "test_reset_cache_finalizes_finished_request_with_pending_store",
        "test_flush_all_jobs_when_no_requests_remain",
        "test_concurrent_lookups_of_the_same_prefix",
        "test_abort_loading_requests",
        "test_fence_at_update_state_after_alloc",
        "test_request_finished_with_pending_stores_populates_fence",
        "test_last_chunk_block_reallocated_in_the_next_step",
    }
    assert named <= {b.test.split("::")[1] for b in BREAKS}
