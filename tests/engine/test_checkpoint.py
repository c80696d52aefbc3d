"""Model directories: what is read from them, what equals ``transformers``, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from orlop.engine.llm import LLM, EngineConfig
from orlop.engine.sampling import SamplingParams
from orlop.testing.checkpoints import ARCHITECTURES, write_checkpoint

torch.set_num_threads(1)

TOLERANCE = 2e-4
"""Between our logits and those of transformers, both float32, logits of a size of 10: rounding in another order."""
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    **{name: (name, {}) for name in ARCHITECTURES},
    "llama, tied, one KV head": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": None}),
    "llama, llama3 rope": ("llama", {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500_000.0}),
    "llama, rope as of transformers 5": (
        "llama",
        {"rope_theta": None, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500_000.0}},
    ),
    "llama, linear rope": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "qwen2 without windows": ("qwen2", {"use_sliding_window": False}),
    "qwen3 with windows in turn": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 17,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
}


def engine_of(directory, **settings):
    return LLM(directory, EngineConfig(**{"num_blocks": 64, "block_tokens": 8, "idle_wait_s": 0.0, **settings}))


def logits_of_every_position(llm, tokens):
    """Ours, (tokens, vocabulary), over paged KV: a prompt in parts, then token by token."""
    rows = []
    forward = llm.runner.model.forward

    def listen(batch, kv_caches):
        logits = forward(replace(batch, sample_rows=torch.arange(len(batch.tokens))), kv_caches)
        rows.append(logits)
        return logits[batch.sample_rows]

    llm.runner.model.forward = listen
    llm.generate([tokens], SamplingParams(max_tokens=1, ignore_eos=True))
    llm.runner.model.forward = forward
    return torch.cat(rows)


@pytest.mark.parametrize("step_tokens", [1, 23, 512])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(tmp_path, variant, step_tokens):
    transformers = pytest.importorskip("transformers")
    architecture, settings = VARIANTS[variant]
    directory = write_checkpoint(tmp_path / "model", architecture, **settings)
    tokens = torch.randint(0, 250, (100,), generator=torch.Generator().manual_seed(3)).tolist()
    judge = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        expected = judge(torch.tensor([tokens])).logits[0]
    found = logits_of_every_position(engine_of(directory, max_step_tokens=step_tokens), tokens)
    assert expected.abs().max() > 5
    assert (found - expected).abs().max() < TOLERANCE
