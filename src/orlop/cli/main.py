"""The command ``orlop``: its options, and nothing of what they do.

In: the command line. Out: an exit code: 0 all well, 1 tokens differ, the demo did not show what it should, or
something was found broken, 2 something the user can put right, 130 stopped by Ctrl-C or SIGTERM. Never: an import of
torch before a command needs it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from orlop.errors import OrlopError

MOST_TOKENS_PER_ID = 4096
EXAMPLE_LINE = '{"input_length": 1100, "output_length": 8, "hash_ids": [0, 1, 2]}'

app = typer.Typer(
    help="KV cache offloading for LLM engines.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"orlop {version('orlop')}")
        except PackageNotFoundError:
            typer.echo("orlop (not installed: runs from its source directory)")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    trace: Annotated[
        Path,
        typer.Option(help=f"A trace: Mooncake or LMCache agent JSON lines, plain or gzip. A line: {EXAMPLE_LINE}"),
    ],
    config: Annotated[Path | None, typer.Option(help="Settings of the offload, a JSON file.")] = None,
    files_path: Annotated[
        Path | None,
        typer.Option(help="Directory of the default files tier, kept afterwards. Default: temporary."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Run the first N requests only.")] = None,
    tokens_per_trace_block: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_TOKENS_PER_ID, help="Tokens each block id becomes. Default: 16 of 512, 4 of 16."),
    ] = None,
    max_output: Annotated[int, typer.Option(min=1, help="The most tokens to generate per request.")] = 4,
    device_blocks: Annotated[
        int | None,
        typer.Option(min=2, help="Blocks of the device cache. Default: a quarter more than the largest request."),
    ] = None,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens per device block.")] = 16,
    step_tokens: Annotated[int, typer.Option(min=1, help="The most tokens one step computes.")] = 512,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in the engine at a time.")] = 4,
    overlay: Annotated[
        int, typer.Option(min=1, help="Sessions of a trace that are mixed, a request of each in turn; 1: file order.")
    ] = 8,
    async_scheduling: Annotated[bool, typer.Option(help="Schedule a step before the last one has reported.")] = False,
    no_compare: Annotated[bool, typer.Option("--no-compare", help="Skip the run without offload.")] = False,
    reference: Annotated[
        Path | None, typer.Option(help="Keep the run without offload in this file; use it if it fits.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run a trace through the embedded engine with offload, and compare its tokens with a run without."""
    from orlop.cli.run import RunOptions, run_trace

    options = RunOptions(
        trace=trace,
        config=config,
        files_path=files_path,
        limit=limit,
        tokens_per_trace_block=tokens_per_trace_block,
        max_output=max_output,
        device_blocks=device_blocks,
        block_tokens=block_tokens,
        step_tokens=step_tokens,
        concurrency=concurrency,
        overlay=overlay,
        async_scheduling=async_scheduling,
        compare=not no_compare,
        reference=reference,
        as_json=as_json,
    )
    raise typer.Exit(run_trace(options))


@app.command()
def demo(
    work_dir: Annotated[Path | None, typer.Option(help="Where to work; kept. Default: temporary.")] = None,
) -> None:
    """Two processes one after the other share stored KV; tokens are those of a run without offload."""
    from orlop.cli.demo import run_demo

    raise typer.Exit(run_demo(work_dir))


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Option(help="The settings to check, a JSON file. Default: none set.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine and the settings: versions, memory, limits, each tier's directory and disk."""
    from orlop.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(config, as_json))


store = typer.Typer(help="Look into a tier's directory, verify it, clear it. Engines may go on using it meanwhile.")
app.add_typer(store, name="store", no_args_is_help=True)

StorePath = Annotated[Path, typer.Argument(help="The directory that the tier's 'path' names.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@store.command()
def inspect(path: StorePath, as_json: AsJson = False) -> None:
    """Namespaces, chunks, bytes, ages, and in which fields namespaces differ."""
    from orlop.cli.store import run_inspect

    raise typer.Exit(run_inspect(path, as_json))


@store.command()
def verify(
    path: StorePath,
    repair: Annotated[bool, typer.Option("--repair", help="Remove what does not verify.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every chunk and check it to its last byte; exit code 1 where one does not verify and stays."""
    from orlop.cli.store import run_verify

    raise typer.Exit(run_verify(path, repair, as_json))


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
    """Remove stored chunks. Beside a running engine too: it computes what it does not find."""
    from orlop.cli.store import run_clear

    raise typer.Exit(run_clear(path, namespace or [], everything, yes, as_json))


def main() -> None:
    """Run the command line; problems that the user can put right are one line and exit code 2."""
    try:
        app()
    except OrlopError as error:
        print(f"orlop: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # Whoever read our output has gone; nothing is left to say, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
