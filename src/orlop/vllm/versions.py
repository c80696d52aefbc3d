"""Which releases of vLLM we stand on, and what is looked at where an unknown one is found.

In: vLLM's version, its connector's base class, our connector. Out: nothing, or one ``ConfigError`` that names every
difference. Never: a refusal for a version number alone.

``HOOKS`` is what our connector was written against: the parameters of each hook that it overrides, in their order.
``FIELDS`` is what ``translate`` reads or makes.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module

from orlop.errors import ConfigError

TESTED = ("0.32.0",)
WHAT_TO_DO = "install a tested release of vLLM, or a newer one of Orlop"

HOOKS: Mapping[str, tuple[str, ...]] = {
    "__init__": ("self", "vllm_config", "role", "kv_cache_config"),
    "requires_kv_delivery": (),
    "get_required_kvcache_layout": ("vllm_config",),
    "register_kv_caches": ("self", "kv_caches"),
    "handle_preemptions": ("self", "kv_connector_metadata"),
    "start_load_kv": ("self", "forward_context", "kwargs"),
    "wait_for_layer_load": ("self", "layer_name"),
    "save_kv_layer": ("self", "layer_name", "kv_layer", "attn_metadata", "kwargs"),
    "wait_for_save": ("self",),
    "get_transfer_results": ("self", "finished_req_ids"),
    "build_connector_worker_meta": ("self",),
    "on_new_request": ("self", "request"),
    "get_num_new_matched_tokens": ("self", "request", "num_computed_tokens"),
    "update_state_after_alloc": ("self", "request", "blocks", "num_external_tokens"),
    "get_external_cache_hit_sources": ("self", "request", "num_external_tokens"),
    "build_connector_meta": ("self", "scheduler_output"),
    "update_connector_output": ("self", "connector_output"),
    "request_finished": ("self", "request", "block_ids"),
    "request_finished_all_groups": ("self", "request", "block_ids"),
    "has_pending_push_work": ("self",),
    "get_kv_connector_stats": ("self",),
    "build_kv_connector_stats": ("data",),
    "build_prom_metrics": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    "reset_cache": ("self",),
    "take_events": ("self",),
    "shutdown": ("self",),
}

FIELDS: Mapping[str, tuple[str, ...]] = {
    "vllm.config:ParallelConfig": (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "nnodes",
        "data_parallel_size",
        "data_parallel_size_local",
        "data_parallel_external_lb",
        "enable_elastic_ep",
        "elastic_ep_max_dp_size",
    ),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "preempted_req_ids",
    ),
    "vllm.v1.core.sched.output:NewRequestData": ("req_id", "block_ids", "num_computed_tokens"),
    "vllm.v1.core.sched.output:CachedRequestData": (
        "req_ids",
        "resumed_req_ids",
        "new_block_ids",
        "num_computed_tokens",
    ),
    "vllm.v1.outputs:KVConnectorOutput": (
        "finished_recving",
        "failed_recving",
        "invalid_block_ids",
        "kv_connector_worker_meta",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorTransferResults": (
        "finished_recving",
        "failed_recving",
    ),
}


def check(version: str, bases: Iterable[type], connector: type) -> None:
    """Refuse a release that was not tested where what we stand on differs; ``ConfigError`` names each difference.

    ``bases``: vLLM's classes whose hooks ``connector`` overrides.
    """
    if version.partition("+")[0] in TESTED:
        return
    found = [*hook_differences(bases, connector), *field_differences()]
    if found:
        raise ConfigError(
            f"vLLM {version}: found another connector interface than that of {', '.join(TESTED)}:\n"
            + "\n".join(f"  {line}" for line in found)
            + f"\nexpected the tested one; {WHAT_TO_DO}"
        )


def lacks(error: ImportError) -> ConfigError:
    """What to raise where vLLM, or a name in it that we import, is not there."""
    found = getattr(sys.modules.get("vllm"), "__version__", "(none)")
    return ConfigError(f"vLLM {found}: {error}, expected what {', '.join(TESTED)} has; {WHAT_TO_DO}")


def hook_differences(bases: Iterable[type], connector: type) -> Iterator[str]:
    """One line per hook that is gone, takes other parameters, or is new and must be there."""
    bases = tuple(bases)
    for name, parameters in HOOKS.items():
        hook = next((vars(c)[name] for base in bases for c in base.__mro__ if name in vars(c)), None)
        if hook is None:
            yield f"{name}: found none, expected {name}({', '.join(parameters)})"
        elif (now := _parameters(hook)) != parameters:
            yield f"{name}: found ({', '.join(now)}), expected ({', '.join(parameters)})"
    for name in sorted(getattr(connector, "__abstractmethods__", ())):
        yield f"{name}: found a hook that every connector must have, expected none beside those known"


def field_differences() -> Iterator[str]:
    """One line per field that we read and that is not there."""
    for place, names in FIELDS.items():
        module, _, name = place.partition(":")
        try:
            there = {field.name for field in dataclasses.fields(getattr(import_module(module), name))}
        except (ImportError, AttributeError, TypeError) as error:
            yield f"{name}: {error}, expected a dataclass in {module}"
            continue
        for missing in sorted(set(names) - there):
            yield f"{name}.{missing}: found no such field, expected one"


def _parameters(hook: object) -> tuple[str, ...]:
    """Names of a hook's parameters; none for a property, and no ``cls``."""
    if isinstance(hook, property):
        return ()
    if isinstance(hook, classmethod):
        return tuple(inspect.signature(hook.__func__).parameters)[1:]
    return tuple(inspect.signature(hook).parameters) if callable(hook) else ()
