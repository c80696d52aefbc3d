"""A ChunkStore of one file per chunk, in a directory on any POSIX file system.

In: keys, headers and payloads. Out: the same bytes under the same key, or an outcome per key. Never: a look inside
a chunk, a file under its final name that is not whole, more than its bound of bytes on disk.

What lies where is in ``files_folder``. A file is written under a name that no other writer can have, then renamed.
There is no fsync: after a power cut a file may be there whose bytes are not, which does not verify and is a miss. A
file that is evicted while somebody reads it stays readable to him until he closes it, so eviction need not know who
reads what.

The bound counts whole pages of every file in the directory, including what other processes and earlier versions
left there. Own files are counted exactly and before they are written; those of other processes on the same
directory by a scan every ``scan_interval_s``, so with several writers the bound may be exceeded by what the others
write within one interval. What was used longest ago goes first, whatever its namespace.
"""

from __future__ import annotations

import errno
import itertools
import logging
import mmap
import os
import re
import stat
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import xxhash

from orlop.core import PAGE_BYTES, Outcome, align_up
from orlop.errors import ConfigError, InvariantError, StoreError
from orlop.stores.files_folder import LAYOUT_VERSION, LEFTOVER_AGE_S, LOCK_SUFFIX, FilesFolder, tree_bytes
from orlop.stores.posix import (
    FULL,
    GONE,
    NO_DIRECT_IO,
    Complaints,
    aligned,
    entries,
    in_the_way,
    move_all,
    named,
    try_lock,
)
from orlop.tiering.base import ChunkStore, StoredChunk

log = logging.getLogger(__name__)

MIN_BYTES = 1 << 20

_VERSION_NAME = re.compile(r"v\d+")
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_KEY_LOCKS = 64
_CACHED_ANSWERS = 1 << 16
_EVICTION_FAILURES = 32
"""Files that one call may find unremovable before it gives up making room."""


@dataclass(slots=True)
class _Entry:
    """What is known of one chunk. Times are wall-clock seconds; ``marked`` is the one on disk (mtime)."""

    nbytes: int
    last_use: float
    marked: float


class FilesStore(ChunkStore):
    """One file per chunk under ``path``; any method from any thread.

    ``max_bytes`` bounds the directory. ``direct_io``: "auto" tries at start and falls back to buffered I/O with one
    warning, "on" refuses a start without it, "off" never uses it. Answers of ``contains`` are at most
    ``contains_ttl_s`` old. ``clock`` is monotonic, ``wall_clock`` that of the file system's times, both seconds.
    Until the first scan of the directory is over, writes wait until ``scan_wait_s`` after the start and answer
    UNAVAILABLE from then on; reads work from the beginning.

    ``ConfigError``: settings that can never work, the setting first. ``StoreError``: the directory cannot be used now.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int,
        direct_io: Literal["auto", "on", "off"] = "auto",
        contains_ttl_s: float = 2.0,
        scan_interval_s: float = 60.0,
        scan_wait_s: float = 5.0,
        touch_interval_s: float = 60.0,
        leftover_age_s: float = LEFTOVER_AGE_S,
        recover_after_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        if max_bytes < MIN_BYTES:
            raise ConfigError(f"bytes: found {max_bytes}, allowed: {MIN_BYTES} or more")
        if direct_io not in ("auto", "on", "off"):
            raise ConfigError(f"direct_io: found {direct_io!r}, allowed: 'auto', 'on' or 'off'")
        self._path = Path(path)
        self._folder = FilesFolder(path)
        self._root = self._folder.root
        self._max_bytes = max_bytes
        self._touch_interval_s = touch_interval_s
        self._leftover_age_s = leftover_age_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._key_locks = [threading.Lock() for _ in range(_KEY_LOCKS)]
        self._eviction_lock = threading.Lock()
        self._lock = threading.Lock()  # guards the fields from here to the next blank line; taken last
        self._index: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._indexed_bytes = 0
        self._arriving_bytes = 0
        self._foreign_bytes = 0
        self._squeeze = _Squeeze(max_bytes, recover_after_s, clock)
        self._counts: Counter[str] = Counter()

        self._tell_removal: Callable[[bytes], None] = _nobody
        self._complaints = Complaints(f"files tier in {path}", clock)
        self._answers = _Answers(contains_ttl_s, clock)
        self._open_directory()
        self._writer = _Writer(self._folder.tmp)
        self._direct = direct_io != "off" and self._probe_direct_io(required=direct_io == "on")
        self._scan_wait_until = time.monotonic() + scan_wait_s
        self._scanned = threading.Event()
        self._closing = threading.Event()
        self._scan_lock = threading.Lock()
        self._keeper = threading.Thread(target=self._keep, args=(scan_interval_s,), name="orlop-files", daemon=True)
        self._keeper.start()

    # --- the five verbs ------------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [self._contains(key) for key in keys]

    def read_into(
        self, keys: Sequence[bytes], headers: Sequence[memoryview], views: Sequence[memoryview]
    ) -> Sequence[Outcome]:
        outcomes = [self._read(*chunk) for chunk in zip(keys, headers, views, strict=True)]
        self.touch([key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.OK])
        return outcomes

    def write(
        self, keys: Sequence[bytes], headers: Sequence[memoryview], views: Sequence[memoryview]
    ) -> Sequence[Outcome]:
        if not self._scanned.wait(max(0.0, self._scan_wait_until - time.monotonic())):
            return [Outcome.UNAVAILABLE] * len(keys)
        outcomes = [self._write(*chunk) for chunk in zip(keys, headers, views, strict=True)]
        self.touch([key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.OK])
        return outcomes

    def delete(self, keys: Sequence[bytes]) -> int:
        return sum(self._delete(key) for key in keys)

    def scan(self) -> Iterator[StoredChunk]:
        """All chunks of all namespaces, from the directory. ``nbytes`` includes the header."""
        return self._folder.scan(self._wall_clock())

    def touch(self, keys: Sequence[bytes]) -> None:
        """The keys were of use, the first of them most: it is the start of the prefix that the others extend."""
        now = self._wall_clock()
        for key in reversed(keys):
            if self._move_to_end(key, now):
                with suppress(OSError):
                    os.utime(self.path_of(key), (now, now))

    def watch_removals(self, tell: Callable[[bytes], None]) -> None:
        self._tell_removal = tell

    def stats(self) -> Mapping[str, float]:
        with self._lock:
            return {
                "bytes": self._used(),
                "foreign_bytes": self._foreign_bytes,
                "limit_bytes": self._squeeze.limit(),
                "chunks": len(self._index),
                "direct_io": float(self._direct),
                "counted": float(self._scanned.is_set()),
                **self._counts,
            }

    def close(self) -> None:
        """Stop scanning and let other writers know that this one is gone; idempotent."""
        self._closing.set()
        self._keeper.join(timeout=5.0)
        self._writer.close()

    def path_of(self, key: bytes) -> str:
        """Where the chunk of ``key`` lies, or would lie."""
        return self._folder.path_of(key)

    # --- contains, delete ----------------------------------------------------------------------------

    def _contains(self, key: bytes) -> bool:
        known = self._answers.get(key)
        if known is None:
            known = _regular_size(self.path_of(key)) is not None
            self._answers.put(key, known)
        return known

    def _delete(self, key: bytes) -> bool:
        with self._key_lock(key):
            try:
                os.unlink(self.path_of(key))
            except OSError as error:
                if error.errno in GONE:
                    self._forget(key)
                else:
                    self._trouble("delete", error)
                return False
            self._forget(key)
            return True

    # --- reading -------------------------------------------------------------------------------------

    def _read(self, key: bytes, header: memoryview, view: memoryview) -> Outcome:
        try:
            outcome = self._read_file(self.path_of(key), header, view)
        except OSError as error:
            outcome = Outcome.MISSING if error.errno in GONE else self._trouble("read", error)
        if outcome is Outcome.MISSING:
            self._vanished(key)
        return outcome

    def _read_file(self, path: str, header: memoryview, view: memoryview) -> Outcome:
        if not (self._direct and aligned(header, view)):
            return _read_whole(path, 0, header, view)
        try:
            return _read_whole(path, _O_DIRECT, header, view)
        except OSError as error:
            if error.errno not in NO_DIRECT_IO:
                raise
            outcome = _read_whole(path, 0, header, view)
            if outcome is Outcome.OK:
                self._fall_back(error)
            return outcome

    # --- writing -------------------------------------------------------------------------------------

    def _write(self, key: bytes, header: memoryview, view: memoryview) -> Outcome:
        nbytes = align_up(len(header) + len(view))
        if not self._make_room(nbytes):
            self._trouble("write", OSError(errno.ENOSPC, "no chunk can be evicted for room under the bound"))
            return Outcome.NO_SPACE
        try:
            self._write_with_retry(key, header, view, nbytes)
        except OSError as error:
            return self._trouble("write", error)
        finally:
            with self._lock:
                self._arriving_bytes -= nbytes
        self._answers.put(key, True)
        return Outcome.OK

    def _write_with_retry(self, key: bytes, header: memoryview, view: memoryview, nbytes: int) -> None:
        try:
            self._write_file(key, header, view, nbytes)
        except OSError as error:
            if error.errno in FULL:
                self._disk_full(nbytes)
            elif error.errno in GONE:
                self._directory_gone()
            else:
                raise
            self._write_file(key, header, view, nbytes)

    def _write_file(self, key: bytes, header: memoryview, view: memoryview, nbytes: int) -> None:
        temporary = self._writer.new_name()
        try:
            self._publish(key, temporary, nbytes, self._fill(temporary, header, view))
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _fill(self, path: str, header: memoryview, view: memoryview) -> float:
        """The time that the file system has given it."""
        if not (self._direct and aligned(header, view)):
            return _write_whole(path, 0, header, view)
        try:
            return _write_whole(path, _O_DIRECT, header, view)
        except OSError as error:
            if error.errno not in NO_DIRECT_IO:
                raise
            with suppress(OSError):
                os.unlink(path)
            mtime = _write_whole(path, 0, header, view)
            self._fall_back(error)
            return mtime

    def _publish(self, key: bytes, temporary: str, nbytes: int, mtime: float) -> None:
        path = self.path_of(key)
        with self._key_lock(key):
            try:
                os.rename(temporary, path)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                os.rename(temporary, path)
            self._learn(key, _Entry(nbytes, self._wall_clock(), mtime))

    # --- room ----------------------------------------------------------------------------------------

    def _make_room(self, nbytes: int) -> bool:
        """Reserve ``nbytes`` under the bound, evicting for it; False where that cannot be."""
        if self._reserve(nbytes):
            return True
        with self._lock:
            if self._foreign_bytes + nbytes > self._squeeze.limit():
                return False  # not even an empty cache would do
        with self._eviction_lock:
            for _ in self._evictions():
                if self._reserve(nbytes):
                    return True
            return self._reserve(nbytes)

    def _reserve(self, nbytes: int) -> bool:
        with self._lock:
            if self._used() + nbytes > self._squeeze.limit():
                return False
            self._arriving_bytes += nbytes
            return True

    def _evictions(self) -> Iterator[int]:
        """Evict chunk by chunk, yielding the bytes of each, until none is left or too many cannot be removed.

        A file that another process has used since is not a victim, and not a failure; it costs one look.
        """
        failures = looks = 0
        while failures < _EVICTION_FAILURES:
            with self._lock:
                key = next(iter(self._index), None)
                limit = len(self._index)
            if key is None or looks > limit:
                return
            freed = self._evict(key)
            looks = 0 if freed else looks + 1
            failures += freed is None
            if freed:
                yield freed

    def _evict(self, key: bytes) -> int | None:
        """Bytes freed; 0 where the chunk was spared or had gone, None where it cannot be removed."""
        path = self.path_of(key)
        with self._key_lock(key):
            entry = self._index.get(key)
            if entry is None:
                return 0
            try:
                used = os.stat(path).st_mtime
                if used > entry.marked + 1.0 and used <= self._wall_clock():
                    self._spare(key, entry, used)
                    return 0
                os.unlink(path)
            except OSError as error:
                if error.errno not in GONE:
                    self._spare(key, entry, entry.marked)
                    self._trouble("evict", error)
                    return None
            self._forget(key)
            with self._lock:
                self._counts["evicted_chunks"] += 1
            self._tell_removal(key)
            return entry.nbytes

    def _spare(self, key: bytes, entry: _Entry, marked: float) -> None:
        with self._lock:
            entry.marked = marked
            self._index.move_to_end(key)

    def _disk_full(self, nbytes: int) -> None:
        """The disk is full below our bound: lower it for a while and make room for one more try."""
        with self._lock:
            self._squeeze.tighten(self._used() - nbytes)
            self._counts["disk_full"] += 1
        wanted = 2 * nbytes  # the file system's own needs come on top of the chunk's
        with self._eviction_lock:
            for freed in self._evictions():
                wanted -= freed
                if wanted <= 0:
                    return

    # --- the books -----------------------------------------------------------------------------------

    def _key_lock(self, key: bytes) -> threading.Lock:
        """Held while the file of ``key`` appears or goes together with its entry."""
        return self._key_locks[xxhash.xxh3_64_intdigest(key) % _KEY_LOCKS]

    def _used(self) -> int:
        return self._indexed_bytes + self._arriving_bytes + self._foreign_bytes

    def _learn(self, key: bytes, entry: _Entry) -> None:
        with self._lock:
            old = self._index.pop(key, None)
            self._index[key] = entry
            self._indexed_bytes += entry.nbytes - (old.nbytes if old else 0)

    def _forget(self, key: bytes) -> None:
        self._answers.put(key, False)
        with self._lock:
            old = self._index.pop(key, None)
            self._indexed_bytes -= old.nbytes if old else 0

    def _vanished(self, key: bytes) -> None:
        """A read found nothing: somebody else may have removed the file."""
        with self._key_lock(key):
            if _regular_size(self.path_of(key)) is None:
                self._forget(key)
                self._tell_removal(key)

    def _move_to_end(self, key: bytes, now: float) -> bool:
        """Note a use; whether it is time to note it on disk as well."""
        with self._lock:
            entry = self._index.get(key)
            if entry is None:
                return True  # the scan has not met it yet, and shall find it used
            self._index.move_to_end(key)
            entry.last_use = now
            if abs(now - entry.marked) < self._touch_interval_s:
                return False
            entry.marked = now
            return True

    def check(self) -> None:
        """Recount from the directory; ``InvariantError`` where the books differ. For a quiet store only."""
        found = {key: align_up(entry.stat().st_size) for key, entry in self._folder.chunks()}
        with self._lock:
            booked = {key: entry.nbytes for key, entry in self._index.items()}
            totals = (self._indexed_bytes, self._arriving_bytes)
        if found != booked:
            odd = sorted(key.hex() for key in found.keys() ^ booked.keys())
            raise InvariantError(f"found {len(found)} chunks on disk, {len(booked)} in the books; differing: {odd[:3]}")
        if totals != (sum(found.values()), 0):
            raise InvariantError(
                f"found {sum(found.values())} bytes on disk, (indexed, arriving) in the books {totals}"
            )

    # --- the keeper: scans and leftovers -----------------------------------------------------------------

    def _keep(self, interval_s: float) -> None:
        while not self._closing.is_set():
            try:
                self.rescan()
            except Exception:
                log.exception("files tier: scanning %s failed", self._path)
            self._closing.wait(interval_s)

    def rescan(self) -> None:
        """Bring the books up to date with what others did in the directory, and collect what dead writers left."""
        with self._scan_lock:
            collected = self._folder.collect_leftovers(self._writer.token, self._leftover_age_s, self._wall_clock())
            foreign = self._foreign_elsewhere()
            with self._lock:
                unseen = set(self._index)
            for key, entry in self._folder.walk(remove_empty=True):
                if self._closing.is_set():
                    return
                if key is None:
                    foreign += tree_bytes(entry.path)
                elif key in unseen:
                    unseen.remove(key)
                else:
                    self._discover(key, entry.path)
            for key in unseen:
                self._vanished(key)
            with self._lock:
                self._foreign_bytes = foreign
                self._counts["leftovers_collected"] += len(collected)
            if not self._scanned.is_set():
                self._sort_by_use()
                self._scanned.set()
        self._shrink()

    def _discover(self, key: bytes, path: str) -> None:
        with self._key_lock(key), suppress(OSError):
            if key not in self._index:
                found = os.stat(path)
                used = min(found.st_mtime, self._wall_clock())  # a clock that was ahead must not make it immortal
                self._learn(key, _Entry(align_up(found.st_size), used, used))

    def _sort_by_use(self) -> None:
        with self._lock:
            self._index = OrderedDict(sorted(self._index.items(), key=lambda item: item[1].last_use))

    def _foreign_elsewhere(self) -> int:
        """Bytes outside our layout that count and are not ours to evict: other versions, other writers' files."""
        others = (e for e in entries(self._path) if _VERSION_NAME.fullmatch(e.name) and e.name != LAYOUT_VERSION)
        return self._writer.bytes_of_others() + sum(tree_bytes(entry.path) for entry in others)

    def _shrink(self) -> None:
        """Evict until what is there is under the bound: it was lowered, or others have written."""
        with self._eviction_lock:
            for _ in itertools.chain((0,), self._evictions()):
                with self._lock:
                    if self._used() <= self._squeeze.limit():
                        return

    # --- start, trouble ----------------------------------------------------------------------------------

    def _open_directory(self) -> None:
        try:
            with suppress(FileNotFoundError):
                os.stat(self._root)  # says what is wrong with a path that is too long to make
            os.makedirs(self._root, exist_ok=True)
            os.scandir(self._root).close()
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(
                f"path: found a file at {in_the_way(self._root)}, allowed: a directory, or where one can be made"
            ) from error
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise ConfigError(
                    f"path: found one of {len(str(self._path))} characters, allowed: what the file system takes "
                    f"({named(error)})"
                ) from error
            raise StoreError(
                f"path: found {self._path} unusable ({named(error)}), expected a directory that can be created, "
                "read and written; check the path, its owner and the mount"
            ) from error

    def _probe_direct_io(self, *, required: bool) -> bool:
        """Try one page for real: some file systems accept the flag and refuse, or lose, the bytes."""
        error = self._try_direct_io() if _O_DIRECT else OSError(errno.EOPNOTSUPP, "no O_DIRECT on this platform")
        if error is None:
            return True
        if error.errno in (*FULL, errno.EACCES, errno.EROFS):
            return True  # says nothing of direct I/O; should it fail later, the fall-back comes then
        if required:
            raise ConfigError(
                f"direct_io: found 'on' and direct I/O refused in {self._path} ({named(error)}), allowed: 'auto' or "
                "'off', or another file system"
            ) from error
        self._say_buffered(error)
        return False

    def _try_direct_io(self) -> OSError | None:
        page, back = (memoryview(mmap.mmap(-1, PAGE_BYTES)) for _ in range(2))
        page[:] = os.urandom(PAGE_BYTES)
        try:
            path = self._writer.new_name()
            try:
                _write_whole(path, _O_DIRECT, page)
                outcome = _read_whole(path, _O_DIRECT, back)
            finally:
                with suppress(OSError):
                    os.unlink(path)
        except OSError as error:
            return error
        if outcome is not Outcome.OK or page != back:
            return OSError(errno.EIO, "the bytes that were written did not come back")
        return None

    def _fall_back(self, error: OSError) -> None:
        """Direct I/O failed where buffered I/O works: go on with that."""
        with self._lock:
            direct, self._direct = self._direct, False
        if direct:
            self._say_buffered(error)

    def _say_buffered(self, error: OSError) -> None:
        log.warning("files tier: direct I/O does not work in %s (%s); using buffered I/O", self._path, named(error))

    def _directory_gone(self) -> None:
        """Make again what is below ``path``. The path itself may be a mount point that is away: not ours to make."""
        self._root.mkdir(exist_ok=True)
        self._writer.renew()

    def _trouble(self, verb: str, error: OSError) -> Outcome:
        with self._lock:
            self._counts[f"{verb}_failures"] += 1
        return self._complaints.hear(verb, error)


class _Squeeze:
    """The bound, lowered after the disk was full below it, and raised again step by step.

    Full at ``n`` bytes of ours sets it to ``n``; after each ``recover_after_s`` without another such failure it
    rises by a sixteenth of the configured bound. Not thread-safe.
    """

    def __init__(self, max_bytes: int, recover_after_s: float, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._recover_after_s = recover_after_s
        self._clock = clock
        self._limit = max_bytes
        self._since = 0.0

    def tighten(self, nbytes: int) -> None:
        self._limit = max(0, min(self.limit(), nbytes))
        self._since = self._clock()

    def limit(self) -> int:
        if self._limit < self._max_bytes:
            steps = int((self._clock() - self._since) / self._recover_after_s)
            self._since += steps * self._recover_after_s
            self._limit = min(self._max_bytes, self._limit + steps * max(1, self._max_bytes // 16))
        return self._limit


class _Answers:
    """What ``contains`` said, for a bounded time and number of keys."""

    def __init__(self, ttl_s: float, clock: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, tuple[bool, float]] = OrderedDict()  # oldest first

    def get(self, key: bytes) -> bool | None:
        answer = self._known.get(key)
        return None if answer is None or self._clock() - answer[1] >= self._ttl_s else answer[0]

    def put(self, key: bytes, found: bool) -> None:
        with self._lock:
            self._known.pop(key, None)
            self._known[key] = (found, self._clock())
            if len(self._known) > _CACHED_ANSWERS:
                self._known.popitem(last=False)


class _Writer:
    """Names for files being written, that no other writer has.

    A writer is a random token and a lock file that it holds locked; the kernel lets the lock go with the process.
    Claimed at the first use, since a read-only directory can still be read from.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self.token = ""
        self._lock_fd = -1

    def new_name(self) -> str:
        with self._lock:
            if not self.token:
                self._claim()
            return f"{self._directory}/{self.token}-{next(self._numbers):x}"

    def renew(self) -> None:
        """The directory went away, and the lock file with it."""
        with self._lock:
            if not self.token or not os.path.exists(self._lock_path(self.token)):
                self._release()
                self._claim()

    def close(self) -> None:
        with self._lock:
            self._release()

    def bytes_of_others(self) -> int:
        own = f"{self.token}-"
        return sum(tree_bytes(e.path) for e in entries(self._directory) if not (self.token and e.name.startswith(own)))

    def _lock_path(self, token: str) -> str:
        return f"{self._directory}/{token}{LOCK_SUFFIX}"

    def _claim(self) -> None:
        self._directory.mkdir(exist_ok=True)
        while not self.token:
            token = os.urandom(8).hex()
            fd = os.open(self._lock_path(token), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
            # A collector may have met the file between the two calls; then it has it, or has removed it.
            if try_lock(fd) is not False and os.fstat(fd).st_nlink:
                self.token, self._lock_fd = token, fd
            else:
                os.close(fd)

    def _release(self) -> None:
        if self.token:
            with suppress(OSError):
                os.unlink(self._lock_path(self.token))
            os.close(self._lock_fd)
            self.token = ""


# --- the file system -------------------------------------------------------------------------------------


def _write_whole(path: str, flags: int, *buffers: memoryview) -> float:
    """A new file of just these bytes; its mtime."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | flags, 0o666)
    try:
        move_all(os.pwritev, fd, buffers)
        found = os.fstat(fd)
        if found.st_size != sum(map(len, buffers)):
            raise OSError(errno.EIO, "the file is shorter than what was written")
        return found.st_mtime
    except EOFError as error:
        raise OSError(errno.EIO, "a write wrote nothing") from error
    finally:
        os.close(fd)


def _read_whole(path: str, flags: int, *buffers: memoryview) -> Outcome:
    """Fill the buffers from a file of exactly their length. MISSING is left to the caller's ``OSError``."""
    # O_NONBLOCK: nothing but a regular file may lie there, and anything else must not block the opening.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size != sum(map(len, buffers)):
            return Outcome.CORRUPT
        move_all(os.preadv, fd, buffers)
    except EOFError:
        return Outcome.CORRUPT
    finally:
        os.close(fd)
    return Outcome.OK


def _regular_size(path: str) -> int | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _nobody(key: bytes) -> None:
    """For a store whose removals nobody watches."""
