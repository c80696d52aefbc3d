"""Random engines: every seed picks a geometry, a size and a mix of trouble, and the books must add up.

In: a seed. Out: after every step all invariants that can be recounted; at the end nothing is left. Never: an
expectation of which request is served what. A red seed is the whole bug report: run it alone.
"""

from __future__ import annotations

import random

import pytest

from orlop.core import Geometry, KVGroup, TransferKind
from orlop.testing.doubles import DictManager
from orlop.testing.request_runner import Status
from orlop.testing.rig import FULL, HYBRID, PAIRS, Rig, make_rig

MIXED = Geometry((KVGroup(0, 4), KVGroup(1, 8, sliding_window=12), KVGroup(2, 4, sliding_window=5)), 4, 2)
GEOMETRIES = {"full": FULL, "pairs": PAIRS, "hybrid": HYBRID, "mixed": MIXED}


def make(seed: int) -> tuple[random.Random, Rig]:
    dice = random.Random(seed)
    geometry = dice.choice(list(GEOMETRIES.values()))
    rig = make_rig(
        geometry,
        DictManager(dice.choice([3, 12, 1000])),
        ranks=dice.choice([1, 2]),
        blocks=len(geometry.groups) * dice.choice([16, 24, 60]),
        async_scheduling=dice.random() < 0.5,
        token_budget=dice.choice([8, 16, 64]),
        prefix_caching=dice.random() < 0.8,
        skip_empty_outputs=dice.random() < 0.5,
        seed=seed,
        options={
            "offload_decode": dice.random() < 0.8,
            "store_deadline_s": dice.choice([0.05, 30.0]),
            "max_chunks_per_step": dice.choice([1, 3, 2048]),
        },
    )
    device = rig.device
    device.crank_chance = dice.choice([0.3, 0.7, 1.0])
    device.reorder = dice.random() < 0.5
    device.loads_before_forward = dice.random() < 0.5
    lossy, flaky = dice.random() < 0.4, dice.random() < 0.4
    device.lose = lambda job, rank: lossy and job.kind is TransferKind.STORE and dice.random() < 0.1
    device.fail = lambda job, rank: flaky and dice.random() < 0.1
    device.repeat = lambda job, rank: dice.random() < 0.1
    device.hold = lambda job, rank: dice.random() < 0.3
    return dice, rig


def trouble(dice: random.Random, rig: Rig) -> None:
    runner = rig.runner
    live = [*runner.waiting, *runner.running]
    what = dice.random()
    if live and what < 0.05:
        runner.abort(dice.choice(live).request_id)
    elif runner.running and what < 0.10:
        runner.preempt(dice.choice(runner.running).request_id)
    elif what < 0.12:
        runner.reset(new_weights=False)
    elif what < 0.22:
        runner.pool.reset()
    elif what < 0.26:
        rig.manager.inner.room = not rig.manager.inner.room  # type: ignore[attr-defined]


def arrive(dice: random.Random, rig: Rig, prompts: list[list[int]]) -> None:
    base = dice.choice(prompts)
    prompt = base[: dice.randint(1, len(base))] + [dice.randint(0, 9) for _ in range(dice.randint(0, 6))]
    ended = [r.request_id for r in rig.runner.requests.values() if r.ended and r not in rig.runner._held]
    req_id = dice.choice(ended) if ended and dice.random() < 0.2 else None
    stop_after = dice.randint(1, 8) if dice.random() < 0.5 else None
    rig.runner.add(prompt, dice.randint(1, 12), req_id=req_id, stop_after=stop_after)


def walk(seed: int, steps: int = 150) -> Rig:
    dice, rig = make(seed)
    prompts = [[dice.randint(0, 9) for _ in range(36)] for _ in range(2)]
    for _ in range(steps):
        if dice.random() < 0.3 and len(rig.runner.waiting) < 4:
            arrive(dice, rig, prompts)
        trouble(dice, rig)
        rig.runner.step()
    rig.device.crank_chance = 1.0
    rig.device.hold = lambda job, rank: False
    rig.finish(max_steps=5000)
    assert all(r.status in (Status.FINISHED, Status.ABORTED) for r in rig.runner.requests.values())
    return rig


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.fault("B059")
@pytest.mark.fault("B072")
def test_any_mix_of_trouble_ends_with_nothing_left(seed: int) -> None:
    walk(seed)
