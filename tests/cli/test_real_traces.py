"""Recorded traces through the whole of it: they complete, and every token equals that of a run without offload.

The traces are not part of the project; where ``TRACES`` or ``../shared/traces`` has none, the tests say so and skip.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRACES = Path(os.environ.get("TRACES", ROOT.parent / "shared" / "traces"))


@pytest.mark.parametrize(
    ("trace", "limit"),
    [("mooncake/conversation_trace.jsonl.gz", 40), ("lmcache-agent/miniswe_cl100k_block16.jsonl.gz", 30)],
    ids=["mooncake", "lmcache-agent"],
)
def test_a_recorded_trace_gives_equal_tokens_and_a_second_process_loads_from_its_files(
    tmp_path: Path, trace: str, limit: int
) -> None:
    path = TRACES / trace
    if not path.exists():
        pytest.skip(f"no recorded trace at {path}")
    config = tmp_path / "config.json"
    patient = {"lookup": "10s", "promotion": "30s"}  # a loaded machine changes what is waited for, not what is found
    files = {"path": str(tmp_path / "files"), "bytes": "16MB", "deadline": patient}
    config.write_text(json.dumps({"host": "3MB", "blocks_per_chunk": 2, "files": files}))
    command = [sys.executable, "-m", "orlop", "run", "--trace", str(path), "--limit", str(limit), "--json"]
    command += ["--config", str(config), "--reference", str(tmp_path / "reference.json")]
    runs = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        runs.append(json.loads(done.stdout))
    assert not any(run["tokens"]["different"] for run in runs)
    assert runs[1]["with_offload"]["loaded_tokens_from_0:files"] > 0
