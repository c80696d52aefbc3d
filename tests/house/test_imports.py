"""Imports run one way, guests come late, and every file has a sign on its door."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
MODULES = {
    ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SRC.rglob("*.py"))
}

# --- which arrows there may be ------------------------------------------------------------------------
# The first entry whose name is the module's, or begins it, is its rule; what it may import is a list of the
# same kind of names. A module may import its own folder besides.

WORDS = ["orlop.core", "orlop.counting", "orlop.errors", "orlop.background"]
CONTRACTS = [
    *WORDS,
    "orlop.config",
    "orlop.tiering.base",
    "orlop.tiering.envelope",
    "orlop.tiering.key_index",
    "orlop.worker.base",
]
JOINED = [*CONTRACTS, "orlop.scheduler", "orlop.host", "orlop.worker", "orlop.tiering", "orlop.stores"]
ARROWS = {
    "orlop.core": [],
    "orlop.counting": [],
    "orlop.errors": [],
    "orlop.background": [],
    "orlop.config": WORDS,
    "orlop.tiering.base": WORDS,
    "orlop.tiering.envelope": WORDS,
    "orlop.tiering.key_index": WORDS,
    "orlop.worker.base": WORDS,
    "orlop.scheduler": CONTRACTS,
    "orlop.host": CONTRACTS,
    "orlop.worker": CONTRACTS,
    "orlop.stores": [*CONTRACTS, "orlop.host.policies"],
    "orlop.tiering.io_process": [*CONTRACTS, "orlop.host", "orlop.tiering", "orlop.stores"],
    "orlop.tiering": [*CONTRACTS, "orlop.host"],
    "orlop.connector": JOINED,
    "orlop.engine": [*JOINED, "orlop.connector"],
    "orlop.testing": [*JOINED, "orlop.connector", "orlop.engine"],
    "orlop.sim": [*JOINED, "orlop.connector", "orlop.testing"],
    "orlop.observe": JOINED,
    "orlop.vllm": [*JOINED, "orlop.connector", "orlop.observe"],
    "orlop.cli": ["orlop"],
    "orlop.__main__": ["orlop.cli"],
    "orlop": [*CONTRACTS, "orlop.connector", "orlop.engine"],
}
NOBODYS = ["orlop.tiering.io_process"]
"""Started as a program, imported by nobody; by name it may be looked up."""

# --- which guests, and where --------------------------------------------------------------------------

PURE = [
    "orlop.scheduler",
    "orlop.host.slots",
    "orlop.host.tier",
    "orlop.tiering.manager",
    "orlop.tiering.admission",
    "orlop.tiering.write_back",
]
NOT_PURE = {"time", "threading", "socket", "os", "torch", "random", "io", "pathlib", "subprocess", "asyncio", "secrets"}
GUESTS = {
    "torch": ["orlop.worker", "orlop.engine", "orlop.testing", "orlop.cli", "orlop.vllm"],
    "vllm": ["orlop.vllm"],
    "obstore": ["orlop.stores.objects"],
    "glide_sync": ["orlop.stores.valkey"],
    "pydantic": ["orlop.config"],
    "typer": ["orlop.cli"],
    "rich": ["orlop.cli"],
    "prometheus_client": ["orlop.observe", "orlop.cli", "orlop.vllm"],
    "tokenizers": ["orlop.engine", "orlop.cli", "orlop.testing"],
    "safetensors": ["orlop.engine", "orlop.testing"],
}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imports_of(module: str) -> Iterator[tuple[str, int]]:
    """Dotted names that a module imports anywhere in its text, and the lines; for typing alone does count."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: found a relative import, expected the full name"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield (name if name in MODULES else str(node.module)), node.lineno


def within(module: str, place: str) -> bool:
    return module == place or module.startswith(place + ".")


def rule_of(module: str) -> str:
    fitting = [place for place in ARROWS if within(module, place) and (place != "orlop" or module == "orlop")]
    assert fitting, f"{module} has no rule: add it to ARROWS and to the picture in docs/internals/architecture.md"
    return max(fitting, key=len)


def allowed(module: str, target: str) -> bool:
    rule = rule_of(module)
    if any(within(target, place) and not within(module, place) for place in NOBODYS):
        return False
    return within(target, rule) or any(within(target, place) for place in ARROWS[rule])


@pytest.mark.parametrize("module", MODULES)
def test_imports_of_ours_run_one_way(module: str) -> None:
    wrong = [
        f"{MODULES[module]}:{line}: {module} may not import {target}"
        for target, line in imports_of(module)
        if within(target, "orlop") and not allowed(module, target)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", [m for m in MODULES if any(within(m, place) for place in PURE)])
def test_what_decides_has_no_clock_thread_file_socket_or_chance(module: str) -> None:
    wrong = [f"line {line}: {name}" for name, line in imports_of(module) if name.split(".")[0] in NOT_PURE]
    assert not wrong, f"{module} imports {wrong}: pass time, randomness and bytes in"


@pytest.mark.parametrize("module", MODULES)
def test_guests_stay_in_their_rooms(module: str) -> None:
    for name, line in imports_of(module):
        rooms = GUESTS.get(name.split(".")[0])
        assert rooms is None or any(within(module, room) for room in rooms), (
            f"{MODULES[module]}:{line}: {module} imports {name}, which is at home in {rooms}"
        )


def test_the_arrows_tell_right_from_wrong() -> None:
    """The judge itself: a rule that allows everything would pass every other test here."""
    assert allowed("orlop.tiering.manager", "orlop.host.tier")
    assert allowed("orlop.tiering.io_process", "orlop.stores.files")
    assert allowed("orlop.scheduler.fences", "orlop.scheduler.request")
    assert not allowed("orlop.core", "orlop.errors")
    assert not allowed("orlop.host.tier", "orlop.tiering.manager")
    assert not allowed("orlop.stores.files", "orlop.host.region")
    assert not allowed("orlop.scheduler.stores", "orlop.host.tier")
    assert not allowed("orlop.tiering.runner", "orlop.stores.files")
    assert not allowed("orlop.tiering.runner", "orlop.tiering.io_process")
    assert not allowed("orlop.cli.main", "orlop.tiering.io_process")


# --- signs and the front door ------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES)
def test_every_file_has_a_sign_on_its_door(module: str) -> None:
    tree = tree_of(module)
    if not tree.body:
        assert MODULES[module].name == "__init__.py", f"{module} is empty"
        return
    sign = ast.get_docstring(tree)
    assert sign, f"{module} has no docstring"
    if MODULES[module].name not in ("__init__.py", "__main__.py"):
        for word in ("In:", "Out:", "Never:"):
            assert word in sign, f"the docstring of {module} does not say {word!r}"


def test_importing_the_package_pulls_in_neither_torch_nor_pydantic() -> None:
    program = (
        "import sys, orlop; orlop.EngineSpec; dir(orlop);"
        "heavy = {'torch', 'pydantic', 'vllm', 'typer', 'rich', 'prometheus_client'} & set(sys.modules);"
        "sys.exit(f'pulled in {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there_and_nothing_else_is() -> None:
    import orlop

    assert sorted(orlop.__all__) == sorted({*orlop._HOMES, "__version__"})
    for name in orlop.__all__:
        assert getattr(orlop, name) is not None
    assert dir(orlop) == sorted(orlop.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        orlop.nonsense  # noqa: B018


def test_the_types_of_public_names_come_from_the_same_homes() -> None:
    """``TYPE_CHECKING`` imports and the table of homes say the same, so that type checkers are not lied to."""
    import orlop

    typed = {
        alias.name: node.module
        for node in ast.walk(tree_of("orlop"))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("orlop")
        for alias in node.names
    }
    assert typed == orlop._HOMES
