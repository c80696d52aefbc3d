"""Handing the host region's descriptor to other processes of the same user on the same host.

In: a name, a descriptor, the ranks' page sizes. Out: the descriptor in another process, by SCM_RIGHTS on an abstract
unix socket. Never: a file, a word to another user's process (the kernel is asked who it is, on both ends).

One exchange per connection. Each message is a length (4 bytes, little-endian) and that much JSON:

    peer    {"magic", "version", "name", "role": "connect"}  or  {..., "role": "join", "rank", "page_bytes": [...]}
    server  {"version"} with the descriptor                  or  {"refused": reason}

A connection that breaks means "try again"; a refusal is final.
"""

from __future__ import annotations

import array
import contextlib
import json
import logging
import os
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

from orlop.core import RegionLayout
from orlop.errors import RegionError

log = logging.getLogger(__name__)

PROTOCOL = "ORLOPREG"
VERSION = 1

_HELLO_TIMEOUT_S = 5.0
_MAX_MESSAGE_BYTES = 1 << 20


class Listener:
    """The name, taken: one process has it at a time, and it goes with the process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = threading.Event()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.bind(_address(name))
            self.socket.listen(128)
        except OSError as error:
            self.socket.close()
            raise RegionError(
                f"found the host region {name!r} taken ({error}), expected to be the only one to create it; end the "
                "other engine of this name, or give one of the two another instance (in vLLM: engine_id)"
            ) from error

    def accept(self, timeout_s: float | None) -> socket.socket:
        """The next peer of this user. ``OSError`` after ``timeout_s`` or ``close``."""
        while True:
            self.socket.settimeout(timeout_s)
            peer, _ = self.socket.accept()
            if _same_user(peer):
                return peer
            log.warning("host region: refused a process of another user")
            peer.close()

    def close(self) -> None:
        self.closed.set()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread in accept
        self.socket.close()


class Waiting:
    """The ranks that have joined before the layout is decided, and others who want the region."""

    def __init__(self, ranks: int, own_page_bytes: tuple[int, ...]) -> None:
        self._ranks = ranks
        self._pages = {0: own_page_bytes}
        self._joined: dict[int, socket.socket] = {}
        self._others: list[socket.socket] = []

    def page_bytes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self._pages[rank] for rank in range(self._ranks))

    def collect(self, listener: Listener, deadline: float) -> None:
        while missing := self._missing():
            try:
                peer = listener.accept(max(0.001, deadline - time.monotonic()))
            except TimeoutError as error:
                raise RegionError(
                    f"found no word from local ranks {missing} of {self._ranks} under {listener.name!r} in time, "
                    "expected each to join; see those processes' logs (ranks on another host cannot join)"
                ) from error
            self._admit(listener.name, peer)

    def _missing(self) -> list[int]:
        """Ranks that have not joined, or have died since; those may join again."""
        for rank, peer in list(self._joined.items()):
            if _hung_up(peer):
                peer.close()
                del self._joined[rank], self._pages[rank]
        return [rank for rank in range(self._ranks) if rank not in self._pages]

    def _admit(self, name: str, peer: socket.socket) -> None:
        wish = _hear(name, peer)
        if wish is None:
            return
        if wish["role"] == "connect":
            self._others.append(peer)
            return
        rank, pages = wish["rank"], tuple(wish["page_bytes"])
        if trouble := self._trouble(rank, pages):
            _refuse(peer, trouble)
            return
        self._joined[rank] = peer
        self._pages[rank] = pages

    def _trouble(self, rank: int, pages: tuple[int, ...]) -> str:
        if not 0 < rank < self._ranks:
            return f"found rank {rank}, expected 1 to {self._ranks - 1}"
        if len(pages) != len(self._pages[0]):
            return f"rank {rank}: found {len(pages)} KV groups, expected {len(self._pages[0])} as on rank 0"
        if rank not in self._missing():
            return f"rank {rank} has joined already; do two engines share this instance and replica?"
        return ""

    def hand_out(self, fd: int) -> None:
        for peer in [*self._joined.values(), *self._others]:
            _hand_over(peer, fd)

    def refuse(self, reason: str) -> None:
        for peer in [*self._joined.values(), *self._others]:
            _refuse(peer, reason)


def serve(listener: Listener, fd: int, layout: RegionLayout) -> None:
    """Hand ``fd`` to whoever asks until the listener closes; ``fd`` is this thread's own and is closed then."""
    try:
        while not listener.closed.is_set():
            _serve_one(listener, fd, layout)
    finally:
        os.close(fd)


def _serve_one(listener: Listener, fd: int, layout: RegionLayout) -> None:
    try:
        peer = listener.accept(None)
    except OSError:
        listener.closed.wait(_HELLO_TIMEOUT_S)  # closed, or out of descriptors: that may pass
        return
    wish = _hear(listener.name, peer)
    if wish is None:
        return
    if trouble := _late_trouble(wish, layout):
        _refuse(peer, trouble)
    else:
        _hand_over(peer, fd)


def _late_trouble(wish: dict[str, Any], layout: RegionLayout) -> str:
    """Why a rank that joins after the decision (it was started again) does not fit the region."""
    if wish["role"] == "connect":
        return ""
    rank, pages = wish["rank"], tuple(wish["page_bytes"])
    if not 0 <= rank < layout.ranks:
        return f"found rank {rank}, expected 0 to {layout.ranks - 1}"
    if pages != layout.page_bytes[rank]:
        return f"rank {rank}: found pages of {pages} bytes, expected {layout.page_bytes[rank]} as the region was made"
    return ""


def ask_once(name: str, wish: dict[str, Any], deadline: float) -> int:
    """One descriptor from the server, or ``OSError`` (try again) or ``RegionError`` (it says no)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(max(0.001, deadline - time.monotonic()))
        peer.connect(_address(name))
        if not _same_user(peer):
            raise RegionError(
                f"found the host region {name!r} served by another user, expected user {os.geteuid()}; run all "
                "processes of an engine as one user"
            )
        _send(peer, {"magic": PROTOCOL, "version": VERSION, "name": name, **wish})
        answer, fds = _receive(peer)
        if "refused" in answer:
            _close_all(fds)
            raise RegionError(f"host region {name!r}: {answer['refused']}")
        if len(fds) != 1:
            _close_all(fds)
            raise RegionError(f"found {len(fds)} descriptors in the answer for {name!r}, expected 1")
        return fds[0]


def _hear(name: str, peer: socket.socket) -> dict[str, Any] | None:
    """A peer's wish if it is one of ours; None where it was refused or went away."""
    try:
        peer.settimeout(_HELLO_TIMEOUT_S)
        wish, fds = _receive(peer)
        _close_all(fds)
    except (OSError, ValueError) as error:
        log.warning("host region: found a peer that does not speak our protocol (%s)", error)
        peer.close()
        return None
    if trouble := _wish_trouble(wish, name):
        _refuse(peer, trouble)
        return None
    return wish


def _wish_trouble(wish: dict[str, Any], name: str) -> str:
    expected = {"magic": PROTOCOL, "version": VERSION, "name": name}
    for field, value in expected.items():
        if wish.get(field) != value:
            return f"found {field} {wish.get(field)!r}, expected {value!r}; run one installation and one instance name"
    pages = wish.get("page_bytes")
    if wish.get("role") == "connect":
        return ""
    if wish.get("role") != "join" or type(wish.get("rank")) is not int or not _is_pages(pages):
        return f"found the wish {wish!r}, expected to connect, or to join with a rank and page sizes"
    return ""


def _is_pages(pages: object) -> bool:
    return isinstance(pages, list) and all(type(n) is int and n > 0 for n in pages)


def _hand_over(peer: socket.socket, fd: int) -> None:
    with peer:
        try:
            _send(peer, {"version": VERSION}, fd)
        except OSError as error:
            log.warning("host region: a process went away before it got the region (%s)", error)


def _refuse(peer: socket.socket, reason: str) -> None:
    log.warning("host region: refused a process: %s", reason)
    with peer, contextlib.suppress(OSError):
        _send(peer, {"refused": reason})


def _hung_up(peer: socket.socket) -> bool:
    peer.setblocking(False)
    try:
        return peer.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        peer.settimeout(_HELLO_TIMEOUT_S)


def _send(peer: socket.socket, message: dict[str, Any], fd: int | None = None) -> None:
    body = json.dumps(message).encode()
    # The descriptor rides on the length word, which fits any socket buffer in one piece.
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd is not None else []
    peer.sendmsg([struct.pack("<I", len(body))], rights)
    peer.sendall(body)


def _receive(peer: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, rights, _, _ = peer.recvmsg(4, socket.CMSG_SPACE(4 * array.array("i").itemsize), _cloexec_flag())
    fds = [fd for level, kind, data in rights if (level, kind) == _RIGHTS for fd in array.array("i", data)]
    try:
        (nbytes,) = struct.unpack("<I", head + _exactly(peer, 4 - len(head)))
        if nbytes > _MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {nbytes} bytes")
        try:
            message = json.loads(_exactly(peer, nbytes))
        except RecursionError as error:
            raise ValueError("a message too deeply nested") from error
        if not isinstance(message, dict):
            raise ValueError("a message that is no object")
    except BaseException:
        _close_all(fds)
        raise
    return message, fds


_RIGHTS = (socket.SOL_SOCKET, socket.SCM_RIGHTS)


def _cloexec_flag() -> int:
    return getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def _exactly(peer: socket.socket, nbytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < nbytes:
        part = peer.recv(nbytes - len(parts))
        if not part:
            raise ConnectionResetError("the other end went away")
        parts += part
    return bytes(parts)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _address(name: str) -> str:
    """Abstract on Linux: it has no file, and the kernel frees it with the process."""
    if sys.platform.startswith("linux"):
        return "\0" + name
    return os.path.join(tempfile.gettempdir(), f"{name}.sock")


def _same_user(peer: socket.socket) -> bool:
    """Whether the other end runs as our effective user, by the kernel's word."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.geteuid())
