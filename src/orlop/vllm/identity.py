"""Who may share bytes with a vLLM engine: all that it says of itself and that determines what a chunk holds.

In: vLLM's configuration. Out: a JSON-able mapping for the namespace, and why what is stored may not outlive the
process, where it may not. Never: a path, a host name, a rank, a time: equal engines say the same on every host.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import vllm
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, iter_layer_specs

from orlop.errors import ConfigError
from orlop.tiering.namespace import weights_identity

WEAK_HASHES = ("xxhash", "xxhash_cbor")
"""Not cryptographic: a prompt can be made up whose blocks have the hashes of another's. Nothing that is kept for others
may go by them."""
TEXT_ONLY = ("_name_or_path", "transformers_version", "architectures_path")
"""Of a model's config: what says nothing about its KV, and may differ between hosts."""


def identity(vllm_config: Any, kv_cache_config: Any, weights_id: str | None) -> tuple[dict[str, Any], str | None]:
    """What determines the bytes, and why tiers must stay off (None: they need not).

    ``weights_id`` is the user's own name for the weights, which then need not be found. Reads the weight files.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    weights, trouble = _weights(vllm_config, weights_id)
    seed, seedless = _hash_seed(cache.prefix_caching_hash_algo)
    said = {
        "engine": "vllm",
        "version": vllm.__version__.partition("+")[0],
        "device": current_platform.device_type,
        "model": _model(model),
        "weights": weights,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "scales": bool(getattr(cache, "calculate_kv_scales", False)),
        "layout": str(kv_cache_config.kv_cache_layout),
        "groups": [_group(group) for group in kv_cache_config.kv_cache_groups],
        "attention": str(getattr(vllm_config.attention_config, "backend", None)),
        "tensor_parallel": parallel.tensor_parallel_size,
        "hash": {"name": cache.prefix_caching_hash_algo, "seed": seed},
        "adapters": vllm_config.lora_config is not None,
        "draft": _draft(vllm_config.speculative_config),
    }
    return said, trouble or seedless


def _model(model_config: Any) -> Mapping[str, Any]:
    """The model's own config in clear: architecture, sizes, positions, windows."""
    config = model_config.hf_config
    said = {k: v for k, v in json.loads(config.to_json_string(use_diff=False)).items() if k not in TEXT_ONLY}
    if "longrope" in json.dumps(said) or "dynamic" in json.dumps(said.get("rope_parameters", "")):
        said["orlop_max_model_len"] = model_config.max_model_len  # which set of factors applies depends on it
    return said


def _group(group: Any) -> Mapping[str, Any]:
    spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
    return {
        "kind": get_kv_cache_spec_kind(group.kv_cache_spec).value,
        "dtype": str(getattr(spec, "dtype", None)),
        "quantisation": str(getattr(spec, "kv_quant_mode", None)),
        "draft": bool(group.is_eagle_group),
    }


def _draft(speculative: Any) -> Mapping[str, Any] | None:
    """Draft layers live in the same blocks as the model's own."""
    if speculative is None:
        return None
    draft = getattr(speculative, "draft_model_config", None)
    return {"method": str(speculative.method), "model": None if draft is None else _model(draft)}


def _weights(vllm_config: Any, weights_id: str | None) -> tuple[Any, str | None]:
    """What tells the weights apart, or why nothing does."""
    if weights_id is not None:
        return None, None  # the connector writes the name itself into what it is told
    if vllm_config.lora_config is not None:
        return None, "adapters are told apart by their names alone; set weights_id to a name that changes with them"
    if vllm_config.load_config.load_format == "dummy":
        return None, "the weights are made up (load_format dummy); set weights_id to a name for them"
    model = vllm_config.model_config
    directory = _model_directory(model.model, model.revision)
    if directory is None:
        return None, f"no local files of the weights of {model.model!r} were found; set weights_id to a name for them"
    try:
        return weights_identity(directory), None
    except ConfigError as error:
        return None, str(error)


def _model_directory(model: str, revision: str | None) -> str | None:
    """Where a model's files lie on this host: its own directory, or the hub's cache. Nothing is fetched."""
    if os.path.isdir(model):
        return model
    try:
        from huggingface_hub import snapshot_download

        return str(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception:  # whatever the hub's client thinks of the name: then there are no files
        return None


def _hash_seed(name: str) -> tuple[str | None, str | None]:
    """A digest of what the first block's hash starts from, or why nothing may be kept under such hashes."""
    if name in WEAK_HASHES:
        return None, (
            f"block hashes of {name} are not cryptographic, so a prompt can be made up that gets another's chunks; "
            "start vLLM with --prefix-caching-hash-algo sha256"
        )
    from vllm.utils.hashing import get_hash_fn_by_name

    seed = resolve_none_hash_seed(get_hash_fn_by_name(name))
    return hashlib.blake2b(seed.encode(), digest_size=16).hexdigest(), None
