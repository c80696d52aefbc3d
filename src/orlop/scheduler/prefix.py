"""How far the stored prefix reaches, and whether waiting for it pays.

In: the keys of one request and a way to look them up. Out: two numbers of tokens, what can be loaded now and
what could be loaded if all that is pending came. Never: a side effect on the request; what to do with the
numbers is the caller's.

With ``L`` tokens on the device already, a hit of ``T > L`` tokens needs from host memory, per group::

    full attention    tokens [L, T)                       so T <= the end of the readable prefix
    sliding window W  tokens [max(L, T - W + 1), T)       so some T's work and others do not

A T that suits every group is found from above: start at the limit, let each group lower T to the largest value
that suits it, and repeat until no group objects (two or three rounds in practice; T only falls). Within a
window group the search runs right to left and, at the first chunk ``c`` that is not there, jumps to the end of
chunk ``c - 1``: every T between needs ``c`` too. The search runs twice over the same answers, once counting only
what is readable, once counting all that may become so; waiting pays if and only if the second T is larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from orlop.core import Geometry, KeyRun, KVGroup, Lookup, PrefixAnswer
from orlop.scheduler.request import GroupState

SCAN_CHUNKS = 32
"""How far beyond the needed chunks a window group is looked up in one call."""


class Hit(NamedTuple):
    """Tokens of the longest usable prefix: loadable now, and if all that is pending comes."""

    ready_tokens: int
    hope_tokens: int
    valid_until: float


class Lookups(NamedTuple):
    """The manager's two bulk lookups, bound to one request."""

    prefix: Callable[[KeyRun], PrefixAnswer]
    each: Callable[[KeyRun], Sequence[Lookup]]
    retry_until: float
    """Until when a RETRY of ``each`` may stand."""
    pending_until: float
    """Until when a HIT_PENDING of ``each`` may stand."""


def needed_chunks(geometry: Geometry, group: KVGroup, on_device: int, tokens: int) -> tuple[int, int]:
    """The chunk range ``[first, stop)`` that a hit of ``tokens`` needs of ``group``: none for a window of one token."""
    first = on_device
    if group.sliding_window is not None:
        first = max(first, tokens - group.sliding_window + 1)
    chunk_tokens = geometry.chunk_tokens(group.index)
    stop = -(-tokens // chunk_tokens)
    return (first // chunk_tokens if first < tokens else stop), stop


def find_hit(geometry: Geometry, groups: Sequence[GroupState], on_device: int, limit: int, lookups: Lookups) -> Hit:
    """The longest hit of at most ``limit`` tokens beyond the ``on_device`` tokens that are there."""
    searches: list[_FullSearch | _WindowSearch] = []
    for spec, state in zip(geometry.groups, groups, strict=True):
        kind = _FullSearch if spec.sliding_window is None else _WindowSearch
        searches.append(kind(geometry, spec, state, on_device, limit, lookups))
    searches.sort(key=lambda s: isinstance(s, _WindowSearch))
    ready = _agree(searches, geometry.hit_alignment, on_device, limit, hopeful=False)
    hope = _agree(searches, geometry.hit_alignment, on_device, limit, hopeful=True)
    return Hit(ready, hope, min((s.valid_until for s in searches), default=math.inf))


def _agree(
    searches: Sequence[_FullSearch | _WindowSearch], alignment: int, on_device: int, limit: int, hopeful: bool
) -> int:
    tokens = limit
    while True:
        before = tokens
        for search in searches:
            tokens = search.largest(tokens, hopeful)
            tokens -= tokens % alignment
            if tokens <= on_device:
                return on_device
        if tokens == before:
            return tokens


class _FullSearch:
    """Full attention: one bulk prefix lookup, made when first needed."""

    def __init__(
        self, geometry: Geometry, spec: KVGroup, state: GroupState, on_device: int, limit: int, lookups: Lookups
    ) -> None:
        self._chunk_tokens = geometry.chunk_tokens(spec.index)
        self._start = on_device // self._chunk_tokens
        self._stop = max(self._start, min(-(-limit // self._chunk_tokens), len(state.hashes)))
        self._state = state
        self._lookups = lookups
        self._answer: PrefixAnswer | None = None

    @property
    def valid_until(self) -> float:
        return self._answer.valid_until if self._answer is not None else math.inf

    def largest(self, tokens: int, hopeful: bool) -> int:
        if self._answer is None:
            run = self._state.run(self._start, self._stop)
            self._answer = self._lookups.prefix(run) if len(run) else PrefixAnswer(0, 0, math.inf)
        chunks = self._answer.reach if hopeful else self._answer.ready
        return min(tokens, (self._start + chunks) * self._chunk_tokens)


class _WindowSearch:
    """Sliding window: right to left, each chunk looked up at most once."""

    def __init__(
        self, geometry: Geometry, spec: KVGroup, state: GroupState, on_device: int, limit: int, lookups: Lookups
    ) -> None:
        self._geometry = geometry
        self._spec = spec
        self._state = state
        self._on_device = on_device
        self._lookups = lookups
        self._chunk_tokens = geometry.chunk_tokens(spec.index)
        self._known: dict[int, Lookup] = {}

    @property
    def valid_until(self) -> float:
        answers = self._known.values()
        if Lookup.RETRY in answers:
            return self._lookups.retry_until
        return self._lookups.pending_until if Lookup.HIT_PENDING in answers else math.inf

    def largest(self, tokens: int, hopeful: bool) -> int:
        """The largest multiple of the hit alignment, at most ``tokens``, that this group can serve."""
        worst = Lookup.RETRY if hopeful else Lookup.HIT
        tokens = min(tokens, len(self._state.hashes) * self._chunk_tokens)
        tokens -= tokens % self._geometry.hit_alignment
        while tokens > self._on_device:
            first, stop = needed_chunks(self._geometry, self._spec, self._on_device, tokens)
            missing = next((c for c in range(stop - 1, first - 1, -1) if self._at(c, stop - first) < worst), None)
            if missing is None:
                return tokens
            tokens = missing * self._chunk_tokens
            tokens -= tokens % self._geometry.hit_alignment
        return self._on_device

    def _at(self, chunk: int, needed: int) -> Lookup:
        if chunk not in self._known:
            lowest = self._on_device // self._chunk_tokens
            start = max(lowest, chunk + 1 - max(needed, SCAN_CHUNKS))
            answers = self._lookups.each(self._state.run(start, chunk + 1))
            self._known.update(zip(range(start, chunk + 1), answers, strict=True))
        return self._known[chunk]
