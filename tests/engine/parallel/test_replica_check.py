"""Checksums find every flipped bit, and name who holds it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ranks import on_ranks
from stretto.engine.parallel.control import this_rank
from stretto.engine.parallel.fragment import ShardPlacement, TensorBox
from stretto.engine.parallel.replica_check import ReplicaConsistencyCheck, ReplicaMismatch, checksum, report

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn)
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Flip one bit of a contiguous tensor in place."""
    bits = tensor.view(-1).view(torch.uint8)
    bits[element * tensor.element_size() + bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_of_an_element_changes_the_sum(dtype: torch.dtype) -> None:
    tensor = torch.randn(33, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = int(checksum(tensor))
    for element in (0, 16, 32):
        for bit in range(8 * tensor.element_size()):
            flip(tensor, element, bit)
            assert int(checksum(tensor)) != before
            flip(tensor, element, bit)
    assert int(checksum(tensor)) == before


def test_padding_and_layout_do_not_count() -> None:
    tensor = torch.randn(6, 4)
    assert int(checksum(torch.nn.functional.pad(tensor, (0, 3)))) == int(checksum(tensor))
    assert int(checksum(tensor.T)) == int(checksum(tensor))
    assert int(checksum(torch.cat([torch.zeros(1), tensor.view(-1)])[1:])) == int(checksum(tensor))


def new_tensors() -> dict[str, tuple[Tensor, ShardPlacement]]:
    """On four ranks: `all` on every one, `pair` twice, `own` once each, `away` without memory."""
    rank = this_rank()
    pair = TensorBox(offsets=(4 * (rank // 2),), sizes=(4,), local=(0,))
    own = TensorBox(offsets=(4 * rank,), sizes=(4,), local=(0,))
    away = torch.zeros(1000)
    away.untyped_storage().resize_(0)
    return {
        "all": (torch.arange(5.0), ShardPlacement.unsharded("all", (5,))),
        "pair": (torch.full((4,), float(rank // 2)), ShardPlacement("pair", (8,), (pair,))),
        "own": (torch.full((4,), float(rank)), ShardPlacement("own", (16,), (own,))),
        "away": (away, ShardPlacement.unsharded("away", (1000,))),
    }


def compared(flips: list[tuple[int, str]]) -> tuple[list[ReplicaMismatch], list[ReplicaMismatch], int]:
    copies, mine = ReplicaConsistencyCheck(), new_tensors()
    before = copies.differences(mine)
    for rank, name in flips:
        if rank == this_rank():
            flip(mine[name][0], 1, 3)
    return before, copies.differences(mine), copies.compared


def test_a_flip_is_named_with_its_rank() -> None:
    for before, after, number in on_ranks(4, compared, [(2, "all"), (3, "pair"), (1, "own")]):
        assert before == []
        assert number == 4  # `all`, `away`, and `pair` of either half
        assert after == [
            ReplicaMismatch(name="all", holders=(0, 1, 2, 3), suspects=(2,)),
            ReplicaMismatch(name="pair", holders=(2, 3), suspects=(2, 3)),
        ]
        assert report(after) == (
            "all on rank 2 is not what 3 other ranks have; "
            "pair is not the same on ranks 2 and 3, without a majority for one value"
        )


def test_one_process_has_no_copies() -> None:
    assert (
        ReplicaConsistencyCheck().differences({"all": (torch.ones(3), ShardPlacement.unsharded("all", (3,)))})
        == []
    )
