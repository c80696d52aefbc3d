"""What README.md shows of prompts, traces, the engine and the commands is as it stands there.

Every command in it runs, in its order, in one folder: but for `make demo` and `make test`, which are `orlop demo`,
tested by itself, and this.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_processes import TIMEOUT_S, orlop, rows_of
from patience import PATIENT_ENVIRON
from typer.main import get_command

from orlop.cli.main import EXAMPLE_LINE, app
from orlop.cli.prompts import read_prompts
from orlop.cli.traces import LMCACHE_AGENT, MOONCAKE, read_lines
from orlop.config import OrlopConfig

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
EXAMPLES = ROOT / "examples"


def examples(language):
    """The examples in ``language``, in the order in which they stand there."""
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each command of the page printed, in a folder that has what a checkout has after `make setup`."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "examples").symlink_to(EXAMPLES)
    commands = [line for block in examples("sh") for line in block.splitlines() if not line.startswith("make ")]
    assert len(commands) == 10
    assert all(line.startswith(".venv/bin/") for line in commands)
    outputs = []
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=os.environ | PATIENT_ENVIRON,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        may_fail = " doctor " in command  # this machine may lack something; its exit code is that of what it says
        assert done.returncode == 0 or (may_fail and "fail  " in done.stdout), command + done.stdout + done.stderr
        outputs.append((command, done.stdout))
    return outputs


def printed_by(said, part):
    return [out for command, out in said if part in command]


def test_the_first_command_shows_tokens_that_were_loaded(said):
    first = rows_of(said[0][1])
    assert first["tokens loaded"][1] == first["from host"][1] + first["from 0:files"][1] > 0
    assert "tokens: 4 equal, 0 ties, 0 different" in said[0][1]
    assert re.search(
        r"\nthe trace is scaled: \d+ prompt tokens for its 17,000 \(--tokens-per-trace-block\), 16 ", said[0][1]
    )


def test_the_second_run_of_the_prompts_starts_from_the_tier_of_the_first(said):
    first, second = map(rows_of, printed_by(said, "--prompts"))
    assert first["from host"][1] > 0
    assert first["from 0:disk"][1] == 0
    assert second["from 0:disk"][1] > 0
    assert second["tokens computed"][1] < first["tokens computed"][1]


def test_the_commands_on_a_store_see_what_the_runs_have_stored(said):
    [seen], [verified], [cleared] = (printed_by(said, f"store {name}") for name in ("inspect", "verify", "clear"))
    chunks = int(re.search(r"1 namespaces, (\d+) chunks", seen)[1])
    assert chunks > 0
    assert re.fullmatch(rf" +{chunks}  ok\n", verified)
    assert cleared == f"removed {chunks} chunks\n"


def test_the_example_lines_are_those_of_the_file_and_of_each_format():
    assert examples("jsonl")[1] == (EXAMPLES / "trace.jsonl").read_text()
    formats = [line.format for line in read_lines(EXAMPLES / "trace.jsonl")]
    assert formats == [MOONCAKE, MOONCAKE, MOONCAKE, LMCACHE_AGENT]


def test_the_example_settings_are_those_of_the_file():
    assert examples("json")[0] == (EXAMPLES / "settings.json").read_text()


def test_prompts_as_short_as_those_that_are_shown_are_said_to_load_nothing(tmp_path):
    path = tmp_path / "prompts"
    path.write_text(examples("jsonl")[0].splitlines()[1])
    assert "\nnothing was loaded: a chunk is " in orlop("run", "--prompts", path, "--no-compare").stdout


def test_with_no_setting_there_is_host_memory_alone_and_a_run_without_config_has_files(tmp_path):
    """Both are said in the page and in the help."""
    settings = OrlopConfig.load({}, environ={})
    assert (settings.tiers, settings.host.bytes) == ((), None)
    (tmp_path / "none.json").write_text("{}")
    options = ("run", "--trace", EXAMPLES / "trace.jsonl", "--no-compare", "--json")
    bare, empty = (json.loads(orlop(*options, *more).stdout) for more in ((), ("--config", tmp_path / "none.json")))
    assert bare["stats"]["store_limit_bytes 0:files"] == 4 * 2**30
    device_bytes = bare["engine"]["num_blocks"] * 16 * 1024
    assert bare["stats"]["slots"] * bare["stats"]["slot_bytes"] == max(2 * device_bytes, 2**20)
    assert not [name for name in empty["stats"] if "0:files" in name]
    for text in (README.read_text(), orlop("run", "--help").stdout):
        assert re.search(r"twice the\s+device\s+cache", text)
        assert re.search(r"4\s?GiB", text)


def test_the_example_prompts_are_one_of_each_kind(tmp_path):
    path = tmp_path / "prompts"
    path.write_text(examples("jsonl")[0])
    requests = read_prompts(path, limit=None, max_output=5, encode=lambda text: list(text.encode()))
    assert [(r.request_id, r.max_tokens) for r in requests] == [("line-1", 5), ("line-2", 5), ("second", 8)]


def test_every_command_and_option_that_is_shown_exists():
    shown = [line for block in examples("sh") for line in block.splitlines() if "orlop " in line]
    shown += re.findall(r"`(?:\.venv/bin/)?orlop ([^`]*)`", README.read_text().replace("\n", " "))
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
    loaded = re.findall(r"\((?:\d+, ){7}\d+\) loaded: (\d+)\n", done.stdout)
    assert loaded[:2] == ["0", "0"]
    assert int(loaded[2]) > 0
