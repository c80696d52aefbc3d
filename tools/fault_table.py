"""Writes docs/internals/faults.md: which kind of fault is covered by which tests.

In: ``tests/faults.toml``, and the ``@pytest.mark.fault(...)`` marks of the tests and of the suites they inherit,
read from their text. Out: the page; with ``--check`` nothing but a status, 1 where the page is out of date.
Never: an import of a test.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pages import write_page

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "internals" / "faults.md"
DATA = ROOT / "tests" / "faults.toml"
PLACES = (ROOT / "tests", ROOT / "src" / "orlop" / "testing")

INTRODUCTION = """# Kinds of fault, and the tests that rule them out

This page is generated from `tests/faults.toml` and the marks of the tests by `make docs`.

Users of KV-cache offloading, in several systems, have met these faults. Each is a kind, not one incident: a test
that carries its number shows that Orlop behaves rightly where that fault would show. A kind without a test waits
for a part that does not exist yet, does not apply and says why, or is not covered yet.
"""


@dataclass
class Kind:
    """One kind of fault and what is known of it."""

    number: str
    title: str
    category: str
    waits_for: str = ""
    not_applicable: str = ""
    tests: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """covered, in part, waits, not applicable or open."""
        if self.tests:
            return "in part" if self.waits_for else "covered"
        return "waits" if self.waits_for else "not applicable" if self.not_applicable else "open"


def read_kinds(text: str) -> dict[str, Kind]:
    """The kinds of the data file by number. ``ValueError`` where it contradicts itself."""
    data: Mapping[str, Mapping[str, str]] = tomllib.loads(text)
    remarks = ("waits_for", "not_applicable")
    kinds: dict[str, Kind] = {}
    for category, titles in data.items():
        for number, title in titles.items() if category not in remarks else ():
            if number in kinds:
                raise ValueError(f"{number} is in {kinds[number].category!r} and in {category!r}")
            kinds[number] = Kind(number, title, category)
    for remark in remarks:
        for number, text in data.get(remark, {}).items():
            if number not in kinds:
                raise ValueError(f"{remark}: {number} has no title in any category")
            setattr(kinds[number], remark, text)
            if kinds[number].waits_for and kinds[number].not_applicable:
                raise ValueError(f"{number} both waits and does not apply")
    return kinds


def read_marks(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, str]]:
    """``(number, qualified name of the test)`` of every mark, those of a class or a module under its name."""
    for node in ast.iter_child_nodes(tree):
        name = inside
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{inside}::{node.name}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.fault"):
            for argument in node.args:
                if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
                    raise ValueError(f"line {node.lineno}: found {ast.unparse(argument)}, expected a text like 'B137'")
                yield argument.value, inside
        yield from read_marks(node, name)


def collect(kinds: dict[str, Kind]) -> None:
    """Write into each kind the tests that carry its number."""
    for place in PLACES:
        for path in sorted(place.rglob("*.py")):
            where = path.relative_to(ROOT).as_posix()
            for number, name in read_marks(ast.parse(path.read_text(encoding="utf-8"))):
                if number not in kinds:
                    raise ValueError(f"{where}{name} is marked {number}, which tests/faults.toml does not know")
                if where + name not in kinds[number].tests:
                    kinds[number].tests.append(where + name)


def page_of(kinds: Mapping[str, Kind]) -> str:
    """The whole page."""
    states = [kind.state for kind in kinds.values()]
    lines = [
        INTRODUCTION,
        f"Of {len(states)} kinds, {states.count('covered')} are covered, {states.count('in part')} in part, "
        f"{states.count('open')} not yet; {states.count('waits')} wait for a part that does not exist, and "
        f"{states.count('not applicable')} do not apply.",
    ]
    for category in dict.fromkeys(kind.category for kind in kinds.values()):
        lines += [
            "",
            f"## {category[0].upper()}{category[1:]}",
            "",
            "| kind | what happens elsewhere | here |",
            "|---|---|---|",
        ]
        lines += [
            f"| {k.number} | {k.title} | {_said_of(k)} |"
            for k in sorted((k for k in kinds.values() if k.category == category), key=lambda k: k.number)
        ]
    return "\n".join(lines) + "\n"


def _said_of(kind: Kind) -> str:
    said = []
    if kind.tests:
        said.append("<br>".join(f"`{test}`" for test in kind.tests))
    if kind.waits_for:
        said.append(f"{'the rest ' if kind.tests else ''}waits for {kind.waits_for}")
    if kind.not_applicable:
        said.append(f"does not apply: {kind.not_applicable}")
    return "<br>".join(said) or "not covered yet"


def main() -> int:
    kinds = read_kinds(DATA.read_text(encoding="utf-8"))
    collect(kinds)
    page = page_of(kinds)
    return write_page(PAGE, page)


if __name__ == "__main__":
    sys.exit(main())
