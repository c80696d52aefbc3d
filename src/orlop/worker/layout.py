"""Where a chunk's bytes lie: in the KV tensors, and in a slot of the host region.

In: tensors (anything with a shape, strides and an address), KV groups, the region's layout, group
transfers. Out: the pieces of a page, checked transfers, and runs of bytes to copy. Never: a copied
byte, an import of torch, a thread.

Inside one rank's part of a slot, chunk by chunk the same::

    part   | block 0             | block 1             | ... | block blocks_per_chunk - 1 |
    page   | layer a | layer b | ...                     one page: page_bytes of this group
    layer  | piece | piece | ...                         in the order of their addresses on the device

A layer's share of a page is whatever bytes its tensor holds for one block, in memory order. Where they
lie together it is one piece; a tensor that keeps keys and values apart has two. The order follows
strides, so two views of one storage that differ only in the order of dimensions give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from orlop.core import GroupTransfer, Int64Array, KVGroup, RegionLayout, TransferJob, TransferKind
from orlop.errors import ConfigError, CopyError

MAX_PIECES = 64
"""Above so many pieces per layer and block a layout counts as unknown: copying it would crawl."""


class SlotMemory(Protocol):
    """What a copy backend needs of the host region.

    ``slots``: uint8 (slots, slot_bytes), writable, bytes of a slot contiguous. ``checksums``: uint64
    (slots, ranks), xxh3_64 of a rank's part without padding.
    """

    @property
    def layout(self) -> RegionLayout: ...
    @property
    def slots(self) -> npt.NDArray[np.uint8]: ...
    @property
    def checksums(self) -> npt.NDArray[np.uint64]: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Contiguous bytes that every block has in one tensor.

    ``address`` of block 0's piece, ``block_stride`` from a block's piece to the next block's, ``nbytes``
    of it, ``column`` where it lies in the page; all in bytes.
    """

    layer: str
    address: int
    block_stride: int
    nbytes: int
    column: int


@dataclass(frozen=True)
class GroupPages:
    """The pages of one group on the device: block ids ``0 .. blocks - 1``, ``page_bytes`` each."""

    blocks: int
    page_bytes: int
    pieces: tuple[Piece, ...]

    @cached_property
    def columns(self) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
        """``address``, ``block_stride``, ``nbytes`` and ``column`` of all pieces."""
        fields = [(p.address, p.block_stride, p.nbytes, p.column) for p in self.pieces]
        address, stride, nbytes, column = np.array(fields, np.int64).T
        return address, stride, nbytes, column


@dataclass(frozen=True, slots=True)
class Rows:
    """One piece of many blocks: rows of equal length.

    Row ``i`` is the piece of block ``block_ids[i]`` on the device, and bytes ``column .. column +
    piece.nbytes - 1`` of slot ``slots[i]``.
    """

    piece: Piece
    column: int
    block_ids: Int64Array
    slots: Int64Array


@dataclass(frozen=True, slots=True)
class Runs:
    """Byte runs with both ends: device addresses, offsets from the region's first byte, lengths; int64."""

    device: Int64Array
    host: Int64Array
    nbytes: Int64Array


# --- tensors to pieces -------------------------------------------------------------------------------


def group_pages(kv_caches: Mapping[str, Any], group: KVGroup, num_blocks: int | None = None) -> GroupPages:
    """The pages of ``group``; ``ConfigError`` names layer, shape and strides where a layout is unknown.

    ``kv_caches`` maps layer names to a tensor (torch or numpy, any dtype and device), or to a sequence of
    tensors that together hold a layer's state. The block index is the first dimension. An engine that
    says its ``num_blocks`` may also register (2, num_blocks, ...), and tensors of k rows per block.
    """
    pieces: list[Piece] = []
    column, blocks = 0, num_blocks
    for layer in group.layers:
        if layer not in kv_caches:
            raise ConfigError(
                f"layer {layer!r} of KV group {group.index}: found no tensor, expected one per layer; "
                "register all layers that the group names"
            )
        value = kv_caches[layer]
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            view = _strided(layer, tensor, num_blocks)
            blocks = view.blocks if blocks is None else blocks
            if view.blocks != blocks:
                raise ConfigError(
                    f"{view}: found {view.blocks} blocks, expected {blocks} as in the group's other layers"
                )
            for offset, nbytes in _contiguous(view):
                pieces.append(Piece(layer, view.address + offset, view.block_stride, nbytes, column))
                column += nbytes
    if not pieces or not blocks:
        raise ConfigError(f"KV group {group.index}: found no bytes to offload, expected layers with KV tensors")
    return GroupPages(blocks, column, tuple(pieces))


def page_bytes(
    kv_caches: Mapping[str, Any], groups: Sequence[KVGroup], num_blocks: int | None = None
) -> tuple[int, ...]:
    """Bytes of one block of each group on this rank, all layers together, counted from the real tensors."""
    return tuple(group_pages(kv_caches, g, num_blocks).page_bytes for g in groups)


@dataclass(frozen=True, slots=True)
class _Strided:
    """One tensor with its block dimension taken out; ``dims`` are (size, stride in bytes), largest stride first."""

    layer: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    blocks: int
    block_stride: int
    itemsize: int
    dims: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return f"layer {self.layer!r} with shape {self.shape} and strides {self.strides} bytes"


def _strided(layer: str, tensor: Any, num_blocks: int | None) -> _Strided:
    if not hasattr(tensor, "shape"):
        raise ConfigError(f"layer {layer!r}: found {type(tensor).__name__}, expected a tensor or an array")
    shape = tuple(int(n) for n in tensor.shape)
    if hasattr(tensor, "data_ptr"):
        itemsize, address = int(tensor.element_size()), int(tensor.data_ptr())
        strides = tuple(int(s) * itemsize for s in tensor.stride())
    else:
        itemsize, address = int(tensor.itemsize), int(tensor.ctypes.data)
        strides = tuple(int(s) for s in tensor.strides)
    what = f"layer {layer!r} with shape {shape} and strides {strides} bytes"
    if len(shape) < 2 or 0 in shape:
        raise ConfigError(f"{what}: expected (blocks, ...) with bytes in every block")
    axis, rows_per_block = _block_axis(shape, num_blocks, what)
    dims = [(n, s) for i, (n, s) in enumerate(zip(shape, strides, strict=True)) if i != axis]
    dims.append((rows_per_block, strides[axis]))
    return _Strided(
        layer,
        shape,
        strides,
        address,
        shape[axis] // rows_per_block,
        strides[axis] * rows_per_block,
        itemsize,
        tuple(sorted(((n, s) for n, s in dims if n > 1), key=lambda dim: -dim[1])),
    )


def _block_axis(shape: tuple[int, ...], num_blocks: int | None, what: str) -> tuple[int, int]:
    """``(axis, rows per block)``. Only a stated ``num_blocks`` allows anything but one row of axis 0."""
    if num_blocks is None:
        if len(shape) > 4 and shape[0] == 2 < shape[1]:
            raise ConfigError(
                f"{what}: found 2 blocks, or keys and values apart, expected to know which; "
                "say num_blocks, or register the tensor with its block index first"
            )
        return 0, 1
    if shape[0] == 2 != num_blocks and shape[1] % num_blocks == 0:
        return 1, shape[1] // num_blocks
    if shape[0] % num_blocks == 0:
        return 0, shape[0] // num_blocks
    raise ConfigError(
        f"{what}: found no dimension for {num_blocks} blocks, expected (blocks, ...), (2, blocks, ...) or a "
        "multiple of blocks; register the tensor with its block index first"
    )


def _contiguous(view: _Strided) -> Iterator[tuple[int, int]]:
    """``(offset, nbytes)`` of each contiguous piece of a block, by rising offset."""
    _refuse_overlap(view)
    nbytes, dims = view.itemsize, list(view.dims)
    while dims and dims[-1][1] == nbytes:
        nbytes *= dims.pop()[0]
    pieces = int(np.prod([n for n, _ in dims], dtype=np.int64)) if dims else 1
    if pieces > MAX_PIECES:
        raise ConfigError(
            f"{view}: found a block in {pieces} pieces of {nbytes} bytes, expected at most {MAX_PIECES}; "
            "register views whose blocks are contiguous, or keys and values apart"
        )
    for steps in product(*(range(n) for n, _ in dims)):
        yield sum(i * s for i, (_, s) in zip(steps, dims, strict=True)), nbytes


def _refuse_overlap(view: _Strided) -> None:
    """Two indexes at one address (broadcast or overlapping views) cannot be written block by block."""
    dims = sorted([*view.dims, (view.blocks, view.block_stride)], key=lambda dim: dim[1])
    extent = view.itemsize
    for n, stride in dims:
        if n > 1 and stride < extent:
            raise ConfigError(
                f"{view}: found elements that share bytes or run backwards, expected every element at its own "
                "place; register the tensors that hold the KV cache, not expanded or flipped views"
            )
        extent += (n - 1) * stride


# --- transfers to copies -----------------------------------------------------------------------------


def checked(job: TransferJob, layout: RegionLayout, pages: Sequence[GroupPages]) -> tuple[GroupTransfer, ...]:
    """The job's transfers, in order of slot and offset; ``CopyError`` if any of them must not be copied.

    Ids out of bounds, a block or a place in a slot named twice, and stores of partial chunks are refused,
    the whole job and before its first byte. Python's own lists and sets on purpose: numpy lets go of the GIL
    in every call on more than 500 entries, and a dozen such calls cost 5 ms each beside a busy thread.
    """
    return tuple(_checked(job, t, layout, pages) for t in job.transfers)


def _checked(job: TransferJob, t: GroupTransfer, layout: RegionLayout, pages: Sequence[GroupPages]) -> GroupTransfer:
    if not 0 <= t.group < len(pages):
        raise CopyError(f"job {job.job_id}: found KV group {t.group}, expected below {len(pages)}")
    if not len(t.block_ids) == len(t.slots) == len(t.offsets):
        raise CopyError(
            f"job {job.job_id}: found {len(t.block_ids)} blocks, {len(t.slots)} slots and {len(t.offsets)} offsets, "
            "expected as many of each"
        )
    blocks, slots, offsets = t.block_ids.tolist(), t.slots.tolist(), t.offsets.tolist()
    _within(job, "block id", blocks, pages[t.group].blocks)
    _within(job, "slot", slots, layout.slots)
    _within(job, "offset", offsets, layout.blocks_per_chunk)
    places = [slot * layout.blocks_per_chunk + offset for slot, offset in zip(slots, offsets, strict=True)]
    written, what = (blocks, "block") if job.kind is TransferKind.LOAD else (places, "place in a slot")
    if len(set(written)) != len(written):
        raise CopyError(f"job {job.job_id}: found a {what} that would be written twice, expected each once")
    if job.kind is TransferKind.STORE and len(places) != len(set(slots)) * layout.blocks_per_chunk:
        raise CopyError(f"job {job.job_id}: found a chunk with blocks missing, expected only whole chunks in a store")
    order = sorted(range(len(places)), key=places.__getitem__)
    return t if order == list(range(len(places))) else _picked(t, np.array(order, np.int64))


def _within(job: TransferJob, what: str, values: list[int], limit: int) -> None:
    if values and (min(values) < 0 or max(values) >= limit):
        raise CopyError(
            f"job {job.job_id}: found {what}s {min(values)} to {max(values)}, expected 0 to {limit - 1}; "
            "nothing of this job was copied"
        )


def _picked(t: GroupTransfer, order: Int64Array) -> GroupTransfer:
    return GroupTransfer(t.group, t.block_ids[order], t.slots[order], t.offsets[order])


def whole_slots(t: GroupTransfer, blocks_per_chunk: int) -> Int64Array:
    """The slots all of whose blocks are in ``t`` (each at most once), rising."""
    slots, counts = np.unique(t.slots, return_counts=True)
    whole: Int64Array = slots[counts == blocks_per_chunk]
    return whole


def part_of(t: GroupTransfer, start: int, stop: int) -> GroupTransfer:
    """Entries ``start .. stop - 1`` of a transfer; views, nothing copied."""
    return GroupTransfer(t.group, t.block_ids[start:stop], t.slots[start:stop], t.offsets[start:stop])


def rows(t: GroupTransfer, pages: GroupPages, part_offset: int) -> Iterator[Rows]:
    """The copies of a transfer as rows of equal length: for each offset in the chunk, for each piece."""
    for offset in np.unique(t.offsets).tolist():
        chosen = t.offsets == offset
        block_ids, slots = t.block_ids[chosen], t.slots[chosen]
        for piece in pages.pieces:
            yield Rows(piece, part_offset + offset * pages.page_bytes + piece.column, block_ids, slots)


def runs(t: GroupTransfer, pages: GroupPages, part_offset: int, slot_stride: int) -> Runs:
    """The copies of a transfer as byte runs; runs that adjoin at both ends are one.

    Ordered as in the slot, block by block, so the host side is read and written front to back.
    """
    address, stride, length, column = pages.columns
    device = (address + t.block_ids[:, None] * stride).ravel()
    page = t.slots * slot_stride + part_offset + t.offsets * pages.page_bytes
    host = (page[:, None] + column).ravel()
    nbytes = np.tile(length, len(t.block_ids))
    if not len(nbytes):
        return Runs(device, host, nbytes)
    joined = (device[1:] - device[:-1] == nbytes[:-1]) & (host[1:] - host[:-1] == nbytes[:-1])
    if not np.count_nonzero(joined):
        return Runs(device, host, nbytes)
    first = np.concatenate(([True], ~joined)).nonzero()[0]
    return Runs(device[first], host[first], np.add.reduceat(nbytes, first))
