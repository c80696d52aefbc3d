"""Cache events: whoever only listens knows what can be found, in host memory and in the tiers below.

In: real scheduler halves over doubles and over a files tier, and a listener that knows nothing else. Out: what it
believes is what is there, what it predicts is what is served. Never: a look of the listener at anything but events.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_engine import FULL as ONE_GROUP
from byte_engine import PATIENT, Engine
from real_stores import chunk_files

from orlop.config import OrlopConfig
from orlop.core import CacheEvent, Geometry, KVGroup
from orlop.testing.request_runner import EngineRequest
from orlop.testing.rig import FULL, HYBRID, Rig, make_tiered_rig
from orlop.tiering.events import EventLog
from orlop.tiering.manager import TieringManager

QUADS = Geometry((KVGroup(0, 4),), 4, 4)
"""Four blocks of four tokens per chunk."""
EVENTS = {"events": True}


class Listener:
    """A router's picture of one engine: ``held[medium]`` are ``(group, hash)`` pairs, learned from events alone."""

    def __init__(self, *, exact: bool = True) -> None:
        self.held: dict[str, set[tuple[int, bytes]]] = {}
        self.exact = exact
        self.heard: list[CacheEvent] = []

    def hear(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            self.heard.append(event)
            held = self.held.setdefault(event.medium, set())
            named = {(event.group, block_hash) for block_hash in event.hashes}
            if event.cleared:
                held.clear()
                continue
            assert len(named) == len(event.hashes) > 0
            if self.exact:
                assert named.isdisjoint(held) if event.stored else named <= held, "each chunk comes once and goes once"
            held ^= named if self.exact else set()
            if not self.exact:
                held.update(named) if event.stored else held.difference_update(named)

    def predict(self, request: EngineRequest, chunk_tokens: int, hashes_per_chunk: int) -> int:
        """Tokens of the request that host memory would serve: whole chunks in a row, the last token excepted."""
        ends = request.block_hashes[hashes_per_chunk - 1 :: hashes_per_chunk]
        chunks = 0
        while chunks < len(ends) and (0, ends[chunks]) in self.held.get("host", set()):
            chunks += 1
        return min(chunks * chunk_tokens, (request.num_tokens - 1) // 4 * 4)


def listen(scheduler: Any, **more: Any) -> Listener:
    """Hears what the engine takes."""
    listener = Listener(**more)
    take = scheduler.take_events

    def taken() -> Sequence[CacheEvent]:
        events = list(take())
        listener.hear(events)
        return events

    scheduler.take_events = taken
    return listener


def readable(rig: Rig) -> set[tuple[int, bytes]]:
    manager = rig.manager.inner
    assert isinstance(manager, TieringManager)
    return {(group, key) for group, _, keys in manager.host.chunks_in(np.arange(manager.host.slots)) for key in keys}


@pytest.mark.fault("B176")
@pytest.mark.parametrize("shared", range(1, 65))
def test_what_a_listener_predicts_is_what_is_served_for_every_length_of_a_prefix(shared: int) -> None:
    rig = make_tiered_rig(QUADS, tiers=0, tiering=EVENTS)
    listener = listen(rig.scheduler)
    prompt = list(range(64))
    rig.store(prompt)
    request = rig.runner.add([*prompt[:shared], *range(500, 520)])
    predicted = listener.predict(request, 16, 4)
    rig.finish()
    assert request.was_external == predicted == shared // 16 * 16


@pytest.mark.fault("B172")
@pytest.mark.parametrize("seed", range(3))
def test_a_listener_knows_what_is_served_when_the_device_has_lost_it(seed: int) -> None:
    rng = random.Random(seed)
    rig = make_tiered_rig(FULL, slots=100, tiers=0, blocks=40, tiering=EVENTS, seed=seed)
    listener = listen(rig.scheduler)
    prompts = [[rng.randrange(1000) for _ in range(rng.randrange(8, 60))] for _ in range(30)]
    served = 0
    for _ in range(60):
        request = rig.runner.add([*rng.choice(prompts), 7])
        predicted = listener.predict(request, 4, 1)
        rig.runner.run()
        rig.runner.pool.reset()
        assert request.was_external == predicted
        served += predicted
        assert listener.held["host"] == readable(rig)
        assert len(listener.held["host"]) <= rig.scheduler.get_stats()["slots"] == 100
    assert served > 0
    assert rig.scheduler.get_stats()["host_evictions"] > 0
    rig.finish()


@pytest.mark.fault("B176")
@pytest.mark.parametrize("geometry", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("seed", range(3))
def test_each_chunk_comes_once_and_goes_once_whatever_fails(geometry: Any, seed: int) -> None:
    rng = random.Random(seed)
    rig = make_tiered_rig(geometry, slots=24, tiers=1, blocks=40, tiering=EVENTS, seed=seed, async_scheduling=True)
    rig.device.fail = lambda job, rank: rng.random() < 0.2
    rig.device.crank_chance = 0.6
    listener = listen(rig.scheduler)
    roots = [[rng.randrange(1000) for _ in range(rng.randrange(8, 40))] for _ in range(6)]
    for number in range(40):
        rig.runner.add([*rng.choice(roots), *range(rng.randrange(1, 8))], rng.randrange(1, 6))
        for _ in range(rng.randrange(6)):
            rig.runner.step()
        if rng.random() < 0.2:
            rig.runner.pool.reset()
        if number in (15, 30):
            rig.runner.reset()
    rig.finish()
    rig.scheduler.take_events()
    assert listener.held["host"] == readable(rig)


def test_a_chunk_that_left_and_came_back_since_the_last_look_is_told_in_that_order() -> None:
    rig = make_tiered_rig(FULL, slots=4, tiers=0, tiering=EVENTS)
    listener, take = Listener(), rig.scheduler.take_events
    rig.scheduler.take_events = lambda: ()  # type: ignore[method-assign]
    for start in (0, 100, 0):
        rig.store(range(start, start + 16))
    listener.hear(take())
    assert [(event.stored, len(event.hashes)) for event in listener.heard] == [
        (True, 4),
        (False, 4),
        (True, 4),
        (False, 4),
        (True, 4),
    ]
    assert listener.held["host"] == readable(rig)


def test_a_tier_that_is_given_a_chunk_again_has_it_once(tmp_path: Path) -> None:
    with Engine(tmp_path, "again", ONE_GROUP, 1, settings=EVENTS) as engine:
        listener = listen(engine.runner.scheduler)
        prompt = list(range(40))
        engine.serve(prompt)
        for i in range(1, 7):
            engine.serve(list(range(100 * i, 100 * i + 61)))  # host memory holds none of it any more
        written = engine.stats()["written_ok 0:files"]
        engine.serve(prompt, skip_reading_prefix_cache=True)
        assert engine.stats()["written_ok 0:files"] == written + 5
        assert len(listener.held["0:files"]) == 5 + 6 * 7


def test_nothing_is_kept_where_events_are_off(tmp_path: Path) -> None:
    with Engine(tmp_path, "off", ONE_GROUP, 1) as engine:
        listener = listen(engine.runner.scheduler)
        engine.serve(list(range(40)))
        assert listener.heard == []
        assert engine.manager.tiers[0].tier._announced == {}  # type: ignore[attr-defined]


def test_events_that_nobody_takes_end_as_one_that_says_forget_it_all() -> None:
    log = EventLog("host", most_hashes=10)
    listener = Listener()
    for i in range(0, 100, 2):
        log.stored(0, [bytes([i]), bytes([i + 1])])
    assert log.overflows == 8
    listener.hear(log.take())
    assert listener.heard[0].cleared
    assert listener.held["host"] == {(0, bytes([i])) for i in range(96, 100)}
    assert log.take() == []


def test_an_overflow_in_a_tier_makes_it_announce_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orlop.tiering.events.MOST_HASHES", 8)
    with Engine(tmp_path, "much", ONE_GROUP, 1, settings=EVENTS) as engine:
        tier: Any = engine.manager.tiers[0].tier
        tier._events._most_hashes = 8
        tier.take_events, take = lambda namespace: (), tier.take_events
        for i in range(6):
            engine.serve(list(range(100 * i, 100 * i + 40)))
        events = take(engine.manager._namespace)
        assert events[0].cleared
        assert engine.stats()["event_overflows 0:files"] >= 1
        listener = Listener()
        listener.hear(events)
        assert {key[:-4] for key in tier._announced.values()} == {h for _, h in listener.held["0:files"]}


@pytest.mark.parametrize("io_process", [True, False], ids=["process", "threads"])
def test_a_listener_knows_which_chunks_are_files(tmp_path: Path, io_process: bool) -> None:
    """Stored, evicted for room under the bound, and found gone."""
    tier = {"type": "files", "path": str(tmp_path), "bytes": "1MiB", "deadline": dict(PATIENT)}
    with Engine(tmp_path, "files", ONE_GROUP, 1, tier=tier, settings=EVENTS, io_process=io_process) as engine:
        listener = listen(engine.runner.scheduler)
        prompts = [list(range(1000 * i, 1000 * i + 61)) for i in range(30)]
        for prompt in prompts:
            engine.serve(prompt)
        assert engine.stats()["chunks_cascaded 0:files"] == 30 * 7
        settle(engine, listener, tmp_path)
        assert 60 < len(listener.held["0:files"]) <= 128
        last = chunk_files(tmp_path)
        for path in last:
            path.unlink()
        engine.serve([*prompts[-10], 1])  # the lookup or the read finds them gone
        engine.serve([*prompts[-11], 1])
        assert engine.serve([*prompts[-10], 2]).was_external == 56
        engine.runner.reset()
        engine.serve(list(range(90_000, 90_030)))
        engine.run()
        events = [e for e in listener.heard if e.medium == "0:files" and e.cleared]
        assert len(events) == 1
        assert len(listener.held["0:files"]) == 3


def test_a_listener_knows_which_chunks_the_slab_has(tmp_path: Path) -> None:
    tier = {"type": "disk", "path": str(tmp_path), "bytes": "1MiB", "deadline": dict(PATIENT)}
    with Engine(tmp_path, "slab", ONE_GROUP, 1, tier=tier, settings=EVENTS) as engine:
        listener = listen(engine.runner.scheduler)
        for i in range(60):
            engine.serve(list(range(1000 * i, 1000 * i + 61)))
        known: Any = engine.manager.tiers[0].tier._pump.known  # type: ignore[attr-defined]

        def agree() -> bool:
            told = [block_hash + bytes(4) for _, block_hash in listener.held["0:disk"]]
            found = known.find(engine.manager._namespace.digest, told, False)
            return set(found) == {1} and len(told) == engine.stats()["store_chunks 0:disk"]

        engine.until(agree)
        assert engine.stats()["store_evicted_chunks 0:disk"] > 0


def settle(engine: Engine, listener: Listener, path: Path) -> None:
    """Until what was removed in the background has come over too."""

    def agree() -> bool:
        there = {bytes.fromhex(p.name)[:-4] for p in chunk_files(path)}
        return {block_hash for _, block_hash in listener.held["0:files"]} == there

    engine.until(agree)


def test_vllms_keys_of_events_keep_their_meaning() -> None:
    fs = {"type": "fs", "root_dir": "/nowhere", "bytes": "1GB"}
    told = OrlopConfig.load({"secondary_tiers": [{**fs, "enable_kv_events": True}]}, environ={})
    silent = OrlopConfig.load({"secondary_tiers": [fs]}, environ={})
    ours = OrlopConfig.load({"files": {"path": "/nowhere", "bytes": "1GB"}, "events": True}, environ={})
    assert [c.tiers[0].events for c in (told, silent, ours)] == [True, False, True]
    assert [c.events for c in (told, silent, ours)] == [False, False, True]
