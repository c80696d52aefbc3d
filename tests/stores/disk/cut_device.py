"""A device in memory that writes down what is written, and disks as a power cut may leave them.

In: the calls of ``Device`` and ``File``; where in the log the power goes, and a seed. Out: the files at that moment:
all that was synced, any part of what was not, in any order, by sectors. Never: a file of the real disk, but for the
lane's lock.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from orlop.stores.disk.device import used_bytes

SECTOR = 512


@dataclass(frozen=True)
class Op:
    """One thing that was done: ``create``, ``write``, ``sync``, ``remove``."""

    verb: str
    path: str
    offset: int = 0
    data: bytes = b""


@dataclass
class Disk:
    """Files by path, and all that has happened to them."""

    files: dict[str, bytearray] = field(default_factory=dict)
    log: list[Op] = field(default_factory=list)


class CutFile:
    writable = True

    def __init__(self, disk: Disk, path: str) -> None:
        self.path = path
        self._disk = disk

    def read(self, buffers: Sequence[memoryview], offset: int) -> None:
        data = self._disk.files[self.path]
        for buffer in buffers:
            if offset + len(buffer) > len(data):
                raise EOFError
            buffer[:] = data[offset : offset + len(buffer)]
            offset += len(buffer)

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        data = b"".join(buffers)
        self._disk.log.append(Op("write", self.path, offset, data))
        apply(self._disk.files, self._disk.log[-1])

    def sync(self) -> None:
        self._disk.log.append(Op("sync", self.path))

    def size(self) -> int:
        return len(self._disk.files[self.path])

    def is_linked(self) -> bool:
        return self.path in self._disk.files

    def close(self) -> None:
        """Nothing to let go of."""


class CutDevice:
    """Stands in for ``Device``: ``make_device=CutDevice.on(disk)``."""

    direct = False

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    @classmethod
    def on(cls, disk: Disk) -> Callable[..., CutDevice]:
        return lambda direct, on_fall_back: cls(disk)

    def create(self, path: str, nbytes: int) -> CutFile:
        self._disk.log.append(Op("create", path, nbytes))
        apply(self._disk.files, self._disk.log[-1])
        return CutFile(self._disk, path)

    def open(self, path: str) -> CutFile:
        if path not in self._disk.files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return CutFile(self._disk, path)

    def remove(self, path: str) -> None:
        self._disk.log.append(Op("remove", path))
        apply(self._disk.files, self._disk.log[-1])

    def names(self, directory: str) -> list[str]:
        return sorted(p.rpartition("/")[2] for p in self._disk.files if p.startswith(directory + "/"))

    def used_bytes(self, path: str) -> int:
        return used_bytes(path) + sum(len(data) for p, data in self._disk.files.items() if p.startswith(path + "/"))


def apply(files: dict[str, bytearray], op: Op) -> None:
    if op.verb == "create":
        files[op.path] = bytearray(op.offset)
    elif op.verb == "remove":
        files.pop(op.path, None)
    elif op.verb == "write" and op.path in files:
        data = files[op.path]
        if len(data) < op.offset + len(op.data):
            data.extend(bytes(op.offset + len(op.data) - len(data)))
        data[op.offset : op.offset + len(op.data)] = op.data


def in_order(log: Sequence[Op], cut: int, rng: random.Random) -> Disk:
    """All before the cut, in its order; of the write at the cut a part of its sectors."""
    disk = Disk()
    for op in log[:cut]:
        apply(disk.files, op)
    if cut < len(log) and log[cut].verb == "write":
        for torn in _torn(log[cut], rng, 0.5):
            apply(disk.files, torn)
    return disk


def reordered(log: Sequence[Op], cut: int, rng: random.Random) -> Disk:
    """Files come and go in order; of the writes since a file's last sync any part is there, sector by sector."""
    synced = {op.path: i for i, op in enumerate(log[:cut]) if op.verb == "sync"}
    share = rng.choice((0.1, 0.5, 0.9))
    disk = Disk()
    for i, op in enumerate(log[: cut + 1]):
        if i == cut and op.verb != "write":
            break
        if op.verb == "write" and i > synced.get(op.path, -1):
            for torn in _torn(op, rng, share):
                apply(disk.files, torn)
        else:
            apply(disk.files, op)
    return disk


def _torn(op: Op, rng: random.Random, share: float) -> list[Op]:
    """Whole, gone, or some of its sectors."""
    fate = rng.random()
    if fate < share / 2:
        return [op]
    if fate < 0.5:
        return []
    parts, at = [], op.offset
    while at < op.offset + len(op.data):
        end = min(op.offset + len(op.data), (at // SECTOR + 1) * SECTOR)
        if rng.random() < share:
            parts.append(Op("write", op.path, at, op.data[at - op.offset : end - op.offset]))
        at = end
    return parts
