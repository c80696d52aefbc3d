"""The host region with real processes: found, joined, refused, filled, and gone when they die."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from processes import left_of, shared_memory_of

from orlop.config import parse_size
from orlop.core import RegionLayout
from orlop.errors import ConfigError, RegionError, ResourceError
from orlop.host import region as region_module
from orlop.host.handover import Listener
from orlop.host.limits import Limit, check_room, memory_limit_bytes, memory_limits
from orlop.host.region import HostRegion, socket_name

LAYOUT = RegionLayout(slots=8, blocks_per_chunk=2, page_bytes=((5000, 3000), (4096, 3000)))
WAIT_S = 120.0


@pytest.fixture
def name() -> str:
    return socket_name(f"test-{os.getpid()}-{os.urandom(4).hex()}", 0)


@pytest.fixture(params=[False, True], ids=["memfd", "plain"])
def plain(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for child in started:
        child.kill()
        child.communicate(timeout=WAIT_S)


def start(code: str, *args: str, **options: object) -> subprocess.Popen[str]:
    """A fresh interpreter that runs ``code``; it inherits no mapping."""
    prelude = "import sys, os, time\nfrom orlop.core import RegionLayout\nfrom orlop.host.region import HostRegion\n"
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        **options,  # type: ignore[call-overload]
    )


def wait_until_filled(region: HostRegion) -> None:
    for thread in threading.enumerate():
        if thread.name == "orlop-region-prefault":
            thread.join(timeout=WAIT_S)
    assert region.usable_slots == region.layout.slots


def mapped_by_anyone(inode: int) -> bool:
    """Whether a process on this machine maps the region with this inode."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = [line.split() for line in maps.read_text().splitlines() if "memfd:orlop-region" in line]
        except OSError:
            continue
        if any(line[4] == str(inode) for line in lines):
            return True
    return False


# --- one region -------------------------------------------------------------------------------------


def test_slots_and_checksums_have_the_layouts_shape(plain: bool) -> None:
    region = HostRegion.create(LAYOUT, plain=plain)
    assert region.slots.shape == (8, LAYOUT.slot_bytes)
    assert region.checksums.shape == (8, 2)
    assert region.slots.ctypes.data % 4096 == 0
    region.checksums[7, 1] = 2**64 - 1
    region.slots[7, -1] = 9
    assert region.view(7, LAYOUT.slot_bytes)[-1] == 9
    assert region.checksums.sum() == 2**64 - 1
    region.close()


@pytest.mark.fault("B126")
def test_views_start_on_a_page_and_are_writable(plain: bool) -> None:
    region = HostRegion.create(LAYOUT, plain=plain)
    for slot in range(8):
        view = region.view(slot, 100)
        assert np.frombuffer(view, np.uint8).ctypes.data % 4096 == 0
        view[:] = bytes([slot]) * 100
    assert region.slots[:, 99].tolist() == list(range(8))
    assert not region.slots[:, 100].any()
    with pytest.raises(ValueError, match="expected 0 to"):
        region.view(0, LAYOUT.slot_bytes + 1)
    del view
    region.close()


def test_every_slot_becomes_usable_and_keeps_nothing_odd(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module, "_POPULATE_BYTES", 3 * 4096)
    region = HostRegion.create(LAYOUT, plain=plain)
    wait_until_filled(region)
    assert not region.slots.any()
    region.close()


def test_pages_are_touched_one_by_one_where_the_kernel_cannot_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module, "_advise", lambda memory, advice: False)
    monkeypatch.setattr(region_module, "_TOUCH_BYTES", 3 * 4096)
    region = HostRegion.create(LAYOUT)
    wait_until_filled(region)
    region.close()


def test_only_filled_slots_are_usable(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def advise(memory: np.ndarray, advice: int) -> bool:
        calls.append(advice)
        return len(calls) < 5  # huge pages, the probe, two parts; then the machine has no more

    monkeypatch.setattr(region_module, "_advise", advise)
    monkeypatch.setattr(region_module, "_POPULATE_BYTES", LAYOUT.slot_bytes)
    region = HostRegion.create(LAYOUT)
    for thread in threading.enumerate():
        if thread.name == "orlop-region-prefault":
            thread.join(timeout=WAIT_S)
    assert region.usable_slots == 2
    assert "memory for 2 of 8 slots only" in caplog.text
    region.close()


@pytest.mark.fault("B191")
def test_nobody_waits_while_memory_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    may_fill = threading.Event()
    advise = region_module._advise

    def wait_and_advise(memory: np.ndarray, advice: int) -> bool:
        may_fill.wait(WAIT_S)
        return advise(memory, advice)

    monkeypatch.setattr(region_module, "_advise", wait_and_advise)
    region = HostRegion.create(LAYOUT)
    assert region.usable_slots == 0
    assert not region.wait_filled(0.0)
    may_fill.set()
    assert region.wait_filled(WAIT_S)
    assert region.usable_slots == LAYOUT.slots
    region.close()


@pytest.mark.fault("B202")
def test_a_plain_region_has_no_name_in_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    region = HostRegion.create(LAYOUT, plain=True)
    assert list(tmp_path.iterdir()) == []
    region.close()


def test_without_filling_all_slots_are_usable_at_once() -> None:
    region = HostRegion.create(LAYOUT, prefault=False)
    assert region.usable_slots == 8
    region.close()


def test_close_is_idempotent_and_leaves_old_views_alone(plain: bool) -> None:
    region = HostRegion.create(LAYOUT, plain=plain)
    view = region.view(3, 10)
    fds = len(os.listdir("/proc/self/fd"))
    region.close()
    region.close()
    assert len(os.listdir("/proc/self/fd")) < fds
    view[:] = b"still here"
    assert region.slots.size == 0
    assert region.usable_slots == 0


# --- limits -----------------------------------------------------------------------------------------


def test_a_region_larger_than_the_machine_is_refused_with_the_numbers(name: str) -> None:
    huge = RegionLayout(1 << 30, 16, ((1 << 20,),))
    with pytest.raises(ResourceError, match=r"^host.bytes: found 18.0 PB, expected at most .*B, .* free here"):
        HostRegion.create(huge, name=name)
    HostRegion.create(LAYOUT, name=name).close()  # the name is free again


def test_locked_memory_counts_only_where_it_is_going_to_be_locked() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, hard))
    try:
        HostRegion.create(LAYOUT).close()
        with pytest.raises(ResourceError, match=r"at most 65.5 kB, .*\(RLIMIT_MEMLOCK\); set \d\dkB or less"):
            HostRegion.create(LAYOUT, pinned=True)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


@pytest.mark.parametrize(
    ("free", "said"),
    [
        (21_312_000_000, "expected at most 21.3 GB, which is what is free here (a limit); set 21GB or less"),
        (1_999_000_000, "expected at most 2.00 GB, which is what is free here (a limit); set 1998MB or less"),
        (300_000_000, "expected at most 300 MB, which is what is free here (a limit); set 299MB or less"),
        (900, "expected at most 900 B, which is what is free here (a limit); one chunk has 1048576 bytes: free memory"),
        (-5, "expected at most -5 B, which is what is free here (a limit); one chunk has 1048576 bytes: free memory"),
    ],
)
def test_a_refusal_names_the_setting_and_a_size_that_works(
    monkeypatch: pytest.MonkeyPatch, free: int, said: str
) -> None:
    limits = [Limit("another limit", 10**15, 10**15), Limit("a limit", 10**12, free)]
    monkeypatch.setattr("orlop.host.limits.memory_limits", lambda **_: limits)
    layout = RegionLayout(64 * 10**9 // (1 << 20), 1, ((1 << 20,),))
    slots_bytes = layout.slots * layout.slot_bytes
    with pytest.raises(ResourceError) as caught:
        check_room(layout, slots_bytes + 500_000)
    assert str(caught.value).startswith("host.bytes: found 64.0 GB, expected at most ")
    assert said in str(caught.value)
    if found := re.search(r"set (\w+) or less", str(caught.value)):
        check_room(layout, parse_size(found[1]) + 500_000)  # what it says to set does fit


def test_limits_of_both_kinds_of_cgroup_are_read(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 100 kB\nMemAvailable:       50 kB\n",
        "proc/self/cgroup": "4:cpu,memory:/pod/one\n0::/unified/two\n",
        "cg/memory/pod/one/memory.limit_in_bytes": "1000\n",
        "cg/memory/pod/one/memory.usage_in_bytes": "400\n",
        "cg/memory/pod/one/memory.stat": "inactive_file 7\ntotal_inactive_file 100\n",
        "cg/unified/memory.max": "5000\n",
        "cg/unified/memory.current": "1000\n",
        "cg/unified/memory.stat": "inactive_file 10\n",
        "cg/unified/two/memory.max": "max\n",
        "cg/unified/two/memory.current": "1000\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    found = memory_limits(proc=tmp_path / "proc", cgroups=tmp_path / "cg")
    by_end = {limit.name.removeprefix(f"{tmp_path}/cg/"): limit.available_bytes for limit in found}
    assert by_end["MemAvailable of /proc/meminfo"] == 50 * 1024
    assert by_end["memory/pod/one/memory.limit_in_bytes"] == 700
    assert by_end["unified/memory.max"] == 4010
    assert "unified/two/memory.max" not in by_end
    assert memory_limit_bytes(proc=tmp_path / "proc", cgroups=tmp_path / "cg") == 1000
    (tmp_path / "proc/self/cgroup").write_text("0::/unified/not/visible\n")  # as in a container
    assert memory_limit_bytes(proc=tmp_path / "proc", cgroups=tmp_path / "cg") == 5000
    (tmp_path / "proc/self/cgroup").unlink()
    assert memory_limit_bytes(proc=tmp_path / "proc", cgroups=tmp_path / "cg") == 100 * 1024


def test_a_machine_that_tells_nothing_limits_nothing(tmp_path: Path) -> None:
    assert memory_limits(proc=tmp_path, cgroups=tmp_path) == []
    assert memory_limit_bytes(proc=tmp_path, cgroups=tmp_path) == sys.maxsize
    assert 2**20 < memory_limit_bytes() < sys.maxsize


# --- handing over -----------------------------------------------------------------------------------


def test_another_process_sees_the_same_bytes(name: str, plain: bool, children: list[subprocess.Popen[str]]) -> None:
    region = HostRegion.create(LAYOUT, name=name, plain=plain)
    region.serve()
    code = (
        "r = HostRegion.connect(sys.argv[1], timeout_s=120)\n"
        "r.slots[5, :4] = 42; r.checksums[5, 1] = 77\n"
        "print(r.layout == eval(sys.argv[2]), flush=True)"
    )
    child = start(code, name, repr(LAYOUT))
    children.append(child)
    assert child.communicate(timeout=WAIT_S)[0] == "True\n"
    assert region.slots[5, :5].tolist() == [42, 42, 42, 42, 0]
    assert region.checksums[5, 1] == 77
    region.close()


def test_a_child_inherits_the_descriptor(plain: bool, children: list[subprocess.Popen[str]]) -> None:
    region = HostRegion.create(LAYOUT, plain=plain)
    code = "r = HostRegion.from_fd(int(sys.argv[1])); r.slots[0, 0] = 5; print(r.layout.slots)"
    child = start(code, str(region.fileno()), pass_fds=(region.fileno(),))
    children.append(child)
    assert child.communicate(timeout=WAIT_S)[0] == "8\n"
    assert region.slots[0, 0] == 5
    region.close()


def test_connecting_before_the_creator_serves_waits_for_it(name: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(HostRegion.connect, name, timeout_s=WAIT_S)
        with HostRegionOf(name) as region:
            found = early.result(timeout=WAIT_S)
            region.slots[1, 1] = 3
            assert found.slots[1, 1] == 3
            found.close()


class HostRegionOf:
    """A served region for a ``with`` block."""

    def __init__(self, name: str) -> None:
        self._region = HostRegion.create(LAYOUT, name=name)

    def __enter__(self) -> HostRegion:
        self._region.serve()
        return self._region

    def __exit__(self, *_: object) -> None:
        self._region.close()


def test_connecting_to_nobody_ends_with_the_name(name: str) -> None:
    with pytest.raises(RegionError, match=name):
        HostRegion.connect(name, timeout_s=0.05)


@pytest.mark.fault("B165")
def test_a_second_creator_is_refused_by_name_until_the_first_is_gone(name: str) -> None:
    with HostRegionOf(name):
        with pytest.raises(RegionError, match=f"{name}.* taken.*give one of the two another instance"):
            HostRegion.create(LAYOUT, name=name)
        with pytest.raises(RegionError, match=f"{name}.* taken"):
            HostRegion.gather(name, 1, (4096,), lambda pages: LAYOUT, 1.0)
    HostRegion.create(LAYOUT, name=name).close()


@pytest.mark.fault("B165")
@pytest.mark.fault("B166")
def test_names_are_bounded_and_tell_instances_and_replicas_apart() -> None:
    names = {socket_name(i, r) for i in ("a", "b", "x" * 500, "x" * 501, "a/b", "a_b") for r in (0, 1)}
    assert len(names) == 12
    assert all(len(name) < 100 and "/" not in name for name in names)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to start a process of another user")
def test_another_user_gets_nothing_and_is_trusted_with_nothing(name: str) -> None:
    # The other user runs the system's view of the socket only, so it needs no access to our files.
    other = (
        "import os, socket, sys\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "os.setuid(65534)\n"
        "if sys.argv[2] == 'ask':\n"
        "    s.connect('\\0' + sys.argv[1]); print(s.recv(100))\n"
        "else:\n"
        "    s.bind('\\0' + sys.argv[1]); s.listen(); print('up', flush=True); c, _ = s.accept(); print(c.recv(100))\n"
    )

    def run(role: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", other, name, role], stdout=subprocess.PIPE, text=True)

    with HostRegionOf(name):
        assert run("ask").communicate(timeout=WAIT_S)[0] == "b''\n"
    server = run("serve")
    assert server.stdout is not None
    assert server.stdout.readline() == "up\n"
    with pytest.raises(RegionError, match="another user"):
        HostRegion.connect(name, timeout_s=WAIT_S)
    assert server.communicate(timeout=WAIT_S)[0] == "b''\n"


def say(name: str, body: bytes) -> bytes:
    """Say something raw to the server; what it answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(WAIT_S)
        peer.connect("\0" + name)
        peer.sendall(struct.pack("<I", len(body)) + body)
        answer = b""
        while part := peer.recv(4096):
            answer += part
        return answer[4:]


def test_peers_of_another_version_or_name_or_language_are_refused_and_the_next_is_served(name: str) -> None:
    hello = {"magic": "ORLOPREG", "version": 1, "name": name, "role": "connect"}
    with HostRegionOf(name):
        assert b"found version 2, expected 1" in say(name, json.dumps({**hello, "version": 2}).encode())
        assert b"found name 'else'" in say(name, json.dumps({**hello, "name": "else"}).encode())
        assert b"found the wish" in say(name, json.dumps({**hello, "role": "join", "rank": "x"}).encode())
        assert say(name, b"GET / HTTP/1.1") == b""
        assert say(name, b"[" * 100_000) == b""
        HostRegion.connect(name, timeout_s=WAIT_S).close()


def test_descriptors_that_are_no_region_are_refused(tmp_path: Path) -> None:
    region = HostRegion.create(LAYOUT, plain=True, prefault=False)
    good = os.pread(region.fileno(), 4096, 0)
    region.close()
    for content, reason in (
        (b"", "start with"),
        (bytes(8192), "start with"),
        (good, "8192|bytes with a header"),
        (good[:8] + b"\x07" + good[9:], "version 7"),
    ):
        path = tmp_path / "file"
        path.write_bytes(content)
        with pytest.raises(RegionError, match=reason):
            HostRegion.from_fd(os.open(path, os.O_RDWR))


# --- gathering --------------------------------------------------------------------------------------


def decide(pages: tuple[tuple[int, ...], ...]) -> RegionLayout:
    return RegionLayout(4, 2, pages)


def test_one_rank_waits_for_nobody(name: str) -> None:
    region = HostRegion.gather(name, 1, (4096, 8192), decide, 0.0)
    assert region.layout.page_bytes == ((4096, 8192),)
    region.close()


@pytest.mark.fault("B160")
def test_ranks_of_real_processes_agree_on_one_layout(name: str, children: list[subprocess.Popen[str]]) -> None:
    code = (
        "rank = int(sys.argv[2])\n"
        "r = HostRegion.join(sys.argv[1], rank, (4096 * (rank + 1), 100), 30)\n"
        "r.slots[rank] = rank; print(r.layout, flush=True)"
    )
    children += [start(code, name, str(rank)) for rank in (2, 1)]
    with ThreadPoolExecutor(1) as pool:
        scheduler = pool.submit(HostRegion.connect, name, timeout_s=WAIT_S)
        region = HostRegion.gather(name, 3, (4096, 100), decide, WAIT_S)
        assert region.layout.page_bytes == ((4096, 100), (8192, 100), (12288, 100))
        for child in children:
            assert child.communicate(timeout=WAIT_S)[0] == f"{region.layout}\n"
        assert scheduler.result(timeout=WAIT_S).slots[:, 0].tolist() == [0, 1, 2, 0]
        scheduler.result().close()
    region.close()


def test_a_rank_that_does_not_come_is_named_to_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, came = Listener.accept, list[socket.socket]()

    def one(self: Listener, timeout_s: float | None) -> socket.socket:
        """Time is up as soon as one has come."""
        if came:
            raise TimeoutError
        came.append(accept(self, timeout_s))
        return came[0]

    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
        patch.setattr(Listener, "accept", one)
        joined = pool.submit(HostRegion.join, name, 2, (4096,), WAIT_S)
        with pytest.raises(RegionError, match=r"local ranks \[1, 3\] of 4"):
            HostRegion.gather(name, 4, (4096,), decide, WAIT_S)
        with pytest.raises(RegionError, match=r"local ranks \[1, 3\] of 4"):
            joined.result(timeout=WAIT_S)
    HostRegion.create(LAYOUT, name=name).close()


def test_what_cannot_be_decided_is_said_to_all(name: str) -> None:
    def refuse(pages: tuple[tuple[int, ...], ...]) -> RegionLayout:
        raise ConfigError("no room for one slot")

    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(HostRegion.join, name, 1, (4096,), WAIT_S)
        with pytest.raises(ConfigError, match="no room for one slot"):
            HostRegion.gather(name, 2, (4096,), refuse, WAIT_S)
        with pytest.raises(RegionError, match="no room for one slot"):
            joined.result(timeout=WAIT_S)


@pytest.mark.parametrize(
    ("rank", "pages", "reason"),
    [(2, (4096,), "found rank 2, expected 1 to 1"), (1, (4096, 1), "found 2 KV groups, expected 1")],
)
def test_a_rank_that_does_not_fit_is_refused_and_the_others_go_on(
    name: str, rank: int, pages: tuple[int, ...], reason: str
) -> None:
    with ThreadPoolExecutor(2) as pool:
        gathered = pool.submit(HostRegion.gather, name, 2, (4096,), decide, WAIT_S)
        with pytest.raises(RegionError, match=reason):
            HostRegion.join(name, rank, pages, WAIT_S)
        HostRegion.join(name, 1, (4096,), WAIT_S).close()
        gathered.result(timeout=WAIT_S).close()


def test_a_rank_that_joins_twice_is_refused_unless_the_first_has_died(name: str) -> None:
    hello = {"magic": "ORLOPREG", "version": 1, "name": name, "role": "join", "rank": 1, "page_bytes": [4096]}
    body = json.dumps(hello).encode()
    with ThreadPoolExecutor(2) as pool, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
        gathered = pool.submit(HostRegion.gather, name, 3, (4096,), decide, WAIT_S)
        with pytest.raises(RegionError, match="found rank 9"):
            HostRegion.join(name, 9, (4096,), WAIT_S)  # from here on somebody listens
        first.connect("\0" + name)
        first.sendall(struct.pack("<I", len(body)) + body)
        with pytest.raises(RegionError, match="rank 1 has joined already"):
            HostRegion.join(name, 1, (8192,), WAIT_S)
        first.close()
        second = pool.submit(HostRegion.join, name, 1, (8192,), WAIT_S)
        HostRegion.join(name, 2, (4096,), WAIT_S).close()
        assert second.result(timeout=WAIT_S).layout.page_bytes == ((4096,), (8192,), (4096,))
        second.result().close()
        gathered.result(timeout=WAIT_S).close()


def test_a_rank_that_comes_again_after_the_decision_must_be_the_same(name: str) -> None:
    region = HostRegion.gather(name, 1, (4096,), decide, 1.0)
    with pytest.raises(RegionError, match="expected 0 to 0"):
        HostRegion.join(name, 1, (4096,), WAIT_S)
    with pytest.raises(RegionError, match=r"found pages of \(8192,\) bytes, expected \(4096,\)"):
        HostRegion.join(name, 0, (8192,), WAIT_S)
    HostRegion.join(name, 0, (4096,), WAIT_S).close()
    region.close()


# --- death ------------------------------------------------------------------------------------------


@pytest.mark.fault("B202")
def test_killed_processes_leave_nothing_and_the_sixth_start_works(
    name: str, children: list[subprocess.Popen[str]]
) -> None:
    creator = (
        "r = HostRegion.create(RegionLayout(64, 1, ((1 << 20,),)), name=sys.argv[1]); r.serve()\n"
        "print('up', flush=True); sys.stdin.read()"
    )
    other = (
        "r = HostRegion.connect(sys.argv[1], timeout_s=120); r.slots[0] = 1; print('up', flush=True); sys.stdin.read()"
    )
    for _ in range(5):
        pair = [start(creator, name), start(other, name)]
        children += pair
        for child in pair:
            assert child.stdout is not None
            assert child.stdout.readline() == "up\n"
        region = HostRegion.connect(name, timeout_s=WAIT_S)
        inode = os.fstat(region.fileno()).st_ino
        region.close()
        assert mapped_by_anyone(inode)
        held = shared_memory_of(child.pid for child in pair)
        for child in pair:
            child.send_signal(signal.SIGKILL)
            child.wait(timeout=WAIT_S)
        assert not mapped_by_anyone(inode)
        assert not left_of(held)
    with HostRegionOf(name) as region:
        assert region.layout == LAYOUT


@pytest.mark.fault("B202")
def test_a_killed_creator_leaves_the_region_to_those_who_have_it(
    name: str, children: list[subprocess.Popen[str]]
) -> None:
    creator = (
        "r = HostRegion.create(RegionLayout(4, 1, ((4096,),)), name=sys.argv[1]); r.serve()\n"
        "r.slots[2] = 8; print('up', flush=True); sys.stdin.read()"
    )
    child = start(creator, name)
    children.append(child)
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    region = HostRegion.connect(name, timeout_s=WAIT_S)
    child.kill()
    child.wait(timeout=WAIT_S)
    assert (region.slots[2] == 8).all()
    with pytest.raises(RegionError):
        HostRegion.connect(name, timeout_s=0.05)
    region.close()
