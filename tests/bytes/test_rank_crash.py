"""kill -9 of any process of an engine whose ranks have processes of their own, and its restart on the same directory.

Each life is one engine: the scheduler half, two or three ranks, the I/O process. At some moment, of the start, the
traffic or the end, one or several of them are killed. Nothing of that life may be left then: no process, no name, no
shared memory. Every rank checks every byte that it is given in the lives that follow.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from byte_engine import FULL, Engine
from processes import children_of, is_gone, left_of, shared_memory_of
from rank_processes import RankProcesses, RemoteRank
from ranks_child import RANK_IS_GONE, STORE_BYTES

from orlop.host.tier import SlotState

CHILD = Path(__file__).with_name("ranks_child.py")
ROUNDS = int(os.environ.get("CRASH_ROUNDS", "6"))
SEED = int(os.environ.get("CRASH_SEED", "7"))
SHAPES = ("2-full", "3-full", "3-hybrid")
MARK = "ORLOP_TEST_MARK"
VICTIMS = ("a rank", "rank 0", "all ranks", "the scheduler", "the scheduler and a rank", "the I/O process", "all")


class Life:
    """One engine, from its start to the end of all its processes."""

    def __init__(self, store: Path, errors: Path, seed: int, shape: str, deed: str) -> None:
        self.mark = f"{store}-{seed}"
        path = os.pathsep.join(filter(None, sys.path))
        with errors.open("a") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(CHILD), str(store), str(seed), shape, deed],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "PYTHONPATH": path, MARK: self.mark},
            )
        assert self.process.stdout is not None
        self.lines: Iterator[str] = map(str.strip, self.process.stdout)
        self.ranks = [int(next(self.lines).removeprefix("rank ")) for _ in range(int(shape[0]))]
        # Held from now on: a number may belong to somebody else by the time it is killed, a descriptor may not.
        self.fds = {pid: os.pidfd_open(pid) for pid in (*self.ranks, self.process.pid)}

    def read(self, count: int) -> None:
        """So many requests more, or to its end."""
        for _ in range(count):
            if next(self.lines, None) is None:
                return

    def kill(self, victims: str, rng: random.Random) -> None:
        some_rank = [rng.choice(self.ranks)]
        scheduler = [self.process.pid]
        io = [pid for pid in children_of(self.process.pid) if pid not in self.ranks]
        chosen = {
            "a rank": some_rank,
            "rank 0": self.ranks[:1],
            "all ranks": self.ranks,
            "the scheduler": scheduler,
            "the scheduler and a rank": [*scheduler, *some_rank],
            "the I/O process": io,
            "all": [*io, *self.ranks, *scheduler],
        }[victims]
        for pid in chosen:
            self._kill(pid)

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            if pid not in self.fds:
                self.fds[pid] = os.pidfd_open(pid)
            signal.pidfd_send_signal(self.fds[pid], signal.SIGKILL)

    def end(self) -> int:
        """Its exit status, once none of its processes is there any more."""
        for _ in self.lines:
            pass
        assert self.process.stdout is not None
        self.process.stdout.close()
        status = self.process.wait(120)
        for fd in self.fds.values():
            os.close(fd)
        left = processes_with(self.mark)
        assert all(is_gone(pid, 60) for pid in left), "a process outlives its engine"
        return status


def processes_with(mark: str) -> list[int]:
    """Processes that were started by, or by somebody who was started by, the life with this mark."""
    wanted = f"{MARK}={mark}".encode()
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and wanted in _environment(p)]


def _environment(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is somebody else's
        return []


@pytest.mark.crash
@pytest.mark.fault("B202")
@pytest.mark.fault("B164")
@pytest.mark.fault("B108")
def test_any_processes_of_an_engine_with_ranks_killed_at_any_moment(tmp_path: Path) -> None:
    print(f"CRASH_SEED={SEED} CRASH_ROUNDS={ROUNDS}")
    rng = random.Random(SEED)
    store, errors = tmp_path / "store", tmp_path / "errors"
    held: set[str] = set()
    order = rng.sample(VICTIMS, len(VICTIMS))
    for number in range(ROUNDS):
        victims, deed = order[number % len(order)], rng.choice(["until-killed", "until-killed", "drain"])
        life = Life(store, errors, 1000 * SEED + number, rng.choice(SHAPES), deed)
        print(f"life {number}: {victims}, {deed}")
        if rng.random() < 0.75:  # else at some moment of its start
            life.read(rng.randrange(1, 60))
        held |= shared_memory_of(processes_with(life.mark))
        life.kill(victims, rng)
        if victims == "the I/O process":  # which the engine survives
            life.read(rng.randrange(1, 30))
            life.kill("the scheduler", rng)
        assert life.end() in (-signal.SIGKILL, RANK_IS_GONE, 0), errors.read_text(encoding="utf-8")[-3000:]
        assert f"@orlop-ranks-{store}" not in Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace")

    for draft in store.glob(".*.draft"):
        os.utime(draft, (0, 0))  # a killed writer's; what is young may be somebody's
    for number, shape in enumerate(SHAPES):
        last = Life(store, errors, number, shape, "look" if "full" in shape else "drain")
        told = list(last.lines)
        assert last.end() == 0, errors.read_text(encoding="utf-8")[-3000:]
        print(shape, told[-2:])
    said = errors.read_text(encoding="utf-8")
    assert "AssertionError" not in said, said[-3000:]
    assert "InvariantError" not in said, said[-3000:]
    assert not left_of(held), "shared memory is left"
    files = [p for p in store.rglob("*") if p.is_file()]
    assert not [p for p in files if len(p.name) != 40 and p.suffix != ".json"], "temporary files are left"
    assert sum(p.stat().st_size for p in files if len(p.name) == 40) <= STORE_BYTES


@pytest.mark.crash
@pytest.mark.fault("B007")
@pytest.mark.fault("B157")
@pytest.mark.parametrize(("rank", "fate"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_an_engine_that_has_not_noticed_that_a_rank_is_silent(tmp_path: Path, rank: int, fate: signal.Signals) -> None:
    """Its stores are settled at their deadline and publish nothing, and their slots stay out of use."""
    ranks: list[RemoteRank] = []

    def start_rank(config: object, spec: object) -> RemoteRank:
        ranks.append(RemoteRank(config, spec))  # type: ignore[arg-type]
        return ranks[-1]

    engine = Engine(
        tmp_path,
        "silent",
        FULL,
        2,
        device=RankProcesses,
        worker=start_rank,  # type: ignore[arg-type]
    )
    silent = ranks[rank]
    try:
        rng = random.Random(SEED)
        before = engine.serve([rng.randrange(1000) for _ in range(33)])
        os.kill(silent.process.pid, fate)
        silent.silent = True
        engine.clock.skips_s = 0.1  # to the deadline of what waits for its word
        unseen = [engine.serve([rng.randrange(1000) for _ in range(33)], 3) for _ in range(3)]
        stats = engine.stats()
        assert stats["store_jobs_failed"] == stats["jobs_overdue"] > 0
        assert stats["slots_retired"] > 0
        state_of = engine.manager.host.slot_state
        names = {path.name for path in tmp_path.rglob("*")}
        keys = [key for request in unseen for key in request.block_hashes[1::2]]
        assert not any(state_of(0, key) for key in keys)
        assert not {f"{key.hex()}00000000" for key in keys} & names
        assert all(state_of(0, key) is SlotState.READY for key in before.block_hashes[1::2])
        if fate is signal.SIGSTOP:
            os.kill(silent.process.pid, signal.SIGCONT)
            silent.wake()
            engine.clock.skips_s = 0.0
            engine.until(lambda: engine.stats()["slots_retired"] == 0)
            again = engine.serve(unseen[0].prompt)
            assert again.was_external == 0, "what was settled as failed is served"
            assert engine.serve(unseen[0].prompt).was_external == 32
            assert engine.serve(before.prompt).was_external == 32
    finally:
        os.kill(silent.process.pid, signal.SIGKILL)
        engine.shutdown()
