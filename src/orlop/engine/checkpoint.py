"""Reads a model directory in the Hugging Face format.

In: a directory with config.json, safetensors and, where there is text, tokenizer.json. Out: a ``Checkpoint``: the
model's configuration, its weights one by one as float32, its tokenizer, its end tokens. Never: a guess; what the
engine would compute wrongly is refused by name.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor

from orlop.engine.model import Model, ModelConfig, RopeScaling
from orlop.errors import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


SHOWN_CHARACTERS = 60
"""Of a value that is wrong, in a message."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """What one architecture has beside the others, and what its config.json may leave out."""

    qkv_bias: bool = False
    qk_norm: bool = False
    has_windows: bool = True
    window_is_optional: bool = True
    """Whether ``use_sliding_window`` has to say so before a window counts."""
    head_dim: int | None = None
    norm_eps: float = 1e-6


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(has_windows=False),
    "MistralForCausalLM": Architecture(window_is_optional=False),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True),
    "Qwen3ForCausalLM": Architecture(qk_norm=True, head_dim=128),
}
REFUSED = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "hidden_act": (None, "silu"),
}
"""Settings that the engine knows in these values only."""

ROPE_KINDS = ("default", "linear", "llama3")
MOST_LAYERS = 4096
MOST_COUNT = (1 << 31) - 1
"""Beyond these no model is meant, and arithmetic fails."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model directory whose config.json has been understood; weights and tokenizer are read when asked for."""

    directory: Path
    config: ModelConfig
    end_tokens: frozenset[int]

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Checkpoint:
        """``ConfigError`` for a directory that is none, holds no model, or one that this engine does not run."""
        try:
            is_directory = os.path.isdir(os.fspath(directory))
        except TypeError:
            raise ConfigError(f"model: found {directory!r}, expected the path of a directory") from None
        root = Path(os.fsdecode(directory))
        if not is_directory:
            raise ConfigError(f"model {root}: found no directory, expected one with config.json and safetensors")
        settings = _read_json(root / "config.json")
        config = model_config(settings, f"{root / 'config.json'}")
        path = root / "generation_config.json"
        generation = _read_json(path) if path.exists() else {}
        ends = _end_tokens(generation, str(path)) or _end_tokens(settings, str(root / "config.json"))
        return cls(root, config, ends)

    def load(self, limit_bytes: int) -> Model:
        """The model with its weights. Reads all files; ``ConfigError`` where they do not fit config.json.

        ``limit_bytes``: memory that there is for them.
        """
        weights = SafetensorWeights(self.directory)
        found = weights.float32_bytes()
        if found > limit_bytes:
            raise ConfigError(
                f"model {self.directory}: found weights of {found} bytes in float32, expected {limit_bytes} at most, "
                "what this process may have beside the KV cache; take a smaller model, or lower num_blocks"
            )
        model = Model(self.config, weights)
        weights.refuse_untaken(["lm_head.weight"] if self.config.tied_embeddings else [])
        return model

    def tokenizer(self) -> Tokenizer | None:
        """None where there is no tokenizer.json: prompts are token ids then."""
        path = self.directory / "tokenizer.json"
        if not path.exists():
            return None
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower one
            raise ConfigError(f"{path}: cannot be read as a tokenizer: {error}; load the file again") from error


class SafetensorWeights:
    """The tensors of one file or of several with an index; each is read when it is taken."""

    def __init__(self, root: Path) -> None:
        self._where = self._locate(root)
        self._untaken = dict(self._where)
        self._files: dict[Path, Any] = {}

    def float32_bytes(self) -> int:
        """What all tensors take in memory; reads the files' headers alone."""
        shapes: list[list[int]] = [
            _reading(path, lambda path=path, name=name: self._file(path).get_slice(name).get_shape())
            for name, path in self._where.items()
        ]
        return 4 * sum(math.prod(shape) for shape in shapes)

    def take(self, name: str, *shape: int) -> Tensor:
        """``ConfigError`` for a tensor that is missing, cut off, or of another shape than config.json says."""
        path = self._where.get(name)
        if path is None:
            raise ConfigError(
                f"weights: found no tensor {name!r}, expected one; config.json and weights are not of the same model"
            )
        self._untaken.pop(name, None)
        tensor: Tensor = _reading(path, lambda: self._file(path).get_tensor(name))
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            found = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            raise ConfigError(
                f"{path}: found {name!r} of shape {found}, expected floating point {shape}; "
                "config.json and weights are not of the same model"
            )
        return tensor.float()

    def refuse_untaken(self, allowed: Sequence[str]) -> None:
        """``ConfigError`` for tensors that nobody took: a model that has them would say something else without."""
        left = [name for name in self._untaken if name not in allowed and not name.endswith("rotary_emb.inv_freq")]
        if left:
            raise ConfigError(
                f"weights: found {len(left)} tensors that this architecture does not have, {left[0]!r} among them; "
                "the engine cannot run this model"
            )

    @staticmethod
    def _locate(root: Path) -> dict[str, Path]:
        if (root / INDEX).exists():
            names = _read_json(root / INDEX).get("weight_map")
            if not isinstance(names, dict):
                raise ConfigError(f"{root / INDEX}: found no 'weight_map', expected one; load the file again")
            return {name: root / str(file) for name, file in names.items()}
        path = root / SINGLE
        if not path.exists():
            raise ConfigError(f"model {root}: found neither {SINGLE} nor {INDEX}, expected one of them")
        with _reading(path, lambda: _opened(path)) as file:
            return dict.fromkeys(file.keys(), path)

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = _opened(path)
        return self._files[path]


def _opened(path: Path) -> Any:
    path.open("rb").close()  # says what is wrong; the library calls a file that may not be read missing
    return safe_open(path, framework="pt")


def _reading(path: Path, read: Any) -> Any:
    try:
        return read()
    except (OSError, SafetensorError, ValueError) as error:  # a name that no file can have is a ValueError
        raise ConfigError(f"{path}: cannot be read as safetensors: {error}; load the file again") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}, expected a file of the model") from error
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise ConfigError(f"{path}: found no JSON ({error}), expected one JSON object; load the file again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: found {type(found).__name__}, expected one JSON object; load the file again")
    return found


# --- config.json ------------------------------------------------------------------------------------------


def model_config(settings: Mapping[str, Any], where: str) -> ModelConfig:
    """The configuration that ``settings`` (a config.json) describe; ``ConfigError`` names what is not supported."""
    names = settings.get("architectures") or ["none"]
    if not isinstance(names, list):
        raise ConfigError(f"{where}: found {_short(names)} for 'architectures', expected a list of one name")
    name = str(names[0])
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        raise ConfigError(
            f"{where}: found the architecture {name}, which the engine does not run; "
            f"expected one of {', '.join(ARCHITECTURES)}"
        )
    for name, known in REFUSED.items():
        if settings.get(name) not in known:
            expected = " or ".join(repr(value) for value in known[1:]) or "none"
            raise ConfigError(f"{where}: found {name} {settings[name]!r}, expected {expected}: no other is supported")
    hidden, heads = _count(settings, "hidden_size", where), _count(settings, "num_attention_heads", where)
    kv_heads = _count(settings, "num_key_value_heads", where, heads)
    layers = _count(settings, "num_hidden_layers", where, most=MOST_LAYERS)
    theta, scaling = _rope(settings, where)
    return ModelConfig(
        vocab_size=_count(settings, "vocab_size", where),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_count(settings, "head_dim", where, architecture.head_dim or hidden // heads),
        intermediate=_count(settings, "intermediate_size", where),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_number(settings, "rms_norm_eps", where, architecture.norm_eps),
        windows=_windows(settings, architecture, layers, where),
        qkv_bias=architecture.qkv_bias,
        qk_norm=architecture.qk_norm,
        tied_embeddings=bool(settings.get("tie_word_embeddings", False)),
        max_positions=_count(settings, "max_position_embeddings", where),
    )


def _count(
    settings: Mapping[str, Any],
    name: str,
    where: str,
    default: int | None = None,
    *,
    least: int = 1,
    most: int = MOST_COUNT,
) -> int:
    value = settings.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        found = "nothing" if value is None else _short(value)
        raise ConfigError(f"{where}: found {found} for '{name}', expected a whole number from {least} to {most}")
    return value


def _number(settings: Mapping[str, Any], name: str, where: str, default: float | None = None) -> float:
    """A number above 0. JSON as Python reads it has NaN and Infinity, with which every logit would be NaN."""
    value = settings.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        found = "nothing" if value is None else _short(value)
        raise ConfigError(f"{where}: found {found} for '{name}', expected a number above 0")
    return float(value)


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= SHOWN_CHARACTERS else shown[:SHOWN_CHARACTERS] + "..."


def _end_tokens(settings: Mapping[str, Any], where: str) -> frozenset[int]:
    """The tokens after which the model has said all; none where the setting is missing."""
    ends = settings.get("eos_token_id")
    each = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(isinstance(token, int) for token in each):
        raise ConfigError(f"{where}: found {ends!r} for 'eos_token_id', expected a token id or a list of them")
    return frozenset(each)


def _windows(
    settings: Mapping[str, Any], architecture: Architecture, layers: int, where: str
) -> tuple[int | None, ...]:
    """Of each layer its window, None for full attention; empty where no layer has one."""
    is_on = architecture.has_windows and (not architecture.window_is_optional or settings.get("use_sliding_window"))
    if not is_on or settings.get("sliding_window") is None:
        return ()
    window = _count(settings, "sliding_window", where)
    if not architecture.window_is_optional:
        return (window,) * layers
    kinds = settings.get("layer_types")
    if kinds is None:
        first = _count(settings, "max_window_layers", where, layers, least=0)
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in list(known) for kind in kinds):
        raise ConfigError(
            f"{where}: found layer_types {_short(kinds)}, expected {layers} times full_attention or sliding_attention"
        )
    windows = tuple(known[kind] for kind in kinds)
    return windows if any(windows) else ()


def _rope(settings: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from ``rope_parameters`` or from the older ``rope_theta`` and ``rope_scaling``."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"{where}: found {rope!r} for the rotary embedding, expected an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KINDS or any(isinstance(value, dict) for value in rope.values()):
        found = kind if kind not in ROPE_KINDS else "one per kind of layer"
        raise ConfigError(f"{where}: found rotary embedding {found!r}, expected {', '.join(ROPE_KINDS)}")
    if rope.get("partial_rotary_factor") not in REFUSED["partial_rotary_factor"]:
        raise ConfigError(f"{where}: found partial_rotary_factor {rope['partial_rotary_factor']!r}, expected 1.0")
    theta = _number({"rope_theta": 10_000.0, **settings, **rope}, "rope_theta", where)
    if kind == "default":
        return theta, None
    factor = _number(rope, "factor", where)
    if kind == "linear":
        return theta, RopeScaling(kind, factor)
    low, high = _number(rope, "low_freq_factor", where), _number(rope, "high_freq_factor", where)
    if low >= high:
        raise ConfigError(f"{where}: found low_freq_factor {low}, high_freq_factor {high}, expected a higher high one")
    return theta, RopeScaling(kind, factor, low, high, _count(rope, "original_max_position_embeddings", where))
