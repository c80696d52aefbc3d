"""The program that runs a tier's store: ``python -m orlop.tiering.io_process --socket-fd N ...``; a runner starts it.

In: inherited descriptors, one end of a stream socket pair, the host region and the wire; a ``Hello`` on the socket and
messages on the wire. Out: reports on the wire, and on the socket a word that wakes who sleeps there. Never: imported by
anybody, alive after the other end of the pair has closed, ended by a signal that was meant for the engine.

It ignores SIGINT and SIGTERM: a terminal and a service manager send them to the whole group, and the engine then
still wants to drain through this process. Its end is ``Bye``, the closing of the pair, or SIGKILL.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
from collections import deque
from typing import NoReturn

from orlop.background import start_thread
from orlop.host.region import HostRegion
from orlop.tiering.io_messages import Channel, Cleared, FromWorker, Hello, Keys, NotReady, Ready, StoreStats
from orlop.tiering.io_ring import Wire
from orlop.tiering.io_worker import IoWorker

HEAVY_BYTES = 16 << 10
"""Of names of keys, about half a millisecond's work for who takes them."""
MOST_HELD = 64
_IGNORED = (signal.SIGINT, signal.SIGTERM)


def main(arguments: list[str]) -> int:
    """Serve until told to end; the exit status."""
    _ignore_signals()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    options = _parse(arguments)
    sock = socket.socket(fileno=options.socket_fd)
    channel = Channel(sock)
    memory_fd, *bell_fds = options.wire_fds
    wire = Wire(memory_fd, (bell_fds[0], bell_fds[1]), far=True)
    region = HostRegion.from_fd(options.region_fd)
    try:
        [hello] = channel.receive()
    except EOFError:
        return 0
    if not isinstance(hello, Hello):
        raise TypeError(f"found {type(hello).__name__}, expected Hello as the first message")
    sender = _Sender(channel, wire, hello.options.tell)
    worker = IoWorker(hello.spec, hello.options, region, sender.send, lambda: sender.send(None))
    start_thread(sender.run, name="orlop-io-send")
    worker.start()
    _take_all(sock.fileno(), wire, worker)
    return 0


def _ignore_signals() -> None:
    """The parent blocked both before it started us, so that there is no moment at which they would count."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)


def _take_all(socket_fd: int, wire: Wire, worker: IoWorker) -> None:
    while (messages := wire.receive(socket_fd)) is not None:
        for message in messages:
            worker.handle(message)
    # The engine is gone. Threads may hang in a store and nobody wants their bytes: end without asking.
    _end_now()


class _Sender:
    """What the worker has to say: at once from the thread that says it, or from one of its own while there is no room.

    A few keys that have come or gone wait for what is said next, most often the report of the job that they belong to.
    Ends the process at None, or when nobody listens.
    """

    def __init__(self, channel: Channel, wire: Wire, tell: bool) -> None:
        self._channel = channel
        self._wire = wire
        self._tell = tell
        self._lock = threading.Lock()  # guards the wire's outbox and the fields below
        self._waiting: deque[tuple[list[FromWorker] | None, bool]] = deque()
        self._held: list[FromWorker] = []
        self._more = threading.Condition(self._lock)
        self._counted = False
        self._resetting = False

    def send(self, message: FromWorker | None) -> None:
        """From any thread; returns at once."""
        with self._lock:
            heavy = self._is_heavy(message)
            if message is None:
                words = None
            else:
                self._held.append(message)
                if isinstance(message, Keys) and not heavy and len(self._held) < MOST_HELD:
                    return
                words, self._held = self._held, []
                if not self._waiting and self._wire.outbox.put_now(words, heavy=heavy):
                    self._wake(words, heavy)
                    return
            self._waiting.append((words, heavy))
            self._more.notify()

    def run(self) -> None:
        """What had no room, in its order."""
        while True:
            with self._lock:
                while not self._waiting:
                    self._more.wait()
                words, heavy = self._waiting[0]
            if words is None:
                _end_now()
            # They stay first in the queue meanwhile, so that nobody else writes.
            self._wire.outbox.put(words, self._ring, heavy=heavy)
            with self._lock:
                self._waiting.popleft()
                self._wake(words, heavy)

    def _wake(self, words: list[FromWorker], heavy: bool) -> None:
        """Whoever sleeps on the other side, if it is for him or he wants to hear of everything."""
        if heavy or self._tell or not self._counted:
            self._ring()
        self._counted = self._counted or any(isinstance(word, StoreStats) and word.complete for word in words)

    def _ring(self) -> None:
        try:
            self._channel.wake()
        except OSError:  # nobody listens
            _end_now()

    def _is_heavy(self, word: FromWorker | None) -> bool:
        """What is not for the engine's thread: many keys at once, and what somebody may wait for at start."""
        if isinstance(word, Keys):
            reset = word.reset or self._resetting
            self._resetting = reset and word.more
            return reset or len(word.added) + len(word.removed) > HEAVY_BYTES
        return isinstance(word, Ready | NotReady | Cleared)


def _end_now() -> NoReturn:
    # Without a last word of the log: a thread may be stuck in it, where nobody reads our stderr any more.
    os._exit(0)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="orlop.tiering.io_process", description=__doc__)
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--region-fd", type=int, required=True)
    parser.add_argument("--wire-fds", type=int, nargs=3, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
