"""Stores of several requests in one reservation: as if what each one has filled had come by itself.

In: two managers, one offered short runs of several lives together, one life by life; and tiers that are cranked by
hand. Out: the same chunks readable and below, under the same salts, for the same lives, in fewer jobs; refusals that
leave nothing behind; sound books where something must leave for them. Never: a real store, a device.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from orlop.core import (
    FIRST_GENERATION,
    JointOffer,
    KeyRun,
    Lookup,
    Outcome,
    ReqContext,
    Reservation,
    StorePlan,
    TierJob,
    TransferKind,
    pack_key,
)
from orlop.host.tier import HostTier, SlotState
from orlop.testing.device import Page, SlotMemory
from orlop.testing.doubles import ManualTier
from orlop.testing.rig import plain_namespace
from orlop.tiering.manager import TierEntry, TieringManager, TieringOptions

REQUESTS, CHAIN = 12, 60
LONGEST = 8
ROOM, SHORT = 2000, 60
SALTS = (bytes(16), b"one salt.......!", b"another salt...!")
PAYLOAD = (4096, 8192)
CASCADE: dict[str, Any] = {}
ON_EVICTION: dict[str, Any] = {"store": False, "evicted_bytes": 1 << 20}
SECOND_OFFER: dict[str, Any] = {"store_after": 2}


class Filled(NamedTuple):
    """The chunks of ``run``, one or a few, that a life has filled."""

    run: KeyRun
    context: ReqContext

    @property
    def key(self) -> bytes:
        return self.run.hashes[self.run.start]

    @property
    def extends(self) -> bytes:
        """What its first chunk extends."""
        return self.run.hashes[self.run.start - 1] if self.run.start else b""


class Single(NamedTuple):
    """One chunk of what a life has filled."""

    key: bytes
    extends: bytes
    chunk: int
    context: ReqContext


def chunks_of(filled: Sequence[Filled]) -> list[Single]:
    """All chunks, one after the other, those of one life together."""
    singles: list[Single] = []
    for run, context in filled:
        before = [b"", *run.hashes]
        singles += [Single(run.hashes[at], before[at], at, context) for at in range(run.start, run.stop)]
    return singles


def joint(filled: Sequence[Filled]) -> JointOffer:
    hashes, extends, chunks, contexts = (list(column) for column in zip(*chunks_of(filled), strict=True))
    return JointOffer(filled[0].run.group, hashes, extends, chunks, contexts)


class Side:
    """One manager over tiers that end their jobs by themselves, and what it has handed out."""

    def __init__(self, slots: int, *entries: dict[str, Any], lives: Sequence[ReqContext] = (), **options: Any) -> None:
        self.now = 0.0
        self.memory = SlotMemory()
        self.tiers = [ManualTier(self.memory, name=f"{i}:manual", auto=True) for i in range(len(entries))]
        self.host = HostTier(slots)
        self.manager = TieringManager(
            self.host,
            [TierEntry(tier, **entry) for tier, entry in zip(self.tiers, entries, strict=True)],
            plain_namespace,
            FIRST_GENERATION,
            TieringOptions(PAYLOAD, events=True, **options),
        )
        self.open: list[Reservation] = []
        """Not completed, or completed and not let go."""
        self.lives = list(lives)
        for context in lives:
            self.manager.on_new_request(context)

    def together(self, filled: Sequence[Filled]) -> Reservation | None:
        """The offer of all; what is refused has changed nothing."""
        before = self.books()
        reservation = self.manager.prepare_joint_store(joint(filled), now=self.now)
        if reservation is None:
            assert self.books() == before
            self.manager.check(self.open)
            return None
        assert reservation.kind is TransferKind.STORE
        assert reservation.group == filled[0].run.group
        there = zip(reservation.hashes, reservation.chunks.tolist(), reservation.contexts, strict=True)
        assert list(there) == [(c.key, c.chunk, c.context) for c in chunks_of(filled)]
        self._begin(reservation)
        return reservation

    def accepted(self, filled: Sequence[Filled]) -> Reservation:
        reservation = self.together(filled)
        assert reservation is not None
        return reservation

    def one_by_one(self, filled: Sequence[Filled]) -> list[StorePlan]:
        plans = [self.manager.prepare_store(run, context, now=self.now) for run, context in filled]
        for plan in plans:
            if plan.reservation is not None:
                self._begin(plan.reservation)
        return plans

    def store(self, *filled: Filled) -> None:
        """Life by life and to the end, the first one the oldest."""
        for one in filled:
            (plan,) = self.one_by_one([one])
            assert plan.reservation is not None
            self.complete(plan.reservation)

    def _begin(self, reservation: Reservation) -> None:
        """The device writes the slots from now on, which nobody else uses meanwhile."""
        self.memory.claim(reservation.number, reservation.slots.tolist(), write=True)
        self.open.append(reservation)

    def complete(self, reservation: Reservation, success: bool = True, *, released: bool = True) -> None:
        if success:
            for key, slot in zip(reservation.hashes, reservation.slots.tolist(), strict=True):
                self.memory.put(slot, 0, 0, Page(reservation.group, [key]))
        if released:
            self._end(reservation)
        self.manager.complete_store(reservation, success, now=self.now, released=released)

    def release(self, reservation: Reservation) -> None:
        self._end(reservation)
        self.manager.release(reservation)

    def _end(self, reservation: Reservation) -> None:
        self.memory.let_go(reservation.number)
        self.open.remove(reservation)

    def end_step(self) -> None:
        self.manager.on_schedule_end(now=self.now)
        self.manager.check(self.open)
        self.now += 1.0

    def settle(self) -> None:
        """Step until the tiers have read what they were given."""
        for _ in range(100):
            self.end_step()
            if not self.manager.has_pending_work():
                return
        raise AssertionError("the tiers have work after a hundred steps")

    def books(self) -> object:
        host = self.host
        versions = [self.manager.answer_version(context) for context in self.lives]
        return self.manager.get_stats(), host.coming(host.slots), host.room, host.arrivals, host.free, versions

    def submitted(self, tier: int = 0) -> list[TierJob]:
        """All store jobs that a tier was ever given."""
        calls = self.tiers[tier].calls  # one for each life of a job
        return list({call.what.job_id: call.what for call in calls if call.name == "submit_store"}.values())

    def given(self, tier: int = 0) -> list[tuple[bytes, bytes, int | None]]:
        """Each chunk that a tier was given, with the salt and the life it was given for, ordered by key."""
        chunks: list[tuple[bytes, bytes, int | None]] = []
        for job in self.submitted(tier):
            contexts = job.contexts * len(job.keys) if len(job.contexts) == 1 else job.contexts
            lives = [context.life for context in contexts] or [None] * len(job.keys)
            chunks += [(key, job.salt, life) for key, life in zip(job.keys, lives, strict=True)]
        return sorted(chunks, key=lambda chunk: chunk[:2])

    def events(self) -> list[tuple[bool, int, bytes]]:
        """What came and what left, since the last call."""
        told = self.manager.take_events()
        return sorted((event.stored, event.group, key) for event in told for key in event.hashes)

    def check_stored(self) -> None:
        """Under each key in a tier lies what was written for that key."""
        for tier in self.tiers:
            for (_, key), chunk in tier.stored.items():
                (page,) = chunk.values()
                assert pack_key(page.cells[0], page.group) == key


def chains(rng: random.Random) -> list[list[bytes]]:
    """Keys of each request; some share a prefix, so that two fill the same chunk, or one fills what another extends."""
    made: list[list[bytes]] = []
    for number in range(REQUESTS):
        shared = made[rng.randrange(number)][: rng.randrange(1, 10)] if number and rng.random() < 0.5 else []
        made.append([*shared, *(rng.randbytes(16) for _ in range(CHAIN - len(shared)))])
    return made


class Offers:
    """Seeded offers of short runs of a few lives, with a cursor for each group."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.contexts = [ReqContext(i + 1, f"r{i}", SALTS[i % len(SALTS)]) for i in range(REQUESTS)]
        self.keys = chains(self.rng)
        self.cursors = [[0, 0] for _ in self.contexts]

    def next(self) -> list[Filled]:
        group = int(self.rng.random() < 0.2)
        some = sorted(self.rng.sample(range(REQUESTS), self.rng.randrange(1, 6)))
        return [self.filled(i, group) for i in some if self.cursors[i][group] < CHAIN]

    def filled(self, request: int, group: int) -> Filled:
        at = self.cursors[request][group]
        count = self.rng.choice([1, 1, 2, 3, self.rng.randrange(1, LONGEST + 1)])
        return Filled(KeyRun(group, self.keys[request], at, min(at + count, CHAIN)), self.contexts[request])

    def settle(self, filled: Sequence[Filled], settled: Sequence[int]) -> None:
        for (run, context), stop in zip(filled, settled, strict=True):
            self.cursors[context.life - 1][run.group] = stop

    def go_back(self) -> None:
        """A request whose blocks were taken away computes them anew."""
        cursors = self.rng.choice(self.cursors)
        cursors[:] = [self.rng.randrange(cursor + 1) for cursor in cursors]

    def runs(self) -> list[KeyRun]:
        return [KeyRun(group, keys, 0, CHAIN) for keys in self.keys for group in (0, 1)]

    def some_of(self, things: Sequence[Any]) -> list[Any]:
        return self.rng.sample(things, self.rng.randrange(len(things) + 1))


def answers(plans: Sequence[StorePlan]) -> list[tuple[int, int]]:
    """Up to where each offer is settled, and how many chunks were reserved for it."""
    return [(plan.settled, len(plan.reservation.hashes) if plan.reservation else 0) for plan in plans]


def reserved(plans: Sequence[StorePlan]) -> list[Reservation]:
    return [plan.reservation for plan in plans if plan.reservation is not None]


class Pair(NamedTuple):
    """What the same chunks are reserved by on each side."""

    ours: list[Reservation]
    theirs: list[Reservation]


class Twins:
    """The same chunks, offered together to one manager and one by one to the other."""

    def __init__(self, offers: Offers, *entries: dict[str, Any]) -> None:
        self.offers = offers
        self.ours, self.theirs = (Side(ROOM, *entries, lives=offers.contexts) for _ in range(2))
        self.sides = (self.ours, self.theirs)
        self.open: list[Pair] = []
        self.held: list[Pair] = []
        """Failed, and somebody may still write their slots."""
        self.joined = self.refused = self.runs = 0

    def offer(self) -> None:
        filled = self.offers.next()
        if not filled:
            return
        reservation = self.ours.together(filled)
        plans = self.theirs.one_by_one(filled)
        if reservation is not None:
            self.joined += len(filled) > 1
            self.runs += len(filled) > 1 and any(run.stop - run.start > 1 for run, _ in filled)
            assert answers(plans) == [(run.stop, run.stop - run.start) for run, _ in filled]
            self.open.append(Pair([reservation], reserved(plans)))
        else:
            self.refused += 1
            alone = self.ours.one_by_one(filled)
            assert answers(alone) == answers(plans)
            self.open += [Pair([a], [b]) for a, b in zip(reserved(alone), reserved(plans), strict=True)]
        self.offers.settle(filled, [plan.settled for plan in plans])

    def complete_some(self) -> None:
        for pair in self.offers.some_of(self.open):
            self.open.remove(pair)
            success, released = self.offers.rng.random() < 0.8, self.offers.rng.random() < 0.5
            self._each(pair, lambda side, r, ok=success, gone=success or released: side.complete(r, ok, released=gone))
            if not (success or released):
                self.held.append(pair)

    def release_some(self) -> None:
        for pair in self.offers.some_of(self.held):
            self.held.remove(pair)
            self._each(pair, Side.release)

    def _each(self, pair: Pair, do: Callable[[Side, Reservation], None]) -> None:
        for side, reservations in zip(self.sides, pair, strict=True):
            for reservation in reservations:
                do(side, reservation)

    def discard(self) -> None:
        """Some chunk of no use to anybody leaves, perhaps out of the middle of a chain."""
        run = self.offers.rng.choice(self.offers.runs())
        key = self.offers.rng.choice(list(run.keys()))
        if self.ours.host.slot_state(run.group, key) is SlotState.READY:
            for side in self.sides:
                side.host.discard(run.group, [key])

    def reset(self) -> None:
        generation = self.offers.rng.randbytes(16)
        for side in self.sides:
            side.manager.reset_cache(generation, now=side.now)
        self.offers.cursors = [[0, 0] for _ in self.offers.contexts]

    def end_step(self) -> None:
        for side in self.sides:
            side.end_step()
        for run in self.offers.runs():
            assert self.ours.host.states(run) == self.theirs.host.states(run)
        assert self.ours.events() == self.theirs.events()


class Offered(NamedTuple):
    """Chunks that were offered, and in how many offers."""

    chunks: float
    offers: float


def take_offers(stats: dict[str, float]) -> Offered:
    """What the histogram of offers says, which is taken out of ``stats``."""
    ours = {name: stats.pop(name) for name in list(stats) if name.startswith("allocation_chunks.")}
    chunks, offers = (sum(v for name, v in ours.items() if name.split(".")[1][0] == kind) for kind in "sn")
    return Offered(chunks, offers)


def refuses(key: bytes) -> Outcome:
    """A tier that takes most chunks and always the same ones."""
    return Outcome.NO_SPACE if key[0] % 8 == 0 else Outcome.OK


@pytest.mark.parametrize("entries", [(), (CASCADE,), (CASCADE, SECOND_OFFER)], ids=["none", "one", "two"])
@pytest.mark.parametrize("seed", range(8))
def test_chunks_that_are_offered_together_end_up_as_one_by_one(seed: int, entries: tuple[dict[str, Any], ...]) -> None:
    offers = Offers(seed)
    twins = Twins(offers, *entries)
    for side in twins.sides:
        for tier in side.tiers:
            tier.store_outcome = refuses
    for step in range(120):
        twins.offer()
        twins.complete_some()
        twins.release_some()
        twins.end_step()
        if offers.rng.random() < 0.2:
            twins.discard()
        if offers.rng.random() < 0.2:
            offers.go_back()
        if step == 80:
            twins.reset()
    assert twins.joined > 10
    assert twins.runs > 5
    assert twins.refused > 10
    stats = [dict(side.manager.get_stats()) for side in twins.sides]
    offered = [take_offers(of_side) for of_side in stats]
    assert offered[0].chunks == offered[1].chunks
    assert offered[0].offers < offered[1].offers
    jobs_failed = {f"cascade_jobs_failed {tier.name}" for tier in twins.ours.tiers}
    assert stats[0].keys() == stats[1].keys()
    assert {name for name in stats[0] if stats[0][name] != stats[1][name]} <= jobs_failed
    for number, (ours, theirs) in enumerate(zip(twins.ours.tiers, twins.theirs.tiers, strict=True)):
        assert ours.stored.keys() == theirs.stored.keys()
        assert ours.stored
        assert twins.ours.given(number) == twins.theirs.given(number)
    if entries:
        assert len(twins.ours.submitted()) < len(twins.theirs.submitted())
    for side in twins.sides:
        side.check_stored()


@pytest.mark.parametrize("seed", range(8))
def test_where_something_must_leave_for_them_nobody_loses_what_is_in_use(seed: int) -> None:
    offers = Offers(seed)
    side = Side(SHORT, CASCADE, lives=offers.contexts)
    rng = offers.rng
    joined = declined = 0
    for _ in range(150):
        filled = offers.next()
        offered = {chunk.key for chunk in chunks_of(filled)}
        extended = [f.run.part(f.run.start - 1, f.run.start) for f in filled if {f.extends}.isdisjoint({b"", *offered})]
        before = [side.host.states(run) for run in extended]
        reservation = side.together(filled) if filled else None
        assert [side.host.states(run) for run in extended] == before
        if reservation is not None:
            joined += len(filled) > 1
            offers.settle(filled, [run.stop for run, _ in filled])
        else:
            plans = side.one_by_one(filled)
            declined += sum(plan.settled < run.stop for plan, (run, _) in zip(plans, filled, strict=True))
            offers.settle(filled, [plan.settled for plan in plans])
        slots = [slot for opened in side.open for slot in opened.slots.tolist()]
        assert len(slots) == len(set(slots)), "a slot is written by two"
        for opened in offers.some_of(side.open) if rng.random() < 0.7 else ():
            side.complete(opened, rng.random() < 0.9)
        side.end_step()
        if rng.random() < 0.2:
            offers.go_back()
    side.check_stored()
    assert joined > 10
    assert declined
    assert side.host.evictions


# --- the same on small cases ----------------------------------------------------------------------------------

LIVES = [ReqContext(i + 1, f"r{i}", salt) for i, salt in enumerate((*SALTS, *SALTS))]


def filled(name: str, chunk: int = 0, life: int = 0, group: int = 0, count: int = 1) -> Filled:
    """So many chunks from ``chunk`` on of the chain ``name``, filled by the life of this number."""
    keys = [f"{name}{i}".encode() for i in range(chunk + count)]
    return Filled(KeyRun(group, keys, chunk, chunk + count), LIVES[life])


def forked(name: str, after: str, shared: int, life: int, count: int) -> Filled:
    """A run from the start of the chain ``name``, whose first ``shared`` chunks are those of the chain ``after``."""
    run, context = filled(name, life=life, count=count)
    return Filled(KeyRun(0, [*filled(after, count=shared).run.hashes, *run.hashes[shared:]], 0, count), context)


def state(side: Side, one: Filled) -> SlotState | None:
    return side.host.slot_state(one.run.group, one.key)


def states(side: Side, some: Sequence[Filled]) -> list[SlotState | None]:
    """Of each chunk of each."""
    return [side.host.slot_state(one.run.group, chunk.key) for one in some for chunk in chunks_of([one])]


FREE, RESERVED, READY, RETIRED = SlotState
A, B, C = filled("a", life=0), filled("b", life=1), filled("c", life=2)
A1, B1, C1 = filled("a", 1, life=0), filled("b", 1, life=1), filled("c", 1, life=2)
BBB = filled("b", life=1, count=3)
OFFERS = {"chunks": [A, B, C], "runs": [filled("a", life=0, count=2), B, filled("c", life=2, count=3)]}
each_offer = pytest.mark.parametrize("offer", OFFERS.values(), ids=list(OFFERS))


def nothing(side: Side) -> None:
    pass


def there(side: Side) -> None:
    side.store(B)


def middle_is_there(side: Side) -> None:
    side.store(B1)


def end_is_there(side: Side) -> None:
    side.store(filled("b", 2, life=1))


def being_written(side: Side) -> None:
    side.one_by_one([B])


def start_is_being_written(side: Side) -> None:
    side.one_by_one([filled("b", life=1, count=2)])


def written_with_others(side: Side) -> None:
    if side.together([filled("x", life=3), B]) is None:
        raise AssertionError("expected room for two")


def no_slot(side: Side) -> None:
    """Two slots are left, and what has the others is being written."""
    side.one_by_one([filled(f"x{i}") for i in range(6)])


def only_what_they_extend(side: Side) -> None:
    """Two slots hold chunks that the offer extends, the others are being written."""
    side.store(A, B)
    side.one_by_one([filled(f"x{i}") for i in range(6)])


REFUSED: dict[str, tuple[Callable[[Side], None], list[Filled]]] = {
    "a key twice": (nothing, [A, B, filled("b", life=3)]),
    "a key that is there": (there, [A, B, C]),
    "a key that is being written": (being_written, [A, B, C]),
    "a key that is being written with others": (written_with_others, [A, B, C]),
    "one that extends another": (nothing, [A, B1, filled("b", life=3)]),
    "one that another extends, further back": (nothing, [filled("b", life=3), A, B1]),
    "the end of a run that another extends, further back": (nothing, [BBB, A, filled("b", 3, life=4)]),
    "the middle of a run that another extends": (nothing, [BBB, filled("b", 2, life=4), A]),
    "one that goes before the run that extends it": (nothing, [filled("b", 1, life=1, count=2), filled("b", life=3)]),
    "a run whose first chunk is there": (there, [A, BBB, C]),
    "a run whose middle is there": (middle_is_there, [A, BBB, C]),
    "a run whose last chunk is there": (end_is_there, [BBB, A, C]),
    "a run whose start is being written": (start_is_being_written, [A, BBB, C]),
    "the same run twice": (nothing, [BBB, A, filled("b", life=3, count=3)]),
    "runs that begin alike": (nothing, [BBB, forked("x", "b", 2, life=4, count=4), A]),
    "a run and its first chunk": (nothing, [A, BBB, filled("b", life=3)]),
    "a run and its middle": (nothing, [B1, BBB]),
    "a run and its last chunk": (nothing, [filled("b", 2, life=3), A, BBB]),
    "no room for the end of a run": (no_slot, [A, BBB]),
    "no room": (no_slot, [A, B, C]),
    "no room but what they extend": (only_what_they_extend, [A1, B1]),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused_changes_nothing_and_one_by_one_goes_on(why: str) -> None:
    begin, offer = REFUSED[why]
    ours, theirs = (Side(8, CASCADE, lives=LIVES) for _ in range(2))
    for side in (ours, theirs):
        begin(side)
    assert ours.together(offer) is None
    assert states(ours, offer) == states(theirs, offer)
    plans = ours.one_by_one(offer), theirs.one_by_one(offer)
    assert answers(plans[0]) == answers(plans[1])
    for side in (ours, theirs):
        for reservation in list(side.open):
            side.complete(reservation)
        side.end_step()
    assert states(ours, offer) == states(theirs, offer)
    assert ours.manager.get_stats() == theirs.manager.get_stats()
    assert ours.given() == theirs.given()


def test_what_is_wanted_at_its_second_offer_only_is_not_offered_together() -> None:
    side, offer = Side(8, CASCADE, lives=LIVES, store_after=2), [A, B, C]
    for _ in range(3):
        assert side.together(offer) is None
    assert answers(side.one_by_one(offer)) == [(1, 0)] * 3
    assert side.manager.get_stats()["stores_skipped"] == 3
    assert answers(side.one_by_one(offer)) == [(1, 1)] * 3


def test_a_chunk_that_is_there_in_another_group_is_another_chunk() -> None:
    side = Side(8, CASCADE, lives=LIVES)
    side.store(A, B)
    reservation = side.accepted([filled("a", life=0, group=1), filled("b", life=1, group=1)])
    side.complete(reservation)
    side.end_step()
    assert side.host.states(KeyRun(1, [A.key, B.key], 0, 2)) == bytes([READY] * 2)
    assert [job.payload_bytes for job in side.submitted()] == [PAYLOAD[0], PAYLOAD[0], PAYLOAD[1], PAYLOAD[1]]
    side.check_stored()


def test_each_salt_travels_in_a_job_of_its_own_with_the_lives_it_belongs_to() -> None:
    side = Side(16, CASCADE, lives=LIVES)
    side.complete(side.accepted([filled(f"x{i}", life=i) for i in range(6)]))
    side.end_step()
    jobs = {tuple(context.life for context in job.contexts): job for job in side.submitted()}
    assert {lives: job.keys for lives, job in jobs.items()} == {
        lives: tuple(pack_key(b"x%d0" % (life - 1), 0) for life in lives) for lives in ((1, 4), (2, 5), (3, 6))
    }
    alone = Side(16, CASCADE, lives=LIVES)
    alone.store(*(filled(f"x{i}", life=i) for i in range(3)))
    assert [jobs[lives].salt for lives in ((1, 4), (2, 5), (3, 6))] == [job.salt for job in alone.submitted()]
    assert len({job.salt for job in jobs.values()}) == 3
    side.check_stored()
    assert len(side.tiers[0].stored) == 6


def test_lives_of_one_salt_share_a_job_and_each_is_named_beside_its_chunk() -> None:
    side = Side(16, CASCADE, SECOND_OFFER, lives=LIVES)
    some = [filled("a", life=1), filled("b", life=4), filled("c", life=1)]
    side.store(some[1])  # the second tier has been offered it once
    side.end_step()
    side.host.clear()
    side.complete(side.accepted([some[0], some[1]]))
    side.end_step()
    job = side.submitted(0)[-1]
    assert (job.keys, job.contexts) == ((pack_key(b"a0", 0), pack_key(b"b0", 0)), (LIVES[1], LIVES[4]))
    (job,) = side.submitted(1)
    assert (job.keys, job.contexts) == ((pack_key(b"b0", 0),), (LIVES[4],))
    side.check_stored()


@pytest.mark.parametrize("seed", range(4))
def test_a_tier_that_is_written_on_eviction_gets_them_under_their_salts(seed: int) -> None:
    """Beside a tier that gets everything at once, which says under what salt."""
    rng = random.Random(seed)
    contexts = [ReqContext(i + 1, f"r{i}", SALTS[i % 3]) for i in range(8)]
    side = Side(2 * SHORT, ON_EVICTION, CASCADE, lives=contexts)
    published = 0
    for step in range(60):
        chunk = step % 3
        if not chunk:
            chains, group = [[rng.randbytes(16) for _ in range(9)] for _ in contexts], rng.randrange(2)
            cursors = [0] * 8
        stops = [cursor + rng.choice([1, 1, 2, 3]) for cursor in cursors]
        offer = [Filled(KeyRun(group, chains[i], cursors[i], stops[i]), contexts[i]) for i in range(8)]
        cursors = stops
        reservation = side.accepted(offer)
        success = rng.random() < 0.8
        side.complete(reservation, success)
        published += len(reservation.slots) * success
        side.end_step()
    for _ in range(100):
        if not side.manager.flush(now=side.now):
            break
    lost = side.manager.get_stats()["evictions_unwritten 0:manual"]
    late, at_once = side.given(0), side.given(1)
    assert len(at_once) == published
    assert len(late) == len(side.tiers[0].stored) == published - lost
    assert published / 2 < len(late)
    assert {life for _, _, life in late} == {None}
    salts = {key: salt for key, salt, _ in at_once}
    assert {key: salt for key, salt, _ in late}.items() <= salts.items()
    assert len(set(salts.values())) == 3
    side.check_stored()


@each_offer
@pytest.mark.parametrize("entries", [(), (CASCADE,)], ids=["none", "one"])
def test_a_failed_store_of_several_makes_none_of_them_readable(
    entries: tuple[dict[str, Any], ...], offer: list[Filled]
) -> None:
    side, n = Side(8, *entries, lives=LIVES), len(chunks_of(offer))
    reservation = side.accepted(offer)
    assert states(side, offer) == [RESERVED] * n
    side.complete(reservation, success=False)
    side.end_step()
    assert states(side, offer) == [None] * n
    assert side.host.counts()[FREE] == 8
    assert side.manager.get_stats()["stores_failed"] == n
    assert not any(side.submitted(i) for i in range(len(entries)))
    side.complete(side.accepted(offer))
    assert states(side, offer) == [READY] * n


@each_offer
def test_slots_that_are_not_let_go_are_nobodys_until_they_are(offer: list[Filled]) -> None:
    n = len(chunks_of(offer))
    side = Side(n + 1, CASCADE, lives=LIVES)
    reservation = side.accepted(offer)
    side.complete(reservation, success=False, released=False)
    side.end_step()
    assert side.host.counts()[RETIRED] == n
    assert states(side, offer) == [None] * n
    assert side.together([A, B]) is None
    side.complete(side.accepted([A]))
    side.end_step()
    side.release(reservation)
    side.end_step()
    assert side.host.counts()[RETIRED] == 0
    assert side.host.counts()[FREE] == n
    rest = [Filled(run.part(run.start + (context is A.context), run.stop), context) for run, context in offer]
    side.complete(side.accepted([one for one in rest if one.run.start < one.run.stop]))
    assert states(side, offer) == [READY] * n
    side.manager.release(reservation)
    side.manager.complete_store(reservation, True, now=side.now)
    assert side.manager.get_stats()["surprises"] == 2
    side.end_step()


@each_offer
@pytest.mark.parametrize("success", [True, False], ids=["written", "failed"])
@pytest.mark.parametrize("entries", [(), (CASCADE,)], ids=["none", "one"])
def test_a_reset_lets_none_of_them_be_seen(
    entries: tuple[dict[str, Any], ...], success: bool, offer: list[Filled]
) -> None:
    side, n = Side(12, *entries, lives=LIVES), len(chunks_of(offer))
    before = side.accepted(offer)
    side.manager.reset_cache(b"G" * 16, now=side.now)
    side.manager.check(side.open)
    assert states(side, offer) == [None] * n
    some, left = offer[:2], n - len(chunks_of(offer[:2]))
    again = side.accepted(some)
    assert not set(again.slots.tolist()) & set(before.slots.tolist())
    side.complete(before, success)
    side.end_step()
    assert states(side, offer) == [RESERVED] * (n - left) + [None] * left
    assert not any(side.submitted(i) for i in range(len(entries)))
    side.complete(again)
    side.end_step()
    assert states(side, offer) == [READY] * (n - left) + [None] * left
    assert side.host.counts()[FREE] == 12 - (n - left)
    assert all({job.namespace.generation for job in side.submitted(i)} == {b"G" * 16} for i in range(len(entries)))


@pytest.mark.parametrize("success", [True, False], ids=["written", "failed"])
@pytest.mark.parametrize("entries", [(), (CASCADE,)], ids=["none", "one"])
def test_who_waits_for_one_of_them_hears_of_its_end(entries: tuple[dict[str, Any], ...], success: bool) -> None:
    side = Side(8, *entries, lives=LIVES)
    waiter, other = LIVES[4], LIVES[5]
    reservation = side.accepted([A, B, C])
    assert side.manager.lookup_each(B.run, waiter, now=side.now, since=side.now) == [Lookup.HIT_PENDING]
    side.manager.want(B.run, waiter, now=side.now)
    side.end_step()
    before = [side.manager.answer_version(context)[0] for context in (waiter, other)]
    side.complete(reservation, success)
    after = [side.manager.answer_version(context)[0] for context in (waiter, other)]
    assert after[0] > before[0]
    assert after[1] == before[1]
    answer = side.manager.lookup_prefix(B.run, waiter, now=side.now, since=side.now)
    assert answer.ready == int(success)
    side.end_step()
    side.manager.on_request_finished(waiter)
    assert side.host.leased == 0
    assert side.host.counts()[FREE] == (5 if success else 8)


@pytest.mark.parametrize("entries", [(), (CASCADE,)], ids=["none", "one"])
def test_what_somebody_waits_for_stays_until_it_is_read(entries: tuple[dict[str, Any], ...]) -> None:
    side, waiter = Side(8, *entries, lives=LIVES), LIVES[4]
    reservation = side.accepted([A, B, C])
    side.manager.want(B.run, waiter, now=side.now)
    side.end_step()
    side.complete(reservation)
    side.end_step()
    *most, last = [filled(f"x{i}") for i in range(8)]
    side.one_by_one(most)
    assert states(side, [A, B, C]) == [None, READY, None]
    assert side.together([last]) is None
    load = side.manager.prepare_load(B.run, waiter, now=side.now)
    side.open.append(load)
    assert load.hashes == (B.key,)
    assert side.together([last]) is None
    side.manager.complete_load(load, now=side.now)
    side.open.remove(load)
    side.accepted([last])
    side.end_step()


def test_what_the_offered_chunks_extend_does_not_leave_for_them() -> None:
    side = Side(6, CASCADE, lives=LIVES)
    newer = [filled(f"x{i}", life=3) for i in range(3)]
    side.store(A, B, C, *newer)
    side.end_step()
    alone = Side(6, CASCADE, lives=LIVES)
    alone.store(A, B, C, *newer)
    alone.end_step()
    alone.one_by_one([A1, B1, C1])
    assert None in states(alone, [A, B, C]), "one by one, the first would push out what the next extends"
    reservation = side.accepted([A1, B1, C1])
    assert states(side, [A, B, C]) == [READY] * 3
    assert states(side, newer) == [None] * 3
    assert side.host.evictions == 3
    side.complete(reservation)
    side.end_step()
    for one in (A1, B1, C1):
        assert side.host.ready_prefix(one.run.part(0, 2)) == 2
    for other in [filled(f"y{i}", life=3) for i in range(6)]:
        side.store(other)
        for parent, child in ((A, A1), (B, B1), (C, C1)):
            assert state(side, parent) is READY or state(side, child) is None
    assert states(side, [A, B, C, A1, B1, C1]) == [None] * 6


def test_a_run_may_go_on_where_the_one_before_it_ends() -> None:
    """Another life goes on with what stands right before it in the offer: it is linked to that as its own would be."""
    side = Side(6, CASCADE, lives=LIVES)
    chain = [filled("a", count=2), filled("a", 2, life=3, count=2)]
    side.complete(side.accepted([*chain, B]))
    side.end_step()
    side.host.touch(chain[1].run.part(3, 4))
    assert side.host.ready_prefix(chain[1].run.part(0, 4)) == 4
    gone: list[int] = []
    for other in [filled(f"y{i}", life=4) for i in range(6)]:
        side.store(other)
        side.end_step()
        there = [one is READY for one in states(side, chain)]
        assert there == sorted(there, reverse=True), "a chunk left before one that extends it"
        gone.append(4 - sum(there))
    assert gone[-1] == 4


def test_runs_leave_from_their_ends_and_what_they_extend_after_them() -> None:
    side = Side(8, CASCADE, lives=LIVES)
    side.store(A, B, filled("x", life=3))
    side.settle()
    runs = [filled("a", 1, life=0, count=3), C, filled("b", 1, life=1, count=2)]
    side.complete(side.accepted(runs))
    side.end_step()
    assert side.host.evictions == 1
    assert states(side, [A, B, *runs]) == [READY] * 8, "what went is what nobody extends"
    for run, _ in runs:
        side.host.touch(run.part(run.stop - 1, run.stop))  # else the order of use alone would have the ends go first
    for other in [filled(f"y{i}", life=4) for i in range(8)]:
        side.store(other)
        side.end_step()
        for chain in (filled("a", count=4), filled("b", count=3)):
            there = [one is READY for one in states(side, [chain])]
            assert there == sorted(there, reverse=True), "a chunk left before one that extends it"
    assert states(side, [A, B, *runs]) == [None] * 8


def test_a_failed_run_leaves_what_it_extends_free_to_go() -> None:
    side = Side(4, CASCADE, lives=LIVES)
    side.store(A)
    side.settle()
    side.complete(side.accepted([filled("a", 1, life=0, count=2), B]), success=False)
    side.end_step()
    assert side.host.room_for(4)
    side.complete(side.accepted([filled("x", life=3, count=4)]))
    assert state(side, A) is None


def test_each_chunk_of_a_run_is_named_for_its_life() -> None:
    """Two lives of one salt and one of another: two jobs, each life beside each of its chunks."""
    side = Side(16, CASCADE, lives=LIVES)
    runs = [
        filled("a", life=0, count=2),
        filled("b", life=1, count=3),
        filled("c", life=3, count=2),
        filled("d", life=4),
    ]
    side.complete(side.accepted(runs))
    side.end_step()
    by_salt = {job.salt: job for job in side.submitted()}
    assert len(by_salt) == len(side.submitted()) == 2
    for pair in ((runs[0], runs[2]), (runs[1], runs[3])):
        chunks, job = chunks_of(pair), by_salt[side.submitted()[pair[0] is runs[1]].salt]
        assert job.keys == tuple(pack_key(chunk.key, 0) for chunk in chunks)
        assert job.contexts == tuple(chunk.context for chunk in chunks)
    side.check_stored()
    assert len(side.tiers[0].stored) == 8


def test_a_tier_that_takes_some_chunks_of_a_run_is_given_these_alone() -> None:
    side = Side(16, SECOND_OFFER, lives=LIVES)
    run, other = filled("a", life=0, count=3), filled("b", life=3, count=2)
    side.store(A1, filled("b", life=3))  # the tier has been offered these once
    side.end_step()
    side.host.clear()
    side.complete(side.accepted([run, other]))
    side.end_step()
    (job,) = side.submitted()
    assert job.keys == (pack_key(b"a1", 0), pack_key(b"b0", 0))
    assert job.contexts == (run.context, other.context)
    side.check_stored()


@pytest.mark.parametrize("success", [True, False], ids=["written", "failed"])
@pytest.mark.parametrize("first", [True, False], ids=["parents first", "children first"])
def test_what_is_being_written_keeps_what_it_extends(first: bool, success: bool) -> None:
    """The parents are still being written when their children are reserved, and they end in either order."""
    side = Side(4, CASCADE, lives=LIVES)
    parents = side.accepted([A, B])
    children = side.accepted([A1, B1])
    if not first:
        side.complete(children)
    side.complete(parents, success)
    if first:
        side.complete(children)
    side.end_step()
    assert states(side, [A1, B1]) == [READY] * 2
    assert states(side, [A, B]) == [READY if success else None] * 2
    for other in [filled(f"x{i}") for i in range(4)]:
        side.store(other)
        side.end_step()
        for parent, child in ((A, A1), (B, B1)) if success else ():
            assert state(side, parent) is READY or state(side, child) is None
    assert states(side, [A, B, A1, B1]) == [None] * 4


def test_what_a_tier_brought_up_is_not_credited_to_it_once_the_slot_holds_another_chunk() -> None:
    side = Side(2, CASCADE, lives=LIVES)
    side.store(A)
    side.end_step()
    side.host.clear()
    assert side.manager.lookup_each(A.run, LIVES[3], now=side.now, since=side.now) == [Lookup.HIT_PENDING]
    side.manager.want(A.run, LIVES[3], now=side.now)
    side.end_step()
    side.end_step()
    assert state(side, A) is READY
    side.manager.on_request_finished(LIVES[3])
    side.lives.remove(LIVES[3])
    side.complete(side.accepted([B, C]))
    side.end_step()
    for run, context in (B, C):
        load = side.manager.prepare_load(run, context, now=side.now)
        assert len(load.hashes) == 1
        assert load.origins == {"0:manual": 0}
        side.manager.complete_load(load, now=side.now)


def test_a_reservation_of_many_lives_is_one_reservation() -> None:
    """Nobody else writes what it holds, however many there are."""
    contexts = [ReqContext(i + 1, f"r{i}", SALTS[i % 3]) for i in range(300)]
    side = Side(300, CASCADE, lives=contexts)
    offer = [Filled(KeyRun(0, [b"%d" % i], 0, 1), context) for i, context in enumerate(contexts)]
    reservation = side.accepted(offer)
    assert np.array_equal(np.sort(reservation.slots), np.arange(300))
    assert side.manager.get_stats()["host_evictions"] == 0
    side.complete(reservation)
    side.end_step()
    assert len(side.tiers[0].stored) == 300
    assert len(side.submitted()) == 3
    side.check_stored()
