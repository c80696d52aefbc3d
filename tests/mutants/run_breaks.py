"""Runs one pytest per break, each in a fork that has numpy and pytest loaded already.

In: a folder to work in, and the names of the breaks to run (none: all). Out: on stdout one JSON object, name to
exit code and output. Never: a change to the source tree; a pytest of its own in the parent.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from pathlib import Path

import numpy  # noqa: F401  (loaded once for all forks)
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from breaks import BREAKS, Break  # noqa: E402

CANNOT_APPLY = 99
AT_ONCE = 2


def patched_source(target: Path, broken: Break) -> Path:
    """A copy of ``src`` with the break applied. What is already compiled comes along."""
    shutil.copytree(ROOT / "src", target)
    file = target / broken.file
    text = file.read_text()
    found = text.count(broken.old)
    if found != 1:
        raise LookupError(f"found the text to break {found} times in {broken.file}, expected once: {broken.old!r}")
    file.write_text(text.replace(broken.old, broken.new))
    return target


def run_in_fork(broken: Break, folder: Path) -> None:
    """In a child process: apply the break, run the test, and exit with pytest's code."""
    code = CANNOT_APPLY
    with open(folder / "log", "w", buffering=1) as log:
        sys.stdout = sys.stderr = log
        try:
            sys.path.insert(0, str(patched_source(folder / "src", broken)))
            code = int(pytest.main(["-x", "-p", "no:cacheprovider", "--tb=line", broken.test]))
        except BaseException:
            traceback.print_exc(file=log)
        finally:
            log.flush()
            shutil.rmtree(folder / "src", ignore_errors=True)
            os._exit(code)


def main(work: Path, names: list[str]) -> None:
    os.chdir(ROOT)
    results: dict[str, tuple[int, str]] = {}
    running: dict[int, tuple[Break, Path]] = {}
    todo = [b for b in BREAKS if not names or b.name in names]
    while todo or running:
        while todo and len(running) < AT_ONCE:
            broken = todo.pop(0)
            folder = work / str(len(todo))
            folder.mkdir()
            pid = os.fork()
            if pid == 0:
                run_in_fork(broken, folder)
            running[pid] = (broken, folder)
        pid, status = os.wait()
        broken, folder = running.pop(pid)
        results[broken.name] = (os.waitstatus_to_exitcode(status), (folder / "log").read_text())
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
