"""One value per slot, twice over the same memory.

In: how many. Out: a plain sequence, quick for one slot, and an array, quick for many. Never: a meaning of the values.
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from orlop.core import Int64Array

UInt8Array = npt.NDArray[np.uint8]


def bytes_of(slots: int) -> tuple[bytearray, UInt8Array]:
    """A byte each, 0 at first."""
    each = bytearray(slots)
    return each, np.frombuffer(each, np.uint8)


def numbers_of(slots: int, first: int = 0) -> tuple[array[int], Int64Array]:
    """A signed 64-bit number each, ``first`` at first."""
    each = array("q", [first]) * slots
    return each, np.frombuffer(each, np.int64)
