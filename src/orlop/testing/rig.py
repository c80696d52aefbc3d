"""A request runner over the real scheduler half and a recorded manager, put together in one call.

In: a geometry, a manager (a dictionary where none is given), and what to vary. Out: a Rig. Never: a
connector or an engine of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from orlop.core import FIRST_GENERATION, Geometry, KVGroup, Namespace, TransferKind
from orlop.host.policies import load_policy
from orlop.host.tier import HostTier, SlotState
from orlop.scheduler.scheduler import OffloadingConnectorScheduler, SchedulerOptions
from orlop.testing.clock import FakeClock
from orlop.testing.device import Device
from orlop.testing.doubles import DictManager, ManualTier, RecordingManager
from orlop.testing.request_runner import EngineRequest, RequestRunner
from orlop.tiering.base import OffloadingManager
from orlop.tiering.manager import TierEntry, TieringManager, TieringOptions

FULL = Geometry((KVGroup(0, 4),), 4, 1)
"""One group of full attention, one block per chunk."""

PAIRS = Geometry((KVGroup(0, 4),), 4, 2)
"""One group of full attention, two blocks per chunk."""

HYBRID = Geometry((KVGroup(0, 4), KVGroup(1, 4, sliding_window=8)), 4, 1)
"""Full attention beside a sliding window of two blocks."""


@dataclass(frozen=True)
class Rig:
    """An engine, its scheduler half, the recorded manager between them and the tiers below."""

    runner: RequestRunner
    scheduler: OffloadingConnectorScheduler
    manager: RecordingManager
    device: Device
    clock: FakeClock
    tiers: tuple[ManualTier, ...] = ()

    def store(self, prompt: Sequence[int], max_tokens: int = 1, **add: Any) -> EngineRequest:
        """Run one request to its end and all its transfers too; the device's prefix cache forgets it."""
        request = self.runner.add(prompt, max_tokens, **add)
        self.runner.run()
        self.runner.pool.reset()
        return request

    def loads(self, req_ids: Iterable[str] | None = None) -> list[int]:
        """Job ids of all loads so far, of some requests or of all."""
        wanted = None if req_ids is None else set(req_ids)
        return [job.job_id for job in self.device.loaded_jobs if wanted is None or job.req_id in wanted]

    def finish(self, max_steps: int = 1000) -> None:
        """Run to the end; then everything has been given back and every life has ended once."""
        self.runner.run(max_steps)
        self.runner.check_drained()
        self.manager.check_all_ended()
        for tier in self.tiers:
            tier.check_all_ended()
        self._check_tiering_drained()

    def _check_tiering_drained(self) -> None:
        """After a drain: no life, job or lease is left, and slots are held by overdue jobs alone."""
        manager = self.manager.inner
        if not isinstance(manager, TieringManager):
            return
        for table in (manager._lives, manager._transfer_jobs, manager._noting):
            assert not table, f"the manager is left with {table}"
        assert manager.host.leased == 0
        assert {r.number for r in self.scheduler.open_reservations()} == set(manager._open)
        lost = sum(len(r.slots) for r in self.scheduler.open_reservations())
        hung = sum(len(job.order.slots) for job in manager._overdue.values())
        retired = manager.host.counts()[SlotState.RETIRED]
        assert retired <= lost + hung, f"{retired} slots are retired, {lost + hung} are somebody's"

    def lives(self, name: str = "on_request_finished") -> list[int]:
        """Lives for which ``name`` was called, in order."""
        return [call.life for call in self.manager.calls if call.name == name and call.life is not None]

    def hold(self, kind: TransferKind | None = None) -> None:
        """Reports of one direction (or both) wait from now on."""
        self.device.hold = lambda job, rank: kind in (None, job.kind)

    def unhold(self) -> None:
        """Reports come again."""
        self.device.hold = lambda job, rank: False


def make_rig(
    geometry: Geometry = FULL,
    manager: OffloadingManager | Callable[[Device], OffloadingManager] | None = None,
    *,
    ranks: int = 1,
    blocks: int = 64,
    async_scheduling: bool = False,
    seed: int = 0,
    options: dict[str, Any] | None = None,
    **runner: Any,
) -> Rig:
    """A Rig. ``manager`` may be a function of the device; ``options`` are fields of SchedulerOptions."""
    clock = FakeClock()
    device = Device(geometry, ranks=ranks, blocks=blocks, seed=seed)
    inner = manager(device) if callable(manager) else manager or DictManager()
    recorded = RecordingManager(inner, device)
    scheduler = OffloadingConnectorScheduler(geometry, recorded, SchedulerOptions(ranks=ranks, **(options or {})))
    engine = RequestRunner(
        scheduler,
        geometry,
        blocks=blocks,
        ranks=ranks,
        async_scheduling=async_scheduling,
        clock=clock,
        device=device,
        checks=(recorded.check,),
        **runner,
    )
    return Rig(engine, scheduler, recorded, device, clock)


def plain_namespace(generation: bytes) -> Namespace:
    """A namespace that depends on the generation alone."""
    return Namespace(hashlib.blake2b(b"namespace" + generation, digest_size=16).digest(), generation)


def make_tiered_rig(
    geometry: Geometry = FULL,
    *,
    slots: int = 64,
    tiers: int = 1,
    auto: bool = True,
    policy: str = "lru",
    usable: int | None = None,
    entry: dict[str, Any] | None = None,
    tiering: dict[str, Any] | None = None,
    **rig: Any,
) -> Rig:
    """A Rig over the real host tier and TieringManager, with ``tiers`` ManualTiers below.

    ``usable``: slots that are ready for use (None: all). ``entry``: settings of each TierEntry; ``tiering``: fields of
    TieringOptions.
    """
    made: list[ManualTier] = []

    def manager(device: Device) -> TieringManager:
        made.extend(ManualTier(device.memory, name=f"{i}:manual", device=device, auto=auto) for i in range(tiers))
        entries = [TierEntry(tier, **(entry or {})) for tier in made]
        options = TieringOptions((4096,) * len(geometry.groups), **(tiering or {}))
        return TieringManager(
            HostTier(slots, load_policy(policy, slots), usable=usable),
            entries,
            plain_namespace,
            FIRST_GENERATION,
            options,
        )

    plain = make_rig(geometry, manager, **rig)
    inner, scheduler = plain.manager.inner, plain.scheduler
    assert isinstance(inner, TieringManager)
    plain.runner.checks.append(lambda: inner.check(scheduler.open_reservations()))
    return Rig(plain.runner, plain.scheduler, plain.manager, plain.device, plain.clock, tuple(made))
