"""One rank of an engine, in a process of its own: its worker half over a device whose bytes are checked.

In: one end of a pipe, whose number is the argument; then settings, the tensors' size, and steps. Out: what the worker
half reports of each step, or the exception that it met. Never: alive without the engine at the other end.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from orlop.config import OrlopConfig
from orlop.connector import OffloadingConnector
from orlop.core import EngineSpec, Geometry, OffloadingConnectorMetadata, WorkerOutput
from orlop.errors import OrlopError
from orlop.testing.byte_device import ByteDevice
from orlop.testing.device import Forward


@dataclass(frozen=True, slots=True)
class Hello:
    """What a rank is."""

    config: OrlopConfig
    spec: EngineSpec


@dataclass(frozen=True, slots=True)
class Register:
    """Make the KV tensors and hand them to the worker half."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step; ``wanted`` says what the blocks that its loads fill have to hold, as ``ByteDevice.expect``."""

    meta: OffloadingConnectorMetadata
    forwards: Sequence[Forward]
    wanted: dict[int, tuple[int, int, list[bytes]]]


@dataclass(frozen=True, slots=True)
class Checked:
    """To a ``Step``: the report, and how many blocks of loads have been compared so far."""

    output: WorkerOutput
    loads_checked: int


class RankDevice(ByteDevice):
    """The one rank of this process; its cells say which it is among all."""

    def __init__(self, spec: EngineSpec, blocks: int) -> None:
        super().__init__(Geometry(spec.groups, spec.tokens_per_hash, 1), ranks=1, blocks=blocks)
        self._rank = spec.rank

    def _cells(self, digests: Sequence[bytes], layer: str, rank: int) -> Any:
        return super()._cells(digests, layer, self._rank)

    def step(self, step: Step) -> Checked:
        self._wanted.update(step.wanted)
        (output,) = self.execute(step.meta, step.forwards)
        return Checked(output, self.loads_checked)


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    registered = threading.Event()
    threading.Thread(target=end_if_alone, args=(pipe.fileno(), registered), daemon=True).start()
    hello = pipe.recv()
    worker = OffloadingConnector.worker(hello.config, hello.spec)
    try:
        device = register(pipe, worker, hello.spec)
        registered.set()
        while device is not None:
            answer(pipe, device.step(pipe.recv()))
    except (EOFError, ConnectionError):
        pass  # the engine has ended, by itself or by force
    except BaseException as error:
        answer(pipe, AssertionError(f"rank {hello.spec.rank}: {type(error).__name__}: {error}"))
        raise
    finally:
        worker.shutdown()


def register(pipe: Connection, worker: OffloadingConnector, spec: EngineSpec) -> RankDevice | None:
    """The device, registered with the worker half; None where that was refused."""
    device = RankDevice(spec, pipe.recv().blocks)
    try:
        worker.register_kv_caches(device.kv_caches[0])
    except OrlopError as error:
        answer(pipe, error)
        return None
    device.attach([worker], worker._region)  # type: ignore[arg-type]
    answer(pipe, None)
    return device


def answer(pipe: Connection, word: object) -> None:
    try:
        pipe.send(word)
    except ConnectionError as error:
        raise EOFError from error


def end_if_alone(pipe: int, registered: threading.Event) -> None:
    """A rank that waits for the others at start hears nothing of its engine's end; afterwards its own loop does."""
    poll = select.poll()
    poll.register(pipe, 0)  # a hang-up is told without being asked for
    poll.poll()
    if not registered.is_set():
        os._exit(1)


if __name__ == "__main__":
    main()
