"""What has happened in a minute, as one line.

In: the difference of two ``Stats``, and the seconds between them. Out: a line for a log. Never: a figure that the
metrics do not have.
"""

from __future__ import annotations

from collections.abc import Iterator

from orlop.counting import Stats
from orlop.observe.table import METRICS, read


def minute_line(changed: Stats, seconds: float) -> str:
    """Tokens asked for and loaded by tier, bytes and rates by direction, how full, and what went wrong."""
    parts = [_tokens(changed), *_moved(changed), _occupancy(changed), _troubles(changed)]
    return f"the last {seconds:.0f} s: " + "; ".join(part for part in parts if part)


def _tokens(changed: Stats) -> str:
    asked, loaded = changed.get("tokens_queried", 0.0), changed.get("tokens_loaded", 0.0)
    if not asked:
        return "no prompt tokens asked for"
    by_tier = [f"{tier} {tokens / asked:.0%}" for tier, tokens in _by_tier(changed, "tokens_loaded") if tokens]
    shares = f" ({', '.join(by_tier)})" if by_tier else ""
    return f"{loaded:,.0f} of {asked:,.0f} prompt tokens loaded{shares}"


def _moved(changed: Stats) -> Iterator[str]:
    for verb, word in (("load", "loaded"), ("store", "stored")):
        yield _rate(word, changed.get(f"{verb}_bytes", 0.0), changed.get(f"{verb}_seconds", 0.0))
    for verb, word in (("read", "read"), ("write", "written")):
        for tier, nbytes in _by_tier(changed, f"{verb}_bytes"):
            yield _rate(f"{tier} {word}", nbytes, changed.get(f"{verb}_seconds {tier}", 0.0))


def _rate(word: str, nbytes: float, seconds: float) -> str:
    if not nbytes:
        return ""
    rate = f" at {nbytes / seconds / 1e9:.2g} GB/s" if seconds else ""
    return f"{word} {size(nbytes)}{rate}"


def _occupancy(changed: Stats) -> str:
    slots = changed.get("slots", 0.0)
    if not slots:
        return ""
    parts = [f"host {(slots - changed.get('slots_free', 0.0)) / slots:.0%} full"]
    for tier, nbytes in _by_tier(changed, "store_bytes"):
        limit = changed.get(f"store_limit_bytes {tier}", 0.0)
        parts.append(f"{tier} {nbytes / limit:.0%} full" if limit else f"{tier} {size(nbytes)}")
    return ", ".join(parts)


def _troubles(changed: Stats) -> str:
    values = read(changed)
    found = []
    for metric in METRICS:
        if not metric.trouble:
            continue
        for labels, count in values[metric.name].numbers.items():
            if count:
                name = metric.name.removeprefix("vllm:kv_offload_").removeprefix("orlop_")
                found.append(" ".join([name, *labels, f"{count:,.0f}"]))
    return "trouble: " + ", ".join(found) if found else "no trouble"


def _by_tier(changed: Stats, name: str) -> Iterator[tuple[str, float]]:
    for key, value in changed.items():
        stat, _, tier = key.partition(" ")
        if stat == name and tier:
            yield tier, value


def size(nbytes: float) -> str:
    """``1.5 GB``, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
