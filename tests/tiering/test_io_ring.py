"""The wire over shared memory: all messages, in order, whole or not yet; nothing waits that must not."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
from collections import deque

import pytest
import xxhash
from tier_doubles import PATIENCE_S

from orlop.tiering import io_ring
from orlop.tiering.io_links import ProcessLink
from orlop.tiering.io_ring import DIRECTION_BYTES, PIECE_BYTES, RING_BYTES, Ring, Wire


def ends() -> tuple[Ring, Ring, memoryview]:
    memory = memoryview(bytearray(DIRECTION_BYTES))
    return Ring(memory), Ring(memory), memory


def never() -> None:
    raise AssertionError("there was no room")


def test_messages_of_any_length_come_in_order_over_many_rounds() -> None:
    rng = random.Random(3)
    writer, reader, _ = ends()
    sent: deque[bytes] = deque()
    came = 0
    while came < 8 * RING_BYTES:
        if rng.random() < 0.6:
            message = rng.randbytes(rng.choice((0, 1, 100, 5000, PIECE_BYTES // 2)))
            if writer.put_now([message]):
                sent.append(message)
        else:
            for message in reader.take():
                assert message == sent.popleft()
                came += len(message)
    assert reader.take() == list(sent)
    assert reader.empty()


def test_a_full_ring_refuses_and_takes_again_after_the_reader() -> None:
    writer, reader, _ = ends()
    count = 0
    while writer.put_now([bytes(10_000)]):
        count += 1
    assert count > 90
    assert not writer.put_now([bytes(10_000)])
    assert len(reader.take()) == count
    assert writer.put_now([bytes(10_000)])
    assert len(reader.take()) == 1


def test_what_is_longer_than_the_ring_goes_in_pieces_while_somebody_reads() -> None:
    writer, reader, _ = ends()
    message = random.Random(5).randbytes(3 * RING_BYTES)
    assert not writer.put_now([message])
    waited = threading.Event()
    thread = threading.Thread(target=writer.put, args=([message, "end"], waited.set))
    thread.start()
    assert waited.wait(PATIENCE_S), "all of it had room"
    came: list[object] = []
    while not came:
        came = reader.take()
    thread.join(PATIENCE_S)
    assert came == [message, "end"]


def test_whoever_waits_for_room_may_give_up() -> None:
    writer, _, _ = ends()

    def gone() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        writer.put([bytes(2 * RING_BYTES)], gone)


def test_heavy_messages_stop_whoever_takes_light_ones_only() -> None:
    writer, reader, _ = ends()
    writer.put(["a"], never)
    writer.put(["b", "c"], never, heavy=True)
    writer.put(["d"], never)
    assert reader.take(light=True) == ["a"]
    assert reader.take(light=True) == []
    assert reader.take() == ["b", "c", "d"]


def test_the_engines_thread_collects_no_heavy_words() -> None:
    near = Wire.create()
    memory_fd, *bell = (os.dup(fd) for fd in near.fds)
    far = Wire(memory_fd, (bell[0], bell[1]), far=True)
    try:
        link = object.__new__(ProcessLink)
        link._wire = near
        far.outbox.put(["light"], never)
        far.outbox.put(["heavy"], never, heavy=True)
        assert link.collect() == ["light"]
        assert link.collect() == []
        assert link.take() == ["heavy"]
    finally:
        far.close()
        near.close()


@pytest.mark.parametrize("late", [0, 4, 8, 12, 16, 30])
def test_what_has_not_arrived_in_whole_is_not_there_yet(late: int) -> None:
    """The count is there before a byte of the entry, as on a machine that lets writes overtake each other."""
    writer, reader, memory = ends()
    writer.put([b"first" * 10], never)
    assert reader.take() == [b"first" * 10]
    before = bytes(memory[128 : 128 + 400])
    writer.put([b"second" * 10], never)
    written = bytes(memory[128 : 128 + 400])
    start = next(i for i, (a, b) in enumerate(zip(before, written, strict=True)) if a != b)
    memory[128 + start + late] ^= 1
    assert reader.take() == []
    memory[128 + start + late] ^= 1
    assert reader.take() == [b"second" * 10]


def test_what_is_overwritten_once_it_was_found_whole_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that lets the writer have the room before all that lay in it was read."""
    writer, reader, memory = ends()
    writer.put([b"first" * 10], never)
    digest = xxhash.xxh3_64_intdigest

    def judge_late(entry: bytes | memoryview, seed: int) -> int:
        seal = digest(entry, seed)
        memory[128:400] = bytes(272)
        return seal

    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", judge_late)
    assert reader.take() == [b"first" * 10]


def test_an_engine_that_ends_in_the_middle_of_a_word_is_noticed() -> None:
    near = Wire.create()
    ours, theirs = os.pipe()
    memory_fd, *bell = (os.dup(fd) for fd in near.fds)
    far = Wire(memory_fd, (bell[0], bell[1]), far=True)
    try:
        near.outbox._written[0] = 64  # the count has moved and nothing has come
        os.close(theirs)
        heard: list[object] = []
        thread = threading.Thread(target=lambda: heard.append(far.receive(ours)), daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        assert heard == [None]
    finally:
        far.close()
        near.close()
        os.close(ours)


def test_a_wire_for_which_there_is_no_memory_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    made: list[int] = []
    closed: list[int] = []
    bell, memory, close = io_ring._bell, io_ring._memory, os.close
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refuse)
        patch.setattr(io_ring, "_bell", lambda: made.extend(set(fds := bell())) or fds)
        patch.setattr(io_ring, "_memory", lambda nbytes: made.append(fd := memory(nbytes)) or fd)
        patch.setattr(os, "close", lambda fd: closed.append(fd) or close(fd))
        with pytest.raises(OSError, match="no memory"):
            Wire.create()
    assert sorted(made) == sorted(closed)
    assert len(made) > 1


def test_the_bell_rings_without_waiting_and_wakes_once() -> None:
    near = Wire.create()
    ours, theirs = os.pipe()
    try:
        memory_fd, *bell = (os.dup(fd) for fd in near.fds)
        far = Wire(memory_fd, (bell[0], bell[1]), far=True)
        for _ in range(100_000):  # more than a pipe holds
            near.ring()
        assert near.outbox.put_now(["word"])
        near.ring()
        assert far.receive(ours) == ["word"]
        assert far.outbox.put_now(["answer"])
        assert near.inbox.take() == ["answer"]
        os.close(theirs)
        assert far.receive(ours) is None
        far.close()
    finally:
        near.close()
        os.close(ours)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_of_the_engine_does_not_speak_in_its_place() -> None:
    near = Wire.create()
    try:
        memory_fd, *bell = (os.dup(fd) for fd in near.fds)
        far = Wire(memory_fd, (bell[0], bell[1]), far=True)
        child = os.fork()
        if child == 0:
            near.outbox.put_now(["of the child"])
            near.ring()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        near.outbox.put_now(["of the parent"])
        assert far.inbox.take() == ["of the parent"]
        far.close()
    finally:
        near.close()
