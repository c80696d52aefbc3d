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


@pytest.mark.parametrize("steps", [2, 3, 7, EVERY, EVERY + 1, 16, 64])
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
    turns = waiting(Turns(16), "c", "a", "b")
    assert list(turns) == ["c", "a", "b"]
    assert until_due(turns) == (16, ["c", "a", "b"])
    assert list(turns) == []


def test_who_comes_later_has_a_later_turn() -> None:
    turns = waiting(Turns(16), "a")
    for _ in range(EVERY):
        assert turns.next_step() == []
    waiting(turns, "b")
    assert until_due(turns) == (16 - EVERY, ["a"])
    assert list(turns) == ["b"]
    assert until_due(turns) == (EVERY, ["b"])


def test_who_waits_and_comes_again_keeps_its_place() -> None:
    turns = waiting(Turns(16), "a", "b")
    for _ in range(15):
        assert turns.next_step() == []
        waiting(turns, "b", "a")
    assert served(turns) == ["a", "b"]


def test_who_has_had_its_turn_waits_anew() -> None:
    turns = waiting(Turns(16), "a")
    assert until_due(turns) == (16, ["a"])
    assert until_due(waiting(turns, "a")) == (16, ["a"])


def test_who_is_gone_has_no_turn_and_keeps_nobody_from_theirs() -> None:
    turns = waiting(Turns(8), "a", "b", "c")
    turns.take("b")
    turns.take("nobody")
    assert list(turns) == ["a", "c"]
    assert until_due(turns) == (8, ["a", "c"])


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
    turns = waiting(Turns(8), "a", "b")
    assert until_due(waiting(Turns(8), "a")) == (8, ["a"])
    for _ in range(7):
        assert turns.next_step() == []
    assert turns.next_step() == ["a", "b"]
    turns.take("a")
    assert until_due(turns) == (EVERY, ["b"])


def test_blocks_are_kept_by_group_until_they_are_taken() -> None:
    turns = Turns(8)
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
    turns = waiting(Turns(64), *req_ids)
    had: list[str] = []
    lots = 0
    while len(had) < count:
        left = count - len(had)
        step, due = until_due(turns)
        assert step == (EVERY if lots else 64)
        assert len(due) == min(left, max(LOT, left // PARTS))
        had += due
        lots += 1
    assert had == req_ids


def test_a_lot_that_is_not_full_takes_nobody_along_whose_time_has_not_come() -> None:
    turns = waiting(Turns(64), *names(LOT - 1))
    for _ in range(EVERY):
        turns.next_step()
    waiting(turns, "late")
    assert until_due(turns) == (64 - EVERY, names(LOT - 1))
    assert until_due(turns) == (EVERY, ["late"])


class NaiveTurns:
    """The same from nothing but a list of who came when, and what each one got."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.step = 0
        self.came: list[tuple[str, int]] = []
        self.got: list[tuple[str, int]] = []

    def note(self, req_id: str, block: int) -> None:
        if req_id not in [name for name, _ in self.came]:
            self.came.append((req_id, self.step))
        self.got.append((req_id, block))

    def take(self, req_id: str) -> BlockIds:
        blocks = [block for name, block in self.got if name == req_id]
        self.came = [(name, since) for name, since in self.came if name != req_id]
        self.got = [(name, block) for name, block in self.got if name != req_id]
        return (blocks,) if blocks else ()

    def next_step(self) -> list[str]:
        self.step += 1
        if self.step % min(8, self.steps) != 0:
            return []
        most = max(64, len(self.came) // 8) if self.steps > 1 else len(self.came)
        return [name for at, (name, since) in enumerate(self.came) if at < most and self.step - since >= self.steps]


acts = st.lists(
    st.one_of(
        st.tuples(st.just("note"), st.integers(0, 30)),
        st.tuples(st.just("note many"), st.integers(0, 1000)),
        st.tuples(st.just("take"), st.integers(0, 30)),
        st.tuples(st.just("take all that are due"), st.integers(1, 20)),
        st.tuples(st.just("step"), st.integers(1, 3)),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(steps=st.one_of(st.integers(1, 70), st.integers(1, 2)), acts=acts)
def test_turns_are_those_of_a_naive_twin(steps: int, acts: list[tuple[str, int]]) -> None:
    ours, twin = Turns(steps), NaiveTurns(steps)
    for block, (what, number) in enumerate(acts):
        if what in ("note", "note many"):
            for req_id in names(number + (150 if what == "note many" else 1))[number:]:
                ours.note(req_id, ([block],))
                twin.note(req_id, block)
        elif what == "take":
            assert ours.take(f"r{number}") == twin.take(f"r{number}")
        else:
            for _ in range(number):
                due = ours.next_step()
                assert due == twin.next_step()
                for req_id in due if what == "take all that are due" else ():
                    assert ours.take(req_id) == twin.take(req_id)
        assert list(ours) == [name for name, _ in twin.came]
