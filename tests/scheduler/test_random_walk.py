"""Random engines: every seed picks a geometry, a size and a mix of trouble, and the books must add up.

In: a seed. Out: after every step all invariants that can be recounted; at the end nothing is left. Never: an
expectation of which request is served what. A red seed is the whole bug report: run it alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from orlop.core import Geometry, KVGroup, Outcome, TransferKind
from orlop.testing.device import Device
from orlop.testing.doubles import Answers, DictManager
from orlop.testing.request_runner import Status
from orlop.testing.rig import FULL, HYBRID, PAIRS, Rig, make_rig, make_tiered_rig

MIXED = Geometry((KVGroup(0, 4), KVGroup(1, 8, sliding_window=12), KVGroup(2, 4, sliding_window=5)), 4, 2)
GEOMETRIES = {"full": FULL, "pairs": PAIRS, "hybrid": HYBRID, "mixed": MIXED}


def make(seed: int, geometries: Sequence[Geometry], roomy: bool, options: dict[str, Any]) -> tuple[random.Random, Rig]:
    dice = random.Random(seed)
    geometry = dice.choice(geometries)
    tiers = dice.choice([None, 0, 1, 2])
    slots = dice.choice([40, 100, 300] if roomy else [4, 12, 40])
    settings = make_settings(dice, geometry, seed)
    settings["options"] |= options
    settings["blocks"] *= 3 if roomy else 1
    if tiers is None:
        rig = make_rig(geometry, DictManager(slots), **settings)
    else:
        waits = {name: dice.choice([0.03, 0.2, 1.0]) for name in ("lookup_s", "promotion_s", "cascade_s")}
        rig = make_tiered_rig(geometry, slots=slots, tiers=tiers, auto=False, entry=waits, **settings)
    make_trouble(dice, rig.device)
    calm = dice.random() < 0.5
    for tier in rig.tiers:
        tier.auto = calm
        if calm:
            continue
        tier.answers = dice.choice(list(Answers))
        tier.load_outcome = lambda key: dice.choice(list(Outcome)) if dice.random() < 0.1 else Outcome.OK
        tier.store_outcome = lambda key: Outcome.NO_SPACE if dice.random() < 0.1 else Outcome.OK
        tier.claims_more = lambda key: dice.random() < 0.02
    return dice, rig


def make_settings(dice: random.Random, geometry: Geometry, seed: int) -> dict[str, Any]:
    return {
        "ranks": dice.choice([1, 2]),
        "blocks": len(geometry.groups) * dice.choice([16, 24, 60]),
        "async_scheduling": dice.random() < 0.5,
        "token_budget": dice.choice([8, 16, 64]),
        "prefix_caching": dice.random() < 0.8,
        "skip_empty_outputs": dice.random() < 0.5,
        "seed": seed,
        "options": {
            "offload_decode": dice.random() < 0.8,
            "store_deadline_s": dice.choice([0.05, 2.0]),
            "max_chunks_per_step": dice.choice([1, 3, 2048]),
            "max_joint_chunks": dice.choice([1, 2, 16, 64]),
            "gather_steps": dice.choice([1, 3, 8, 16, 64]),
        },
    }


def make_trouble(dice: random.Random, device: Device) -> None:
    device.crank_chance = dice.choice([0.3, 0.7, 1.0])
    device.reorder = dice.random() < 0.5
    device.loads_before_forward = dice.random() < 0.5
    lossy, flaky = dice.random() < 0.4, dice.random() < 0.4
    device.lose = lambda job, rank: lossy and job.kind is TransferKind.STORE and dice.random() < 0.1
    device.fail = lambda job, rank: flaky and dice.random() < 0.1
    device.repeat = lambda job, rank: dice.random() < 0.1
    device.hold = lambda job, rank: dice.random() < 0.3


def crank_tiers(dice: random.Random, rig: Rig) -> None:
    for tier in rig.tiers:
        for lookup in tier.open_lookups:
            if dice.random() < 0.4 and tier.answers is Answers.BY_HAND:
                tier.answer(lookup)
        for job in tier.open_jobs():
            what = dice.random()
            if what < 0.3:
                tier.complete(job)
            elif what < 0.35:
                tier.fail(job, released=dice.random() < 0.5)
        for job in tier.hanging_jobs():
            if dice.random() < 0.1:
                tier.release(job)


def trouble(dice: random.Random, rig: Rig) -> None:
    runner = rig.runner
    live = [*runner.waiting, *runner.running]
    what = dice.random()
    if live and what < 0.05:
        runner.abort(dice.choice(live).request_id)
    elif runner.running and what < 0.10:
        runner.preempt(dice.choice(runner.running).request_id)
    elif what < 0.12:
        runner.reset(device_cleared=dice.random() < 0.7)
    elif what < 0.22:
        runner.pool.reset()
    elif what < 0.26 and isinstance(rig.manager.inner, DictManager):
        rig.manager.inner.room = not rig.manager.inner.room


def arrive(dice: random.Random, rig: Rig, prompts: list[list[int]]) -> None:
    base = dice.choice(prompts)
    prompt = base[: dice.randint(1, len(base))] + [dice.randint(0, 9) for _ in range(dice.randint(0, 6))]
    ended = [r.request_id for r in rig.runner.requests.values() if r.ended and r not in rig.runner._held]
    req_id = dice.choice(ended) if ended and dice.random() < 0.2 else None
    stop_after = dice.randint(1, 8) if dice.random() < 0.5 else None
    fits = 4 * (rig.runner.pool.size // len(rig.runner.geometry.groups) - 1) - len(prompt)
    max_tokens = min(40, fits) if dice.random() < 0.3 else dice.randint(1, 12)
    rig.runner.add(prompt, max_tokens, req_id=req_id, stop_after=stop_after)


def walk(
    seed: int,
    steps: int = 150,
    geometries: Sequence[Geometry] = tuple(GEOMETRIES.values()),
    roomy: bool = False,
    **options: Any,
) -> Rig:
    dice, rig = make(seed, geometries, roomy, options)
    prompts = [[dice.randint(0, 9) for _ in range(36)] for _ in range(dice.choice([2, 6]))]
    for _ in range(steps):
        if dice.random() < 0.3 and len(rig.runner.waiting) < 4:
            arrive(dice, rig, prompts)
        trouble(dice, rig)
        crank_tiers(dice, rig)
        rig.runner.step()
    rig.device.crank_chance = 1.0
    rig.device.hold = lambda job, rank: False
    for tier in rig.tiers:
        tier.auto, tier.answers = True, Answers.AT_ONCE
    rig.finish(max_steps=5000)
    assert all(r.status in (Status.FINISHED, Status.ABORTED) for r in rig.runner.requests.values())
    return rig


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.fault("B059")
@pytest.mark.fault("B072")
def test_any_mix_of_trouble_ends_with_nothing_left(seed: int) -> None:
    walk(seed)


def shared_runs(rig: Rig) -> int:
    """Store jobs of several lives that had more than one chunk of one of them, not only of prompts."""
    found = 0
    for reservation in {call.what for call in rig.manager.calls if call.name == "complete_store"}:
        if 1 < len(set(reservation.contexts)) < len(reservation.contexts):
            last = {c.req_id: chunk for c, chunk in zip(reservation.contexts, reservation.chunks, strict=True)}
            per_chunk = rig.scheduler.geometry.chunk_tokens(reservation.group)
            found += any((chunk + 1) * per_chunk > len(rig.runner.requests[r].prompt) for r, chunk in last.items())
    return found


@pytest.mark.parametrize("gather_steps", [8, 16, 64])
def test_runs_that_are_gathered_meet_the_same_trouble(gather_steps: int) -> None:
    found = 0
    for seed in range(100, 106):
        rig = walk(
            seed,
            300,
            [FULL, PAIRS],
            roomy=True,
            gather_steps=gather_steps,
            max_joint_chunks=64,
            max_chunks_per_step=2048,
            offload_decode=True,
        )
        found += shared_runs(rig)
    assert found, "these walks have tested less than they should"
