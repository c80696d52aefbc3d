"""What is counted is what has happened: exactly once, whatever is repeated, late, lost, failed or reset.

In: the real scheduler half and manager over doubles that are cranked by hand, and plain twins that count beside them.
Out: equal numbers. Never: a store, a thread, a page of documentation.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from orlop.core import JobReport, Outcome, TierResult, TransferJob, TransferKind, WorkerOutput
from orlop.host.tier import SlotState
from orlop.testing.device import BLOCK_BYTES, COPY_S
from orlop.testing.doubles import Answers
from orlop.testing.request_runner import Status
from orlop.testing.rig import FULL, HYBRID, PAIRS, Rig, make_tiered_rig
from orlop.tiering.manager import TieringManager

STORE, LOAD = TransferKind.STORE, TransferKind.LOAD
PROMPT = list(range(16))
TIER = "0:manual"


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def async_scheduling(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def counts(rig: Rig, *names: str) -> list[float]:
    stats = rig.scheduler.get_stats()
    return [stats.get(name, 0) for name in names]


def histogram(rig: Rig, name: str) -> tuple[float, float]:
    """Observations and their sum."""
    stats = rig.scheduler.get_stats()
    keys = {part: [k for k in stats if k.startswith(f"{name}.{part}")] for part in "ns"}
    return sum(stats[k] for k in keys["n"]), sum(stats[k] for k in keys["s"])


def manager(rig: Rig) -> TieringManager:
    assert isinstance(rig.manager.inner, TieringManager)
    return rig.manager.inner


def forget_host(rig: Rig) -> None:
    """Host memory loses what nobody holds; the tiers keep it."""
    manager(rig).host.clear()


# --- queries and hits -----------------------------------------------------------------------------------------


@pytest.mark.fault("B171")
def test_queries_are_what_the_device_lacks_and_hits_what_is_loaded(async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=512, tiers=0, blocks=1024, token_budget=4096, async_scheduling=async_scheduling)
    prompt = list(range(1000))
    rig.store(prompt[:800])
    rig.runner.add(prompt[:601])
    rig.runner.run()
    before = counts(rig, "tokens_queried", "tokens_loaded", "chunks_queried host", "chunks_hit host")
    request = rig.runner.add(prompt)
    rig.runner.run()
    assert (request.local_tokens, request.was_external) == (600, 200)
    after = counts(rig, "tokens_queried", "tokens_loaded", "chunks_queried host", "chunks_hit host")
    assert [b - a for a, b in zip(before, after, strict=True)] == [400, 200, 99, 50]
    rig.runner.pool.reset()
    rig.runner.add(prompt, skip_reading_prefix_cache=True)
    rig.finish()
    assert counts(rig, "tokens_queried", "tokens_loaded") == after[:2]


@pytest.mark.fault("B171")
def test_a_load_that_fails_is_one_query_and_counted_as_a_failure(async_scheduling: bool) -> None:
    rig = make_tiered_rig(tiers=0, async_scheduling=async_scheduling)
    rig.store(PROMPT)
    before = counts(rig, "tokens_queried")
    rig.device.fail = lambda job, rank: job.kind is LOAD
    request = rig.runner.add([*PROMPT, 1])
    rig.finish()
    assert request.status is Status.FINISHED
    assert request.was_external == 0
    assert counts(rig, "tokens_queried")[0] - before[0] == 17
    assert counts(rig, "tokens_loaded", "load_jobs_failed", "load_bytes") == [16, 1, 0]


def test_a_request_that_asks_a_hundred_times_is_one_query(async_scheduling: bool) -> None:
    rig = make_tiered_rig(auto=False, async_scheduling=async_scheduling, entry={"lookup_s": 10.0})
    rig.tiers[0].answers = Answers.BY_HAND
    rig.runner.add([*PROMPT, 1])
    for _ in range(100):
        rig.runner.step()
    assert counts(rig, "tokens_queried", f"chunks_queried {TIER}", f"chunks_hit {TIER}") == [0, 4, 0]
    rig.tiers[0].answer()
    rig.tiers[0].auto = True
    rig.finish()
    assert counts(rig, "tokens_queried", "tokens_loaded", f"chunks_queried {TIER}") == [17, 0, 4]


def test_an_aborted_wait_is_no_query_and_its_delay_is_observed(async_scheduling: bool) -> None:
    rig = make_tiered_rig(auto=False, async_scheduling=async_scheduling, entry={"lookup_s": 10.0})
    rig.tiers[0].answers = Answers.BY_HAND
    request = rig.runner.add([*PROMPT, 1])
    rig.runner.step()
    start = rig.clock.now
    asked_at = start - rig.runner.step_s
    rig.runner.run(10, until=lambda: rig.clock.now >= start + 0.05)
    rig.runner.abort(request.request_id)
    assert counts(rig, "tokens_queried") == [0]
    observed, seconds = histogram(rig, "lookup_async_seconds")
    assert observed == 1
    assert seconds == pytest.approx(rig.clock.now - asked_at, abs=rig.runner.step_s)
    rig.finish()


@pytest.mark.fault("B173")
@pytest.mark.parametrize("geometry", [FULL, PAIRS, HYBRID], ids=["full", "pairs", "hybrid"])
@pytest.mark.parametrize("seed", range(3))
def test_the_sums_of_a_random_run_are_those_of_a_plain_twin(geometry: Any, seed: int, async_scheduling: bool) -> None:
    rng = random.Random(seed)
    rig = make_tiered_rig(geometry, slots=24, tiers=2, blocks=40, async_scheduling=async_scheduling, seed=seed, ranks=2)
    rig.device.repeat = lambda job, rank: rng.random() < 0.3
    rig.device.fail = lambda job, rank: rng.random() < (0.25 if job.kind is LOAD else 0.1)  # loads are rare
    rig.device.reorder = True
    rig.device.crank_chance = 0.7
    rig.tiers[0].store_outcome = lambda key: rng.choice([Outcome.OK] * 4 + [Outcome.NO_SPACE])
    rig.tiers[1].load_outcome = lambda key: rng.choice([Outcome.OK] * 4 + [Outcome.IO_ERROR])
    twin = Twin(rig)
    roots = [[rng.randrange(1000) for _ in range(rng.randrange(8, 40))] for _ in range(6)]
    for number in range(80):
        request = rig.runner.add([*rng.choice(roots), *range(rng.randrange(1, 8))], rng.randrange(1, 6))
        for _ in range(rng.randrange(6)):
            rig.runner.step()
        if rng.random() < 0.1:
            rig.runner.abort(request.request_id)
        if rng.random() < 0.2:
            rig.runner.pool.reset()
        if number in (40, 60):
            rig.runner.reset()
    rig.finish()
    stats = rig.scheduler.get_stats()
    wrong = {name: (stats.get(name, 0), value) for name, value in twin.sums.items() if stats.get(name, 0) != value}
    assert not wrong
    for verb in ("load", "store"):
        assert histogram(rig, f"{verb}_size_bytes") == (twin.sizes[verb], twin.sums[f"{verb}_bytes"])
    assert twin.sums["tokens_loaded"] > 0
    assert twin.sums["load_jobs_failed"] > 0
    assert stats["resets"] == 2
    assert sum(stats[f"tokens_loaded {name}"] for name in ("host", "0:manual", "1:manual")) == stats["tokens_loaded"]
    assert stats["chunks_hit host"] == stats["chunks_loaded host"]


class Twin:
    """Counts by listening at the engine's hooks and at the tiers' reports, with plain dictionaries."""

    def __init__(self, rig: Rig) -> None:
        self.sums: Counter[str] = Counter()
        self.sizes: Counter[str] = Counter()
        self._rig = rig
        self._reports: set[tuple[int, int]] = set()
        self._asked: dict[int, int] = {}
        """Per request the ``num_computed_tokens`` of the ask that it has not got blocks for yet."""
        self._failed: set[int] = set()
        self._bad: set[int] = set()
        self._outdated: set[int] = set()
        self._jobs: dict[int, TransferJob] = {}
        self._listen("get_num_new_matched_tokens", self._ask)
        self._listen("update_state_after_alloc", self._alloc)
        self._listen("update_connector_output", self._output)
        self._listen("reset_cache", self._reset)
        for tier in rig.tiers:
            self._listen_at(tier)

    def _listen(self, name: str, hear: Any) -> None:
        call = getattr(self._rig.scheduler, name)

        def heard(*args: Any, **rest: Any) -> Any:
            hear(*args)
            return call(*args, **rest)

        setattr(self._rig.scheduler, name, heard)

    def _listen_at(self, tier: Any) -> None:
        poll, submitted = tier.get_finished_jobs, {}
        for verb in ("store", "load"):
            submit = getattr(tier, f"submit_{verb}")

            def heard(job: Any, *, now: float, submit: Any = submit) -> None:
                submitted[job.job_id] = job.kind
                submit(job, now=now)

            setattr(tier, f"submit_{verb}", heard)

        def polled() -> Any:
            results = poll()
            for result in results:
                word, verb = ("promotion", "read") if submitted[result.job_id] is LOAD else ("cascade", "write")
                failed = len(result.outcomes) - result.outcomes.count(Outcome.OK)
                self.sums[f"{verb}_bytes {tier.name}"] += result.nbytes
                self.sums[f"{word}_failures {tier.name}"] += failed
                self.sums[f"{word}_jobs_failed {tier.name}"] += bool(failed)
            return results

        tier.get_finished_jobs = polled

    def _ask(self, request: Any, computed: int) -> None:
        if not request.skip_reading_prefix_cache and id(request) not in self._failed:
            self._asked[id(request)] = computed

    def _alloc(self, request: Any, blocks: Any, external: int) -> None:
        if id(request) in self._asked:
            self.sums["tokens_queried"] += request.num_tokens - self._asked.pop(id(request))
        self.sums["tokens_loaded"] += external

    def _reset(self, generation: bytes) -> None:
        """What is in flight will count as failed, and a request whose load that was may ask anew."""
        self._outdated |= set(self._rig.scheduler._jobs)

    def _output(self, output: WorkerOutput) -> None:
        self._jobs = {j.job_id: j for j in (*self._rig.device.loaded_jobs, *self._rig.device.stored_jobs)}
        for report in output.reports:
            self._report(report)

    def _report(self, report: JobReport) -> None:
        if (report.job_id, report.rank) in self._reports:
            self.sums["reports_ignored"] += 1
            return
        self._reports.add((report.job_id, report.rank))
        job = self._jobs[report.job_id]
        self.sums[f"{job.kind}_bytes"] += report.nbytes
        self.sums[f"{job.kind}_seconds"] += COPY_S
        self.sizes[job.kind] += bool(report.nbytes)
        self._bad |= {report.job_id} if not report.ok else set()
        if (report.job_id, 1 - report.rank) in self._reports and self._bad | self._outdated >= {report.job_id}:
            self.sums[f"{job.kind}_jobs_failed"] += 1
            if job.kind is LOAD and report.job_id not in self._outdated:
                self._failed.add(id(self._rig.runner.requests[job.req_id]))


# --- device copies ------------------------------------------------------------------------------------------------


@pytest.mark.fault("B173")
def test_bytes_and_seconds_of_copies_are_those_that_ranks_report(async_scheduling: bool) -> None:
    rig = make_tiered_rig(tiers=0, ranks=3, async_scheduling=async_scheduling)
    rig.device.repeat = lambda job, rank: rank == 1
    rig.store(PROMPT)
    rig.runner.add([*PROMPT, 1])
    rig.finish()
    for kind in TransferKind:
        blocks, jobs = (
            rig.device.copies[kind],
            len(getattr(rig.device, "loaded_jobs" if kind is LOAD else "stored_jobs")),
        )
        assert blocks > 0
        assert counts(rig, f"{kind}_bytes", f"{kind}_seconds") == [3 * BLOCK_BYTES * blocks, 3 * COPY_S * jobs]
        assert histogram(rig, f"{kind}_size_bytes") == (3 * jobs, 3 * BLOCK_BYTES * blocks)
    assert counts(rig, "reports_ignored")[0] >= 2


def test_a_wait_for_a_fence_is_counted_with_the_report_that_says_it(async_scheduling: bool) -> None:
    rig = make_tiered_rig(tiers=0, async_scheduling=async_scheduling)
    rig.hold(STORE)
    rig.runner.add(PROMPT)
    rig.runner.run(10, until=lambda: bool(rig.device.stored_jobs))
    job_id = rig.device.stored_jobs[0].job_id
    said = WorkerOutput((JobReport(job_id, 0, True, 5, 0.5, fence_waits=2, fence_wait_s=0.125),))
    for _ in range(3):
        rig.scheduler.update_connector_output(said, now=rig.clock.now)
    assert counts(rig, "fence_waits", "fence_wait_seconds", "store_bytes") == [2, 0.125, 5]


@pytest.mark.parametrize("late", [False, True], ids=["lost", "late"])
def test_a_store_past_its_deadline_is_counted_once_and_its_bytes_when_they_come(
    late: bool, async_scheduling: bool
) -> None:
    rig = make_tiered_rig(tiers=0, async_scheduling=async_scheduling, options={"store_deadline_s": 1.0})
    rig.hold(STORE)
    rig.runner.add(PROMPT)
    rig.runner.run(10, until=lambda: bool(rig.device.stored_jobs))
    rig.runner.run(200, until=lambda: rig.scheduler.get_stats()["jobs_overdue"] > 0)
    assert counts(rig, "store_deadlines_passed", "store_jobs_failed", "jobs_overdue", "store_bytes") == [1, 1, 1, 0]
    assert counts(rig, "slots_retired") == [4]
    assert rig.clock.now - counts(rig, "jobs_overdue_at")[0] == pytest.approx(0, abs=2 * rig.runner.step_s)
    if late:
        rig.unhold()
        rig.runner.step()
        rig.runner.step()
        assert counts(rig, "store_deadlines_passed", "store_jobs_failed", "jobs_overdue") == [1, 1, 0]
        assert counts(rig, "store_bytes", "slots_retired") == [4 * BLOCK_BYTES, 0]
        assert "jobs_overdue_at" not in rig.scheduler.get_stats()


# --- host memory ------------------------------------------------------------------------------------------


def test_occupancy_says_what_is_read_written_ready_and_free(async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=16, async_scheduling=async_scheduling, auto=False, entry={"lookup_s": 0.0})
    states = [f"slots_{state.name.lower()}" for state in (SlotState.FREE, SlotState.RESERVED, SlotState.READY)]
    rig.hold(STORE)
    rig.runner.add(PROMPT)
    rig.runner.run(20, until=lambda: len(rig.device.stored_jobs) > 0)
    assert counts(rig, *states, "slots_being_read") == [12, 4, 0, 0]
    rig.unhold()
    rig.runner.run(20, until=lambda: bool(rig.tiers[0].open_jobs(STORE)))
    assert counts(rig, *states, "slots_being_read") == [12, 0, 4, 4]  # the tier reads them
    rig.tiers[0].complete()
    rig.runner.step()
    rig.runner.run()
    assert counts(rig, *states, "slots_being_read") == [12, 0, 4, 0]
    rig.runner.pool.reset()
    rig.hold(LOAD)
    rig.runner.add([*PROMPT, 1])
    rig.runner.run(20, until=lambda: bool(rig.device.loaded_jobs))
    assert counts(rig, *states, "slots_being_read") == [12, 0, 4, 4]
    rig.unhold()
    rig.tiers[0].auto = True
    rig.finish()
    assert counts(rig, "slots_being_read", "slots_reserved", "slots") == [0, 0, 16]


def test_offers_without_room_and_offers_too_early_are_counted(async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=4, tiers=0, async_scheduling=async_scheduling, tiering={"store_after": 2})
    rig.store(PROMPT)
    assert counts(rig, "stores_skipped", "allocation_failures") == [4, 0]
    assert histogram(rig, "allocation_chunks") == (0, 0)
    rig.store(PROMPT)
    assert counts(rig, "stores_skipped", "allocation_failures", "slots_ready") == [4, 0, 4]
    assert histogram(rig, "allocation_chunks") == (1, 4)
    rig.hold(LOAD)
    rig.runner.add([*PROMPT, 1])
    rig.runner.run(20, until=lambda: bool(rig.device.loaded_jobs))
    for prompt in (range(100, 108), range(100, 108)):
        rig.runner.add(list(prompt))
        for _ in range(10):
            rig.runner.step()
    assert counts(rig, "allocation_failures")[0] >= 1
    rig.unhold()
    rig.finish()


@pytest.mark.fault("B173")
def test_evictions_are_counted(async_scheduling: bool) -> None:
    rig = make_tiered_rig(slots=8, tiers=0, async_scheduling=async_scheduling)
    for start in (0, 100, 200):
        rig.store(range(start, start + 16))
    assert counts(rig, "host_evictions", "slots_ready") == [4, 8]
    rig.finish()


# --- tiers ------------------------------------------------------------------------------------------------


def stored_below(async_scheduling: bool, **more: Any) -> Rig:
    """PROMPT lies in the tier alone, which from now on is cranked by hand."""
    rig = make_tiered_rig(async_scheduling=async_scheduling, **more)
    rig.store(PROMPT)
    forget_host(rig)
    rig.tiers[0].auto = False
    return rig


@pytest.mark.fault("B173")
def test_what_a_tier_reads_and_writes_is_counted_by_tier(async_scheduling: bool) -> None:
    rig = stored_below(async_scheduling)
    assert counts(rig, f"write_bytes {TIER}", f"chunks_cascaded {TIER}") == [4 * 4096, 4]
    assert counts(rig, f"chunks_queried {TIER}", f"chunks_hit {TIER}") == [3, 0]
    rig.runner.add([*PROMPT, 1])
    rig.tiers[0].auto = False
    rig.runner.run(20, until=lambda: bool(rig.tiers[0].open_jobs(LOAD)))
    assert counts(rig, f"promotion_jobs_active {TIER}", f"promotion_chunks_active {TIER}") == [1, 4]
    assert counts(rig, "slots_reserved") == [4]
    rig.tiers[0].auto = True
    rig.finish()
    assert counts(rig, f"promotion_jobs_active {TIER}", f"promotion_chunks_active {TIER}") == [0, 0]
    assert counts(rig, f"chunks_queried {TIER}", f"chunks_hit {TIER}") == [7, 4]
    assert counts(rig, f"read_bytes {TIER}", f"chunks_promoted {TIER}") == [4 * 4096, 4]
    assert counts(rig, f"tokens_loaded {TIER}", f"chunks_loaded {TIER}", "tokens_loaded host") == [16, 4, 0]


@pytest.mark.fault("B173")
@pytest.mark.parametrize("word", ["promotion", "cascade"])
@pytest.mark.parametrize("released", [True, False], ids=["let go", "held"])
def test_a_job_past_its_deadline_is_counted_once_and_its_late_bytes_once(
    word: str, released: bool, async_scheduling: bool
) -> None:
    entry = {"promotion_s": 1.0, "cascade_s": 1.0, "lookup_s": 0.0 if word == "cascade" else 0.2}
    rig = stored_below(async_scheduling, entry=entry)
    kind, verb = (LOAD, "read") if word == "promotion" else (STORE, "write")
    before = counts(rig, f"{verb}_bytes {TIER}")[0]
    rig.runner.add([*PROMPT, 1] if word == "promotion" else list(range(100, 116)))
    rig.runner.run(20, until=lambda: bool(rig.tiers[0].open_jobs(kind)))
    tier = rig.tiers[0]
    if not released:
        for number in tier.open_jobs(kind):
            tier.fail(number, released=False)
        rig.runner.step()
    rig.runner.run(300, until=lambda: rig.scheduler.get_stats()["tier_jobs_overdue"] > 0 and rig.clock.now > 1.5)
    expected = [1, 1] if released else [0, 1]
    assert counts(rig, f"{word}_deadlines_passed {TIER}", f"{word}_jobs_failed {TIER}") == expected
    assert counts(rig, "slots_retired", f"{word}_jobs_active {TIER}")[1] == 0
    assert counts(rig, "tier_jobs_overdue_at")[0] > 0
    if released:
        tier.complete()
        rig.runner.step()
        tier.auto = True
        rig.finish()
        assert counts(rig, f"{verb}_bytes {TIER}")[0] - before == 4 * 4096, "what comes late was moved all the same"
    else:
        tier.release()
        rig.runner.step()
        tier.auto = True
        rig.finish()
    assert counts(rig, "tier_jobs_overdue", "slots_retired") == [0, 0]
    assert counts(rig, f"{word}_deadlines_passed {TIER}", f"{word}_jobs_failed {TIER}") == expected


def test_a_report_that_a_tier_repeats_is_ignored_and_counted_so(async_scheduling: bool) -> None:
    rig = stored_below(async_scheduling)
    tier = rig.tiers[0]
    rig.runner.add([*PROMPT, 1])
    rig.runner.run(20, until=lambda: bool(tier.open_jobs(LOAD)))
    (number,) = tier.open_jobs(LOAD)
    tier.fail(number, released=False)
    before = counts(rig, f"read_bytes {TIER}", "reports_ignored")
    said = TierResult(number, (Outcome.IO_ERROR,) * 4, nbytes=100, released=False)
    for _ in range(3):
        tier._results.append(said)
        rig.runner.step()
    assert counts(rig, f"read_bytes {TIER}", "reports_ignored") == [before[0], before[1] + 3]
    assert counts(rig, f"promotion_jobs_failed {TIER}") == [1]
    tier.release()
    rig.runner.step()
    tier.auto = True
    rig.finish()


def test_a_lookup_that_outlasts_its_deadline_is_counted_by_tier(async_scheduling: bool) -> None:
    rig = stored_below(async_scheduling, tiers=1)
    rig.tiers[0].answers = Answers.BY_HAND
    rig.runner.add([*PROMPT, 1])
    rig.tiers[0].auto = True
    rig.runner.run()
    assert counts(rig, f"lookup_deadlines_passed {TIER}", "pending_deadlines_passed") == [1, 0]
    rig.tiers[0].answer()
    rig.finish()
    assert counts(rig, f"lookup_deadlines_passed {TIER}", f"chunks_hit {TIER}")[0] == 1


def test_a_request_that_gives_up_waiting_for_a_promotion_is_counted(async_scheduling: bool) -> None:
    rig = stored_below(async_scheduling, options={"promotion_wait_s": 1.0}, entry={"promotion_s": 1.0})
    request = rig.runner.add([*PROMPT, 1])
    rig.runner.run(300, until=lambda: request.ended)
    assert request.was_external == 0
    assert counts(rig, "pending_deadlines_passed") == [1]
    observed, seconds = histogram(rig, "lookup_async_seconds")
    assert observed >= 1
    assert seconds >= 1.0
