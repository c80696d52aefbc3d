"""Commands run to their end, here or in processes of their own, or stopped on the way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from unittest import mock

import torch

from orlop.cli.main import main

TIMEOUT_S = 120


def orlop(*arguments):
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "orlop", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def orlop_here(*arguments):
    """As ``orlop``, without a process and its imports, which cost more than what most commands do."""
    out, err, threads = StringIO(), StringIO(), torch.get_num_threads()
    command = ["orlop", *map(str, arguments)]
    with redirect_stdout(out), redirect_stderr(err), mock.patch.object(sys, "argv", command):
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
        finally:
            torch.set_num_threads(threads)
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


def stopped(signum, said_before, tmp_path, *arguments, has_temporary=True):
    """Exit code and standard output of a command that gets ``signum`` once its progress says ``said_before``.

    Its temporary directories must be gone afterwards.
    """
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    ours, theirs = os.openpty()  # progress is shown to terminals only
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        process = subprocess.Popen(
            [sys.executable, "-m", "orlop", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "80", "TMPDIR": str(temporary)},
        )
        os.close(theirs)
        said = b""
        while not re.search(said_before, said):
            said += terminal.read(1024)
        assert bool(list(temporary.iterdir())) == has_temporary
        process.send_signal(signum)
        out, _ = process.communicate(timeout=TIMEOUT_S)
    assert list(temporary.iterdir()) == []
    return process.returncode, out


def rows_of(table):
    """Rows of whole numbers by their label, a number per column; 0 where a column has none."""
    rows = (line.strip("│").split("│") for line in table.splitlines() if line.startswith("│"))
    shown = ((label.strip(), [cell.strip() for cell in cells]) for label, *cells in rows)
    return {
        label: [0 if cell == "-" else int(cell.replace(",", "")) for cell in cells]
        for label, cells in shown
        if all(re.fullmatch(r"[\d,]+|-", cell) for cell in cells)
    }
