"""Threads that work beside the engine's and never push it off its core.

In: what to run, and a name. Out: a started daemon thread. Never: a change of the caller's own thread.

A thread that is woken may push another off its core at once: the kernel gives who has slept the next turn. Beside an
engine that wakes a sender or a copier in every step this costs the engine's thread a whole time slice (3 to 4 ms) now
and then, where all cores are busy. Under the policy SCHED_BATCH (Linux; sched(7)) a woken thread takes a free core or
waits for its turn. It gets the same share of the machine. Threads and processes that such a thread starts inherit it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from threading import Thread
from typing import Any


def start_thread(target: Callable[..., Any], *args: Any, name: str) -> Thread:
    """Run ``target(*args)`` on a new daemon thread that stands behind the engine's."""

    def run() -> None:
        stand_behind()
        target(*args)

    thread = Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def stand_behind() -> None:
    """The calling thread pushes nobody off a core from now on; nothing changes where the system cannot do that."""
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
