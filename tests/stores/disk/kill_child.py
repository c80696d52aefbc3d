"""Forks writers that are killed: imports once, so that a thousand kills take seconds.

In: lines ``path seed`` on stdin. Out: per line the writer's pid, then ``number version`` for each chunk for which a
writer's ``write`` answered OK; ``gone`` once it is dead. Never: an end of a writer by itself.
"""

from __future__ import annotations

import os
import random
import sys

from chunks import store

from orlop.core import Outcome
from orlop.stores.disk.store import DiskStore

KEYS = 200
MIB = 1 << 20


def write_for_ever(path: str, seed: int) -> None:
    rng = random.Random(seed)
    slab = DiskStore(path, max_bytes=MIB, direct_io="off", keep_s=0.0)
    version = seed << 20
    while True:
        version += 1
        numbers = sorted(rng.sample(range(KEYS), rng.randrange(1, 8)))
        outcomes = store(slab, [(number, version) for number in numbers])
        words = [f"{n} {version}\n" for n, o in zip(numbers, outcomes, strict=True) if o is Outcome.OK]
        os.write(1, "".join(words).encode())


def main() -> None:
    for line in sys.stdin:
        path, seed = line.split()
        pid = os.fork()
        if not pid:
            write_for_ever(path, int(seed))
        os.write(1, f"{pid}\n".encode())
        os.waitpid(pid, 0)
        os.write(1, b"gone\n")


if __name__ == "__main__":
    main()
