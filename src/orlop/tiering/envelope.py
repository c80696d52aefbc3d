"""The header of a chunk at rest, one for all stores; its bytes are written down in docs/internals/envelope.md.

In: a namespace, a key, part checksums, and memoryviews of header and payload. Out: a built header, or the
verdict on one; the same for many chunks at once (``NewHeaders``, ``ReadHeaders``). Never: a file, a copy of the
payload, a look at what the payload means.

All functions may be called from any thread; hashing of parts larger than 64 KiB releases the GIL from xxhash 4.1 on.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import xxhash

from orlop.core import DIGEST_BYTES, PAGE_BYTES, Namespace
from orlop.errors import EnvelopeError

HEADER_BYTES = PAGE_BYTES
"""Length of a header: one page, so that header and payload go by one direct I/O call."""

MAGIC = b"\x89ORLOP\r\n"
VERSION = 1
MAX_KEY_BYTES = 128

_FIXED = struct.Struct("<8sII16s16s16sQHHI128s")
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_OFFSET = HEADER_BYTES - _CHECKSUM.size
_ZEROS = memoryview(bytes(HEADER_BYTES))
_SALT = slice(48, 64)
_KEY = slice(_FIXED.size - 128, _FIXED.size)

digest = xxhash.xxh3_64_intdigest
"""XXH3-64 of a contiguous buffer."""

Pages = npt.NDArray[np.uint8]
Parts = Sequence[tuple[int, int]]
"""``(offset, nbytes)`` of each rank's part in a payload."""

MAX_PARTS = (_CHECKSUM_OFFSET - _FIXED.size) // _CHECKSUM.size
"""The most ranks whose parts one header can describe."""


class Reason(StrEnum):
    """Why bytes at rest do not verify, in the order in which it is judged."""

    BAD_MAGIC = "bad_magic"
    VERSION = "version"
    """Written by another version of this program: a miss, but not to be removed."""
    HEADER_CHECKSUM = "header_checksum"
    FOREIGN_NAMESPACE = "foreign_namespace"
    FOREIGN_GENERATION = "foreign_generation"
    FOREIGN_KEY = "foreign_key"
    LENGTH = "length"
    PAYLOAD_CHECKSUM = "payload_checksum"


class Envelope(NamedTuple):
    """What a header says of its chunk. ``parts`` are the XXH3-64 checksums of the ranks' parts."""

    version: int
    namespace: bytes
    generation: bytes
    salt: bytes
    key: bytes
    payload_bytes: int
    parts: tuple[int, ...]


def part_checksum(view: memoryview | npt.NDArray[Any]) -> int:
    """XXH3-64 of one rank's part, a contiguous buffer of ``RegionLayout.part_bytes`` bytes without padding."""
    return digest(view.data if isinstance(view, np.ndarray) else view)


def part_checksums(payloads: Sequence[memoryview], parts: Parts) -> list[list[int]]:
    """The ``part_checksum`` of every part of every payload. Every byte of them is read."""
    if len(parts) == 1:
        [(offset, nbytes)] = parts
        if offset == 0 and all(len(payload) == nbytes for payload in payloads):
            return [[digest(payload)] for payload in payloads]
    return [[digest(payload[offset : offset + nbytes]) for offset, nbytes in parts] for payload in payloads]


def salt_digest(namespace_digest: bytes, salt: str) -> bytes:
    """16 bytes that stand for a cache salt in one namespace. A request without a salt has ``core.NO_SALT``."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), key=namespace_digest, digest_size=DIGEST_BYTES).digest()


def build(
    header: memoryview,
    *,
    namespace: Namespace,
    key: bytes,
    salt: bytes,
    payload_bytes: int,
    part_checksums: Sequence[int],
) -> None:
    """Write a header into ``header`` (``HEADER_BYTES`` writable bytes).

    ``key`` is the packed OffloadKey, ``salt`` a 16-byte digest, ``part_checksums[rank]`` the ``part_checksum``
    of a rank's part. ``ValueError`` where a field does not fit.
    """
    if len(header) != HEADER_BYTES:
        raise ValueError(f"found room for {len(header)} bytes, expected a header of {HEADER_BYTES}")
    header[: _FIXED.size] = _fixed(namespace, salt, payload_bytes, len(part_checksums), len(key), key)
    struct.pack_into(f"<{len(part_checksums)}Q", header, _FIXED.size, *part_checksums)
    rest = slice(_FIXED.size + _CHECKSUM.size * len(part_checksums), _CHECKSUM_OFFSET)
    header[rest] = _ZEROS[rest]
    _CHECKSUM.pack_into(header, _CHECKSUM_OFFSET, part_checksum(header[:_CHECKSUM_OFFSET]))


def parse(header: memoryview) -> Envelope:
    """What a header says, once it is known to be whole. ``EnvelopeError`` of the first four reasons, or ``length``."""
    if len(header) != HEADER_BYTES:
        _fail(Reason.LENGTH, f"found a header of {len(header)} bytes, expected {HEADER_BYTES}")
    magic, version, header_bytes, digest, generation, salt, payload_bytes, parts, key_bytes, _, key = (
        _FIXED.unpack_from(header)
    )
    if magic != MAGIC:
        _fail(Reason.BAD_MAGIC, f"found {magic!r} at the start, expected {MAGIC!r}")
    if version != VERSION or header_bytes != HEADER_BYTES:
        _fail(Reason.VERSION, f"found version {version} with a header of {header_bytes} bytes, expected {VERSION}")
    if part_checksum(header[:_CHECKSUM_OFFSET]) != _CHECKSUM.unpack_from(header, _CHECKSUM_OFFSET)[0]:
        _fail(Reason.HEADER_CHECKSUM, "the header does not match its own checksum")
    if parts > MAX_PARTS or key_bytes > MAX_KEY_BYTES:
        _fail(Reason.LENGTH, f"found {parts} parts and a key of {key_bytes} bytes, more than a header holds")
    checksums = struct.unpack_from(f"<{parts}Q", header, _FIXED.size)
    return Envelope(version, digest, generation, salt, key[:key_bytes], payload_bytes, checksums)


def verify(
    header: memoryview,
    payload: memoryview,
    *,
    namespace: Namespace,
    key: bytes,
    payload_bytes: int,
    parts: Parts,
) -> tuple[int, ...]:
    """The part checksums of a chunk that is what was asked for; ``EnvelopeError`` with its ``reason`` otherwise.

    ``payload`` are the bytes after the header; ``parts[rank]`` is ``(offset, nbytes)`` of a rank's part in it.
    Every byte of every part is read.
    """
    found = parse(header)
    if found.namespace != namespace.digest:
        _fail(Reason.FOREIGN_NAMESPACE, f"found namespace {found.namespace.hex()}, expected {namespace.digest.hex()}")
    if found.generation != namespace.generation:
        _fail(
            Reason.FOREIGN_GENERATION,
            f"found generation {found.generation.hex()}, expected {namespace.generation.hex()}",
        )
    if found.key != key:
        _fail(Reason.FOREIGN_KEY, f"found key {found.key.hex()}, expected {key.hex()}")
    if (found.payload_bytes, len(found.parts)) != (payload_bytes, len(parts)) or len(payload) < payload_bytes:
        _fail(
            Reason.LENGTH,
            f"found {found.payload_bytes} bytes in {len(found.parts)} parts and {len(payload)} bytes read, "
            f"expected {payload_bytes} bytes in {len(parts)} parts",
        )
    for rank, ((offset, nbytes), expected) in enumerate(zip(parts, found.parts, strict=True)):
        checksum = part_checksum(payload[offset : offset + nbytes])
        if checksum != expected:
            _fail(Reason.PAYLOAD_CHECKSUM, f"part of rank {rank}: found {checksum:016x}, expected {expected:016x}")
    return found.parts


def _fixed(namespace: Namespace, salt: bytes, payload_bytes: int, parts: int, key_bytes: int, key: bytes) -> bytes:
    """The fields before the part checksums. ``ValueError`` where one does not fit."""
    if not 1 <= key_bytes <= MAX_KEY_BYTES:
        raise ValueError(f"found a key of {key_bytes} bytes, expected 1 to {MAX_KEY_BYTES}")
    if not 1 <= parts <= MAX_PARTS:
        raise ValueError(f"found {parts} parts, expected 1 to {MAX_PARTS}")
    for name, value in (("namespace", namespace.digest), ("generation", namespace.generation), ("salt", salt)):
        if len(value) != DIGEST_BYTES:
            raise ValueError(f"found a {name} of {len(value)} bytes, expected {DIGEST_BYTES}")
    return _FIXED.pack(
        MAGIC,
        VERSION,
        HEADER_BYTES,
        namespace.digest,
        namespace.generation,
        salt,
        payload_bytes,
        parts,
        key_bytes,
        0,
        key,
    )


def _fail(reason: Reason, message: str) -> NoReturn:
    raise EnvelopeError(f"{reason}: {message}", reason)


# --- many at once ---------------------------------------------------------------------------------------


class _Pages:
    """Room for the headers of one call, aligned for direct I/O; one thread's, used again for each call."""

    def __init__(self, count: int) -> None:
        room = mmap.mmap(-1, count * HEADER_BYTES)
        whole = memoryview(room)
        self.pages = [whole[i * HEADER_BYTES : (i + 1) * HEADER_BYTES] for i in range(count)]
        self._bodies = [page[:_CHECKSUM_OFFSET] for page in self.pages]
        self._rows: Pages = np.frombuffer(room, np.uint8).reshape(count, HEADER_BYTES)
        self._seals = self._rows[:, _CHECKSUM_OFFSET:].view("<u8")[:, 0]

    def part_checksums(self, count: int, parts: int) -> npt.NDArray[np.uint64]:
        """uint64 ``[count, parts]`` over the part checksums of the first headers."""
        return self._rows[:count, _FIXED.size : _FIXED.size + _CHECKSUM.size * parts].view("<u8")


class _Fields:
    """The fields before the part checksums, for all rows of an array; written again only where they change."""

    def __init__(self, rows: Pages) -> None:
        self._rows = rows
        self._keys = rows[:, _KEY].view(f"S{MAX_KEY_BYTES}")[:, 0]
        self._same: tuple[Namespace, bytes, int, int, int] | None = None

    def set(self, keys: Sequence[bytes], namespace: Namespace, salt: bytes, payload_bytes: int, parts: int) -> None:
        """Those of one chunk per key, in the first rows. ``ValueError`` where a field does not fit."""
        lengths = set(map(len, keys))
        if len(lengths) == 1:
            same = (namespace, salt, payload_bytes, parts, lengths.pop())
            if same != self._same:
                self._same = None
                self._rows[:, : _FIXED.size] = np.frombuffer(_fixed(*same, b""), np.uint8)
                self._same = same
            self._keys[: len(keys)] = keys
        else:
            self._same = None
            for row, key in zip(self._rows, keys, strict=False):
                fields = _fixed(namespace, salt, payload_bytes, parts, len(key), key)
                row[: _FIXED.size] = np.frombuffer(fields, np.uint8)


class NewHeaders(_Pages):
    """Headers of up to ``count`` chunks that are to be written, as ``build`` makes them. Of one thread."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._fields = _Fields(self._rows)
        self._most_parts = 0

    def build(
        self,
        keys: Sequence[bytes],
        *,
        namespace: Namespace,
        salt: bytes,
        payload_bytes: int,
        part_checksums: npt.NDArray[np.uint64],
    ) -> list[memoryview]:
        """One header per key, good until the next call. ``part_checksums``: uint64 ``[keys, ranks]``."""
        count, parts = part_checksums.shape
        self._fields.set(keys, namespace, salt, payload_bytes, parts)
        if parts < self._most_parts:
            self.part_checksums(len(self.pages), self._most_parts)[:] = 0
        self._most_parts = parts
        self.part_checksums(count, parts)[:] = part_checksums
        self._seals[:count] = [digest(body) for body in self._bodies[:count]]
        return self.pages[:count]


class ReadHeaders(_Pages):
    """Headers of up to ``count`` chunks that are read into ``pages``, and a quick verdict on them. Of one thread."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._wanted: Pages = np.zeros((count, _FIXED.size), np.uint8)
        self._fields = _Fields(self._wanted)

    def unlike(
        self,
        rows: Sequence[int],
        payloads: Sequence[memoryview],
        *,
        namespace: Namespace,
        keys: Sequence[bytes],
        payload_bytes: int,
        parts: Parts,
    ) -> list[int]:
        """Which of ``rows`` are not exactly what was asked for; ``verify`` says why, or that it is all right.

        ``payloads[row]`` and ``keys[row]`` belong to ``pages[row]``; ``rows`` grow. Every byte of every part is read.
        """
        count = len(keys)
        self._fields.set(keys, namespace, bytes(DIGEST_BYTES), payload_bytes, len(parts))
        found, wanted = self._rows[:count, : _FIXED.size], self._wanted[:count]
        same = found == wanted
        same[:, _SALT] = True
        seals = self._seals[:count].tolist()
        told = self.part_checksums(count, len(parts)).tolist()
        found_seals = [digest(body) for body in self._bodies[:count]]
        seen = part_checksums([payloads[row] for row in rows], parts)
        if len(rows) == count and same.all() and seals == found_seals and told == seen:
            return []
        as_asked = same.all(axis=1).tolist()
        return [
            row
            for row, sums in zip(rows, seen, strict=True)
            if not (as_asked[row] and seals[row] == found_seals[row] and told[row] == sums)
        ]
