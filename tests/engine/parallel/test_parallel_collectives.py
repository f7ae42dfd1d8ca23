"""f and g (Shoeybi et al. 2019, section 3): what the one does forward the other does backward."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks import on_ranks
from stretto.engine.parallel.collectives import (
    all_max,
    all_sum,
    copy_to,
    cut,
    exchange,
    gather,
    gather_copy,
    gather_from,
    gather_uneven,
    join,
    reduce_from,
    scatter_sum,
    scatter_to,
    scatter_uneven,
    slice_to,
    start_exchange,
    start_gather,
    start_scatter_sum,
    start_sum,
)


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


def split_along(full: Tensor, dim: int) -> Tensor:
    return full.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def drawn(shape: Sequence[int], who: int) -> Tensor:
    """Random numbers of rank `who`, known to all; n - 1 stands for numbers that all ranks draw alike."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + who))


def with_gradients() -> None:
    """Each operator beside its definition, written with the tensors of all ranks at hand."""
    rank, group, n = dist.get_rank(), dist.group.WORLD, dist.get_world_size()
    for shape, dim in (((2, 4 * n, 3), 1), ((n, 3), 0), ((1, n, 2), -2), ((3, 2, 2 * n), -1)):
        part = list(shape)
        part[dim] //= n
        parts, wholes = [drawn(part, r) for r in range(n)], [drawn(shape, r) for r in range(n)]
        alike, summed = drawn(shape, n), sum(wholes)
        cases = (
            # operator, its input, its output, gradient of its output, gradient of its input
            (gather_from, parts[rank], torch.cat(parts, dim), wholes[rank], split_along(summed, dim)),
            (gather_copy, parts[rank], torch.cat(parts, dim), alike, split_along(alike, dim)),
            (scatter_to, wholes[rank], split_along(summed, dim), parts[rank], torch.cat(parts, dim)),
            (slice_to, alike, split_along(alike, dim), parts[rank], torch.cat(parts, dim)),
        )
        for operator, x, y, dy, dx in cases:
            for apart in (False, True):  # inputs that are not contiguous
                label = f"{operator.__name__} {shape} along {dim}, rank {rank}, apart {apart}"
                inputs, upstream = (strided(t) if apart else t.clone() for t in (x, dy))
                leaf = inputs.requires_grad_()
                out = operator(leaf, group, dim)
                torch.testing.assert_close(out, y, rtol=1e-14, atol=1e-14, msg=label)
                out.backward(upstream)
                torch.testing.assert_close(leaf.grad, dx, rtol=1e-14, atol=1e-14, msg=label)
                assert torch.equal(leaf, x), f"{label}: the input was written to"
                assert torch.equal(upstream, dy), f"{label}: the gradient was written to"


def strided(x: Tensor) -> Tensor:
    """The same numbers, not contiguous."""
    wide = x.new_zeros((*x.shape, 2))
    wide[..., 0] = x
    return wide[..., 0]


def rows_sent() -> None:
    """Uneven and empty shares; rank i sends (i + 2 j) % 3 rows to rank j."""
    rank, group, n = dist.get_rank(), dist.group.WORLD, dist.get_world_size()
    counts = [[(i + 2 * j) % 3 for j in range(n)] for i in range(n)]
    inputs = [drawn((sum(counts[i]), 2), i) for i in range(n)]
    expected = torch.cat([inputs[i].split(counts[i])[rank] for i in range(n)])
    receive = [counts[i][rank] for i in range(n)]
    x = inputs[rank].clone().requires_grad_()
    out = exchange(x, counts[rank], receive, group)
    assert torch.equal(out, expected)
    out.backward(3 * expected)
    assert torch.equal(x.grad, 3 * inputs[rank])

    empty = torch.zeros(0, 2, requires_grad=True)
    out = exchange(empty, [0] * n, [0] * n, group)
    assert out.shape == (0, 2)
    out.sum().backward()
    assert empty.grad.shape == (0, 2)

    for sizes in ([r + 1 for r in range(n)], [0] + [2] * (n - 1), [0] * (n - 1) + [3]):
        parts = [drawn((sizes[r], 2, 3), r) for r in range(n)]
        wholes = [drawn((sum(sizes), 2, 3), r) for r in range(n)]
        together, share = torch.cat(parts), sum(wholes).split(sizes)[rank]
        x = parts[rank].clone().requires_grad_()
        out = gather_uneven(x, sizes, group)
        assert torch.equal(out, together)
        out.backward(wholes[rank])
        torch.testing.assert_close(x.grad, share, rtol=1e-14, atol=1e-14)
        x = strided(wholes[rank]).requires_grad_()
        out = scatter_uneven(x, sizes, group)
        torch.testing.assert_close(out, share, rtol=1e-14, atol=1e-14)
        out.backward(parts[rank])
        assert torch.equal(x.grad, together)


def types() -> None:
    """Other dtypes are supported; sums of bfloat16 are rounded once."""
    rank, group, n = dist.get_rank(), dist.group.WORLD, dist.get_world_size()
    for dtype in (torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.bool):
        x = torch.tensor([[rank, 1], [0, rank]]).to(dtype)
        every = [torch.tensor([[r, 1], [0, r]]).to(dtype) for r in range(n)]
        assert torch.equal(gather(x, group, 0), torch.cat(every))
        assert torch.equal(gather(x, group, 1), torch.cat(every, 1))
        sizes = [2] * n
        rows = torch.cat([x] * n)
        out, work = start_exchange(rows, sizes, sizes, group)
        work.wait()
        assert torch.equal(out, torch.cat(every))
        if dtype is not torch.bool:
            summed = scatter_sum(rows, group, 0)
            assert torch.equal(summed, sum(t.float() for t in every).to(dtype)), dtype
    big = torch.tensor([[256.0], [1.0]]).bfloat16()[min(rank, 1)].expand(n)  # 256 + 1 is 256 in bfloat16
    assert scatter_sum(big, group, 0).item() == torch.tensor(256.0 + n - 1).bfloat16().item()


def beside_work() -> None:
    """Started and not waited for, several at a time, in one order on all ranks."""
    rank, group, n = dist.get_rank(), dist.group.WORLD, dist.get_world_size()
    x = drawn((3, 2), rank)
    first, gathered = start_gather(x, group)
    second, summed = start_scatter_sum(torch.stack([x] * n), group)
    summed.wait()
    gathered.wait()
    assert torch.equal(first, torch.stack([drawn((3, 2), r) for r in range(n)]))
    torch.testing.assert_close(second, sum(drawn((3, 2), r) for r in range(n)), rtol=1e-14, atol=1e-14)


def shared_out() -> None:
    with_gradients()
    rows_sent()
    types()
    beside_work()


@pytest.mark.parametrize("ranks", [2, 4])
def test_gathering_and_scattering_are_each_others_gradients(ranks):
    on_ranks(ranks, shared_out)


def test_without_a_group_pieces_are_the_whole():
    x = torch.randn(2, 4, requires_grad=True)
    for operator in (gather_from, gather_copy, scatter_to, slice_to, gather, scatter_sum):
        assert operator(x, None, 1) is x
    for operator in (gather_uneven, scatter_uneven):
        assert operator(x, [2], None) is x
    assert exchange(x, [2], [2], None) is x
    for started in (start_gather(x, None), start_scatter_sum(x.unsqueeze(0), None)):
        started[1].wait()
        assert started[0].numel() == 8


def test_pieces_are_views_where_memory_allows():
    x = torch.randn(1, 6, 2)
    pieces = cut(x, 3, 1)
    assert pieces.shape == (3, 1, 2, 2)
    assert pieces.data_ptr() == x.data_ptr()
    assert join(pieces, 1).data_ptr() == x.data_ptr()
    several = torch.randn(2, 6, 2)
    assert torch.equal(join(cut(several, 3, 1), 1), several)
    assert cut(several, 3, 1).is_contiguous()
