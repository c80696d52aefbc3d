"""``orlop store`` on a slab: seen, verified, mended and swept from outside, also while an engine has a lane of it."""

from __future__ import annotations

import json
import os
import shutil
import sys

import pytest
from patience import PATIENT

from orlop.cli.main import main
from orlop.cli.stored import Stored, open_folder
from orlop.engine.llm import LLM, EngineConfig
from orlop.stores.disk.store import DiskStore
from orlop.tiering.envelope import HEADER_BYTES

PROMPTS = [[(start + n * n) % 500 for n in range(200)] for start in (0, 1, 2)]


def engine(path, blocks_per_chunk=2):
    disk = {"path": str(path), "bytes": "64MiB", "deadline": dict(PATIENT)}
    settings = {"host": "4MiB", "blocks_per_chunk": blocks_per_chunk, "disk": disk, "drain_deadline": "60s"}
    return LLM(EngineConfig(num_blocks=64, drain_deadline_s=60), offload=settings)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A slab with three namespaces in two lanes: one engine's, the same after a reset, one of longer chunks."""
    path = tmp_path_factory.mktemp("filled") / "tier"
    first, second = engine(path), engine(path, 4)
    for llm in (first, second):
        llm.generate(PROMPTS, 2)
    first.reset_prefix_cache()
    first.generate(PROMPTS[:1], 2)
    for llm in (first, second):
        llm.shutdown()
    return path


@pytest.fixture
def tier(filled, tmp_path):
    return shutil.copytree(filled, tmp_path / "tier", copy_function=shutil.copy2)


@pytest.fixture
def orlop(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["orlop", "store", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code, json.loads(out) if "--json" in arguments and out else out, err

    return run


@pytest.fixture
def beside():
    """A lane held by the store that an engine's I/O process has; let go at the end."""
    held = []

    def hold(path):
        held.append(DiskStore(path, max_bytes=64 << 20, direct_io="off"))
        return held[-1]

    yield hold
    for store in held:
        store.close()


def keys(path):
    return [chunk.key for chunk in open_folder(path).scan()]


def place_of(path, key):
    """The cells file of a chunk, the offset of its cell, the index file, the offset of its record."""
    folder = open_folder(path)
    list(folder.scan())
    lane, shape, cell = folder._find(key)
    base = path / str(lane) / f"{shape.number:08d}"
    return base.with_suffix(".cells"), cell * shape.cell_bytes, base.with_suffix(".index"), 4096 + 128 * cell


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        [byte] = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_inspect_counts_all_lanes_and_names_the_field_in_which_namespaces_differ(tier, orlop):
    exit_code, said, _ = orlop("inspect", tier, "--json")
    assert (exit_code, said["kind"], said["engines"]) == (0, "disk", 0)
    by_kind = {(n["description"]["blocks_per_chunk"], n["after_reset"]): n["chunks"] for n in said["namespaces"]}
    assert by_kind == {(2, False): 18, (2, True): 6, (4, False): 9}
    fields = {tuple(pair["fields"]) for pair in said["differences"]}
    assert fields <= {("blocks_per_chunk",), ("blocks_per_chunk", "generation"), ("generation",)}
    assert any("blocks_per_chunk" in pair for pair in fields)
    text = orlop("inspect", tier)[1]
    for word in ("disk store", "3 namespaces", "33 chunks", "differ in: ", "blocks_per_chunk", "after a reset"):
        assert word in text


def test_looking_changes_no_byte(tier, orlop):
    def state():
        return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in tier.rglob("*") if p.is_file()}

    before = state()
    for command in ("inspect", "verify"):
        assert orlop(command, tier)[0] == 0
    assert state() == before


@pytest.mark.fault("B109")
def test_verify_counts_by_reason_and_repair_removes_what_is_bad_and_nothing_else(tier, orlop):
    payload, header, one, two, record = keys(tier)[:5]
    flip(place_of(tier, payload)[0], place_of(tier, payload)[1] + HEADER_BYTES + 5)
    flip(place_of(tier, header)[0], place_of(tier, header)[1] + 100)
    (cells, a, _, _), (_, b, _, _) = place_of(tier, one), place_of(tier, two)
    content = bytearray(cells.read_bytes())
    size = abs(b - a)
    content[a : a + size], content[b : b + size] = content[b : b + size], content[a : a + size]
    cells.write_bytes(content)
    flip(*place_of(tier, record)[2:])
    expected = {"payload_checksum": 1, "header_checksum": 1, "foreign_key": 2, "ok": 28}
    exit_code, said, _ = orlop("verify", tier, "--json")
    assert (exit_code, said["chunks"], said["removed"]) == (1, expected, 0)
    assert said["flaws"] == {"damaged_record_checksum": 1}
    text = orlop("verify", tier)[1]
    assert "4 do not verify" in text
    assert "damaged_record_checksum: left out of the index" in text
    assert orlop("verify", tier, "--repair", "--json")[1]["removed"] == 4
    exit_code, said, _ = orlop("verify", tier, "--json")
    assert (exit_code, said["chunks"]) == (0, {"ok": 28})


def test_repair_removes_the_bad_one_of_two_lanes_that_have_the_same_chunk(tier, orlop):
    [key, *_] = keys(tier)
    shutil.copytree(tier / "0", tier / "2")
    lane_0 = place_of(tier, key)[0].parent.parent / "0" / place_of(tier, key)[0].name
    flip(lane_0, place_of(tier, key)[1] + HEADER_BYTES + 5)
    assert orlop("verify", tier, "--repair", "--json")[1]["removed"] == 1
    assert orlop("verify", tier)[0] == 0
    assert keys(tier).count(key) == 1


def test_a_lane_that_an_engine_has_is_verified_and_not_changed(tier, orlop, beside):
    [key, *_] = keys(tier)
    cells, offset, _, _ = place_of(tier, key)
    flip(cells, offset + HEADER_BYTES + 5)
    assert beside(tier).stats()["lane"] == 0
    exit_code, said, err = orlop("verify", tier, "--repair", "--json")
    assert (exit_code, said["chunks"]["payload_checksum"], said["removed"]) == (1, 1, 0)
    assert "1 chunks could not be removed (an engine has lane 0); end that engine first" in err
    assert err.count("\n") == 1


def test_clear_takes_idle_lanes_and_says_what_stays_in_an_engines(tier, orlop, beside):
    held = beside(tier)
    chunks = held.stats()["chunks"]
    exit_code, said, err = orlop("clear", tier, "--all", "--yes", "--json")
    assert (exit_code, said["removed"]) == (1, 33 - chunks)
    assert f"{chunks:.0f} chunks could not be removed (an engine has lane 0)" in err
    assert len(keys(tier)) == chunks
    assert list(tier.glob("*.json"))
    held.check()
    held.close()
    assert orlop("clear", tier, "--all", "--yes")[:2] == (0, f"removed {chunks:.0f} chunks\n")
    assert keys(tier) == []
    assert not list(tier.glob("*.json"))


def test_gc_frees_what_holds_nothing_and_leaves_engines_and_chunks_alone(tier, orlop, beside):
    assert orlop("gc", tier, "--json")[1]["freed_bytes"] == 0
    (tier / "0" / "00000099.cells").write_bytes(bytes(100_000))
    assert orlop("gc", tier, "--json")[1]["freed_bytes"] >= 100_000
    held = beside(tier)
    orlop("clear", tier, "--all", "--yes")  # of lane 1 alone
    before = sorted(os.listdir(tier / "0"))
    exit_code, out, _ = orlop("gc", tier)
    assert exit_code == 0
    assert "engines that have it open: 1, what they write to was left alone" in out
    assert sorted(os.listdir(tier / "0")) == before
    assert os.listdir(tier / "1") == ["lane"]
    assert orlop("verify", tier)[0] == 0
    held.check()


def test_an_engine_goes_on_beside_every_command_and_generates_the_same_tokens(tmp_path, orlop):
    path = tmp_path / "tier"
    llm = engine(path)
    expected = [r.tokens for r in llm.generate(PROMPTS, 4)]
    assert Stored(open_folder(path)).folder.engines() == 1
    for command in (["inspect"], ["verify", "--repair"], ["gc"], ["clear", "--all", "--yes"]):
        orlop(command[0], path, *command[1:])
        assert [r.tokens for r in llm.generate(PROMPTS[::-1], 4)] == expected[::-1]
    llm.check()
    llm.shutdown()
    assert orlop("verify", path)[0] == 0
    assert orlop("inspect", path, "--json")[1]["engines"] == 0
