"""Every bench that needs no vLLM can be started. Those beside vLLM: tests/vllm/test_vllm_benches.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_programs import ALONE, assert_it_starts


@pytest.mark.parametrize("program", ALONE, ids=lambda program: program.stem)
def test_a_bench_can_be_started(program: Path) -> None:
    assert_it_starts(program)
