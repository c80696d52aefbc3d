"""Whether installing a wheel into an environment would change a package that is there.

In: the environment's Python, a wheel. Out: what pip would install, exit code 1 where that replaces anything but the
wheel's own package. Never: an installation.

    python tools/dry_run_of_wheel.py .venv-vllm/bin/python dist/orlop-*.whl
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

OURS = "orlop"


def main(python: str, wheel: str) -> int:
    installed = {p["name"]: p["version"] for p in json.loads(_pip(python, "list", "--format", "json"))}
    report = json.loads(_pip(python, "install", "--quiet", "--dry-run", "--report", "-", wheel))
    added, changed = sort_out(report, installed)
    print(f"{len(installed)} packages are there; added would be: {', '.join(added) or 'none'}")
    for line in changed:
        print(f"changed would be: {line}")
    return 1 if changed else 0


def sort_out(report: Mapping[str, Any], installed: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """What pip's report adds to the installed packages (name to version), and what it changes among them."""
    there = {_normal(name): found for name, found in installed.items()}
    added, changed = [], []
    for item in report["install"]:
        name, wanted = _normal(item["metadata"]["name"]), item["metadata"]["version"]
        if name == OURS:
            continue
        if name in there:
            changed.append(f"{name} {there[name]} -> {wanted}")
        else:
            added.append(f"{name} {wanted}")
    return added, changed


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pip(python: str, *arguments: str) -> str:
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"found {len(sys.argv) - 1} arguments, expected a Python and a wheel")
    sys.exit(main(*sys.argv[1:]))
