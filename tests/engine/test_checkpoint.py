"""Model directories: what is read from them, what equals ``transformers``, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from patience import PATIENT
from safetensors.torch import load_file, save_file

from orlop.engine.llm import LLM, EngineConfig
from orlop.engine.model import ModelConfig
from orlop.engine.sampling import SamplingParams
from orlop.errors import ConfigError
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


# --- what is read besides ---------------------------------------------------------------------------------


def generated(directory, **settings):
    with engine_of(directory, **settings) as llm:
        return [r.tokens for r in llm.generate([[1, 2, 3], list(range(60))], 8)]


def test_shards_with_an_index_are_the_same_model(tmp_path):
    whole = write_checkpoint(tmp_path / "whole", "qwen3")
    parts = write_checkpoint(tmp_path / "parts", "qwen3", shards=3)
    assert not (parts / "model.safetensors").exists()
    assert generated(parts) == generated(whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_run_in_float32(tmp_path, dtype):
    directory = write_checkpoint(tmp_path, dtype=dtype)
    llm = engine_of(directory)
    assert {t.dtype for t in llm.runner.kv_caches.values()} == {torch.float32}
    assert llm.logits_after([1, 2, 3]).dtype == torch.float32
    assert generated(directory)


def test_layers_of_two_kinds_share_tensors_and_every_group_has_its_own_blocks(tmp_path):
    llm = engine_of(write_checkpoint(tmp_path, "qwen2"))
    spec = llm.spec()
    assert [(g.sliding_window, g.layers) for g in spec.groups] == [
        (None, ("layers.0", "layers.1")),
        (24, ("layers.2", "layers.3")),
    ]
    assert len({t.data_ptr() for t in llm.runner.kv_caches.values()}) == 2
    assert spec.device_cache_bytes == 64 * 8 * llm.config.model.kv_bytes_per_token


def test_identity_is_of_the_weights_and_not_of_the_place(tmp_path):
    one = engine_of(write_checkpoint(tmp_path / "one")).spec().identity
    same = engine_of(write_checkpoint(tmp_path / "same")).spec().identity
    other = engine_of(write_checkpoint(tmp_path / "other", seed=1)).spec().identity
    assert one == same
    assert one != other
    assert LLM(EngineConfig()).spec().identity["weights"] is None
    assert LLM(EngineConfig()).spec().identity["model"]["seed"] == 0


@pytest.mark.fault("B039")
def test_a_restart_on_the_same_files_loads_and_other_weights_never_do(tmp_path):
    tier = {"type": "files", "path": str(tmp_path / "files"), "bytes": "64MiB", "deadline": dict(PATIENT)}
    offload = {"host": {"bytes": 1 << 20}, "blocks_per_chunk": 1, "io_process": False, "tiers": [tier]}
    prompt = list(range(100))

    def loaded_by(directory):
        with LLM(directory, EngineConfig(num_blocks=64, block_tokens=8, drain_deadline_s=60), offload) as llm:
            (result,) = llm.generate([prompt], SamplingParams(5, ignore_eos=True))
        return result.loaded_tokens

    same = write_checkpoint(tmp_path / "same", "qwen2")
    assert [loaded_by(same), loaded_by(same)] == [0, 96]
    assert loaded_by(write_checkpoint(tmp_path / "other", "qwen2", seed=1)) == 0
    assert loaded_by(write_checkpoint(tmp_path / "theta", "qwen2", rope_theta=20_000.0)) == 0
    assert loaded_by(write_checkpoint(tmp_path / "window", "qwen2", sliding_window=25)) == 0
    assert loaded_by(write_checkpoint(same, "qwen2", seed=2)) == 0  # new weights in the same place
    assert loaded_by(write_checkpoint(tmp_path / "copy", "qwen2")) == 96


# --- what is refused --------------------------------------------------------------------------------------


def refused(directory):
    with pytest.raises(ConfigError) as caught:
        engine_of(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("settings", [{"max_window_layers": "x"}, {"sliding_window": 10**30}])
def test_windows_that_cannot_be_are_refused(tmp_path, settings):
    write_checkpoint(tmp_path, "qwen2")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    assert f"for '{next(iter(settings))}', expected a whole number" in refused(tmp_path)


@pytest.mark.parametrize("directory", ["", "\0", "\ud800", "x" * 5000, b"missing", 5, ["model"]])
def test_what_is_no_path_of_a_directory_is_refused(directory):
    assert "model" in refused(directory)


@pytest.mark.parametrize("file", ["", "\0", "\ud800", "x" * 5000, None])
def test_an_index_that_names_no_file_is_refused(tmp_path, file):
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": file}}))
    assert "cannot be read as safetensors" in refused(tmp_path)


def test_a_directory_without_a_model_is_refused(tmp_path):
    assert "found no directory" in refused(tmp_path / "nowhere")
    assert "config.json: cannot be read: No such file" in refused(tmp_path)
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "found neither model.safetensors nor model.safetensors.index.json" in refused(tmp_path)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "found the architecture GPT2LMHeadModel"),
        ({"architectures": None}, "found the architecture none"),
        ({"architectures": "LlamaForCausalLM"}, "found 'LlamaForCausalLM' for 'architectures', expected a list"),
        ({"architectures": 5}, "found 5 for 'architectures'"),
        ({"hidden_act": "gelu"}, "found hidden_act 'gelu', expected 'silu'"),
        ({"mlp_bias": True}, "found mlp_bias True"),
        ({"attention_bias": True}, "found attention_bias True"),
        ({"quantization_config": {"quant_method": "awq"}}, "found quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "found rotary embedding 'yarn', expected default"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "found rotary embedding 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "found nothing for 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "found 'x' for 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "found 0 for 'factor', expected a number above 0"),
        ({"rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": float("inf")}}, "found inf for"),
        ({"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 4.0}}, "found low_freq_factor 4.0, high_freq_factor 4.0"),
        ({"rope_theta": float("nan")}, "found nan for 'rope_theta'"),
        ({"rope_theta": 10**400}, "for 'rope_theta', expected a number above 0"),
        ({"rms_norm_eps": float("nan")}, "found nan for 'rms_norm_eps'"),
        ({"max_position_embeddings": 10**30}, "for 'max_position_embeddings', expected a whole number from 1 to"),
        ({"num_hidden_layers": 10**9}, "found 1000000000 for 'num_hidden_layers'"),
        ({"rope_scaling": "linear"}, "found 'linear' for the rotary embedding"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "'one per kind of layer'"),
        ({"num_hidden_layers": 0}, "found 0 for 'num_hidden_layers'"),
        ({"vocab_size": "many"}, "found 'many' for 'vocab_size'"),
        ({"num_attention_heads": None}, "found nothing for 'num_attention_heads'"),
        ({"num_key_value_heads": 3}, "found 4 query heads, 3 KV heads"),
        ({"rms_norm_eps": "small"}, "found 'small' for 'rms_norm_eps'"),
        ({"eos_token_id": "end"}, "found 'end' for 'eos_token_id'"),
        ({"intermediate_size": 100}, "expected floating point (100, 64)"),
    ],
)
def test_a_config_that_this_engine_does_not_run_is_refused_by_name(tmp_path, settings, says):
    write_checkpoint(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    (tmp_path / "generation_config.json").unlink()
    assert says in refused(tmp_path)


@pytest.mark.parametrize("kinds", [["full_attention"], ["full_attention", "linear_attention"] * 2, 7, [[], {}] * 2])
def test_unknown_kinds_of_layers_are_refused(tmp_path, kinds):
    write_checkpoint(tmp_path, "qwen2")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_types": kinds}))
    assert "found layer_types" in refused(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00\xff", pytest.param('{"a":' * 100_000, id="nested")])
def test_files_that_are_no_json_are_refused_by_name(tmp_path, file, content):
    write_checkpoint(tmp_path)
    (tmp_path / file).write_bytes(content.encode("latin-1"))
    assert file in refused(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
@pytest.mark.parametrize("shards", [1, 2])
def test_truncated_safetensors_are_refused_by_name(tmp_path, share, shards):
    write_checkpoint(tmp_path, shards=shards)
    path = sorted(tmp_path.glob("*.safetensors"))[-1]
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert str(path) in refused(tmp_path)


def test_weights_that_miss_a_tensor_or_have_one_too_many_are_refused(tmp_path):
    write_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "layers.3.mlp.up" not in n}, tmp_path / "model.safetensors")
    assert "found no tensor 'model.layers.3.mlp.up_proj.weight'" in refused(tmp_path)
    save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, tmp_path / "model.safetensors")
    assert "'model.layers.0.self_attn.q_proj.bias'" in refused(tmp_path)


def test_weights_beyond_the_memory_limit_are_refused_before_they_are_read(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, dtype=torch.bfloat16, shards=2)
    weights = sum(load_file(p)[n].numel() * 4 for p in tmp_path.glob("*.safetensors") for n in load_file(p))
    kv_cache = 64 * 8 * 4 * 2 * 2 * 16 * 4
    monkeypatch.setattr("orlop.engine.llm.memory_limit_bytes", lambda: weights + kv_cache - 1)
    assert f"found weights of {weights} bytes in float32, expected {weights - 1} at most" in refused(tmp_path)
    monkeypatch.setattr("orlop.engine.llm.memory_limit_bytes", lambda: weights + kv_cache)
    assert generated(tmp_path)


def test_a_shard_that_is_missing_is_refused_by_name(tmp_path):
    write_checkpoint(tmp_path, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refused(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    assert "found no 'weight_map'" in refused(tmp_path)


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ({"layers": 0}, "layers: found 0"),
        ({"heads": 4, "kv_heads": 3}, "found 4 query heads, 3 KV heads"),
        ({"head_dim": 15}, "head_dim of 15"),
        ({"windows": (None,)}, r"windows: found \(None,\)"),
        ({"windows": (None, 0)}, r"windows: found \(None, 0\)"),
    ],
)
def test_a_shape_that_no_transformer_has_is_refused(shape, says):
    with pytest.raises(ConfigError, match=says):
        ModelConfig(**shape)


def test_two_engine_configs_are_one_too_many():
    with pytest.raises(ConfigError, match="two EngineConfigs"):
        LLM(EngineConfig(), EngineConfig())
