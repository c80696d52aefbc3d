"""An engine whose bytes are checked cell by cell, over both real connector halves and a files tier.

In: a directory and a layout. Out: an engine to add requests to. Never: a model, a fake store, a fake clock.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from patience import PATIENT

from orlop.config import OrlopConfig
from orlop.connector import OffloadingConnector
from orlop.core import EngineSpec, Geometry, KVGroup, Reservation
from orlop.errors import OrlopError
from orlop.testing.byte_device import ByteDevice
from orlop.testing.request_runner import EngineRequest, RequestRunner
from orlop.tiering.breaker import BreakerState

FULL = (KVGroup(0, 4, layers=("a", "b")),)
HYBRID = (KVGroup(0, 4, layers=("a", "b")), KVGroup(1, 4, sliding_window=8, layers=("c", "d")))


FORWARD_S = 0.0002


class RealClock:
    """The machine's monotonic clock, for a runner that drives real I/O.

    A step lets go of the interpreter for a moment, as a forward does; a loop that never did would starve the threads
    that copy and send, whose every turn then takes a whole switch interval.

    ``skips_s``: so much more than the machine's time goes by in each step, for a test that is about a deadline; one
    so short that a machine meets it by itself would be met elsewhere too.
    """

    def __init__(self) -> None:
        self.skips_s = 0.0
        self._skipped_s = 0.0

    @property
    def now(self) -> float:
        return time.monotonic() + self._skipped_s

    def advance(self, seconds: float) -> float:
        time.sleep(FORWARD_S)
        self._skipped_s += self.skips_s
        return self.now


class Engine:
    """One engine over both connector halves and a tier: files in ``path``, or what ``tier`` says.

    ``settings`` go over what a test gets by default, ``tiers`` False: the files tier is not among that. ``spec`` goes
    over what the engine says of itself, ``device`` makes the device, ``worker`` one rank's worker half, ``runner`` is
    for the RequestRunner. A start that is refused leaves no worker behind; ``refused`` is what ranks other than the
    lowest were told. Leaving the ``with`` block shuts both halves down.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        groups: tuple[KVGroup, ...],
        ranks: int,
        tier: dict[str, Any] | None = None,
        io_process: bool = True,
        tiers: bool = True,
        settings: Mapping[str, Any] | None = None,
        spec: Mapping[str, Any] | None = None,
        device: type[ByteDevice] = ByteDevice,
        worker: Callable[[OrlopConfig, EngineSpec], Any] = OffloadingConnector.worker,
        **runner: Any,
    ) -> None:
        files = {"type": "files", "path": str(path), "bytes": "2MiB", "deadline": dict(PATIENT)}
        config = OrlopConfig.load(
            {
                "host": {"bytes": 24 * 4096 * ranks},
                "blocks_per_chunk": 2,
                "io_process": io_process,
                "store_deadline": "60s",
                **({"tiers": [tier or files]} if tiers else {}),
                **(settings or {}),
            },
            environ={},
        )
        says = {"instance": f"{name}-{os.getpid()}", "groups": groups, "tokens_per_hash": 4, "ranks": ranks}
        says |= {"identity": {"model": "cells"}, "device_cache_bytes": 1, **(spec or {})}
        specs = [EngineSpec(**says, rank=r) for r in range(ranks)]
        size: dict[str, Any] = {"blocks": 40, "token_budget": 32, **runner}
        self.device = device(Geometry(groups, 4, 2), ranks=ranks, blocks=size["blocks"])
        self.clock = RealClock()
        self.refused: list[OrlopError | ConnectionError] = []
        self.workers = [worker(config, s) for s in specs]
        try:
            self._register_all()
            self.connector = OffloadingConnector.scheduler(config, specs[0], clock=lambda: self.clock.now)
        except BaseException:
            for worker in self.workers:
                worker.shutdown()
            raise
        assert self.connector._region is not None
        assert self.connector._region.wait_filled(60)  # a busy machine must not decide what is stored
        half = self.connector._scheduler
        self.device.geometry = half.geometry
        self.device.attach(self.workers, self.connector._region)
        self.manager = self.connector._manager
        self._check_stores()
        self.runner = RequestRunner(
            half,
            half.geometry,
            ranks=ranks,
            clock=self.clock,  # type: ignore[arg-type]
            device=self.device,  # type: ignore[arg-type]
            checks=(self.connector.check,),
            **size,
        )

    def _register_all(self) -> None:
        """All ranks at once, as in an engine: the lowest waits for the others. Raises what the lowest raised."""
        others = [
            threading.Thread(target=self._try_to_register, args=pair, daemon=True)
            for pair in zip(self.workers[1:], self.device.kv_caches[1:], strict=True)
        ]
        for thread in others:
            thread.start()
        try:
            self._register(self.workers[0], self.device.kv_caches[0])
        finally:
            for thread in others:
                thread.join()
        if self.refused:
            raise self.refused[0]

    def _try_to_register(self, worker: Any, caches: dict[str, Any]) -> None:
        try:
            self._register(worker, caches)
        except (OrlopError, ConnectionError) as error:
            self.refused.append(error)

    def _register(self, worker: Any, caches: dict[str, Any]) -> None:
        worker.register_kv_caches(caches)

    def _check_stores(self) -> None:
        """Compare the slots of every store when it is completed, before anybody else may get them."""
        complete = self.manager.complete_store

        def checked(reservation: Reservation, success: bool, **rest: Any) -> None:
            if success and not self.manager._open[reservation.number].outdated:
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

    def serve(self, prompt: list[int], max_tokens: int = 1, **add: Any) -> EngineRequest:
        """Run one request to its end, and all its transfers too; then the device has forgotten it."""
        request = self.runner.add(prompt, max_tokens, **add)
        self.run()
        self.runner.pool.reset()
        return request

    def run(self) -> None:
        """Step until all requests have ended and nothing is pending; nothing is left then."""
        limit = time.monotonic() + 60
        while not self.runner.idle:
            assert time.monotonic() < limit, f"not done after a minute: {self.runner.describe()}"
            self.runner.step()
        self.runner.check_drained()

    def until(self, condition: Callable[[], bool]) -> None:
        """Step until the condition holds."""
        limit = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < limit, f"not so after a minute: {self.runner.describe()}"
            self.runner.step()

    def stats(self) -> Mapping[str, float]:
        """The connector's counters; 0 for one that has not counted yet."""
        return defaultdict(float, self.connector.get_stats())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

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


def load_what_is_published(engine: Engine, path: Path, wanted: list[list[int]]) -> int:
    """Every leading chunk of a prompt that lies in the directory is loaded, as far as a hit may reach; these tokens."""
    published = path / "v1" / engine.manager._namespace.digest.hex()
    expected = 0
    for prompt in wanted:
        names = {entry.name for entry in published.rglob("*") if entry.is_file()}
        request = engine.runner.add(prompt)
        keys = request.block_hashes[1::2]
        there = next((i for i, key in enumerate(keys) if f"{key.hex()}00000000" not in names), len(keys))
        reach = min(8 * there, (len(prompt) - 1) // 4 * 4)  # of whole chunks; at least one token is computed
        engine.run()
        engine.runner.pool.reset()
        assert request.was_external >= reach, f"{reach} tokens are published, {request.was_external} were found"
        expected += reach
    assert expected or not any(published.rglob("*"))
    return expected
