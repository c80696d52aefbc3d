"""Files of JSON lines, plain or gzip.

In: a path and the option that named it. Out: one parsed value per line with its number, from 1. Never: a guess about a
line that is no JSON: that is a ``TraceError`` with file and line.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from orlop.errors import TraceError

MOST_LINE_BYTES = 64 << 20
"""A line that is longer is none: it would fill memory before anybody can say what it is."""
SHOWN_CHARACTERS = 60
"""Of a value that is wrong, in a message."""


def read_json_lines(path: Path, option: str) -> Iterator[tuple[int, Any]]:
    """Number and value of each line as they come; blank ones are passed over."""
    number = 0
    try:
        with _opened(path) as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MOST_LINE_BYTES + 1), b""), start=1):
                if len(line) > MOST_LINE_BYTES:
                    raise TraceError(
                        f"{path}, line {number}: found more than {MOST_LINE_BYTES} bytes in a line, expected one JSON "
                        "value per line"
                    )
                if line.strip():
                    yield number, _parsed(line, f"{path}, line {number}")
    except (OSError, EOFError, zlib.error) as error:
        where = f"{path}, after line {number}" if number else str(path)
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(
            f"{option} {where}: cannot be read: {reason}; give a file of JSON lines, plain or gzip, that is whole"
        ) from error


def short(value: object) -> str:
    """A value as a message shows it."""
    shown = repr(value)
    return shown if len(shown) <= SHOWN_CHARACTERS else shown[:SHOWN_CHARACTERS] + "..."


def is_count(value: object) -> bool:
    """Whether ``value`` is a whole number from 0 up."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO | gzip.GzipFile]:
    """The lines of the file, unpacked where its first bytes say gzip, whatever its name."""
    with path.open("rb") as file:
        if file.peek(2)[:2] != b"\x1f\x8b":  # looking alone: a pipe has no way back
            yield file
            return
        with gzip.open(file) as unpacked:
            yield unpacked


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: found no JSON ({error}), expected one JSON value per line") from error
