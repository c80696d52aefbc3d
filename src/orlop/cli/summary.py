"""What runs came to, as a mapping that fits into JSON, and as a table.

In: ``RunReport``s and a ``Comparison``. Out: a mapping; lines on standard output. Never: a figure that the reports
do not hold, or that does not follow from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from orlop.cli.compare import Comparison
from orlop.cli.replay import RunReport

Figures = Mapping[str, int | float | None]

LABELS = {
    "computed_tokens": "tokens computed",
    "device_hit_tokens": "tokens found on the device",
    "loaded_tokens": "tokens loaded",
    "first_token_p50_s": "time to first token, p50",
    "first_token_p95_s": "time to first token, p95",
    "total_s": "total time",
    "first_token_p50_ratio": "ratio of first token, p50",
    "total_ratio": "ratio of total time",
}
TIER = "loaded_tokens_from_"
RATIOS = {"first_token_p50_ratio": "first_token_p50_s", "total_ratio": "total_s"}
SHOWN_DIFFERENCES = 5


@dataclass(frozen=True, slots=True)
class ChunksTooLong:
    """Why nothing was stored: the tokens of a chunk, and those of the longest prompt, which are fewer."""

    chunk_tokens: int
    longest_prompt_tokens: int


def summarise(
    engine: Mapping[str, Any],
    without: RunReport | None,
    offloaded: RunReport | None,
    verdict: Comparison | None,
    no_chunk_filled: ChunksTooLong | None = None,
) -> dict[str, Any]:
    """The mapping that ``orlop run --json`` prints. Keys say their unit; None stands for what there is none of."""
    runs = with_ratios({name: figures_of(r) for name, r in (("w", without), ("o", offloaded)) if r is not None})
    return {
        "engine": dict(engine),
        "interrupted": any(report.interrupted for report in (without, offloaded) if report is not None),
        "without_offload": runs.get("w"),
        "with_offload": runs.get("o"),
        "tokens": asdict(verdict) if verdict is not None else None,
        "no_chunk_filled": asdict(no_chunk_filled) if no_chunk_filled is not None else None,
        "stats": dict(offloaded.stats) if offloaded is not None else {},
    }


def figures_of(report: RunReport) -> dict[str, int | float | None]:
    """The figures of one run, in the order in which a table shows them."""
    return {
        "requests": len(report.tokens),
        "prompt_tokens": report.prompt_tokens,
        "computed_tokens": report.computed_tokens,
        "device_hit_tokens": report.device_hit_tokens,
        "loaded_tokens": report.loaded_tokens,
        **{f"{TIER}{tier}": count for tier, count in report.tokens_loaded_by_tier.items()},
        "preemptions": report.preemptions,
        "first_token_p50_s": report.first_token_percentile_s(50),
        "first_token_p95_s": report.first_token_percentile_s(95),
        "total_s": report.total_s,
    }


def with_ratios(runs: Mapping[str, Figures]) -> dict[str, Figures]:
    """The runs, each after the first with its times as parts of those of the first."""
    base = next(iter(runs.values()), {})
    ratios = {
        name: {ratio: _ratio(figures[of], base[of]) for ratio, of in RATIOS.items()}
        for name, figures in runs.items()
        if figures is not base
    }
    return {name: {**figures, **ratios.get(name, {})} for name, figures in runs.items()}


def _ratio(value: int | float | None, base: int | float | None) -> float | None:
    return value / base if value is not None and base else None


def print_summary(summary: Mapping[str, Any]) -> None:
    """The table that ``orlop run`` prints."""
    console = Console(markup=False)
    engine = summary["engine"]
    runs = {"without offload": summary["without_offload"], "with offload": summary["with_offload"]}
    columns: dict[str, Figures] = {name: figures for name, figures in runs.items() if figures is not None}
    if columns:
        console.print(
            table_of(columns, title=f"{engine['num_blocks']} device blocks of {engine['block_tokens']} tokens")
        )
    if (hint := summary["no_chunk_filled"]) is not None:
        console.print(
            f"no chunk was filled: a chunk is {hint['chunk_tokens']} tokens, the longest prompt has "
            f"{hint['longest_prompt_tokens']}; set blocks_per_chunk",
            soft_wrap=True,
        )
    if summary["interrupted"]:
        console.print("stopped: the figures are of what was done until then")
    if summary["tokens"] is not None:
        print_verdict(console, summary["tokens"])


def table_of(columns: Mapping[str, Figures], title: str | None = None) -> Table:
    """One column per run, one row per figure; the run with the most figures names the rows."""
    table = Table(title=title)
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for figure in max(columns.values(), key=len):
        table.add_row(label(figure), *(shown(figure, column.get(figure)) for column in columns.values()))
    return table


def print_verdict(console: Console, tokens: Mapping[str, Any], of: str = "tokens") -> None:
    """Whether two runs agree, and where not."""
    different = tokens["different"]
    console.print(f"{of}: {tokens['equal']} equal, {tokens['ties']} ties, {len(different)} different")
    for d in different[:SHOWN_DIFFERENCES]:
        found = f"generated token {d['position']} is {d['found']}, expected {d['expected']}"
        console.print(f"  {d['request_id']}: {found} (their logits differ by {d['gap']:.2g})")
    if len(different) > SHOWN_DIFFERENCES:
        console.print(f"  and {len(different) - SHOWN_DIFFERENCES} more")


def label(figure: str) -> str:
    if figure.startswith(TIER):
        return f"  from {figure.removeprefix(TIER)}"
    return LABELS.get(figure, figure.replace("_", " "))


def shown(figure: str, value: int | float | None) -> str:
    if value is None:
        return "-"
    if figure in RATIOS:
        return f"{value:.2f}"
    if not figure.endswith("_s"):
        return f"{value:,}"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"
