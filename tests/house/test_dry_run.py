"""The judge of what a wheel changes in an environment: what is there may not move, what is new may come."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "dry_run_of_wheel.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dry_run_of_wheel", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(*packages: tuple[str, str]) -> dict[str, object]:
    return {"install": [{"metadata": {"name": name, "version": version}} for name, version in packages]}


def test_what_is_there_may_not_move_and_what_is_new_may_come(tool: ModuleType) -> None:
    installed = {"numpy": "2.1.0", "Typing_Extensions": "4.0", "orlop": "0.1"}
    assert tool.sort_out(report(("orlop", "0.2")), installed) == ([], [])
    assert tool.sort_out(report(("orlop", "0.2"), ("xxhash", "3.5")), installed) == (["xxhash 3.5"], [])
    assert tool.sort_out(report(("numpy", "2.2.0"), ("typing.extensions", "5.0")), installed) == (
        [],
        ["numpy 2.1.0 -> 2.2.0", "typing-extensions 4.0 -> 5.0"],
    )
