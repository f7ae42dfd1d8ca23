"""Rows of a sample's ids to one vector, and its gradient back to the rows, without autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.layout.tables import Pooling
from stretto.parallel.tables.kernels.plain import lookup


def pool(rows: Tensor, offsets: Tensor, pooling: Pooling, weights: Tensor | None = None) -> Tensor:
    """Vectors [bags, dim] from rows [n, dim]: bag i is the sum of `rows[offsets[i]:offsets[i + 1]]`, each
    times its weight; with `mean` divided by how many they are, whatever they weigh. Of no row: zeros.

    Args:
        offsets: [bags + 1] int64.
        weights: [n]; None: ones.
    """
    which = torch.arange(rows.shape[0], device=rows.device)
    scale = None if weights is None else weights.to(rows.dtype)
    sums = lookup(rows, which, offsets, scale)
    return sums if pooling == "sum" else sums / counts_of(offsets).to(sums.dtype).unsqueeze(1)


def pool_backward(
    gradient: Tensor, offsets: Tensor, pooling: Pooling, weights: Tensor | None = None
) -> Tensor:
    """The gradient of rows [n, dim] from that of the vectors [bags, dim]."""
    if pooling == "mean":
        gradient = gradient / counts_of(offsets).to(gradient.dtype).unsqueeze(1)
    spread = gradient.repeat_interleave(torch.diff(offsets), dim=0)
    return spread if weights is None else spread * weights.to(spread.dtype).unsqueeze(1)


def counts_of(offsets: Tensor) -> Tensor:
    """Rows of each bag [bags], by which a mean divides: at least one."""
    return torch.diff(offsets).clamp(min=1)
