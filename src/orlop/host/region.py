"""The bytes of the host tier: one shared mapping per engine and host.

In: a layout, or the name or descriptor of a region that somebody else made. Out: slots and checksums as
numpy arrays over the same memory in the scheduler process, every rank and the I/O process. Never: a decision on
who may use a slot, a name in a file system that outlives the processes, a descriptor for another user.

The region is a memfd (elsewhere than on Linux an unlinked temporary file), handed over by SCM_RIGHTS on an
abstract socket and freed by the kernel when the last process has died, however it died.

    | header: magic, version, usable slots, layout | checksums [slots, ranks] uint64 | slots |
      each section starts on a multiple of 4096 bytes

Every integer is little-endian. The creator fills the pages in the background and publishes in the header how many
slots from the start are there; only those are handed out, so that no transfer meets a page fault.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import logging
import mmap
import os
import re
import resource
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from orlop.core import PAGE_BYTES, RegionLayout, align_up
from orlop.errors import RegionError, ResourceError

log = logging.getLogger(__name__)

MAGIC = b"ORLOPREG"
VERSION = 1

_HEADER = struct.Struct("<8sIIQQQII")  # magic, version, header bytes, usable, slots, blocks per chunk, ranks, groups
_USABLE_OFFSET = 16
_TABLE_OFFSET = 64

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_POPULATE_BYTES = 64 << 20
_TOUCH_BYTES = 16 << 20

_HELLO_TIMEOUT_S = 5.0
_RETRY_S = 0.02
_MAX_MESSAGE_BYTES = 1 << 20

Decide = Callable[[tuple[tuple[int, ...], ...]], RegionLayout]
"""From the page sizes ``[rank][group]`` in bytes to the layout of the region."""


def socket_name(instance: str, replica: int) -> str:
    """The name under which the region of one engine is served on this host, of bounded length."""
    digest = blake2b(f"{os.geteuid()}/{replica}/{instance}".encode(), digest_size=8).hexdigest()
    legible = re.sub(r"[^A-Za-z0-9._-]", "_", instance)[:40]
    return f"orlop-{legible}-{replica}-{digest}"


class HostRegion:
    """One mapping of the region in this process.

    ``slots``: uint8 ``[layout.slots, layout.slot_bytes]``. ``checksums``: uint64 ``[layout.slots, layout.ranks]``,
    the ``part_checksum`` of each rank's part, written by whoever filled the slot. Who may touch which slot is
    decided elsewhere. Any thread may read the attributes; ``close`` makes the arrays empty, and the memory goes
    when the last array or view made from them goes.
    """

    layout: RegionLayout
    slots: npt.NDArray[np.uint8]
    checksums: npt.NDArray[np.uint64]

    # --- making, finding -----------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        layout: RegionLayout,
        *,
        name: str | None = None,
        plain: bool = False,
        prefault: bool = True,
        pinned: bool = False,
    ) -> HostRegion:
        """A new region; with ``name``, that name is taken at once and answers after ``serve``.

        ``plain``: an unlinked temporary file instead of a memfd. ``prefault`` False: all slots are usable at
        once and pages come when they are touched. ``pinned``: the caller is going to lock the memory, so that
        limit counts too. ``ResourceError`` with the numbers where the machine lacks the memory, ``RegionError``
        where the name is taken.
        """
        listener = _Listener(name) if name else None
        try:
            return cls._create(layout, listener, plain=plain, prefault=prefault, pinned=pinned)
        except BaseException:
            if listener:
                listener.close()
            raise

    @classmethod
    def _create(
        cls, layout: RegionLayout, listener: _Listener | None, *, plain: bool, prefault: bool, pinned: bool
    ) -> HostRegion:
        check_room(layout, pinned=pinned)
        sections = _Sections.of(layout)
        memfd = not plain and hasattr(os, "memfd_create")
        fd = _memfd(sections.total_bytes) if memfd else _unlinked_file(sections.total_bytes)
        try:
            _write_header(fd, layout, usable=0 if prefault else layout.slots)
            region = cls(fd, layout)
        except BaseException:
            os.close(fd)
            raise
        region._listener = listener
        if prefault:
            region._prefault()
        return region

    @classmethod
    def from_fd(cls, fd: int) -> HostRegion:
        """The region behind an inherited descriptor, which it owns from now on."""
        try:
            return cls(fd, _read_header(fd))
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def connect(cls, name: str, *, timeout_s: float) -> HostRegion:
        """The region served under ``name``, by any process of this user on this host.

        May be called before the creator serves: tries until ``timeout_s`` has passed, then ``RegionError``.
        """
        return cls._ask(name, {"role": "connect"}, timeout_s)

    @classmethod
    def join(cls, name: str, rank: int, page_bytes: Sequence[int], timeout_s: float) -> HostRegion:
        """Tell the lowest rank the page size of each group on ``rank``; the region once it is decided.

        ``rank`` counts the ranks of this host from 0. ``RegionError`` after ``timeout_s``, or with the lowest
        rank's reason where it refuses.
        """
        return cls._ask(name, {"role": "join", "rank": rank, "page_bytes": list(page_bytes)}, timeout_s)

    @classmethod
    def gather(
        cls,
        name: str,
        ranks: int,
        own_page_bytes: Sequence[int],
        decide: Decide,
        timeout_s: float,
        *,
        plain: bool = False,
        prefault: bool = True,
        pinned: bool = False,
    ) -> HostRegion:
        """On the lowest rank (0): wait for ranks ``1 .. ranks - 1`` to join, decide, create and serve.

        ``RegionError`` naming the ranks that did not come within ``timeout_s``. What ``decide`` or ``create``
        raises is raised here, and said to the ranks that wait.
        """
        listener = _Listener(name)
        waiting = _Waiting(ranks, tuple(own_page_bytes))
        try:
            waiting.collect(listener, time.monotonic() + timeout_s)
            layout = decide(waiting.page_bytes())
            region = cls._create(layout, listener, plain=plain, prefault=prefault, pinned=pinned)
        except BaseException as error:
            waiting.refuse(f"the lowest rank gave up: {error}")
            listener.close()
            raise
        waiting.hand_out(region.fileno())
        region.serve()
        return region

    @classmethod
    def _ask(cls, name: str, wish: dict[str, Any], timeout_s: float) -> HostRegion:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return cls.from_fd(_ask_once(name, wish, deadline))
            except ValueError as error:
                raise RegionError(f"found something else than a host region under {name!r}: {error}") from error
            except OSError as error:
                # Nobody serves yet, or the creator went away in the middle and may come back.
                if time.monotonic() + _RETRY_S >= deadline:
                    raise RegionError(
                        f"found no host region under {name!r} within {timeout_s:g} s ({error}), expected the engine's "
                        "lowest rank on this host to serve it; see that process' log"
                    ) from error
            time.sleep(_RETRY_S)

    # --- one mapping ---------------------------------------------------------------------------------

    def __init__(self, fd: int, layout: RegionLayout) -> None:
        sections = _Sections.of(layout)
        self.layout = layout
        self._fd = fd
        self._listener: _Listener | None = None
        self._server: threading.Thread | None = None
        self._closing = threading.Event()
        self._mapping = mmap.mmap(fd, sections.total_bytes)
        self._usable = np.frombuffer(self._mapping, np.uint64, 1, _USABLE_OFFSET)
        self.checksums = np.frombuffer(
            self._mapping, np.uint64, layout.slots * layout.ranks, sections.checksums_offset
        ).reshape(layout.slots, layout.ranks)
        self.slots = np.frombuffer(
            self._mapping, np.uint8, layout.slots * layout.slot_bytes, sections.slots_offset
        ).reshape(layout.slots, layout.slot_bytes)

    @property
    def usable_slots(self) -> int:
        """How many slots from the start have their pages; a plain memory read that only grows."""
        return int(self._usable[0])

    def view(self, slot: int, nbytes: int) -> memoryview:
        """The first ``nbytes`` of a slot, writable; starts on a multiple of 4096."""
        if not 0 <= nbytes <= self.layout.slot_bytes:
            raise ValueError(f"found {nbytes} bytes asked of a slot, expected 0 to {self.layout.slot_bytes}")
        return memoryview(self.slots[slot])[:nbytes]

    def fileno(self) -> int:
        """The descriptor, for a process that is to inherit it."""
        return self._fd

    def serve(self) -> None:
        """Hand out the descriptor under the region's name, from a daemon thread, until ``close``."""
        if self._listener is None:
            raise RegionError("found a host region without a name, expected one made with create(name=...)")
        self._server = threading.Thread(
            target=_serve,
            args=(self._listener, os.dup(self._fd), self.layout),
            name="orlop-region-serve",
            daemon=True,
        )
        self._server.start()

    def close(self) -> None:
        """Stop serving and let go of the memory; idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._listener:
            self._listener.close()
        if self._server:
            self._server.join(timeout=1.0)  # after this the name is free again
        self._usable = np.zeros(1, np.uint64)
        self.slots = np.empty((0, self.layout.slot_bytes), np.uint8)
        self.checksums = np.empty((0, self.layout.ranks), np.uint64)
        try:
            self._mapping.close()
        except BufferError:
            log.debug("host region: unmapped when the last view of it goes")
        os.close(self._fd)

    def _prefault(self) -> None:
        threading.Thread(
            target=_fill_pages,
            args=(self.slots, self._usable, self._closing),
            name="orlop-region-prefault",
            daemon=True,
        ).start()


# --- the mapping's sections ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sections:
    """Byte offsets in the region."""

    checksums_offset: int
    slots_offset: int
    total_bytes: int

    @classmethod
    def of(cls, layout: RegionLayout) -> _Sections:
        checksums_offset = align_up(_TABLE_OFFSET + 8 * layout.ranks * layout.groups)
        slots_offset = checksums_offset + align_up(8 * layout.slots * layout.ranks)
        return cls(checksums_offset, slots_offset, slots_offset + layout.slots * layout.slot_bytes)


def _write_header(fd: int, layout: RegionLayout, *, usable: int) -> None:
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        _Sections.of(layout).checksums_offset,
        usable,
        layout.slots,
        layout.blocks_per_chunk,
        layout.ranks,
        layout.groups,
    ).ljust(_TABLE_OFFSET, b"\0")
    table = np.asarray(layout.page_bytes, "<u8").tobytes()
    os.pwrite(fd, header + table, 0)


def _read_header(fd: int) -> RegionLayout:
    size = os.fstat(fd).st_size
    head = os.pread(fd, _TABLE_OFFSET, 0)
    if len(head) < _TABLE_OFFSET or head[:8] != MAGIC:
        raise RegionError(f"found {size} bytes that start with {head[:8]!r}, expected a host region ({MAGIC!r})")
    _, version, header_bytes, _, slots, blocks_per_chunk, ranks, groups = _HEADER.unpack_from(head)
    if version != VERSION:
        raise RegionError(
            f"found a host region of version {version}, expected {VERSION}; run all processes of an engine from one "
            "installation"
        )
    table = np.frombuffer(os.pread(fd, 8 * ranks * groups, _TABLE_OFFSET), "<u8")
    if table.size != ranks * groups or table.size == 0:
        raise RegionError(f"found {table.size} page sizes in the host region's header, expected {ranks} x {groups}")
    page_bytes = tuple(tuple(row) for row in table.reshape(ranks, groups).tolist())
    layout = RegionLayout(slots, blocks_per_chunk, page_bytes)
    sections = _Sections.of(layout)
    if (header_bytes, size) != (sections.checksums_offset, sections.total_bytes):
        raise RegionError(
            f"found a host region of {size} bytes with a header of {header_bytes}, expected {sections.total_bytes} "
            f"and {sections.checksums_offset} for its layout"
        )
    return layout


def _memfd(nbytes: int) -> int:
    import fcntl

    fd = os.memfd_create("orlop-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        # A mapping that somebody shortens kills its users with SIGBUS; after this nobody can.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _unlinked_file(nbytes: int) -> int:
    fd, path = tempfile.mkstemp(prefix="orlop-region-")
    try:
        os.unlink(path)
        # Claims the disk space now: a later write to a mapped hole on a full disk would be a SIGBUS.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, nbytes)
        else:
            os.ftruncate(fd, nbytes)
    except OSError as error:
        os.close(fd)
        raise ResourceError(
            f"found no room for a host region of {nbytes} bytes in {tempfile.gettempdir()} ({error}); lower the host "
            "tier's size or point TMPDIR at a larger disk"
        ) from error
    return fd


# --- filling pages ------------------------------------------------------------------------------------


def _fill_pages(slots: npt.NDArray[np.uint8], usable: npt.NDArray[np.uint64], closing: threading.Event) -> None:
    """Give every slot its pages, in order, publishing as it goes. Holds the arrays, so the memory stays mapped."""
    flat = slots.reshape(-1)
    slot_bytes = slots.shape[1]
    _advise(flat, _MADV_HUGEPAGE)
    populate = _advise(flat[:PAGE_BYTES], _MADV_POPULATE_WRITE)
    step = _POPULATE_BYTES if populate else _TOUCH_BYTES
    for start in range(0, flat.size, step):
        if closing.is_set():
            return
        part = flat[start : start + step]
        if not populate:
            part[::PAGE_BYTES] = 0  # before a slot is published nobody else writes it
        elif not _advise(part, _MADV_POPULATE_WRITE):
            log.warning(
                "host region: found memory for %d of %d slots only (%s); going on with these",
                usable[0],
                slots.shape[0],
                os.strerror(ctypes.get_errno()),
            )
            return
        usable[0] = min(start + step, flat.size) // slot_bytes


def _advise(memory: npt.NDArray[np.uint8], advice: int) -> bool:
    """madvise through ctypes, which releases the GIL where ``mmap.madvise`` holds it."""
    if not sys.platform.startswith("linux"):
        return False
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    return bool(madvise(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes), ctypes.c_int(advice)) == 0)


# --- what the machine can give ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limit:
    """Something that bounds a new region: a name for the message, and the bytes that are left under it."""

    name: str
    available_bytes: int


def check_room(layout: RegionLayout, *, pinned: bool = False) -> None:
    """``ResourceError`` with the numbers where the machine cannot give the region its memory."""
    need = _Sections.of(layout).total_bytes
    for limit in memory_limits(pinned=pinned):
        if need > limit.available_bytes:
            fit = max(0, limit.available_bytes // layout.slot_bytes)
            raise ResourceError(
                f"found {limit.available_bytes} bytes left under {limit.name}, expected {need} for {layout.slots} "
                f"slots of {layout.slot_bytes} bytes; lower the host tier's size (about {fit} slots fit) or raise "
                "the limit"
            )


def memory_limits(
    *, pinned: bool = False, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> list[Limit]:
    """What bounds this process' memory now; what cannot be read bounds nothing."""
    limits = [*_meminfo_limit(proc), *_cgroup_limits(proc, cgroups), *_rlimit(resource.RLIMIT_AS, "RLIMIT_AS", proc)]
    if pinned:
        limits += _rlimit(resource.RLIMIT_MEMLOCK, "RLIMIT_MEMLOCK", proc)
    return limits


def _meminfo_limit(proc: Path) -> Iterator[Limit]:
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            yield Limit("MemAvailable of /proc/meminfo", int(line.split()[1]) * 1024)


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[Limit]:
    """Memory limits of our cgroup and of all above it, version 1 and 2."""
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _up(cgroups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _up(
                cgroups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )


def _up(root: Path, path: str, limit_file: str, usage_file: str, cache_field: str) -> Iterator[Limit]:
    """One limit per directory from ``path`` up to the mount; a container may see the mount only."""
    here = root / path.lstrip("/")
    for directory in [here, *here.parents]:
        limit = _lines(directory / limit_file)
        usage = _lines(directory / usage_file)
        if limit and usage and limit[0].isdigit():
            cache = [int(line.split()[1]) for line in _lines(directory / "memory.stat") if line.startswith(cache_field)]
            yield Limit(str(directory / limit_file), int(limit[0]) - int(usage[0]) + sum(cache[:1]))
        if directory == root:
            return


def _rlimit(which: int, name: str, proc: Path) -> Iterator[Limit]:
    soft, _ = resource.getrlimit(which)
    if soft == resource.RLIM_INFINITY:
        return
    used_pages = int(_lines(proc / "self/statm")[0].split()[0]) if which == resource.RLIMIT_AS else 0
    yield Limit(name, soft - used_pages * mmap.PAGESIZE)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


# --- handing the descriptor over ----------------------------------------------------------------------


class _Listener:
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
                f"found the host region {name!r} taken ({error}), expected to be the only one to create it; is another "
                "engine running under the same instance and replica?"
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


class _Waiting:
    """The ranks that have joined before the layout is decided, and others who want the region."""

    def __init__(self, ranks: int, own_page_bytes: tuple[int, ...]) -> None:
        self._ranks = ranks
        self._pages = {0: own_page_bytes}
        self._joined: dict[int, socket.socket] = {}
        self._others: list[socket.socket] = []

    def page_bytes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self._pages[rank] for rank in range(self._ranks))

    def collect(self, listener: _Listener, deadline: float) -> None:
        while len(self._pages) < self._ranks:
            try:
                peer = listener.accept(max(0.001, deadline - time.monotonic()))
            except TimeoutError as error:
                missing = [rank for rank in range(self._ranks) if rank not in self._pages]
                raise RegionError(
                    f"found no word from local ranks {missing} of {self._ranks} under {listener.name!r} in time, "
                    "expected each to join; see those processes' logs (ranks on another host cannot join)"
                ) from error
            self._admit(listener.name, peer)

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
        if rank in self._joined and not _hung_up(self._joined[rank]):
            return f"rank {rank} has joined already; do two engines share this instance and replica?"
        return ""

    def hand_out(self, fd: int) -> None:
        for peer in [*self._joined.values(), *self._others]:
            _hand_over(peer, fd)

    def refuse(self, reason: str) -> None:
        for peer in [*self._joined.values(), *self._others]:
            _refuse(peer, reason)


def _serve(listener: _Listener, fd: int, layout: RegionLayout) -> None:
    """Answer until the listener closes; ``fd`` is this thread's own."""
    try:
        while not listener.closed.is_set():
            _serve_one(listener, fd, layout)
    finally:
        os.close(fd)


def _serve_one(listener: _Listener, fd: int, layout: RegionLayout) -> None:
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


def _ask_once(name: str, wish: dict[str, Any], deadline: float) -> int:
    """One descriptor from the server, or ``OSError`` (try again) or ``RegionError`` (it says no)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(max(0.001, deadline - time.monotonic()))
        peer.connect(_address(name))
        if not _same_user(peer):
            raise RegionError(
                f"found the host region {name!r} served by another user, expected user {os.geteuid()}; run all "
                "processes of an engine as one user"
            )
        _send(peer, {"magic": MAGIC.decode(), "version": VERSION, "name": name, **wish})
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
    expected = {"magic": MAGIC.decode(), "version": VERSION, "name": name}
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
        message = json.loads(_exactly(peer, nbytes))
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
