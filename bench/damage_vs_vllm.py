"""The same damages and crashes for our tiers, vLLM's file tier and LMCache's disk and file adapters: what is served?

In: a Python with vLLM 0.32, and with ``--lmcache PYTHON`` one that has LMCache 0.5.6. Out: a table of counts: right,
miss, wrong bytes, raised, hang, crash. Never: a time; counts do not depend on how busy the machine is.

Method. Each system is the component itself, as its package has it, in a process of its own; it stores 32 chunks of
64 KiB, is closed, the files are copied, one damage is done to the copy, the component is opened on it and asked for all
chunks, in calls of 8. An answer is compared with what was stored under that key. Ours run through the real I/O process,
which verifies. LMCache's local disk backend has its index in memory alone, so it is damaged while it is open. ``bit in
the header`` is for what has one. ``of another model`` and ``from before a reset`` put the bytes of a chunk of the same
length and key in the chunk's place: of another namespace, or of another generation of the same; where a system knows
neither, of a run with other weights. ``zeros`` is what a power cut can leave where a name reaches the disk before the
bytes. ``kill -9`` takes a writing process, and the I/O process with it, at a random moment.

    PYTHONPATH=src python bench/damage_vs_vllm.py [--short] [--lmcache PYTHON] [--markdown]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import itertools
import json
import mmap
import os
import platform
import random
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

CHUNKS, CALL, CHUNK_BYTES = 32, 8, 64 << 10
PATIENCE_S, START_S = 30.0, 180.0
STALE = 0xEE
"""Lies in a slot before a load, as the bytes of whoever had it before."""
VARIANTS = ("ours", "other model", "old generation")
Places = dict[int, tuple[str, int, int, int, int]]
"""By chunk: its file, offset and bytes of the header, offset and bytes of the payload."""


def content(number: int, variant: str = "ours") -> bytes:
    return np.random.default_rng([number, VARIANTS.index(variant)]).bytes(CHUNK_BYTES)


def verdict(found: Any, number: int) -> str:
    """Of a chunk that was served."""
    return "right" if bytes(found) == content(number) else "wrong"


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def wait_for(done: Callable[[], Any]) -> Any:
    """What it says once it says something. Who waits for ever is ended from outside."""
    while not (found := done()):
        time.sleep(0.001)
    return found


# --- the systems: one of them per process ---------------------------------------------------------------


class System:
    """One component: opened on a directory, asked, closed."""

    restarts = True
    """Whether what it stored is found by the next one that opens the directory."""
    needs: tuple[str, ...] = ()
    """Modules that ``open`` imports."""

    def open(self, path: str, variant: str) -> None:
        raise NotImplementedError

    def store(self, numbers: Sequence[int], variant: str) -> None:
        raise NotImplementedError

    def load(self, numbers: Sequence[int]) -> list[str]:
        raise NotImplementedError

    def places(self, path: str) -> Places:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Ours(System):
    """A tier of ours through its runner and its I/O process."""

    needs = (
        "orlop.cli.stored",
        "orlop.tiering.runner",
    )

    def __init__(self, kind: str) -> None:
        self._factory = {"slab": "disk.store:DiskStore", "files": "files:FilesStore"}[kind]
        self._ids = itertools.count()

    def open(self, path: str, variant: str) -> None:
        from orlop.core import Namespace, RegionLayout
        from orlop.host.region import HostRegion
        from orlop.tiering.io_messages import StoreSpec
        from orlop.tiering.runner import RunnerOptions, TierRunner

        digest = b"another model" if variant == "other model" else b"ours"
        self._namespace = Namespace(digest.ljust(16, b"\0"), b"g" * 16 if variant == "old generation" else bytes(16))
        self._region = HostRegion.create(RegionLayout(CHUNKS, 1, ((CHUNK_BYTES,),)), prefault=False)
        kwargs = {"path": path, "max_bytes": 16 << 20}
        self._runner = TierRunner(
            RunnerOptions("bench"), self._region, StoreSpec(f"orlop.stores.{self._factory}", kwargs)
        )
        if trouble := self._runner.wait_ready(PATIENCE_S):
            raise RuntimeError(trouble)

    def _job(self, kind: Any, numbers: Sequence[int]) -> Any:
        from orlop.core import TierJob

        keys = tuple(key_of(n) + bytes(4) for n in numbers)
        return TierJob(next(self._ids), kind, 0, keys, np.asarray(numbers), CHUNK_BYTES, self._namespace)

    def store(self, numbers: Sequence[int], variant: str) -> None:
        from orlop.core import TransferKind
        from orlop.tiering.envelope import part_checksum

        for n in numbers:
            self._region.slots[n] = np.frombuffer(content(n, variant), np.uint8)
            self._region.checksums[n] = part_checksum(self._region.slots[n])
        self._runner.submit_store(self._job(TransferKind.STORE, numbers), now=time.monotonic())
        wait_for(self._runner.get_finished_jobs)

    def load(self, numbers: Sequence[int]) -> list[str]:
        from orlop.core import Outcome, TransferKind

        self._region.slots[list(numbers)] = STALE
        self._runner.submit_load(self._job(TransferKind.LOAD, numbers), now=time.monotonic())
        [result] = wait_for(self._runner.get_finished_jobs)
        answers = zip(result.outcomes, numbers, strict=True)
        return [verdict(self._region.slots[n], n) if o is Outcome.OK else "miss" for o, n in answers]

    def places(self, path: str) -> Places:
        from orlop.cli.stored import open_folder
        from orlop.stores.files_folder import FilesFolder
        from orlop.tiering.envelope import HEADER_BYTES

        places: Places = {}
        folder: Any = open_folder(Path(path))
        for chunk in folder.scan():
            if isinstance(folder, FilesFolder):
                file, at = os.path.relpath(folder.path_of(chunk.key), path), 0
            else:
                lane, shape, cell = folder._find(chunk.key)
                file, at = f"{lane}/{shape.number:08d}.cells", cell * shape.cell_bytes
            number = int.from_bytes(chunk.key[16:48], "little")
            places[number] = (file, at, HEADER_BYTES, at + HEADER_BYTES, CHUNK_BYTES)
        return places

    def close(self) -> None:
        self._runner.shutdown(PATIENCE_S)
        self._region.close()


class VllmFiles(System):
    """vLLM's FileSystemTierManager over a view."""

    needs = ("vllm.v1.kv_offload.tiering.fs.manager",)

    def open(self, path: str, variant: str) -> None:
        from vllm.v1.kv_offload.base import ReqContext, make_offload_key
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self._view = np.frombuffer(mmap.mmap(-1, CHUNKS * CHUNK_BYTES), np.uint8).reshape(CHUNKS, CHUNK_BYTES)
        self._job, self._key, self._context = TransferJob, make_offload_key, ReqContext(req_id="bench")
        self._tier = vllm_file_tier(path, self._view, "another" if variant == "other model" else "ours")
        self._ids = itertools.count()

    def _submit(self, numbers: Sequence[int], is_load: bool) -> Any:
        keys = [self._key(key_of(n), 0) for n in numbers]
        job = self._job(next(self._ids), keys, np.asarray(numbers), is_load, self._context)
        (self._tier.submit_load if is_load else self._tier.submit_store)(job)
        [result] = wait_for(lambda: list(self._tier.get_finished_jobs()))
        return keys, result

    def store(self, numbers: Sequence[int], variant: str) -> None:
        for n in numbers:
            self._view[n] = np.frombuffer(content(n, variant), np.uint8)
        self._submit(numbers, False)

    def load(self, numbers: Sequence[int]) -> list[str]:
        """As its manager does: what a lookup finds is loaded; after a failed load what had come is kept."""
        self._view[list(numbers)] = STALE
        there = [n for n in numbers if self._is_there(n)]
        said = dict.fromkeys(numbers, "miss")
        if there:
            keys, result = self._submit(there, True)
            served = keys if result.success else result.successful_keys or ()
            said |= {n: verdict(self._view[n], n) for n, key in zip(there, keys, strict=True) if key in served}
        return list(said.values())

    def _is_there(self, number: int) -> bool:
        from vllm.v1.kv_offload.base import LookupResult

        def answer() -> Any:
            found = self._tier.lookup(self._key(key_of(number), 0), self._context)
            if found is LookupResult.RETRY:
                self._tier.on_schedule_end(None)
                return None
            return [found is LookupResult.HIT]

        return bool(wait_for(answer)[0])

    def places(self, path: str) -> Places:
        mapper = self._tier.file_mapper
        names = {n: os.path.relpath(mapper.get_file_name(self._key(key_of(n), 0)), path) for n in range(CHUNKS)}
        return {n: (name, 0, 0, 0, CHUNK_BYTES) for n, name in names.items()}

    def close(self) -> None:
        self._tier.shutdown()


def vllm_file_tier(path: str, view: Any, model: str) -> Any:
    """vLLM's FileSystemTierManager over ``view``, uint8 (slots, bytes of a chunk), for a model of one KV group."""
    from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

    config = SimpleNamespace(
        groups=[SimpleNamespace(tokens_per_block=16, layer_names=["layer"])],
        parallel=SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=False),
        canonical_layout=False,
        replicated_layout=False,
        kv_cache_layout=None,
        model=SimpleNamespace(name=model, dtype="uint8"),
        cache=SimpleNamespace(tokens_per_hash=16),
    )
    spec = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=None)
    return FileSystemTierManager(spec, view.data, "fs", path)


class LmcacheL2(System):
    """LMCache's FSL2Adapter: one file per object, no header."""

    needs = (
        "lmcache.v1.distributed.l2_adapters.fs_l2_adapter",
        "lmcache.v1.memory_allocators.ad_hoc_memory_allocator",
    )

    def _adapter(self, path: str) -> Any:
        from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig

        return FSL2Adapter(FSL2AdapterConfig(path))

    def open(self, path: str, variant: str) -> None:
        self._model = "another" if variant == "other model" else "ours"
        self._tier = self._adapter(path)

    def _key(self, number: int) -> Any:
        from lmcache.v1.distributed.api import ObjectKey

        return ObjectKey(chunk_hash=key_of(number), model_name=self._model, kv_rank=0)

    def store(self, numbers: Sequence[int], variant: str) -> None:
        keys, objects = [self._key(n) for n in numbers], [lmcache_object(content(n, variant)) for n in numbers]
        self._tier.submit_store_task(keys, objects)
        wait_for(self._tier.pop_completed_store_tasks)

    def load(self, numbers: Sequence[int]) -> list[str]:
        keys, objects = [self._key(n) for n in numbers], [lmcache_object(bytes([STALE]) * CHUNK_BYTES) for _ in numbers]
        lookup = self._tier.submit_lookup_and_lock_task(keys, {})
        there = self._bits(lambda: self._tier.query_lookup_and_lock_result(lookup))
        load = self._tier.submit_load_task(keys, objects)
        came = self._bits(lambda: self._tier.query_load_result(load))
        return [
            verdict(objects[i].byte_array, n) if there.test(i) and came.test(i) else "miss"
            for i, n in enumerate(numbers)
        ]

    def _bits(self, ask: Callable[[], Any]) -> Any:
        return wait_for(lambda: None if (bits := ask()) is None else [bits])[0]

    def places(self, path: str) -> Places:
        names = {n: os.path.relpath(self._tier._key_to_path(self._key(n)), path) for n in range(CHUNKS)}
        return {n: (name, 0, 0, 0, CHUNK_BYTES) for n, name in names.items()}

    def close(self) -> None:
        self._tier.close()


class LmcacheLocal(System):
    """LMCache's LocalDiskBackend: one file per chunk, the index in memory."""

    needs = ("lmcache.v1.storage_backend.local_disk_backend",)
    restarts = False

    def open(self, path: str, variant: str) -> None:
        self._model = "another" if variant == "other model" else "ours"
        self._loop, self._config, self._cpu = lmcache_parts(local_disk=path)
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        self._tier = LocalDiskBackend(self._config, self._loop.loop, self._cpu, dst_device="cpu")

    def _key(self, number: int) -> Any:
        return lmcache_key(self._model, number)

    def store(self, numbers: Sequence[int], variant: str) -> None:
        for n in numbers:
            self._tier.submit_put_task(self._key(n), lmcache_object(content(n, variant)))
        wait_for(lambda: all(self._tier.contains(self._key(n)) for n in numbers))

    def load(self, numbers: Sequence[int]) -> list[str]:
        found = self._tier.batched_get_blocking([self._key(n) for n in numbers])
        return ["miss" if o is None else verdict(o.byte_array, n) for o, n in zip(found, numbers, strict=True)]

    def places(self, path: str) -> Places:
        names = {n: os.path.relpath(self._tier._key_to_path(self._key(n)), path) for n in range(CHUNKS)}
        return {n: (name, 0, 0, 0, CHUNK_BYTES) for n, name in names.items()}

    def close(self) -> None:
        self._tier.close()
        self._loop.close()


class LmcacheFs(System):
    """LMCache's FSConnector (``fs://``): one file per chunk, with a short header."""

    needs = ("lmcache.v1.storage_backend.connector.fs_connector",)

    def open(self, path: str, variant: str) -> None:
        self._model = "another" if variant == "other model" else "ours"
        self._loop, config, cpu = lmcache_parts()
        from lmcache.v1.storage_backend.connector.fs_connector import FSConnector

        self._tier = FSConnector(self._loop.loop, cpu, config, base_paths_str=path)

    def store(self, numbers: Sequence[int], variant: str) -> None:
        for n in numbers:
            self._loop.run(self._tier.put(lmcache_key(self._model, n), lmcache_object(content(n, variant))))

    def load(self, numbers: Sequence[int]) -> list[str]:
        found = [self._loop.run(self._tier.get(lmcache_key(self._model, n))) for n in numbers]
        return ["miss" if o is None else verdict(o.byte_array, n) for o, n in zip(found, numbers, strict=True)]

    def places(self, path: str) -> Places:
        header = self._tier.remote_metadata_bytes
        files = {n: self._tier._get_file_path(lmcache_key(self._model, n)) for n in range(CHUNKS)}
        return {n: (os.path.relpath(file, path), 0, header, header, CHUNK_BYTES) for n, file in files.items()}

    def close(self) -> None:
        self._loop.close()


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        import asyncio
        import threading

        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Any) -> Any:
        import asyncio

        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


LMCACHE_SHAPE = (2, 4, 16, 256)  # K and V, layers, tokens, hidden: 64 KiB of bfloat16


def lmcache_object(data: bytes) -> Any:
    import torch
    from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator

    made = AdHocMemoryAllocator().allocate(torch.Size(LMCACHE_SHAPE), torch.bfloat16)
    assert made is not None
    made.raw_data.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return made


def lmcache_key(model: str, number: int) -> Any:
    import torch
    from lmcache.utils import CacheEngineKey

    return CacheEngineKey(model, 1, 0, number, torch.bfloat16)


def lmcache_parts(local_disk: str | None = None) -> tuple[Loop, Any, Any]:
    """A loop, the configuration, and the host memory that its tiers read into."""
    import torch
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

    class Dirty(AdHocMemoryAllocator):
        """Memory that somebody has used before."""

        def allocate(self, *args: Any, **kwargs: Any) -> Any:
            made = super().allocate(*args, **kwargs)
            made.raw_data.fill_(STALE)
            return made

    if local_disk is not None:
        os.makedirs(local_disk, exist_ok=True)
    config = LMCacheEngineConfig.from_defaults(
        local_disk=local_disk, max_local_disk_size=1.0 if local_disk else 0.0, local_cpu=False
    )
    metadata = LMCacheMetadata("ours", 1, 1, 0, 0, torch.bfloat16, (4, 2, 16, 1, 256), chunk_size=16)
    return Loop(), config, LocalCPUBackend(config, metadata, "cpu", memory_allocator=Dirty())


SYSTEMS: dict[str, Callable[[], System]] = {
    "Orlop slab": lambda: Ours("slab"),
    "Orlop files": lambda: Ours("files"),
    "vLLM file tier": VllmFiles,
    "LMCache FSL2Adapter": LmcacheL2,
    "LMCache FSConnector": LmcacheFs,
    "LMCache local disk": LmcacheLocal,
}


def serve(name: str) -> None:
    """Lines of JSON in, one line of JSON each out; ends with the input."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a package prints is no answer
    system = SYSTEMS[name]()
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        try:
            answer = {"ok": answer_to(system, verb, arguments)}
        except Exception as error:
            answer = {"raised": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out)


def answer_to(system: System, verb: str, arguments: list[Any]) -> Any:
    if verb == "hello":
        return system.restarts
    if verb == "fill":
        path, variant = arguments
        system.open(path, variant)
        for first in range(0, CHUNKS, CALL):
            system.store(range(first, first + CALL), variant)
        return system.places(path)
    if verb == "look":
        said: list[str] = []
        for first in range(0, CHUNKS, CALL):
            try:
                said += system.load(range(first, first + CALL))
            except Exception:
                said += ["raised"] * CALL
        return said
    if verb == "write":  # in a fork, which is to be killed; from a process that has opened nothing yet
        for module in system.needs:
            importlib.import_module(module)
        if (pid := os.fork()) == 0:
            try:
                os.setsid()
                system.open(arguments[0], "ours")
                for n in range(CHUNKS):
                    system.store([n], "ours")
                time.sleep(PATIENCE_S)
            finally:
                os._exit(0)
        return pid
    if verb == "reap":
        os.waitpid(arguments[0], 0)
        return None
    return system.open(*arguments) if verb == "open" else system.close()


# --- the one who does the damage -------------------------------------------------------------------------


class Failed(Exception):
    """The process of a system did not answer: ``hang`` or ``crash``."""


class Process:
    """A system in its process; started again when it has gone."""

    def __init__(self, name: str, python: str) -> None:
        self._command = [python, __file__, "--serve", name]
        self._process: subprocess.Popen[str] | None = None
        self.restarts = bool(self.ask("hello"))

    def ask(self, *words: Any) -> Any:
        patience = START_S if words[0] in ("fill", "write") else PATIENCE_S  # they import
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            patience = START_S
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(words) + "\n")
        process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            line = process.stdout.readline() if selector.select(patience) else None
        if not line:
            self.close()
            raise Failed("hang" if line is None else "crash")
        answer = json.loads(line)
        if "raised" in answer:
            raise Failed(f"raised {answer['raised']}")
        return answer["ok"]

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Scene:
    """The files of one round, before they are damaged."""

    def __init__(self, path: Path, places: Places, others: dict[str, tuple[Path, Places]], rng: random.Random) -> None:
        self.path, self.places, self._others, self.rng = path, places, others, rng

    def patch(self, number: int, data: bytes) -> None:
        file, at, *_ = self.places[number]
        with open(self.path / file, "r+b") as f:
            f.seek(at)
            f.write(data)

    def whole(self, number: int, variant: str = "ours") -> bytes:
        path, places = (self.path, self.places) if variant == "ours" else self._others[variant]
        file, at, header, _, payload = places[number]
        with open(path / file, "rb") as f:
            f.seek(at)
            return f.read(header + payload)

    def flip(self, number: int, first: int, nbytes: int) -> set[int]:
        at = first + self.rng.randrange(nbytes)
        data = bytearray(self.whole(number))
        data[at] ^= 1 << self.rng.randrange(8)
        self.patch(number, bytes(data))
        return {number}

    def in_file(self, file: str, beyond: int) -> set[int]:
        return {n for n, (f, at, h, _, p) in self.places.items() if f == file and at + h + p > beyond}

    def any(self) -> int:
        return self.rng.randrange(CHUNKS)


def payload_bit(scene: Scene) -> set[int]:
    number = scene.any()
    _, _, header, _, nbytes = scene.places[number]
    return scene.flip(number, header, nbytes)


def header_bit(scene: Scene) -> set[int]:
    number = scene.any()
    header = scene.places[number][2]
    return scene.flip(number, 0, header) if header else set()


def cut(scene: Scene) -> set[int]:
    file, at, header, _, nbytes = scene.places[scene.any()]
    keep = at + scene.rng.randrange(header + nbytes)
    os.truncate(scene.path / file, keep)
    return scene.in_file(file, keep)


def swapped(scene: Scene) -> set[int]:
    one, two = scene.rng.sample(range(CHUNKS), 2)
    first, second = scene.whole(one), scene.whole(two)
    scene.patch(one, second)
    scene.patch(two, first)
    return {one, two}


def replaced(variant: str) -> Callable[[Scene], set[int]]:
    def replace(scene: Scene) -> set[int]:
        number = scene.any()
        scene.patch(number, scene.whole(number, variant))
        return {number}

    return replace


def zeros(scene: Scene) -> set[int]:
    number = scene.any()
    scene.patch(number, bytes(len(scene.whole(number))))
    return {number}


def removed(scene: Scene) -> set[int]:
    file = scene.places[scene.any()][0]
    os.unlink(scene.path / file)
    return scene.in_file(file, -1)


DAMAGES: dict[str, Callable[[Scene], set[int]]] = {
    "bit in the payload": payload_bit,
    "bit in the header": header_bit,
    "file cut short": cut,
    "two chunks swapped": swapped,
    "of another model": replaced("other model"),
    "from before a reset": replaced("old generation"),
    "zeros": zeros,
    "file removed": removed,
}
Seen = dict[str, Counter[str]]


def damage_all(process: Process, work: Path, rounds: int) -> Seen:
    """By damage: answers for the damaged chunks, and ``lost`` of the others (or ``wrong others``)."""
    originals: dict[str, tuple[Path, Places]] = {}
    for variant in VARIANTS:
        path = work / variant.replace(" ", "-")
        originals[variant] = (path, as_places(process.ask("fill", str(path), variant)))
        process.ask("close")
    seen: Seen = {}
    for name, harm in DAMAGES.items():
        seen[name] = Counter()
        for seed in range(rounds):
            path = work / "round"
            shutil.rmtree(path, ignore_errors=True)
            if process.restarts:
                shutil.copytree(originals["ours"][0], path)
                places = originals["ours"][1]
            else:
                places = as_places(process.ask("fill", str(path), "ours"))
            hit = harm(Scene(path, places, originals, random.Random(f"{name} {seed}")))
            seen[name] += look(process, path, hit)
    return seen


def look(process: Process, path: Path, hit: set[int] | None) -> Counter[str]:
    """What is said of the chunks in ``hit``, and what was lost of the others. None: all are asked about."""
    try:
        if process.restarts:
            process.ask("open", str(path), "ours")
        said = process.ask("look")
        process.ask("close")
    except Failed as failed:
        process.close()
        return Counter({str(failed).split()[0]: 1})
    found: Counter[str] = Counter()
    for number, answer in enumerate(said):
        if hit is None or number in hit:
            found[answer] += 1
        elif answer != "right":
            found["neighbour lost" if answer == "miss" else f"neighbour {answer}"] += 1
    return found


def kill_all(process: Process, writers: Process, work: Path, rounds: int) -> Counter[str]:
    """A writer killed at a random moment, what it left opened again; all chunks are asked for."""
    seen: Counter[str] = Counter()
    for seed in range(rounds):
        path = work / f"kill-{seed}"
        pid = writers.ask("write", str(path))
        rng, deadline = random.Random(seed), time.monotonic() + PATIENCE_S
        wanted = rng.randrange(1, CHUNKS) * CHUNK_BYTES
        while used(path) < wanted:
            if time.monotonic() > deadline:
                raise SystemExit("found a writer that does not write; nothing was shown")
        os.killpg(pid, signal.SIGKILL)
        writers.ask("reap", pid)
        wait_for(lambda group=pid: not alive_in(group))
        if not process.restarts:
            process.ask("open", str(path), "ours")
        seen += look(process, path, None)
    return seen


def alive_in(group: int) -> list[str]:
    """The processes of a group that still hold something."""
    alive = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, found = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(found) == group and state not in "ZX":
            alive.append(stat.parent.name)
    return alive


def used(path: Path) -> int:
    """Bytes that were written below ``path``; a preallocated file counts by what is not zero in its index."""
    total = 0
    for file in path.rglob("*"):
        try:
            if file.suffix == ".index":
                records = np.frombuffer(file.read_bytes()[4096:], np.uint8)
                total += int(records[: len(records) // 128 * 128].reshape(-1, 128).any(axis=1).sum()) * CHUNK_BYTES
            elif file.suffix != ".cells" and file.is_file():
                total += file.stat().st_size
        except OSError:
            continue
    return total


def as_places(said: dict[str, list[Any]]) -> Places:
    return {int(n): tuple(place) for n, place in said.items()}


# --- the table -------------------------------------------------------------------------------------------

ORDER = ("right", "miss", "wrong", "raised", "hang", "crash", "neighbour lost", "neighbour wrong", "neighbour raised")


def cell(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[word]} {word}" for word in ORDER if counts[word]) or "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="two rounds of each, to see that it works")
    parser.add_argument("--rounds", type=int, default=20, help="of each damage and of the kill")
    parser.add_argument("--lmcache", metavar="PYTHON", help="a Python in which LMCache is installed")
    parser.add_argument("--directory", help="where to work; default: temporary files")
    parser.add_argument("--markdown", action="store_true", help="the table as docs/benchmarks.md has it")
    parser.add_argument("--serve", choices=list(SYSTEMS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    rounds = 2 if options.short else options.rounds
    columns: dict[str, Seen] = {}
    for name in SYSTEMS:
        python = options.lmcache if name.startswith("LMCache") else sys.executable
        if python is None or (name.startswith("vLLM") and not installed("vllm")):
            print(f"{name}: not installed, left out", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory(prefix="orlop-bench-", dir=options.directory) as work:
            process, writers = Process(name, python), Process(name, python)
            try:
                columns[name] = damage_all(process, Path(work), rounds)
                columns[name]["kill -9 while writing"] = kill_all(process, writers, Path(work), rounds)
            finally:
                process.close()
                writers.close()
        print(f"{name}: done", file=sys.stderr)
    show(columns, rounds, lmcache_version(options.lmcache), options.markdown)


def installed(package: str) -> str | None:
    for name in (package, f"{package}-cpu"):
        try:
            return f"{package} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def lmcache_version(python: str | None) -> str:
    if python is None:
        return "not installed"
    ask = "import importlib.metadata; print(importlib.metadata.version('lmcache'))"
    return subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


def show(columns: dict[str, Seen], rounds: int, lmcache: str, as_markdown: bool) -> None:
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.platform()}, Python {platform.python_version()}, {installed('vllm')}"
    )
    if "LMCache local disk" in columns:
        print(f"lmcache {lmcache}")
    print(f"{rounds} rounds each, {CHUNKS} chunks of {CHUNK_BYTES >> 10} KiB\n")
    rows = list(next(iter(columns.values())))
    if as_markdown:
        print("| damage | " + " | ".join(columns) + " |")
        print("|---" * (len(columns) + 1) + "|")
        for row in rows:
            print(f"| {row} | " + " | ".join(cell(seen[row]) for seen in columns.values()) + " |")
        return
    for row in rows:
        print(row)
        for name, seen in columns.items():
            print(f"    {name:<20} {cell(seen[row])}")


if __name__ == "__main__":
    main()
