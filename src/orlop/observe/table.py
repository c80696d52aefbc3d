"""One table of all metrics, and how their values are read from what the parts have counted.

In: ``Stats`` of a connector. Out: values by metric and labels; the difference of two ``Stats``. Never: a metric that is
defined somewhere else, a prometheus_client, a call into a connector.

Names that begin with ``vllm:`` are those of vLLM's own offloading connector, with its unit and labels, because the
meaning is the same; there a tier is called what vLLM calls it, ``0:primary`` for host memory and ``1:files`` for the
first one below. All others begin with ``orlop_`` and call tiers what settings and log lines call them: ``host``,
``0:files``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from orlop.core import Outcome
from orlop.counting import ASYNC_BOUNDS, CHUNK_BOUNDS, SIZE_BOUNDS, SYNC_BOUNDS, Stats
from orlop.tiering.envelope import Reason
from orlop.tiering.io_worker import SOURCE_REASON
from orlop.tiering.runner import REFUSALS

VLLM = "vllm:kv_offload_"
VLLM_TIERING = VLLM + "tiering_"


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Source(NamedTuple):
    """A name in ``Stats``, and the values of the metric's own ``labels`` for it."""

    stat: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Metric:
    """One row.

    ``about``: the label that says what a key of ``Stats`` is about, ``tier`` or ``group``; empty where keys have a name
    only. ``labels``: further labels, whose values ``sources`` say; sources with equal labels are added up.
    ``share_of``: the value is divided by this one of ``Stats``. ``trouble``: more than 0 is worth a word in the line of
    the minute. ``engines_own``: an engine that counts prompts itself, as vLLM does, has it already.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    sources: tuple[Source, ...]
    about: str = ""
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    share_of: str = ""
    trouble: bool = False
    engines_own: bool = False

    @property
    def labelnames(self) -> tuple[str, ...]:
        """The labels beside ``model_name`` and ``engine``."""
        return ((self.about,) if self.about else ()) + self.labels

    def labels_of(self, source: Source, about: str) -> tuple[str, ...]:
        """Their values."""
        if not self.about:
            return source.labels
        vllms = self.about == "tier" and self.name.startswith("vllm:")
        return (_vllm_tier(about) if vllms else about, *source.labels)


def _vllm_tier(name: str) -> str:
    index, _, kind = name.partition(":")
    if name == "host":
        return "0:primary"
    return f"{int(index) + 1}:{kind}" if index.isdigit() else name


# --- the table ------------------------------------------------------------------------------------------


def _counter(name: str, unit: str, help: str, *sources: str | Source, **more: object) -> Metric:
    return _metric(name, Kind.COUNTER, unit, help, sources, more)


def _gauge(name: str, unit: str, help: str, *sources: str | Source, **more: object) -> Metric:
    return _metric(name, Kind.GAUGE, unit, help, sources, more)


def _histogram(
    name: str, unit: str, help: str, bounds: tuple[float, ...], *sources: str | Source, **more: object
) -> Metric:
    return _metric(name, Kind.HISTOGRAM, unit, help, sources, {"bounds": bounds, **more})


def _metric(
    name: str, kind: Kind, unit: str, help: str, sources: tuple[str | Source, ...], more: Mapping[str, object]
) -> Metric:
    taken = tuple(s if isinstance(s, Source) else Source(s) for s in sources)
    return Metric(name, kind, unit, help, taken, **more)  # type: ignore[arg-type]


_DEVICE = (
    _counter(VLLM + "load_bytes", "bytes", "Copied from host memory to the device, all ranks.", "load_bytes"),
    _counter(VLLM + "load_time", "seconds", "Spent on these copies, all ranks.", "load_seconds"),
    _histogram(VLLM + "load_size", "bytes", "Size of one load on one rank.", SIZE_BOUNDS, "load_size_bytes"),
    _counter(VLLM + "store_bytes", "bytes", "Copied from the device to host memory, all ranks.", "store_bytes"),
    _counter(VLLM + "store_time", "seconds", "Spent on these copies, all ranks.", "store_seconds"),
    _histogram(VLLM + "store_size", "bytes", "Size of one store on one rank.", SIZE_BOUNDS, "store_size_bytes"),
    _counter(
        VLLM + "total_bytes",
        "bytes",
        "The same by direction, as older dashboards want it.",
        Source("load_bytes", ("CPU_to_GPU",)),
        Source("store_bytes", ("GPU_to_CPU",)),
        labels=("transfer_type",),
    ),
    _counter(
        VLLM + "total_time",
        "seconds",
        "The same by direction, as older dashboards want it.",
        Source("load_seconds", ("CPU_to_GPU",)),
        Source("store_seconds", ("GPU_to_CPU",)),
        labels=("transfer_type",),
    ),
    _histogram(
        VLLM + "size",
        "bytes",
        "The same by direction, as older dashboards want it.",
        SIZE_BOUNDS,
        Source("load_size_bytes", ("CPU_to_GPU",)),
        Source("store_size_bytes", ("GPU_to_CPU",)),
        labels=("transfer_type",),
    ),
    _counter(
        "orlop_device_job_failures",
        "jobs",
        "Copies between device and host that failed on some rank, were outdated by a reset, or came too late.",
        Source("load_jobs_failed", ("load",)),
        Source("store_jobs_failed", ("store",)),
        labels=("direction",),
        trouble=True,
    ),
    _counter(
        "orlop_store_deadlines_passed",
        "jobs",
        "Copies from the device that were given up because some rank had not reported them in time.",
        "store_deadlines_passed",
        trouble=True,
    ),
    _gauge("orlop_device_jobs", "jobs", "Copies between device and host that are not settled.", "jobs_in_flight"),
    _gauge("orlop_fenced_blocks", "blocks", "Device blocks that a pending store still reads.", "fenced_blocks"),
    _counter("orlop_fences", "jobs", "Stores that had to be read before a step could overwrite.", "stores_flushed"),
    _counter("orlop_fence_waits", "waits", "Times an engine's thread waited for such a store.", "fence_waits"),
    _counter("orlop_fence_wait_seconds", "seconds", "How long it waited, all ranks.", "fence_wait_seconds"),
)

_LOOKUPS = (
    _histogram(
        VLLM + "lookup_sync_delay_seconds",
        "seconds",
        "Time of one lookup call on the engine's thread.",
        SYNC_BOUNDS,
        "lookup_sync_seconds",
    ),
    _histogram(
        VLLM + "lookup_async_delay_seconds",
        "seconds",
        "Time from the first 'ask again' of a request to its answer or its end.",
        ASYNC_BOUNDS,
        "lookup_async_seconds",
    ),
    _counter(
        VLLM + "hit_pending_deadline_expired",
        "requests",
        "Requests that went on without chunks that were still coming up.",
        "pending_deadlines_passed",
        trouble=True,
    ),
    _counter(
        "vllm:external_prefix_cache_queries",
        "tokens",
        "Prompt tokens beyond the device's own prefix of requests that got their blocks.",
        "tokens_queried",
        engines_own=True,
    ),
    _counter(
        "vllm:external_prefix_cache_hits",
        "tokens",
        "Those of them that are loaded.",
        "tokens_loaded",
        engines_own=True,
    ),
    _counter(
        "orlop_queried_tokens",
        "tokens",
        "Tokens beyond the device's own prefix of requests that got their blocks.",
        "tokens_queried",
    ),
    _counter(
        "orlop_loaded_tokens",
        "tokens",
        "Tokens of loads begun for them, by the tier that had them; the others are computed, and so is what a load "
        "that fails was to bring (`orlop_device_job_failures`).",
        "tokens_loaded",
        about="tier",
    ),
    _counter(
        "orlop_loaded_chunks",
        "chunks",
        "Chunks that are loaded, of all groups, by the tier that had them.",
        "chunks_loaded",
        about="tier",
    ),
)

_HOST = (
    _counter(VLLM + "allocation_failure", "offers", "Stores for which host memory had no room.", "allocation_failures"),
    _counter(
        VLLM + "stores_skipped", "chunks", "Chunks not stored yet because of `host.store_after`.", "stores_skipped"
    ),
    _histogram(
        VLLM + "cpu_allocation_size", "chunks", "Chunks of one offer to store.", CHUNK_BOUNDS, "allocation_chunks"
    ),
    _gauge(
        VLLM + "cpu_cache_usage_perc",
        "share",
        "Share of host memory that transfers are reading or writing: 0 idle, 1 all of it.",
        "slots_being_read",
        "slots_reserved",
        share_of="slots",
    ),
    _gauge(
        VLLM + "cpu_cache_read_usage_perc",
        "share",
        "Share of host memory that transfers are reading.",
        "slots_being_read",
        share_of="slots",
    ),
    _gauge(
        VLLM + "cpu_cache_write_usage_perc",
        "share",
        "Share of host memory that transfers are writing.",
        "slots_reserved",
        share_of="slots",
    ),
    _gauge(
        "orlop_host_slots",
        "chunks",
        "Slots of host memory by what is in them; together its capacity.",
        *(Source(f"slots_{state}", (state,)) for state in ("free", "reserved", "ready", "retired")),
        labels=("state",),
    ),
    _gauge("orlop_host_capacity_chunks", "chunks", "Chunks that host memory has room for.", "slots"),
    _gauge("orlop_host_usable_chunks", "chunks", "Those of them whose memory is there already.", "slots_usable"),
    _gauge("orlop_host_slot_bytes", "bytes", "Size of one slot.", "slot_bytes"),
    _gauge("orlop_host_leased_chunks", "chunks", "Chunks kept for requests that wait for them.", "slots_leased"),
    _gauge("orlop_chunk_tokens", "tokens", "Tokens of one chunk, by KV group.", "chunk_tokens", about="group"),
    _counter("orlop_host_evicted_chunks", "chunks", "Readable chunks that left host memory.", "host_evictions"),
)

_TIERS = (
    _histogram(
        VLLM_TIERING + "lookup_sync_delay_seconds",
        "seconds",
        "Time of one lookup call at a tier, which asks for a whole run of chunks.",
        SYNC_BOUNDS,
        "lookup_sync_seconds",
        about="tier",
    ),
    _histogram(
        VLLM_TIERING + "lookup_async_delay_seconds",
        "seconds",
        "Time until a tier answered a lookup.",
        ASYNC_BOUNDS,
        "lookup_async_seconds",
        about="tier",
    ),
    _counter(VLLM_TIERING + "read_bytes", "bytes", "Read from a tier into host memory.", "read_bytes", about="tier"),
    _counter(VLLM_TIERING + "read_time", "seconds", "Spent on these reads.", "read_seconds", about="tier"),
    _counter(VLLM_TIERING + "write_bytes", "bytes", "Written from host memory to a tier.", "write_bytes", about="tier"),
    _counter(VLLM_TIERING + "write_time", "seconds", "Spent on these writes.", "write_seconds", about="tier"),
    _counter(
        VLLM_TIERING + "chunk_queries",
        "chunks",
        "Chunks that a tier was asked for, once per request; of host memory, those of requests that got their blocks.",
        "chunks_queried",
        about="tier",
    ),
    _counter(VLLM_TIERING + "chunk_hits", "chunks", "Those of them that it had.", "chunks_hit", about="tier"),
    _counter(
        VLLM_TIERING + "promotion_job_failures",
        "jobs",
        "Reads of which some chunk did not come.",
        "promotion_jobs_failed",
        about="tier",
        trouble=True,
    ),
    _counter(
        VLLM_TIERING + "cascade_job_failures",
        "jobs",
        "Writes of which some chunk was not kept.",
        "cascade_jobs_failed",
        about="tier",
        trouble=True,
    ),
    _counter(
        VLLM_TIERING + "promotion_allocation_failures",
        "jobs",
        "Reads that found no room in host memory.",
        "promotion_allocation_failures",
        trouble=True,
    ),
    _gauge(VLLM_TIERING + "active_promotion_jobs", "jobs", "Reads in flight.", "promotion_jobs_active", about="tier"),
    _gauge(VLLM_TIERING + "active_cascade_jobs", "jobs", "Writes in flight.", "cascade_jobs_active", about="tier"),
    _gauge(
        VLLM_TIERING + "primary_read_usage_perc",
        "share",
        "Share of host memory that a tier is reading.",
        "cascade_chunks_active",
        about="tier",
        share_of="slots",
    ),
    _gauge(
        VLLM_TIERING + "primary_write_usage_perc",
        "share",
        "Share of host memory that a tier is writing.",
        "promotion_chunks_active",
        about="tier",
        share_of="slots",
    ),
    _counter(
        VLLM_TIERING + "backpressure_stores_dropped",
        "jobs",
        "Writes dropped because the tier's queue was full.",
        "stores_refused_queue_full",
        about="tier",
        trouble=True,
    ),
    _counter(
        VLLM_TIERING + "backpressure_blocks_dropped",
        "chunks",
        "Their chunks.",
        "chunks_stores_refused_queue_full",
        about="tier",
    ),
    _counter(
        VLLM_TIERING + "checksum_failures",
        "chunks",
        "Chunks whose checksum was wrong when they were read; never served.",
        f"damaged_{Reason.HEADER_CHECKSUM}",
        f"damaged_{Reason.PAYLOAD_CHECKSUM}",
        about="tier",
    ),
    _counter(
        "orlop_tier_chunks",
        "chunks",
        "Chunks of reads and writes that were tried, by what became of them.",
        *(Source(f"{verb}_{o}", (d, o)) for verb, d in (("read", "read"), ("written", "write")) for o in Outcome),
        about="tier",
        labels=("direction", "outcome"),
    ),
    _counter(
        "orlop_tier_damaged_chunks",
        "chunks",
        "Chunks that did not verify as what was asked for, or, with `source_checksum`, as what was to be written.",
        *(Source(f"damaged_{reason}", (str(reason),)) for reason in (*Reason, SOURCE_REASON)),
        about="tier",
        labels=("reason",),
        trouble=True,
    ),
    _counter(
        "orlop_tier_refused",
        "calls",
        "Reads, writes and lookups that were not even tried.",
        *(
            Source(f"{what}s_refused_{why}", (word, why))
            for what, word in (("load", "read"), ("store", "write"), ("lookup", "lookup"))
            for why in REFUSALS
        ),
        about="tier",
        labels=("what", "reason"),
    ),
    _counter(
        "orlop_tier_promoted_chunks",
        "chunks",
        "Chunks that came up from a tier, also for requests that had gone on without them.",
        "chunks_promoted",
        about="tier",
    ),
    _counter("orlop_tier_cascaded_chunks", "chunks", "Chunks that a tier has kept.", "chunks_cascaded", about="tier"),
    _counter(
        "orlop_tier_unwritten_evictions",
        "chunks",
        "Chunks that left host memory before a tier that is written on eviction had them.",
        "evictions_unwritten",
        about="tier",
    ),
    _gauge(
        "orlop_tier_unwritten_chunks",
        "chunks",
        "Chunks in host memory that a tier that is written on eviction does not have yet.",
        "chunks_unwritten",
        about="tier",
    ),
    _counter(
        "orlop_tier_deadlines_passed",
        "events",
        "Lookups, reads and writes that took longer than the tier's deadline.",
        Source("lookup_deadlines_passed", ("lookup",)),
        Source("promotion_deadlines_passed", ("promotion",)),
        Source("cascade_deadlines_passed", ("cascade",)),
        about="tier",
        labels=("deadline",),
        trouble=True,
    ),
    _counter(
        "orlop_tier_lookup_failures",
        "lookups",
        "Lookups that a tier's store failed, or never answered.",
        Source("lookups_failed", ("failed",)),
        Source("lookups_timed_out", ("timed_out",)),
        about="tier",
        labels=("reason",),
        trouble=True,
    ),
    _counter(
        "orlop_tier_late_answers", "lookups", "Answers after nobody waited any more.", "late_answers", about="tier"
    ),
    _gauge(
        "orlop_tier_queue_bytes",
        "bytes",
        "Submitted and not reported.",
        Source("load_queue_bytes", ("read",)),
        Source("queue_bytes", ("write",)),
        about="tier",
        labels=("direction",),
    ),
    _gauge("orlop_tier_open_lookups", "lookups", "Lookups that are not answered.", "open_lookups", about="tier"),
    _gauge("orlop_tier_breaker_state", "state", "0 closed, 1 on probation, 2 open.", "breaker_state", about="tier"),
    _counter(
        "orlop_tier_breaker_opened",
        "times",
        "Times it went out of service.",
        "breaker_opened",
        about="tier",
        trouble=True,
    ),
    _counter(
        "orlop_tier_io_restarts", "times", "Times its I/O was started again.", "io_restarts", about="tier", trouble=True
    ),
    _gauge("orlop_tier_capacity_bytes", "bytes", "What it may keep now.", "store_limit_bytes", about="tier"),
    _gauge("orlop_tier_used_bytes", "bytes", "What it keeps, as last said by its store.", "store_bytes", about="tier"),
    _gauge("orlop_tier_stored_chunks", "chunks", "The chunks of that.", "store_chunks", about="tier"),
    _counter(
        "orlop_tier_evicted_chunks", "chunks", "Chunks it gave up for room.", "store_evicted_chunks", about="tier"
    ),
)

_WHOLE = (
    _gauge(
        "orlop_retired_jobs",
        "jobs",
        "Given up at their deadline, while somebody may still touch their slots.",
        Source("jobs_overdue", ("device",)),
        Source("tier_jobs_overdue", ("tier",)),
        labels=("side",),
        trouble=True,
    ),
    _gauge("orlop_retired_seconds", "seconds", "How long the oldest of them has been so.", "retired_seconds"),
    _counter(
        "orlop_promotions_cut", "requests", "Waits cut short because they asked for too much room.", "promotions_cut"
    ),
    _counter(
        "orlop_event_overflows",
        "times",
        "Times more cache events waited than are kept; whoever reads them was told to forget the tier.",
        "event_overflows",
        about="tier",
        trouble=True,
    ),
    _counter("orlop_resets", "times", "Cache resets.", "resets"),
    _counter("orlop_reports_ignored", "reports", "Reports that were repeated, unknown or outdated.", "reports_ignored"),
    _counter(
        "orlop_surprises",
        "events",
        "Things that should not happen; each costs a request a recompute at most.",
        "surprises",
        trouble=True,
    ),
)

SECTIONS: Mapping[str, tuple[Metric, ...]] = {
    "Lookups": _LOOKUPS,
    "Host memory": _HOST,
    "Between host memory and the device": _DEVICE,
    "Tiers below host memory": _TIERS,
    "The whole": _WHOLE,
}
METRICS: tuple[Metric, ...] = tuple(metric for section in SECTIONS.values() for metric in section)

# --- reading values ---------------------------------------------------------------------------------------


class Buckets:
    """The buckets of one histogram, not cumulated: counts and sums, the last of them without a bound."""

    __slots__ = ("counts", "sums")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.counts = [0.0] * (len(bounds) + 1)
        self.sums = [0.0] * (len(bounds) + 1)


class Values(NamedTuple):
    """Of one metric: numbers by labels, or buckets by labels."""

    numbers: dict[tuple[str, ...], float]
    buckets: dict[tuple[str, ...], Buckets]


_READERS: defaultdict[tuple[str, bool], list[tuple[Metric, Source]]] = defaultdict(list)
for _metric_ in METRICS:
    for _source in _metric_.sources:
        _READERS[_source.stat, bool(_metric_.about)].append((_metric_, _source))

_GAUGES = {(s.stat, bool(m.about)) for m in METRICS if m.kind is Kind.GAUGE for s in m.sources} | {
    (m.share_of, False) for m in METRICS
}
"""Names that are gauges, and whether that is so of keys that are about something or of those that are not."""


def read(stats: Stats) -> dict[str, Values]:
    """The values of every metric. What has been counted nowhere yet is 0; a gauge that nobody knows is left out."""
    found = {metric.name: Values({}, {}) for metric in METRICS}
    for metric, source, about in _nothing_yet(stats):
        _place(found[metric.name], metric, metric.labels_of(source, about))
    for key, value in stats.items():
        name, _, about = key.partition(" ")
        stat, _, bucket = name.partition(".")
        for metric, source in _READERS.get((stat, bool(about)), ()):
            _add(found[metric.name], metric, metric.labels_of(source, about), bucket, value, stats)
    return found


def difference(now: Stats, before: Stats) -> dict[str, float]:
    """What has happened between two readings of one connector; gauges are as they are now.

    A counter that is smaller than before has begun again, as a store's own do when its I/O process is started again.
    """
    changed: dict[str, float] = {}
    for key, value in now.items():
        was = before.get(key, 0.0)
        name, _, about = key.partition(" ")
        if (name, bool(about)) in _GAUGES:
            changed[key] = value
        elif value != was:
            changed[key] = value - was if value > was else value
    return changed


def joined(first: Stats, then: Stats) -> dict[str, float]:
    """Two differences, one after the other, as one; gauges are as they were last."""
    both = dict(first)
    for key, value in then.items():
        name, _, about = key.partition(" ")
        both[key] = value if (name, bool(about)) in _GAUGES else both.get(key, 0.0) + value
    return both


def _nothing_yet(stats: Stats) -> Iterator[tuple[Metric, Source, str]]:
    """What is 0 from the start, so that the first event of a series is seen as an increase."""
    tiers = [key.partition(" ")[2] for key in stats if key.startswith("promotion_jobs_active ")]
    for metric in METRICS:
        if metric.kind is Kind.GAUGE:
            continue
        for source in metric.sources:
            for about in tiers if metric.about else ("",):
                yield metric, source, about


def _place(values: Values, metric: Metric, labels: tuple[str, ...]) -> None:
    if metric.kind is Kind.HISTOGRAM:
        values.buckets.setdefault(labels, Buckets(metric.bounds))
    else:
        values.numbers.setdefault(labels, 0.0)


def _add(values: Values, metric: Metric, labels: tuple[str, ...], bucket: str, value: float, stats: Stats) -> None:
    _place(values, metric, labels)
    if metric.kind is Kind.HISTOGRAM:
        buckets = values.buckets[labels]
        (buckets.counts if bucket[0] == "n" else buckets.sums)[int(bucket[1:])] += value
        return
    if metric.share_of:
        whole = stats.get(metric.share_of, 0.0)
        value = value / whole if whole else 0.0
    values.numbers[labels] += value
