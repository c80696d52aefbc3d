"""The table of fault kinds: complete in the categories that matter first, and read rightly from the tests."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]

FIRST = [
    "lifecycle: preemption",
    "lifecycle: finish and abort",
    "lifecycle: reset",
    "block reuse race",
    "lookup and hash",
    "lookup and scheduling stalls",
    "capacity and eviction",
    "secondary tier failure",
    "memory leaks",
    "shutdown and restart",
]
NUMBERS = """
B001 B002 B003 B004 B005 B006 B007 B008 B009 B010 B015 B016 B018 B019 B020 B021 B022 B024 B027 B028 B030 B032 B033
B034 B035 B036 B037 B039 B042 B043 B046 B047 B048 B049 B050 B053 B054 B055 B056 B057 B058 B059 B060 B061 B062 B063
B067 B091 B092 B093 B095 B096 B097 B098 B099 B100 B104 B105 B106 B137 B139 B141 B142 B145 B146 B147 B148 B149 B150
B194 B195 B197 B199 B202 B204 B205 B207 B208
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fault_table", ROOT / "tools" / "fault_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_kind_of_the_first_categories_has_an_entry(tool: ModuleType) -> None:
    kinds = tool.read_kinds((ROOT / "tests" / "faults.toml").read_text(encoding="utf-8"))
    assert [number for number, kind in kinds.items() if kind.category in FIRST] == NUMBERS.split()
    assert all(kind.title and kind.title == kind.title.strip(" .") for kind in kinds.values())


def test_marks_are_found_on_functions_classes_modules_and_parameters(tool: ModuleType) -> None:
    text = """
pytestmark = [pytest.mark.fault("B001")]

@pytest.mark.fault("B002", "B003")
def test_a(): ...

@mark.fault("B004")
class TestB:
    @pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.fault("B005"))])
    @pytest.mark.crash
    def test_c(self): ...
"""
    assert sorted(tool.read_marks(ast.parse(text))) == [
        ("B001", ""),
        ("B002", "::test_a"),
        ("B003", "::test_a"),
        ("B004", "::TestB"),
        ("B005", "::TestB::test_c"),
    ]
    with pytest.raises(ValueError, match="expected a text"):
        list(tool.read_marks(ast.parse("pytest.mark.fault(number)")))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[a]\nB1 = "x"\n[b]\nB1 = "y"', "is in 'a' and in 'b'"),
        ('[waits_for]\nB1 = "x"', "has no title"),
        ('[a]\nB1 = "x"\n[waits_for]\nB1 = "x"\n[not_applicable]\nB1 = "x"', "both waits and does not apply"),
    ],
)
def test_a_data_file_that_contradicts_itself_is_refused(tool: ModuleType, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tool.read_kinds(text)


def test_the_page_says_of_each_kind_how_it_stands(tool: ModuleType) -> None:
    kinds = tool.read_kinds(
        '[a]\nB1 = "x"\nB2 = "y"\nB3 = "z"\nB4 = "u"\n[waits_for]\nB2 = "p"\n[not_applicable]\nB3 = "q"'
    )
    kinds["B1"].tests.append("tests/t.py::test")
    page = tool.page_of(kinds)
    assert "| B1 | x | `tests/t.py::test` |" in page
    assert "| B2 | y | waits for p |" in page
    assert "| B3 | z | does not apply: q |" in page
    assert "| B4 | u | not covered yet |" in page
    assert (
        "Of 4 kinds, 1 are covered, 0 in part, 1 not yet; 1 wait for a part that does not exist, and 1 do not apply."
        in page
    )
