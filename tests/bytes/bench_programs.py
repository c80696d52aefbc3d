"""The programs in bench/, started as a stranger starts them, to see that each of them can be.

In: which of them. Out: what one says of its use. Never: a measurement; a path on which one would find more than at the
prompt of a shell.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orlop

BENCH = Path(__file__).parents[2] / "bench"
BESIDE_VLLM = sorted(BENCH.glob("*_vs_vllm.py"))
"""Those that run where vLLM is; the others, ``ALONE``, where it need not be."""
ALONE = sorted(set(BENCH.glob("*.py")) - set(BESIDE_VLLM))


def assert_it_starts(program: Path) -> None:
    """``--help`` ends well and shows the usage, ``--short`` among it: that is what `make bench` asks of all."""
    done = subprocess.run(
        [sys.executable, str(program), "--help"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(orlop.__file__).parents[1])},
    )
    assert done.returncode == 0, f"{program.name}: {done.stderr[-4000:]}"
    assert done.stdout.startswith(f"usage: {program.name} "), done.stdout[:400]
    assert "--short" in done.stdout, f"{program.name} has no short form"
