"""The contracts beside the device: CopyBackend and OffloadingWorker.

In: words from ``core``. Out: abstract classes with their promises. Never: torch, CUDA, a policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orlop.core import TransferJob


@dataclass(frozen=True, slots=True)
class CopyResult:
    """The end of one job on this rank: bytes copied, seconds spent, and why it failed (empty: it did not)."""

    job_id: int
    ok: bool
    nbytes: int
    seconds: float
    reason: str = ""


class CopyBackend(ABC):
    """Copies blocks between KV tensors and slots, in bulk.

    ``kv_caches`` maps each layer name to its tensor, block index first. One backend serves one rank.
    ``copy`` runs on the worker's copy thread, may be long, releases the GIL while bytes move, and raises
    on failure. After a store it has written the checksum of its part of every chunk it copied whole.
    """

    @abstractmethod
    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Learn the tensors, called again after they moved. Refuses an unknown layout by ``ConfigError``."""

    def forget(self) -> None:
        """Let go of the tensors, so that their memory can be freed; copies fail until the next ``register``."""

    @abstractmethod
    def copy(self, job: TransferJob) -> int:
        """Do one job from beginning to end; the bytes moved."""

    def compute_done(self) -> Any:
        """On the engine's thread after a forward: a token for "all compute so far" (None on CPU)."""
        return None

    def wait_for(self, token: Any) -> None:
        """On the copy thread: order later copies behind ``token``."""


class OffloadingWorker(ABC):
    """Runs copy jobs off the engine's thread, in the order of submission per direction.

    Engine's thread: ``submit``, ``flush``, ``get_finished``. Every submitted job is in ``get_finished``
    exactly once, also when its copy raised. ``flush`` is the one allowed wait of the system.
    """

    @abstractmethod
    def submit(self, job: TransferJob) -> None:
        """Queue one job; returns at once, never raises for the job's sake."""

    @abstractmethod
    def flush(self, job_ids: Collection[int]) -> float:
        """Return once every store among ``job_ids`` has read its blocks; seconds waited. Unknown ids are done."""

    @abstractmethod
    def get_finished(self) -> Sequence[CopyResult]:
        """Jobs that ended since the last call."""

    @abstractmethod
    def drain(self, deadline_s: float) -> bool:
        """Wait until no job is open, for engines that move their tensors; False where the deadline passed first."""

    @abstractmethod
    def shutdown(self, deadline_s: float) -> None:
        """Finish what is queued for at most ``deadline_s``; what is left ends as failed."""
