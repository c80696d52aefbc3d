"""Small checkpoints made in code: seeded, float32, a tokenizer of whole words.

In: a folder. Out: a directory that vLLM loads like any other. Never: a download.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCABULARY = 320
MODEL_TOKENS = 4096
IMAGE_TOKEN, IMAGE_TOKENS = 7, 16

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MODEL_TOKENS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def make_llama(folder: Path, seed: int = 7, **sizes: Any) -> Path:
    """Full attention in every layer; ``sizes`` of its configuration, where they are others."""
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    return _save(LlamaForCausalLM, LlamaConfig(**{**_SIZES, **sizes}), folder, seed)


def make_gemma(folder: Path, seed: int = 7, window: int = 256) -> Path:
    """Sliding-window layers and full layers: two KV groups."""
    from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3ForCausalLM

    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**_SIZES, sliding_window=window, layer_types=kinds, query_pre_attn_scalar=32)
    return _save(Gemma3ForCausalLM, config, folder, seed)


def make_blip2(folder: Path, seed: int = 7) -> Path:
    """A small OPT behind a small vision tower: a prompt with an image begins with ``IMAGE_TOKENS`` places for it."""
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
    from transformers.models.blip_2.configuration_blip_2 import Blip2Config
    from transformers.models.blip_2.modeling_blip_2 import Blip2ForConditionalGeneration

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = {"vocab_size": VOCABULARY, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": MODEL_TOKENS}
    config = Blip2Config(
        vision_config={**sizes, "image_size": 56, "patch_size": 14},
        qformer_config={**sizes, "encoder_hidden_size": 32, "vocab_size": VOCABULARY},
        text_config={"model_type": "opt", **words, **heads, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=IMAGE_TOKEN,
    )
    _save(Blip2ForConditionalGeneration, config, folder, seed)
    BlipImageProcessorPil(size={"height": 56, "width": 56}).save_pretrained(folder)
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "Blip2Processor", "num_query_tokens": IMAGE_TOKENS})
    )
    return folder


def make_adapter(folder: Path, rank: int = 8) -> Path:
    """A LoRA adapter of the small Llama's query projections."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(3)
    hidden, heads = _SIZES["hidden_size"], _SIZES["num_attention_heads"] * _SIZES["head_dim"]
    tensors = {}
    for layer in range(_SIZES["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, hidden) * 0.3
        tensors[f"{name}.lora_B.weight"] = torch.randn(heads, rank) * 0.3
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _save(model_class: Any, config: Any, folder: Path, seed: int) -> Path:
    import torch

    torch.manual_seed(seed)
    model = model_class(config).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)  # wide enough that the best token leads clearly
    model.save_pretrained(folder)
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", '
        '"unk_token": "<unk>", "chat_template": "{% for m in messages %}{{ m[\'role\'] }} {{ m[\'content\'] }} '
        '{% endfor %}"}'
    )
    return folder


def _tokenizer() -> Any:
    """``w8`` ... ``w319`` are words, and so are tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    names = ["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", "system", "<image>"]
    names += [f"w{n}" for n in range(len(names), VOCABULARY)]
    tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return tokenizer
