"""Stores of many requests at once: as if each had come by itself.

In: two managers, one asked in bulk, one request by request. Out: the same answers and the same books where there is
room for all; sound books where there is not, since in bulk nobody's offer evicts what a later one of the call extends.
Never: a real store, a device.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from orlop.core import FIRST_GENERATION, KeyRun, ReqContext, Reservation, StorePlan
from orlop.host.tier import HostTier
from orlop.testing.device import SlotMemory
from orlop.testing.doubles import ManualTier
from orlop.testing.rig import plain_namespace
from orlop.tiering.manager import TierEntry, TieringManager, TieringOptions

REQUESTS = 12
ROOM, SHORT = 1000, 40


class Side:
    """One manager, and what it has handed out."""

    def __init__(self, slots: int, store_after: int) -> None:
        self.tier = ManualTier(SlotMemory(), auto=True)
        options = TieringOptions((4096, 4096), store_after=store_after)
        self.manager = TieringManager(
            HostTier(slots), [TierEntry(self.tier)], plain_namespace, FIRST_GENERATION, options
        )
        self.open: list[Reservation] = []

    def take(self, plans: Sequence[StorePlan]) -> list[tuple[int, list[int]]]:
        """What the plans say, but for the numbers of slots."""
        self.open += [plan.reservation for plan in plans if plan.reservation is not None]
        return [(plan.settled, plan.reservation.chunks.tolist() if plan.reservation else []) for plan in plans]


def chains(rng: random.Random) -> list[list[bytes]]:
    """Keys of each request; some share a prefix, so that two fill the same chunk, or one fills what another extends."""
    made: list[list[bytes]] = []
    for number in range(REQUESTS):
        shared = made[rng.randrange(number)][: rng.randrange(1, 10)] if number and rng.random() < 0.5 else []
        made.append([*shared, *(rng.randbytes(16) for _ in range(30 - len(shared)))])
    return made


class Offers:
    """Seeded offers of the lives of a few requests, as the scheduler half makes them: a cursor for each group."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.contexts = [ReqContext(i + 1, f"r{i}") for i in range(REQUESTS)]
        self.keys = chains(self.rng)
        self.cursors = [[0, 0] for _ in self.contexts]

    def next(self) -> list[tuple[KeyRun, ReqContext]]:
        offers = []
        for i in sorted(self.rng.sample(range(REQUESTS), self.rng.randrange(1, REQUESTS))):
            group = int(self.rng.random() < 0.2)
            start = self.cursors[i][group]
            stop = min(30, start + (1 if self.rng.random() < 0.8 else self.rng.randrange(1, 4)))
            if start < stop:
                offers.append((KeyRun(group, self.keys[i], start, stop), self.contexts[i]))
        return offers

    def settle(self, offers: Sequence[tuple[KeyRun, ReqContext]], plans: Sequence[StorePlan]) -> None:
        for (run, context), plan in zip(offers, plans, strict=True):
            self.cursors[context.life - 1][run.group] = plan.settled

    def some_of(self, open_ones: Sequence[Reservation]) -> list[int]:
        return sorted(self.rng.sample(range(len(open_ones)), self.rng.randrange(len(open_ones) + 1)))


def begin(offers: Offers, side: Side) -> Side:
    for context in offers.contexts:
        side.manager.on_new_request(context)
    return side


def end_step(side: Side, ended: Sequence[int]) -> None:
    side.open = [reservation for number, reservation in enumerate(side.open) if number not in ended]
    side.manager.on_schedule_end(now=0.0)
    side.manager.check(side.open)


@pytest.mark.parametrize("store_after", [1, 2])
@pytest.mark.parametrize("seed", range(10))
def test_many_offers_at_once_are_answered_as_one_by_one(seed: int, store_after: int) -> None:
    offers = Offers(seed)
    bulk, single = (begin(offers, Side(ROOM, store_after)) for _ in range(2))
    for _ in range(60):
        asked = offers.next()
        together = bulk.manager.prepare_stores(asked, now=0.0)
        one_by_one = [single.manager.prepare_store(run, context, now=0.0) for run, context in asked]
        assert bulk.take(together) == single.take(one_by_one)
        assert [r.hashes for r in bulk.open] == [r.hashes for r in single.open]
        offers.settle(asked, together)
        ended = offers.some_of(bulk.open)
        bulk.manager.complete_stores([bulk.open[e] for e in ended], now=0.0)
        for e in ended:
            single.manager.complete_store(single.open[e], True, now=0.0)
        for side in (bulk, single):
            end_step(side, ended)
    for chain in offers.keys:
        for run in (KeyRun(0, chain, 0, 30), KeyRun(1, chain, 0, 30)):
            assert bulk.manager.host.states(run) == single.manager.host.states(run)
    assert bulk.manager.get_stats() == single.manager.get_stats()
    assert list(bulk.tier.stored) == list(single.tier.stored)


@pytest.mark.parametrize("seed", range(10))
def test_many_offers_at_once_where_there_is_no_room_for_all(seed: int) -> None:
    offers = Offers(seed)
    side = begin(offers, Side(SHORT, store_after=1))
    declined = 0
    for _ in range(120):
        asked = offers.next()
        plans = side.manager.prepare_stores(asked, now=0.0)
        side.take(plans)
        for (run, _), plan in zip(asked, plans, strict=True):
            if plan.reservation is not None:
                assert plan.reservation.hashes == tuple(run.hashes[c] for c in plan.reservation.chunks.tolist())
            declined += plan.settled < run.stop
        slots = [slot for reservation in side.open for slot in reservation.slots.tolist()]
        assert len(slots) == len(set(slots)), "a slot is written by two"
        offers.settle(asked, plans)
        ended = offers.some_of(side.open)
        side.manager.complete_stores([side.open[e] for e in ended], now=0.0)
        end_step(side, ended)
    assert declined
    assert side.manager.host.evictions


def test_who_waits_for_one_of_many_stores_hears_of_it() -> None:
    offers = Offers(0)
    side = begin(offers, Side(ROOM, store_after=1))
    writers, waiter = offers.contexts[:2], offers.contexts[2]
    runs = [KeyRun(0, [bytes([i]) * 16], 0, 1) for i in range(2)]
    side.take(side.manager.prepare_stores(list(zip(runs, writers, strict=True)), now=0.0))
    side.manager.want(runs[1], waiter, now=0.0)
    before = side.manager.answer_version(waiter)
    side.manager.complete_stores(side.open, now=0.0)
    assert side.manager.answer_version(waiter) != before
    assert side.manager.lookup_prefix(runs[1], waiter, now=0.0, since=0.0).ready == 1
