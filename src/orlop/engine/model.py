"""A small Llama-shaped model with seeded weights, over paged KV tensors, in float32 on the CPU.

In: token ids, positions, block tables. Out: logits. Never: a file, a checkpoint, a choice of what to run.

The same seed gives the same weights everywhere, so two processes can share stored KV. Attention is computed
sequence by sequence: the logits of a token depend on its own sequence alone, up to float32 rounding in the
matrix products that all tokens of a step share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of the model; everything that determines its weights is in here.

    ``attention_scale`` multiplies the random query and key weights: above 1 a token attends to a few others
    instead of to the mean of all, so that a wrong block of KV changes what is generated.
    """

    vocab_size: int = 512
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 128
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    attention_scale: float = 2.5
    seed: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers, in float32."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 4

    def layer_names(self) -> tuple[str, ...]:
        return tuple(f"layers.{i}" for i in range(self.layers))


@dataclass(frozen=True, slots=True)
class Span:
    """Rows ``first .. last - 1`` of a batch: the tokens of one sequence that this step computes.

    ``blocks``: int64 (blocks,), its block table. ``context``: tokens with KV once this step has run.
    """

    first: int
    last: int
    blocks: Tensor
    context: int


@dataclass(frozen=True, slots=True)
class Batch:
    """All tokens of a step, one after the other.

    ``tokens``, ``positions``, ``write_blocks``, ``write_offsets``: int64 (tokens,). ``sample_rows``: int64, the
    rows whose logits are wanted.
    """

    tokens: Tensor
    positions: Tensor
    write_blocks: Tensor
    write_offsets: Tensor
    spans: tuple[Span, ...]
    sample_rows: Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer, each (out, in)."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class Model:
    """``forward`` writes the KV of a batch and answers the logits of its sample rows."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        source = torch.Generator().manual_seed(config.seed)

        def weight(rows: int, columns: int, scale: float = 1.0) -> Tensor:
            drawn: Tensor = torch.randn(rows, columns, generator=source)
            return drawn * float(scale * columns**-0.5)

        c = config
        self._embedding = torch.randn(c.vocab_size, c.hidden, generator=source)
        self._layers = [
            Layer(
                query=weight(c.heads * c.head_dim, c.hidden, c.attention_scale),
                key=weight(c.kv_heads * c.head_dim, c.hidden, c.attention_scale),
                value=weight(c.kv_heads * c.head_dim, c.hidden),
                output=weight(c.hidden, c.heads * c.head_dim),
                gate=weight(c.intermediate, c.hidden),
                up=weight(c.intermediate, c.hidden),
                down=weight(c.hidden, c.intermediate),
            )
            for _ in range(c.layers)
        ]
        self._head = weight(c.vocab_size, c.hidden, 4.0)
        self._frequencies = c.rope_theta ** (-torch.arange(0, c.head_dim, 2) / c.head_dim)

    def new_kv_caches(self, num_blocks: int, block_tokens: int) -> dict[str, Tensor]:
        """One float32 tensor per layer: (num_blocks, 2 for K and V, kv_heads, block_tokens, head_dim)."""
        c = self.config
        shape = (num_blocks, 2, c.kv_heads, block_tokens, c.head_dim)
        return {name: torch.zeros(shape) for name in c.layer_names()}

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_caches: dict[str, Tensor]) -> Tensor:
        """Logits, float32 (sample rows, vocabulary)."""
        hidden: Tensor = self._embedding[batch.tokens]
        cos, sin = self._rotation(batch.positions)
        for name, layer in zip(self.config.layer_names(), self._layers, strict=True):
            hidden = hidden + self._attention(layer, self._norm(hidden), cos, sin, batch, kv_caches[name])
            normed = self._norm(hidden)
            hidden = hidden + (functional.silu(normed @ layer.gate.T) * (normed @ layer.up.T)) @ layer.down.T
        last = self._norm(hidden[batch.sample_rows])
        return functional.linear(last, self._head)

    def _attention(
        self, layer: Layer, hidden: Tensor, cos: Tensor, sin: Tensor, batch: Batch, kv_cache: Tensor
    ) -> Tensor:
        c, rows = self.config, len(hidden)
        query = self._rotate((hidden @ layer.query.T).view(rows, c.heads, c.head_dim), cos, sin)
        key = self._rotate((hidden @ layer.key.T).view(rows, c.kv_heads, c.head_dim), cos, sin)
        value = (hidden @ layer.value.T).view(rows, c.kv_heads, c.head_dim)
        # All KV of the step is written before anything is read: a sequence may share a block that another
        # one fills in this very step.
        kv_cache[batch.write_blocks, 0, :, batch.write_offsets] = key
        kv_cache[batch.write_blocks, 1, :, batch.write_offsets] = value
        attended = torch.empty(rows, c.heads * c.head_dim)
        for span in batch.spans:
            attended[span.first : span.last] = self._attend(query[span.first : span.last], span, kv_cache)
        return attended @ layer.output.T

    def _attend(self, query: Tensor, span: Span, kv_cache: Tensor) -> Tensor:
        """Causal attention of one sequence's queries (n, heads, head_dim) over its blocks: (n, heads * head_dim)."""
        c, rows = self.config, len(query)
        # (blocks, 2, kv_heads, block_tokens, head_dim) to (2, kv_heads, context, head_dim)
        gathered = kv_cache[span.blocks].permute(1, 2, 0, 3, 4).reshape(2, c.kv_heads, -1, c.head_dim)
        keys, values = gathered[:, :, : span.context]
        mask = None
        if rows > 1:
            own = torch.arange(span.context - rows, span.context)
            mask = torch.arange(span.context) <= own[:, None]
        out = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
        )
        return out[0].transpose(0, 1).reshape(rows, -1)

    def _norm(self, hidden: Tensor) -> Tensor:
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.config.norm_eps)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * self._frequencies
        return angles.cos()[:, None], angles.sin()[:, None]

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary position embedding: the halves of each head as the two coordinates of a plane."""
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
