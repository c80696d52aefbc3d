"""An engine process to be killed: serves random requests over a directory until it is told to end, checking every byte.

Arguments: the directory, a seed, the number of requests (0: until killed). Prints a line per request, and at the end
how many tokens came from files.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

from byte_engine import FULL, Engine, prompts


def main() -> None:
    path, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    work = prompts(random.Random(0), 200)  # the same in every life, so that what one stored another finds
    rng = random.Random(seed)
    engine = Engine(path, f"crash-{seed}", FULL, 1)
    print("started", flush=True)
    for number in range(count) if count else itertools.count():
        engine.runner.add(rng.choice(work), rng.randrange(1, 4), req_id=f"r{number}")
        for _ in range(rng.randrange(1, 4)):
            engine.runner.step()
        print(number, flush=True)
    engine.runner.run(max_steps=1_000_000)
    stats = engine.connector.get_stats()
    engine.shutdown()
    print("tokens from files:", int(stats["tokens_loaded 0:files"]), flush=True)


main()
