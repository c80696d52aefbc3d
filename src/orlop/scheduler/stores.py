"""Which chunks this step stores.

In: one life, how many of its tokens are (or will be, by this step) computed, and the manager. Out: reservations with
the device blocks to copy. Never: a fence, a job id.

A chunk is stored when its last token is computed, its blocks are known, and the engine has hashed it::

    tokens     0 . . . . . . . . . . . . . . . . . . . .
    computed   =======================>                     bytes on the device
    hashed     ================>                            keys (late with asynchronous scheduling)
    chunks     |  0  |  1  |  2  |  3  |
                           ^ cursor: offered up to here     offers: [cursor, min of the above)

The cursor stops at the first chunk that was declined for want of room or that somebody else is writing; from there on
chunks are offered again when the life is next looked at, so that no hole stays and no chunk is lost with another
request's failed store.

In sliding-window groups, blocks that lie wholly behind the window may hold other tokens by now. Their chunks are
passed over for good.

Most requests that decode fill one chunk now and then, the last one that they have a key for. Those of one step are
offered together, and share reservations and jobs (``JointOffer``): so what a chunk costs is not what a job costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from orlop.core import Geometry, GroupTransfer, Int64Array, JointOffer, Reservation
from orlop.scheduler.request import GroupState, RequestState
from orlop.tiering.base import OffloadingManager

FEW = 4
"""So many chunks that cannot be stored together are stored one by one."""


class PlannedStore(NamedTuple):
    """One reservation and the blocks that fill it."""

    reservation: Reservation
    transfer: GroupTransfer


_Offer = tuple[RequestState, GroupState, int, int]
"""What one life may store of one group: chunks from a start to a stop."""
Planned = tuple[tuple[RequestState, ...], list[PlannedStore]]
"""The lives of one job, and what it stores of them."""


class StorePlanner:
    """Plans the stores of lives, within a budget of chunks per step; at most ``most_joint`` lives share a job."""

    def __init__(
        self, geometry: Geometry, manager: OffloadingManager, offload_decode: bool, most_joint: int = 16
    ) -> None:
        self._geometry = geometry
        self._chunk_tokens = tuple(geometry.chunk_tokens(group.index) for group in geometry.groups)
        self._windows = tuple(group.sliding_window for group in geometry.groups)
        self._manager = manager
        self._offload_decode = offload_decode
        self._most_joint = most_joint
        self._offsets = np.tile(np.arange(geometry.blocks_per_chunk, dtype=np.int64), most_joint)
        self._offsets.flags.writeable = False  # transfers of few chunks share it

    def storable_chunks(self, state: RequestState, group: GroupState) -> int:
        """Chunks of the life that are filled, keyed, allocated and allowed to be stored."""
        chunks = self._filled_chunks(state, group)
        keyed, allocated = len(group.hashes), len(group.block_ids) // self._geometry.blocks_per_chunk
        if chunks > keyed:  # comparisons, because min() costs more, and this is asked for every chunk
            chunks = keyed
        return chunks if chunks <= allocated else allocated

    def _filled_chunks(self, state: RequestState, group: GroupState) -> int:
        """Chunks of the life that are filled and allowed to be stored."""
        return self._storable_tokens(state) // self._chunk_tokens[group.index]

    def _storable_tokens(self, state: RequestState) -> int:
        """Tokens of the life that are computed and allowed to be stored."""
        tokens = state.tokens_filled
        if not self._offload_decode:
            tokens = min(tokens, state.req.num_prompt_tokens)
        if state.max_offload_tokens is not None:
            tokens = min(tokens, state.max_offload_tokens)
        return tokens

    def lacks_keys(self, state: RequestState) -> bool:
        """Whether a chunk is computed whose key the engine has not made yet."""
        return any(self._filled_chunks(state, group) > len(group.hashes) for group in state.groups)

    def is_behind(self, state: RequestState) -> bool:
        """Whether some chunk of the life is storable and not settled."""
        return not state.tainted and any(g.cursor < self.storable_chunks(state, g) for g in state.groups)

    def plan(self, states: Iterable[RequestState], budget: int, now: float) -> tuple[list[Planned], list[RequestState]]:
        """Offer what is storable, at most ``budget`` chunks; moves the cursors.

        What is to be stored, job by job; and the lives to look at again in the next step, because keys are late or the
        budget is used up.
        """
        offers: list[_Offer] = []
        singles: list[list[_Offer]] = [[] for _ in self._chunk_tokens]
        filled = [state for state in states if self.has_filled(state) and not state.tainted]
        for state in filled:
            block_hashes = state.req.block_hashes
            for group in state.groups:
                group.learn_keys(block_hashes)
                stop = self.storable_chunks(state, group)
                if group.cursor >= stop:
                    continue
                start, stop = self._within(state, group, stop, budget)
                if start < stop:
                    budget -= stop - start
                    single = stop - start == 1 and stop == len(group.hashes)
                    (singles[group.index] if single else offers).append((state, group, start, stop))
        planned: list[Planned] = []
        for same_group in singles:
            for at in range(0, len(same_group), self._most_joint):
                planned += self._joint_stores(same_group[at : at + self._most_joint], offers, now)
        planned += self._stores_one_by_one(offers, now)
        again = [
            s for s in filled if self.has_filled(s) and ((budget <= 0 and self.is_behind(s)) or self.lacks_keys(s))
        ]
        return planned, again

    def _joint_stores(self, singles: list[_Offer], alone: list[_Offer], now: float) -> list[Planned]:
        """As few stores as will do, in halves where one of them stands in the way; what is left over goes to ``alone``.

        So a request that says again what another has said does not keep all the others from sharing.
        """
        joint = self._joint_store(singles, now)
        if joint is not None:
            return [joint]
        if len(singles) <= FEW:
            alone += singles
            return []
        half = len(singles) // 2
        return [*self._joint_stores(singles[:half], alone, now), *self._joint_stores(singles[half:], alone, now)]

    def _joint_store(self, offers: Sequence[_Offer], now: float) -> Planned | None:
        """One store for offers of one chunk each of one group, the last one that each life has a key for."""
        n = self._geometry.blocks_per_chunk
        index = offers[0][1].index
        joint = JointOffer(
            index,
            [group.hashes[-1] for _, group, _, _ in offers],
            [group.hashes[-2] if start else b"" for _, group, start, _ in offers],
            [start for _, _, start, _ in offers],
            [state.context for state, _, _, _ in offers],
        )
        reservation = self._manager.prepare_joint_store(joint, now=now)
        if reservation is None:
            return None
        block_ids: list[int] = []
        for _, group, start, stop in offers:
            group.cursor = stop
            block_ids += group.block_ids[start * n : stop * n]
        transfer = self._transfer(index, reservation, np.array(block_ids, dtype=np.int64))
        return tuple(state for state, _, _, _ in offers), [PlannedStore(reservation, transfer)]

    def _stores_one_by_one(self, offers: Iterable[_Offer], now: float) -> list[Planned]:
        """A store for each life, of all its groups."""
        planned: dict[RequestState, list[PlannedStore]] = {}
        for state, group, start, stop in offers:
            plan = self._manager.prepare_store(group.run(start, stop), state.context, now=now)
            group.cursor = plan.settled
            if plan.reservation is not None:
                planned.setdefault(state, []).append(self._planned(group, plan.reservation))
        return [((state,), stores) for state, stores in planned.items()]

    def has_filled(self, state: RequestState) -> bool:
        """Whether a chunk beyond a cursor may be stored; without one nothing else of the life needs a look."""
        tokens = self._storable_tokens(state)
        if len(self._chunk_tokens) == 1:  # the common case, for each of many requests in each step
            return tokens >= (state.groups[0].cursor + 1) * self._chunk_tokens[0]
        groups = zip(state.groups, self._chunk_tokens, strict=True)
        return any(tokens >= (group.cursor + 1) * per_chunk for group, per_chunk in groups)

    def _within(self, state: RequestState, group: GroupState, stop: int, budget: int) -> tuple[int, int]:
        """What to offer now of the chunks from the cursor to ``stop``, as a start and a stop."""
        window = self._windows[group.index]
        if window is not None:
            group.cursor = self._first_in_window(state, group, window, stop)
        start = group.cursor
        return start, (stop if stop - start <= budget else start + budget)

    def _first_in_window(self, state: RequestState, group: GroupState, window: int, stop: int) -> int:
        """The first chunk all of whose blocks still hold this life's tokens when the step begins.

        Blocks wholly behind the window of the step's first token may hold other tokens by now, and a
        placeholder in the block table holds none.
        """
        n = self._geometry.blocks_per_chunk
        tokens_per_block = self._geometry.groups[group.index].tokens_per_block
        first_block = max(0, state.tokens_before_step - window + 1) // tokens_per_block
        first = max(group.cursor, -(-first_block // n))
        positions = range(min(stop * n, len(group.block_ids)) - 1, first * n - 1, -1)
        last_null = next((p for p in positions if group.block_ids[p] == self._geometry.null_block_id), None)
        return first if last_null is None else last_null // n + 1

    def _planned(self, group: GroupState, reservation: Reservation) -> PlannedStore:
        n, chunks = self._geometry.blocks_per_chunk, reservation.chunks
        first, stop = int(chunks[0]), int(chunks[-1]) + 1
        block_ids = np.array(group.block_ids[first * n : stop * n], dtype=np.int64)
        if stop - first > len(chunks):  # with gaps, where chunks between are there already
            block_ids = block_ids.reshape(-1, n)[chunks - first].ravel()
        return PlannedStore(reservation, self._transfer(group.index, reservation, block_ids))

    def _transfer(self, group: int, reservation: Reservation, block_ids: Int64Array) -> GroupTransfer:
        """Whole chunks of a group: their blocks, one chunk after the other, and their slots."""
        n = self._geometry.blocks_per_chunk
        slots = reservation.slots if n == 1 else reservation.slots.repeat(n)
        few = len(block_ids) <= len(self._offsets)
        offsets = self._offsets[: len(block_ids)] if few else np.tile(self._offsets[:n], len(block_ids) // n)
        return GroupTransfer(group, block_ids, slots, offsets)
