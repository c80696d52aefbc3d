"""Small model directories in the Hugging Face format, made in a moment: for tests, demos and benches.

In: a directory, an architecture, a seed, settings that differ. Out: config.json, safetensors (one file or several with
an index), tokenizer.json, generation_config.json. Never: a trained weight; the model speaks noise, always the same.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, float32
from torch import dtype as Dtype

from orlop.engine.checkpoint import model_config
from orlop.engine.model import Model, ModelConfig, SeededWeights

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 2,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
}
"""Mistral sees a window in all layers, Qwen2 in the last two of four, the others none."""


class _Recorder(SeededWeights):
    """Seeded weights that remember what was taken; norms are drawn too, so that none can be mistaken for another."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.taken: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = super().take(name, *shape)
        if "norm" in name:
            tensor = tensor + 0.3 * super().take("a.bias", *shape)
        self.taken[name] = tensor
        return tensor


def write_checkpoint(
    directory: str | Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    dtype: Dtype = float32,
    shards: int = 1,
    **settings: Any,
) -> Path:
    """Write a model into ``directory`` (made where it is missing); the directory.

    ``settings`` replace entries of config.json; None takes one out. The tokenizer has one token per byte, ids 0 to 255,
    then a begin token, which it adds to prompts, and an end token.
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    config = {**SHAPE, **ARCHITECTURES[architecture], **settings}
    config = {name: value for name, value in config.items() if value is not None}
    (root / "config.json").write_text(json.dumps(config, indent=2))
    (root / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    byte_tokenizer().save(str(root / "tokenizer.json"))
    shape = replace(model_config(config, "config.json"), seed=seed)
    weights = _Recorder(shape)
    Model(shape, weights)
    _write_weights(root, {name: tensor.to(dtype).contiguous() for name, tensor in weights.taken.items()}, shards)
    return root


def _write_weights(root: Path, tensors: dict[str, Tensor], shards: int) -> None:
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(tensors, root / "model.safetensors", metadata)
        return
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    where = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensors[name] for name in tensors if where[name] == file}, root / file, metadata)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def byte_tokenizer() -> Tokenizer:
    """One token per byte of UTF-8, ``<begin>`` 256 before every prompt, ``<end>`` 257."""
    tokenizer = Tokenizer(models.BPE({character: byte for byte, character in enumerate(_characters())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    tokenizer.post_processor = processors.TemplateProcessing("<begin> $A", special_tokens=[("<begin>", 256)])
    return tokenizer


def _characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte: itself if printable, else one above 255."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
