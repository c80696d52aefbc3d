"""What tools see of a slab, beside engines and without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from chunks import chunk, key_of, load, store

from orlop.cli.stored import Stored, open_folder
from orlop.core import Outcome
from orlop.stores.disk.folder import DiskFolder
from orlop.stores.disk.store import DiskStore

MIB = 1 << 20


def open_store(path: Path, namespace: bytes = bytes(16)) -> DiskStore:
    return DiskStore(path, max_bytes=4 * MIB, direct_io="off", namespace=namespace)


def test_a_folder_shows_all_lanes_and_reads_their_chunks(tmp_path: Path) -> None:
    one, two = open_store(tmp_path), open_store(tmp_path)
    store(one, [(n, n) for n in range(10)])
    store(two, [(n, n) for n in range(10, 15)])
    folder = open_folder(tmp_path)
    assert isinstance(folder, DiskFolder)
    assert {found.key for found in folder.scan()} == {key_of(n) for n in range(15)}
    assert folder.engines() == 2
    assert folder.read(key_of(12)) == b"".join(map(bytes, chunk(12, 12)))
    with pytest.raises(FileNotFoundError):
        folder.read(key_of(99))
    one.close()
    two.close()
    assert folder.engines() == 0


def test_what_has_gone_meanwhile_is_gone_and_not_damaged(tmp_path: Path) -> None:
    slab = open_store(tmp_path)
    store(slab, [(n, n) for n in range(10)])
    stored = Stored(open_folder(tmp_path))
    slab.delete([key_of(3)])
    assert stored.verdict(key_of(3)) == "gone"
    slab.close()


def test_a_damaged_chunk_is_found_and_removed_where_no_engine_has_the_lane(tmp_path: Path) -> None:
    slab = open_store(tmp_path)
    store(slab, [(n, n) for n in range(10)])
    at = slab.path_of(key_of(3))
    assert at is not None
    with open(at[0], "r+b") as file:
        file.seek(at[1] + 100)
        file.write(b"\xff" * 10)
    stored = Stored(open_folder(tmp_path))
    verdicts = [stored.verdict(key_of(n)) for n in range(10)]
    assert [n for n, verdict in enumerate(verdicts) if verdict is not None] == [3]
    with pytest.raises(OSError, match="an engine has lane 0"):
        stored.folder.remove(key_of(3))
    slab.close()
    assert stored.folder.remove(key_of(3))
    assert not stored.folder.remove(key_of(3))
    slab = open_store(tmp_path)
    assert [outcome for outcome, _, _ in load(slab, range(5))] == [Outcome.OK] * 3 + [Outcome.MISSING, Outcome.OK]
    slab.close()


def test_collecting_takes_what_holds_nothing_and_leaves_engines_alone(tmp_path: Path) -> None:
    idle, busy = open_store(tmp_path), open_store(tmp_path)
    for slab in (idle, busy):
        store(slab, [(n, n) for n in range(10)])
        slab.delete([key_of(n) for n in range(10)])
    idle.close()
    folder = DiskFolder(tmp_path)
    (tmp_path / "0" / "00000099.cells").write_bytes(bytes(100_000))
    assert folder.collect() > 500_000
    assert os.listdir(tmp_path / "0") == ["lane"]
    assert len(os.listdir(tmp_path / "1")) == 3
    assert store(busy, [(1, 1)]) == [Outcome.OK]
    busy.close()
