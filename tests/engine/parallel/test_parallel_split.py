"""Which positions a rank holds: every one once, causal work shared evenly, padding at the end."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.engine.parallel.tensor.sequence import SequenceSplit

sizes = st.tuples(st.integers(1, 70), st.integers(1, 5), st.integers(1, 4))


def splits(length: int, cp: int, tp: int) -> list[SequenceSplit]:
    return [
        SequenceSplit(length=length, cp=cp, cp_index=i, tp=tp, tp_index=j)
        for i in range(cp)
        for j in range(tp)
    ]


@given(sizes)
def test_every_position_is_held_once(size: tuple[int, int, int]) -> None:
    ranks = splits(*size)
    padded = ranks[0].padded
    assert torch.equal(torch.cat([r.shard for r in ranks]).sort().values, torch.arange(padded))
    assert torch.equal(
        torch.cat([r.positions for r in ranks if not r.tp_index]).sort().values, torch.arange(padded)
    )


@given(sizes)
def test_shards_are_equal_runs_of_the_context_ranks_positions(size: tuple[int, int, int]) -> None:
    length, cp, tp = size
    for at, rank in enumerate(splits(*size)):
        together = [
            SequenceSplit(length=length, cp=cp, cp_index=at // tp, tp=tp, tp_index=j).shard for j in range(tp)
        ]
        assert torch.equal(torch.cat(together), rank.positions)
        assert len({len(shard) for shard in together}) == 1


@given(sizes)
def test_causal_work_is_the_same_on_every_context_rank(size: tuple[int, int, int]) -> None:
    work = {int((rank.positions + 1).sum()) for rank in splits(*size)}
    assert len(work) == 1


@given(sizes)
def test_padding_is_minimal_and_at_the_end(size: tuple[int, int, int]) -> None:
    length, cp, tp = size
    unit = tp * (2 * cp if cp > 1 else 1)
    padded = splits(*size)[0].padded
    assert length <= padded < length + unit
    assert padded % unit == 0


@given(sizes, st.sampled_from([0, 1, 2]))
def test_the_ranks_parts_are_the_whole_sample(size: tuple[int, int, int], dim: int) -> None:
    length = size[0]
    shape = [2, 3, 4]
    shape[dim] = length
    x = torch.arange(length * 24 // [2, 3, 4][dim]).reshape(shape)
    ranks = [r for r in splits(*size) if not r.tp_index]
    padded = ranks[0].padded
    shape[dim] = padded
    full = torch.full(shape, -1)
    for rank in ranks:
        full.index_copy_(dim, rank.positions, rank.take(x, dim, -7))
    assert torch.equal(full.narrow(dim, 0, length), x)
    assert bool((full.narrow(dim, length, padded - length) == -7).all())


@pytest.mark.parametrize(
    ("cp", "positions"), [(2, [[0, 1, 6, 7], [2, 3, 4, 5]]), (4, [[0, 7], [1, 6], [2, 5], [3, 4]])]
)
def test_zigzag_by_hand(cp: int, positions: list[list[int]]) -> None:
    assert [SequenceSplit(length=8, cp=cp, cp_index=i).positions.tolist() for i in range(cp)] == positions
