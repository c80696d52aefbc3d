"""Each policy against a naive twin on plain lists: the same chunk leaves, whatever came before."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

import numpy as np
import pytest
from naive_policies import NaiveARC, NaiveS3FIFO, NaiveSieve

from orlop.core import Int64Array
from orlop.host.policies import line
from orlop.host.policies.arc import ARC
from orlop.host.policies.s3fifo import S3FIFO
from orlop.host.policies.sieve import Sieve

HISTORIES, STEPS = 40, 300


class Pair:
    """A policy and its twin, called alike with what the host tier may call them with."""

    def __init__(self, random: Random, policy: Any, twin: Any) -> None:
        self.random, self.policy, self.twin = random, policy, twin
        self.there: dict[int, int] = {}
        self.offered: set[int] = set()
        self.before: dict[int, int] = {}
        """Of a slot the one that was inserted as the chunk before it."""

    def some(self, slots: Iterable[int]) -> list[int]:
        some = sorted(slots)
        return self.random.sample(some, self.random.randint(min(1, len(some)), len(some)))

    def step(self) -> None:
        idle = self.there.keys() - self.offered
        match self.random.randrange(9):
            case 0 | 1:
                self.insert(self.some(set(range(self.policy.slots)) - self.there.keys()))
            case 2:
                if used := self.some(self.there):
                    self.policy.touch(_array(used))
                    self.twin.touch(used)
            case 3 | 4:
                more = self.some(idle)
                self.policy.offer(more)
                self.twin.offer(more)
                self.offered |= set(more)
            case 5:
                kept = self.some(self.offered)[:3]
                self.policy.withdraw(kept)
                self.twin.withdraw(kept)
                self.offered -= set(kept)
            case 6:
                self.forget(self.some(self.there)[:2])
            case _ if self.offered:
                self.leave(self.random.randrange(5))
        assert set(self.policy.candidates()) == self.offered

    def insert(self, slots: list[int]) -> None:
        """Of twice as many chunks as there are slots, so that what has left comes back."""
        absent = sorted(set(range(2 * self.policy.slots)) - set(self.there.values()))
        names = self.random.sample(absent, len(slots))
        hashes = [b"%d" % name for name in names]
        self.policy.insert(3, hashes, _array(slots))
        self.twin.insert(hashes, slots)
        self.there.update(zip(slots, names, strict=True))
        self.before.update(zip(slots[1:], slots, strict=False))

    def forget(self, slots: list[int]) -> None:
        self.policy.forget(_array(slots))
        self.twin.forget(slots)
        for slot in slots:
            del self.there[slot]
        self.offered -= set(slots)

    def leave(self, generations: int) -> None:
        """One leaves, then its parent, and so on, until one has other children."""
        coming = self.policy.coming(3)
        assert len(set(coming)) == min(3, len(self.offered))
        assert set(coming) <= self.offered
        child = self.chosen(self.policy.pop())
        assert child == coming[0] or isinstance(self.policy, S3FIFO), "said to come, and another one came"
        for _ in range(generations):
            idle = sorted(self.there.keys() - self.offered)
            if not idle:
                return
            likely = self.before.get(child)
            parent = likely if likely in idle and self.random.random() < 0.8 else self.random.choice(idle)
            self.twin.inherit(parent)
            if self.random.random() < 0.3:
                self.policy.inherit(parent, child)
                return
            self.twin.offer([parent])
            self.offered.add(parent)
            child = self.chosen(self.policy.replace(parent, child))

    def chosen(self, slot: int) -> int:
        assert slot == self.twin.pop()
        del self.there[slot]
        self.offered.discard(slot)
        return slot


@pytest.mark.parametrize(
    ("policy", "twin"), [(ARC, NaiveARC), (S3FIFO, NaiveS3FIFO), (Sieve, NaiveSieve)], ids=["arc", "s3fifo", "sieve"]
)
def test_a_policy_and_its_twin_choose_alike(policy: Any, twin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "SPARE", 0)  # the holes are closed often
    for seed in range(HISTORIES):
        random = Random(seed)
        slots = random.randint(1, 30)
        pair = Pair(random, policy(slots), twin(slots))
        for step in range(STEPS):
            try:
                pair.step()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {slots} slots, step {step}") from error


def _array(slots: list[int]) -> Int64Array:
    return np.array(slots, np.int64)
