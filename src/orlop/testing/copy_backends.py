"""The suite that a copy backend inherits, and plain slots to run it on.

In: a backend, and how its device takes and gives back bytes. Out: tests. Never: a thread, a clock, an
import of torch; bytes are judged on the device's own tensors, with their logical order.

A new backend is proved by a subclass that says how to make it::

    class TestMyBackend(CopyBackendSuite):
        def backend(self, groups, memory, rank, num_blocks=None):
            return MyBackend(groups, memory, rank, num_blocks=num_blocks)

and, where its tensors are not numpy arrays, ``place``, ``fetch`` and ``overwrite``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from orlop.core import GroupTransfer, Int64Array, KVGroup, RegionLayout, TransferJob, TransferKind
from orlop.errors import ConfigError, CopyError
from orlop.worker.base import CopyBackend
from orlop.worker.layout import SlotMemory, page_bytes

Bytes = npt.NDArray[np.uint8]


class PlainMemory:
    """Slots in ordinary memory, filled with random bytes so that a stray write shows."""

    def __init__(self, layout: RegionLayout, rng: np.random.Generator) -> None:
        self.layout = layout
        self.slots: Bytes = rng.integers(0, 256, (layout.slots, layout.slot_bytes), np.uint8)
        self.checksums: npt.NDArray[np.uint64] = rng.integers(0, 2**63, (layout.slots, layout.ranks), np.uint64)


# Ways in which engines lay out one layer's KV, as (blocks, ...) views over storages that `place` makes.
# Each takes `place`, the layers, blocks, heads, tokens per block and head size.
Place = Callable[[tuple[int, ...]], Any]


def packed(place: Place, layers: Sequence[str], n: int, h: int, b: int, d: int) -> dict[str, Any]:
    """Keys and values side by side in the last dimension: contiguous blocks."""
    return {layer: place((n, h, b, 2 * d)) for layer in layers}


def split_inside(place: Place, layers: Sequence[str], n: int, h: int, b: int, d: int) -> dict[str, Any]:
    """(blocks, 2, heads, tokens, dim): contiguous blocks."""
    return {layer: place((n, 2, h, b, d)) for layer in layers}


def heads_last(place: Place, layers: Sequence[str], n: int, h: int, b: int, d: int) -> dict[str, Any]:
    """Stored with tokens before heads, viewed with heads before tokens: contiguous in memory, not in shape."""
    return {layer: place((n, 2, b, h, d)).swapaxes(2, 3) for layer in layers}


def split_outside(place: Place, layers: Sequence[str], n: int, h: int, b: int, d: int) -> dict[str, Any]:
    """All keys, then all values, viewed with the block first: two pieces."""
    return {layer: place((2, n, h, b, d)).swapaxes(0, 1) for layer in layers}


def split_outside_by_token(place: Place, layers: Sequence[str], n: int, h: int, b: int, d: int) -> dict[str, Any]:
    """As before with tokens before heads in memory."""
    return {layer: place((2, n, b, h, d)).swapaxes(0, 1).swapaxes(2, 3) for layer in layers}


def layers_inside(place: Place, layers: Sequence[str], n: int, h: int, b: int, d: int) -> dict[str, Any]:
    """One storage (blocks, layers, page), viewed per layer: a block's layers lie together."""
    storage = place((n, len(layers), h, b, 2 * d))
    return {layer: storage[:, i] for i, layer in enumerate(layers)}


def heads_outside(place: Place, layers: Sequence[str], n: int, h: int, b: int, d: int) -> dict[str, Any]:
    """Heads outermost in memory: one piece per head."""
    return {layer: place((h, n, b, 2 * d)).swapaxes(0, 1) for layer in layers}


def padded(place: Place, layers: Sequence[str], n: int, h: int, b: int, d: int) -> dict[str, Any]:
    """Blocks with bytes between them that belong to somebody else."""
    return {layer: place((n, h * b * 2 * d + 7))[:, : h * b * 2 * d] for layer in layers}


def two_states(place: Place, layers: Sequence[str], n: int, h: int, b: int, d: int) -> dict[str, Any]:
    """Recurrent layers with two tensors each, of different sizes, in one padded storage."""
    return {layer: _states(place((n, h * b * 2 * d + 11)), h * b) for layer in layers}


def _states(storage: Any, cut: int) -> list[Any]:
    return [storage[:, :cut], storage[:, cut:-11]]


LAYOUTS = (
    packed,
    split_inside,
    heads_last,
    split_outside,
    split_outside_by_token,
    layers_inside,
    heads_outside,
    padded,
    two_states,
)


@dataclass
class Ranks:
    """One engine's ranks: their tensors, their backends, and the slots they share."""

    groups: tuple[KVGroup, ...]
    blocks: int
    tensors: list[dict[str, Any]]
    backends: list[CopyBackend]
    memory: PlainMemory


# Ways to spoil a good transfer; the job holds a good one before it, which must not be copied either.


def block_beyond_the_last(t: GroupTransfer, world: Ranks) -> GroupTransfer:
    return t._replace(block_ids=_last_is(t.block_ids, world.blocks))


def negative_block(t: GroupTransfer, world: Ranks) -> GroupTransfer:
    return t._replace(block_ids=_last_is(t.block_ids, -1))


def slot_beyond_the_last(t: GroupTransfer, world: Ranks) -> GroupTransfer:
    return t._replace(slots=np.where(t.slots == t.slots[0], world.memory.layout.slots, t.slots))


def negative_slot(t: GroupTransfer, world: Ranks) -> GroupTransfer:
    return t._replace(slots=np.where(t.slots == t.slots[0], -1, t.slots))


def offset_beyond_the_last(t: GroupTransfer, world: Ranks) -> GroupTransfer:
    return t._replace(offsets=_last_is(t.offsets, world.memory.layout.blocks_per_chunk))


def arrays_of_unequal_length(t: GroupTransfer, world: Ranks) -> GroupTransfer:
    return t._replace(slots=t.slots[:-1])


def unknown_group(t: GroupTransfer, world: Ranks) -> GroupTransfer:
    return t._replace(group=len(world.groups))


def one_block_twice(t: GroupTransfer, world: Ranks) -> GroupTransfer:
    return t._replace(block_ids=_last_is(t.block_ids, t.block_ids[0]))


def one_place_twice(t: GroupTransfer, world: Ranks) -> GroupTransfer:
    return GroupTransfer(
        t.group,
        np.concatenate((t.block_ids, t.block_ids[:1])),
        np.concatenate((t.slots, t.slots[:1])),
        np.concatenate((t.offsets, t.offsets[:1])),
    )


def partial_chunk(t: GroupTransfer, world: Ranks) -> GroupTransfer:
    return GroupTransfer(t.group, t.block_ids[:-1], t.slots[:-1], t.offsets[:-1])


def _last_is(values: Int64Array, last: int) -> Int64Array:
    return np.append(values[:-1], np.int64(last))


_ALWAYS = (
    block_beyond_the_last,
    negative_block,
    slot_beyond_the_last,
    negative_slot,
    offset_beyond_the_last,
    arrays_of_unequal_length,
    unknown_group,
)
SPOILED: dict[TransferKind, tuple[Any, ...]] = {
    TransferKind.STORE: (*_ALWAYS, one_place_twice, partial_chunk),
    TransferKind.LOAD: (*_ALWAYS, one_block_twice),
}


class CopyBackendSuite:
    """What every copy backend must do. Seeds are bug reports: they are in the test's name."""

    # --- what a subclass says ---

    def backend(
        self, groups: Sequence[KVGroup], memory: SlotMemory, rank: int, num_blocks: int | None = None
    ) -> CopyBackend:
        raise NotImplementedError

    def place(self, array: Bytes) -> Any:
        """A new tensor on the device with these bytes."""
        return array.copy()

    def fetch(self, tensor: Any) -> Bytes:
        """The tensor's bytes, uint8 in its logical shape."""
        return np.array(tensor)

    def overwrite(self, tensor: Any, array: Bytes) -> None:
        """Write bytes to a tensor (or view) in place."""
        tensor[...] = array

    # --- the world ---

    def ranks(
        self,
        rng: np.random.Generator,
        layouts: Sequence[Any] = LAYOUTS,
        ranks: int | None = None,
        blocks_per_chunk: int | None = None,
    ) -> Ranks:
        """Random geometry: groups, ranks, chunk sizes and odd page sizes."""
        n_ranks = ranks or int(rng.integers(1, 4))
        blocks = int(rng.integers(24, 40))
        counts = rng.integers(1, 4, int(rng.integers(1, 4))).tolist()
        groups = tuple(
            KVGroup(g, 16, layers=tuple(f"group{g}.layer{i}" for i in range(n))) for g, n in enumerate(counts)
        )
        sizes = [[layouts[int(rng.integers(len(layouts)))], *rng.integers(1, 8, 3).tolist()] for _ in groups]
        tensors = [self._tensors(rng, groups, sizes, blocks) for _ in range(n_ranks)]
        layout = RegionLayout(
            int(rng.integers(6, 12)),
            blocks_per_chunk or int(rng.integers(1, 9)),
            tuple(page_bytes(t, groups) for t in tensors),
        )
        memory = PlainMemory(layout, rng)
        backends = [self.backend(groups, memory, rank) for rank in range(n_ranks)]
        for backend, t in zip(backends, tensors, strict=True):
            backend.register(t)
        return Ranks(groups, blocks, tensors, backends, memory)

    def _tensors(
        self, rng: np.random.Generator, groups: Sequence[KVGroup], sizes: Sequence[Any], blocks: int
    ) -> dict[str, Any]:
        def place(shape: tuple[int, ...]) -> Any:
            return self.place(rng.integers(0, 256, shape, np.uint8))

        made: dict[str, Any] = {}
        for group, (layout, h, b, d) in zip(groups, sizes, strict=True):
            made |= layout(place, group.layers, blocks, h, b, d)
        return made

    def pages(self, tensors: Mapping[str, Any], group: KVGroup) -> list[bytes]:
        """The plain twin: every block's bytes, layer after layer, in logical order."""
        layers = [self.fetch(t) for layer in group.layers for t in _each(tensors[layer])]
        return [b"".join(layer[block].tobytes() for layer in layers) for block in range(len(layers[0]))]

    def poison(self, tensors: Mapping[str, Any], rng: np.random.Generator) -> None:
        for value in tensors.values():
            for t in _each(value):
                self.overwrite(t, rng.integers(0, 256, tuple(t.shape), np.uint8))

    # --- the tests ---

    @pytest.mark.parametrize("seed", range(12))
    @pytest.mark.fault("B028")
    @pytest.mark.fault("B032")
    def test_what_was_stored_is_what_is_loaded_into_other_blocks(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        world = self.ranks(rng)
        stored = [random_transfer(rng, world, g.index) for g in world.groups]
        before = [[self.pages(t, g) for g in world.groups] for t in world.tensors]
        for g, t in enumerate(stored):
            _all_copy(world, job(1 + g, TransferKind.STORE, shuffled(rng, t)))
            loaded = GroupTransfer(g, rng.permutation(world.blocks)[: len(t.slots)], t.slots, t.offsets)
            for tensors in world.tensors:
                self.poison(tensors, rng)
            poisoned = [self.pages(tensors, world.groups[g]) for tensors in world.tensors]
            _all_copy(world, job(100 + g, TransferKind.LOAD, shuffled(rng, loaded)))
            for rank, tensors in enumerate(world.tensors):
                expected = list(poisoned[rank])
                for new, old in zip(loaded.block_ids.tolist(), t.block_ids.tolist(), strict=True):
                    expected[new] = before[rank][g][old]
                assert self.pages(tensors, world.groups[g]) == expected
            for tensors, pages in zip(world.tensors, before, strict=True):
                self._restore(tensors, world.groups, pages)

    def _restore(self, tensors: Mapping[str, Any], groups: Sequence[KVGroup], pages: Sequence[list[bytes]]) -> None:
        for group, blocks in zip(groups, pages, strict=True):
            at = 0
            for layer in group.layers:
                for t in _each(tensors[layer]):
                    shape = tuple(t.shape)
                    n = int(np.prod(shape[1:]))
                    array = np.array([np.frombuffer(p[at : at + n], np.uint8) for p in blocks]).reshape(shape)
                    self.overwrite(t, array)
                    at += n

    @pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
    @pytest.mark.fault("B235")
    def test_every_known_layout_comes_back(self, layout: Any) -> None:
        rng = np.random.default_rng(7)
        world = self.ranks(rng, [layout], ranks=2)
        t = random_transfer(rng, world, 0)
        before = [self.pages(tensors, world.groups[0]) for tensors in world.tensors]
        _all_copy(world, job(1, TransferKind.STORE, t))
        for tensors in world.tensors:
            self.poison(tensors, rng)
        _all_copy(world, job(2, TransferKind.LOAD, t))
        for rank, tensors in enumerate(world.tensors):
            after = self.pages(tensors, world.groups[0])
            assert [after[b] for b in t.block_ids.tolist()] == [before[rank][b] for b in t.block_ids.tolist()]

    @pytest.mark.parametrize("rows_per_block", [1, 4])
    @pytest.mark.parametrize("outside", [False, True])
    @pytest.mark.fault("B235")
    def test_kernel_blocks_smaller_than_blocks_and_keys_apart(self, rows_per_block: int, outside: bool) -> None:
        rng = np.random.default_rng(3)
        n = 10
        shape = (2, n * rows_per_block, 3, 5) if outside else (n * rows_per_block, 2, 3, 5)
        array = rng.integers(0, 256, shape, np.uint8)
        tensor = self.place(array)
        group = KVGroup(0, 16, layers=("a",))
        layout = RegionLayout(2, 2, (page_bytes({"a": tensor}, [group], n),))
        assert layout.page_bytes == ((30 * rows_per_block,),)
        backend = self.backend([group], PlainMemory(layout, rng), 0, n)
        backend.register({"a": tensor})
        backend.copy(job(1, TransferKind.STORE, GroupTransfer(0, ids(7, 2), ids(1, 1), ids(0, 1))))
        self.overwrite(tensor, np.zeros(shape, np.uint8))
        backend.copy(job(2, TransferKind.LOAD, GroupTransfer(0, ids(4, 0), ids(1, 1), ids(0, 1))))
        axis = 1 if outside else 0
        blocks = np.moveaxis(array, axis, 0).reshape(n, -1)
        expected = np.zeros_like(blocks)
        expected[4], expected[0] = blocks[7], blocks[2]
        assert np.array_equal(np.moveaxis(self.fetch(tensor), axis, 0).reshape(n, -1), expected)

    @pytest.mark.parametrize("seed", range(4))
    def test_a_partial_load_fills_only_its_blocks(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        world = self.ranks(rng)
        t = random_transfer(rng, world, 0)
        before = [self.pages(tensors, world.groups[0]) for tensors in world.tensors]
        _all_copy(world, job(1, TransferKind.STORE, t))
        for tensors in world.tensors:
            self.poison(tensors, rng)
        chosen = rng.random(len(t.slots)) < 0.5
        part = GroupTransfer(0, t.block_ids[chosen], t.slots[chosen], t.offsets[chosen])
        expected = [self.pages(tensors, world.groups[0]) for tensors in world.tensors]
        _all_copy(world, job(2, TransferKind.LOAD, part))
        for rank, tensors in enumerate(world.tensors):
            for b in part.block_ids.tolist():
                expected[rank][b] = before[rank][b]
            assert self.pages(tensors, world.groups[0]) == expected[rank]

    @pytest.mark.parametrize("seed", range(6))
    def test_a_store_writes_its_parts_and_their_checksums_and_nothing_else(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        world = self.ranks(rng)
        memory, layout = world.memory, world.memory.layout
        t = random_transfer(rng, world, int(rng.integers(len(world.groups))))
        rank = int(rng.integers(layout.ranks))
        slots, checksums = memory.slots.copy(), memory.checksums.copy()
        assert world.backends[rank].copy(job(1, TransferKind.STORE, t)) == layout.page_bytes[rank][t.group] * len(
            t.slots
        )
        start = layout.part_offset(rank, t.group)
        stop = start + layout.part_bytes(rank, t.group)
        written = np.unique(t.slots)
        for slot in written.tolist():
            part = memory.slots[slot, start:stop]
            assert memory.checksums[slot, rank] == xxhash.xxh3_64_intdigest(part.tobytes())
            assert not np.array_equal(part, slots[slot, start:stop])
            slots[slot, start:stop] = part
            checksums[slot, rank] = memory.checksums[slot, rank]
        assert np.array_equal(memory.slots, slots)
        assert np.array_equal(memory.checksums, checksums)

    @pytest.mark.parametrize(
        ("kind", "spoil"), [(k, f) for k, fs in SPOILED.items() for f in fs], ids=lambda x: getattr(x, "__name__", x)
    )
    def test_a_job_that_must_not_run_fails_and_touches_nothing(self, kind: TransferKind, spoil: Any) -> None:
        rng = np.random.default_rng(5)
        world = self.ranks(rng, ranks=1, blocks_per_chunk=3)
        t = random_transfer(rng, world, 0, chunks=2)
        spoiled = spoil(t, world)
        memory, tensors = world.memory, world.tensors[0]
        slots, checksums = memory.slots.copy(), memory.checksums.copy()
        before = [self.pages(tensors, g) for g in world.groups]
        with pytest.raises(CopyError):
            world.backends[0].copy(TransferJob(1, "r", kind, (t, spoiled)))
        assert np.array_equal(memory.slots, slots)
        assert np.array_equal(memory.checksums, checksums)
        assert [self.pages(tensors, g) for g in world.groups] == before

    @pytest.mark.fault("B077")
    def test_a_mapping_that_is_permuted_after_every_eviction(self) -> None:
        rng = np.random.default_rng(11)
        world = self.ranks(rng, [packed, split_outside], ranks=1)
        bpc, tensors, backend = world.memory.layout.blocks_per_chunk, world.tensors[0], world.backends[0]
        held: dict[int, list[bytes]] = {}
        for n in range(50):
            slot = n % world.memory.layout.slots
            mapping = rng.permutation(world.blocks)[:bpc]
            self.poison(tensors, rng)
            pages = self.pages(tensors, world.groups[0])
            held[slot] = [pages[b] for b in mapping.tolist()]
            backend.copy(job(2 * n, TransferKind.STORE, chunk(0, mapping, slot)))
            wanted = int(rng.choice(list(held)))
            mapping = rng.permutation(world.blocks)[:bpc]
            backend.copy(job(2 * n + 1, TransferKind.LOAD, chunk(0, mapping, wanted)))
            pages = self.pages(tensors, world.groups[0])
            assert [pages[b] for b in mapping.tolist()] == held[wanted]

    @pytest.mark.fault("B015")
    def test_tensors_that_moved_are_found_again(self) -> None:
        rng = np.random.default_rng(2)
        world = self.ranks(rng, [packed], ranks=1)
        t = random_transfer(rng, world, 0)
        before = self.pages(world.tensors[0], world.groups[0])
        world.backends[0].copy(job(1, TransferKind.STORE, t))
        world.backends[0].forget()
        with pytest.raises(CopyError):
            world.backends[0].copy(job(2, TransferKind.LOAD, t))
        moved = {k: self.place(np.zeros(tuple(v.shape), np.uint8)) for k, v in world.tensors[0].items()}
        world.backends[0].register(moved)
        world.backends[0].copy(job(3, TransferKind.LOAD, t))
        after = self.pages(moved, world.groups[0])
        assert [after[b] for b in t.block_ids.tolist()] == [before[b] for b in t.block_ids.tolist()]
        assert self.pages(world.tensors[0], world.groups[0]) == before

    @pytest.mark.fault("B078")
    def test_tensors_of_another_size_than_the_region_are_refused(self) -> None:
        tensor = self.place(np.zeros((10, 2, 3, 4, 5), np.uint8))
        group = KVGroup(0, 16, layers=("a", "b"))
        all_layers_counted_twice = RegionLayout(2, 1, ((2 * 240,),))
        backend = self.backend([group], PlainMemory(all_layers_counted_twice, np.random.default_rng(0)), 0)
        with pytest.raises(ConfigError, match=r"240.*480"):
            backend.register({"a": tensor, "b": self.place(np.zeros((10, 1, 3, 4, 10), np.uint8))})

    @pytest.mark.fault("B078")
    def test_the_first_and_the_last_block_are_reached_and_the_one_after_is_refused(self) -> None:
        rng = np.random.default_rng(4)
        world = self.ranks(rng, [layers_inside], ranks=1)
        bpc, last = world.memory.layout.blocks_per_chunk, world.memory.layout.slots - 1
        for first_block in (0, world.blocks - bpc):
            t = chunk(0, np.arange(first_block, first_block + bpc), last)
            before = self.pages(world.tensors[0], world.groups[0])
            world.backends[0].copy(job(1, TransferKind.STORE, t))
            self.poison(world.tensors[0], rng)
            world.backends[0].copy(job(2, TransferKind.LOAD, t))
            after = self.pages(world.tensors[0], world.groups[0])
            assert [after[b] for b in t.block_ids.tolist()] == [before[b] for b in t.block_ids.tolist()]
        beyond = np.arange(world.blocks + 1 - bpc, world.blocks + 1)
        with pytest.raises(CopyError, match=f"expected 0 to {world.blocks - 1}"):
            world.backends[0].copy(job(3, TransferKind.STORE, chunk(0, beyond, last)))


# --- helpers -------------------------------------------------------------------------------------------


def ids(*values: int) -> Int64Array:
    """An int64 array, as messages carry them."""
    return np.array(values, np.int64)


def job(job_id: int, kind: TransferKind, *transfers: GroupTransfer, **more: Any) -> TransferJob:
    """A job of request ``r``."""
    return TransferJob(job_id, "r", kind, transfers, **more)


def chunk(group: int, block_ids: npt.ArrayLike, slot: int) -> GroupTransfer:
    """One whole chunk: its blocks in order, in one slot."""
    blocks = np.asarray(block_ids, np.int64)
    return GroupTransfer(group, blocks, np.full(len(blocks), slot, np.int64), np.arange(len(blocks), dtype=np.int64))


def random_transfer(rng: np.random.Generator, world: Ranks, group: int, chunks: int | None = None) -> GroupTransfer:
    """Whole chunks from random blocks to random slots; block ids never equal positions."""
    layout = world.memory.layout
    bpc = layout.blocks_per_chunk
    n = chunks or int(rng.integers(1, min(layout.slots, world.blocks // bpc) + 1))
    slots = rng.permutation(layout.slots)[:n]
    blocks = rng.permutation(world.blocks)[: n * bpc]
    return GroupTransfer(group, blocks, np.repeat(slots, bpc), np.tile(np.arange(bpc, dtype=np.int64), n))


def shuffled(rng: np.random.Generator, t: GroupTransfer) -> GroupTransfer:
    """The same copies in another order."""
    order = rng.permutation(len(t.slots))
    return GroupTransfer(t.group, t.block_ids[order], t.slots[order], t.offsets[order])


def _all_copy(world: Ranks, job: TransferJob) -> None:
    for backend in world.backends:
        backend.copy(job)


def _each(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)
