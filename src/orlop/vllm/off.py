"""A half that offloads nothing, for models of which some KV cannot be kept.

In: the hooks. Out: "nothing found, nothing to do". Never: a region, a thread, a tier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orlop.core import CacheEvent, OffloadingConnectorMetadata, WorkerOutput


class Off:
    """Answers like an ``OffloadingConnector`` whose caches stay empty; both halves in one."""

    chunk_tokens: tuple[int, ...] = ()
    is_idle = True

    def on_new_request(self, request: Any) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def load_origins(self, request: Any) -> Mapping[str, int]:
        return {}

    def build_connector_meta(self, scheduler_output: Any) -> OffloadingConnectorMetadata:
        return OffloadingConnectorMetadata()

    def update_connector_output(self, output: WorkerOutput) -> None: ...

    def request_finished(self, request: Any) -> tuple[bool, None]:
        return False, None

    def has_pending_push_work(self) -> bool:
        return False

    def reset_cache(self, device_cleared: bool = True) -> None: ...

    def take_events(self) -> Sequence[CacheEvent]:
        return ()

    def get_stats(self) -> Mapping[str, float]:
        return {}

    def check(self) -> None: ...

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None: ...

    def handle_preemptions(self, meta: OffloadingConnectorMetadata) -> None: ...

    def start_load_kv(self, meta: OffloadingConnectorMetadata) -> None: ...

    def wait_for_save(self, meta: OffloadingConnectorMetadata) -> None: ...

    def get_finished(self) -> WorkerOutput:
        return WorkerOutput()

    def shutdown(self, deadline_s: float | None = None) -> None: ...
