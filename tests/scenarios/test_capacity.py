"""Room: host memory far smaller than what wants in, and slots that several parties use at once.

In: the real scheduler half and TieringManager over tiers cranked by hand. Out: progress, bounded reading, and slots
that nobody gets too early (the slot memory of the device double refuses it). Never: a real store.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import Counter

import pytest

import orlop.scheduler.scheduler as scheduler_module
import orlop.tiering.manager as manager_module
from orlop.core import Outcome, TransferKind
from orlop.host.slots import SlotState
from orlop.testing.device import only
from orlop.testing.request_runner import Status
from orlop.testing.rig import PAIRS, Rig, make_tiered_rig
from orlop.tiering.manager import TieringManager

STORE, LOAD = TransferKind.STORE, TransferKind.LOAD
PROMPT = list(range(16))


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def async_scheduling(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def tiering(rig: Rig) -> TieringManager:
    assert isinstance(rig.manager.inner, TieringManager)
    return rig.manager.inner


@pytest.mark.fault("B092")
def test_promotions_for_a_queue_neither_thrash_nor_starve_stores(async_scheduling: bool) -> None:
    """20 slots; 10 waiting requests of 10 chunks each that are on disk only; one of them is admitted at a time."""
    rig = make_tiered_rig(
        slots=20, async_scheduling=async_scheduling, blocks=200, token_budget=16, max_num_seqs=2, step_s=0.01
    )
    prompts = [list(range(1000 * i, 1000 * i + 40)) for i in range(10)]
    for prompt in prompts:
        rig.store(prompt)
    rig.store(range(10**6, 10**6 + 80))
    tier = rig.tiers[0]
    tier.calls.clear()
    running = rig.runner.add(range(77000, 77008), 60)
    rig.runner.run(until=lambda: running.status is Status.RUNNING)
    requests = [rig.runner.add([*prompt, 7], 4) for prompt in prompts]
    rig.runner.run(3000, until=lambda: all(r.ended for r in requests))
    read, useful = len(tier.loaded_keys()), sum(r.was_external for r in requests) // 4
    assert useful >= 90, "the queue is served from below"
    assert read <= 1.2 * useful
    rig.runner.run()
    below = {key[:-4] for _, key in tier.stored}
    assert set(running.block_hashes[:16]) <= below, "the running request's stores find room"
    rig.finish()


@pytest.mark.fault("B092")
def test_promoted_chunks_stay_until_they_are_loaded(async_scheduling: bool) -> None:
    """The engine cannot admit the request for a while; meanwhile another one's stores go through host memory."""
    rig = make_tiered_rig(slots=12, async_scheduling=async_scheduling, blocks=64)
    rig.store(PROMPT)
    for i in range(1, 4):
        rig.store(range(1000 * i, 1000 * i + 48))
    tier = rig.tiers[0]
    tier.calls.clear()
    other = rig.runner.add(range(9000, 9008), 60)
    rig.runner.step()
    request = rig.runner.add([*PROMPT, 1])
    rig.runner.step()
    rig.runner.max_num_seqs = 1
    rig.runner.run(until=lambda: other.ended)
    rig.runner.max_num_seqs = 16
    rig.finish()
    assert request.was_external == 16
    assert len(tier.loaded_keys()) == 4, "what was promoted was evicted before it was used"


@pytest.mark.fault("B104")
@pytest.mark.fault("B096")
@pytest.mark.parametrize(("slots", "loads", "chunks"), [(10, 4, 4), (8, 4, 5), (10, 12, 4), (6, 3, 2)])
def test_loads_take_all_their_slots_or_none_and_somebody_always_goes_on(
    slots: int, loads: int, chunks: int, async_scheduling: bool
) -> None:
    rig = make_tiered_rig(slots=slots, async_scheduling=async_scheduling, blocks=200, token_budget=512)
    prompts = [list(range(1000 * i, 1000 * i + 4 * chunks)) for i in range(loads)]
    for prompt in prompts:
        rig.store(prompt)
    for i in range(4):
        rig.store(range(10**6 + 1000 * i, 10**6 + 1000 * i + 4 * slots))
    requests = [rig.runner.add([*prompt, 7]) for prompt in prompts]
    steps = rig.runner.run(400, until=lambda: all(r.ended for r in requests))
    assert steps <= 200
    assert sum(r.was_external for r in requests) > 0
    rig.finish()


@pytest.mark.fault("B096")
def test_a_staging_tier_whose_slots_are_all_held_lets_requests_compute(async_scheduling: bool) -> None:
    rig = make_tiered_rig(
        slots=4, async_scheduling=async_scheduling, auto=False, entry={"cascade_s": 50.0, "promotion_s": 1.0}
    )
    rig.runner.add(PROMPT)
    for _ in range(3):
        rig.runner.step()
    assert rig.tiers[0].open_jobs(STORE), "every slot is held by a write to the tier below"
    requests = [rig.runner.add(range(100 * i, 100 * i + 17)) for i in range(1, 5)]
    steps = rig.runner.run(until=lambda: all(r.ended for r in requests))
    assert steps <= 10
    rig.tiers[0].auto = True
    rig.finish()


@pytest.mark.fault("B095")
def test_a_hit_of_this_step_is_not_evicted_by_a_store_of_this_step(async_scheduling: bool) -> None:
    """Ten slots hold R1's eight chunks; R2's stores of the same step want room; R1' loads all it was promised."""
    rig = make_tiered_rig(slots=10, tiers=0, async_scheduling=async_scheduling, blocks=100, token_budget=200)
    rig.store(range(32))
    again = rig.runner.add([*range(32), 1])
    other = rig.runner.add(range(500, 516))
    rig.runner.step()
    assert again.status is Status.WAITING_FOR_LOAD
    assert again.external_tokens == 32
    rig.finish()
    assert again.was_external == 32
    assert other.status is Status.FINISHED
    assert rig.scheduler.get_stats().get("surprises", 0) == 0


@pytest.mark.fault("B195")
def test_a_shared_chunk_stays_while_the_second_of_two_loads_reads_it(async_scheduling: bool) -> None:
    rig = make_tiered_rig(
        slots=8, tiers=0, async_scheduling=async_scheduling, blocks=100, prefix_caching=False,
        options={"prefix_caching": False},
    )  # fmt: skip
    rig.store(PROMPT)
    rig.device.hold = lambda job, rank: job.req_id == "slow" and job.kind is LOAD
    fast = rig.runner.add([*PROMPT, 1], req_id="fast")
    slow = rig.runner.add([*PROMPT, 2], req_id="slow")
    rig.runner.run(until=lambda: fast.ended)
    assert slow.status is Status.WAITING_FOR_LOAD
    for i in range(4):
        rig.runner.add(range(1000 * (i + 1), 1000 * (i + 1) + 32))
    rig.runner.run(until=lambda: not rig.runner.running)
    host = tiering(rig).host
    assert all(host.slot_state(0, h) is SlotState.READY for h in slow.block_hashes[:4]), "it is being read"
    rig.runner.reset(new_weights=False)
    rig.unhold()
    rig.finish()
    assert slow.status is Status.FINISHED


@pytest.mark.fault("B024")
@pytest.mark.parametrize("first", ["promotion", "store"])
def test_a_chunk_that_is_promoted_and_computed_at_once_has_one_slot(first: str, async_scheduling: bool) -> None:
    """R1 waits for a promotion; R2 computes and stores the same prefix meanwhile; a third gets no slot too early."""
    rig = make_tiered_rig(
        slots=12, async_scheduling=async_scheduling, blocks=100, prefix_caching=False,
        options={"prefix_caching": False},
    )  # fmt: skip
    rig.store(PROMPT)
    rig.store(range(10**6, 10**6 + 48))
    tier = rig.tiers[0]
    tier.auto = False
    rig.device.hold = only(STORE)
    waiting = rig.runner.add([*PROMPT, 1])
    rig.runner.step()
    assert tier.open_jobs(LOAD)
    computing = rig.runner.add([*PROMPT, 2], 3, skip_reading_prefix_cache=True)
    for _ in range(4):
        rig.runner.step()
    if first == "promotion":
        tier.complete()
        rig.runner.step()
        rig.unhold()
    else:
        rig.unhold()
        rig.runner.step()
        rig.runner.step()
        tier.complete()
    tier.auto = True
    third = rig.runner.add(range(7000, 7048))
    rig.finish()
    assert waiting.status is computing.status is third.status is Status.FINISHED
    assert waiting.was_external == 16


@pytest.mark.fault("B034")
@pytest.mark.parametrize("fate", ["completes", "fails"])
def test_chunks_in_flight_for_another_request_reach_the_tier_below(fate: str, async_scheduling: bool) -> None:
    rig = make_tiered_rig(async_scheduling=async_scheduling, prefix_caching=False, entry={"promotion_s": 0.02})
    rig.hold(STORE)
    rig.runner.add(PROMPT, 1)
    rig.runner.run(until=lambda: not rig.runner.running and not rig.runner.waiting)
    second = rig.runner.add(PROMPT, 12, skip_reading_prefix_cache=True)
    rig.runner.step()
    if fate == "fails":
        rig.device.fail_late(job.job_id for job in rig.device.stored_jobs if job.req_id == "r0")
    rig.unhold()
    rig.finish()
    below = {key[:-4] for _, key in rig.tiers[0].stored}
    assert set(second.block_hashes[:4]) <= below


@pytest.mark.fault("B016")
def test_after_a_reset_no_tier_serves_bytes_of_old_weights(async_scheduling: bool) -> None:
    """One store is still between device and host, another between host and tier, when the weights change."""
    rig = make_tiered_rig(slots=32, async_scheduling=async_scheduling)
    rig.store(PROMPT)
    tier = rig.tiers[0]
    tier.auto = False
    rig.runner.add(range(100, 116))
    for _ in range(3):
        rig.runner.step()
    rig.hold(STORE)
    rig.runner.add(range(200, 216))
    for _ in range(2):
        rig.runner.step()
    rig.runner.reset()
    rig.unhold()
    tier.auto = True
    rig.finish()
    for start in (0, 100, 200):
        again = rig.runner.add([*range(start, start + 16), 7])
        rig.runner.run()
        assert again.was_external == 0
    rig.runner.pool.reset()
    fresh = rig.runner.add([*PROMPT, 9])
    rig.finish()
    assert fresh.was_external == 16, "what is computed with the new weights is kept as usual"


@pytest.mark.fault("B022")
def test_returning_sessions_get_their_own_bytes_from_below(async_scheduling: bool) -> None:
    """Eight sessions, host memory for a third of them; every load is compared with what its key stands for."""
    rig = make_tiered_rig(PAIRS, slots=16, async_scheduling=async_scheduling, blocks=120, token_budget=64)
    sessions = [list(range(1000 * i, 1000 * i + 48)) for i in range(8)]
    external = 0
    for turn in range(4):
        for i, session in enumerate(sessions):
            request = rig.runner.add([*session, turn], 6)
            rig.runner.add(range(10**6 + 100 * (8 * turn + i), 10**6 + 100 * (8 * turn + i) + 9))
            rig.runner.run()
            external += request.was_external
            sessions[i] = request.token_ids
        rig.runner.pool.reset()
    assert external >= 3 * 8 * 32
    rig.finish()


@pytest.mark.fault("B028")
def test_many_prompts_through_a_small_device_and_a_big_host_tier(async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=600, tiers=0, async_scheduling=async_scheduling, blocks=40, token_budget=64)
    dice = random.Random(1)
    prompts = [[dice.randrange(50) for _ in range(16)] for _ in range(60)]
    for _ in range(3):
        requests = [rig.runner.add([*p, 99], 3) for p in prompts]
        rig.runner.run(3000)
    assert [r.was_external + r.local_tokens for r in requests] == [16] * 60
    rig.finish()


@pytest.mark.fault("B097")
def test_host_memory_smaller_than_the_device_hands_everything_on(async_scheduling: bool) -> None:
    """16 slots beside 64 blocks, which hold most of what was stored all the time."""
    rig = make_tiered_rig(slots=16, async_scheduling=async_scheduling, blocks=65, token_budget=32, max_num_seqs=2)
    requests = [rig.runner.add(range(1000 * i, 1000 * i + 33), 3) for i in range(24)]
    rig.runner.run()
    below = {key[:-4] for _, key in rig.tiers[0].stored}
    missing = [h for r in requests for h in r.block_hashes[:8] if h not in below]
    assert not missing, f"{len(missing)} of {24 * 8} chunks never reached the tier below"
    rig.finish()


@pytest.mark.fault("B197")
def test_bookkeeping_does_not_grow_with_the_rounds_of_conversations() -> None:
    rig = make_tiered_rig(slots=40, blocks=100, token_budget=256)
    ours = [tracemalloc.Filter(True, f"*/orlop/{part}/*") for part in ("scheduler", "host", "tiering")]
    sessions = [list(range(1000 * i, 1000 * i + 8)) for i in range(6)]

    def play() -> None:
        for i, session in enumerate(sessions):
            request = rig.runner.add([*session, 7], 3)
            rig.runner.run()
            sessions[i] = request.token_ids[-60:]

    def held() -> int:
        """Bytes that the library holds, once deadlines have passed and the doubles have forgotten what they saw."""
        rig.clock.advance(100.0)
        rig.runner.step()
        for record in (rig.runner.requests, rig.manager.calls, rig.tiers[0].calls):
            record.clear()  # type: ignore[attr-defined]
        rig.device.stored_jobs.clear()
        rig.device.loaded_jobs.clear()
        gc.collect()
        return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(ours).traces)

    tracemalloc.start()
    try:
        for _ in range(4):
            play()
        before = held()
        for _ in range(8):
            play()
        assert held() <= 1.2 * before + 4096
    finally:
        tracemalloc.stop()
    rig.finish()


@pytest.mark.fault("B197")
def test_what_is_over_does_not_stand_in_a_list_until_its_deadline(
    async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deadlines of a year, and one store that nobody reports: all that comes after it would gather behind it."""
    monkeypatch.setattr(manager_module, "FEW", 4)
    monkeypatch.setattr(scheduler_module, "FEW", 4)
    year = 366 * 24 * 3600.0
    rig = make_tiered_rig(
        PAIRS,
        slots=12,
        entry={"promotion_s": year, "cascade_s": year},
        options={"store_deadline_s": year, "promotion_wait_s": year},
        async_scheduling=async_scheduling,
    )
    rig.device.hold = only(kind=STORE)
    rig.runner.add(PROMPT, req_id="first")
    rig.runner.run(until=lambda: rig.runner.requests["first"].ended)
    held = set(rig.scheduler._jobs)
    rig.device.hold = lambda job, rank: job.job_id in held
    for turn in range(40):
        number = turn % 4 + 1  # more than the host tier holds
        request = rig.runner.add(range(100 * number, 100 * number + 40), req_id=f"r{turn}")
        rig.runner.run(until=lambda request=request: request.ended and len(rig.scheduler._jobs) == len(held))
        rig.runner.pool.reset()
    inner = tiering(rig)
    assert inner.counters["chunks_promoted 0:manual"] > 40
    lists = [inner._deadlines, inner._lease_ends, rig.scheduler._store_deadlines]
    assert all(len(entries) <= 12 for entries in lists), [len(entries) for entries in lists]
    rig.unhold()
    rig.finish()


@pytest.mark.fault("B100")
def test_days_of_sessions_under_eviction_aborts_and_preemptions(async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=20, tiers=1, async_scheduling=async_scheduling, blocks=60, token_budget=32, seed=3)
    dice = random.Random(3)
    rig.device.crank_chance = 0.7
    rig.tiers[0].load_outcome = lambda key: Outcome.IO_ERROR if dice.random() < 0.05 else Outcome.OK
    sessions = [[dice.randrange(9) for _ in range(8)] for _ in range(8)]
    ends: Counter[Status] = Counter()
    for turn in range(15):
        requests = []
        for i in range(8):
            requests.append(rig.runner.add([*sessions[i], turn], dice.randint(1, 5)))
            for _ in range(dice.randint(0, 3)):
                rig.runner.step()
            if dice.random() < 0.05:
                rig.runner.abort(dice.choice(requests).request_id)
            if rig.runner.running and dice.random() < 0.2:
                rig.runner.preempt(dice.choice(rig.runner.running).request_id)
        rig.runner.run(until=lambda: not rig.runner.waiting and not rig.runner.running)
        ends.update(r.status for r in requests)
        sessions = [r.token_ids[-60:] if len(r.token_ids) > 60 else r.token_ids for r in requests]
        rig.runner.pool.reset()
    rig.device.crank_chance = 1.0
    rig.finish()
    assert ends[Status.FINISHED] + ends[Status.ABORTED] == 120
    assert rig.scheduler.get_stats().get("surprises", 0) == 0


@pytest.mark.fault("B008")
def test_thirty_aborted_loads_give_all_blocks_back(async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=200, tiers=0, async_scheduling=async_scheduling, blocks=300, token_budget=4096)
    for i in range(30):
        rig.store(range(100 * i, 100 * i + 16))
    rig.device.crank_chance = 0.0
    requests = [rig.runner.add([*range(100 * i, 100 * i + 16), 7]) for i in range(30)]
    rig.runner.step()
    for request in requests:
        assert request.status is Status.WAITING_FOR_LOAD
        rig.runner.abort(request.request_id)
    rig.device.crank(LOAD)
    rig.finish()


@pytest.mark.fault("B106")
def test_the_tiers_hear_of_what_host_memory_serves_now_and_then_and_its_start_first(
    async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "MOST_TOUCHES_PER_STEP", 3)
    rig = make_tiered_rig(PAIRS, async_scheduling=async_scheduling)

    def touched(prompt_at_s: float) -> list[tuple[bytes, ...]]:
        rig.clock.advance(prompt_at_s)
        before = len(rig.tiers[0].calls)
        rig.store(range(41))
        return [call.what for call in rig.tiers[0].calls[before:] if call.name == "touch"]

    keys = [key + bytes(4) for key in rig.store(range(41)).block_hashes[1::2]]
    assert touched(1.0) == [], "they were written just now"
    told = [key for part in touched(31.0) for key in part]
    assert told[:3] == keys[:3]
    assert len(told) == len(set(told)), "each of them once"
    assert set(told) <= set(keys)
    again = touched(1.0)
    assert all(len(part) <= 3 for part in again)
    assert not set(told) & {key for part in again for key in part}
    rig.finish()
