"""Ranks in processes of their own, behind the same calls as ranks in this process.

In: what an ``Engine`` asks of its worker halves and of its device. Out: one started program per rank, one message and
one answer per step and rank. Never: a copy or a forward of its own; a wait for a rank that is said to be silent.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import rank_worker  # by this name its messages are pickled on both sides
from rank_worker import Checked, Hello, Register, Step

from orlop.config import OrlopConfig
from orlop.core import EngineSpec, OffloadingConnectorMetadata, WorkerOutput
from orlop.testing.byte_device import ByteDevice
from orlop.testing.device import Forward

PROGRAM = "import rank_worker; rank_worker.main()"


class RankGone(ConnectionError):
    """The process of a rank has ended."""


class RemoteRank:
    """One rank's worker half; for ``Engine(worker=RemoteRank)``.

    ``silent``: it is dead or stopped and nobody has noticed. It says nothing, and what it is to do waits here.
    """

    def __init__(self, config: OrlopConfig, spec: EngineSpec) -> None:
        self.rank = spec.rank
        self.silent = False
        self.loads_checked = 0
        self._todo: deque[Step] = deque()
        self._pipe, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(rank_worker.__file__).parent), *sys.path])},
            )
        self._say(Hello(config, spec))

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._say(Register(len(next(iter(kv_caches.values())))))
        self._hear()

    def begin(self, step: Step) -> None:
        self._todo.append(step)
        if not self.silent and len(self._todo) == 1:
            self._say(step)

    def end(self) -> WorkerOutput:
        """What it has to say of all steps since the last time; nothing while it is silent."""
        if self.silent:
            return WorkerOutput()
        outputs = [self._checked()]
        while self._todo:
            self._say(self._todo[0])
            outputs.append(self._checked())
        return WorkerOutput(
            tuple(report for output in outputs for report in output.reports),
            frozenset().union(*(output.finished_recving for output in outputs)),
            frozenset().union(*(output.failed_recving for output in outputs)),
            frozenset().union(*(output.failed_block_ids for output in outputs)),
        )

    def wake(self) -> None:
        """It goes on where it was stopped."""
        self.silent = False
        if self._todo:
            self._say(self._todo[0])

    def shutdown(self) -> None:
        self._pipe.close()
        self.process.wait(60)

    def _checked(self) -> WorkerOutput:
        checked: Checked = self._hear()
        self._todo.popleft()
        self.loads_checked = checked.loads_checked
        return checked.output

    def _say(self, word: object) -> None:
        try:
            self._pipe.send(word)
        except OSError as error:
            raise RankGone(f"rank {self.rank}") from error

    def _hear(self) -> Any:
        try:
            word = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RankGone(f"rank {self.rank}") from error
        if isinstance(word, BaseException):
            raise word
        return word


class RankProcesses(ByteDevice):
    """The device as the scheduler's process sees it: it knows all tokens, and the ranks have the bytes."""

    def execute(self, meta: OffloadingConnectorMetadata, forwards: Sequence[Forward]) -> list[WorkerOutput]:
        blocks = [b for job in meta.load_jobs for part in job.transfers for b in part.block_ids.tolist()]
        copies = [replace(forward, digests=list(forward.digests)) for forward in forwards]
        step = Step(meta, copies, {block: self._wanted[block] for block in blocks})
        ranks: Sequence[RemoteRank] = self._halves  # type: ignore[assignment]
        for rank in ranks:
            rank.begin(step)
        outputs = [rank.end() for rank in ranks]
        self.loads_checked = sum(rank.loads_checked for rank in ranks)
        for forward in forwards:
            self._sample(forward)
        return outputs
