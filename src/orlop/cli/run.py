"""``orlop run``: prompts or a trace through the embedded engine, with offload and without.

In: ``RunOptions``. Out: a table or JSON on standard output, progress on standard error, a JSON line per request where
asked for, an exit code. Never: a table that hides a difference: where tokens differ it says which, and the exit code
is 1. Two models in memory at a time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from orlop.cli.compare import compare
from orlop.cli.jsonl import short
from orlop.cli.prompts import read_prompts
from orlop.cli.replay import RunReport, RunRequest, replay
from orlop.cli.settings import read_settings, refuse_unwritable, unwritable
from orlop.cli.stopping import STOPPED, stop_signals
from orlop.cli.summary import NothingLoaded, Scaled, print_summary, summarise
from orlop.cli.traces import read_requests
from orlop.config import MOST_BYTES, OrlopConfig
from orlop.engine.blocks import BlockPool
from orlop.engine.checkpoint import Checkpoint
from orlop.engine.llm import LEAST_BLOCKS, LLM, EngineConfig, Result  # before torch: it says which extra brings that
from orlop.engine.model import ModelConfig
from orlop.engine.tables import BlockTables
from orlop.engine.text import Text
from orlop.errors import ConfigError, TraceError
from orlop.observe.observer import Observer
from orlop.observe.prometheus import MetricsServer

import torch  # isort: skip

log = logging.getLogger(__name__)

CONSOLE = Console(stderr=True, markup=False)
ENDED, DIFFERS = 0, 1
TRACE_OUTPUT, PROMPTS_OUTPUT = 4, 32
"""The most tokens to generate per request, where nothing says how many."""
SWITCH_INTERVAL_S = 0.002
"""How long the engine's thread may have to wait for another one to let go of the interpreter; Python's own is 5 ms."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of ``orlop run``, as its help explains them."""

    model: Path | None = None
    prompts: Path | None = None
    trace: Path | None = None
    config: Path | None = None
    files_path: Path | None = None
    output: Path | None = None
    limit: int | None = None
    tokens_per_trace_block: int | None = None
    max_output: int | None = None
    device_blocks: int | None = None
    block_tokens: int = 16
    step_tokens: int = 512
    concurrency: int = 4
    overlay: int = 8
    threads: int | None = None
    async_scheduling: bool = False
    offload: bool = True
    compare: bool = True
    reference: Path | None = None
    metrics_port: int | None = None
    quiet: bool = False
    as_json: bool = False


def run(options: RunOptions) -> int:
    """Run, compare, print; the exit code."""
    _refuse_what_does_not_go_together(options)
    _refuse_what_would_be_overwritten(options)
    if options.reference is not None:
        refuse_unwritable("--reference", options.reference)
    torch.set_num_threads(options.threads or _threads(options.model))
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    model, requests = _work(options)
    engine = _engine_config(options, model, requests)
    offloaded = without = verdict = None
    with stop_signals() as must_stop, _output(options.output) as keep, _log_shown(options.quiet):
        if options.offload:
            # First, so that a mistake in the settings is said at once and not after the other run.
            offloaded = _with_offload(options, engine, requests, must_stop, keep)
        if options.compare and not must_stop():
            judge = _Judge(options.model, engine)
            without = _without_offload(options, judge, requests, must_stop, keep)
            if offloaded is not None:
                prompts = {r.request_id: r.prompt for r in requests}
                verdict = compare(prompts, without.tokens, offloaded.report.tokens, judge.logits_after)
        stopped = must_stop()
    report, nothing_loaded = (offloaded.report, offloaded.nothing_loaded) if offloaded is not None else (None, None)
    summary = summarise(asdict(engine), without, report, verdict, nothing_loaded, Scaled.of(requests))
    if options.as_json:
        print(json.dumps(summary))
    else:
        print_summary(summary)
    if stopped:
        return STOPPED
    return DIFFERS if verdict is not None and verdict.different else ENDED


# --- what is to be done ---------------------------------------------------------------------------------------


def _refuse_what_does_not_go_together(options: RunOptions) -> None:
    for found, expected in (
        (options.prompts is None and options.trace is None, "neither --prompts nor --trace, expected one of them"),
        (options.prompts is not None and options.trace is not None, "--prompts and --trace, expected one of them"),
        (
            options.reference is not None and not (options.compare and options.offload),
            "--reference and a run that compares nothing, expected one of them: the reference is the run to compare "
            "with",
        ),
        (
            options.metrics_port is not None and not options.offload,
            "--metrics-port and --no-offload, expected one of them: the metrics are those of the offload",
        ),
        (not (options.compare or options.offload), "--no-compare and --no-offload, which leaves nothing to run"),
        (
            options.config is not None and options.files_path is not None,
            "--config and --files-path, expected one of them: a config names its own tiers",
        ),
    ):
        if found:
            raise ConfigError(f"found {expected}")


def _refuse_what_would_be_overwritten(options: RunOptions) -> None:
    """No file that is read is written, and none is written twice."""
    named = [("--prompts", options.prompts), ("--trace", options.trace), ("--config", options.config)]
    for option, path in (("--output", options.output), ("--reference", options.reference)):
        if path is None:
            continue
        for other, its_path in named:
            if its_path is not None and os.path.isfile(path) and os.path.realpath(path) == os.path.realpath(its_path):
                raise ConfigError(f"{option} {path}: found the file that {other} names, expected one of its own")
        named.append((option, path))


def _threads(model: Path | None) -> int:
    """Small matrices are faster on one thread; copies and tier I/O want a core beside a large model."""
    return 1 if model is None else max(1, (os.cpu_count() or 1) - 1)


def _work(options: RunOptions) -> tuple[ModelConfig, list[RunRequest]]:
    """What runs, and every request as token ids, all of which it can run."""
    checkpoint = Checkpoint.open(options.model) if options.model is not None else None
    model = checkpoint.config if checkpoint is not None else ModelConfig()
    if options.prompts is not None:
        text = Text(checkpoint.tokenizer() if checkpoint is not None else None)
        max_output = options.max_output or PROMPTS_OUTPUT
        requests = read_prompts(options.prompts, limit=options.limit, max_output=max_output, encode=text.encode)
    else:
        assert options.trace is not None
        requests = read_requests(
            options.trace,
            limit=options.limit,
            tokens_per_block=options.tokens_per_trace_block,
            max_output=options.max_output or TRACE_OUTPUT,
            vocab_size=model.vocab_size,
            overlay=options.overlay,
        )
    for request in requests:
        _refuse_what_the_model_cannot_take(model, request, options)
    return model, requests


def _refuse_what_the_model_cannot_take(model: ModelConfig, request: RunRequest, options: RunOptions) -> None:
    unknown = next((token for token in request.prompt if token >= model.vocab_size), None)
    if unknown is not None:
        raise TraceError(
            f"{request.where}: found the token id {short(unknown)}, expected ids from 0 to {model.vocab_size - 1}, "
            "which is what the model has"
        )
    found, most = len(request.prompt), model.max_positions
    if most is not None and found + request.max_tokens > most:
        shorter = "shorten the prompt, or lower max_tokens" if options.prompts else "lower --tokens-per-trace-block"
        raise TraceError(
            f"{request.where}: found {found} prompt tokens and {request.max_tokens} to generate, expected at most "
            f"{most} together, which is what the model allows; {shorter}"
        )


def _engine_config(options: RunOptions, model: ModelConfig, requests: list[RunRequest]) -> EngineConfig:
    tables = BlockTables(BlockPool(LEAST_BLOCKS), tuple(model.layer_groups), options.block_tokens)
    largest = max(tables.most_blocks(len(r.prompt) + r.max_tokens, options.step_tokens) for r in requests)
    if options.device_blocks is not None and options.device_blocks <= largest:
        # One block of the device is the null block, which holds nothing.
        raise ConfigError(
            f"--device-blocks: found {options.device_blocks}, the largest request needs {largest + 1}; "
            "give that many, or shorter requests"
        )
    return EngineConfig(
        model=model,
        num_blocks=options.device_blocks or largest + max(largest // 4, 4) + 1,
        block_tokens=options.block_tokens,
        max_step_tokens=options.step_tokens,
        max_running=options.concurrency,
        async_scheduling=options.async_scheduling,
    )


def _settings(options: RunOptions, engine: EngineConfig, stack: ExitStack) -> Mapping[str, Any]:
    """What the offload is told: the file, or a small host tier with files below it."""
    if options.config is not None:
        return read_settings(options.config)
    path = options.files_path or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="orlop-run-")))
    device_bytes = engine.num_blocks * engine.block_tokens * engine.model.kv_bytes_per_token
    return {
        # Little more than the device, so that the files are needed too.
        "host": {"bytes": min(max(2 * device_bytes, 1 << 20), MOST_BYTES)},
        "blocks_per_chunk": "auto" if options.model is not None else 2,
        # Patient: what is shown here is what is found, also on a disk that is busy with other things.
        "tiers": [
            {"type": "files", "path": str(path), "bytes": "4GiB", "deadline": {"lookup": "5s", "promotion": "30s"}}
        ],
    }


@contextmanager
def _output(path: Path | None) -> Iterator[Callable[[Result], None]]:
    """A function that writes one request's result as a JSON line, at once: what was done is there, whatever comes."""
    if path is None:
        yield lambda result: None
        return
    try:
        file = path.open("wb", buffering=0)  # nothing is left to be written, and to fail, when it is closed
    except OSError as error:
        raise unwritable("--output", path, error) from error
    with file:

        def keep(result: Result) -> None:
            line = (json.dumps(asdict(result)) + "\n").encode()
            try:
                while line:
                    line = line[file.write(line) :]
            except OSError as error:
                raise unwritable("--output", path, error) from error

        yield keep


class _Shown(logging.Handler):
    """What the engine logs, a line each, above the progress."""

    def emit(self, record: logging.LogRecord) -> None:
        CONSOLE.print(record.getMessage(), soft_wrap=True, markup=False, highlight=False)


@contextmanager
def _log_shown(quiet: bool) -> Iterator[None]:
    """On standard error: what is on and what is off, a line a minute, warnings. ``quiet``: the warnings alone."""
    logger, handler = logging.getLogger("orlop"), _Shown()
    level = logger.level
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


# --- runs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Offloaded:
    """The run with offload, and why it loaded nothing where it did."""

    report: RunReport
    nothing_loaded: NothingLoaded | None


def _with_offload(
    options: RunOptions,
    engine: EngineConfig,
    requests: list[RunRequest],
    must_stop: Callable[[], bool],
    keep: Callable[[Result], None],
) -> _Offloaded:
    with ExitStack() as stack:
        settings = OrlopConfig.load(_settings(options, engine, stack), source=str(options.config or "config"))
        server = _metrics_server(options.metrics_port, stack)
        llm = LLM(options.model, engine, settings)
        assert llm.connector is not None
        llm.observer = observer = Observer(llm.connector.get_stats, model_name=str(options.model or "seeded"))
        if server is not None:
            server.show(observer)
        groups = llm.spec().groups
        report = _replay("with offload", llm, requests, options, must_stop, keep)
    block_bytes = options.block_tokens * engine.model.kv_bytes_per_token
    chunk_tokens = settings.chunk_blocks(groups, block_bytes) * options.block_tokens
    return _Offloaded(report, NothingLoaded.of(report, requests, chunk_tokens))


def _metrics_server(port: int | None, stack: ExitStack) -> MetricsServer | None:
    """Prometheus text at ``port`` until the stack unwinds; 0 is any free port, so the log says which."""
    if port is None:
        return None
    server = MetricsServer(port)
    stack.callback(server.close)
    log.info("metrics at http://127.0.0.1:%d/metrics", server.port)
    return server


def _without_offload(
    options: RunOptions,
    judge: _Judge,
    requests: list[RunRequest],
    must_stop: Callable[[], bool],
    keep: Callable[[Result], None],
) -> RunReport:
    """The run without offload, from ``--reference`` where that file is of the same requests and engine."""
    fingerprint = ""
    if options.reference is not None:
        fingerprint = _fingerprint(judge.llm.spec().identity, judge.engine, requests)
        if (kept := _kept_reference(options.reference, fingerprint)) is not None:
            return kept
    nobody: Callable[[Result], None] = lambda result: None  # noqa: E731
    report = _replay("without offload", judge.llm, requests, options, must_stop, nobody if options.offload else keep)
    if options.reference is not None and not report.interrupted:
        try:
            options.reference.write_text(json.dumps({"fingerprint": fingerprint, "report": asdict(report)}))
        except OSError as error:
            raise unwritable("--reference", options.reference, error) from error
    return report


def _replay(
    name: str,
    llm: LLM,
    requests: list[RunRequest],
    options: RunOptions,
    must_stop: Callable[[], bool],
    keep: Callable[[Result], None],
) -> RunReport:
    # Progress goes where the table does not, and only where somebody looks.
    with CONSOLE.status(f"{name}: starting") as status:
        return replay(
            llm,
            requests,
            concurrency=options.concurrency,
            tell=lambda ended: status.update(f"{name}: {ended} of {len(requests)} requests"),
            must_stop=must_stop,
            keep=keep,
        )


class _Judge:
    """The engine without offload, made where it is needed: it runs what is compared with, and settles differences."""

    def __init__(self, model: Path | None, engine: EngineConfig) -> None:
        self.model = model
        self.engine = engine

    @cached_property
    def llm(self) -> LLM:
        return LLM(self.model, self.engine)

    def logits_after(self, tokens: list[int]) -> list[float]:
        logits: list[float] = self.llm.logits_after(tokens).tolist()
        return logits


def _fingerprint(identity: Mapping[str, Any], engine: EngineConfig, requests: list[RunRequest]) -> str:
    """A digest of all that determines a run without offload, and what is known of it."""
    work = [identity, asdict(engine), [(r.request_id, r.prompt, r.max_tokens) for r in requests], torch.__version__]
    work.append([field.name for field in fields(RunReport)])
    return hashlib.sha256(json.dumps(work).encode()).hexdigest()


def _kept_reference(path: Path, fingerprint: str) -> RunReport | None:
    """None where there is no such file, or it is of another run or version."""
    try:
        kept = json.loads(path.read_text())
        if kept["fingerprint"] != fingerprint:
            return None
        fields = kept["report"]
        tokens = {request_id: tuple(generated) for request_id, generated in fields["tokens"].items()}
        return RunReport(**fields | {"tokens": tokens, "first_token_s": tuple(fields["first_token_s"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
