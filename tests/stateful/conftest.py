"""What the walks have met, said at the end of the run."""

from __future__ import annotations

import sys
from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    walks = sys.modules.get("test_stateful")
    if walks is None or not walks.TALLY:
        return
    tally = walks.TALLY
    terminalreporter.write_line(
        f"stateful: STATEFUL_SEED={walks.SEED}, {tally['walks']} walks, {tally['rules']} rules, {tally['steps']} steps"
    )
    if terminalreporter.config.option.verbose > 0:
        for name, count in sorted(tally.items()):
            terminalreporter.write_line(f"  {count:7} {name}")
