"""A step's budget of chunks delays stores; it loses none."""

from __future__ import annotations

import pytest

from orlop.core import Outcome, TierResult, TransferKind
from orlop.testing.rig import FULL, make_rig, make_tiered_rig


@pytest.mark.fault("B042")
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_a_request_that_ends_before_its_backlog_is_stored_stores_all_of_it(async_scheduling: bool) -> None:
    rig = make_rig(FULL, async_scheduling=async_scheduling, options={"max_chunks_per_step": 1})
    rig.runner.add(list(range(33)), 1)
    rig.finish()
    stored = {int(slot) for job in rig.device.stored_jobs for part in job.transfers for slot in part.slots}
    assert len(stored) == 8


def test_a_report_with_the_wrong_number_of_outcomes_is_a_failed_job() -> None:
    rig = make_tiered_rig(FULL)
    tier = rig.tiers[0]
    rig.runner.add(list(range(17)), 1)
    rig.runner.run(until=lambda: bool(tier.open_jobs(TransferKind.STORE)))
    job_id = tier.open_jobs(TransferKind.STORE)[0]
    tier.get_finished_jobs = lambda: [TierResult(job_id, (Outcome.OK,))]  # type: ignore[method-assign]
    rig.runner.step()
    del tier.get_finished_jobs
    assert rig.scheduler.get_stats()["surprises"] >= 1
    assert rig.scheduler.get_stats()["tier_jobs_in_flight"] == 0
