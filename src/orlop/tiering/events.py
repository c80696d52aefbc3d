"""Cache events of one medium until somebody takes them.

In: chunks that became readable in a tier, or left it. Out: ``CacheEvent``s, in the order in which it happened. Never: a
decision, a memory that grows without a bound: where nobody takes them, one that says "forget it all" replaces them.
"""

from __future__ import annotations

from collections.abc import Sequence

from orlop.core import CacheEvent

MOST_HASHES = 65_536


class EventLog:
    """Keeps events of ``medium`` that name at most ``most_hashes`` chunks together. One thread.

    ``overflows``: how often there were more. A reader who forgets everything of the medium then, as he is told, knows
    too little until chunks are stored anew, and never too much.
    """

    def __init__(self, medium: str, most_hashes: int = MOST_HASHES) -> None:
        self.medium = medium
        self.overflows = 0
        self._most_hashes = most_hashes
        self._kept = 0
        self._events: list[tuple[bool, int, list[bytes]]] = []
        self._cleared = False
        """Before the first of them, everything has left."""

    def stored(self, group: int, hashes: Sequence[bytes]) -> bool:
        """False: it was too much, and whoever reads will forget everything, these chunks included."""
        return self._note(True, group, hashes)

    def removed(self, group: int, hashes: Sequence[bytes]) -> bool:
        """False as for ``stored``."""
        return self._note(False, group, hashes)

    def cleared(self) -> None:
        """Everything has left at once."""
        self._events, self._kept, self._cleared = [], 0, True

    def take(self) -> list[CacheEvent]:
        """What has happened since the last call."""
        events = [CacheEvent(stored, self.medium, group, tuple(hashes)) for stored, group, hashes in self._events]
        if self._cleared:
            events.insert(0, CacheEvent(False, self.medium, -1, cleared=True))
        self._events, self._kept, self._cleared = [], 0, False
        return events

    def _note(self, stored: bool, group: int, hashes: Sequence[bytes]) -> bool:
        if not hashes:
            return True
        if self._events and self._events[-1][:2] == (stored, group):
            self._events[-1][2].extend(hashes)
        else:
            self._events.append((stored, group, list(hashes)))
        self._kept += len(hashes)
        if self._kept <= self._most_hashes:
            return True
        self.overflows += 1
        self.cleared()
        return False
