"""The words of the system as types.

In: nothing. Out: keys, groups, geometry, lookup answers, request contexts, reservations, jobs and
step messages, all small and frozen. Never: a decision, a clock, a thread, a file, an import of ours.

Arrays that travel in messages are one-dimensional ``numpy.int64`` arrays that nobody writes to once
the message exists. Times are seconds of one monotonic clock that the engine's side reads once per
hook and passes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from math import lcm
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

PAGE_BYTES = 4096
"""Alignment of everything that may meet direct I/O."""

DIGEST_BYTES = 16
FIRST_GENERATION = bytes(DIGEST_BYTES)
"""The generation every process starts with, so that a restart finds what was stored."""

NO_SALT = bytes(DIGEST_BYTES)


def align_up(n: int, alignment: int = PAGE_BYTES) -> int:
    """The smallest multiple of ``alignment`` that is not below ``n``."""
    return -(-n // alignment) * alignment


# --- keys -----------------------------------------------------------------------------------------


def pack_key(block_hash: bytes, group: int) -> bytes:
    """The packed OffloadKey: hash bytes, then the group index as 4 big-endian bytes."""
    return block_hash + group.to_bytes(4, "big")


def unpack_key(key: bytes) -> tuple[bytes, int]:
    """``(hash, group)`` of a packed OffloadKey."""
    return key[:-4], int.from_bytes(key[-4:], "big")


@dataclass(frozen=True, slots=True)
class KeyRun:
    """Neighbouring chunks ``start .. stop - 1`` of one request in one KV group.

    ``hashes[i]`` is the engine's own hash object for the end of chunk ``i``. The list belongs to the
    request and is only ever appended to; a run is a view of it and copies nothing. Chunk ``start - 1``,
    where there is one, is the chunk that this run extends.
    """

    group: int
    hashes: Sequence[bytes]
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> KeyRun:
        """The sub-run of absolute chunk indexes ``start .. stop - 1``."""
        return KeyRun(self.group, self.hashes, start, stop)

    def keys(self) -> Sequence[bytes]:
        """The hashes of this run, in chunk order."""
        return self.hashes[self.start : self.stop]

    def packed(self) -> list[bytes]:
        """The packed OffloadKeys of this run, made only where keys go to a tier."""
        tail = self.group.to_bytes(4, "big")
        return [h + tail for h in self.hashes[self.start : self.stop]]


# --- geometry -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share a block table.

    ``sliding_window`` is in tokens, None for full attention. ``layers`` are the engine's layer names.
    """

    index: int
    tokens_per_block: int
    sliding_window: int | None = None
    layers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Geometry:
    """How tokens, hashes, blocks and chunks of one engine relate.

    ``tokens_per_hash``: the engine makes one block hash for so many tokens; every group's
    ``tokens_per_block`` is a multiple of it. ``null_block_id``: the placeholder in block tables for
    positions that hold nothing; never stored, never loaded.
    """

    groups: tuple[KVGroup, ...]
    tokens_per_hash: int
    blocks_per_chunk: int
    null_block_id: int = 0

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("found no KV group, expected at least one")
        if self.blocks_per_chunk < 1:
            raise ValueError(f"found blocks_per_chunk={self.blocks_per_chunk}, expected 1 or more")
        if self.tokens_per_hash < 1:
            raise ValueError(f"found {self.tokens_per_hash} tokens per hash, expected 1 or more")
        for place, g in enumerate(self.groups):
            if g.index != place:
                raise ValueError(f"found group {g.index} in place {place}, expected the groups in order from 0")
            if g.sliding_window is not None and g.sliding_window < 1:
                raise ValueError(f"group {g.index}: found a window of {g.sliding_window} tokens, expected 1 or more")
            if g.tokens_per_block < 1 or g.tokens_per_block % self.tokens_per_hash:
                raise ValueError(
                    f"group {g.index}: found {g.tokens_per_block} tokens per block, expected a multiple "
                    f"of the engine's {self.tokens_per_hash} tokens per hash"
                )

    def chunk_tokens(self, group: int) -> int:
        """Tokens of one chunk of ``group``."""
        return self.groups[group].tokens_per_block * self.blocks_per_chunk

    def hashes_per_chunk(self, group: int) -> int:
        """Engine block hashes per chunk of ``group``."""
        return self.chunk_tokens(group) // self.tokens_per_hash

    @property
    def hit_alignment(self) -> int:
        """Tokens of which every hit is a multiple: whole blocks in every group."""
        return lcm(*(g.tokens_per_block for g in self.groups))


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """Where the bytes of a chunk lie in a slot of the host region.

    ``page_bytes[rank][group]`` is the size of one block of ``group`` on ``rank``, all its layers
    together. A slot holds the parts of all ranks one after the other, each padded to 4096 bytes, so
    that ranks write side by side and one I/O call moves the whole chunk. All slots have one size: that
    of the largest group's chunk.
    """

    slots: int
    blocks_per_chunk: int
    page_bytes: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.page_bytes)

    @property
    def groups(self) -> int:
        return len(self.page_bytes[0])

    def part_bytes(self, rank: int, group: int) -> int:
        """Payload bytes of one rank's part, without padding."""
        return self.page_bytes[rank][group] * self.blocks_per_chunk

    def part_offset(self, rank: int, group: int) -> int:
        """Byte offset of a rank's part in the slot."""
        return sum(align_up(self.part_bytes(r, group)) for r in range(rank))

    def parts(self, group: int) -> list[tuple[int, int]]:
        """``(offset, nbytes)`` of each rank's part in the slot."""
        return [(self.part_offset(rank, group), self.part_bytes(rank, group)) for rank in range(self.ranks)]

    def payload_bytes(self, group: int) -> int:
        """Bytes of a chunk at rest: all parts with their padding, a multiple of 4096."""
        return self.part_offset(self.ranks, group)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, a multiple of 4096."""
        return max(self.payload_bytes(g) for g in range(self.groups))


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine says of itself when it joins a connector.

    ``instance`` and ``replica`` name the host region's socket: unique per engine on this host, equal in all
    its processes. ``groups`` and ``tokens_per_hash`` as in ``Geometry``. ``identity`` is a JSON-able mapping of
    all that determines the bytes of a chunk (architecture, weights, dtypes, positions, hashing, layout).
    ``device_cache_bytes`` is the size of the device's KV cache of all ranks, from which defaults are sized, and
    ``replicas`` how many such engines share the host, so that all have room.
    ``persistent`` False: the weights cannot be told apart from others, so tiers that outlive the process
    stay off; ``volatile``: a better reason for it, for the log. ``events``: the engine takes cache events; otherwise
    none are kept for it.
    """

    instance: str
    groups: tuple[KVGroup, ...]
    tokens_per_hash: int
    identity: Mapping[str, Any]
    device_cache_bytes: int
    replica: int = 0
    replicas: int = 1
    rank: int = 0
    ranks: int = 1
    null_block_id: int = 0
    prefix_caching: bool = True
    persistent: bool = True
    volatile: str = ""
    events: bool = False


# --- lookups --------------------------------------------------------------------------------------


class Lookup(IntEnum):
    """What the manager knows of one key, ordered by hope."""

    MISS = 0
    RETRY = 1
    """A tier does not know yet; an answer comes within the lookup deadline."""
    HIT_PENDING = 2
    """It is being written to host memory, or a tier has it: readable within a deadline."""
    HIT = 3
    """Readable now, and until the end of this step without a pin."""


class PrefixAnswer(NamedTuple):
    """How far a run reaches, counted in chunks from its start.

    ``ready``: leading chunks that are HIT. ``reach``: leading chunks none of which is MISS (RETRY counts
    as hope), never below ``ready``. ``valid_until``: the time at which the answer may become worse by
    itself, because a deadline passes; infinity where nothing is waited for.
    """

    ready: int
    reach: int
    valid_until: float


# --- requests -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReqContext:
    """One life of a request, as managers and tiers see it.

    ``life`` is unique in the process and never reused; ``req_id`` may come back. ``salt`` is a 16-byte
    digest of the request's cache salt, zero bytes where it has none.
    """

    life: int
    req_id: str
    salt: bytes = NO_SALT


@runtime_checkable
class Request(Protocol):
    """An engine's request, with vLLM's attribute names; read, never written.

    ``num_computed_tokens`` counts tokens whose KV is computed or being computed by steps already handed
    to the worker. Two more attributes are read where an engine has them: ``num_in_flight_tokens``
    (tokens of those steps that have not reported) and ``skip_reading_prefix_cache``.
    """

    request_id: str
    num_computed_tokens: int
    block_hashes: Sequence[bytes]

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_prompt_tokens(self) -> int: ...


@runtime_checkable
class NewRequestData(Protocol):
    """An entry of ``scheduled_new_reqs``."""

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@runtime_checkable
class CachedRequestData(Protocol):
    """The parallel lists of requests that were scheduled before."""

    req_ids: list[str]
    resumed_req_ids: set[str]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]


@runtime_checkable
class SchedulerOutput(Protocol):
    """What an engine's scheduler decided for one step, with vLLM's attribute names."""

    scheduled_new_reqs: Sequence[Any]
    scheduled_cached_reqs: Any
    num_scheduled_tokens: Mapping[str, int]
    total_num_scheduled_tokens: int
    preempted_req_ids: set[str] | None


class Blocks(Protocol):
    """The blocks of a request after an allocation, prefix hits included."""

    def get_block_ids(self) -> tuple[list[int], ...]: ...


# --- reservations: the manager's handles ------------------------------------------------------------


class TransferKind(StrEnum):
    STORE = "store"
    LOAD = "load"


@dataclass(slots=True, eq=False)
class Reservation:
    """Slots that a device transfer may touch, from prepare to complete.

    Compared by identity and given back exactly once, so a release needs no key. ``contexts`` is the one life whose
    chunks these are, or one life for each chunk. ``chunks`` are the absolute chunk indexes in the request, ``slots``
    the slots in the same order. ``origins``: of a load, how many of its chunks each secondary tier brought up for it,
    by the tier's name.
    """

    number: int
    kind: TransferKind
    contexts: tuple[ReqContext, ...]
    group: int
    hashes: tuple[bytes, ...]
    chunks: Int64Array
    slots: Int64Array
    origins: Mapping[str, int] = field(default_factory=dict)


class JointOffer(NamedTuple):
    """A few chunks each of some lives, all of one KV group: what decoding requests have filled in the same steps.

    ``hashes[i]`` names chunk ``chunks[i]`` of ``contexts[i]``, and ``extends[i]`` the chunk before it in the request;
    empty where it is the first. Chunks of one life follow each other.
    """

    group: int
    hashes: Sequence[bytes]
    extends: Sequence[bytes]
    chunks: Sequence[int]
    contexts: Sequence[ReqContext]


@dataclass(frozen=True, slots=True)
class StorePlan:
    """The manager's answer to one offer of chunks.

    ``reservation``: what to copy now, None for nothing. ``settled``: the absolute chunk index up to which
    nothing is left to offer (stored, or reserved by this plan, or not wanted); from there on chunks were
    declined for want of room or are being written by somebody else, and are offered again.
    """

    reservation: Reservation | None
    settled: int


# --- device jobs and step messages -------------------------------------------------------------------


class GroupTransfer(NamedTuple):
    """Blocks of one group to copy; the three arrays have one entry per block.

    ``block_ids[i]`` on the device is block ``offsets[i]`` of the chunk in slot ``slots[i]``.
    """

    group: int
    block_ids: Int64Array
    slots: Int64Array
    offsets: Int64Array


class TransferJob(NamedTuple):
    """One asynchronous copy between device and host.

    ``req_id``: the request whose blocks these are; empty for a store of several requests. ``after_compute``: its bytes
    are computed by the step that carries it, so it is read after that step's forward; False: they are there already.
    ``doomed``: a load that must be reported as failed even where its copy succeeds, since fewer chunks could be pinned
    than the engine was promised.
    """

    job_id: int
    req_id: str
    kind: TransferKind
    transfers: tuple[GroupTransfer, ...]
    after_compute: bool = False
    doomed: bool = False


class OffloadingConnectorMetadata(NamedTuple):
    """The step message from the scheduler half to every rank.

    ``jobs_to_flush`` are ids of store jobs, of this message or of earlier ones, whose blocks must have been
    read before anything of this step may overwrite them. Ids that a worker does not know are done.
    ``loads_to_fail`` are ids of earlier load jobs that a reset has outdated: each is reported as failed, however
    its copy ends, unless it has been reported already.
    """

    load_jobs: tuple[TransferJob, ...] = ()
    store_jobs: tuple[TransferJob, ...] = ()
    jobs_to_flush: tuple[int, ...] = ()
    loads_to_fail: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.load_jobs or self.store_jobs or self.jobs_to_flush or self.loads_to_fail)


@dataclass(frozen=True, slots=True)
class JobReport:
    """One rank's word on one job, said once; a repeated one is recognised by ``(job_id, rank)``.

    ``fence_waits`` and ``fence_wait_s``: how often and how long the rank's engine thread has waited for fences since
    the rank's last report; they travel with a report because that is what is counted once.
    """

    job_id: int
    rank: int
    ok: bool
    nbytes: int = 0
    seconds: float = 0.0
    fence_waits: int = 0
    fence_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """What one rank has to say after a step (or several ranks, merged).

    ``finished_recving``: requests whose load has ended, well or badly; ``failed_recving``: the badly
    ended ones among them; ``failed_block_ids``: the device blocks that these did not fill. ``invalid_block_ids``: those
    that another connector was to fill before the step, and did not.
    """

    reports: tuple[JobReport, ...] = ()
    finished_recving: frozenset[str] = frozenset()
    failed_recving: frozenset[str] = frozenset()
    failed_block_ids: frozenset[int] = frozenset()
    invalid_block_ids: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.reports or self.finished_recving or self.invalid_block_ids)


# --- tier jobs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Namespace:
    """All that must be equal for two runs to share bytes; ``digest`` covers the generation."""

    digest: bytes
    generation: bytes = FIRST_GENERATION


@dataclass(frozen=True, slots=True)
class TierJob:
    """Chunks of one group that move between the host region and one secondary tier.

    ``keys`` are packed OffloadKeys; ``slots[i]`` holds, or will hold, the ``payload_bytes`` of ``keys[i]``.
    The slots belong to the tier until it has reported the job (or, where its report said that it still
    holds them, until it has released it). ``contexts`` are the lives whose chunks these are; none for work that
    outlives requests.
    """

    job_id: int
    kind: TransferKind
    group: int
    keys: tuple[bytes, ...]
    slots: Int64Array
    payload_bytes: int
    namespace: Namespace
    salt: bytes = NO_SALT
    contexts: tuple[ReqContext, ...] = ()


class Outcome(StrEnum):
    """What became of one key in a tier."""

    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"
    """It was there and did not verify as what was asked for; it has been removed."""
    NO_SPACE = "no_space"
    DENIED = "denied"
    IO_ERROR = "io_error"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    """Not tried: breaker open, queue full, I/O process dead, shutting down."""


@dataclass(frozen=True, slots=True)
class TierResult:
    """The one report of a TierJob: ``outcomes[i]`` belongs to ``keys[i]``.

    ``released`` False: the tier may still touch the slots, and says so later once it no longer does.
    ``reason`` is one line for the log, empty where all went well.
    """

    job_id: int
    outcomes: tuple[Outcome, ...]
    nbytes: int = 0
    seconds: float = 0.0
    reason: str = ""
    released: bool = True


@dataclass(frozen=True, slots=True)
class TierAnswer:
    """A tier's answer to one lookup: ``found[i]`` is 1 where it has key ``i``.

    Shorter than the keys asked where the scan was told to stop at the first miss.
    """

    lookup_id: int
    found: bytes


# --- what the outside sees --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """Chunks that became readable in, or left, a tier (``medium``: ``host`` or the tier's name).

    A chunk goes by the hash of its end, which is the one under which it is found. ``cleared``: everything of the medium
    has left, of all groups; then there are no ``hashes`` and ``group`` says nothing.
    """

    stored: bool
    medium: str
    group: int
    hashes: tuple[bytes, ...] = field(default=())
    cleared: bool = False
