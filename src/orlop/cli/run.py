"""``orlop run``: a trace through the embedded engine, without offload and with it.

In: ``RunOptions``. Out: a table or JSON on standard output, progress on standard error, an exit code. Never: a
table that hides a difference: where tokens differ it says which, and the exit code is 1.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from orlop.cli.compare import Comparison, compare
from orlop.cli.replay import RunReport, replay
from orlop.cli.settings import read_settings
from orlop.cli.stopping import STOPPED, stop_signals
from orlop.cli.summary import ChunksTooLong, print_summary, summarise
from orlop.cli.traces import TraceRequest, read_requests
from orlop.config import OrlopConfig
from orlop.core import EngineSpec
from orlop.engine.llm import LLM, EngineConfig  # before torch: it says which extra brings that
from orlop.engine.model import ModelConfig
from orlop.errors import ConfigError

import torch  # isort: skip

ENDED, DIFFERS = 0, 1
SWITCH_INTERVAL_S = 0.002
"""How long the engine's thread may have to wait for another one to let go of the interpreter; Python's own is 5 ms."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of ``orlop run``, as its help explains them."""

    trace: Path
    config: Path | None = None
    files_path: Path | None = None
    limit: int | None = None
    tokens_per_trace_block: int | None = None
    max_output: int = 4
    device_blocks: int | None = None
    block_tokens: int = 16
    step_tokens: int = 512
    concurrency: int = 4
    overlay: int = 8
    async_scheduling: bool = False
    compare: bool = True
    reference: Path | None = None
    as_json: bool = False


def run_trace(options: RunOptions) -> int:
    """Run, compare, print; the exit code."""
    if options.reference is not None and not options.compare:
        raise ConfigError(
            "found --no-compare and --reference, expected one of them: the reference is the run to compare with"
        )
    # Matrices this small are faster on one thread, and copies and tier I/O want the other cores.
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    requests = read_requests(
        options.trace,
        limit=options.limit,
        tokens_per_block=options.tokens_per_trace_block,
        max_output=options.max_output,
        vocab_size=ModelConfig().vocab_size,
        overlay=options.overlay,
    )
    engine = _engine_config(options, requests)
    with ExitStack() as stack:
        must_stop = stack.enter_context(stop_signals())
        settings = OrlopConfig.load(_settings(options, engine, stack), source=str(options.config or "config"))
        # Made here, so that a mistake in its settings is said before the first run and not after it.
        llm = LLM(engine, offload=settings)
        stack.callback(llm.shutdown)
        without = _without_offload(options, engine, requests, must_stop) if options.compare else None
        offloaded = None if must_stop() else _replay("with offload", llm, requests, options, must_stop)
    too_long = _chunks_too_long(settings, llm.spec(), requests, offloaded) if offloaded is not None else None
    verdict = _compare(engine, requests, without, offloaded) if without is not None and offloaded is not None else None
    summary = summarise(asdict(engine), without, offloaded, verdict, too_long)
    if options.as_json:
        print(json.dumps(summary))
    else:
        print_summary(summary)
    if offloaded is None or offloaded.interrupted:
        return STOPPED
    return DIFFERS if verdict is not None and verdict.different else ENDED


# --- settings ---------------------------------------------------------------------------------------------


def _engine_config(options: RunOptions, requests: list[TraceRequest]) -> EngineConfig:
    largest = max(-(-(len(r.prompt) + r.max_tokens) // options.block_tokens) for r in requests)
    if options.device_blocks is not None and options.device_blocks <= largest:
        # One block of the device is the null block, which holds nothing.
        raise ConfigError(
            f"--device-blocks: found {options.device_blocks}, the largest request needs {largest + 1}; "
            "give that many, or lower --tokens-per-trace-block"
        )
    return EngineConfig(
        num_blocks=options.device_blocks or largest + max(largest // 4, 4) + 1,
        block_tokens=options.block_tokens,
        max_step_tokens=options.step_tokens,
        max_running=options.concurrency,
        async_scheduling=options.async_scheduling,
    )


def _settings(options: RunOptions, engine: EngineConfig, stack: ExitStack) -> Mapping[str, Any]:
    """What the offload is told: the file, or a small host tier with files below it."""
    if options.config is not None:
        if options.files_path is not None:
            raise ConfigError("found --config and --files-path, expected one of them: a config names its own tiers")
        return read_settings(options.config)
    path = options.files_path or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="orlop-run-")))
    device_bytes = engine.num_blocks * engine.block_tokens * ModelConfig().kv_bytes_per_token
    return {
        # Little more than the device, so that the files are needed too.
        "host": {"bytes": max(2 * device_bytes, 1 << 20)},
        "blocks_per_chunk": 2,
        # Patient: what is shown here is what is found, also on a disk that is busy with other things.
        "tiers": [
            {"type": "files", "path": str(path), "bytes": "4GiB", "deadline": {"lookup": "5s", "promotion": "30s"}}
        ],
    }


def _chunks_too_long(
    settings: OrlopConfig, spec: EngineSpec, requests: list[TraceRequest], offloaded: RunReport
) -> ChunksTooLong | None:
    """Said where nothing was stored because no prompt is as long as a chunk."""
    tokens_per_block = spec.groups[0].tokens_per_block
    block_bytes = tokens_per_block * ModelConfig().kv_bytes_per_token
    chunk_tokens = settings.chunk_blocks(spec.groups, block_bytes) * tokens_per_block
    longest = max(len(r.prompt) for r in requests)
    if offloaded.stats.get("store_bytes") or chunk_tokens <= longest:
        return None
    return ChunksTooLong(chunk_tokens, longest)


# --- runs -------------------------------------------------------------------------------------------------


def _replay(
    name: str, llm: LLM, requests: list[TraceRequest], options: RunOptions, must_stop: Callable[[], bool]
) -> RunReport:
    # Progress goes where the table does not, and only where somebody looks.
    with Console(stderr=True).status(f"{name}: starting") as status:
        return replay(
            llm,
            requests,
            concurrency=options.concurrency,
            tell=lambda ended: status.update(f"{name}: {ended} of {len(requests)} requests"),
            must_stop=must_stop,
        )


def _without_offload(
    options: RunOptions, engine: EngineConfig, requests: list[TraceRequest], must_stop: Callable[[], bool]
) -> RunReport:
    """The run without offload, from ``--reference`` where that file is of the same requests and engine."""
    fingerprint = _fingerprint(engine, requests)
    if options.reference is not None and (kept := _kept_reference(options.reference, fingerprint)) is not None:
        return kept
    report = _replay("without offload", LLM(engine), requests, options, must_stop)
    if options.reference is not None and not report.interrupted:
        try:
            options.reference.write_text(json.dumps({"fingerprint": fingerprint, "report": asdict(report)}))
        except OSError as error:
            raise ConfigError(
                f"--reference {options.reference}: cannot be written: {error.strerror}; give a file in a directory "
                "that can be written"
            ) from error
    return report


def _fingerprint(engine: EngineConfig, requests: list[TraceRequest]) -> str:
    """A digest of all that determines a run without offload."""
    work = [asdict(engine), [(r.request_id, r.prompt, r.max_tokens) for r in requests], torch.__version__]
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
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _compare(
    engine: EngineConfig, requests: list[TraceRequest], without: RunReport, offloaded: RunReport
) -> Comparison:
    judge: list[LLM] = []  # made only where a difference has to be judged

    def logits_after(tokens: list[int]) -> list[float]:
        if not judge:
            judge.append(LLM(engine))
        logits: list[float] = judge[0].logits_after(tokens).tolist()
        return logits

    prompts = {r.request_id: r.prompt for r in requests}
    return compare(prompts, without.tokens, offloaded.tokens, logits_after)
