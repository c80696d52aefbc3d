"""A user's own prompts, one per line: a text, a list of token ids, or an object with one of them as ``prompt``.

In: a file of JSON lines, what turns text into token ids. Out: ``RunRequest``s. Never: a prompt that is changed to make
it fit.

    "The orlop is the lowest deck"
    [17, 4, 99]
    {"prompt": "Why?", "max_tokens": 8, "id": "first"}
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from orlop.cli.jsonl import is_count, read_json_lines, short
from orlop.cli.replay import RunRequest
from orlop.config import MOST_COUNT
from orlop.errors import ConfigError, TraceError

FIELDS = ("prompt", "max_tokens", "id")
LINE = "a text, a list of token ids, or an object with one of them as 'prompt'"


def read_prompts(
    path: Path, *, limit: int | None, max_output: int, encode: Callable[[str], list[int]]
) -> list[RunRequest]:
    """The first ``limit`` prompts (None: all). ``encode`` may raise ``ConfigError``.

    Raises ``TraceError`` for a broken line, for two lines of one id and for a file without any prompt.
    """
    requests: dict[str, RunRequest] = {}
    for number, record in islice(read_json_lines(path, "--prompts"), limit):
        where = f"{path}, line {number}"
        request = _request(record, f"line-{number}", where, max_output, encode)
        if request.request_id in requests:
            raise TraceError(f"{where}: found the id {request.request_id!r} again, expected each once; rename one")
        requests[request.request_id] = request
    if not requests:
        raise TraceError(f"{path}: found no prompt, expected one per line: {LINE}")
    return list(requests.values())


def _request(record: Any, name: str, where: str, max_output: int, encode: Callable[[str], list[int]]) -> RunRequest:
    fields = record if isinstance(record, dict) else {"prompt": record}
    unknown = next((key for key in fields if key not in FIELDS), None)
    if unknown is not None:
        raise TraceError(f"{where}: found the field {unknown!r}, expected {', '.join(FIELDS)} and no other")
    max_tokens, request_id = fields.get("max_tokens", max_output), fields.get("id", name)
    if not is_count(max_tokens) or not 1 <= max_tokens <= MOST_COUNT:
        raise TraceError(
            f"{where}: found {short(max_tokens)} for 'max_tokens', expected a whole number from 1 to {MOST_COUNT}"
        )
    if not isinstance(request_id, str) or not request_id:
        raise TraceError(f"{where}: found {short(request_id)} for 'id', expected a text that is not empty")
    return RunRequest(request_id, _tokens(fields.get("prompt"), where, encode), max_tokens, where)


def _tokens(prompt: Any, where: str, encode: Callable[[str], list[int]]) -> list[int]:
    if isinstance(prompt, str):
        try:
            tokens = encode(prompt)
        except ConfigError as error:
            raise TraceError(f"{where}: {error}") from error
    elif isinstance(prompt, list) and all(is_count(token) for token in prompt):
        tokens = prompt
    else:
        raise TraceError(f"{where}: found {'nothing' if prompt is None else short(prompt)}, expected {LINE}")
    if not tokens:
        raise TraceError(f"{where}: found an empty prompt, expected one token or more")
    return tokens
