"""The ids of one feature, a bag for each sample."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from stretto.parallel.tables.jagged import Jagged

VARYING = -1


@dataclass
class Bags:
    """Ids of samples.

    Attributes:
        ids: [n] int64, or rows of a table.
        samples: number of bags.
        hot: ids of each bag, or VARYING.
        lengths: [samples] int64.
        scale: [n] of each id in its sum; None: ones.
    """

    ids: Tensor
    samples: int
    hot: int
    lengths: Tensor
    scale: Tensor | None = None

    @cached_property
    def offsets(self) -> Tensor:
        """[samples + 1]: where each bag begins."""
        if self.hot != VARYING:
            return torch.arange(self.samples + 1, device=self.ids.device) * self.hot
        return torch.nn.functional.pad(torch.cumsum(self.lengths, 0), (1, 0))

    @property
    def single(self) -> bool:
        """Whether a bag is one row as it is."""
        return self.hot == 1 and self.scale is None

    def of(self, ids: Tensor) -> Bags:
        """The same bags of other ids."""
        return replace(self, ids=ids)


def features_of(ids: Jagged, dtype: torch.dtype) -> list[Bags]:
    """The bags of each feature; weights in `dtype`."""
    counts = ids.counts()
    weights = [None] * len(counts) if ids.weights is None else ids.weights.to(dtype).split(counts)
    hot = [VARYING] * len(counts) if ids.hot is None else ids.hot
    return [
        Bags(own, ids.samples, each, ids.lengths[feature], weight)
        for feature, (own, each, weight) in enumerate(zip(ids.ids.split(counts), hot, weights, strict=True))
    ]
