"""The host tier's promises, one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import pytest

from orlop.core import Int64Array, KeyRun
from orlop.errors import InvariantError
from orlop.host.policies.lru import LRU
from orlop.host.slots import SlotState
from orlop.host.tier import EVICTED_KEPT, FIRST_BATCH, GROWTH, LAST_BATCH, HostTier


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


ENDS = [*accumulate(min(FIRST_BATCH * GROWTH**i, LAST_BATCH) for i in range(7))]
"""Where batches end, the last two of the greatest size."""
LONGEST = ENDS[-1]
EDGES = [end + shift for end in ENDS[:-1] for shift in (-1, 0, 1)]


@pytest.fixture(scope="module")
def long_tier() -> tuple[HostTier, KeyRun]:
    """A run of many batches, all of it readable."""
    tier, run = HostTier(LONGEST), run_of("a", LONGEST)
    tier.publish_and_unhold(reserve(tier, run))
    return tier, run


@pytest.mark.parametrize("damage", ["missing", "being written", "missing while another is written"])
@pytest.mark.parametrize("length", [0, 1, *EDGES, LONGEST - 1])
def test_the_readable_prefix_ends_before_what_is_missing_or_being_written(
    length: int, damage: str, long_tier: tuple[HostTier, KeyRun]
) -> None:
    tier, run = long_tier
    slots, last = tier.slots_of(run), None
    tier.discard(0, run.hashes[length : length + 1])
    if damage == "missing while another is written":
        tier.discard(0, run.hashes[-1:])
        last = reserve(tier, run.part(LONGEST - 1, LONGEST)) if length < LONGEST - 1 else None
    written = reserve(tier, run.part(length, length + 1)) if damage == "being written" else None
    for start in (0, 1, FIRST_BATCH):
        part, expected = run.part(start, LONGEST), max(0, length - start)
        if start <= length:
            assert tier.ready_prefix(part) == expected
            assert tier.ready_slots(part).tolist() == slots[start:length].tolist()
    assert tier.slot_state(0, run.hashes[length]) is (None if written is None else SlotState.RESERVED)
    assert tier.states(run)[length] == (0 if written is None else 1)
    if written is None:
        written = reserve(tier, run.part(length, length + 1))
    tier.publish_and_unhold(written)
    if last is not None:
        tier.publish_and_unhold(last)
    assert tier.ready_prefix(run) == LONGEST
    assert tier.ready_slots(run).tolist() == tier.slots_of(run).tolist()


@pytest.mark.parametrize("length", [1, *EDGES, LONGEST])
def test_a_run_that_is_wholly_readable_is_so_at_every_length(length: int, long_tier: tuple[HostTier, KeyRun]) -> None:
    tier, run = long_tier
    assert tier.ready_prefix(run.part(0, length)) == length
    assert tier.ready_prefix(run.part(LONGEST - length, LONGEST)) == length
    assert tier.ready_slots(run.part(0, length)).tolist() == tier.slots_of(run.part(0, length)).tolist()


def test_an_empty_run_has_no_chunk() -> None:
    tier = HostTier(8)
    store(tier, run_of("a", 3))
    for run in (KeyRun(0, [], 0, 0), run_of("a", 3).part(0, 0), run_of("a", 3).part(3, 3), KeyRun(1, [], 0, 0)):
        assert tier.ready_prefix(run) == 0
        for slots in (tier.ready_slots(run), tier.slots_of(run)):
            assert slots.tolist() == []
            assert slots.dtype == np.int64
        assert tier.states(run) == b""
        tier.touch(run)
    tier.check({}, {})


class Told(LRU):
    """Notes what it is told of uses of chunks."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.touched: list[list[int]] = []

    def insert(self, group: int, hashes: Sequence[bytes], slots: Int64Array) -> None:
        super().insert(group, hashes, slots)
        self.touched.clear()

    def touch(self, slots: Int64Array) -> None:
        super().touch(slots)
        self.touched.append(slots.tolist())


def test_what_is_being_written_is_not_touched() -> None:
    """A policy has not been told of it yet."""
    policy = Told(8)
    tier = HostTier(8, policy)
    readable = store(tier, run_of("a", 2))
    written = reserve(tier, run_of("w", 1))
    tier.touch(KeyRun(0, [b"w0", b"a1", b"missing", b"a0"], 0, 4))
    assert policy.touched == [readable[::-1].tolist()]
    tier.touch(run_of("w", 2))
    assert len(policy.touched) == 1
    tier.check(dict.fromkeys(written.tolist(), 1), {})


def test_a_chunk_that_comes_back_while_its_retired_slot_is_read_has_a_slot_of_its_own() -> None:
    tier, run = HostTier(4), run_of("a", 1)
    old = store(tier, run)
    tier.hold(old)
    tier.discard(0, [b"a0"])
    new = reserve(tier, run)
    assert new.tolist() != old.tolist()
    assert tier.slot_state(0, b"a0") is SlotState.RESERVED
    tier.abandon(old)
    tier.unhold(old)
    assert tier.slots_of(run).tolist() == new.tolist(), "what becomes of the old slot is nothing to the key"
    tier.publish_and_unhold(new)
    assert tier.ready_slots(run).tolist() == new.tolist()
    tier.check({}, {})


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
        lambda t: t._slot[0].pop(b"a1"),
        lambda t: t._slot[0].__setitem__(b"a1", 0),
        lambda t: t._slot[0].__setitem__(b"a1", 3),
        lambda t: t._slot[0].__setitem__(b"a1", -1),
        lambda t: t._slot[0].__setitem__(b"more", 2),
        lambda t: t._slot[1].__setitem__(b"a1", t._slot[0].pop(b"a1")),
        lambda t: t._slot[1].__setitem__(t._key[1], 1),
        lambda t: t._slot[0].__setitem__(bytes(bytearray(t._key[1])), t._slot[0].pop(b"a1")),
        lambda t: t._group.__setitem__(1, 1),
        lambda t: t._books.state.__setitem__(2, SlotState.FREE),
        lambda t: t._books.state.__setitem__(2, SlotState.RESERVED),
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


# --- single chunks, a few at once -----------------------------------------------------------------------------


def reserve_each(tier: HostTier, keys: list[bytes], extended: list[bytes] | None = None, group: int = 0) -> Int64Array:
    taken = tier.reserve_each(group, keys, extended or [b""] * len(keys))
    assert taken is not None
    return np.array(taken, np.int64)


def store_each(tier: HostTier, keys: list[bytes], extended: list[bytes] | None = None, group: int = 0) -> Int64Array:
    slots = reserve_each(tier, keys, extended, group)
    tier.publish_and_unhold(slots)
    tier.check({}, {})
    return slots


def books(tier: HostTier) -> tuple[object, ...]:
    """All that a call could change, but for which slot is free."""
    changing = tier.room, tier.arrivals, tier.evictions, tier.leased, tier.being_read
    return tier.counts(), tier.coming(tier.slots), *changing


REFUSED = {
    "twice": ([b"x", b"y", b"x"], [b"", b"", b""]),
    "readable": ([b"x", b"r1"], [b"", b"r0"]),
    "being written": ([b"w0", b"x"], [b"", b""]),
    "extends one further back": ([b"x", b"y", b"z"], [b"", b"", b"x"]),
    "extended by another": ([b"y", b"x"], [b"x", b""]),
    "extends itself": ([b"x"], [b"x"]),
    "more than all": ([b"%d" % i for i in range(7)], [b""] * 7),
    "more than may leave": ([b"p", b"q", b"x", b"y"], [b""] * 4),
    "only what they extend may leave": ([b"x", b"y"], [b"r1", b""]),
}


@pytest.mark.parametrize("why", REFUSED)
def test_single_chunks_that_will_not_do_are_refused_and_nothing_has_changed(why: str) -> None:
    tier, (keys, extended) = HostTier(6), REFUSED[why]
    written = reserve(tier, run_of("w", 3))
    store(tier, run_of("r", 2))
    before = books(tier)
    assert tier.reserve_each(0, keys, extended) is None
    assert books(tier) == before
    tier.check(dict.fromkeys(written.tolist(), 1), {})


def test_single_chunks_get_what_a_reservation_gives() -> None:
    tier = HostTier(6)
    slots = reserve_each(tier, [b"x", b"y", b"z"])
    assert tier.states(KeyRun(0, [b"x", b"y", b"z"], 0, 3)) == b"\1\1\1"
    assert tier.slots_of(KeyRun(0, [b"x", b"y", b"z"], 0, 3)).tolist() == slots.tolist()
    assert tier.holds_of(slots).tolist() == [1, 1, 1]
    assert tier.free == 3
    tier.check(dict.fromkeys(slots.tolist(), 1), {})
    tier.abandon(slots[:1])
    tier.unhold(slots[:1])
    tier.publish_and_unhold(slots[1:])
    assert tier.states(KeyRun(0, [b"x", b"y", b"z"], 0, 3)) == b"\0\2\2"
    tier.check({}, {})


def test_no_chunk_takes_no_slot() -> None:
    tier = HostTier(4)
    assert tier.reserve_each(0, [], []) == []
    tier.publish_and_unhold(np.empty(0, np.int64))
    assert tier.counts()[SlotState.FREE] == tier.free == 4
    tier.check({}, {})
    full = store_each(tier, [b"w", b"x", b"y", b"z"])
    tier.hold(full)
    assert tier.reserve_each(0, [], []) == []
    tier.check(dict.fromkeys(full.tolist(), 1), {})


def test_single_chunks_of_another_group_are_other_chunks() -> None:
    tier = HostTier(6)
    store_each(tier, [b"x", b"y"])
    store_each(tier, [b"y", b"z"], [b"x", b"x"], group=1)  # what they extend is not there in this group
    assert [tier.states(KeyRun(group, [b"x", b"y", b"z"], 0, 3)) for group in (0, 1)] == [b"\2\2\0", b"\0\2\2"]
    tier.discard(1, [b"y"])
    assert tier.states(KeyRun(0, [b"x", b"y"], 0, 2)) == b"\2\2"
    tier.check({}, {})


@pytest.mark.parametrize("ready", [True, False], ids=["readable", "being written"])
def test_single_chunks_keep_what_they_extend(ready: bool) -> None:
    """Two of them the same chunk, of which one comes to nothing."""
    tier = HostTier(5)
    parents = reserve_each(tier, [b"p", b"q"])
    if ready:
        tier.publish_and_unhold(parents)
    children = reserve_each(tier, [b"p1", b"p2", b"q1"], [b"p", b"p", b"q"])
    if not ready:
        tier.publish_and_unhold(parents)
    tier.check(dict.fromkeys(children.tolist(), 1), {})
    assert not tier.room_for(1)
    tier.publish_and_unhold(children[:1])
    tier.abandon(children[1:2])
    tier.unhold(children[1:2])
    tier.publish_and_unhold(children[2:])
    tier.check({}, {})
    gone = []
    for i in range(6):
        store_each(tier, [b"new%d" % i])
        gone += [key for _, key in tier.take_evicted()]
    assert sorted(gone[:4]) == [b"p", b"p1", b"q", b"q1"]
    assert gone.index(b"p1") < gone.index(b"p")
    assert gone.index(b"q1") < gone.index(b"q")


@pytest.mark.parametrize("kept", [b"x3", b"x1"], ids=["nothing", "what comes after the first"])
def test_short_runs_leave_from_their_ends(kept: bytes) -> None:
    """Two runs at once, one of them on top of what is there; the end of one comes to nothing in the second case."""
    tier = HostTier(6)
    store_each(tier, [b"p"])
    slots = reserve_each(tier, [b"x1", b"x2", b"x3", b"p1", b"p2"], [b"", b"x1", b"x2", b"p", b"p1"])
    tier.check(dict.fromkeys(slots.tolist(), 1), {})
    assert not tier.room_for(1)
    if kept == b"x1":
        tier.abandon(slots[1:2])
        tier.unhold(slots[1:2])
        tier.publish_and_unhold(np.delete(slots, 1))
    else:
        tier.publish_and_unhold(slots)
    tier.check({}, {})
    gone = []
    for i in range(7):
        store_each(tier, [b"new%d" % i])
        gone += [key for _, key in tier.take_evicted()]
    ends_first = [b"p2", b"p1", b"p"]
    assert [key for key in gone if key in ends_first] == ends_first
    chain = [key for key in gone if key[:1] == b"x"]
    assert chain == ([b"x3", b"x2", b"x1"] if kept == b"x3" else sorted(chain, reverse=True))


def test_what_single_chunks_extend_is_not_evicted_for_any_of_them() -> None:
    tier = HostTier(4)
    for name in (b"p", b"q", b"new", b"newer"):
        store_each(tier, [name])
    children = reserve_each(tier, [b"p1", b"q1"], [b"p", b"q"])
    assert sorted(tier.take_evicted()) == [(0, b"new"), (0, b"newer")]
    tier.check(dict.fromkeys(children.tolist(), 1), {})


def test_a_single_chunk_whose_beginning_comes_later_is_its_child_then() -> None:
    tier, run = HostTier(2), run_of("a", 2)
    store_each(tier, [b"a1"], [b"a0"])
    store(tier, run.part(0, 1))
    tier.touch(run.part(1, 2))
    store_each(tier, [b"x"])
    assert tier.take_evicted() == [(0, b"a1")]


def hold_and_abandon(tier: HostTier, slots: Int64Array) -> None:
    tier.hold(slots)
    tier.abandon(slots)


TROUBLES: dict[str, Callable[[HostTier, Int64Array], None]] = {
    "none": lambda tier, slots: None,
    "some are read as well": lambda tier, slots: tier.hold(slots[::3]),
    "some are waited for": lambda tier, slots: tier.lease(slots[::3]),
    "some are retired": lambda tier, slots: tier.abandon(slots[::3]),
    "some are retired and read": lambda tier, slots: hold_and_abandon(tier, slots[::3]),
    "all are retired": lambda tier, slots: tier.clear(),
    "some are extended": lambda tier, slots: tier.publish_and_unhold(reserve_each(tier, [b"child"], [b"x0"])),
}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 64, 65, 200])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_the_end_of_a_write_in_one_call_is_that_in_two(trouble: str, count: int, groups: int) -> None:
    ends: list[tuple[object, ...]] = []
    for at_once in (True, False):
        tier = HostTier(700)
        keys = [[b"%c%d" % (name, i) for i in range(count)] for name in b"px"]
        store_each(tier, keys[0])
        slots = np.concatenate([reserve_each(tier, keys[1], keys[0], group) for group in range(groups)])
        TROUBLES[trouble](tier, slots)
        room, arrivals = tier.room, tier.arrivals
        if at_once:
            tier.publish_and_unhold(slots)
        else:
            tier.publish(slots)
            tier.unhold(slots)
        tier.check()
        states = [tier.states(KeyRun(group, keys[1], 0, count)) for group in range(2)]
        holds = tier.holds_of(slots).tolist()
        more_room = tier.room > room
        ends.append((states, holds, more_room, tier.arrivals - arrivals, tier.counts(), tier.coming(700), tier.leased))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("verb", ["publish", "publish_and_unhold"])
def test_the_end_of_a_write_is_refused_for_slots_that_are_not_written_or_named_twice(verb: str) -> None:
    tier = HostTier(8)
    readable, written = store_each(tier, [b"x"]), reserve_each(tier, [b"y", b"z"])
    before = books(tier)
    for wrong in ([*written, written[0]], [*written, readable[0]], [*written, 7], [*written, -1]):
        with pytest.raises(InvariantError):
            getattr(tier, verb)(np.array(wrong))
        assert books(tier) == before
        tier.check(dict.fromkeys(written.tolist(), 1), {})
    tier.publish(written)
    tier.unhold(written)
    tier.check({}, {})
