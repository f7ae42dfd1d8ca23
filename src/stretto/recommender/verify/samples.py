"""Random samples for verification, which cover cases that the data may lack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Generator, Tensor

from stretto.recommender.clicks.batch import ClickBatch
from stretto.recommender.placement import TableSpec
from stretto.recommender.tables.jagged import Jagged

Kind = Literal["one", "fixed", "ragged"]
KINDS: tuple[Kind, ...] = ("one", "fixed", "ragged")
_MOST = 3  # ids of a sample and feature


def draw(
    features: Sequence[TableSpec], numbers: int, samples: int, count: int, kind: Kind, seed: int
) -> list[ClickBatch]:
    """`count` batches of `samples` samples with `numbers` dense numbers.

    Ids are many times as large as tables, and popular ones come often. `one`: one id for each feature;
    `fixed`: a number of ids for each feature; `ragged`: any number, also none, each with a weight.
    """
    generator = Generator().manual_seed(seed)
    return [_batch(features, numbers, samples, kind, generator) for _ in range(count)]


def _batch(
    features: Sequence[TableSpec], numbers: int, samples: int, kind: Kind, generator: Generator
) -> ClickBatch:
    dense = torch.randn(samples, numbers, generator=generator)
    labels = (torch.rand(samples, generator=generator) < 0.4).float()
    if kind == "ragged":
        lengths = torch.randint(0, _MOST + 1, (len(features), samples), generator=generator)
        ids = [_ids(spec, int(n), generator) for spec, n in zip(features, lengths.sum(1), strict=True)]
        # in eighths: of 16-bit rows, sums are formed in float32, and are exact
        weights = torch.randint(1, 16, (int(lengths.sum()),), generator=generator).double() / 8
        return ClickBatch(dense, Jagged(torch.cat(ids), lengths, weights), labels)
    hot = [1 if kind == "one" else 1 + at % _MOST for at in range(len(features))]
    ids = [_ids(spec, samples * n, generator) for spec, n in zip(features, hot, strict=True)]
    shaped = [values.view(samples, n) for values, n in zip(ids, hot, strict=True)]
    return ClickBatch(dense, Jagged.fixed(shaped), labels)


def _ids(spec: TableSpec, n: int, generator: Generator) -> Tensor:
    """Half of them of the first tenth; beyond 32 bits where rows are by modulo, beyond 40 of a hash table."""
    rank = torch.rand(n, generator=generator, dtype=torch.float64) ** 3
    if spec.ids == "hash":
        return (rank * 2 * spec.rows).long() * (2**40 + 15)
    laps = torch.randint(0, 2**40 // spec.rows, (n,), generator=generator)
    return (rank * spec.rows).long() + laps * spec.rows
