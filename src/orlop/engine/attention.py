"""Attention over paged KV: which rows of a step attend to which places of the cache.

In: block tables and positions of a step, then queries and one layer's KV tensor. Out: what is attended to. Never: a
weight, a choice of blocks.

A place is one token's room in a layer's tensor: block times ``block_tokens`` plus the offset in the block. A plan
is made once per step and KV group and serves all layers of that group. Sequences that compute one token are
attended together, those of similar length in one call; prompts one by one. Only places that hold the sequence's
own tokens are ever read, so what else lies in a block, NaN included, has no way into a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

Int64s = npt.NDArray[np.int64]


class Part(NamedTuple):
    """Rows ``row .. row + length - 1`` of a step: tokens ``start`` and following of a sequence, and its block table."""

    row: int
    start: int
    length: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Decodes:
    """One row each of several sequences.

    ``rows`` (n,), ``places`` (n * longest,), ``mask`` bool (n, 1, 1, longest), None where all are as long.
    """

    rows: Tensor
    places: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Rows ``first .. last - 1``, of one sequence. ``places`` (tokens,), ``mask`` bool (rows, tokens)."""

    first: int
    last: int
    places: Tensor
    mask: Tensor


class AttentionPlan:
    """One step in one KV group. ``writes``: int64 (rows,), the place of each row's own token."""

    def __init__(self, parts: Sequence[Part], block_tokens: int, window: int | None) -> None:
        self._block_tokens = block_tokens
        self._window = window
        self.writes = torch.from_numpy(np.concatenate([self._places_of(p, p.start, p.start + p.length) for p in parts]))
        self._prompts = [self._prompt(part) for part in parts if part.length > 1]
        by_length: dict[int, list[Part]] = {}
        for part in parts:
            if part.length == 1:  # padded to the longest of the call, which is less than twice as long
                by_length.setdefault((part.start + 1 - self._first(part)).bit_length(), []).append(part)
        self._decodes = [self._decode(alike) for alike in by_length.values()]

    def attend(self, query: Tensor, cache: Tensor) -> Tensor:
        """Causal attention of ``query`` (rows, heads, head_dim) over ``cache`` (places, 2, kv_heads, head_dim).

        The answer is (rows, heads * head_dim). Head ``h`` reads KV head ``h * kv_heads // heads``.
        """
        rows, heads, dim = query.shape
        kv_heads = cache.shape[2]
        grouped = query.view(rows, kv_heads, heads // kv_heads, dim)
        attended = torch.empty_like(grouped)
        for decodes in self._decodes:
            n = len(decodes.rows)
            kv = cache.index_select(0, decodes.places).view(n, -1, 2, kv_heads, dim)
            keys, values = kv.permute(2, 0, 3, 1, 4)
            # The query heads of one KV head stand where a prompt has its rows: none of them is copied.
            attended[decodes.rows] = functional.scaled_dot_product_attention(
                grouped[decodes.rows], keys, values, attn_mask=decodes.mask
            )
        for prompt in self._prompts:
            keys, values = cache.index_select(0, prompt.places).permute(1, 2, 0, 3)[:, :, None]
            shape = (kv_heads, heads // kv_heads, -1, dim)
            attended[prompt.first : prompt.last] = functional.scaled_dot_product_attention(
                grouped[prompt.first : prompt.last].permute(1, 2, 0, 3),
                keys.expand(shape[0], shape[1], keys.shape[2], dim),
                values.expand(shape[0], shape[1], values.shape[2], dim),
                attn_mask=prompt.mask,
            ).permute(2, 0, 1, 3)
        return attended.view(rows, heads * dim)

    # --- making it ----------------------------------------------------------------------------------------

    def _first(self, part: Part) -> int:
        """The first token that any row of ``part`` attends to."""
        return 0 if self._window is None else max(0, part.start + 1 - self._window)

    def _places_of(self, part: Part, first: int, stop: int) -> Int64s:
        """The places of tokens ``first .. stop - 1``."""
        size = self._block_tokens
        skipped = first // size
        blocks = np.array(part.block_ids[skipped : -(-stop // size)], np.int64)
        tokens = np.arange(first, stop)
        places: Int64s = blocks[tokens // size - skipped] * size + tokens % size
        return places

    def _prompt(self, part: Part) -> _Prompt:
        first, stop = self._first(part), part.start + part.length
        keys, rows = torch.arange(first, stop), torch.arange(part.start, stop)[:, None]
        mask = keys <= rows
        if self._window is not None:
            mask &= keys > rows - self._window
        return _Prompt(part.row, part.row + part.length, torch.from_numpy(self._places_of(part, first, stop)), mask)

    def _decode(self, parts: Sequence[Part]) -> _Decodes:
        each = [self._places_of(part, self._first(part), part.start + 1) for part in parts]
        lengths = np.array([len(places) for places in each])
        longest = int(lengths.max())
        # Padded with each sequence's own last place: masked, and never anybody else's bytes.
        padded = np.empty((len(each), longest), np.int64)
        for row, places in zip(padded, each, strict=True):
            row[: len(places)], row[len(places) :] = places, places[-1]
        mask = None
        if lengths.min() < longest:
            mask = torch.from_numpy(np.arange(longest) < lengths[:, None])[:, None, None]
        rows = torch.tensor([part.row for part in parts])
        return _Decodes(rows, torch.from_numpy(padded.reshape(-1)), mask)
