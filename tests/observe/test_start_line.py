"""The start line says what is on, what was found, and what is off and why; and an engine shows its metrics at a port.

In: real connectors, a files tier, an embedded engine. Out: log lines and samples. Never: a double of our own parts.
"""

from __future__ import annotations

import logging
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from byte_engine import FULL, Engine
from prometheus_client.parser import text_string_to_metric_families
from real_stores import MemoryStore

from orlop.engine.llm import LLM, EngineConfig
from orlop.observe.observer import Observer
from orlop.observe.prometheus import MetricsServer

torch.set_num_threads(1)


def start_line(caplog: pytest.LogCaptureFixture) -> str:
    (line,) = [message for message in caplog.messages if message.startswith("offloading is on")]
    caplog.clear()
    return line


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "orlop")


@pytest.mark.fault("B227", "B231")
def test_the_start_line_says_what_was_found_and_under_which_namespace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(tmp_path, "first", FULL, 1) as engine:
        line = start_line(caplog)
        assert "host 98304 bytes in 24 chunks of 4096 bytes (2 blocks, 8 tokens each), policy lru" in line
        assert "0:files with 0 chunks in 0 of 2097152 bytes" in line
        assert line.endswith("off: nothing")
        engine.serve(list(range(40)))
    with Engine(tmp_path, "second", FULL, 1):
        line = start_line(caplog)
        assert "0:files with 5 chunks in 40960 of 2097152 bytes" in line
        (folder,) = [p.name for p in (tmp_path / "v1").iterdir() if len(p.name) == 32]
        assert f"namespace {folder}" in line


@pytest.mark.fault("B231")
def test_the_start_line_says_what_is_off_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Engine(
        tmp_path,
        "off",
        FULL,
        1,
        spec={"persistent": False, "prefix_caching": False},
        settings={"offload_decode": False},
    ):
        line = start_line(caplog)
    assert "tiers: none" in line
    assert (
        "off: tiers (nothing tells these weights apart from others: set weights_id), chunks that generated tokens fill "
        "(offload_decode), sharing of blocks on the device (the engine's prefix caching)"
    ) in line
    tier = {"type": "files", "path": "/proc/nowhere", "bytes": "2MiB"}
    with Engine(tmp_path, "trouble", FULL, 1, tier=tier):
        line = start_line(caplog)
    assert "tiers: 0:files; namespace" in line
    assert "off: tier 0:files for now (path: found" in line


@pytest.mark.parametrize(("write", "says"), [("off", "read only"), ("evicted", "written on eviction")])
def test_when_a_tier_is_written_and_a_store_that_says_nothing_are_named_so(
    write: str, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = {"type": f"{MemoryStore.__module__}:{MemoryStore.__name__}", "write": write}
    with Engine(tmp_path, "quiet", FULL, 1, tier=tier, io_process=False):
        line = start_line(caplog)
    assert f"tiers: 0:{tier['type']} ({says}); namespace" in line


def test_the_embedded_engine_shows_what_it_has_done_at_a_port() -> None:
    config = EngineConfig(num_blocks=12, max_step_tokens=64, max_running=2, drain_deadline_s=60.0)
    llm = LLM(config, offload={"host": {"bytes": "4MiB"}, "blocks_per_chunk": 1})
    server = MetricsServer(0)
    try:
        assert llm.connector is not None
        observer = llm.observer = Observer(llm.connector.get_stats, model_name="seeded", engine="7")
        server.show(observer)
        results = []
        limit = time.monotonic() + 60  # host memory is handed out as it comes
        while not any(result.loaded_tokens for result in results):
            assert time.monotonic() < limit, "nothing was ever loaded"
            results += [llm.generate([wanted], 1)[0] for wanted in (list(range(65)), list(range(100, 220)))]
        loaded_tokens = sum(result.loaded_tokens for result in results)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        samples = {
            s.name: s for f in families for s in f.samples if "tier" not in s.labels or s.labels["tier"] == "host"
        }
        loaded = samples["orlop_loaded_tokens_total"]
        assert loaded.labels == {"model_name": "seeded", "engine": "7", "tier": "host"}
        assert loaded.value == samples["vllm:external_prefix_cache_hits_total"].value == loaded_tokens
        asked = sum(result.num_prompt_tokens - result.device_hit_tokens for result in results)
        assert samples["orlop_queried_tokens_total"].value == asked
        assert samples["vllm:kv_offload_load_bytes_total"].value > 0
    finally:
        server.close()
        llm.shutdown()
