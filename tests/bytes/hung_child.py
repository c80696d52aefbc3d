"""An engine over a store that never answers: serves its requests and ends. Argument: whether I/O has a process."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from byte_engine import FULL, Engine, prompts


def main() -> None:
    tier = {
        "type": "orlop.testing.slow_store:SlowStore",
        "deadline": {"lookup": "50ms", "promotion": "100ms", "cascade": "200ms"},
    }
    engine = Engine(
        Path("unused"), "hung", FULL, 1, tier, io_process=sys.argv[1] == "process", settings={"drain_deadline": "300ms"}
    )
    for number, prompt in enumerate(prompts(random.Random(0), 40)):
        engine.runner.add(prompt, 2, req_id=f"r{number}")
        engine.runner.step()
    engine.runner.run(max_steps=10_000_000)
    stats = engine.connector.get_stats()
    engine.shutdown()
    print("ended", int(stats["tier_deadlines_passed"]), int(stats["slots_retired"]), flush=True)


main()
