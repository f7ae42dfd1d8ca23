"""Tensors of a small plain model, cut into fragments over tensor-parallel ranks and shards of flat units."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stretto.engine.parallel.fragment import ParameterFragment, ShardPlacement, TensorBox

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.tok.weight": (11, 6),
    "blocks.0.norm1.weight": (6,),
    "blocks.0.attn.qkv.weight": (16, 6),
    "blocks.0.attn.qkv.bias": (16,),
    "blocks.0.attn.proj.weight": (6, 8),
    "blocks.0.mlp.router.gate.weight": (4, 6),
    "blocks.0.mlp.experts.up": (4, 5, 6),
    "blocks.0.mlp.experts.up_bias": (4, 5),
    "head.out.weight": (11, 6),
}


def values(seed: int) -> dict[str, Tensor]:
    """A float64 tensor of each shape; each expert of another size, so that they cannot be mixed up."""
    generator = torch.Generator().manual_seed(seed)
    results = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}
    for name, tensor in results.items():
        if len(SHAPES[name]) == 3:
            tensor.mul_(torch.tensor([1.0, 3.0, 0.2, 7.0], dtype=torch.float64)[:, None, None])
    return results


def split_by_tp(name: str, tp: int, rank: int) -> tuple[ShardPlacement, tuple[int, ...]]:
    """Return the box of a tensor on one of tp ranks, and its local shape."""
    shape = SHAPES[name]
    start = (0,) * len(shape)
    if name in ("embed.tok.weight", "head.out.weight"):  # padded: the last ranks have less
        rows = -(-shape[0] // tp) + 1
        low, high = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
        pieces = (
            (TensorBox(offsets=(low, 0), sizes=(high - low, shape[1]), local=(0, 0)),) if high > low else ()
        )
        return ShardPlacement(name, shape, pieces), (rows, shape[1])
    if "qkv" in name:  # 8 rows of queries split, 4 of keys and 4 of values held by pairs of ranks
        copies = max(1, tp // 2)
        n, m = 8 // tp, 4 // (tp // copies)
        rest, rest_size = start[1:], shape[1:]
        runs = [(rank * n, n, True)]
        runs += [(at + rank // copies * m, m, rank % copies == 0) for at in (8, 12)]
        pieces, at = list[TensorBox](), 0
        for first, size, owned in runs:
            pieces.append(
                TensorBox(offsets=(first, *rest), sizes=(size, *rest_size), local=(at, *rest), owned=owned)
            )
            at += size
        return ShardPlacement(name, shape, tuple(pieces)), (at, *rest_size)
    if "proj" in name:
        n = shape[1] // tp
        return ShardPlacement(
            name, shape, (TensorBox(offsets=(0, rank * n), sizes=(shape[0], n), local=(0, 0)),)
        ), (
            shape[0],
            n,
        )
    if "experts" in name:
        n = shape[0] // tp
        rest, rest_size = start[1:], shape[1:]
        piece = TensorBox(offsets=(rank * n, *rest), sizes=(n, *rest_size), local=start)
        return ShardPlacement(name, shape, (piece,)), (n, *rest_size)
    return ShardPlacement.unsharded(name, shape, rank == 0), shape


@dataclass
class Split:
    """How ranks hold a model: tp x shards of them one copy together; cuts of the flat unit fall anywhere."""

    tp: int
    shards: int
    seed: int = 0

    def of(
        self, rank: int, holders: ProcessGroup | None, start: dict[str, Tensor]
    ) -> list[ParameterFragment]:
        """The fragments of one rank of tp x shards, with `start` for values."""
        tp_rank, shard = rank % self.tp, rank // self.tp
        places = {name: split_by_tp(name, self.tp, tp_rank) for name in SHAPES}
        sizes = [prod(local) for _, local in places.values()]
        low, high = self._cuts(sum(sizes))[shard : shard + 2]
        fragments, at = list[ParameterFragment](), 0
        for (name, (placed, local)), size in zip(places.items(), sizes, strict=True):
            if self.shards > 1:
                first, last = min(max(low - at, 0), size), min(max(high - at, 0), size)
                placed = placed.part(local, first, last)
                parameter = nn.Parameter(torch.zeros(last - first, dtype=torch.float64))
            else:
                parameter = nn.Parameter(torch.zeros(local, dtype=torch.float64))
            placed.fill(parameter, start[name])
            fragments.append(
                ParameterFragment(
                    name=name, parameter=parameter, placed=placed, gradient=None, holders=holders
                )
            )
            at += size
        return fragments

    def _cuts(self, size: int) -> list[int]:
        draw = random.Random(self.seed)
        return [0, *sorted(draw.randrange(size) for _ in range(self.shards - 1)), size]


def set_gradients(fragments: list[ParameterFragment], gradients: dict[str, Tensor]) -> None:
    """Each fragment's part of the plain model's gradients, ready for a step."""
    for fragment in fragments:
        fragment.gradient = torch.zeros_like(fragment.parameter)
        fragment.placed.fill(fragment.gradient, gradients[fragment.name])
        fragment.parameter.grad = fragment.gradient


def unsplit(start: dict[str, Tensor]) -> list[ParameterFragment]:
    """The same in one process."""
    return [
        ParameterFragment(
            name=name,
            parameter=nn.Parameter(tensor.clone()),
            placed=ShardPlacement.unsharded(name, tuple(tensor.shape)),
        )
        for name, tensor in start.items()
    ]
