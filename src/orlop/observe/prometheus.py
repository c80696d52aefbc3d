"""Prometheus: the metrics of observers at a port, and objects of prometheus_client for an engine that has its own.

In: snapshots of ``Observer``s, or differences of ``Stats``. Out: Prometheus text over HTTP; prometheus_client objects.
Never: a call into a connector, the registry that other libraries share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from orlop.counting import Stats
from orlop.errors import ConfigError
from orlop.observe.observer import Observer
from orlop.observe.table import METRICS, Buckets, Kind, Metric, Values, read

ENGINE_LABELS = ("model_name", "engine")


class MetricsServer:
    """Prometheus text at ``http://host:port/metrics`` until ``close``, from a thread of its own.

    ``port`` 0 takes a free one. ``ConfigError`` where the port cannot be had. What is shown is the last snapshot of
    each observer; a scrape never waits for an engine, nor an engine for a scrape.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._observers: list[Observer] = []
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Scrape(self._observers))
        if not 0 <= port <= 65535:
            raise ConfigError(f"metrics port: found {port}, allowed: a number from 0 (any free port) to 65535")
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(
                f"metrics port: found {port} on {host} not to be had ({error.strerror or error}), expected a free "
                "port; choose another one, or 0 for any"
            ) from error
        self.port: int = self._server.server_port

    def show(self, observer: Observer) -> None:
        """Its metrics are part of every scrape from now on. ``model_name`` and ``engine`` tell several apart."""
        self._observers.append(observer)

    def close(self) -> None:
        """Let go of the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Scrape(Collector):
    """All metrics of all observers, read anew for every scrape, on the thread of that scrape."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def describe(self) -> Iterable[Any]:
        return [_family(metric) for metric in METRICS]

    def collect(self) -> Iterator[Any]:
        readings = [((o.model_name, o.engine), read(o.latest)) for o in list(self._observers)]
        for metric in METRICS:
            family = _family(metric)
            for engine, values in readings:
                _fill(family, metric, engine, values[metric.name])
            yield family


_FAMILIES: Mapping[Kind, Any] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


def _family(metric: Metric) -> Any:
    return _FAMILIES[metric.kind](metric.name, documentation(metric), labels=[*ENGINE_LABELS, *metric.labelnames])


def _fill(family: Any, metric: Metric, engine: tuple[str, str], values: Values) -> None:
    for labels, number in values.numbers.items():
        family.add_metric([*engine, *labels], number)
    for labels, buckets in values.buckets.items():
        bounds = [*map(floatToGoString, metric.bounds), "+Inf"]
        cumulated = list(zip(bounds, accumulate(buckets.counts), strict=True))
        family.add_metric([*engine, *labels], cumulated, sum(buckets.sums))


def documentation(metric: Metric) -> str:
    """The help text of a metric, its unit included."""
    return f"{metric.help} Unit: {metric.unit}."


class Instruments:
    """prometheus_client objects for the table, for an engine that has a registry, and perhaps several processes.

    ``types`` gives the classes to use for each kind, with the interface of prometheus_client's. ``labelnames`` and
    ``engines`` (label values by engine index) are the engine's own. Metrics that such an engine counts itself are left
    out.
    """

    def __init__(
        self, types: Mapping[Kind, Any], labelnames: Sequence[str], engines: Mapping[int, Sequence[object]]
    ) -> None:
        self._engines = {index: tuple(map(str, values)) for index, values in engines.items()}
        self._made = {m.name: self._make(types, m, labelnames) for m in METRICS if not m.engines_own}

    def add(self, changed: Stats, engine: int = 0) -> None:
        """What ``table.difference`` found since the last call for this engine.

        A bucket's observations are given as so many times their mean: counts, buckets and sums come out right.
        """
        values = read(changed)
        for metric in METRICS:
            instrument = self._made.get(metric.name)
            if instrument is None:
                continue
            for labels, number in values[metric.name].numbers.items():
                child = instrument.labels(*self._engines[engine], *labels)
                child.set(number) if metric.kind is Kind.GAUGE else child.inc(number)
            for labels, buckets in values[metric.name].buckets.items():
                _observe(instrument.labels(*self._engines[engine], *labels), buckets, metric.bounds)

    @staticmethod
    def _make(types: Mapping[Kind, Any], metric: Metric, labelnames: Sequence[str]) -> Any:
        more: dict[str, Any] = {}
        if metric.kind is Kind.HISTOGRAM:
            more = {"buckets": metric.bounds}
        elif metric.kind is Kind.GAUGE:
            more = {"multiprocess_mode": "mostrecent"}
        return types[metric.kind](
            name=metric.name,
            documentation=documentation(metric),
            labelnames=[*labelnames, *metric.labelnames],
            **more,
        )


def _observe(child: Any, buckets: Buckets, bounds: Sequence[float]) -> None:
    for count, total, bound in zip(buckets.counts, buckets.sums, [*bounds, math.inf], strict=True):
        for _ in range(int(count)):
            child.observe(min(total / count, bound))  # rounding must not lift it into the next bucket
