"""What README.md shows of prompts, traces, the engine and the commands is as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from typer.main import get_command

from orlop.cli.main import EXAMPLE_LINE, app
from orlop.cli.prompts import read_prompts
from orlop.cli.traces import LMCACHE_AGENT, MOONCAKE, read_lines

README = Path(__file__).parents[2] / "README.md"


def examples(language):
    """The examples in ``language``, in the order in which they stand there."""
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_example_lines_are_one_of_each_format(tmp_path):
    path = tmp_path / "trace"
    path.write_text(examples("jsonl")[1])
    assert [line.format for line in read_lines(path)] == [MOONCAKE, LMCACHE_AGENT]


def test_the_example_prompts_are_one_of_each_kind(tmp_path):
    path = tmp_path / "prompts"
    path.write_text(examples("jsonl")[0])
    requests = read_prompts(path, limit=None, max_output=5, encode=lambda text: list(text.encode()))
    assert [(r.request_id, r.max_tokens) for r in requests] == [("line-1", 5), ("line-2", 5), ("second", 8)]


def test_every_command_and_option_that_is_shown_exists():
    shown = [line for block in examples("sh") for line in block.splitlines() if "orlop " in line]
    shown += re.findall(r"`orlop ([^`]*)`", README.read_text().replace("\n", " "))
    commands = get_command(app).commands
    for line in shown:
        words = line.partition("orlop ")[2].split("#")[0].split() if "bin/orlop" in line else line.split()
        command = commands[words[0].strip(",")]
        if hasattr(command, "commands") and len(words) > 1:
            command = command.commands[words[1]]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, line


def test_the_picture_of_the_demo_and_its_table_are_of_one_run():
    picture = (README.parent / "docs" / "demo.svg").read_text()
    row = re.search(r"\| tokens computed +\|(.*)\|", README.read_text())
    figures = [cell.strip() for cell in row[1].split("|")]
    assert len(figures) == 4
    for figure in figures:
        assert f">{figure} computed<" in picture


def test_the_example_in_the_help_is_a_line_of_a_trace(tmp_path):
    path = tmp_path / "trace"
    path.write_text(EXAMPLE_LINE)
    assert [line.hash_ids for line in read_lines(path)] == [(0, 1, 2)]


def test_the_python_example_generates(tmp_path):
    program = tmp_path / "example.py"  # a file: a started process may import the main module again
    (text,) = examples("python")
    program.write_text(text)
    done = subprocess.run(
        [sys.executable, "-W", "error", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"(\((\d+, ){7}\d+\)\n){2}", done.stdout)
