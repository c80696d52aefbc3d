"""The namespace: equal engines share, engines that differ in anything that matters do not."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orlop.core import FIRST_GENERATION, EngineSpec, KVGroup, RegionLayout
from orlop.errors import ConfigError
from orlop.tiering.namespace import (
    SAMPLE_PAGE_BYTES,
    SAMPLE_PAGES,
    Fingerprint,
    almost_same,
    differences,
    read_descriptions,
    weights_identity,
    write_description,
)

IDENTITY: dict[str, Any] = {
    "architecture": {"name": "LlamaForCausalLM", "layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 64},
    "weights": {"mode": "sampled", "files": [{"name": "model.safetensors", "bytes": 100, "content": "0a"}]},
    "revision": "main",
    "dtype": "float16",
    "kv_dtype": "auto",
    "quantisation": None,
    "positions": {"theta": 10000.0, "scaling": {"type": "linear", "factor": 1.0}},
    "page_layout": "LBHNC",
    "parallel": {"tensor": 1, "pipeline": 1, "context": 1},
    "hash": {"algorithm": "sha256", "seed": ""},
    "draft": None,
    "backend": "cpu",
}
BASE = Fingerprint(
    identity=IDENTITY,
    groups=(KVGroup(0, 16, None, ("a.0", "a.1")), KVGroup(1, 16, 1024, ("b.0",))),
    page_bytes=((65536, 32768),),
    tokens_per_hash=16,
    blocks_per_chunk=4,
    ranks=1,
)
GENERATION = bytes(range(16))


def with_identity(path: str, value: Any) -> Fingerprint:
    identity = copy.deepcopy(IDENTITY)
    *way, last = path.split(".")
    place = identity
    for part in way:
        place = place[int(part)] if isinstance(place, list) else place[part]
    place[last] = value
    return replace(BASE, identity=identity)


CHANGES: dict[str, Fingerprint] = {
    f"identity.{path}={value}": with_identity(path, value)
    for path, value in {
        "architecture.name": "MistralForCausalLM",
        "architecture.layers": 5,
        "architecture.heads": 16,
        "architecture.kv_heads": 1,
        "weights.files": [],
        "weights.mode": "full",
        "revision": "v2",
        "dtype": "bfloat16",
        "kv_dtype": "fp8_e4m3",
        "quantisation": "awq",
        "positions.theta": 10000.5,
        "positions.scaling.type": "yarn",
        "positions.scaling.factor": 2.0,
        "page_layout": "LBNHC",
        "parallel.tensor": 2,
        "parallel.pipeline": 2,
        "parallel.context": 2,
        "hash.algorithm": "blake3",
        "hash.seed": "1",
        "draft": "eagle",
        "backend": "cuda",
        "a new field": None,
    }.items()
} | {
    "groups, reversed": replace(BASE, groups=BASE.groups[::-1]),
    "groups, one less": replace(BASE, groups=BASE.groups[:1]),
    "layers, other order": replace(BASE, groups=(KVGroup(0, 16, None, ("a.1", "a.0")), BASE.groups[1])),
    "window": replace(BASE, groups=(BASE.groups[0], KVGroup(1, 16, 512, ("b.0",)))),
    "tokens per block": replace(BASE, groups=(KVGroup(0, 32, None, ("a.0", "a.1")), BASE.groups[1])),
    "page bytes": replace(BASE, page_bytes=((65536, 65536),)),
    "page bytes of two ranks": replace(BASE, page_bytes=((32768, 16384), (32768, 16384))),
    "tokens per hash": replace(BASE, tokens_per_hash=8),
    "blocks per chunk": replace(BASE, blocks_per_chunk=8),
    "ranks": replace(BASE, ranks=2),
    "format version": replace(BASE, format_version=2),
}


@pytest.mark.fault("B046")
@pytest.mark.fault("B115")
@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES.keys())
def test_whatever_changes_the_bytes_changes_the_digest(changed: Fingerprint) -> None:
    assert changed.namespace().digest != BASE.namespace().digest


def test_no_two_changes_meet_again() -> None:
    digests = {f.namespace(g).digest for f in (BASE, *CHANGES.values()) for g in (FIRST_GENERATION, GENERATION)}
    assert len(digests) == 2 * (1 + len(CHANGES))


@pytest.mark.fault("B046")
def test_every_field_of_a_fingerprint_is_in_its_description() -> None:
    """A field that is added to the class and forgotten in the description would not change the digest."""
    assert BASE.describe().keys() == set(Fingerprint.__slots__)
    assert BASE.describe()["groups"][0].keys() == set(KVGroup.__slots__)


def test_a_generation_is_a_namespace_of_its_own() -> None:
    first, later = BASE.namespace(), BASE.namespace(GENERATION)
    assert first.generation == FIRST_GENERATION
    assert later.generation == GENERATION
    assert len(later.digest) == 16
    assert later.digest != first.digest
    with pytest.raises(ValueError, match="found a generation of 3 bytes, expected 16"):
        BASE.namespace(b"abc")


def test_order_of_keys_and_kind_of_sequence_do_not_matter() -> None:
    shuffled = dict(reversed(copy.deepcopy(IDENTITY).items()))
    shuffled["weights"]["files"] = tuple(shuffled["weights"]["files"])
    assert replace(BASE, identity=shuffled).namespace() == BASE.namespace()


def test_a_fingerprint_comes_from_an_engine_and_a_layout() -> None:
    spec = EngineSpec("i", BASE.groups, tokens_per_hash=16, identity=IDENTITY, device_cache_bytes=1)
    assert Fingerprint.of(spec, RegionLayout(10, 4, BASE.page_bytes)) == BASE
    more_slots = RegionLayout(99, 4, BASE.page_bytes)
    assert Fingerprint.of(spec, more_slots).namespace() == BASE.namespace()


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"x": object()}, r"identity\.x: found object"),
        ({"x": [1, {2, 3}]}, r"identity\.x\[1\]: found set"),
        ({"x": b"raw"}, r"identity\.x: found bytes"),
        ({"x": {1: 2}}, r"identity\.x: found the key 1"),
        ({"x": float("nan")}, r"identity\.x: found float nan"),
        ({"x": float("inf")}, r"identity\.x: found float inf"),
    ],
)
def test_what_json_would_bend_is_refused_by_its_path(value: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        replace(BASE, identity=value).namespace()


# --- the same in every process ----------------------------------------------------------------------


_IN_ANOTHER_PROCESS = """
import json, sys
from orlop.core import KVGroup
from orlop.tiering.namespace import Fingerprint, weights_identity
identity = json.loads(sys.argv[1])
identity["none"] = {k: None for k in {"x", "y", "z"}}  # a set: its order follows the seed
identity["weights"] = weights_identity(sys.argv[2])
groups = (KVGroup(0, 16, None, ("a.0", "a.1")), KVGroup(1, 16, 1024, ("b.0",)))
print(Fingerprint(identity, groups, ((65536, 32768),), 16, 4, 1).namespace().digest.hex())
"""


@pytest.mark.fault("B036")
def test_fresh_processes_agree_whatever_their_hash_seed(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors(100))
    running = []
    for seed in ("random", "0", "1", None):
        env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        if seed is not None:
            env["PYTHONHASHSEED"] = seed
        command = [sys.executable, "-c", _IN_ANOTHER_PROCESS, json.dumps(IDENTITY), str(tmp_path)]
        running.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    digests = [process.communicate(timeout=120)[0].strip() for process in running]
    assert [process.returncode for process in running] == [0] * 4
    assert len(digests[0]) == 32
    assert len(set(digests)) == 1


@pytest.mark.fault("B036")
def test_the_digest_of_a_known_fingerprint_never_changes() -> None:
    """Golden: a change here makes everything stored so far unreachable, and needs a new format version."""
    known = Fingerprint({"a": [1, 2.5, None, True, "é"]}, (KVGroup(0, 16, None, ("l",)),), ((4096,),), 16, 1, 1)
    assert known.namespace().digest.hex() == "bb142093491a7b954e69e8dd54154857"


# --- in clear ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "fields"),
    [
        (BASE, []),
        (with_identity("positions.scaling.factor", 2.0), ["identity.positions.scaling.factor"]),
        (with_identity("weights.files.0.content", "0b"), ["identity.weights.files[0].content"]),
        (with_identity("weights.files", []), ["identity.weights.files"]),
        (with_identity("more", 1), ["identity.more"]),
        (with_identity("architecture.layers", 4.0), ["identity.architecture.layers"]),
        (replace(BASE, ranks=2, blocks_per_chunk=8), ["blocks_per_chunk", "ranks"]),
        (CHANGES["window"], ["groups[1].sliding_window"]),
    ],
)
def test_two_descriptions_differ_in_named_fields(changed: Fingerprint, fields: list[str]) -> None:
    assert differences(BASE.describe(), changed.describe()) == fields
    assert differences(changed.describe(), BASE.describe()) == fields


def test_descriptions_are_found_again_and_the_nearest_is_named(tmp_path: Path) -> None:
    far = replace(BASE, ranks=2, blocks_per_chunk=8, tokens_per_hash=8)
    near = with_identity("dtype", "bfloat16")
    assert all(write_description(tmp_path / "new", f) for f in (far, near, near))
    (tmp_path / "new" / "other.json").write_text("not json")
    (tmp_path / "new" / "list.json").write_text("[]")
    found = read_descriptions(tmp_path / "new")
    assert found == {f.namespace().digest.hex(): f.describe() for f in (far, near)}
    assert almost_same(BASE, found) == (near.namespace().digest.hex(), ["identity.dtype"])
    assert almost_same(near, found) is None
    assert almost_same(BASE, {}) is None
    assert not list((tmp_path / "new").glob(".*"))


def test_a_directory_that_cannot_be_written_or_read_costs_nothing_but_the_description(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert write_description(tmp_path / "file", BASE) is False
    assert read_descriptions(tmp_path / "file") == {}
    assert read_descriptions(tmp_path / "missing") == {}


DEEP = "[" * 100_000


@pytest.mark.fault("B120")
def test_what_else_lies_there_under_such_a_name_is_no_description(tmp_path: Path) -> None:
    """Nothing is waited for, nothing is read without end, and the start goes on."""
    assert write_description(tmp_path, BASE)
    (tmp_path / "deep.json").write_text(DEEP, encoding="ascii")
    (tmp_path / "binary.json").write_bytes(bytes(range(256)))
    (tmp_path / "directory.json").mkdir()
    (tmp_path / "endless.json").symlink_to("/dev/zero")
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.json")
    with (tmp_path / "huge.json").open("wb") as huge:
        huge.truncate(1 << 40)
    assert read_descriptions(tmp_path) == {BASE.namespace().digest.hex(): BASE.describe()}


def test_drafts_of_killed_writers_go_and_those_of_others_stay(tmp_path: Path) -> None:
    old, young = tmp_path / ".a.1.draft", tmp_path / ".b.2.draft"
    for draft in (old, young):
        draft.write_text("{", encoding="ascii")
    os.utime(old, (0, 0))
    assert write_description(tmp_path, BASE)
    assert [path.name for path in tmp_path.glob(".*")] == [young.name]


# --- weights -----------------------------------------------------------------------------------------------


def safetensors(payload_bytes: int, header: str = '{"w":{"dtype":"F32"}}', fill: bytes = b"w") -> bytes:
    return len(header).to_bytes(8, "little") + header.encode() + fill * payload_bytes


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(safetensors(1000))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def touch(weights: Path) -> None:
    os.utime(weights / "model.safetensors", (1, 1))


def edit(offset: int) -> Callable[[Path], None]:
    def do(weights: Path) -> None:
        with (weights / "model.safetensors").open("r+b") as file:
            file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
            file.write(b"!")

    return do


@pytest.mark.fault("B039")
@pytest.mark.parametrize("mode", ["sampled", "full"])
@pytest.mark.parametrize(
    "change",
    [
        edit(10),
        edit(500),
        edit(-1),
        lambda w: (w / "model.safetensors").write_bytes(safetensors(1001)),
        lambda w: (w / "model.safetensors").rename(w / "other.safetensors"),
        lambda w: (w / "second.bin").write_bytes(b""),
    ],
    ids=["header", "payload", "last byte", "longer", "renamed", "one more file"],
)
def test_other_weights_in_the_same_directory_are_other_weights(weights: Path, mode: Any, change: Any) -> None:
    before = weights_identity(weights, mode)
    change(weights)
    assert weights_identity(weights, mode) != before


def test_time_stamps_paths_and_other_files_do_not_matter(
    weights: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = weights_identity(weights)
    touch(weights)
    (weights / "config.json").write_text('{"a": 1}')
    assert weights_identity(weights) == before
    copied = tmp_path_factory.mktemp("copy")
    (copied / "model.safetensors").symlink_to(weights / "model.safetensors")
    assert weights_identity(copied) == before
    assert replace(BASE, identity={"weights": before}).namespace()  # nothing but JSON


@pytest.mark.fault("B039")
def test_sampling_reads_pages_from_end_to_end_and_full_reads_all(tmp_path: Path) -> None:
    nbytes = 2 * SAMPLE_PAGES * SAMPLE_PAGE_BYTES
    with (tmp_path / "model.bin").open("wb") as file:
        file.truncate(nbytes)
    spacing = (nbytes - SAMPLE_PAGE_BYTES) / (SAMPLE_PAGES - 1)
    between = int(0.75 * spacing)  # beyond the first page, before the second
    sampled, full = weights_identity(tmp_path), weights_identity(tmp_path, "full")
    for offset, is_sampled in ((0, True), (between, False), (nbytes // 2, None), (nbytes - 1, True)):
        with (tmp_path / "model.bin").open("r+b") as file:
            file.seek(offset)
            file.write(b"!")
        assert weights_identity(tmp_path, "full") != full
        if is_sampled is not None:
            assert (weights_identity(tmp_path) != sampled) == is_sampled
        sampled, full = weights_identity(tmp_path), weights_identity(tmp_path, "full")


@pytest.mark.parametrize(
    "content",
    [b"", b"version", b"version https://example.org/a-pointer-not-weights"],
    ids=["empty", "short", "pointer"],
)
def test_a_file_that_is_no_safetensors_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"no whole safetensors header in .*model\.safetensors"):
        weights_identity(tmp_path)


def test_no_weights_is_an_error_that_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set weights_id"):
        weights_identity(tmp_path)
    with pytest.raises(ConfigError, match="set weights_id"):
        weights_identity(tmp_path / "missing")
