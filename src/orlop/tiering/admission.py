"""What is worth keeping: only chunks that were offered often enough.

In: keys as they are offered. Out: yes or no for each. Never: a clock, a thread, bytes, a memory that grows
without a bound.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable


class StoreAfter:
    """Admits a key when it is offered for the ``n``-th time, and from then on as long as it is remembered.

    Remembers at most ``capacity`` keys that wait for their ``n``-th offer or have passed it. When full, the
    half whose first offer lies furthest back is forgotten at once, so that forgetting costs one pass per
    ``capacity / 2`` new keys. With ``n`` = 1 nothing is remembered and every key is admitted. Called from
    one thread.
    """

    def __init__(self, n: int, capacity: int = 64 * 1024) -> None:
        if n < 1:
            raise ValueError(f"found n={n}, expected 1 or more")
        if capacity < 2:
            raise ValueError(f"found capacity={capacity}, expected 2 or more")
        self.n = n
        self.capacity = capacity
        self._offers: dict[Hashable, int] = {}  # in the order of first offers

    def __len__(self) -> int:
        """How many keys are remembered."""
        return len(self._offers)

    def admit(self, keys: Iterable[Hashable]) -> list[bool]:
        """One offer of each key; which of them are admitted, in the same order."""
        if self.n == 1:
            return [True for _ in keys]
        return [self._offer(key) for key in keys]

    def clear(self) -> None:
        """Forget all offers."""
        self._offers.clear()

    def _offer(self, key: Hashable) -> bool:
        offers = self._offers.get(key, 0) + 1
        if offers == 1 and len(self._offers) >= self.capacity:
            self._forget_oldest_half()
        self._offers[key] = offers
        return offers >= self.n

    def _forget_oldest_half(self) -> None:
        kept = list(self._offers.items())[len(self._offers) // 2 :]
        self._offers = dict(kept)
