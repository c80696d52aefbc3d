"""An engine whose bytes are checked cell by cell, over both real connector halves and a files tier.

In: a directory and a layout. Out: an engine to add requests to. Never: a model, a fake store, a fake clock.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from orlop.config import OrlopConfig
from orlop.connector import OffloadingConnector
from orlop.core import EngineSpec, Geometry, KVGroup, Reservation
from orlop.testing.byte_device import ByteDevice
from orlop.testing.request_runner import RequestRunner
from orlop.tiering.breaker import BreakerState

FULL = (KVGroup(0, 4, layers=("a", "b")),)
HYBRID = (KVGroup(0, 4, layers=("a", "b")), KVGroup(1, 4, sliding_window=8, layers=("c", "d")))


class RealClock:
    """The machine's monotonic clock, for a runner that drives real I/O; steps give other threads a turn."""

    @property
    def now(self) -> float:
        return time.monotonic()

    def advance(self, seconds: float) -> float:
        os.sched_yield()
        return self.now


class Engine:
    """One engine over both connector halves and a tier: files in ``path``, or what ``tier`` says."""

    def __init__(
        self,
        path: Path,
        name: str,
        groups: tuple[KVGroup, ...],
        ranks: int,
        tier: dict[str, Any] | None = None,
        io_process: bool = True,
        **runner: Any,
    ) -> None:
        files = {"type": "files", "path": str(path), "bytes": "2MiB", "deadline": {"lookup": "2s"}}
        config = OrlopConfig.load(
            {
                "host": {"bytes": 24 * 4096 * ranks},
                "blocks_per_chunk": 2,
                "io_process": io_process,
                "tiers": [tier or files],
            },
            environ={},
        )
        spec = {"instance": f"{name}-{os.getpid()}", "groups": groups, "tokens_per_hash": 4, "ranks": ranks}
        specs = [EngineSpec(**spec, identity={"model": "cells"}, device_cache_bytes=1, rank=r) for r in range(ranks)]
        self.device = ByteDevice(Geometry(groups, 4, 2), ranks=ranks, blocks=40)
        self.workers = [OffloadingConnector.worker(config, s) for s in specs]
        for worker, caches in zip(reversed(self.workers), reversed(self.device.kv_caches), strict=True):
            self._register(worker, caches)
        self.connector = OffloadingConnector.scheduler(config, specs[0])
        assert self.connector._region is not None
        self.device.attach(self.workers, self.connector._region)
        self.manager = self.connector._manager
        self._check_stores()
        half = self.connector._scheduler
        self.runner = RequestRunner(
            half,
            half.geometry,
            blocks=40,
            ranks=ranks,
            token_budget=32,
            clock=RealClock(),  # type: ignore[arg-type]
            device=self.device,  # type: ignore[arg-type]
            checks=(self.connector.check,),
            **runner,
        )

    def _register(self, worker: OffloadingConnector, caches: dict[str, Any]) -> None:
        worker.register_kv_caches(caches)

    def _check_stores(self) -> None:
        """Compare the slots of every store when it is completed, before anybody else may get them."""
        complete = self.manager.complete_store

        def checked(reservation: Reservation, success: bool, **rest: Any) -> None:
            opened = self.manager._open[reservation.number]
            if success and not opened.outdated:
                self.device.check_slots(reservation.slots.tolist(), reservation.group, reservation.hashes)
            complete(reservation, success, **rest)

        self.manager.complete_store = checked  # type: ignore[method-assign]

    def kill_io(self) -> None:
        """SIGKILL for the I/O process of the files tier, wherever it is."""
        link = self.manager.tiers[0].tier._pump._link  # type: ignore[attr-defined]
        if link is not None:
            os.kill(link.pid, signal.SIGKILL)

    def wait_in_service(self) -> None:
        """Traffic until the tier's breaker has closed again, as it does by itself."""
        tier: Any = self.manager.tiers[0].tier
        limit = time.monotonic() + 60
        while tier._breaker.state is not BreakerState.CLOSED:
            assert time.monotonic() < limit, "the tier has not come back"
            self.runner.add([time.monotonic_ns() % 10**9 + i for i in range(9)])
            self.runner.run(max_steps=1_000_000)

    def load_from_files(self, rng: random.Random) -> None:
        """Store more than host memory holds, and ask for all of it again."""
        wanted = [[rng.randrange(10**6) for _ in range(61)] for _ in range(8)]
        for prompt in [*wanted, *wanted]:
            self.runner.add(prompt)
            self.runner.run(max_steps=1_000_000)

    def shutdown(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.connector.shutdown()


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts that share prefixes: a few roots, each grown in turns."""
    roots = [[rng.randrange(1000) for _ in range(rng.randrange(8, 40))] for _ in range(12)]
    made = []
    for _ in range(count):
        root = rng.choice(roots)
        made.append(root + [rng.randrange(1000) for _ in range(rng.randrange(1, 24))])
        if rng.random() < 0.3 and len(root) < 60:
            root.extend(rng.randrange(1000) for _ in range(8))
    return made
