"""The files store on real directories: the suite of every store, and what only files can go through."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orlop.config import FILES_BYTES_AT_LEAST
from orlop.core import Outcome, align_up
from orlop.errors import ConfigError, InvariantError, StoreError
from orlop.stores import files as files_module
from orlop.stores.files import FilesStore
from orlop.stores.files_folder import FilesFolder
from orlop.testing.stores import (
    CHUNK_BYTES,
    PAYLOAD_BYTES,
    ChunkStoreSuite,
    OpenStore,
    buffer,
    read,
    store_key,
    write,
)
from orlop.tiering.base import ChunkStore

MIB = 1 << 20
WAIT_S = 120.0
ROOT = os.geteuid() == 0


class Clock:
    """A clock that is cranked by hand."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., FilesStore]]:
    """Opens stores on one directory that are closed in the end; scans come only when asked for."""
    opened: list[FilesStore] = []

    def open_store(path: Path = tmp_path / "tier", **settings: object) -> FilesStore:
        options: dict[str, object] = {"max_bytes": 64 * MIB, "scan_interval_s": 1e6, "scan_wait_s": WAIT_S}
        store = FilesStore(path, **{**options, **settings})  # type: ignore[arg-type]
        opened.append(store)
        return store

    yield open_store
    for store in opened:
        store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB of its own."""
    if not ROOT:
        pytest.skip("needs root, to mount a tmpfs")
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "orlop-test", path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"needs a tmpfs to be mounted: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def disk_bytes(path: Path) -> int:
    return sum(align_up(p.stat().st_size) for p in path.rglob("*") if p.is_file())


class TestFiles(ChunkStoreSuite):
    @pytest.fixture(params=["auto", "off"])
    def open_store(self, request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
        return lambda max_bytes: FilesStore(tmp_path / "tier", max_bytes=max_bytes, direct_io=request.param)

    def resize(self, store: ChunkStore, key: bytes, nbytes: int) -> None:
        assert isinstance(store, FilesStore)
        os.truncate(store.path_of(key), nbytes)

    @pytest.fixture
    def store(self, open_store: OpenStore) -> Iterator[ChunkStore]:
        store = open_store(64 * MIB)
        assert isinstance(store, FilesStore)
        yield store
        store.check()
        store.close()


# --- the bound --------------------------------------------------------------------------------------


@pytest.mark.fault("B108")
@pytest.mark.fault("B119")
def test_other_versions_and_namespaces_count_and_unknown_versions_stay(
    make: Callable[..., FilesStore], tmp_path: Path
) -> None:
    newer = tmp_path / "tier" / "v9" / "deep" / "file"
    newer.parent.mkdir(parents=True)
    newer.write_bytes(bytes(MIB - 5))
    (tmp_path / "tier" / "somebody's file").write_bytes(bytes(100))
    limit = 3 * MIB
    for restart in range(3):
        store = make(max_bytes=limit)
        for n in range(60):
            assert write(store, [store_key(n, restart)], [n], 16 * 4096) == [Outcome.OK]
            assert disk_bytes(tmp_path / "tier") - 4096 <= limit
        assert store.stats()["foreign_bytes"] == MIB
        store.check()
        store.close()
    assert newer.stat().st_size == MIB - 5
    # The oldest run went first and wholly.
    assert {chunk.key[15] for chunk in make(max_bytes=limit).scan()} == {2}


@pytest.mark.fault("B110")
@pytest.mark.fault("B112")
@pytest.mark.parametrize("by", ["delete", "hand"])
def test_the_books_survive_removals(make: Callable[..., FilesStore], by: str) -> None:
    store = make(max_bytes=100 * CHUNK_BYTES)
    number = 0
    for _ in range(50):
        keys = [store_key(number + n) for n in range(10)]
        number += 10
        assert write(store, keys, [1] * 10) == [Outcome.OK] * 10
        if by == "delete":
            assert store.delete(keys) == 10
            store.check()
        else:
            for key in keys:
                os.unlink(store.path_of(key))
    assert write(store, [store_key(number + n) for n in range(10)], [1] * 10) == [Outcome.OK] * 10
    if by == "hand":
        with pytest.raises(InvariantError, match="10 chunks on disk, 100 in the books"):
            store.check()
        store.rescan()
    store.check()
    assert store.stats()["bytes"] == 10 * CHUNK_BYTES


def test_a_read_of_what_was_removed_by_hand_corrects_the_books(make: Callable[..., FilesStore]) -> None:
    store = make()
    write(store, [store_key(1)], [1])
    os.unlink(store.path_of(store_key(1)))
    assert read(store, [store_key(1)]) == [(Outcome.MISSING, None)]
    store.check()


def test_the_least_recently_used_goes_first_and_recency_survives_a_restart(make: Callable[..., FilesStore]) -> None:
    wall = Clock(1e9)
    keys = [store_key(n) for n in range(64)]
    store = make(max_bytes=64 * CHUNK_BYTES, wall_clock=wall)
    for key in keys:
        write(store, [key], [1])
        os.utime(store.path_of(key), (wall.now, wall.now))
    store.close()
    wall.now += 100
    store = make(max_bytes=64 * CHUNK_BYTES, wall_clock=wall)
    read(store, keys[:4])
    store.touch(keys[4:8])
    store.close()
    wall.now += 100
    store = make(max_bytes=64 * CHUNK_BYTES, wall_clock=wall)
    for n in range(56):
        write(store, [store_key(100 + n)], [1])
    assert list(store.contains(keys)) == [True] * 8 + [False] * 56
    store.check()


def test_of_one_batch_the_last_goes_first_since_it_extends_the_others(make: Callable[..., FilesStore]) -> None:
    store = make(max_bytes=52 * CHUNK_BYTES)
    keys = [store_key(n) for n in range(52)]
    write(store, keys, [1] * 52)
    write(store, [store_key(100), store_key(101)], [1, 1])
    assert list(store.contains(keys)) == [True] * 50 + [False] * 2


def test_what_another_process_used_since_is_spared(make: Callable[..., FilesStore]) -> None:
    wall = Clock(2e9)
    store = make(max_bytes=52 * CHUNK_BYTES, wall_clock=wall)
    keys = [store_key(n) for n in range(52)]
    for key in keys:
        write(store, [key], [1])
    used = os.stat(store.path_of(keys[0])).st_mtime + 100
    os.utime(store.path_of(keys[0]), (used, used))
    wall.now += 1000
    write(store, [store_key(100)], [1])
    assert list(store.contains(keys[:3])) == [True, False, True]


@pytest.mark.fault("B124")
@pytest.mark.parametrize("all_of_them", [False, True])
def test_what_cannot_be_removed_does_not_stop_eviction(make: Callable[..., FilesStore], all_of_them: bool) -> None:
    store = make(max_bytes=52 * CHUNK_BYTES)
    keys = [store_key(n) for n in range(52)]
    for key in keys:
        write(store, [key], [1])
    for key in keys if all_of_them else keys[:3]:
        path = store.path_of(key)
        os.unlink(path)
        os.mkdir(path)  # unlink refuses a directory, whoever asks
        os.utime(path, (1, 1))
    expected = Outcome.NO_SPACE if all_of_them else Outcome.OK
    assert write(store, [store_key(100)], [1]) == [expected]
    assert 3 <= store.stats()["evict_failures"] <= 32
    if not all_of_them:
        assert list(store.contains(keys[3:5])) == [False, True]


def test_a_smaller_bound_after_a_restart_is_reached_by_the_scan(
    make: Callable[..., FilesStore], tmp_path: Path
) -> None:
    store = make()
    write(store, [store_key(n) for n in range(100)], [1] * 100)
    store.close()
    store = make(max_bytes=MIB)
    assert write(store, [store_key(100)], [1]) == [Outcome.OK]
    assert disk_bytes(tmp_path / "tier") <= MIB
    store.check()


def test_nothing_is_written_before_what_is_there_is_known(
    make: Callable[..., FilesStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make()
    write(store, [store_key(1)], [1])
    store.close()
    go_on = threading.Event()
    walk = FilesFolder.walk

    def slow_walk(self: FilesFolder, **options: bool) -> Iterator[tuple[bytes | None, os.DirEntry[str]]]:
        assert go_on.wait(timeout=WAIT_S)
        yield from walk(self, **options)

    monkeypatch.setattr(FilesFolder, "walk", slow_walk)
    store = make(scan_wait_s=0.0)
    assert write(store, [store_key(2)], [2]) == [Outcome.UNAVAILABLE]
    assert read(store, [store_key(1)]) == [(Outcome.OK, 1)]
    go_on.set()
    store.rescan()
    assert write(store, [store_key(2)], [2]) == [Outcome.OK]
    store.check()


@pytest.mark.fault("B123")
def test_keys_fan_out_evenly_even_where_they_begin_alike(make: Callable[..., FilesStore]) -> None:
    store = make()
    directories: dict[str, int] = {}
    for n in range(40_000):
        directory = os.path.dirname(store.path_of(store_key(n)))
        directories[directory] = directories.get(directory, 0) + 1
    assert max(directories.values()) < 40


@pytest.mark.fault("B119")
def test_empty_directories_go(make: Callable[..., FilesStore], tmp_path: Path) -> None:
    store = make()
    keys = [store_key(n) for n in range(50)]
    write(store, keys, [1] * 50)
    store.delete(keys)
    store.rescan()
    store.rescan()
    assert [p.name for p in (tmp_path / "tier" / "v1").iterdir()] == ["tmp"]
    assert write(store, keys, [1] * 50) == [Outcome.OK] * 50


# --- whole or not at all ------------------------------------------------------------------------------


def fail_one_write(monkeypatch: pytest.MonkeyPatch, nth: int, fail: Callable[[int], int]) -> None:
    """Let the ``nth`` vectored write from now on do half of its work and then ``fail``."""
    real, count = os.pwritev, iter(range(1_000_000))

    def pwritev(fd: int, buffers: list[memoryview], offset: int) -> int:
        if next(count) < nth:
            return real(fd, buffers, offset)
        if offset == 0:
            return real(fd, [buffers[0]], offset)
        monkeypatch.setattr(os, "pwritev", real)
        return fail(fd)

    monkeypatch.setattr(os, "pwritev", pwritev)


def io_error(fd: int) -> int:
    raise OSError(errno.EIO, "broken")


@pytest.mark.fault("B113")
@pytest.mark.fault("B126")
@pytest.mark.parametrize(
    "fail", [io_error, lambda fd: 0, lambda fd: PAYLOAD_BYTES], ids=["error", "short", "said and not done"]
)
def test_a_failed_write_is_not_visible(
    make: Callable[..., FilesStore], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fail: Callable[[int], int]
) -> None:
    store = make()
    keys = [store_key(n) for n in range(20)]
    fail_one_write(monkeypatch, 7, fail)
    expected = [Outcome.IO_ERROR if n == 7 else Outcome.OK for n in range(20)]
    assert write(store, keys, [1] * 20) == expected
    assert list(store.contains(keys)) == [n != 7 for n in range(20)]
    assert len([p for p in (tmp_path / "tier").rglob("*") if p.is_file() and p.suffix != ".lock"]) == 19
    assert store.stats()["write_failures"] == 1
    store.check()


@pytest.mark.fault("B128")
def test_a_call_that_moves_less_is_continued(make: Callable[..., FilesStore], monkeypatch: pytest.MonkeyPatch) -> None:
    write_some, read_some = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: write_some(fd, [buffers[0][:4096]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: read_some(fd, [buffers[0][:4096]], at))
    store = make()
    assert write(store, [store_key(1)], [1]) == [Outcome.OK]
    assert read(store, [store_key(1)]) == [(Outcome.OK, 1)]


@pytest.mark.fault("B120")
def test_a_directory_or_a_pipe_in_a_chunks_place_is_not_a_chunk(make: Callable[..., FilesStore]) -> None:
    store = make()
    keys = [store_key(n) for n in range(3)]
    write(store, keys, [0, 1, 2])
    for key, make_other in ((keys[0], os.mkdir), (keys[1], os.mkfifo)):
        os.unlink(store.path_of(key))
        make_other(store.path_of(key))
    assert read(store, keys)[2] == (Outcome.OK, 2)
    assert all(outcome in (Outcome.CORRUPT, Outcome.MISSING) for outcome, _ in read(store, keys[:2]))
    assert store.contains(keys[:1]) == [True]  # as of the write, at most the answers' age ago


KILLED_WRITER = """
import os, sys
from orlop.stores import files
from orlop.testing.stores import store_key, write
store = files.FilesStore(sys.argv[1], max_bytes=64 << 20, scan_wait_s=120)
real = os.pwritev
def stuck(fd, buffers, offset):
    real(fd, buffers[:1], offset)
    print("half", flush=True)
    sys.stdin.read()
os.pwritev = stuck
write(store, [store_key(1)], [1])
"""


@pytest.mark.fault("B114")
def test_a_dead_writers_half_goes_and_a_live_writers_stays(make: Callable[..., FilesStore], tmp_path: Path) -> None:
    path = tmp_path / "tier"
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED_WRITER, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"half\n"
        store = make(leftover_age_s=0.0)
        store.rescan()
        halves = [p for p in (path / "v1" / "tmp").iterdir() if p.suffix != ".lock"]
        assert len(halves) == 1
        assert read(store, [store_key(1)]) == [(Outcome.MISSING, None)]
        assert store.stats()["foreign_bytes"] == align_up(halves[0].stat().st_size)
    finally:
        child.kill()
        child.communicate(timeout=WAIT_S)
    store.rescan()
    assert not halves[0].exists()
    assert store.stats()["leftovers_collected"] == 1
    assert store.stats()["foreign_bytes"] == 0
    assert len(list((path / "v1" / "tmp").iterdir())) == 1  # our own lock
    store.close()
    assert not list((path / "v1" / "tmp").iterdir())


TWO_WRITERS = """
import sys
from orlop.stores.files import FilesStore
from orlop.testing.stores import read, store_key, write
first = int(sys.argv[2])
store = FilesStore(sys.argv[1], max_bytes=1 << 20, scan_wait_s=120, scan_interval_s=1e6)
outcomes = set()
for turn in range(150):
    key = store_key((first + turn) % 70)
    outcomes |= set(write(store, [key], [first + turn]))
    outcomes |= {outcome for outcome, fill in read(store, [store_key(turn % 70)]) if fill is None}
    if turn % 50 == 0:
        store.rescan()
store.close()
print(*sorted(outcomes))
"""


@pytest.mark.fault("B108")
@pytest.mark.fault("B112")
def test_two_processes_on_one_directory_do_not_break_each_other(
    make: Callable[..., FilesStore], tmp_path: Path
) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", TWO_WRITERS, tmp_path / "tier", str(first)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for first in (0, 35)
    ]
    said = [child.communicate(timeout=WAIT_S)[0] for child in children]
    assert all(set(words.split()) <= {"ok", "missing"} and "ok" in words for words in said)
    store = make(max_bytes=MIB)
    store.rescan()
    store.check()
    assert disk_bytes(tmp_path / "tier") <= MIB


# --- direct I/O ---------------------------------------------------------------------------------------


@pytest.mark.fault("B121")
@pytest.mark.fault("B126")
@pytest.mark.parametrize("offset", [0, 8, 16, 512])
@pytest.mark.parametrize("nbytes", [1, 511, 4096, 4097])
def test_unaligned_buffers_work_without_giving_direct_io_up(
    make: Callable[..., FilesStore], offset: int, nbytes: int
) -> None:
    store = make()
    direct = store.stats()["direct_io"]
    source, target = buffer(offset + nbytes, 7)[offset:], buffer(offset + nbytes)[offset:]
    header = buffer(4096, 8)
    assert store.write([store_key(1)], [header], [source]) == [Outcome.OK]
    assert store.read_into([store_key(1)], [buffer(4096)], [target]) == [Outcome.OK]
    assert target == source
    assert store.stats()["direct_io"] == direct


def refuse_direct(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A file system that takes the flag when opening and refuses the transfer."""
    real = getattr(os, call)

    def refuse(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return int(real(fd, buffers, offset))

    monkeypatch.setattr(os, call, refuse)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.fault("B116")
@pytest.mark.fault("B121")
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
@pytest.mark.parametrize("late", [False, True])
def test_refused_direct_io_falls_back_with_one_warning(
    make: Callable[..., FilesStore],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    late: bool,
) -> None:
    if not late:
        refuse_direct(monkeypatch, call)
    store = make()
    if late:
        assert store.stats()["direct_io"] == 1.0
        refuse_direct(monkeypatch, call)
    keys = [store_key(n) for n in range(5)]
    assert write(store, keys, list(range(5))) == [Outcome.OK] * 5
    assert read(store, keys) == [(Outcome.OK, n) for n in range(5)]
    assert store.stats()["direct_io"] == 0.0
    [warning] = warnings_of(caplog)
    assert "EINVAL" in warning
    assert "buffered" in warning
    store.check()


def test_required_direct_io_that_does_not_work_refuses_the_start(
    make: Callable[..., FilesStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct(monkeypatch, "pwritev")
    with pytest.raises(ConfigError, match=r"^direct_io: found .*EINVAL"):
        make(direct_io="on")


def test_direct_io_is_really_used(make: Callable[..., FilesStore], monkeypatch: pytest.MonkeyPatch) -> None:
    store = make()
    if not store.stats()["direct_io"]:
        pytest.skip("needs a temporary directory on a file system with direct I/O")
    flags: list[int] = []
    real = os.pwritev

    def watch(fd: int, buffers: list[memoryview], offset: int) -> int:
        flags.append(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", watch)
    write(store, [store_key(1)], [1])
    assert flags == [os.O_DIRECT]


# --- trouble ------------------------------------------------------------------------------------------


@pytest.mark.fault("B122")
def test_a_full_disk_evicts_retries_and_recovers(
    make: Callable[..., FilesStore], small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    (small_disk / "foreign").write_bytes(bytes(4 * MIB))
    store = make(small_disk / "tier", max_bytes=12 * MIB, clock=clock, recover_after_s=10.0)
    keys = [store_key(n) for n in range(100)]
    for n, key in enumerate(keys):
        assert write(store, [key], [n], 63 * 4096) == [Outcome.OK]
        store.check()
    assert store.stats()["limit_bytes"] <= 4 * MIB
    assert read(store, keys[-8:], 63 * 4096) == [(Outcome.OK, n) for n in range(92, 100)]
    os.unlink(small_disk / "foreign")
    clock.now += 1000.0
    for n, key in enumerate(keys):
        assert write(store, [key], [n], 63 * 4096) == [Outcome.OK]
    assert store.stats()["bytes"] > 6 * MIB
    assert not warnings_of(caplog) or "direct" in warnings_of(caplog)[0]


@pytest.mark.fault("B122")
def test_a_disk_that_is_full_of_others_is_no_space_until_it_is_not(
    make: Callable[..., FilesStore], small_disk: Path
) -> None:
    clock = Clock()
    store = make(small_disk / "tier", max_bytes=4 * MIB, clock=clock)
    filler = small_disk / "foreign"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(bytes(9 * MIB))
    assert write(store, [store_key(1), store_key(2)], [1, 2]) == [Outcome.NO_SPACE] * 2
    store.check()
    filler.unlink()
    clock.now += 1000.0
    assert write(store, [store_key(1)], [1]) == [Outcome.OK]


def test_a_read_only_disk_serves_reads_and_denies_writes_until_it_is_writable(
    make: Callable[..., FilesStore], small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [store_key(n) for n in range(4)]
    store = make(small_disk / "tier", max_bytes=4 * MIB)
    write(store, keys, list(range(4)))
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    store = make(small_disk / "tier", max_bytes=4 * MIB)
    caplog.clear()
    assert read(store, keys) == [(Outcome.OK, n) for n in range(4)]
    assert write(store, [store_key(8)] * 3, [8] * 3) == [Outcome.DENIED] * 3
    assert store.delete(keys[:1]) == 0
    assert list(store.contains(keys)) == [True] * 4
    [write_warning, delete_warning] = warnings_of(caplog)
    assert "write" in write_warning
    assert "EROFS" in delete_warning
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    assert write(store, [store_key(8)], [8]) == [Outcome.OK]
    assert store.delete(keys[:1]) == 1
    store.check()


def test_a_removed_directory_is_an_outcome_and_a_recreated_one_works(
    make: Callable[..., FilesStore], tmp_path: Path
) -> None:
    store = make(contains_ttl_s=0.0)
    keys = [store_key(n) for n in range(4)]
    write(store, keys, list(range(4)))
    shutil.rmtree(tmp_path / "tier")
    assert read(store, keys) == [(Outcome.MISSING, None)] * 4
    assert list(store.contains(keys)) == [False] * 4
    assert write(store, keys, list(range(4))) == [Outcome.IO_ERROR] * 4
    assert store.delete(keys) == 0
    store.rescan()
    assert not (tmp_path / "tier").exists()
    (tmp_path / "tier").mkdir()
    assert write(store, keys, list(range(4))) == [Outcome.OK] * 4
    assert read(store, keys) == [(Outcome.OK, n) for n in range(4)]
    other = make(leftover_age_s=0.0)
    other.rescan()
    assert write(store, keys, list(range(4))) == [Outcome.OK] * 4  # its new lock is respected
    store.check()


@pytest.mark.fault("B120")
def test_a_key_too_long_for_a_file_name_is_that_keys_trouble(make: Callable[..., FilesStore]) -> None:
    store = make()
    keys = [store_key(1), bytes(16) + b"k" * 200, store_key(2)]
    assert write(store, keys, [1, 2, 3]) == [Outcome.OK, Outcome.IO_ERROR, Outcome.OK]
    assert [outcome for outcome, _ in read(store, keys)] == [Outcome.OK, Outcome.IO_ERROR, Outcome.OK]
    assert list(store.contains(keys)) == [True, False, True]
    assert store.delete(keys) == 2
    store.check()


def test_answers_have_a_bounded_age_both_ways(make: Callable[..., FilesStore]) -> None:
    clock = Clock()
    store, other = make(clock=clock, contains_ttl_s=2.0), make()
    here, gone = store_key(1), store_key(2)
    write(other, [gone], [1])
    assert list(store.contains([here, gone])) == [False, True]
    write(other, [here], [1])
    other.delete([gone])
    assert list(store.contains([here, gone])) == [False, True]
    clock.now += 2.0
    assert list(store.contains([here, gone])) == [True, False]
    store.delete([here])
    write(store, [gone], [1])
    assert list(store.contains([here, gone])) == [False, True]


def test_impossible_settings_refuse_the_start(make: Callable[..., FilesStore], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below" / "deeper"):
        with pytest.raises(ConfigError, match=rf"^path: found a file at {tmp_path}/file, allowed: a directory"):
            make(path)
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "v1").write_text("")
    with pytest.raises(ConfigError, match=r"found a file at .*/directory/v1, allowed"):
        make(tmp_path / "directory")
    with pytest.raises(ConfigError, match=r"^bytes: found 1000, allowed: 1048576 or more"):
        make(max_bytes=1000)
    with pytest.raises(ConfigError, match=r"^direct_io: found 'maybe'"):
        make(direct_io="maybe")
    with pytest.raises(StoreError, match=r"^path: found /proc/none unusable \(ENOENT"):
        make(Path("/proc/none"))


def test_the_least_bound_is_that_of_the_settings() -> None:
    assert files_module.MIN_BYTES == FILES_BYTES_AT_LEAST


@pytest.mark.fault("B036")
def test_a_key_has_the_same_path_in_every_process(make: Callable[..., FilesStore], tmp_path: Path) -> None:
    code = (
        "import sys; from orlop.stores.files import FilesStore; from orlop.testing.stores import store_key\n"
        "s = FilesStore(sys.argv[1], max_bytes=1 << 20); print(s.path_of(store_key(5, 2))); s.close()"
    )
    expected = make().path_of(store_key(5, 2))
    for seed in ("0", "1", "random"):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code, str(tmp_path / "tier")]
        assert subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip() == expected


def test_closing_ends_the_keeper(make: Callable[..., FilesStore]) -> None:
    store = make()
    store.close()
    assert not store._keeper.is_alive()
    assert files_module.LAYOUT_VERSION == "v1"
