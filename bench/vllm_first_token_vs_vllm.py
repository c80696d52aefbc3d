"""Time to first token of 2,000 tokens in vLLM: from host memory, from disk after a restart, recomputed; and LMCache's.

In: a Python environment with vLLM 0.32 (its CPU build will do) and this package; ``--lmcache``: the interpreter of
another one with vLLM and LMCache (``make peers``); ``--rounds``, ``--tier``, ``--short``. Out: medians in milliseconds
with the spread, and ratios to recompute and to LMCache, each of the same round. Never: a hit that was none (the round
is void), a file that outlives the run.

    python bench/vllm_first_token_vs_vllm.py [--short]

Method: vLLM without a connector, with OrlopConnector over files and over the slab, and with LMCacheMPConnector over
LMCache's server, each in a process of its own over one seeded float32 checkpoint, with the same prompts, threads,
device cache, chunks of at most 256 tokens and room in host memory for everything. In each round each of them, in turn,
is asked a new prompt (cold), then two others that push it out of the device's cache, then the first again (host). Then
all are ended, LMCache's server too; files and slab are synced and their pages dropped from the system's cache (cold),
and new ones are asked the same prompts (disk). Ours reads both with direct I/O where the disk can, LMCache is told to.
The time is that from the request to its only token, in vLLM's own loop.

A first prompt that is not counted warms every process up.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import select
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "vllm"))

import vllm_models
from vllm_ports import hold_port, number_of

ROOT = Path(__file__).resolve().parents[1]
PROMPT_TOKENS, BLOCK_TOKENS, DEVICE_BLOCKS = 2_000, 32, 80
CHUNK_TOKENS = 256
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
RECOMPUTE, LMCACHE = "no connector", "LMCache"
OURS = {"files": "Orlop over files", "disk": "Orlop over the slab"}
"""By the name of the tier below host memory."""
PATIENCE_S = 180.0
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_DISABLE_BANNER": "1",
}


# --- in a process of its own: one engine, asked line by line ------------------------------------------------


def serve(model: str, transfer: dict[str, Any] | None) -> None:
    """Answer each line, a prompt, with seconds to its token and how many of its tokens were found."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM and LMCache print
    from vllm import LLM, SamplingParams

    if transfer and transfer["kv_connector"] == "OrlopConnector":
        import orlop.vllm

        orlop.vllm.register()
    elif transfer:
        let_vllm_look_at_numba()
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2304,
        max_num_batched_tokens=4096,
        num_gpu_blocks_override=DEVICE_BLOCKS,
        block_size=BLOCK_TOKENS,
        seed=0,
        kv_transfer_config=transfer,
    )
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    print("{}", file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        outputs: list[Any] = []
        start = time.perf_counter()
        engine.add_request(str(number), {"prompt_token_ids": json.loads(line)}, params)
        while not outputs:
            outputs = [output for output in engine.step() if output.finished]
        took = time.perf_counter() - start
        connector = core.scheduler.connector
        while core.scheduler.requests or (connector is not None and connector.has_pending_push_work()):
            core.step_fn()
        (found,) = outputs
        said = {"s": took, "cached": found.num_cached_tokens or 0, "token": found.outputs[0].token_ids[0]}
        print(json.dumps(said), file=answers, flush=True)
    engine.engine_core.shutdown()


def let_vllm_look_at_numba() -> None:
    """vLLM 0.32 looks for kernels in everything that has a ``__dict__``; that of a part of numba is no mapping."""
    from vllm.triton_utils import dispatcher

    def mapping_of(value: object) -> Any:
        found = vars(value)
        return found if hasattr(found, "get") else {}

    dispatcher.vars = mapping_of  # type: ignore[attr-defined]


# --- the parent ----------------------------------------------------------------------------------------------------


class Failed(Exception):
    """A process ended, or did not do what it should."""


class Engine:
    """A process that serves; ends with the block."""

    def __init__(self, python: str, model: Path, transfer: dict[str, Any] | None, log: Path) -> None:
        self._log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [python, __file__, "--serve", str(model), "--transfer", json.dumps(transfer)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                env={**os.environ, **ENVIRONMENT},
            )

    def __enter__(self) -> Engine:
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        end(self._process)

    def ask(self, prompt: Sequence[int]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            print(json.dumps(prompt), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        came, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S)
        line = self._process.stdout.readline() if came else None
        if line is None:
            raise Failed(f"an engine said nothing for {PATIENCE_S:.0f} s: {tail(self._log)}")
        if not line:
            raise Failed(f"an engine ended: {tail(self._log)}")
        return dict(json.loads(line))


def end(process: subprocess.Popen[Any]) -> None:
    """Wait for it, or make it."""
    for stop in (lambda: None, process.terminate, process.kill):
        stop()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
            return


class LMCacheServer:
    """LMCache's server with host memory and its file tier; ends with the block."""

    def __init__(self, python: Path, folder: Path, log: Path) -> None:
        self._held = hold_port(), hold_port()
        self.port, self._http = map(number_of, self._held)
        adapter = {"type": "fs_native", "base_path": str(folder), "use_odirect": True, "num_workers": 4}
        command = [python.with_name("lmcache"), "server", "--host", "127.0.0.1", "--port", self.port]
        command += ["--http-port", self._http, "--disable-observability", "--eviction-policy", "LRU"]
        command += ["--l1-size-gb", 4, "--l1-init-size-gb", 4, "--l2-adapter", json.dumps(adapter)]
        command += ["--chunk-size", CHUNK_TOKENS]
        command += ["--supported-transfer-mode", "engine_driven", "--shm-name", f"orlop-bench-{os.getpid()}"]
        self._log = log
        folder.mkdir(exist_ok=True)
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [str(part) for part in command], stdout=out, stderr=out, env={**os.environ, **ENVIRONMENT}
            )

    def __enter__(self) -> LMCacheServer:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self._http}/healthcheck", timeout=5):
                return self
            time.sleep(0.2)
        self._end()
        raise Failed(f"LMCache's server does not start: {tail(self._log)}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._end()

    def _end(self) -> None:
        end(self._process)
        for held in self._held:
            held.close()


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


class Bench:
    """The engines of a phase, over the same folders in each."""

    def __init__(self, folder: Path, tiers: Sequence[str], lmcache: Path | None) -> None:
        self._folder, self._tiers, self._lmcache = folder, tiers, lmcache
        self._model = vllm_models.make_llama(folder / "model", **SIZES)

    def start(self, stack: ExitStack) -> dict[str, Engine]:
        """One engine a way, warm."""
        engines = {RECOMPUTE: self._engine(stack, sys.executable, None)}
        engines |= {OURS[tier]: self._ours(stack, tier) for tier in self._tiers}
        if self._lmcache is not None:
            server = stack.enter_context(LMCacheServer(self._lmcache, self._folder / "lmcache", self._log))
            extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port}
            engines[LMCACHE] = self._engine(stack, str(self._lmcache), connector("LMCacheMPConnector", extra))
        warm_up = prompt(random.Random("warm-up" + str(time.time_ns())))
        for engine in engines.values():
            engine.ask(warm_up)
        return engines

    def _ours(self, stack: ExitStack, tier: str) -> Engine:
        where = {"path": str(self._folder / tier), "bytes": "8GB"}
        return self._engine(stack, sys.executable, connector("OrlopConnector", {"host": "3GB", tier: where}))

    def _engine(self, stack: ExitStack, python: str, transfer: dict[str, Any] | None) -> Engine:
        return stack.enter_context(Engine(python, self._model, transfer, self._log))

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def wait_until_written(self) -> None:
        """The file tiers write behind: no new byte for two seconds."""
        before, deadline = -1, time.monotonic() + PATIENCE_S
        while (now := self._bytes_used()) != before and time.monotonic() < deadline:
            before = now
            time.sleep(2)

    def _bytes_used(self) -> int:
        return sum(f.stat().st_mtime_ns + f.stat().st_size for f in self._files())

    def _files(self) -> list[Path]:
        return [f for way in (*OURS, "lmcache") for f in (self._folder / way).rglob("*") if f.is_file()]

    def drop_pages(self) -> None:
        """Nothing of the tiers' files stays in the system's page cache."""
        for path in self._files():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def connector(name: str, extra: dict[str, Any]) -> dict[str, Any]:
    policy = {"kv_load_failure_policy": "recompute"}
    return {"kv_connector": name, "kv_role": "kv_both", **policy, "kv_connector_extra_config": extra}


def prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(10, 310) for _ in range(PROMPT_TOKENS)]


Times = dict[tuple[str, str], list[float]]


def measure(bench: Bench, rounds: int) -> Times:
    """Seconds by way and place, a value a round."""
    times: Times = {}
    prompts = [prompt(random.Random(n)) for n in range(rounds)]
    with ExitStack() as stack:
        engines = bench.start(stack)
        right = [cold_and_host(engines, asked, times) for asked in prompts]
        bench.wait_until_written()
    bench.drop_pages()
    with ExitStack() as stack:
        engines = bench.start(stack)
        for asked, token in zip(prompts, right, strict=True):
            for way, engine in engines.items():
                note(times, way, "disk" if way != RECOMPUTE else "again", engine.ask(asked), token)
    return times


def cold_and_host(engines: Mapping[str, Engine], asked: list[int], times: Times) -> int:
    """One round of the first phase; the right token."""
    others = [prompt(random.Random(f"{asked}{n}")) for n in range(2)]
    right = None
    for way, engine in engines.items():
        cold = engine.ask(asked)
        right = cold["token"] if right is None else right
        note(times, way, "cold", cold, right)
        for other in others:
            engine.ask(other)
        note(times, way, "host" if way != RECOMPUTE else "again", engine.ask(asked), right)
    assert right is not None
    return int(right)


def note(times: Times, way: str, place: str, said: Mapping[str, Any], right: int) -> None:
    """Keep a time, of what it is said to be."""
    found, least = said["cached"], PROMPT_TOKENS - CHUNK_TOKENS
    if (found < least) if place in ("host", "disk") else (found > 0):
        raise Failed(f"{way}, {place}: found {found} tokens of the prompt, expected another number: the run is void")
    if said["token"] != right:
        print(f"{way}, {place}: found another token than without a connector")
    times.setdefault((way, place), []).append(said["s"])


def shown(values: Sequence[float]) -> str:
    return f"{statistics.median(values) * 1e3:.0f} ({min(values) * 1e3:.0f} to {max(values) * 1e3:.0f})"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    return f"{statistics.median(a / b for a, b in zip(ours, theirs, strict=True)):.2f}"


def table(times: Times) -> None:
    print(f"\n{'':<34}{'ms to first token':<26}{'of recompute':<16}of LMCache")
    recompute = times[RECOMPUTE, "cold"]
    for (way, place), values in times.items():
        if place == "again":
            continue
        beside = times.get((LMCACHE, place)) if way in OURS.values() else None
        print(
            f"{way + ', ' + place:<34}{shown(values):<26}{ratio(values, recompute):<16}"
            f"{ratio(values, beside) if beside else '-'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tier", choices=(*OURS, "both"), default="both", help="of ours; LMCache's is files")
    parser.add_argument("--lmcache", type=Path, default=ROOT / ".venv-lmcache" / "bin" / "python")
    parser.add_argument("--short", action="store_true", help="two rounds")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--transfer", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.transfer)
        return
    rounds = 2 if options.short else options.rounds
    tiers = tuple(OURS) if options.tier == "both" else (options.tier,)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {time.strftime('%F')}\n"
        f"{rounds} rounds, {PROMPT_TOKENS} tokens, a thread each; tiers below host memory with cold pages"
    )
    lmcache = options.lmcache if options.lmcache.exists() else None
    if lmcache is None:
        print(f"LMCache: found no interpreter {options.lmcache}, so its rows are left out; make peers installs it")
    for peer in (lmcache, None) if lmcache else (None,):
        with tempfile.TemporaryDirectory(prefix="orlop-bench-") as folder:
            try:
                table(measure(Bench(Path(folder), tiers, peer), rounds))
                return
            except Failed as failure:
                if peer is None:
                    raise SystemExit(str(failure)) from None
                print(f"with LMCache the run failed, again without it: {failure}")


if __name__ == "__main__":
    main()
