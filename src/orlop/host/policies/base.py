"""The contract of an eviction policy: of the slots that may leave, which one is missed least?

In: which chunks arrived, were used, may leave, may no longer leave. Out: one victim at a time. Never: keys to
slots, holds, leases, the tree of chunks, a clock, a thread, a file.

The host tier keeps the rule "a chunk outlives the chunks that extend it" and the rule "what is held or leased
stays" by itself, for every policy: it offers a slot only while it is readable, unheld, unleased and has no
child in the tier, and withdraws it when that ends. So a policy never skips over slots that cannot leave, and
needs no tree. When a victim was the last child of its parent, the parent is offered before the next victim is
asked for. A chain of a hundred chunks is thus one candidate at a time, its end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from orlop.core import Int64Array


class EvictionPolicy(ABC):
    """Ranks the candidates among slots ``0 .. slots - 1``.

    All calls come from the engine's thread. Nothing is called for a slot between the end of its chunk (``pop``
    or ``forget``) and the next ``insert``. Cost: each call in proportion to the slots it names, ``pop`` in
    constant or logarithmic time on average.

    A subclass is built with the number of slots as its one argument.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots

    @abstractmethod
    def insert(self, group: int, hashes: Sequence[bytes], slots: Int64Array) -> None:
        """Chunks became readable now. ``hashes[i]`` of ``group`` is in ``slots[i]``; int64, in chunk order.

        They are no candidates yet. The first of them counts as used last, like in ``touch``. The hashes are for
        policies that remember what has left.
        """

    @abstractmethod
    def touch(self, slots: Int64Array) -> None:
        """Readable chunks were of use, candidates or not; int64, in chunk order, the first used last."""

    @abstractmethod
    def offer(self, slots: Sequence[int]) -> None:
        """These may leave from now on. They were no candidates."""

    @abstractmethod
    def withdraw(self, slots: Sequence[int]) -> None:
        """These may not leave any more, but their chunks stay, and what is known of them. They were candidates."""

    @abstractmethod
    def forget(self, slots: Int64Array) -> None:
        """The chunks are gone without having been chosen; int64. No longer candidates, if they were."""

    @abstractmethod
    def pop(self) -> int:
        """Choose a candidate; its chunk is gone with the return. Called only while there is one."""

    def inherit(self, parent: int, child: int) -> None:
        """After ``pop`` returned ``child``: ``parent``, readable and no candidate yet, was needed whenever it was."""

    def replace(self, parent: int, child: int) -> int:
        """After ``pop`` returned ``child``, the last one of ``parent``: offer ``parent`` and choose the next victim.

        Peeling a long chain is one such call per chunk, so a policy may say it in a faster way.
        """
        self.inherit(parent, child)
        self.offer((parent,))
        return self.pop()

    def coming(self, n: int) -> Sequence[int]:
        """The candidates that would be chosen next, ``n`` at most, about in that order; nothing changes by it.

        What is written to a tier before it leaves is chosen by it. Asked now and then, so it may look at all of them.
        """
        return list(self.candidates())[:n]

    @abstractmethod
    def candidates(self) -> Collection[int]:
        """The slots offered and not withdrawn, forgotten or popped; for checks, may be slow."""
