"""A runner's I/O worker without a thread: everything moves when somebody turns the crank, on the calling thread.

In: a StoreSpec, options, the host region, a clock; and which crank is turned. Out: the messages that the real worker
and the real pump send. Never: a thread, a wait, real time; a decision of its own about a job.

::

    CrankedPump.send()       what the engine's side has posted goes to the worker's queues
    InlineLink.begin()       idle hands of the worker take what is queued; what is begun may be *stuck*
    InlineLink.finish()      what is begun and not stuck is done: the store's verb runs now, all at once
    CrankedPump.receive()    reports and answers come back; a dead worker is buried

A verb that hangs is work that was begun and is stuck until ``release``: it holds one hand, it has already written
half of what it reads, and it runs, late, when it is released.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from orlop.host.region import HostRegion
from orlop.tiering.io_links import Link
from orlop.tiering.io_messages import Ask, Bye, FromWorker, IoOptions, StoreSpec, ToWorker
from orlop.tiering.io_worker import IoWorker, _Batch, _Headers
from orlop.tiering.runner import Pump

SCRIBBLE = b"\xee"
"""What lies in a slot while it is being read into."""

Touched = Callable[[int], None]
"""Hears the id of a job right before the worker reads or writes its slots."""


def _nobody(job_id: int) -> None:
    """Nobody listens."""


@dataclass(eq=False, slots=True)
class Begun:
    """Work that one hand of the worker is in the middle of: parts of transfers, touched keys, or a lookup."""

    work: Any
    stuck: bool = False

    @property
    def job_ids(self) -> list[int]:
        """The transfers that it moves parts of."""
        return [part.job.transfer.job_id for part in self.work.parts] if isinstance(self.work, _Batch) else []


class InlineWorker(IoWorker):
    """The real worker, whose hands are not threads but entries of ``begun``."""

    def __init__(self, *args: Any, touched: Touched = _nobody, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.begun: list[Begun] = []
        self._touched = touched
        self._headers = _Headers()

    def start(self) -> None:
        self._build_first()

    def handle(self, message: ToWorker) -> None:
        if isinstance(message, Bye):
            self._closing = True
        else:
            super().handle(message)

    def join(self, timeout_s: float | None = None) -> bool:
        return not self.begun

    def begin(self, stuck: int = 0) -> int:
        """Every idle hand takes something, as far as there is something; how much. The first ``stuck`` get stuck."""
        began = 0
        while (work := self._next()) is not None:
            begun = Begun(work, stuck=began < stuck)
            self.begun.append(begun)
            if begun.stuck:
                self._scribble(begun)
            began += 1
        return began

    def finish(self, *, last_first: bool = False) -> int:
        """Do what is begun and not stuck; how much."""
        due = [begun for begun in self.begun if not begun.stuck]
        for begun in reversed(due) if last_first else due:
            self.begun.remove(begun)
            if isinstance(begun.work, Ask):
                self._answer(begun.work)
            else:
                for job_id in begun.job_ids:
                    self._touched(job_id)
                self._do(begun.work, self._headers)
        self._clear_if_told()
        return len(due)

    def release(self) -> int:
        """What is stuck goes on with the next ``finish``; how much."""
        stuck = [begun for begun in self.begun if begun.stuck]
        for begun in stuck:
            begun.stuck = False
        return len(stuck)

    def drop(self) -> None:
        """The worker is dead: nothing that was begun goes on. What was being read has left its slots half written."""
        for begun in self.begun:
            if begun.stuck:
                self._scribble(begun)
        self.begun.clear()

    def finished(self) -> bool:
        """Whether it was told to end and has nothing left to do."""
        return self._closing and not (self.begun or self._loads or self._stores or self._asks or self._clears)

    def _next(self) -> _Batch | Ask | Any | None:
        asking = sum(isinstance(begun.work, Ask) for begun in self.begun)
        if self._asks and asking < self._options.lookup_threads:
            return self._asks.popleft()
        if len(self.begun) - asking < self._options.threads:
            return self._take_work()
        return None

    def _scribble(self, begun: Begun) -> None:
        batch = begun.work
        if not isinstance(batch, _Batch) or not batch.load:
            return
        for job_id in begun.job_ids:
            self._touched(job_id)
        for slot in batch.slots:
            self._region.view(slot, batch.transfer.payload_bytes)[:64] = SCRIBBLE * 64

    def _clear_if_told(self) -> None:
        while self._clears and not self._loading and not self._storing:
            clear = self._clears[0]
            if not self._cleared():
                return
            self._clear_done(clear)


class InlineLink(Link):
    """One life of an InlineWorker. ``receive`` answers with what has come, be it nothing.

    ``outlives``: when it is killed with work stuck, it does not die before ``die``, as a process does that waits in
    the kernel for a dead mount. ``unheard``: what it has said and nobody has received dies with it.
    """

    def __init__(
        self,
        spec: StoreSpec,
        options: IoOptions,
        region: HostRegion,
        *,
        clock: Callable[[], float],
        touched: Touched = _nobody,
    ) -> None:
        self.outlives = False
        self.unheard = False
        self._outbox: deque[FromWorker] = deque()
        self._dead = False
        self.worker = InlineWorker(
            spec, options, region, self._outbox.append, self._on_ended, clock=clock, touched=touched
        )
        self.worker.start()

    def send(self, messages: Sequence[ToWorker]) -> None:
        if self._dead:
            raise OSError("the worker is gone")
        for message in messages:
            self.worker.handle(message)

    def receive(self) -> Sequence[FromWorker]:
        if not self._outbox and (self._dead or self.worker.finished()):
            raise EOFError("the worker has ended")
        messages = list(self._outbox)
        self._outbox.clear()
        return messages

    def kill(self) -> None:
        """What it has said is still heard, mostly; what it was doing is not done."""
        self._dead = True
        if self.unheard:
            self._outbox.clear()
        self.worker.abandon()
        if not (self.outlives and any(begun.stuck for begun in self.worker.begun)):
            self.worker.drop()

    def die(self) -> None:
        """The end of one that has outlived being killed."""
        self.worker.drop()

    def end(self, timeout_s: float) -> bool:
        self.kill()
        return self.worker.join()

    def wait_gone(self) -> None:
        assert self.worker.join(), "found a wait for a stuck worker, expected only cranks"

    def close(self) -> None:
        """Nothing to let go of."""

    def _on_ended(self) -> None:
        self._dead = True


class CrankedPump(Pump):
    """The real pump, whose two threads are two cranks. It starts a worker at once, and again when told to.

    ``make_pump=functools.partial(CrankedPump, clock=clock, touched=...)`` for a ``TierRunner``.
    """

    def __init__(
        self, *args: Any, clock: Callable[[], float] = time.monotonic, touched: Touched = _nobody, **kwargs: Any
    ) -> None:
        self._clock = clock
        self._touched = touched
        self._dying: tuple[InlineLink, list[int]] | None = None
        self._was_ready = False
        super().__init__(*args, **kwargs)

    @property
    def link(self) -> InlineLink | None:
        """The worker's present life, if it has one."""
        return self._link if isinstance(self._link, InlineLink) else None

    @property
    def dying(self) -> InlineLink | None:
        """A killed worker that may still touch its slots."""
        return self._dying[0] if self._dying else None

    def _start(self) -> None:
        self._begin()

    def _open_link(self) -> Link:
        return InlineLink(
            self._spec, self._options.io_options(), self._region, clock=self._clock, touched=self._touched
        )

    # --- the cranks -----------------------------------------------------------------------------------

    def send(self) -> None:
        """The sender's turn: all that is posted."""
        while not self._posted.empty():
            self._pass_on(self._posted.get())

    def receive(self) -> None:
        """The owner's turn: take what has come, bury who has died, look whether who outlives it is gone."""
        if self._dying is not None:
            self._look_after_dying()
        link = self.link
        if link is None:
            return
        try:
            self._was_ready |= self._take_all(link.receive())
        except EOFError:
            held = self._bury(link, self._was_ready)
            self._was_ready = False
            if held is not None:
                self._dying = link, held

    def restart(self) -> bool:
        """Start a worker where there is none; whether one was started."""
        if self._link is not None or self._dying is not None or self._stopping.is_set():
            return False
        self.restarts += 1
        return self._begin() is not None

    def _look_after_dying(self) -> None:
        assert self._dying is not None
        link, held = self._dying
        if link.end(0.0):
            self._dying = None
            self._let_go(held)

    def shutdown(self, deadline_s: float) -> None:
        """Everything that is not stuck is done; then the worker is killed."""
        self._stopping.set()
        self.post(Bye())
        self.send()
        link = self.link
        if link is not None:
            while link.worker.begin() + link.worker.finish():
                pass
            link.kill()
        self.receive()
        self.receive()
