"""Chunks with real envelopes, for tests that judge what comes back.

In: numbers and versions. Out: keys, headers, payloads, and the verdict on what was read. Never: a store of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache

from orlop.core import NO_SALT, PAGE_BYTES, Namespace, Outcome, pack_key
from orlop.errors import EnvelopeError
from orlop.testing.stores import buffer
from orlop.tiering import envelope
from orlop.tiering.base import ChunkStore

NAMESPACE = Namespace(b"N" * 16, bytes(16))
OTHER_NAMESPACE = Namespace(b"O" * 16, bytes(16))
OLD_GENERATION = Namespace(b"N" * 16, b"g" * 16)
PAYLOAD_BYTES = PAGE_BYTES


def packed(number: int) -> bytes:
    return pack_key(number.to_bytes(32, "big"), 0)


def key_of(number: int, namespace: Namespace = NAMESPACE) -> bytes:
    return namespace.digest + packed(number)


def payload_of(number: int, version: int, nbytes: int = PAYLOAD_BYTES) -> bytes:
    return (number.to_bytes(8, "little") + version.to_bytes(8, "little")) * (nbytes // 16)


def chunk(
    number: int, version: int, nbytes: int = PAYLOAD_BYTES, namespace: Namespace = NAMESPACE
) -> tuple[memoryview, memoryview]:
    """Header and payload."""
    header, view = buffer(envelope.HEADER_BYTES), buffer(nbytes)
    view[:] = payload_of(number, version, nbytes)
    envelope.build(
        header,
        namespace=namespace,
        key=packed(number),
        salt=NO_SALT,
        payload_bytes=nbytes,
        part_checksums=[envelope.part_checksum(view)],
    )
    return header, view


def store(into: ChunkStore, chunks: Sequence[tuple[int, int]], nbytes: int = PAYLOAD_BYTES) -> list[Outcome]:
    """Write ``(number, version)``s in one call."""
    made = [chunk(number, version, nbytes) for number, version in chunks]
    keys = [key_of(number) for number, _ in chunks]
    return list(into.write(keys, [header for header, _ in made], [view for _, view in made]))


def load(
    out_of: ChunkStore, numbers: Sequence[int], nbytes: int = PAYLOAD_BYTES
) -> list[tuple[Outcome, str, int | None]]:
    """Per number its outcome as the I/O process would report it, why it does not verify, and its version.

    What verifies and is not what any version of this number is, fails the test at once.
    """
    headers, views = _buffers(len(numbers), nbytes, threading.get_ident())
    outcomes = out_of.read_into([key_of(number) for number in numbers], headers, views)
    return [_judge(*answer, nbytes) for answer in zip(numbers, outcomes, headers, views, strict=True)]


@cache
def _buffers(count: int, nbytes: int, thread: int) -> tuple[list[memoryview], list[memoryview]]:
    """Made once per thread: thousands of reads fill the same ones."""
    whole = buffer(count * (envelope.HEADER_BYTES + nbytes))
    starts = range(0, len(whole), envelope.HEADER_BYTES + nbytes)
    headers = [whole[start : start + envelope.HEADER_BYTES] for start in starts]
    return headers, [whole[start + envelope.HEADER_BYTES :][:nbytes] for start in starts]


def _judge(
    number: int, outcome: Outcome, header: memoryview, view: memoryview, nbytes: int
) -> tuple[Outcome, str, int | None]:
    if outcome is not Outcome.OK:
        return outcome, "", None
    try:
        envelope.verify(
            header, view, namespace=NAMESPACE, key=packed(number), payload_bytes=nbytes, parts=[(0, nbytes)]
        )
    except EnvelopeError as error:
        return Outcome.CORRUPT, str(error.reason), None
    version = int.from_bytes(view[8:16], "little")
    assert view == payload_of(number, version, nbytes), f"wrong bytes under key {number}"
    return outcome, "", version
