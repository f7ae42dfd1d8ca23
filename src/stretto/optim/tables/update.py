"""One update of a store's rows, by the way that is there: compiled as one pass, or sum first and then apply."""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.optim.tables.rule import TableRule
from stretto.parallel.tables.kernels.face import Kernels
from stretto.parallel.tables.kernels.plain import Grouped


@torch.no_grad()
def update(
    rule: TableRule,
    kernels: Kernels,
    weight: Tensor,
    states: dict[str, Tensor],
    slots: Tensor,
    offsets: Tensor,
    gradient: Tensor,
    lr: float,
    scale: Tensor | None = None,
    grouped: Grouped | None = None,
    mean_square: Tensor | None = None,
    factor: float = 1.0,
) -> None:
    """Update in place the rows that were looked up, each once, by the gradient of the sums of its bags."""
    if not len(slots):
        return
    grouped = kernels.group(slots) if grouped is None else grouped
    total = kernels.segment_sum(gradient, offsets, grouped, scale)
    rule.apply(weight, states, grouped.rows, total if factor == 1 else total * factor, lr, mean_square)
