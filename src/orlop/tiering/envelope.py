"""The header of a chunk at rest, one for all stores; its bytes are written down in docs/internals/envelope.md.

In: a namespace, a key, part checksums, and memoryviews of header and payload. Out: a built header, or the
verdict on one. Never: a file, a copy of the payload, a look at what the payload means.

All functions may be called from any thread; hashing of parts larger than 64 KiB releases the GIL from xxhash 4.1 on.
"""

from __future__ import annotations

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
    return xxhash.xxh3_64_intdigest(view.data if isinstance(view, np.ndarray) else view)


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
    _check_fields(header, namespace, key, salt, part_checksums)
    _FIXED.pack_into(
        header,
        0,
        MAGIC,
        VERSION,
        HEADER_BYTES,
        namespace.digest,
        namespace.generation,
        salt,
        payload_bytes,
        len(part_checksums),
        len(key),
        0,
        key,
    )
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
    parts: Sequence[tuple[int, int]],
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


def _check_fields(
    header: memoryview, namespace: Namespace, key: bytes, salt: bytes, part_checksums: Sequence[int]
) -> None:
    if len(header) != HEADER_BYTES:
        raise ValueError(f"found room for {len(header)} bytes, expected a header of {HEADER_BYTES}")
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"found a key of {len(key)} bytes, expected 1 to {MAX_KEY_BYTES}")
    if not 1 <= len(part_checksums) <= MAX_PARTS:
        raise ValueError(f"found {len(part_checksums)} parts, expected 1 to {MAX_PARTS}")
    for name, digest in (("namespace", namespace.digest), ("generation", namespace.generation), ("salt", salt)):
        if len(digest) != DIGEST_BYTES:
            raise ValueError(f"found a {name} of {len(digest)} bytes, expected {DIGEST_BYTES}")


def _fail(reason: Reason, message: str) -> NoReturn:
    raise EnvelopeError(f"{reason}: {message}", reason)
