"""Pieces of a tensor: what is filled from the full tensor is read back from the same place."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.engine.parallel.fragment import ShardPlacement, TensorBox


@given(
    rows=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    drawn=st.data(),
    columns=st.integers(1, 3),
    padding=st.integers(0, 3),
    dim=st.integers(0, 1),
)
def test_fill_copies_each_piece_to_its_place_and_zeros_the_rest(rows, drawn, columns, padding, dim):
    total = sum(rows)
    mine = drawn.draw(st.lists(st.sampled_from(range(len(rows))), unique=True))
    shape = (total, columns) if dim == 0 else (columns, total)
    full = torch.arange(1.0, 1.0 + total * columns).view(shape)
    pieces, at = [], 0
    for run in mine:
        start = [0, 0]
        sizes, local = list(shape), [0, 0]
        start[dim], sizes[dim], local[dim] = sum(rows[:run]), rows[run], at
        pieces.append(TensorBox(offsets=tuple(start), sizes=tuple(sizes), local=tuple(local)))
        at += rows[run]
    size = list(shape)
    size[dim] = at + padding
    local = torch.full(size, torch.nan)
    ShardPlacement("w", shape, tuple(pieces)).fill(local, full)

    starts = [sum(rows[:run]) for run in mine]
    parts = [full.narrow(dim, start, rows[run]) for start, run in zip(starts, mine, strict=True)]
    empty = list(shape)
    empty[dim] = padding
    assert torch.equal(local, torch.cat([*parts, torch.zeros(empty)], dim))
    for piece in pieces:
        assert torch.equal(piece.of_local(local), piece.of_full(full))


def test_boxes_are_views():
    piece = TensorBox(offsets=(1, 2), sizes=(2, 1), local=(0, 0))
    full, local = torch.zeros(4, 4), torch.zeros(2, 2)
    piece.of_full(full).fill_(1.0)
    piece.of_local(local).fill_(2.0)
    assert full.sum() == 2
    assert full[1:3, 2].tolist() == [1, 1]
    assert local.tolist() == [[2, 0], [2, 0]]


def test_a_whole_tensor_is_one_owned_piece():
    full = torch.randn(3, 2)
    placed = ShardPlacement.unsharded("w", (3, 2))
    local = torch.empty(3, 2)
    placed.fill(local, full)
    assert torch.equal(local, full)
    assert [piece.owned for piece in placed.pieces] == [True]
    assert [piece.owned for piece in ShardPlacement.unsharded("w", (3, 2), owned=False).pieces] == [False]


def test_a_scalar_is_filled():
    local = torch.zeros(())
    ShardPlacement.unsharded("scale", ()).fill(local, torch.tensor(3.0))
    assert local == 3.0
