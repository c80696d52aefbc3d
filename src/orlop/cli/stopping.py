"""Ctrl-C and SIGTERM as a question that a run asks between two steps.

In: SIGINT and SIGTERM. Out: whether one of them came. Never: an end in the middle of a step, unless they insist.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOPPED = 130
"""The exit code of a run that was stopped."""


@contextmanager
def stop_signals(hand_on: Callable[[], None] | None = None) -> Iterator[Callable[[], bool]]:
    """Whether one of the signals came. Main thread only; what handled them before does so again afterwards.

    The second one raises ``KeyboardInterrupt``, so that what was opened is closed even then. With ``hand_on`` every
    one is only handed on: to a process that is waited for, and that does the same.
    """
    came: list[int] = []

    def note(signum: int, frame: object) -> None:
        came.append(signum)
        if hand_on is not None:
            hand_on()
        elif len(came) > 1:
            raise KeyboardInterrupt

    before = {signum: signal.signal(signum, note) for signum in STOP_SIGNALS}
    try:
        yield lambda: bool(came)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
