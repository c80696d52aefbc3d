"""The slab on real directories: the suite of every store, and what only a slab can go through."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chunks import key_of, load
from chunks import store as store_chunks

from orlop.config import FILES_BYTES_AT_LEAST
from orlop.core import Outcome
from orlop.errors import ConfigError, StoreError
from orlop.host.policies import BUILT_IN
from orlop.stores.disk import store as store_module
from orlop.stores.disk.device import File, used_bytes
from orlop.stores.disk.store import DiskStore
from orlop.testing.stores import ChunkStoreSuite, OpenStore, buffer, read, store_key, write
from orlop.tiering.base import ChunkStore

MIB = 1 << 20
WAIT_S = 120.0
ROOT = os.geteuid() == 0
A, B, C = (letter * 16 for letter in (b"A", b"B", b"C"))


class Clock:
    """A clock that is cranked by hand."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


Make = Callable[..., DiskStore]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Opens stores on one directory that are closed in the end. No time goes by but what a test's own clock says."""
    opened: list[DiskStore] = []

    def open_store(path: Path = tmp_path / "tier", **settings: object) -> DiskStore:
        options: dict[str, object] = {"max_bytes": 64 * MIB, "clock": Clock()}
        opened.append(DiskStore(path, **{**options, **settings}))  # type: ignore[arg-type]
        return opened[-1]

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


class TestSlab(ChunkStoreSuite):
    @pytest.fixture(params=["auto", "off"])
    def open_store(self, request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
        return lambda max_bytes: DiskStore(tmp_path / "tier", max_bytes=max_bytes, direct_io=request.param)

    def resize(self, store: ChunkStore, key: bytes, nbytes: int) -> None:
        """Cells have one length; that of a chunk is what its record says."""
        whole = memoryview(buffer(max(1, nbytes), 7))
        cut = min(nbytes, 4096)
        store.write([key], [whole[:cut]], [whole[cut:]])

    @pytest.fixture
    def store(self, open_store: OpenStore) -> Iterator[ChunkStore]:
        store = open_store(64 * MIB)
        assert isinstance(store, DiskStore)
        yield store
        store.check()
        store.close()


# --- the bound --------------------------------------------------------------------------------------------


@pytest.mark.fault("B108")
@pytest.mark.fault("B125")
@pytest.mark.parametrize("pages", [1, 4, 63])
def test_the_file_system_never_counts_more_than_the_bound(make: Make, tmp_path: Path, pages: int) -> None:
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / "somebody's file").write_bytes(bytes(100_000))
    limit = 5 * MIB
    store = make(max_bytes=limit)
    count = 3 * limit // (pages * 4096)
    most = 0
    for number in range(0, count, 8):
        keys = [store_key(n) for n in range(number, number + 8)]
        assert write(store, keys, [1] * 8, pages * 4096) == [Outcome.OK] * 8
        most = max(most, used_bytes(str(tmp_path / "tier")))
    assert limit * 0.75 < most <= limit
    assert all(store.contains(keys))
    store.check()


@pytest.mark.fault("B108")
@pytest.mark.fault("B119")
def test_chunks_of_other_sizes_and_namespaces_make_room_oldest_first(make: Make, tmp_path: Path) -> None:
    limit = 4 * MIB
    for run, pages in enumerate((4, 16, 7, 32)):
        store = make(max_bytes=limit)
        for n in range(3 * limit // (pages * 4096)):
            assert write(store, [store_key(n, run)], [n], pages * 4096) == [Outcome.OK]
            assert used_bytes(str(tmp_path / "tier")) <= limit
        store.check()
        store.close()
    assert {chunk.key[15] for chunk in make(max_bytes=limit).scan()} == {3}


def test_what_nobody_needs_room_for_is_left_alone(make: Make) -> None:
    store = make()
    write(store, [store_key(n, 1) for n in range(20)], [1] * 20)
    store.close()
    store = make()
    write(store, [store_key(n, 2) for n in range(20)], [2] * 20, 8 * 4096)
    assert all(store.contains([store_key(n, 1) for n in range(20)]))


def test_a_smaller_bound_after_a_restart_is_kept_from_the_start(make: Make, tmp_path: Path) -> None:
    store = make(max_bytes=16 * MIB)
    for n in range(600):
        write(store, [store_key(n)], [n])
    store.close()
    assert used_bytes(str(tmp_path / "tier")) > 8 * MIB
    store = make(max_bytes=4 * MIB)
    assert used_bytes(str(tmp_path / "tier")) <= 4 * MIB
    assert write(store, [store_key(1000)], [1]) == [Outcome.OK]
    store.check()


@pytest.mark.fault("B110")
def test_removals_give_their_room_back(make: Make) -> None:
    store = make(max_bytes=2 * MIB)
    for turn in range(40):
        keys = [store_key(100 * turn + n) for n in range(40)]
        assert write(store, keys, [1] * 40) == [Outcome.OK] * 40
        assert store.delete(keys) == 40
        store.check()
    assert store.stats().get("evicted_chunks", 0) == 0
    assert list(store.scan()) == []


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
def test_what_was_used_longest_ago_goes_first_and_recency_survives_a_restart(make: Make, policy: str) -> None:
    clock, wall = Clock(), Clock(1e9)
    settings = {"max_bytes": MIB, "clock": clock, "wall_clock": wall, "policy": policy}
    store = make(**settings)
    number = 0
    while not store.stats().get("evicted_chunks"):
        write(store, [store_key(number)], [1])
        number += 1
    held = [n for n in range(number) if store.contains([store_key(n)])[0]]
    assert held == list(range(number - len(held), number)), "the oldest went first"
    old = [store_key(n) for n in held[:8]]
    wall.now += 100
    assert read(store, old[:4]) == [(Outcome.OK, 1)] * 4
    store.touch(old[4:])
    store.close()
    wall.now -= 50  # a clock that goes back does not make what is new old
    store = make(**settings)
    for n in range(len(held) - 8):
        write(store, [store_key(1000 + n)], [1])
    assert list(store.contains(old)) == [True] * 8
    store.check()


def test_of_one_prefix_the_end_goes_first(make: Make) -> None:
    store = make(max_bytes=MIB)
    keys = [store_key(n) for n in range(30)]
    write(store, keys, [1] * 30)
    store.touch(keys)
    number = 100
    while all(store.contains(keys)):
        write(store, [store_key(number)], [1])
        number += 1
    there = list(store.contains(keys))
    assert there == sorted(there, reverse=True)


def test_free_room_stays_in_large_pieces_under_random_eviction(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 16 find side by side what random uses and removals leave."""
    store = make(max_bytes=32 * MIB, direct_io="off")
    rng = random.Random(5)
    calls: list[int] = []
    real = File.write

    def watch(self: File, buffers: list[memoryview], offset: int) -> None:
        if self.path.endswith(".cells"):
            calls.append(len(buffers) // 2)
        real(self, buffers, offset)

    monkeypatch.setattr(File, "write", watch)
    known: list[bytes] = []
    for turn in range(400):
        keys = [store_key(16 * turn + n) for n in range(16)]
        assert write(store, keys, [1] * 16) == [Outcome.OK] * 16
        known += keys
        store.touch(rng.sample(known, min(len(known), 40)))
        store.delete(rng.sample(known, min(len(known), 4)))
    assert store.stats()["evicted_chunks"] > 3000
    assert sum(calls[-400:]) / 400 > 6, "chunks of one batch lie scattered"
    store.check()


@pytest.mark.fault("B112")
def test_what_is_read_is_not_evicted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(max_bytes=MIB, direct_io="off")
    keys = [store_key(n) for n in range(4)]
    for n in range(100):
        write(store, [store_key(1000 + n)], [8])  # until it has all its segments
    write(store, keys, [1, 2, 3, 4])
    reading, go_on = threading.Event(), threading.Event()
    real = File.read

    def slow(self: File, buffers: list[memoryview], offset: int) -> None:
        reading.set()
        assert go_on.wait(WAIT_S)
        real(self, buffers, offset)

    monkeypatch.setattr(File, "read", slow)
    answers: list[tuple[Outcome, int | None]] = []
    thread = threading.Thread(target=lambda: answers.extend(read(store, keys)))
    thread.start()
    assert reading.wait(WAIT_S)
    for n in range(200):
        assert write(store, [store_key(100 + n)], [9]) == [Outcome.OK]
    store.delete(keys[:1])  # what is removed meanwhile is not filled again either
    go_on.set()
    thread.join(WAIT_S)
    assert answers == [(Outcome.OK, n) for n in (1, 2, 3, 4)]
    store.check()


def test_the_same_bytes_are_not_written_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make()
    assert store_chunks(store, [(1, 7)]) == [Outcome.OK]
    monkeypatch.setattr(File, "write", lambda *a: pytest.fail("wrote what is there"))
    assert store_chunks(store, [(1, 7)]) == [Outcome.OK]
    monkeypatch.undo()
    assert store_chunks(store, [(1, 8)]) == [Outcome.OK]
    assert load(store, [1]) == [(Outcome.OK, "", 8)]


@pytest.mark.fault("B027")
def test_an_older_chunk_never_comes_back_over_a_newer_one(make: Make) -> None:
    rng, newest = random.Random(2), {}
    for version in range(400):
        if version % 10 == 0:
            store = make(max_bytes=MIB)
        number = rng.randrange(120)
        assert store_chunks(store, [(number, version)]) == [Outcome.OK]
        newest[number] = version
        if version % 10 == 9:
            for number, (_, _, found) in zip(newest, load(store, list(newest)), strict=True):
                assert found in (None, newest[number])
            store.close()


@pytest.mark.fault("B027")
def test_what_was_evicted_stays_gone_after_a_restart(make: Make) -> None:
    """Extents of several cells: those that are not filled again yet must not bring back what they held."""
    store = make(max_bytes=8 * MIB)
    number = 0
    while not store.stats().get("evicted_chunks"):
        assert store_chunks(store, [(number, 1)]) == [Outcome.OK]
        number += 1
    assert store.stats()["evicted_chunks"] > 2
    there = list(store.contains([key_of(n) for n in range(number)]))
    store.close()
    assert list(make(max_bytes=8 * MIB).contains([key_of(n) for n in range(number)])) == there


@pytest.mark.fault("B027")
def test_of_two_records_of_one_key_the_newer_counts_and_the_other_goes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a crash between the record of the newer chunk and the end of the older one's."""
    store = make()
    assert store_chunks(store, [(1, 1)]) == [Outcome.OK]
    monkeypatch.setattr(DiskStore, "_erase", lambda *a: True)
    assert store_chunks(store, [(1, 2)]) == [Outcome.OK]
    monkeypatch.undo()
    store.close()
    store = make()
    assert load(store, [1]) == [(Outcome.OK, "", 2)]
    store.check()
    assert store.delete([key_of(1)]) == 1
    store.close()
    assert load(make(), [1]) == [(Outcome.MISSING, "", None)]


# --- lanes ------------------------------------------------------------------------------------------------


def test_an_engine_takes_the_lowest_free_lane_of_its_namespace(make: Make) -> None:
    first, second, third = make(namespace=A), make(namespace=B), make(namespace=A)
    assert [s.stats()["lane"] for s in (first, second, third)] == [0, 1, 2]
    write(second, [store_key(1)], [5])
    for store in (first, second, third):
        store.close()
    again = make(namespace=B)
    assert again.stats()["lane"] == 1
    assert read(again, [store_key(1)]) == [(Outcome.OK, 5)]
    assert [make(namespace=n).stats()["lane"] for n in (C, A, C)] == [0, 2, 3]


def test_the_lanes_of_engines_that_are_gone_make_room_oldest_first_and_those_that_live_do_not(
    make: Make, tmp_path: Path
) -> None:
    limit = 8 * MIB
    gone, alive = make(max_bytes=limit, namespace=A), make(max_bytes=limit, namespace=B)
    keys = [store_key(n) for n in range(60)]
    write(gone, keys, [1] * 60)
    write(alive, keys, [2] * 60)
    gone.close()
    mine = make(max_bytes=limit, namespace=C)
    other = make(max_bytes=limit, namespace=A)
    assert mine.stats()["lane"] == 0
    other.close()
    for n in range(1000):
        assert write(mine, [store_key(1000 + n)], [3]) == [Outcome.OK]
        assert used_bytes(str(tmp_path / "tier")) <= limit
    assert read(alive, keys[:60:7]) == [(Outcome.OK, 2)] * 9
    assert not (tmp_path / "tier" / "2").exists()


def test_two_engines_share_the_bound_when_both_need_it(make: Make, tmp_path: Path) -> None:
    limit, clock = 8 * MIB, Clock()
    settings = {"max_bytes": limit, "namespace": A, "clock": clock, "keep_s": 1.0}
    one = make(**settings)
    for n in range(1000):
        write(one, [store_key(n)], [1])
    assert used_bytes(str(tmp_path / "tier" / "0")) > 0.7 * limit
    two = make(**settings)
    for n in range(0, 3000, 10):
        clock.now += 1.0
        write(two, [store_key(5000 + n + i) for i in range(10)], [2] * 10)
        write(one, [store_key(10_000 + n + i) for i in range(10)], [1] * 10)
        assert used_bytes(str(tmp_path / "tier")) <= limit
    share = [used_bytes(str(tmp_path / "tier" / lane)) / limit for lane in ("0", "1")]
    assert min(share) > 0.3, share
    assert list(two.contains([store_key(7999)])) == [True]


LOCKED = (
    "import sys, json; from orlop.stores.disk.store import DiskStore\n"
    "s = DiskStore(sys.argv[1], max_bytes=1 << 20); print(json.dumps(s.stats()), flush=True); sys.stdin.read()"
)


@pytest.mark.fault("B202")
def test_the_lock_of_a_lane_dies_with_its_process(make: Make, tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", LOCKED, tmp_path / "tier"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert child.stdout is not None
    assert json.loads(child.stdout.readline())["lane"] == 0
    assert make().stats()["lane"] == 1
    child.kill()
    child.communicate()
    assert make().stats()["lane"] == 0


def test_a_file_system_without_locks_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.flock

    def flock(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_NB:
            raise OSError(errno.ENOLCK, "no locks")
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StoreError, match=r"^path: found no locks .* use type 'files'"):
        make()


# --- direct I/O -------------------------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.fault("B116")
@pytest.mark.fault("B121")
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
@pytest.mark.parametrize("late", [False, True])
def test_refused_direct_io_falls_back_with_one_warning(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str, late: bool
) -> None:
    real = getattr(os, call)

    def refuse(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return int(real(fd, buffers, offset))

    store = make() if late else None
    if store is not None and not store.stats()["direct_io"]:
        pytest.skip("needs a temporary directory on a file system with direct I/O")
    monkeypatch.setattr(os, call, refuse)
    store = store or make()
    keys = [store_key(n) for n in range(5)]
    assert write(store, keys, list(range(5))) == [Outcome.OK] * 5
    assert read(store, keys) == [(Outcome.OK, n) for n in range(5)]
    assert store.stats()["direct_io"] == 0.0
    [warning] = warnings_of(caplog)
    assert "EINVAL" in warning
    assert "buffered" in warning
    with pytest.raises(ConfigError, match=r"^direct_io: found .*EINVAL"):
        make(direct_io="on")


@pytest.mark.fault("B126")
@pytest.mark.parametrize("offset", [0, 8, 512])
@pytest.mark.parametrize("nbytes", [1, 511, 4096, 4097])
def test_unaligned_buffers_work(make: Make, offset: int, nbytes: int) -> None:
    store = make()
    keys = [store_key(n) for n in range(3)]
    sources = [buffer(offset + nbytes, n)[offset:] for n in range(3)]
    headers = [buffer(4096, 100 + n) for n in range(3)]
    assert store.write(keys, headers, sources) == [Outcome.OK] * 3
    back = [buffer(4096) for _ in keys]
    targets = [buffer(offset + nbytes)[offset:] for _ in keys]
    assert store.read_into(keys, back, targets) == [Outcome.OK] * 3
    assert targets == sources
    assert back == headers


def test_neighbours_go_in_one_direct_call(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make()
    if not store.stats()["direct_io"]:
        pytest.skip("needs a temporary directory on a file system with direct I/O")
    calls: list[tuple[str, int, bool]] = []
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def watch(fd: int, buffers: list[memoryview], offset: int, name: str = name, real: Callable = real) -> int:
            calls.append((name, len(buffers), bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)))
            return int(real(fd, buffers, offset))

        monkeypatch.setattr(os, name, watch)
    keys = [store_key(n) for n in range(8)]
    write(store, keys, [1] * 8)
    read(store, list(reversed(keys)))
    assert [call for call in calls if call[2]] == [("pwritev", 16, True), ("preadv", 16, True)]


# --- trouble ----------------------------------------------------------------------------------------------


@pytest.mark.fault("B122")
def test_a_disk_full_below_the_bound_degrades_and_recovers(make: Make, small_disk: Path) -> None:
    clock = Clock()
    (small_disk / "foreign").write_bytes(bytes(4 * MIB))
    store = make(small_disk / "tier", max_bytes=16 * MIB, clock=clock)
    for n in range(600):
        assert write(store, [store_key(n)], [n]) == [Outcome.OK]
    store.check()
    assert store.stats()["disk_full"] > 0
    assert read(store, [store_key(n) for n in range(560, 600)]) == [(Outcome.OK, n % 256) for n in range(560, 600)]
    before = store.stats()["bytes"]
    os.unlink(small_disk / "foreign")
    clock.now += 1000.0
    for n in range(600, 1000):
        assert write(store, [store_key(n)], [n]) == [Outcome.OK]
        clock.now += 1.0
    assert store.stats()["bytes"] > before + 2 * MIB
    store.check()


@pytest.mark.fault("B122")
def test_a_disk_full_of_others_is_no_space_until_it_is_not(make: Make, small_disk: Path) -> None:
    clock = Clock()
    store = make(small_disk / "tier", max_bytes=4 * MIB, clock=clock)
    filler = small_disk / "foreign"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(bytes(9 * MIB))
    assert write(store, [store_key(1), store_key(2)], [1, 2]) == [Outcome.NO_SPACE] * 2
    store.check()
    filler.unlink()
    assert write(store, [store_key(1)], [1]) == [Outcome.NO_SPACE]  # not asked again at once
    clock.now += 1000.0
    assert write(store, [store_key(1)], [1]) == [Outcome.OK]


def test_a_read_only_disk_serves_reads_and_denies_writes_until_it_is_writable(
    make: Make, small_disk: Path, caplog: pytest.LogCaptureFixture
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
    said = warnings_of(caplog)
    assert len(said) == 2
    assert "EROFS" in said[1]
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    assert write(store, [store_key(8)], [8]) == [Outcome.OK]
    assert store.delete(keys[:1]) == 1
    store.check()


def test_a_removed_directory_is_an_outcome_and_a_recreated_one_works(make: Make, tmp_path: Path) -> None:
    store = make()
    keys = [store_key(n) for n in range(4)]
    write(store, keys, list(range(4)))
    shutil.rmtree(tmp_path / "tier")
    assert read(store, keys) == [(Outcome.MISSING, None)] * 4
    assert list(store.contains(keys)) == [False] * 4
    assert write(store, keys, list(range(4))) == [Outcome.IO_ERROR] * 4
    assert store.delete(keys) == 0
    assert not (tmp_path / "tier").exists()
    (tmp_path / "tier").mkdir()
    assert write(store, keys, list(range(4))) == [Outcome.OK] * 4
    assert read(store, keys) == [(Outcome.OK, n) for n in range(4)]
    store.check()


@pytest.mark.fault("B113")
@pytest.mark.parametrize("suffix", [".cells", ".index"])
def test_a_write_that_fails_is_not_visible_and_harms_no_neighbour(
    make: Make, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    store = make(direct_io="off")
    keys = [store_key(n) for n in range(20)]
    real, count = File.write, iter(range(10**6))

    def fail(self: File, buffers: list[memoryview], offset: int) -> None:
        if self.path.endswith(suffix) and next(count) == 10:
            raise OSError(errno.EIO, "Input/output error")
        real(self, buffers, offset)

    write(store, [store_key(99)], [1])
    monkeypatch.setattr(File, "write", fail)
    outcomes = [write(store, [key], [n])[0] for n, key in enumerate(keys)]
    assert outcomes.count(Outcome.IO_ERROR) == 1
    there = [outcome is Outcome.OK for outcome in outcomes]
    assert list(store.contains(keys)) == there
    assert [fill for _, fill in read(store, keys)] == [n if ok else None for n, ok in enumerate(there)]
    store.check()
    store.close()
    assert list(make().contains(keys)) == there


def test_a_bad_sector_is_one_chunks_trouble(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(direct_io="off")
    keys = [store_key(n) for n in range(8)]
    write(store, keys, list(range(8)))
    at = store.path_of(keys[3])
    assert at is not None
    real = os.preadv

    def rot(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset <= at[1] < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", rot)
    answers = read(store, keys)
    assert answers[3] == (Outcome.IO_ERROR, None)
    assert answers[:3] + answers[4:] == [(Outcome.OK, n) for n in (0, 1, 2, 4, 5, 6, 7)]


def test_an_index_that_cannot_be_read_costs_its_segment_and_not_the_start(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(max_bytes=MIB)
    keys = [store_key(n) for n in range(20)]
    write(store, keys, list(range(20)))
    store.close()
    real = File.read

    def rot(self: File, buffers: list[memoryview], offset: int) -> None:
        if self.path.endswith("00000001.index"):
            raise OSError(errno.EIO, "Input/output error")
        real(self, buffers, offset)

    monkeypatch.setattr(File, "read", rot)
    store = make(max_bytes=MIB)
    there = list(store.contains(keys))
    assert 10 < sum(there) < 20
    assert store.stats()["damaged_segment"] == 1
    store.close()
    monkeypatch.undo()
    assert all(make(max_bytes=MIB).contains(keys))


@pytest.mark.fault("B120")
def test_a_key_too_long_for_a_record_is_that_keys_trouble(make: Make) -> None:
    store = make()
    keys = [store_key(1), bytes(16) + b"k" * 200, store_key(2)]
    assert write(store, keys, [1, 2, 3]) == [Outcome.OK, Outcome.IO_ERROR, Outcome.OK]
    assert [outcome for outcome, _ in read(store, keys)] == [Outcome.OK, Outcome.MISSING, Outcome.OK]
    assert store.delete(keys) == 2


def test_impossible_settings_refuse_the_start(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=rf"^path: found a file at {tmp_path}/file, allowed: a directory"):
            make(path)
    with pytest.raises(ConfigError, match=r"^bytes: found 1000, allowed: 1048576 or more"):
        make(max_bytes=1000)
    with pytest.raises(ConfigError, match=r"^direct_io: found 'maybe'"):
        make(direct_io="maybe")
    with pytest.raises(StoreError, match=r"^path: found /proc/none unusable \(ENOENT"):
        make(Path("/proc/none"))
    assert store_module.MIN_BYTES == FILES_BYTES_AT_LEAST


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
def test_many_threads_and_evictions_keep_the_books(make: Make, policy: str) -> None:
    store = make(max_bytes=4 * MIB, direct_io="off", policy=policy)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for version in range(60):
                numbers = sorted(rng.sample(range(800), 12))
                store_chunks(store, [(n, version) for n in numbers])
                for outcome, reason, _ in load(store, numbers[:: 1 + seed % 3]):
                    assert outcome in (Outcome.OK, Outcome.MISSING), reason
                if version % 8 == seed:
                    store.delete([key_of(n) for n in numbers[:3]])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    store.check()
