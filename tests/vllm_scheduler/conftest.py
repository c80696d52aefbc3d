"""These tests need vLLM (its CPU build will do); without it they are skipped by name.

In: nothing. Out: one model folder per test session. Never: a model hub.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

collect_ignore_glob: list[str] = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Where the imitated model's config.json is written."""
    return tmp_path
