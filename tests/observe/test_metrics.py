"""From what was counted to what a scraper reads: one table, parsed back by Prometheus' own parser.

In: Stats of real runs and made-up ones, a real HTTP server on loopback. Out: samples. Never: a double of a
library of others.
"""

from __future__ import annotations

import logging
import re
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from byte_engine import FULL as ONE_GROUP
from byte_engine import Engine
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from orlop.errors import ConfigError
from orlop.observe.observer import Observer
from orlop.observe.prometheus import Instruments, MetricsServer
from orlop.observe.table import METRICS, Kind, difference, read
from orlop.testing.rig import make_tiered_rig

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
PROMPT = list(range(1000, 1041))
CLASSES = {Kind.COUNTER: Counter, Kind.GAUGE: Gauge, Kind.HISTOGRAM: Histogram}


def parsed(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(server: MetricsServer) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as answer:
        return parsed(answer.read().decode())


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted({"model_name": "m", "engine": "0", **labels}.items()))]


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    made = MetricsServer(0)
    yield made
    made.close()


# --- the table ------------------------------------------------------------------------------------------


def test_every_metric_has_one_name_and_a_source_of_its_kind() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    kinds: dict[tuple[str, bool], set[Kind]] = {}
    for metric in METRICS:
        assert re.fullmatch(r"(vllm:[a-z_]+|orlop_[a-z_]+)", metric.name)
        assert not metric.name.endswith("_total"), "a counter gets it when it is scraped"
        assert bool(metric.bounds) == (metric.kind is Kind.HISTOGRAM)
        assert metric.help.endswith(".")
        for source in metric.sources:
            assert len(source.labels) == len(metric.labels)
            kinds.setdefault((source.stat, bool(metric.about)), set()).add(metric.kind)
    assert all(len(found) == 1 for found in kinds.values()), "a number is counted in one way"


def test_what_has_not_happened_yet_is_0_and_what_is_unknown_is_not_there() -> None:
    rig = make_tiered_rig(tiers=2)
    values = read(rig.scheduler.get_stats())
    assert values["orlop_surprises"].numbers == {(): 0.0}
    assert values["vllm:kv_offload_tiering_read_bytes"].numbers == {("1:manual",): 0.0, ("2:manual",): 0.0}
    assert values["orlop_loaded_tokens"].numbers == {("host",): 0, ("0:manual",): 0, ("1:manual",): 0}
    assert values["vllm:kv_offload_load_size"].buckets[()].counts == [0.0] * 11
    assert values["orlop_tier_breaker_state"].numbers == {}


def test_tiers_are_called_as_vllm_calls_them_where_the_name_is_vllms() -> None:
    values = read({"chunks_queried host": 3.0, "chunks_queried 0:files": 2.0, "tokens_loaded 0:files": 8.0})
    assert values["vllm:kv_offload_tiering_chunk_queries"].numbers == {("0:primary",): 3.0, ("1:files",): 2.0}
    assert values["orlop_loaded_tokens"].numbers == {("0:files",): 8.0}


def test_a_difference_has_what_happened_since_and_gauges_as_they_are() -> None:
    before = {"load_bytes": 5.0, "load_size_bytes.n0": 1.0, "slots_free": 9.0, "store_evicted_chunks 0:files": 7.0}
    now = {"load_bytes": 8.0, "load_size_bytes.n0": 1.0, "load_size_bytes.n2": 4.0, "slots_free": 9.0}
    now |= {"store_evicted_chunks 0:files": 2.0, "surprises": 1.0}
    assert difference(now, before) == {
        "load_bytes": 3.0,
        "load_size_bytes.n2": 4.0,
        "slots_free": 9.0,
        "store_evicted_chunks 0:files": 2.0,  # it began again
        "surprises": 1.0,
    }


# --- scraping ---------------------------------------------------------------------------------------------


def test_a_scrape_reads_the_last_snapshot_and_calls_nobody(server: MetricsServer) -> None:
    stats = {"load_bytes": 5.0, "slots": 4.0, "slots_reserved": 1.0, "slots_being_read": 1.0}
    calls = []

    def get_stats() -> Mapping[str, float]:
        calls.append(dict(stats))
        return stats

    observer = Observer(get_stats, model_name="m")
    server.show(observer)
    assert value(scrape(server), "vllm:kv_offload_load_bytes_total") == 0
    observer.tick(100.0)
    stats["load_bytes"] = 7.0
    observer.tick(100.9)
    for _ in range(3):
        samples = scrape(server)
    assert len(calls) == 1
    assert value(samples, "vllm:kv_offload_load_bytes_total") == 5
    assert value(samples, "vllm:kv_offload_cpu_cache_usage_perc") == 0.5
    observer.tick(101.0)
    assert value(scrape(server), "vllm:kv_offload_load_bytes_total") == 7
    assert len(calls) == 2


def test_histograms_are_cumulated_and_labelled_by_engine(server: MetricsServer) -> None:
    stats = {"load_size_bytes.n0": 2.0, "load_size_bytes.s0": 1e6, "load_size_bytes.n10": 1.0}
    stats |= {"load_size_bytes.s10": 5e8}
    for engine in ("0", "1"):
        observer = Observer(lambda: stats, model_name="m", engine=engine)
        observer.publish(0.0)
        server.show(observer)
    samples = scrape(server)
    for engine in ("0", "1"):
        name = "vllm:kv_offload_load_size"
        assert value(samples, f"{name}_bucket", le="1e+06", engine=engine) == 2
        assert value(samples, f"{name}_bucket", le="2e+08", engine=engine) == 2
        assert value(samples, f"{name}_bucket", le="+Inf", engine=engine) == 3
        assert value(samples, f"{name}_count", engine=engine) == 3
        assert value(samples, f"{name}_sum", engine=engine) == 5.01e8
        assert value(samples, "vllm:kv_offload_size_count", transfer_type="CPU_to_GPU", engine=engine) == 3


def test_a_port_in_use_is_one_clear_error(server: MetricsServer) -> None:
    with pytest.raises(ConfigError, match=rf"metrics port: found {server.port} on 127.0.0.1 not to be had"):
        MetricsServer(server.port)
    with pytest.raises(ConfigError, match="metrics port: found 70000, allowed: a number from 0"):
        MetricsServer(70000)
    with pytest.raises(ConfigError, match=r"metrics port: found 0 on nobody\.invalid not to be had"):
        MetricsServer(0, "nobody.invalid")


def test_instruments_of_an_engine_come_to_what_a_scrape_says(server: MetricsServer) -> None:
    """The plain twin: prometheus_client's own objects, fed by differences, against the last snapshot read at once."""
    rig = make_tiered_rig(tiers=2, ranks=2, slots=12)
    rig.device.repeat = lambda job, rank: True
    observer = Observer(rig.scheduler.get_stats, model_name="m")
    server.show(observer)
    registry = CollectorRegistry()

    def made(kind: Kind) -> Any:
        return lambda **how: CLASSES[kind](registry=registry, **how)

    instruments = Instruments({k: made(k) for k in Kind}, ["model_name", "engine"], {0: ["m", "0"]})
    before: Mapping[str, float] = {}
    for turn in range(6):
        rig.store([*range(turn % 3 * 100, turn % 3 * 100 + 20 + turn)])
        observer.publish(float(turn))
        instruments.add(difference(observer.latest, before))
        before = observer.latest
    theirs = {k: v for k, v in parsed(generate_latest(registry).decode()).items() if not k[0].endswith("_created")}
    ours = {k: v for k, v in scrape(server).items() if not k[0].startswith("vllm:external")}
    missing = {k for k in ours.keys() - theirs.keys() if ours[k]}
    assert not missing
    assert {k: theirs[k] for k in theirs if theirs[k] != pytest.approx(ours.get(k, 0.0))} == {}
    assert value(ours, "vllm:kv_offload_load_bytes_total") > 0


# --- the line of the minute ----------------------------------------------------------------------------------


def test_a_line_a_minute_says_what_happened_in_it(caplog: pytest.LogCaptureFixture) -> None:
    stats = {"tokens_queried": 1000.0, "tokens_loaded": 100.0, "tokens_loaded host": 100.0, "slots": 8.0}
    observer = Observer(lambda: stats)
    with caplog.at_level(logging.INFO, "orlop.observe"):
        observer.tick(0.0)
        observer.tick(59.0)
        assert caplog.messages == []
        stats = {
            **stats,
            "tokens_queried": 2000.0,
            "tokens_loaded": 600.0,
            "tokens_loaded host": 350.0,
            "tokens_loaded 0:files": 250.0,
            "load_bytes": 4e9,
            "load_seconds": 2.0,
            "read_bytes 0:files": 5e8,
            "read_seconds 0:files": 1.0,
            "slots_free": 2.0,
            "store_bytes 0:files": 5e8,
            "store_limit_bytes 0:files": 1e9,
            "promotion_jobs_failed 0:files": 3.0,
        }
        observer.tick(61.0)
        observer.tick(122.0)
    assert caplog.messages == [
        "the last 61 s: 500 of 1,000 prompt tokens loaded (host 25%, 0:files 25%); loaded 4 GB at 2 GB/s; "
        "0:files read 500 MB at 0.5 GB/s; host 75% full, 0:files 50% full; trouble: tiering_promotion_job_failures "
        "1:files 3",
        "the last 61 s: no prompt tokens asked for; host 75% full, 0:files 50% full; no trouble",
    ]


# --- everything real -------------------------------------------------------------------------------------------


@pytest.mark.fault("B173")
def test_a_round_trip_over_files_moves_the_metrics_by_what_was_moved(tmp_path: Path, server: MetricsServer) -> None:
    with Engine(tmp_path, "first", ONE_GROUP, 2) as engine:
        observer = Observer(engine.connector.get_stats, model_name="m")
        server.show(observer)
        engine.serve(PROMPT[:40])
        observer.publish(0.0)
        samples = scrape(server)
        slot = value(samples, "orlop_host_slot_bytes")
        assert value(samples, "vllm:kv_offload_tiering_write_bytes_total", tier="1:files") == 5 * slot
        assert value(samples, "vllm:kv_offload_tiering_write_time_total", tier="1:files") > 0
        assert value(samples, "orlop_tier_cascaded_chunks_total", tier="0:files") == 5
        assert value(samples, "orlop_tier_chunks_total", tier="0:files", direction="write", outcome="ok") == 5
        stored = value(samples, "vllm:kv_offload_store_bytes_total")
        assert stored == value(samples, "vllm:kv_offload_store_size_sum") > 0
    with Engine(tmp_path, "second", ONE_GROUP, 2) as engine:
        observer = Observer(engine.connector.get_stats, model_name="m")
        server.show(observer)
        engine.serve(PROMPT)
        observer.publish(0.0)
        samples = scrape(server)
        slot = value(samples, "orlop_host_slot_bytes")
        assert value(samples, "orlop_queried_tokens_total") == 41
        assert value(samples, "orlop_loaded_tokens_total", tier="0:files") == 40
        assert value(samples, "orlop_loaded_tokens_total", tier="host") == 0
        assert value(samples, "vllm:kv_offload_tiering_chunk_queries_total", tier="1:files") == 5
        assert value(samples, "vllm:kv_offload_tiering_chunk_hits_total", tier="1:files") == 5
        assert value(samples, "vllm:kv_offload_tiering_read_bytes_total", tier="1:files") == 5 * slot
        assert value(samples, "vllm:kv_offload_tiering_read_time_total", tier="1:files") > 0
        assert value(samples, "vllm:kv_offload_tiering_lookup_async_delay_seconds_count", tier="1:files") == 1
        assert value(samples, "vllm:kv_offload_tiering_lookup_sync_delay_seconds_count", tier="1:files") == 1
        blocks = engine.device.loads_checked
        assert value(samples, "vllm:kv_offload_load_size_count") == 2
        brought = value(samples, "vllm:kv_offload_load_bytes_total")
        assert brought == value(samples, "vllm:kv_offload_load_size_sum") == stored, "bytes in are bytes out"
        assert value(samples, "orlop_tier_promoted_chunks_total", tier="0:files") == 5
        assert value(samples, "orlop_loaded_chunks_total", tier="0:files") == 5
        assert blocks >= 10
        assert value(samples, "orlop_tier_chunks_total", tier="0:files", direction="read", outcome="ok") == 5
        assert value(samples, "orlop_chunk_tokens", group="0") == 8
        assert value(samples, "vllm:kv_offload_tiering_active_promotion_jobs", tier="1:files") == 0
        assert value(samples, "orlop_surprises_total") == 0
