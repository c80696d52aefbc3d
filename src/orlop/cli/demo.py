"""``orlop demo``: what is stored by one process is used by the next one.

In: a directory. Out: a table per process, an exit code: 0 where both generated the tokens of a run without offload
and the second one loaded from the files of the first, 130 where it was stopped. Never: a claim that the tables do
not show.

The workload is a chat service in small: one system prompt, many conversations whose turns take turns, a device
cache that holds a fraction of them.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console

from orlop.cli.stopping import STOPPED, stop_signals
from orlop.cli.summary import TIER, print_summary
from orlop.errors import ConfigError

SYSTEM_BLOCKS, TURN_BLOCKS, TURNS, CONVERSATIONS = 32, 20, 4, 24
BLOCK_TOKENS, DEVICE_BLOCKS = 16, 300
PROCESS_DEADLINE_S = 300


def run_demo(work_dir: Path | None, conversations: int = CONVERSATIONS) -> int:
    """Write the workload, run it in two processes, print what each did; the exit code."""
    running: list[subprocess.Popen[str]] = []

    def interrupt() -> None:
        for process in running:
            process.send_signal(signal.SIGINT)

    with ExitStack() as stack:
        must_stop = stack.enter_context(stop_signals(hand_on=interrupt))
        if work_dir is None:
            work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="orlop-demo-")))
        trace = work_dir / "conversations.jsonl"
        try:
            work_dir.mkdir(parents=True, exist_ok=True)
            trace.write_text("".join(json.dumps(line) + "\n" for line in workload(conversations)))
        except OSError as error:
            raise ConfigError(
                f"--work-dir {work_dir}: cannot be used: {error.strerror}, expected a directory that can be written; "
                "name another one, or leave the option out for a temporary one"
            ) from error
        console = Console()
        console.print(
            f"{conversations} conversations of {TURNS} turns behind one system prompt, in turn. The device holds "
            f"{DEVICE_BLOCKS} blocks of {BLOCK_TOKENS} tokens; host memory and files in {work_dir} hold the rest."
        )
        problems: list[str] = []
        for number, what in enumerate(("stores", "starts from the files of the first"), start=1):
            if must_stop():
                break
            console.print(f"\nProcess {number} {what}:")
            summary, exit_code = _run_process(trace, work_dir, running, must_stop)
            if must_stop():
                break
            if summary is None:
                problems.append(f"process {number} ended with exit code {exit_code} and no result")
                break
            print_summary(summary)
            problems += _problems(number, exit_code, summary, conversations * TURNS)
        if must_stop():
            console.print("stopped")
            return STOPPED
        for problem in problems:
            console.print(f"FAILED: {problem}")
        return 1 if problems else 0


def workload(conversations: int = CONVERSATIONS) -> Iterator[dict[str, Any]]:
    """Lines of a trace with 16 tokens per id. Turn ``n`` of a conversation begins with all of turn ``n - 1``."""
    fresh = count(SYSTEM_BLOCKS)
    prompts = [list(range(SYSTEM_BLOCKS)) for _ in range(conversations)]
    for _ in range(TURNS):
        for session, prompt in enumerate(prompts):
            prompt.extend(next(fresh) for _ in range(TURN_BLOCKS))
            yield {
                "session": session,
                "input_length": len(prompt) * BLOCK_TOKENS + 5,
                "output_length": 8,
                "hash_ids": list(prompt),
            }


def _run_process(
    trace: Path, work_dir: Path, running: list[subprocess.Popen[str]], must_stop: Callable[[], bool]
) -> tuple[Mapping[str, Any] | None, int]:
    """One ``orlop run`` in its own process: its summary (None: it had none) and its exit code.

    It stands in ``running`` while it runs. Its process group is its own, so that Ctrl-C reaches it once: by us.
    """
    command = [sys.executable, "-m", "orlop", "run", "--json", "--trace", str(trace)]
    command += ["--files-path", str(work_dir / "files"), "--reference", str(work_dir / "without-offload.json")]
    command += ["--tokens-per-trace-block", str(BLOCK_TOKENS), "--block-tokens", str(BLOCK_TOKENS)]
    command += ["--device-blocks", str(DEVICE_BLOCKS), "--max-output", "8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        running.append(process)
        if must_stop():  # the signal came before it stood there
            process.send_signal(signal.SIGINT)
        try:
            out, _ = process.communicate(timeout=PROCESS_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out = ""
        finally:
            running.remove(process)
    try:
        return json.loads(out), process.returncode
    except ValueError:
        return None, process.returncode


def _problems(number: int, exit_code: int, summary: Mapping[str, Any], requests: int) -> list[str]:
    """What the summary of process ``number`` does not show although it should."""
    problems = []
    tokens, figures = summary["tokens"], summary["with_offload"]
    if exit_code or tokens["different"] or tokens["equal"] + tokens["ties"] != requests:
        problems.append(f"process {number} did not generate the tokens of the run without offload")
    if number == 2 and not any(figures[f] for f in figures if f.startswith(TIER) and f.endswith("files")):
        problems.append("process 2 loaded nothing from the files of process 1")
    return problems
