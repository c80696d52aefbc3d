"""What is remembered of chunks that have left: that they were there.

In: groups and hashes. Out: a number per chunk, and whether one is among those that left last. Never: a chunk, a slot.

A number of 64 bits stands for a key. Two keys that share one are ranked wrongly now and then, and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from orlop.core import Int64Array

_GROUP_STEP = 0x9E3779B97F4A7C15 - (1 << 64)


def prints(group: int, hashes: Sequence[bytes]) -> Int64Array:
    """A number per key, the same as long as the process lives; int64."""
    found = np.fromiter(map(hash, hashes), np.int64, len(hashes))
    return found + np.int64(group) * np.int64(_GROUP_STEP) if group else found


class Ghosts(OrderedDict[int, None]):
    """Numbers of chunks in the order in which they left."""

    def keep(self, most: int) -> None:
        """Forget the oldest beyond ``most``."""
        while len(self) > most:
            self.popitem(last=False)
