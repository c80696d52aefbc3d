"""The bytes, through everything that is real: worker halves, region, I/O process, files on a disk.

Each cell of the device says which tokens it is of. Every load is compared with what its request needs there, every
finished store with what its key stands for, while the I/O process is killed in between.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from byte_engine import FULL, HYBRID, Engine, prompts

from orlop.core import KVGroup


@pytest.mark.fault("B022")
@pytest.mark.fault("B028")
@pytest.mark.fault("B147")
@pytest.mark.parametrize(
    ("groups", "async_scheduling", "seed"), [(FULL, False, 1), (HYBRID, True, 2)], ids=["full", "hybrid-async"]
)
def test_a_thousand_requests_over_files_with_the_io_process_killed_in_between(
    tmp_path: Path, groups: tuple[KVGroup, ...], async_scheduling: bool, seed: int
) -> None:
    rng = random.Random(seed)
    engine = Engine(tmp_path, f"bytes-{seed}", groups, 1, async_scheduling=async_scheduling)
    try:
        for number, prompt in enumerate(prompts(rng, 500)):
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
    assert stats["tokens_loaded 0:files"] > 0
    assert engine.device.loads_checked > 0
    assert engine.device.stores_checked > 0
    print(f"seed {seed}: {engine.device.loads_checked} blocks loaded, {engine.device.stores_checked} chunks stored")
