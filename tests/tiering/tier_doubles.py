"""Stores that are cranked by hand, and a small rig around a runner.

In: what a test wants to go wrong. Out: ChunkStores for both modes, jobs with real bytes, reports without polling.
Never: a sleep.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orlop.core import Namespace, Outcome, RegionLayout, ReqContext, TierAnswer, TierJob, TierResult, TransferKind
from orlop.host.region import HostRegion
from orlop.tiering.base import ChunkStore, StoredChunk
from orlop.tiering.envelope import part_checksum
from orlop.tiering.io_messages import StoreSpec
from orlop.tiering.runner import RunnerOptions, TierRunner

PATIENCE_S = 60.0
"""How long a test waits for what must come before it fails."""

LAYOUT = RegionLayout(slots=256, blocks_per_chunk=2, page_bytes=((1000, 500), (3000, 700)))
NAMESPACE = Namespace(b"N" * 16)
CONTEXT = ReqContext(life=1, req_id="r")


class MemoryStore(ChunkStore):
    """A dictionary. ``before`` is called with each verb's name and keys, before it does anything."""

    def __init__(self) -> None:
        self.data: dict[bytes, tuple[bytes, bytes]] = {}
        self.calls: list[tuple[str, int]] = []
        self.deleted: list[bytes] = []
        self.touched: list[bytes] = []
        self.closed = False

    def before(self, verb: str, keys: Sequence[bytes]) -> None:
        """To be replaced by a test."""

    def _enter(self, verb: str, keys: Sequence[bytes]) -> None:
        self.calls.append((verb, len(keys)))
        self.before(verb, keys)

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        self._enter("contains", keys)
        return [key in self.data for key in keys]

    def read_into(
        self, keys: Sequence[bytes], headers: Sequence[memoryview], views: Sequence[memoryview]
    ) -> Sequence[Outcome]:
        self._enter("read_into", keys)
        return [self._read(*each) for each in zip(keys, headers, views, strict=True)]

    def _read(self, key: bytes, header: memoryview, view: memoryview) -> Outcome:
        if key not in self.data:
            return Outcome.MISSING
        head, payload = self.data[key]
        if len(payload) != len(view):
            return Outcome.CORRUPT
        header[:] = head
        view[:] = payload
        return Outcome.OK

    def write(
        self, keys: Sequence[bytes], headers: Sequence[memoryview], views: Sequence[memoryview]
    ) -> Sequence[Outcome]:
        self._enter("write", keys)
        for key, header, view in zip(keys, headers, views, strict=True):
            self.data[key] = (bytes(header), bytes(view))
        return [Outcome.OK] * len(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        self._enter("delete", keys)
        self.deleted += keys
        return sum(self.data.pop(key, None) is not None for key in keys)

    def scan(self) -> Iterator[StoredChunk]:
        for key, (_, payload) in list(self.data.items()):
            yield StoredChunk(key, len(payload), 0.0)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._enter("touch", keys)
        self.touched += keys

    def stats(self) -> dict[str, float]:
        return {"entries": len(self.data)}

    def close(self) -> None:
        self.closed = True


class DirectoryStore(MemoryStore):
    """Files in a directory that outlives the process, and two named pipes per verb to stop it there.

    Where ``<path>/<verb>.gate`` is, the verb says so in ``<verb>.arrived`` and waits until ``<verb>.gate`` is
    written to: a test knows that the process is in the middle, with no guess about time.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = Path(path)

    def before(self, verb: str, keys: Sequence[bytes]) -> None:
        gate = self._path / f"{verb}.gate"
        if gate.exists():
            (self._path / f"{verb}.arrived").write_bytes(b"!")
            gate.read_bytes()

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        self._enter("contains", keys)
        return [(self._path / key.hex()).exists() for key in keys]

    def _read(self, key: bytes, header: memoryview, view: memoryview) -> Outcome:
        try:
            found = (self._path / key.hex()).read_bytes()
        except FileNotFoundError:
            return Outcome.MISSING
        header[:] = found[: len(header)]
        view[:] = found[len(header) :]
        return Outcome.OK

    def write(
        self, keys: Sequence[bytes], headers: Sequence[memoryview], views: Sequence[memoryview]
    ) -> Sequence[Outcome]:
        self._enter("write", keys)
        for key, header, view in zip(keys, headers, views, strict=True):
            (self._path / key.hex()).write_bytes(bytes(header) + bytes(view))
        return [Outcome.OK] * len(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        self._enter("delete", keys)
        for key in keys:
            (self._path / key.hex()).unlink(missing_ok=True)
        return len(keys)

    def scan(self) -> Iterator[StoredChunk]:
        for entry in self._path.iterdir():
            if not entry.suffix:
                yield StoredChunk(bytes.fromhex(entry.name), entry.stat().st_size, 0.0)


class CountingStore(DirectoryStore):
    """Knows what it holds once a file ``yes.counted`` lies in its directory."""

    def stats(self) -> dict[str, float]:
        return {"counted": float((self._path / "yes.counted").exists())}


class ChattyStore(DirectoryStore):
    """Says more in each write than a pipe holds."""

    def write(
        self, keys: Sequence[bytes], headers: Sequence[memoryview], views: Sequence[memoryview]
    ) -> Sequence[Outcome]:
        outcomes = super().write(keys, headers, views)
        logging.getLogger(__name__).warning("%s", "x" * (1 << 20))
        return outcomes


def make_gate(path: Path, verb: str) -> None:
    """Stop the next ``verb`` of a DirectoryStore."""
    os.mkfifo(path / f"{verb}.arrived")
    os.mkfifo(path / f"{verb}.gate")


def wait_arrived(path: Path, verb: str) -> None:
    """Until the verb stands at its gate."""
    assert (path / f"{verb}.arrived").read_bytes() == b"!"


def open_gate(path: Path, verb: str) -> None:
    """Let the verb that stands there go on, and all later ones pass."""
    gate = path / f"{verb}.gate"
    fd = os.open(gate, os.O_WRONLY)
    gate.unlink()
    os.close(fd)


_registered: dict[str, ChunkStore | Exception] = {}


def registered(name: str) -> ChunkStore:
    """The factory of thread mode: hands out what a test has registered, or raises it."""
    found = _registered[name]
    if isinstance(found, Exception):
        raise found
    return found


def register(name: str, store: ChunkStore | Exception) -> StoreSpec:
    _registered[name] = store
    return StoreSpec("tier_doubles:registered", {"name": name})


class NosyStore(MemoryStore):
    """Refuses to be opened where something of the caller has come along."""

    def __init__(self) -> None:
        super().__init__()
        main = Path(str(sys.modules["__main__"].__file__)).name
        if main != "io_process.py":
            raise OSError(f"found {main} as the main module, expected io_process.py")
        if "__mp_main__" in sys.modules:
            raise OSError("found the caller's main module imported again")
        if sys.stdin.read():
            raise OSError("found something on stdin, expected nothing")


def die() -> ChunkStore:
    """A factory that ends its process."""
    os._exit(3)


class Rig:
    """A region, a runner over a store, and jobs with bytes in them. ``now`` is the runner's clock.

    ``quiet``: nobody is told when something has come, as in an engine.
    """

    def __init__(self, spec: StoreSpec, *, io_process: bool = False, quiet: bool = False, **options: Any) -> None:
        self.now = 100.0
        self.region = HostRegion.create(LAYOUT, prefault=False)
        self._came = threading.Semaphore(0)
        self.runner = TierRunner(
            RunnerOptions(name="1:double", **options),
            self.region,
            spec,
            io_process=io_process,
            clock=lambda: self.now,
            notify=None if quiet else self._came.release,
        )
        self._ids = iter(range(1, 1 << 30))
        self._rng = np.random.default_rng(7)

    def close(self) -> None:
        self.runner.shutdown(PATIENCE_S)
        self.region.close()

    def job(self, kind: TransferKind, keys: Sequence[bytes], first_slot: int = 0, group: int = 0) -> TierJob:
        slots = np.arange(first_slot, first_slot + len(keys), dtype=np.int64)
        return TierJob(next(self._ids), kind, group, tuple(keys), slots, LAYOUT.payload_bytes(group), NAMESPACE)

    def fill(self, slots: Sequence[int], group: int = 0) -> list[bytes]:
        """Random bytes in the parts of the slots, with their checksums as the worker writes them; the payloads."""
        for slot in slots:
            self.region.slots[slot] = 0
            for rank in range(LAYOUT.ranks):
                start, n = LAYOUT.part_offset(rank, group), LAYOUT.part_bytes(rank, group)
                self.region.slots[slot, start : start + n] = self._rng.integers(0, 256, n, dtype=np.uint8)
                self.region.checksums[slot, rank] = part_checksum(self.region.slots[slot, start : start + n])
        return [self.payload(slot, group) for slot in slots]

    def payload(self, slot: int, group: int = 0) -> bytes:
        return self.region.slots[slot, : LAYOUT.payload_bytes(group)].tobytes()

    def store(self, keys: Sequence[bytes], first_slot: int = 0, group: int = 0) -> TierJob:
        """Fill slots and submit them."""
        self.fill(range(first_slot, first_slot + len(keys)), group)
        job = self.job(TransferKind.STORE, keys, first_slot, group)
        self.runner.submit_store(job, now=self.now)
        return job

    def load(self, keys: Sequence[bytes], first_slot: int = 128, group: int = 0) -> TierJob:
        job = self.job(TransferKind.LOAD, keys, first_slot, group)
        self.runner.submit_load(job, now=self.now)
        return job

    def ask(self, keys: Sequence[bytes], **options: Any) -> tuple[int, TierAnswer | None]:
        number = next(self._ids)
        answer = self.runner.lookup_prefix(number, keys, CONTEXT, namespace=NAMESPACE, now=self.now, **options)
        return number, answer

    def found(self, keys: Sequence[bytes], **options: Any) -> bytes:
        """The answer to a lookup, whenever it comes."""
        number, answer = self.ask(keys, **options)
        if answer is None:
            (answer,) = self.answers(1)
        assert answer.lookup_id == number
        return answer.found

    def results(self, count: int = 1) -> list[TierResult]:
        """The next ``count`` reports, in the order of job ids; fails where more come."""
        got: list[TierResult] = []
        while True:
            got += self.runner.get_finished_jobs()
            if len(got) >= count:
                break
            assert self._came.acquire(timeout=PATIENCE_S), f"{len(got)} of {count} reports came"
        assert len(got) == count
        return sorted(got, key=lambda result: result.job_id)

    def answers(self, count: int = 1) -> list[TierAnswer]:
        got: list[TierAnswer] = []
        while len(got) < count:
            got += self.runner.get_answers()
            if len(got) < count:
                assert self._came.acquire(timeout=PATIENCE_S), f"{len(got)} of {count} answers came"
        return got

    def released(self) -> list[int]:
        got: list[int] = []
        while not got:
            got += self.runner.get_released_jobs()
            if not got:
                assert self._came.acquire(timeout=PATIENCE_S), "nothing was released"
        return got


def keys(count: int, prefix: bytes = b"k") -> list[bytes]:
    """Packed OffloadKeys of group 0."""
    return [prefix + i.to_bytes(31, "big") + bytes(4) for i in range(count)]
