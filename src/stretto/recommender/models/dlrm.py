"""DLRM (Naumov et al. 2019, arXiv 1906.00091): its dense layers and their initial values.

Initial values depend only on the seed and the name of the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.engine.models.weights import seeded_generator
from stretto.engine.parallel.tensor.matmul import add_weight_gradient, input_gradient, linear_rectified
from stretto.engine.parallel.tensor.matmul import linear as product
from stretto.errors import StrettoError
from stretto.recommender.models.interaction import dot_interaction, pair_products
from stretto.recommender.placement import TableSpec, divisor_of, physical_tables
from stretto.recommender.shape import DlrmShape
from stretto.recommender.tables.jagged import Jagged

_NARROW = 64  # up to this many inputs, the weight gradient is computed as its transpose


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rectified: bool) -> Tensor:
        y = (linear_rectified if rectified else product)(x, weight, bias)
        ctx.rectified, ctx.biased = rectified, bias is not None
        ctx.save_for_backward(x, weight, *([y] if rectified else []))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        dy: Tensor = grads[0]
        x, weight, *outputs = ctx.saved_tensors
        if ctx.rectified:
            dy = torch.ops.aten.threshold_backward(dy, outputs[0], 0)
        needs = ctx.needs_input_grad
        dx = input_gradient(dy, weight) if needs[0] else None
        dw = None
        if needs[1]:  # dy^T x; for few inputs its transpose is three times as fast in BLAS libraries
            if x.shape[1] <= _NARROW < dy.shape[1]:
                dw = product(x.t(), dy.t(), None).t().contiguous()
            else:
                dw = add_weight_gradient(None, dy, x, dy.dtype)
        return dx, dw, dy.sum(0) if ctx.biased and needs[2] else None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias; x [b, in], weight [out, in]."""
    output: Any = _Linear.apply(x, weight, bias, False)
    return output


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """max(0, x weight^T + bias); for the backward it saves its output, not the values before the ReLU."""
    output: Any = _Linear.apply(x, weight, bias, True)
    return output


class Mlp(nn.ModuleList):
    """Linear layers, each followed by ReLU; the last one only with `relu_last`.

    `fast`: compute with `linear` and `linear_relu` instead of torch's layers.
    """

    def __init__(self, sizes: Sequence[int], relu_last: bool, fast: bool) -> None:
        super().__init__(nn.Linear(n, k) for n, k in pairwise(sizes))
        self.relu_last, self.fast = relu_last, fast

    def forward(self, x: Tensor) -> Tensor:
        """[b, first size] to [b, last size]."""
        for index, layer in enumerate(self):
            assert isinstance(layer, nn.Linear)
            rectified = self.relu_last or index < len(self) - 1
            if self.fast:
                x = (linear_relu if rectified else linear)(x, layer.weight, layer.bias)
            else:
                x = F.relu(layer(x)) if rectified else layer(x)
        return x


class CrossLayer(nn.Module):
    """A low-rank cross layer (DCN-V2, section 3.2): x_0 * (U (V x_l) + b) + x_l."""

    def __init__(self, width: int, rank: int, fast: bool) -> None:
        super().__init__()
        self.v = nn.Linear(width, rank, bias=False)
        self.u = nn.Linear(rank, width)
        self.fast = fast

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        """x_0 and x_l [b, width] to x_{l+1}."""
        if not self.fast:
            return first * self.u(self.v(x)) + x
        crossed = linear(linear(x, self.v.weight, None), self.u.weight, self.u.bias)
        return torch.addcmul(x, first, crossed)


class DenseNet(nn.Module):
    """The dense part of a DLRM, all but the tables; it is replicated on data-parallel ranks.

    Args:
        fast: use the optimised layers and interaction instead of the reference ones. Results agree up to
            rounding.
    """

    def __init__(self, shape: DlrmShape, fast: bool = True) -> None:
        super().__init__()
        self.shape, self.fast = shape, fast
        self.bottom = Mlp((shape.dense, *shape.bottom), True, fast)
        self.cross = nn.ModuleList(
            CrossLayer(shape.wide, shape.cross_rank, fast) for _ in range(shape.cross_layers)
        )
        self.top = Mlp((shape.interacted, *shape.top), False, fast)

    def interact(self, x: Tensor, pooled: Tensor) -> Tensor:
        """The interaction, input of the top MLP [b, interacted]; arguments as for `score`."""
        if self.shape.interaction == "dot":
            return (dot_interaction if self.fast else pair_products)(x, pooled)
        first = torch.cat([x, pooled.flatten(1)], 1)
        crossed = first
        for layer in self.cross:
            crossed = layer(first, crossed)
        return crossed

    def score(self, x: Tensor, pooled: Tensor) -> Tensor:
        """Logits [b].

        Args:
            x: [b, dim], output of the bottom MLP.
            pooled: [b, tables, dim], pooled embeddings of each feature.
        """
        return self.top(self.interact(x, pooled)).squeeze(1)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Logits [b] from dense features [b, dense] and pooled embeddings [b, tables, dim]."""
        return self.score(self.bottom(dense), pooled)


class Dlrm(nn.Module):
    """The model with unsharded tables, in plain PyTorch.

    Attributes:
        net: the dense layers.
        tables: [rows, dim] for each stored table, in the order of `physical_tables`.
    """

    def __init__(self, shape: DlrmShape, tables: Sequence[TableSpec]) -> None:
        """Raises:
        StrettoError: the tables do not match the shape, or one of them has hash ids.
        """
        super().__init__()
        if len(tables) != len(shape.tables):
            raise StrettoError(
                f"{len(tables)} tables for a recommender with {len(shape.tables)}",
                hint="one for each feature",
            )
        for table in tables:
            if table.dim != shape.dim:
                raise StrettoError(
                    f"table {table.name} is {table.dim} wide, the interaction {shape.dim}",
                    hint=f"dim {shape.dim}, or a bottom MLP that ends with {table.dim}",
                )
            if table.ids == "hash":
                raise StrettoError(
                    f"table {table.name} has ids: hash, whose rows come and go while it trains",
                    hint="ids: modulo or quotient-remainder for the plain model",
                )
        self.specs, self.stored = tuple(tables), tuple(physical_tables(tables))
        self.net = DenseNet(shape, fast=False)
        self.tables = nn.ParameterList(nn.Parameter(torch.zeros(t.rows, t.dim)) for t in self.stored)

    def table(self, name: str) -> Tensor:
        """The weight of a stored table, by name."""
        return next(w for spec, w in zip(self.stored, self.tables, strict=True) if spec.name == name)

    def forward(self, dense: Tensor, ids: Jagged) -> Tensor:
        """Logits [b] from dense features [b, dense] and the ids of each feature."""
        pooled, first = list[Tensor](), 0
        for spec, count, lengths in zip(self.specs, ids.counts(), ids.lengths, strict=True):
            columns = slice(first, first + count)
            weights = None if ids.weights is None else ids.weights[columns]
            pooled.append(pool(self.rows(spec, ids.ids[columns]), lengths, weights, spec))
            first += count
        return self.net(dense, torch.stack(pooled, 1))

    def rows(self, spec: TableSpec, ids: Tensor) -> Tensor:
        """The embedding of each id [n, dim]."""
        ids = ids % spec.rows
        if spec.ids == "modulo":
            return self.table(spec.name)[ids]
        divisor = divisor_of(spec)
        quotient, remainder = (self.table(f"{spec.name}.{part}") for part in ("quotient", "remainder"))
        return quotient[ids // divisor] * remainder[ids % divisor]


def pool(rows: Tensor, lengths: Tensor, weights: Tensor | None, spec: TableSpec) -> Tensor:
    """Pool each sample's rows to [b, dim]: their sum, or with `mean` the sum divided by their number. Samples
    without rows get zeros.

    Args:
        rows: [n, dim], sample by sample.
        lengths: [b], number of rows of each sample.
        weights: [n], per-sample weight of each row; None if all are 1.
    """
    if weights is not None:
        rows = rows * weights.to(rows.dtype).unsqueeze(1)
    samples = torch.repeat_interleave(torch.arange(len(lengths), device=rows.device), lengths)
    total = rows.new_zeros(len(lengths), spec.dim).index_add(0, samples, rows)
    return total / lengths.clamp(min=1).unsqueeze(1) if spec.pooling == "mean" else total


def initial_dense(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the initial values of a dense parameter, float32, on the CPU.

    Weights are normal with variance 2 / (inputs + outputs) (Glorot and Bengio 2010, eq. 12), as in the DLRM
    paper's code. Biases are 0 (drawn in that code), so that initial logits are near 0 for any seed.
    """
    if len(shape) == 1:
        return torch.zeros(shape, device="cpu")
    std = (2.0 / (shape[0] + shape[1])) ** 0.5
    return torch.empty(shape, device="cpu").normal_(std=std, generator=seeded_generator(seed, name))


@torch.no_grad()
def initialise_dense(net: DenseNet, seed: int) -> None:
    """Set every dense parameter to its initial values, in place."""
    for name, parameter in net.named_parameters():
        parameter.copy_(initial_dense(name, tuple(parameter.shape), seed))
