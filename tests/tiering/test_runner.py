"""The runner over a store that is cranked by hand, its worker in threads of this process."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from tier_doubles import CONTEXT, LAYOUT, NAMESPACE, PATIENCE_S, MemoryStore, Rig, keys, register

from orlop.core import Outcome, TransferKind
from orlop.errors import ConfigError, StoreError
from orlop.tiering.base import ChunkStore
from orlop.tiering.breaker import BreakerOptions
from orlop.tiering.io_links import Link, ThreadLink
from orlop.tiering.io_messages import StoreSpec, ToWorker
from orlop.tiering.io_worker import IoWorker
from orlop.tiering.runner import Posted

Make = Callable[..., Rig]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def make(store: MemoryStore, request: pytest.FixtureRequest) -> Iterator[Make]:
    rigs: list[Rig] = []

    def make_rig(over: ChunkStore | Exception = store, **options: Any) -> Rig:
        rigs.append(Rig(register(request.node.name, over), **options))
        return rigs[-1]

    yield make_rig
    for rig in rigs:
        rig.close()


class Gate:
    """Stops calls of some verbs of a store: ``reached`` counts those that stand there; ``open`` lets all go on."""

    def __init__(self, store: MemoryStore, *verbs: str) -> None:
        self.reached = threading.Semaphore(0)
        self._open = threading.Event()
        self._verbs = verbs
        store.before = self._before  # type: ignore[method-assign]

    def _before(self, verb: str, keys: Sequence[bytes]) -> None:
        if verb in self._verbs:
            self.reached.release()
            assert self._open.wait(PATIENCE_S)

    def wait_reached(self) -> None:
        assert self.reached.acquire(timeout=PATIENCE_S)

    def open(self) -> None:
        self._open.set()


# --- bytes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [0, 1])
def test_what_is_stored_comes_back_with_its_checksums(make: Make, group: int) -> None:
    rig = make()
    rig.store(keys(40), 0, group)
    (stored,) = rig.results()
    assert stored.outcomes == (Outcome.OK,) * 40
    assert stored.nbytes == 40 * LAYOUT.payload_bytes(group)
    rig.region.checksums[100:] = 0
    rig.load(keys(40), 100, group)
    (loaded,) = rig.results()
    assert loaded.outcomes == (Outcome.OK,) * 40
    assert loaded.released
    for i in range(40):
        assert rig.payload(100 + i, group) == rig.payload(i, group)
        assert (rig.region.checksums[100 + i] == rig.region.checksums[i]).all()


def test_keys_of_another_namespace_are_not_seen(make: Make, store: MemoryStore) -> None:
    rig = make()
    rig.store(keys(1))
    rig.results()
    (name,) = store.data
    assert name == NAMESPACE.digest + keys(1)[0]


@pytest.mark.fault("B109")
@pytest.mark.fault("B146")
@pytest.mark.fault("B150")
def test_a_flipped_byte_costs_that_chunk_alone(make: Make, store: MemoryStore) -> None:
    rig = make()
    rig.store(keys(5))
    rig.results()
    name = NAMESPACE.digest + keys(5)[2]
    head, payload = store.data[name]
    store.data[name] = (head, bytes([payload[0] ^ 1]) + payload[1:])
    rig.region.checksums[128:] = 0
    rig.load(keys(5))
    (result,) = rig.results()
    assert result.outcomes == (Outcome.OK, Outcome.OK, Outcome.CORRUPT, Outcome.OK, Outcome.OK)
    assert not rig.region.checksums[130].any()
    assert store.deleted == [name]
    stats = rig.runner.get_stats()
    assert stats["damaged_payload_checksum"] == 1
    assert stats["breaker_state"] == 0
    rig.load(keys(5))
    assert rig.results()[0].outcomes[2] is Outcome.MISSING


@pytest.mark.fault("B109")
def test_two_swapped_chunks_are_both_removed(make: Make, store: MemoryStore) -> None:
    rig = make()
    rig.store(keys(2))
    rig.results()
    one, two = (NAMESPACE.digest + key for key in keys(2))
    store.data[one], store.data[two] = store.data[two], store.data[one]
    rig.load(keys(2))
    assert rig.results()[0].outcomes == (Outcome.CORRUPT, Outcome.CORRUPT)
    assert rig.runner.get_stats()["damaged_foreign_key"] == 2
    assert not store.data


def test_a_chunk_of_another_version_is_a_miss_and_stays(make: Make, store: MemoryStore) -> None:
    rig = make()
    rig.store(keys(1))
    rig.results()
    (name,) = store.data
    head, payload = store.data[name]
    store.data[name] = (head[:8] + (99).to_bytes(4, "little") + head[12:], payload)
    rig.load(keys(1))
    assert rig.results()[0].outcomes == (Outcome.MISSING,)
    assert rig.runner.get_stats()["damaged_version"] == 1
    assert name in store.data


@pytest.mark.fault("B145")
@pytest.mark.fault("B150")
def test_an_object_of_wrong_length_is_removed(make: Make, store: MemoryStore) -> None:
    rig = make()
    rig.store(keys(2))
    rig.results()
    name = NAMESPACE.digest + keys(2)[0]
    store.data[name] = (store.data[name][0], b"")
    rig.load(keys(2))
    assert rig.results()[0].outcomes == (Outcome.CORRUPT, Outcome.OK)
    assert name not in store.data


def test_bytes_that_were_never_whole_are_not_stored(make: Make, store: MemoryStore) -> None:
    rig = make()
    rig.fill(range(3))
    rig.region.slots[1, 0] ^= 1
    rig.runner.submit_store(rig.job(TransferKind.STORE, keys(3)), now=rig.now)
    assert rig.results()[0].outcomes == (Outcome.OK, Outcome.CORRUPT, Outcome.OK)
    assert NAMESPACE.digest + keys(3)[1] not in store.data
    assert rig.runner.get_stats()["damaged_source_checksum"] == 1


# --- threads and queues -------------------------------------------------------------------------------


def test_one_job_is_spread_over_all_threads(make: Make, store: MemoryStore) -> None:
    together = threading.Barrier(4)
    rig = make(threads=4)
    rig.store(keys(128))
    rig.results()
    store.before = lambda verb, keys: together.wait(PATIENCE_S)  # type: ignore[assignment,method-assign]
    rig.load(keys(128))  # a part is at most 32 chunks
    assert rig.results()[0].outcomes == (Outcome.OK,) * 128


def test_loads_go_before_stores_that_came_first(make: Make, store: MemoryStore) -> None:
    rig = make(threads=1)
    rig.store(keys(1))
    rig.results()
    gate = Gate(store, "write")
    rig.store(keys(1, b"a"))
    gate.wait_reached()
    rig.store(keys(1, b"b"), 1)
    rig.load(keys(1))
    assert rig.found(keys(1)) == b"\1"  # what was posted before it has reached the worker
    store.calls.clear()
    gate.open()
    rig.results(3)
    assert [verb for verb, _ in store.calls if verb != "contains"] == ["read_into", "write"]


@pytest.mark.fault("B118")
def test_slow_stores_never_take_the_last_thread(make: Make, store: MemoryStore) -> None:
    rig = make(threads=2)
    rig.store(keys(1))
    rig.results()
    gate = Gate(store, "write")
    rig.store(keys(1, b"a"))
    rig.store(keys(1, b"b"), 1)
    gate.wait_reached()
    for _ in range(20):  # after each of them the other thread finds a store waiting
        rig.load(keys(1))
        assert rig.results()[0].outcomes == (Outcome.OK,)
    gate.open()
    rig.results(2)


@pytest.mark.fault("B118")
@pytest.mark.fault("B135")
def test_a_full_queue_drops_stores_and_refuses_loads(make: Make, store: MemoryStore) -> None:
    nbytes = LAYOUT.payload_bytes(0)
    rig = make(queue_bytes=2 * nbytes, load_queue_bytes=nbytes)
    gate = Gate(store, "write", "read_into")
    for i in range(5):
        rig.store([keys(5)[i]], i)
    rig.load(keys(1), 128)
    rig.load(keys(1), 129)
    assert rig.runner.get_stats()["queue_bytes"] == 2 * nbytes
    dropped = rig.results(4)
    assert all(result.outcomes == (Outcome.UNAVAILABLE,) and result.released for result in dropped)
    assert [result.job_id for result in dropped] == [3, 4, 5, 7]
    gate.open()
    rig.results(3)
    stats = rig.runner.get_stats()
    assert (stats["stores_refused_queue_full"], stats["loads_refused_queue_full"]) == (3, 1)
    assert (stats["chunks_stores_refused_queue_full"], stats["chunks_loads_refused_queue_full"]) == (3, 1)
    assert (stats["queue_bytes"], stats["load_queue_bytes"]) == (0, 0)
    assert stats["breaker_state"] == 0


def test_a_job_larger_than_the_queue_goes_alone(make: Make) -> None:
    rig = make(queue_bytes=1)
    rig.store(keys(3))
    assert rig.results()[0].outcomes == (Outcome.OK,) * 3


@pytest.mark.fault("B118")
def test_what_waited_too_long_is_not_tried(make: Make, store: MemoryStore) -> None:
    rig = make(store_wait_s=-1.0)  # over before it began
    rig.store(keys(1))
    (result,) = rig.results()
    assert result.outcomes == (Outcome.TIMEOUT,)
    assert not store.data


def test_an_empty_job_is_reported(make: Make) -> None:
    rig = make()
    rig.load([])
    assert rig.results()[0].outcomes == ()


# --- lookups ------------------------------------------------------------------------------------------


def test_a_lookup_probes_in_growing_batches_and_stops_at_the_first_miss(make: Make, store: MemoryStore) -> None:
    rig = make()
    for key in keys(100):
        store.data[NAMESPACE.digest + key] = (b"", b"")
    assert rig.found(keys(1000)) == b"\1" * 100 + b"\0"
    assert [n for verb, n in store.calls if verb == "contains"] == [32, 64, 128]
    stats = rig.runner.get_stats()
    assert (stats["chunks_queried"], stats["chunks_hit"]) == (1000, 100)


def test_a_lookup_may_ask_for_each_key(make: Make, store: MemoryStore) -> None:
    rig = make()
    store.data[NAMESPACE.digest + keys(3)[1]] = (b"", b"")
    assert rig.found(keys(3), stop_at_miss=False) == b"\0\1\0"


def test_lookups_do_not_wait_behind_reads(make: Make, store: MemoryStore) -> None:
    rig = make(threads=1)
    gate = Gate(store, "read_into")
    rig.load(keys(1))
    gate.wait_reached()
    assert rig.found(keys(1)) == b"\0"
    gate.open()
    rig.results()


def test_unanswered_lookups_are_bounded_and_end(make: Make, store: MemoryStore) -> None:
    rig = make(most_lookups=2, lookup_limit_s=5.0, breaker=BreakerOptions(failures=2))
    gate = Gate(store, "contains")
    assert rig.ask(keys(1))[1] is None
    assert rig.ask(keys(1))[1] is None
    _, third = rig.ask(keys(1))
    assert third is not None
    assert third.found == b"\0"
    rig.now += 5.0
    rig.runner.on_schedule_end(now=rig.now)
    assert not rig.runner.get_answers()
    rig.now += 0.1
    rig.runner.on_schedule_end(now=rig.now)
    assert [answer.found for answer in rig.runner.get_answers()] == [b"\0", b"\0"]
    assert rig.runner.get_stats()["breaker_state"] == 2
    gate.open()


# --- trouble ------------------------------------------------------------------------------------------


class UnknownToAnybody(BaseException):
    """A type that no handler names."""


@pytest.mark.fault("B147")
@pytest.mark.fault("B149")
def test_an_exception_fails_its_job_and_the_threads_go_on(make: Make, store: MemoryStore) -> None:
    """Also where jobs that wait together go by one call."""
    rig = make(threads=2, breaker=BreakerOptions(failures=100))
    poison = {"write": NAMESPACE.digest + keys(20)[2], "read_into": NAMESPACE.digest + keys(20)[7]}
    calls: list[int] = []

    def one_fails(verb: str, keys: Sequence[bytes]) -> None:
        calls.append(len(keys))
        if poison.get(verb) in keys:
            raise OSError(errno.EIO, "cable") if verb == "write" else UnknownToAnybody("?")

    store.before = one_fails  # type: ignore[method-assign]
    for i in range(20):
        rig.store([keys(20)[i]], i)
    stored = rig.results(20)
    assert sorted(result.outcomes[0] for result in stored) == [Outcome.IO_ERROR] + [Outcome.OK] * 19
    there = [key for key in keys(20) if NAMESPACE.digest + key in store.data]
    for i, key in enumerate(there):
        rig.load([key], 128 + i)
    loaded = rig.results(19)
    assert sorted(result.outcomes[0] for result in loaded) == [Outcome.IO_ERROR] + [Outcome.OK] * 18
    stats = rig.runner.get_stats()
    assert (stats["written_io_error"], stats["read_io_error"]) == (1, 1)
    assert (stats["queue_bytes"], stats["load_queue_bytes"], stats["open_jobs"]) == (0, 0, 0)
    assert any("UnknownToAnybody" in result.reason for result in loaded)


def test_jobs_that_wait_together_go_by_one_call_and_are_reported_each(make: Make, store: MemoryStore) -> None:
    rig = make(threads=2)
    gate = Gate(store, "write")
    names = keys(61)
    rig.store(names[:1])
    gate.wait_reached()
    calls: list[int] = []
    store.before = lambda verb, keys: calls.append(len(keys)) if verb == "write" else None  # type: ignore[method-assign]
    for start in range(1, 59, 2):
        rig.store(names[start : start + 2], start)
    rig.store(names[59:], 59, group=1)
    rig.found(names[:1])  # answered after all of them have come
    gate.open()
    outcomes = [result.outcomes for result in rig.results(31)]
    assert outcomes == [(Outcome.OK,)] + [(Outcome.OK,) * 2] * 30
    assert calls == [58, 2], "what differs in more than keys and slots goes by itself"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (OSError(errno.ENOSPC, "full"), Outcome.NO_SPACE),
        (OSError(errno.EDQUOT, "quota"), Outcome.NO_SPACE),
        (PermissionError(errno.EACCES, "no"), Outcome.DENIED),
        (OSError(errno.EROFS, "read-only"), Outcome.DENIED),
        (TimeoutError("slow"), Outcome.TIMEOUT),
        (StoreError("gone"), Outcome.IO_ERROR),
    ],
)
def test_errors_become_outcomes(make: Make, store: MemoryStore, error: Exception, outcome: Outcome) -> None:
    rig = make()

    def fail(verb: str, keys: Sequence[bytes]) -> None:
        raise error

    store.before = fail  # type: ignore[method-assign]
    rig.store(keys(2))
    assert rig.results()[0].outcomes == (outcome, outcome)
    assert not store.deleted


def test_a_store_that_answers_for_too_few_keys_has_answered_for_none(make: Make, store: MemoryStore) -> None:
    rig = make()
    store.write = lambda keys, headers, views: [Outcome.OK]  # type: ignore[method-assign]
    store.contains = lambda keys: [True]  # type: ignore[method-assign]
    rig.store(keys(2))
    assert rig.results()[0].outcomes == (Outcome.IO_ERROR, Outcome.IO_ERROR)
    assert rig.found(keys(2)) == b"\0\0"


@pytest.mark.fault("B109")
@pytest.mark.fault("B137")
@pytest.mark.fault("B142")
def test_a_failing_tier_goes_out_of_service_and_comes_back(
    make: Make, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rig = make(breaker=BreakerOptions(failures=2, open_s=1.0))

    def fail(verb: str, keys: Sequence[bytes]) -> None:
        raise OSError(errno.EIO, "cable")

    store.before = fail  # type: ignore[method-assign]
    for _ in range(2):
        rig.load(keys(1))
        rig.results()
    store.calls.clear()
    assert rig.ask(keys(3))[1] is not None
    rig.load(keys(1))
    rig.store(keys(1))
    assert all(result.outcomes == (Outcome.UNAVAILABLE,) for result in rig.results(2))
    assert not store.calls
    rig.now += 1.0
    assert rig.found(keys(3)) == b"\0\0\0"  # the probe fails
    assert rig.runner.get_stats()["breaker_state"] == 2
    del store.before
    rig.now += 2.0
    rig.store(keys(1))  # the probe succeeds
    assert rig.results()[0].outcomes == (Outcome.OK,)
    assert rig.found(keys(1)) == b"\1"
    lines = [record.message for record in caplog.records]
    assert sum("out of service" in line for line in lines) == 1
    assert sum("in service again" in line for line in lines) == 1


@pytest.mark.fault("B109")
def test_one_read_that_hangs_holds_up_no_other(make: Make, store: MemoryStore) -> None:
    rig = make(threads=2)
    rig.store(keys(50))
    rig.results()
    gate = Gate(store, "read_into")
    hung = rig.load(keys(1))
    gate.wait_reached()
    del store.before
    for i in range(1, 50):
        rig.load([keys(50)[i]], 128 + i)
    assert all(result.outcomes == (Outcome.OK,) for result in rig.results(49))
    gate.open()
    (late,) = rig.results()
    assert late.job_id == hung.job_id
    assert late.outcomes == (Outcome.OK,)


@pytest.mark.fault("B109")
def test_slots_past_their_deadline_open_the_breaker(make: Make) -> None:
    rig = make(max_retired=10, breaker=BreakerOptions(failures=3))
    for count in (1, 1, 1, 2):  # the same slots again are no news
        rig.runner.note_hung(count, now=rig.now)
    assert rig.runner.get_stats()["breaker_state"] == 0
    rig.runner.note_hung(3, now=rig.now)
    assert rig.runner.get_stats()["breaker_state"] == 2


@pytest.mark.fault("B109")
def test_too_many_retired_slots_open_the_breaker_at_once(make: Make) -> None:
    rig = make(max_retired=10)
    rig.runner.note_hung(11, now=rig.now)
    assert rig.runner.get_stats()["breaker_state"] == 2


@pytest.mark.fault("B147")
def test_a_thread_that_dies_of_our_own_fault_is_told_and_replaced(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(restart_s=0.01)
    assert rig.runner.wait_ready(PATIENCE_S) is None
    with monkeypatch.context() as patch:
        patch.setattr(IoWorker, "_move", lambda self, part, headers: 1 // 0)
        rig.store(keys(1))
        (result,) = rig.results()
    assert result.outcomes == (Outcome.UNAVAILABLE,)
    outcome = Outcome.UNAVAILABLE
    while outcome is Outcome.UNAVAILABLE:
        rig.now += 100.0
        rig.store(keys(1))
        outcome = rig.results()[0].outcomes[0]
    assert outcome is Outcome.OK
    assert rig.runner.get_stats()["io_restarts"] >= 1
    assert any("thread of the I/O worker died" in record.message for record in caplog.records)


def test_a_job_whose_worker_dies_while_it_is_posted_is_not_given_to_the_next_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its report says that its slots are free: nobody may touch them for it any more."""
    rig = make(restart_s=0.01)
    assert rig.runner.wait_ready(PATIENCE_S) is None
    pump = rig.runner._pump

    def die(link: Link, message: ToWorker) -> bool:
        link.kill()
        deadline = time.monotonic() + PATIENCE_S
        while not any(hasattr(message, "report") for message in pump.arrived):
            assert time.monotonic() < deadline, "nobody reports it"
            time.sleep(0)
        return False

    with monkeypatch.context() as patch:
        patch.setattr(ThreadLink, "post", die)
        rig.store(keys(1))
    assert rig.results()[0].outcomes == (Outcome.UNAVAILABLE,)
    rig.runner.shutdown(PATIENCE_S)
    assert "unknown_reports" not in rig.runner.get_stats()


def test_a_merge_that_fails_does_not_end_the_sender(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise MemoryError

    rig = make()
    rig.runner._pump._posted.put(fail)
    rig.store(keys(1))
    assert rig.results()[0].outcomes == (Outcome.OK,)
    assert any("work beside the engine failed" in record.message for record in caplog.records)


def test_a_job_that_is_posted_to_a_worker_that_was_buried_meanwhile_is_reported(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(restart_s=1e6)
    assert rig.runner.wait_ready(PATIENCE_S) is None
    pump = rig.runner._pump
    link, remember = pump._link, pump._remember
    assert link is not None

    def late(message: Posted) -> None:
        link.kill()
        deadline = time.monotonic() + PATIENCE_S
        while pump._link is link:
            assert time.monotonic() < deadline, "nobody buries it"
            time.sleep(0)
        with pump._lock:  # what it owed has been settled
            remember(message)

    with monkeypatch.context() as patch:
        patch.setattr(pump, "_remember", late)
        patch.setattr(link, "post", lambda message: True)
        rig.store(keys(1))
    assert rig.results()[0].outcomes == (Outcome.UNAVAILABLE,)


# --- start --------------------------------------------------------------------------------------------


def test_a_store_that_cannot_be_opened_comes_back_alone(make: Make, store: MemoryStore, request: Any) -> None:
    rig = make(StoreError("nobody answers"), breaker=BreakerOptions(open_s=1.0))
    text = rig.runner.wait_ready(PATIENCE_S)
    assert text is not None
    assert "nobody answers" in text
    assert rig.ask(keys(1))[1] is not None
    rig.now += 1.0
    rig.load(keys(1))
    (result,) = rig.results()
    assert result.outcomes == (Outcome.UNAVAILABLE,)
    register(request.node.name, store)
    rig.now += 2.0
    assert rig.found(keys(1)) == b"\0"
    assert rig.runner.wait_ready(PATIENCE_S) is None
    assert rig.runner.get_stats()["breaker_state"] == 0


def test_a_setting_that_can_never_work_is_raised(make: Make) -> None:
    rig = make(ConfigError("found bytes=0, expected more"))
    with pytest.raises(ConfigError, match=r"^found bytes=0, expected more$"):
        rig.runner.wait_ready(PATIENCE_S)


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        ("no_such_module:x", "cannot be imported"),
        ("tier_doubles:no_such_thing", "cannot be imported"),
        ("tier_doubles", "cannot be imported"),
        ("json:JSONDecoder", "is a class of something else"),
        ("builtins:list", "is a class of something else"),
        ("builtins:globals", "makes a dict"),
        ("builtins:id", "does not take"),
        ("tier_doubles:ChunkStore", "is refused .*abstract"),
    ],
)
def test_a_factory_that_makes_no_store_is_a_setting_that_can_never_work(
    factory: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(StoreSpec(factory))
    try:
        with pytest.raises(ConfigError, match=rf"^type: found '{factory}', .*{why}.*; allowed: 'module:callable'"):
            rig.runner.wait_ready(PATIENCE_S)
    finally:
        rig.close()
    assert not caplog.records, "the error says it all"


def test_what_was_told_at_the_start_is_not_logged_once_more(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    rig = make(StoreError("nobody answers"))
    assert rig.runner.wait_ready(PATIENCE_S) == "nobody answers"
    assert rig.ask(keys(1))[1] is not None
    assert rig.runner.get_stats()["breaker_state"] == 2
    assert not caplog.records


def test_what_nobody_was_told_is_logged(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    rig = make(StoreError("nobody answers"))
    rig.load(keys(1))
    rig.results()
    assert "out of service (nobody answers)" in caplog.text


# --- clear and shutdown -------------------------------------------------------------------------------


def test_clear_forgets_everything_and_what_is_on_its_way(make: Make, store: MemoryStore) -> None:
    rig = make(threads=2)
    rig.store(keys(2))
    rig.results()
    gate = Gate(store, "write", "read_into", "contains")
    rig.load(keys(2))
    rig.store(keys(1, b"a"), 2)
    rig.ask(keys(2))
    for _ in range(3):
        gate.wait_reached()
    rig.runner.clear()
    assert [answer.found for answer in rig.runner.get_answers()] == [b"\0\0"]
    assert rig.found(keys(2)) == b"\0\0"
    gate.open()
    loaded, stored = rig.results(2)
    assert loaded.outcomes == (Outcome.MISSING, Outcome.MISSING)
    assert stored.outcomes == (Outcome.UNAVAILABLE,)
    rig.runner.shutdown(PATIENCE_S)
    assert not store.data
    assert rig.runner.get_stats()["breaker_state"] == 0


def test_a_store_after_a_clear_is_kept(make: Make, store: MemoryStore) -> None:
    rig = make()
    rig.store(keys(2))
    rig.results()
    rig.runner.clear()
    outcome = Outcome.UNAVAILABLE
    while outcome is Outcome.UNAVAILABLE:  # overtaken by the clear
        rig.store(keys(1, b"n"))
        outcome = rig.results()[0].outcomes[0]
    assert [name[16:] for name in store.data] == keys(1, b"n")


def test_touches_reach_the_store(make: Make, store: MemoryStore) -> None:
    rig = make(threads=1)
    rig.store(keys(1))
    rig.results()
    rig.runner.touch(keys(2), CONTEXT)
    rig.runner.shutdown(PATIENCE_S)
    assert store.touched == [NAMESPACE.digest + key for key in keys(2)]


@pytest.mark.fault("B207")
def test_shutdown_drains_then_closes_the_store(make: Make, store: MemoryStore) -> None:
    rig = make(threads=2)
    for i in range(50):
        rig.store([keys(50)[i]], i)
        rig.load([keys(50)[i]], 128 + i)
    rig.runner.shutdown(PATIENCE_S)
    assert len(rig.runner.get_finished_jobs()) == 100
    assert len(store.data) == 50
    assert store.closed
    rig.store(keys(1))
    assert rig.results()[0].outcomes == (Outcome.UNAVAILABLE,)


@pytest.mark.parametrize("lock", ["_sending", "_taking"])
def test_shutdown_ends_after_a_signal_in_the_middle_of_a_call(make: Make, lock: str) -> None:
    """Its handler may end the runner where the call that it has interrupted holds a lock."""
    rig = make()
    rig.store(keys(5))

    def interrupted() -> None:
        getattr(rig.runner._pump, lock).acquire()
        rig.runner.shutdown(PATIENCE_S)

    engine = threading.Thread(target=interrupted, daemon=True)
    engine.start()
    engine.join(2 * PATIENCE_S)
    assert not engine.is_alive()
    assert rig.results()[0].outcomes == (Outcome.OK,) * 5


class Interrupted:
    """A lock whose taking, without waiting, is the last thing before a Ctrl-C, once."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.release = lock.release
        self.was_interrupted = False

    def acquire(self, blocking: bool) -> bool:
        taken = bool(self._lock.acquire(blocking=blocking))
        if taken and not self.was_interrupted:
            self.was_interrupted = True
            raise KeyboardInterrupt
        return taken

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def step_on(rig: Rig) -> None:
    """Speak and listen to the worker again and again: now and then another thread may be at it."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        rig.runner.touch(keys(1), CONTEXT)
        rig.runner.get_finished_jobs()


@pytest.mark.parametrize("lock", ["_sending", "_taking"])
def test_after_a_ctrl_c_that_the_application_survives_the_tier_goes_on(make: Make, lock: str) -> None:
    rig = make()
    rig.store(keys(1))
    rig.results()
    pump = rig.runner._pump
    setattr(pump, lock, Interrupted(getattr(pump, lock)))
    with pytest.raises(KeyboardInterrupt):
        step_on(rig)
    rig.store(keys(5))
    assert rig.results()[0].outcomes == (Outcome.OK,) * 5


@pytest.mark.fault("B207")
@pytest.mark.fault("B109")
def test_shutdown_ends_beside_a_hung_thread_and_says_what_it_holds(make: Make, store: MemoryStore) -> None:
    rig = make(threads=1)
    gate = Gate(store, "write")
    hung = rig.store(keys(1))
    waiting = rig.store(keys(1, b"w"), 1)
    gate.wait_reached()
    rig.runner.shutdown(0.0)
    results = {result.job_id: result for result in rig.runner.get_finished_jobs()}
    assert set(results) == {hung.job_id, waiting.job_id}
    assert not results[hung.job_id].released
    assert not rig.runner.get_released_jobs()
    gate.open()
    released = rig.released()
    while len(released) < 2:
        released += rig.released()
    assert sorted(released) == [hung.job_id, waiting.job_id]
    assert not rig.runner.get_finished_jobs()
