"""The engine's thread says now and then what has been counted; a line a minute tells it to a reader of logs.

In: a connector's ``get_stats`` and the time, on the engine's thread. Out: the last snapshot, for any thread; log lines.
Never: a call into the connector from another thread, work in a step in which nothing is due but one comparison.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from orlop.counting import Stats
from orlop.observe.summary import minute_line
from orlop.observe.table import difference

log = logging.getLogger(__name__)


class Observer:
    """Of one connector. ``tick`` is for the engine's loop; ``latest`` may be read by any thread.

    ``model_name`` and ``engine`` are the labels under which its metrics appear. ``publish_s``: seconds between two
    snapshots at least; ``line_s`` between two lines.
    """

    def __init__(
        self,
        get_stats: Callable[[], Stats],
        *,
        model_name: str = "",
        engine: str = "0",
        publish_s: float = 1.0,
        line_s: float = 60.0,
    ) -> None:
        self.model_name = model_name
        self.engine = engine
        self.latest: Stats = {}
        """The last snapshot: replaced as a whole, never changed."""
        self._get_stats = get_stats
        self._publish_s = publish_s
        self._line_s = line_s
        self._due = -math.inf
        self._line_at: float | None = None
        self._line_stats: Stats = {}

    def tick(self, now: float) -> None:
        """Once per step, with the time of a monotonic clock."""
        if now >= self._due:
            self.publish(now)

    def publish(self, now: float) -> None:
        """Take a snapshot now; for the end of a run, after which no step comes."""
        self._due = now + self._publish_s
        self.latest = dict(self._get_stats())
        if self._line_at is None:
            self._line_at, self._line_stats = now, self.latest
        elif now >= self._line_at + self._line_s:
            log.info("%s", minute_line(difference(self.latest, self._line_stats), now - self._line_at))
            self._line_at, self._line_stats = now, self.latest
