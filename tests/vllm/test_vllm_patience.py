"""How long an engine without requests steps on for transfers."""

from __future__ import annotations

from orlop.vllm.patience import Patience


def test_stepping_goes_on_while_transfers_are_pending_and_ends_at_the_limit() -> None:
    patience = Patience(3.0)
    assert [patience.is_worth_stepping(True, t) for t in (10.0, 11.0, 12.9, 13.0, 99.0)] == [True] * 3 + [False] * 2


def test_with_nothing_pending_nobody_steps_and_the_limit_begins_anew() -> None:
    patience = Patience(3.0)
    assert patience.is_worth_stepping(True, 0.0)
    assert not patience.is_worth_stepping(False, 2.0)
    assert patience.is_worth_stepping(True, 4.0)
    assert patience.is_worth_stepping(True, 6.5)


def test_a_request_that_comes_begins_it_anew() -> None:
    patience = Patience(3.0)
    patience.is_worth_stepping(True, 0.0)
    patience.someone_came()
    assert patience.is_worth_stepping(True, 5.0)


def test_a_shutdown_has_what_is_left() -> None:
    patience = Patience(3.0)
    assert patience.left_s(100.0) == 3.0
    patience.is_worth_stepping(True, 100.0)
    assert patience.left_s(101.0) == 2.0
    assert patience.left_s(200.0) == 0.0
