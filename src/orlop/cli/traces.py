"""Public workload traces as prompts of token ids.

In: a trace file (JSON lines, plain or gzip). Out: prompts whose shared prefixes are those of the trace. Never:
text, a guess about a line that does not add up: that is a ``TraceError`` with file and line.

Two formats are told apart line by line, by how many ids a line of its length must have:

- Mooncake: ids of 512-token blocks, the last one partial: ``ceil(input_length / 512)`` ids.
- LMCache agent: ids of 16-token blocks, full blocks only: ``input_length // 16`` ids. What is left over is of
  that line alone.

A trace says which blocks are equal, not what is in them. Each id becomes ``tokens_per_block`` tokens drawn from
a hash of the id, the same in every process. Fewer tokens than the trace's blocks had scale the work down and
keep its shape.

Agent traces were recorded one session at a time, so that a device cache of any size serves the next call. An engine
that many agents use sees their calls mixed: sessions are overlaid, one call of each in turn.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from orlop.cli.jsonl import is_count, read_json_lines, short
from orlop.cli.replay import RunRequest
from orlop.errors import TraceError


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """``block_tokens``: tokens of one id in the trace. ``scaled_tokens``: what an id becomes by default."""

    name: str
    block_tokens: int
    has_partial_block: bool
    scaled_tokens: int

    def num_ids(self, input_length: int) -> int:
        """Ids that a line of ``input_length`` tokens has."""
        if self.has_partial_block:
            return -(-input_length // self.block_tokens)
        return input_length // self.block_tokens


MOONCAKE = TraceFormat("Mooncake", 512, has_partial_block=True, scaled_tokens=16)
LMCACHE_AGENT = TraceFormat("LMCache agent", 16, has_partial_block=False, scaled_tokens=4)


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One request of a trace, as it stands there; ``number`` is its line in the file, from 1."""

    number: int
    format: TraceFormat
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    session: int | None = None


def read_requests(
    path: Path,
    *,
    limit: int | None,
    tokens_per_block: int | None,
    max_output: int,
    vocab_size: int,
    overlay: int = 1,
) -> list[RunRequest]:
    """The first ``limit`` requests of a trace (None: all), in file order but for ``overlay`` sessions in turn.

    ``tokens_per_block``: tokens that each id becomes (None: as the format says). ``max_output``: the most tokens
    to generate per request. Raises ``TraceError`` for a broken line and for a file without any request.
    """
    requests = [
        RunRequest(
            request_id=f"line-{line.number}",
            prompt=prompt_of(line, tokens_per_block or line.format.scaled_tokens, vocab_size),
            max_tokens=max(1, min(line.output_length, max_output)),
            where=f"{path}, line {line.number}",
            recorded=(line.input_length, line.output_length),
        )
        for line in overlaid(list(itertools.islice(read_lines(path), limit)), overlay)
    ]
    if not requests:
        raise TraceError(f"{path}: found no request, expected one JSON object per line")
    return requests


def overlaid(lines: Sequence[TraceLine], sessions: int) -> list[TraceLine]:
    """``lines`` with one line of each of ``sessions`` sessions in turn; a session that ends makes room for the next.

    Lines without a session are a session each, so a trace without any stays in file order, as it does with 1.
    """
    waiting: dict[object, deque[TraceLine]] = {}
    for line in lines:
        key = ("line", line.number) if line.session is None else line.session
        waiting.setdefault(key, deque()).append(line)
    queues = deque(waiting.values())
    running = deque(queues.popleft() for _ in range(min(sessions, len(queues))))
    mixed: list[TraceLine] = []
    while running:
        queue = running.popleft()
        mixed.append(queue.popleft())
        if not queue and queues:
            queue = queues.popleft()
        if queue:
            running.append(queue)
    return mixed


def read_lines(path: Path) -> Iterator[TraceLine]:
    """The lines of a trace as they come; blank ones are passed over."""
    for number, record in read_json_lines(path, "--trace"):
        yield _parsed(record, f"{path}, line {number}", number)


def prompt_of(line: TraceLine, tokens_per_block: int, vocab_size: int) -> list[int]:
    """Token ids of one line; at least one."""
    block, tokens = line.format.block_tokens, []
    for index, block_id in enumerate(line.hash_ids):
        share = min(block, line.input_length - index * block)
        stream = _tokens(f"{line.format.name} {block_id}", tokens_per_block, vocab_size)
        tokens += stream[: -(-share * tokens_per_block // block)]
    left_over = line.input_length - len(line.hash_ids) * block
    if left_over > 0 or not tokens:
        count = max(1, -(-left_over * tokens_per_block // block))
        tokens += _tokens(f"{line.format.name} line {line.number}", count, vocab_size)
    return tokens


def _parsed(record: Any, where: str, number: int) -> TraceLine:
    if not isinstance(record, dict):
        raise TraceError(f"{where}: found {type(record).__name__}, expected one JSON object")
    input_length = _count(record, "input_length", where)
    hash_ids = record.get("hash_ids")
    if not isinstance(hash_ids, list):
        found = "nothing" if "hash_ids" not in record else short(hash_ids)
        raise TraceError(f"{where}: found {found} for 'hash_ids', expected a list of whole numbers from 0 up")
    for block_id in hash_ids:
        if not is_count(block_id):
            raise TraceError(f"{where}: found {short(block_id)} in 'hash_ids', expected whole numbers from 0 up")
    if "session_id" in record and "session" not in record:
        raise TraceError(
            f"{where}: found 'session_id', expected 'session', a whole number from 0 up, or neither; rename it"
        )
    return TraceLine(
        number=number,
        format=_format(record, input_length, len(hash_ids), where),
        input_length=input_length,
        output_length=_count(record, "output_length", where),
        hash_ids=tuple(hash_ids),
        session=_count(record, "session", where) if "session" in record else None,
    )


def _format(record: dict[str, Any], input_length: int, num_ids: int, where: str) -> TraceFormat:
    # A short line can have the right number of ids for both; only the agent traces name a session.
    candidates = (LMCACHE_AGENT,) if "session" in record else (MOONCAKE, LMCACHE_AGENT)
    for candidate in candidates:
        if candidate.num_ids(input_length) == num_ids:
            return candidate
    expected = " or ".join(f"{c.num_ids(input_length)} ({c.name}, {c.block_tokens} tokens per id)" for c in candidates)
    raise TraceError(f"{where}: found {num_ids} hash_ids for input_length {input_length}, expected {expected}")


def _count(record: dict[str, Any], name: str, where: str) -> int:
    value = record.get(name)
    if not is_count(value):
        found = "nothing" if name not in record else short(value)
        raise TraceError(f"{where}: found {found} for '{name}', expected a whole number from 0 up")
    return int(value)  # type: ignore[arg-type]


def _tokens(name: str, count: int, vocab_size: int) -> list[int]:
    """``count`` token ids that follow from ``name`` alone."""
    stream = hashlib.shake_128(name.encode()).digest(4 * count)
    drawn: list[int] = (np.frombuffer(stream, dtype="<u4") % vocab_size).tolist()
    return drawn
