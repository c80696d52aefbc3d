"""The host tier's promises, one by one."""

from __future__ import annotations

import numpy as np
import pytest

from orlop.core import Int64Array, KeyRun
from orlop.errors import InvariantError
from orlop.host.slots import SlotState
from orlop.host.tier import EVICTED_KEPT, HostTier


def run_of(name: str, chunks: int, group: int = 0) -> KeyRun:
    return KeyRun(group, [f"{name}{i}".encode() for i in range(chunks)], 0, chunks)


def reserve(tier: HostTier, run: KeyRun) -> Int64Array:
    slots = tier.reserve(run, range(run.start, run.stop))
    assert slots is not None
    return slots


def store(tier: HostTier, run: KeyRun) -> Int64Array:
    slots = reserve(tier, run)
    tier.publish(slots)
    tier.unhold(slots)
    tier.check()
    return slots


def there(tier: HostTier, run: KeyRun) -> int:
    return sum(s > 0 for s in tier.states(run))


def test_a_chunk_is_readable_from_publish_on() -> None:
    tier, run = HostTier(8), run_of("a", 3)
    slots = reserve(tier, run)
    assert tier.ready_prefix(run) == 0
    assert tier.states(run) == b"\1\1\1"
    assert tier.slot_state(0, b"a1") is SlotState.RESERVED
    arrivals = tier.arrivals
    tier.publish(slots)
    assert tier.arrivals > arrivals
    assert tier.ready_prefix(run) == 3
    assert tier.ready_slots(run_of("a", 5)).tolist() == slots.tolist()
    assert tier.slots_of(run_of("a", 4)).tolist() == [*slots.tolist(), -1]
    assert tier.slot_state(0, b"a1") is SlotState.READY
    assert tier.slot_state(0, b"b1") is None
    assert tier.holds_of(slots).tolist() == [1, 1, 1]
    tier.check(dict.fromkeys(slots.tolist(), 1), {})


def test_groups_do_not_share_keys() -> None:
    tier = HostTier(8)
    store(tier, run_of("a", 3, group=0))
    assert tier.ready_prefix(run_of("a", 3, group=1)) == 0
    store(tier, run_of("a", 3, group=1))
    tier.discard(0, [b"a0", b"a1", b"a2"])
    assert tier.ready_prefix(run_of("a", 3, group=1)) == 3


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200, 5000])
def test_the_readable_prefix_is_counted_to_its_last_chunk(length: int) -> None:
    tier = HostTier(5000)
    store(tier, run_of("a", length))
    assert tier.ready_prefix(run_of("a", 5000)) == length
    assert tier.ready_prefix(run_of("a", 5000).part(length // 2, 5000)) == length - length // 2
    tier.discard(0, [b"a%d" % (length // 2)])
    assert tier.ready_prefix(run_of("a", 5000)) == length // 2


@pytest.mark.fault("B105")
def test_empty_slots_go_first_and_no_more_is_evicted_than_is_missing() -> None:
    tier = HostTier(8)
    store(tier, run_of("a", 8))
    tier.discard(0, [b"a5", b"a6", b"a7"])
    before = tier.evictions
    store(tier, run_of("b", 3))
    assert tier.evictions == before
    store(tier, run_of("c", 2))
    assert tier.evictions == before + 2
    assert tier.ready_prefix(run_of("a", 8)) == 3


@pytest.mark.fault("B106")
def test_a_fresh_chunk_is_the_most_recent() -> None:
    tier = HostTier(4)
    for name in "abcd":
        store(tier, run_of(name, 1))
    store(tier, run_of("e", 1))
    assert tier.take_evicted() == [(0, b"a0")]
    tier.touch(run_of("b", 1))
    store(tier, run_of("f", 1))
    assert tier.take_evicted() == [(0, b"c0")]


def test_a_prefix_outlives_what_extends_it_and_ends_leave_first() -> None:
    tier = HostTier(6)
    trunk, left, right = run_of("t", 2), ["l0", "l1"], ["r0", "r1"]
    hashes = list(trunk.hashes)
    store(tier, trunk)
    for branch in (left, right):
        run = KeyRun(0, hashes + [h.encode() for h in branch], 2, 4)
        store(tier, run)
    gone = []
    for i in range(6):
        store(tier, KeyRun(0, [b"new%d" % i], 0, 1))
        gone += [key for _, key in tier.take_evicted()]
    assert gone == [b"l1", b"l0", b"r1", b"r0", b"t1", b"t0"]


def test_touch_leaves_the_first_chunk_as_the_most_recent() -> None:
    tier = HostTier(4)
    names = [b"w", b"x", b"y", b"z"]
    for name in names:
        store(tier, KeyRun(0, [name], 0, 1))
    tier.touch(KeyRun(0, [b"y", b"missing", b"w"], 0, 3))
    for i in range(4):
        store(tier, KeyRun(0, [b"new%d" % i], 0, 1))
    assert [key for _, key in tier.take_evicted()] == [b"x", b"z", b"w", b"y"]


@pytest.mark.fault("B097")
def test_everything_unheld_is_evictable_again_and_again() -> None:
    tier = HostTier(8)
    for i in range(12):
        store(tier, run_of(f"r{i}-", 8))
        assert tier.ready_prefix(run_of(f"r{i}-", 8)) == 8


@pytest.mark.fault("B098")
def test_a_run_longer_than_the_tier_is_refused_before_anything_leaves() -> None:
    tier = HostTier(8)
    store(tier, run_of("a", 8))
    assert not tier.room_for(9)
    assert tier.reserve(run_of("b", 9), range(9)) is None
    assert tier.ready_prefix(run_of("a", 8)) == 8
    tier.check({}, {})


def test_a_chain_longer_than_the_tier_keeps_its_beginning() -> None:
    tier, chain = HostTier(8), run_of("a", 20)
    store(tier, chain.part(0, 8))
    assert tier.reserve(chain, [8]) is None
    assert tier.reserve(chain, range(8, 20)) is None
    assert tier.ready_prefix(chain) == 8
    tier.check({}, {})


@pytest.mark.fault("B091")
def test_a_declined_reserve_changes_nothing_and_room_tells_when_to_ask_again() -> None:
    tier, b = HostTier(8), run_of("b", 2)
    held = reserve(tier, run_of("a", 8))
    tier.publish(held)
    books = dict.fromkeys(held.tolist(), 1)
    room = tier.room
    assert not tier.room_for(1)
    assert tier.reserve(b, range(2)) is None
    assert tier.room == room
    tier.check(books, {})
    tier.unhold(held[4:])
    assert tier.room > room
    assert tier.room_for(4)
    assert not tier.room_for(5)
    assert tier.reserve(b, range(2)) is not None


@pytest.mark.fault("B104")
def test_loads_take_all_their_slots_or_none() -> None:
    tier = HostTier(10)
    runs = [run_of(name, 4) for name in "abcd"]
    answers = [tier.reserve(run, range(4)) for run in runs]
    assert [a is not None for a in answers] == [True, True, False, False]
    assert [there(tier, run) for run in runs] == [4, 4, 0, 0]
    for slots in answers[:2]:
        assert slots is not None
        tier.publish(slots)
        tier.unhold(slots)
    assert all(tier.reserve(run, range(4)) is not None for run in runs[2:])


@pytest.mark.fault("B095")
def test_what_is_held_or_leased_is_not_evicted() -> None:
    tier = HostTier(10)
    held, leased = store(tier, run_of("a", 4)), store(tier, run_of("b", 4))
    tier.hold(held)
    tier.lease(leased)
    assert tier.leased == 4
    store(tier, run_of("c", 2))
    assert tier.reserve(run_of("d", 3), range(3)) is None
    store(tier, run_of("d", 2))
    assert tier.ready_prefix(run_of("a", 4)) == tier.ready_prefix(run_of("b", 4)) == 4
    assert tier.ready_prefix(run_of("c", 2)) == 0
    tier.check(dict.fromkeys(held.tolist(), 1), dict.fromkeys(leased.tolist(), 1))


def test_a_held_parent_does_not_keep_its_children() -> None:
    tier = HostTier(6)
    slots = store(tier, run_of("a", 6))
    tier.hold(slots[:2])
    assert tier.room_for(4)
    store(tier, run_of("b", 4))
    assert tier.ready_prefix(run_of("a", 6)) == 2


def test_a_held_end_keeps_the_whole_chain() -> None:
    tier = HostTier(6)
    slots = store(tier, run_of("a", 6))
    tier.hold(slots[5:])
    assert not tier.room_for(1)
    tier.unhold(slots[5:])
    assert tier.room_for(6)


def test_the_end_that_new_chunks_extend_is_not_evicted_for_them() -> None:
    tier = HostTier(4)
    a, b = run_of("a", 5), run_of("b", 2)
    store(tier, a.part(0, 2))
    store(tier, b)
    store(tier, a.part(2, 4))
    assert tier.ready_prefix(a) == 4
    assert tier.reserve(a, [4]) is None
    tier.check({}, {})
    assert tier.ready_prefix(a) == 4


@pytest.mark.fault("B194")
def test_holds_and_leases_of_requests_that_come_to_nothing_leave_nothing() -> None:
    tier, run = HostTier(20), run_of("a", 10)
    store(tier, run)
    for _ in range(100):
        slots = tier.ready_slots(run)
        tier.lease(slots)
        tier.hold(slots)
        tier.unlease(slots)
        tier.unhold(slots)
        tier.check({}, {})
    assert tier.leased == 0
    store(tier, run_of("b", 20))


@pytest.mark.fault("B195")
def test_a_hold_given_back_twice_is_refused_and_changes_nothing() -> None:
    tier = HostTier(4)
    slots = store(tier, run_of("a", 2))
    tier.hold(slots[:1])
    with pytest.raises(InvariantError, match="without a hold"):
        tier.unhold(slots)
    with pytest.raises(InvariantError, match="without a lease"):
        tier.unlease(slots)
    tier.check({int(slots[0]): 1}, {})


@pytest.mark.fault("B195")
def test_a_chunk_discarded_while_two_hold_it_is_free_after_the_second() -> None:
    tier = HostTier(4)
    slots = store(tier, run_of("a", 1))
    tier.hold(slots)
    tier.hold(slots)
    tier.discard(0, [b"a0"])
    for _ in range(2):
        assert tier.counts()[SlotState.RETIRED] == 1
        assert tier.reserve(run_of("b", 4), range(4)) is None
        tier.unhold(slots)
    assert tier.counts()[SlotState.FREE] == 4
    with pytest.raises(InvariantError):
        tier.unhold(slots)


@pytest.mark.parametrize("verb", ["hold", "lease", "publish", "abandon"])
def test_a_slot_without_a_chunk_is_refused(verb: str) -> None:
    tier = HostTier(4)
    store(tier, run_of("a", 1))
    for slot in (3, -1):
        with pytest.raises(InvariantError):
            getattr(tier, verb)(np.array([slot]))
    tier.check({}, {})


def test_a_slot_named_twice_in_one_call_is_refused() -> None:
    tier = HostTier(4)
    slots = store(tier, run_of("a", 2))
    with pytest.raises(InvariantError, match="twice"):
        tier.hold(np.concatenate([slots, slots]))
    tier.check({}, {})


def test_a_key_that_is_there_is_not_reserved_again() -> None:
    tier = HostTier(8)
    reserve(tier, run_of("a", 1))
    with pytest.raises(InvariantError, match="expected only absent keys"):
        tier.reserve(run_of("a", 2), [0, 1])
    assert there(tier, run_of("a", 2)) == 1


def test_clear_retires_what_is_being_written_and_its_publication_publishes_nothing() -> None:
    tier = HostTier(8)
    ready, written = store(tier, run_of("a", 2)), reserve(tier, run_of("b", 3))
    tier.hold(ready[:1])
    before = tier.evictions
    tier.clear()
    assert tier.evictions == before + 2
    assert tier.counts() == {
        SlotState.FREE: 4,
        SlotState.RESERVED: 0,
        SlotState.READY: 0,
        SlotState.RETIRED: 4,
    }
    arrivals = tier.arrivals
    tier.publish(written)
    tier.abandon(written)
    assert tier.arrivals == arrivals
    assert there(tier, run_of("b", 3)) == 0
    room = tier.room
    tier.unhold(np.concatenate([written, ready[:1]]))
    assert tier.room > room
    tier.check({}, {})
    assert tier.counts()[SlotState.FREE] == 8


def test_a_chain_that_lost_its_middle_is_whole_again_when_it_comes_back() -> None:
    tier, run = HostTier(6), run_of("a", 6)
    store(tier, run)
    tier.discard(0, [b"a2"])
    store(tier, run.part(2, 3))
    tier.touch(run.part(3, 6))
    tier.take_evicted()
    for i in range(6):
        store(tier, KeyRun(0, [b"new%d" % i], 0, 1))
    assert [key for _, key in tier.take_evicted()] == [b"a5", b"a4", b"a3", b"a2", b"a1", b"a0"]


def test_a_store_with_gaps_links_each_chunk_to_the_one_before_it() -> None:
    tier, run = HostTier(6), run_of("a", 6)
    store(tier, run.part(0, 2))
    slots = tier.reserve(run, [2, 4, 5])
    assert slots is not None
    tier.publish(slots)
    tier.unhold(slots)
    store(tier, run.part(3, 4))
    assert tier.ready_prefix(run) == 6
    for i in range(6):
        store(tier, KeyRun(0, [b"new%d" % i], 0, 1))
        assert tier.ready_prefix(run) == 5 - i


@pytest.mark.fault("B091")
def test_room_tells_that_an_abandoned_child_no_longer_keeps_its_parent() -> None:
    tier = HostTier(4)
    store(tier, run_of("a", 2))
    store(tier, KeyRun(0, [b"a0", b"x1"], 1, 2))
    written = tier.reserve(KeyRun(0, [b"a0", b"y1"], 0, 2), [1])
    assert written is not None
    assert not tier.room_for(3)
    room = tier.room
    tier.abandon(written)
    assert tier.room_for(3)
    assert tier.room > room


def test_only_usable_slots_are_handed_out() -> None:
    tier = HostTier(8, usable=2)
    assert tier.reserve(run_of("a", 3), range(3)) is None
    room = tier.room
    tier.grow(5)
    assert tier.room > room
    assert reserve(tier, run_of("a", 5)).max() < 5
    with pytest.raises(ValueError, match="expected 5 "):
        tier.grow(4)
    with pytest.raises(ValueError, match="to 8"):
        tier.grow(9)
    tier.check()


def test_the_list_of_evicted_keys_is_bounded_to_the_newest() -> None:
    tier = HostTier(1000)
    total = 0
    while total < EVICTED_KEPT + 2500:
        store(tier, run_of(f"{total}-", 1000))
        tier.clear()
        total += 1000
    evicted = tier.take_evicted()
    assert len(evicted) == EVICTED_KEPT
    assert evicted[-1][1].startswith(b"%d-" % (total - 1000))
    assert tier.evictions == total
    assert tier.take_evicted() == []


def test_check_finds_books_that_differ_from_the_callers() -> None:
    tier = HostTier(4)
    slots = store(tier, run_of("a", 1))
    tier.hold(slots)
    tier.check({int(slots[0]): 1}, {})
    for holds, leases in (({}, {}), ({int(slots[0]): 2}, {}), (None, {int(slots[0]): 1})):
        with pytest.raises(InvariantError):
            tier.check(holds, leases)


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: t._books.free.pop(),
        lambda t: t._books.reasons.__setitem__(0, 7),
        lambda t: t._books.parent.__setitem__(0, 3),
        lambda t: t._books.state.__setitem__(3, SlotState.RETIRED),
        lambda t: t._books.holds.__setitem__(3, 1),
        lambda t: t._ready[0].pop(b"a1"),
        lambda t: t._ready[0].__setitem__(b"a1", 0),
        lambda t: t._key.__setitem__(0, b"other"),
        lambda t: t._policy.withdraw([2]),
        lambda t: setattr(t._books, "candidates", 5),
        lambda t: setattr(t._books, "leased", 1),
        lambda t: setattr(t._books, "retired", 1),
    ],
)
def test_check_finds_damage(damage) -> None:  # type: ignore[no-untyped-def]
    tier = HostTier(4)
    assert store(tier, run_of("a", 3)).tolist() == [0, 1, 2]
    damage(tier)
    with pytest.raises(InvariantError):
        tier.check()
