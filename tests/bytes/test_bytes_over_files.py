"""The bytes, through everything that is real: worker halves, region, I/O process, files or a slab on a disk.

Each cell of the device says which tokens it is of. Every load is compared with what its request needs there, every
finished store with what its key stands for, while the I/O process is killed in between.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from byte_engine import FULL, HYBRID, PATIENT, Engine, prompts

from orlop.core import KVGroup


@pytest.mark.fault("B022")
@pytest.mark.fault("B028")
@pytest.mark.fault("B147")
@pytest.mark.parametrize(
    ("groups", "async_scheduling", "seed", "kind"),
    [(FULL, False, 1, "files"), (HYBRID, True, 2, "files"), (HYBRID, False, 3, "disk")],
    ids=["full", "hybrid-async", "disk"],
)
def test_hundreds_of_requests_over_a_tier_with_the_io_process_killed_in_between(
    tmp_path: Path, groups: tuple[KVGroup, ...], async_scheduling: bool, seed: int, kind: str
) -> None:
    rng = random.Random(seed)
    tier = {"type": kind, "path": str(tmp_path), "bytes": "2MiB", "deadline": dict(PATIENT)}
    engine = Engine(tmp_path, f"bytes-{seed}", groups, 1, tier, async_scheduling=async_scheduling)
    try:
        for number, prompt in enumerate(prompts(rng, 400)):
            engine.runner.add(prompt, rng.randrange(1, 6), req_id=f"r{number}")
            if rng.random() < 0.05:
                engine.runner.abort(f"r{rng.randrange(number + 1)}")
            if number % 100 == 50:
                engine.kill_io()
            for _ in range(rng.randrange(1, 5)):
                engine.runner.step()
        engine.runner.run(max_steps=1_000_000)
        engine.wait_in_service()
        engine.load_from_files(rng)
        stats = engine.connector.get_stats()
    finally:
        engine.shutdown()
    assert stats[f"tokens_loaded 0:{kind}"] > 0
    assert engine.device.loads_checked > 0
    assert engine.device.stores_checked > 0
    print(f"seed {seed}: {engine.device.loads_checked} blocks loaded, {engine.device.stores_checked} chunks stored")


@pytest.mark.fault("B115")
def test_an_engine_that_starts_again_is_served_from_the_slab(tmp_path: Path) -> None:
    tier = {"type": "disk", "path": str(tmp_path), "bytes": "4MiB", "deadline": dict(PATIENT)}
    rng = random.Random(4)
    wanted = [[rng.randrange(10**6) for _ in range(61)] for _ in range(6)]
    for life in range(2):
        with Engine(tmp_path, f"again-{life}", FULL, 1, tier) as engine:
            for prompt in wanted:
                engine.serve(prompt)
            loaded = engine.stats()["tokens_loaded 0:disk"]
            assert engine.stats()["open_lookups 0:disk"] == 0
        assert loaded >= 6 * 56 if life else loaded == 0
    assert engine.device.loads_checked > 0
