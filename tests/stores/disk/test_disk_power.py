"""The power is cut after each write of a workload in turn: no wrong byte, no failed start, what was synced is there."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from chunks import key_of, load, store
from cut_device import CutDevice, Disk, Op, in_order, reordered

from orlop.core import Outcome
from orlop.stores.disk.store import DiskStore
from orlop.tiering.base import KeyChange
from orlop.tiering.key_index import key_name

MIB = 1 << 20
KEYS = 90
OPERATIONS = 220
NAMES = {key_name(key_of(n)): n for n in range(KEYS)}


@dataclass
class History:
    """Of one key: versions by the position in the log at which their store began and ended, and what ended them."""

    begun: list[tuple[int, int]] = field(default_factory=list)
    ended: list[tuple[int, int]] = field(default_factory=list)
    deleted: list[tuple[int, int]] = field(default_factory=list)
    """When a delete began and ended."""
    evicted: list[int] = field(default_factory=list)


@dataclass
class Workload:
    log: list[Op]
    keys: list[History]
    syncs: list[tuple[int, int]]


def open_store(path: Path, disk: Disk, sync: bool) -> DiskStore:
    return DiskStore(path, max_bytes=MIB, direct_io="off", sync=sync, make_device=CutDevice.on(disk), keep_s=0.0)


def run_workload(path: Path, sync: bool) -> Workload:
    """A few hundred operations on a slab that holds half of the keys: stores, rewrites, reads, removals, syncs."""
    rng, disk = random.Random(7), Disk()
    keys = [History() for _ in range(KEYS)]
    syncs: list[tuple[int, int]] = []
    slab = open_store(path, disk, sync)

    def told(change: KeyChange) -> None:
        for name in change.removed.tolist():
            keys[NAMES[name]].evicted.append(len(disk.log))

    slab.watch(told)
    for version in range(OPERATIONS // (1 + sync)):  # with syncs there is twice as much to cut
        kind, numbers = rng.random(), sorted(rng.sample(range(KEYS), rng.randrange(1, 4)))
        began = len(disk.log)
        if kind < 0.6:
            for number in numbers:
                keys[number].begun.append((began, version))
            outcomes = store(slab, [(number, version) for number in numbers])
            for number, outcome in zip(numbers, outcomes, strict=True):
                if outcome is Outcome.OK:
                    keys[number].ended.append((len(disk.log), version))
        elif kind < 0.8:
            load(slab, numbers)
        elif kind < 0.9:
            slab.delete([key_of(number) for number in numbers])
            for number in numbers:
                keys[number].deleted.append((began, len(disk.log)))
        else:
            slab.sync()
            syncs.append((began, len(disk.log)))
    slab.check()
    slab.close()
    return Workload(disk.log, keys, syncs)


def judge(slab: DiskStore, work: Workload, cut: int, sync: bool) -> int:
    """Every key against its history up to the cut; how many were found."""
    lasting = max((began for began, ended in work.syncs if ended <= cut), default=-1)
    found = 0
    for number, (outcome, _, version) in enumerate(load(slab, range(KEYS))):
        history = work.keys[number]
        begun = [(at, v) for at, v in history.begun if at <= cut]
        removed = max((ended for _, ended in history.deleted if ended <= cut), default=-1)
        if version is not None:
            found += 1
            assert version in [v for _, v in begun], f"key {number} came back with a version nobody stored"
            last_began = max(at for at, v in begun)
            assert last_began >= removed, f"key {number} came back after its removal"
        # What was reported before the last sync, and nothing has touched since, is there.
        safe = cut if sync else lasting
        ended = [(at, v) for at, v in history.ended if at <= safe]
        if not ended:
            continue
        at, wanted = ended[-1]
        if begun[-1][1] != wanted or any(at <= e <= cut for e in history.evicted):
            continue
        if any(began <= cut and ended >= at for began, ended in history.deleted):
            continue
        assert (outcome, version) == (Outcome.OK, wanted), f"key {number} was safe and is lost"
    return found


@pytest.mark.fault("B113")
@pytest.mark.fault("B027")
@pytest.mark.parametrize(("cut_at", "sync"), [(in_order, False), (reordered, False), (reordered, True)])
def test_the_power_may_go_after_any_write(
    tmp_path: Path, cut_at: Callable[[Sequence[Op], int, random.Random], Disk], sync: bool
) -> None:
    work = run_workload(tmp_path, sync)
    found = 0
    for cut in range(len(work.log) + 1):
        after = open_store(tmp_path, cut_at(work.log, cut, random.Random(cut)), sync)
        found += judge(after, work, cut, sync)
        after.check()
        after.close()
    assert len(work.log) > 300
    assert found > 10 * len(work.log), "the slab came back empty most of the time"


def test_the_judge_tells_a_loss(tmp_path: Path) -> None:
    """Without what the last sync brought to the disk, a key that was safe is missed."""
    work = run_workload(tmp_path, False)
    cut = len(work.log)
    bare = Disk()
    slab = open_store(tmp_path, bare, False)
    with pytest.raises(AssertionError, match="was safe and is lost"):
        judge(slab, work, cut, False)
    slab.close()
