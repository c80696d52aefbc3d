"""Cost follows change: what a decode step and a repeated question touch does not grow with the context.

In: engines whose requests are short or forty times as long. Out: counts of states, keys and bytes; no time is taken.
Never: a clock.
"""

from __future__ import annotations

import statistics
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, overload

import pytest

from orlop.core import Lookup
from orlop.testing.doubles import DictManager
from orlop.testing.request_runner import EngineRequest
from orlop.testing.rig import FULL, HYBRID, Rig, make_rig

SHORT, LONG = 64, 64 * 40


class CountedHashes(list[bytes]):
    """The engine's hashes of a request, counting how many of them are looked at."""

    looked_at = 0

    @overload
    def __getitem__(self, index: Any) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.looked_at += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Iterator[bytes]:
        self.looked_at += len(self)
        return super().__iter__()


def decoding(tokens: int, geometry: Any = FULL, requests: int = 1) -> tuple[Rig, list[EngineRequest]]:
    """An engine whose requests have their prompts computed and stored and are saying something."""
    rig = make_rig(geometry, DictManager(20000), blocks=4000, token_budget=10**6)
    made = [rig.runner.add(range(10**5 * i, 10**5 * i + tokens), 400) for i in range(requests)]
    for request in made:
        request.block_hashes = CountedHashes(request.block_hashes)
    for _ in range(4):
        rig.runner.step()
    return rig, made


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that was held at once during a call, beyond what was held before."""
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    call()
    return tracemalloc.get_traced_memory()[1] - before


def measured(rig: Rig, steps: int) -> list[int]:
    """Peak bytes of ``build_connector_meta`` in each of some steps."""
    peaks: list[int] = []
    original = rig.scheduler.build_connector_meta

    def build(output: Any, *, now: float) -> Any:
        made: list[Any] = []
        peaks.append(peak_bytes(lambda: made.append(original(output, now=now))))
        return made[0]

    rig.scheduler.build_connector_meta = build  # type: ignore[method-assign]
    tracemalloc.start()
    try:
        for _ in range(steps):
            rig.runner.step()
    finally:
        tracemalloc.stop()
        rig.scheduler.build_connector_meta = original  # type: ignore[method-assign]
    return peaks


@pytest.mark.parametrize("geometry", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("tokens", [SHORT, LONG])
def test_a_decoding_request_is_touched_once_per_block_and_its_old_keys_never(tokens: int, geometry: Any) -> None:
    rig, (request,) = decoding(tokens, geometry)
    touched = rig.scheduler.counters["states_touched"]
    request.block_hashes.looked_at = 0  # type: ignore[attr-defined]
    rig.manager.calls.clear()
    for _ in range(40):
        rig.runner.step()
    assert rig.scheduler.counters["states_touched"] - touched == 10
    in_runner = 2 * 10
    assert request.block_hashes.looked_at - in_runner <= 2 * 10  # type: ignore[attr-defined]
    offered = [call.what for call in rig.manager.calls if call.name == "prepare_store"]
    assert len(offered) <= 10 * len(geometry.groups)
    assert max(len(run) for run in offered) == 1, "what is settled is not offered again"
    assert rig.manager.count("lookup_prefix") == rig.manager.count("touch") == 0


def test_a_step_message_needs_no_more_memory_for_a_longer_context() -> None:
    peaks = {}
    for tokens in (SHORT, LONG):
        rig, _ = decoding(tokens)
        peaks[tokens] = statistics.median_high(sorted(measured(rig, 41))[-15:])
    assert peaks[LONG] <= 1.5 * peaks[SHORT], peaks


def test_a_step_in_which_nothing_happens_touches_no_request() -> None:
    rig, _ = decoding(62, requests=16)
    touched, calls = rig.scheduler.counters["states_touched"], len(rig.manager.calls)
    rig.runner.step()
    assert rig.scheduler.counters["states_touched"] == touched
    assert [call.name for call in rig.manager.calls[calls:]] == ["on_schedule_end"]
    assert rig.runner.last_meta.store_jobs == ()


@pytest.mark.parametrize("tokens", [SHORT, LONG])
def test_asking_again_with_nothing_changed_looks_at_no_key(tokens: int) -> None:
    rig = make_rig(manager=DictManager(), blocks=4000)
    rig.manager.inner.verdict = lambda group, h: Lookup.RETRY  # type: ignore[attr-defined]
    request = rig.runner.add(range(tokens), 1)
    request.block_hashes = CountedHashes(request.block_hashes)
    rig.runner.step()
    request.block_hashes.looked_at = 0  # type: ignore[attr-defined]
    calls = len(rig.manager.calls)
    tracemalloc.start()
    try:
        ask = lambda: rig.scheduler.get_num_new_matched_tokens(request, 0, now=rig.clock.now)  # noqa: E731
        # Of most calls: whatever else lives in this process may allocate during one of them.
        peak = statistics.median_high(peak_bytes(ask) for _ in range(21))
    finally:
        tracemalloc.stop()
    assert request.block_hashes.looked_at == 0  # type: ignore[attr-defined]
    assert len(rig.manager.calls) == calls
    assert peak < 2000


@pytest.mark.fault("B093")
def test_declined_chunks_cost_one_offer_per_block_while_there_is_no_room() -> None:
    rig, (request,) = decoding(SHORT)
    rig.manager.inner.room = False  # type: ignore[attr-defined]
    rig.manager.calls.clear()
    for _ in range(80):
        rig.runner.step()
    assert request.num_computed_tokens >= SHORT + 80
    assert rig.manager.count("prepare_store") <= 20
