"""What a store's directory holds, by namespace, and whether it is what it says it is.

In: a store's folder. Out: ``NamespaceReport``s, in which fields two differ, the verdict on a chunk. Never: a line of
output, a change of anything.

A reset gives a namespace another digest and leaves no second description. The generation stands in the header of every
chunk, so the description of a later generation is found by trying those that are there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from orlop.core import DIGEST_BYTES, FIRST_GENERATION, Namespace, RegionLayout, unpack_key
from orlop.errors import ConfigError, EnvelopeError
from orlop.stores.disk.folder import DiskFolder
from orlop.stores.files_folder import FilesFolder
from orlop.tiering import envelope
from orlop.tiering.namespace import FORMAT_VERSION, differences, digest_of, read_descriptions

Folder = FilesFolder | DiskFolder
KINDS: tuple[type[FilesFolder] | type[DiskFolder], ...] = (FilesFolder, DiskFolder)
"""The kinds of store that are told apart by what lies in their directory; each has the methods of the first."""

GONE = "gone"
"""Evicted while the tool was looking."""
UNREADABLE = "unreadable"
UNDESCRIBED = "no_description"
"""The header is right, and nothing tells how the payload is laid out, so the payload could not be checked."""
KEPT = frozenset({GONE, UNREADABLE, UNDESCRIBED, str(envelope.Reason.VERSION)})
"""Of what is not good, that which says nothing against the chunk."""


@dataclass(slots=True)
class NamespaceReport:
    """One namespace. Bytes include headers; ages in seconds since a chunk was last of use."""

    digest: str
    chunks: int = 0
    stored_bytes: int = 0
    newest_s: float | None = None
    oldest_s: float | None = None
    after_reset: bool | None = None
    """Whether it belongs to a generation after a reset, which no later process serves; None: not known."""
    description: Mapping[str, Any] | None = None
    sample: bytes = field(default=b"", repr=False)
    """The key of one of its chunks."""

    def add(self, key: bytes, nbytes: int, age_s: float) -> None:
        self.chunks += 1
        self.stored_bytes += nbytes
        self.newest_s = age_s if self.newest_s is None else min(self.newest_s, age_s)
        self.oldest_s = age_s if self.oldest_s is None else max(self.oldest_s, age_s)
        self.sample = self.sample or key


def _differing(a: NamespaceReport, b: NamespaceReport) -> list[str]:
    fields = differences(a.description or {}, b.description or {})
    return fields + ["generation"] * bool(a.after_reset or b.after_reset)  # each reset has one of its own


def open_folder(path: Path) -> Folder:
    """The store in ``path``; ``ConfigError`` where there is none."""
    for kind in KINDS:
        if kind.lies_in(path):
            folder = kind(path)
            if not os.access(folder.root, os.R_OK | os.X_OK):
                raise ConfigError(f"{path}: found no permission to look into it; run as its owner, or change its mode")
            return folder
    kinds = " or ".join(kind.kind for kind in KINDS)
    what = f"found no {kinds} store there" if os.path.isdir(path) else "found no such directory"
    raise ConfigError(f"{path}: {what}, expected the 'path' of a tier of type {kinds}, once an engine has run")


class Stored:
    """The namespaces of a folder, as they were when this was made. Blocks; one thread."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        # A description that was changed by hand describes nothing.
        self.descriptions = {
            digest: description
            for digest, description in read_descriptions(folder.path).items()
            if digest_of(description, FIRST_GENERATION).hex() == digest
        }
        self.namespaces = self._namespaces()

    def _namespaces(self) -> dict[str, NamespaceReport]:
        found = {digest: NamespaceReport(digest) for digest in self.descriptions}
        for chunk in self.folder.scan():
            digest = chunk.key[:DIGEST_BYTES].hex()
            found.setdefault(digest, NamespaceReport(digest)).add(chunk.key, chunk.nbytes, chunk.age_s)
        for report in found.values():
            self._describe(report)
        return dict(sorted(found.items(), key=lambda item: (item[1].newest_s is None, item[1].newest_s or 0.0)))

    def _describe(self, report: NamespaceReport) -> None:
        generation = FIRST_GENERATION if report.digest in self.descriptions else self._generation(report)
        if generation is None:
            return
        report.after_reset = generation != FIRST_GENERATION
        digests = {digest_of(d, generation).hex(): d for d in self.descriptions.values()}
        report.description = digests.get(report.digest)

    def _generation(self, report: NamespaceReport) -> bytes | None:
        try:
            header = memoryview(self.folder.read(report.sample))[: envelope.HEADER_BYTES]
            return envelope.parse(header).generation
        except (OSError, EnvelopeError):
            return None

    def differences(self) -> list[tuple[str, str, list[str]]]:
        """``(digest, newest digest, fields)``: where each described namespace differs from the one used last.

        That one is most likely what runs now, and the others are what it does not find.
        """
        described = [report for report in self.namespaces.values() if report.description is not None]
        return [(other.digest, described[0].digest, _differing(other, described[0])) for other in described[1:]]

    # --- verify -----------------------------------------------------------------------------------------------

    def verdict(self, key: bytes) -> str | None:
        """None for a chunk that verifies from its first byte to its last, else why it does not, in one word."""
        try:
            content = memoryview(self.folder.read(key))
        except FileNotFoundError:
            return GONE
        except OSError:
            return UNREADABLE
        header, payload = content[: envelope.HEADER_BYTES], content[envelope.HEADER_BYTES :]
        parts = self._parts(key)
        try:
            found = envelope.parse(header)
            envelope.verify(
                header,
                payload,
                namespace=Namespace(key[:DIGEST_BYTES], found.generation),
                key=key[DIGEST_BYTES:],
                payload_bytes=len(payload),
                # Without a description: right for one rank whose pages leave no padding, else no verdict below.
                parts=parts or [(0, len(payload))] * len(found.parts),
            )
        except EnvelopeError as error:
            undescribed = error.reason == envelope.Reason.PAYLOAD_CHECKSUM and not parts
            return UNDESCRIBED if undescribed else str(error.reason)
        return None

    def _parts(self, key: bytes) -> list[tuple[int, int]]:
        """Where the ranks' parts lie in the payload; empty where no description tells."""
        layout = self._layouts.get(key[:DIGEST_BYTES].hex())
        group = unpack_key(key[DIGEST_BYTES:])[1]
        return layout.parts(group) if layout is not None and group < layout.groups else []

    @cached_property
    def _layouts(self) -> dict[str, RegionLayout]:
        layouts = {}
        for report in self.namespaces.values():
            if (d := report.description) is not None and d.get("format_version") == FORMAT_VERSION:
                pages = tuple(tuple(rank) for rank in d["page_bytes"])
                layouts[report.digest] = RegionLayout(1, d["blocks_per_chunk"], pages)
        return layouts
