"""One request in the embedded engine: its tokens, their hashes, its blocks and where it stands.

In: a prompt and, step by step, the tokens sampled for it. Out: the attributes that a connector reads of a
request (``core.Request``). Never: a decision about when it runs or which blocks it gets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq
from enum import StrEnum

import numpy as np

from orlop.engine.sampling import SamplingParams

HASH_NAME = "sha256"
ROOT_DIGEST = hashlib.sha256(b"orlop embedded engine: start of a prompt").digest()


class Status(StrEnum):
    """Where a sequence stands. Only LOADED, WAITING_FOR_LOAD and RUNNING hold blocks."""

    WAITING = "waiting"
    WAITING_FOR_LOAD = "waiting_for_load"
    """Its blocks are being written by a load; nobody else may have them."""
    LOADED = "loaded"
    """Its load has ended, well or badly; it is not asked for another one and can run."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    """It gave its blocks back and computes from the start again."""
    FINISHED = "finished"


def hash_block(parent: bytes, token_ids: Seq[int]) -> bytes:
    """The 32-byte digest of a full block: of the digest before it and of its tokens as little-endian int32."""
    return hashlib.sha256(parent + np.asarray(token_ids, dtype="<i4").tobytes()).digest()


class Sequence:
    """A prompt that grows by one token per step until ``params`` or an end token of the model stop it.

    ``tokens`` are the known ones, prompt first. ``num_placeholders`` are sampled but not yet reported.
    ``num_computed_tokens`` counts tokens whose KV is in the blocks, or will be by steps handed to the worker;
    ``num_in_flight_tokens`` those of steps that have not reported. ``block_ids[g][i]`` holds, in KV group ``g``,
    tokens ``i * block_tokens`` and following. Times are seconds of the engine's monotonic clock.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Seq[int],
        params: SamplingParams,
        *,
        block_tokens: int,
        num_groups: int = 1,
        arrival_s: float = 0.0,
        seed: int = 0,
        end_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self.request_id = request_id
        self.tokens = list(prompt)
        self.params = params
        self.seed = seed
        self.status = Status.WAITING
        self.block_ids: list[list[int]] = [[] for _ in range(num_groups)]
        self._hashes: list[bytes] = []
        self.block_hashes: Seq[bytes] = self._hashes
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_placeholders = 0
        self.num_loading_tokens = 0
        self.num_registered_blocks = 0
        self.num_preemptions = 0
        self.skip_reading_prefix_cache = False
        self.was_scheduled = False
        self.load_failed = False
        self.aborted = False

        self.arrival_s = arrival_s
        self.first_token_s: float | None = None
        self.device_hit_tokens = 0
        self.loaded_tokens = 0
        self.computed_tokens = 0
        self._most_computed_tokens = 0

        self._block_tokens = block_tokens
        self._stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else end_tokens)
        self._num_prompt_tokens = len(self.tokens)
        self._hash_full_blocks()

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and generated."""
        return len(self.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return self._num_prompt_tokens

    @property
    def num_generated_tokens(self) -> int:
        return len(self.tokens) - self._num_prompt_tokens

    @property
    def generated(self) -> list[int]:
        return self.tokens[self._num_prompt_tokens :]

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that can be scheduled now; 0 where all that may be sampled has been, reported or not."""
        if self.num_generated_tokens + self.num_placeholders >= self.params.max_tokens:
            return 0
        return self.num_tokens + self.num_placeholders - self.num_computed_tokens

    @property
    def has_stopped(self) -> bool:
        """Whether the last known token says that nothing follows it."""
        return self.num_generated_tokens > 0 and self.tokens[-1] in self._stops

    @property
    def has_ended(self) -> bool:
        """Whether the last known token is the last one there will be."""
        return self.has_stopped or self.num_generated_tokens >= self.params.max_tokens

    @property
    def num_needed_tokens(self) -> int:
        """Known tokens whose KV was there at one time; of what has ended, all but the last."""
        return min(max(self._most_computed_tokens, self.num_computed_tokens), self.num_tokens - 1)

    def tables(self) -> tuple[list[int], ...]:
        """Its block tables as they are now, one per KV group: copies."""
        return tuple(list(table) for table in self.block_ids)

    def append(self, token: int) -> None:
        """A sampled token has been reported."""
        self.tokens.append(token)
        self._hash_full_blocks()

    def forget_computed(self) -> None:
        """Its blocks have been freed: all of it is to be computed, should it run again."""
        for table in self.block_ids:
            table.clear()
        self._most_computed_tokens = max(self._most_computed_tokens, self.num_computed_tokens)
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_loading_tokens = 0
        self.num_registered_blocks = 0

    def _hash_full_blocks(self) -> None:
        size = self._block_tokens
        for start in range(len(self._hashes) * size, len(self.tokens) - size + 1, size):
            parent = self._hashes[-1] if self._hashes else ROOT_DIGEST
            self._hashes.append(hash_block(parent, self.tokens[start : start + size]))
