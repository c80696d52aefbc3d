"""The files store on real directories."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orlop.stores.files import FilesStore
from orlop.testing.stores import ChunkStoreSuite, OpenStore
from orlop.tiering.base import ChunkStore


class TestFiles(ChunkStoreSuite):
    @pytest.fixture(params=["auto", "off"])
    def open_store(self, request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
        return lambda max_bytes: FilesStore(tmp_path / "tier", max_bytes=max_bytes, direct_io=request.param)

    def resize(self, store: ChunkStore, key: bytes, nbytes: int) -> None:
        assert isinstance(store, FilesStore)
        os.truncate(store.path_of(key), nbytes)
