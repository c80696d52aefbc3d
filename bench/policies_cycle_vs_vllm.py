"""The host tier's cycle, full, beside vLLM's CPU manager.

In: a Python environment that has vLLM 0.32 (its CPU build will do) and this package. Out: one table: microseconds of
CPU time per chunk through lookup, reserve, complete and finish, both sides in turn in one run, and the dearest
request of each. Never: a device, a byte of KV, a thread.

    python bench/policies_cycle_vs_vllm.py [--short] [--slots N]

Each request brings ``batch`` new chunks to a tier that is full, so as many leave. "Pinned": half of the tier, the half
that would leave first, is being read meanwhile. s3fifo and sieve, which vLLM does not have, stand beside its LRU.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence

import numpy
import vllm
from vllm.v1.kv_offload.base import ReqContext as PeerContext
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from orlop.core import FIRST_GENERATION, KeyRun, Namespace, ReqContext
from orlop.host.policies import load_policy
from orlop.host.tier import HostTier
from orlop.tiering.manager import TieringManager, TieringOptions
from scheduler_vs_vllm import machine

ROWS = (("lru", "lru", ">= 5x"), ("arc", "arc", ">= 2x"), ("s3fifo", "lru", ""), ("sieve", "lru", ""))
MOST_US_PER_REQUEST = "1 ms per 1,000 chunks"
BATCHES = (1, 64, 2048)
FILL = 1000
MOST_REQUESTS = 512


class Peer:
    """vLLM's CPU manager; keys are packed as its scheduler half does, outside of what is timed."""

    def __init__(self, policy: str, slots: int) -> None:
        self.manager = CPUOffloadingManager(num_chunks=slots, cache_policy=policy)
        self.number = itertools.count()

    def prepared(self, hashes: Sequence[bytes]) -> object:
        keys = [make_offload_key(h, 0) for h in hashes]
        context = PeerContext(f"r{next(self.number)}")
        for i, key in enumerate(keys):
            context.set_offload_key_position(key, 16 * (i + 1))
        return keys, context

    def cycle(self, prepared: tuple[list[bytes], PeerContext]) -> None:
        keys, context = prepared
        self.manager.on_new_request(context)
        self.manager.lookup(keys[0], context)
        plan = self.manager.prepare_store(keys, context)
        assert plan is not None
        assert len(plan.keys_to_store) == len(keys)
        self.manager.complete_store(keys, context)
        self.manager.on_request_finished(context)

    def pin(self, hashes: Sequence[bytes]) -> None:
        keys, context = self.prepared(hashes)
        self.manager.on_new_request(context)
        self.manager.prepare_load(keys, context)


class Ours:
    """Our manager over a host tier and nothing below it."""

    def __init__(self, policy: str, slots: int) -> None:
        host = HostTier(slots, load_policy(policy, slots))
        options = TieringOptions(payload_bytes=(4096,))
        self.manager = TieringManager(host, [], lambda g: Namespace(g, g), FIRST_GENERATION, options)
        self.number = itertools.count()

    def prepared(self, hashes: Sequence[bytes]) -> object:
        life = next(self.number)
        return KeyRun(0, hashes, 0, len(hashes)), ReqContext(life, f"r{life}")

    def cycle(self, prepared: tuple[KeyRun, ReqContext]) -> None:
        run, context = prepared
        manager = self.manager
        manager.on_new_request(context)
        manager.lookup_prefix(run, context, now=0.0, since=0.0)
        plan = manager.prepare_store(run, context, now=0.0)
        assert plan.reservation is not None
        assert len(plan.reservation.slots) == len(run)
        manager.complete_store(plan.reservation, True, now=0.0)
        manager.on_request_finished(context)
        manager.on_schedule_end(now=0.0)

    def pin(self, hashes: Sequence[bytes]) -> None:
        run, context = self.prepared(hashes)
        self.manager.on_new_request(context)
        self.manager.prepare_load(run, context, now=0.0)


def requests(batch: int) -> Iterator[list[bytes]]:
    while True:
        yield [os.urandom(32) for _ in range(batch)]


def fill(side: Peer | Ours, slots: int, pinned: bool) -> None:
    """To the last slot, and a tenth beyond, so that the first evictions are behind it."""
    runs = [next(requests(FILL)) for _ in range(slots // FILL + (slots // 10) // FILL)]
    for i, hashes in enumerate(runs):
        side.cycle(side.prepared(hashes))
        if pinned and i == slots // FILL - 1:
            for oldest in runs[: len(runs) // 2]:
                side.pin(oldest)


def measure(side: Peer | Ours, batch: int, chunks: int, samples: list[float]) -> None:
    """Microseconds of CPU time of each request."""
    for _, hashes in zip(range(min(MOST_REQUESTS, chunks // batch)), requests(batch), strict=False):
        prepared = side.prepared(hashes)
        began = time.thread_time_ns()
        side.cycle(prepared)
        samples.append((time.thread_time_ns() - began) / 1e3)


def row(policy: str, peer_policy: str, goal: str, slots: int, pinned: bool, chunks: int, rounds: int) -> None:
    for batch in BATCHES:
        sides: tuple[Peer | Ours, ...] = (Peer(peer_policy, slots), Ours(policy, slots))
        for side in sides:
            fill(side, slots, pinned)
        gc.collect()
        gc.freeze()
        means: tuple[list[float], list[float]] = ([], [])
        dearest = [0.0, 0.0]
        for _ in range(rounds):
            for i, side in enumerate(sides):
                samples: list[float] = []
                measure(side, batch, chunks, samples)
                means[i].append(sum(samples) / (len(samples) * batch))
                dearest[i] = max(dearest[i], *samples)
        gc.unfreeze()
        peer, ours = map(statistics.median, means)
        name = policy + (", half pinned" if pinned else "")
        print(
            f"{name:<22} {peer_policy:<6} {batch:>6} {peer:>10.2f} {ours:>10.2f} "
            f"{peer / ours:>8.1f}x {dearest[0] / 1e3:>12.2f} {dearest[1] / 1e3:>12.2f}  {goal}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one round, 20,000 slots")
    parser.add_argument("--slots", type=int, default=0, help="slots of the tier (100,000)")
    args = parser.parse_args()
    slots, rounds, chunks = args.slots or (20_000 if args.short else 100_000), 2 if args.short else 5, 8_192
    print(f"{machine()}; Python {platform.python_version()}, numpy {numpy.__version__}, vLLM {vllm.__version__}")
    print(f"{time.strftime('%Y-%m-%d')}; {slots} slots, full; CPU microseconds per chunk, medians of {rounds} rounds")
    print(f"the dearest request in ms; the goal is {MOST_US_PER_REQUEST}\n")
    print(f"{'ours':<22} {'vLLM':<6} {'batch':>6} {'vLLM':>10} {'Orlop':>10} {'ratio':>9}", end=" ")
    print(f"{'vLLM ms':>12} {'Orlop ms':>12}")
    for policy, peer_policy, goal in ROWS:
        for pinned in (False, True):
            row(policy, peer_policy, goal, slots, pinned, chunks, rounds)


if __name__ == "__main__":
    main()
