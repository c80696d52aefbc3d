"""``orlop store``: what an engine has stored, seen, verified and swept from outside, also while it runs."""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENT

from orlop.cli.main import main
from orlop.cli.stored import Stored, open_folder
from orlop.engine.llm import LLM, EngineConfig
from orlop.stores.files_folder import FilesFolder
from orlop.tiering.envelope import HEADER_BYTES

PROMPTS = [[(start + n * n) % 500 for n in range(200)] for start in (0, 1, 2)]


def engine(path, blocks_per_chunk=2):
    files = {"path": str(path), "bytes": "64MiB", "deadline": dict(PATIENT)}
    settings = {"host": "4MiB", "blocks_per_chunk": blocks_per_chunk, "files": files, "drain_deadline": "60s"}
    return LLM(EngineConfig(num_blocks=64, drain_deadline_s=60), offload=settings)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A store with three namespaces: one engine's, the same after a reset, one of longer chunks."""
    path = tmp_path_factory.mktemp("filled") / "tier"
    for blocks_per_chunk in (2, 4):
        llm = engine(path, blocks_per_chunk)
        llm.generate(PROMPTS, 2)
        if blocks_per_chunk == 2:
            llm.reset_prefix_cache()
            llm.generate(PROMPTS[:1], 2)
        llm.shutdown()
    return path


@pytest.fixture
def tier(filled, tmp_path):
    """A copy to be damaged, with the times of the original."""
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


def files_below(path):
    return {os.path.join(d, n) for d, _, names in os.walk(path) for n in names}


def chunk_files(path):
    return sorted(FilesFolder(path).path_of(chunk.key) for chunk in FilesFolder(path).scan())


def test_inspect_counts_what_is_there_and_names_where_namespaces_differ(tier, orlop):
    exit_code, said, _ = orlop("inspect", tier, "--json")
    assert (exit_code, said["kind"], said["engines"]) == (0, "files", 0)
    assert sum(n["chunks"] for n in said["namespaces"]) == len(chunk_files(tier)) > 0
    assert sum(n["stored_bytes"] for n in said["namespaces"]) == sum(map(os.path.getsize, chunk_files(tier)))
    by_kind = {(n["description"]["blocks_per_chunk"], n["after_reset"]): n["chunks"] for n in said["namespaces"]}
    assert by_kind == {(2, False): 18, (2, True): 6, (4, False): 9}
    fields = {tuple(pair["fields"]) for pair in said["differences"]}
    assert fields == {("blocks_per_chunk",), ("blocks_per_chunk", "generation")}
    text = orlop("inspect", tier)[1]
    for word in ("3 namespaces", "33 chunks", "differ in: blocks_per_chunk", "chunk, generation", "after a reset"):
        assert word in text


def test_looking_changes_nothing(tier, orlop):
    def state():
        return {path: (os.stat(path).st_mtime_ns, os.stat(path).st_size) for path in files_below(tier)}

    before = state()
    assert orlop("inspect", tier)[0] == 0
    assert orlop("verify", tier)[0] == 0
    assert state() == before


def test_a_pipe_in_the_place_of_any_file_is_not_waited_for(tier, orlop):
    os.mkfifo(tier / "v1" / "tmp" / "pipe.lock")
    os.mkfifo(tier / "pipe.json")
    first = chunk_files(tier)[0]
    os.unlink(first)
    os.mkfifo(first)
    assert "32 chunks" in orlop("inspect", tier)[1]


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "payload_checksum":
        content[HEADER_BYTES + 5] ^= 1
    elif how == "header_checksum":
        content[100] ^= 1
    elif how == "bad_magic":
        content[0] ^= 1
    elif how == "length":
        del content[-1:]
    elif how == "version":
        content[8] = 99
    path.write_bytes(content)


def test_verify_counts_by_reason_and_repair_removes_what_is_bad_and_nothing_else(tier, orlop):
    paths = [Path(p) for p in chunk_files(tier)]
    reasons = ["payload_checksum", "payload_checksum", "header_checksum", "bad_magic", "length", "version"]
    for path, how in zip(paths, reasons, strict=False):
        damage(path, how)
    other = next(p for p in paths[6:] if p.parents[1] == paths[6].parents[1] and p != paths[6])
    other.write_bytes(paths[6].read_bytes())  # whole, but another chunk's
    expected = {"payload_checksum": 2, "header_checksum": 1, "bad_magic": 1, "length": 1, "version": 1}
    expected |= {"foreign_key": 1, "ok": 26}
    exit_code, said, _ = orlop("verify", tier, "--json")
    assert (exit_code, said["chunks"], said["removed"]) == (1, expected, 0)
    assert "6 do not verify" in orlop("verify", tier)[1]
    exit_code, said, _ = orlop("verify", tier, "--repair", "--json")
    assert (exit_code, said["removed"]) == (0, 6)
    assert orlop("verify", tier, "--json")[:2] == (
        0,
        {"path": str(tier), "chunks": {"ok": 26, "version": 1}, "removed": 0, "interrupted": False, "flaws": {}},
    )
    assert not other.exists()
    assert paths[5].exists()


def test_a_payload_whose_layout_nothing_tells_is_counted_apart_and_kept(tier, orlop):
    for path in tier.glob("*.json"):
        path.write_text(path.read_text().replace("float32", "float16"))  # describes nothing that is here
    exit_code, said, _ = orlop("verify", tier, "--repair", "--json")
    assert exit_code == 0
    assert said["removed"] == 0
    assert set(said["chunks"]) <= {"no_description", "ok"}
    assert sum(said["chunks"].values()) == 33
    assert "no description" in orlop("inspect", tier)[1]


def test_clear_removes_one_namespace_with_its_description_and_leaves_the_others(tier, orlop):
    namespaces = orlop("inspect", tier, "--json")[1]["namespaces"]
    target = next(n["digest"] for n in namespaces if n["description"]["blocks_per_chunk"] == 4)
    assert orlop("clear", tier, "--namespace", target[:12], "--yes", "--json")[:2] == (
        0,
        {"path": str(tier), "removed": 9, "interrupted": False},
    )
    left = orlop("inspect", tier, "--json")[1]["namespaces"]
    assert sorted(n["digest"] for n in left) == sorted(n["digest"] for n in namespaces if n["digest"] != target)
    assert orlop("clear", tier, "--all", "--yes")[1] == "removed 24 chunks\n"
    assert orlop("inspect", tier, "--json")[1]["namespaces"] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["clear", "{tier}"], "found neither of --namespace and --all"),
        (["clear", "{tier}", "--all", "--namespace", "a"], "found both of --namespace and --all"),
        (["clear", "{tier}", "--namespace", "xyz", "--yes"], "--namespace xyz: found 0 that begin so"),
        (["clear", "{tier}", "--all"], "found nobody to ask"),
        (["inspect", "{tier}/v1"], "store there, expected the 'path' of a tier of type "),
        (["verify", "{tier}/missing"], "found no such directory"),
    ],
)
def test_what_a_user_can_put_right_is_one_line_and_nothing_is_removed(tier, orlop, monkeypatch, arguments, says):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    before = files_below(tier)
    exit_code, out, err = orlop(*(a.format(tier=tier) for a in arguments))
    assert (exit_code, out, err.count("\n")) == (2, "", 1)
    assert says in err
    assert files_below(tier) == before


@pytest.mark.parametrize("command", [["verify"], ["clear", "--all", "--yes"]])
def test_ctrl_c_ends_after_the_chunk_at_hand_and_says_what_was_done(tier, orlop, monkeypatch, command):
    scan, scans = FilesFolder.scan, []

    def interrupted_scan(folder, *arguments):
        scans.append(folder)
        for number, chunk in enumerate(scan(folder, *arguments)):
            if len(scans) == 2 and number == 3:  # the first one has counted what there is
                signal.raise_signal(signal.SIGINT)
            yield chunk

    monkeypatch.setattr(FilesFolder, "scan", interrupted_scan)
    exit_code, said, _ = orlop(command[0], tier, *command[1:], "--json")
    assert (exit_code, said["interrupted"]) == (130, True)
    monkeypatch.undo()
    removed = said["removed"]
    assert (said.get("chunks", {}).get("ok"), removed) in [(3, 0), (None, 3)]
    assert len(chunk_files(tier)) == 33 - removed


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look into everything")
def test_a_directory_that_may_not_be_looked_into_is_said(tier, orlop):
    (tier / "v1").chmod(0)
    try:
        exit_code, _, err = orlop("inspect", tier)
    finally:
        (tier / "v1").chmod(0o755)
    assert exit_code == 2
    assert "found no permission to look into it" in err


class Answer:
    def __init__(self, text):
        self.text = text

    def isatty(self):
        return True

    def readline(self, *_):
        return self.text


@pytest.mark.parametrize(("answer", "left"), [("n\n", 33), ("y\n", 0)])
def test_clear_asks_and_does_what_it_is_told(tier, orlop, monkeypatch, answer, left):
    monkeypatch.setattr("sys.stdin", Answer(answer))
    exit_code, _, err = orlop("clear", tier, "--all")
    assert "remove these chunks?" in err
    assert exit_code == (1 if left else 0)
    assert len(chunk_files(tier)) == left


def test_gc_of_files_removes_what_dead_writers_left_and_no_chunk(tier, orlop):
    tmp = tier / "v1" / "tmp"
    aged, young, dead, live = tmp / "a-1", tmp / "b-1", tmp / "c-1", tmp / "d-1"
    for half in (aged, young, dead, live):
        half.write_bytes(bytes(5_000))
    os.utime(aged, (1.0, 1.0))
    (tmp / "c.lock").touch()
    empty = tier / "v1" / chunk_files(tier)[0].split("/")[-3] / "abc"
    empty.mkdir()
    chunks = chunk_files(tier)
    with (tmp / "d.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        exit_code, said, _ = orlop("gc", tier, "--json")
        assert (exit_code, said) == (0, {"path": str(tier), "freed_bytes": 4 * 4096, "engines": 1})
        assert "freed 0 B; engines that have it open: 1, what they write to was left alone" in orlop("gc", tier)[1]
    assert {path.name for path in tmp.iterdir()} == {"b-1", "d-1", "d.lock"}
    assert not empty.exists()
    assert chunk_files(tier) == chunks
    assert orlop("gc", tier, "--json")[1]["freed_bytes"] == 2 * 4096  # d is dead now
    assert {path.name for path in tmp.iterdir()} == {"b-1"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_gc_where_nothing_may_be_removed_says_so(tier, orlop):
    (tier / "v1").chmod(0o555)
    try:
        exit_code, out, err = orlop("gc", tier)
    finally:
        (tier / "v1").chmod(0o755)
    assert (exit_code, out, err.count("\n")) == (2, "", 1)
    assert "found it not to be written to" in err


def test_an_engine_goes_on_beside_clear_and_generates_the_same_tokens(tmp_path, orlop):
    path = tmp_path / "tier"
    llm = engine(path)
    expected = [r.tokens for r in llm.generate(PROMPTS, 4)]
    assert Stored(open_folder(path)).folder.engines() == 1
    exit_code, said, _ = orlop("clear", path, "--all", "--yes", "--json")
    assert (exit_code, said["removed"] > 0, chunk_files(path)) == (0, True, [])
    assert list(path.glob("*.json"))  # its description stays: it writes that at its start only
    for _ in range(2):
        assert [r.tokens for r in llm.generate(PROMPTS[::-1], 4)] == expected[::-1]
    llm.check()
    llm.shutdown()
    assert orlop("verify", path)[0] == 0
    assert orlop("inspect", path, "--json")[1]["engines"] == 0


@pytest.mark.parametrize("name", ["a[/b]", "a[red]b", "ünï", os.fsdecode(b"a\xff")])
def test_a_directory_is_shown_by_its_own_name(tier, name):
    (tier.parent / name).parent.mkdir(exist_ok=True)
    path = tier.rename(tier.parent / name)
    for encoding in ("utf-8", "ascii"):
        done = subprocess.run(
            [sys.executable, "-m", "orlop", "store", "inspect", path],
            capture_output=True,
            env=os.environ | {"PYTHONIOENCODING": encoding, "COLUMNS": "200"},
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert str(path).encode(encoding, "backslashreplace") in done.stdout
