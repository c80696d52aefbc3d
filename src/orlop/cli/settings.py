"""Files that an option names: the settings to read, and those to write to.

In: an option and a path. Out: what stands in the settings file, as a mapping that ``OrlopConfig.load`` reads; one clear
error where a file cannot be read or written. Never: a default, a verdict on a key.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orlop.errors import ConfigError

MOST_SETTINGS_BYTES = 1 << 20
"""No settings are that long; what is has no end, or is something else."""


def read_settings(path: Path) -> Mapping[str, Any]:
    """The JSON object in the file or pipe ``path``; ``ConfigError`` where there is none."""
    try:
        settings = json.loads(_read_bounded(path))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read: {error.strerror}; give a JSON file of settings") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: found no JSON ({error}), expected one JSON object of settings") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: found {type(settings).__name__}, expected one JSON object of settings")
    return settings


def _read_bounded(path: Path) -> bytes:
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or file.isatty()):
            raise ConfigError(f"--config {path}: found a device, expected a JSON file of settings, or a pipe with one")
        content = file.read(MOST_SETTINGS_BYTES + 1)
    if len(content) > MOST_SETTINGS_BYTES:
        raise ConfigError(
            f"--config {path}: found more than {MOST_SETTINGS_BYTES} bytes, expected one JSON object of settings; give "
            "another file"
        )
    return content


def unwritable(option: str, path: Path, error: OSError) -> ConfigError:
    """The error for a file that ``option`` names and that cannot be written."""
    return ConfigError(
        f"{option} {path}: cannot be written: {error.strerror}; give a file in a directory that can be written"
    )


def refuse_unwritable(option: str, path: Path) -> None:
    """Find out before the work, not after it. What is there stays as it is, and nothing is left."""
    try:
        existed = os.path.exists(path)
        if existed and not path.is_dir() and not path.is_file():  # a pipe would be waited for, a device read for ever
            raise ConfigError(f"{option} {path}: found neither file nor directory, expected a file of its own")
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise unwritable(option, path, error) from error
