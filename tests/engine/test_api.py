"""The Python API over a model directory: text in and out, sampling, streaming, abort, the ends of an engine."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest
import torch
from engine_doubles import DictConnector, engine, greedy, run_checked

from orlop.engine.llm import LLM, EngineConfig
from orlop.engine.sampling import SamplingParams, sample, uniform
from orlop.errors import ConfigError, OrlopError
from orlop.testing.checkpoints import write_checkpoint

torch.set_num_threads(1)

SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, top_k=40, top_p=0.95, seed=7)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture
def llm(directory):
    with LLM(directory, EngineConfig(num_blocks=64, block_tokens=8)) as llm:
        yield llm


# --- text -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_after_generate_nothing_is_left_of_a_request_that_stopped_by_itself(directory, async_scheduling):
    with LLM(directory, EngineConfig(num_blocks=64, async_scheduling=async_scheduling)) as llm:
        (whole,) = llm.generate("Ahoy", 8)
        llm.generate("Ahoy", SamplingParams(8, stop_token_ids=[whole.tokens[3]]))
        assert not llm.has_work()


def test_text_is_its_tokens_with_the_begin_token_and_the_answer_is_text_again(llm):
    by_text, by_ids = llm.generate(["Ahoy", [256, *b"Ahoy"]], 10)
    assert by_text.tokens == by_ids.tokens
    assert by_text.num_prompt_tokens == 5
    assert by_text.text == llm.text.decode(by_text.tokens) != ""


def test_a_single_text_is_one_prompt(llm):
    assert [r.tokens for r in llm.generate("Ahoy", 3)] == [r.tokens for r in llm.generate(["Ahoy"], 3)]


def test_without_a_tokenizer_ids_run_and_text_is_refused(tmp_path):
    directory = write_checkpoint(tmp_path)
    (directory / "tokenizer.json").unlink()
    with LLM(directory, EngineConfig(num_blocks=64)) as llm:
        (result,) = llm.generate([[1, 2]], 3)
        assert (len(result.tokens), result.text) == (3, None)
        with pytest.raises(ConfigError, match="no tokenizer"):
            llm.generate(["Ahoy"], 3)


def test_an_end_token_of_the_model_ends_a_request_unless_it_is_told_to_go_on(tmp_path):
    plain = write_checkpoint(tmp_path / "plain")
    with LLM(plain, EngineConfig(num_blocks=64)) as llm:
        (whole,) = llm.generate([[1, 2]], 20)
    end = whole.tokens[4]
    ending = write_checkpoint(tmp_path / "ending", eos_token_id=[3, end])
    with LLM(ending, EngineConfig(num_blocks=64)) as llm:
        (stopped,) = llm.generate([[1, 2]], 20)
        (ignored,) = llm.generate([[1, 2]], SamplingParams(20, ignore_eos=True))
    assert stopped.tokens == whole.tokens[: whole.tokens.index(end) + 1]
    assert (stopped.finish_reason, whole.finish_reason) == ("stop", "length")
    assert ignored.tokens == whole.tokens


# --- streaming --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_pieces_joined_are_what_generate_answers(directory, async_scheduling):
    config = EngineConfig(num_blocks=200, block_tokens=8, async_scheduling=async_scheduling)
    prompts = ["Ahoy", "The orlop is the lowest deck \u2693", [256, 240, 159], *([n, n] for n in range(40))]
    with LLM(directory, config) as llm:
        expected = llm.generate(prompts, SAMPLED)
        pieces = list(llm.stream(prompts, SAMPLED))
    results = [p.result for p in pieces if p.result is not None]
    assert Counter(r.tokens for r in results) == Counter(r.tokens for r in expected)
    for result in results:
        mine = [p for p in pieces if p.request_id == result.request_id]
        assert sum((p.tokens for p in mine), ()) == result.tokens
        assert len(mine) > 3
        assert "".join(p.text for p in mine) == result.text


def test_who_leaves_a_stream_early_aborts_what_is_left_and_nothing_of_others_is_lost(llm):
    other = llm.add_request("another", 5)
    stream = llm.stream(["Ahoy", "there"], 200)
    for _ in range(12):
        next(stream)
    stream.close()
    assert [r.request_id for r in run_checked(llm).values()] == [other]
    assert llm.scheduler.pool.num_free == llm.scheduler.pool.capacity


def test_results_of_others_wait_for_the_next_step(llm):
    other = llm.add_request("another", 2)
    llm.generate("Ahoy", 8)
    assert not llm.scheduler.has_unfinished
    assert [r.request_id for r in llm.step()] == [other]
    assert llm.step() == []


def test_a_streamed_request_that_is_aborted_by_id_ends_its_stream(llm):
    stream = llm.stream("Ahoy", 200)
    first = next(stream)
    assert llm.abort(first.request_id).tokens[:1] == first.tokens
    assert list(stream) == []


# --- sampling ---------------------------------------------------------------------------------------------


def test_what_is_sampled_does_not_depend_on_the_other_requests_or_on_preemption():
    prompts = [[n, 2 * n, 3 * n] for n in range(1, 9)]
    each = [SamplingParams(20, temperature=0.8, top_k=50, seed=n) for n in range(8)]
    alone = [engine().generate([prompt], params)[0].tokens for prompt, params in zip(prompts, each, strict=True)]
    for settings in ({}, {"num_blocks": 12, "block_tokens": 4}, {"async_scheduling": True, "max_step_tokens": 5}):
        llm = engine(**settings)
        assert [r.tokens for r in llm.generate(prompts, each)] == alone
    small = engine(num_blocks=12, block_tokens=4)
    small.generate(prompts, each)
    assert small.scheduler.num_preemptions > 0


def test_the_seed_decides_and_without_one_requests_differ():
    llm = engine()
    prompts = [[5, 6]] * 4
    same = llm.generate(prompts, SAMPLED)
    others = llm.generate(prompts, SamplingParams(12, temperature=1.0))
    assert len({r.tokens for r in same}) == 1
    assert len({r.tokens for r in others}) == 4


def test_top_k_of_one_and_a_tiny_top_p_are_greedy():
    llm = engine()
    expected = greedy(llm, [5, 6], 8)
    for params in (SamplingParams(8, temperature=2.0, top_k=1), SamplingParams(8, temperature=2.0, top_p=1e-9)):
        assert llm.generate([[5, 6]], params)[0].tokens == expected


def test_tokens_are_drawn_as_often_as_their_probability_says():
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0, 3.0])
    number = 3_000

    def share(params):
        drawn = Counter(sample(logits, params, 1, position) for position in range(number))
        return [drawn[token] / number for token in range(5)]

    def expect(params, likely):
        assert share(params) == pytest.approx((likely / likely.sum()).tolist(), abs=0.03)

    expect(SamplingParams(temperature=1.0), logits.exp())
    expect(SamplingParams(temperature=2.0), (logits / 2).exp())
    expect(SamplingParams(temperature=1.0, top_k=3), logits.exp() * torch.tensor([0, 1, 1, 0, 1]))
    # 0.64 and 0.24 are the two likeliest: 0.8 is reached with both of them.
    expect(SamplingParams(temperature=1.0, top_p=0.8), logits.exp() * torch.tensor([0, 1, 0, 0, 1]))


def test_numbers_for_neighbouring_seeds_and_positions_are_all_different():
    drawn = {uniform(seed, position) for seed in range(50) for position in range(50)}
    assert len(drawn) == 2500
    assert all(0 <= u < 1 for u in drawn)
    assert 0.45 < sum(drawn) / 2500 < 0.55


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"temperature": 10**400},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"seed": -1},
        {"seed": 2**64},
        {"stop_token_ids": ["end"]},
        {"stop_token_ids": "end"},
        {"stop_token_ids": 5},
        {"stop_token_ids": None},
        {"stop_token_ids": iter([1])},
        {"ignore_eos": 1},
    ],
)
def test_sampling_that_cannot_work_is_refused_by_name(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError, match=rf"^{name}={re.escape(repr(value))}: found .* expected"):
        SamplingParams(**settings)


# --- ends -------------------------------------------------------------------------------------------------


def test_the_context_manager_shuts_down(directory):
    with LLM(directory, EngineConfig(num_blocks=64)) as llm:
        llm.add_request("Ahoy", 100)
    with pytest.raises(OrlopError, match="shut down"):
        llm.generate("Ahoy", 1)


def test_one_set_of_params_per_prompt_or_one_for_all(llm):
    assert [len(r.tokens) for r in llm.generate(["a", "b"], [3, SamplingParams(5)])] == [3, 5]
    with pytest.raises(ConfigError, match="found 1 for 2 prompts"):
        llm.generate(["a", "b"], [3])
    with pytest.raises(ConfigError, match=r"max_tokens=\[\]"):
        llm.generate(["a"], [[]])
    assert not llm.has_work()


def test_a_prompt_longer_than_the_model_allows_is_refused(tmp_path):
    directory = write_checkpoint(tmp_path, max_position_embeddings=32)
    with LLM(directory, EngineConfig(num_blocks=64)) as llm:
        with pytest.raises(ConfigError, match=r"30 prompt tokens and 3 to generate make 33.*positions for 32"):
            llm.add_request([1] * 30, 3)
        assert llm.generate([[1] * 30], 2)[0].finish_reason == "length"


def test_an_answer_waits_for_its_transfers_up_to_the_drain_deadline_and_the_next_call_settles_them():
    now = itertools.count()
    connector = DictConnector()
    llm = LLM(EngineConfig(num_blocks=64, idle_wait_s=0.0), connect=connector.connect, clock=lambda: next(now) / 10)
    connector.pending = True
    llm.generate([[1, 2]], 2)
    steps = len([call for call in connector.calls if call == ("meta",)])
    assert 10 < steps < 40  # 3 s by a clock that moves a tenth per look
    assert llm.has_work()
    connector.pending = False
    before = len(connector.calls)
    llm.generate([[1, 2]], 2)
    assert len(connector.calls) - before < 20
    assert not llm.has_work()


# --- in the middle, and after the end ----------------------------------------------------------------------------


def offloading(**settings):
    return LLM(EngineConfig(num_blocks=64), offload={"host": "8MiB", "blocks_per_chunk": 2, **settings})


PROMPTS = [[1, 2, 3] * 20, [4, 5] * 20]


def joined(pieces):
    said = {}
    for piece in pieces:
        said.setdefault(piece.request_id, []).extend(piece.tokens)
    return [tuple(tokens) for tokens in said.values()]


@pytest.mark.parametrize("between", ["generate", "stream", "step"])
def test_a_stream_ends_whoever_steps_the_engine_between_its_pieces(between):
    with LLM(EngineConfig(num_blocks=64)) as llm:
        expected = [r.tokens for r in llm.generate(PROMPTS, 6)]
        stream, said, results = llm.stream(PROMPTS, 6), [], []
        for piece in stream:
            said.append(piece)
            results += [piece.result] if piece.result is not None else []
            if between == "generate":
                llm.generate([[7, 8, 9]], 3)
            elif between == "stream":
                list(llm.stream([[7, 8, 9]], 3))
            else:
                llm.step()
        assert joined(said) == expected == [r.tokens for r in results]
        assert not llm.has_work()


def test_a_stream_that_nobody_began_leaves_nothing_queued():
    with LLM(EngineConfig(num_blocks=64)) as llm:
        stream = llm.stream(PROMPTS, 6)
        assert llm.has_work()
        stream.close()
        assert not llm.scheduler.has_unfinished


def test_after_shutdown_nothing_steps_and_a_stream_has_ended():
    llm = offloading()
    for number, _ in enumerate(llm.stream(PROMPTS, 12)):
        if number == 2:
            llm.shutdown()
    assert llm.step() == llm.run() == []
    llm.reset_prefix_cache()
    assert llm.abort("request-0") is None
    assert not llm.has_work()
    llm.shutdown()


def test_a_prompt_that_raises_leaves_none_of_the_others_queued(llm):
    class Raises(list):
        def __iter__(self):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llm.generate([[1, 2, 3], Raises([1])], 2)
    assert not llm.has_work()


def test_text_that_utf_8_cannot_say_is_refused(llm):
    with pytest.raises(ConfigError, match="expected text that UTF-8 can say"):
        llm.generate("\ud800", 2)
    assert not llm.has_work()


@pytest.mark.parametrize("request_id", [5, b"x", []])
def test_an_id_is_a_text(llm, request_id):
    with pytest.raises(ConfigError, match="found an id that is no text"):
        llm.add_request([1], 2, request_id=request_id)


@pytest.mark.parametrize("model", [None, "path/to/model"])
def test_a_directory_in_the_place_of_a_shape_is_refused(model):
    with pytest.raises(ConfigError, match="a directory is LLM's first argument"):
        EngineConfig(model=model)


@pytest.mark.parametrize("name", ["idle_wait_s", "drain_deadline_s"])
@pytest.mark.parametrize("seconds", [10**400, float("nan"), float("inf"), True])
def test_seconds_that_no_clock_has_are_refused(name, seconds):
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**{name: seconds})
