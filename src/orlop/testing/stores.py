"""The suite of every ChunkStore: what holds for each of them, run on a real one.

In: a subclass that says how to open the store and how to damage what it keeps. Out: tests. Never: knowledge of how a
store keeps its bytes.

    class TestFiles(ChunkStoreSuite):
        @pytest.fixture
        def open_store(self, tmp_path):
            return lambda max_bytes: FilesStore(tmp_path, max_bytes=max_bytes)

        def resize(self, store, key, nbytes):
            os.truncate(store.path_of(key), nbytes)
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from orlop.core import PAGE_BYTES, Outcome, pack_key
from orlop.tiering.base import ChunkStore
from orlop.tiering.envelope import HEADER_BYTES

PAYLOAD_BYTES = 4 * PAGE_BYTES
CHUNK_BYTES = HEADER_BYTES + PAYLOAD_BYTES
ROOMY_BYTES = 64 << 20

OpenStore = Callable[[int], ChunkStore]
"""Opens the one store under test with a bound in bytes; called again, it opens what was kept."""


def store_key(number: int, namespace: int = 0) -> bytes:
    """A distinct key per number and namespace, shaped as the runner's."""
    return namespace.to_bytes(16, "big") + pack_key(number.to_bytes(32, "big"), 0)


def buffer(nbytes: int = PAYLOAD_BYTES, fill: int = 0) -> memoryview:
    """Page-aligned bytes of one value."""
    view = memoryview(mmap.mmap(-1, nbytes))
    view[:] = bytes([fill % 256]) * nbytes
    return view


def write(store: ChunkStore, keys: list[bytes], fills: list[int], payload_bytes: int = PAYLOAD_BYTES) -> list[Outcome]:
    """Store chunks whose payload is all ``fill`` and whose header is all ``fill + 1``."""
    headers = [buffer(HEADER_BYTES, fill + 1) for fill in fills]
    return list(store.write(keys, headers, [buffer(payload_bytes, fill) for fill in fills]))


def read(store: ChunkStore, keys: list[bytes], payload_bytes: int = PAYLOAD_BYTES) -> list[tuple[Outcome, int | None]]:
    """Each key's outcome and the fill it came back with; None where the bytes are not of one chunk."""
    headers = [buffer(HEADER_BYTES) for _ in keys]
    views = [buffer(payload_bytes) for _ in keys]
    outcomes = store.read_into(keys, headers, views)
    return [
        (outcome, _fill_of(header, view) if outcome is Outcome.OK else None)
        for outcome, header, view in zip(outcomes, headers, views, strict=True)
    ]


def _fill_of(header: memoryview, view: memoryview) -> int | None:
    fill = view[0]
    whole = view == bytes([fill]) * len(view) and header == bytes([(fill + 1) % 256]) * len(header)
    return fill if whole else None


class ChunkStoreSuite:
    """Inherit, give ``open_store`` and ``resize``, and set ``bounded`` False where the server keeps the bound."""

    bounded = True

    @pytest.fixture
    def open_store(self) -> OpenStore:
        raise NotImplementedError

    def resize(self, store: ChunkStore, key: bytes, nbytes: int) -> None:
        """Cut or lengthen what is stored under ``key``, behind the store's back."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, open_store: OpenStore) -> Iterator[ChunkStore]:
        store = open_store(ROOMY_BYTES)
        yield store
        store.close()

    def test_what_was_written_is_read_back(self, store: ChunkStore) -> None:
        keys = [store_key(n) for n in range(8)]
        assert write(store, keys, list(range(8))) == [Outcome.OK] * 8
        assert read(store, keys) == [(Outcome.OK, n) for n in range(8)]
        assert list(store.contains([*keys, store_key(99)])) == [True] * 8 + [False]

    def test_nothing_asked_is_nothing_done(self, store: ChunkStore) -> None:
        assert list(store.write([], [], [])) == []
        assert list(store.read_into([], [], [])) == []
        assert list(store.contains([])) == []
        assert store.delete([]) == 0
        assert list(store.scan()) == []
        store.touch([])

    def test_the_same_key_of_another_namespace_is_another_chunk(self, store: ChunkStore) -> None:
        write(store, [store_key(1, 1), store_key(1, 2)], [11, 12])
        assert read(store, [store_key(1, 2), store_key(1, 1), store_key(1, 3)]) == [
            (Outcome.OK, 12),
            (Outcome.OK, 11),
            (Outcome.MISSING, None),
        ]

    def test_chunks_of_many_lengths_share_a_store(self, store: ChunkStore) -> None:
        for number, pages in enumerate((1, 3, 16, 256)):
            key = store_key(number)
            assert write(store, [key], [number], pages * PAGE_BYTES) == [Outcome.OK]
            assert read(store, [key], pages * PAGE_BYTES) == [(Outcome.OK, number)]

    @pytest.mark.fault("B134")
    @pytest.mark.parametrize("gone", [[0], [3], [7], [3, 4], [0, 7]])
    def test_a_missing_key_shifts_no_neighbour(self, store: ChunkStore, gone: list[int]) -> None:
        keys = [store_key(n) for n in range(8)]
        write(store, keys, list(range(8)))
        assert store.delete([keys[n] for n in gone]) == len(gone)
        expected = [(Outcome.MISSING, None) if n in gone else (Outcome.OK, n) for n in range(8)]
        assert read(store, keys) == expected
        assert list(store.contains(keys)) == [n not in gone for n in range(8)]

    @pytest.mark.fault("B112")
    def test_deleting_what_is_not_there_is_fine(self, store: ChunkStore) -> None:
        write(store, [store_key(1)], [1])
        assert store.delete([store_key(0), store_key(1), store_key(1)]) == 1
        assert store.delete([store_key(1)]) == 0

    def test_a_key_written_again_is_still_one_whole_chunk(self, store: ChunkStore) -> None:
        key = store_key(1)
        assert write(store, [key, key], [1, 2]) == [Outcome.OK] * 2
        [(outcome, fill)] = read(store, [key])
        assert outcome is Outcome.OK
        assert fill in (1, 2)
        assert [chunk.key for chunk in store.scan()] == [key]

    def test_scan_names_all_that_is_there_once(self, store: ChunkStore) -> None:
        keys = {store_key(n, n % 3) for n in range(20)}
        write(store, sorted(keys), [7] * 20)
        chunks = list(store.scan())
        assert len(chunks) == 20
        assert {chunk.key for chunk in chunks} == keys
        assert all(chunk.nbytes >= CHUNK_BYTES and chunk.age_s >= 0 for chunk in chunks)

    @pytest.mark.fault("B120")
    @pytest.mark.fault("B126")
    @pytest.mark.parametrize(
        "nbytes", [0, 1, HEADER_BYTES, CHUNK_BYTES - PAGE_BYTES, CHUNK_BYTES - 1, CHUNK_BYTES + 1, 2 * CHUNK_BYTES]
    )
    def test_a_chunk_of_another_length_is_never_ok(self, store: ChunkStore, nbytes: int) -> None:
        keys = [store_key(n) for n in range(3)]
        write(store, keys, [0, 1, 2])
        self.resize(store, keys[1], nbytes)
        first, second, third = read(store, keys)
        assert (first, third) == ((Outcome.OK, 0), (Outcome.OK, 2))
        assert second[0] in (Outcome.CORRUPT, Outcome.MISSING)
        assert write(store, [keys[1]], [9]) == [Outcome.OK]
        store.delete([keys[1]])
        assert read(store, [keys[1]]) == [(Outcome.MISSING, None)]

    def test_a_damaged_chunk_is_replaced_by_delete_and_write(self, store: ChunkStore) -> None:
        key = store_key(1)
        write(store, [key], [1])
        self.resize(store, key, 5)
        store.delete([key])
        assert write(store, [key], [2]) == [Outcome.OK]
        assert read(store, [key]) == [(Outcome.OK, 2)]

    def test_what_was_kept_is_there_after_a_restart(self, store: ChunkStore, open_store: OpenStore) -> None:
        keys = [store_key(n) for n in range(8)]
        write(store, keys, list(range(8)))
        store.delete(keys[:1])
        store.close()
        store.close()
        again = open_store(ROOMY_BYTES)
        try:
            assert list(again.contains(keys)) == [False] + [True] * 7
            assert read(again, keys)[1:] == [(Outcome.OK, n) for n in range(1, 8)]
        finally:
            again.close()

    @pytest.mark.fault("B114")
    def test_many_threads_see_whole_chunks_only(self, store: ChunkStore) -> None:
        keys = [store_key(n) for n in range(4)]
        start = threading.Barrier(4)

        def work(thread: int) -> list[tuple[Outcome, int | None]]:
            start.wait(timeout=30)
            seen = []
            for turn in range(12):
                write(store, keys, [16 * thread + turn] * 4)
                seen += read(store, keys)
                if turn % 4 == thread:
                    store.delete(keys[:2])
            return seen

        with ThreadPoolExecutor(4) as pool:
            seen = [answer for answers in pool.map(work, range(4)) for answer in answers]
        assert all(outcome in (Outcome.OK, Outcome.MISSING) for outcome, _ in seen)
        assert all(fill is not None for outcome, fill in seen if outcome is Outcome.OK)

    @pytest.mark.fault("B108")
    @pytest.mark.fault("B125")
    def test_the_bound_holds_and_the_newest_stay(self, open_store: OpenStore) -> None:
        if not self.bounded:
            pytest.skip("the bound of this store is kept by its server")
        limit = 60 * CHUNK_BYTES
        keys = [store_key(n, n % 2) for n in range(200)]
        for part in (keys[:100], keys[100:]):  # with a restart in between
            store = open_store(limit)
            try:
                for key in part:
                    assert write(store, [key], [3]) == [Outcome.OK]
                    assert sum(chunk.nbytes for chunk in store.scan()) <= limit
                assert all(store.contains(part[-20:]))
            finally:
                store.close()

    @pytest.mark.fault("B128")
    def test_a_chunk_larger_than_the_bound_is_refused_alone(self, open_store: OpenStore) -> None:
        if not self.bounded:
            pytest.skip("the bound of this store is kept by its server")
        limit = 1 << 20
        store = open_store(limit)
        try:
            assert write(store, [store_key(0)], [1]) == [Outcome.OK]
            assert write(store, [store_key(1)], [2], limit) == [Outcome.NO_SPACE]
            assert read(store, [store_key(0)]) == [(Outcome.OK, 1)]
        finally:
            store.close()
