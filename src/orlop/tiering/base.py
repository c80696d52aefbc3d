"""The contracts of everything that holds chunks: OffloadingManager, SecondaryTierManager, ChunkStore.

In: words from ``core``. Out: abstract classes with their promises. Never: behaviour, beyond defaults that
say "nothing to do".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orlop.core import (
    CacheEvent,
    JointOffer,
    KeyRun,
    Lookup,
    Namespace,
    Outcome,
    PrefixAnswer,
    ReqContext,
    Reservation,
    StorePlan,
    TierAnswer,
    TierJob,
    TierResult,
)


class OffloadingManager(ABC):
    """Who holds which chunk, and what moves between tiers.

    Called by the scheduler half on the engine's thread only; every call returns at once and none raises
    for a request's sake. ``now`` is the engine side's monotonic time in seconds; ``since`` the time of the
    request's own first ask, from which its waits count.

    Submit side, for live requests: ``lookup*``, ``touch``, ``prepare_load``, ``prepare_store`` and
    ``prepare_joint_store``. Completion side, may come after a request has ended but before ``on_request_finished``:
    ``complete_load``, ``complete_store``, ``release``.

    A HIT holds until the next ``on_schedule_end``: between the first lookup of a step and its
    ``on_schedule_end`` no slot is evicted or reserved but by ``prepare_store`` and its joint form, which the scheduler
    half calls after every ``prepare_load`` of the step.
    """

    @abstractmethod
    def on_new_request(self, context: ReqContext) -> None:
        """A life begins. Called once, before any other call with this context."""

    def lookup(self, group: int, block_hash: bytes, context: ReqContext, *, now: float, since: float) -> Lookup:
        """What is known of one key."""
        return self.lookup_each(KeyRun(group, (block_hash,), 0, 1), context, now=now, since=since)[0]

    @abstractmethod
    def lookup_prefix(self, run: KeyRun, context: ReqContext, *, now: float, since: float) -> PrefixAnswer:
        """How far ``run`` reaches from its start.

        Secondary tiers are asked for the part that host memory lacks, once per request and run start, and
        what they have is noted for promotion. Waits count from ``since``; once over, what is not readable
        is a MISS.
        """

    @abstractmethod
    def lookup_each(self, run: KeyRun, context: ReqContext, *, now: float, since: float) -> Sequence[Lookup]:
        """One answer per key of ``run``, for groups whose hit is a window instead of a prefix."""

    @abstractmethod
    def want(self, run: KeyRun, context: ReqContext, *, now: float) -> None:
        """The request will wait for ``run``: promote what a tier has of it, lease what is readable."""

    @abstractmethod
    def answer_version(self, context: ReqContext) -> tuple[int, int]:
        """Two numbers that only grow: while both are as they were, lookups of this life answer as they did.

        The first grows when something that this life waits for has come or failed, the second when a readable
        chunk of anybody may have gone. Deadlines (``PrefixAnswer.valid_until``) are not part of it.
        """

    @abstractmethod
    def touch(self, run: KeyRun, context: ReqContext, *, now: float) -> None:
        """The chunks of ``run`` were of use: keep them longer; the first chunk longest.

        ``prepare_load`` and ``prepare_store`` imply it for what of their run is readable.
        """

    @abstractmethod
    def prepare_load(self, run: KeyRun, context: ReqContext, *, now: float) -> Reservation:
        """Pin the readable prefix of ``run`` until ``complete_load``. May hold fewer chunks than asked."""

    @abstractmethod
    def complete_load(self, reservation: Reservation, *, now: float) -> None:
        """The device has read the slots (or never will). Exactly once per reservation."""

    @abstractmethod
    def prepare_store(self, run: KeyRun, context: ReqContext, *, now: float) -> StorePlan:
        """Reserve slots for the chunks of ``run`` that are wanted and not there; evicts for room if it must."""

    def prepare_joint_store(self, offer: JointOffer, *, now: float) -> Reservation | None:
        """One reservation for a chunk each of some lives, all or nothing; a manager may do without.

        None: some chunk is there or being written, is not wanted yet, or extends another of them, or there is no room.
        Then each is to be offered by itself.
        """
        return None

    @abstractmethod
    def complete_store(self, reservation: Reservation, success: bool, *, now: float, released: bool = True) -> None:
        """Every rank has written the slots (success), or the store has failed. Exactly once per reservation.

        ``released`` False: somebody may still write the slots; they stay retired until ``release``.
        """

    @abstractmethod
    def release(self, reservation: Reservation) -> None:
        """Nobody touches the slots of a store that was completed with ``released=False`` any more."""

    @abstractmethod
    def on_request_finished(self, context: ReqContext) -> None:
        """No further call for this life will submit anything. Bookkeeping only. Exactly once per life."""

    @abstractmethod
    def on_schedule_end(self, *, now: float) -> None:
        """Once per step, after the step's stores are reserved: read reports, keep deadlines, submit promotions."""

    def has_pending_work(self) -> bool:
        """Whether work is in flight that must finish with no request around."""
        return False

    @abstractmethod
    def reset_cache(self, generation: bytes, *, now: float) -> None:
        """Nothing from before is served from now on. ``generation``: 16 fresh random bytes.

        Reservations still open are honoured: their completion publishes nothing and frees the slots.
        """

    def take_events(self) -> Sequence[CacheEvent]:
        """Events since the last call."""
        return ()

    def get_stats(self) -> Mapping[str, float]:
        """Counters and gauges by name; counters only grow."""
        return {}

    def flush(self, *, now: float) -> bool:
        """The end is near: write what only host memory has. True: there is more to come, call again in a moment."""
        return False

    @abstractmethod
    def shutdown(self, *, now: float, deadline_s: float) -> None:
        """End all tiers, waiting at most ``deadline_s``. The only call that may wait."""


class SecondaryTierManager(ABC):
    """One tier below host memory, as the engine's thread sees it.

    All calls come from the engine's thread and return at once. Every submitted job is reported exactly
    once through ``get_finished_jobs``, also after an exception, a dead I/O process or ``shutdown``.
    """

    name: str
    """Index and type, for example ``1:files``; a label in logs and metrics."""

    @abstractmethod
    def lookup_prefix(
        self,
        lookup_id: int,
        keys: Sequence[bytes],
        context: ReqContext,
        *,
        namespace: Namespace,
        stop_at_miss: bool = True,
        now: float,
    ) -> TierAnswer | None:
        """Which of ``keys`` (packed OffloadKeys) the tier has; None: the answer comes by ``get_answers``.

        ``lookup_id`` is unique in the process. With ``stop_at_miss`` the answer may end at the first 0.
        """

    @abstractmethod
    def get_answers(self) -> Sequence[TierAnswer]:
        """Answers to lookups that have come since the last call. Every lookup is answered once."""

    @abstractmethod
    def submit_store(self, job: TierJob, *, now: float) -> None:
        """Read the slots and keep their bytes. Dropped (reported UNAVAILABLE) where the queue is full."""

    @abstractmethod
    def submit_load(self, job: TierJob, *, now: float) -> None:
        """Fill the slots with verified bytes and their checksums in the region's table."""

    @abstractmethod
    def get_finished_jobs(self) -> Sequence[TierResult]:
        """Reports since the last call."""

    @abstractmethod
    def get_released_jobs(self) -> Sequence[int]:
        """Ids of jobs that were reported with ``released=False`` and whose slots nobody touches any more."""

    def touch(self, keys: Sequence[bytes], context: ReqContext) -> None:
        """The keys were of use."""

    def on_new_request(self, context: ReqContext) -> None:
        """A life begins."""

    def on_request_finished(self, context: ReqContext) -> None:
        """No submit for this life follows. Once per life."""

    def on_schedule_end(self, *, now: float) -> None:
        """Once per step."""

    def note_hung(self, count: int, *, now: float) -> None:
        """``count`` slots are retired because this tier holds them past a deadline (the breaker listens)."""

    def has_pending_work(self) -> bool:
        """Only work that must finish with no request around and that no submitted job stands for."""
        return False

    def take_events(self, namespace: Namespace) -> Sequence[CacheEvent]:
        """Events since the last call, of chunks of ``namespace``; "all has left" first where that is a new one."""
        return ()

    def get_stats(self) -> Mapping[str, float]:
        return {}

    def clear(self) -> None:
        """Forget everything stored; asynchronous, the bytes may go later but are not served again."""

    @abstractmethod
    def shutdown(self, deadline_s: float) -> None:
        """Drain for at most ``deadline_s`` seconds, report what is left as failed, end the I/O process."""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One entry of a store's ``scan``. ``age_s`` since it was last known to be of use."""

    key: bytes
    nbytes: int
    age_s: float


@dataclass(frozen=True, slots=True)
class KeyChange:
    """What has come to a store and what has gone, as ``key_index.key_name`` of each key; never both for one key.

    ``reset``: forget all that was said before.
    """

    added: npt.NDArray[np.uint64]
    removed: npt.NDArray[np.uint64]
    reset: bool = False


class ChunkStore(ABC):
    """Where a secondary tier's bytes rest: blocking, dumb.

    Runs in the I/O process, called from several threads at once. A key is opaque bytes: 16 bytes of
    namespace digest, then a packed OffloadKey. ``headers[i]`` and ``views[i]`` are writable byte
    memoryviews, aligned and sized to 4096, of one chunk's header and payload; they are the caller's and
    are touched only during the call. A store never looks inside them and never raises for one key's sake:
    it answers one outcome per key. ``StoreError`` or ``OSError``: the store failed as a whole.
    """

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Which keys are there, as of at most a bounded time ago."""

    @abstractmethod
    def read_into(
        self, keys: Sequence[bytes], headers: Sequence[memoryview], views: Sequence[memoryview]
    ) -> Sequence[Outcome]:
        """Fill header and payload of each key. A short or over-long object is CORRUPT."""

    @abstractmethod
    def write(
        self, keys: Sequence[bytes], headers: Sequence[memoryview], views: Sequence[memoryview]
    ) -> Sequence[Outcome]:
        """Keep header and payload under each key, whole or not at all. Replacing or keeping an existing key is OK."""

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget the keys; how many were there. A missing key is fine."""

    @abstractmethod
    def scan(self) -> Iterator[StoredChunk]:
        """All that is stored, in no order, incrementally."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """The keys were of use."""

    def watch(self, tell: Callable[[KeyChange], None]) -> bool:
        """Tell at once all that is there, and from then on every change, in order; False: this store cannot.

        For a store that nobody else writes to and that knows its keys: lookups are then answered where the engine
        is. ``tell`` is called from any thread, returns at once and does not call back. A key that is added is told
        before its ``write`` returns.
        """
        return False

    def stats(self) -> Mapping[str, float]:
        """Counters and gauges by name; counters only grow.

        Known to metrics and the start line are the gauges ``bytes`` and ``chunks`` (kept), ``limit_bytes`` (the bound),
        ``counted`` (0 while it still looks through what is there; left out where it never has to), and the counter
        ``evicted_chunks``.
        """
        return {}

    def watch_removals(self, tell: Callable[[bytes], None]) -> None:
        """From now on tell each key that leaves and that nobody deleted: evicted for room, or found gone.

        ``tell`` may be called from any thread, before the key can be written again. Stores that cannot say it do not.
        """

    def close(self) -> None:
        """Let go of everything; idempotent."""
