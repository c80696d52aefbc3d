"""The demo's figures as a picture: where each way's prompt tokens came from, and how long the first token took.

In: figures by way. Out: one SVG as text, that any browser and any README shows. Never: a package for it: two rows of
bars are a few rectangles, and a plotting library is larger than the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from xml.sax.saxutils import escape

from orlop.cli.summary import TIER, Figures

WIDTH, LEFT, RIGHT, BAR, GAP = 720, 90, 130, 22, 12
COLORS = {"computed": "#b5443c", "device": "#8a8f98", "host": "#3b77b5", "files": "#4f9d69", "time": "#b58b3c"}
FONT = 'font-family="sans-serif" font-size="13"'


def chart(runs: Mapping[str, Figures]) -> str:
    """``runs``: by the name of the way what ``summary.figures_of`` gives."""
    parts = {name: _parts(figures) for name, figures in runs.items()}
    rows = [(name, list(p.items()), f"{p['computed']:,} computed") for name, p in parts.items()]
    tokens, height = _bars("prompt tokens: computed, or found where", rows, 20)
    legend, height = _legend(height)
    times = {name: (figures.get("first_token_p50_s") or 0.0) * 1e3 for name, figures in runs.items()}
    rows = [(name, [("time", ms)], f"{ms:.1f} ms") for name, ms in times.items()]
    bars, height = _bars("time to first token, median", rows, height + 20)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">'
    ground = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    return "\n".join([head, ground, *tokens, *legend, *bars, "</svg>"]) + "\n"


def _parts(figures: Figures) -> dict[str, float]:
    loaded = {name.removeprefix(TIER): value or 0 for name, value in figures.items() if name.startswith(TIER)}
    return {
        "computed": figures["computed_tokens"] or 0,
        "device": figures["device_hit_tokens"] or 0,
        "host": loaded.pop("host", 0),
        "files": sum(loaded.values()),
    }


def _bars(title: str, rows: list[tuple[str, list[tuple[str, float]], str]], top: int) -> tuple[list[str], int]:
    """One bar of coloured parts per row, all on one scale; the lines, and where the next thing may begin."""
    lines = [_text(LEFT, top, title, weight="bold")]
    most = max((sum(value for _, value in values) for _, values, _ in rows), default=0) or 1
    scale, y = (WIDTH - LEFT - RIGHT) / most, top + GAP
    for name, values, note in rows:
        lines.append(_text(LEFT - 8, y + BAR - 6, name, anchor="end"))
        x = float(LEFT)
        for kind, value in values:
            width = value * scale
            lines.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{COLORS[kind]}"/>')
            x += width
        lines.append(_text(x + 6, y + BAR - 6, note))
        y += BAR + GAP
    return lines, y


def _legend(top: int) -> tuple[list[str], int]:
    lines, x = [], LEFT
    for kind in ("computed", "device", "host", "files"):
        lines.append(f'<rect x="{x}" y="{top}" width="12" height="12" fill="{COLORS[kind]}"/>')
        lines.append(_text(x + 18, top + 11, kind))
        x += 110
    return lines, top + 30


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y}" {FONT} font-weight="{weight}" text-anchor="{anchor}">{escape(text)}</text>'
