"""What a runner and its I/O worker say to each other, and the wire between their processes.

In: words from ``core``. Out: small tuples that pickle compactly, and ``Channel``, which carries lists of them
over a socket pair; ``io_ring`` carries them over memory. Never: a decision, a thread, a payload byte (those lie in the
host region).

Both connect a process with the program it has started itself, over descriptors nobody else has, which is why pickle is
good enough.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import pickle
import socket
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from orlop.core import Outcome
from orlop.errors import ConfigError
from orlop.tiering.base import ChunkStore

OUTCOMES = tuple(Outcome)
"""Outcomes by code: a report carries one byte per key."""

OUTCOME_CODES = {outcome: code for code, outcome in enumerate(OUTCOMES)}


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """How to make a ChunkStore where it is going to run: ``factory`` is ``module:callable``, called with ``kwargs``."""

    factory: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> ChunkStore:
        """Import the factory and call it. ``ConfigError`` where that can never make a store; else what it raises.

        A ``ConfigError`` begins with the tier's setting that it is about and a colon, such as ``type:``; what a
        store raises by itself may do the same.
        """
        make = self._factory()
        try:
            store = make(**self.kwargs)
        except TypeError as e:  # an abstract class, a value of the wrong type: no better the next time
            raise self._refused(f"whose call with {sorted(self.kwargs)} is refused ({e})") from e
        if not isinstance(store, ChunkStore):
            raise self._refused(f"which makes a {type(store).__name__}")
        return store

    def _factory(self) -> Callable[..., Any]:
        """What ``factory`` names, once it is known that it can be called like this and may make a store."""
        module_name, _, name = self.factory.partition(":")
        try:
            make = getattr(importlib.import_module(module_name), name)
        except (ImportError, AttributeError, ValueError) as e:
            raise self._refused(f"which cannot be imported ({e})") from e
        if isinstance(make, type) and not issubclass(make, ChunkStore):
            raise self._refused("which is a class of something else")
        try:
            inspect.signature(make).bind(**self.kwargs)
        except (TypeError, ValueError) as e:
            raise self._refused(f"which does not take {sorted(self.kwargs)} ({e})") from e
        return make  # type: ignore[no-any-return]

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(
            f"type: found {self.factory!r}, {why}; allowed: 'module:callable' that takes the tier's settings by name "
            "and makes a ChunkStore"
        )


@dataclass(frozen=True, slots=True)
class IoOptions:
    """What a worker needs to know beside its store. ``name`` is the tier's, for logs.

    ``threads`` move bytes, ``lookup_threads`` answer lookups. A transfer that has waited in the worker's queue for
    longer than ``load_wait_s`` or ``store_wait_s`` when its turn comes is not tried any more. ``events``: what leaves
    the store is of interest. ``tell``: whoever sleeps in ``Link.receive`` is woken by every message, not only by those
    that are for him alone.
    """

    name: str
    threads: int = 4
    lookup_threads: int = 2
    load_wait_s: float = 5.0
    store_wait_s: float = 30.0
    events: bool = False
    tell: bool = True


# --- to the worker ------------------------------------------------------------------------------------


class Hello(NamedTuple):
    """The first message."""

    spec: StoreSpec
    options: IoOptions


class Transfer(NamedTuple):
    """One TierJob, less what only the engine's side needs."""

    job_id: int
    load: bool
    group: int
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]
    payload_bytes: int
    digest: bytes
    generation: bytes
    salt: bytes


class Ask(NamedTuple):
    """A lookup of packed OffloadKeys."""

    lookup_id: int
    keys: tuple[bytes, ...]
    digest: bytes
    stop_at_miss: bool


class Touch(NamedTuple):
    """Keys that were of use. Never answered."""

    keys: tuple[bytes, ...]
    digest: bytes


class Clear(NamedTuple):
    """Forget everything; answered by ``Cleared`` with the same number."""

    number: int


class Bye(NamedTuple):
    """The last message: finish what is queued, close the store, end."""


# --- from the worker ----------------------------------------------------------------------------------


class Ready(NamedTuple):
    """The store is built."""


class NotReady(NamedTuple):
    """The store could not be built. ``permanent``: a setting that can never work."""

    text: str
    permanent: bool


class Answer(NamedTuple):
    """To an ``Ask``. ``trouble``: why nothing was found where that is the store's fault, else empty."""

    lookup_id: int
    found: bytes
    trouble: str = ""


class Report(NamedTuple):
    """To a ``Transfer``: one code of ``OUTCOMES`` per key.

    ``failed``: it counts against the store. ``damaged``: reasons of envelopes that did not verify.
    """

    job_id: int
    codes: bytes
    nbytes: int = 0
    seconds: float = 0.0
    reason: str = ""
    failed: bool = False
    damaged: tuple[str, ...] = ()
    released: bool = True


class Keys(NamedTuple):
    """What a store that watches its keys has to say: ``key_name`` of what came and of what went, 8 bytes each.

    ``reset``: all that was said before is void. ``more``: the rest of this change follows; a reset is of use with its
    last piece only.
    """

    added: bytes
    removed: bytes
    reset: bool
    more: bool


class Cleared(NamedTuple):
    number: int


class Removed(NamedTuple):
    """A key, namespace digest first, that has left the store and that nobody deleted."""

    key: bytes


class StoreStats(NamedTuple):
    """The store's own counters, now and then."""

    values: Mapping[str, float]

    @property
    def complete(self) -> bool:
        """Whether the store knows what it holds; it may still be looking through its directory."""
        return bool(self.values.get("counted", 1.0))


ToWorker = Transfer | Ask | Touch | Clear | Bye
FromWorker = Ready | NotReady | Answer | Report | Keys | Cleared | Removed | StoreStats


# --- the wire -----------------------------------------------------------------------------------------

_LENGTH_BYTES = 4


def pack(messages: list[Any]) -> bytes:
    """Messages as they travel."""
    return pickle.dumps(messages, protocol=5)


def unpack(body: bytes) -> list[Any]:
    """What ``pack`` packed, in this process or in the one that it has started itself."""
    messages: list[Any] = pickle.loads(body)
    return messages


def _framed(messages: list[Any]) -> bytes:
    body = pack(messages)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


_WAKE = _framed([])


class Channel:
    """Lists of messages over one end of a stream socket pair. One thread sends, one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        _channels.add(self)

    def send(self, messages: list[Any]) -> None:
        """Blocks until the kernel has taken all of it. ``OSError``: the other side is gone."""
        self._sock.sendall(_framed(messages))

    def wake(self) -> None:
        """Send an empty list, at once; nothing where many have not been read yet. ``OSError``: nobody is there."""
        with contextlib.suppress(BlockingIOError):
            self._sock.send(_WAKE, socket.MSG_DONTWAIT)

    def receive(self) -> list[Any]:
        """The next list. ``EOFError``: the other side is gone, perhaps in the middle of a word."""
        length = int.from_bytes(self._exactly(_LENGTH_BYTES), "little")
        return unpack(self._exactly(length))

    def fileno(self) -> int:
        """The descriptor, for a process that is to inherit it."""
        return self._sock.fileno()

    def hang_up(self) -> None:
        """Wakes whoever is blocked in ``send`` or ``receive``, on both sides."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the descriptor. Nobody may be inside ``send`` or ``receive``."""
        self._sock.close()

    def _exactly(self, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        rest = memoryview(buffer)
        while rest:
            try:
                n = self._sock.recv_into(rest)
            except OSError as e:
                raise EOFError(str(e)) from e
            if n == 0:
                raise EOFError("the other side has closed")
            rest = rest[n:]
        return bytes(buffer)


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _close_in_fork() -> None:
    """A fork of this process must not keep the wire open, or the other side never learns of our end."""
    for channel in list(_channels):
        channel.close()


os.register_at_fork(after_in_child=_close_in_fork)
