"""What host memory has and tiers that are written on eviction lack: which chunk is written next, so that it may leave.

In: slots that are filled, become readable, are written or not. Out: slots to write, a stretch at a time. Never: a job,
a byte, a clock, a thread, a file; a wait of somebody who needs a slot.

A tier that is written on eviction gets a chunk when host memory is about to give its slot up::

    filled ----> unwritten ----> on its way ----> clean: leaves and costs nothing
                   |   ^              |
                   |   +--- failed ---+           tried again at the next look
                   v
                 leaves all the same: the slot was needed first. Lost for the tier, and counted.

The next victims are looked for once a part of the reserve has been filled anew, so a look costs little per slot; those
of them that are unwritten are written, in the order in which they would leave, as far as the tier takes it. What is
on its way is held and leaves later. Nobody waits for it: others leave instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from orlop.core import NO_SALT, Int64Array
from orlop.errors import InvariantError
from orlop.host.tier import HostTier

RESERVE_SHARE, MOST_RESERVE = 4, 4096
"""The next victims that should be clean: so large a part of the slots, and so many, at most."""
LOOKS_PER_RESERVE = 8


class WriteBack:
    """``most[tier]``: how many chunks may be on their way to a tier at a time, cut to half of the reserve.

    Engine's thread only.
    """

    def __init__(self, host: HostTier, most: Mapping[int, int]) -> None:
        self.lost: Counter[int] = Counter()
        """Chunks that left unwritten, by tier."""
        self.on_the_way: Counter[int] = Counter()
        self._host = host
        self._reserve = min(max(1, host.slots // RESERVE_SHARE), MOST_RESERVE)
        self._most = {tier: min(count, max(1, self._reserve // 2)) for tier, count in most.items()}
        self._bits = {tier: 1 << i for i, tier in enumerate(most)}
        self._lacks = np.zeros(host.slots, np.int64)
        """Per slot a bit for each tier that lacks its chunk; of slots without one, what was true of the last."""
        self._salts: dict[int, bytes] = {}
        """Per slot the salt of its chunk's request, where it had one."""
        self._filled = 0
        """Slots since the last look."""
        self._next: dict[int, list[int]] = {tier: [] for tier in most}
        """Per tier the slots to write, the next one last."""
        self._ends = False

    def __contains__(self, tier: int) -> bool:
        return tier in self._most

    @property
    def tiers(self) -> Iterable[int]:
        return self._most

    def unwritten(self, tier: int) -> int:
        """Readable chunks that the tier lacks and that are not on their way to it."""
        return len(self._host.ready_among(self._lacking(tier)))

    def by_salt(self, slots: Int64Array) -> Iterable[tuple[bytes, list[int]]]:
        """Each salt with the indexes of those slots whose chunks have it."""
        if not self._salts:
            return [(NO_SALT, list(range(len(slots))))]
        where: dict[bytes, list[int]] = {}
        for i, slot in enumerate(slots.tolist()):
            where.setdefault(self._salts.get(slot, NO_SALT), []).append(i)
        return where.items()

    # --- what happens to slots ------------------------------------------------------------------------------

    def filled(self, slots: Int64Array) -> None:
        """Slots are reserved for other chunks: what they held has left."""
        if not self._most:
            return
        self._filled += len(slots)
        lacked = self._lacks[slots]
        if np.count_nonzero(lacked):
            for tier, bit in self._bits.items():
                self.lost[tier] += int(np.count_nonzero(lacked & bit))
            self._lacks[slots] = 0
        if self._salts:
            for slot in slots.tolist():
                self._salts.pop(slot, None)

    def readable(self, tier: int, slots: Int64Array, salt: bytes) -> None:
        """New chunks that the tier lacks and is to have."""
        self._lacks[slots] |= self._bits[tier]
        if salt != NO_SALT:
            self._salts.update(dict.fromkeys(slots.tolist(), salt))

    def sent(self, tier: int, slots: Int64Array) -> None:
        """Chunks of ``to_write`` are on their way."""
        self._lacks[slots] &= ~self._bits[tier]
        self.on_the_way[tier] += len(slots)

    def settled(self, tier: int, slots: Int64Array, failed: Int64Array, *, gone: bool) -> None:
        """They have come; ``failed`` of them have not. ``gone``: nor can they be written again."""
        self.on_the_way[tier] -= len(slots)
        if gone or self._ends:
            self.lost[tier] += len(failed)
        else:
            self._lacks[failed] |= self._bits[tier]

    def forget(self) -> None:
        """Host memory has dropped all of it."""
        self._lacks.fill(0)
        self._salts.clear()
        self._next = {tier: [] for tier in self._most}

    # --- who is written ---------------------------------------------------------------------------------------

    def to_write(self, tier: int) -> Int64Array:
        """The next slots to write now, of one prefix from its start where they are of one; a part of them if any."""
        self._look()
        queue, room = self._next[tier], self._most[tier] - self.on_the_way[tier]
        if not queue or room <= 0:
            return np.empty(0, np.int64)
        cut = max(0, len(queue) - room)
        slots = np.array(queue[cut:], np.int64)
        del queue[cut:]
        wanted: Int64Array = slots[(self._lacks[slots] & self._bits[tier]) != 0]
        return wanted

    def write_all(self) -> None:
        """The end is near: everything is to be written, what would leave last before the rest; nothing again."""
        if self._ends:
            return
        self._ends = True
        order = self._host.coming(self._host.slots)
        for tier in self._most:
            lacking = set(self._lacking(tier).tolist())
            ranked = [slot for slot in order if slot in lacking]
            self._next[tier] = [*(lacking - set(ranked)), *ranked]

    def _look(self) -> None:
        if self._ends or self._filled * LOOKS_PER_RESERVE < self._reserve:
            return
        self._filled = 0
        free = self._host.free
        coming = np.array(self._host.coming(self._reserve - free) if free < self._reserve else (), np.int64)[::-1]
        for tier, bit in self._bits.items():
            self._next[tier] = coming[(self._lacks[coming] & bit) != 0].tolist()

    def _lacking(self, tier: int) -> Int64Array:
        lacking: Int64Array = np.flatnonzero(self._lacks & self._bits[tier])
        return lacking

    def check(self, on_the_way: Mapping[int, int]) -> None:
        """``InvariantError`` where the caller's count of what is on its way is another."""
        if any(self.on_the_way[tier] != on_the_way.get(tier, 0) for tier in self._most):
            raise InvariantError(f"found {dict(self.on_the_way)} chunks on their way, counted {dict(on_the_way)}")
