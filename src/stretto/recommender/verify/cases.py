"""A case to verify: placements, optimisers and features of one recommender job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from stretto.recommender.config.schema import RecommenderConfig, TableRuleName
from stretto.recommender.placement import Placements, TableSpec
from stretto.recommender.shape import Interaction

Dense = Literal["adamw", "sgd", "lamb"]
Samples = Literal["one", "fixed", "ragged", "data"]  # drawn, as in `samples`; or the first of the job's own


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is proved.

    name: of the placement.
    placements: of each table that is stored.
    rule, dense: the optimisers of tables and dense layers.
    samples: what is trained on.
    """

    name: str
    placements: Placements = field(hash=False)
    ranks: int
    rule: TableRuleName
    dense: Dense
    samples: Samples = "ragged"
    overlap: bool = True
    clip: float | None = None
    interaction: Interaction = "dot"

    def __str__(self) -> str:
        said = [self.name, f"{self.rule}+{self.dense}", self.interaction, _SAID[self.samples]]
        said += ["overlap"] if self.overlap else []
        said += [f"clip={self.clip:g}"] if self.clip is not None else []
        return " ".join(said)

    @property
    def described(self) -> dict[str, str]:
        """Where each table is, in words."""
        words = dict[str, str]()
        for name, placement in self.placements.items():
            ranks = "" if placement.split == "data" else f" on {', '.join(map(str, placement.ranks))}"
            words[name] = (
                f"{placement.split}{ranks}{'' if placement.place == 'device' else ' ' + placement.place}"
            )
        return words

    def apply(self, config: RecommenderConfig, features: Sequence[TableSpec]) -> RecommenderConfig:
        """The config of this case, in float64 on the CPU."""
        optim, model = config.optim, config.model
        if self.interaction != config.shape(features).interaction:
            crossed = (2, 3) if self.interaction == "dcn" else (None, None)
            sizes = {"cross_layers": crossed[0], "cross_rank": crossed[1]}
            model = model.model_copy(update={"interaction": self.interaction, **sizes})
        rules = {
            "dense": optim.dense.model_copy(update={"name": self.dense}),
            "tables": optim.tables.model_copy(update={"name": self.rule}),
            "clip": self.clip,
        }
        parts: dict[str, Any] = {
            "model": model,
            "tables": config.tables.model_copy(update={"overlap": self.overlap, "wire": "float32"}),
            "layout": config.layout.model_copy(update={"ranks": self.ranks}),
            "optim": optim.model_copy(update=rules),
            "train": config.train.model_copy(update={"dtype": "float64", "device": "cpu"}),
        }
        return config.model_copy(update=parts)

    @property
    def reference(self) -> tuple[Any, ...]:
        """All that the reference depends on."""
        return self.rule, self.dense, self.samples, self.clip, self.interaction


_SAID: Mapping[Samples, str] = {
    "one": "one-hot",
    "fixed": "multi-hot",
    "ragged": "ragged weighted",
    "data": "data",
}


def own_case(config: RecommenderConfig, features: Sequence[TableSpec], placements: Placements) -> Case:
    """The config's own placement and optimisers, on its own samples."""
    placement = config.tables.placement
    name = placement if isinstance(placement, str) else "own placement"
    optim = config.optim
    return Case(
        name=name,
        placements=placements,
        ranks=config.layout.ranks,
        rule=optim.tables.name,
        dense=optim.dense.name,
        samples="data",
        overlap=config.tables.overlap,
        clip=optim.clip,
        interaction=config.shape(features).interaction,
    )
