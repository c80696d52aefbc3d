"""Our scheduler half beside vLLM's own, under vLLM's real Scheduler with a mock worker, in one run.

In: a Python environment that has vLLM 0.32 (its CPU build will do) and this package. Out: one table: what the engine's
thread pays in each connector hook, medians in microseconds with quartiles, both sides in turn, with the goal
beside it. Never: a model, a device, a byte of KV; both sides get the same requests, the same hash objects and
the same reports.

    python bench/scheduler_vs_vllm.py [--short]

Each figure is the CPU time of the engine's thread inside one hook of the connector, called by vLLM; the hooks wait
for nothing, so on a quiet machine that is the wall time, and on a busy one it is not the neighbours' time. Both
sides use chunks of one block of 16 tokens, host memory only, LRU, room for everything (nothing is evicted), and store
decoded tokens too. As in vLLM's engine, the objects alive after the set-up are frozen out of garbage collection.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "vllm_scheduler"))

import numpy
import vllm
import vllm_adapter as adapter
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm_adapter import BLOCK_TOKENS, EngineSizes, Joined, KVConnectorOutput
from vllm_watch import make_manager

from orlop.core import JobReport
from orlop.scheduler.scheduler import OffloadingConnectorScheduler, SchedulerOptions
from orlop.vllm.translate import Reports

HOOKS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
)
RUNNING = 256
LONG_PROMPT = 131_072
PROMPT_2000 = 2_000 * BLOCK_TOKENS


# --- the two sides --------------------------------------------------------------------------------------


class Peer:
    """vLLM's OffloadingConnector over its CPU manager."""

    name = "vLLM"

    def scheduler(self, sizes: EngineSizes, slots: int, folder: Path) -> Any:
        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            engine_id=str(folder),
            kv_connector_extra_config={
                "cpu_bytes_to_use": slots * 4096,
                "blocks_per_chunk": 1,
                "offload_prompt_only": False,
            },
        )
        made = adapter.make_scheduler(adapter.make_vllm_config(sizes, folder, transfer), sizes)
        chunks = made.connector.connector_scheduler.manager._num_chunks
        assert chunks >= slots, f"found {chunks} chunks, expected {slots}"
        return made

    def jobs(self, message: Any) -> tuple[dict[int, str], dict[int, str]]:
        """Ids and requests of the stores and the loads of a step message."""
        return (
            {i: job.req_id for i, job in message.store_jobs.items()},
            {i: job.req_id for i, job in message.load_jobs.items()},
        )

    def chunks_stored(self, message: Any) -> int:
        return sum(len(job.src_spec.block_ids) for job in message.store_jobs.values())

    def report(self, job_ids: Iterable[int]) -> Any:
        return OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(job_ids, 1))


class Ours:
    """Our scheduler half over a TieringManager without secondary tiers."""

    name = "Orlop"

    def scheduler(self, sizes: EngineSizes, slots: int, folder: Path) -> Any:
        half = OffloadingConnectorScheduler(sizes.geometry(blocks_per_chunk=1), make_manager(slots), SchedulerOptions())
        joined = Joined(half, time.monotonic, lambda: os.urandom(16))
        return adapter.build_scheduler(sizes, joined, folder)

    def jobs(self, message: Any) -> tuple[dict[int, str], dict[int, str]]:
        return (
            {job.job_id: job.req_id for job in message.message.store_jobs},
            {job.job_id: job.req_id for job in message.message.load_jobs},
        )

    def chunks_stored(self, message: Any) -> int:
        return sum(len(part.slots) for job in message.message.store_jobs for part in job.transfers)

    def report(self, job_ids: Iterable[int]) -> Any:
        return Reports(tuple(JobReport(i, 0, ok=True) for i in job_ids))


# --- one engine with its connector's hooks timed ---------------------------------------------------------


@dataclass
class Rig:
    """A vLLM scheduler, a worker that moves nothing, and the time that each hook of the last step took.

    Jobs of one step are reported with the next step's output.
    """

    side: Any
    scheduler: Any
    took_us: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    message: Any = None
    hooks: Sequence[str] = HOOKS
    _stores: dict[int, str] = field(default_factory=dict)
    _loads: dict[int, str] = field(default_factory=dict)
    _added: int = 0

    def __post_init__(self) -> None:
        for hook in self.hooks:
            setattr(self.scheduler.connector, hook, self._timed(hook, getattr(self.scheduler.connector, hook)))

    def _timed(self, hook: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.thread_time_ns()
            answer = call(*args)
            self.took_us[hook].append((time.thread_time_ns() - began) / 1e3)
            return answer

        return timed

    def add(self, hashes: Sequence[bytes], tokens: int, output_tokens: int) -> Request:
        """A request of ``tokens`` prompt tokens whose full blocks have ``hashes``, as fresh objects."""

        def hasher(request: Request) -> list[bytes]:
            have, full = len(request.block_hashes), request.num_tokens // BLOCK_TOKENS
            known = [bytes(bytearray(h)) for h in hashes[have:full]]
            return known + [os.urandom(32) for _ in range(full - have - len(known))]

        self._added += 1
        request = Request(
            request_id=f"r{self._added}",
            prompt_token_ids=[7] * tokens,
            sampling_params=SamplingParams(max_tokens=output_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=hasher,
        )
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        """One engine step; fills ``took_us`` and ``message`` anew."""
        self.took_us.clear()
        stores, loads = self._stores, self._loads
        output = self.scheduler.schedule()
        self.message = output.kv_connector_metadata
        self._stores, self._loads = self.side.jobs(self.message)
        ids = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        made = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=[[7] if requests[r].num_computed_tokens >= requests[r].num_tokens else [] for r in ids],
            kv_connector_output=self.said(stores, loads),
        )
        self.scheduler.update_from_output(output, made)

    def said(self, stores: dict[int, str], loads: dict[int, str]) -> KVConnectorOutput | None:
        """What the worker says of the last step's jobs; nothing where there were none, as within one process."""
        if not stores and not loads:
            return None
        return KVConnectorOutput(
            finished_recving=set(loads.values()), kv_connector_worker_meta=self.side.report([*stores, *loads])
        )

    @property
    def busy(self) -> bool:
        """Whether the last step had jobs."""
        return bool(self._stores or self._loads)

    def drain(self) -> None:
        """Step until the engine has nothing left."""
        for _ in range(1_000):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"{self.side.name}: still busy after 1,000 steps")

    def abort(self, request: Request) -> None:
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        self.drain()
        assert self.scheduler.reset_prefix_cache()


def make_rigs(sizes: EngineSizes, slots: int) -> list[Rig]:
    """The peer's engine and ours, alike in everything else."""
    rigs = []
    for side in (Peer(), Ours()):
        folder = Path(tempfile.mkdtemp(prefix="orlop-bench-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        rigs.append(Rig(side, side.scheduler(sizes, slots, folder)))
    return rigs


def settle_garbage() -> None:
    gc.collect()
    gc.freeze()


# --- samples ------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One line of the table; samples in microseconds, by side."""

    work: str
    goal: str
    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def text(self) -> str:
        peer, ours = self.samples[Peer.name], self.samples[Ours.name]
        ratio = statistics.median(peer) / statistics.median(ours)
        return f"{self.work:<70} {_spread(peer):>26} {_spread(ours):>26} {ratio:>8.1f}x  {self.goal}"


def _spread(samples: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else samples * 3
    return f"{middle:,.0f} [{low:,.0f} .. {high:,.0f}]"


def fresh_hashes(tokens: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(tokens // BLOCK_TOKENS)]


def decode_steps(context_tokens: int, rounds: int) -> list[Row]:
    """256 running requests; steps in which no chunk fills and no block is handed out, and those in which all do.

    A chunk fills in one step and the next block is handed out in the step after; which of the two plans the store is
    each side's own affair, so the two are taken together.
    """
    blocks = RUNNING * (context_tokens // BLOCK_TOKENS + 64)
    sizes = EngineSizes(
        blocks=blocks + 1,
        running=RUNNING,
        step_tokens=RUNNING * context_tokens + 1,
        model_tokens=context_tokens + 4096,
    )
    rigs = make_rigs(sizes, blocks)
    prompts = [fresh_hashes(context_tokens) for _ in range(RUNNING)]
    for rig in rigs:
        for hashes in prompts:
            rig.add(hashes, context_tokens, 4000)
        calm = 0
        while calm < 3:
            rig.step()
            calm = 0 if rig.busy else calm + 1
        assert len(rig.scheduler.running) == RUNNING
    settle_garbage()
    label = f"{RUNNING} requests of {context_tokens // 1024}k"
    goal = ">= 40x, and the same at every length" if context_tokens == 8192 else "independent of the length"
    idle = Row(f"build_connector_meta, decode, nothing happens, {label}", goal)
    fills = Row(f"the two steps together in which all fill a chunk, {label}", "no goal of its own")
    for _ in range(rounds):
        for rig in rigs:
            filling, stored = 0.0, 0
            for _ in range(BLOCK_TOKENS):
                rig.step()
                (took,) = rig.took_us["build_connector_meta"]
                if rig.scheduler.running[0].num_computed_tokens % BLOCK_TOKENS in (0, 1):
                    filling += took
                    stored += rig.side.chunks_stored(rig.message)
                else:
                    assert not rig.busy, f"{rig.side.name}: found jobs in a step in which nothing was to happen"
                    idle.samples[rig.side.name].append(took)
            assert stored == RUNNING, f"{rig.side.name}: stored {stored} chunks of {RUNNING}"
            fills.samples[rig.side.name].append(filling)
    return [idle, fills]


def long_hits(samples: int) -> list[Row]:
    """A prompt of 128k tokens wholly in host memory: asked first, asked again, allocated."""
    blocks = LONG_PROMPT // BLOCK_TOKENS
    sizes = EngineSizes(blocks=blocks + 200, running=8, step_tokens=32_768, model_tokens=LONG_PROMPT + 4096)
    rigs = make_rigs(sizes, blocks + 64 * (samples + 1) + 1_000)
    hashes = fresh_hashes(LONG_PROMPT)
    for rig in rigs:
        rig.add(hashes, LONG_PROMPT, 1)
        rig.drain()
        assert rig.scheduler.reset_prefix_cache()
    settle_garbage()
    first = Row("get_num_new_matched_tokens, 128k tokens in host, first", ">= 5x")
    again = Row("get_num_new_matched_tokens, asked again, nothing new", "independent of the length")
    alloc = Row("update_state_after_alloc, 128k tokens", ">= 4x")
    load = Row("update_connector_output, a load of 8,192 chunks", ">= 4x")
    for _ in range(samples):
        for rig in rigs:
            _one_long_hit(rig, hashes, first, again, alloc, load)
    return [first, again, alloc, load]


def _one_long_hit(rig: Rig, hashes: Sequence[bytes], first: Row, again: Row, alloc: Row, load: Row) -> None:
    """The hit waits for blocks behind another request, is asked again, gets its blocks, is loaded."""
    name = rig.side.name
    blocker = rig.add((), 250 * BLOCK_TOKENS, 1_000)
    rig.step()
    rig.step()
    request = rig.add(hashes, LONG_PROMPT, 4)
    rig.step()
    first.samples[name] += rig.took_us["get_num_new_matched_tokens"]
    for _ in range(4):
        rig.step()
        again.samples[name] += rig.took_us["get_num_new_matched_tokens"]
    rig.scheduler.finish_requests(blocker.request_id, RequestStatus.FINISHED_ABORTED)
    rig.step()
    assert rig._loads, f"{name}: the prompt was not loaded"
    alloc.samples[name].append(max(rig.took_us["update_state_after_alloc"]))
    rig.step()
    load.samples[name] += rig.took_us["update_connector_output"]
    rig.abort(request)


def jobs_of_2000(samples: int) -> list[Row]:
    """A prompt of 32,000 tokens is stored as 2,000 chunks, then found again and loaded."""
    blocks = PROMPT_2000 // BLOCK_TOKENS
    sizes = EngineSizes(blocks=blocks + 100, running=8, step_tokens=40_000, model_tokens=PROMPT_2000 + 4096)
    rigs = make_rigs(sizes, (blocks + 4) * (samples + 2))
    settle_garbage()
    plan = Row("build_connector_meta that stores 2,000 chunks", ">= 4x")
    store = Row("update_connector_output, a store of 2,000 chunks", ">= 4x")
    first = Row("get_num_new_matched_tokens, 32k tokens in host, first", ">= 5x")
    alloc = Row("update_state_after_alloc, 32k tokens", ">= 4x")
    load = Row("update_connector_output, a load of 2,000 chunks", ">= 4x")
    for number in range(samples + 1):
        hashes = fresh_hashes(PROMPT_2000)
        for rig in rigs:
            rows = (plan, store, first, alloc, load) if number else tuple(Row("", "") for _ in range(5))
            _one_store_and_load(rig, hashes, *rows)
    return [plan, store, first, alloc, load]


def _one_store_and_load(
    rig: Rig, hashes: Sequence[bytes], plan: Row, store: Row, first: Row, alloc: Row, load: Row
) -> None:
    name = rig.side.name
    writer = rig.add(hashes, PROMPT_2000, 8)
    rig.step()
    assert rig.side.chunks_stored(rig.message) == len(hashes)
    plan.samples[name] += rig.took_us["build_connector_meta"]
    rig.step()
    store.samples[name] += rig.took_us["update_connector_output"]
    rig.abort(writer)
    reader = rig.add(hashes, PROMPT_2000, 8)
    rig.step()
    assert rig._loads, f"{name}: the prompt was not loaded"
    first.samples[name] += rig.took_us["get_num_new_matched_tokens"]
    alloc.samples[name].append(max(rig.took_us["update_state_after_alloc"]))
    rig.step()
    load.samples[name] += rig.took_us["update_connector_output"]
    rig.abort(reader)


# --- the table -------------------------------------------------------------------------------------------------


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor()}, {os.cpu_count()} cores, {platform.system()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="fewer samples, no 32k contexts: about half a minute")
    short = parser.parse_args().short
    began = time.monotonic()
    print(f"{machine()}; Python {platform.python_version()}, numpy {numpy.__version__}, vLLM {vllm.__version__}")
    print(f"{time.strftime('%Y-%m-%d')}; microseconds of the engine's thread, median [quartiles]; sides take turns\n")
    print(f"{'':<70} {'vLLM':>26} {'Orlop':>26} {'ratio':>9}  goal")
    for rows in (
        jobs_of_2000(5 if short else 15),
        long_hits(3 if short else 8),
        *(decode_steps(n, 2 if short else 6) for n in ((1024, 8192) if short else (1024, 8192, 32_768))),
    ):
        for row in rows:
            print(row.text(), flush=True)
        gc.unfreeze()
        gc.collect()
    print(f"\n{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
