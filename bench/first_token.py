"""Time to first token of a prompt whose KV is 100 MB: from host memory, and from disk after a restart.

In: ``--rounds``, ``--short``. Out: medians and spreads, ratios to recompute, and each way's limit. Never: a
figure of one round alone.

Method: the embedded engine with a seeded float32 model on the CPU. In each round, in turn: the prompt is computed; it
is found on the device; the device forgets and it is loaded from host memory; a new engine (and with it a new host
tier and a new I/O process) on the same directory loads it from files, and another from a slab. What lies on disk is
synced and its pages are dropped from the system's cache first; both tiers read with direct I/O where the disk can.

The limit of a way is the bytes of the prompt over the bandwidth measured in the same round (memcpy page by page for
host memory; for disk, reading the same files just as cold and with as many threads, then that memcpy), plus three empty
steps, plus the time to first token of the prompt found on the device (the forward of its last tokens).
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orlop import LLM, EngineConfig
from orlop.engine.model import ModelConfig

MODEL = ModelConfig(hidden=512, layers=8, heads=8, kv_heads=8, head_dim=64, intermediate=1024)
PROMPT_TOKENS = 3200
PROMPT_BYTES = PROMPT_TOKENS * MODEL.kv_bytes_per_token
GOAL = 1.5
THREADS = 4
PAGE_BYTES = 64 << 10
PIECE_BYTES = 1 << 20
TIERS = {"files": "files after a restart", "disk": "slab after a restart"}
WAYS = ("recompute", "device", "host", *TIERS.values())


def engine_config() -> EngineConfig:
    return EngineConfig(model=MODEL, num_blocks=PROMPT_TOKENS // 16 + 40)


def offload(tier: str, path: Path) -> dict[str, Any]:
    where = {"path": str(path), "bytes": 4 * PROMPT_BYTES, "threads": THREADS}
    return {"host": 2 * PROMPT_BYTES, tier: where, "weights_id": "bench"}


def first_token_s(llm: LLM, prompt: list[int], loaded: int) -> float:
    """Serve the prompt and let its transfers settle; ``loaded``: tokens that must have come by the connector."""
    request_id = llm.add_request(prompt, 2)
    result = next(r for r in llm.run() if r.request_id == request_id)
    if result.loaded_tokens < loaded:
        raise SystemExit(f"found {result.loaded_tokens} tokens loaded, expected {loaded} or more: this round is void")
    assert result.first_token_s is not None
    return result.first_token_s


def empty_step_s(llm: LLM) -> float:
    times = []
    for _ in range(50):
        start = time.perf_counter()
        llm.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def memcpy_s(nbytes: int) -> float:
    """Seconds that a plain memcpy, page by page, takes for ``nbytes``."""
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    start = time.perf_counter()
    for offset in range(0, nbytes, PAGE_BYTES):
        ctypes.memmove(target.ctypes.data + offset, source.ctypes.data + offset, PAGE_BYTES)
    return time.perf_counter() - start


def read_s(path: Path) -> float:
    """Seconds to read a prompt's bytes of what lies below ``path``, pages dropped, with ``THREADS`` threads."""
    pieces, nbytes = [], 0
    for piece in written(path):
        if nbytes < PROMPT_BYTES:
            pieces.append((*piece, mmap.mmap(-1, PIECE_BYTES)))
            nbytes += piece[2]
    drop_pages(path)

    def read(piece: tuple[Path, int, int, mmap.mmap]) -> None:
        fd = os.open(piece[0], os.O_RDONLY)
        os.preadv(fd, [memoryview(piece[3])[: piece[2]]], piece[1])
        os.close(fd)

    with ThreadPoolExecutor(THREADS) as pool:
        start = time.perf_counter()
        list(pool.map(read, pieces))
        return (time.perf_counter() - start) * PROMPT_BYTES / nbytes


def written(path: Path) -> Iterator[tuple[Path, int, int]]:
    """File, offset and length of pieces that hold data, not holes."""
    for file in sorted(f for f in path.rglob("*") if f.is_file() and f.stat().st_size > PAGE_BYTES):
        with file.open("rb") as opened, suppress(OSError):  # no data beyond an offset is an error
            stop = 0
            while True:
                start = os.lseek(opened.fileno(), stop, os.SEEK_DATA)
                stop = os.lseek(opened.fileno(), start, os.SEEK_HOLE)
                yield from ((file, at, min(PIECE_BYTES, stop - at)) for at in range(start, stop, PIECE_BYTES))


def drop_pages(path: Path) -> None:
    """Nothing below ``path`` stays in the system's page cache."""
    for file in (f for f in path.rglob("*") if f.is_file()):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def one_round(number: int, path: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds to first token per way, and each way's limit."""
    prompt = [random.Random(number).randrange(MODEL.vocab_size) for _ in range(PROMPT_TOKENS)]
    most = PROMPT_TOKENS - 16
    times, reads = {}, {}
    bare = LLM(engine_config())
    times["recompute"] = first_token_s(bare, prompt, 0)
    bare.shutdown()
    for tier, way in TIERS.items():
        folder = path / tier
        llm = LLM(engine_config(), offload=offload(tier, folder))
        first_token_s(llm, prompt, 0)
        if "device" not in times:
            times["device"] = first_token_s(llm, prompt, 0)
            llm.scheduler.forget_prefixes()
            times["host"] = first_token_s(llm, prompt, most)
            empty = empty_step_s(llm)
        llm.shutdown()
        drop_pages(folder)
        again = LLM(engine_config(), offload=offload(tier, folder))
        times[way] = first_token_s(again, prompt, most)
        again.shutdown()
        reads[way] = read_s(folder)
    copy, fixed = memcpy_s(PROMPT_BYTES), 3 * empty + times["device"]
    return times, {"host": copy + fixed} | {way: read + copy + fixed for way, read in reads.items()}


def shown(values: list[float]) -> str:
    return f"{statistics.median(values) * 1e3:.1f} ({min(values) * 1e3:.1f} to {max(values) * 1e3:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--short", action="store_true", help="three rounds")
    options = parser.parse_args()
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    limits: dict[str, list[float]] = {way: [] for way in WAYS[2:]}
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads; {PROMPT_TOKENS} tokens, {PROMPT_BYTES / 1e6:.0f} MB"
    )
    for number in range(3 if options.short else options.rounds):
        with tempfile.TemporaryDirectory() as directory:
            seconds, limit = one_round(number, Path(directory))
        for way, took in seconds.items():
            times[way].append(took)
        for way, least in limit.items():
            limits[way].append(least)
    print(f"{'way':<24}{'ms to first token':<30}{'of recompute':<14}{'limit ms':<30}{'of the limit (goal 1.5)'}")
    for way in WAYS:
        row = f"{way:<24}{shown(times[way]):<30}"
        row += f"{statistics.median(t / r for t, r in zip(times[way], times['recompute'], strict=True)):<14.3f}"
        if way in limits:
            ratio = statistics.median(t / least for t, least in zip(times[way], limits[way], strict=True))
            row += f"{shown(limits[way]):<30}{ratio:.2f}: {'reached' if ratio <= GOAL else 'not reached'}"
        print(row)


if __name__ == "__main__":
    main()
