"""All that is known of one life of a request.

In: an engine's request (read only) and what the hooks say of it. Out: ``RequestState``, one object per life,
and ``Job``, one object per unsettled transfer. Never: a decision, a lookup, a call to a manager.

The states of a life::

    live --request_finished--> draining --last job settled, nothing owed--> gone
      |                            ^
      +-- nothing in flight, nothing owed: gone at once

A request id may come back while an earlier life of it is still draining: that is a new life, with its own
jobs, cursor and context. Preemption does not end a life; it rewinds what is known of its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from orlop.core import Geometry, Int64Array, KeyRun, ReqContext, Request, Reservation, TransferKind


class GroupState:
    """One KV group of one life: keys, blocks, and how far its chunks have been offered.

    ``hashes[i]`` is the key of chunk ``i``; ``block_ids[p]`` the device block at block position ``p``, as last
    told (positions behind a sliding window may have been recycled since). ``cursor``: chunks below it are
    settled: stored, being stored by us, or never to be stored.
    """

    __slots__ = ("block_ids", "cursor", "hashes", "hashes_per_chunk", "index")

    def __init__(self, index: int, hashes_per_chunk: int) -> None:
        self.index = index
        self.hashes_per_chunk = hashes_per_chunk
        self.hashes: list[bytes] = []
        self.block_ids: list[int] = []
        self.cursor = 0

    def learn_keys(self, block_hashes: Sequence[bytes]) -> None:
        """Take over the keys of chunks that the engine has hashed since the last call; costs what is new."""
        first = (len(self.hashes) + 1) * self.hashes_per_chunk - 1
        if first < len(block_hashes):
            self.hashes.extend(block_hashes[first :: self.hashes_per_chunk])

    def run(self, start: int, stop: int) -> KeyRun:
        return KeyRun(self.index, self.hashes, start, stop)


class RequestState:
    """One life. Attributes are plain; the scheduler half alone writes them."""

    __slots__ = (
        "answer",
        "answer_hashes",
        "answer_load",
        "answer_until",
        "answer_version",
        "asked_computed",
        "context",
        "finished",
        "groups",
        "load_base",
        "load_failed",
        "load_origins",
        "looked_ahead",
        "max_load_tokens",
        "max_offload_tokens",
        "queried",
        "req",
        "since",
        "tainted",
        "tokens_before_step",
        "tokens_filled",
        "transfer_jobs",
        "waited_for_load",
        "waits_since",
    )

    def __init__(self, request: Request, context: ReqContext, geometry: Geometry) -> None:
        self.req = request
        self.context = context
        self.groups = tuple(GroupState(g.index, geometry.hashes_per_chunk(g.index)) for g in geometry.groups)
        self.transfer_jobs: set[int] = set()
        self.finished = False
        # The cached answer of get_num_new_matched_tokens, and what it was an answer to.
        self.answer: tuple[int | None, bool] | None = None
        self.answer_version = (0, 0)
        self.answer_until = math.inf
        self.answer_hashes = 0
        self.answer_load: int | None = None
        """The load of another life that the answer waits for."""
        self.asked_computed = 0
        self.since: float | None = None
        """Time of the first ask of the present wait; None while it does not wait."""
        self.queried = False
        """Asked since it last got blocks: what it asked for is counted once it gets them."""
        self.waits_since: float | None = None
        """Time of the first ask that was told to come again; None where none was."""
        self.looked_ahead = False
        """Whether an answer was there before the engine has asked."""
        # Loads.
        self.load_base: int | None = None
        """Tokens below which the device holds real KV while a load, or somebody else's, is in flight or has failed."""
        self.load_failed = False
        self.load_origins: Mapping[str, int] = {}
        self.waited_for_load: int | None = None
        """The one load of another life that this wait has waited, or waits, for."""
        # Stores.
        self.tokens_before_step = 0
        self.tokens_filled = 0
        """Tokens computed once the step in hand is, as of the last time its stores were planned."""
        self.tainted = False
        """It holds KV from before a reset: nothing of it is stored until it starts again from nothing."""
        params = getattr(request, "kv_transfer_params", None) or {}
        self.max_load_tokens = _limit(params, "max_load_tokens")
        self.max_offload_tokens = _limit(params, "max_offload_tokens")

    def learn_keys(self) -> None:
        block_hashes = self.req.block_hashes
        for group in self.groups:
            group.learn_keys(block_hashes)

    def forget_answer(self) -> None:
        self.answer = None

    def end_wait(self) -> None:
        """It has its blocks: what it was told, or has waited for, is of the past."""
        self.load_base = None
        self.since = None
        self.queried = False
        self.waited_for_load = None
        self.forget_answer()

    def rewind(self) -> None:
        """Preempted: its blocks are gone, and what is stored is found out anew."""
        for group in self.groups:
            group.block_ids = []
            group.cursor = 0
        self.tokens_before_step = self.tokens_filled = 0
        self.waits_since = None
        self.end_wait()


class Job:
    """One transfer that some rank has not reported yet.

    ``lives`` are the lives whose chunks it moves: one, or, of a joint store, one for each chunk, in the order of
    ``block_ids``, those of one life together; none once a reset has outdated the job or it is over. ``waiting`` are the
    ranks still to report. ``fenced`` are the device blocks under which the job stands in the fence table. ``rests_on``
    are all blocks that lives of it held when they lost them: from then on nothing else tells which they were.
    """

    __slots__ = (
        "block_ids",
        "deadline",
        "failed",
        "fenced",
        "job_id",
        "kind",
        "lives",
        "reservations",
        "rests_on",
        "waiting",
    )

    def __init__(
        self,
        job_id: int,
        kind: TransferKind,
        lives: tuple[RequestState, ...],
        reservations: tuple[Reservation, ...],
        ranks: int,
        deadline: float,
        block_ids: Int64Array,
    ) -> None:
        self.job_id = job_id
        self.kind = kind
        self.lives = lives
        self.reservations = reservations
        self.waiting = set(range(ranks))
        self.failed = False
        self.deadline = deadline
        self.block_ids = block_ids
        self.fenced: tuple[int, ...] = ()
        self.rests_on: frozenset[int] = frozenset()

    def blocks_of(self, life: RequestState) -> Int64Array:
        """Those of ``block_ids`` that are of one of its lives."""
        share = len(self.block_ids) // len(self.lives)
        start = self.lives.index(life) * share
        return self.block_ids[start : start + self.lives.count(life) * share]


def _limit(params: Any, name: str) -> int | None:
    """A per-request limit in tokens; anything but a non-negative integer is no limit."""
    value = params.get(name) if isinstance(params, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
