"""Every setting has a consequence: what the schema accepts, something outside of it reads."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from orlop.config import DeadlineConfig, HostConfig, OrlopConfig, TierConfig

SRC = Path(__file__).parents[2] / "src" / "orlop"
OWNERS = {"config": OrlopConfig, "host": HostConfig, "tier": TierConfig, "deadline": DeadlineConfig}
"""How code calls what it reads a field from: ``tier.path``, ``self.config.host.bytes``."""

NOT_READ = {
    "config.weights": "for an engine whose weights are files; the one value that joins is what such an engine does",
}


def reads_in(tree: ast.AST) -> set[str]:
    """``owner.field`` of every attribute that is read from a name, or an attribute, of the owner's name."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            found.add(f"{owner}.{node.attr}")
    return found


@pytest.fixture(scope="module")
def reads() -> set[str]:
    paths = [path for path in SRC.rglob("*.py") if path != SRC / "config.py" and "testing" not in path.parts]
    return set().union(*(reads_in(ast.parse(path.read_text(encoding="utf-8"))) for path in paths))


FIELDS = [f"{owner}.{name}" for owner, model in OWNERS.items() for name in model.model_fields]


@pytest.mark.parametrize("field", FIELDS)
def test_every_setting_is_read_or_there_is_a_reason(field: str, reads: set[str]) -> None:
    if field in NOT_READ:
        assert field not in reads, f"{field} is read now: take it from the list"
    else:
        assert field in reads, f"{field} is accepted and nothing reads it: honour it, refuse it, or name the reason"


def test_the_judge_tells_what_is_read() -> None:
    assert reads_in(ast.parse("x(self.config.host.bytes, tier.path); tier = 3")) == {
        "self.config",
        "config.host",
        "host.bytes",
        "tier.path",
    }
    assert NOT_READ.keys() <= set(FIELDS)
