"""The program that runs a tier's store: ``python -m orlop.tiering.io_process --socket-fd N --region-fd M``.

In: two inherited descriptors, one end of a stream socket pair and the host region; then a ``Hello``. Out: reports
on the socket. Never: imported by anybody, alive after the other end of the pair has closed, ended by a signal that
was meant for the engine.

It ignores SIGINT and SIGTERM: a terminal and a service manager send them to the whole group, and the engine then
still wants to drain through this process. Its end is ``Bye``, the closing of the pair, or SIGKILL.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import signal
import socket
import sys

from orlop.background import start_thread
from orlop.host.region import HostRegion
from orlop.tiering.io_messages import Channel, FromWorker, Hello
from orlop.tiering.io_worker import IoWorker

BATCH = 256
_IGNORED = (signal.SIGINT, signal.SIGTERM)


def main(arguments: list[str]) -> int:
    """Serve until told to end; the exit status."""
    _ignore_signals()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    options = _parse(arguments)
    channel = Channel(socket.socket(fileno=options.socket_fd))
    region = HostRegion.from_fd(options.region_fd)
    try:
        hello, *rest = channel.receive()
    except EOFError:
        return 0
    if not isinstance(hello, Hello):
        raise TypeError(f"found {type(hello).__name__}, expected Hello as the first message")
    outgoing: queue.SimpleQueue[FromWorker | None] = queue.SimpleQueue()
    worker = IoWorker(hello.spec, hello.options, region, outgoing.put, lambda: outgoing.put(None))
    start_thread(_send_all, channel, outgoing, name="orlop-io-send")
    worker.start()
    for message in rest:
        worker.handle(message)
    _take_all(channel, worker)
    return 0


def _ignore_signals() -> None:
    """The parent blocked both before it started us, so that there is no moment at which they would count."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)


def _take_all(channel: Channel, worker: IoWorker) -> None:
    while True:
        try:
            messages = channel.receive()
        except EOFError:
            # The engine is gone. Threads may hang in a store and nobody wants their bytes: end without asking.
            _end_now()
        for message in messages:
            worker.handle(message)


def _send_all(channel: Channel, outgoing: queue.SimpleQueue[FromWorker | None]) -> None:
    """Sends what has gathered in one piece; ends the process at None, or when nobody listens."""
    while True:
        batch = [outgoing.get()]
        while len(batch) < BATCH and not outgoing.empty():
            batch.append(outgoing.get())
        words = [message for message in batch if message is not None]
        try:
            if words:
                channel.send(words)
        except OSError:
            _end_now()
        if len(words) < len(batch):
            _end_now()


def _end_now() -> None:
    logging.shutdown()
    os._exit(0)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="orlop.tiering.io_process", description=__doc__)
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--region-fd", type=int, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
