"""What README.md shows of traces and of the engine runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from orlop.cli.main import EXAMPLE_LINE
from orlop.cli.traces import LMCACHE_AGENT, MOONCAKE, read_lines

README = Path(__file__).parents[2] / "README.md"


def example(language):
    """The one example in ``language`` in the section on traces."""
    section = README.read_text().split("## Your own trace\n")[1].split("\n## ")[0]
    (found,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    return found


def test_the_example_lines_are_one_of_each_format(tmp_path):
    path = tmp_path / "trace"
    path.write_text(example("jsonl"))
    assert [line.format for line in read_lines(path)] == [MOONCAKE, LMCACHE_AGENT]


def test_the_example_in_the_help_is_a_line_of_a_trace(tmp_path):
    path = tmp_path / "trace"
    path.write_text(EXAMPLE_LINE)
    assert [line.hash_ids for line in read_lines(path)] == [(0, 1, 2)]


def test_the_python_example_generates(tmp_path):
    program = tmp_path / "example.py"  # a file: a started process may import the main module again
    program.write_text(example("python"))
    done = subprocess.run(
        [sys.executable, "-W", "error", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"(\((\d+, ){7}\d+\)\n){2}", done.stdout)
