"""Who may share bytes with whom: the fingerprint of model, weights, layout, hashing and generation.

In: what an engine says of itself, and how a chunk is laid out. Out: a 16-byte digest that differs as soon as
anything differs that determines the bytes of a chunk, and the same facts in clear for tools and logs. Never:
Python's ``hash()``, a time stamp, a path, a host name: equal engines get equal digests on every host and in
every process.

The digest is BLAKE2b, 16 bytes, over the canonical JSON of the fingerprint followed by the 16 bytes of the
generation. The canonical JSON has sorted keys, no white space and ASCII only.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import xxhash

from orlop.core import DIGEST_BYTES, FIRST_GENERATION, EngineSpec, KVGroup, Namespace, RegionLayout
from orlop.errors import ConfigError

FORMAT_VERSION = 1
"""Of what a chunk's payload looks like in a slot. Raised when an older program would read it wrongly."""

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLE_PAGES = 64
SAMPLE_PAGE_BYTES = 64 * 1024
_READ_BYTES = 8 * 1024**2
_MOST_DESCRIPTION_BYTES = 4 << 20
_DRAFT_AGE_S = 60.0
"""A draft that is older was left by a process that was killed."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """All that must be equal for two runs to share bytes, the generation aside.

    ``identity`` as in ``EngineSpec``: nothing but JSON. ``page_bytes[rank][group]`` as in ``RegionLayout``.
    """

    identity: Mapping[str, Any]
    groups: tuple[KVGroup, ...]
    page_bytes: tuple[tuple[int, ...], ...]
    tokens_per_hash: int
    blocks_per_chunk: int
    ranks: int
    format_version: int = FORMAT_VERSION

    @classmethod
    def of(cls, spec: EngineSpec, layout: RegionLayout) -> Fingerprint:
        """The fingerprint of an engine whose chunks lie in a region of ``layout``."""
        return cls(
            spec.identity, spec.groups, layout.page_bytes, spec.tokens_per_hash, layout.blocks_per_chunk, spec.ranks
        )

    def describe(self) -> dict[str, Any]:
        """The fingerprint in clear, as JSON types. ``ConfigError`` where ``identity`` holds something else."""
        return {
            "blocks_per_chunk": self.blocks_per_chunk,
            "format_version": self.format_version,
            "groups": [
                {
                    "index": g.index,
                    "layers": list(g.layers),
                    "sliding_window": g.sliding_window,
                    "tokens_per_block": g.tokens_per_block,
                }
                for g in self.groups
            ],
            "identity": _plain(self.identity, "identity"),
            "page_bytes": [list(pages) for pages in self.page_bytes],
            "ranks": self.ranks,
            "tokens_per_hash": self.tokens_per_hash,
        }

    def namespace(self, generation: bytes = FIRST_GENERATION) -> Namespace:
        """The namespace of this fingerprint in ``generation`` (16 bytes)."""
        if len(generation) != DIGEST_BYTES:
            raise ValueError(f"found a generation of {len(generation)} bytes, expected {DIGEST_BYTES}")
        return Namespace(digest_of(self.describe(), generation), generation)


def digest_of(description: Mapping[str, Any], generation: bytes) -> bytes:
    """The digest of the namespace that ``description`` describes, in ``generation``; both as they were stored."""
    return hashlib.blake2b(_canonical(description) + generation, digest_size=DIGEST_BYTES).digest()


def _plain(value: Any, where: str) -> Any:
    """``value`` as JSON types alone.

    What JSON would bend is refused: keys that are no text become equal to texts, NaN differs from itself,
    and ``str()`` of an object may hold an address.
    """
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{where}: found the key {key!r}, expected a text; turn it into one")
        return {key: _plain(value[key], f"{where}.{key}") for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int) or (isinstance(value, float) and value - value == 0):
        return value
    raise ConfigError(
        f"{where}: found {type(value).__name__} {value!r}, expected a mapping, list, text, finite number, "
        "true, false or null; write what it stands for"
    )


def _canonical(description: Mapping[str, Any]) -> bytes:
    return json.dumps(description, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


# --- in which fields two differ -----------------------------------------------------------------------


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Paths of the fields in which two descriptions differ, such as ``identity.dtype`` or ``groups[1].layers``."""
    return sorted(_differences(a, b, ""))


def _differences(a: Any, b: Any, where: str) -> Iterator[str]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in a.keys() | b.keys():
            path = f"{where}.{key}" if where else key
            if key in a and key in b:
                yield from _differences(a[key], b[key], path)
            else:
                yield path
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _differences(x, y, f"{where}[{i}]")
    elif type(a) is not type(b) or a != b:
        yield where


def almost_same(mine: Fingerprint, others: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[str]] | None:
    """Among ``others`` (digest to description) the one that differs from ``mine`` in the fewest fields, and in which.

    None where there is no other, or one is equal: then its data is found, or of another generation.
    """
    own = mine.describe()
    candidates = sorted((differences(own, other), digest) for digest, other in others.items())
    candidates.sort(key=lambda c: len(c[0]))
    if not candidates or not candidates[0][0]:
        return None
    fields, digest = candidates[0]
    return digest, fields


# --- descriptions in clear, beside the data ----------------------------------------------------------------


def write_description(root: str | os.PathLike[str], fingerprint: Fingerprint) -> bool:
    """Leave ``<root>/<digest>.json``, whole or not at all; False where the directory does not let us.

    Named by the first generation's digest, so that a reset leaves no second file. A convenience for tools:
    nothing that is served depends on it, hence no error.
    """
    digest = fingerprint.namespace().digest.hex()
    path = Path(root, f"{digest}.json")
    draft = Path(root, f".{digest}.{secrets.token_hex(8)}.draft")
    text = json.dumps(fingerprint.describe(), indent=2, sort_keys=True, allow_nan=False)
    try:
        Path(root).mkdir(parents=True, exist_ok=True)
        draft.write_text(text + "\n", encoding="ascii")
        os.replace(draft, path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        return False
    _collect_drafts(Path(root))
    return True


def _collect_drafts(root: Path) -> None:
    for draft in root.glob(".*.draft"):
        with suppress(OSError):
            if time.time() - draft.lstat().st_mtime > _DRAFT_AGE_S:
                draft.unlink()


def read_descriptions(root: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Digest to description of all that was left in ``root``; what cannot be read is left out."""
    found = {}
    try:
        paths = sorted(Path(root).glob("*.json"))
    except OSError:
        return {}
    for path in paths:
        with suppress(OSError, ValueError, RecursionError):
            description = json.loads(_text_of(path))
            if isinstance(description, dict):
                found[path.stem] = description
    return found


def _text_of(path: Path) -> str:
    """What a regular file of a sensible size holds. Anybody may have put there anything, pipes and devices too."""
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_DESCRIPTION_BYTES:
            raise ValueError(f"{path} is no description")
        return file.read(_MOST_DESCRIPTION_BYTES).decode("ascii")


# --- weights -----------------------------------------------------------------------------------------------


def weights_identity(directory: str | os.PathLike[str], mode: Literal["sampled", "full"] = "sampled") -> dict[str, Any]:
    """What tells a directory of weights apart from others, from content alone: no time stamp, no path.

    Of every weight file: its name, its size, a digest of its safetensors header where it has one, and xxh3
    of its content, all of it (``full``) or 64 evenly spaced pages of 64 KiB (``sampled``). Blocks while
    it reads. ``ConfigError`` where there are no weight files, or one cannot be read.
    """
    root = Path(directory)
    try:
        paths = sorted(p for p in root.iterdir() if p.suffix in WEIGHT_SUFFIXES and p.is_file())
        if not paths:
            raise ConfigError(
                f"weights: found no file ending in {', '.join(WEIGHT_SUFFIXES)} in {root}, expected the model's "
                "weights; set weights_id to a name that changes whenever they do"
            )
        return {"mode": mode, "files": [_file_identity(path, mode) for path in paths]}
    except OSError as error:
        raise ConfigError(f"weights: cannot read {root}: {error}; make it readable or set weights_id") from error


def _file_identity(path: Path, mode: str) -> dict[str, Any]:
    with path.open("rb") as file:
        nbytes = file.seek(0, os.SEEK_END)
        identity: dict[str, Any] = {"name": path.name, "bytes": nbytes}
        if path.suffix == ".safetensors":
            identity["header"] = _header_digest(file, nbytes, path)
        identity["content"] = _pages_digest(file, nbytes, _page_offsets(nbytes) if mode == "sampled" else None)
    return identity


def _header_digest(file: BinaryIO, nbytes: int, path: Path) -> str:
    """A safetensors file begins with the length of its JSON header, 8 bytes little-endian, and the header."""
    file.seek(0)
    header_bytes = int.from_bytes(file.read(8), "little")
    if nbytes < 8 or header_bytes > nbytes - 8:
        raise ConfigError(f"weights: found no whole safetensors header in {path}, expected one; load the file again")
    return _pages_digest(file, 8 + header_bytes, None)


def _page_offsets(nbytes: int) -> list[int] | None:
    """Where the sampled pages begin: the first at the file's beginning, the last at its end. None: all of it."""
    if nbytes <= SAMPLE_PAGES * SAMPLE_PAGE_BYTES:
        return None
    return [i * (nbytes - SAMPLE_PAGE_BYTES) // (SAMPLE_PAGES - 1) for i in range(SAMPLE_PAGES)]


def _pages_digest(file: BinaryIO, nbytes: int, offsets: Sequence[int] | None) -> str:
    """xxh3, 128 bits, of the pages at ``offsets``, or of the first ``nbytes``."""
    digest = xxhash.xxh3_128()
    for offset in offsets if offsets is not None else range(0, nbytes, _READ_BYTES):
        file.seek(offset)
        digest.update(file.read(SAMPLE_PAGE_BYTES if offsets is not None else min(_READ_BYTES, nbytes - offset)))
    return digest.hexdigest()
