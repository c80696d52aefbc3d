"""Tiers that are written on eviction: what goes down when, and what becomes of what does not.

In: the real scheduler half, TieringManager and host tier over a tier cranked by hand; a connector over real
directories. Out: chunks that are written once, when they are about to leave, or are counted. Never: a wait.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from byte_engine import FULL as FULL_GROUPS
from byte_engine import PATIENT, Engine
from real_stores import Gated

from orlop.core import NO_SALT, Outcome
from orlop.host.policies import BUILT_IN
from orlop.testing.doubles import ManualTier
from orlop.testing.rig import FULL, Rig, make_tiered_rig
from orlop.tiering.manager import TieringManager

ON_EVICTION = {"store": False, "evicted_bytes": 8 * 4096}
SLOTS = 64
RESERVE = SLOTS // 4
PROMPT = list(range(16))


def make(**more: Any) -> tuple[Rig, TieringManager, ManualTier]:
    rig = make_tiered_rig(FULL, slots=SLOTS, blocks=200, **{"entry": ON_EVICTION, **more})
    manager = rig.manager.inner
    assert isinstance(manager, TieringManager)
    return rig, manager, rig.tiers[0]


def filler(i: int, chunks: int = 8) -> range:
    return range(10**6 * (i + 1), 10**6 * (i + 1) + 4 * chunks)


def written(tier: ManualTier) -> list[bytes]:
    return [key for call in tier.calls if call.name == "submit_store" for key in call.what.keys]


def keys_of(rig: Rig, prompt: list[int]) -> set[bytes]:
    """The packed keys of a prompt's chunks, by asking with it."""
    request = rig.runner.add(prompt)
    keys = {block_hash + bytes(4) for block_hash in request.block_hashes[: len(prompt) // 4]}
    rig.runner.run()
    rig.runner.pool.reset()
    return keys


def lost(manager: TieringManager) -> float:
    return manager.get_stats()["evictions_unwritten 0:manual"]


def unwritten(manager: TieringManager) -> float:
    return manager.get_stats()["chunks_unwritten 0:manual"]


def test_what_fits_into_host_memory_is_not_written() -> None:
    rig, manager, tier = make()
    rig.store(PROMPT)
    for i in range(5):
        rig.store(filler(i))
    assert not written(tier)
    assert unwritten(manager) == 4 + 5 * 8
    rig.finish()


def test_what_leaves_was_written_before_and_comes_back_from_below() -> None:
    rig, manager, tier = make()
    rig.store(PROMPT)
    for i in range(16):
        rig.store(filler(i))
    assert manager.host.evictions > 0
    assert lost(manager) == 0
    request = rig.runner.add([*PROMPT, 1])
    rig.finish()
    assert request.was_external == 16
    assert len(tier.loaded_keys()) == 4
    assert max(Counter(written(tier)).values()) == 1


def test_the_next_victims_are_clean_and_the_others_are_not_written() -> None:
    rig, manager, tier = make()
    for i in range(12):
        rig.store(filler(i))
    assert unwritten(manager) >= SLOTS - 2 * RESERVE
    assert not set(manager.host.coming(RESERVE // 2)) & set(manager._write_back._lacking(0).tolist())
    assert len(written(tier)) <= manager.host.evictions + RESERVE


def test_slots_that_are_not_ready_for_use_yet_are_no_reserve() -> None:
    rig, manager, tier = make(usable=SLOTS // 2)
    for i in range(8):
        rig.store(filler(i, 4))
    assert manager.host.evictions == 0
    assert len(written(tier)) >= RESERVE // 2


def test_what_stays_in_use_is_never_written() -> None:
    rig, _, tier = make()
    keys = keys_of(rig, PROMPT)
    for i in range(20):
        rig.store(filler(i))
        rig.store([*PROMPT, 1])
    assert len(written(tier)) > SLOTS
    assert not keys & set(written(tier))
    rig.finish()


def test_what_a_tier_has_brought_is_not_written_again() -> None:
    rig, _, tier = make()
    keys = keys_of(rig, PROMPT)
    for round_ in range(3):
        for i in range(12):
            rig.store(filler(100 * round_ + i))
        rig.store([*PROMPT, 1])
    assert len(tier.loaded_keys()) >= 8
    assert [written(tier).count(key) for key in keys] == [1] * 4


def test_a_slot_that_a_tier_fills_does_not_inherit_what_its_last_chunk_lacked() -> None:
    rig, manager, tier = make()
    keys = keys_of(rig, PROMPT)
    for i in range(12):
        rig.store(filler(i))
    tier.store_outcome = lambda key: Outcome.IO_ERROR
    for i in range(12):
        rig.store(filler(100 + i))
    before = lost(manager), unwritten(manager)
    assert before[1] == SLOTS
    rig.store([*PROMPT, 1])
    assert len(tier.loaded_keys()) == 4
    assert (lost(manager), unwritten(manager)) == (before[0] + 4, SLOTS - 4)
    assert [written(tier).count(key) for key in keys] == [1] * 4


def test_a_tier_that_never_answers_costs_chunks_and_nobody_waits() -> None:
    rig, manager, tier = make(auto=False)
    for i in range(20):
        request = rig.runner.add(filler(i))
        for _ in range(6):
            rig.runner.step()
        assert request.ended
        held = sum(len(job.slots) for job in tier.jobs.values())
        assert held <= RESERVE // 2
    assert lost(manager) > 0
    assert manager.counters["allocation_failures"] == 0
    tier.auto = True
    rig.finish()


def test_what_could_not_be_written_is_tried_again_before_it_leaves() -> None:
    rig, manager, tier = make()
    for i in range(7):
        rig.store(filler(i))
    tier.store_outcome = lambda key: Outcome.NO_SPACE
    tier.calls.clear()
    rig.store(filler(7))
    refused = set(written(tier))
    assert refused
    tier.store_outcome = lambda key: Outcome.OK
    rig.store(filler(8, 3))
    assert refused <= {key for _, key in tier.stored}
    assert lost(manager) == 0
    rig.finish()


def test_a_reset_forgets_what_was_not_written() -> None:
    rig, manager, tier = make()
    for i in range(7):
        rig.store(filler(i))
    before = len(tier.stored)
    rig.runner.reset()
    assert unwritten(manager) == 0
    for i in range(3):
        rig.store(filler(50 + i))
    assert len(tier.stored) == before
    assert lost(manager) == 0
    rig.finish()


def test_a_job_that_outlives_its_deadline_is_given_up_like_any_cascade() -> None:
    rig, manager, tier = make(auto=False)
    for i in range(8):
        rig.runner.add(filler(i))
        for _ in range(6):
            rig.runner.step()
    sent = sum(len(job.slots) for job in tier.jobs.values())
    assert sent
    rig.clock.advance(100.0)
    rig.runner.step()
    assert lost(manager) >= sent
    assert manager.get_stats()["slots_retired"] == sent
    tier.auto = True
    rig.finish()


def test_each_salt_travels_with_its_chunks() -> None:
    through, *_ = make(entry={"store": True})
    rig, _, tier = make()
    for each in (through, rig):
        each.store(PROMPT, cache_salt="a")
        each.store(PROMPT, cache_salt="b")
        each.store(PROMPT)
        for i in range(16):
            each.store(filler(i))

    def salts(tier: ManualTier) -> dict[bytes, bytes]:
        jobs = [call.what for call in tier.calls if call.name == "submit_store"]
        return {key: job.salt for job in jobs for key in job.keys}

    expected, found = salts(through.tiers[0]), salts(tier)
    assert len({salt for salt in found.values() if salt != NO_SALT}) == 2
    assert all(expected[key] == salt for key, salt in found.items())


def test_work_on_eviction_is_nobodys_and_counts_as_pending() -> None:
    rig, manager, tier = make(auto=False)
    for i in range(8):
        rig.runner.add(filler(i))
        for _ in range(6):
            rig.runner.step()
    assert all(not job.contexts for job in tier.jobs.values())
    assert tier.jobs
    assert manager.has_pending_work()
    tier.auto = True
    rig.finish()
    assert not manager.has_pending_work()


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
def test_every_chunk_is_written_lost_or_still_there(policy: str) -> None:
    """The judge: what became readable and was admitted is somewhere, once, under any policy and any trouble."""
    for seed in range(6):
        dice = random.Random(seed)
        rig, manager, tier = make(policy=policy)
        prompts = [[dice.randrange(10**6) for _ in range(4 * dice.randint(2, 9))] for _ in range(30)]
        for _ in range(80):
            tier.auto = dice.random() < 0.8
            good = dice.random() < 0.8
            tier.store_outcome = (lambda key: Outcome.OK) if good else (lambda key: Outcome.IO_ERROR)
            rig.runner.add([*dice.choice(prompts)[: 4 * dice.randint(1, 9)], dice.randrange(100)])
            for _ in range(dice.randint(1, 6)):
                rig.runner.step()
            if dice.random() < 0.3:
                rig.runner.pool.reset()
        tier.auto = True
        rig.finish()
        ended = dict.fromkeys(call.what for call in rig.manager.calls if call.name == "complete_store")
        stored = sum(len(reservation.hashes) for reservation in ended)
        failed = manager.counters["stores_failed"]
        kept = manager.counters["chunks_cascaded 0:manual"]
        assert stored - failed == kept + lost(manager) + unwritten(manager), f"seed {seed}"


def flush(rig: Rig, manager: TieringManager, tier: ManualTier) -> int:
    rounds = 0
    while manager.flush(now=rig.clock.now):
        rounds += 1
        assert rounds < 100
        tier.complete()
    return rounds


def test_the_end_writes_all_that_is_left_and_first_what_would_leave_last() -> None:
    rig, manager, tier = make(auto=False)
    for i in range(6):
        rig.runner.add(filler(i))
        rig.runner.run()
    last = keys_of(rig, list(filler(5)))
    assert not written(tier)
    flush(rig, manager, tier)
    assert set(written(tier)[: len(last)]) == last
    assert len(tier.stored) == 6 * 8
    assert unwritten(manager) == lost(manager) == 0
    manager.check()


def test_the_end_tries_nothing_twice() -> None:
    rig, manager, tier = make(auto=False)
    for i in range(6):
        rig.runner.add(filler(i))
        rig.runner.run()
    tier.store_outcome = lambda key: Outcome.UNAVAILABLE
    flush(rig, manager, tier)
    assert lost(manager) == len(written(tier)) == 6 * 8


def test_without_such_a_tier_the_end_has_nothing_to_write() -> None:
    rig, manager, _ = make(entry={"store": True})
    rig.store(PROMPT)
    assert manager.flush(now=rig.clock.now) is False


# --- a real connector ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["disk", "files"])
def test_a_restart_finds_what_was_only_in_host_memory(tmp_path: Path, kind: str) -> None:
    tier = {"type": kind, "path": str(tmp_path), "bytes": "2MiB", "write": "evicted", "deadline": dict(PATIENT)}
    prompt = list(range(1000, 1041))
    with Engine(tmp_path, "first", FULL_GROUPS, 1, tier=tier, settings={"drain_deadline": "60s"}) as engine:
        engine.serve(prompt)
        stats = engine.stats()
        assert stats[f"chunks_unwritten 0:{kind}"] > 0
        assert not stats.get(f"chunks_cascaded 0:{kind}")
    with Engine(tmp_path, "second", FULL_GROUPS, 1, tier=tier) as engine:
        assert engine.serve(prompt).was_external == 40


@pytest.mark.parametrize("kind", ["disk", "files"])
def test_what_has_left_a_real_host_memory_comes_back_from_a_real_tier(tmp_path: Path, kind: str) -> None:
    tier = {"type": kind, "path": str(tmp_path), "bytes": "4MiB", "write": "evicted", "deadline": dict(PATIENT)}
    host = {"host": {"bytes": SLOTS * 4096}}
    with Engine(tmp_path, "small", FULL_GROUPS, 1, tier=tier, settings=host) as engine:
        prompts = [list(range(1000 * i, 1000 * i + 41)) for i in range(1, 26)]
        for prompt in prompts:
            engine.serve(prompt)
        assert engine.stats()["host_evictions"] > 24
        assert engine.stats()[f"evictions_unwritten 0:{kind}"] == 0
        assert [engine.serve(prompt).was_external for prompt in prompts] == [40] * 25


def test_a_tier_that_hangs_at_the_end_costs_its_chunks_and_not_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Gated.open_both()
    tier = {"type": "real_stores:Gated", "path": str(tmp_path), "bytes": "4MiB", "write": "evicted"}
    settings = {"drain_deadline": "300ms"}
    engine = Engine(tmp_path, "hangs", FULL_GROUPS, 1, tier=tier, settings=settings, io_process=False)
    engine.serve(list(range(1000, 1041)))
    Gated.may_write.clear()
    engine.shutdown()
    Gated.open_both()
    (said,) = [r.getMessage() for r in caplog.records if "in host memory alone" in r.getMessage()]
    assert "with 5 chunks" in said
