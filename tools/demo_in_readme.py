"""Run the demo, and put its table into README.md and its picture beside it.

In: this machine. Out: docs/demo.svg and the lines between the two markers of README.md. Never: a figure by hand.

    python tools/demo_in_readme.py
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from orlop.cli.summary import RATIOS, TIER, label, shown

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- demo -->\n", "<!-- end of demo -->\n"
LEFT_OUT = {"requests", "preemptions", "loaded_tokens"}


def main() -> int:
    command = [sys.executable, "-m", "orlop", "demo", "--json", "--plot", str(ROOT / "docs" / "demo.svg")]
    load = os.getloadavg()[0]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return done.returncode
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    text = "\n".join(lines_of(json.loads(done.stdout), load)) + "\n"
    readme.write_text(before + BEGIN + text + END + after, encoding="utf-8")
    return 0


def lines_of(demo: Mapping[str, Any], load: float) -> Iterator[str]:
    """A table in Markdown, and where it was made."""
    ways = demo["ways"]
    yield "| | " + " | ".join(way["name"] for way in ways) + " |"
    yield "|---|" + "---:|" * len(ways)
    figures = [name for name in ways[-1] if (name.endswith(("_tokens", "_s")) or name in RATIOS or TIER in name)]
    for name in figures:
        if name not in LEFT_OUT:
            yield f"| {label(name).strip()} | " + " | ".join(shown(name, way.get(name)) for way in ways) + " |"
    yield ""
    system = f"{platform.system()} {platform.release().split('-')[0]}, Python {platform.python_version()}"
    yield (
        f"`orlop demo` on {os.cpu_count()} cores, {system}, {date.today()}, load average before it {load:.0f}; "
        "renewed by `make readme`."
    )


if __name__ == "__main__":
    sys.exit(main())
