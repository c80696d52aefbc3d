"""``orlop doctor``: what it finds, what it says to do, its exit code, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from orlop.cli import disk, machine
from orlop.cli.disk import DiskSpeed, measure
from orlop.cli.doctor import run_doctor
from orlop.cli.settings import MOST_SETTINGS_BYTES, read_settings
from orlop.config import parse_size
from orlop.errors import ConfigError
from orlop.host.limits import Limit


@pytest.fixture
def examine(tmp_path, capsys):
    """Run the doctor on settings; exit code, findings by check, effective settings."""

    def run(settings, path=tmp_path / "config.json"):
        path.write_text(settings if isinstance(settings, str) else json.dumps(settings))
        exit_code = run_doctor(path, as_json=True)
        said = json.loads(capsys.readouterr().out)
        return exit_code, {f["check"]: f for f in said["findings"]}, said["settings"]

    return run


def test_a_machine_that_can_do_it_is_well_and_nothing_is_left_behind(examine, tmp_path, monkeypatch):
    monkeypatch.setenv("ORLOP_DRAIN_DEADLINE", "7s")
    place = tmp_path / "disk"
    place.mkdir()
    files = {"path": str(place / "tier"), "bytes": "2MB"}
    exit_code, found, settings = examine({"host": "4MB", "files": files})
    assert exit_code == 0, found
    for check in ("python", "packages", "cores", "memory", "copies", "copy speed", "locked memory", "/dev/shm"):
        assert found[check]["found"]
    assert found["host.bytes"] == {"status": "ok", "check": "host.bytes", "found": "4.00 MB", "advice": ""}
    assert f"will be made in {place}" in found["tiers.0.path"]["found"]
    assert "bound 2.00 MB, 0 B in use" in found["tiers.0.bytes"]["found"]
    assert "writes " in found["tiers.0 disk"]["found"]
    assert settings["drain_deadline"] == {"value": 7.0, "origin": "ORLOP_DRAIN_DEADLINE"}
    assert settings["host.bytes"] == {"value": 4_000_000, "origin": "config"}
    assert settings["host.policy"]["origin"] == "default"
    assert list(place.iterdir()) == []


@pytest.mark.fault("B183")
def test_slow_copies_are_a_warning_with_the_numbers(examine, monkeypatch):
    """As in a container with a part of a core, or with its memory at another socket."""
    monkeypatch.setattr(machine, "measure_copies", lambda: (300_000_000, 250_000_000))
    exit_code, found, _ = examine({"host": "4MB"})
    assert exit_code == 0
    assert found["copy speed"]["status"] == "warn"
    assert found["copy speed"]["found"] == "300 MB a second to host memory, 250 MB back"
    assert "a load of 1 GB takes 4.0 s here" in found["copy speed"]["advice"]


def test_without_settings_the_machine_alone_is_looked_at(capsys):
    assert run_doctor(None, as_json=False) == 0
    said = capsys.readouterr().out
    assert "host.bytes" in said
    assert "effective settings" in said
    assert "0 fail" in said


def test_a_host_tier_that_cannot_be_had_fails_with_a_size_that_can(examine, monkeypatch):
    limits = [Limit("the machine", 10**10, 9 * 10**9), Limit("a cgroup", 10**11, 5 * 10**9)]
    monkeypatch.setattr(machine, "memory_limits", lambda: limits)
    exit_code, found, _ = examine({"host": "64GB"})
    assert exit_code == 1
    assert found["host.bytes"]["status"] == "fail"
    assert "found 64.0 GB, expected at most 5.00 GB, which is what is free here (a cgroup)" in str(found["host.bytes"])
    size = found["host.bytes"]["advice"].split()[1]
    assert examine({"host": size})[0] == 0
    assert parse_size(size) > 4 * 10**9


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("{", "found no JSON"),
        ('{"host":' * 100_000, "found no JSON"),
        ('{"host":' + " " * MOST_SETTINGS_BYTES + "1}", "found more than 1048576 bytes"),
        ('{"hots": "1GB"}', "did you mean host"),
        ('{"files": {"path": "/x"}}', "tiers.0.bytes"),
    ],
)
def test_settings_that_cannot_be_read_are_a_finding_and_the_machine_is_still_looked_at(examine, settings, says):
    exit_code, found, effective = examine(settings)
    assert (exit_code, found["settings"]["status"], effective) == (1, "fail", {})
    assert says in found["settings"]["found"]
    assert "memory" in found


def test_a_pipe_that_says_more_than_settings_can_be_is_not_heard_out(tmp_path):
    """By name, as a shell gives what stands in ``<(...)``."""
    read, write = os.pipe()

    def say_on():
        with suppress(BrokenPipeError), os.fdopen(write, "wb", buffering=0) as pipe:
            for _ in range(64 * MOST_SETTINGS_BYTES // 65536):
                pipe.write(b" " * 65536)

    with ThreadPoolExecutor(1) as pool:
        saying = pool.submit(say_on)
        with pytest.raises(ConfigError, match=f"--config /dev/fd/{read}: found more than 1048576 bytes"):
            read_settings(Path(f"/dev/fd/{read}"))
        os.close(read)
        saying.result(timeout=60)


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nope"])
def test_a_path_that_cannot_hold_a_store_fails(examine, tmp_path, place):
    (tmp_path / "file").write_text("in the way")
    exit_code, found, _ = examine({"files": {"path": str(tmp_path / place), "bytes": "2MB"}})
    assert exit_code == 1
    failed = [f for f in found.values() if f["status"] == "fail"]
    assert failed
    assert all(f["check"].startswith("tiers.0") and "path" in f["advice"] for f in failed)


def test_a_disk_that_is_full_before_the_bound_is_a_warning_with_a_bound_that_fits(examine, tmp_path, monkeypatch):
    (tmp_path / "tier" / "v1").mkdir(parents=True)
    (tmp_path / "tier" / "v1" / "chunk").write_bytes(bytes(3_000_000))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage._replace(free=40_000_000))
    exit_code, found, _ = examine({"files": {"path": str(tmp_path / "tier"), "bytes": "1GB"}})
    assert (exit_code, found["tiers.0.bytes"]["status"]) == (0, "warn")
    assert found["tiers.0.bytes"]["advice"].startswith("set 43MB or less")
    assert examine({"files": {"path": str(tmp_path / "tier"), "bytes": "43MB"}})[1]["tiers.0.bytes"]["status"] == "ok"


@pytest.mark.parametrize(
    ("direct_io", "speed", "status"),
    [
        ("on", DiskSpeed(False, 1e9, 1e9), "fail"),
        ("auto", DiskSpeed(False, 1e9, 1e9), "warn"),
        ("off", DiskSpeed(False, 1e9, 1e9), "ok"),
        ("on", DiskSpeed(True, 1e9, 1e9), "ok"),
        ("auto", DiskSpeed(True, 1e9, 1e6), "warn"),
    ],
)
def test_direct_io_and_speed_are_judged_by_what_was_asked_for(examine, tmp_path, monkeypatch, direct_io, speed, status):
    monkeypatch.setattr(disk, "measure", lambda place, direct: speed)
    files = {"path": str(tmp_path), "bytes": "2MB", "direct_io": direct_io}
    exit_code, found, _ = examine({"files": files})
    assert found["tiers.0 disk"]["status"] == status
    assert exit_code == (1 if status == "fail" else 0)


def test_a_file_system_without_direct_io_is_measured_through_the_page_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "O_DIRECT", os.O_DIRECTORY, raising=False)  # a flag that every regular file refuses
    speed = measure(tmp_path, direct=True)
    assert not speed.direct
    assert min(speed.write, speed.read) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_store_of_ones_own_is_named_and_left_alone(examine):
    exit_code, found, _ = examine({"tiers": [{"type": "my.module:Store"}]})
    assert exit_code == 0
    assert "my.module:Store" in found["tiers.0"]["found"]
