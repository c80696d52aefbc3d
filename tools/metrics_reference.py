"""Writes docs/reference/metrics.md from the table of metrics.

In: ``orlop.observe.table``. Out: the page; with ``--check`` nothing but a status, 1 where the page is out of date.
Never: a word that the table does not have, beyond the introduction.
"""

from __future__ import annotations

import sys
from pathlib import Path

from orlop.observe.table import SECTIONS, Kind, Metric
from pages import write_page

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "metrics.md"

INTRODUCTION = """# Metrics

This page is generated from the table in `src/orlop/observe/table.py` by `make docs`; edit there.

Every metric has the labels `model_name` and `engine`, and those of its row. A counter's name gains `_total` when it is
scraped. Names that begin with `vllm:` are those of vLLM's own offloading connector, with its units and labels, because
the meaning is the same; there `tier` is `0:primary` for host memory and `1:files` for the first tier below it. In all
others it is what settings and log lines say: `host`, `0:files`. The last column names the counters of `get_stats()`
that a metric comes from.

The metrics marked with a star are left out where an engine counts prompts itself, as vLLM does.

Not there: `vllm:kv_offload_tiering_backpressure_store_latency_ema`, because a full queue drops stores here, not an
average of latencies.

What to look at first:

| question | metrics |
|---|---|
| does it pay | `orlop_loaded_tokens_total` by `tier` over `orlop_queried_tokens_total` |
| is host memory large enough | `orlop_host_evicted_chunks_total`, `orlop_host_slots` |
| is a tier in service | `orlop_tier_breaker_state`, `orlop_tier_breaker_opened_total` |
| is a tier too slow | `orlop_tier_deadlines_passed_total`, `vllm:kv_offload_tiering_read_time_total` over bytes |
| is anything lost | `orlop_tier_damaged_chunks_total`, `orlop_tier_chunks_total` by `outcome` |
| does the engine wait | `orlop_fence_wait_seconds_total`; nothing else ever makes it wait |
"""


def main() -> int:
    page = "\n".join([INTRODUCTION, *(_section(title, metrics) for title, metrics in SECTIONS.items())])
    return write_page(PAGE, page)


def _section(title: str, metrics: tuple[Metric, ...]) -> str:
    head = ["| name | kind | unit | labels | meaning | from |", "|---|---|---|---|---|---|"]
    return "\n".join([f"## {title}", "", *head, *map(_row, metrics), ""])


def _row(metric: Metric) -> str:
    kind = f"{metric.kind}, {len(metric.bounds)} bounds" if metric.kind is Kind.HISTOGRAM else str(metric.kind)
    star = " \\*" if metric.engines_own else ""
    stats = ", ".join(f"`{stat}`" for stat in dict.fromkeys(source.stat for source in metric.sources))
    over = f" / `{metric.share_of}`" if metric.share_of else ""
    labels = ", ".join(f"`{label}`" for label in metric.labelnames)
    return f"| `{metric.name}`{star} | {kind} | {metric.unit} | {labels} | {metric.help} | {stats}{over} |"


if __name__ == "__main__":
    sys.exit(main())
