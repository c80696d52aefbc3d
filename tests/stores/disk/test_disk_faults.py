"""Faults of disk tiers that others had, and which a slab could only have in another form."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from chunks import load, store

from orlop.cli.stored import open_folder
from orlop.core import Outcome
from orlop.stores.disk.device import Device, used_bytes
from orlop.stores.disk.store import DiskStore
from orlop.testing.stores import read, store_key, write

MIB = 1 << 20


@pytest.mark.fault("B123")
def test_however_many_chunks_there_are_they_lie_in_few_files(tmp_path: Path) -> None:
    slab = DiskStore(tmp_path, max_bytes=32 * MIB, direct_io="off")
    for first in range(0, 3000, 100):
        assert set(store(slab, [(n, n) for n in range(first, first + 100)])) == {Outcome.OK}
    assert slab.stats()["chunks"] == 3000
    files = [name for _, _, names in os.walk(tmp_path) for name in names]
    assert len(files) <= 2 * 64 + 2, "a segment is a sixty-fourth of the bound, in two files"
    slab.close()


@pytest.mark.fault("B124")
@pytest.mark.parametrize("stuck", [1, 3])
def test_segments_that_cannot_be_removed_do_not_stop_eviction(tmp_path: Path, stuck: int) -> None:
    """A new size of chunk needs whole segments of the old one to go, and the first ``stuck`` of them do not."""

    refused: set[str] = set()

    class Sticky(Device):
        def remove(self, path: str) -> None:
            if path.endswith(".cells") and (path in refused or len(refused) < stuck):
                refused.add(path)
                raise OSError(errno.EPERM, "immutable")
            super().remove(path)

    limit = 4 * MIB
    slab = DiskStore(tmp_path, max_bytes=limit, direct_io="off", make_device=Sticky)
    for n in range(3 * limit // 8192):
        assert write(slab, [store_key(n, 1)], [n]) == [Outcome.OK]
    for n in range(200):
        assert write(slab, [store_key(n, 2)], [n], 7 * 4096) == [Outcome.OK]
        assert used_bytes(str(tmp_path)) <= limit
    assert len(refused) == stuck
    assert read(slab, [store_key(199, 2)], 7 * 4096) == [(Outcome.OK, 199)]
    slab.check()
    slab.close()


@pytest.mark.fault("B114")
def test_a_chunk_that_is_being_written_is_not_seen_from_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by lookups of the same engine nor by a tool, before its record is written."""
    slab = DiskStore(tmp_path, max_bytes=4 * MIB, direct_io="off")
    store(slab, [(1, 1)])
    seen: list[tuple[object, ...]] = []
    pwritev = os.pwritev

    def look(fd: int, buffers: list[memoryview], offset: int) -> int:
        if not seen and os.readlink(f"/proc/self/fd/{fd}").endswith(".cells"):
            half = pwritev(fd, [memoryview(bytes(buffers[0]))], offset)
            seen.append((load(slab, [2])[0][0], len(list(open_folder(tmp_path).scan())), half))
        return pwritev(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", look)
    assert store(slab, [(2, 2)]) == [Outcome.OK]
    assert seen == [(Outcome.MISSING, 1, 4096)]
    assert load(slab, [2]) == [(Outcome.OK, "", 2)]
    slab.close()


@pytest.mark.fault("B128")
def test_calls_that_move_less_than_they_were_asked_for_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel does above 2 GiB."""

    def at_most(move: Callable[[int, list[memoryview], int], int]) -> Callable[[int, list[memoryview], int], int]:
        return lambda fd, buffers, offset: move(fd, [memoryview(buffers[0])[:3000]], offset)

    slab = DiskStore(tmp_path, max_bytes=4 * MIB, direct_io="off")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", at_most(os.pwritev))
        patch.setattr(os, "preadv", at_most(os.preadv))
        assert set(store(slab, [(n, n) for n in range(8)])) == {Outcome.OK}
        assert load(slab, range(8)) == [(Outcome.OK, "", n) for n in range(8)]
    assert load(slab, range(8)) == [(Outcome.OK, "", n) for n in range(8)]
    slab.close()
