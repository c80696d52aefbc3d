"""vLLM's OpenAI server as a process of its own, and what it leaves behind when it ends.

In: a checkpoint, settings, a folder for its log. Out: a running server, its metrics, its processes. Never: a process
that outlives the test.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from processes import left_of, shared_memory_of
from vllm_engine import BLOCK_TOKENS, DEVICE_BLOCKS, MODEL_TOKENS, PATIENCE_S, Answer, patient
from vllm_ports import hold_port, number_of

START_S = 300.0


class Server:
    """Starts at once, ready when made. ``settings`` as in ``kv_connector_extra_config``; ``more``: its own options."""

    def __init__(self, model: Path, settings: Mapping[str, Any], log: Path, **more: Any) -> None:
        self._held = hold_port()
        self.port = number_of(self._held)
        transfer = {
            "kv_connector": "OrlopConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": patient({"blocks_per_chunk": 2, **settings}),
        }
        arguments = {
            "model": model,
            "served-model-name": "small",
            "host": "127.0.0.1",
            "port": self.port,
            "dtype": "float32",
            "max-model-len": MODEL_TOKENS,
            "num-gpu-blocks-override": DEVICE_BLOCKS,
            "block-size": BLOCK_TOKENS,
            "max-num-seqs": 8,
            "kv-transfer-config": json.dumps(transfer),
            **{name.replace("_", "-"): value for name, value in more.items()},
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        command += [f"--{name}={value}" for name, value in arguments.items()]
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO"},
            )
        self._family: dict[int, psutil.Process] = {}
        self._shared_memory: set[str] = set()
        try:
            self._wait_healthy()
        except BaseException:
            self.end()
            raise

    # --- requests ---------------------------------------------------------------------------------------

    def ask(self, prompts: Sequence[Sequence[int]], max_tokens: int = 12) -> list[Answer]:
        """All at once, with the real client; answers in their order."""
        import openai

        with openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0) as client:

            def one(prompt: Sequence[int]) -> Answer:
                said = client.completions.create(
                    model="small",
                    prompt=list(prompt),
                    max_tokens=max_tokens,
                    temperature=0.0,
                    logprobs=2,
                    timeout=PATIENCE_S,
                    extra_body={"ignore_eos": True, "return_token_ids": True},
                )
                choice = said.choices[0]
                rows = [sorted(row.values(), reverse=True) for row in choice.logprobs.top_logprobs]
                return Answer(tuple(choice.token_ids), tuple(row[0] - row[1] for row in rows))

            with ThreadPoolExecutor(len(prompts)) as pool:
                return list(pool.map(one, prompts))

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of ``name`` whose labels have these values; 0 where there is none."""
        total = 0.0
        for line in self._get("/metrics").splitlines():
            match = re.fullmatch(rf"{re.escape(name)}(?:\{{(.*)\}})? (\S+)", line)
            if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
                total += float(match[2])
        return total

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE_S) as reply:
            return str(reply.read().decode())

    def _wait_healthy(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            with suppress(OSError):
                self._get("/health")
                return
            assert self.process.poll() is None, f"the server ended at start:\n{self.tail()}"
            assert time.monotonic() < deadline, f"the server does not start:\n{self.tail()}"
            time.sleep(0.2)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-8000:]

    # --- processes -----------------------------------------------------------------------------------------

    def look(self) -> list[psutil.Process]:
        """Its processes as of now; they and the shared memory that they hold are remembered for ``traces``."""
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            for process in [root, *root.children(recursive=True)]:
                self._family[process.pid] = process
        self._shared_memory |= shared_memory_of(self._family)
        return list(self._family.values())

    def kill(self) -> None:
        """SIGKILL to the server and the engine, as by an operator or the kernel; what they started is not touched."""
        for process in self.look():
            with suppress(psutil.NoSuchProcess):
                if "orlop.tiering.io_process" not in process.cmdline():
                    process.kill()
        self.process.wait(PATIENCE_S)

    def stop(self) -> int:
        """SIGTERM, and its exit status."""
        self.look()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(START_S)  # a drain alone may take ``PATIENCE_S``

    def traces(self) -> list[str]:
        """What is left of it once all its processes have had the time to end."""
        _, alive = psutil.wait_procs(self._family.values(), timeout=START_S)
        left = [f"process {p.pid}: {' '.join(p.cmdline())[:200]}" for p in alive if p.status() != psutil.STATUS_ZOMBIE]
        return left + sorted(left_of(self._shared_memory))

    def end(self) -> None:
        """Whatever happened before: nothing of it runs any more."""
        for process in self.look():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE_S)
        self._held.close()
