"""Embedding lookups and their gradients in PyTorch operations, on any device and in any type."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Grouped:
    """Lookups grouped by row.

    Attributes:
        rows: [u] int64, the unique rows, ascending.
        order: [n] int64, the lookups sorted by row, stably.
        starts: [u + 1] int64, start of each row's lookups in `order`.
    """

    rows: Tensor
    order: Tensor
    starts: Tensor

    def first(self) -> Tensor:
        """[u], the first lookup of each row."""
        return self.order[self.starts[:-1]]


@dataclass
class Divided:
    """Lookups grouped by the row shard that stores their row: row r of the table is row r // parts of shard
    r % parts.

    Attributes:
        order: [n] int64, the lookups sorted by shard, stably.
        local_rows: [n] int64, the row within its shard of each lookup, in that order.
        lengths: [parts, bags] int64, number of lookups of each bag in each shard.
    """

    order: Tensor
    local_rows: Tensor
    lengths: Tensor


class Kernels:
    """PyTorch's operations; `CompiledKernels` overrides them where a compiled loop is faster."""

    def lookup(
        self,
        weight: Tensor,
        rows: Tensor,
        offsets: Tensor,
        scale: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return pooled rows [bags, width]: bag i sums `rows[offsets[i]:offsets[i + 1]]`, each times its
        `scale`; an empty bag is zeros.

        Args:
            weight: [slots, width].
            rows: [n] int64.
            offsets: [bags + 1] int64.
            scale: [n], per-sample weights in the dtype of the sums; None if all are 1.
            dtype: dtype of the sums; by default that of `weight`, but float32 for bfloat16, so that partial
                sums are not rounded.
        """
        dtype = dtype or sum_dtype(weight)
        if weight.dtype != dtype:
            weight, rows = weight.index_select(0, rows).to(dtype), torch.arange(len(rows), device=rows.device)
        return F.embedding_bag(
            rows, weight, offsets, mode="sum", per_sample_weights=scale, include_last_offset=True
        )

    def group(self, rows: Tensor, unique: int | None = None) -> Grouped:
        """Group the lookups of `rows` [n] by row; given `unique`, all of 0 to unique - 1: no host waits."""
        ordered, order = torch.sort(rows, stable=True)
        if unique is not None:
            edges = torch.arange(unique + 1, device=rows.device)
            return Grouped(edges[:-1], order, torch.searchsorted(ordered, edges))
        different, counts = torch.unique_consecutive(ordered, return_counts=True)
        starts = torch.zeros(len(different) + 1, dtype=torch.int64, device=rows.device)
        torch.cumsum(counts, 0, out=starts[1:])
        return Grouped(different, order, starts)

    def segment_sum(
        self, gradient: Tensor, offsets: Tensor, grouped: Grouped, scale: Tensor | None = None
    ) -> Tensor:
        """Return the gradient of each unique row [u, width], in float32 at least.

        Args:
            gradient: [bags, width], gradient of the sums that `lookup` returned.
            offsets, scale: as passed to `lookup`.
        """
        return sum_by_row(gradient, bags_of(offsets, len(grouped.order)), grouped, scale)

    def squares(
        self, gradient: Tensor, offsets: Tensor, grouped: Grouped, scale: Tensor | None = None
    ) -> Tensor:
        """Return the squared norm of each unique row's gradient [u]; arguments as for `segment_sum`."""
        return self.segment_sum(gradient, offsets, grouped, scale).square().sum(1)

    def divide(self, rows: Tensor, offsets: Tensor, parts: int) -> Divided:
        """Divide the lookups of `rows` [n], in bags by `offsets` [bags + 1], among row-wise shards."""
        return divide_by(rows % parts, rows // parts, offsets, parts)


def sum_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which rows of `weight` are summed: 16 bits are too few for sums."""
    return torch.float32 if weight.dtype == torch.bfloat16 else weight.dtype


def widened(gradient: Tensor) -> Tensor:
    """Widen a 16-bit gradient to float32: sums over many samples need more than 16 bits."""
    return gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient


def bags_of(offsets: Tensor, lookups: int) -> Tensor:
    """Return the bag of each lookup [n]; with their number, no host waits for a device."""
    return torch.repeat_interleave(torch.diff(offsets), output_size=lookups)


def sum_by_row(gradient: Tensor, bags: Tensor, grouped: Grouped, scale: Tensor | None) -> Tensor:
    """`Kernels.segment_sum` by the bag of each lookup [n]; `grouped` may hold only some of the rows."""
    return F.embedding_bag(
        bags[grouped.order],
        widened(gradient),
        grouped.starts,
        mode="sum",
        per_sample_weights=None if scale is None else scale[grouped.order],
        include_last_offset=True,
    )


def divide_by(shard: Tensor, local_rows: Tensor, offsets: Tensor, parts: int) -> Divided:
    """As `Kernels.divide`, by the shard [n] of each lookup and its row [n] within that shard."""
    order, bags = torch.argsort(shard, stable=True), len(offsets) - 1
    cells = shard * bags + bags_of(offsets, len(shard))
    lengths = cells.new_zeros(parts * bags).scatter_add_(0, cells, torch.ones_like(cells))
    return Divided(order, local_rows[order], lengths.view(parts, bags))
