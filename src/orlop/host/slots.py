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

A slot is a candidate for eviction while no reason keeps it. The reasons are counted: one unless it is READY, one for
each hold, lease and child. A child is a slot whose chunk extends this slot's chunk, RESERVED or READY; so a prefix
outlives what was built on it.

What is changed one by one has two faces (``columns.py``). All columns are one item longer than there are slots: index
-1, "no slot", meets that last item, which is FREE for ever, so links to nothing need no mask and a hold of nothing is
refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from orlop.core import Int64Array
from orlop.errors import InvariantError
from orlop.host.columns import bytes_of, numbers_of


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


class Slots:
    """The books of ``slots`` slots, the first ``usable`` of which are handed out.

    Arrays of slots are int64 and name a slot once.
    """

    def __init__(self, slots: int, usable: int) -> None:
        if not 0 <= usable <= slots or slots < 1:
            raise ValueError(f"found {usable} usable of {slots} slots, expected at least one, and from 0 to all usable")
        self.slots = slots
        self.usable = usable
        self.state_of, self.state = bytes_of(slots + 1)
        self.holds_of, self.holds = numbers_of(slots + 1)
        self.leases = np.zeros(slots + 1, np.int64)
        self.parent_of, self.parent = numbers_of(slots + 1, -1)
        self.reasons_of, self.reasons = numbers_of(slots + 1, 1)
        self._place = np.zeros(slots + 1, np.int64)
        self._places = np.arange(slots + 1)
        self.candidates = 0
        self.leased = 0
        self.held = 0
        self.reserved = 0
        self.ready = 0
        self.retired = 0
        self.retired_held = 0
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
        before = self.holds[slots]
        self.held += len(slots) - int(np.count_nonzero(before))
        if self.retired:
            self.retired_held += int(np.count_nonzero((before == 0) & (self.state[slots] == RETIRED)))
        self.holds[slots] = before + 1
        return self._one_reason_more(slots)

    def lease(self, slots: Int64Array) -> list[int]:
        """One more lease each; the candidates that are none any more."""
        self._require_used(slots)
        before = self.leases[slots]
        self.leased += len(slots) - int(np.count_nonzero(before))
        self.leases[slots] = before + 1
        return self._one_reason_more(slots)

    def unhold(self, slots: Int64Array) -> Change:
        """One hold less each."""
        after = self._one_less(self.holds, slots, "hold")
        ended = len(slots) - int(np.count_nonzero(after))
        self.held -= ended
        if self.retired:
            self.retired_held -= int(np.count_nonzero((after == 0) & (self.state[slots] == RETIRED)))
        return self._one_reason_less(slots, ended)

    def unlease(self, slots: Int64Array) -> Change:
        """One lease less each."""
        after = self._one_less(self.leases, slots, "lease")
        ended = len(slots) - int(np.count_nonzero(after))
        self.leased -= ended
        return self._one_reason_less(slots, ended)

    def _require_used(self, slots: Int64Array) -> None:
        self._require_distinct(slots)
        state = self.state[slots]
        if np.count_nonzero(state) < len(slots):
            free = slots[state == FREE][:8].tolist()
            raise InvariantError(f"found free slots {free}, expected slots that hold a chunk")

    def _require_distinct(self, slots: Int64Array) -> None:
        # Bulk arithmetic counts a slot once per call, so a slot named twice would be miscounted in silence.
        places = self._places[: len(slots)]
        self._place[slots] = places
        if np.count_nonzero(self._place[slots] != places):
            raise InvariantError(f"found a slot named twice among {len(slots)}, expected distinct slots in one call")

    def _one_less(self, book: Int64Array, slots: Int64Array, word: str) -> Int64Array:
        self._require_distinct(slots)
        after: Int64Array = book[slots] - 1
        below = after < 0
        if np.count_nonzero(below):
            bad = slots[below][:8].tolist()
            raise InvariantError(
                f"found slots {bad} without a {word}, expected one to give back: it is given back twice"
            )
        book[slots] = after
        return after

    # --- reasons to stay ------------------------------------------------------------------------

    def _one_reason_more(self, slots: Int64Array) -> list[int]:
        before = self.reasons[slots]
        self.reasons[slots] = before + 1
        left: list[int] = slots[before == 0].tolist()
        self.candidates -= len(left)
        return left

    def _one_reason_less(self, slots: Int64Array, opened: int) -> Change:
        """Those without a reason may leave, retired ones that nobody touches any more are free."""
        after = self.reasons[slots] - 1
        self.reasons[slots] = after
        joined: list[int] = slots[after == 0].tolist()
        self.candidates += len(joined)
        if self.retired:
            gone = slots[(after == 1) & (self.state[slots] == RETIRED)]
            self.retired -= len(gone)
            self._free(gone)
        return Change(joined, opened)

    def keep(self, parents: Iterable[int]) -> list[int]:
        """One child more each; the candidates that are none any more. A parent may be named more than once."""
        left = []
        for parent in parents:
            if not self.reasons_of[parent]:
                left.append(parent)
            self.reasons_of[parent] += 1
        self.candidates -= len(left)
        return left

    def unkeep(self, parents: Iterable[int]) -> list[int]:
        """One child less each; the candidates that joined."""
        joined = []
        for parent in parents:
            self.reasons_of[parent] -= 1
            if not self.reasons_of[parent]:
                joined.append(parent)
        self.candidates += len(joined)
        return joined

    def can_evict(self, n: int) -> bool:
        """Whether ``n`` slots could be evicted one after the other, parents after their last child.

        Plays the eviction through without doing it, in any order, and stops at ``n``: so it costs no more than
        the eviction would.
        """
        if self.candidates >= n:
            return True
        if not self.candidates:
            return False  # what is refused again and again while all is held must not look at every slot
        return len(self.leaving(np.flatnonzero(self.reasons == 0).tolist(), n)) == n

    def leaving(self, candidates: Iterable[int], n: int) -> list[int]:
        """Who would leave, ``n`` at most, if candidates left in this order, each with the parents that it frees."""
        reasons: dict[int, int] = {}
        found: list[int] = []
        for slot in candidates:
            while len(found) < n:
                found.append(slot)
                slot = self.parent_of[slot]
                if slot < 0:
                    break
                reasons[slot] = reasons.get(slot, self.reasons_of[slot]) - 1
                if reasons[slot]:
                    break
            if len(found) == n:
                break
        return found

    # --- the life -----------------------------------------------------------------------------------

    def take(self, n: int) -> list[int]:
        """``n`` free slots, to be reserved at once."""
        left = len(self.free) - n
        taken = self.free[left:][::-1]
        del self.free[left:]
        return taken

    def reserve(self, slots: Int64Array, parents: Int64Array) -> None:
        """FREE to RESERVED with one hold. A parent outside ``slots`` has been told by ``keep``."""
        self.state[slots] = RESERVED
        self.holds[slots] = 1
        self.held += len(slots)
        self.reserved += len(slots)
        self.parent[slots] = parents
        # Not READY, and held. A slot that is followed by its child has that reason too; a child that follows
        # somewhere else starts another piece, and its parent is outside.
        self.reasons[slots] = 2
        self.reasons[slots[:-1]] += parents[1:] == slots[:-1]

    def reserve_each(self, n: int, firsts: Sequence[int], parents: Sequence[int]) -> list[int]:
        """``take`` and ``reserve`` for short runs, ``n`` slots: they begin at ``firsts`` and extend ``parents``, or -1.

        One by one, because they are few: a call of numpy costs as much as some ten of them.
        """
        taken = self.take(n)
        state_of, holds_of, parent_of, reasons_of = self.state_of, self.holds_of, self.parent_of, self.reasons_of
        before = -1
        for slot in taken:
            state_of[slot] = RESERVED
            holds_of[slot] = 1
            parent_of[slot] = before
            reasons_of[slot] = 3
            before = slot
        for first, parent in zip(firsts, parents, strict=True):
            parent_of[taken[first]] = parent
            reasons_of[taken[first - 1]] = 2  # the last of the run before it, of the first one the very last
        self.held += n
        self.reserved += n
        return taken

    def adopt(self, child: int, parent: int) -> None:
        """``child``, which had no parent, extends ``parent``, which is RESERVED."""
        self.parent_of[child] = parent
        self.reasons_of[parent] += 1

    def publish(self, slots: Int64Array) -> Change:
        """RESERVED to READY. Usually the writer still holds them, and nothing opens up."""
        self._require_distinct(slots)
        self.state[slots] = READY
        self.reserved -= len(slots)
        self.ready += len(slots)
        return self._one_reason_less(slots, len(slots) - int(np.count_nonzero(self.holds[slots])))

    def publish_and_unhold(self, slots: Sequence[int]) -> Change | None:
        """``publish`` and ``unhold`` in one, for few slots, all of them RESERVED and held; None where they are not."""
        state_of, holds_of, reasons_of = self.state_of, self.holds_of, self.reasons_of
        if (
            len(set(slots)) < len(slots)
            or set(map(state_of.__getitem__, slots)) != {RESERVED}
            or 0 in map(holds_of.__getitem__, slots)
        ):
            return None
        joined, ended = [], 0
        for slot in slots:
            state_of[slot] = READY
            holds_of[slot] = held = holds_of[slot] - 1
            reasons_of[slot] = reasons = reasons_of[slot] - 2
            if not held:
                ended += 1
                if not reasons:
                    joined.append(slot)
        self.reserved -= len(slots)
        self.ready += len(slots)
        self.held -= ended
        self.candidates += len(joined)
        return Change(joined, ended)

    def vacate(self, slots: Int64Array, joined: int) -> None:
        """READY to FREE: candidates that were chosen to leave.

        Their parents have one reason less each already, by which ``joined`` of them became candidates.
        """
        self.parent[slots] = -1
        self.reasons[slots] = 1
        self.candidates += joined - len(slots)
        self.ready -= len(slots)
        self._free(slots)

    def drop(self, slots: Int64Array) -> Change:
        """RESERVED or READY to RETIRED, or FREE where nobody holds or leases it. Its children have no parent now."""
        self.candidates -= len(slots) - int(np.count_nonzero(self.reasons[slots]))
        parents = self.parent[slots]
        np.subtract.at(self.reasons, parents, 1)
        self.reasons[-1] = 1
        uses = self.holds[slots] + self.leases[slots]
        if (self.reasons[slots] - uses - (self.state[slots] != READY)).any():
            self._orphan_children(slots)
        self.parent[slots] = -1
        ready = int(np.count_nonzero(self.state[slots] == READY))
        self.ready -= ready
        self.reserved -= len(slots) - ready
        self.retired_held += int(np.count_nonzero(self.holds[slots]))
        self.state[slots] = RETIRED
        self.reasons[slots] = uses + 1
        idle = slots[uses == 0]
        self.retired += len(slots) - len(idle)
        self._free(idle)
        # A parent that is no candidate yet may still be evictable now, after its other children.
        opened = len(idle) + int(np.count_nonzero(parents >= 0))
        parents = np.unique(parents)
        joined: list[int] = parents[self.reasons[parents] == 0].tolist()
        self.candidates += len(joined)
        return Change(joined, opened)

    def _orphan_children(self, slots: Int64Array) -> None:
        gone = np.zeros(self.slots + 1, np.bool_)
        gone[slots] = True
        self.parent[gone[self.parent]] = -1

    def _free(self, slots: Int64Array) -> None:
        self.state[slots] = FREE
        self.free.extend(slots.tolist())

    # --- the recount ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Recount all of it from nothing; raises ``InvariantError`` at the first thing that is wrong."""
        n = self.slots
        state, parent, reasons = self.state[:n], self.parent[:n], self.reasons[:n]
        uses = self.holds[:n] + self.leases[:n]
        resident = (state == RESERVED) | (state == READY)
        last = (int(self.state[n]), int(self.parent[n]), int(self.reasons[n]), int(self.holds[n]), int(self.leases[n]))
        _require(last == (FREE, -1, 1, 0, 0), "the item that stands for no slot has changed")
        free = np.flatnonzero(state[: self.usable] == FREE).tolist()
        _require(sorted(self.free) == free, f"{len(self.free)} slots on the free list, counted {len(free)}")
        _require(not state[self.usable :].any(), "a slot that is not usable is in use")
        _require(int(min(self.holds.min(), self.leases.min())) >= 0, "holds or leases below zero")
        _require(not uses[state == FREE].any(), "a free slot is held or leased")
        _require(bool(uses[state == RETIRED].all()), "a retired slot that nobody holds or leases is not free")
        leased = int(np.count_nonzero(self.leases))
        _require(self.leased == leased, f"found leased={self.leased}, counted {leased}")
        held = self.holds[:n] > 0
        for word, found, where in (
            ("held", self.held, held),
            ("reserved", self.reserved, state == RESERVED),
            ("ready", self.ready, state == READY),
            ("retired", self.retired, state == RETIRED),
            ("retired and held", self.retired_held, held & (state == RETIRED)),
        ):
            counted = int(np.count_nonzero(where))
            _require(found == counted, f"found {found} slots {word}, counted {counted}")
        _require(not (parent[~resident] >= 0).any(), "a slot without a key has a parent")
        _require(bool(resident[parent[parent >= 0]].all()), "a slot without a key has a child")
        children = np.bincount(parent[parent >= 0], minlength=n)
        wanted = uses + children + (state != READY)
        wrong = np.flatnonzero(wanted != reasons)[:8].tolist()
        _require(not wrong, f"slots {wrong} have other reasons to stay than state, holds, leases and children")
        candidates = int(np.count_nonzero(wanted == 0))
        _require(self.candidates == candidates, f"found candidates={self.candidates}, counted {candidates}")


def _require(right: bool, what: str) -> None:
    if not right:
        raise InvariantError(f"the host tier's slots do not add up: {what}")
