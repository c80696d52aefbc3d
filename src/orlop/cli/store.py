"""``orlop store inspect | verify | gc | clear``: a tier's directory, looked at and swept from outside.

In: the directory's path, options. Out: tables or JSON on standard output, progress on standard error, an exit code: 1
where chunks do not verify (and were not removed). Never: a change that an engine beside it could notice as more than a
chunk that was evicted; in a slab, no change at all of the lane that an engine has.
"""

from __future__ import annotations

import errno
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from orlop.cli.stopping import STOPPED, stop_signals
from orlop.cli.stored import KEPT, NamespaceReport, Stored, open_folder
from orlop.core import DIGEST_BYTES
from orlop.errors import ConfigError
from orlop.host.limits import legible_bytes
from orlop.tiering.base import StoredChunk

WELL, DAMAGED = 0, 1
SHOWN_DIGITS = 12
"""Of a namespace's digest, in tables; ``--namespace`` takes any beginning that is of one alone."""


# --- inspect --------------------------------------------------------------------------------------------------


def run_inspect(path: Path, as_json: bool) -> int:
    stored = Stored(open_folder(path))
    if as_json:
        print(json.dumps(_inspection(stored)))
        return WELL
    console = Console(markup=False)
    console.print(_headline(stored), soft_wrap=True)
    if stored.namespaces:
        console.print(_table(list(stored.namespaces.values())))
    for report in stored.namespaces.values():
        console.print(f"{_short(report)}  {_what(report)}", soft_wrap=True, highlight=False)
    for digest, other, fields in stored.differences():
        pair = f"{digest[:SHOWN_DIGITS]} and {other[:SHOWN_DIGITS]}"
        console.print(f"{pair} differ in: {', '.join(fields)}", soft_wrap=True, highlight=False)
    return WELL


def _inspection(stored: Stored) -> dict[str, Any]:
    namespaces = []
    for report in stored.namespaces.values():
        fields = asdict(report)
        del fields["sample"]
        namespaces.append(fields)
    return {
        "kind": stored.folder.kind,
        "path": str(stored.folder.path),
        "engines": stored.folder.engines(),
        "namespaces": namespaces,
        "differences": [{"a": a, "b": b, "fields": fields} for a, b, fields in stored.differences()],
    }


def _headline(stored: Stored) -> str:
    reports = stored.namespaces.values()
    chunks, nbytes = sum(r.chunks for r in reports), sum(r.stored_bytes for r in reports)
    return (
        f"{stored.folder.path}: {stored.folder.kind} store, {len(reports)} namespaces, {chunks:,} chunks, "
        f"{legible_bytes(nbytes)}; engines that have it open: {stored.folder.engines()}"
    )


def _table(reports: Sequence[NamespaceReport]) -> Table:
    table = Table("namespace", "chunks", "bytes", "last used", "first out")
    for column in table.columns[1:]:
        column.justify = "right"
    for r in reports:
        table.add_row(_short(r), f"{r.chunks:,}", legible_bytes(r.stored_bytes), _ago(r.newest_s), _ago(r.oldest_s))
    return table


def _short(report: NamespaceReport) -> str:
    return report.digest[:SHOWN_DIGITS]


def _what(report: NamespaceReport) -> str:
    """One line on whose a namespace is."""
    late = ", after a reset: served to nobody else any more" if report.after_reset else ""
    if (d := report.description) is None:
        return f"no description{late}"
    names = [str(d["identity"][key]) for key in ("engine", "model_name", "dtype", "weights_id") if key in d["identity"]]
    shape = f"{len(d['groups'])} KV groups, {d['ranks']} ranks, {d['blocks_per_chunk']} blocks per chunk"
    return f"{', '.join([*names, shape])}{late}"


def _ago(age_s: float | None) -> str:
    if age_s is None:
        return "-"
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if age_s >= seconds:
            return f"{age_s / seconds:.0f} {unit} ago"
    return f"{age_s:.0f} s ago"


# --- verify ---------------------------------------------------------------------------------------------------


def run_verify(path: Path, repair: bool, as_json: bool) -> int:
    """Read every chunk to its last byte; with ``repair``, remove what does not verify."""
    stored = Stored(open_folder(path))
    seen: Counter[str] = Counter()
    removed, trouble = 0, Trouble()
    with stop_signals() as must_stop, _progress("verifying", stored.namespaces.values()) as tell:
        for chunk in stored.folder.scan():
            if must_stop():
                break
            verdict = stored.verdict(chunk.key)
            seen[verdict or "ok"] += 1
            if repair and verdict is not None and verdict not in KEPT:
                removed += _remove(stored, [chunk.key], trouble)
            tell(chunk.nbytes)
        interrupted = must_stop()
    _settle(stored, trouble)
    num_bad = sum(count for verdict, count in seen.items() if verdict != "ok" and verdict not in KEPT)
    _say_verified(stored, seen, removed, as_json, interrupted, num_bad)
    trouble.say()
    return STOPPED if interrupted else DAMAGED if num_bad > removed else WELL


def _say_verified(
    stored: Stored, counts: Counter[str], removed: int, as_json: bool, interrupted: bool, num_bad: int
) -> None:
    if as_json:
        said = {"path": str(stored.folder.path), "chunks": dict(counts), "removed": removed, "interrupted": interrupted}
        print(json.dumps(said | {"flaws": dict(stored.folder.flaws())}))
        return
    console = Console(markup=False)
    for reason, count in sorted(counts.items(), key=lambda item: (item[0] != "ok", item[0])):
        console.print(f"{count:>10,}  {reason}", highlight=False)
    if not counts:
        console.print("no chunk")
    if removed:
        console.print(f"removed {removed:,} that did not verify")
    elif num_bad:
        console.print(f"{num_bad:,} do not verify: none of them is ever served; --repair removes them", soft_wrap=True)
    for flaw, count in sorted(stored.folder.flaws().items()):
        console.print(f"{count:>10,}  {flaw}: left out of the index, a miss", highlight=False)
    if interrupted:
        console.print("stopped before the end")


# --- gc -------------------------------------------------------------------------------------------------------


def run_gc(path: Path, as_json: bool) -> int:
    """Give space back that holds no chunk."""
    folder = open_folder(path)
    busy = folder.engines()
    try:
        freed = folder.collect()
    except OSError as error:
        raise ConfigError(f"{path}: found it not to be written to ({error.strerror}); run as its owner") from error
    if as_json:
        print(json.dumps({"path": str(path), "freed_bytes": freed, "engines": busy}))
    else:
        left = f"; engines that have it open: {busy}, what they write to was left alone" if busy else ""
        print(f"freed {legible_bytes(freed)}{left}")
    return WELL


# --- clear ----------------------------------------------------------------------------------------------------


def run_clear(path: Path, prefixes: Sequence[str], everything: bool, yes: bool, as_json: bool) -> int:
    """Remove the chunks of some namespaces, or of all, after a question."""
    if everything == bool(prefixes):
        found = "both" if everything else "neither"
        raise ConfigError(f"found {found} of --namespace and --all, expected one of them; orlop store inspect lists")
    stored = Stored(open_folder(path))
    chosen = list(stored.namespaces.values()) if everything else [_chosen(stored, prefix) for prefix in prefixes]
    if not yes:
        _ask(stored, chosen)
    digests = {report.digest for report in chosen}
    chunks = (c for c in stored.folder.scan() if c.key[:DIGEST_BYTES].hex() in digests)
    trouble = Trouble()
    with stop_signals() as must_stop, _progress("removing", chosen) as tell:
        keys = _told(itertools.takewhile(lambda _: not must_stop(), chunks), tell)
        removed = _remove(stored, keys, trouble)
        interrupted = must_stop()
    _settle(stored, trouble)
    if not (trouble.chunks or interrupted):
        _forget_descriptions(stored, digests)
    if as_json:
        print(json.dumps({"path": str(path), "removed": removed, "interrupted": interrupted}))
    else:
        print(f"removed {removed:,} chunks" + ("; stopped before the end" if interrupted else ""))
    trouble.say()
    return STOPPED if interrupted else DAMAGED if trouble.chunks else WELL


def _told(chunks: Iterable[StoredChunk], tell: Callable[[int], None]) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk.key
        tell(chunk.nbytes)


def _chosen(stored: Stored, prefix: str) -> NamespaceReport:
    fitting = [r for r in stored.namespaces.values() if prefix and r.digest.startswith(prefix.lower())]
    if len(fitting) != 1:
        there = ", ".join(_short(r) for r in fitting or stored.namespaces.values()) or "none"
        raise ConfigError(f"--namespace {prefix}: found {len(fitting)} that begin so, expected one; there are: {there}")
    return fitting[0]


def _ask(stored: Stored, chosen: Sequence[NamespaceReport]) -> None:
    """Show what is going to be removed, and end here unless the answer is yes."""
    if not sys.stdin.isatty():
        raise ConfigError("found nobody to ask before chunks are removed, expected a terminal; or give --yes")
    console = Console(stderr=True, markup=False)
    console.print(_table(chosen))
    if engines := stored.folder.engines():
        console.print(f"engines that have it open: {engines}; they go on, and compute what they do not find")
    typer.confirm("remove these chunks?", abort=True, err=True)


def _forget_descriptions(stored: Stored, digests: set[str]) -> None:
    """A running engine has written its own at its start and never again, so it keeps it."""
    if stored.folder.engines():
        return
    for digest in digests:
        with suppress(OSError):
            (stored.folder.path / f"{digest}.json").unlink()


# --- both -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Trouble:
    """Chunks that could not be removed, and why the first of them."""

    chunks: int = 0
    why: OSError | None = None

    def hear(self, error: OSError) -> None:
        self.chunks += 1
        self.why = self.why or error

    def say(self) -> None:
        if self.why is None:
            return
        what = f"{self.chunks:,} chunks could not be removed ({self.why.strerror or self.why})"
        is_busy = self.why.errno == errno.EBUSY
        advice = (
            "end that engine first: no tool writes to its lane" if is_busy else "check the directory's owner and mount"
        )
        print(f"orlop: {what}; {advice}", file=sys.stderr)


def _remove(stored: Stored, keys: Iterable[bytes], trouble: Trouble) -> int:
    """How many are gone."""
    removed = 0
    for key in keys:
        try:
            removed += stored.folder.remove(key)
        except OSError as error:
            trouble.hear(error)
    return removed


def _settle(stored: Stored, trouble: Trouble) -> None:
    try:
        stored.folder.settle()
    except OSError as error:
        trouble.hear(error)


@contextmanager
def _progress(what: str, reports: Iterable[NamespaceReport]) -> Iterator[Callable[[int], None]]:
    """A bar in bytes where somebody looks; the function takes the bytes that are done."""
    console = Console(stderr=True, markup=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=sum(r.stored_bytes for r in reports))
        yield lambda nbytes: progress.advance(task, nbytes)
