"""vLLM's real Scheduler around our scheduler half, in one process and without a model.

In: a scheduler half, a clock, sizes. Out: a vLLM Scheduler whose connector hands every scheduler-side call
to that half line by line, and the vLLM requests to feed it. Never: a device, a model file, a decision.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # other people's deprecations at import
    import torch
    from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    from orlop.vllm import translate

from orlop.core import Geometry, KVGroup

BLOCK_TOKENS = 16
WINDOW_TOKENS = 64
MODEL_TOKENS = 1024
VOCABULARY = 500


@dataclass
class Joined:
    """What a HalfConnector is made of; vLLM's factory passes nothing but configuration, so it is looked up."""

    half: Any
    clock: Callable[[], float]
    generation: Callable[[], bytes]


JOINED: dict[str, Joined] = {}
"""By ``engine_id``; filled by ``build_scheduler`` just before vLLM makes the connector."""


class HalfConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler role of a vLLM connector, over a scheduler half and a clock that is read once per hook."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        assert role is KVConnectorRole.SCHEDULER
        joined = JOINED[self._kv_transfer_config.engine_id]
        self.half, self._clock, self._generation = joined.half, joined.clock, joined.generation

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def on_new_request(self, request: Request) -> None:
        self.half.on_new_request(request, now=self._clock())

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.half.get_num_new_matched_tokens(request, num_computed_tokens, now=self._clock())

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        self.half.update_state_after_alloc(request, blocks, num_external_tokens, now=self._clock())

    def build_connector_meta(self, scheduler_output: Any) -> translate.StepMessage:
        return translate.StepMessage(self.half.build_connector_meta(scheduler_output, now=self._clock()))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.half.update_connector_output(translate.worker_output(connector_output), now=self._clock())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.half.request_finished(request, now=self._clock())

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.half.request_finished(request, now=self._clock())

    def has_pending_push_work(self) -> bool:
        return self.half.has_pending_push_work()

    def reset_cache(self) -> bool:
        """vLLM calls it after it has tried to reset the device's own prefix cache, whether that worked or not."""
        assert self._kv_cache_manager is not None
        cleared = translate.is_cleared(self._kv_cache_manager.block_pool)
        self.half.reset_cache(self._generation(), now=self._clock(), device_cleared=cleared)
        return True

    def take_events(self) -> Iterable[Any]:
        list(self.half.take_events())  # vLLM's event types are the real connector's business
        return ()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise AssertionError("the worker role is a double")

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise AssertionError("the worker role is a double")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise AssertionError("the worker role is a double")

    def wait_for_save(self) -> None:
        raise AssertionError("the worker role is a double")


@dataclass(frozen=True)
class EngineSizes:
    """The engine to imitate.

    ``windowed`` adds a sliding-window group of 64 tokens to the full-attention group. ``asynchronous`` takes
    vLLM's AsyncScheduler. ``resumed_as_new``: resumed requests appear as new ones, as model runner V2 has them.
    """

    blocks: int = 48
    running: int = 8
    step_tokens: int = 128
    model_tokens: int = MODEL_TOKENS
    windowed: bool = False
    asynchronous: bool = False
    resumed_as_new: bool = False

    def geometry(self, blocks_per_chunk: int) -> Geometry:
        """The same in our words."""
        groups = [KVGroup(0, BLOCK_TOKENS, None, ("full",))]
        if self.windowed:
            groups.append(KVGroup(1, BLOCK_TOKENS, WINDOW_TOKENS, ("window",)))
        return Geometry(tuple(groups), tokens_per_hash=BLOCK_TOKENS, blocks_per_chunk=blocks_per_chunk)


def make_vllm_config(sizes: EngineSizes, folder: Path, kv_transfer: KVTransferConfig | None) -> VllmConfig:
    """A VllmConfig of a model that consists of its config.json alone, written to ``folder``."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": sizes.model_tokens,
    }
    (folder / "config.json").write_text(json.dumps(config))
    model = ModelConfig(
        model=str(folder),
        tokenizer=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=sizes.model_tokens,
        seed=0,
    )
    scheduler = SchedulerConfig(
        max_num_seqs=sizes.running,
        max_num_batched_tokens=sizes.step_tokens,
        max_model_len=sizes.model_tokens,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=sizes.asynchronous,
    )
    made = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
        scheduler_config=scheduler,
        device_config=DeviceConfig(device="cpu"),
        kv_transfer_config=kv_transfer,
    )
    # vLLM turns it off where its executor cannot do it; here there is no executor.
    made.scheduler_config.async_scheduling = sizes.asynchronous
    made.cache_config.num_gpu_blocks = sizes.blocks
    return made


def make_kv_cache_config(sizes: EngineSizes) -> KVCacheConfig:
    """The KV groups of ``sizes`` over one pool of ``sizes.blocks`` blocks, block 0 being vLLM's null block."""
    one: dict[str, Any] = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": 1,
        "head_size": 16,
        "dtype": torch.float32,
    }
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**one))]
    if sizes.windowed:
        groups.append(KVCacheGroupSpec(["window"], SlidingWindowSpec(**one, sliding_window=WINDOW_TOKENS)))
    return KVCacheConfig(num_blocks=sizes.blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def make_scheduler(vllm_config: VllmConfig, sizes: EngineSizes) -> Scheduler:
    """vLLM's Scheduler or AsyncScheduler; makes the connector that ``vllm_config`` names."""
    kind = AsyncScheduler if sizes.asynchronous else Scheduler
    made = kind(
        vllm_config=vllm_config,
        kv_cache_config=make_kv_cache_config(sizes),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
        log_stats=False,
    )
    made.use_v2_model_runner = sizes.resumed_as_new
    return made


def build_scheduler(sizes: EngineSizes, joined: Joined, folder: Path) -> Scheduler:
    """A vLLM scheduler whose connector is a HalfConnector over ``joined``."""
    name = str(folder)
    JOINED[name] = joined
    try:
        transfer = KVTransferConfig(
            kv_connector=HalfConnector.__name__,
            kv_connector_module_path=HalfConnector.__module__,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            engine_id=name,
        )
        return make_scheduler(make_vllm_config(sizes, folder, transfer), sizes)
    finally:
        del JOINED[name]


init_none_hash(sha256)
_hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)


def make_request(req_id: str, prompt: list[int], output_tokens: int, stop_tokens: Sequence[int] = ()) -> Request:
    """A vLLM request that ends after ``output_tokens`` tokens, with the first stop token, or when aborted."""
    params = SamplingParams(
        max_tokens=output_tokens, stop_token_ids=list(stop_tokens), ignore_eos=True, temperature=0.0
    )
    return Request(
        request_id=req_id,
        prompt_token_ids=prompt,
        sampling_params=params,
        pooling_params=None,
        block_hasher=_hasher,
    )
