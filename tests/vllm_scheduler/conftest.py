"""What the tests of this folder share; they need vLLM (its CPU build will do) and are skipped by name without it.

In: nothing. Out: one model folder per test. Never: a model hub.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Where the imitated model's config.json is written."""
    return tmp_path
