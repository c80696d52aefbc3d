"""The breaker of one tier: whether it is worth asking at all.

In: what became of jobs and lookups, and the time of each. Out: a ticket for what may go through, or None.
Never: a clock of its own, a thread, a log line (it tells its owner of changes).

::

            failures in a row, or trip              open period over: one probe
    CLOSED ----------------------------> OPEN ---------------------------------> HALF_OPEN
       ^                                  ^                                          |
       |                                  +--- probe failed or silent: twice as long -+
       +------------------------------------------- probe succeeded ------------------+

A ticket is the number of the state in which it was given. What comes back with an older ticket is news from
before the last change and is ignored, so that a backlog of old failures cannot decide about a tier that has
come back. Delays have no random part: one engine has one breaker per tier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum


class BreakerState(IntEnum):
    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    """``failures`` in a row open it; ``open_s`` is the first open period, doubled up to ``max_open_s``."""

    failures: int = 5
    open_s: float = 1.0
    max_open_s: float = 60.0

    def __post_init__(self) -> None:
        if self.failures < 1:
            raise ValueError(f"found failures={self.failures}, expected 1 or more")
        if not 0 < self.open_s <= self.max_open_s:
            raise ValueError(
                f"found open_s={self.open_s}, max_open_s={self.max_open_s}, expected 0 < open_s <= max_open_s"
            )


def _unheard(state: BreakerState, reason: str) -> None:
    """For an owner who does not listen."""


class Breaker:
    """Closed, open, half-open. One thread; every ``now`` is seconds of one monotonic clock.

    ``on_change`` hears the new state and the reason, once per change.
    """

    def __init__(self, options: BreakerOptions, on_change: Callable[[BreakerState, str], None] = _unheard) -> None:
        self.state = BreakerState.CLOSED
        self.opened = 0
        """How often it has left CLOSED."""
        self._options = options
        self._on_change = on_change
        self._ticket = 0
        self._failures = 0
        self._period_s = options.open_s
        self._until = 0.0

    def admit(self, now: float) -> int | None:
        """A ticket to hand back with the outcome, or None: do not try."""
        if self.state is BreakerState.CLOSED:
            return self._ticket
        if now < self._until:
            return None
        if self.state is BreakerState.HALF_OPEN:
            self._open(now, "the probe was not answered")
            return None
        self._change(BreakerState.HALF_OPEN, "one probe")
        self._until = now + self._period_s
        return self._ticket

    def withdraw(self, ticket: int, now: float) -> None:
        """What ``ticket`` was given for was not tried after all: where it was the probe, the next asker is."""
        if ticket == self._ticket and self.state is BreakerState.HALF_OPEN:
            self._change(BreakerState.OPEN, "the probe was not tried")
            self._until = now

    def succeeded(self, ticket: int, now: float, *, transfer: bool = True) -> None:
        """It answered. A lookup (``transfer`` False) closes the breaker on probation only.

        A store may know its keys and yet read or write none of them; so a lookup's success neither forgets
        earlier failures nor the length of the period: the next failed transfer opens again at once.
        """
        if ticket != self._ticket or self.state is BreakerState.OPEN:
            return
        probe = self.state is BreakerState.HALF_OPEN
        if transfer:
            self._failures = 0
            self._period_s = self._options.open_s
        elif probe:
            self._failures = self._options.failures - 1
            self._lengthen()
        if probe:
            self._change(BreakerState.CLOSED, "the probe succeeded")

    def failed(self, ticket: int, now: float, reason: str) -> None:
        """It failed, or did not answer in time."""
        if ticket != self._ticket or self.state is BreakerState.OPEN:
            return
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN or self._failures >= self._options.failures:
            self._open(now, reason)

    def stalled(self, now: float, reason: str) -> None:
        """Something that was let through hangs, whatever its ticket: counts as one failure now."""
        self.failed(self._ticket, now, reason)

    def trip(self, now: float, reason: str) -> None:
        """Open at once. While it is open already this says nothing new."""
        if self.state is not BreakerState.OPEN:
            self._open(now, reason)

    def _open(self, now: float, reason: str) -> None:
        if self.state is BreakerState.CLOSED:
            self.opened += 1
        else:
            self._lengthen()
        self._failures = 0
        self._until = now + self._period_s
        self._change(BreakerState.OPEN, reason)

    def _lengthen(self) -> None:
        self._period_s = min(2 * self._period_s, self._options.max_open_s)

    def _change(self, state: BreakerState, reason: str) -> None:
        self.state = state
        self._ticket += 1
        self._on_change(state, reason)
