"""The slab on real directories: the suite of every store, and what only a slab can go through."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orlop.stores.disk.store import DiskStore
from orlop.testing.stores import ChunkStoreSuite, OpenStore, buffer
from orlop.tiering.base import ChunkStore

MIB = 1 << 20


class TestSlab(ChunkStoreSuite):
    @pytest.fixture(params=["auto", "off"])
    def open_store(self, request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
        return lambda max_bytes: DiskStore(tmp_path / "tier", max_bytes=max_bytes, direct_io=request.param)

    def resize(self, store: ChunkStore, key: bytes, nbytes: int) -> None:
        """Cells have one length; that of a chunk is what its record says."""
        whole = memoryview(buffer(max(1, nbytes), 7))
        cut = min(nbytes, 4096)
        store.write([key], [whole[:cut]], [whole[cut:]])

    @pytest.fixture
    def store(self, open_store: OpenStore) -> Iterator[ChunkStore]:
        store = open_store(64 * MIB)
        assert isinstance(store, DiskStore)
        yield store
        store.check()
        store.close()
