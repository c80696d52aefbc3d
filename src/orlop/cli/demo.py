"""``orlop demo``: the same work in four ways, from a device cache alone to a restart on the files that are left.

In: a directory or none. Out: a table or JSON, a chart where asked for, an exit code: 0 where all four ways generated
the same tokens and the last one found what the third had left, 130 where it was stopped. Never: a claim that the
figures do not show.

The workload is a chat service in small: one system prompt, many conversations, a few of them active at a time, and a
device cache that holds a fraction of these. Each way is one ``orlop run`` in a process of its own, and can be repeated
by hand.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console

from orlop.cli.compare import Comparison, compare
from orlop.cli.settings import refuse_unwritable
from orlop.cli.stopping import STOPPED, stop_signals
from orlop.cli.summary import TIER, Figures, print_verdict, table_of, with_ratios
from orlop.engine.checkpoint import Checkpoint
from orlop.engine.llm import LLM, EngineConfig
from orlop.errors import ConfigError
from orlop.testing.checkpoints import write_checkpoint

SYSTEM_BLOCKS, TURN_BLOCKS, TURNS, CONVERSATIONS = 32, 20, 4, 24
BLOCK_TOKENS, DEVICE_BLOCKS, HOST_BLOCKS, BLOCKS_PER_CHUNK = 16, 300, 800, 2
OUTPUT_TOKENS = 8
PACE = 3
"""Conversations that begin between two turns of one."""
MODEL: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 512}
PROCESS_DEADLINE_S = 300
MOST_COMPUTED_AFTER_RESTART = 0.25
"""Of the tokens that the first way computes."""


@dataclass(frozen=True, slots=True)
class Way:
    """One run: a name for tables, what it is in words, and the options of ``orlop run`` that make it so."""

    name: str
    what: str
    options: tuple[str, ...]


def run_demo(
    work_dir: Path | None, *, as_json: bool = False, plot: Path | None = None, conversations: int = CONVERSATIONS
) -> int:
    """Write model and workload, run them in four ways, print what each did; the exit code."""
    with ExitStack() as stack:
        demo = Demo(conversations, Console(stderr=as_json, markup=False))
        must_stop = stack.enter_context(stop_signals(hand_on=demo.interrupt))
        if work_dir is None:
            work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="orlop-demo-")))
        demo.prepare(work_dir, plot)
        demo.run(must_stop)
        if must_stop():
            demo.console.print("stopped")
            return STOPPED
        problems = demo.problems()
        if as_json:
            print(json.dumps(demo.summary(problems)))
        else:
            demo.show(problems)
        if plot is not None and len(demo.runs) > 1:
            demo.draw(plot)
        return 1 if problems else 0


class Demo:
    """The four ways, and what has come of them so far. One thread."""

    def __init__(self, conversations: int, console: Console) -> None:
        self.conversations = conversations
        self.console = console
        self.ways: tuple[Way, ...] = ()
        self.runs: dict[str, Mapping[str, Any]] = {}
        """By the name of the way: the summary of its ``orlop run``."""
        self.tokens: dict[str, dict[str, tuple[int, ...]]] = {}
        self.trouble: list[str] = []
        self.dir = Path()
        self.block_bytes = 0
        """Of keys and values of one block of the model."""
        self._running: list[subprocess.Popen[str]] = []

    # --- before -----------------------------------------------------------------------------------------------

    def prepare(self, work_dir: Path, plot: Path | None) -> None:
        """Everything that the ways need, in ``work_dir``."""
        self.dir = work_dir
        if (work_dir / "store").exists():
            raise ConfigError(
                f"--work-dir {work_dir}: found the store of an earlier demo, expected none, since the first ways would "
                "find what it had; remove it or name another directory"
            )
        try:
            work_dir.mkdir(parents=True, exist_ok=True)
            lines = (json.dumps(line) for line in workload(self.conversations))
            (work_dir / "prompts.jsonl").write_text("".join(line + "\n" for line in lines))
            write_checkpoint(work_dir / "model", **MODEL)
            self.block_bytes = BLOCK_TOKENS * Checkpoint.open(work_dir / "model").config.kv_bytes_per_token
            for name, settings in self._settings().items():
                (work_dir / f"{name}.json").write_text(json.dumps(settings, indent=2))
        except OSError as error:
            raise ConfigError(
                f"--work-dir {work_dir}: cannot be used: {error.strerror}, expected a directory that can be written; "
                "name another one, or leave the option out for a temporary one"
            ) from error
        if plot is not None:
            if plot.suffix != ".svg":
                raise ConfigError(f"--plot {plot}: found {plot.suffix or 'no ending'}, expected .svg; name it so")
            refuse_unwritable("--plot", plot)
        host, files = (("--config", str(work_dir / f"{name}.json")) for name in ("host", "files"))
        self.ways = (
            Way("device", "the device cache alone", ("--no-offload",)),
            Way("+ host", "host memory below it", ("--no-compare", *host)),
            Way("+ files", "files below that", ("--no-compare", *files)),
            Way("restart", "a new process, on the files that are left", ("--no-compare", *files)),
        )

    def _settings(self) -> dict[str, dict[str, Any]]:
        host = {"host": {"bytes": HOST_BLOCKS * self.block_bytes}, "blocks_per_chunk": BLOCKS_PER_CHUNK}
        # Patient: what is shown here is what is found, also on a disk that is busy with other things.
        deadline = {"lookup": "5s", "promotion": "30s"}
        files = {"path": str(self.dir / "store"), "bytes": "4GiB", "deadline": deadline}
        return {"host": host, "files": {**host, "files": files, "drain_deadline": "30s"}}

    @property
    def kv_blocks(self) -> int:
        """Different blocks of all prompts together."""
        return SYSTEM_BLOCKS + self.conversations * TURNS * TURN_BLOCKS

    # --- the four ways ----------------------------------------------------------------------------------------

    def run(self, must_stop: Callable[[], bool]) -> None:
        size = self.kv_blocks * self.block_bytes / 1e6
        self.console.print(
            f"{self.conversations} conversations of {TURNS} turns behind one system prompt, in turn: {size:.0f} MB of "
            f"keys and values, {self.kv_blocks / DEVICE_BLOCKS:.1f} times the device cache and "
            f"{self.kv_blocks / HOST_BLOCKS:.1f} times the host tier.",
            soft_wrap=True,
        )
        for way in self.ways:
            if must_stop():
                return
            self.console.print(f"{way.name:8} {way.what} ...")
            summary, exit_code = self._process(way, must_stop)
            if must_stop():
                return
            if summary is None:
                self.trouble.append(f"{way.name}: its process ended with exit code {exit_code} and no result")
                return
            self.runs[way.name] = summary
            self.tokens[way.name] = self._generated(way)

    def command(self, way: Way) -> list[str]:
        """The arguments of ``orlop run`` for one way."""
        command = ["--model", str(self.dir / "model"), "--prompts", str(self.dir / "prompts.jsonl")]
        command += ["--device-blocks", str(DEVICE_BLOCKS), "--block-tokens", str(BLOCK_TOKENS), "--threads", "1"]
        return [*command, "--output", str(self._output(way)), *way.options]

    def _process(self, way: Way, must_stop: Callable[[], bool]) -> tuple[Mapping[str, Any] | None, int]:
        """One ``orlop run`` in its own process: its summary (None: it had none) and its exit code.

        It stands in ``_running`` while it runs. Its process group is its own, so that Ctrl-C reaches it once: by us.
        """
        command = [sys.executable, "-m", "orlop", "run", "--json", "--quiet", *self.command(way)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
            self._running.append(process)
            if must_stop():  # the signal came before it stood there
                process.send_signal(signal.SIGINT)
            try:
                out, _ = process.communicate(timeout=PROCESS_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                out = ""
            finally:
                self._running.remove(process)
        try:
            return json.loads(out), process.returncode
        except ValueError:
            return None, process.returncode

    def interrupt(self) -> None:
        for process in self._running:
            process.send_signal(signal.SIGINT)

    def _output(self, way: Way) -> Path:
        return self.dir / f"results-{self.ways.index(way) + 1}.jsonl"

    def _generated(self, way: Way) -> dict[str, tuple[int, ...]]:
        lines = (json.loads(line) for line in self._output(way).read_text().splitlines())
        return {line["request_id"]: tuple(line["tokens"]) for line in lines}

    # --- after ------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, Figures]:
        """By the name of the way, with ratios to the first one."""
        runs = {name: s["with_offload"] or s["without_offload"] for name, s in self.runs.items()}
        return with_ratios(runs)

    def comparisons(self) -> dict[str, Comparison]:
        """The tokens of each later way against those of the first."""
        prompts = {line["id"]: line["prompt"] for line in workload(self.conversations)}
        judge: list[LLM] = []  # made only where a difference has to be judged

        def logits_after(tokens: list[int]) -> list[float]:
            if not judge:
                judge.append(LLM(self.dir / "model", EngineConfig()))
            logits: list[float] = judge[0].logits_after(tokens).tolist()
            return logits

        first, *others = self.tokens
        return {name: compare(prompts, self.tokens[first], self.tokens[name], logits_after) for name in others}

    def problems(self) -> list[str]:
        """What the figures do not show although they should."""
        if self.trouble:
            return self.trouble
        problems, wanted = [], self.conversations * TURNS
        for name, verdict in self.comparisons().items():
            if verdict.different or verdict.requests != wanted:
                problems.append(f"{name}: the tokens of the first way were not generated")
        figures = self.figures()
        first, last = figures["device"], figures["restart"]
        if not sum(value or 0 for figure, value in last.items() if figure.startswith(TIER) and "files" in figure):
            problems.append("restart: nothing was loaded from the files that were left")
        if (last["computed_tokens"] or 0) >= MOST_COMPUTED_AFTER_RESTART * (first["computed_tokens"] or 0):
            problems.append(
                f"restart: {last['computed_tokens']} tokens were computed, expected less than a quarter of the "
                f"{first['computed_tokens']} of the first way"
            )
        return problems

    def summary(self, problems: list[str]) -> dict[str, Any]:
        """The mapping that ``orlop demo --json`` prints."""
        figures = self.figures()
        return {
            "kv_bytes": self.kv_blocks * self.block_bytes,
            "device_bytes": DEVICE_BLOCKS * self.block_bytes,
            "host_bytes": HOST_BLOCKS * self.block_bytes,
            "ways": [
                {
                    "name": way.name,
                    "what": way.what,
                    "command": ["orlop", "run", *self.command(way)],
                    **figures[way.name],
                }
                for way in self.ways
                if way.name in figures
            ],
            "tokens": {name: asdict(verdict) for name, verdict in self.comparisons().items()} if self.tokens else {},
            "problems": problems,
        }

    def show(self, problems: list[str]) -> None:
        console = self.console
        if self.runs:
            console.print(table_of(self.figures()))
            for name, verdict in self.comparisons().items():
                print_verdict(console, asdict(verdict), of=f"tokens of '{name}' against the first way")
        for problem in problems:
            console.print(f"FAILED: {problem}", soft_wrap=True)

    def draw(self, plot: Path) -> None:
        from orlop.cli.plot import chart

        plot.write_text(chart(self.figures()), encoding="utf-8")


def workload(conversations: int = CONVERSATIONS) -> Iterator[dict[str, Any]]:
    """Lines of prompts: turn ``n`` of a conversation begins with all of turn ``n - 1``.

    A few conversations are active at a time, and each comes back once more after all others.
    """
    fresh = count(1)

    def block() -> list[int]:
        """Ids of a byte each; the first two tell every block from all others."""
        number = next(fresh)
        return [number % 251, number // 251, *((number * 31 + i * i * 17) % 251 for i in range(BLOCK_TOKENS - 2))]

    system = [token for _ in range(SYSTEM_BLOCKS) for token in block()]
    prompts = [list(system) for _ in range(conversations)]
    for _, conversation, turn in sorted(
        (conversation + turn * PACE + (turn == TURNS - 1) * conversations * TURNS * PACE, conversation, turn)
        for conversation in range(conversations)
        for turn in range(TURNS)
    ):
        prompt = prompts[conversation]
        for _ in range(TURN_BLOCKS):
            prompt.extend(block())
        yield {"id": f"{conversation}.{turn}", "prompt": [*prompt, 0, 1, 2], "max_tokens": OUTPUT_TOKENS}
