"""The envelope: golden bytes, and every way in which bytes at rest can be other than what was asked for."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orlop.core import FIRST_GENERATION, NO_SALT, Namespace, pack_key
from orlop.errors import EnvelopeError
from orlop.tiering import envelope
from orlop.tiering.envelope import HEADER_BYTES, MAX_PARTS, Envelope, Reason, build, parse, part_checksum, verify

NAMESPACE = Namespace(bytes(range(16)))
KEY = pack_key(bytes(range(32)), 3)
PARTS = ((0, 5000), (8192, 4096))
PAYLOAD_BYTES = 12288


def chunk(namespace: Namespace = NAMESPACE, key: bytes = KEY) -> tuple[memoryview, memoryview]:
    """A header and a payload of two parts that belong together."""
    payload = memoryview(bytearray(i * 7 % 251 for i in range(PAYLOAD_BYTES)))
    header = memoryview(bytearray(HEADER_BYTES))
    checksums = [part_checksum(payload[o : o + n]) for o, n in PARTS]
    build(header, namespace=namespace, key=key, salt=NO_SALT, payload_bytes=PAYLOAD_BYTES, part_checksums=checksums)
    return header, payload


def check(header: memoryview, payload: memoryview, **other: object) -> tuple[int, ...]:
    asked: dict[str, object] = {
        "namespace": NAMESPACE,
        "key": KEY,
        "payload_bytes": PAYLOAD_BYTES,
        "parts": PARTS,
    }
    return verify(header, payload, **{**asked, **other})  # type: ignore[arg-type]


def reason_of(header: memoryview, payload: memoryview, **other: object) -> str:
    with pytest.raises(EnvelopeError) as caught:
        check(header, payload, **other)
    return caught.value.reason


def reseal(header: memoryview) -> None:
    """Give a changed header a checksum that matches again."""
    header[4088:] = part_checksum(header[:4088]).to_bytes(8, "little")


def test_version_1_has_these_bytes() -> None:
    header = memoryview(bytearray(b"\xff" * HEADER_BYTES))
    build(
        header,
        namespace=Namespace(bytes(range(16)), bytes(range(16, 32))),
        key=bytes.fromhex("aabbcc00000001"),
        salt=bytes(range(32, 48)),
        payload_bytes=0x12345000,
        part_checksums=[0x0102030405060708, 0xFFFFFFFFFFFFFFFF],
    )
    golden = bytes.fromhex(
        "894f524c4f500d0a"
        "01000000"
        "00100000"
        "000102030405060708090a0b0c0d0e0f"
        "101112131415161718191a1b1c1d1e1f"
        "202122232425262728292a2b2c2d2e2f"
        "0050341200000000"
        "0200"
        "0700"
        "00000000"
        "aabbcc00000001"
    ).ljust(208, b"\0") + bytes.fromhex("0807060504030201ffffffffffffffff")
    assert bytes(header[: len(golden)]) == golden
    assert bytes(header[len(golden) : 4088]) == bytes(4088 - len(golden))
    assert bytes(header[4088:]) == GOLDEN_CHECKSUM


GOLDEN_CHECKSUM = bytes.fromhex("e30e58810ac29c80")


def test_what_was_built_is_parsed_and_verified() -> None:
    header, payload = chunk()
    found = parse(header)
    assert found == Envelope(1, NAMESPACE.digest, FIRST_GENERATION, NO_SALT, KEY, PAYLOAD_BYTES, check(header, payload))


@pytest.mark.fault("B109")
@pytest.mark.parametrize(("offset", "nbytes"), PARTS)
def test_one_flipped_bit_in_a_part_is_seen(offset: int, nbytes: int) -> None:
    for at in (offset, offset + nbytes // 2, offset + nbytes - 1):
        header, payload = chunk()
        payload[at] ^= 0x10
        assert reason_of(header, payload) == Reason.PAYLOAD_CHECKSUM


def test_padding_between_parts_is_nobodys_business() -> None:
    header, payload = chunk()
    payload[5000:8192] = os.urandom(8192 - 5000)
    check(header, payload)


@pytest.mark.fault("B109")
@given(at=st.integers(0, HEADER_BYTES - 1), bit=st.integers(0, 7))
def test_no_flipped_bit_of_a_header_passes(at: int, bit: int) -> None:
    header, payload = chunk()
    header[at] ^= 1 << bit
    expected = Reason.BAD_MAGIC if at < 8 else Reason.VERSION if at < 16 else Reason.HEADER_CHECKSUM
    assert reason_of(header, payload) == expected


@pytest.mark.fault("B115")
def test_bytes_of_another_run_are_told_apart_by_what_differs() -> None:
    header, payload = chunk()
    assert reason_of(header, payload, namespace=Namespace(bytes(16))) == Reason.FOREIGN_NAMESPACE
    assert reason_of(header, payload, namespace=Namespace(NAMESPACE.digest, b"g" * 16)) == Reason.FOREIGN_GENERATION


@pytest.mark.fault("B109")
@pytest.mark.fault("B134")
def test_a_swapped_chunk_is_foreign() -> None:
    header, payload = chunk(key=pack_key(bytes(32), 3))
    assert reason_of(header, payload) == Reason.FOREIGN_KEY
    header, payload = chunk(key=KEY[:-1] + b"\x04")
    assert reason_of(header, payload) == Reason.FOREIGN_KEY


@pytest.mark.fault("B120")
def test_other_lengths_are_seen_before_a_part_is_read() -> None:
    header, payload = chunk()
    assert reason_of(header, payload, payload_bytes=PAYLOAD_BYTES + 4096) == Reason.LENGTH
    assert reason_of(header, payload, parts=PARTS[:1]) == Reason.LENGTH
    assert reason_of(header, payload[:8192]) == Reason.LENGTH
    assert reason_of(header, payload[:0]) == Reason.LENGTH
    assert reason_of(header[:100], payload) == Reason.LENGTH


def test_zeros_and_noise_are_not_envelopes() -> None:
    _, payload = chunk()
    assert reason_of(memoryview(bytes(HEADER_BYTES)), payload) == Reason.BAD_MAGIC
    assert reason_of(memoryview(b"\xa5" * HEADER_BYTES), payload) == Reason.BAD_MAGIC


def test_a_newer_version_is_named_even_though_its_checksum_lies_elsewhere() -> None:
    header, payload = chunk()
    header[8:12] = (2).to_bytes(4, "little")
    assert reason_of(header, payload) == Reason.VERSION


def test_impossible_counts_under_a_good_checksum_are_a_length() -> None:
    for at in (72, 74):
        header, payload = chunk()
        header[at : at + 2] = b"\xff\xff"
        reseal(header)
        assert reason_of(header, payload) == Reason.LENGTH


def test_the_most_parts_fit_and_one_more_is_refused() -> None:
    assert MAX_PARTS >= 64
    header = memoryview(bytearray(HEADER_BYTES))
    key = b"k" * envelope.MAX_KEY_BYTES
    build(header, namespace=NAMESPACE, key=key, salt=NO_SALT, payload_bytes=4096, part_checksums=range(MAX_PARTS))
    assert parse(header).parts == tuple(range(MAX_PARTS))
    assert parse(header).key == key
    with pytest.raises(ValueError, match="486 parts"):
        build(
            header, namespace=NAMESPACE, key=key, salt=NO_SALT, payload_bytes=4096, part_checksums=range(MAX_PARTS + 1)
        )
    with pytest.raises(ValueError, match="129 bytes"):
        build(header, namespace=NAMESPACE, key=key + b"k", salt=NO_SALT, payload_bytes=4096, part_checksums=[1])


def test_a_salts_digest_belongs_to_its_namespace() -> None:
    first = envelope.salt_digest(NAMESPACE.digest, "tenant a")
    assert len(first) == 16
    assert first == envelope.salt_digest(NAMESPACE.digest, "tenant a")
    assert first != envelope.salt_digest(NAMESPACE.digest, "tenant b")
    assert first != envelope.salt_digest(bytes(16), "tenant a")
    assert envelope.salt_digest(NAMESPACE.digest, "\ud800") != first
