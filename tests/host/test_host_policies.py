"""Policies by name, and the suite for each that exists."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pytest

from orlop.core import Int64Array, KeyRun
from orlop.errors import ConfigError, InvariantError
from orlop.host.policies import EvictionPolicy, load_policy
from orlop.host.policies.arc import ARC
from orlop.host.policies.lru import LRU
from orlop.host.policies.s3fifo import S3FIFO
from orlop.host.policies.sieve import Sieve
from orlop.host.tier import HostTier
from orlop.testing.policies import PolicySuite


class Newest(EvictionPolicy):
    """The smallest policy a user could write: whoever was offered last."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.stack: list[int] = []

    def insert(self, group: int, hashes: Sequence[bytes], slots: Int64Array) -> None: ...

    def touch(self, slots: Int64Array) -> None: ...

    def offer(self, slots: Sequence[int]) -> None:
        self.stack += slots

    def withdraw(self, slots: Sequence[int]) -> None:
        self.stack = [s for s in self.stack if s not in slots]

    def forget(self, slots: Int64Array) -> None:
        self.withdraw(slots.tolist())

    def pop(self) -> int:
        return self.stack.pop()

    def candidates(self) -> Collection[int]:
        return self.stack


class Careless(Newest):
    """Forgets that a slot was withdrawn."""

    def withdraw(self, slots: Sequence[int]) -> None: ...


class TestLRU(PolicySuite):
    def build(self, slots: int) -> EvictionPolicy:
        return LRU(slots)


class TestARC(PolicySuite):
    def build(self, slots: int) -> EvictionPolicy:
        return ARC(slots)


class TestS3FIFO(PolicySuite):
    def build(self, slots: int) -> EvictionPolicy:
        return S3FIFO(slots)


class TestSieve(PolicySuite):
    def build(self, slots: int) -> EvictionPolicy:
        return Sieve(slots)


class TestNewest(PolicySuite):
    def build(self, slots: int) -> EvictionPolicy:
        return Newest(slots)


def test_a_policy_is_found_by_its_name() -> None:
    policy = load_policy("lru", 7)
    assert isinstance(policy, LRU)
    assert policy.slots == 7


def test_a_policy_of_the_users_is_found_by_module_and_class() -> None:
    assert isinstance(load_policy(f"{__name__}:Newest", 7), Newest)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lifo", r"found 'lifo', expected one of arc, lru, s3fifo, sieve, or module:Class"),
        ("", r"found ''"),
        (":Newest", r"module:Class"),
        ("no_such_module:Policy", r"importing 'no_such_module' .* failed"),
        (f"{__name__}:Missing", r"has ARC, Careless, EvictionPolicy, LRU, Newest, S3FIFO, Sieve"),
        (f"{__name__}:pytest", r"expected a subclass"),
        (f"{__name__}:EvictionPolicy", r"implements every abstract method"),
    ],
)
def test_a_name_that_cannot_work_says_what_exists(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_policy(name, 7)


def test_a_policy_that_chooses_a_held_slot_is_named_and_the_chunk_stays() -> None:
    tier = HostTier(2, Careless(2))
    old, new = KeyRun(0, [b"a"], 0, 1), KeyRun(0, [b"b"], 0, 1)
    for run in (old, new):
        slots = tier.reserve(run, [0])
        assert slots is not None
        tier.publish(slots)
        tier.unhold(slots)
    tier.hold(slots)
    with pytest.raises(InvariantError, match=r"Careless chose slot 1, which may not leave"):
        tier.reserve(KeyRun(0, [b"c"], 0, 1), [0])
    assert tier.ready_prefix(old) == tier.ready_prefix(new) == 1


def test_lru_sorts_anew_where_all_candidates_were_used_since() -> None:
    slots = 4096
    policy = LRU(slots)
    everyone = np.arange(slots)
    policy.insert(0, [b"%d" % s for s in everyone], everyone)
    policy.offer(everyone.tolist())
    order = np.random.default_rng(5).permutation(slots)
    policy.touch(order)
    assert [policy.pop() for _ in range(slots)] == order[::-1].tolist()


def test_lru_keeps_one_heap_entry_for_a_slot_however_often_it_is_used_and_held() -> None:
    policy = LRU(8)
    everyone = np.arange(8)
    policy.insert(0, [b"%d" % s for s in everyone], everyone)
    for _ in range(50):
        policy.offer(range(8))
        policy.touch(everyone)
        policy.withdraw(range(8))
    assert len(policy._heap) == 8
