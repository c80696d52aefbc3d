"""The settings file that a command names.

In: a path. Out: what stands in the file, as a mapping that ``OrlopConfig.load`` reads. Never: a default, a verdict
on a key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orlop.errors import ConfigError


def read_settings(path: Path) -> Mapping[str, Any]:
    """The JSON object in the file ``path``; ``ConfigError`` where there is none."""
    try:
        settings = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read: {error.strerror}; give a JSON file of settings") from error
    except ValueError as error:
        raise ConfigError(f"{path}: found no JSON ({error}), expected one JSON object of settings") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: found {type(settings).__name__}, expected one JSON object of settings")
    return settings
