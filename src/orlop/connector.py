"""OffloadingConnector: the engine's one door, and how the parts are joined.

In: settings, what the engine says of itself, its KV tensors, its hooks. Out: the hooks' answers and messages. Never: a
decision of its own; it reads the clock once per hook and hands it on.

One object is one half. The worker half of the lowest local rank makes the host region when it learns the KV tensors;
the other ranks, the scheduler half and the tiers' I/O processes join it, so workers are built first::

    worker = OffloadingConnector.worker(config, spec)         # in each rank
    worker.register_kv_caches(kv_caches)
    scheduler = OffloadingConnector.scheduler(config, spec)   # in the engine's scheduler process
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from orlop.config import OrlopConfig, TierConfig, default_host_bytes
from orlop.core import (
    FIRST_GENERATION,
    Blocks,
    CacheEvent,
    EngineSpec,
    Geometry,
    OffloadingConnectorMetadata,
    RegionLayout,
    Request,
    SchedulerOutput,
    WorkerOutput,
)
from orlop.counting import SYNC_BOUNDS, Histogram, Stats
from orlop.errors import ConfigError, TierUnavailable
from orlop.host.limits import free_bytes, memory_limit_bytes
from orlop.host.policies import load_policy
from orlop.host.region import HostRegion, socket_name
from orlop.host.tier import HostTier
from orlop.scheduler.scheduler import OffloadingConnectorScheduler, SchedulerOptions
from orlop.tiering.io_messages import StoreSpec
from orlop.tiering.manager import TierEntry, TieringManager, TieringOptions
from orlop.tiering.namespace import Fingerprint, almost_same, read_descriptions, write_description
from orlop.tiering.runner import RunnerOptions, TierRunner
from orlop.worker.cpu import CpuCopyBackend
from orlop.worker.layout import page_bytes
from orlop.worker.worker import CopyWorker, OffloadingConnectorWorker

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 60.0
"""How long the parts of one engine wait for each other at start."""
TIER_START_TIMEOUT_S = 10.0
MEMORY_START_TIMEOUT_S = 2.0
"""How long a start waits for host memory: enough for some GiB. An engine without any would store nothing at first."""
HELD = {"store_chunks", "store_bytes", "store_limit_bytes"}
"""What a store says of itself that the start line tells."""
COUNT_TIMEOUT_S = 1.0
"""How long the start line waits for tiers that still look through what they hold."""
FLUSH_PAUSE_S = 0.002
FLUSH_SHARE = 0.9
"""A shutdown writes what only host memory has, and looks so often how far that is, for so much of its time."""
LEAST_SLOTS = 4
LEAST_LOOKUP_LIMIT_S = 5.0
LEAST_MAX_RETIRED = 64
"""Slots that a tier may hold past their deadline before it is out of service, where a quarter of all is less."""
GATHER_STEPS = 128
"""Steps for which chunks that decoding fills are gathered, to be stored together: some seconds."""
JOINT_BYTES = 64 * 1024 * 1024
MOST_JOINT = 64
"""So much, and so many chunks, of several requests share a store job; a fence for one of them waits for all of it."""
LOOK_AHEAD = 8
"""Waiting requests whose tiers are asked before the engine comes to them: some steps' worth, a part of host memory."""
STORES = {"disk": "orlop.stores.disk.store:DiskStore", "files": "orlop.stores.files:FilesStore"}


class OffloadingConnector:
    """One half of the connector. All calls come from the engine's thread of that half's process."""

    def __init__(self, config: OrlopConfig, spec: EngineSpec, clock: Callable[[], float]) -> None:
        config.refuse_what_waits_for_an_engine()
        self.config = config
        self.spec = _named(spec, config.weights_id)
        self._clock = clock
        self._region: HostRegion | None = None
        self._scheduler_half: OffloadingConnectorScheduler | None = None
        self._lookup_delays = Histogram(SYNC_BOUNDS)
        self._troubles: dict[str, str] = {}
        """Tiers that are out of service at start, and why."""
        self._worker_half: OffloadingConnectorWorker | None = None
        self._closed = False

    @classmethod
    def worker(
        cls,
        config: OrlopConfig | Mapping[str, Any] | None,
        spec: EngineSpec,
        clock: Callable[[], float] = time.monotonic,
    ) -> OffloadingConnector:
        """The worker half of ``spec.rank``; of use once ``register_kv_caches`` was called."""
        return cls(_settings(config), spec, clock)

    @classmethod
    def scheduler(
        cls,
        config: OrlopConfig | Mapping[str, Any] | None,
        spec: EngineSpec,
        clock: Callable[[], float] = time.monotonic,
    ) -> OffloadingConnector:
        """The scheduler half; waits for the workers' host region, then for each tier to open (or say why not)."""
        connector = cls(_settings(config), spec, clock)
        connector._join_scheduler()
        return connector

    # --- the scheduler half ------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_new_request(request, now=self._clock())

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        now = self._clock()
        answer = self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens, now=now)
        self._lookup_delays.observe(self._clock() - now)
        return answer

    def update_state_after_alloc(self, request: Request, blocks: Blocks, num_external_tokens: int) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens, now=self._clock())

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> OffloadingConnectorMetadata:
        return self._scheduler.build_connector_meta(scheduler_output, now=self._clock())

    def update_connector_output(self, output: WorkerOutput) -> None:
        self._scheduler.update_connector_output(output, now=self._clock())

    def request_finished(self, request: Request) -> tuple[bool, None]:
        return self._scheduler.request_finished(request, now=self._clock())

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_pending_push_work()

    @property
    def is_idle(self) -> bool:
        """Whether no request is alive, and nothing is on its way."""
        return self._scheduler.is_idle

    def reset_cache(self, device_cleared: bool = True) -> None:
        """Nothing from before is served; the new generation is drawn from the system's random source.

        ``device_cleared`` False: the engine could not forget the device's own prefix cache.
        """
        self._scheduler.reset_cache(os.urandom(16), now=self._clock(), device_cleared=device_cleared)

    def load_origins(self, request: Request) -> Mapping[str, int]:
        """Tokens of the load that ``update_state_after_alloc`` has just planned, by the tier that had them."""
        return self._scheduler.load_origins(request)

    @cached_property
    def chunk_tokens(self) -> tuple[int, ...]:
        """Tokens of a chunk, by group."""
        geometry = self._scheduler.geometry
        return tuple(geometry.chunk_tokens(group.index) for group in geometry.groups)

    def take_events(self) -> Sequence[CacheEvent]:
        return self._scheduler.take_events()

    def get_stats(self) -> Stats:
        """All counters, gauges and histograms; ``orlop.counting`` says how keys read, docs/reference/metrics.md what
        they mean. Costs the same whatever is running or stored, but is not meant for every step.
        """
        stats = dict(self._scheduler.get_stats())
        stats.update(self._lookup_delays.stats("lookup_sync_seconds"))
        overdue = [
            at for key in ("jobs_overdue_at", "tier_jobs_overdue_at") if (at := stats.pop(key, None)) is not None
        ]
        stats["retired_seconds"] = self._clock() - min(overdue) if overdue else 0.0
        geometry = self._scheduler.geometry
        stats.update({f"chunk_tokens {g.index}": geometry.chunk_tokens(g.index) for g in geometry.groups})
        if self._region is not None:
            stats["slot_bytes"] = self._region.layout.slot_bytes
            stats["slots_usable"] = self._region.usable_slots
        return stats

    def check(self) -> None:
        """Recount the books of this half; ``InvariantError`` where they do not add up. For tests and tools."""
        self._scheduler.check()
        self._manager.check(self._scheduler.open_reservations())

    # --- the worker half -----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Learn the KV tensors, and make or join the host region. Called again after the tensors have moved."""
        if self._worker_half is not None:
            self._worker_half.rebind(kv_caches)
            return
        self._require_sound_spec()
        pages = page_bytes(kv_caches, self.spec.groups)
        name = socket_name(self.spec.instance, self.spec.replica)
        if self.spec.rank == 0:
            self._region = HostRegion.gather(name, self.spec.ranks, pages, self._decide_layout, JOIN_TIMEOUT_S)
        else:
            self._region = HostRegion.join(name, self.spec.rank, pages, JOIN_TIMEOUT_S)
        backend = CpuCopyBackend(self.spec.groups, self._region, self.spec.rank)
        backend.register(kv_caches)
        self._worker_half = OffloadingConnectorWorker(CopyWorker(backend), backend, self.spec.rank)

    def handle_preemptions(self, meta: OffloadingConnectorMetadata) -> None:
        self._worker.handle_preemptions(meta)

    def start_load_kv(self, meta: OffloadingConnectorMetadata) -> None:
        self._worker.start_load_kv(meta)

    def wait_for_save(self, meta: OffloadingConnectorMetadata) -> None:
        self._worker.wait_for_save(meta)

    def get_finished(self) -> WorkerOutput:
        return self._worker.get_finished()

    # --- both ------------------------------------------------------------------------------------------------

    def shutdown(self, deadline_s: float | None = None) -> None:
        """End this half: waits for what is in flight at most ``deadline_s`` (None: the drain deadline). Idempotent."""
        if self._closed:
            return
        self._closed = True
        if deadline_s is None:
            deadline_s = self.config.drain_deadline_s
        if self._worker_half is not None:
            self._worker_half.shutdown(deadline_s)
        if self._scheduler_half is not None:
            began = self._clock()
            self._scheduler_half.shutdown(now=began)
            lost = self._per_tier("evictions_unwritten")
            while self._manager.flush(now=self._clock()) and self._clock() - began < FLUSH_SHARE * deadline_s:
                time.sleep(FLUSH_PAUSE_S)
            now = self._clock()
            self._manager.shutdown(now=now, deadline_s=max(0.0, began + deadline_s - now))
            self._say_what_was_not_written(lost)
        if self._region is not None:
            self._region.close()

    def _per_tier(self, *stats: str) -> Counter[str]:
        """The sum of some figures, by tier."""
        found, names = self._manager.get_stats(), [entry.tier.name for entry in self._manager.tiers]
        return Counter({name: int(sum(found.get(f"{stat} {name}", 0) for stat in stats)) for name in names})

    def _say_what_was_not_written(self, lost_before: Counter[str]) -> None:
        for name, count in (self._per_tier("evictions_unwritten", "chunks_unwritten") - lost_before).items():
            log.warning(
                "tier %s: the drain deadline ended with %d chunks in host memory alone, which are lost; a longer "
                "drain_deadline, or write: 'through', keeps them",
                name,
                count,
            )

    # --- joining the parts --------------------------------------------------------------------------------------

    @cached_property
    def _scheduler(self) -> OffloadingConnectorScheduler:
        if self._scheduler_half is None:
            raise ConfigError("found a call of the scheduler half on a worker half, expected the other connector")
        return self._scheduler_half

    @cached_property
    def _worker(self) -> OffloadingConnectorWorker:
        if self._worker_half is None:
            raise ConfigError("found a call of the worker half, expected register_kv_caches() before it")
        return self._worker_half

    def _require_sound_spec(self) -> None:
        """Before anything is made or waited for: what no engine can mean, and groups that no chunk size can serve."""
        spec = self.spec
        if not isinstance(spec.instance, str) or not spec.instance.isprintable():
            raise ConfigError(f"instance: found {spec.instance!r}, expected a text of printable characters")
        if not 0 <= spec.rank < spec.ranks:
            raise ConfigError(f"found rank {spec.rank} of {spec.ranks}, expected a rank from 0 up, below the number")
        layers = Counter(layer for group in spec.groups for layer in group.layers)
        if twice := [layer for layer, count in layers.items() if count > 1]:
            raise ConfigError(f"found layer {twice[0]!r} more than once in the KV groups, expected each in one group")
        try:
            Geometry(spec.groups, spec.tokens_per_hash, 1, spec.null_block_id)
        except ValueError as error:
            raise ConfigError(f"this engine cannot be offloaded: {error}") from error

    def _require_own_region(self, layout: RegionLayout) -> None:
        """A half that waits for fewer reports than there are ranks would publish what is not whole."""
        ours = (self.spec.ranks, len(self.spec.groups))
        if ours != (layout.ranks, layout.groups):
            raise ConfigError(
                f"found a host region of {layout.ranks} ranks and {layout.groups} KV groups, expected {ours[0]} and "
                f"{ours[1]} as this half was told; tell all halves of an engine the same"
            )

    def _decide_layout(self, pages: tuple[tuple[int, ...], ...]) -> RegionLayout:
        """Chunk size and number of slots, from the settings and the page sizes of all ranks."""
        block_bytes = max(sum(rank[g.index] for rank in pages) for g in self.spec.groups)
        blocks = self._stored_chunk_blocks(pages) or self.config.chunk_blocks(self.spec.groups, block_bytes)
        slot_bytes = RegionLayout(1, blocks, pages).slot_bytes
        wanted = self.config.host.bytes or self._default_host_bytes(LEAST_SLOTS * slot_bytes)
        slots = wanted // slot_bytes
        if slots < LEAST_SLOTS:
            raise ConfigError(
                f"host.bytes: found {wanted} bytes, which is {slots} chunks of {slot_bytes} bytes, expected "
                f"{LEAST_SLOTS} or more; set it to {LEAST_SLOTS * slot_bytes} at least, or blocks_per_chunk lower"
            )
        return RegionLayout(slots, blocks, pages)

    def _default_host_bytes(self, least_bytes: int) -> int:
        """What nobody has set is never refused: not more than half of what is free, and never too little to work."""
        spec = self.spec
        wanted = default_host_bytes(spec.device_cache_bytes, memory_limit_bytes(), free_bytes(), spec.replicas)
        return max(least_bytes, wanted)

    def _stored_chunk_blocks(self, pages: tuple[tuple[int, ...], ...]) -> int | None:
        """With ``auto``, the chunk size of the newest stored namespace that equals ours in all else."""
        if self.config.blocks_per_chunk is not None or self.config.tokens_per_chunk is not None:
            return None
        found: list[tuple[float, int]] = []
        for tier in self.config.tiers if self.spec.persistent else ():
            for digest, description in read_descriptions(tier.path).items() if tier.path else ():
                blocks = description.get("blocks_per_chunk")
                if not isinstance(blocks, int) or blocks < 1:
                    continue
                same = Fingerprint.of(self.spec, RegionLayout(1, blocks, pages)).describe() == description
                if same and tier.path:
                    found.append((_mtime(os.path.join(tier.path, f"{digest}.json")), blocks))
        return max(found)[1] if found else None

    def _join_scheduler(self) -> None:
        spec = self.spec
        self._require_sound_spec()
        region = HostRegion.connect(socket_name(spec.instance, spec.replica), timeout_s=JOIN_TIMEOUT_S)
        self._region = region
        entries: list[TierEntry] = []
        try:
            self._require_own_region(region.layout)
            region.wait_filled(MEMORY_START_TIMEOUT_S)  # what is not there yet comes while the engine runs
            fingerprint = Fingerprint.of(spec, region.layout)
            for index, tier in enumerate(self._persistent_tiers()):
                entries.append(self._open_tier(index, tier, region, fingerprint))
            self._build_scheduler(region, fingerprint, entries)
        except BaseException:
            for entry in entries:
                entry.tier.shutdown(0.0)
            region.close()
            raise

    def _build_scheduler(self, region: HostRegion, fingerprint: Fingerprint, entries: Sequence[TierEntry]) -> None:
        spec, config, layout = self.spec, self.config, region.layout
        geometry = Geometry(spec.groups, spec.tokens_per_hash, layout.blocks_per_chunk, spec.null_block_id)
        host = HostTier(layout.slots, load_policy(config.host.policy, layout.slots), usable=region.usable_slots)
        payloads = tuple(layout.payload_bytes(g.index) for g in spec.groups)
        options = TieringOptions(
            payloads,
            store_after=config.host.store_after,
            keep_tiers_on_reset=config.keep_tiers_on_reset,
            events=config.events or spec.events,
            usable_slots=lambda: region.usable_slots,
        )
        self._manager = TieringManager(host, entries, fingerprint.namespace, FIRST_GENERATION, options)
        self._scheduler_half = OffloadingConnectorScheduler(
            geometry,
            self._manager,
            SchedulerOptions(
                ranks=spec.ranks,
                offload_decode=config.offload_decode,
                prefix_caching=spec.prefix_caching,
                store_deadline_s=config.store_deadline_s,
                lookup_wait_s=max((e.lookup_s for e in entries), default=0.0),
                promotion_wait_s=max((e.promotion_s for e in entries), default=5.0),
                max_joint_chunks=max(1, min(MOST_JOINT, JOINT_BYTES // layout.slot_bytes)),
                gather_steps=GATHER_STEPS,
                look_ahead=LOOK_AHEAD if entries else 0,
            ),
        )
        self._say_what_is_on(layout, entries, fingerprint)

    def _say_what_is_on(self, layout: RegionLayout, entries: Sequence[TierEntry], fingerprint: Fingerprint) -> None:
        """The start line: what is on, and what is off and why."""
        stored_until = time.monotonic() + COUNT_TIMEOUT_S
        tiers = [self._describe_tier(entry, stored_until) for entry in entries]
        tokens = self._scheduler.geometry.chunk_tokens(0)
        parts = [
            f"offloading is on: host {layout.slots * layout.slot_bytes} bytes in {layout.slots} chunks of "
            f"{layout.slot_bytes} bytes ({layout.blocks_per_chunk} blocks, {tokens} tokens each), "
            f"policy {self.config.host.policy}",
            f"tiers: {', '.join(tiers) or 'none'}",
            f"namespace {fingerprint.namespace().digest.hex()}",
            f"off: {', '.join(self._what_is_off()) or 'nothing'}",
        ]
        log.info("%s", "; ".join(parts))

    def _describe_tier(self, entry: TierEntry, stored_until: float) -> str:
        tier = entry.tier
        when = "" if entry.store else " (written on eviction)" if entry.evicted_bytes else " (read only)"
        text = tier.name + when
        if tier.name in self._troubles or not isinstance(tier, TierRunner):
            return text
        if not tier.wait_counted(max(0.0, stored_until - time.monotonic())):
            return f"{text}, what it holds is not known yet"
        stats = tier.get_stats()
        if not stats.keys() >= HELD:
            return text
        chunks, nbytes, limit = (stats[f"store_{name}"] for name in ("chunks", "bytes", "limit_bytes"))
        return f"{text} with {chunks:.0f} chunks in {nbytes:.0f} of {limit:.0f} bytes"

    def _what_is_off(self) -> list[str]:
        off = []
        if self.config.tiers and not self.spec.persistent:
            off.append(f"tiers ({self._why_volatile})")
        if not self.config.offload_decode:
            off.append("chunks that generated tokens fill (offload_decode)")
        if not self.spec.prefix_caching:
            off.append("sharing of blocks on the device (the engine's prefix caching)")
        off += [f"tier {name} for now ({trouble})" for name, trouble in self._troubles.items()]
        return off

    def _persistent_tiers(self) -> tuple[TierConfig, ...]:
        if self.config.tiers and not self.spec.persistent:
            log.warning("tiers are off: %s", self._why_volatile)
            return ()
        return self.config.tiers

    @property
    def _why_volatile(self) -> str:
        """Why nothing of this engine may outlive it."""
        return self.spec.volatile or "nothing tells these weights apart from others: set weights_id"

    def _open_tier(self, index: int, tier: TierConfig, region: HostRegion, fingerprint: Fingerprint) -> TierEntry:
        name = f"{index}:{tier.type}"
        kwargs: dict[str, Any] = {"path": tier.path, "max_bytes": tier.bytes}
        if tier.type in STORES:
            kwargs["direct_io"] = tier.direct_io
        if tier.type == "disk":
            kwargs |= {"policy": tier.policy, "sync": tier.sync, "namespace": fingerprint.namespace().digest}
        options = RunnerOptions(
            name,
            queue_bytes=tier.queue_bytes,
            threads=tier.threads,
            max_retired=max(LEAST_MAX_RETIRED, region.layout.slots // 4),
            # What nobody waits for any more is not worth the tier's time either, and no sooner.
            lookup_limit_s=max(LEAST_LOOKUP_LIMIT_S, tier.deadline.lookup_s),
            load_wait_s=tier.deadline.promotion_s,
            store_wait_s=tier.deadline.cascade_s,
            events=(self.config.events or self.spec.events) and tier.events,
        )
        spec = StoreSpec(STORES.get(tier.type, tier.type), {k: v for k, v in kwargs.items() if v is not None})
        runner = TierRunner(options, region, spec, io_process=self.config.io_process, clock=self._clock)
        try:
            trouble = _wait_ready(runner, f"tiers.{index}")
            if trouble and tier.required:
                raise TierUnavailable(
                    f"tiers.{index}: found it unavailable ({trouble}), expected it reachable since it is required; "
                    "mend it, or set required to false to start without it"
                )
        except BaseException:
            runner.shutdown(0.0)
            raise
        if trouble:
            self._troubles[name] = trouble
            log.warning("tier %s is off for now and comes back by itself: %s", name, trouble)
        elif tier.path:
            self._describe(name, tier.path, fingerprint)
        return TierEntry(
            runner,
            store=tier.write == "through",
            evicted_bytes=max(1, tier.queue_bytes // 2) if tier.write == "evicted" else 0,
            store_after=tier.store_after,
            lookup_s=tier.deadline.lookup_s,
            promotion_s=tier.deadline.promotion_s,
            cascade_s=tier.deadline.cascade_s,
        )

    def _describe(self, name: str, path: str, fingerprint: Fingerprint) -> None:
        """Leave the namespace in clear beside the data, and say where data of almost the same namespace lies."""
        near = almost_same(fingerprint, read_descriptions(path))
        if near is not None:
            digest, fields = near
            log.info(
                "tier %s also holds data of namespace %s, which is not served to this run: it differs in %s",
                name,
                digest,
                ", ".join(fields),
            )
        write_description(path, fingerprint)


def _settings(config: OrlopConfig | Mapping[str, Any] | None) -> OrlopConfig:
    return config if isinstance(config, OrlopConfig) else OrlopConfig.load(config)


def _named(spec: EngineSpec, weights_id: str | None) -> EngineSpec:
    """What an engine says of itself, and what its user calls its weights: a name tells them apart from others."""
    if weights_id is None:
        return spec
    return replace(spec, identity={**spec.identity, "weights_id": weights_id}, persistent=True)


def _wait_ready(runner: TierRunner, key: str) -> str | None:
    """Why the tier of ``key`` is not open, if it is not; a refusal names the full key of the setting it is about."""
    try:
        return runner.wait_ready(TIER_START_TIMEOUT_S)
    except ConfigError as error:
        setting = str(error).partition(":")[0]
        raise ConfigError(f"{key}.{error}" if setting in TierConfig.model_fields else f"{key}: {error}") from error


def _mtime(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
