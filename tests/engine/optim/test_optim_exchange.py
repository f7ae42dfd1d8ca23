"""Matrices are shared out evenly, come together whole, and go back to every copy."""

from __future__ import annotations

import torch
import torch.distributed as dist
from splits import SHAPES, Split, values

from ranks import on_ranks
from stretto.engine.optim.base import is_block_matrix
from stretto.engine.optim.muon import MatrixExchange
from stretto.engine.parallel.fragment import ParameterFragment


def matrices_of(fragments: list[ParameterFragment]) -> list[ParameterFragment]:
    return [f for f in fragments if is_block_matrix(f.name, f.placed.shape)]


def there_and_back() -> list[list[tuple[str, tuple[int, ...]]]]:
    """The matrices that this rank works on, in several splits."""
    results = list[list[tuple[str, tuple[int, ...]]]]()
    for split in (Split(4, 1), Split(2, 2, seed=1), Split(1, 4)):
        fragments = matrices_of(split.of(dist.get_rank(), dist.group.WORLD, values(0)))
        exchange = MatrixExchange(fragments)
        tensors = [f.parameter.detach().clone() for f in fragments]
        matrices = exchange.gather(tensors)
        for (tensor, member), matrix in matrices.items():
            assert torch.equal(matrix, values(0)[fragments[tensor].name][member])
        exchange.scatter({at: 2 * matrix for at, matrix in matrices.items()}, tensors)
        for fragment, tensor in zip(fragments, tensors, strict=True):
            assert torch.equal(tensor, 2 * fragment.parameter), fragment.name  # of copies too
        results.append([(fragments[tensor].name, member) for tensor, member in matrices])
    return results


def test_each_matrix_is_gathered_on_one_rank_and_the_work_is_balanced():
    results = on_ranks(4, there_and_back)
    every = [("blocks.0.attn.qkv.weight", ()), ("blocks.0.attn.proj.weight", ())]
    every += [("blocks.0.mlp.experts.up", (e,)) for e in range(4)]
    for by_rank in zip(*results, strict=True):
        assert sorted(m for mine in by_rank for m in mine) == sorted(every)
        # 576 for qkv, 288 for proj, 150 for each of four experts
        loads = [sum(_cost(SHAPES[name][-2:]) for name, _ in mine) for mine in by_rank]
        assert sorted(loads) == [288, 300, 300, 576]


def _cost(shape: tuple[int, ...]) -> int:
    return shape[0] * shape[1] * min(shape)


def test_one_process_exchanges_nothing():
    fragments = matrices_of(Split(1, 1).of(0, None, values(0)))
    exchange = MatrixExchange(fragments)
    matrices = exchange.gather([f.parameter.detach() for f in fragments])
    assert len(matrices) == 6
    into = [torch.zeros_like(f.parameter) for f in fragments]
    exchange.scatter(matrices, into)
    assert all(torch.equal(a, f.parameter) for a, f in zip(into, fragments, strict=True))
