"""OrlopConnector: vLLM's door to Orlop. Every hook is one line into ``orlop.connector``.

In: vLLM's hooks, in the scheduler's process and in each worker's. Out: answers and messages. Never: a decision of its
own, a wait on vLLM's threads beyond what ``orlop.connector`` allows.

vLLM builds the workers' connectors first, then the scheduler's: so rank 0 makes the host region when it learns the KV
tensors, and the others join it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import vllm
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from orlop.config import OrlopConfig
from orlop.connector import OffloadingConnector
from orlop.core import OffloadingConnectorMetadata, WorkerOutput
from orlop.vllm import translate, versions
from orlop.vllm.metrics import Meter, OrlopPromMetrics, OrlopStats
from orlop.vllm.off import Off
from orlop.vllm.patience import Patience

log = logging.getLogger(__name__)

WORKER_SHUTDOWN_S = 1.0
"""Of the five seconds after which vLLM kills; the scheduler's half has the drain deadline. Copies take milliseconds."""


class OrlopConnector(KVConnectorBase_V1, SupportsHMA):
    """One role of the connector, in one process of vLLM. Settings come from ``kv_connector_extra_config``."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _share_vllms_log()
        versions.check(vllm.__version__, (KVConnectorBase_V1, SupportsHMA), type(self))
        translate.refuse_what_is_not_there(vllm_config)
        transfer = vllm_config.kv_transfer_config
        self._config = OrlopConfig.load(transfer.kv_connector_extra_config, source="kv_connector_extra_config")
        translate.refuse_what_contradicts(vllm_config, self._config)
        self._output = WorkerOutput()
        self._patience = Patience(self._config.drain_deadline_s)
        self._half = self._make_half(role is KVConnectorRole.SCHEDULER)
        self._meter = Meter(self._half.get_stats)

    def _make_half(self, is_scheduler: bool) -> OffloadingConnector | Off:
        left_out = translate.groups_left_out(self._kv_cache_config)
        if left_out:
            if is_scheduler:
                log.warning("offloading is off: %s cannot be kept, and a prefix needs all", ", ".join(left_out))
            return Off()
        spec = translate.engine_spec(self._vllm_config, self._kv_cache_config, self._config.weights_id)
        if is_scheduler:
            return OffloadingConnector.scheduler(self._config, spec)
        if spec.rank == 0 and translate.load_failure_policy(self._vllm_config) != "recompute":
            log.warning(
                "kv_load_failure_policy is 'fail': a load that fails ends its request with an error; add "
                '"kv_load_failure_policy": "recompute" to the outermost KV transfer config to compute it instead'
            )
        return OffloadingConnector.worker(self._config, spec)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache, not a delivery: what was not stored is computed again."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Layers outermost: a block of one layer is one run of bytes."""
        return "LBHNC"

    # --- the scheduler's process ---------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        self._patience.someone_came()
        self._half.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._half.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._half.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        return translate.hit_sources(self._half.load_origins(request))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return translate.StepMessage(self._half.build_connector_meta(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if output := translate.worker_output(connector_output):
            self._half.update_connector_output(output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._half.request_finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._half.request_finished(request)

    def has_pending_push_work(self) -> bool:
        return self._patience.is_worth_stepping(self._half.has_pending_push_work(), time.monotonic())

    def reset_cache(self) -> bool | None:
        """vLLM calls it after it has tried to reset the device's own prefix cache, whether that worked or not."""
        manager = self._kv_cache_manager
        self._half.reset_cache(manager is None or translate.is_cleared(manager.block_pool))
        return True

    def take_events(self) -> Iterable[KVCacheEvent]:
        events = self._half.take_events()
        return tuple(translate.vllm_events(events, self._half.chunk_tokens)) if events else ()

    def get_kv_connector_stats(self) -> OrlopStats | None:
        if self._role is KVConnectorRole.WORKER:
            return None
        return self._meter.reading(self._half.is_idle, time.monotonic())

    def check(self) -> None:
        """Recount the books of the scheduler's half; for tests and tools."""
        self._half.check()

    # --- a worker's process ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        groups = translate.kv_groups(self._kv_cache_config)
        self._half.register_kv_caches(translate.block_views(kv_caches, groups, self._kv_cache_config.num_blocks))

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._half.handle_preemptions(kv_connector_metadata.message)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._half.start_load_kv(self._message)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are over before their request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Stores are read after the forward, all layers at once."""

    def wait_for_save(self) -> None:
        self._half.wait_for_save(self._message)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._output = self._half.get_finished()
        return translate.transfer_results(self._output)

    def build_connector_worker_meta(self) -> translate.Reports | None:
        return translate.reports_of(self._output)

    # --- the front-end's process -------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OrlopStats:
        return OrlopStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> OrlopPromMetrics:
        return OrlopPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- both --------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        is_worker = self._role is KVConnectorRole.WORKER
        self._half.shutdown(WORKER_SHUTDOWN_S if is_worker else self._patience.left_s(time.monotonic()))

    @property
    def _message(self) -> OffloadingConnectorMetadata:
        message: OffloadingConnectorMetadata = self._get_connector_metadata().message
        return message


def _share_vllms_log() -> None:
    """Our lines go where vLLM's go; without vLLM's handlers, where the user's own logging sends them."""
    ours, theirs = logging.getLogger("orlop"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate
