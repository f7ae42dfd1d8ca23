"""Interface of the kernels of embedding tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Grouped:
    """Lookups brought together by row.

    Attributes:
        rows: [u] int64, each row that was looked up, once, ascending.
        order: [n] int64, the lookups sorted by row; in a row in their own order.
        starts: [u + 1] int64, where in `order` each row's lookups begin.
    """

    rows: Tensor
    order: Tensor
    starts: Tensor

    def first(self) -> Tensor:
        """[u] the first lookup of each row."""
        return self.order[self.starts[:-1]]


def lookup(
    weight: Tensor,
    rows: Tensor,
    offsets: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Sums of rows [bags, width]: bag i is that of `rows[offsets[i]:offsets[i + 1]]`, each times its `scale`;
    of an empty bag zeros.

    Args:
        weight: [slots, width].
        rows: [n] int64.
        offsets: [bags + 1] int64.
        scale: [n], of the sums' type; None: ones.
        dtype: of the sums; None: of `weight`, but float32 for bfloat16, so that partial sums lose nothing.
    """
    if dtype is None:
        dtype = torch.float32 if weight.dtype == torch.bfloat16 else weight.dtype
    if weight.dtype != dtype:
        weight, rows = weight.index_select(0, rows).to(dtype), torch.arange(len(rows), device=rows.device)
    return F.embedding_bag(
        rows, weight, offsets, mode="sum", per_sample_weights=scale, include_last_offset=True
    )


def group(rows: Tensor) -> Grouped:
    """Lookups by row."""
    ordered, order = torch.sort(rows, stable=True)
    unique, counts = torch.unique_consecutive(ordered, return_counts=True)
    starts = torch.zeros(len(unique) + 1, dtype=torch.int64, device=rows.device)
    torch.cumsum(counts, 0, out=starts[1:])
    return Grouped(unique, order, starts)


def bags_of(offsets: Tensor) -> Tensor:
    """[n]: the bag of each lookup."""
    return torch.repeat_interleave(torch.diff(offsets))


def segment_sum(
    gradient: Tensor,
    offsets: Tensor,
    grouped: Grouped,
    scale: Tensor | None = None,
    bags: Tensor | None = None,
) -> Tensor:
    """The gradient of each row [u, width] from that of the sums, in float32 at least.

    Args:
        gradient: [bags, width], of what `lookup` returned.
        offsets, scale: as `lookup` had them.
        bags: `bags_of(offsets)`, where it is known already; then `grouped` may be some of the rows.
    """
    gradient = widened(gradient)
    bags = bags_of(offsets) if bags is None else bags
    scales = None if scale is None else scale[grouped.order]
    return F.embedding_bag(
        bags[grouped.order],
        gradient,
        grouped.starts,
        mode="sum",
        per_sample_weights=scales,
        include_last_offset=True,
    )


def widened(gradient: Tensor) -> Tensor:
    """16 bits as float32: sums over many samples are not made in 16."""
    return gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient


def squares(gradient: Tensor, offsets: Tensor, grouped: Grouped, scale: Tensor | None = None) -> Tensor:
    """The sum of squares [u] of each row's gradient."""
    return segment_sum(gradient, offsets, grouped, scale).square().sum(1)


@dataclass
class Divided:
    """Lookups brought together by the part of the table that has their row: row r is row r // parts of part
    r % parts.

    Attributes:
        order: [n] int64, the lookups by part; in a part in their own order.
        own: [n] int64, the part's own row of each, in that order.
        lengths: [parts, bags] int64, how many of a bag's lookups each part has.
    """

    order: Tensor
    local_rows: Tensor
    lengths: Tensor


def divide(rows: Tensor, offsets: Tensor, parts: int) -> Divided:
    """Lookups of rows [n] in bags by `offsets` [bags + 1], by part."""
    return divide_by(rows % parts, rows // parts, offsets, parts)


def divide_by(part_of: Tensor, own: Tensor, offsets: Tensor, parts: int) -> Divided:
    """As `divide`, where the part of each lookup and its own row there are known, [n] each."""
    order, bags = torch.argsort(part_of, stable=True), len(offsets) - 1
    places = part_of * bags + bags_of(offsets)
    lengths = torch.bincount(places, minlength=parts * bags).view(parts, bags)
    return Divided(order, own[order], lengths)


class PlainKernels:
    """These, as one of the choices; see `kernels.interface`."""

    lookup = staticmethod(lookup)
    group = staticmethod(group)
    segment_sum = staticmethod(segment_sum)
    squares = staticmethod(squares)
    divide = staticmethod(divide)


class Kernels(Protocol):
    """Lookups and sums of rows; `stretto.recommender.tables.kernels.plain` says what each does."""

    def lookup(
        self,
        weight: Tensor,
        rows: Tensor,
        offsets: Tensor,
        scale: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor: ...

    def group(self, rows: Tensor) -> Grouped: ...

    def segment_sum(
        self, gradient: Tensor, offsets: Tensor, grouped: Grouped, scale: Tensor | None = None
    ) -> Tensor: ...

    def squares(
        self, gradient: Tensor, offsets: Tensor, grouped: Grouped, scale: Tensor | None = None
    ) -> Tensor: ...

    def divide(self, rows: Tensor, offsets: Tensor, parts: int) -> Divided: ...
