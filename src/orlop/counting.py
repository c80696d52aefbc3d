"""How things are counted: counters and gauges by name in one flat mapping, and histograms that fit into it.

In: events, one at a time. Out: ``Stats``, a flat mapping of names to numbers that pickles, adds and subtracts.
Never: a clock, a label's meaning, an import of ours; work that grows with anything but the event.

A key of ``Stats`` is a name, or a name, a space and what it is about: a tier, or a reason. Of histogram ``name``,
``name.n3`` is how many observations fell into bucket 3 and ``name.s3`` their sum; empty buckets are left out. Counters
and histograms only grow, so whoever sees one mapping in two knows everything, and the difference of two mappings is
what has happened between them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

Stats = Mapping[str, float]

SIZE_BOUNDS = (1e6, 5e6, 1e7, 2e7, 4e7, 6e7, 8e7, 1e8, 1.5e8, 2e8)
"""Bytes of one transfer; the bounds here are those that dashboards know from vLLM."""
CHUNK_BOUNDS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)
"""Chunks of one offer."""
SYNC_BOUNDS = (1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1.0)
"""Seconds of one call on the engine's thread."""
ASYNC_BOUNDS = (1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1.0, 5.0, 10.0)
"""Seconds until something that is waited for has come."""


class Histogram:
    """Counts and sums by bucket; bucket ``i`` holds what is at most ``bounds[i]``, the last one everything else."""

    __slots__ = ("_counts", "_sums", "bounds")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sums = [0.0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        bucket = bisect_left(self.bounds, value)
        self._counts[bucket] += 1
        self._sums[bucket] += value

    def stats(self, name: str) -> dict[str, float]:
        """The buckets that are not empty, under their keys."""
        filled = [i for i, count in enumerate(self._counts) if count]
        return {
            **{f"{name}.n{i}": self._counts[i] for i in filled},
            **{f"{name}.s{i}": self._sums[i] for i in filled},
        }
