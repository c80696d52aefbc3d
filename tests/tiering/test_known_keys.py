"""A store that tells its keys: lookups are answered on the engine's side at once, also after its process was killed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tier_doubles import PATIENCE_S, Rig, keys

from orlop.core import Outcome, TierAnswer
from orlop.tiering.io_messages import Keys, StoreSpec
from orlop.tiering.key_index import KeyIndex, key_name
from orlop.tiering.known_keys import KnownKeys


@pytest.fixture(params=[True, False], ids=["process", "threads"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Rig]]:
    rigs: list[Rig] = []

    def make_rig() -> Rig:
        kwargs = {"path": str(tmp_path), "max_bytes": 8 << 20}
        spec = StoreSpec("orlop.stores.disk.store:DiskStore", kwargs)
        rigs.append(Rig(spec, io_process=request.param, restart_s=0.01))
        assert rigs[-1].runner.wait_ready(PATIENCE_S) is None
        return rigs[-1]

    yield make_rig
    for rig in rigs:
        rig.close()


def at_once(rig: Rig, wanted: list[bytes], **options: bool) -> bytes:
    _, answer = rig.ask(wanted, **options)
    assert isinstance(answer, TierAnswer), "the engine's side had to ask"
    return answer.found


def test_what_was_stored_is_known_at_once_and_what_left_is_not(make: Callable[[], Rig]) -> None:
    rig = make()
    assert at_once(rig, keys(3)) == b"\0"
    rig.store(keys(40))
    assert rig.results()[0].outcomes == (Outcome.OK,) * 40
    assert at_once(rig, keys(42)) == b"\1" * 40 + b"\0"
    assert at_once(rig, keys(42), stop_at_miss=False) == b"\1" * 40 + b"\0\0"
    rig.close()
    again = make()
    assert at_once(again, keys(42)) == b"\1" * 40 + b"\0"
    again.runner.clear()
    assert not any(again.found(keys(42)))
    again.store(keys(1, b"n"))
    while again.results()[0].outcomes != (Outcome.OK,):
        again.store(keys(1, b"n"))  # until the clear is over
    assert not any(again.found(keys(42)))
    assert again.found(keys(1, b"n")) == b"\1"


@pytest.mark.fault("B142")
def test_a_killed_process_is_forgotten_and_the_next_one_is_believed(tmp_path: Path) -> None:
    spec = StoreSpec("orlop.stores.disk.store:DiskStore", {"path": str(tmp_path), "max_bytes": 8 << 20})
    rig = Rig(spec, io_process=True, restart_s=0.01)
    try:
        assert rig.runner.wait_ready(PATIENCE_S) is None
        rig.store(keys(40))
        assert rig.results()[0].outcomes == (Outcome.OK,) * 40
        pid = rig.runner.io_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while True:
            rig.now += 100.0
            rig.load(keys(40))
            if rig.results()[0].outcomes == (Outcome.OK,) * 40:
                break
        assert rig.runner.io_pid != pid
        assert at_once(rig, keys(42)) == b"\1" * 40 + b"\0"
    finally:
        rig.close()


@pytest.mark.fault("B142")
def test_while_no_process_is_there_nothing_is_believed(tmp_path: Path) -> None:
    spec = StoreSpec("orlop.stores.disk.store:DiskStore", {"path": str(tmp_path), "max_bytes": 8 << 20})
    rig = Rig(spec, io_process=True, restart_s=1e6, max_restart_s=1e6)
    try:
        assert rig.runner.wait_ready(PATIENCE_S) is None
        rig.store(keys(4))
        assert rig.results()[0].outcomes == (Outcome.OK,) * 4
        pid = rig.runner.io_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while rig.load(keys(4)) and rig.results()[0].outcomes == (Outcome.OK,) * 4:
            pass  # it was told to do that before it died
        assert rig.found(keys(4)) == bytes(4)
    finally:
        rig.close()


def test_nothing_is_known_before_all_was_told() -> None:
    known = KnownKeys()
    names = np.array([key_name(b"d" * 16 + key) for key in keys(10)], np.uint64)
    assert known.find(b"d" * 16, keys(10), True) is None
    known.take(Keys(names[:5].tobytes(), b"", reset=True, more=True))
    assert known.find(b"d" * 16, keys(10), True) is None
    known.take(Keys(names[5:].tobytes(), b"", reset=False, more=False))
    assert known.find(b"d" * 16, keys(10), True) == b"\1" * 10
    assert known.find(b"e" * 16, keys(10), False) == b"\0" * 10
    known.take(Keys(b"", names[3:4].tobytes(), reset=False, more=False))
    assert known.find(b"d" * 16, keys(10), True) == b"\1\1\1\0"
    known.drop()
    known.take(Keys(names.tobytes(), b"", reset=False, more=False))
    assert known.find(b"d" * 16, keys(10), True) is None


def test_an_index_is_a_dictionary_however_often_it_merges() -> None:
    rng, index, twin = random.Random(3), KeyIndex(), {}
    for turn in range(40):
        for _ in range(1000):
            name = rng.randrange(1, 20_000) << 40 | 1
            value = rng.choice([-1, rng.randrange(1 << 50)])
            index.set(name, value)
            twin[name] = value
        if turn % 10 == 5:
            alive = {name: value for name, value in twin.items() if value >= 0}
            assert len(index) == len(alive)
            index.load(np.array(list(alive), np.uint64), np.array(list(alive.values()), np.int64))
        asked = [rng.randrange(1, 20_000) << 40 | 1 for _ in range(500)]
        assert index.get(asked) == [twin.get(name, -1) for name in asked]
        assert index.has(asked) == bytes(twin.get(name, -1) >= 0 for name in asked)
    names, values = index.items()
    assert dict(zip(names.tolist(), values.tolist(), strict=True)) == {n: v for n, v in twin.items() if v >= 0}
