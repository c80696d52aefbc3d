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

Requests that decode fill a few chunks each. Those of many requests are offered together, and share reservations and
jobs (``JointOffer``): so what a chunk costs is not what a job costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from orlop.core import Geometry, GroupTransfer, Int64Array, JointOffer, Reservation
from orlop.scheduler.request import GroupState, RequestState
from orlop.tiering.base import OffloadingManager

FEW = 4
"""So many offers that cannot be stored together are stored one by one."""
SHORT = 16
"""Longer runs of chunks are stored by themselves: in bulk, each chunk of them costs little."""


class PlannedStore(NamedTuple):
    """One reservation and the blocks that fill it."""

    reservation: Reservation
    transfer: GroupTransfer


_Offer = tuple[RequestState, GroupState, int, int]
"""What one life may store of one group: chunks from a start to a stop."""
Planned = tuple[tuple[RequestState, ...], list[PlannedStore]]
"""The lives of one job (of a joint one, the life of each chunk), and what it stores of them."""


class Plan(NamedTuple):
    """What is to be stored, job by job; and lives with more: cut off by the budget, and those whose keys are late."""

    jobs: list[Planned]
    cut: list[RequestState]
    late: list[RequestState]


class StorePlanner:
    """Plans the stores of lives, within a budget of chunks per step; at most ``most_joint`` chunks share a job."""

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

    def _storable_tokens(self, state: RequestState) -> int:
        """Tokens of the life that are computed and allowed to be stored."""
        tokens = state.tokens_filled
        if not self._offload_decode:
            tokens = min(tokens, state.req.num_prompt_tokens)
        if state.max_offload_tokens is not None:
            tokens = min(tokens, state.max_offload_tokens)
        return tokens

    def _storable_chunks(self, group: GroupState, filled: int) -> int:
        """Those of the leading ``filled`` chunks that are keyed and allocated."""
        return min(filled, len(group.hashes), len(group.block_ids) // self._geometry.blocks_per_chunk)

    def is_behind(self, state: RequestState) -> bool:
        """Whether some chunk of the life is storable and not settled."""
        if state.tainted:
            return False
        tokens = self._storable_tokens(state)
        groups = zip(state.groups, self._chunk_tokens, strict=True)
        return any(g.cursor < self._storable_chunks(g, tokens // per_chunk) for g, per_chunk in groups)

    def plan(self, states: Iterable[RequestState], budget: int, now: float) -> Plan:
        """Offer what is storable, at most ``budget`` chunks; moves the cursors."""
        plan = Plan([], [], [])
        alone: list[_Offer] = []
        short: list[list[_Offer]] = [[] for _ in self._chunk_tokens]
        longest = min(SHORT, self._most_joint)
        for state in states:
            if state.tainted:
                continue
            tokens = self._storable_tokens(state)
            is_cut = is_late = False
            for group, per_chunk in zip(state.groups, self._chunk_tokens, strict=True):
                filled = tokens // per_chunk
                if filled <= group.cursor:
                    continue
                group.learn_keys(state.req.block_hashes)
                is_late = is_late or filled > len(group.hashes)
                stop = self._storable_chunks(group, filled)
                self._pass_over(state, group, stop)
                start = group.cursor
                if stop - start > budget:
                    stop = start + budget
                    is_cut = True
                if start < stop:
                    budget -= stop - start
                    # What is keyed beyond it may be there already, and is then to learn again what it extends.
                    is_short = stop - start <= longest and stop == len(group.hashes)
                    (short[group.index] if is_short else alone).append((state, group, start, stop))
            if is_cut:
                plan.cut.append(state)
            elif is_late:
                plan.late.append(state)
        for same_group in short:
            for lot in self._lots(same_group):
                plan.jobs.extend(self._joint_stores(lot, alone, now))
        plan.jobs.extend(self._stores_one_by_one(alone, now))
        return plan

    def _lots(self, offers: list[_Offer]) -> Iterator[list[_Offer]]:
        """What may share a job: offers in their order, with as many chunks together as are allowed."""
        first = chunks = 0
        for i, (_, _, start, stop) in enumerate(offers):
            chunks += stop - start
            if chunks > self._most_joint:
                yield offers[first:i]
                first, chunks = i, stop - start
        if offers:
            yield offers[first:]

    def _joint_stores(self, lot: list[_Offer], alone: list[_Offer], now: float) -> list[Planned]:
        """As few stores as will do, in halves where one of them stands in the way; what is left over goes to ``alone``.

        So a request that says again what another has said does not keep all the others from sharing.
        """
        joint = self._joint_store(lot, now)
        if joint is not None:
            return [joint]
        if len(lot) <= FEW:
            alone += lot
            return []
        half = len(lot) // 2
        return [*self._joint_stores(lot[:half], alone, now), *self._joint_stores(lot[half:], alone, now)]

    def _joint_store(self, offers: Sequence[_Offer], now: float) -> Planned | None:
        """One store for offers of one group."""
        n = self._geometry.blocks_per_chunk
        index = offers[0][1].index
        hashes: list[bytes] = []
        extends: list[bytes] = []
        chunks: list[int] = []
        lives: list[RequestState] = []
        block_ids: list[int] = []
        for state, group, start, stop in offers:
            hashes += group.hashes[start:stop]
            extends += group.hashes[start - 1 : stop - 1] if start else [b"", *group.hashes[: stop - 1]]
            chunks += range(start, stop)
            lives += [state] * (stop - start)
            block_ids += group.block_ids[start * n : stop * n]
        offer = JointOffer(index, hashes, extends, chunks, [state.context for state in lives])
        reservation = self._manager.prepare_joint_store(offer, now=now)
        if reservation is None:
            return None
        for _, group, _, stop in offers:
            group.cursor = stop
        transfer = self._transfer(index, reservation, np.array(block_ids, dtype=np.int64))
        return tuple(lives), [PlannedStore(reservation, transfer)]

    def _stores_one_by_one(self, offers: Iterable[_Offer], now: float) -> list[Planned]:
        """A store for each life, of all its groups."""
        planned: dict[RequestState, list[PlannedStore]] = {}
        for state, group, start, stop in offers:
            plan = self._manager.prepare_store(group.run(start, stop), state.context, now=now)
            group.cursor = plan.settled
            if plan.reservation is not None:
                planned.setdefault(state, []).append(self._planned(group, plan.reservation))
        return [((state,), stores) for state, stores in planned.items()]

    def _pass_over(self, state: RequestState, group: GroupState, stop: int) -> None:
        """Chunks below ``stop`` that a window has left behind count as settled."""
        window = self._windows[group.index]
        if window is not None and group.cursor < stop:
            group.cursor = self._first_in_window(state, group, window, stop)

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
