"""A case to verify: placements, optimisers and features of one recommender job; and cases from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from stretto.errors import StrettoError
from stretto.recommender.config.placement import configured_placements
from stretto.recommender.config.schema import (
    DenseOptimConfig,
    DenseRuleName,
    RecommenderConfig,
    RecommenderOptim,
    TableOptimConfig,
    TableRuleName,
    TablesConfig,
)
from stretto.recommender.placement import Placements, TableSpec
from stretto.recommender.shape import Interaction
from stretto.verify.language.cases import check_value, read_cases

Samples = Literal[
    "one", "fixed", "ragged", "data"
]  # random, as drawn by `every.draw`; or the first of the job's


@dataclass(frozen=True, kw_only=True)
class PlacementCase:
    """A case to verify.

    name: of the placement.
    placements: of each table that is stored.
    rule, dense: the optimisers of tables and dense layers.
    samples: what is trained on.
    """

    name: str
    placements: Placements = field(hash=False)
    ranks: int
    rule: TableRuleName
    dense: DenseRuleName
    samples: Samples = "ragged"
    overlap: bool = True
    clip: float | None = None
    interaction: Interaction = "dot"

    def __str__(self) -> str:
        parts = [self.name, f"{self.rule}+{self.dense}", self.interaction, _SAMPLE_WORDS[self.samples]]
        parts += ["overlap"] if self.overlap else []
        parts += [f"clip={self.clip:g}"] if self.clip is not None else []
        return " ".join(parts)

    @property
    def placement_words(self) -> dict[str, str]:
        """The placement of each table, in words."""
        descriptions = dict[str, str]()
        for name, placement in self.placements.items():
            ranks = "" if placement.split == "data" else f" on {', '.join(map(str, placement.ranks))}"
            descriptions[name] = (
                f"{placement.split}{ranks}{'' if placement.place == 'device' else ' ' + placement.place}"
            )
        return descriptions

    def apply(
        self, config: RecommenderConfig, features: Sequence[TableSpec], own_types: bool = False
    ) -> RecommenderConfig:
        """The config of this case on the CPU, in float64 or in the types of the config."""
        optim, model = config.optim, config.model
        if self.interaction != config.shape(features).interaction:
            crossed = (2, 3) if self.interaction == "dcn" else (None, None)
            sizes = {"cross_layers": crossed[0], "cross_rank": crossed[1]}
            model = replace(model, interaction=self.interaction, **sizes)
        rules = {
            "dense": replace(optim.dense, name=self.dense),
            "tables": replace(optim.tables, name=self.rule),
            "clip": self.clip,
        }
        parts: dict[str, Any] = {
            "model": model,
            "tables": replace(config.tables, overlap=self.overlap),
            "layout": replace(config.layout, ranks=self.ranks),
            "optim": replace(optim, **rules),
            "train": replace(config.train, device="cpu"),
        }
        if not own_types:
            parts["tables"] = replace(parts["tables"], wire="float32")
            parts["train"] = replace(parts["train"], dtype="float64")
        return replace(config, **parts)

    @property
    def reference(self) -> tuple[Any, ...]:
        """Everything that the reference run depends on."""
        return self.rule, self.dense, self.samples, self.clip, self.interaction


_SAMPLE_WORDS: Mapping[Samples, str] = {
    "one": "one-hot",
    "fixed": "multi-hot",
    "ragged": "ragged weighted",
    "data": "data",
}


def configured_case(
    config: RecommenderConfig, features: Sequence[TableSpec], placements: Placements
) -> PlacementCase:
    """The placement and optimisers of the config, on the job's samples."""
    placement = config.tables.placement
    name = placement if isinstance(placement, str) else "own placement"
    optim = config.optim
    return PlacementCase(
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


_EXAMPLE = "write lines such as: - {placement: row, place: cpu, rule: adagrad}"
# keys, and the fields of the config that say what they can be
_KEYS: Mapping[str, tuple[type, str]] = {
    "placement": (TablesConfig, "placement"),
    "place": (TablesConfig, "place"),
    "cache": (TablesConfig, "cache"),
    "overlap": (TablesConfig, "overlap"),
    "rule": (TableOptimConfig, "name"),
    "dense": (DenseOptimConfig, "name"),
    "clip": (RecommenderOptim, "clip"),
}


def cases_from_file(
    path: Path, config: RecommenderConfig, features: Sequence[TableSpec], configured: PlacementCase
) -> list[PlacementCase]:
    """Cases from a YAML list of mappings with `placement`, `place`, `cache`, `overlap` (as in section
    `tables`), `rule` (the tables' optimiser), `dense` (the dense networks' optimiser), `clip` and `samples`.

    Args:
        configured: the config's case, for the keys that are left out.

    Raises:
        StrettoError: not such a list, an unknown key, or a placement that does not fit.
    """
    rows = read_cases(path, kind="placement", example=_EXAMPLE, keys=(*_KEYS, "samples"))
    return [_case(mapping, location, config, features, configured) for location, mapping in rows]


def _case(
    mapping: dict[str, Any],
    location: str,
    config: RecommenderConfig,
    features: Sequence[TableSpec],
    configured: PlacementCase,
) -> PlacementCase:
    kinds = get_args(Samples)
    for key, value in mapping.items():
        if key in _KEYS:
            check_value(*_KEYS[key], key, value, location=location, example=_EXAMPLE)
        elif value not in kinds:
            raise StrettoError(f"{location}: samples is {value!r}", hint=f"one of {', '.join(kinds)}")
    fields = {name: mapping[name] for name in ("placement", "place", "cache") if name in mapping}
    name, placements = configured.name, configured.placements
    if fields:
        tables = replace(config.tables, **fields)
        try:
            planned = configured_placements(tables, config.layout, features)
        except StrettoError as error:
            raise StrettoError(f"{location}: {error.message}", hint=error.hint) from None
        number = location.rpartition(" ")[2]
        label = tables.placement if isinstance(tables.placement, str) else f"placement {number}"
        name = label if tables.place in (None, "device") else f"{label} {tables.place}"
        if planned is None and "placement" in mapping:
            raise StrettoError(
                f"{location}: placement is auto", hint="left out, it is the config's; or name one"
            )
        placements = _moved(configured.placements, features, fields) if planned is None else planned
    changed = {key: mapping[key] for key in ("rule", "dense", "clip", "overlap", "samples") if key in mapping}
    return replace(configured, name=name, placements=placements, **changed)


def _moved(placements: Placements, features: Sequence[TableSpec], fields: Mapping[str, Any]) -> Placements:
    """A planned placement in another memory; hash tables stay on the device, because they grow."""
    hashed = {table.name for table in features if table.ids == "hash"}
    return {
        name: placement if name in hashed else replace(placement, **fields)
        for name, placement in placements.items()
    }
