"""The transformer that Llama, Mistral, Qwen2 and Qwen3 share, over paged KV tensors, in float32 on the CPU.

In: a ``ModelConfig`` and weights under their Hugging Face names; then token ids, positions, attention plans. Out:
logits. Never: a file, a choice of what to run.

What one architecture has and another has not is a field of ``ModelConfig``: biases of query, key and value, norms of
query and key, layers that see a window only. Without a checkpoint the weights are drawn from a seed, the same
everywhere, so that two processes can share stored KV.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from orlop.engine.attention import AttentionPlan
from orlop.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for longer contexts: ``linear`` or ``llama3``.

    ``linear`` divides all by ``factor``; ``llama3`` only those whose wave is longer than ``original_positions`` over
    ``low_freq_factor``, none whose wave is shorter than it over ``high_freq_factor``, and goes smoothly between.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of the model. Of a seeded one, everything that determines its weights is in here.

    ``windows``: of each layer the number of last tokens that it sees, None for all; empty: all layers see all.
    ``max_positions``: the most tokens of a sequence, None for no limit. ``attention_scale`` multiplies seeded query and
    key weights: above 1 a token attends to a few others instead of to the mean of all, so that a wrong block of KV
    changes what is generated.
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
    rope_scaling: RopeScaling | None = None
    windows: tuple[int | None, ...] = ()
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    max_positions: int | None = None
    attention_scale: float = 2.5
    seed: int = 0

    def __post_init__(self) -> None:
        """``ConfigError`` for a shape that no transformer has."""
        for name in ("vocab_size", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: found {getattr(self, name)}, allowed: a whole number from 1 up")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ConfigError(
                f"found {self.heads} query heads, {self.kv_heads} KV heads and a head_dim of {self.head_dim}, expected "
                "a multiple of the KV heads and an even head_dim"
            )
        if len(self.windows) not in (0, self.layers) or any(
            window is not None and window < 1 for window in self.windows
        ):
            raise ConfigError(f"windows: found {self.windows}, allowed: for each of {self.layers} layers None, or 1 up")

    @property
    def layer_groups(self) -> dict[int | None, tuple[int, ...]]:
        """The layers of each KV group, by the window that they share; full attention (None) comes first."""
        windows = self.windows or (None,) * self.layers
        kinds = sorted(set(windows), key=lambda window: (window is not None, window))
        return {kind: tuple(i for i, window in enumerate(windows) if window == kind) for kind in kinds}

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V that one token has room for in a block, in float32: those of the largest KV group."""
        layers = max(len(group) for group in self.layer_groups.values())
        return layers * 2 * self.kv_heads * self.head_dim * 4

    def layer_names(self) -> tuple[str, ...]:
        return tuple(f"layers.{i}" for i in range(self.layers))


@dataclass(frozen=True, slots=True)
class Batch:
    """All tokens of a step, one after the other.

    ``tokens``, ``positions``: int64 (tokens,). ``plans``: one per KV group. ``sample_rows``: int64, the rows whose
    logits are wanted.
    """

    tokens: Tensor
    positions: Tensor
    plans: Sequence[AttentionPlan]
    sample_rows: Tensor


class Weights(Protocol):
    """Where weights come from, each asked for once, in the order of the layers."""

    def take(self, name: str, *shape: int) -> Tensor:
        """The float32 tensor called ``name`` (its Hugging Face name), of ``shape``; matrices are (out, in)."""
        ...


class SeededWeights:
    """Random weights that follow from the seed alone."""

    def __init__(self, config: ModelConfig) -> None:
        self._source = torch.Generator().manual_seed(config.seed)
        self._scales = {"q_proj": config.attention_scale, "k_proj": config.attention_scale, "lm_head": 4.0}

    def take(self, name: str, *shape: int) -> Tensor:
        if "norm" in name:
            return torch.ones(shape)
        drawn: Tensor = torch.randn(shape, generator=self._source)
        module = name.split(".")[-2]
        if module == "embed_tokens":
            return drawn
        return drawn * float(self._scales.get(module, 1.0) * shape[-1] ** -0.5)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer, matrices (out, in). ``qkv`` are those of query, key and value, one below the other.

    ``qk_norm`` (heads + kv_heads, head_dim): the norm's weight of each query and key head. ``group``: its KV group.
    """

    group: int
    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Model:
    """``forward`` writes the KV of a batch and answers the logits of its sample rows."""

    def __init__(self, config: ModelConfig, weights: Weights | None = None) -> None:
        """``weights`` None: seeded ones."""
        self.config = c = config
        weights = weights or SeededWeights(config)
        groups = {layer: g for g, layers in enumerate(c.layer_groups.values()) for layer in layers}
        self._embedding = weights.take("model.embed_tokens.weight", c.vocab_size, c.hidden)
        self._layers = [self._take_layer(weights, f"model.layers.{i}", groups[i]) for i in range(c.layers)]
        self._last_norm = weights.take("model.norm.weight", c.hidden)
        head = self._embedding if c.tied_embeddings else weights.take("lm_head.weight", c.vocab_size, c.hidden)
        self._head = head
        self._frequencies = rope_frequencies(c)

    def _take_layer(self, weights: Weights, name: str, group: int) -> Layer:
        c = self.config
        widths = {"q": c.heads * c.head_dim, "k": c.kv_heads * c.head_dim, "v": c.kv_heads * c.head_dim}
        attention = f"{name}.self_attn"
        norms = []
        if c.qk_norm:
            norms = [(weights.take(f"{attention}.{x}_norm.weight", c.head_dim), n) for x, n in self._normed_heads()]
        return Layer(
            group=group,
            attention_norm=weights.take(f"{name}.input_layernorm.weight", c.hidden),
            qkv=torch.cat([weights.take(f"{attention}.{x}_proj.weight", n, c.hidden) for x, n in widths.items()]),
            qkv_bias=torch.cat([weights.take(f"{attention}.{x}_proj.bias", n) for x, n in widths.items()])
            if c.qkv_bias
            else None,
            qk_norm=torch.cat([norm.expand(heads, -1) for norm, heads in norms]) if norms else None,
            output=weights.take(f"{attention}.o_proj.weight", c.hidden, c.heads * c.head_dim),
            mlp_norm=weights.take(f"{name}.post_attention_layernorm.weight", c.hidden),
            gate_up=torch.cat([weights.take(f"{name}.mlp.{x}_proj.weight", c.intermediate, c.hidden) for x in GATE_UP]),
            down=weights.take(f"{name}.mlp.down_proj.weight", c.hidden, c.intermediate),
        )

    def _normed_heads(self) -> tuple[tuple[str, int], ...]:
        return (("q", self.config.heads), ("k", self.config.kv_heads))

    def new_kv_caches(self, num_blocks: int, block_tokens: int) -> dict[str, Tensor]:
        """A float32 tensor per layer name: (num_blocks, block_tokens, 2 for K and V, kv_heads, head_dim).

        A block belongs to one KV group at a time, so layers of different groups share a tensor: the first of each
        the first one, the second of each the second one, and so on.
        """
        c = self.config
        shape = (num_blocks, block_tokens, 2, c.kv_heads, c.head_dim)
        groups = c.layer_groups.values()
        tensors = [torch.zeros(shape) for _ in range(max(len(group) for group in groups))]
        names = c.layer_names()
        caches = {names[layer]: tensor for group in groups for layer, tensor in zip(group, tensors, strict=False)}
        return {name: caches[name] for name in names}

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_caches: Mapping[str, Tensor]) -> Tensor:
        """Logits, float32 (sample rows, vocabulary)."""
        hidden: Tensor = self._embedding[batch.tokens]
        cos, sin = self._rotation(batch.positions)
        for name, layer in zip(self.config.layer_names(), self._layers, strict=True):
            plan, cache = batch.plans[layer.group], kv_caches[name].flatten(0, 1)
            hidden = hidden + self._attention(layer, self._norm(hidden, layer.attention_norm), cos, sin, plan, cache)
            gate, up = functional.linear(self._norm(hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + functional.linear(functional.silu(gate) * up, layer.down)
        return functional.linear(self._norm(hidden[batch.sample_rows], self._last_norm), self._head)

    def _attention(
        self, layer: Layer, hidden: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan, cache: Tensor
    ) -> Tensor:
        c = self.config
        qkv = functional.linear(hidden, layer.qkv, layer.qkv_bias).view(len(hidden), -1, c.head_dim)
        turned, value = qkv[:, : -c.kv_heads], qkv[:, -c.kv_heads :]
        if layer.qk_norm is not None:
            turned = self._norm(turned, None) * layer.qk_norm
        turned = self._rotate(turned, cos, sin)
        query, key = turned[:, : c.heads], turned[:, c.heads :]
        # All KV of the step is written before anything is read: a sequence may share a block that another
        # one fills in this very step.
        cache[plan.writes] = torch.stack((key, value), dim=1)
        return functional.linear(plan.attend(query, cache), layer.output)

    def _norm(self, hidden: Tensor, weight: Tensor | None) -> Tensor:
        return functional.rms_norm(hidden, hidden.shape[-1:], weight, self.config.norm_eps)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * self._frequencies
        return angles.cos()[:, None], angles.sin()[:, None]

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary position embedding: the halves of each head as the two coordinates of a plane."""
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


GATE_UP = ("gate", "up")


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each plane, float32 (head_dim / 2,)."""
    plain = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    turns = scaling.original_positions * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (unscaled + (1 - unscaled) / scaling.factor)
