"""``orlop bench tier``: it moves what it says, within its bounds, leaves nothing, and says what the figures mean."""

from __future__ import annotations

import errno
import json
import os
import signal

import pytest
from cli_processes import orlop

from orlop.cli import bench
from orlop.cli.bench import Measured, Rate, advice, run_bench_tier

MIB = 1 << 20


@pytest.mark.parametrize("chunk_bytes", [64 << 10, 2 * MIB])
def test_it_writes_and_reads_back_within_its_bounds_and_leaves_nothing(tmp_path, capsys, chunk_bytes):
    assert run_bench_tier(tmp_path, chunk_bytes, 16 * MIB, 60, True) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["chunk_bytes"], said["interrupted"]) == (chunk_bytes, False)
    for who in ("disk", "orlop"):
        assert said[who]["write"]["nbytes"] == said[who]["read"]["nbytes"] > 0
        assert said[who]["write"]["nbytes"] <= 16 * MIB
        assert said[who]["write"]["bytes_per_s"] > 0
    assert said["advice"]
    assert os.listdir(tmp_path) == []


def test_people_get_a_table_and_advice(tmp_path):
    said = orlop("bench", "tier", tmp_path, "--bytes", "16MiB", "--chunk", "64KiB")
    assert (said.returncode, said.stderr) == (0, "")
    for word in ("chunks of", "the disk", "Orlop on it", "direct I/O"):
        assert word in said.stdout
    assert os.listdir(tmp_path) == []


def test_a_time_that_is_over_ends_it_with_what_was_moved(tmp_path, capsys):
    assert run_bench_tier(tmp_path, 64 << 10, 16 * MIB, 1e-9, True) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["disk"]["write"]["nbytes"] == 0
    assert said["orlop"]["write"]["nbytes"] <= 16 * MIB


@pytest.mark.parametrize("step", ["measure_disk", "_Mover.move"])
def test_ctrl_c_stops_it_says_so_and_leaves_nothing(tmp_path, capsys, monkeypatch, step):
    owner, _, name = step.rpartition(".")
    place = getattr(bench, owner) if owner else bench
    before = getattr(place, name)

    came = []

    def interrupted(*arguments):
        if not came:
            came.append(signal.raise_signal(signal.SIGINT))
        return before(*arguments)

    monkeypatch.setattr(place, name, interrupted)
    assert run_bench_tier(tmp_path, 64 << 10, 16 * MIB, 60, True) == 130
    said = json.loads(capsys.readouterr().out)
    assert (said["interrupted"], said["advice"]) == (True, [])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{path}/missing"], "found no such directory"),
        (["{path}", "--chunk", "5000"], "--chunk: found 5000, allowed: multiples of 4096"),
        (["{path}", "--chunk", "large"], "--chunk: found 'large', allowed: a whole number of bytes"),
        (["{path}", "--bytes", "1MiB"], "expected 4 times"),
    ],
)
def test_what_a_user_can_put_right_is_one_line(tmp_path, arguments, says):
    said = orlop("bench", "tier", *(a.format(path=tmp_path) for a in arguments))
    assert (said.returncode, said.stdout, said.stderr.count("\n")) == (2, "", 1)
    assert says in said.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.fault("B116")
def test_a_file_system_without_direct_io_is_measured_and_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "try_direct_io", lambda path: OSError(errno.EINVAL, "refused"))
    assert run_bench_tier(tmp_path, 64 << 10, 16 * MIB, 60, True) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["disk"]["direct"] is False
    assert said["disk"]["read"]["nbytes"] == 16 * MIB
    assert "takes no direct I/O" in said["advice"][0]


def measured(per_s, direct=True):
    return Measured(direct, Rate(int(per_s), 1.0), Rate(int(per_s), 1.0))


@pytest.mark.parametrize(
    ("disk", "tier", "chunk_bytes", "says"),
    [
        (measured(2e9), measured(1.9e9), 2 * MIB, "Orlop reaches 95% of plain calls or more: nothing to do"),
        (measured(2e9), measured(3e9), 2 * MIB, "Orlop reaches 100% of plain calls or more: nothing to do"),
        (measured(2e9), measured(1e9), 64 << 10, "raise 'blocks_per_chunk'"),
        (measured(2e9), measured(1e9), 2 * MIB, "Orlop reaches 50% of the disk"),
        (measured(5e7), measured(5e7), 2 * MIB, "computing may be faster"),
        (measured(2e9, direct=False), measured(2e9), 2 * MIB, "takes no direct I/O"),
    ],
)
def test_advice_follows_the_figures(disk, tier, chunk_bytes, says):
    [said] = advice(disk, tier, chunk_bytes)
    assert says in said
