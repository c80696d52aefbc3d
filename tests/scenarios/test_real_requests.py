"""What users of such systems have met between requests and tiers, over everything that is real.

In: both connector halves, the host region, a files tier on a disk. Out: every byte that a load brings is that of its
tokens, and what counts as reused was not computed. Never: a double of one of our own parts.
"""

from __future__ import annotations

import itertools
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from byte_engine import FULL, HYBRID, PATIENT, Engine
from real_stores import Gated, LosesAPart, chunk_files

from orlop.core import KVGroup
from orlop.testing.request_runner import EngineRequest, Status

PROMPT = list(range(1000, 1041))
CHUNK = 8
"""Tokens of a chunk: two blocks of four."""

BOTH_FULL = (KVGroup(0, 4, layers=("a",)), KVGroup(1, 4, layers=("b",)))


def numbers(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10**6) for _ in range(count)]


def stored_whole(tokens: int) -> int:
    """Tokens of ``tokens`` that a second request for them, and one more, finds in whole chunks."""
    return tokens // CHUNK * CHUNK


def fill_host(engine: Engine, seed: int = 99) -> None:
    """So many other prompts that nothing from before is left in host memory."""
    for i in range(6):
        engine.serve(numbers(seed + i, 61))


def files(path: Path, store: str = "files", **rest: Any) -> dict[str, Any]:
    return {"type": store, "path": str(path), "bytes": "8MiB", "deadline": dict(PATIENT), **rest}


@pytest.mark.fault("B004")
@pytest.mark.parametrize(("after", "async_scheduling"), [(2, False), (2, True), (3, False)])
def test_what_an_interrupted_prompt_stored_is_what_its_keys_say(
    tmp_path: Path, after: int, async_scheduling: bool
) -> None:
    with Engine(tmp_path, "pause", FULL, 1, token_budget=8, async_scheduling=async_scheduling) as engine:
        request = engine.runner.add(PROMPT[:40])
        engine.until(lambda: request.num_computed_tokens == 8 * after)
        engine.runner.preempt(request.request_id)
        engine.runner.pool.reset()
        engine.run()
        engine.runner.pool.reset()
        again = engine.serve(PROMPT)
        assert again.was_external == 40
        fill_host(engine)
        assert engine.serve(PROMPT).was_external == 40
        assert engine.stats()["tokens_loaded 0:files"] == 40
    assert engine.device.loads_checked >= 2 * 40 // 4


@pytest.mark.fault("B053")
@pytest.mark.fault("B227")
def test_what_is_said_to_come_back_after_a_restart_was_not_computed(tmp_path: Path) -> None:
    with Engine(tmp_path, "first", FULL, 1) as engine:
        engine.serve(PROMPT[:40])
        assert (
            engine.serve(PROMPT[:40]).was_external == 36
        )  # the last block is not loaded: at least one token is always computed
    assert len(chunk_files(tmp_path)) == 5
    with Engine(tmp_path, "second", FULL, 1) as engine:
        computed = count_computed(engine)
        request = engine.serve(PROMPT)
        assert request.was_external == 40
        assert computed == [1]
        stats = engine.stats()
        assert stats["tokens_loaded 0:files"] == 40
        assert stats["read_ok 0:files"] == 5


def count_computed(engine: Engine) -> list[int]:
    """Tokens that each step computes, from now on."""
    computed: list[int] = []
    forward = engine.device._forward

    def counted(forwards: Any) -> None:
        computed.extend(f.count for f in forwards)
        forward(forwards)

    engine.device._forward = counted  # type: ignore[method-assign]
    return computed


@pytest.mark.fault("B055")
def test_store_and_lookup_cut_every_prompt_at_the_same_chunks(tmp_path: Path) -> None:
    system = numbers(1, 45)
    with Engine(tmp_path, "cut-1", FULL, 1) as engine:
        for tail in range(1, 10):  # ends at every position of a chunk
            engine.serve([*system, *numbers(100 + tail, tail)], 3)
    with Engine(tmp_path, "cut-2", FULL, 1) as engine:
        computed = count_computed(engine)
        expected, reused = 0, 0
        for tail in range(1, 10):
            prompt = [*system, *numbers(100 + tail, tail), 5]
            request = engine.serve(prompt)
            assert request.was_external == stored_whole(45 + tail)
            expected += len(prompt) - request.was_external
            reused += request.was_external
        assert sum(computed) == expected
        assert engine.stats()["tokens_loaded"] == reused


@pytest.mark.fault("B080")
def test_a_part_that_goes_between_check_and_read_costs_what_lies_beyond_it(tmp_path: Path) -> None:
    prompt = numbers(2, 81)
    with Engine(tmp_path, "part-1", BOTH_FULL, 1, blocks=64) as engine:
        engine.serve(prompt)
    assert len(chunk_files(tmp_path)) == 20
    LosesAPart.first_lost = 7
    tier = files(tmp_path, "real_stores:LosesAPart")
    roomy = {"host": {"bytes": 64 * 4096}}
    with Engine(tmp_path, "part-2", BOTH_FULL, 1, tier, io_process=False, settings=roomy, blocks=64) as engine:
        request = engine.serve(prompt)
        assert request.was_external == 7 * CHUNK
        assert engine.stats()["promotion_failures 0:real_stores:LosesAPart"] == 3


@pytest.mark.fault("B141")
def test_a_load_that_failed_on_one_rank_is_computed_and_shared_by_nobody(tmp_path: Path) -> None:
    rng = random.Random(3)
    roots = [numbers(10 + i, 24) for i in range(4)]
    with Engine(tmp_path, "failing", FULL, 2, async_scheduling=True) as engine:
        for root in roots:
            engine.serve(root)
        fail_loads(engine, rank=1, every=3)
        requests: list[EngineRequest] = []
        for _ in range(60):
            requests.append(engine.runner.add([*rng.choice(roots), *numbers(rng.randrange(99), 5)], 3))
            engine.runner.step()
            engine.runner.pool.reset()
        engine.run()
        assert all(r.status is Status.FINISHED for r in requests)
        loaded = [r.was_external > 0 for r in (*requests, *(engine.serve([*root, 1]) for root in roots))]
        assert any(loaded)
        assert engine.workers[1]._worker.failed_jobs > 0


def fail_loads(engine: Engine, rank: int, every: int) -> None:
    """The first of ``every`` loads of one rank fails half way, with other bytes in the blocks than wanted."""
    backend: Any = engine.workers[rank]._worker._backend
    copy, loads = backend.copy, itertools.count()

    def failing(job: Any) -> int:
        if job.kind.value == "load" and next(loads) % every == 0:
            for cells in engine.device.kv_caches[rank].values():
                for part in job.transfers:
                    cells[part.block_ids] = 0x55
            raise OSError("the copy failed")
        return int(copy(job))

    backend.copy = failing


@pytest.mark.fault("B099")
def test_a_hit_waits_while_every_block_of_the_device_is_in_use(tmp_path: Path) -> None:
    with Engine(tmp_path, "no-block", FULL, 1, blocks=14) as engine:
        engine.serve(PROMPT)
        holder = engine.runner.add(numbers(4, 30), 20)
        engine.until(lambda: holder.status is Status.RUNNING)
        hit = engine.runner.add([*PROMPT, 7])
        for _ in range(5):
            engine.runner.step()
        assert hit.was_external == 0
        engine.run()
        assert hit.status is Status.FINISHED
        assert holder.status is Status.FINISHED
        assert engine.device.loads_checked > 0


@pytest.mark.fault("B189")
@pytest.mark.parametrize("in_time", [False, True])
def test_what_comes_after_the_limit_hurts_nobody_and_is_found_the_next_time(tmp_path: Path, in_time: bool) -> None:
    prompts = [numbers(20 + i, 25) for i in range(3)]
    with Engine(tmp_path, "late-1", FULL, 1) as engine:
        for prompt in prompts:
            engine.serve(prompt)
    Gated.open_both()
    Gated.may_read.clear()
    tier = files(tmp_path, "real_stores:Gated")
    name = "0:real_stores:Gated"
    with Engine(tmp_path, "late-2", FULL, 1, tier, io_process=False) as engine:
        first = [engine.runner.add(prompt) for prompt in prompts]
        for _ in prompts:
            engine.until(lambda: Gated.waiting.acquire(blocking=False))
        if not in_time:
            engine.clock.skips_s = 1.0
            engine.until(lambda: all(r.ended for r in first))
            engine.clock.skips_s = 0.0
            assert not any(r.was_external for r in first)
        Gated.may_read.set()
        engine.run()
        engine.runner.pool.reset()
        stats = engine.stats()
        if not in_time:
            assert stats["tier_deadlines_passed"] > 0
            # The late word gives the slots back.
            engine.until(lambda: engine.stats()["slots_retired"] == 0)
        else:
            assert stats["tier_deadlines_passed"] == 0
            assert [r.was_external for r in first] == [24] * 3
            assert stats[f"tokens_loaded {name}"] == 72
        second = [engine.serve(prompt) for prompt in prompts]
        assert [r.was_external for r in second] == [24] * 3


@pytest.mark.fault("B236")
def test_a_request_that_must_not_read_the_cache_is_computed_whole_and_stored(tmp_path: Path) -> None:
    with Engine(tmp_path, "no-read", FULL, 1) as engine:
        engine.serve(PROMPT)
        before = engine.stats()
        computed = count_computed(engine)
        request = engine.serve(PROMPT, skip_reading_prefix_cache=True)
        assert (request.was_external, sum(computed)) == (0, len(PROMPT))
        other = numbers(5, 41)
        engine.serve(other, skip_reading_prefix_cache=True)
        after = engine.stats()
        for name in ("queries", "tokens_queried", "chunks_queried host", "tokens_loaded", "chunks_queried 0:files"):
            assert after.get(name, 0) == before.get(name, 0), name
        assert engine.serve(other).was_external == 40
    with Engine(tmp_path, "no-read-2", FULL, 1) as engine:
        assert engine.serve(other, skip_reading_prefix_cache=True).was_external == 0
        assert engine.serve(PROMPT).was_external == 40


@pytest.mark.fault("B092")
def test_waiting_requests_read_each_chunk_of_a_full_host_about_once(tmp_path: Path) -> None:
    prompts = [numbers(30 + i, 81) for i in range(6)]
    with Engine(tmp_path, "thrash-1", FULL, 1) as engine:
        for prompt in prompts:
            engine.serve(prompt)
    settings = {"host": {"bytes": 20 * 4096}}
    with Engine(tmp_path, "thrash-2", FULL, 1, settings=settings, max_num_seqs=2, blocks=60) as engine:
        running = engine.runner.add(numbers(40, 9), 60)
        engine.until(lambda: running.status is Status.RUNNING)
        waiting = [engine.runner.add(prompt) for prompt in prompts]
        engine.run()
        assert running.status is Status.FINISHED
        stats = engine.stats()
        loaded = sum(r.was_external for r in waiting)
        assert loaded > 0
        assert stats["read_ok 0:files"] * CHUNK <= 1.2 * loaded
        assert stats["tokens_loaded 0:files"] == loaded


@pytest.mark.fault("B197")
def test_bookkeeping_does_not_grow_with_the_rounds_of_a_conversation(tmp_path: Path) -> None:
    talks = [numbers(50 + i, 12) for i in range(12)]
    ours = [tracemalloc.Filter(True, f"*/orlop/{part}/*") for part in ("scheduler", "tiering", "host")]

    def rounds(count: int) -> int:
        for _ in range(count):
            for i, talk in enumerate(talks):
                engine.runner.add([*talk, *numbers(len(talk) + i, 10)], 2)
            engine.run()
        engine.device._jobs.clear()  # the test's own notes
        snapshot = tracemalloc.take_snapshot().filter_traces(ours)
        return sum(trace.size for trace in snapshot.traces)

    with Engine(tmp_path, "rounds", FULL, 1) as engine:
        tracemalloc.start()
        try:
            early = rounds(4)
            late = rounds(8)
        finally:
            tracemalloc.stop()
        assert engine.stats()["tokens_loaded"] > 0
    assert late - early < 24 * 300, f"{late - early} bytes of bookkeeping more for 24 slots"


@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.fault("B027")
def test_storing_what_is_there_already_changes_nothing(tmp_path: Path, groups: tuple[KVGroup, ...]) -> None:
    names: list[list[str]] = []
    for life in range(2):
        with Engine(tmp_path, f"again-{life}", groups, 1) as engine:
            engine.serve(PROMPT, skip_reading_prefix_cache=True)
            stats = engine.stats()
            assert stats["written_ok 0:files"] > 0
            assert stats["cascade_failures 0:files"] == 0
            names.append([p.name for p in chunk_files(tmp_path)])
    assert names[0] == names[1]
    with Engine(tmp_path, "again-3", groups, 1) as engine:
        assert engine.serve(PROMPT).was_external == 40
