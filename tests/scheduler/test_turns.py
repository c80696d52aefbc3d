"""Whose turn it is: who waits how long, in which order, in lots of what size, and what each one is given until then.

In: requests that get blocks and are taken out, and steps. Out: passes only if each has its turn once, with all its
blocks, in the order of coming, and no sooner and no later than a twin without any shortcut says. Never: a scheduler.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orlop.scheduler.turns import EVERY, LOT, PARTS, BlockIds, Turns


def names(count: int, prefix: str = "r") -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


NONE: BlockIds = ([],)


def waiting(turns: Turns, *req_ids: str) -> Turns:
    for req_id in req_ids:
        turns.note(req_id, NONE)
    return turns


def served(turns: Turns) -> list[str]:
    """Those whose turn the next step is, taken out."""
    due = turns.next_step()
    for req_id in due:
        turns.take(req_id)
    return due


def until_due(turns: Turns, most: int = 1000) -> tuple[int, list[str]]:
    """Steps until somebody has a turn, and who."""
    for step in range(1, most + 1):
        due = served(turns)
        if due:
            return step, due
    raise AssertionError(f"nobody had a turn in {most} steps")


@pytest.mark.parametrize("count", [1, LOT, 5 * LOT])
def test_one_step_means_at_once_however_many_they_are(count: int) -> None:
    turns = Turns(1)
    for i in range(20):
        req_ids = names(count, f"step {i} ")
        waiting(turns, *req_ids)
        assert served(turns) == req_ids
    assert served(turns) == []


@pytest.mark.parametrize("steps", [2, 7, EVERY - 1, EVERY, EVERY + 1, 64, 128])
@pytest.mark.parametrize("before", range(2 * EVERY))
def test_nobody_has_a_turn_too_early_or_much_too_late(steps: int, before: int) -> None:
    turns = Turns(steps)
    for _ in range(before):
        assert turns.next_step() == []
    waited, due = until_due(waiting(turns, "a"))
    assert due == ["a"]
    assert steps <= waited < steps + min(steps, EVERY)
    assert list(turns) == []
    assert not any(turns.next_step() for _ in range(3 * steps))


def test_turns_are_taken_in_the_order_of_coming_and_once() -> None:
    turns = waiting(Turns(2 * EVERY), "c", "a", "b")
    assert list(turns) == ["c", "a", "b"]
    assert until_due(turns) == (2 * EVERY, ["c", "a", "b"])
    assert list(turns) == []


def test_who_comes_later_has_a_later_turn() -> None:
    turns = waiting(Turns(2 * EVERY), "a")
    for _ in range(EVERY):
        assert turns.next_step() == []
    waiting(turns, "b")
    assert until_due(turns) == (EVERY, ["a"])
    assert list(turns) == ["b"]
    assert until_due(turns) == (EVERY, ["b"])


def test_who_waits_and_comes_again_keeps_its_place() -> None:
    turns = waiting(Turns(2 * EVERY), "a", "b")
    for _ in range(2 * EVERY - 1):
        assert turns.next_step() == []
        waiting(turns, "b", "a")
    assert served(turns) == ["a", "b"]


def test_who_has_had_its_turn_waits_anew() -> None:
    turns = waiting(Turns(2 * EVERY), "a")
    assert until_due(turns) == (2 * EVERY, ["a"])
    assert until_due(waiting(turns, "a")) == (2 * EVERY, ["a"])


def test_who_is_gone_has_no_turn_and_keeps_nobody_from_theirs() -> None:
    turns = waiting(Turns(EVERY), "a", "b", "c")
    turns.take("b")
    turns.take("nobody")
    assert list(turns) == ["a", "c"]
    assert until_due(turns) == (EVERY, ["a", "c"])


def test_who_comes_back_after_it_was_gone_stands_at_the_end() -> None:
    turns = waiting(Turns(2 * EVERY), "a", "b")
    for _ in range(EVERY):
        turns.next_step()
    turns.take("a")
    waiting(turns, "a")
    assert list(turns) == ["b", "a"]
    assert until_due(turns) == (EVERY, ["b"])
    assert until_due(turns) == (EVERY, ["a"])


def test_who_is_not_taken_keeps_its_turn() -> None:
    turns = waiting(Turns(EVERY), "a", "b")
    assert until_due(waiting(Turns(EVERY), "a")) == (EVERY, ["a"])
    for _ in range(EVERY - 1):
        assert turns.next_step() == []
    assert turns.next_step() == ["a", "b"]
    turns.take("a")
    assert until_due(turns) == (EVERY, ["b"])


def test_blocks_are_kept_by_group_until_they_are_taken() -> None:
    turns = Turns(EVERY, groups=2)
    first: BlockIds = ([1, 2], [])
    turns.note("a", first)
    turns.note("b", ([7], [8]))
    turns.note("a", ([], [3]))
    turns.note("a", ([4], [5]))
    assert first == ([1, 2], []), "what the engine handed in is the engine's"
    assert turns.take("a") == ([1, 2, 4], [3, 5])
    assert turns.take("a") == ()
    assert turns.take("b") == ([7], [8])
    turns.note("a", ([9], []))
    assert turns.take("a") == ([9], [])
    assert list(turns) == []


@pytest.mark.parametrize("count", [LOT - 1, LOT, LOT + 1, 3 * LOT, PARTS * LOT, PARTS * LOT + 8, 20 * LOT])
def test_many_have_their_turns_in_lots(count: int) -> None:
    """Never more than a lot, or than a part of all that wait; one lot right after the other; nobody is left out."""
    req_ids = names(count)
    turns = waiting(Turns(8 * EVERY), *req_ids)
    had: list[str] = []
    lots = 0
    while len(had) < count:
        left = count - len(had)
        step, due = until_due(turns)
        assert step == (EVERY if lots else 8 * EVERY)
        assert len(due) == min(left, max(LOT, left // PARTS))
        had += due
        lots += 1
    assert had == req_ids


def test_a_lot_that_is_not_full_takes_nobody_along_whose_time_has_not_come() -> None:
    turns = waiting(Turns(8 * EVERY), *names(LOT - 1))
    for _ in range(EVERY):
        turns.next_step()
    waiting(turns, "late")
    assert until_due(turns) == (7 * EVERY, names(LOT - 1))
    assert until_due(turns) == (EVERY, ["late"])


def test_the_computed_count_is_that_of_the_last_note() -> None:
    turns = Turns(EVERY)
    assert turns.computed("a") == 0
    turns.note("a", ([1],), 16)
    turns.note("b", ([2],), 7)
    assert (turns.computed("a"), turns.computed("b")) == (16, 7)
    assert turns.add("a", ([3],), 20)
    turns.note("b", ([4],), 3)
    assert (turns.computed("a"), turns.computed("b")) == (20, 3), "the engine may take tokens back"
    turns.note("a", NONE)
    assert turns.computed("a") == 0, "who is noted without a count is not known to have computed anything"
    assert turns.take("a") == ([1, 3],)
    assert turns.computed("a") == 0
    assert turns.computed("b") == 3


def test_only_who_waits_is_given_more() -> None:
    turns = Turns(EVERY, groups=2)
    assert not turns.add("a", ([1], [2]), 5)
    assert list(turns) == []
    assert turns.take("a") == ()
    turns.note("a", ([1], [2]), 5)
    assert turns.add("a", ([], [3]), 6)
    assert turns.take("a") == ([1], [2, 3])
    assert not turns.add("a", ([4], []), 7)
    assert turns.computed("a") == 0


@pytest.mark.parametrize("groups", [1, 2, 3, 7])
def test_blocks_of_any_number_come_back_to_their_group_in_their_order(groups: int) -> None:
    turns = Turns(EVERY, groups)
    ids = [0, 1, groups - 1, groups, groups + 1, 2**31, 2**40, 1]
    for i in range(len(ids)):
        turns.note("a", tuple(ids[i:] + ids[:i] if group % 2 else ids[: i + group % 3] for group in range(groups)))
    expected: list[list[int]] = [[] for _ in range(groups)]
    for i in range(len(ids)):
        for group in range(groups):
            expected[group] += ids[i:] + ids[:i] if group % 2 else ids[: i + group % 3]
    assert turns.take("a") == tuple(expected)


class NaiveTurns:
    """The same from nothing but a list of who came when, and what each one got."""

    def __init__(self, steps: int, groups: int) -> None:
        self.steps = steps
        self.groups = groups
        self.step = 0
        self.came: list[tuple[str, int]] = []
        self.got: list[tuple[str, BlockIds, int]] = []

    def waits(self, req_id: str) -> bool:
        return req_id in [name for name, _ in self.came]

    def note(self, req_id: str, blocks: BlockIds, computed: int) -> None:
        if not self.waits(req_id):
            self.came.append((req_id, self.step))
        self.got.append((req_id, blocks, computed))

    def computed(self, req_id: str) -> int:
        return next((computed for name, _, computed in reversed(self.got) if name == req_id), 0)

    def take(self, req_id: str) -> BlockIds:
        theirs = [blocks for name, blocks, _ in self.got if name == req_id]
        self.came = [(name, since) for name, since in self.came if name != req_id]
        self.got = [entry for entry in self.got if entry[0] != req_id]
        return tuple([block for blocks in theirs for block in blocks[i]] for i in range(self.groups)) if theirs else ()

    def next_step(self) -> list[str]:
        self.step += 1
        if self.step % min(16, self.steps) != 0:
            return []
        most = max(64, len(self.came) // 8) if self.steps > 1 else len(self.came)
        return [name for at, (name, since) in enumerate(self.came) if at < most and self.step - since >= self.steps]


acts = st.lists(
    st.one_of(
        st.tuples(st.just("note"), st.integers(0, 30)),
        st.tuples(st.just("add"), st.integers(0, 40)),
        st.tuples(st.just("note many"), st.integers(0, 1000)),
        st.tuples(st.just("take"), st.integers(0, 30)),
        st.tuples(st.just("take all that are due"), st.integers(1, 20)),
        st.tuples(st.just("step"), st.integers(1, 3)),
    ),
    max_size=60,
)


def some_blocks(groups: int, act: int) -> BlockIds:
    """What a step hands out: now and then several blocks for a group, or none."""
    return tuple([1000 * act + i for i in range((act + group) % 3)] for group in range(groups))


@settings(deadline=None)
@given(steps=st.one_of(st.integers(1, 70), st.integers(1, 2)), groups=st.integers(1, 4), acts=acts)
def test_turns_are_those_of_a_naive_twin(steps: int, groups: int, acts: list[tuple[str, int]]) -> None:
    ours, twin = Turns(steps, groups), NaiveTurns(steps, groups)
    for act, (what, number) in enumerate(acts):
        blocks = some_blocks(groups, act)
        if what in ("note", "note many"):
            for req_id in names(number + (150 if what == "note many" else 1))[number:]:
                ours.note(req_id, blocks, act)
                twin.note(req_id, blocks, act)
        elif what == "add":
            waits = twin.waits(f"r{number}")
            assert ours.add(f"r{number}", blocks, act) == waits
            if waits:
                twin.note(f"r{number}", blocks, act)
        elif what == "take":
            assert ours.computed(f"r{number}") == twin.computed(f"r{number}")
            assert ours.take(f"r{number}") == twin.take(f"r{number}")
        else:
            for _ in range(number):
                due = ours.next_step()
                assert due == twin.next_step()
                for req_id in due if what == "take all that are due" else ():
                    assert ours.computed(req_id) == twin.computed(req_id)
                    assert ours.take(req_id) == twin.take(req_id)
        assert list(ours) == [name for name, _ in twin.came]
