"""How the next token is chosen: greedy, or drawn so that the same request says the same again.

In: one row of logits, a ``SamplingParams``, a seed and a position. Out: one token id. Never: a state. The number
that decides is a hash of seed and position, so neither the other requests of a step nor a preemption changes what
a request says.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from orlop.errors import ConfigError

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What one request wants. ``temperature`` 0 is greedy: the token with the highest logit.

    Above 0 the token is drawn from the ``top_k`` likeliest (0: all), and of those from the likeliest whose
    probabilities reach ``top_p``. ``seed`` None: a seed of its own for every request. It ends after ``max_tokens``,
    after one of ``stop_token_ids``, or after an end token of the model unless ``ignore_eos``.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: Collection[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """``ConfigError`` for a value that no request can be run with."""
        self._require("max_tokens", is_whole(self.max_tokens, 1), "a whole number from 1 up")
        self._require("temperature", is_number(self.temperature), "a number from 0 up")
        self._require("top_k", is_whole(self.top_k, 0), "a whole number from 0 up (0: all tokens)")
        self._require("top_p", is_number(self.top_p) and 0 < self.top_p <= 1, "a number above 0, at most 1")
        is_seed = self.seed is None or (is_whole(self.seed, 0) and self.seed <= MAX_SEED)
        self._require("seed", is_seed, f"a whole number from 0 to {MAX_SEED}, or None")
        # An iterator would be used up by looking.
        is_list = isinstance(self.stop_token_ids, Collection) and not isinstance(self.stop_token_ids, str)
        are_ids = is_list and all(is_whole(t, 0) for t in self.stop_token_ids)
        self._require("stop_token_ids", are_ids, "a list of token ids")
        self._require("ignore_eos", isinstance(self.ignore_eos, bool), "True or False")

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise ConfigError(f"{name}={getattr(self, name)!r}: found a value that cannot work, expected {allowed}")


def is_whole(value: object, least: int) -> bool:
    """Whether ``value`` is a whole number from ``least`` up, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> bool:
    """Whether ``value`` is a number from 0 up that fits into a float, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def sample(logits: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """The token at ``position`` of a sequence (0 is the prompt's first), from float32 ``logits`` (vocabulary,).

    Temperature, then top-k, then top-p (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020), then
    the inverse of the distribution function at a number that follows from ``seed`` and ``position`` alone.
    """
    if params.temperature == 0:
        return int(logits.argmax())
    count = min(params.top_k or len(logits), len(logits))
    best, tokens = torch.topk(logits, count)
    likely = torch.softmax((best - best[0]).double() / params.temperature, dim=0)
    reached = likely.cumsum(0)
    kept = int((reached - likely < params.top_p).sum())
    draw = reached.new_tensor([uniform(seed, position)]) * reached[kept - 1]
    return int(tokens[min(int(torch.searchsorted(reached[:kept], draw, right=True)), kept - 1)])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + position.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53
