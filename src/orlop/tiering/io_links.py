"""How a runner reaches its I/O worker: in a process of its own, or in threads of this one.

In: a StoreSpec, options, the host region. Out: two links with the same verbs. Never: a queue bound, a retry, a
call from the engine's thread.

A link has one sender and one owner; the owner receives, and ends the link. ``end`` says whether what the worker
held is free: a process that is dead touches nothing, a thread that hangs still may.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence

from orlop.host.region import HostRegion
from orlop.tiering.io_messages import Channel, FromWorker, Hello, IoOptions, StoreSpec, ToWorker
from orlop.tiering.io_ring import Wire
from orlop.tiering.io_worker import IoWorker


class Link(ABC):
    """One life of an I/O worker."""

    @abstractmethod
    def send(self, messages: Sequence[ToWorker]) -> None:
        """From the sender. ``OSError``: the worker is gone."""

    def post(self, message: ToWorker) -> bool:
        """From the engine's thread, at once: whether it is on its way. False: the sender has to do it.

        Not while somebody is inside of ``send``.
        """
        return False

    def collect(self) -> Sequence[FromWorker]:
        """From the engine's thread, at once: what has come and is not for the owner alone.

        Not while somebody is inside of ``take``.
        """
        return ()

    def take(self) -> Sequence[FromWorker]:
        """From the owner, at once: all that has come and that ``receive`` has not returned."""
        return ()

    @abstractmethod
    def receive(self) -> Sequence[FromWorker]:
        """From the owner; blocks until something has come, be it for ``take``. ``EOFError``: nothing more will come."""

    @abstractmethod
    def kill(self) -> None:
        """From any thread: make ``receive`` end soon, whatever the worker is doing."""

    @abstractmethod
    def end(self, timeout_s: float) -> bool:
        """From the owner, after ``receive`` has ended: True once nothing of the worker touches the region."""

    @abstractmethod
    def wait_gone(self) -> None:
        """From the owner, where ``end`` said False: until it would say True, however long."""

    @abstractmethod
    def close(self) -> None:
        """From the owner, when nobody is inside of ``send`` or ``post``: let go of descriptors."""

    def epitaph(self) -> str:
        """How the worker ended, for the log."""
        return "the I/O threads have ended"


class ProcessLink(Link):
    """A worker in its own process, which is started here."""

    def __init__(self, spec: StoreSpec, options: IoOptions, region: HostRegion) -> None:
        # Both ends are channels, or a fork at this moment would keep the other one open and its death unheard.
        self._channel, theirs = map(Channel, socket.socketpair())
        self._killed = False
        try:
            with contextlib.closing(theirs):
                self._wire = Wire.create()
                try:
                    self._process = _start(theirs.fileno(), region.fileno(), self._wire.fds)
                except BaseException:
                    self._wire.close()
                    raise
        except BaseException:
            self._channel.close()
            raise
        # Cannot block: nothing has been sent before it, and it is small. Where it fails, receive tells.
        with contextlib.suppress(OSError):
            self._channel.send([Hello(spec, options)])

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, messages: Sequence[ToWorker]) -> None:
        self._wire.outbox.put(list(messages), self._full)
        self._wire.ring()

    def post(self, message: ToWorker) -> bool:
        if not self._wire.outbox.put_now([message]):
            return False
        self._wire.ring()
        return True

    def collect(self) -> Sequence[FromWorker]:
        return self._wire.inbox.take(light=True)

    def take(self) -> Sequence[FromWorker]:
        return self._wire.inbox.take()

    def receive(self) -> Sequence[FromWorker]:
        return self._channel.receive()

    def _full(self) -> None:
        """It reads on, or somebody finds out that it does not."""
        if self._killed:
            raise OSError("the I/O process is gone")
        self._wire.ring()

    def kill(self) -> None:
        self._killed = True
        self._process.kill()
        self._channel.hang_up()

    def end(self, timeout_s: float) -> bool:
        # It closes its end by dying, so there is nothing to ask for; kill makes sure of a stopped one.
        self.kill()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False  # in the kernel, on a mount that does not answer
        return True

    def wait_gone(self) -> None:
        self._process.wait()

    def close(self) -> None:
        self._channel.close()
        self._wire.close()

    def epitaph(self) -> str:
        code = self._process.returncode
        end = f"by signal {-code}" if code is not None and code < 0 else f"with status {code}"
        return f"the I/O process has ended {end}"


def _start(socket_fd: int, region_fd: int, wire_fds: tuple[int, int, int]) -> subprocess.Popen[bytes]:
    """The I/O process, with our import path, our stderr, and nothing else of ours.

    SIGINT and SIGTERM are blocked across the start: one that is meant for the group must not catch the process
    before it ignores them.
    """
    command = [sys.executable, "-P", "-m", "orlop.tiering.io_process"]
    command += ["--socket-fd", str(socket_fd), "--region-fd", str(region_fd), "--wire-fds", *map(str, wire_fds)]
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(socket_fd, region_fd, *wire_fds),
            env={**os.environ, "PYTHONPATH": path},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ThreadLink(Link):
    """A worker in threads of this process: nothing can be killed, a hung thread holds its slots."""

    def __init__(self, spec: StoreSpec, options: IoOptions, region: HostRegion) -> None:
        self._incoming: queue.SimpleQueue[FromWorker | None] = queue.SimpleQueue()
        self._worker = IoWorker(spec, options, region, self._incoming.put, lambda: self._incoming.put(None))
        self._worker.start()

    def send(self, messages: Sequence[ToWorker]) -> None:
        for message in messages:
            self._worker.handle(message)

    def receive(self) -> Sequence[FromWorker]:
        message = self._incoming.get()
        if message is None:
            raise EOFError("the worker has ended")
        return (message,)

    def kill(self) -> None:
        self._worker.abandon()
        self._incoming.put(None)

    def end(self, timeout_s: float) -> bool:
        self._worker.abandon()
        return self._worker.join(timeout_s)

    def wait_gone(self) -> None:
        self._worker.join(None)

    def close(self) -> None:
        """Nothing to let go of."""


def open_link(spec: StoreSpec, options: IoOptions, region: HostRegion, *, process: bool) -> Link:
    """Start a worker; ``OSError`` where the machine cannot."""
    return ProcessLink(spec, options, region) if process else ThreadLink(spec, options, region)
