"""What the programs that write a page of the documentation share.

In: a page's place and text, the command line. Out: the page; with ``--check`` nothing but a status. Never: a word of
its own on a page.
"""

from __future__ import annotations

import sys
from pathlib import Path


def write_page(place: Path, text: str) -> int:
    """Write ``text`` to ``place``, or with ``--check`` only compare: the exit status, 1 where it is out of date."""
    if "--check" in sys.argv[1:]:
        if place.exists() and place.read_text(encoding="utf-8") == text:
            return 0
        print(f"{place} is out of date: run `make docs`", file=sys.stderr)
        return 1
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text, encoding="utf-8")
    return 0
