"""The judges of the policies: the same rules on plain lists, slow and obvious.

In: slots, one by one. Out: who leaves. Never: an array, a mark, a line shared with the policies.

A queue is a list, the oldest first. Who was chosen leaves a ``Hole`` behind, which the parent may fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Hole:
    """Where a chosen slot was; ``number`` tells the holes of one slot apart."""

    slot: int
    number: int


Queue = list["int | Hole"]


class NaivePolicy:
    """What the judges share."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.offered: set[int] = set()
        self.hash_of: dict[int, bytes] = {}
        self.holes = 0
        self.hole: Hole | None = None

    def offer(self, slots: Sequence[int]) -> None:
        self.offered |= set(slots)

    def withdraw(self, slots: Sequence[int]) -> None:
        self.offered -= set(slots)

    def leave(self, queue: Queue, slot: int) -> int:
        self.holes += 1
        self.hole = Hole(slot, self.holes)
        queue[queue.index(slot)] = self.hole
        self.offered.discard(slot)
        return slot

    def fill(self, queue: Queue, parent: int) -> None:
        """The parent stands where the last one was chosen."""
        assert self.hole
        queue[queue.index(self.hole)] = parent


class NaiveSieve(NaivePolicy):
    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.queue: Queue = []
        self.used: set[int] = set()
        self.hand = 0

    def insert(self, hashes: Sequence[bytes], slots: Sequence[int]) -> None:
        self.queue += reversed(slots)
        self.used -= set(slots)

    def touch(self, slots: Sequence[int]) -> None:
        self.used |= set(slots)

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.leave(self.queue, slot)

    def pop(self) -> int:
        while True:
            if self.hand >= len(self.queue):
                self.hand = 0
            item = self.queue[self.hand]
            if item in self.offered and item not in self.used:
                assert isinstance(item, int)
                return self.leave(self.queue, item)
            if isinstance(item, int):
                self.used.discard(item)
            self.hand += 1

    def inherit(self, parent: int) -> None:
        assert self.hole
        at = self.queue.index(parent)
        if at < self.queue.index(self.hole):
            self.fill(self.queue, parent)
            self.queue[at] = Hole(parent, 0)


class NaiveARC(NaivePolicy):
    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.once: Queue = []
        self.again: Queue = []
        self.left_once: list[bytes] = []
        self.left_again: list[bytes] = []
        self.share = 0.0

    def count(self, queue: Queue) -> int:
        return sum(isinstance(item, int) for item in queue)

    def insert(self, hashes: Sequence[bytes], slots: Sequence[int]) -> None:
        back = set()
        for block_hash, slot in zip(hashes, slots, strict=True):
            self.hash_of[slot] = block_hash
            once, again = len(self.left_once), len(self.left_again)
            if block_hash in self.left_once:
                self.share = min(self.slots, self.share + max(1, again / once))
                self.left_once.remove(block_hash)
                back.add(slot)
            elif block_hash in self.left_again:
                self.share = max(0, self.share - max(1, once / again))
                self.left_again.remove(block_hash)
                back.add(slot)
        for slot in reversed(slots):
            (self.again if slot in back else self.once).append(slot)
        self.trim()

    def touch(self, slots: Sequence[int]) -> None:
        for slot in reversed(slots):
            (self.once if slot in self.once else self.again).remove(slot)
            self.again.append(slot)

    def forget(self, slots: Sequence[int]) -> None:
        self.withdraw(slots)
        for slot in slots:
            (self.once if slot in self.once else self.again).remove(slot)

    def pop(self) -> int:
        order = [(self.once, self.left_once), (self.again, self.left_again)]
        if self.count(self.once) <= self.share:
            order.reverse()
        queue, left, slot = next((q, b, s) for q, b in order for s in q if isinstance(s, int) and s in self.offered)
        left.append(self.hash_of[slot])
        self.leave(queue, slot)
        self.trim()
        return slot

    def inherit(self, parent: int) -> None:
        mine, childs = (next(q for q in (self.once, self.again) if item in q) for item in (parent, self.hole))
        assert self.hole
        better = childs is self.again and mine is self.once
        if better or (childs is mine and mine.index(parent) < mine.index(self.hole)):
            self.fill(childs, parent)
            mine.remove(parent)

    def trim(self) -> None:
        once, again = self.count(self.once), self.count(self.again)
        del self.left_once[: max(0, len(self.left_once) + once - self.slots)]
        del self.left_again[: max(0, len(self.left_again) + once + again + len(self.left_once) - 2 * self.slots)]


class NaiveS3FIFO(NaivePolicy):
    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.small: Queue = []
        self.main: Queue = []
        self.left: list[bytes] = []
        self.uses: dict[int, int] = {}
        self.most = max(1, slots // 10)

    def insert(self, hashes: Sequence[bytes], slots: Sequence[int]) -> None:
        for block_hash, slot in reversed(list(zip(hashes, slots, strict=True))):
            self.hash_of[slot] = block_hash
            self.uses[slot] = 0
            if block_hash in self.left:
                self.left.remove(block_hash)
                self.main.append(slot)
            else:
                self.small.append(slot)

    def touch(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.uses[slot] = min(3, self.uses[slot] + 1)

    def forget(self, slots: Sequence[int]) -> None:
        self.withdraw(slots)
        for slot in slots:
            (self.small if slot in self.small else self.main).remove(slot)

    def pop(self) -> int:
        main_gives = any(slot in self.offered for slot in self.main)
        if sum(isinstance(s, int) for s in self.small) >= self.most or not main_gives:
            leaves = [s for s in self.small if isinstance(s, int) and s in self.offered and self.uses[s] <= 1]
            end = self.small.index(leaves[0]) if leaves else len(self.small)
            if leaves or not main_gives:
                for slot in [s for s in self.small[:end] if isinstance(s, int)]:
                    self.small.remove(slot)
                    self.main.append(slot)
                    self.uses[slot] = 0
            if leaves:
                self.left = [*self.left, self.hash_of[leaves[0]]][-(self.slots - self.most) :]
                return self.leave(self.small, leaves[0])
        here = [s for s in self.main if isinstance(s, int)]
        while not (leaves := [s for s in here if s in self.offered and not self.uses[s]]):
            for slot in here:
                self.uses[slot] = max(0, self.uses[slot] - 1)
        for slot in here[: here.index(leaves[0])]:
            if self.uses[slot]:
                self.uses[slot] -= 1
                self.main.remove(slot)
                self.main.append(slot)
        return self.leave(self.main, leaves[0])

    def inherit(self, parent: int) -> None:
        mine, childs = (next(q for q in (self.small, self.main) if item in q) for item in (parent, self.hole))
        assert self.hole
        better = childs is self.main and mine is self.small
        if better or (childs is mine and mine.index(parent) < mine.index(self.hole)):
            self.fill(childs, parent)
            mine.remove(parent)
