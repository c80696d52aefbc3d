"""Whether two runs generated the same tokens, and whether a difference is a tie.

In: the tokens of a run without offload and of one with it. Out: a ``Comparison``. Never: a tolerance for wrong
KV: two correct runs differ by float32 rounding alone, and rounding decides only between logits that are as good
as equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

TIE_GAP = 1e-4
"""Two logits that are nearer to each other than this may change places by rounding."""

LogitsAfter = Callable[[list[int]], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which a request went another way. ``position`` counts generated tokens from 0."""

    request_id: str
    position: int
    expected: int | None
    found: int | None
    gap: float


@dataclass(slots=True)
class Comparison:
    """Requests by how they ended: equal, equal up to a tie, or different."""

    equal: int = 0
    ties: int = 0
    different: list[Difference] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return self.equal + self.ties + len(self.different)


def compare(
    prompts: Mapping[str, list[int]],
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    logits_after: LogitsAfter,
) -> Comparison:
    """Judge every request that both runs have ended.

    At the first difference the logits after the common tokens are computed again, without any cache. A tie is a
    difference between two tokens that are both within ``TIE_GAP`` of the best; what follows it is not compared.
    """
    result = Comparison()
    for request_id, tokens in found.items():
        if request_id not in expected:
            continue
        if tokens == expected[request_id]:
            result.equal += 1
            continue
        difference = _first_difference(request_id, prompts[request_id], expected[request_id], tokens, logits_after)
        if difference.gap < TIE_GAP:
            result.ties += 1
        else:
            result.different.append(difference)
    return result


def _first_difference(
    request_id: str,
    prompt: list[int],
    expected: tuple[int, ...],
    found: tuple[int, ...],
    logits_after: LogitsAfter,
) -> Difference:
    common = min(len(expected), len(found))
    position = next((i for i in range(common) if expected[i] != found[i]), common)
    if position == common:  # one of them stopped early: no rounding does that
        ends = [tokens[position] if position < len(tokens) else None for tokens in (expected, found)]
        return Difference(request_id, position, ends[0], ends[1], float("inf"))
    logits = logits_after(prompt + list(expected[:position]))
    gap = max(logits) - min(logits[expected[position]], logits[found[position]])
    return Difference(request_id, position, expected[position], found[position], gap)
