"""Jagged ids: of a batch by feature (like TorchRec's KeyedJaggedTensor), of a feature as a bag per sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from stretto.engine.device import moved


@dataclass
class Jagged:
    """The ids of a batch, feature by feature, and within a feature sample by sample.

    Attributes:
        ids: [n] int64, non-negative, all ids of feature 0, then of feature 1, ...
        lengths: [features, samples] int64, number of ids of each.
        weights: [n], per-sample weight of each id in its sum; None if all are 1.
        hot: number of ids per sample of each feature; None if it varies. With it, `lengths` need not be read.
    """

    ids: Tensor
    lengths: Tensor
    weights: Tensor | None = None
    hot: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self._counts: list[int] | None = None

    @classmethod
    def fixed(cls, ids: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> Jagged:
        """Build from the ids [samples, hot] of each feature."""
        hot = tuple(feature.shape[1] for feature in ids)
        lengths = torch.tensor(hot).unsqueeze(1).expand(len(hot), ids[0].shape[0])
        flat = None if weights is None else torch.cat([feature.reshape(-1) for feature in weights])
        return cls(torch.cat([feature.reshape(-1) for feature in ids]), lengths, flat, hot)

    @property
    def features(self) -> int:
        return self.lengths.shape[0]

    @property
    def samples(self) -> int:
        return self.lengths.shape[1]

    def counts(self) -> list[int]:
        """The number of ids of each feature."""
        if self.hot is not None:
            return [hot * self.samples for hot in self.hot]
        return self.lengths.sum(1).tolist() if self._counts is None else self._counts

    def to(self, device: torch.device) -> Jagged:
        """The ids on the device, for which the host does not wait."""
        weights = None if self.weights is None else moved(self.weights, device)
        copy = Jagged(moved(self.ids, device), moved(self.lengths, device), weights, self.hot)
        copy._counts = self.counts()  # the host need not ask the device
        return copy

    def part(self, start: int, stop: int) -> Jagged:
        """Samples [start, stop)."""
        ids = list[Tensor]()
        weights = list[Tensor]()
        first = 0
        for feature, count in enumerate(self.counts()):
            before = int(self.lengths[feature, :start].sum())
            size = int(self.lengths[feature, start:stop].sum())
            span = slice(first + before, first + before + size)
            ids.append(self.ids[span])
            if self.weights is not None:
                weights.append(self.weights[span])
            first += count
        return Jagged(
            torch.cat(ids), self.lengths[:, start:stop], torch.cat(weights) if weights else None, self.hot
        )


VARYING = -1


@dataclass(kw_only=True)
class Bags:
    """The ids of one feature, or rows of one table, as a bag for each sample.

    Attributes:
        ids: [n] int64.
        samples: number of bags.
        hot: ids per bag, or VARYING.
        lengths: [samples] int64.
        scale: [n], per-sample weight of each id in its sum; None if all are 1.
    """

    ids: Tensor
    samples: int
    hot: int
    lengths: Tensor
    scale: Tensor | None = None

    @cached_property
    def offsets(self) -> Tensor:
        """[samples + 1], start of each bag."""
        if self.hot != VARYING:
            return torch.arange(self.samples + 1, device=self.ids.device) * self.hot
        return torch.nn.functional.pad(torch.cumsum(self.lengths, 0), (1, 0))

    @property
    def single(self) -> bool:
        """True if each bag is a single unscaled row."""
        return self.hot == 1 and self.scale is None

    def with_ids(self, ids: Tensor) -> Bags:
        """Return the same bags with other ids."""
        return replace(self, ids=ids)


def split_features(ids: Jagged, dtype: torch.dtype) -> list[Bags]:
    """Return the bags of each feature, with weights in `dtype`."""
    counts = ids.counts()
    weights = [None] * len(counts) if ids.weights is None else ids.weights.to(dtype).split(counts)
    hot = [VARYING] * len(counts) if ids.hot is None else ids.hot
    return [
        Bags(ids=values, samples=ids.samples, hot=ids_each, lengths=ids.lengths[feature], scale=weight)
        for feature, (values, ids_each, weight) in enumerate(
            zip(ids.ids.split(counts), hot, weights, strict=True)
        )
    ]
