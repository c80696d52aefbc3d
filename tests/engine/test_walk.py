"""The random walk over the real engine: whatever happens to it, it says what an undisturbed one says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from processes import children_of, is_gone
from walk import REQUESTS, engine, work

from orlop.cli.compare import compare

CHILD = Path(__file__).with_name("walk.py")
KILLED_AFTER = (90,)
"""Requests that have ended in a life when it is killed; the last life runs to its end."""


@cache
def undisturbed(model):
    """What each request says on a device that holds everything, without offload."""
    torch.set_num_threads(1)
    with engine(model, num_blocks=4096) as llm:
        ids = {llm.add_request(prompt, count): number for number, (prompt, count) in work().items()}
        return {str(ids[r.request_id]): r.tokens for r in llm.run()}


def live(directory, model, async_scheduling, life, todo):
    """Start a life; its process."""
    settings = {
        "path": str(directory),
        "model": model,
        "async_scheduling": async_scheduling,
        "life": life,
        "todo": todo,
    }
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(CHILD), json.dumps(settings)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def kill(child):
    """SIGKILL; its I/O process must end by itself."""
    children = children_of(child.pid)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait(60) == -signal.SIGKILL
    assert children
    assert all(is_gone(pid, 60) for pid in children)


def total(stats, name):
    """A counter of all tiers."""
    return sum(count for key, count in stats.items() if key.startswith(f"{name} "))


@pytest.mark.crash
@pytest.mark.fault("B202")
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("model", ["full", "mixed"])
def test_a_random_walk_with_every_accident_says_what_an_undisturbed_run_says(tmp_path, model, async_scheduling):
    ended, aborted, books = {}, set(), {}
    for life, limit in enumerate((*KILLED_AFTER, None)):
        todo = [n for n in range(REQUESTS) if str(n) not in ended and str(n) not in aborted]
        child = live(tmp_path / "files", model, async_scheduling, life, todo)
        ends_before = len(ended)
        with child, child.stdout as lines:
            for line in lines:
                facts = json.loads(line)
                if "ended" in facts:
                    ended[facts["ended"]] = tuple(facts["tokens"])
                elif "aborted" in facts:
                    aborted.add(facts["aborted"])
                else:
                    books = facts
                if limit is not None and len(ended) - ends_before == limit:
                    kill(child)
                    break
        assert child.returncode == (0 if limit is None else -signal.SIGKILL)

    assert len(ended) + len(aborted) == REQUESTS
    assert aborted
    prompts = {str(number): prompt for number, (prompt, _) in work().items()}
    with engine(model) as judge:
        verdict = compare(prompts, undisturbed(model), ended, lambda tokens: judge.logits_after(tokens).tolist())
    assert verdict.different == []
    assert verdict.equal + verdict.ties == len(ended)
    assert (books["free"], books["pending"]) == (True, False)
    assert books["preemptions"] > 0
    assert books["resets"] > 0
    stats = books["stats"]
    assert books["same"]
    assert books["served"] == 40
    # What comes back from such a store is its luck and its breaker's; that it was tried and failed is not.
    assert total(stats, "chunks_cascaded") > 0
    assert total(stats, "cascade_failures") > 0
