"""The rules of embedding tables, in torch's own operations: they run on any device and in any type.

A rule is its numbers alone; what it remembers is in a table's states. None counts steps of the job, so that a
row is the same whichever rank holds it, and whether or not it has been away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.offload.rows.store import StateSpec
from stretto.optim.tables.halves import glue, halves


class _Plain:
    """What rules share whose weights are in the job's type."""

    row_statistic = False

    def weight_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        return {"weight": values}

    def decode(self, rows: Mapping[str, Tensor]) -> Tensor:
        return rows["weight"]


@dataclass(frozen=True)
class Sgd(_Plain):
    """w -= lr g."""

    name = "sgd"

    def state_specs(self, dtype: torch.dtype) -> dict[str, StateSpec]:
        return {}

    @torch.no_grad()
    def apply(
        self,
        weight: Tensor,
        states: dict[str, Tensor],
        slots: Tensor,
        gradient: Tensor,
        lr: float,
        mean_square: Tensor | None = None,
    ) -> None:
        weight.index_add_(0, slots, gradient, alpha=-lr)


@dataclass(frozen=True)
class Adagrad(_Plain):
    """G += g^2, w -= lr g / (sqrt(G) + eps), of each element (Duchi et al. 2011), with torch's eps."""

    eps: float = 1e-10
    name = "adagrad"

    def state_specs(self, dtype: torch.dtype) -> dict[str, StateSpec]:
        return {"sum": StateSpec(False, dtype)}

    @torch.no_grad()
    def apply(
        self,
        weight: Tensor,
        states: dict[str, Tensor],
        slots: Tensor,
        gradient: Tensor,
        lr: float,
        mean_square: Tensor | None = None,
    ) -> None:
        total = states["sum"][slots].addcmul_(gradient, gradient)
        states["sum"][slots] = total
        weight.index_add_(0, slots, gradient / total.sqrt_().add_(self.eps), alpha=-lr)


@dataclass(frozen=True)
class RowwiseAdagrad(_Plain):
    """Adagrad with one number for a row: G += mean_d g_d^2, w -= lr g / (sqrt(G) + eps).

    The mean is over all columns of the table (Gupta, Bengio and Weston 2014, "Training highly multiclass
    classifiers", JMLR 15); eps as in FBGEMM.
    """

    eps: float = 1e-8
    name = "rowwise_adagrad"
    row_statistic = True

    def state_specs(self, dtype: torch.dtype) -> dict[str, StateSpec]:
        return {"sum": StateSpec(True, dtype)}

    @torch.no_grad()
    def apply(
        self,
        weight: Tensor,
        states: dict[str, Tensor],
        slots: Tensor,
        gradient: Tensor,
        lr: float,
        mean_square: Tensor | None = None,
    ) -> None:
        if mean_square is None:
            mean_square = gradient.square().mean(1)
        total = states["sum"][slots].add_(mean_square)
        states["sum"][slots] = total
        weight.index_add_(0, slots, gradient / total.sqrt_().add_(self.eps).unsqueeze(1), alpha=-lr)


@dataclass(frozen=True)
class LazyAdam(_Plain):
    """Adam of the rows seen alone: moments of the others neither decay nor move them.

    Each row is Adam (Kingma and Ba 2015, algorithm 1) on the gradients that this row got: the correction of
    its moments' bias takes the row's own number of updates, a state `count`, where torch's SparseAdam takes
    the step of all. So a row that is first seen late is corrected as one that is seen at once, and what a row
    becomes depends on its own gradients only.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    name = "lazy_adam"

    def state_specs(self, dtype: torch.dtype) -> dict[str, StateSpec]:
        return {
            "first": StateSpec(False, dtype),
            "second": StateSpec(False, dtype),
            "count": StateSpec(True, torch.int32),
        }

    @torch.no_grad()
    def apply(
        self,
        weight: Tensor,
        states: dict[str, Tensor],
        slots: Tensor,
        gradient: Tensor,
        lr: float,
        mean_square: Tensor | None = None,
    ) -> None:
        count = states["count"][slots].add_(1)
        states["count"][slots] = count
        first = states["first"][slots].lerp_(gradient, 1 - self.beta1)
        states["first"][slots] = first
        second = states["second"][slots].mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        states["second"][slots] = second
        step = count.to(torch.float64).unsqueeze(1)
        of_first = (1 - self.beta1**step).to(gradient.dtype)
        of_second = (1 - self.beta2**step).sqrt_().to(gradient.dtype)
        second.sqrt_().div_(of_second).add_(self.eps)
        weight.index_add_(0, slots, first.div_(of_first).div_(second), alpha=-lr)


@dataclass(frozen=True)
class SplitSgd:
    """SGD in float32 whose weight is a bfloat16, and the 16 bits that a bfloat16 lacks a state (Kalamkar et
    al. 2020, arXiv 2005.04680): lookups read half the bytes, and no bit is lost.

    Both halves together are the float32, exactly: the weight is its upper half, cut off, not rounded.
    """

    name = "split_sgd"
    row_statistic = False

    def state_specs(self, dtype: torch.dtype) -> dict[str, StateSpec]:
        return {"low": StateSpec(False, torch.int16)}

    def weight_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        weight, low = halves(values)
        return {"weight": weight, "low": low}

    def decode(self, rows: Mapping[str, Tensor]) -> Tensor:
        return glue(rows["weight"], rows["low"])

    @torch.no_grad()
    def apply(
        self,
        weight: Tensor,
        states: dict[str, Tensor],
        slots: Tensor,
        gradient: Tensor,
        lr: float,
        mean_square: Tensor | None = None,
    ) -> None:
        """`gradient` is float32, or float64: then the difference is rounded once, to float32."""
        values = glue(weight[slots], states["low"][slots]).to(gradient.dtype)
        weight[slots], states["low"][slots] = halves(values.add_(gradient, alpha=-lr))
