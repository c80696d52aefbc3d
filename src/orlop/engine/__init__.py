"""The embedded engine: a package of its own, because it alone brings torch.

In: nothing. Out: ``MissingExtra`` where torch is not installed, before any of its modules fails on it. Never: a name.
"""

from orlop.errors import MissingExtra

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingExtra("the embedded engine needs torch: pip install 'orlop[engine]'") from error
