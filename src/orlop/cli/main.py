"""The command ``orlop``: its options, and nothing of what they do.

In: the command line. Out: an exit code: 0 all well, 1 tokens differ, the demo did not show what it should, or
something was found broken, 2 something the user can put right, 130 stopped by Ctrl-C or SIGTERM. Never: an import of
torch before a command needs it.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from orlop import __version__
from orlop.errors import ConfigError, OrlopError

MOST_TOKENS_PER_ID = 4096
MOST_TOKENS_PER_BLOCK = 65_536
MOST = (1 << 31) - 1
MOST_THREADS = 256
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
EXAMPLE_LINE = '{"input_length": 1100, "output_length": 8, "hash_ids": [0, 1, 2]}'

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

app = typer.Typer(
    help="Keep the KV cache of an LLM engine in host memory, on disk and in files, and bring it back.\n\n"
    "Begin with 'orlop demo'; then 'orlop run' with your own model and prompts, and 'orlop doctor' before you deploy.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"orlop {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the figures into this .svg file.")] = None,
    work_dir: Annotated[Path | None, typer.Option(help="Where to work; kept. Default: temporary.")] = None,
) -> None:
    """See in a minute what it does, on a small model.

    The same conversations in four ways: with a device cache that is far too small, with host memory below it, with
    files below that, and again in a new process on the files that are left. The tokens of all four are compared.
    """
    from orlop.cli.demo import run_demo

    raise typer.Exit(run_demo(work_dir, as_json=as_json, plot=plot))


@app.command()
def run(
    model: Annotated[
        Path | None, typer.Option(help="A model directory (Hugging Face format). Default: a small seeded model.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help='JSON lines: a text, a list of token ids, or {"prompt": ..., "max_tokens": ..., "id": ...}.'),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines of a Mooncake or LMCache agent trace, run smaller than recorded: see "
            f"--tokens-per-trace-block and --max-output. A line: {EXAMPLE_LINE}"
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Settings of the offload, a JSON file. Default: host memory of twice the device cache and a files "
            "tier of at most 4GiB; with an empty {} host memory alone."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, max=MOST, help="Run the first N requests only.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write a JSON line per request into this file.")] = None,
    files_path: Annotated[
        Path | None,
        typer.Option(help="Without --config: directory of the files tier, kept afterwards. Default: temporary."),
    ] = None,
    max_output: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST, help="The most tokens to generate per request. Default: 4 of a trace, 32 of prompts."
        ),
    ] = None,
    tokens_per_trace_block: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_TOKENS_PER_ID, help="Tokens each block id becomes. Default: 16 of 512, 4 of 16."),
    ] = None,
    device_blocks: Annotated[
        int | None,
        typer.Option(
            min=2, max=MOST, help="Blocks of the device cache. Default: a quarter more than the largest request."
        ),
    ] = None,
    block_tokens: Annotated[int, typer.Option(min=1, max=MOST_TOKENS_PER_BLOCK, help="Tokens per device block.")] = 16,
    step_tokens: Annotated[int, typer.Option(min=1, max=MOST, help="The most tokens one step computes.")] = 512,
    concurrency: Annotated[int, typer.Option(min=1, max=MOST, help="Requests in the engine at a time.")] = 4,
    overlay: Annotated[
        int,
        typer.Option(
            min=1, max=MOST, help="Sessions of a trace that are mixed, a request of each in turn; 1: file order."
        ),
    ] = 8,
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_THREADS, help="Threads that compute. Default: 1, with --model all cores but one."),
    ] = None,
    async_scheduling: Annotated[bool, typer.Option(help="Schedule a step before the last one has reported.")] = False,
    no_offload: Annotated[bool, typer.Option("--no-offload", help="The run without offload alone.")] = False,
    no_compare: Annotated[bool, typer.Option("--no-compare", help="The run with offload alone.")] = False,
    reference: Annotated[
        Path | None, typer.Option(help="Keep the run without offload in this file; use it if it fits.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Prometheus text at this port of this host; 0: any free one.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No log lines but warnings.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run your prompts or a trace on your model, with offload and without.

    Prints what was computed, found and loaded from where, and the times of both runs; says whether their tokens are
    equal. Ctrl-C stops between two steps and shows what was done.
    """
    from orlop.cli.run import RunOptions
    from orlop.cli.run import run as run_it

    options = RunOptions(
        model=model,
        prompts=prompts,
        trace=trace,
        config=config,
        files_path=files_path,
        output=output,
        limit=limit,
        tokens_per_trace_block=tokens_per_trace_block,
        max_output=max_output,
        device_blocks=device_blocks,
        block_tokens=block_tokens,
        step_tokens=step_tokens,
        concurrency=concurrency,
        overlay=overlay,
        threads=threads,
        async_scheduling=async_scheduling,
        offload=not no_offload,
        compare=not no_compare,
        reference=reference,
        metrics_port=metrics_port,
        quiet=quiet,
        as_json=as_json,
    )
    raise typer.Exit(run_it(options))


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Option(help="The settings to check, a JSON file. Default: none set.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check the machine and your settings, and say what to do.

    Versions, memory and its limits, locked memory, shared memory, each tier's directory: room, direct I/O and speed;
    the effective settings and where each comes from. Exit code 1 where something cannot work.
    """
    from orlop.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(config, as_json))


store = typer.Typer(
    help="Look into a tier's directory, verify it, clear it.\n\nEngines may go on using it meanwhile; in a slab their "
    "own lanes are read and never changed.",
    rich_markup_mode=None,
)
app.add_typer(store, name="store", no_args_is_help=True)

StorePath = Annotated[Path, typer.Argument(help="The directory that the tier's 'path' names.", show_default=False)]


@store.command()
def inspect(path: StorePath, as_json: AsJson = False) -> None:
    """What is stored, for whom, and how old it is.

    Chunks, bytes and ages by namespace, and the fields in which two namespaces differ.
    """
    from orlop.cli.store import run_inspect

    raise typer.Exit(run_inspect(path, as_json))


@store.command()
def verify(
    path: StorePath,
    repair: Annotated[bool, typer.Option("--repair", help="Remove what does not verify.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every chunk and check it to its last byte.

    Counts by reason; exit code 1 where a chunk does not verify and stays.
    """
    from orlop.cli.store import run_verify

    raise typer.Exit(run_verify(path, repair, as_json))


@store.command()
def gc(path: StorePath, as_json: AsJson = False) -> None:
    """Give space back that holds no chunk.

    Of a slab halves of segments that a crash left, and segments whose chunks are all gone, where no engine has the
    lane; of files what dead engines left half written, and empty directories. Chunks stay: a running engine keeps them
    within its bound.
    """
    from orlop.cli.store import run_gc

    raise typer.Exit(run_gc(path, as_json))


@store.command()
def clear(
    path: StorePath,
    namespace: Annotated[
        list[str] | None, typer.Option(help="Of this namespace only: the beginning of its name. May be repeated.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Of all namespaces.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove stored chunks, after a question.

    Beside a running engine too: it computes what it does not find. Of a slab, what lies in the lane of a running engine
    stays, and is said.
    """
    from orlop.cli.store import run_clear

    raise typer.Exit(run_clear(path, namespace or [], everything, yes, as_json))


bench = typer.Typer(help="Measure what this machine gives.", rich_markup_mode=None)
app.add_typer(bench, name="bench", no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    pass


@bench.command("tier")
def bench_tier(
    path: Annotated[Path, typer.Argument(help="A directory on the disk to measure.", show_default=False)],
    chunk: Annotated[
        str, typer.Option(help="Bytes of a chunk, such as 2MiB; 'orlop store inspect' shows yours.")
    ] = "2MiB",
    most: Annotated[
        str, typer.Option("--bytes", help="The most to write, and at most a quarter of what is free.")
    ] = "1GiB",
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="How long each of the four figures may take.")] = 5.0,
    as_json: AsJson = False,
) -> None:
    """What a disk can do, what a slab on it reaches, and what to do about it.

    Writes and reads with several threads: plain calls first, then the real tier through its I/O process. Ctrl-C stops
    it; nothing stays.
    """
    from orlop.cli.bench import run_bench_tier
    from orlop.config import parse_size

    def size(option: str, text: str) -> int:
        try:
            return parse_size(text)
        except ValueError as error:
            raise ConfigError(f"{option}: found {text!r}, allowed: {error}") from error

    raise typer.Exit(run_bench_tier(path, size("--chunk", chunk), size("--bytes", most), seconds, as_json))


def main() -> None:
    """Run the command line; problems that the user can put right are one line and exit code 2."""
    if isinstance(sys.stdout, TextIOWrapper):  # a path may have characters that the terminal has not
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except OrlopError as error:
        print(f"orlop: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # Whoever read our output has gone; nothing is left to say, not even at exit.
        _say_no_more()
        sys.exit(1)
    except OSError as error:
        if error.errno not in FULL:
            raise
        _say_no_more()
        with suppress(OSError):
            print(f"orlop: output cannot be written: {error.strerror}; make room there", file=sys.stderr)
        sys.exit(2)


def _say_no_more() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
