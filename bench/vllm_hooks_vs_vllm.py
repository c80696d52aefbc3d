"""What a connector costs vLLM's Scheduler while 256 requests of 8k tokens decode: ours and vLLM's own, in turn.

In: a Python environment that has vLLM 0.32 (its CPU build will do) and this package. Out: a table: time of the
engine's thread inside all hooks of the connector together, per step, median [quartiles] in microseconds, and the
ratio. Never: a model; a worker says of every job that it is done, and copies nothing.

    python bench/vllm_hooks_vs_vllm.py [--short] [--most-joint N]

Both connectors are made by vLLM from their names and called by its own Scheduler: OrlopConnector with its host region,
clock, counters and metrics, and OffloadingConnector. Both get the same requests, the same hash objects, chunks of one
size, host memory alone with room for everything. As with vLLM's engine in a process of its own,
``update_connector_output`` is called in every step. A figure is CPU time, so it is not the neighbours'.

First as vLLM's connector is by default: prompts alone are stored. Then with what is decoded stored too, which is our
default: in each cycle, as many steps as a chunk has tokens, each of the requests fills one chunk, which is stored.
That is taken twice: all requests fill theirs in the same step, as after prompts of one length; and each in a step of
its own, spread over the cycle, as after prompts of many lengths. The mean over whole cycles is what an engine pays; of
the first, the steps in which no chunk fills have a row of their own. A turn goes before those that are counted.
A side that gathers chunks may store a few less in all its turns than fill in them: then it is charged in proportion.
Chunks are small here, so up to 64 of them share a store job of ours; of chunks of 2 MiB it would be 32, which
``--most-joint 32`` shows.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

import orlop.connector
import orlop.vllm
import scheduler_vs_vllm as bare
from orlop.core import JobReport
from orlop.vllm.connector import OrlopConnector
from orlop.vllm.translate import Reports
from scheduler_vs_vllm import BLOCK_TOKENS, RUNNING, EngineSizes, Peer, Rig, Row, adapter

CONTEXT = 8192
GOAL = 20
TURN_STEPS = 1024
"""So many steps of one side follow each other: two engines that alternate would empty each other's caches, and a side
that gathers chunks stores some times in each turn."""
SETTLE_STEPS = 160
"""Then a side that gathers chunks for some time stores as many as fill."""
STORED_PER_STEP = 2048
"""Of prompts; ours spreads them over so many a step, the peer stores them at once."""
STEP_HOOKS = (
    *bare.HOOKS,
    "on_new_request",
    "get_external_cache_hit_sources",
    "get_loaded_kv_cache_group_ids",
    "get_kv_connector_stats",
    "has_pending_block_frees",
    "has_pending_push_work",
    "take_events",
    "request_finished_all_groups",
)
BLOCK_BYTES = 2 * BLOCK_TOKENS * 16 * 4
"""Of the engine that ``vllm_adapter`` imitates: keys and values of one head of 16 float32."""


class Theirs(Peer):
    """vLLM's OffloadingConnector with chunks of more than one block."""

    def __init__(self, blocks_per_chunk: int, decoded: bool) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._decoded = decoded

    def scheduler(self, sizes: EngineSizes, slots: int, folder: Path) -> Any:
        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            engine_id=str(folder),
            kv_connector_extra_config={
                "cpu_bytes_to_use": slots * self._blocks_per_chunk * BLOCK_BYTES * 2,
                "blocks_per_chunk": self._blocks_per_chunk,
                "offload_prompt_only": not self._decoded,
            },
        )
        return adapter.make_scheduler(adapter.make_vllm_config(sizes, folder, transfer), sizes)

    def chunks_stored(self, message: Any) -> int:
        return super().chunks_stored(message) // self._blocks_per_chunk


class Adapter:
    """OrlopConnector as vLLM makes it; its worker has KV tensors, makes the host region, and does nothing else."""

    name = "Orlop"

    def __init__(self, blocks_per_chunk: int, decoded: bool) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._decoded = decoded

    def scheduler(self, sizes: EngineSizes, slots: int, folder: Path) -> Any:
        orlop.vllm.register()
        transfer = KVTransferConfig(
            kv_connector="OrlopConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            engine_id=folder.name,
            kv_connector_extra_config={
                "host": slots * max(4096, self._blocks_per_chunk * BLOCK_BYTES),
                "blocks_per_chunk": self._blocks_per_chunk,
                "offload_decode": self._decoded,
            },
        )
        config = adapter.make_vllm_config(sizes, folder, transfer)
        worker = OrlopConnector(config, KVConnectorRole.WORKER, adapter.make_kv_cache_config(sizes))
        worker.register_kv_caches({"full": torch.zeros(sizes.blocks, 1, BLOCK_TOKENS, 32)})
        atexit.register(worker.shutdown)
        made = adapter.make_scheduler(config, sizes)
        atexit.register(made.connector.shutdown)
        return made

    def jobs(self, message: Any) -> tuple[dict[int, str], dict[int, str]]:
        """Ids and requests of the stores and the loads of a step message."""
        said = message.message
        return {j.job_id: j.req_id for j in said.store_jobs}, {j.job_id: j.req_id for j in said.load_jobs}

    def chunks_stored(self, message: Any) -> int:
        blocks = sum(len(part.slots) for job in message.message.store_jobs for part in job.transfers)
        return blocks // self._blocks_per_chunk

    def report(self, job_ids: Iterable[int]) -> Any:
        return Reports(tuple(JobReport(i, 0, ok=True) for i in job_ids))


class EveryStep(Rig):
    """A worker in a process of its own speaks in every step."""

    def said(self, stores: dict[int, str], loads: dict[int, str]) -> KVConnectorOutput:
        return super().said(stores, loads) or KVConnectorOutput()

    @property
    def spent_us(self) -> float:
        """Inside all hooks of the last step."""
        return sum(sum(calls) for calls in self.took_us.values())


def decode(blocks_per_chunk: int, turns: int, spread: bool, decoded: bool) -> list[Row]:
    """Each cycle is as many steps as a chunk has tokens; every request fills one chunk in it, stored if ``decoded``."""
    chunk_tokens = blocks_per_chunk * BLOCK_TOKENS
    prompts = [CONTEXT + (i % chunk_tokens if spread else 0) for i in range(RUNNING)]
    prompt_chunks = sum(tokens // chunk_tokens for tokens in prompts)
    output_tokens = (turns + 1) * TURN_STEPS + 4 * chunk_tokens + prompt_chunks // STORED_PER_STEP
    model_tokens = CONTEXT + chunk_tokens + output_tokens
    blocks = RUNNING * (model_tokens // BLOCK_TOKENS + 1)
    sizes = EngineSizes(
        blocks=blocks + 1, running=RUNNING, step_tokens=sum(prompts) + 1, model_tokens=model_tokens + BLOCK_TOKENS
    )
    rigs = [
        start(side, sizes, blocks // blocks_per_chunk + 64)
        for side in (Theirs(blocks_per_chunk, decoded), Adapter(blocks_per_chunk, decoded))
    ]
    hashes = [bare.fresh_hashes(tokens) for tokens in prompts]
    for rig in rigs:
        settle(rig, hashes, prompts, output_tokens, prompt_chunks, chunk_tokens)
    bare.settle_garbage()
    chunks = f"chunks of {chunk_tokens} tokens"
    when = "filled one a step or so" if spread else "all filled in one step"
    quiet = Row(f"a step in which no chunk fills, {chunks}", f">= {GOAL}x")
    mean = Row(f"{chunks}, {when if decoded else 'prompts alone are stored'}", f">= {GOAL}x")
    filled = turns * TURN_STEPS // chunk_tokens * RUNNING if decoded else 0
    stored = [0 for _ in rigs]
    for _ in range(turns):
        for i, rig in enumerate(rigs):
            stored[i] += one_turn(rig, TURN_STEPS, quiet, mean)
    gathered = RUNNING * (1 + SETTLE_STEPS // chunk_tokens)
    for rig, count in zip(rigs, stored, strict=True):
        name = rig.side.name
        assert abs(count - filled) <= gathered, f"{name}: stored {count} chunks, expected about {filled}"
        owing = max(1.0, filled / count) if decoded else 1.0
        mean.samples[name] = [sample * owing for sample in mean.samples[name]]
    return [mean] if spread else [quiet, mean]


def start(side: Any, sizes: EngineSizes, slots: int) -> EveryStep:
    folder = Path(tempfile.mkdtemp(prefix="orlop-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return EveryStep(side, side.scheduler(sizes, slots, folder), hooks=STEP_HOOKS)


def settle(
    rig: EveryStep,
    hashes: list[list[bytes]],
    prompts: list[int],
    output_tokens: int,
    prompt_chunks: int,
    chunk_tokens: int,
) -> None:
    """All requests run, what their prompts fill is stored, and some steps have gone by."""
    for prompt_hashes, tokens in zip(hashes, prompts, strict=True):
        rig.add(prompt_hashes, tokens, output_tokens)
    stored = 0
    while stored < prompt_chunks:
        rig.step()
        stored += rig.side.chunks_stored(rig.message)
        assert len(rig.scheduler.running) == RUNNING
    for _ in range(max(chunk_tokens, SETTLE_STEPS)):
        rig.step()
    while rig.scheduler.running[0].num_computed_tokens % chunk_tokens != chunk_tokens // 2:
        rig.step()  # so that chunks fill in the middle of a cycle, and are stored in it


def one_turn(rig: EveryStep, steps: int, quiet: Row, mean: Row) -> int:
    """Adds to the samples of both rows; the chunks that were stored."""
    spent, stored, was_busy = [], 0, rig.busy
    for _ in range(steps):
        rig.step()
        spent.append(rig.spent_us)
        stored += rig.side.chunks_stored(rig.message)
        if not rig.busy and not was_busy and rig.scheduler.running[0].num_computed_tokens % BLOCK_TOKENS > 1:
            quiet.samples[rig.side.name].append(spent[-1])
        was_busy = rig.busy
    mean.samples[rig.side.name].append(statistics.mean(spent))
    return stored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one turn of each: about a minute and a half")
    parser.add_argument("--most-joint", type=int, help="chunks that may share a store job of ours")
    args = parser.parse_args()
    turns = 1 if args.short else 4
    orlop.connector.MOST_JOINT = args.most_joint or orlop.connector.MOST_JOINT
    print(f"{bare.machine()}; Python {platform.python_version()}, vLLM {vllm.__version__}")
    print(f"{time.strftime('%Y-%m-%d')}; {RUNNING} running requests of {CONTEXT} tokens; microseconds per step\n")
    print(f"{'':<70} {'vLLM':>26} {'Orlop':>26} {'ratio':>9}  goal")
    modes = [(1, True, False), *((n, spread, True) for n in (1, 16) for spread in (False, True))]
    for blocks_per_chunk, spread, decoded in modes:
        for row in decode(blocks_per_chunk, turns, spread, decoded):
            print(row.text(), flush=True)
        gc.unfreeze()
        gc.collect()


if __name__ == "__main__":
    main()
