"""An engine with a process per rank, to be killed: serves random requests over a directory, checking every byte.

Arguments: the directory, a seed, a shape (``2-full``: ranks and groups), and what it does: ``until-killed``, ``drain``
(a number of requests, then it ends well), or ``look`` (loads what earlier lives have published, then it ends well).
Prints the ids of its ranks, then a line per request. When a rank has ended it ends all others, by force or by closing
their pipes, whichever the seed says, and says so by its exit status.
"""

from __future__ import annotations

import itertools
import os
import random
import select
import sys
import threading
from pathlib import Path
from typing import Any

from byte_engine import FULL, HYBRID, PATIENT, Engine, load_what_is_published, prompts
from rank_processes import RankGone, RankProcesses, RemoteRank

RANK_IS_GONE = 3
GROUPS = {"full": FULL, "hybrid": HYBRID}
STORE_BYTES = 16 << 20


class Watch:
    """Ends the whole engine as soon as one rank has ended; what an engine's parent of the ranks does."""

    def __init__(self) -> None:
        self.ranks: list[RemoteRank] = []
        self.armed = True

    def start_rank(self, config: Any, spec: Any) -> RemoteRank:
        rank = RemoteRank(config, spec)
        self.ranks.append(rank)
        print("rank", rank.process.pid, flush=True)
        threading.Thread(target=self._wait_for_its_end, args=(os.pidfd_open(rank.process.pid),), daemon=True).start()
        return rank

    def _wait_for_its_end(self, pidfd: int) -> None:
        select.select([pidfd], [], [])
        if self.armed:
            for rank in self.ranks:
                rank.process.kill()
            os._exit(RANK_IS_GONE)


def main() -> None:
    path, seed, shape, deed = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    rng = random.Random(seed)
    ranks, groups = shape.split("-")
    watch = Watch()
    engine = Engine(
        path,
        "ranks",
        GROUPS[groups],
        int(ranks),
        {"type": "files", "path": str(path), "bytes": STORE_BYTES, "deadline": dict(PATIENT)},
        spec={"instance": f"ranks-{path}"},  # the same in every life: a name that is still taken would be found out
        device=RankProcesses,
        worker=watch.start_rank,
        async_scheduling=rng.random() < 0.5,
    )
    print("started", flush=True)
    if rng.random() < 0.5:
        watch.armed = False  # then its step finds out, and the scheduler half ends in order
    try:
        if deed == "look":
            print("found", load_what_is_published(engine, path, prompts(random.Random(0), 200)[::8]), flush=True)
        else:
            serve(engine, rng, 40 if deed == "drain" else None)
        watch.armed = False
        engine.runner.run(max_steps=1_000_000)
        told = engine.connector.get_stats()
        engine.shutdown()
    except RankGone:
        watch.armed = False
        for rank in watch.ranks:
            rank.shutdown()
        engine.connector.shutdown()
        sys.exit(RANK_IS_GONE)
    damaged = sum(count for name, count in told.items() if name.startswith("damaged_"))
    assert not damaged, f"{damaged} chunks at rest did not verify"
    print("ended well, with", int(told.get("tokens_loaded 0:files", 0)), "tokens from files", flush=True)


def serve(engine: Engine, rng: random.Random, count: int | None) -> None:
    work = prompts(random.Random(0), 200)  # the same in every life, so that what one stored another finds
    for number in itertools.count() if count is None else range(count):
        engine.runner.add(rng.choice(work), rng.randrange(1, 4), req_id=f"r{number}")
        if rng.random() < 0.1:
            engine.runner.abort(f"r{rng.randrange(number + 1)}")
        for _ in range(rng.randrange(1, 4)):
            engine.runner.step()
        print(number, flush=True)


if __name__ == "__main__":
    main()
