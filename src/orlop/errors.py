"""The tree of errors, with what each means for a request.

In: nothing. Out: exception classes. Never: raised on an engine's step path; what happens there is an
answer (a miss, a failed job), a counter and a log line. A message says what was found, what was
expected and what to do next.
"""

from __future__ import annotations


class OrlopError(Exception):
    """Base of everything that Orlop raises on purpose."""


class ConfigError(OrlopError):
    """A setting that can never work. The start is refused; no request has been touched."""


class ResourceError(OrlopError):
    """The machine cannot give what a setting asks for: memory, locked memory, disk. The start is refused."""


class TierUnavailable(OrlopError):
    """A tier that is marked ``required`` cannot be reached at start."""


class RegionError(OrlopError):
    """The shared host region cannot be created, found or joined. The start is refused."""


class StoreError(OrlopError):
    """A chunk store failed as a whole. For requests: the job's keys are misses; the breaker counts it."""


class CopyError(OrlopError):
    """A copy between device and host memory was refused or failed. For requests: a load's tokens are computed,
    a store's keys are dropped."""


class EnvelopeError(OrlopError):
    """Bytes at rest do not verify. For requests: a miss for that chunk alone; the chunk is removed.

    ``reason`` is one of ``tiering.envelope.Reason``.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class TraceError(OrlopError):
    """A file of prompts or a workload trace cannot be read. Names the file and the line."""


class InvariantError(OrlopError):
    """``check()`` recounted the books and they do not add up. Raised by tests and tools only."""


class MissingExtra(OrlopError):
    """An optional package is not installed. Names the extra to install."""
