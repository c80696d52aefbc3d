"""The breaker alone, its time cranked by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orlop.tiering.breaker import Breaker, BreakerOptions, BreakerState

OPTIONS = BreakerOptions(failures=3, open_s=1.0, max_open_s=4.0)


def ticket_of(breaker: Breaker, now: float) -> int:
    ticket = breaker.admit(now)
    assert ticket is not None
    return ticket


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(OPTIONS)
    breaker.trip(now, "test")
    return breaker


def test_it_opens_after_failures_in_a_row() -> None:
    breaker = Breaker(OPTIONS)
    for _ in range(3):
        assert breaker.state is BreakerState.CLOSED
        breaker.failed(ticket_of(breaker, 0.0), 0.0, "no")
    assert breaker.state is BreakerState.OPEN
    assert breaker.admit(0.9) is None


def test_a_success_in_between_starts_the_count_again() -> None:
    breaker = Breaker(OPTIONS)
    for ok in (False, False, True, False, False):
        ticket = ticket_of(breaker, 0.0)
        if ok:
            breaker.succeeded(ticket, 0.0)
        else:
            breaker.failed(ticket, 0.0, "no")
    assert breaker.state is BreakerState.CLOSED


def test_lookups_that_succeed_do_not_hide_transfers_that_fail() -> None:
    breaker = Breaker(OPTIONS)
    for _ in range(3):
        breaker.succeeded(ticket_of(breaker, 0.0), 0.0, transfer=False)
        breaker.failed(ticket_of(breaker, 0.0), 0.0, "reads fail, names are known")
    assert breaker.state is BreakerState.OPEN


def test_one_probe_goes_through_when_the_period_is_over() -> None:
    breaker = opened()
    assert breaker.admit(0.99) is None
    probe = ticket_of(breaker, 1.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.admit(1.0) is None
    breaker.succeeded(probe, 1.1)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.admit(1.1) is not None


def test_a_failed_probe_doubles_the_period_up_to_its_bound() -> None:
    breaker = opened()
    now = 0.0
    for period_s in (1.0, 2.0, 4.0, 4.0):
        assert breaker.admit(now + period_s - 0.01) is None
        now += period_s
        breaker.failed(ticket_of(breaker, now), now, "still no")
    assert breaker.opened == 1


def test_the_period_is_short_again_after_a_transfer_has_succeeded() -> None:
    breaker = opened()
    breaker.failed(ticket_of(breaker, 1.0), 1.0, "still no")
    breaker.succeeded(ticket_of(breaker, 3.0), 3.0)
    breaker.trip(10.0, "again")
    assert breaker.admit(11.0) is not None


def test_a_probe_by_lookup_closes_on_probation() -> None:
    breaker = opened()
    breaker.succeeded(ticket_of(breaker, 1.0), 1.0, transfer=False)
    assert breaker.state is BreakerState.CLOSED
    breaker.failed(ticket_of(breaker, 1.0), 1.0, "but reads fail")
    assert breaker.state is BreakerState.OPEN
    assert breaker.admit(2.9) is None  # and for twice as long
    assert breaker.admit(3.0) is not None


def test_a_probe_that_is_never_answered_counts_as_failed() -> None:
    breaker = opened()
    probe = ticket_of(breaker, 1.0)
    assert breaker.admit(1.9) is None
    assert breaker.admit(2.0) is None
    assert breaker.state is BreakerState.OPEN
    breaker.succeeded(probe, 2.5)  # late: nobody waits for it
    assert breaker.state is BreakerState.OPEN
    assert breaker.admit(3.9) is None
    assert breaker.admit(4.0) is not None


def test_news_from_before_a_change_decides_nothing() -> None:
    breaker = Breaker(OPTIONS)
    old = ticket_of(breaker, 0.0)
    breaker.trip(0.0, "test")
    probe = ticket_of(breaker, 1.0)
    breaker.failed(old, 1.0, "from the backlog")
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.succeeded(probe, 1.0)
    for _ in range(5):
        breaker.failed(old, 1.0, "from the backlog")
    assert breaker.state is BreakerState.CLOSED


def test_a_probe_that_was_not_tried_leaves_its_place_to_the_next() -> None:
    breaker = opened()
    breaker.withdraw(ticket_of(breaker, 1.0), 1.0)
    assert breaker.admit(1.0) is not None


def test_its_owner_hears_each_change_once() -> None:
    heard: list[tuple[BreakerState, str]] = []
    breaker = Breaker(OPTIONS, lambda state, reason: heard.append((state, reason)))
    breaker.trip(0.0, "first")
    breaker.trip(0.5, "second")
    breaker.succeeded(ticket_of(breaker, 1.0), 1.0)
    assert [state for state, _ in heard] == [BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED]
    assert heard[0][1] == "first"


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ValueError, match="failures=0"):
        BreakerOptions(failures=0)
    with pytest.raises(ValueError, match="open_s=0"):
        BreakerOptions(open_s=0.0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["ok", "lookup", "fail", "wait", "silent", "trip", "withdraw"]), st.floats(0, 8))
    )
)
def test_it_always_comes_back(events: list[tuple[str, float]]) -> None:
    """Whatever happened: after the longest period one probe is let through, and its success closes it."""
    breaker = Breaker(OPTIONS)
    now = 0.0
    for event, pause_s in events:
        now += pause_s
        ticket = breaker.admit(now)
        if event == "trip":
            breaker.trip(now, "x")
        elif ticket is not None and event == "fail":
            breaker.failed(ticket, now, "x")
        elif ticket is not None and event == "withdraw":
            breaker.withdraw(ticket, now)
        elif ticket is not None and event in ("ok", "lookup"):
            breaker.succeeded(ticket, now, transfer=event == "ok")
            assert breaker.state is BreakerState.CLOSED
    ticket = breaker.admit(now + OPTIONS.max_open_s)
    if ticket is None:  # it was a silent probe that has just been given up
        ticket = breaker.admit(now + 2 * OPTIONS.max_open_s)
    assert ticket is not None
    breaker.succeeded(ticket, now)
    assert breaker.state is BreakerState.CLOSED
