"""``orlop doctor``: what this machine can give, what the settings ask of it, and whether the two fit.

In: a settings file or none, the environment. Out: one line per check, ``ok``, ``warn`` or ``fail`` with what to do,
the effective settings with their origin, exit code 1 where something failed. Never: a file that stays, a directory
made, a change of anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orlop.cli.disk import check_tier
from orlop.cli.machine import FAIL, OK, WARN, Finding, check_host, check_machine
from orlop.cli.settings import read_settings
from orlop.config import OrlopConfig
from orlop.errors import ConfigError

HEALTHY, UNWELL = 0, 1
STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}


def run_doctor(config: Path | None, as_json: bool) -> int:
    """Check, print; the exit code. Settings that cannot be read are a finding like others."""
    settings, problem = _settings(config)
    findings = [*check_machine(), *problem, *(_check_settings(settings) if settings is not None else ())]
    effective = _effective(settings) if settings is not None else {}
    if as_json:
        print(json.dumps({"findings": [asdict(f) for f in findings], "settings": effective}))
    else:
        _print(findings, effective)
    return UNWELL if any(f.status == FAIL for f in findings) else HEALTHY


def _settings(path: Path | None) -> tuple[OrlopConfig | None, list[Finding]]:
    try:
        mapping = read_settings(path) if path is not None else None
        return OrlopConfig.load(mapping, source=str(path or "environment")), []
    except ConfigError as error:
        return None, [Finding(FAIL, "settings", str(error), "put them right; nothing that depends on them was checked")]


def _check_settings(settings: OrlopConfig) -> Iterator[Finding]:
    try:
        settings.refuse_what_waits_for_an_engine()
        yield Finding(OK, "settings", f"{sum(o != 'default' for o in settings.origins().values())} set, none refused")
    except ConfigError as error:
        yield Finding(FAIL, "settings", str(error), "leave them out")
    yield from check_host(settings.host.bytes)
    for index, tier in enumerate(settings.tiers):
        yield from check_tier(f"tiers.{index}", tier)
    if not settings.tiers:
        yield Finding(OK, "tiers", "none: host memory alone, nothing is kept over a restart")


def _effective(settings: OrlopConfig) -> dict[str, dict[str, Any]]:
    origins = settings.origins()
    return {key: {"value": value, "origin": origins[key]} for key, value in settings.settings().items()}


def _print(findings: list[Finding], effective: dict[str, dict[str, Any]]) -> None:
    console = Console(markup=False)
    width = max(len(f.check) for f in findings)
    for f in findings:
        line = Text.assemble((f"{f.status:4}", STYLES[f.status]), f"  {f.check:{width}}  {f.found}")
        console.print(line, soft_wrap=True)
        if f.advice:
            console.print(Text(f"{'':{width + 6}}  -> {f.advice}"), soft_wrap=True)
    if effective:
        table = Table("setting", "value", "from", title="effective settings", title_justify="left")
        for key, entry in effective.items():
            table.add_row(key, "unset" if entry["value"] is None else str(entry["value"]), entry["origin"])
        console.print()
        console.print(table)
    counts = {status: sum(f.status == status for f in findings) for status in STYLES}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()))
