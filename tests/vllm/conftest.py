"""What the tests of this folder share: small checkpoints, and what an engine without a connector says to them.

In: an environment with vLLM's CPU build; without it every test here is skipped by name. Out: fixtures that live as
long as the run, since an engine takes ten seconds to start. Never: a model hub.

Tests ask for ``vllm.config``: where vLLM is not installed, this folder may answer to its name.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process, so that a test can look inside
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several would spin for each other at every layer
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Chunk stores of this folder are looked up by name in processes that we start.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # other people's, and many


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a small checkpoint by its kind: ``llama``, ``gemma`` or ``blip2``; made once."""
    import vllm_models

    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = getattr(vllm_models, f"make_{kind}")(tmp_path_factory.mktemp(kind))
        return made[kind]

    return of


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], object]:
    """What a model says without a connector: ``reference(kind).answers(prompts, max_tokens)``; asked once each."""
    from vllm_engine import Reference

    made: dict[str, Reference] = {}
    return lambda kind: made.setdefault(kind, Reference(checkpoint(kind)))


@pytest.fixture
def orlop_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """What we say, each line once. In vLLM our lines go to its handlers and nowhere else."""
    logger = logging.getLogger("orlop")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, "orlop"):
        yield caplog
    logger.removeHandler(caplog.handler)
