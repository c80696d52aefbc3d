"""The suite that every eviction policy passes.

In: a subclass that says how its policy is built. Out: tests, for pytest. Never: an opinion who should leave first.

    class TestMine(PolicySuite):
        def build(self, slots: int) -> EvictionPolicy:
            return Mine(slots)
"""

from __future__ import annotations

from random import Random

import numpy as np

from orlop.core import Int64Array, KeyRun
from orlop.host.policies.base import EvictionPolicy
from orlop.host.tier import HostTier, SlotState


class PolicySuite:
    """Subclass it, name the class ``Test...`` and implement ``build``."""

    seeds = range(8)
    """Each is one random history; a failing one is named in the message."""

    def build(self, slots: int) -> EvictionPolicy:
        """A fresh policy for so many slots."""
        raise NotImplementedError(f"{type(self).__name__}.build must return an EvictionPolicy")

    # --- the policy alone ---------------------------------------------------------------------------

    def test_what_is_offered_is_chosen_once(self) -> None:
        policy = self._filled(16)
        policy.offer(range(16))
        assert set(policy.candidates()) == set(range(16))
        assert sorted(policy.pop() for _ in range(16)) == list(range(16))
        assert not policy.candidates()

    def test_what_was_not_offered_is_never_chosen(self) -> None:
        policy = self._filled(16)
        policy.offer([3, 5])
        policy.touch(_slots(range(16)))
        assert {policy.pop(), policy.pop()} == {3, 5}

    def test_what_was_withdrawn_is_not_chosen_until_it_is_offered_again(self) -> None:
        policy = self._filled(8)
        policy.offer(range(8))
        policy.withdraw([0, 1, 2, 7])
        policy.touch(_slots([2, 3]))
        assert set(policy.candidates()) == {3, 4, 5, 6}
        assert {policy.pop() for _ in range(4)} == {3, 4, 5, 6}
        policy.offer([2, 0])
        assert {policy.pop(), policy.pop()} == {0, 2}

    def test_what_is_forgotten_is_not_chosen_and_its_slot_serves_again(self) -> None:
        policy = self._filled(4)
        policy.offer(range(3))
        policy.forget(_slots([1, 3]))
        assert set(policy.candidates()) == {0, 2}
        policy.insert(1, [b"again"], _slots([1]))
        assert set(policy.candidates()) == {0, 2}
        policy.offer([1])
        assert {policy.pop() for _ in range(3)} == {0, 1, 2}

    def test_a_parent_is_offered_in_place_of_its_last_child(self) -> None:
        policy = self._filled(4)
        policy.offer([3])
        child = policy.pop()
        order = [child]
        for parent in (2, 1, 0):
            child = policy.replace(parent, child)
            order.append(child)
        assert order == [3, 2, 1, 0]
        assert not policy.candidates()

    def test_a_replaced_child_does_not_hide_other_candidates(self) -> None:
        policy = self._filled(6)
        policy.offer([1, 3, 5])
        child = policy.pop()
        chosen = [child, policy.replace(child - 1, child)]
        left = set(policy.candidates())
        assert left | set(chosen) == {1, 3, 5, child - 1}
        assert len(left) == 2

    def test_who_comes_next_is_a_candidate_and_asking_changes_nothing(self) -> None:
        asked, other = self._filled(16), self._filled(16)
        for policy in (asked, other):
            policy.offer([3, 9, 1, 12])
            policy.touch(_slots([9, 4]))
        for n in (1, 2, 9):
            coming = asked.coming(n)
            assert len(set(coming)) == len(coming) == min(n, 4)
            assert set(coming) <= {3, 9, 1, 12}
        assert [asked.pop() for _ in range(4)] == [other.pop() for _ in range(4)]
        assert list(asked.coming(2)) == []

    def test_random_histories_alone(self) -> None:
        for seed in self.seeds:
            random, slots = Random(seed), 24
            policy = self._filled(slots)
            there, offered = set(range(slots)), set[int]()
            for _ in range(400):
                some = [s for s in range(slots) if random.random() < 0.2]
                match random.randrange(6):
                    case 0 if new := [s for s in some if s not in there]:
                        policy.insert(0, [b"%d" % s for s in new], _slots(new))
                        there |= set(new)
                    case 1 if used := [s for s in some if s in there]:
                        policy.touch(_slots(used))
                    case 2 if idle := [s for s in some if s in there - offered]:
                        policy.offer(idle)
                        offered |= set(idle)
                    case 3 if kept := [s for s in some if s in offered]:
                        policy.withdraw(kept)
                        offered -= set(kept)
                    case 4 if gone := [s for s in some[:2] if s in there]:
                        policy.forget(_slots(gone))
                        there -= set(gone)
                        offered -= set(gone)
                    case 5 if offered:
                        victim = policy.pop()
                        assert victim in offered, f"seed {seed}: slot {victim} was chosen and is no candidate"
                        there.discard(victim)
                        offered.discard(victim)
                assert set(policy.candidates()) == offered, f"seed {seed}"

    # --- under the tier -------------------------------------------------------------------------------

    def test_a_tier_with_it_keeps_its_rules_in_random_histories(self) -> None:
        for seed in self.seeds:
            _History(Random(seed), self.build(32)).play(150)

    def test_a_tier_with_it_gives_every_slot_away_again(self) -> None:
        tier = HostTier(32, self.build(32))
        for name in "abcd":
            run = _conversation(name, 32)
            assert tier.ready_prefix(run) == 0
            _store(tier, run)
            tier.check({}, {})
            assert tier.ready_prefix(run) == 32
            tier.touch(run)

    def test_a_child_may_leave_while_its_parent_is_written_once_more(self) -> None:
        tier = HostTier(4, self.build(4))
        run, other, third, older = (_conversation(n, k) for n, k in (("a", 2), ("b", 3), ("c", 4), ("d", 1)))
        _store(tier, older)
        _store(tier, run)
        tier.discard(0, run.hashes[:1])
        tier.discard(0, older.hashes)  # its slot is the parent's then
        parent = tier.reserve(run, [0])
        assert parent is not None
        _store(tier, other)
        assert tier.ready_prefix(other) == 3, "the child has made room"
        tier.publish(parent)
        tier.unhold(parent)
        for later in (third, run, other, third):
            _store(tier, later)
            tier.check({}, {})
            assert tier.ready_prefix(later) == len(later)

    def _filled(self, slots: int) -> EvictionPolicy:
        policy = self.build(slots)
        assert policy.slots == slots
        policy.insert(0, [b"%d" % s for s in range(slots)], _slots(range(slots)))
        assert not policy.candidates()
        return policy


class _History:
    """Conversations that share prefixes, in a tier that is too small for them."""

    def __init__(self, random: Random, policy: EvictionPolicy) -> None:
        self.random = random
        self.tier = HostTier(policy.slots, policy)
        self.held: list[Int64Array] = []

    def play(self, steps: int) -> None:
        for _ in range(steps):
            run = _conversation(self.random.choice("abcdef") + self.random.choice("xyz"), self.random.randint(1, 20))
            self.tier.touch(run)
            ready = self.tier.ready_slots(run)
            match self.random.randrange(4):
                case 0:
                    self.tier.hold(ready)
                    self.held.append(ready)
                case 1 if self.held:
                    self.tier.unhold(self.held.pop(self.random.randrange(len(self.held))))
                case _:
                    self.store(run)
            self.check()
        while self.held:
            self.tier.unhold(self.held.pop())
        assert self.tier.room_for(self.tier.slots)

    def store(self, run: KeyRun) -> None:
        states = self.tier.states(run)
        absent = [i for i in range(len(run)) if not states[i]]
        free = self.tier.counts()[SlotState.FREE]
        evictions = self.tier.evictions
        slots = self.tier.reserve(run, absent)
        if slots is None:
            return
        assert self.tier.evictions - evictions == max(0, len(absent) - free), "evicted more or less than was missing"
        self.tier.publish(slots)
        if self.random.random() < 0.5:
            self.held.append(slots)
        else:
            self.tier.unhold(slots)

    def check(self) -> None:
        holds: dict[int, int] = {}
        for slots in self.held:
            for slot in slots.tolist():
                holds[slot] = holds.get(slot, 0) + 1
        self.tier.check(holds, {})


def _store(tier: HostTier, run: KeyRun) -> None:
    slots = tier.reserve(run, range(tier.ready_prefix(run), len(run)))
    assert slots is not None
    tier.publish(slots)
    tier.unhold(slots)


def _conversation(name: str, chunks: int) -> KeyRun:
    """The first ten chunks are shared by all whose name begins alike."""
    hashes = [b"%s %d" % (name[: 1 + i // 10].encode(), i) for i in range(chunks)]
    return KeyRun(0, hashes, 0, chunks)


def _slots(numbers: object) -> Int64Array:
    return np.array(list(numbers), np.int64)  # type: ignore[call-overload]
