"""The public names of Orlop, KV-cache offloading for LLM engines.

In: nothing. Out: the names below, each fetched from its module when it is first asked for. Never: anything
computed at import, torch, pydantic or an engine pulled in by ``import orlop``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orlop.config import DeadlineConfig, HostConfig, OrlopConfig, TierConfig
    from orlop.connector import OffloadingConnector
    from orlop.core import EngineSpec, KVGroup, OffloadingConnectorMetadata, WorkerOutput
    from orlop.engine.llm import LLM, EngineConfig
    from orlop.engine.sampling import SamplingParams
    from orlop.errors import ConfigError, OrlopError, ResourceError, TierUnavailable
    from orlop.tiering.base import ChunkStore, OffloadingManager, SecondaryTierManager
    from orlop.worker.base import CopyBackend

__version__ = "0.1.0.dev0"

_HOMES = {
    "ChunkStore": "orlop.tiering.base",
    "ConfigError": "orlop.errors",
    "CopyBackend": "orlop.worker.base",
    "DeadlineConfig": "orlop.config",
    "EngineConfig": "orlop.engine.llm",
    "EngineSpec": "orlop.core",
    "HostConfig": "orlop.config",
    "KVGroup": "orlop.core",
    "LLM": "orlop.engine.llm",
    "OffloadingConnector": "orlop.connector",
    "OffloadingConnectorMetadata": "orlop.core",
    "OffloadingManager": "orlop.tiering.base",
    "OrlopConfig": "orlop.config",
    "OrlopError": "orlop.errors",
    "ResourceError": "orlop.errors",
    "SamplingParams": "orlop.engine.sampling",
    "SecondaryTierManager": "orlop.tiering.base",
    "TierConfig": "orlop.config",
    "TierUnavailable": "orlop.errors",
    "WorkerOutput": "orlop.core",
}

__all__ = [
    "LLM",
    "ChunkStore",
    "ConfigError",
    "CopyBackend",
    "DeadlineConfig",
    "EngineConfig",
    "EngineSpec",
    "HostConfig",
    "KVGroup",
    "OffloadingConnector",
    "OffloadingConnectorMetadata",
    "OffloadingManager",
    "OrlopConfig",
    "OrlopError",
    "ResourceError",
    "SamplingParams",
    "SecondaryTierManager",
    "TierConfig",
    "TierUnavailable",
    "WorkerOutput",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'orlop' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
