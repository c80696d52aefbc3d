"""The life of a slot, without keys: free, reserved, ready, retired; held, leased; parent and children.

In: slot numbers. Out: which slots became free, which may now be evicted, which no longer. Never: a key, an order of
eviction, a byte of a chunk, a clock, a thread, a file.

```
            reserve              publish
   FREE ------------> RESERVED ------------> READY
    ^                     |                    |  drop (evicted, discarded, cleared, abandoned)
    |                     v                    v
    +---------------- RETIRED <----------------+       straight to FREE where nobody holds or leases it
       last hold and lease given back
```

A slot is a candidate for eviction while it is READY, unheld, unleased and has no child. A child is a slot whose chunk
extends this slot's chunk, RESERVED or READY; so a prefix outlives what was built on it.

Each property is one buffer with two faces: plain Python items, fast one by one, and a numpy view, fast in bulk. The
buffers are one item longer than there are slots: index -1, "no slot", meets that last item, which is FREE for ever, so
links to nothing need no mask and a hold of nothing is refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from orlop.core import Int64Array
from orlop.errors import InvariantError


class SlotState(IntEnum):
    """Where a slot is in its life. FREE includes slots that are not pre-faulted yet."""

    FREE = 0
    RESERVED = 1
    """Its key is taken; its bytes are being written."""
    READY = 2
    """Readable under its key."""
    RETIRED = 3
    """Its key is gone, but somebody may still touch its bytes."""


FREE, RESERVED, READY, RETIRED = (int(s) for s in SlotState)


class Change(NamedTuple):
    """What giving back or dropping slots made possible: candidates that joined, and how many slots opened up."""

    joined: list[int]
    opened: int
    """Slots that became free or that nothing but their children keeps from being evicted."""


NO_CHANGE = Change([], 0)


class Slots:
    """The books of ``slots`` slots, of which the first ``usable`` are handed out. Arrays of slots are int64, distinct."""

    def __init__(self, slots: int, usable: int) -> None:
        if not 0 <= usable <= slots or slots < 1:
            raise ValueError(
                f"found {usable} usable of {slots} slots, expected 1 or more slots, 0 to all of them usable"
            )
        self.slots = slots
        self.usable = usable
        self.state_of = bytearray(slots + 1)
        self.candidate_of = bytearray(slots + 1)
        self.parent_of = array("q", [-1]) * (slots + 1)
        self.children_of = array("i", [0]) * (slots + 1)
        self.state = np.frombuffer(self.state_of, np.uint8)
        self.candidate = np.frombuffer(self.candidate_of, np.uint8)
        self.parent = np.frombuffer(self.parent_of, np.int64)
        self.children = np.frombuffer(self.children_of, np.intc)
        self.holds = np.zeros(slots + 1, np.int32)
        self.leases = np.zeros(slots + 1, np.int32)
        self._order = np.zeros(slots + 1, np.int64)
        self.candidates = 0
        self.leased = 0
        self.free = list(range(usable - 1, -1, -1))
        """A stack, lowest slot on top at first, so that chunks stored together lie together."""

    def grow(self, usable: int) -> int:
        """Hand out slots below ``usable`` from now on; how many these are more than before."""
        if not self.usable <= usable <= self.slots:
            raise ValueError(f"found usable={usable}, expected {self.usable} (the present value) to {self.slots}")
        more = usable - self.usable
        self.free[:0] = range(usable - 1, self.usable - 1, -1)
        self.usable = usable
        return more

    # --- holds and leases -----------------------------------------------------------------------

    def hold(self, slots: Int64Array) -> list[int]:
        """One more hold each; the candidates that are none any more."""
        self._require_used(slots)
        self.holds[slots] += 1
        return self._leave(slots)

    def lease(self, slots: Int64Array) -> list[int]:
        """One more lease each; the candidates that are none any more."""
        self._require_used(slots)
        before = self.leases[slots]
        self.leased += len(slots) - int(np.count_nonzero(before))
        self.leases[slots] = before + 1
        return self._leave(slots)

    def unhold(self, slots: Int64Array) -> Change:
        """One hold less each."""
        self.holds[slots] = self._one_less(self.holds, slots, "hold")
        return self._rest(slots)

    def unlease(self, slots: Int64Array) -> Change:
        """One lease less each."""
        after = self._one_less(self.leases, slots, "lease")
        self.leased -= len(slots) - int(np.count_nonzero(after))
        self.leases[slots] = after
        return self._rest(slots)

    def _require_used(self, slots: Int64Array) -> None:
        self._require_distinct(slots)
        if not self.state[slots].all():
            free = slots[self.state[slots] == FREE]
            raise InvariantError(f"found free slots {free[:8].tolist()}, expected slots that hold a chunk")

    def _require_distinct(self, slots: Int64Array) -> None:
        # Bulk arithmetic counts a slot once per call, so a slot named twice would be miscounted in silence.
        order = np.arange(len(slots))
        self._order[slots] = order
        if (self._order[slots] != order).any():
            raise InvariantError(f"found a slot named twice among {len(slots)}, expected distinct slots in one call")

    def _one_less(self, book: np.ndarray, slots: Int64Array, word: str) -> np.ndarray:  # type: ignore[type-arg]
        self._require_distinct(slots)
        after = book[slots] - 1
        if (after < 0).any():
            bad = slots[after < 0]
            raise InvariantError(
                f"found slots {bad[:8].tolist()} without a {word}, expected at least one: given back twice, or never taken"
            )
        return after

    def _rest(self, slots: Int64Array) -> Change:
        """After a hold or lease was given back: retired slots that nobody touches are free, ready ones may leave."""
        slots = slots[(self.holds[slots] | self.leases[slots]) == 0]
        state = self.state[slots]
        ready = slots[state == READY]
        gone = slots[state == RETIRED]
        if gone.size:
            self._free(gone)
        return Change(self.join(ready), len(ready) + len(gone))

    # --- candidates -----------------------------------------------------------------------------

    def join(self, slots: Int64Array) -> list[int]:
        """Those of distinct ``slots`` that have become candidates."""
        busy = self.holds[slots] | self.leases[slots] | self.children[slots] | self.candidate[slots]
        new = slots[(busy == 0) & (self.state[slots] == READY)]
        self.candidate[new] = 1
        self.candidates += len(new)
        joined: list[int] = new.tolist()
        return joined

    def _leave(self, slots: Int64Array) -> list[int]:
        old = slots[self.candidate[slots] != 0]
        self.candidate[old] = 0
        self.candidates -= len(old)
        left: list[int] = old.tolist()
        return left

    def may_leave(self, slot: int) -> bool:
        """Whether this one slot is fit to be a candidate."""
        return (
            not self.children_of[slot]
            and self.state_of[slot] == READY
            and not self.holds[slot]
            and not self.leases[slot]
        )

    def can_evict(self, n: int) -> bool:
        """Whether ``n`` slots could be evicted one after the other, parents after their last child.

        Plays the eviction through without doing it, in any order, and stops at ``n``: so it costs no more than
        the eviction would.
        """
        if self.candidates >= n:
            return True
        waits_for: dict[int, int] = {}
        found = 0
        for leaf in np.flatnonzero(self.candidate).tolist():
            slot = leaf
            while True:
                found += 1
                if found >= n:
                    return True
                slot = self.parent_of[slot]
                if slot < 0:
                    break
                waits_for[slot] = waits_for.get(slot, self.children_of[slot]) - 1
                if waits_for[slot] or self.state_of[slot] != READY or self.holds[slot] or self.leases[slot]:
                    break
        return False

    # --- parents and children ---------------------------------------------------------------------

    def keep(self, parents: Iterable[int]) -> list[int]:
        """One more child each; the candidates that are none any more. A parent may be named more than once."""
        left = []
        for parent in parents:
            self.children_of[parent] += 1
            if self.candidate_of[parent]:
                self.candidate_of[parent] = 0
                self.candidates -= 1
                left.append(parent)
        return left

    def unkeep(self, parents: Iterable[int]) -> list[int]:
        """One child less each; the candidates that joined."""
        joined = []
        for parent in parents:
            self.children_of[parent] -= 1
            if self.may_leave(parent):
                self.candidate_of[parent] = 1
                self.candidates += 1
                joined.append(parent)
        return joined

    def adopt(self, child: int, parent: int) -> None:
        """``child``, which had no parent, extends ``parent``, which is RESERVED."""
        self.parent_of[child] = parent
        self.children_of[parent] += 1

    # --- the life -----------------------------------------------------------------------------------

    def take(self, n: int) -> list[int]:
        """``n`` free slots, to be reserved at once."""
        taken = self.free[-n:][::-1]
        del self.free[-n:]
        return taken

    def reserve(self, slots: Int64Array, parents: Int64Array) -> None:
        """FREE to RESERVED with one hold. A parent outside ``slots`` has been told by ``keep``."""
        self.state[slots] = RESERVED
        self.holds[slots] = 1
        self.parent[slots] = parents
        # Within a run each slot is followed by its child, or by the first slot of another piece.
        self.children[slots[:-1]] = parents[1:] == slots[:-1]
        self.children[slots[-1:]] = 0

    def publish(self, slots: Int64Array) -> Change:
        """RESERVED to READY. Usually the writer still holds them."""
        self.state[slots] = READY
        return NO_CHANGE if self.holds[slots].all() else self._rest(slots)

    def vacate(self, slot: int) -> int:
        """A candidate chosen to leave: READY to FREE. Its parent, -1 for none, which has one child less."""
        self.candidate_of[slot] = 0
        self.candidates -= 1
        self.state_of[slot] = FREE
        self.free.append(slot)
        parent = self.parent_of[slot]
        self.parent_of[slot] = -1
        return parent

    def drop(self, slots: Int64Array) -> Change:
        """RESERVED or READY to RETIRED, or FREE where nobody holds or leases it. Its children have no parent now."""
        self._leave(slots)
        self.state[slots] = RETIRED
        parents = self.parent[slots]
        np.subtract.at(self.children, parents, 1)
        self.children[-1] = 0
        self.parent[slots] = -1
        if self.children[slots].any():
            gone = np.zeros(self.slots + 1, np.bool_)
            gone[slots] = True
            self.parent[gone[self.parent]] = -1
            self.children[slots] = 0
        idle = slots[(self.holds[slots] | self.leases[slots]) == 0]
        self._free(idle)
        # A parent that is no candidate yet may still be evictable now, after its other children.
        return Change(self.join(np.unique(parents)), len(idle) + int(np.count_nonzero(parents >= 0)))

    def _free(self, slots: Int64Array) -> None:
        self.state[slots] = FREE
        self.free.extend(slots.tolist())

    # --- the recount ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Recount all of it from nothing; raises ``InvariantError`` at the first thing that is wrong."""
        n = self.slots
        state, parent = self.state[:n], self.parent[:n]
        uses = self.holds[:n] | self.leases[:n]
        resident = (state == RESERVED) | (state == READY)
        _require(
            not self.state[n] and not self.children[n] and self.parent[n] == -1, "the item for no slot has changed"
        )
        free = np.flatnonzero(state[: self.usable] == FREE).tolist()
        _require(sorted(self.free) == free, f"{len(self.free)} slots on the free list, expected {len(free)}")
        _require(not state[self.usable :].any(), "a slot that is not usable is in use")
        _require(int(min(self.holds.min(), self.leases.min())) >= 0, "holds or leases below zero")
        _require(not uses[state == FREE].any(), "a free slot is held or leased")
        _require(bool(uses[state == RETIRED].all()), "a retired slot that nobody holds or leases is not free")
        _require(
            self.leased == np.count_nonzero(self.leases), f"leased={self.leased} is not the number of leased slots"
        )
        children = np.bincount(parent[parent >= 0], minlength=n)
        _require(np.array_equal(children, self.children[:n]), "child counts differ from parent links")
        _require(not (parent[~resident] >= 0).any(), "a slot without a key has a parent")
        _require(bool(resident[parent[parent >= 0]].all()), "a parent without a key has a child")
        fit = (state == READY) & (uses == 0) & (children == 0)
        _require(np.array_equal(fit, self.candidate[:n] != 0), "candidates differ from the slots that may leave")
        _require(self.candidates == np.count_nonzero(fit), f"found candidates={self.candidates}, counted otherwise")


def _require(right: bool, what: str) -> None:
    if not right:
        raise InvariantError(f"the host tier's slots do not add up: {what}")
