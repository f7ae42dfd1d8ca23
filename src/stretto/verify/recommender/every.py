"""Every placement on a number of ranks with every optimiser, on small tables of every kind.

Each placement is combined with each pair of a table and a dense optimiser. The remaining options (kinds of
samples, overlap, clipping, interaction) rotate, so that each value meets each placement and each optimiser.
Random samples cover cases that data may lack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any, Literal, get_args

import torch
from torch import Generator, Tensor

from stretto.recommender.clicks.batch import ClickBatch
from stretto.recommender.config.model import RecommenderModel, TableConfig
from stretto.recommender.config.schema import DenseRuleName, RecommenderConfig, TableRuleName
from stretto.recommender.placement import (
    PLACES,
    Place,
    Placements,
    Split,
    TablePlacement,
    TableSpec,
    physical_tables,
)
from stretto.recommender.shape import Interaction
from stretto.recommender.tables.jagged import Jagged
from stretto.verify.recommender.cases import PlacementCase
from stretto.verify.run import Impossible

Kind = Literal["one", "fixed", "ragged"]
KINDS: tuple[Kind, ...] = ("one", "fixed", "ragged")
_MAX_IDS = 3  # ids of a sample and feature


def draw(
    features: Sequence[TableSpec], numbers: int, samples: int, count: int, kind: Kind, seed: int
) -> list[ClickBatch]:
    """`count` random batches of `samples` samples with `numbers` dense features.

    Ids exceed the tables' rows many times, and are skewed. `one`: one id a feature; `fixed`: a fixed number
    of ids a feature; `ragged`: any number of ids, also none, each with a weight.
    """
    generator = Generator().manual_seed(seed)
    return [_batch(features, numbers, samples, kind, generator) for _ in range(count)]


def _batch(
    features: Sequence[TableSpec], numbers: int, samples: int, kind: Kind, generator: Generator
) -> ClickBatch:
    dense = torch.randn(samples, numbers, generator=generator)
    labels = (torch.rand(samples, generator=generator) < 0.4).float()
    if kind == "ragged":
        lengths = torch.randint(0, _MAX_IDS + 1, (len(features), samples), generator=generator)
        ids = [_ids(spec, int(n), generator) for spec, n in zip(features, lengths.sum(1), strict=True)]
        # in eighths, so that float32 sums of 16-bit rows are exact
        weights = torch.randint(1, 16, (int(lengths.sum()),), generator=generator).double() / 8
        return ClickBatch(dense, Jagged(torch.cat(ids), lengths, weights), labels)
    hot = [1 if kind == "one" else 1 + at % _MAX_IDS for at in range(len(features))]
    ids = [_ids(spec, samples * n, generator) for spec, n in zip(features, hot, strict=True)]
    shaped = [values.view(samples, n) for values, n in zip(ids, hot, strict=True)]
    return ClickBatch(dense, Jagged.fixed(shaped), labels)


def _ids(spec: TableSpec, n: int, generator: Generator) -> Tensor:
    """Skewed ids, half of them from the first eighth, beyond 32 bits; of hash tables uniform from twice as
    many as are drawn, beyond 40 bits: a third of them come once in two steps, so that evictions meet ties.
    """
    if spec.ids == "hash":
        return torch.randint(0, 2 * n + 1, (n,), generator=generator) * (2**40 + 15)
    rank = torch.rand(n, generator=generator, dtype=torch.float64) ** 3
    laps = torch.randint(0, 2**40 // spec.rows, (n,), generator=generator)
    return (rank * spec.rows).long() + laps * spec.rows


_RULES: tuple[TableRuleName, ...] = get_args(TableRuleName)
_DENSE: tuple[DenseRuleName, ...] = get_args(DenseRuleName)
_INTERACTIONS: tuple[Interaction, ...] = ("dot", "dcn")
_STEP = 7
_MIXES = 4
_CACHE = 0.3  # share of rows: large tables evict rows, the caches of small ones must grow
_CLIP = 0.05  # below every gradient norm here


def _tables(ranks: int) -> list[TableConfig]:
    """Tables of every kind. Hash tables have so few rows that both policies evict among ids that are equal in
    what they look at first, and keep some of them; but for one from which ids go by their age alone.
    """
    hashed: list[dict[str, Any]] = [
        {"rows": 4 * ranks, "evict_every": 2},
        {"rows": 2 * ranks, "evict_every": 2, "admit": 2, "pooling": "mean"},
        {"rows": 40 * ranks, "evict_every": 1, "evict": "age", "max_age": 1},  # by age, before there are many
        {"rows": 4 * ranks, "evict_every": 2, "evict": "age"},
    ]
    others: list[dict[str, Any]] = [
        {"rows": 300},
        {"rows": 90, "pooling": "mean"},
        {"rows": 1},  # fewer rows than parts
        {"rows": 40, "ids": "quotient-remainder", "divisor": 7},
        {"rows": 30, "ids": "quotient-remainder", "pooling": "mean"},
        {"rows": 3},
    ]
    return [TableConfig(**table) for table in others] + [TableConfig(ids="hash", **table) for table in hashed]


def small(config: RecommenderConfig, ranks: int) -> RecommenderConfig:
    """The job with small tables of every kind, narrow networks, and a batch that the ranks do not divide;
    optimiser settings are kept.
    """
    dim = max(5, ranks)  # 5 columns do not divide evenly
    model = RecommenderModel(family="dlrm", dense=4, bottom=[6, dim], top=[7, 1], tables=_tables(ranks))
    batch = replace(config.batch, global_size=5 * ranks + 1)
    layout = replace(config.layout, ranks=ranks)
    return replace(config, model=model, batch=batch, layout=layout)


class AllCases:
    """All cases on a number of ranks.

    Attributes:
        cases: the cases to verify.
        impossible: combinations that do not exist, and why.
    """

    def __init__(
        self, tables: Sequence[TableSpec], ranks: int, node: int | None = None, full: bool = False
    ) -> None:
        """Args:
        tables: of the features.
        node: ranks of a node; None: half of them, where that is more than one.
        full: the whole product of all options, instead of rotating them.
        """
        self.ranks = ranks
        self._tables = physical_tables(tables)
        self.impossible = list[Impossible]()
        half = ranks // 2 if ranks % 2 == 0 and ranks > 2 else None
        self._node = node if node is not None and 1 < node < ranks else half
        self.cases = list(self._cases(full))

    def placements(self) -> Iterator[tuple[str, Placements]]:
        """Each placement with its name."""
        places: tuple[Place, ...] = PLACES
        splits = ["table", "column", "row", "data"]
        splits += [] if self._node is None else ["table-row"]
        for split, place in product(splits, places):
            chosen = {t.name: self._placement_of(t, split, at, place) for at, t in enumerate(self._tables)}
            yield split if place == "device" else f"{split} {place}", chosen
        for number in range(_MIXES):
            draw = Random(f"mix {number} of {self.ranks}")
            yield f"mix {number + 1}", {t.name: self._random_placement(t, draw) for t in self._tables}

    def _cases(self, full: bool) -> Iterator[PlacementCase]:
        if self._node is None:
            reason = "table-row needs nodes of several ranks, and several nodes"
            self.impossible.append(Impossible(reason, [f"{self.ranks} ranks"]))
        hashed = "a hash table is not copied, and lies on devices: there it is, where the others are not"
        self.impossible.append(
            Impossible(hashed, ["data", *(place for place in PLACES if place != "device")])
        )
        ways = list(product(KINDS, (True, False), (None, _CLIP), _INTERACTIONS))
        pairs = list(product(_RULES, _DENSE))
        for at, (name, placements) in enumerate(self.placements()):
            for number, (rule, dense) in enumerate(pairs):
                # a stride coprime to the number of ways visits all of them, each time in another order
                turn = (at * len(pairs) + number) * _STEP % len(ways)
                for kind, overlap, clip, interaction in ways if full else ways[turn : turn + 1]:
                    yield PlacementCase(
                        name=name,
                        placements=placements,
                        ranks=self.ranks,
                        rule=rule,
                        dense=dense,
                        samples=kind,
                        overlap=overlap,
                        clip=clip,
                        interaction=interaction,
                    )

    def _placement_of(self, table: TableSpec, split: str, at: int, place: Place) -> TablePlacement:
        """The placement of a table where all have one split."""
        if table.ids == "hash":
            place = "device"
            split = "table" if split == "data" else split
        if split == "data":
            return TablePlacement("data", (), place, _CACHE)
        if split == "table":
            return TablePlacement("table", (at % self.ranks,), place, _CACHE)
        if split == "table-row":
            node = self._node or self.ranks
            first = at % (self.ranks // node) * node
            return TablePlacement("row", tuple(range(first, first + node)), place, _CACHE)
        axis: Split = "row" if split == "row" else "column"
        return TablePlacement(axis, tuple(range(self.ranks)), place, _CACHE)

    def _random_placement(self, table: TableSpec, draw: Random) -> TablePlacement:
        """A random split on random ranks in random order, in a random memory."""
        hashed = table.ids == "hash"
        split: Split = draw.choice(
            ("table", "column", "row") if hashed else ("table", "column", "row", "data")
        )
        place: Place = "device" if hashed else draw.choice(PLACES)
        if split == "data":
            return TablePlacement("data", (), place, _CACHE)
        parts = 1 if split == "table" else draw.randint(1, self.ranks)
        return TablePlacement(split, tuple(draw.sample(range(self.ranks), parts)), place, _CACHE)
