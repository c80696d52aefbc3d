"""Orlop as a KV connector of vLLM: its name, and its place in vLLM's registry.

In: vLLM, which calls ``register`` in every process that it starts. Out: the connector ``OrlopConnector``, so that
``{"kv_connector": "OrlopConnector", "kv_role": "kv_both"}`` is enough. Never: vLLM imported before it asks for us.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orlop.vllm.connector import OrlopConnector

__all__ = ["OrlopConnector", "register"]

NAME = "OrlopConnector"


def register() -> None:
    """Enter the connector in vLLM's registry. Called by vLLM's plug-in loader, any number of times."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, __name__, NAME)


def __getattr__(name: str) -> Any:
    """vLLM looks the class up here, by its registry or by ``kv_connector_module_path: orlop.vllm``.

    Found by its path it is entered in the registry too: where it is one of several connectors, vLLM's front-end goes by
    the name alone. ``ConfigError`` where this release of vLLM lacks a name that we import.
    """
    if name == NAME:
        try:
            register()
            from orlop.vllm.connector import OrlopConnector
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "vllm":
                raise
            from orlop.vllm.versions import lacks

            raise lacks(error) from error
        return OrlopConnector
    raise AttributeError(f"module 'orlop.vllm' has no attribute {name!r}")
