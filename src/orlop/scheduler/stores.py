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
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from orlop.core import Geometry, GroupTransfer, KeyRun, Reservation
from orlop.scheduler.request import GroupState, RequestState
from orlop.tiering.base import OffloadingManager


class PlannedStore(NamedTuple):
    """One reservation and the blocks that fill it."""

    reservation: Reservation
    transfer: GroupTransfer


class _Offer(NamedTuple):
    """What one life may store of one group."""

    state: RequestState
    group: GroupState
    run: KeyRun


class StorePlanner:
    """Plans the stores of lives, within a budget of chunks per step."""

    def __init__(self, geometry: Geometry, manager: OffloadingManager, offload_decode: bool) -> None:
        self._geometry = geometry
        self._chunk_tokens = tuple(geometry.chunk_tokens(group.index) for group in geometry.groups)
        self._manager = manager
        self._offload_decode = offload_decode
        self._offsets = np.arange(geometry.blocks_per_chunk, dtype=np.int64)
        self._offsets.flags.writeable = False  # transfers of one chunk share it

    def storable_chunks(self, state: RequestState, group: GroupState) -> int:
        """Chunks of the life that are filled, keyed, allocated and allowed to be stored."""
        tokens = min(state.tokens_filled, self.token_limit(state))
        per_chunk = self._chunk_tokens[group.index]
        return min(tokens // per_chunk, len(group.hashes), len(group.block_ids) // self._geometry.blocks_per_chunk)

    def token_limit(self, state: RequestState) -> int:
        """Tokens beyond which this request asks not to be stored."""
        limit = state.tokens_filled if self._offload_decode else state.req.num_prompt_tokens
        if state.max_offload_tokens is not None:
            limit = min(limit, state.max_offload_tokens)
        return limit

    def lacks_keys(self, state: RequestState) -> bool:
        """Whether a chunk is computed whose key the engine has not made yet."""
        tokens = min(state.tokens_filled, self.token_limit(state))
        return any(tokens // self._chunk_tokens[g.index] > len(g.hashes) for g in state.groups)

    def is_behind(self, state: RequestState) -> bool:
        """Whether some chunk of the life is storable and not settled."""
        return not state.tainted and any(g.cursor < self.storable_chunks(state, g) for g in state.groups)

    def plan(
        self, states: Iterable[RequestState], budget: int, now: float
    ) -> tuple[dict[RequestState, list[PlannedStore]], list[RequestState]]:
        """Offer what is storable, at most ``budget`` chunks; moves the cursors.

        What is to be stored of each life of which there is something; and the lives to look at again in the next step,
        because keys are late or the budget is used up.
        """
        offers: list[_Offer] = []
        filled = [state for state in states if self._has_filled(state)]
        for state in filled:
            state.learn_keys()
            for offer in self._offers(state, budget):
                budget -= len(offer.run)
                offers.append(offer)
        planned: dict[RequestState, list[PlannedStore]] = {}
        if offers:
            plans = self._manager.prepare_stores([(offer.run, offer.state.context) for offer in offers], now=now)
            for offer, plan in zip(offers, plans, strict=True):
                offer.group.cursor = plan.settled
                if plan.reservation is not None:
                    planned.setdefault(offer.state, []).append(self._planned(offer.group, plan.reservation))
        again = [s for s in filled if (budget <= 0 and self.is_behind(s)) or self.lacks_keys(s)]
        return planned, again

    def _has_filled(self, state: RequestState) -> bool:
        """Whether a chunk beyond a cursor is computed; without one nothing else of the life needs a look."""
        filled = state.tokens_filled
        if len(self._chunk_tokens) == 1:  # the common case, for each of many requests in each step
            return filled >= (state.groups[0].cursor + 1) * self._chunk_tokens[0]
        tokens = zip(state.groups, self._chunk_tokens, strict=True)
        return any(filled >= (group.cursor + 1) * per_chunk for group, per_chunk in tokens)

    def _offers(self, state: RequestState, budget: int) -> list[_Offer]:
        """What is storable of a life, of all groups at most ``budget`` chunks."""
        offers: list[_Offer] = []
        if state.tainted:
            return offers
        for spec, group in zip(self._geometry.groups, state.groups, strict=True):
            storable = self.storable_chunks(state, group)
            if spec.sliding_window is not None and group.cursor < storable:
                group.cursor = self._first_in_window(state, group, spec.sliding_window, storable)
            stop = min(storable, group.cursor + budget)
            if group.cursor < stop:
                budget -= stop - group.cursor
                offers.append(_Offer(state, group, group.run(group.cursor, stop)))
        return offers

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
        slots = reservation.slots if n == 1 else reservation.slots.repeat(n)
        offsets = self._offsets if len(chunks) == 1 else np.tile(self._offsets, len(chunks))
        return PlannedStore(reservation, GroupTransfer(group.index, block_ids, slots, offsets))
