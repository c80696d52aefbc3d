"""What the connector has counted, in vLLM's log and under its ``/metrics``.

In: a half's ``get_stats`` on the engine's thread; the differences, in the front-end's process. Out: vLLM's containers
of stats; prometheus_client objects for ``orlop.observe``'s table. Never: a count of its own, a reading in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from orlop.counting import Stats
from orlop.observe.prometheus import Instruments
from orlop.observe.summary import minute_line
from orlop.observe.table import Kind, difference, joined

CHANGED, SECONDS = "changed", "seconds"
"""Keys of ``OrlopStats.data``: what ``difference`` found, and over how long."""


class OrlopStats(KVConnectorStats):
    """What has happened since the last one; vLLM adds them up for its log and gives each to Prometheus."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> OrlopStats:
        """``other`` came later."""
        self.data = {
            CHANGED: joined(self.data.get(CHANGED, {}), other.data.get(CHANGED, {})),
            SECONDS: self.data.get(SECONDS, 0.0) + other.data.get(SECONDS, 0.0),
        }
        return self

    def reduce(self) -> dict[str, Any]:
        """For vLLM's log: one line."""
        return {"Orlop": minute_line(self.data[CHANGED], self.data[SECONDS])}

    def is_empty(self) -> bool:
        return not self.data.get(CHANGED)


class Meter:
    """Reads a half's counters now and then: every ``every_s`` while it works, and once more when it comes to rest."""

    def __init__(self, get_stats: Callable[[], Stats], every_s: float = 1.0) -> None:
        self._get_stats = get_stats
        self._every_s = every_s
        self._read_at: float | None = None
        self._read: Stats = {}
        self._was_idle = False

    def reading(self, is_idle: bool, now: float) -> OrlopStats | None:
        """What has changed since the last reading, where it is time for one."""
        came_to_rest = is_idle and not self._was_idle
        self._was_idle = is_idle
        if self._read_at is not None and now < self._read_at + self._every_s and not came_to_rest:
            return None
        seconds = 0.0 if self._read_at is None else now - self._read_at
        before, self._read, self._read_at = self._read, dict(self._get_stats()), now
        changed = difference(self._read, before)
        return OrlopStats({CHANGED: changed, SECONDS: seconds}) if changed else None


class OrlopPromMetrics(KVConnectorPromMetrics):
    """The table of metrics as objects of vLLM's registry, with its labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _forget_earlier_engines()
        kinds = {
            Kind.COUNTER: metric_types[Counter],
            Kind.GAUGE: metric_types[Gauge],
            Kind.HISTOGRAM: metric_types[Histogram],
        }
        self._instruments = Instruments(kinds, labelnames, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._instruments.add(transfer_stats_data.get(CHANGED, {}), engine_idx)


def _forget_earlier_engines() -> None:
    """A process may make one engine after another. vLLM takes its own metrics from the registry then; we do ours."""
    for collector in list(REGISTRY._collector_to_names):
        if str(getattr(collector, "_name", "")).startswith("orlop_"):
            REGISTRY.unregister(collector)
