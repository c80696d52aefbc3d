"""The wire between a runner and its I/O process: messages in memory that both share, so that nobody needs a thread.

In: lists of messages, one writer and one reader at a time per direction. Out: the same lists, in order. Never: a wait
in ``put_now`` and ``take``, a payload byte, a message half read, one that is not what was written.

The engine's thread posts and collects here by itself. A thread beside it that had to receive for it would wait for the
GIL, 5 ms for every word, while the engine's thread runs.

::

    | bytes written | bytes read | entries ...                                          | and again from the start
                                   seal, length, flags, a pickled list or a piece of it

The seal is the XXH3-64 of the rest of an entry, seeded with its position: what has not arrived in whole, on a machine
that lets writes overtake each other, or is left from the round before, is not there yet. The bell for the I/O process
that sleeps is an eventfd, a pipe where there is none; ringing never blocks.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import xxhash

from orlop.core import align_up
from orlop.tiering.io_messages import pack, unpack

RING_BYTES = 1 << 20
PIECE_BYTES = RING_BYTES // 4
"""A longer list goes in pieces of so much."""
WAIT_S = 0.001
_STROKE = (1).to_bytes(8, sys.byteorder)

_COUNTS_BYTES = 128
_ENTRY = struct.Struct("<QII")
_SEAL = struct.Struct("<Q")
_MORE, _HEAVY, _SKIP = 1, 2, 4


class Ring:
    """One direction, over ``WIRE_BYTES`` of memory that are zero at first. One writer, one reader, at a time each."""

    def __init__(self, memory: memoryview) -> None:
        self._written = memory[:8].cast("Q")
        self._read = memory[64:72].cast("Q")
        self._data = memory[_COUNTS_BYTES : _COUNTS_BYTES + RING_BYTES]
        self._at = 0
        """Where this end goes on, counted from the beginning of the wire."""
        self._pieces: list[memoryview] = []

    # --- the writer -----------------------------------------------------------------------------------

    def put_now(self, messages: list[Any], *, heavy: bool = False) -> bool:
        """Whether there was room for them. ``heavy``: the reader may take its time over these."""
        body = pack(messages)
        return len(body) <= PIECE_BYTES and self._put(body, _HEAVY * heavy)

    def put(self, messages: list[Any], full: Callable[[], None], *, heavy: bool = False) -> None:
        """However long it takes; ``full`` is called now and then while there is no room, and may raise."""
        body = pack(messages)
        for start in range(0, len(body), PIECE_BYTES):
            more = start + PIECE_BYTES < len(body)
            while not self._put(body[start : start + PIECE_BYTES], _HEAVY * heavy | _MORE * more):
                full()
                time.sleep(WAIT_S)

    def _put(self, body: bytes, flags: int) -> bool:
        need = align_up(_ENTRY.size + len(body), _ENTRY.size)
        end = RING_BYTES - self._at % RING_BYTES
        skipped = end if need > end else 0
        if self._at + skipped + need - self._read[0] > RING_BYTES:
            return False
        if skipped:
            self._write(b"", _SKIP, skipped)
        self._write(body, flags, need)
        self._written[0] = self._at
        return True

    def _write(self, body: bytes, flags: int, nbytes: int) -> None:
        start = self._at % RING_BYTES
        stop = start + _ENTRY.size + len(body)
        _ENTRY.pack_into(self._data, start, 0, len(body), flags)
        self._data[start + _ENTRY.size : stop] = body
        _SEAL.pack_into(self._data, start, self._seal(self._data[start + _SEAL.size : stop]))
        self._at += nbytes

    # --- the reader -----------------------------------------------------------------------------------

    def empty(self) -> bool:
        return self._written[0] == self._at

    def take(self, *, light: bool = False) -> list[Any]:
        """All messages that are there; ``light``: up to the first heavy ones."""
        messages: list[Any] = []
        while self._written[0] != self._at:
            start = self._at % RING_BYTES
            seal, length, flags = _ENTRY.unpack_from(self._data, start)
            stop = start + _ENTRY.size + length
            if (light and flags & _HEAVY) or stop > RING_BYTES:
                break
            # The seal is that of the copy: so no machine can let the writer have the room before all of it was read.
            entry = bytes(self._data[start + _SEAL.size : stop])
            if seal != self._seal(entry):
                break
            if flags & _SKIP:
                self._at += RING_BYTES - start
                continue
            self._pieces.append(memoryview(entry)[_ENTRY.size - _SEAL.size :])
            self._at += align_up(stop - start, _ENTRY.size)
            self._read[0] = self._at
            if not flags & _MORE:
                messages += unpack(b"".join(self._pieces))
                self._pieces.clear()
        return messages

    def _seal(self, entry: bytes | memoryview) -> int:
        return xxhash.xxh3_64_intdigest(entry, self._at)


DIRECTION_BYTES = align_up(_COUNTS_BYTES + RING_BYTES)


class Wire:
    """Both directions and the bell of the I/O process, whose descriptors it inherits."""

    def __init__(self, fd: int, bell_fds: tuple[int, int], *, far: bool) -> None:
        self.fds = (fd, *bell_fds)
        memory = memoryview(mmap.mmap(fd, 2 * DIRECTION_BYTES))
        rings = [Ring(memory[i * DIRECTION_BYTES : (i + 1) * DIRECTION_BYTES]) for i in range(2)]
        self.outbox, self.inbox = reversed(rings) if far else rings
        _wires.add(self)

    @classmethod
    def create(cls) -> Wire:
        """The engine's end. ``OSError``: no memory, no descriptors."""
        fd = _memory(2 * DIRECTION_BYTES)
        try:
            bell_fds = _bell()
        except BaseException:
            os.close(fd)
            raise
        try:
            return cls(fd, bell_fds, far=False)
        except BaseException:
            for each in {fd, *bell_fds}:
                os.close(each)
            raise

    def ring(self) -> None:
        """Wake the I/O process. Never blocks: a bell that is full rings already."""
        with suppress(OSError):
            os.write(self.fds[2], _STROKE)

    def receive(self, other_fd: int) -> list[Any] | None:
        """For the I/O process: the next messages, sooner or later; None once ``other_fd`` has something to say."""
        while not (messages := self.inbox.take()):
            # What is there and has not arrived in whole will do so soon, if anybody is left who writes.
            if not self._sleep(other_fd, None if self.inbox.empty() else 1000 * WAIT_S):
                return None
        return messages

    def _sleep(self, other_fd: int, limit_ms: float | None) -> bool:
        """Until the bell rings; False where it was ``other_fd``."""
        bell_fd = self.fds[1]
        poll = select.poll()
        for fd in (bell_fd, other_fd):
            poll.register(fd, select.POLLIN)
        ready = dict(poll.poll(limit_ms))
        if bell_fd in ready:
            with suppress(BlockingIOError):
                os.read(bell_fd, RING_BYTES)
        return not ready or bell_fd in ready

    def close(self) -> None:
        """Let go of the descriptors. Nobody may be inside of ``ring``; the memory goes with the object."""
        fds, self.fds = self.fds, (-1, -1, -1)
        for fd in set(fds):
            with suppress(OSError):
                os.close(fd)


_wires: weakref.WeakSet[Wire] = weakref.WeakSet()


def _cut_in_fork() -> None:
    """A fork of the engine's process has the same memory and must not speak in its place."""
    for wire in list(_wires):
        wire.close()
        wire.outbox, wire.inbox = (Ring(memoryview(bytearray(DIRECTION_BYTES))) for _ in range(2))


os.register_at_fork(after_in_child=_cut_in_fork)


def _bell() -> tuple[int, int]:
    """Where to hear it and where to ring it."""
    if hasattr(os, "eventfd"):
        # Unlike a pipe it does not tell the kernel that who rings is about to sleep.
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return fd, fd
    fds = os.pipe()
    for fd in fds:
        os.set_blocking(fd, False)
    return fds


def _memory(nbytes: int) -> int:
    """Zeros that an inherited descriptor leads to."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("orlop-wire", os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp(prefix="orlop-wire-")
        os.unlink(path)
    try:
        os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd
