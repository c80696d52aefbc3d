"""A user's own prompts: what a line may be, and what is said of a broken one."""

from __future__ import annotations

import json

import pytest

from orlop.cli.prompts import read_prompts
from orlop.errors import ConfigError, TraceError


def encode(text):
    if text == "refused":
        raise ConfigError("found a text that no tokenizer takes")
    return list(text.encode())


def read(tmp_path, *lines, limit=None):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return read_prompts(path, limit=limit, max_output=7, encode=encode)


def test_a_line_is_a_text_a_list_of_ids_or_an_object(tmp_path):
    requests = read(tmp_path, '"ab"', [3, 4], "", {"prompt": "c", "max_tokens": 2, "id": "mine"}, {"prompt": [9]})
    assert [(r.request_id, r.prompt, r.max_tokens) for r in requests] == [
        ("line-1", [97, 98], 7),
        ("line-2", [3, 4], 7),
        ("mine", [99], 2),
        ("line-5", [9], 7),
    ]


def test_lines_behind_the_limit_are_not_looked_at(tmp_path):
    assert len(read(tmp_path, [1], [2], "broken", limit=2)) == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "found no JSON"),
        ("7", "found 7, expected a text, a list of token ids"),
        ("null", "found nothing, expected a text"),
        ("{}", "found nothing, expected a text"),
        ("[1, -1]", r"found \[1, -1\], expected"),
        ("[true]", r"found \[True\], expected"),
        ('[1, "a"]', "expected a text, a list of token ids"),
        ('""', "found an empty prompt"),
        ("[]", "found an empty prompt"),
        ('{"prompt": [1], "max_tokens": 0}', "found 0 for 'max_tokens'"),
        ('{"prompt": [1], "max_tokens": "5"}', "found '5' for 'max_tokens'"),
        ('{"prompt": [1], "id": 5}', "found 5 for 'id'"),
        ('{"prompt": [1], "temperature": 1}', "found the field 'temperature', expected prompt, max_tokens, id"),
        ('{"prompt": [1], "id": "line-1"}', "found the id 'line-1' again"),
        ('"refused"', "found a text that no tokenizer takes"),
    ],
)
def test_a_broken_line_is_named_with_file_and_number(tmp_path, line, says):
    with pytest.raises(TraceError, match=rf"{tmp_path}/p.jsonl, line 2: .*{says}"):
        read(tmp_path, [1], line)


def test_a_file_without_a_prompt_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"p\.jsonl: found no prompt"):
        read(tmp_path, "")
