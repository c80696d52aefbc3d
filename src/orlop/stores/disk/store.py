"""A ChunkStore in a few large files on a local disk: the slab.

In: keys, headers and payloads. Out: the same bytes under the same key, or an outcome per key. Never: a look inside a
chunk, an fsync before an answer (but with ``sync``), more bytes on the disk than its bound, a chunk removed while it is
read.

docs/internals/disk-format.md has the bytes, the commit point and what each crash leaves. ``slab`` keeps the books,
``lanes`` the peace between engines, ``device`` moves bytes; here they are put together::

    write   find room (allocate, grow, evict) -> cells -> records -> index in memory -> older cell's record zeroed
    read    find, pin -> one vectored call per run of neighbouring cells -> unpin

One lock guards the books and is never held during I/O; another one is held by whoever makes room.
"""

from __future__ import annotations

import errno
import logging
import operator
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from orlop.core import PAGE_BYTES, Outcome
from orlop.errors import ConfigError, InvariantError, StoreError
from orlop.host.policies import load_policy
from orlop.stores.disk import format as fmt
from orlop.stores.disk.device import Device, File, try_direct_io
from orlop.stores.disk.format import MAX_KEY_BYTES, RECORD_BYTES, RECORDS_OFFSET, SegmentShape
from orlop.stores.disk.lanes import Lane, directory_lock, others_alive, retire_idle, take_lane
from orlop.stores.disk.recovery import read_records, recover, segment_paths
from orlop.stores.disk.slab import Chunk, Run, Segment, Slab, Victim, cell_bytes_for, segment_bytes, shape_for
from orlop.stores.posix import FULL, Complaints, in_the_way, named
from orlop.tiering.base import ChunkStore, KeyChange, StoredChunk
from orlop.tiering.key_index import NOTHING, UInt64Array, key_name

log = logging.getLogger(__name__)

MIN_BYTES = 1 << 20
_NO_NAMES: UInt64Array = np.empty(0, np.uint64)
_MARGIN_BYTES = 8 * PAGE_BYTES
"""Left free under the bound: a file system may count a page or two for a file's own books."""
_LOOK_AGAIN_S = 5.0
"""How long it is taken for granted that the bound has no room for another segment."""
_LEAST_PART = 4
"""What is left under the bound is worth a segment from so small a part of a whole one on."""
_HALVINGS = 8

Tell = Callable[[KeyChange], None]


class _Call(NamedTuple):
    """What is known of the chunks of one ``write``, by their numbers in the call, and what became of them so far."""

    keys: Sequence[bytes]
    headers: Sequence[memoryview]
    views: Sequence[memoryview]
    names: list[int]
    header_checksums: list[int]
    sizes: list[int]
    outcomes: list[Outcome]

    def end(self, chunks: Iterable[int], outcome: Outcome) -> None:
        for i in chunks:
            self.outcomes[i] = outcome


@dataclass(eq=False, slots=True)
class _Room:
    """A lane of ours, open: its books and its files. Calls that began on it may outlive it and harm nobody."""

    lane: Lane
    slab: Slab
    files: dict[int, tuple[File, File]]
    next_number: int
    next_sequence: int
    unsynced: set[int]
    """Segments with zeroed records that may not be on the disk yet."""
    no_growth_before: float = 0.0


class DiskStore(ChunkStore):
    """The slab under ``path``; any method from any thread.

    ``max_bytes`` bounds the directory with all its lanes. ``direct_io``: "auto" tries at start and falls back to
    buffered I/O with one warning, "on" refuses a start without it, "off" never uses it. ``policy``: a host policy,
    which ranks extents. ``namespace``: 16 bytes, which lane to prefer. ``sync``: what is reported as stored survives
    a power cut. Recency goes to disk every ``keep_s``; after a full disk growing is tried again after
    ``recover_after_s``. ``clock`` is monotonic, ``wall_clock`` orders uses over restarts, both seconds. ``make_device``
    stands in for ``Device``.

    ``ConfigError``: settings that can never work, the setting first. ``StoreError``: the directory cannot be used now.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int,
        direct_io: Literal["auto", "on", "off"] = "auto",
        policy: str = "lru",
        namespace: bytes = bytes(16),
        sync: bool = False,
        keep_s: float = 10.0,
        recover_after_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        make_device: Callable[[bool, Callable[[OSError], None]], Device] = Device,
    ) -> None:
        if max_bytes < MIN_BYTES:
            raise ConfigError(f"bytes: found {max_bytes}, allowed: {MIN_BYTES} or more")
        if direct_io not in ("auto", "on", "off"):
            raise ConfigError(f"direct_io: found {direct_io!r}, allowed: 'auto', 'on' or 'off'")
        load_policy(policy, 1)
        self._root = os.path.abspath(path)
        self._max_bytes = max_bytes
        self._policy = policy
        self._namespace = namespace
        self._sync = sync
        self._keep_s = keep_s
        self._recover_after_s = recover_after_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._complaints = Complaints(f"disk tier in {self._root}", clock)
        self._making_room = threading.Lock()
        self._keeping = threading.Lock()
        self._keep_next = clock() + keep_s
        self._lock = threading.Lock()  # guards the fields from here on, and the books; taken last
        self._counts: Counter[str] = Counter()
        self._tell: Tell | None = None
        self._closed = False
        self._room: _Room | None = None

        self._open_directory()
        self._device = make_device(direct_io != "off" and self._probe_direct_io(direct_io == "on"), self._say_buffered)
        try:
            self._room = self._open_room()
        except OSError as error:
            raise StoreError(f"path: found {self._root} unusable ({named(error)}), expected a directory") from error

    # --- the five verbs ------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        room = self._open()
        if room is None:
            return [False] * len(keys)
        with self._lock:
            return [place >= 0 for place in room.slab.index.get([key_name(key) for key in keys])]

    def read_into(
        self, keys: Sequence[bytes], headers: Sequence[memoryview], views: Sequence[memoryview]
    ) -> Sequence[Outcome]:
        outcomes = [Outcome.MISSING] * len(keys)
        room = self._open()
        if room is None:
            return outcomes
        names = [key_name(key) for key in keys]
        sizes = _sizes(headers, views)
        with self._lock:
            runs = room.slab.find_runs(names)
            pinned = [extent for run in runs for extent in run.extents]
            room.slab.pin(pinned)
        used: list[Run] = []
        try:
            for run in runs:
                for part in _readable(run, sizes, outcomes):
                    self._read_run(room, part, headers, views, outcomes)
                    if outcomes[part.members[0]] is Outcome.OK:
                        used.append(part)
        finally:
            used.sort(key=lambda run: run.members[0])
            with self._lock:
                room.slab.touch([extent for run in used for extent in run.extents], self._now_us())
                room.slab.unpin(pinned)
        return outcomes

    def write(
        self, keys: Sequence[bytes], headers: Sequence[memoryview], views: Sequence[memoryview]
    ) -> Sequence[Outcome]:
        outcomes = [Outcome.IO_ERROR] * len(keys)
        room = self._open()
        if room is None:
            return outcomes
        call = _Call(
            keys,
            headers,
            views,
            [key_name(key) for key in keys],
            [fmt.checksum(header) for header in headers],
            _sizes(headers, views),
            outcomes,
        )
        for cell_bytes, chunks in self._wanted(room, call).items():
            self._write_chunks(room, cell_bytes, chunks, call)
        return outcomes

    def delete(self, keys: Sequence[bytes]) -> int:
        room = self._open()
        if room is None:
            return 0
        names = list(dict.fromkeys(key_name(key) for key in keys))
        with self._lock:
            found = [
                (name, chunk) for name, chunk in zip(names, room.slab.find(names), strict=True) if chunk is not None
            ]
            pinned = [chunk.extent for _, chunk in found]
            room.slab.pin(pinned)
        removed = 0
        try:
            for chunks in _by_segment(found):
                removed += self._delete_in(room, chunks)
        finally:
            with self._lock:
                room.slab.unpin(pinned)
        self._sync_erased(room)
        return removed

    def scan(self) -> Iterator[StoredChunk]:
        """All chunks of this lane, from the index on disk. ``nbytes`` are those of the cell."""
        room = self._open()
        now_us = self._now_us()
        for number in list(room.slab.segments) if room is not None else ():
            assert room is not None
            segment, files = room.slab.segments.get(number), room.files.get(number)
            if segment is None or files is None:
                continue
            for first, records, kept in read_records(files[1], segment.shape, []):
                for i in kept.tolist():
                    key, place = fmt.key_of(records[i]), segment.shape.place(first + i)
                    with self._lock:
                        if room.slab.index.get([key_name(key)])[0] != place:
                            continue
                        used_us = room.slab.last_use_us(room.slab.at(place))
                    yield StoredChunk(key, segment.shape.cell_bytes, max(0.0, (now_us - used_us) / 1e6))

    def touch(self, keys: Sequence[bytes]) -> None:
        """The keys were of use, the first of them most: it is the start of the prefix that the others extend."""
        room = self._open()
        if room is None:
            return
        with self._lock:
            chunks = [chunk for chunk in room.slab.find([key_name(key) for key in keys]) if chunk is not None]
            room.slab.touch([chunk.extent for chunk in chunks], self._now_us())

    def watch(self, tell: Tell) -> bool:
        with self._lock:
            self._tell = tell
            self._tell_all()
        return True

    def stats(self) -> Mapping[str, float]:
        with self._lock:
            room = self._room
            return {
                "bytes": room.slab.nbytes if room is not None else 0,
                "limit_bytes": self._max_bytes,
                "chunks": room.slab.chunks() if room is not None else 0,
                "segments": len(room.slab.segments) if room is not None else 0,
                "lane": room.lane.number if room is not None else -1,
                "direct_io": float(self._device.direct),
                **self._counts,
            }

    def sync(self) -> None:
        """All that was reported survives a power cut from here on. ``OSError``."""
        room = self._room
        if room is not None:
            self._keep(room)
            for cells, index in list(room.files.values()):
                cells.sync()
                index.sync()

    def close(self) -> None:
        """Write the recency and let the lane go; idempotent. Nobody may be inside another call."""
        self._closed = True
        room, self._room = self._room, None
        if room is not None:
            self._keep(room)
            for files in room.files.values():
                for file in files:
                    file.close()
            room.lane.close()

    def check(self) -> None:
        """Recount the books; ``InvariantError`` where they do not add up. For tests and tools, while nothing runs."""
        with self._lock:
            if self._room is not None:
                self._room.slab.check()
                if set(self._room.files) != set(self._room.slab.segments):
                    raise InvariantError("open files and segments differ")

    def path_of(self, key: bytes) -> tuple[str, int] | None:
        """The cells file and the offset at which the chunk of ``key`` lies, for tools and tests."""
        room = self._room
        [chunk] = room.slab.find([key_name(key)]) if room is not None else [None]
        if room is None or chunk is None:
            return None
        cells_path, _ = segment_paths(room.lane.directory, chunk.segment.shape.number)
        return cells_path, chunk.cell * chunk.segment.shape.cell_bytes

    # --- reading -------------------------------------------------------------------------------------------

    def _read_run(
        self,
        room: _Room,
        run: Run,
        headers: Sequence[memoryview],
        views: Sequence[memoryview],
        outcomes: list[Outcome],
    ) -> None:
        shape = run.segment.shape
        buffers = [part for i in run.members for part in (headers[i], views[i])]
        outcome = Outcome.OK
        try:
            room.files[shape.number][0].read(buffers, run.cell * shape.cell_bytes)
        except (OSError, EOFError) as error:
            if len(run.members) > 1:  # one bad sector, or the end of a file cut short, is not its neighbours' trouble
                for part in _single(run):
                    self._read_run(room, part, headers, views, outcomes)
                return
            outcome = self._trouble("read", error) if isinstance(error, OSError) else Outcome.CORRUPT
        for i in run.members:
            outcomes[i] = outcome

    # --- writing -------------------------------------------------------------------------------------------

    def _wanted(self, room: _Room, call: _Call) -> dict[int, list[int]]:
        """What there is to write, by size of cell: what is there already with the same header is OK and kept."""
        fits = [1 <= len(key) <= MAX_KEY_BYTES for key in call.keys]
        wanted: dict[int, list[int]] = {}
        with self._lock:
            self._counts["keys_too_long"] += fits.count(False)
            found = room.slab.index.get(call.names)
            if all(fits) and found.count(NOTHING) == len(found) and len(set(call.sizes)) == 1:
                return {cell_bytes_for(call.sizes[0]): list(range(len(found)))}
            same: list[Chunk] = []
            for i, place in enumerate(found):
                if not fits[i]:
                    continue
                if place != NOTHING and _is_same(chunk := room.slab.at(place), call, i):
                    same.append(chunk)
                    call.outcomes[i] = Outcome.OK
                else:
                    wanted.setdefault(cell_bytes_for(call.sizes[i]), []).append(i)
            self._counts["kept_chunks"] += len(same)
            room.slab.touch([chunk.extent for chunk in same], self._now_us())
        return wanted

    def _write_chunks(self, room: _Room, cell_bytes: int, chunks: list[int], call: _Call) -> None:
        while chunks:
            try:
                runs = self._find_room(room, cell_bytes, [call.names[i] for i in chunks])
                if not runs:
                    raise OSError(errno.ENOSPC, "nothing can be evicted for room under the bound")
            except (OSError, StoreError) as error:
                cause = error if isinstance(error, OSError) else OSError(errno.EIO, str(error))
                call.end(chunks, self._trouble("write", cause))
                return
            pinned = [extent for run in runs for extent in run.extents]
            try:
                for run in runs:
                    members = [chunks[i] for i in run.members]
                    self._write_run(room, run._replace(members=members), call)
            finally:
                with self._lock:
                    room.slab.unpin(pinned)
            chunks = chunks[runs[-1].members[-1] + 1 :]

    def _write_run(self, room: _Room, run: Run, call: _Call) -> None:
        shape = run.segment.shape
        cells, index = room.files[shape.number]
        outcome = Outcome.OK
        try:
            for part in _writable(run, call.sizes):
                buffers = [buffer for i in part.members for buffer in (call.headers[i], call.views[i])]
                cells.write(buffers, part.cell * shape.cell_bytes)
            if self._sync:
                cells.sync()
            index.write([memoryview(self._records(room, run, call))], RECORDS_OFFSET + run.cell * RECORD_BYTES)
            if self._sync:
                index.sync()
        except OSError as error:
            outcome = self._trouble("write", error)
        else:
            self._publish(room, run, call)
        call.end(run.members, outcome)

    def _records(self, room: _Room, run: Run, call: _Call) -> bytes:
        count, place = len(run.members), run.segment.shape.place(run.cell)
        with self._lock:
            sequence = room.next_sequence
            room.next_sequence += count
            newest_us = room.slab.next_us(self._now_us(), count)
        fields = fmt.Fields(
            np.arange(sequence, sequence + count),
            np.arange(newest_us, newest_us - count, -1),
            [call.names[i] for i in run.members],
            [call.header_checksums[i] for i in run.members],
            [call.sizes[i] for i in run.members],
            np.arange(place, place + count),
        )
        return fmt.pack_records(fields, [call.keys[i] for i in run.members])

    def _publish(self, room: _Room, run: Run, call: _Call) -> None:
        names = [call.names[i] for i in run.members]
        sums = [call.header_checksums[i] for i in run.members]
        slack = [run.segment.shape.cell_bytes - call.sizes[i] for i in run.members]
        with self._lock:
            before = room.slab.publish(run, names, sums, slack)
            room.slab.touch(run.extents, self._now_us())
            self._told(room, added=names)
        if before:
            try:
                self._erase(room, before)
            finally:
                with self._lock:
                    room.slab.unpin([chunk.extent for chunk in before])

    # --- removing ------------------------------------------------------------------------------------------

    def _delete_in(self, room: _Room, found: Sequence[tuple[int, Chunk]]) -> int:
        """Chunks of one segment, all pinned. What cannot be erased stays, since a restart would bring it back."""
        chunks = [chunk for _, chunk in found]
        if not self._erase(room, chunks):
            return 0
        with self._lock:
            gone = [name for name, chunk in found if room.slab.forget(chunk, name)]
            self._told(room, removed=gone)
        return len(gone)

    def _erase(self, room: _Room, chunks: Sequence[Chunk]) -> bool:
        """Zero the records of pinned chunks."""
        ok = True
        for chunk in chunks:
            index = room.files[chunk.segment.shape.number][1]
            room.unsynced.add(chunk.segment.shape.number)
            try:
                index.write([memoryview(bytes(RECORD_BYTES))], RECORDS_OFFSET + chunk.cell * RECORD_BYTES)
            except OSError as error:
                self._trouble("delete", error)
                ok = False
        return ok

    def _sync_erased(self, room: _Room) -> None:
        """What was evicted or replaced before goes for good too: its key may be among those that were to be removed."""
        while room.unsynced:
            files = room.files.get(room.unsynced.pop())
            try:
                if files is not None:
                    files[1].sync()
            except OSError as error:
                self._trouble("delete", error)

    # --- room ----------------------------------------------------------------------------------------------

    def _find_room(self, room: _Room, cell_bytes: int, names: Sequence[int]) -> list[Run]:
        """Cells for one name at least, pinned; none where nothing can leave for them."""
        if shape_for(0, cell_bytes, self._max_bytes - _MARGIN_BYTES) is None:
            return []
        while True:
            with self._lock:
                runs = room.slab.allocate(cell_bytes, names, self._now_us())
            if runs:
                return runs
            with self._making_room:
                with self._lock:
                    runs = room.slab.allocate(cell_bytes, names, self._now_us())
                if runs or not (self._grow(room, cell_bytes) or self._evict(room, cell_bytes)):
                    return runs

    def _grow(self, room: _Room, cell_bytes: int) -> bool:
        """Another segment, if the bound, the share of this engine and the disk have room for it."""
        if self._clock() < room.no_growth_before:
            return False
        with directory_lock(self._root):
            shape = self._next_shape(room, cell_bytes)
            made = self._make_segment(room, shape) if shape is not None else None
        if made is None:
            return False
        shape, cells, index = made
        with self._lock:
            room.slab.add(shape)
            room.files[shape.number] = (cells, index)
            room.next_number += 1
        return True

    def _next_shape(self, room: _Room, cell_bytes: int) -> SegmentShape | None:
        whole = segment_bytes(self._max_bytes)
        wanted = shape_for(room.next_number, cell_bytes, whole)
        if wanted is None:  # a cell as large as that: a segment of its own
            whole = SegmentShape(0, cell_bytes, 1, 1).nbytes
            wanted = shape_for(room.next_number, cell_bytes, whole)
        free = self._max_bytes - _MARGIN_BYTES - self._device.used_bytes(self._root)
        alive, wish = others_alive(self._root, room.lane.number)
        if free < whole:
            with self._lock:
                oldest_us = room.slab.oldest_use_us()
            free += retire_idle(self._root, room.lane.number, self._namespace, whole - free, oldest_us)
        share = self._max_bytes // (alive + 1)
        mine = self._device.used_bytes(room.lane.directory) if alive else 0  # of interest to others alone
        room.lane.wish(alive > 0 and free < whole and mine + whole <= share)
        if wish and mine + whole > share:
            free = 0
        shape = wanted if free >= whole else shape_for(room.next_number, cell_bytes, free)
        if shape is None or (wanted is not None and shape.cells * _LEAST_PART < wanted.cells):
            room.no_growth_before = self._clock() + _LOOK_AGAIN_S
            return None
        return shape

    def _make_segment(self, room: _Room, shape: SegmentShape) -> tuple[SegmentShape, File, File] | None:
        """The largest half, quarter ... of it that the disk has room for."""
        for _ in range(_HALVINGS):
            try:
                return shape, *self._make_files(room, shape)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                with self._lock:
                    self._counts["disk_full"] += 1
            smaller = shape_for(shape.number, shape.cell_bytes, shape.nbytes // 2)
            if smaller is None:
                break
            shape = smaller
        room.no_growth_before = self._clock() + self._recover_after_s
        return None

    def _make_files(self, room: _Room, shape: SegmentShape) -> tuple[File, File]:
        """The superblock last: what has none is no segment, and the next start removes it."""
        cells_path, index_path = segment_paths(room.lane.directory, shape.number)
        try:
            cells = self._device.create(cells_path, shape.cells_bytes)
            index = self._device.create(index_path, shape.index_bytes)
            index.write([memoryview(fmt.pack_segment(shape))], 0)
        except OSError:
            self._remove_files(room, shape)
            raise
        return cells, index

    def _remove_files(self, room: _Room, shape: SegmentShape) -> None:
        for path in reversed(segment_paths(room.lane.directory, shape.number)):
            try:
                self._device.remove(path)
            except OSError as error:
                self._trouble("evict", error)

    def _evict(self, room: _Room, cell_bytes: int) -> bool:
        """One extent leaves, or a whole segment of another size of cell; False where nothing can."""
        with self._lock:
            victim = room.slab.take_victim()
            if victim is None:
                return False
            self._counts["evicted_chunks"] += len(victim.names)
            self._told(room, removed=victim.names)
            whole = victim.segment.shape.cell_bytes != cell_bytes and room.slab.can_remove(victim.segment)
            if whole:
                self._take_segment(room, victim.segment)
        if whole:
            self._remove_files(room, victim.segment.shape)
        else:
            self._erase_extent(room, victim)
            with self._lock:
                room.slab.release(victim)
        return True

    def _take_segment(self, room: _Room, segment: Segment) -> None:
        """Forget a segment; under the lock. Its files are the caller's to remove."""
        names = room.slab.remove(segment)
        self._counts["evicted_chunks"] += len(names)
        self._counts["retired_segments"] += 1
        self._told(room, removed=names)
        room.no_growth_before = 0.0
        del room.files[segment.shape.number]

    def _erase_extent(self, room: _Room, victim: Victim) -> None:
        """Before a cell is filled again its record goes, or an older chunk could come back over a newer one."""
        cells = victim.segment.cells_of(victim.extent)
        index = room.files[victim.segment.shape.number][1]
        room.unsynced.add(victim.segment.shape.number)
        zeros = bytes((cells.stop - cells.start) * RECORD_BYTES)
        try:
            index.write([memoryview(zeros)], RECORDS_OFFSET + cells.start * RECORD_BYTES)
        except OSError as error:
            self._trouble("evict", error)

    def _give_back(self, room: _Room) -> None:
        """Others have less than their share and wish for room: what is above ours goes, oldest first."""
        try:
            with directory_lock(self._root):
                alive, wish = others_alive(self._root, room.lane.number)
        except OSError:  # the directory has gone: the next call finds out
            return
        share = self._max_bytes // (alive + 1)
        while wish and self._device.used_bytes(room.lane.directory) > share:
            with self._making_room:
                with self._lock:
                    segment = room.slab.oldest_segment()
                    if segment is None:
                        return
                    self._take_segment(room, segment)
                room.no_growth_before = self._clock() + _LOOK_AGAIN_S
                self._remove_files(room, segment.shape)

    # --- the directory -------------------------------------------------------------------------------------

    def _open_directory(self) -> None:
        try:
            os.makedirs(self._root, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            found = in_the_way(Path(self._root))
            raise ConfigError(f"path: found a file at {found}, allowed: a directory") from error
        except OSError as error:
            raise StoreError(f"path: found {self._root} unusable ({named(error)}), expected a directory") from error

    def _open_room(self) -> _Room:
        lane = take_lane(self._root, self._namespace)
        found = recover(self._device, lane.directory, self._now_us())
        slab = Slab(lambda slots: load_policy(self._policy, slots))
        settled = [(slab.add(segment.shape, segment.found), segment.found) for segment in found.segments]
        doubles = slab.settle(settled)
        files = {segment.shape.number: (segment.cells, segment.index) for segment in found.segments}
        room = _Room(lane, slab, files, found.next_number, found.next_sequence, set(files))
        flaws = Counter(f"damaged_{flaw}" for flaw in found.flaws)
        flaws["damaged_superblock"] += lane.damaged
        with self._lock:
            self._counts.update(flaws)
        if sum(flaws.values()):
            log.warning("disk tier in %s: %s", lane.directory, ", ".join(f"{n} {k}" for k, n in flaws.items() if n))
        self._erase(room, [slab.at(place) for place in doubles])
        self._shrink(room)
        return room

    def _shrink(self, room: _Room) -> None:
        """What a smaller bound has no room for leaves at start."""
        with suppress(OSError), directory_lock(self._root):
            over = self._device.used_bytes(self._root) - self._max_bytes
            if over > 0:
                over -= retire_idle(self._root, room.lane.number, self._namespace, over, room.slab.oldest_use_us())
            while over > 0 and (segment := room.slab.oldest_segment()) is not None:
                with self._lock:
                    self._take_segment(room, segment)
                self._remove_files(room, segment.shape)
                over = self._device.used_bytes(self._root) - self._max_bytes

    def _open(self) -> _Room | None:
        """The lane, with what is due every now and then done; None where there is none to be had."""
        room = self._room
        if room is None or not room.lane.is_linked():
            room = self._open_again(room)
        if room is not None and self._clock() >= self._keep_next and self._keeping.acquire(blocking=False):
            try:
                self._keep_next = self._clock() + self._keep_s
                self._keep(room)
                self._give_back(room)
            finally:
                self._keeping.release()
        return room

    def _open_again(self, gone: _Room | None) -> _Room | None:
        """The directory was removed. The path itself may be a mount point that is away: not ours to make."""
        with self._making_room:
            if self._closed or self._room is not gone:
                return self._room
            with self._lock:
                self._room = None
                self._counts["directory_gone"] += gone is not None
                self._tell_all()
            try:
                room = self._open_room()
            except (OSError, StoreError) as error:
                self._trouble("open", error if isinstance(error, OSError) else OSError(errno.EIO, str(error)))
                return None
            with self._lock:
                self._room = room
                self._tell_all()
            return room

    def _keep(self, room: _Room) -> None:
        """Recency goes to disk."""
        with self._lock:
            changed = [s for s in room.slab.segments.values() if s.recency_changed]
            pages = [(s, room.slab.recency(s)) for s in changed]
            for segment in changed:
                segment.recency_changed = False
        for segment, recency in pages:
            files = room.files.get(segment.shape.number)
            if files is None:
                continue
            try:
                files[1].write([memoryview(recency)], segment.shape.recency_offset)
            except OSError as error:
                self._trouble("keep", error)

    def _probe_direct_io(self, required: bool) -> bool:
        path = f"{self._root}/{os.urandom(8).hex()}.probe"
        error = try_direct_io(path)
        if error is None:
            return True
        if required:
            raise ConfigError(
                f"direct_io: found direct I/O refused in {self._root} ({named(error)}), allowed: 'auto' or 'off', "
                "or another file system"
            ) from error
        self._say_buffered(error)
        return False

    def _say_buffered(self, error: OSError) -> None:
        log.warning("disk tier: direct I/O does not work in %s (%s); using buffered I/O", self._root, named(error))

    # --- words ---------------------------------------------------------------------------------------------

    def _now_us(self) -> int:
        return int(self._wall_clock() * 1e6)

    def _told(self, room: _Room, added: Iterable[int] = (), removed: Iterable[int] = ()) -> None:
        """Under the lock, so that changes are told in the order in which they happen."""
        if self._tell is not None and room is self._room:
            self._tell(KeyChange(np.array(list(added), np.uint64), np.array(list(removed), np.uint64)))

    def _tell_all(self) -> None:
        if self._tell is not None:
            names = self._room.slab.index.items()[0] if self._room is not None else _NO_NAMES
            self._tell(KeyChange(names.copy(), _NO_NAMES, reset=True))

    def _trouble(self, verb: str, error: OSError) -> Outcome:
        with self._lock:
            self._counts[f"{verb}_failures"] += 1
        return self._complaints.hear(verb, error)


def _sizes(headers: Sequence[memoryview], views: Sequence[memoryview]) -> list[int]:
    """Bytes of each chunk."""
    return list(map(operator.add, map(len, headers), map(len, views)))


def _is_same(chunk: Chunk, call: _Call, i: int) -> bool:
    """Whether what is stored has the same header: its checksums say that the payload is the same too."""
    told = int(chunk.segment.header_checksums[chunk.cell])
    return told == call.header_checksums[i] and chunk.nbytes == call.sizes[i]


def _single(run: Run) -> Iterator[Run]:
    """Each cell for itself."""
    return (Run(run.segment, run.cell + i, [member]) for i, member in enumerate(run.members))


def _readable(run: Run, sizes: Sequence[int], outcomes: list[Outcome]) -> Iterable[Run]:
    """What of a run one call each can read: all at once where every chunk fills its cell, as it mostly does.

    A chunk that is not as long as it is asked for is CORRUPT.
    """
    cell_bytes, slack = run.segment.shape.cell_bytes, run.segment.slack[run.cells].tolist()
    wrong = [i for i, less in zip(run.members, slack, strict=True) if sizes[i] != cell_bytes - less]
    for i in wrong:
        outcomes[i] = Outcome.CORRUPT
    if not wrong and not any(slack):
        return (run,)
    return [part for part in _single(run) if part.members[0] not in wrong]


def _writable(run: Run, sizes: Sequence[int]) -> Iterable[Run]:
    """What of a run one call each can write: all at once where every chunk fills its cell."""
    cell_bytes = run.segment.shape.cell_bytes
    return (run,) if all(sizes[i] == cell_bytes for i in run.members) else _single(run)


def _by_segment(found: Sequence[tuple[int, Chunk]]) -> Iterator[list[tuple[int, Chunk]]]:
    groups: dict[int, list[tuple[int, Chunk]]] = {}
    for name, chunk in found:
        groups.setdefault(chunk.segment.shape.number, []).append((name, chunk))
    yield from groups.values()
