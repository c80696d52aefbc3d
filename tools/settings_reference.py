"""Writes docs/reference/settings.md from the schema.

In: ``orlop.config``. Out: the page; with ``--check`` nothing but a status, 1 where the page is out of date.
Never: a key that the schema does not have.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from orlop.config import ENV_PREFIX, TIER_TYPES, DeadlineConfig, HostConfig, OrlopConfig, TierConfig
from pages import write_page

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "settings.md"

INTRODUCTION = """# Settings

This page is generated from the schema in `src/orlop/config.py` by `make docs`; edit there.

One schema serves the library, the command line and an engine's extra configuration. All settings are frozen
once they are read. Sizes are bytes, or texts like `64GB` (powers of 1000) and `64GiB` (powers of 1024). Times
are seconds, or texts like `200ms`, `3s` and `5min`. An unknown key, a wrong type or an impossible relation is
an error that names the key, what was found and what is allowed; all problems are in one message.

Variables of the environment win over the configuration: a key in upper case, dots as underscores, after
`ORLOP_`. A tier of the list is named by its position: `ORLOP_TIERS_0_BYTES`. An unknown `ORLOP_` variable is
an error too.

Short forms:

| short | long |
|---|---|
| `"host": "64GB"` | `"host": {"bytes": "64GB"}` |
SHORT_TIERS
| `"disk": {...}, "files": {...}` | `"tiers": [{"type": "disk", ...}, {"type": "files", ...}]`: in the order they have |

A short form beside a list `tiers` is an error. With no setting at all there is host memory alone, sized by the machine.
`orlop run` without `--config` is a trial, and has settings of its own: host memory of twice the device cache, and a
`files` tier of at most 4 GiB in a temporary directory, or in that of `--files-path`.

The keys of vLLM's own offloading connector are accepted where their meaning is kept: `cpu_bytes_to_use`,
`block_size`, `blocks_per_chunk`, `eviction_policy`, `store_threshold`, `offload_prompt_only` and
`secondary_tiers`. Any other of its keys is an error that says what to write instead. An `fs` tier needs `bytes`
added: no tier here grows without a bound.
"""


def main() -> int:
    short = "\n".join(f'| `"{kind}": {{...}}` | `"tiers": [{{"type": "{kind}", ...}}]` |' for kind in TIER_TYPES)
    page = "\n".join([INTRODUCTION.replace("SHORT_TIERS", short), *_sections()])
    return write_page(PAGE, page)


def _sections() -> list[str]:
    return [
        _section("Top level", OrlopConfig, "", env=True),
        _section("`host`", HostConfig, "host.", env=True),
        _section("Each entry of `tiers`", TierConfig, "", env=False),
        _section("`deadline` of a tier", DeadlineConfig, "deadline.", env=False),
    ]


def _section(title: str, model: type[BaseModel], prefix: str, *, env: bool) -> str:
    head = ["| key | default | meaning |", "|---|---|---|"]
    if env:
        head = ["| key | default | variable | meaning |", "|---|---|---|---|"]
    rows = [_row(name, info, prefix, env=env) for name, info in model.model_fields.items()]
    return "\n".join([f"## {title}", "", *head, *rows, ""])


def _row(name: str, info: FieldInfo, prefix: str, *, env: bool) -> str:
    alias = info.validation_alias
    key = prefix + (alias if isinstance(alias, str) else name)
    cells = [f"`{key}`", _default(name, info)]
    if env:
        cells.append("" if _is_section(info) else f"`{ENV_PREFIX}{key.upper().replace('.', '_')}`")
    cells.append(str(info.description))
    return "| " + " | ".join(cells) + " |"


def _is_section(info: FieldInfo) -> bool:
    return info.default == () or isinstance(info.default, BaseModel)


def _default(name: str, info: FieldInfo) -> str:
    value: Any = info.default
    if info.is_required():
        return "required"
    if _is_section(info):
        return "none" if value == () else "see below"
    if value is None:
        return "`auto`" if name == "blocks_per_chunk" else "unset"
    if name.endswith("_s"):
        return f"{value:g} s"
    if name.endswith("bytes"):
        return f"{value // 1024**2} MiB"
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value}`"


if __name__ == "__main__":
    sys.exit(main())
