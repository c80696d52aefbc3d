"""Damages of every kind, from one seed each: a miss with a counter, never wrong bytes, and no neighbour harmed.

``make damage`` does ten thousand of them.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from chunks import NAMESPACE, OLD_GENERATION, OTHER_NAMESPACE, chunk, key_of, load, store

from orlop.core import Outcome
from orlop.stores.disk import format as fmt
from orlop.stores.disk.device import Device
from orlop.stores.disk.format import RECORD_BYTES, RECORDS_OFFSET, SegmentShape
from orlop.stores.disk.recovery import read_records, segment_numbers, segment_paths
from orlop.stores.disk.store import DiskStore

DAMAGES = int(os.environ.get("DISK_DAMAGES", "500"))
MIB = 1 << 20
CHUNKS = 40
CELL_BYTES = 8192


@dataclass(frozen=True)
class Seen:
    """A pristine slab: where each chunk lies."""

    path: Path
    shapes: dict[int, SegmentShape]
    places: dict[int, tuple[int, int]]
    """By number: segment and cell."""

    def numbers_in(self, segment: int, first_cell: int = 0) -> set[int]:
        return {n for n, (s, c) in self.places.items() if s == segment and c >= first_cell}


@dataclass(frozen=True)
class Harm:
    """Which chunks a damage may cost, and the counters one of which must have heard of it (none: nobody need)."""

    lost: set[int]
    counters: tuple[str, ...]


def open_store(path: Path) -> DiskStore:
    return DiskStore(path, max_bytes=MIB, direct_io="off", keep_s=1e9, namespace=NAMESPACE.digest)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    path = tmp_path_factory.mktemp("pristine") / "tier"
    slab = open_store(path)
    for number in range(CHUNKS):
        assert store(slab, [(number, number)]) == [Outcome.OK]
    slab.close()
    shapes, places = {}, {}
    device = Device(False, lambda error: None)
    for number in segment_numbers(os.listdir(path / "0")):
        index = device.open(segment_paths(str(path / "0"), number)[1])
        page = memoryview(bytearray(4096))
        index.read([page], 0)
        shape, _ = fmt.unpack_segment(page)
        assert shape is not None
        shapes[number] = shape
        for first, records, kept in read_records(index, shape, []):
            for i in kept.tolist():
                places[int.from_bytes(fmt.key_of(records[i])[16:48], "big")] = (number, first + i)
        index.close()
    assert len(places) == CHUNKS
    assert len(shapes) > 2
    return Seen(path, shapes, places)


# --- damages ------------------------------------------------------------------------------------------------


def patch(path: str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def fetch(path: str, offset: int, nbytes: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(nbytes)


def flip(path: str, offset: int, rng: random.Random) -> None:
    patch(path, offset, bytes([fetch(path, offset, 1)[0] ^ (1 << rng.randrange(8))]))


def payload_bit(lane: str, seen: Seen, rng: random.Random) -> Harm:
    number = rng.randrange(CHUNKS)
    segment, cell = seen.places[number]
    flip(segment_paths(lane, segment)[0], cell * CELL_BYTES + 4096 + rng.randrange(4096), rng)
    return Harm({number}, ("payload_checksum",))


def header_bit(lane: str, seen: Seen, rng: random.Random) -> Harm:
    number = rng.randrange(CHUNKS)
    segment, cell = seen.places[number]
    flip(segment_paths(lane, segment)[0], cell * CELL_BYTES + rng.randrange(4096), rng)
    return Harm({number}, ("header_checksum", "bad_magic", "version"))


def record_bit(lane: str, seen: Seen, rng: random.Random) -> Harm:
    number = rng.randrange(CHUNKS)
    segment, cell = seen.places[number]
    flip(segment_paths(lane, segment)[1], RECORDS_OFFSET + cell * RECORD_BYTES + rng.randrange(RECORD_BYTES), rng)
    return Harm({number}, ("damaged_record_checksum",))


def record_noise(lane: str, seen: Seen, rng: random.Random) -> Harm:
    """A sector of the index: four records."""
    segment = rng.choice(list(seen.shapes))
    first = rng.randrange(seen.shapes[segment].cells // 4) * 4
    patch(segment_paths(lane, segment)[1], RECORDS_OFFSET + first * RECORD_BYTES, rng.randbytes(512))
    lost = {n for n, (s, c) in seen.places.items() if s == segment and first <= c < first + 4}
    return Harm(lost, ("damaged_record_checksum",))


def superblock_bit(lane: str, seen: Seen, rng: random.Random) -> Harm:
    segment = rng.choice(list(seen.shapes))
    flip(segment_paths(lane, segment)[1], rng.choice((0, 2048)) + rng.randrange(128), rng)
    return Harm(set(), ("damaged_superblock",))


def superblock_gone(lane: str, seen: Seen, rng: random.Random) -> Harm:
    segment = rng.choice(list(seen.shapes))
    patch(segment_paths(lane, segment)[1], 0, rng.randbytes(4096))
    return Harm(seen.numbers_in(segment), ("damaged_segment",))


def lane_bit(lane: str, seen: Seen, rng: random.Random) -> Harm:
    flip(f"{lane}/lane", rng.choice((0, 2048)) + rng.randrange(128), rng)
    return Harm(set(), ("damaged_superblock",))


def recency_noise(lane: str, seen: Seen, rng: random.Random) -> Harm:
    segment = rng.choice(list(seen.shapes))
    patch(segment_paths(lane, segment)[1], seen.shapes[segment].recency_offset, rng.randbytes(64))
    return Harm(set(), ())


def cells_cut(lane: str, seen: Seen, rng: random.Random) -> Harm:
    segment = rng.choice(list(seen.shapes))
    keep = rng.randrange(seen.shapes[segment].cells_bytes)
    os.truncate(segment_paths(lane, segment)[0], keep)
    return Harm(seen.numbers_in(segment, keep // CELL_BYTES), ("damaged_cells_short",))


def index_cut(lane: str, seen: Seen, rng: random.Random) -> Harm:
    segment = rng.choice(list(seen.shapes))
    keep = rng.randrange(seen.shapes[segment].recency_offset)
    os.truncate(segment_paths(lane, segment)[1], keep)
    lost = seen.numbers_in(segment, max(0, keep - RECORDS_OFFSET) // RECORD_BYTES)
    return Harm(lost, ("damaged_index_short", "damaged_segment"))


def cells_swapped(lane: str, seen: Seen, rng: random.Random) -> Harm:
    one, two = rng.sample(range(CHUNKS), 2)
    spots = [(segment_paths(lane, s)[0], c * CELL_BYTES) for s, c in (seen.places[one], seen.places[two])]
    contents = [fetch(*spot, CELL_BYTES) for spot in spots]
    for (path, offset), content in zip(spots, reversed(contents), strict=True):
        patch(path, offset, content)
    return Harm({one, two}, ("foreign_key",))


def records_swapped(lane: str, seen: Seen, rng: random.Random) -> Harm:
    one, two = rng.sample(range(CHUNKS), 2)
    spots = [
        (segment_paths(lane, s)[1], RECORDS_OFFSET + c * RECORD_BYTES) for s, c in (seen.places[one], seen.places[two])
    ]
    contents = [fetch(*spot, RECORD_BYTES) for spot in spots]
    for (path, offset), content in zip(spots, reversed(contents), strict=True):
        patch(path, offset, content)
    return Harm({one, two}, ("damaged_record_place",))


def of_another_namespace(lane: str, seen: Seen, rng: random.Random) -> Harm:
    number = rng.randrange(CHUNKS)
    segment, cell = seen.places[number]
    header, view = chunk(number, number, namespace=OTHER_NAMESPACE)
    patch(segment_paths(lane, segment)[0], cell * CELL_BYTES, bytes(header) + bytes(view))
    return Harm({number}, ("foreign_namespace",))


def of_an_old_generation(lane: str, seen: Seen, rng: random.Random) -> Harm:
    number = rng.randrange(CHUNKS)
    segment, cell = seen.places[number]
    header, view = chunk(number, number, namespace=OLD_GENERATION)
    patch(segment_paths(lane, segment)[0], cell * CELL_BYTES, bytes(header) + bytes(view))
    return Harm({number}, ("foreign_generation",))


def file_gone(lane: str, seen: Seen, rng: random.Random) -> Harm:
    segment = rng.choice(list(seen.shapes))
    os.unlink(rng.choice(segment_paths(lane, segment)))
    return Harm(seen.numbers_in(segment), ("damaged_segment",))


def indexes_swapped(lane: str, seen: Seen, rng: random.Random) -> Harm:
    one, two = rng.sample(list(seen.shapes), 2)
    first, second = segment_paths(lane, one)[1], segment_paths(lane, two)[1]
    os.rename(first, f"{lane}/aside")
    os.rename(second, first)
    os.rename(f"{lane}/aside", second)
    return Harm(seen.numbers_in(one) | seen.numbers_in(two), ("damaged_segment",))


def cells_files_swapped(lane: str, seen: Seen, rng: random.Random) -> Harm:
    one, two = rng.sample(list(seen.shapes), 2)
    first, second = segment_paths(lane, one)[0], segment_paths(lane, two)[0]
    os.rename(first, f"{lane}/aside")
    os.rename(second, first)
    os.rename(f"{lane}/aside", second)
    return Harm(seen.numbers_in(one) | seen.numbers_in(two), ("foreign_key", "bad_magic"))


KINDS: tuple[Callable[[str, Seen, random.Random], Harm], ...] = (
    payload_bit,
    header_bit,
    record_bit,
    record_noise,
    superblock_bit,
    superblock_gone,
    lane_bit,
    recency_noise,
    cells_cut,
    index_cut,
    cells_swapped,
    records_swapped,
    of_another_namespace,
    of_an_old_generation,
    file_gone,
    indexes_swapped,
    cells_files_swapped,
)


@pytest.fixture
def copies(pristine: Seen, tmp_path: Path) -> Callable[[], Path]:
    def copy() -> Path:
        shutil.rmtree(tmp_path / "tier", ignore_errors=True)
        shutil.copytree(pristine.path, tmp_path / "tier")
        return tmp_path / "tier"

    return copy


@pytest.mark.fault("B109")
@pytest.mark.fault("B120")
@pytest.mark.fault("B022")
@pytest.mark.fault("B115")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_damage_costs_what_it_hits_and_says_so(
    copies: Callable[[], Path], pristine: Seen, kind: Callable[[str, Seen, random.Random], Harm]
) -> None:
    for seed in range(-(-DAMAGES // len(KINDS))):
        path = copies()
        harm = kind(str(path / "0"), pristine, random.Random(seed))
        slab = open_store(path)
        answers = load(slab, range(CHUNKS))
        reasons = {reason for _, reason, _ in answers if reason}
        heard = reasons | {name for name, count in slab.stats().items() if name.startswith("damaged") and count}
        for number, (outcome, reason, version) in enumerate(answers):
            if number in harm.lost:
                assert version is None, f"seed {seed}: key {number} was damaged and came back"
            else:
                assert (outcome, version) == (Outcome.OK, number), f"seed {seed}: a neighbour of the damage is {reason}"
        if harm.counters and (harm.lost or kind not in (record_noise, cells_cut, index_cut)):
            assert heard & set(harm.counters), f"seed {seed}: found {heard}, expected one of {harm.counters}"
        # What does not verify is removed by whoever read it, and the next store brings it back.
        slab.delete([key_of(n) for n, (outcome, _, _) in enumerate(answers) if outcome is Outcome.CORRUPT])
        assert store(slab, [(n, 1000 + n) for n in sorted(harm.lost)]) == [Outcome.OK] * len(harm.lost)
        assert all(version is not None for _, _, version in load(slab, range(CHUNKS)))
        slab.check()
        slab.close()


def test_a_version_of_tomorrow_is_left_alone(copies: Callable[[], Path], pristine: Seen) -> None:
    path = copies()
    segment = min(pristine.shapes)
    index_path = segment_paths(str(path / "0"), segment)[1]
    page = bytearray(fetch(index_path, 0, 4096))
    for offset in (0, 2048):
        page[offset + 16] = fmt.VERSION + 1
        page[offset : offset + 8] = fmt.checksum(bytes(page[offset + 8 : offset + 128])).to_bytes(8, "little")
    patch(index_path, 0, bytes(page))
    before = fetch(index_path, 0, 1 << 20)
    slab = open_store(path)
    lost = pristine.numbers_in(segment)
    answers = load(slab, range(CHUNKS))
    assert {n for n, (_, _, version) in enumerate(answers) if version is None} == lost
    assert store(slab, [(n, n) for n in sorted(lost)]) == [Outcome.OK] * len(lost)
    slab.check()
    slab.close()
    assert fetch(index_path, 0, 1 << 20) == before
