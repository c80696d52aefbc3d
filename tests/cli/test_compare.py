"""Which differences are ties, and how runs are summed up."""

from __future__ import annotations

from orlop.cli.compare import compare
from orlop.cli.replay import RunReport

PROMPTS = {"r": [1, 2]}


def verdict(expected, found, logits):
    asked = []

    def logits_after(tokens):
        asked.append(tokens)
        return logits

    return compare(PROMPTS, {"r": expected}, {"r": found}, logits_after), asked


def test_equal_tokens_are_not_computed_again():
    result, asked = verdict((5, 6), (5, 6), [])
    assert (result.equal, result.ties, result.different, asked) == (1, 0, [], [])


def test_a_difference_between_the_two_best_is_a_tie_below_the_gap_only():
    near, asked = verdict((5, 0, 3), (5, 1, 9), [2.0, 2.00009, 0.0])
    assert (near.ties, near.different) == (1, [])
    assert asked == [[1, 2, 5]]  # and nothing after the first difference
    far, _ = verdict((5, 0, 3), (5, 1, 3), [2.0, 2.00011, 0.0])
    assert (far.ties, far.different[0].position, far.different[0].expected, far.different[0].found) == (0, 1, 0, 1)


def test_a_token_that_is_not_among_the_best_is_no_tie_although_those_two_are():
    result, _ = verdict((0,), (2,), [2.0, 2.00001, 1.0])
    assert (result.ties, len(result.different)) == (0, 1)
    both, _ = verdict((1,), (2,), [2.0, 1.0, 1.00001])
    assert (both.ties, len(both.different)) == (0, 1)


def test_a_run_that_stopped_early_differs():
    result, asked = verdict((5, 6), (5,), [])
    assert (result.different[0].position, result.different[0].expected, result.different[0].found) == (1, 6, None)
    assert asked == []


def test_requests_that_only_one_run_has_ended_are_not_judged():
    assert compare(PROMPTS, {"r": (1,)}, {}, lambda tokens: []).requests == 0
    assert compare(PROMPTS, {}, {"r": (1,)}, lambda tokens: []).requests == 0


def test_percentiles_are_times_that_were_measured():
    report = RunReport(first_token_s=(4.0, 1.0, 3.0, 2.0))
    assert report.first_token_percentile_s(50) == 2.0
    assert report.first_token_percentile_s(95) == 4.0
    assert report.first_token_percentile_s(1) == 1.0
    assert RunReport().first_token_percentile_s(50) is None


def test_loaded_tokens_are_told_by_tier():
    report = RunReport(stats={"tokens_loaded": 9.0, "tokens_loaded host": 4.0, "tokens_loaded 0:files": 5.0, "x": 1.0})
    assert report.tokens_loaded_by_tier == {"host": 4, "0:files": 5}
