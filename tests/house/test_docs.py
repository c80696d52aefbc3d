"""What is written about the project is true: commands exist, generated pages are fresh, no page leads nowhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TEXTS = [
    path
    for folder in ("src", "tests", "tools", "bench", "docs", "examples", ".ci")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.is_file() and path.suffix in ("", ".py", ".md", ".toml", ".txt", ".json", ".yml")
] + [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_make_command_in_a_page_exists(page: Path) -> None:
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", page.read_text(encoding="utf-8"), re.DOTALL))
    named = set(re.findall(r"\bmake ([a-z][\w-]*)", code))
    assert named <= makefile_targets(), f"{page.name} names {sorted(named - makefile_targets())}"


def test_the_readme_begins_with_two_commands_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"```\w*\nmake demo\nmake test\n```", readme)


def test_the_check_calls_only_what_exists() -> None:
    called = set(re.findall(r"^make ([\w-]+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"test", "lint", "types", "demo", "test-vllm-scheduler"} <= called <= makefile_targets()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("tool", ["settings_reference", "metrics_reference", "fault_table"])
def test_a_generated_page_is_up_to_date(tool: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / f"{tool}.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_no_file_names_a_machine() -> None:
    """Paths of a developer's machine mean nothing anywhere else."""
    machine = re.compile(r"(?<![\w.])/" + r"(?:work|home|root|Users)/\w")
    wrong = []
    for path in TEXTS:
        text = path.read_text(encoding="utf-8", errors="replace")
        wrong += [f"{path.relative_to(ROOT)}: {m.group()}" for m in machine.finditer(text)]
    assert not wrong, "\n".join(wrong)


def test_the_example_of_the_readme_is_accepted() -> None:
    from orlop.config import OrlopConfig

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```json\n(.*?)```", readme, re.DOTALL)
    assert examples
    for example in examples:
        assert OrlopConfig.load(json.loads(example), environ={}).tiers


def make_would(*arguments: str) -> str:
    """What make would run, without running it."""
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_pytorch_comes_from_the_index_that_is_named_and_from_that_of_all_else_otherwise() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [named] = re.findall(r"`make demo (TORCH_INDEX=[^`]*)`", readme)
    [option] = re.findall(r"--index-url \S+ torch==[\d.]+$", make_would("demo", named), re.MULTILINE)
    assert option.split()[1] == named.partition("=")[2]
    assert "index-url" not in make_would("demo")


@pytest.mark.parametrize("example", ["prompts.jsonl", "settings.json", "trace.jsonl"])
def test_every_example_is_named_where_a_reader_looks_and_is_packed(example: str) -> None:
    assert f"examples/{example}" in (ROOT / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "examples" in project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]


def test_the_short_forms_of_settings_are_what_the_page_says() -> None:
    from orlop.config import TIER_TYPES, OrlopConfig

    page = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\".*?)` \| `(\".*?)`(?::.*)? \|$", page, re.MULTILINE)
    assert len(rows) == len(TIER_TYPES) + 2
    for row in rows:
        filled = [re.sub(r'"(\w+)": \{\.\.\.\}', r'"\1": {"path": "\1", "bytes": "1GB"}', text) for text in row]
        filled = [
            re.sub(r'"type": "(\w+)", \.\.\.', r'"type": "\1", "path": "\1", "bytes": "1GB"', text) for text in filled
        ]
        short, long = (OrlopConfig.load(json.loads("{" + text + "}"), environ={}) for text in filled)
        assert short == long, row


def test_the_package_needs_neither_torch_nor_vllm() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {re.split(r"[<>=\[ ]", line)[0] for line in project["dependencies"]}
    assert not needed & {"torch", "vllm", "obstore", "valkey-glide-sync"}


def test_the_vllm_environment_installs_what_the_package_needs() -> None:
    """It installs the package without dependencies, so that nothing of vLLM's own set moves."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in project["dependencies"]:
        assert f"'{line}'" in makefile
