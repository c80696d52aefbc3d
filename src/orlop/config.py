"""Every setting, frozen, with its unit.

In: a mapping (a file, a command line, vLLM's ``kv_connector_extra_config``) and the environment. Out: one
frozen ``OrlopConfig``, or one ``ConfigError`` that names every problem at once. Never: a default that hides a
typing mistake, an import of what a setting names, a file opened because a setting names it.

Keys in a file are short (``drain_deadline``); attributes carry their unit (``drain_deadline_s``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictBool,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo

from orlop.core import KVGroup
from orlop.errors import ConfigError

ENV_PREFIX = "ORLOP_"
TIER_TYPES = ("disk", "files")
TIER_TYPES_TO_COME = ("objects", "valkey")
POLICIES = ("lru", "arc", "s3fifo", "sieve")

CHUNK_BYTES_WANTED = 512 * 1024
CHUNK_TOKENS_AT_MOST = 256
FILES_BYTES_AT_LEAST = 1 << 20
MOST_BYTES = 1 << 60
MOST_SECONDS = 366 * 24 * 3600
MOST_COUNT = (1 << 31) - 1
MOST_THREADS = 256
"""Beyond these nothing is meant, and arithmetic, locks or the machine fail."""

_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_SECRET = re.compile(r"secret|password|token$|access_key|credential", re.IGNORECASE)
_MOST_DIGITS = 40
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_SIZE_UNITS = {"": 1, "B": 1} | {
    f"{letter}{tail}": base**power
    for power, letter in enumerate("KMGTP", start=1)
    for tail, base in (("B", 1000), ("iB", 1024))
}
_TIME_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


# --- values -----------------------------------------------------------------------------------------


def parse_size(value: object) -> int:
    """Bytes of ``64``, ``"64GB"`` (powers of 1000) or ``"64GiB"`` (powers of 1024). ``ValueError`` otherwise."""
    allowed = "a whole number of bytes above 0, at most 2**60, or a text like '64GB' or '64GiB'"
    nbytes = _quantity(value, {unit.upper(): factor for unit, factor in _SIZE_UNITS.items()}, upper=True)
    if nbytes is None or not 1 <= nbytes <= MOST_BYTES or nbytes != int(nbytes):
        raise ValueError(allowed)
    return int(nbytes)


def parse_seconds(value: object) -> float:
    """Seconds of ``3``, ``0.2``, ``"3s"`` or ``"200ms"``. ``ValueError`` otherwise."""
    seconds = _quantity(value, _TIME_UNITS)
    if seconds is None or not 0 <= seconds <= MOST_SECONDS:
        raise ValueError("seconds from 0 up to a year, or a text like '200ms', '3s' or '5min'")
    return float(seconds)


def _parse_wait(value: object) -> float:
    seconds = parse_seconds(value)
    if seconds == 0:
        raise ValueError("seconds above 0, up to a year; with 0 nothing would ever come in time")
    return seconds


def _quantity(value: object, units: Mapping[str, float], upper: bool = False) -> float | None:
    """A number with a unit; None for what is neither. Whole numbers stay exact."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return value
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    number, unit = match.groups()
    factor = units.get(unit.upper() if upper else unit)
    if factor is None or len(number) > _MOST_DIGITS:
        return None
    return int(number) * factor if number.isdigit() else float(number) * factor


def _parse_count(value: object, most: int = MOST_COUNT) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"a whole number from 1 to {most}")
    return value


def _parse_threads(value: object) -> int:
    return _parse_count(value, MOST_THREADS)


def _parse_blocks(value: object) -> int | None:
    if value is None or value == "auto":
        return None
    try:
        return _parse_count(value)
    except ValueError:
        raise ValueError(f"'auto' or a whole number from 1 to {MOST_COUNT}") from None


def _named_or_class(value: object, known: Sequence[str], to_come: Sequence[str], what: str) -> str:
    there = ", ".join(known)
    if value in to_come:
        raise ValueError(f"{there}, or 'module:Class'; the {what} {value!r} is known but not there yet")
    if not isinstance(value, str) or (value not in known and not _CLASS.fullmatch(value)):
        raise ValueError(f"{there}, or 'module:Class'" + _did_you_mean(value, known))
    return value


def _parse_policy(value: object) -> str:
    return _named_or_class(value, POLICIES, (), "policy")


def _parse_tier_policy(value: object) -> str:
    if value not in POLICIES:
        raise ValueError(f"{', '.join(POLICIES)}: the policy of a store is its own")
    return str(value)


def _parse_type(value: object) -> str:
    if value == "fs":
        raise ValueError("'files', which is what vLLM's 'fs' is called here")
    return _named_or_class(value, TIER_TYPES, TIER_TYPES_TO_COME, "tier type")


def _parse_write(value: object) -> str:
    if value not in ("through", "evicted", "off"):
        raise ValueError("'through', 'evicted' or 'off'")
    return str(value)


def _parse_text(value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError("a text that is not empty")
    return value


def _parse_path(value: object) -> str | None:
    """``~`` and ``~name`` at the beginning are homes: no shell has been here before."""
    text = _parse_text(value)
    path = os.path.expanduser(text) if text else text
    if path and ("\0" in path or not _is_encodable(path)):
        raise ValueError("a path without NUL characters, in the encoding of this system")
    if path and path.startswith("~"):
        raise ValueError("a path; nobody's home is known by that name, write './~...' for a directory called so")
    return path


def _is_encodable(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


Size = Annotated[int, BeforeValidator(parse_size)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]
Wait = Annotated[float, BeforeValidator(_parse_wait)]
Count = Annotated[int, BeforeValidator(_parse_count)]
Policy = Annotated[str, BeforeValidator(_parse_policy)]
Text = Annotated[str | None, BeforeValidator(_parse_text)]


# --- the schema ----------------------------------------------------------------------------------------


class _Settings(BaseModel):
    """What all settings share: frozen, closed, and silent about secrets."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True, hide_input_in_errors=True
    )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, _masked(name or "", value)


class DeadlineConfig(_Settings):
    """How long a tier may take, in seconds, before the request goes on without it."""

    lookup_s: Wait = Field(default=0.2, validation_alias="lookup", description="to say what it has; then it is a miss")
    promotion_s: Wait = Field(
        default=5.0, validation_alias="promotion", description="to fill host memory; then the request computes"
    )
    cascade_s: Wait = Field(
        default=30.0, validation_alias="cascade", description="to keep a chunk; then it is given up"
    )


class HostConfig(_Settings):
    """Host memory, the primary tier."""

    bytes: Annotated[int | None, BeforeValidator(lambda v: None if v is None else parse_size(v))] = Field(
        default=None,
        description="size of the host tier, per engine, all its ranks together, and so of each data parallel replica; "
        "unset: the smaller of a quarter of the memory limit and four device caches, at most half of what is free "
        "(replicas share the quarter and the half), at least four chunks",
    )
    policy: Policy = Field(
        default="lru", description="who leaves when it is full: `lru`, `arc`, `s3fifo`, `sieve`, or `module:Class`"
    )
    store_after: Count = Field(default=1, description="store a chunk only when it is offered for the n-th time")


class TierConfig(_Settings):
    """One secondary tier."""

    type: Annotated[str, BeforeValidator(_parse_type)] = Field(
        description="`disk` (a slab on a local disk), `files` (one file per chunk, also shared), or a chunk store as "
        "`module:Class`"
    )
    path: Annotated[str | None, BeforeValidator(_parse_path)] = Field(
        default=None,
        validate_default=True,
        description="its directory, `~` is your home; required for `disk` and `files`",
    )
    bytes: Annotated[int | None, BeforeValidator(lambda v: None if v is None else parse_size(v))] = Field(
        default=None,
        validate_default=True,
        description="the bound on what it keeps, for `disk` of all engines on that directory together; required for "
        "`disk` and `files`, and 1 MiB or more there",
    )
    write: Annotated[Literal["through", "evicted", "off"], BeforeValidator(_parse_write)] = Field(
        default="through",
        description="`through`: chunks are kept as soon as host memory has them; `evicted`: when they are about to "
        "leave it, and at shutdown; `off`: read only",
    )
    store_after: Count = Field(default=1, description="keep a chunk only when it is offered for the n-th time")
    policy: Annotated[str, BeforeValidator(_parse_tier_policy)] = Field(
        default="lru",
        description="who leaves when it is full: `lru`, for `disk` also `arc`, `s3fifo`, `sieve`; a store of your own "
        "decides for itself",
    )
    required: StrictBool = Field(
        default=False, description="true: unreachable at start is an error, not an open breaker"
    )
    deadline: DeadlineConfig = Field(default=DeadlineConfig(), description="its deadlines")
    threads: Annotated[int, BeforeValidator(_parse_threads)] = Field(default=4, description="threads of its I/O")
    queue_bytes: Size = Field(default=256 * 1024**2, description="bytes that may wait to be stored; more is dropped")
    events: StrictBool = Field(default=True, description="whether cache events, where they are on, tell of it too")
    direct_io: Literal["auto", "on", "off"] = Field(
        default="auto", description="bypass the page cache: `auto`, `on`, `off`"
    )
    sync: StrictBool = Field(
        default=False,
        description="true: what was stored survives a power cut, at two syncs per write; for `disk` alone. What is "
        "served is verified either way",
    )

    @field_validator("sync")
    @classmethod
    def _can_sync(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("type") not in ("disk", None):
            raise ValueError(f"false for type {info.data['type']!r}: only 'disk' can")
        return value

    @field_validator("policy")
    @classmethod
    def _ranks(cls, value: str, info: ValidationInfo) -> str:
        if value != "lru" and info.data.get("type") not in ("disk", None):
            raise ValueError(f"'lru' for type {info.data['type']!r}: only 'disk' takes the others")
        return value

    @field_validator("path", "bytes")
    @classmethod
    def _required(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("type") in TIER_TYPES:
            what = "its directory" if info.field_name == "path" else "a bound like '1TB': no tier grows without one"
            raise ValueError(f"{what} (required for type {info.data['type']!r})")
        return value

    @field_validator("bytes")
    @classmethod
    def _enough(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("type") in TIER_TYPES and value < FILES_BYTES_AT_LEAST:
            raise ValueError(f"'1MiB' or more for type {info.data['type']!r}")
        return value


class OrlopConfig(_Settings):
    """All settings. ``load`` is the way in; direct construction (by attribute names) is for tests."""

    host: HostConfig = Field(default=HostConfig(), description="host memory; a size alone is short for `host.bytes`")
    blocks_per_chunk: Annotated[int | None, BeforeValidator(_parse_blocks)] = Field(
        default=None,
        description="blocks that are offloaded as one unit; `auto` aims at chunks of 512 KiB, at most 256 tokens",
    )
    tokens_per_chunk: Annotated[int | None, BeforeValidator(lambda v: None if v is None else _parse_count(v))] = Field(
        default=None, description="the same as tokens, a multiple of the engine's block; excludes `blocks_per_chunk`"
    )
    offload_decode: StrictBool = Field(default=True, description="also chunks that generated tokens fill")
    hash: Literal["sha256", "blake3"] | None = Field(
        default=None, description="hash of the embedded engine's blocks: `sha256`; unset: the engine's own choice"
    )
    tiers: tuple[TierConfig, ...] = Field(
        default=(), description="secondary tiers, in the order in which they are asked"
    )
    drain_deadline_s: Seconds = Field(
        default=3.0, validation_alias="drain_deadline", description="how long a shutdown waits for the tiers"
    )
    store_deadline_s: Wait = Field(
        default=30.0,
        validation_alias="store_deadline",
        description="how long a copy from the device may stay unreported before it is given up",
    )
    keep_tiers_on_reset: StrictBool = Field(
        default=False, description="true: what was stored before a cache reset is served after it (same weights only)"
    )
    weights: Literal["sampled", "full"] = Field(
        default="sampled", description="how files of weights are told apart: by pages of each (`sampled`)"
    )
    weights_id: Text = Field(
        default=None,
        description="a name for the weights, that changes whenever they do: what is stored under another is not "
        "served; weights that are not files need one for tiers",
    )
    events: StrictBool = Field(
        default=False,
        description="keep cache events (chunks stored in a tier, chunks that left it) for whoever takes them",
    )
    io_process: StrictBool = Field(default=True, description="false: tier I/O by threads of the engine's process")

    _from_env: Mapping[str, str] = PrivateAttr(default_factory=dict)

    SHORTHANDS: ClassVar[tuple[str, ...]] = TIER_TYPES + TIER_TYPES_TO_COME

    @classmethod
    def load(
        cls,
        mapping: Mapping[str, Any] | None,
        *,
        environ: Mapping[str, str] | None = None,
        source: str = "config",
    ) -> OrlopConfig:
        """Settings from ``mapping`` with ``ORLOP_*`` variables over it (None: those of the process).

        ``source`` names the mapping in messages. Raises ``ConfigError`` with every problem found.
        """
        problems: list[Problem] = []
        data = _normalised(mapping, problems)
        from_env = _overlay(data, os.environ if environ is None else environ, problems)
        problems += _impossible(data)
        try:
            config = cls.model_validate(data, by_alias=True, by_name=False)
        except ValidationError as error:
            problems += [_problem(cls, e, data) for e in error.errors()]
        if problems:
            raise ConfigError(_report(problems, from_env, source))
        config._from_env = from_env
        return config

    def settings(self) -> Mapping[str, Any]:
        """Every effective setting by its dotted key, secrets masked."""
        return {key: _masked(key, value) for key, value, _ in _flat(self)}

    def origins(self) -> Mapping[str, str]:
        """Where each setting comes from: ``default``, ``config`` or the name of a variable."""
        return {key: self._from_env.get(key, "config" if is_set else "default") for key, _, is_set in _flat(self)}

    def refuse_what_waits_for_an_engine(self) -> None:
        """``ConfigError`` for a setting that only an engine can honour, and no engine here does yet."""
        waiting = [
            Problem(key, f"found {value!r}, allowed: {allowed}; {value!r} is known but not there yet")
            for key, value, there, allowed in (
                ("hash", self.hash, (None, "sha256"), "'sha256', or leave it out"),
                ("weights", self.weights, ("sampled",), "'sampled', or leave it out"),
            )
            if value not in there
        ]
        if waiting:
            raise ConfigError(_report(waiting, self._from_env, "config"))

    def chunk_blocks(self, groups: Sequence[KVGroup], block_bytes: int) -> int:
        """Blocks per chunk for an engine: as set, or worked out by ``auto_blocks_per_chunk``.

        ``block_bytes``: one block of all layers of the largest group, all ranks together.
        """
        if self.blocks_per_chunk is not None:
            return self.blocks_per_chunk
        if self.tokens_per_chunk is None:
            return auto_blocks_per_chunk(groups, block_bytes)
        tokens_per_block = max(g.tokens_per_block for g in groups)
        if self.tokens_per_chunk % tokens_per_block:
            raise ConfigError(
                f"tokens_per_chunk: found {self.tokens_per_chunk}, allowed: a multiple of the engine's "
                f"{tokens_per_block} tokens per block"
            )
        return self.tokens_per_chunk // tokens_per_block


# --- defaults that depend on the machine or the engine -------------------------------------------------------


def default_host_bytes(
    device_cache_bytes: int, memory_limit_bytes: int, free_bytes: int | None = None, replicas: int = 1
) -> int:
    """Size of a host tier that nobody sized: four device caches, at most its share of the machine.

    That is a quarter of the memory, and half of what is free (None: nothing tells), over the ``replicas`` of the engine
    that share the machine.
    """
    most = memory_limit_bytes // 4
    if free_bytes is not None:
        most = min(most, free_bytes // 2)
    return min(most // replicas, 4 * device_cache_bytes)


def auto_blocks_per_chunk(groups: Sequence[KVGroup], block_bytes: int) -> int:
    """The smallest power of two that makes chunks of 512 KiB or more, within what hits allow.

    At most 256 tokens per chunk, since only whole chunks are found again, and at most the smallest sliding
    window, since a chunk that is longer would keep tokens nobody reads. At least 1.
    """
    tokens = max(g.tokens_per_block for g in groups)
    most = min([CHUNK_TOKENS_AT_MOST, *(g.sliding_window for g in groups if g.sliding_window)])
    blocks = 1
    while blocks * block_bytes < CHUNK_BYTES_WANTED and 2 * blocks * tokens <= most:
        blocks *= 2
    return blocks


# --- from what was written to what the schema reads ------------------------------------------------------------


class Problem(NamedTuple):
    """One thing wrong with the settings: a dotted key, and what is to be said of it."""

    key: str
    text: str


def _normalised(mapping: Mapping[str, Any] | None, problems: list[Problem]) -> dict[str, Any]:
    """A private copy with shorthands spelled out and vLLM's own keys translated."""
    if mapping is not None and not isinstance(mapping, Mapping):
        raise ConfigError(f"settings: found {type(mapping).__name__}, allowed: a mapping of keys to values")
    data: dict[str, Any] = deepcopy(dict(mapping or {}))
    _spell_out(data, problems)
    _translate_vllm(data, problems)
    return data


def _spell_out(data: dict[str, Any], problems: list[Problem]) -> None:
    """``host: "64GB"`` and ``files: {...}`` are short for longer things."""
    if "host" in data and not isinstance(data["host"], Mapping):
        data["host"] = {"bytes": data["host"]}
    short = [key for key in data if key in OrlopConfig.SHORTHANDS]
    if short and ("tiers" in data or "secondary_tiers" in data):
        problems.append(
            Problem(short[0], "found beside a list of tiers, allowed: one of the two; write it as an entry")
        )
    tiers = []
    for key in short:
        entry = data.pop(key)
        if isinstance(entry, Mapping) and "type" not in entry:
            tiers.append({"type": key, **entry})
        else:
            problems.append(Problem(key, f"found {_shown(key, entry)}, allowed: the keys of one tier, without 'type'"))
    if tiers:
        data.setdefault("tiers", tiers)


def _overlay(data: dict[str, Any], environ: Mapping[str, str], problems: list[Problem]) -> dict[str, str]:
    """Write ``ORLOP_*`` variables over ``data``; which key came from which variable."""
    known = {ENV_PREFIX + key.upper().replace(".", "_"): (key, info) for key, info in _keys(data)}
    from_env: dict[str, str] = {}
    for name in sorted(n for n in environ if n.startswith(ENV_PREFIX)):
        if name not in known:
            problems.append(Problem(name, "found an unknown variable" + _did_you_mean(name, known)))
            continue
        key, info = known[name]
        if _put(data, key.split("."), _from_text(info, environ[name])):
            from_env[key] = name
    return from_env


def _put(data: Any, path: Sequence[str], value: Any) -> bool:
    """Set a nested value, making what is missing on the way; False where something else is in the way."""
    *way, last = path
    for part in way:
        data = data[int(part)] if isinstance(data, list) else data.setdefault(part, {})
        if not isinstance(data, (dict, list)):
            return False
    data[last] = value
    return True


def _from_text(info: FieldInfo, text: str) -> Any:
    """The value that a variable's text stands for; what it does not fit stays text and is refused later."""
    kinds = {info.annotation, *get_args(info.annotation)}
    if bool in kinds:
        return _WORDS.get(text.lower(), text)
    if int in kinds and re.fullmatch(r"-?[0-9]+", text):
        return int(text)
    return text


def _keys(data: Mapping[str, Any]) -> Iterator[tuple[str, FieldInfo]]:
    """Dotted key and field of every scalar setting, those of the tiers that ``data`` has included."""
    yield from _scalars(OrlopConfig)
    tiers = data.get("tiers")
    if isinstance(tiers, list):
        for i, tier in enumerate(tiers):
            if isinstance(tier, dict):
                yield from ((f"tiers.{i}.{key}", info) for key, info in _scalars(TierConfig))


def _scalars(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        key = prefix + _key_of(name, info)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _scalars(info.annotation, key + ".")
        elif name != "tiers":
            yield key, info


def _key_of(name: str, info: FieldInfo) -> str:
    return info.validation_alias if isinstance(info.validation_alias, str) else name


def _flat(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Dotted key, value and "was it given" of every setting."""
    for name, info in type(model).model_fields.items():
        key, value = prefix + _key_of(name, info), getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _flat(value, key + ".")
        elif name == "tiers":
            for i, tier in enumerate(value):
                yield from _flat(tier, f"{key}.{i}.")
        else:
            yield key, value, name in model.model_fields_set


# --- vLLM's own keys -------------------------------------------------------------------------------------------


_VLLM_REFUSED = {
    "spec_module_path": "a class of vLLM's is not run here; write tiers: [{'type': 'module:Class', ...}] with a "
    "chunk store of your own",
    "cache_policy_module_path": "a policy of vLLM's is not run here; write host: {'policy': 'module:Class'} with a "
    "policy of your own",
    "max_tracker_size": "the memory of host.store_after is bounded by itself; leave it out",
    "backpressure": "a tier drops stores beyond its queue by itself; write the tier's queue_bytes, or leave it out",
}
_VLLM_REFUSED_IF_TRUE = {
    "self_describing_kv_events": "an event names each chunk by the hash under which it is found; leave it out",
    "canonical_layout": "chunks have one layout, Orlop's own; leave it out",
}
_VLLM_TIER_REFUSED = {
    "module_path": "a tier class of vLLM's is not run here; write 'type': 'module:Class' with your chunk store",
    "class_name": "a tier class of vLLM's is not run here; write 'type': 'module:Class' with your chunk store",
    "locality": "it is a label of events, which name the tier instead; leave it out",
    "backpressure": _VLLM_REFUSED["backpressure"],
}
_VLLM_SPECS = ("CPUOffloadingSpec", "TieringOffloadingSpec")


def _translate_vllm(data: dict[str, Any], problems: list[Problem]) -> None:
    """Replace the keys of vLLM's own offloading connector by ours, or say what to write instead.

    The one place that knows them. ``store_threshold`` 0 and 1 both mean "store at once" there.
    """

    def refuse(key: str, value: Any, why: str) -> None:
        problems.append(Problem(key, f"found {_shown(key, value)}, a setting of vLLM's own connector: {why}"))

    def move(old: str, path: str, value: Any) -> None:
        *way, last = path.split(".")
        place = data.setdefault(way[0], {}) if way else data
        if isinstance(place, dict) and place.get(last, value) != value:
            problems.append(
                Problem(old, f"found beside {path}={place[last]!r}, which says something else; allowed: one of the two")
            )
        elif isinstance(place, dict):
            place[last] = value

    for key, why in _VLLM_REFUSED.items():
        if (value := data.pop(key, None)) is not None:
            refuse(key, value, why)
    for key, why in _VLLM_REFUSED_IF_TRUE.items():
        if value := data.pop(key, False):
            refuse(key, value, why)
    if (spec := data.pop("spec_name", _VLLM_SPECS[0])) not in _VLLM_SPECS:
        refuse("spec_name", spec, f"allowed: {', '.join(_VLLM_SPECS)}, or leave it out")
    for old, new in (
        ("cpu_bytes_to_use", "host.bytes"),
        ("block_size", "tokens_per_chunk"),
        ("eviction_policy", "host.policy"),
    ):
        if old in data:
            move(old, new, data.pop(old))
    if "store_threshold" in data:
        threshold = data.pop("store_threshold")
        move("store_threshold", "host.store_after", 1 if threshold == 0 else threshold)
    if "offload_prompt_only" in data:
        prompt_only = data.pop("offload_prompt_only")
        if isinstance(prompt_only, bool):
            move("offload_prompt_only", "offload_decode", not prompt_only)
        else:
            refuse("offload_prompt_only", prompt_only, "allowed: true or false; write offload_decode, its opposite")
    if (tiers := data.pop("secondary_tiers", None)) is not None:
        if not isinstance(tiers, (list, tuple)) or not all(isinstance(t, Mapping) for t in tiers):
            refuse("secondary_tiers", tiers, "allowed: a list of mappings; write tiers")
        else:
            move("secondary_tiers", "tiers", [_translate_tier(i, dict(t), refuse) for i, t in enumerate(tiers)])


def _translate_tier(index: int, tier: dict[str, Any], refuse: Any) -> dict[str, Any]:
    """One entry of vLLM's ``secondary_tiers``; a part of ``_translate_vllm``."""
    where = f"secondary_tiers.{index}."
    for key, why in _VLLM_TIER_REFUSED.items():
        if (value := tier.pop(key, None)) is not None:
            refuse(where + key, value, why)
    tier.setdefault("events", tier.pop("enable_kv_events", False))
    kind = tier.get("type")
    tier["type"] = {"fs": "files", "obj": "objects"}.get(str(kind), kind)
    if "root_dir" in tier:
        tier["path"] = tier.pop("root_dir")
    threads = [tier.pop(key) for key in ("n_read_threads", "n_write_threads", "io_threads") if key in tier]
    if threads and all(isinstance(n, int) for n in threads):
        tier.setdefault("threads", sum(threads))  # one pool serves both ways: as many threads altogether
    if kind == "fs" and "bytes" not in tier:
        refuse(where + "bytes", None, "its fs tier grows without a bound, here bytes is required: add 'bytes': '1TB'")
        tier["bytes"] = FILES_BYTES_AT_LEAST  # said once
    if kind == "obj":
        for key in ("store_config", "prefix"):
            tier.pop(key, None)  # the type itself is refused
    return tier


# --- what is wrong -----------------------------------------------------------------------------------------------


def _impossible(data: Mapping[str, Any]) -> list[Problem]:
    """Relations between settings that can never work, read from raw values so that all problems are said at once."""
    problems = []
    if data.get("blocks_per_chunk") not in (None, "auto") and data.get("tokens_per_chunk") is not None:
        problems.append(Problem("tokens_per_chunk", "found beside blocks_per_chunk, allowed: one of the two"))
    seen: dict[str, int] = {}
    tiers = data.get("tiers")
    for i, tier in enumerate(tiers if isinstance(tiers, (list, tuple)) else ()):
        path = tier.get("path") if isinstance(tier, Mapping) else None
        if not isinstance(path, str) or not path:
            continue
        first = seen.setdefault(os.path.abspath(os.path.expanduser(path)), i)
        if first != i:
            problems.append(
                Problem(
                    f"tiers.{i}.path", f"found {path!r}, the path of tiers.{first}; allowed: one tier per directory"
                )
            )
    return problems


_ALLOWED = {
    "bool_type": "true or false",
    "string_type": "a text",
    "missing": "a value (required)",
    "model_type": "a mapping of keys to values",
    "tuple_type": "a list",
}


def _problem(model: type[BaseModel], error: Any, data: Any) -> Problem:
    """One of pydantic's errors in our words."""
    loc = error["loc"]
    key = ".".join(str(part) for part in loc)
    found = _shown(key, error["input"])
    if error["type"] == "extra_forbidden":
        names = list(_names(model, loc[:-1]))
        return Problem(key, f"found an unknown key{_did_you_mean(loc[-1], names)}; allowed: {', '.join(sorted(names))}")
    if error["type"] == "missing":
        return Problem(key, "found nothing, allowed: " + _ALLOWED["missing"])
    if error["type"] == "literal_error":
        allowed = error["ctx"]["expected"] + _did_you_mean(error["input"], re.findall(r"'(\w+)'", error["msg"]))
    elif error["type"] == "value_error":
        allowed = str(error["ctx"]["error"])
    else:
        allowed = _ALLOWED.get(error["type"], error["msg"])
    return Problem(key, f"found {found}, allowed: {allowed}")


_SECTIONS: Mapping[str, type[BaseModel]] = {"tiers": TierConfig, "host": HostConfig, "deadline": DeadlineConfig}


def _names(model: type[BaseModel], path: Sequence[str | int]) -> Iterator[str]:
    """The keys that the schema has at ``path``."""
    here: type[BaseModel] = model
    for part in path:
        if isinstance(part, str):
            here = _SECTIONS[part]
    yield from (_key_of(name, info) for name, info in here.model_fields.items())
    if here is OrlopConfig:
        yield from TIER_TYPES


def _report(problems: Sequence[Problem], from_env: Mapping[str, str], source: str) -> str:
    lines = []
    for key, text in problems:
        origin = f" (from {from_env[key]})" if key in from_env else ""
        lines.append(f"  {key}{origin}: {text}")
    count = f"{len(lines)} problem{'s' if len(lines) > 1 else ''}"
    return "\n".join([f"{source}: {count} in the settings", *lines])


def _did_you_mean(word: object, known: Any) -> str:
    close = get_close_matches(str(word), [str(k) for k in known], n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "nothing"
    text = repr(_masked(key, value))
    return text if len(text) <= 80 else text[:77] + "..."


def _masked(key: str, value: Any) -> Any:
    """``value`` without what nobody may read in a log."""
    if value is not None and _SECRET.search(key):
        return "***"
    if isinstance(value, Mapping):
        return {k: _masked(str(k), v) for k, v in value.items()}
    return value


__all__ = [
    "DeadlineConfig",
    "HostConfig",
    "OrlopConfig",
    "TierConfig",
    "auto_blocks_per_chunk",
    "default_host_bytes",
    "parse_seconds",
    "parse_size",
]
