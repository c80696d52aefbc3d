"""Admission by number of offers, against a plain counter."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orlop.tiering.admission import StoreAfter


@given(n=st.integers(1, 4), batches=st.lists(st.lists(st.integers(0, 9))))
@pytest.mark.fault("B192")
def test_with_room_enough_a_key_is_admitted_from_its_nth_offer_on(n: int, batches: list[list[int]]) -> None:
    admission, offers = StoreAfter(n, capacity=10), Counter[int]()
    for batch in batches:
        expected = []
        for key in batch:
            offers[key] += 1
            expected.append(offers[key] >= n)
        assert admission.admit(batch) == expected


def test_admitting_everything_remembers_nothing() -> None:
    admission = StoreAfter(1)
    assert admission.admit(range(1000)) == [True] * 1000
    assert len(admission) == 0


@given(st.integers(2, 9), st.lists(st.integers(0, 50), max_size=200))
def test_memory_is_bounded_whatever_is_offered(capacity: int, keys: list[int]) -> None:
    admission = StoreAfter(2, capacity)
    for key in keys:
        admission.admit([key])
        assert len(admission) <= capacity


def test_the_half_that_was_offered_first_is_forgotten() -> None:
    admission = StoreAfter(2, capacity=4)
    admission.admit("abcd")
    admission.admit("e")
    assert admission.admit("cd") == [True, True]
    assert admission.admit("a") == [False]


def test_clear_forgets_all_offers() -> None:
    admission = StoreAfter(2)
    admission.admit("a")
    admission.clear()
    assert admission.admit("a") == [False]


@pytest.mark.parametrize(("n", "capacity"), [(0, 10), (2, 1)])
def test_numbers_that_make_no_sense_are_refused(n: int, capacity: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        StoreAfter(n, capacity)
