"""The worker half: what an engine's worker calls, and the threads that copy beside it.

In: step messages and the engine's KV tensors. Out: for every rank, each job's end, once, and the
requests whose loads ended. Never: a decision about what to copy, a key, a wait on the engine's thread
other than the flush of a fence (and of ``suspend`` and ``shutdown``, which no step calls).

Why two copy threads, one per direction, and no order between them:

- A load that writes blocks which a pending store still reads: the scheduler half has those blocks in its
  fences, a block handed out in a step puts its stores into ``jobs_to_flush``, and ``handle_preemptions``
  returns only when they have read. ``start_load_kv`` comes later in the same step. So the order is that of
  the calls, and a load need not queue behind stores that have nothing to do with it.
- A store that reads what a load wrote: the engine has heard of the load's end before it computes on.
- Slots: a slot that a load reads is pinned, one that a store writes is reserved; they never meet.

Why compute needs no care on a CPU: the forward has returned when ``wait_for_save`` is called, so what it
wrote is visible to a thread that takes the job from a queue afterwards, and a store whose bytes are there
already was computed by an earlier step. On other devices ``submit`` takes a token for all compute so far,
which the copy thread passes to the backend before it copies.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Condition, Lock
from typing import Any

from orlop.background import start_thread
from orlop.core import JobReport, OffloadingConnectorMetadata, TransferJob, TransferKind, WorkerOutput
from orlop.errors import ConfigError
from orlop.worker.base import CopyBackend, CopyResult, OffloadingWorker

log = logging.getLogger(__name__)

NOTHING = WorkerOutput()
REMEMBERED_JOBS = 16_384
"""Job ids kept to recognise a job that comes again in a later message."""


@dataclass(slots=True)
class _Lane:
    """One direction: what waits, in order of submission, and what is being copied; ``more`` wakes its thread."""

    more: Condition
    waiting: deque[tuple[TransferJob, Any]] = field(default_factory=deque)
    copying: TransferJob | None = None


class CopyWorker(OffloadingWorker):
    """Runs the jobs of one rank on two daemon threads, one for stores and one for loads.

    Order of submission per direction, but for one case: a store that is flushed is brought forward, so
    that the engine waits for the stores it needs and for at most one other.
    """

    def __init__(self, backend: CopyBackend, clock: Callable[[], float] = time.perf_counter) -> None:
        self._backend = backend
        self._clock = clock
        lock = Lock()  # guards all that follows
        self._ended = Condition(lock)
        self._lanes = {kind: _Lane(Condition(lock)) for kind in TransferKind}
        self._open: dict[int, TransferJob] = {}
        self._finished: list[CopyResult] = []
        self._complaints: set[tuple[TransferKind, str]] = set()
        self._stopped = False
        self._threads = [
            start_thread(self._run, lane, name=f"orlop-{kind.value}") for kind, lane in self._lanes.items()
        ]

    def submit(self, job: TransferJob) -> None:
        try:
            token = self._backend.compute_done()
        except Exception as e:
            self._refuse(job, f"{type(e).__name__}: {e}")
            return
        lane = self._lanes[job.kind]
        with lane.more:
            if self._stopped:
                self._finished.append(_failed(job, "the worker is shut down"))
                return
            self._open[job.job_id] = job
            lane.waiting.append((job, token))
            lane.more.notify()

    def _refuse(self, job: TransferJob, reason: str) -> None:
        with self._ended:
            self._finished.append(_failed(job, reason))

    def flush(self, job_ids: Collection[int]) -> float:
        with self._ended:
            needed = {j for j in job_ids if j in self._open and self._open[j].kind is TransferKind.STORE}
            if not needed:
                return 0.0
            self._bring_forward(needed)
            start = self._clock()
            self._ended.wait_for(lambda: needed.isdisjoint(self._open))
            return self._clock() - start

    def _bring_forward(self, needed: set[int]) -> None:
        lane = self._lanes[TransferKind.STORE]
        waiting = sorted(lane.waiting, key=lambda entry: entry[0].job_id not in needed)
        lane.waiting = deque(waiting)

    def get_finished(self) -> Sequence[CopyResult]:
        if not self._finished:  # as in most steps; what comes in this moment is there in the next
            return ()
        with self._ended:
            finished, self._finished = self._finished, []
        return finished

    def drain(self, deadline_s: float) -> bool:
        with self._ended:
            return self._ended.wait_for(lambda: not self._open, deadline_s)

    def shutdown(self, deadline_s: float) -> None:
        """Both directions are drained, then stopped; what the deadline cuts off ends as failed.

        A copy that hangs keeps its thread: see ``let_go``.
        """
        with self._ended:
            self._ended.wait_for(lambda: not self._open, deadline_s)
            self._stopped = True
            for lane in self._lanes.values():
                lane.waiting.clear()
                lane.more.notify()
            self._finished += [_failed(job, "cut off by the shutdown") for job in self._open.values()]
            self._open.clear()
            self._ended.notify_all()
        if not any(lane.copying for lane in self._lanes.values()):
            for thread in self._threads:
                thread.join()

    @property
    def let_go(self) -> bool:
        """Whether nothing is being copied: only then may tensors or the region be unmapped after a shutdown."""
        with self._ended:
            return not any(lane.copying for lane in self._lanes.values())

    # --- on the copy threads ---

    def _run(self, lane: _Lane) -> None:
        while (taken := self._take(lane)) is not None:
            job, token = taken
            result = self._copied(job, token)
            with self._ended:
                lane.copying = None
                if self._open.pop(job.job_id, None) is not None:
                    self._finished.append(result)
                self._ended.notify_all()

    def _take(self, lane: _Lane) -> tuple[TransferJob, Any] | None:
        with lane.more:
            while not lane.waiting and not self._stopped:
                lane.more.wait()
            if not lane.waiting:
                return None
            taken = lane.waiting.popleft()
            lane.copying = taken[0]
            return taken

    def _copied(self, job: TransferJob, token: Any) -> CopyResult:
        """The job's end, whatever its copy raises: one job's trouble never ends the thread, for whom a fence waits."""
        start = self._clock()
        try:
            self._backend.wait_for(token)
            nbytes = self._backend.copy(job)
        except BaseException as e:
            self._complain(job, e)
            return CopyResult(job.job_id, False, 0, self._clock() - start, f"{type(e).__name__}: {e}")
        return CopyResult(job.job_id, True, nbytes, self._clock() - start)

    def _complain(self, job: TransferJob, error: BaseException) -> None:
        kind = (job.kind, type(error).__name__)
        if kind not in self._complaints:
            self._complaints.add(kind)
            log.warning(
                "%s job %d failed: %s: %s; further failures of this kind are only counted", job.kind, job.job_id,
                type(error).__name__, error, exc_info=error,
            )  # fmt: skip


def _failed(job: TransferJob, reason: str) -> CopyResult:
    return CopyResult(job.job_id, False, 0, 0.0, reason)


# --- what an engine's worker calls -----------------------------------------------------------------------


class OffloadingConnectorWorker:
    """One rank's worker half. All calls on the engine's thread, in the order of lifecycle: ``handle_preemptions``,
    ``start_load_kv``, the forward, ``wait_for_save``, ``get_finished`` (the last two in either order).

    ``fence_waits`` and ``fence_wait_s`` count and time the waits for fences; ``failed_jobs`` the jobs that failed.
    """

    def __init__(self, worker: OffloadingWorker, backend: CopyBackend, rank: int) -> None:
        self._worker = worker
        self._backend = backend
        self._rank = rank
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._after_compute: list[TransferJob] = []
        self._loads: dict[int, TransferJob] = {}
        self._doomed: set[int] = set()
        self._failed_blocks: dict[str, set[int]] = {}
        self.fence_waits = 0
        self.fence_wait_s = 0.0
        self._said_waits = 0
        self._said_wait_s = 0.0
        self.failed_jobs = 0

    def handle_preemptions(self, meta: OffloadingConnectorMetadata) -> None:
        """Before anything of this step writes to a block: stores that read what is there, then the fences.

        Loads that a reset has outdated will be reported as failed, each when its copy no longer writes.
        Stores of an earlier step that no ``wait_for_save`` submitted are due too: their forward is over.
        """
        self._submit_stores(self._after_compute)
        self._after_compute = []
        if not meta:
            return
        self._doomed.update(job_id for job_id in meta.loads_to_fail if job_id in self._loads)
        flushed = set(meta.jobs_to_flush)
        self._submit_stores(j for j in meta.store_jobs if not j.after_compute or j.job_id in flushed)
        self._after_compute = [j for j in meta.store_jobs if j.job_id not in self._seen]
        if flushed:
            waited_s = self._worker.flush(meta.jobs_to_flush)
            self.fence_waits += waited_s > 0
            self.fence_wait_s += waited_s

    def start_load_kv(self, meta: OffloadingConnectorMetadata) -> None:
        """Submit this step's loads; behind ``handle_preemptions``, hence behind the stores that it flushed."""
        for job in meta.load_jobs:
            if self._first_time(job):
                self._loads[job.job_id] = job
                if job.doomed:
                    self._doomed.add(job.job_id)
                self._worker.submit(job)

    def wait_for_save(self, meta: OffloadingConnectorMetadata) -> None:
        """After the forward was launched: submit the stores of what it computes. Returns at once."""
        if self._after_compute or meta.store_jobs:
            self._submit_stores([*self._after_compute, *meta.store_jobs])
            self._after_compute = []

    def get_finished(self) -> WorkerOutput:
        """What ended since the last call.

        A request is in ``finished_recving`` once none of its loads is open any more, and in
        ``failed_recving`` too if any of them failed or was doomed; ``failed_block_ids`` are all blocks of
        its failed loads, since a failed copy does not say how far it came.
        """
        results = self._worker.get_finished()
        if not results:
            return NOTHING
        reports = tuple(self._report(r) for r in results)
        ended = [job for r in reports if (job := self._loads.pop(r.job_id, None)) is not None]
        ok = {r.job_id: r.ok for r in reports}
        for job in ended:
            if not ok[job.job_id]:
                self._failed_blocks.setdefault(job.req_id, set()).update(_block_ids(job))
        still_loading = {job.req_id for job in self._loads.values()}
        finished = frozenset(job.req_id for job in ended) - still_loading
        failed = {req_id: self._failed_blocks.pop(req_id) for req_id in finished if req_id in self._failed_blocks}
        return WorkerOutput(reports, finished, frozenset(failed), frozenset().union(*failed.values()))

    def suspend(self, deadline_s: float = 30.0) -> bool:
        """Before the engine frees or moves its tensors: wait for open jobs, then let go of the tensors.

        False, and the tensors kept, where jobs are still open at the deadline: the engine must not free them.
        """
        self._submit_stores(self._after_compute)
        self._after_compute = []
        if not self._worker.drain(deadline_s):
            return False
        self._backend.forget()
        return True

    def rebind(self, kv_caches: Mapping[str, Any], deadline_s: float = 30.0) -> None:
        """After the engine moved its tensors: drain, then learn the new ones. What host memory holds stays valid."""
        if not self.suspend(deadline_s):
            raise ConfigError(
                f"rank {self._rank}: found copies still open after {deadline_s} s, expected none while tensors move; "
                "call suspend() before the tensors are freed"
            )
        self._backend.register(kv_caches)

    def shutdown(self, deadline_s: float) -> None:
        """Finish or fail all jobs within the deadline; the last ``get_finished`` after it reports them."""
        self._submit_stores(self._after_compute)
        self._after_compute = []
        self._worker.shutdown(deadline_s)

    def _submit_stores(self, jobs: Iterable[TransferJob]) -> None:
        for job in jobs:
            if self._first_time(job):
                self._worker.submit(job)

    def _first_time(self, job: TransferJob) -> bool:
        if job.job_id in self._seen:
            return False
        self._seen[job.job_id] = None
        if len(self._seen) > REMEMBERED_JOBS:
            self._seen.popitem(last=False)
        return True

    def _report(self, result: CopyResult) -> JobReport:
        ok = result.ok and result.job_id not in self._doomed
        self._doomed.discard(result.job_id)
        self.failed_jobs += not ok
        waits, wait_s = self.fence_waits - self._said_waits, self.fence_wait_s - self._said_wait_s
        self._said_waits, self._said_wait_s = self.fence_waits, self.fence_wait_s
        return JobReport(result.job_id, self._rank, ok, result.nbytes, result.seconds, waits, wait_s)


def _block_ids(job: TransferJob) -> list[int]:
    return [block_id for t in job.transfers for block_id in t.block_ids.tolist()]


# --- several ranks -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Receiving:
    """One request's loads as the ranks report them: ``ended[rank]`` loads not yet matched by the other ranks."""

    ended: list[int]
    failed: bool = False
    failed_block_ids: set[int] = field(default_factory=set)


class OutputMerger:
    """Makes one WorkerOutput of those of several ranks, step by step.

    Job reports pass through at once, each says its rank. A request's load has ended when every rank has
    said so, in whatever steps; it has failed if it failed on any. ``failed_block_ids`` come with the
    requests they belong to.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._receiving: dict[str, _Receiving] = {}

    def merge(self, outputs: Sequence[WorkerOutput]) -> WorkerOutput:
        """``outputs[rank]`` of one step, one of every rank, empty ones included."""
        if len(outputs) != self._ranks:
            raise ValueError(f"found outputs of {len(outputs)} ranks, expected {self._ranks}, empty ones included")
        for rank, output in enumerate(outputs):
            self._note(rank, output)
        ended = {r: s for r, s in self._receiving.items() if min(s.ended) > 0}
        failed = {r: s for r, s in ended.items() if s.failed}
        for req_id in ended:
            self._settle(req_id)
        return WorkerOutput(
            tuple(report for output in outputs for report in output.reports),
            frozenset(ended),
            frozenset(failed),
            frozenset().union(*(s.failed_block_ids for s in failed.values())),
        )

    @property
    def pending(self) -> frozenset[str]:
        """Requests that some rank, but not every rank, has reported."""
        return frozenset(self._receiving)

    def _note(self, rank: int, output: WorkerOutput) -> None:
        for req_id in output.finished_recving:
            state = self._receiving.setdefault(req_id, _Receiving([0] * self._ranks))
            state.ended[rank] += 1
            if req_id in output.failed_recving:
                state.failed = True
                state.failed_block_ids |= output.failed_block_ids

    def _settle(self, req_id: str) -> None:
        """A rank may be a load ahead; it cannot be told which of the two failed, so then both have."""
        state = self._receiving.pop(req_id)
        ended = [n - 1 for n in state.ended]
        if any(ended):
            self._receiving[req_id] = _Receiving(ended, state.failed, state.failed_block_ids)
