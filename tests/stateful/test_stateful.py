"""Everything that can happen to an engine and its tiers, in any order, and the books must add up after every step.

In: a seed. Out: after each step the ten invariants of docs/internals/lifecycle.md as far as they can be recounted; at
the end of each walk everything has ended and nothing is left. Never: an expectation of which request is served what.

``STATEFUL_SEED``: a number for another run, ``random`` for one that differs each time (the seed is printed).
``STATEFUL_WALKS``: how many walks, each of up to ``RULES`` rules. ``STATEFUL_NO_SHRINK``: the first red is told as it
is.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from stateful_rig import FAULTS, Rig, Setup, WatchedTier, make

from orlop.core import Geometry, JobReport, KVGroup, TransferJob, TransferKind, WorkerOutput
from orlop.host.policies import BUILT_IN
from orlop.host.tier import SlotState
from orlop.testing.request_runner import EngineRequest, StepOutput
from orlop.testing.rig import FULL, HYBRID, PAIRS
from orlop.tiering import io_worker, key_index

MIXED = Geometry((KVGroup(0, 4), KVGroup(1, 8, sliding_window=12), KVGroup(2, 4, sliding_window=5)), 4, 2)
GEOMETRIES = {"full": FULL, "pairs": PAIRS, "hybrid": HYBRID, "mixed": MIXED}

ASKED_SEED = os.environ.get("STATEFUL_SEED", "1")
SEED = random.SystemRandom().getrandbits(32) if ASKED_SEED == "random" else int(ASKED_SEED)
WALKS = int(os.environ.get("STATEFUL_WALKS", "60"))
PARTS = 6
MORE_PARTS = 18
"""So many may follow until all of ``HAPPENED`` was met: what a seed makes differs between releases of hypothesis."""
RULES = 60
LEAST_STEPS = 5000
BOUND = 400
"""Steps within which all requests have ended and all is drained, once nothing new goes wrong."""

MOST_LIVE = 6
RESTART_AFTER = 8
"""Steps until a dead I/O worker is started again."""

BASES = [[random.Random(n).randint(0, 9) for _ in range(24)] for n in range(8)]
TALLY: Counter[str] = Counter()
"""What has happened in all walks together."""

setups = st.builds(
    Setup,
    geometry=st.sampled_from(list(GEOMETRIES.values())),
    ranks=st.sampled_from([1, 2]),
    blocks_per_group=st.sampled_from([14, 24, 60]),
    slots=st.sampled_from([12, 40, 24, 6]),
    policy=st.sampled_from(sorted(BUILT_IN)),
    tiers=st.sampled_from([1, 1, 2, 2, 0]),
    async_scheduling=st.booleans(),
    token_budget=st.sampled_from([16, 8, 64]),
    prefix_caching=st.sampled_from([True, True, False]),
    skip_empty_outputs=st.booleans(),
    loads_before_forward=st.booleans(),
    offload_decode=st.sampled_from([True, True, False]),
    max_chunks_per_step=st.sampled_from([2048, 3, 1]),
    max_promotions_per_step=st.sampled_from([2048, 2]),
    look_ahead=st.sampled_from([8, 1, 0]),
    max_joint_chunks=st.sampled_from([16, 64, 2, 1]),
    gather_steps=st.sampled_from([1, 3, 8, 16, 64]),
    store_deadline_s=st.sampled_from([2.0, 0.1]),
    lookup_s=st.sampled_from([0.2, 0.03]),
    promotion_s=st.sampled_from([1.0, 0.1]),
    cascade_s=st.sampled_from([1.0, 0.1]),
    keep_tiers_on_reset=st.booleans(),
    store_after=st.sampled_from([1, 1, 2]),
    evicted=st.tuples(st.sampled_from([False, False, True]), st.booleans()),
    evicted_chunks=st.sampled_from([4, 1, 64]),
    threads=st.sampled_from([2, 1, 4]),
    max_retired=st.sampled_from([64, 2]),
    queue_chunks=st.sampled_from([64, 4]),
    pace=st.sampled_from([1, 0, 2, 3]),
    arrivals=st.sampled_from([0.0, 0.2, 0.2, 0.4, 0.4]),
    faults=st.sampled_from([0.0, 0.0, 0.1, 0.2]),
    hangs=st.sampled_from([0.0, 0.0, 0.02]),
    hung_steps=st.sampled_from([30, 100, 10]),
    crank_chance=st.sampled_from([1.0, 0.6, 0.3]),
    seed=st.integers(0, 1000),
)
sides = st.tuples(st.sampled_from(list(TransferKind)), st.integers(0, 1))
"""A direction and a rank."""
indexes = st.integers(0, 7)


class Walk(RuleBasedStateMachine):
    """One engine with its tiers, from the first request to the last slot that is given back."""

    rig: Rig

    @initialize(setup=setups)
    def start(self, setup: Setup) -> None:
        self.rig = make(setup)
        self.engine = self.rig.engine
        self.held: set[tuple[TransferKind, int]] = set()
        self.failing: set[tuple[TransferKind, int]] = set()
        self.losing: set[int] = set()
        self.failed: set[tuple[int, int]] = set()
        self.lost: list[tuple[int, int]] = []
        self.repeating = False
        self.outdated: dict[int, bool] = {}
        """Loads that a reset has met in flight, and whether a rank has reported them as failed since."""
        self.ending = False
        self.dice = random.Random(setup.seed)
        device = self.rig.device
        device.hold = lambda job, rank: (job.kind, rank) in self.held
        device.fail = self._fails
        device.lose = self._loses
        device.repeat = lambda job, rank: self.repeating
        self.engine.drop_output = self._hear
        TALLY["walks"] += 1

    def _fails(self, job: TransferJob, rank: int) -> bool:
        if (job.kind, rank) in self.failing:
            self.failed.add((job.job_id, rank))
            return True
        return False

    def _loses(self, job: TransferJob, rank: int) -> bool:
        if job.kind is TransferKind.STORE and rank in self.losing:
            self.lost.append((job.job_id, rank))
            return True
        return False

    def _hear(self, report: JobReport) -> bool:
        """Every report on its way to the scheduler half; none is dropped here."""
        if report.job_id in self.outdated and not report.ok:
            self.outdated[report.job_id] = True
        return False

    # --- the engine -------------------------------------------------------------------------------------

    @property
    def live(self) -> list[EngineRequest]:
        return [*self.engine.waiting, *self.engine.running]

    @precondition(lambda self: len(self.live) < MOST_LIVE)
    @rule(
        base=st.integers(0, 7),
        cut=st.sampled_from([24, 20, 17, 12, 9, 5, 1]),
        tail=st.lists(st.integers(0, 9), max_size=5),
        max_tokens=st.one_of(st.integers(1, 12), st.integers(1, 12), st.just(24)),
        stop_after=st.sampled_from([None, 1, 4]),
        salt=st.sampled_from([None, None, None, "mine"]),
        params=st.sampled_from([None, None, {"max_load_tokens": 8}, {"max_offload_tokens": 12}]),
        again=st.one_of(st.none(), indexes),
        skip=st.sampled_from([False, False, False, True]),
    )
    def add(
        self,
        base: int,
        cut: int,
        tail: list[int],
        max_tokens: int,
        stop_after: int | None,
        salt: str | None,
        params: dict[str, Any] | None,
        again: int | None,
        skip: bool,
    ) -> None:
        """A request arrives; ``again``: under an id that has been used, perhaps while its earlier life drains."""
        gone = [r.request_id for r in self.engine.requests.values() if r.ended and r not in self.engine._held]
        req_id = gone[-1 - again % len(gone)] if gone and again is not None else None
        self._add(
            BASES[base][:cut] + tail,
            max_tokens,
            req_id=req_id,
            cache_salt=salt,
            stop_after=stop_after,
            kv_transfer_params=params,
            skip_reading_prefix_cache=skip,
        )

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @rule(count=st.integers(1, 8))
    def step_more(self, count: int) -> None:
        """Twice as likely as other rules."""
        self.step(count)

    @precondition(lambda self: len(self.live) < MOST_LIVE)
    @rule(base=st.integers(0, 7), max_tokens=st.integers(1, 4), count=st.integers(1, 8))
    def come_back(self, base: int, max_tokens: int, count: int) -> None:
        """A known prompt comes when the device's prefix cache is lost to it, so that it is loaded."""
        self.engine.pool.reset()
        self.engine.add(BASES[base], max_tokens)
        self.step(count)

    @precondition(lambda self: self.live)
    @rule(which=indexes)
    def abort(self, which: int) -> None:
        request = self.live[which % len(self.live)]
        TALLY[f"aborts while {request.status}"] += 1
        self.engine.abort(request.request_id)

    @precondition(lambda self: self.engine.running)
    @rule(which=indexes)
    def preempt(self, which: int) -> None:
        self.engine.preempt(self.engine.running[which % len(self.engine.running)].request_id)

    # --- everybody's trouble ------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.05, 0.25, 1.5, 8.0, 100.0]))
    def jump(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)

    @rule(new_weights=st.sampled_from([True, True, False]), device_cleared=st.sampled_from([True, True, False]))
    def reset(self, new_weights: bool, device_cleared: bool) -> None:
        """Everything stored is outdated; and prompts that were served just before come again."""
        new_weights = new_weights and not self.rig.setup.keep_tiers_on_reset
        TALLY["resets"] += 1
        TALLY["resets with jobs in flight"] += bool(self.rig.scheduler._jobs)
        TALLY["resets with tier jobs in flight"] += bool(self.rig.manager._transfer_jobs)
        for tier in self.rig.tiers:
            tier.resets += 1
            TALLY["resets that outdate what a tier keeps"] += new_weights and bool(tier.store.kept)
        self._note_loads_in_flight()
        self.engine.reset(new_weights=new_weights, device_cleared=device_cleared)
        counts = self.rig.manager.host.counts()
        assert counts[SlotState.READY] == counts[SlotState.RESERVED] == 0, "something from before is there"
        served = [request.prompt for request in self.engine.requests.values() if request.ended]
        for prompt in served[-2:]:
            self._add(prompt, 2, req_id=None)

    def _note_loads_in_flight(self) -> None:
        """Those that some rank has neither reported nor said on its way: they have to end as failed."""
        said = {
            (report.job_id, report.rank)
            for _, outputs in self.engine._queue
            for output in outputs
            for report in output.reports
        }
        for job in self.rig.scheduler._jobs.values():
            if job.kind is TransferKind.LOAD and any((job.job_id, rank) not in said for rank in job.waiting):
                self.outdated.setdefault(job.job_id, False)
                TALLY["loads that a reset outdates"] += 1

    # --- the workers beside the device ------------------------------------------------------------------

    @rule(
        hold=st.sets(sides, max_size=2),
        fail=st.sampled_from([set(), set(), {(TransferKind.STORE, 0)}, {(TransferKind.LOAD, 0)}]),
        lose=st.sampled_from([None, None, 0, 1]),
        repeats=st.booleans(),
        reorders=st.booleans(),
        chance=st.sampled_from([1.0, 0.3]),
        count=st.integers(1, 6),
    )
    def trouble_workers(
        self,
        hold: set[tuple[TransferKind, int]],
        fail: set[tuple[TransferKind, int]],
        lose: int | None,
        repeats: bool,
        reorders: bool,
        chance: float,
        count: int,
    ) -> None:
        """For some steps reports wait, fail, get lost, come twice or in another order; some of that stays."""
        self.held, self.failing = hold, fail
        self.losing = set() if lose is None else {lose}
        self.repeating = repeats
        self.rig.device.reorder = reorders
        self.rig.device.crank_chance = chance
        self.step(count)
        self.failing, self.losing = set(), set()
        if count % 2:
            self.held = set()

    @precondition(lambda self: self.lost)
    @rule(which=indexes)
    def find_lost_report(self, which: int) -> None:
        """A lost report comes after all: perhaps long after its deadline, a reset, or the end of its request."""
        self._deliver(self.lost.pop(which % len(self.lost)))

    def _deliver(self, lost: tuple[int, int]) -> None:
        report = JobReport(*lost, ok=lost not in self.failed)
        self.rig.device.delivered((report,))
        self.rig.scheduler.update_connector_output(WorkerOutput(reports=(report,)), now=self.rig.clock.now)

    # --- the tiers ----------------------------------------------------------------------------------------

    def tier(self, which: int) -> WatchedTier:
        return self.rig.tiers[which % len(self.rig.tiers)]

    @precondition(lambda self: self.rig.tiers)
    @rule(
        which=indexes,
        what=st.sampled_from([(verb, fault) for verb, faults in FAULTS.items() for fault in faults]),
        times=st.integers(1, 3),
    )
    def trouble_store(self, which: int, what: tuple[str, str], times: int) -> None:
        """The next calls of a verb fail, or lie."""
        verb, fault = what
        self.tier(which).store.faults[verb].extend([fault] * times)

    @precondition(lambda self: self.rig.tiers)
    @rule(which=indexes, last_first=st.booleans(), stuck=st.sampled_from([0, 0, 1, 2]), count=st.integers(1, 4))
    def turn_by_hand(self, which: int, last_first: bool, stuck: int, count: int) -> None:
        """For some steps a tier moves only once each; its first verbs may hang."""
        tier = self.tier(which)
        tier.auto = False
        tier.to_hang += stuck
        for _ in range(count):
            self._step()
            tier.turn_once(last_first=last_first)
        tier.auto = True

    @precondition(lambda self: self.rig.tiers)
    @rule(which=indexes, count=st.integers(1, 6))
    def stand_still(self, which: int, count: int) -> None:
        """For some steps nothing of a tier moves."""
        self.tier(which).auto = False
        self.step(count)
        self.tier(which).auto = True

    @precondition(lambda self: self.rig.tiers)
    @rule(which=indexes, count=st.integers(1, 3))
    def hang(self, which: int, count: int) -> None:
        """The next verbs hang, whenever they come."""
        self.tier(which).to_hang += count

    @precondition(lambda self: any(tier.hangs for tier in self.rig.tiers))
    @rule(which=indexes)
    def release(self, which: int) -> None:
        """Verbs that hang come back."""
        hanging = [tier for tier in self.rig.tiers if tier.hangs]
        hanging[which % len(hanging)].release()

    @precondition(lambda self: any(tier.hangs for tier in self.rig.tiers))
    @rule(which=indexes)
    def release_more(self, which: int) -> None:
        self.release(which)

    @precondition(lambda self: any(tier.link for tier in self.rig.tiers))
    @rule(
        which=indexes,
        what=st.sampled_from(["kill", "kill while it hangs", "clear"]),
        outlives=st.booleans(),
        unheard=st.booleans(),
        reopens=st.sampled_from([True, True, True, False]),
    )
    def kill_or_clear(self, which: int, what: str, outlives: bool, unheard: bool, reopens: bool) -> None:
        """The I/O process dies, or cannot; its last words may be lost; its store may not open again for long."""
        tier = self.tier(which)
        if what == "clear":
            TALLY["clears"] += 1
            tier.clear()
            return
        if what == "kill while it hangs":
            tier.to_hang += 1
            self.step(3)
        if tier.link is not None:
            tier.store.refuses_to_open = not reopens
            tier.kill(outlives=outlives, unheard=unheard)

    # --- a step, and what holds after it ----------------------------------------------------------------

    def _arrive(self) -> None:
        """A request comes by itself: mostly a known prompt, longer or shorter, sometimes lost to the device."""
        dice = self.dice
        if self.ending or len(self.live) >= MOST_LIVE or dice.random() >= self.rig.setup.arrivals:
            return
        if dice.random() < 0.4:
            self.engine.pool.reset()
        gone = [r.request_id for r in self.engine.requests.values() if r.ended and r not in self.engine._held]
        again = dice.choice(gone[-3:]) if gone and dice.random() < 0.3 else None
        prompt = dice.choice(BASES)[: dice.choice([24, 24, 24, 20, 17, 12])] + dice.choice([[], [], [1], [2, 3, 4, 5]])
        self._add(prompt, dice.choice([1, 2, 4, 9]), req_id=again)

    def _add(self, prompt: list[int], max_tokens: int, *, req_id: str | None, **more: Any) -> None:
        if req_id is not None:
            draining = {state.context.req_id for state in self.rig.scheduler._req_status.values() if state.finished}
            TALLY["ids used again"] += 1
            TALLY["ids used again while draining"] += req_id in draining
        self.engine.add(prompt, max_tokens, req_id=req_id, **more)

    def _step(self) -> StepOutput:
        self._arrive()
        for tier in self.rig.tiers:
            if tier.auto:
                tier.turn()
            tier.recover(RESTART_AFTER)
            tier.store.engine_is_inside = True
        output = self.engine.step()
        for tier in self.rig.tiers:
            tier.store.engine_is_inside = False
        TALLY["steps"] += not self.ending
        TALLY["steps to the end"] += self.ending
        TALLY["preemptions"] += len(output.preempted_req_ids)
        self._check_pending()
        return output

    @invariant()
    def books(self) -> None:
        if hasattr(self, "rig"):
            TALLY["rules"] += 1
            self.engine.check()
            self._check_pending()
            self.step(self.rig.setup.pace)

    def _check_pending(self) -> None:
        """There is push work if and only if a job is unsettled or something is owed: counted from outside."""
        rig = self.rig
        overdue = set(rig.manager._overdue)
        tier_jobs = {i for tier in rig.tiers for i in tier.jobs if i not in overdue}
        reports_to_read = {i for tier in rig.tiers for i in tier.reported & set(tier.jobs)} - overdue
        assert not reports_to_read, f"jobs {reports_to_read} were reported and are neither settled nor overdue"
        owed = bool(rig.scheduler._owed or rig.scheduler._current_batch_loads_to_fail)
        unsettled = bool(rig.recorded.open) or bool(tier_jobs) or bool(rig.scheduler._jobs)
        assert rig.scheduler.has_pending_push_work() == (unsettled or owed)

    # --- the end --------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        try:
            if sys.exc_info()[0] is None:
                self._end()
                self._count()
        finally:
            self.rig.close()

    def _end(self) -> None:
        """Nothing new goes wrong, and the clock runs: all ends within BOUND steps, and what hangs holds slots alone."""
        rig = self.rig
        self.ending = True
        self.held, self.failing, self.losing, self.repeating = set(), set(), set(), False
        rig.device.crank_chance = 1.0
        for tier in rig.tiers:
            tier.heal()
        self.engine.step_s = 0.25
        steps = self._run_until_idle()
        TALLY["most steps to the end"] = max(TALLY["most steps to the end"], steps)
        assert all(request.ended for request in self.engine.requests.values())
        self._check_drained()
        self._release_everything()
        self._check_usable()
        self._check_flushed()

    def _check_usable(self) -> None:
        """After all that: what one request leaves is loaded by the next, where there is room and time for all of it."""
        setup = self.rig.setup
        roomy = setup.slots >= 24 and setup.max_chunks_per_step > 3 and setup.store_after == 1
        if self.rig.scheduler._device_is_old or not roomy:
            return
        TALLY["seen usable afterwards"] += 1
        self.engine.step_s = 0.02
        loaded = 0
        for _ in range(4):  # a policy that keeps what was of use may let the first of it go for the rest of it, once
            self.engine.pool.reset()
            request = self.engine.add(range(100, 125), 2)
            self._run_until_idle()
            loaded += request.was_external
        assert loaded > 0, "nothing is stored or loaded any more"

    def _check_flushed(self) -> None:
        """The last thing: tiers that are written on eviction get what they lack, and nothing is left to write."""
        manager = self.rig.manager
        for _ in range(BOUND):
            if not manager.flush(now=self.rig.clock.now):
                break
            for tier in self.rig.tiers:
                tier.turn()
        for index in manager._write_back.tiers:
            assert not manager._write_back.unwritten(index), "something was left in host memory alone"
        manager.check()
        self._check_drained()

    def _run_until_idle(self) -> int:
        for steps in range(BOUND):
            if self.engine.idle:
                return steps
            self._step()
        raise AssertionError(f"not done after {BOUND} steps: {self.engine.describe()}")

    def _check_drained(self) -> None:
        rig = self.rig
        self.engine.check_drained()
        rig.recorded.check_all_ended()
        kept = [job_id for job_id, failed in self.outdated.items() if not failed]
        assert not kept, f"loads {kept} brought what a reset had outdated"
        for tier in rig.tiers:
            assert not any(tier.lives.values()), f"{tier.name}: lives were never ended"
        for name in ("_lives", "_transfer_jobs", "_noting"):
            assert not getattr(rig.manager, name), f"the manager is left with {name}"
        assert rig.manager.host.leased == 0
        overdue = [job.order.slots for job in rig.manager._overdue.values()]
        lost = [reservation.slots for reservation in rig.scheduler.open_reservations()]
        theirs = {slot for slots in overdue + lost for slot in slots.tolist()}
        assert rig.manager.host.counts()[SlotState.RETIRED] == len(theirs)
        TALLY["slots retired at the end"] += len(theirs)

    def _release_everything(self) -> None:
        """What hung comes back and what was lost is found: then no slot is retired, and nobody touches any."""
        rig = self.rig
        for lost in self.lost:
            self._deliver(lost)
        self.lost.clear()
        for tier in rig.tiers:
            tier.release()
            tier.heal()
        self.engine.step_s = 1.0
        for _ in range(10):  # lookups that were lost with a worker are answered after 5 s
            self._step()
        self._run_until_idle()
        self._check_drained()
        counts = rig.manager.host.counts()
        assert counts[SlotState.RETIRED] == counts[SlotState.RESERVED] == 0, f"slots are left: {counts}"
        for name in ("_overdue", "_asks", "_open", "_deadlines", "_lease_ends"):
            assert not getattr(rig.manager, name), f"the manager is left with {getattr(rig.manager, name)}"
        assert not rig.scheduler._overdue
        assert not rig.memory.owners(), f"slots are still used by {rig.memory.owners()}"
        for tier in rig.tiers:
            assert not tier.jobs, f"{tier.name} is left with {tier.jobs}"
            assert not tier.asked, f"{tier.name} never answered lookups {tier.asked}"
            assert not tier.runner._open, f"{tier.name}: the runner is left with {tier.runner._open}"

    def _count(self) -> None:
        rig = self.rig
        for tier in rig.tiers:
            for name, count in (*tier.counts.items(), *tier.store.happened.items()):
                TALLY[name] += count
            TALLY["breakers opened"] += tier.runner._breaker.opened
            for name in ("chunks_promoted", "chunks_cascaded", "promotion_failures", "cascade_failures"):
                TALLY[name] += int(rig.manager.counters[f"{name} {tier.name}"])
            stats = tier.get_stats()
            TALLY["lookups that timed out"] += int(stats.get("lookups_timed_out", 0))
            damaged = sum(int(count) for name, count in stats.items() if name.startswith("damaged_"))
            TALLY["damaged chunks that were not served"] += damaged
        for name in ("tier_deadlines_passed", "promotions_cut", "allocation_failures", "surprises"):
            TALLY[name] += int(rig.manager.counters[name])
        for name, count in rig.scheduler.counters.items():
            TALLY[f"scheduler {name}"] += count
        for index in rig.manager._write_back.tiers:
            TALLY["evictions before they were written"] += rig.manager._write_back.lost[index]
        TALLY["retired stores released"] += rig.recorded.count("release")
        for call in rig.recorded.calls:
            if call.name == "complete_load":
                TALLY["loads"] += 1
                TALLY["loads of what a tier brought"] += bool(sum(call.what.origins.values()))
        for reservation in {call.what for call in rig.recorded.calls if call.name == "complete_store"}:
            contexts = reservation.contexts
            TALLY["stores of runs of several lives"] += 1 < len(set(contexts)) < len(contexts)


HAPPENED = [
    "chunks_promoted",
    "chunks_cascaded",
    "loads of what a tier brought",
    "stores of runs of several lives",
    "preemptions",
    "resets with jobs in flight",
    "resets with tier jobs in flight",
    "loads that a reset outdates",
    "resets that outdate what a tier keeps",
    "seen usable afterwards",
    "tier_deadlines_passed",
    "retired stores released",
    "released late",
    "reported while held",
    "breakers opened",
    "damaged chunks that were not served",
    "ids used again while draining",
    "aborts while waiting_for_load",
    "chunks submitted before they leave",
    "evictions before they were written",
]


def run_walks(walks: int, number: int) -> None:
    """Some walks from one seed. Walks of one seed are variations of each other: several seeds see more."""
    how = settings(
        max_examples=walks,
        stateful_step_count=RULES,
        deadline=None,
        database=None,
        print_blob=True,
        phases=(Phase.generate,) if os.environ.get("STATEFUL_NO_SHRINK") else (Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(number)(Walk), settings=how)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short runs are enough for jobs of several parts and lookups of several questions."""
    monkeypatch.setattr(io_worker, "PART_CHUNKS", 2)
    monkeypatch.setattr(key_index, "FIRST_PROBE", 2)


@pytest.mark.fault("B001")
@pytest.mark.fault("B003")
@pytest.mark.fault("B008")
@pytest.mark.fault("B016")
@pytest.mark.fault("B018")
@pytest.mark.fault("B059")
@pytest.mark.fault("B072")
@pytest.mark.fault("B137")
@pytest.mark.fault("B145")
@pytest.mark.fault("B146")
@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_happens_the_books_add_up_and_everything_ends(part: int) -> None:
    run_part(part)


def run_part(part: int) -> None:
    print(f"STATEFUL_SEED={SEED} STATEFUL_WALKS={WALKS}, part {part}")
    run_walks(WALKS // PARTS, PARTS * SEED + part)
    TALLY["parts"] += 1


def missing() -> list[str]:
    return [name for name in HAPPENED if not TALLY[name]]


def test_the_walks_were_long_enough_and_met_what_matters() -> None:
    if TALLY["parts"] < PARTS:
        pytest.skip("only some of the parts were run")
    part = PARTS
    while part < PARTS + MORE_PARTS and (missing() or TALLY["steps"] < LEAST_STEPS):
        run_part(part)
        part += 1
    assert TALLY["steps"] >= LEAST_STEPS, f"found {TALLY['steps']} steps, expected at least {LEAST_STEPS}"
    assert not missing(), f"none of the walks met {missing()}: {dict(TALLY)}"
