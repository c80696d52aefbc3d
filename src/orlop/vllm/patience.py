"""How long an engine without requests keeps stepping for transfers.

In: whether transfers are pending and requests are alive, and the time. Out: whether to step on. Never: a clock.

vLLM steps on while ``has_pending_push_work`` says so, and pausing, sleeping and stopping wait for that. A tier that
hangs says so for half a minute. So with nobody there, stepping ends after the drain deadline. Nothing is lost by it:
copies and tiers go on by themselves, and what they report is read with the next request, or at shutdown.
"""

from __future__ import annotations


class Patience:
    """One engine's. ``limit_s``: seconds of stepping with no request alive."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: float | None = None

    def someone_came(self) -> None:
        """A request is alive: waiting for transfers costs nobody anything."""
        self._since = None

    def is_worth_stepping(self, pending: bool, now: float) -> bool:
        """Whether to step on for what is pending."""
        if not pending:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since < self._limit_s

    def left_s(self, now: float) -> float:
        """What is left of the limit for a shutdown now."""
        return self._limit_s if self._since is None else max(0.0, self._limit_s - (now - self._since))
