"""f and g (Shoeybi et al. 2019, section 3): what the one does forward the other does backward."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ranks import on_ranks
from stretto.parallel.collectives import all_max, all_sum, copy_to, reduce_from, start_sum


def pair() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    x = torch.tensor([1.0 + rank, 10.0 * rank], requires_grad=True)
    total = torch.tensor([3.0, 10.0])
    dy = torch.tensor([2.0 + rank, 4.0])

    y = copy_to(x, group)
    assert torch.equal(y, x)
    y.backward(dy)
    assert torch.equal(x.grad, torch.tensor([5.0, 8.0]))
    assert dy.tolist() == [2.0 + rank, 4.0], "the gradient that came in was written to"

    x.grad = None
    y = reduce_from(x, group)
    assert torch.equal(y, total)
    assert x.tolist() == [1.0 + rank, 10.0 * rank], "the input was written to"
    y.backward(dy)
    assert torch.equal(x.grad, dy)

    # g after f: a replicated tensor through partial results; the sum of all ranks' work, once
    x = torch.tensor([3.0], requires_grad=True)
    y = reduce_from(copy_to(x, group) * (1 + rank), group)
    assert y.item() == 9.0
    y.backward()
    assert x.grad.item() == 3.0

    apart = torch.arange(6.0).view(2, 3).t()  # not contiguous
    assert torch.equal(reduce_from(apart, group), 2 * apart)


def in_place() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    x = torch.tensor([1.0 + rank, -float(rank)])
    assert all_max(x, group) is x
    assert x.tolist() == [2.0, 0.0]
    assert all_sum(x, group) is x
    assert x.tolist() == [4.0, 0.0]
    start_sum(x, group).wait()
    assert x.tolist() == [8.0, 0.0]


def both() -> None:
    pair()
    in_place()


def test_on_two_ranks():
    on_ranks(2, both)


def test_without_a_group_nothing_happens():
    x = torch.randn(3)
    before = x.clone()
    for operation in (copy_to, reduce_from, all_sum, all_max):
        assert operation(x, None) is x
    assert torch.equal(x, before)
