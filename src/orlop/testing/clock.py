"""A clock that only a test moves.

In: seconds to advance by. Out: a monotonic time in seconds. Never: the machine's clock, a thread.
"""

from __future__ import annotations


class FakeClock:
    """Monotonic seconds under the test's control; calling it reads it."""

    def __init__(self, start: float = 1000.0) -> None:
        self.now = start

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Move on by ``seconds`` (0 or more); the new time."""
        if seconds < 0:
            raise ValueError(f"found a step of {seconds} s, expected 0 or more: this clock is monotonic")
        self.now += seconds
        return self.now
