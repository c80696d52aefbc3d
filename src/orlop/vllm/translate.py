"""vLLM's words as ours: configuration, KV groups, tensors, results, events.

In: vLLM's objects. Out: an ``EngineSpec``, views of tensors, messages in vLLM's envelopes and back. Never: a decision
about a chunk, state of a request. Requests, blocks and scheduler outputs need no translation: ``core``'s protocols
have vLLM's attribute names, and are read where they lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    SlidingWindowSpec,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
    group_kernel_blocks,
    iter_layer_specs,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from orlop.config import OrlopConfig
from orlop.core import CacheEvent, EngineSpec, JobReport, KVGroup, OffloadingConnectorMetadata, WorkerOutput
from orlop.errors import ConfigError
from orlop.vllm.identity import identity

OFFLOADED = (FullAttentionSpec, SlidingWindowSpec)
"""Specs whose block holds what its prefix determines, and nothing else. Exactly these: a subclass means more.

Latent attention would do as well, but on CPUs vLLM computes it over whole prompts only, never on top of a prefix.
"""

DISK_TIERS = ("files", "disk")
NOTHING = WorkerOutput()


# --- messages in vLLM's envelopes ---------------------------------------------------------------------


@dataclass
class StepMessage(KVConnectorMetadata):
    """Our step message on its way to every rank."""

    message: OffloadingConnectorMetadata


@dataclass
class Reports(KVConnectorWorkerMetadata):
    """Job reports on their way back; vLLM merges those of all ranks."""

    reports: tuple[JobReport, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Reports:
        assert isinstance(other, Reports)
        return Reports(self.reports + other.reports)


def transfer_results(output: WorkerOutput) -> KVConnectorTransferResults:
    """One rank's ended loads. Failures go by request: by block ids vLLM takes them for one KV group only."""
    if not output:
        return KVConnectorTransferResults()
    return KVConnectorTransferResults(
        finished_recving=set(output.finished_recving), failed_recving=set(output.failed_recving)
    )


def reports_of(output: WorkerOutput) -> Reports | None:
    return Reports(output.reports) if output.reports else None


def worker_output(output: KVConnectorOutput) -> WorkerOutput:
    """What all ranks said in one step, merged by vLLM. Beside other connectors its requests may be theirs."""
    said = output.kv_connector_worker_meta
    if not (isinstance(said, Reports) or output.finished_recving or output.invalid_block_ids):
        return NOTHING
    return WorkerOutput(
        reports=said.reports if isinstance(said, Reports) else (),
        finished_recving=frozenset(output.finished_recving or ()),
        failed_recving=frozenset(output.failed_recving or ()),
        invalid_block_ids=frozenset(output.invalid_block_ids or ()),
    )


# --- the engine -----------------------------------------------------------------------------------------


def refuse_what_contradicts(vllm_config: Any, config: OrlopConfig) -> None:
    """``ConfigError`` for settings of ours that vLLM's own say otherwise."""
    role, theirs = vllm_config.kv_transfer_config.kv_role, vllm_config.cache_config.prefix_caching_hash_algo
    if role != "kv_both":
        raise ConfigError(
            f"kv_role: found {role!r}, expected 'kv_both': a cache stores and loads; a tier that is only read has "
            "'write': 'off'"
        )
    if config.hash not in (None, theirs):
        raise ConfigError(
            f"hash: found {config.hash!r}, expected vLLM's {theirs!r}: it hashes the blocks; leave hash out and say "
            "it with --prefix-caching-hash-algo"
        )


def refuse_what_is_not_there(vllm_config: Any) -> None:
    """``ConfigError`` for an engine that this release cannot serve, before anything is made."""
    parallel = vllm_config.parallel_config
    if not current_platform.is_cpu():
        raise ConfigError(
            f"vLLM runs on {current_platform.device_type!r}, expected 'cpu': this release copies KV on CPUs only; "
            "use vLLM's own OffloadingConnector there"
        )
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        found = getattr(parallel, name, 1)
        if found > 1:
            raise ConfigError(f"{name}: found {found}, expected 1: only tensor parallel ranks are offloaded together")
    if getattr(parallel, "nnodes_within_dp", 1) > 1:
        raise ConfigError(
            "found ranks of one engine on several hosts, expected one host: they share one region of host memory"
        )


def load_failure_policy(vllm_config: Any) -> str:
    """What vLLM does about a load that fails, as a worker's process knows it.

    Several connectors are each given a config with their own part for the whole, and vLLM goes by the whole. That one
    is at hand while vLLM sets up a worker, and in the scheduler's process nowhere.
    """
    whole = get_current_vllm_config_or_none() or vllm_config
    return str(whole.kv_transfer_config.kv_load_failure_policy)


def engine_spec(vllm_config: Any, kv_cache_config: Any, weights_id: str | None) -> EngineSpec:
    """What the engine says of itself, the same in all its processes but for the rank."""
    parallel = vllm_config.parallel_config
    said, trouble = identity(vllm_config, kv_cache_config, weights_id)
    events = vllm_config.kv_events_config
    return EngineSpec(
        instance=str(vllm_config.kv_transfer_config.engine_id),
        groups=kv_groups(kv_cache_config),
        tokens_per_hash=resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1],
        identity=said,
        device_cache_bytes=device_cache_bytes(kv_cache_config) * parallel.world_size,
        replica=parallel.data_parallel_index,
        replicas=replicas_here(parallel),
        rank=parallel.rank,
        ranks=parallel.world_size,
        prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
        persistent=trouble is None,
        volatile=trouble or "",
        events=events is not None and events.enable_kv_cache_events,
    )


def replicas_here(parallel: Any) -> int:
    """Data parallel replicas of the engine on this host, this one among them; all, where that is not said.

    In a dense model's replica vLLM sets their number to 1. The number that was asked for is left only in the bound of
    elastic replicas, which such a model has not. One that was started by itself is told that it is alone on its host.
    """
    if parallel.data_parallel_size > 1 or parallel.enable_elastic_ep:
        if parallel.data_parallel_external_lb:
            return int(parallel.data_parallel_size)
        return max(1, int(parallel.data_parallel_size_local))
    return int(parallel.elastic_ep_max_dp_size)


def device_cache_bytes(kv_cache_config: Any) -> int:
    """Bytes of one rank's KV cache: every tensor that vLLM lists is a place in one allocation."""
    return max((tensor.size for tensor in kv_cache_config.kv_cache_tensors), default=0)


# --- KV groups ------------------------------------------------------------------------------------------


def kv_groups(kv_cache_config: Any) -> tuple[KVGroup, ...]:
    """vLLM's KV groups, all of them: a prefix is of use only with every group's part."""
    return tuple(
        KVGroup(
            index,
            group.kv_cache_spec.block_size,
            get_kv_cache_spec_sliding_window(group.kv_cache_spec),
            tuple(group.layer_names),
        )
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
    )


def groups_left_out(kv_cache_config: Any) -> list[str]:
    """The groups that cannot be offloaded, described for a log; where there is one, no prefix can be loaded."""
    if not kv_cache_config.kv_cache_groups:
        return ["the model has no KV cache"]
    return [
        f"KV group {index} ({get_kv_cache_spec_kind(group.kv_cache_spec).value}, {len(group.layer_names)} layers)"
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
        if not _is_offloaded(group)
    ]


def _is_offloaded(group: Any) -> bool:
    specs = list(iter_layer_specs(group.kv_cache_spec))
    windows = {get_kv_cache_spec_sliding_window(spec) for spec in specs}
    return (
        all(type(spec) in OFFLOADED for spec in specs)
        and len(windows) == 1
        and all(getattr(spec, "tokens_per_state", 1) == 1 for spec in specs)
        and not any(getattr(spec, "non_causal", False) for spec in specs)
        and group.kv_cache_spec.prefix_cacheable
        and group.enable_kv_transfer
        and not group.host_resident
    )


def block_views(kv_caches: Mapping[str, Any], groups: Sequence[KVGroup], num_blocks: int) -> dict[str, Any]:
    """The offloaded layers' tensors, block index first; an attention kernel's smaller blocks are put together."""
    return {
        layer: group_kernel_blocks(kv_caches[layer], num_blocks)
        for group in groups
        for layer in group.layers
        if layer in kv_caches
    }


def is_cleared(block_pool: Any) -> bool:
    """Whether the device's prefix cache has nothing from before a reset, and will not get it from a request either.

    A block that is half full when its request lives through the reset is cached once it is full.
    """
    in_use = block_pool.num_gpu_blocks - block_pool.get_num_free_blocks() - 1  # the null block always is
    return not in_use and not len(block_pool.cached_block_hash_to_block)


# --- what the outside sees ------------------------------------------------------------------------------


def hit_sources(origins: Mapping[str, int]) -> dict[CacheHitSource, int]:
    """Tokens of a load by vLLM's names for places."""
    sources: dict[CacheHitSource, int] = {}
    for tier, tokens in origins.items():
        if tokens:
            source = _source_of(tier)
            sources[source] = sources.get(source, 0) + tokens
    return sources


def _source_of(tier: str) -> CacheHitSource:
    if tier == "host":
        return CacheHitSource.HOST
    kind = tier.partition(":")[2]
    return CacheHitSource.DISK if kind in DISK_TIERS else CacheHitSource.EXTERNAL_UNSPECIFIED


def vllm_events(events: Iterable[CacheEvent], chunk_tokens: Sequence[int]) -> Iterator[KVCacheEvent]:
    """Cache events as vLLM publishes them: a chunk goes by the hash of its end, its tokens are not told.

    vLLM has no word for "everything of this tier has left" but one that means the device too: a reader who follows it
    knows too little for a while, and never too much.
    """
    for event in events:
        if event.cleared:
            yield AllBlocksCleared()
            continue
        hashes = [maybe_convert_block_hash(block_hash) for block_hash in event.hashes]
        medium = MEDIUM_CPU if event.medium == "host" else MEDIUM_STORAGE
        if event.stored:
            yield BlockStored(
                block_hashes=hashes,
                parent_block_hash=None,
                token_ids=[],
                block_size=chunk_tokens[event.group],
                lora_id=None,
                medium=medium,
                lora_name=None,
                group_idx=event.group,
            )
        else:
            yield BlockRemoved(block_hashes=hashes, medium=medium, group_idx=event.group)
