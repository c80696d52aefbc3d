"""What runs came to, as a mapping that fits into JSON, and as a table.

In: ``RunReport``s and a ``Comparison``. Out: a mapping; lines on standard output. Never: a figure that the reports
do not hold, or that does not follow from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from orlop.cli.compare import Comparison
from orlop.cli.replay import RunReport, RunRequest

Figures = Mapping[str, int | float | None]

LABELS = {
    "requests": "requests that ended",
    "requests_stopped": "requests stopped on the way",
    "generated_tokens": "tokens generated",
    "needed_tokens": "tokens needed",
    "repeated_tokens": "tokens again or unused",
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
HOW_IT_ADDS_UP = (
    "needed: prompts and answers, but the last token of each; computed + found + loaded = needed + again or unused"
)


@dataclass(frozen=True, slots=True)
class NothingLoaded:
    """Why nothing was loaded. ``short_prompts``: none has a whole chunk and a token that is computed after it.

    ``on_device``: what was asked for again was there. ``all_new``: no prompt begins with a chunk that was stored.
    """

    why: Literal["short_prompts", "on_device", "all_new"]
    chunk_tokens: int
    longest_prompt_tokens: int

    @classmethod
    def of(cls, report: RunReport, requests: Sequence[RunRequest], chunk_tokens: int) -> NothingLoaded | None:
        """None where something was loaded, or would have been later in a run that was stopped."""
        longest = max(len(r.prompt) for r in requests)
        if report.loaded_tokens:
            return None
        if longest <= chunk_tokens:
            return cls("short_prompts", chunk_tokens, longest)
        if report.interrupted:
            return None
        return cls("on_device" if report.device_hit_tokens else "all_new", chunk_tokens, longest)


@dataclass(frozen=True, slots=True)
class Scaled:
    """A trace that is run smaller or larger than it was recorded: tokens of all its prompts, and to generate."""

    recorded_prompt_tokens: int
    prompt_tokens: int
    recorded_output_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, requests: Sequence[RunRequest]) -> Scaled | None:
        """None where prompts and answers are as long as recorded, or were not recorded."""
        recorded = [r.recorded or (len(r.prompt), r.max_tokens) for r in requests]
        prompts, outputs = (sum(tokens) for tokens in zip(*recorded, strict=True))
        scaled = cls(prompts, sum(len(r.prompt) for r in requests), outputs, sum(r.max_tokens for r in requests))
        return scaled if (scaled.prompt_tokens, scaled.output_tokens) != (prompts, outputs) else None


def summarise(
    engine: Mapping[str, Any],
    without: RunReport | None,
    offloaded: RunReport | None,
    verdict: Comparison | None,
    nothing_loaded: NothingLoaded | None = None,
    scaled: Scaled | None = None,
) -> dict[str, Any]:
    """The mapping that ``orlop run --json`` prints. Keys say their unit; None stands for what there is none of."""
    runs = with_ratios({name: figures_of(r) for name, r in (("w", without), ("o", offloaded)) if r is not None})
    return {
        "engine": dict(engine),
        "interrupted": any(report.interrupted for report in (without, offloaded) if report is not None),
        "without_offload": runs.get("w"),
        "with_offload": runs.get("o"),
        "tokens": asdict(verdict) if verdict is not None else None,
        "nothing_loaded": asdict(nothing_loaded) if nothing_loaded is not None else None,
        "trace": asdict(scaled) if scaled is not None else None,
        "stats": dict(offloaded.stats) if offloaded is not None else {},
    }


def figures_of(report: RunReport) -> dict[str, int | float | None]:
    """The figures of one run, in the order in which a table shows them."""
    return {
        "requests": len(report.tokens),
        "requests_stopped": report.stopped,
        "prompt_tokens": report.prompt_tokens,
        "generated_tokens": report.generated_tokens,
        "needed_tokens": report.needed_tokens,
        "repeated_tokens": report.repeated_tokens,
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
    for line in (_on_scale(summary["trace"]), _on_nothing_loaded(summary["nothing_loaded"])):
        if line:
            console.print(line, soft_wrap=True, highlight=False)
    if summary["interrupted"]:
        console.print(
            "stopped: the figures are of what was done until then, also for requests that did not end", soft_wrap=True
        )
    if summary["tokens"] is not None:
        print_verdict(console, summary["tokens"])


def _on_scale(trace: Mapping[str, int] | None) -> str:
    if trace is None:
        return ""
    parts = []
    if trace["prompt_tokens"] != trace["recorded_prompt_tokens"]:
        parts.append(
            f"{trace['prompt_tokens']:,} prompt tokens for its {trace['recorded_prompt_tokens']:,} "
            "(--tokens-per-trace-block)"
        )
    if trace["output_tokens"] != trace["recorded_output_tokens"]:
        parts.append(
            f"{trace['output_tokens']:,} tokens to generate for its {trace['recorded_output_tokens']:,} (--max-output)"
        )
    return f"the trace is scaled: {', '.join(parts)}"


def _on_nothing_loaded(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    reasons = {
        "short_prompts": f"a chunk is {found['chunk_tokens']} tokens and the longest prompt has "
        f"{found['longest_prompt_tokens']}, expected more than a chunk; give longer prompts (of a trace: "
        "--tokens-per-trace-block) or lower blocks_per_chunk in --config",
        "on_device": "what was asked for again was still on the device; lower --device-blocks, or run it again on a "
        "tier that stays (--config, --files-path)",
        "all_new": "no prompt begins with a chunk that was stored; run it again on a tier that stays (--config, "
        "--files-path)",
    }
    return f"nothing was loaded: {reasons[found['why']]}"


def table_of(columns: Mapping[str, Figures], title: str | None = None) -> Table:
    """One column per run, one row per figure; the run with the most figures names the rows."""
    table = Table(title=title, caption=HOW_IT_ADDS_UP)
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for figure in max(columns.values(), key=len):
        if figure == "requests_stopped" and not any(column.get(figure) for column in columns.values()):
            continue
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
