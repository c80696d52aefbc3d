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

import ctypes
import logging
import mmap
import os
import re
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from orlop.background import start_thread
from orlop.core import PAGE_BYTES, RegionLayout, align_up
from orlop.errors import RegionError, ResourceError
from orlop.host.handover import Listener, Waiting, ask_once, serve
from orlop.host.limits import check_room

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

_RETRY_S = 0.02
_FILL_POLL_S = 0.001

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
        listener = Listener(name) if name else None
        try:
            return cls._create(layout, listener, plain=plain, prefault=prefault, pinned=pinned)
        except BaseException:
            if listener:
                listener.close()
            raise

    @classmethod
    def _create(
        cls, layout: RegionLayout, listener: Listener | None, *, plain: bool, prefault: bool, pinned: bool
    ) -> HostRegion:
        sections = _Sections.of(layout)
        check_room(layout, sections.total_bytes, pinned=pinned)
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
        listener = Listener(name)
        waiting = Waiting(ranks, tuple(own_page_bytes))
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
                return cls.from_fd(ask_once(name, wish, deadline))
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
        self._slot_bytes = layout.slot_bytes  # recounted from all ranks and groups at each look
        self._fd = fd
        self._listener: Listener | None = None
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
        self._flat = self.slots.reshape(-1).data

    @property
    def usable_slots(self) -> int:
        """How many slots from the start have their pages; a plain memory read that only grows."""
        return int(self._usable[0])

    def wait_filled(self, timeout_s: float) -> bool:
        """Whether, at latest after ``timeout_s``, every slot has its pages. Waits; for start-up only."""
        deadline = time.monotonic() + timeout_s
        while self.usable_slots < self.layout.slots:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_FILL_POLL_S)
        return True

    def view(self, slot: int, nbytes: int) -> memoryview:
        """The first ``nbytes`` of a slot, writable; starts on a multiple of 4096."""
        if not 0 <= nbytes <= self._slot_bytes:
            raise ValueError(f"found {nbytes} bytes asked of a slot, expected 0 to {self._slot_bytes}")
        start = slot * self._slot_bytes
        view = self._flat[start : start + nbytes]
        if len(view) != nbytes or slot < 0:
            raise IndexError(f"found slot {slot}, expected one of {len(self.slots)}")
        return view

    def fileno(self) -> int:
        """The descriptor, for a process that is to inherit it."""
        return self._fd

    def serve(self) -> None:
        """Hand out the descriptor under the region's name, from a daemon thread, until ``close``."""
        if self._listener is None:
            raise RegionError("found a host region without a name, expected one made with create(name=...)")
        self._server = start_thread(serve, self._listener, os.dup(self._fd), self.layout, name="orlop-region-serve")

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
        self._flat = memoryview(b"")
        self.checksums = np.empty((0, self.layout.ranks), np.uint64)
        try:
            self._mapping.close()
        except BufferError:
            log.debug("host region: unmapped when the last view of it goes")
        os.close(self._fd)

    def _prefault(self) -> None:
        start_thread(_fill_pages, self.slots, self._usable, self._closing, name="orlop-region-prefault")


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
            f"found no room for a host region of {nbytes} bytes in {tempfile.gettempdir()} ({error}); lower "
            "host.bytes or point TMPDIR at a larger disk"
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
