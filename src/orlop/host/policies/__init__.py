"""Eviction policies by name.

In: a name from the settings. Out: a policy for so many slots. Never: a policy's own work; each is one file here, or a
class of the user's.
"""

from __future__ import annotations

from importlib import import_module

from orlop.errors import ConfigError
from orlop.host.policies.base import EvictionPolicy

BUILT_IN = {
    "lru": "orlop.host.policies.lru:LRU",
    "arc": "orlop.host.policies.arc:ARC",
    "s3fifo": "orlop.host.policies.s3fifo:S3FIFO",
    "sieve": "orlop.host.policies.sieve:Sieve",
}


def load_policy(name: str, slots: int) -> EvictionPolicy:
    """The policy called ``name``, or the class at ``module:Class``, built for ``slots`` slots.

    Raises ``ConfigError`` for a name that does not exist, a module that cannot be imported and a class that is no
    ``EvictionPolicy``.
    """
    module_name, colon, class_name = BUILT_IN.get(name, name).partition(":")
    if not (module_name and colon and class_name):
        raise ConfigError(
            f"host.policy: found {name!r}, expected one of {', '.join(sorted(BUILT_IN))}, "
            "or module:Class of your own EvictionPolicy"
        )
    try:
        module = import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"host.policy: importing {module_name!r} for {name!r} failed ({type(error).__name__}: {error}); "
            "put the module on the Python path of the engine's process"
        ) from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, EvictionPolicy)):
        there = sorted(n for n, c in vars(module).items() if isinstance(c, type) and issubclass(c, EvictionPolicy))
        raise ConfigError(
            f"host.policy: found {found!r} at {name!r}, expected a subclass of "
            f"orlop.host.policies.base.EvictionPolicy; that module has {', '.join(there) or 'none'}"
        )
    try:
        return found(slots)
    except TypeError as error:
        raise ConfigError(
            f"host.policy: {name!r} could not be built ({error}); a policy is built with the number of slots as its "
            "one argument and implements every abstract method"
        ) from error


__all__ = ["BUILT_IN", "EvictionPolicy", "load_policy"]
