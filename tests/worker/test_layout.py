"""Layouts are read from strides, and what cannot be read is refused with its shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from orlop.core import GroupTransfer, KVGroup
from orlop.errors import ConfigError
from orlop.testing.copy_backends import ids
from orlop.worker.layout import group_pages, page_bytes, part_of, rows, runs, whole_slots

A = KVGroup(0, 16, layers=("a",))


def pieces(tensor: Any, num_blocks: int | None = None) -> list[tuple[int, int, int]]:
    pages = group_pages({"a": tensor}, A, num_blocks)
    return [(p.block_stride, p.nbytes, p.column) for p in pages.pieces]


def test_contiguous_blocks_are_one_piece() -> None:
    assert pieces(np.zeros((9, 2, 3, 4, 5), np.float32)) == [(480, 480, 0)]
    assert pieces(torch.zeros((9, 2, 3, 4, 5), dtype=torch.bfloat16)) == [(240, 240, 0)]


def test_the_order_of_dimensions_in_the_shape_does_not_matter() -> None:
    stored_by_token = torch.zeros((9, 2, 16, 4, 8), dtype=torch.bfloat16)
    seen_by_head = stored_by_token.permute(0, 1, 3, 2, 4)
    assert pieces(seen_by_head) == pieces(stored_by_token)


def test_keys_and_values_apart_are_two_pieces() -> None:
    storage = np.zeros((2, 9, 4, 8), np.float16)
    assert pieces(storage.swapaxes(0, 1)) == [(64, 64, 0), (64, 64, 64)]
    assert pieces(storage, num_blocks=9) == pieces(storage.swapaxes(0, 1))


def test_one_storage_for_all_layers() -> None:
    storage = torch.zeros((9, 3, 50), dtype=torch.int8)
    group = KVGroup(0, 16, layers=("x", "y", "z"))
    pages = group_pages({k: storage[:, i] for i, k in enumerate("xyz")}, group)
    assert [(p.address - storage.data_ptr(), p.block_stride, p.nbytes, p.column) for p in pages.pieces] == [
        (0, 150, 50, 0),
        (50, 150, 50, 50),
        (100, 150, 50, 100),
    ]
    whole = runs(GroupTransfer(0, ids(4, 5), ids(1, 1), ids(0, 1)), pages, 0, 4096)
    assert whole.nbytes.tolist() == [300]


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.zeros((9, 1, 8)).expand(9, 4, 8), "share bytes"),
        (np.zeros((9, 8), np.uint8)[::-1], "run backwards"),
        (np.lib.stride_tricks.as_strided(np.zeros(64, np.uint8), (9, 8), (4, 1)), "share bytes"),
        (np.zeros((9, 200, 2), np.uint8)[:, :, 0], "in 200 pieces"),
        (np.zeros((9,), np.uint8), "expected \\(blocks"),
        (np.zeros((9, 0), np.uint8), "bytes in every block"),
        (np.zeros((2, 9, 3, 4, 5), np.uint8), "say num_blocks"),
    ],
)
@pytest.mark.fault("B235")
def test_an_unknown_layout_is_refused_by_name_shape_and_strides(tensor: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        group_pages({"a": tensor}, A)
    assert "'a'" in str(refused.value)
    assert str(tuple(tensor.shape)) in str(refused.value)
    assert "strides" in str(refused.value)


def test_a_missing_layer_and_an_odd_number_of_blocks_are_refused() -> None:
    group = KVGroup(0, 16, layers=("a", "b"))
    with pytest.raises(ConfigError, match="'b'"):
        group_pages({"a": np.zeros((9, 8))}, group)
    with pytest.raises(ConfigError, match="found 8 blocks, expected 9"):
        group_pages({"a": np.zeros((9, 8)), "b": np.zeros((8, 8))}, group)
    with pytest.raises(ConfigError, match="no dimension for 5 blocks"):
        group_pages({"a": np.zeros((9, 8)), "b": np.zeros((9, 8))}, group, num_blocks=5)


@pytest.mark.parametrize(("tp", "heads_per_rank"), [(1, 8), (2, 4), (8, 1), (16, 1)])
@pytest.mark.fault("B226")
def test_page_bytes_are_those_of_this_rank_s_real_tensors(tp: int, heads_per_rank: int) -> None:
    groups = [KVGroup(0, 16, layers=("a", "b")), KVGroup(1, 16, layers=("c",))]
    tensors = {k: torch.zeros((7, 2, heads_per_rank, 16, 64), dtype=torch.bfloat16) for k in "abc"}
    counted = page_bytes(tensors, groups)
    assert tuple(n * 7 for n in counted) == (2 * tensors["a"].nbytes, tensors["c"].nbytes)


def test_whole_slots_are_those_with_every_block() -> None:
    t = GroupTransfer(0, ids(1, 2, 3, 4, 5), ids(8, 8, 2, 8, 2), ids(0, 1, 0, 2, 2))
    assert whole_slots(t, 3).tolist() == [8]
    assert whole_slots(part_of(t, 0, 2), 3).tolist() == []


def test_rows_and_runs_name_the_same_bytes() -> None:
    rng = np.random.default_rng(0)
    tensor = np.zeros((2, 20, 3, 8), np.uint8).swapaxes(0, 1)
    pages = group_pages({"a": tensor}, A)
    t = GroupTransfer(0, rng.permutation(20)[:12], rng.permutation(30)[:12], rng.integers(0, 4, 12))
    by_run, by_row = set(), set()
    found = runs(t, pages, 64, 1000)
    for device, host, n in zip(found.device.tolist(), found.host.tolist(), found.nbytes.tolist(), strict=True):
        by_run |= {(device + i, host + i) for i in range(n)}
    for r in rows(t, pages, 64):
        for block, slot in zip(r.block_ids.tolist(), r.slots.tolist(), strict=True):
            start = r.piece.address + block * r.piece.block_stride
            by_row |= {(start + i, slot * 1000 + r.column + i) for i in range(r.piece.nbytes)}
    assert by_run == by_row
    assert len(by_run) == 12 * 48
