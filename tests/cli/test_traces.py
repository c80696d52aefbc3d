"""Reading traces: the two formats, what their ids become, and what is said of a broken line."""

from __future__ import annotations

import gzip
import json

import pytest

from orlop.cli.traces import LMCACHE_AGENT, MOONCAKE, read_lines, read_requests
from orlop.errors import TraceError


def line(input_length, hash_ids, output_length=5, **more):
    return json.dumps(
        {"timestamp": 0, "input_length": input_length, "output_length": output_length, "hash_ids": hash_ids} | more
    )


def written(path, *lines):
    path.write_text("".join(text + "\n" for text in lines))
    return path


def prompts(path, **options):
    options = {"limit": None, "tokens_per_block": 16, "max_output": 4, "vocab_size": 512} | options
    return [r.prompt for r in read_requests(path, **options)]


def test_each_line_is_read_in_the_format_that_its_number_of_ids_fits(tmp_path):
    path = written(
        tmp_path / "t",
        line(1100, [1, 2, 3]),
        line(1100, list(range(68)), session=0),
        line(1100, list(range(68))),
        line(16, [5]),
        line(16, [5], session=0),
    )
    formats = [one.format for one in read_lines(path)]
    assert formats == [MOONCAKE, LMCACHE_AGENT, LMCACHE_AGENT, MOONCAKE, LMCACHE_AGENT]


def test_equal_ids_are_equal_tokens_and_a_partial_block_is_the_start_of_one(tmp_path):
    path = written(tmp_path / "t", line(1024, [1, 2]), line(1024, [1, 3]), line(600, [1, 2]), line(513, [1, 2]))
    whole, other, partial, least = prompts(path)
    assert [len(p) for p in (whole, other, partial, least)] == [32, 32, 19, 17]
    assert whole[:16] == other[:16]
    assert whole[16:] != other[16:]
    assert partial == whole[:19]
    assert least == whole[:17]


def test_what_an_agent_trace_has_no_ids_for_belongs_to_that_line_alone(tmp_path):
    path = written(tmp_path / "t", line(40, [1, 2], session=0), line(40, [1, 2], session=0))
    first, second = prompts(path)
    assert len(first) == 40
    assert first[:32] == second[:32]
    assert first[32:] != second[32:]


def test_the_same_ids_of_two_formats_are_different_tokens(tmp_path):
    path = written(tmp_path / "t", line(512, [1]), line(16, [1], session=0))
    first, second = prompts(path)
    assert first != second


def test_prompts_are_the_same_in_every_process():
    from orlop.cli.traces import TraceLine, prompt_of

    assert prompt_of(TraceLine(1, MOONCAKE, 512, 1, (7,)), 4, 512) == [312, 415, 133, 219]


def test_gzip_is_known_by_its_first_bytes(tmp_path):
    plain = written(tmp_path / "t", line(512, [1]), "", line(512, [2]))
    packed = tmp_path / "named-otherwise"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert prompts(packed) == prompts(plain)
    assert len(prompts(packed)) == 2


def test_limit_and_output_are_capped_and_lines_behind_the_limit_are_not_looked_at(tmp_path):
    path = written(tmp_path / "t", line(512, [1], output_length=0), line(512, [1], output_length=99), "broken")
    requests = read_requests(path, limit=2, tokens_per_block=1, max_output=4, vocab_size=512)
    assert [r.max_tokens for r in requests] == [1, 4]
    assert [r.request_id for r in requests] == ["line-1", "line-2"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "found no JSON"),
        ("[" * 100_000, "found no JSON"),
        ("[1]", "found list, expected one JSON object"),
        ('{"output_length": 1, "hash_ids": []}', "found nothing for 'input_length'"),
        (line(True, [1]), "found True for 'input_length'"),
        (line(-1, []), "found -1 for 'input_length'"),
        (line(512, [1], output_length="5"), "found '5' for 'output_length'"),
        (line(512, 1), "found 1 for 'hash_ids', expected a list"),
        ('{"input_length": 1, "output_length": 1}', "found nothing for 'hash_ids', expected a list"),
        (line(512, "x" * 999), r"found 'x{59}\.\.\. for 'hash_ids'"),
        (line(512, [1, "a"]), "found 'a' in 'hash_ids', expected whole numbers"),
        (line(512, [None]), "found None in 'hash_ids'"),
        (line(512, [1], session_id="a"), "found 'session_id', expected 'session', a whole number"),
        (line(512, [1, 2]), r"found 2 hash_ids for input_length 512, expected 1 \(Mooncake.*or 32 \(LMCache"),
        (line(512, [1], session=3), r"expected 32 \(LMCache agent"),
        ("\udcff", "found no JSON"),
    ],
)
def test_a_broken_line_is_named_with_file_and_number(tmp_path, text, says):
    path = tmp_path / "t"
    path.write_bytes((line(512, [1]) + "\n" + text + "\n").encode("utf-8", "surrogateescape"))
    with pytest.raises(TraceError, match=rf"{path}, line 2: .*{says}"):
        list(read_lines(path))


def test_a_file_that_is_missing_empty_or_cut_short_is_named(tmp_path):
    with pytest.raises(TraceError, match="missing: cannot be read: No such file"):
        prompts(tmp_path / "missing")
    with pytest.raises(TraceError, match="empty: found no request"):
        prompts(written(tmp_path / "empty"))
    with pytest.raises(TraceError, match=f"{tmp_path}: cannot be read"):
        prompts(tmp_path)
    cut = tmp_path / "cut"
    cut.write_bytes(gzip.compress("".join(line(512, [i]) + "\n" for i in range(5_000)).encode())[:-500])
    with pytest.raises(TraceError, match=r"cut, after line [1-9]\d*: cannot be read"):
        prompts(cut)


def test_sessions_are_overlaid_one_line_of_each_in_turn(tmp_path):
    lines = [line(16, [i], session=s) for i, s in enumerate([0, 0, 0, 1, 2, 2, 2])]
    path = written(tmp_path / "t", *lines)
    numbers = [
        r.request_id
        for r in read_requests(path, limit=None, tokens_per_block=4, max_output=1, vocab_size=512, overlay=2)
    ]
    assert numbers == [f"line-{n}" for n in (1, 4, 2, 5, 3, 6, 7)]


def test_a_trace_without_sessions_stays_in_file_order_however_many_are_overlaid(tmp_path):
    path = written(tmp_path / "t", *(line(16, [i]) for i in range(9)))
    requests = read_requests(path, limit=None, tokens_per_block=4, max_output=1, vocab_size=512, overlay=4)
    assert [r.request_id for r in requests] == [f"line-{n}" for n in range(1, 10)]
