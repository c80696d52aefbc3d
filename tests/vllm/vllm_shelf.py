"""A second connector for vLLM's MultiConnector: it loads asynchronously, no sooner than a test lets it, or at once.

In: prompts whose device blocks a test has put on the shelf. Out: loads that spoil their blocks first, as half of a
transfer would, and fill or fail them once ``SHELF.held`` is False. Never: a thread, a store.

Scheduler's half and worker's half meet in ``SHELF``, so it serves engines in this process only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

SPOILT = 7.0


@dataclass(frozen=True)
class Load:
    """Blocks of one request to fill."""

    req_id: str
    prompt: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass
class Loads(KVConnectorMetadata):
    loads: tuple[Load, ...]


@dataclass
class Shelf:
    """What can be loaded, what is being loaded, and whether that may end, and well."""

    kept: dict[tuple[int, ...], Mapping[str, Any]] = field(default_factory=dict)
    open: list[Load] = field(default_factory=list)
    begun: list[Load] = field(default_factory=list)
    held: bool = False
    fails: bool = False
    at_once: bool = False
    """Loads are synchronous: before the forward of the step that schedules their request."""
    device: Mapping[str, Any] = field(default_factory=dict)

    def keep(self, prompt: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy what the device has of ``prompt`` in ``blocks``."""
        self.kept[tuple(prompt)] = {layer: cache[list(blocks)].clone() for layer, cache in self.device.items()}

    def spoil(self, load: Load) -> None:
        for cache in self.device.values():
            cache[list(load.blocks)] = SPOILT

    def fill(self, load: Load) -> None:
        for layer, kept in self.kept[load.prompt].items():
            self.device[layer][list(load.blocks)] = kept[: len(load.blocks)]


SHELF = Shelf()


class ShelfConnector(KVConnectorBase_V1, SupportsHMA):
    """Both halves. One KV group."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._tokens_per_block = vllm_config.cache_config.block_size
        self._planned: list[Load] = []
        self._invalid: set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if tuple(request.prompt_token_ids) not in SHELF.kept:
            return 0, False
        whole = (request.num_prompt_tokens - 1) // self._tokens_per_block * self._tokens_per_block
        return max(0, whole - num_computed_tokens), whole > num_computed_tokens and not SHELF.at_once

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            (ids,) = blocks.get_block_ids()
            filled = ids[: num_external_tokens // self._tokens_per_block]
            self._planned.append(Load(request.request_id, tuple(request.prompt_token_ids), tuple(filled)))

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        planned, self._planned = tuple(self._planned), []
        return Loads(planned)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        return False, None

    def has_pending_push_work(self) -> bool:
        return bool(SHELF.open)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        SHELF.device = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for load in self._get_connector_metadata().loads:
            SHELF.spoil(load)
            SHELF.begun.append(load)
            if not SHELF.at_once:
                SHELF.open.append(load)
            elif SHELF.fails:
                self._invalid.update(load.blocks)
            else:
                SHELF.fill(load)

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if SHELF.held:
            return KVConnectorTransferResults()
        ended, SHELF.open = SHELF.open, []
        for load in ended:
            if not SHELF.fails:
                SHELF.fill(load)
        ids = {load.req_id for load in ended}
        return KVConnectorTransferResults(finished_recving=ids, failed_recving=ids if SHELF.fails else set())

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
