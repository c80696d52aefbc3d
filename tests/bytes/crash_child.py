"""An engine process to be killed: serves random requests over a directory until it is told to end, checking every byte.

Arguments: the directory, a seed, the number of requests (0: until killed). Prints a line per request. One that is not
killed loads at its start what lies in the directory, and says at the end how many tokens that were.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

from byte_engine import FULL, Engine, load_what_is_published, prompts


def main() -> None:
    path, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    work = prompts(random.Random(0), 200)  # the same in every life, so that what one stored another finds
    rng = random.Random(seed)
    engine = Engine(path, f"crash-{seed}", FULL, 1)
    print("started", flush=True)
    found = load_what_is_published(engine, path, work) if count else 0
    for number in range(count) if count else itertools.count():
        engine.runner.add(rng.choice(work), rng.randrange(1, 4), req_id=f"r{number}")
        for _ in range(rng.randrange(1, 4)):
            engine.runner.step()
        print(number, flush=True)
    engine.runner.run(max_steps=1_000_000)
    engine.shutdown()
    print("found", found, flush=True)


main()
