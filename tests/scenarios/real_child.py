"""An engine process that serves until it is told to stop: SIGTERM once makes it shut down, and again changes nothing.

Arguments: the directory. Prints ``started``, then a line per request, then ``down`` once both halves are shut down.
"""

from __future__ import annotations

import itertools
import random
import signal
import sys
from pathlib import Path

from byte_engine import FULL, Engine, prompts

asked_to_stop = False


def stop(number: int, frame: object) -> None:
    global asked_to_stop
    asked_to_stop = True


def main() -> None:
    signal.signal(signal.SIGTERM, stop)
    rng = random.Random(1)
    work = prompts(rng, 100)
    engine = Engine(Path(sys.argv[1]), "child", FULL, 1)
    print("started", flush=True)
    for number in itertools.count():
        engine.runner.add(rng.choice(work), 3, req_id=f"r{number}")
        engine.runner.step()
        print(number, flush=True)
        if asked_to_stop:
            break
    engine.shutdown()
    print("down", flush=True)


main()
