"""What is wrong with settings, directories, files and stores, met by the connector as a whole.

In: settings that cannot work, a disk that fills or goes away in the middle, files that are damaged, stores that lie.
Out: a clear error at the start or a counted miss, right bytes in every case, an end for every request. Never: a
refused start that leaves something behind.
"""

from __future__ import annotations

import ast
import gc
import json
import logging
import os
import pickle
import random
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from byte_engine import FULL, HYBRID, PATIENT, Engine, prompts
from real_stores import chunk_files, leftovers

from orlop.config import OrlopConfig
from orlop.connector import OffloadingConnector
from orlop.core import EngineSpec, KVGroup
from orlop.errors import ConfigError, OrlopError, ResourceError, TierUnavailable
from orlop.stores.disk.folder import DiskFolder
from orlop.testing.request_runner import Status

SOURCE = Path(__file__).parents[2] / "src" / "orlop"
PROMPT = list(range(1000, 1041))


def numbers(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10**6) for _ in range(count)]


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No thread, no child and no descriptor more than before."""
    threads, children, descriptors = set(threading.enumerate()), our_children(), len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()  # the region's mapping goes with the last view of it
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)
        assert not thread.is_alive(), f"{thread.name} is left"
    assert our_children() <= children
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def our_children() -> set[str]:
    lists = Path("/proc/self/task").glob("*/children")
    return {child for path in lists for child in path.read_text(encoding="ascii").split()}


def traffic(engine: Engine, rng: random.Random, count: int) -> None:
    """Random requests, some aborted, up to the end of all of them."""
    begun = [engine.runner.add(prompt, rng.randrange(1, 4)) for prompt in prompts(rng, count)]
    for request in begun:
        for _ in range(rng.randrange(4)):
            engine.runner.step()
        if rng.random() < 0.1:
            engine.runner.abort(request.request_id)
    engine.run()
    assert all(r.ended for r in begun)
    engine.runner.pool.reset()


# --- settings --------------------------------------------------------------------------------------------------


@pytest.mark.fault("B099")
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"host": {"bites": 1}}, "host.bites: found an unknown key .did you mean bytes"),
        ({"hots": "1GB"}, "hots: found an unknown key .did you mean host"),
        ({"host": {"bytes": 0}}, "host.bytes: found 0, allowed: a whole number"),
        ({"host": {"bytes": 8192}}, r"host.bytes: found 8192 bytes, which is 2 chunks of 4096 .* set it to 16384"),
        ({"tokens_per_chunk": 8}, "tokens_per_chunk: found beside blocks_per_chunk"),
        ({"blocks_per_chunk": None, "tokens_per_chunk": 6}, "tokens_per_chunk: found 6, allowed: a multiple of"),
        ({"hash": "blake3"}, "hash: found 'blake3', allowed: 'sha256', or leave it out; 'blake3' is known but not"),
        ({"weights": "full"}, "weights: found 'full', allowed: 'sampled', .* known but not there yet"),
        (
            {"tiers": [{"type": "files", "path": "/tmp", "bytes": "1GB", "policy": "m:P"}]},
            "tiers.0.policy: found 'm:P'",
        ),
        ({"host": {"bytes": 98304, "policy": "no_such_module:Policy"}}, "no_such_module"),
        ({"tiers": [{"type": "files", "path": "/tmp"}]}, "tiers.0.bytes"),
        ({"tiers": [{"type": "fils", "path": "/tmp", "bytes": "1GB"}]}, "did you mean files"),
        ({"tiers": [{"type": "no_such_module:Store"}]}, "no_such_module:Store"),
        ({"tiers": [{"type": "real_stores:chunk_files"}]}, "chunk_files"),
    ],
)
def test_settings_that_cannot_work_refuse_the_start_by_name(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(OrlopError, match=said):
        Engine(tmp_path, "refused", FULL, 1, settings=settings)


@pytest.mark.fault("B099")
def test_the_size_is_that_of_the_mapping_or_the_environment_and_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for said, config in {
        30: OrlopConfig.load({"host": 30 * 4096, "blocks_per_chunk": 2}, environ={}),
        31: OrlopConfig.load({"blocks_per_chunk": 2}, environ={"ORLOP_HOST_BYTES": str(31 * 4096)}),
    }.items():
        spec = EngineSpec(f"size-{said}-{os.getpid()}", FULL, 4, {"m": 1}, 1)
        worker = OffloadingConnector.worker(config, spec)
        try:
            worker.register_kv_caches(kv_caches())
            OffloadingConnector.scheduler(config, spec).shutdown()
        finally:
            worker.shutdown()
        assert f"host {said * 4096} bytes in {said} chunks of 4096 bytes" in caplog.text


def kv_caches() -> dict[str, Any]:
    from orlop.core import Geometry
    from orlop.testing.byte_device import ByteDevice

    return dict(ByteDevice(Geometry(FULL, 4, 2), blocks=8).kv_caches[0])


@pytest.mark.usefixtures("nothing_left")
def test_a_refusal_is_said_to_every_rank(tmp_path: Path) -> None:
    engine = Engine.__new__(Engine)
    with pytest.raises(ConfigError, match=r"host\.bytes: found 8192"):
        engine.__init__(tmp_path, "ranks", FULL, 3, settings={"host": {"bytes": 8192}})  # type: ignore[misc]
    assert len(engine.refused) == 2
    assert all("the lowest rank gave up: host.bytes: found 8192" in str(said) for said in engine.refused)


@pytest.mark.fault("B227")
def test_the_documented_line_of_configuration_keeps_chunks_and_serves_them(tmp_path: Path) -> None:
    readme = (SOURCE.parents[1] / "README.md").read_text(encoding="utf-8")
    line = json.loads(re.findall(r"```json\n(.*?)```", readme, re.DOTALL)[0])
    line["host"] = 24 * 4096
    line["disk"] |= {"path": str(tmp_path), "bytes": "4MiB", "deadline": dict(PATIENT)}
    for external in (0, 40):
        with Engine(tmp_path, "documented", FULL, 1, settings=line, tiers=False) as engine:
            assert engine.serve(PROMPT).was_external == external
            assert engine.stats()["tokens_loaded 0:disk"] == external
        assert len(list(DiskFolder(tmp_path).scan())) == 5


@pytest.mark.fault("B218")
@pytest.mark.usefixtures("nothing_left")
def test_a_host_tier_larger_than_memory_is_refused_with_the_numbers_and_the_next_start_works(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"^host.bytes: found 900 TB, expected at most .*; set \d+.B or less"):
        Engine(tmp_path, "too-large", FULL, 1, settings={"host": {"bytes": "900TB"}})
    with Engine(tmp_path, "too-large", FULL, 1) as engine:
        engine.serve(PROMPT)
        assert engine.serve(PROMPT).was_external == 40


@pytest.mark.parametrize(("host", "slots"), [({}, 15), ({"bytes": 40 * 4096}, 40)])
def test_replicas_share_what_nobody_set_and_each_has_what_somebody_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: dict[str, int], slots: int
) -> None:
    monkeypatch.setattr("orlop.connector.free_bytes", lambda: 2 * 60 * 4096)
    says = {"device_cache_bytes": 10**9, "replicas": 4}
    with Engine(tmp_path, "one-of-four", FULL, 1, tiers=False, settings={"host": host}, spec=says) as engine:
        assert engine.connector._region is not None
        assert engine.connector._region.layout.slots == slots


@pytest.mark.parametrize(
    ("device_cache_bytes", "free", "slots"),
    [(1, 10**9, 4), (10**9, 20 * 4096, 10), (10 * 4096, 10**9, 40), (10**9, 4096, 4), (40 * 4096, None, 160)],
)
def test_a_size_that_nobody_set_is_never_refused_by_our_own_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_cache_bytes: int, free: int | None, slots: int
) -> None:
    monkeypatch.setattr("orlop.connector.free_bytes", lambda: free)
    says = {"device_cache_bytes": device_cache_bytes}
    with Engine(tmp_path, "unset", FULL, 1, tiers=False, settings={"host": {}}, spec=says) as engine:
        assert engine.connector._region is not None
        assert engine.connector._region.layout.slots == slots
        engine.serve(PROMPT)


@pytest.mark.fault("B099")
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"instance": "a\ud800"}, "instance: found 'a.ud800', expected a text"),
        ({"instance": 5}, "instance: found 5, expected a text"),
        ({"ranks": 0}, "found rank 0 of 0"),
        ({"rank": -1}, "found rank -1 of 1"),
        ({"rank": 1}, "found rank 1 of 1"),
        ({"groups": (KVGroup(0, 4, layers=("a", "a")),)}, "found layer 'a' more than once"),
        ({"groups": (KVGroup(0, 4, layers=("a",)), KVGroup(1, 4, layers=("b", "a")))}, "found layer 'a' more than"),
        ({"groups": (KVGroup(1, 4, layers=("a", "b")),)}, "found group 1 in place 0"),
    ],
)
def test_what_no_engine_can_mean_is_refused_by_both_halves_at_once(wrong: dict[str, Any], said: str) -> None:
    right = {"instance": f"wrong-{os.getpid()}", "groups": FULL, "tokens_per_hash": 4, "identity": {"m": 1}}
    spec = EngineSpec(**{**right, "device_cache_bytes": 1, **wrong})
    with pytest.raises(ConfigError, match=said):
        OffloadingConnector.worker({}, spec).register_kv_caches(kv_caches())
    with pytest.raises(ConfigError, match=said):
        OffloadingConnector.scheduler({}, spec)


@pytest.mark.parametrize(("given", "found"), [(None, "NoneType"), ([1, 2], "int"), (5, "int"), ("cells", "str")])
def test_what_is_no_tensor_is_refused_by_the_name_of_its_layer(given: object, found: str) -> None:
    worker = OffloadingConnector.worker({}, EngineSpec(f"no-tensor-{os.getpid()}", FULL, 4, {"m": 1}, 1))
    with pytest.raises(ConfigError, match=f"layer 'a': found {found}, expected a tensor"):
        worker.register_kv_caches({**kv_caches(), "a": given})


@pytest.mark.fault("B157")
@pytest.mark.parametrize("wrong", [{"ranks": 1}, {"ranks": 3}, {"groups": HYBRID}])
def test_a_scheduler_half_that_was_told_of_other_ranks_or_groups_is_refused(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    """One that waits for one rank's reports where there are two would serve what the second has not stored."""
    with Engine(tmp_path, "others", FULL, 2) as engine:
        spec = replace(engine.connector.spec, **wrong)
        with pytest.raises(ConfigError, match="found a host region of 2 ranks and 1 KV groups, expected"):
            OffloadingConnector.scheduler(engine.connector.config, spec)
        assert engine.serve(PROMPT).output_token_ids


@pytest.mark.fault("B217")
@pytest.mark.fault("B231")
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("groups", "said"),
    [((), "found no KV group"), ((KVGroup(0, 6, layers=("a", "b")),), "found 6 tokens per block, expected a multiple")],
)
def test_groups_that_cannot_be_offloaded_refuse_the_start(groups: tuple[KVGroup, ...], said: str) -> None:
    worker = OffloadingConnector.worker({}, EngineSpec(f"no-group-{os.getpid()}", groups, 4, {"m": 1}, 1))
    with pytest.raises(ConfigError, match=said):
        worker.register_kv_caches(kv_caches())
    worker.shutdown()


@pytest.mark.fault("B231")
def test_without_the_devices_own_prefix_cache_offloading_is_on_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with Engine(tmp_path, "no-prefix", FULL, 1, spec={"prefix_caching": False}, prefix_caching=False) as engine:
        engine.serve(PROMPT)
        assert engine.serve(PROMPT).was_external == 40
    assert "offloading is on: host" in caplog.text


@pytest.mark.fault("B231")
def test_tiers_that_stay_off_because_the_weights_have_no_name_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(tmp_path, "nameless", FULL, 1, spec={"persistent": False}) as engine:
        engine.serve(PROMPT)
        assert engine.serve(PROMPT).was_external == 40
        assert not engine.manager.tiers
    assert "set weights_id" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_salt_that_is_no_text_of_any_encoding_is_a_salt_like_others(tmp_path: Path) -> None:
    with Engine(tmp_path, "surrogate", FULL, 1) as engine:
        engine.device.lineage.root = lambda salt=None: repr(salt).encode()[:16].ljust(16)  # type: ignore[method-assign]
        engine.serve(PROMPT, cache_salt="\ud800")
        assert engine.serve(PROMPT, cache_salt="\ud800").was_external == 40
        assert engine.serve(PROMPT, cache_salt="\ud801").was_external == 0


@pytest.mark.parametrize(("slots", "most"), [(24, 64), (1000, 250)])
def test_how_many_slots_a_tier_may_hold_follows_the_host_tier(tmp_path: Path, slots: int, most: int) -> None:
    """What one slow tier may hold past its deadline before it is out of service."""
    with Engine(tmp_path, "retired", FULL, 1, settings={"host": slots * 4096}) as engine:
        assert engine.connector._region is not None
        assert engine.connector._region.layout.slots == slots
        tier = engine.manager.tiers[0].tier
        tier.note_hung(most, now=0.0)
        assert engine.stats()["breaker_state 0:files"] == 0
        tier.note_hung(most + 1, now=0.0)
        assert engine.stats()["breaker_state 0:files"] == 2


# --- a start that fails in part ----------------------------------------------------------------------------------


@pytest.mark.fault("B220")
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("trouble", ["read-only", "store raises", "store hangs", "no process"])
def test_a_tier_that_did_not_start_serves_every_request_or_none(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, trouble: str, required: bool
) -> None:
    tier: dict[str, Any] = {"type": "files", "path": str(tmp_path / "m"), "bytes": "2MiB", "required": required}
    # Where every verb hangs the deadlines are what ends the waits; elsewhere they must not.
    hurry = {"lookup": "10ms", "promotion": "100ms", "cascade": "100ms"}
    tier["deadline"] = hurry if trouble == "store hangs" else dict(PATIENT)
    if trouble == "read-only":
        (tmp_path / "m").mkdir()
        mounted(request, tmp_path / "m", "ro,size=4m")
    elif trouble == "store raises":
        tier["type"] = "real_stores:RaisesAtStart"
    elif trouble == "store hangs":
        tier["type"] = "real_stores:HangsAtStart"
        monkeypatch.setattr("orlop.connector.TIER_START_TIMEOUT_S", 0.1)
    else:
        monkeypatch.setattr("orlop.tiering.io_links.sys.executable", "/nonexistent/python")
    if required:
        with pytest.raises(TierUnavailable, match="set required to false"):
            Engine(tmp_path, "half", FULL, 1, tier)
        return
    with Engine(tmp_path, "half", FULL, 1, tier, settings={"drain_deadline": "100ms"}) as engine:
        engine.serve(PROMPT)
        # A tier that hangs holds the slots of what it was to keep: those chunks are given up.
        assert engine.serve(PROMPT).was_external == (0 if trouble == "store hangs" else 40)
        aborted = engine.runner.add(numbers(1, 30), 5)
        engine.runner.step()
        engine.runner.abort(aborted.request_id)
        engine.run()


def mounted(request: pytest.FixtureRequest, where: Path, options: str) -> None:
    """A tmpfs, or with ``--bind`` the directory itself, at ``where`` until the test ends; else a skip that says why."""
    what = ["--bind", str(where)] if options == "--bind" else ["-t", "tmpfs", "-o", options, "tmpfs"]
    done = subprocess.run(["mount", *what, str(where)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount at {where}: {done.stderr.strip()}")
    request.addfinalizer(lambda: subprocess.run(["umount", "-l", str(where)], capture_output=True, check=False))


@pytest.mark.fault("B220")
@pytest.mark.usefixtures("nothing_left")
def test_a_file_where_the_directory_should_be_refuses_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("here already", encoding="ascii")
    with pytest.raises(ConfigError, match=rf"^tiers\.0\.path: found a file at {tmp_path}/taken, allowed: a directory"):
        Engine(tmp_path / "taken" / "deeper", "in-the-way", FULL, 1)
    assert not caplog.records, "the error says it all"
    assert (tmp_path / "taken").read_text(encoding="ascii") == "here already"


@pytest.mark.parametrize("name", ["x" * 300, "/".join(["deep"] * 1000)])
def test_a_path_too_long_for_the_file_system_refuses_the_start(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^tiers\.0\.path: found one of \d+ characters, allowed: what the file system"
    ):
        Engine(tmp_path / name, "long", FULL, 1)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "json:JSONDecoder",
            r"^tiers\.0\.type: found 'json:JSONDecoder', which is a class of something else; allowed:",
        ),
        (
            "no_such_module:Store",
            r"^tiers\.0\.type: found 'no_such_module:Store', which cannot be imported .*; allowed:",
        ),
        ("real_stores:Picky", r"^tiers\.0: found no moon, expected a full one"),
    ],
)
def test_a_store_that_can_never_be_made_is_one_error_that_names_the_setting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        Engine(tmp_path, "never", FULL, 1, {"type": kind})
    assert "Error:" not in str(caught.value)
    assert not caplog.records, "the error says it all"


def test_a_path_that_cannot_be_made_now_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = {"type": "files", "path": "/proc/nowhere", "bytes": "2MiB"}
    with Engine(tmp_path, "nowhere", FULL, 1, tier) as engine:
        engine.serve(PROMPT)
        assert engine.serve(PROMPT).was_external == 40
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("tier 0:files is off for now and comes back by itself: path: found /proc/nowhere unusable")


# --- in the middle of traffic ---------------------------------------------------------------------------------------


@pytest.mark.fault("B113")
@pytest.mark.fault("B108")
def test_a_disk_that_fills_in_the_middle_and_gets_space_again(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    mounted(request, tmp_path, "size=3m")
    (tmp_path / "others").touch()
    rng = random.Random(1)
    tier = {"type": "files", "path": str(tmp_path / "t"), "bytes": "64MiB", "deadline": dict(PATIENT)}
    with Engine(tmp_path, "full", FULL, 1, tier) as engine:
        traffic(engine, rng, 10)
        fill_up(tmp_path / "others")
        traffic(engine, rng, 60)
        assert not leftovers(tmp_path / "t"), "a failed write leaves its temporary file"
        assert all(p.stat().st_size == 8192 for p in chunk_files(tmp_path / "t"))
        (tmp_path / "others").unlink()
        engine.wait_in_service()
        traffic(engine, rng, 20)
        written = engine.stats()["written_ok 0:files"]
        engine.serve(PROMPT)
        assert engine.stats()["written_ok 0:files"] == written + 5
    with Engine(tmp_path, "full-2", FULL, 1, tier) as engine:
        assert engine.serve(PROMPT).was_external == 40


def test_a_disk_that_becomes_read_only_in_the_middle_is_read_and_comes_back(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with Engine(tmp_path, "remount", FULL, 1) as engine:
        engine.serve(PROMPT)
        for seed in range(8):
            engine.serve(numbers(seed, 61))
        mounted(request, tmp_path, "--bind")
        subprocess.run(["mount", "-o", "remount,bind,ro", str(tmp_path)], check=True)
        assert engine.serve(PROMPT).was_external == 40
        assert engine.stats()["tokens_loaded 0:files"] == 40
        traffic(engine, random.Random(3), 30)
        assert engine.stats()["written_denied 0:files"] > 0
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
        engine.wait_in_service()
        written = engine.stats()["written_ok 0:files"]
        engine.serve(numbers(77, 41))
        assert engine.stats()["written_ok 0:files"] == written + 5


def fill_up(path: Path) -> None:
    written = 1
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while written:
            written = file.write(bytes(4096))


@pytest.mark.fault("B110")
@pytest.mark.fault("B112")
@pytest.mark.parametrize("what", ["chunks", "all below", "the directory"])
def test_what_is_removed_and_made_again_in_the_middle_costs_hits(tmp_path: Path, what: str) -> None:
    rng = random.Random(2)
    path = tmp_path / "t"
    with Engine(path, "removed", FULL, 1) as engine:
        for _ in range(2):
            traffic(engine, rng, 15)
            if what == "chunks":
                for file in chunk_files(path):
                    file.unlink()
            elif what == "all below":
                shutil.rmtree(path / "v1", ignore_errors=True)
            else:
                shutil.rmtree(path, ignore_errors=True)
            traffic(engine, rng, 15)
            path.mkdir(exist_ok=True)
        engine.wait_in_service()
        engine.serve(PROMPT)
    with Engine(path, "removed-2", FULL, 1) as engine:
        assert engine.serve(PROMPT).was_external == 40
        assert engine.stats()["tokens_loaded 0:files"] == 40


@pytest.mark.fault("B109")
@pytest.mark.fault("B214")
@pytest.mark.parametrize(
    ("groups", "how"),
    [(FULL, how) for how in ("flipped", "header", "truncated", "empty", "longer", "pickle", "swapped", "directory")]
    + [(HYBRID, "flipped"), (HYBRID, "swapped")],
)
def test_a_damaged_file_under_a_right_name_is_a_miss_of_that_chunk_and_goes(
    tmp_path: Path, groups: tuple[KVGroup, ...], how: str
) -> None:
    prompt = [*PROMPT, *numbers(3, 20)]
    with Engine(tmp_path, "damaged-1", groups, 1, io_process=False) as engine:
        engine.serve(prompt)
    before = {path: path.read_bytes() for path in chunk_files(tmp_path)}
    damage(list(before), how, tmp_path)
    with Engine(tmp_path, "damaged-2", groups, 1, io_process=False) as engine:
        request = engine.serve(prompt)
        assert request.status is Status.FINISHED
        assert request.was_external == 0
        stats = engine.stats()
        assert stats["promotion_failures 0:files"] > 0 or how in ("directory",)
        if how not in ("directory",):
            assert sum(n for name, n in stats.items() if name.startswith("damaged_")) > 0
        assert engine.serve(prompt).was_external == 56
    assert not (tmp_path / "ran").exists(), "stored bytes were run as code"
    if how != "directory":
        after = {path: path.read_bytes() for path in chunk_files(tmp_path)}
        # Of a window, a chunk may have been recycled before it could be offered again.
        assert after.items() <= before.items()
        assert len(after) == len(before) or groups is HYBRID, "what was damaged is stored anew"


class Bomb:
    """Runs a command where somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.path),)


def damage(files: list[Path], how: str, where: Path) -> None:
    if how == "swapped":
        contents = [file.read_bytes() for file in files]
        for file, other in zip(files, contents[1:] + contents[:1], strict=True):
            file.write_bytes(other)
        return
    for file in files:
        whole = bytearray(file.read_bytes())
        if how == "flipped":
            whole[4096 + 100] ^= 4
        elif how == "header":
            whole[20] ^= 4
        elif how == "truncated":
            del whole[5000:]
        elif how == "empty":
            whole.clear()
        elif how == "longer":
            whole += bytes(4096)
        elif how == "pickle":
            bomb = pickle.dumps(Bomb(where / "ran"))
            whole[: len(bomb)] = bomb
        file.unlink()
        if how == "directory":
            file.mkdir()
        else:
            file.write_bytes(whole)


@pytest.mark.fault("B214")
def test_nothing_at_rest_is_unpickled_or_evaluated() -> None:
    """Pickle is the private wire between an engine and the process it started, and nothing else."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            wrong = {"pickle", "marshal", "shelve", "dill"} & {name.split(".")[0] for name in names}
            if wrong or called in ("eval", "exec", "torch.load") or called.endswith("allow_pickle"):
                found.add(path.relative_to(SOURCE).as_posix())
    assert found == {"tiering/io_messages.py"}


# --- stores that lie -------------------------------------------------------------------------------------------------


@pytest.mark.fault("B053")
@pytest.mark.parametrize(
    ("lie", "io_process"),
    [
        ("SaysOkAndKeepsNothing", True),
        ("KeepsOtherBytes", True),
        ("GivesOtherKeysBytes", False),
        ("SaysMissingAboutAll", False),
        ("AnswersTooFew", False),
    ],
)
def test_a_store_that_lies_costs_hits_and_nothing_else(tmp_path: Path, lie: str, io_process: bool) -> None:
    rng = random.Random(4)
    tier = {"type": f"real_stores:{lie}", "deadline": dict(PATIENT)}
    with Engine(tmp_path, f"lie-{lie}", FULL, 1, tier, io_process=io_process) as engine:
        traffic(engine, rng, 30)
        engine.load_from_files(rng)
        engine.run()
        stats = engine.stats()
        assert stats[f"tokens_loaded 0:real_stores:{lie}"] == 0
        refused = stats[f"promotion_failures 0:real_stores:{lie}"] + stats[f"lookups_failed 0:real_stores:{lie}"]
        assert refused > 0, "the lie was never told"


def test_a_store_that_is_honest_serves_the_same_traffic(tmp_path: Path) -> None:
    tier = {"type": "real_stores:MemoryStore", "deadline": dict(PATIENT)}
    with Engine(tmp_path, "honest", FULL, 1, tier) as engine:
        engine.load_from_files(random.Random(4))
        assert engine.stats()["tokens_loaded 0:real_stores:MemoryStore"] > 0


def test_messages_name_no_value_of_ours_that_is_a_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Engine(tmp_path, "secret", FULL, 1, settings={"tiers": [{"type": "files", "password": "hunter2"}]})
    assert not re.search("hunter2", str(caught.value))
