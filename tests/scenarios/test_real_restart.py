"""What a restart finds and what it must not find, over a real directory.

In: engines that come and go over one files tier, each with one thing changed. Out: what was stored under the same
settings, and nothing else, with the field named in the log. Never: a hit across namespaces, salts or generations
that are not the process's own.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from byte_engine import FULL, HYBRID, PATIENT, Engine
from real_stores import Gated

import orlop.tiering.manager as manager_module
from orlop.core import KVGroup, RegionLayout
from orlop.testing.byte_device import ByteDevice
from orlop.tiering.namespace import Fingerprint

PROMPT = list(range(1000, 1041))
WIDE = (KVGroup(0, 4, layers=("a", "b", "c")),)


def numbers(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10**6) for _ in range(count)]


def life(path: Path, name: str, *, groups: tuple[KVGroup, ...] = FULL, ranks: int = 1, **rest: Any) -> tuple[int, int]:
    """One life of an engine that asks for the prompt once: tokens loaded from files, and tokens of a chunk."""
    with Engine(path, name, groups, ranks, io_process=False, **rest) as engine:
        request = engine.serve(PROMPT)
        chunk_tokens = engine.device.geometry.chunk_tokens(0)
        assert engine.stats()["tokens_loaded 0:files"] == request.was_external
        return request.was_external, chunk_tokens


# --- one changed setting at a time ----------------------------------------------------------------------------------

CHANGES: dict[str, dict[str, Any]] = {
    "identity.model": {"spec": {"identity": {"model": "other"}}},
    "identity.dtype": {"spec": {"identity": {"model": "cells", "dtype": "fp8"}}},
    "identity.weights_id": {"settings": {"weights_id": "tuned-2"}},
    "blocks_per_chunk": {"settings": {"blocks_per_chunk": 1}},
    "groups": {"groups": HYBRID},
    "groups[0].layers[1]": {"groups": (KVGroup(0, 4, layers=("a", "z")),)},
    "groups[0].sliding_window": {"groups": (KVGroup(0, 4, sliding_window=64, layers=("a", "b")),)},
    "page_bytes[0][0]": {"groups": WIDE},
    "ranks": {"ranks": 2},
}


@pytest.mark.fault("B046")
@pytest.mark.parametrize("field", CHANGES)
def test_another_setting_finds_nothing_and_the_log_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    caplog.set_level(logging.INFO, "orlop.connector")
    assert life(tmp_path, "before")[0] == 0
    caplog.clear()
    assert life(tmp_path, "changed", **CHANGES[field])[0] == 0
    (said,) = [r.getMessage() for r in caplog.records if "not served to this run" in r.getMessage()]
    assert field in said.split("it differs in ")[1].split(", ")
    caplog.clear()
    assert life(tmp_path, "as-before")[0] == 40
    assert "not served to this run" not in caplog.text
    assert life(tmp_path, "changed-again", **CHANGES[field])[0] == 40


def test_weights_that_are_no_files_are_told_apart_by_their_name(tmp_path: Path) -> None:
    """With a name the tiers are on; under another name nothing is served."""
    for name, found in [("tuned-1", 0), ("tuned-2", 0), ("tuned-1", 40), ("tuned-2", 40)]:
        settings = {"weights_id": name}
        assert life(tmp_path, "named", spec={"persistent": False}, settings=settings)[0] == found
    assert len([path for path in (tmp_path / "v1").iterdir() if path.name != "tmp"]) == 2


def test_auto_takes_the_chunk_size_that_is_stored(tmp_path: Path) -> None:
    assert life(tmp_path, "three", settings={"blocks_per_chunk": 3}) == (0, 12)
    assert life(tmp_path, "auto", settings={"blocks_per_chunk": "auto"}) == (36, 12)
    # Of another model's chunks it takes nothing.
    other = {"identity": {"model": "other"}}
    assert life(tmp_path, "auto-other", settings={"blocks_per_chunk": "auto"}, spec=other)[0] == 0
    # The newest of those that fit is taken.
    assert life(tmp_path, "two") == (0, 8)
    make_older(tmp_path, 'blocks_per_chunk": 3')
    assert life(tmp_path, "auto-2", settings={"blocks_per_chunk": "auto"}) == (40, 8)


def make_older(path: Path, text: str) -> None:
    """Set back the times of the descriptions that hold ``text``."""
    for description in path.glob("*.json"):
        if text in description.read_text(encoding="ascii"):
            os.utime(description, (1, 1))


@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
def test_two_ranks_find_after_a_restart_what_they_stored_and_one_rank_finds_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, groups: tuple[KVGroup, ...]
) -> None:
    caplog.set_level(logging.INFO, "orlop.connector")
    with Engine(tmp_path, "ranks-1", groups, 2, async_scheduling=True) as engine:
        for seed in range(3):
            engine.serve([*PROMPT[:20], *numbers(seed, 20)], 4)
        engine.serve(PROMPT)
    with Engine(tmp_path, "ranks-2", groups, 2) as engine:
        assert engine.serve(PROMPT).was_external == 40
        assert engine.stats()["tokens_loaded 0:files"] == 40
        assert engine.device.loads_checked > 0
    caplog.clear()
    with Engine(tmp_path, "ranks-3", groups, 1) as engine:
        assert engine.serve(PROMPT).was_external == 0
    assert "ranks" in caplog.text.split("it differs in ")[1].split("\n")[0]


# --- namespaces and salts -----------------------------------------------------------------------------------------


@pytest.mark.fault("B212")
@pytest.mark.parametrize("order", [("A", "B", None), (None, "B", "A")], ids=str)
def test_no_namespace_finds_another_ones_chunks_in_any_order(tmp_path: Path, order: tuple[str | None, ...]) -> None:
    def says(namespace: str | None) -> dict[str, Any]:
        return {"identity": {"model": "cells"} | ({"namespace": namespace} if namespace else {})}

    for namespace in order:  # each comes to a directory that holds all before it
        assert life(tmp_path, f"first-{namespace}", spec=says(namespace))[0] == 0
    for namespace in order:
        assert life(tmp_path, f"second-{namespace}", spec=says(namespace))[0] == 40


@pytest.mark.fault("B210")
def test_salts_share_no_chunk_in_any_tier_and_stand_nowhere_in_clear(tmp_path: Path) -> None:
    salts = ["tenant-one-secret", "tenant-two-secret", None]
    with Engine(tmp_path, "salts-1", FULL, 1) as engine:
        for salt in salts:
            assert engine.serve(PROMPT, cache_salt=salt).was_external == 0, "host memory or files crossed a salt"
        assert [engine.serve(PROMPT, cache_salt=salt).was_external for salt in salts] == [40] * 3
        spoken = repr([list(engine.connector.take_events()), dict(engine.stats())])
    with Engine(tmp_path, "salts-2", FULL, 1) as engine:
        assert engine.serve(PROMPT, cache_salt="tenant-three").was_external == 0
        assert [engine.serve(PROMPT, cache_salt=salt).was_external for salt in salts] == [40] * 3
        assert engine.stats()["tokens_loaded 0:files"] == 120
    for file in tmp_path.rglob("*"):
        assert "secret" not in str(file)
        assert not file.is_file() or b"secret" not in file.read_bytes()
    assert "secret" not in spoken


@pytest.mark.fault("B213")
def test_fields_that_join_to_one_text_are_different_namespaces() -> None:
    rng = random.Random(1)
    names = ("model", "salt", "adapter", "image", "tokens")
    layout = RegionLayout(1, 2, ((128,),))

    def digest(identity: dict[str, Any]) -> bytes:
        return Fingerprint(identity, FULL, layout.page_bytes, 4, 2, 1).namespace().digest

    for _ in range(1000):
        text = "".join(rng.choice('ab1,:"{}[]\\') for _ in range(12))
        one, other = ([0, *sorted(rng.choices(range(13), k=4)), 12] for _ in range(2))
        if one != other:
            split = [[text[a:b] for a, b in itertools.pairwise(cut)] for cut in (one, other)]
            assert digest(dict(zip(names, split[0], strict=True))) != digest(dict(zip(names, split[1], strict=True)))
    empty_or_missing = [{}, {"salt": ""}, {"salt": None}, {"salt": []}, {"salt": {}}, {"salt": "0"}, {"salt": 0}]
    assert len({digest(identity) for identity in empty_or_missing}) == len(empty_or_missing)
    salted = [digest({"salt": "a", "model": "b"}), digest({"salt": "b", "model": "a"})]
    assert salted[0] != salted[1]


# --- resets -----------------------------------------------------------------------------------------------------------


class WeightedDevice(ByteDevice):
    """Cells that also say which version of the weights computed them."""

    def _cells(self, digests: Any, layer: str, rank: int) -> Any:
        cells = super()._cells(digests, layer, rank)
        cells[:, -3] = self.weights
        return cells


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[dict[str, Any]]:
    Gated.open_both()
    yield {"type": "real_stores:Gated", "path": str(tmp_path), "bytes": "8MiB", "deadline": dict(PATIENT)}
    Gated.open_both()


@pytest.mark.fault("B016")
@pytest.mark.fault("B027")
def test_a_slow_write_of_old_weights_never_comes_back_after_a_reset(tmp_path: Path, gated: dict[str, Any]) -> None:
    """Old: first generation, what the identity's weights computed. New: what they became by an update in place."""
    device: dict[str, Any] = {"device": WeightedDevice, "io_process": False}
    with Engine(tmp_path, "reset-1", FULL, 1, gated, **device) as engine:
        Gated.may_write.clear()
        first = engine.runner.add(PROMPT)
        engine.until(lambda: Gated.waiting.acquire(blocking=False))  # old bytes are on their way to the file
        engine.until(lambda: first.ended)
        engine.runner.reset(os.urandom(16))
        again = engine.runner.add(PROMPT)
        engine.until(lambda: again.ended)
        assert again.was_external == 0
        Gated.may_write.set()
        engine.run()
        engine.runner.pool.reset()
        for _ in range(2):
            assert engine.serve(PROMPT).was_external == 40
        for seed in range(8):
            engine.serve(numbers(seed, 61))  # out of host memory, so that only files are left
        engine.runner.pool.reset()
        files_before = engine.stats()["tokens_loaded 0:real_stores:Gated"]
        assert engine.serve(PROMPT).was_external == 40
        assert engine.stats()["tokens_loaded 0:real_stores:Gated"] == files_before + 40
    # A process that starts again has loaded the weights that its identity names: those of before the reset.
    with Engine(tmp_path, "reset-2", FULL, 1, gated, **device) as engine:
        assert engine.serve(PROMPT).was_external >= 32  # the last chunk may have met the reset before its store
    # One whose identity names the new weights finds nothing of either.
    with Engine(tmp_path, "reset-3", FULL, 1, gated, spec={"identity": {"model": "updated"}}, **device) as engine:
        engine.device.weights = 1
        assert engine.serve(PROMPT).was_external == 0


@pytest.mark.fault("B016")
@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
def test_resets_in_the_middle_of_traffic_serve_nothing_from_before(tmp_path: Path, groups: tuple[KVGroup, ...]) -> None:
    rng = random.Random(7)
    roots = [numbers(i, 30) for i in range(3)]
    with Engine(tmp_path, "resets", groups, 1, device=WeightedDevice) as engine:
        engine.serve(roots[0])  # of the first weights at least this is stored before any reset
        for version in range(4):
            engine.device.weights = version
            for _ in range(12):
                engine.runner.add([*rng.choice(roots), *numbers(rng.randrange(10), 9)], 2)
                engine.runner.step()
            engine.until(lambda: not (engine.runner.running or engine.runner.waiting))
            # Transfers are still in flight here; what they bring belongs to nobody afterwards.
            engine.runner.reset(os.urandom(16))
            first = engine.runner.add(roots[0])
            engine.until(lambda first=first: first.ended)  # type: ignore[misc]
            assert first.was_external == 0
        engine.run()
        assert engine.stats()["slots_retired"] == 0
        engine.serve(roots[0])
    with Engine(tmp_path, "resets-2", groups, 1, device=WeightedDevice) as engine:
        assert engine.serve(roots[0]).was_external > 0, "what was stored before any reset is found again"


def test_tiers_that_are_kept_serve_after_a_reset_and_after_a_restart(tmp_path: Path) -> None:
    keep = {"settings": {"keep_tiers_on_reset": True}}
    with Engine(tmp_path, "keep-1", FULL, 1, **keep) as engine:
        engine.serve(PROMPT)
        for round_ in range(1, 3):
            engine.runner.reset(os.urandom(16), new_weights=False)
            assert engine.serve(PROMPT).was_external == 40
            assert engine.stats()["tokens_loaded 0:files"] == 40 * round_
    with Engine(tmp_path, "keep-2", FULL, 1, **keep) as engine:
        assert engine.serve(PROMPT).was_external == 40


@pytest.mark.parametrize("tells", [True, False])
def test_what_host_memory_served_all_the_time_is_not_the_oldest_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tells: bool
) -> None:
    """A prompt that is always in host memory is written once; the tier keeps it because it hears of its use."""
    monkeypatch.setattr(manager_module, "TOUCH_AGAIN_S", 0.0 if tells else math.inf)
    rng = random.Random(4)
    hot = [rng.randrange(10**6) for _ in range(41)]
    tier = {"type": "files", "path": str(tmp_path), "bytes": "1MiB", "deadline": dict(PATIENT)}
    with Engine(tmp_path, "hot", FULL, 1, tier) as engine:
        for _ in range(40):
            engine.serve(hot)
            for _ in range(2):  # in all more than twice what the tier may keep
                engine.serve([rng.randrange(10**6) for _ in range(33)])
        assert engine.stats()["tokens_loaded host"] == 39 * 40
    with Engine(tmp_path, "hot-again", FULL, 1, tier) as engine:
        assert engine.serve(hot).was_external == (40 if tells else 0)
