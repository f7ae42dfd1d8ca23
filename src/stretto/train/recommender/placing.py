"""Where the tables of a job go: as the config says, or planned for the ranks and this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stretto.config.recommender.placed import given_placements
from stretto.config.recommender.schema import RecommenderConfig
from stretto.layout.tables import Placements, TablePlacement, physical_tables
from stretto.plan.tables.file import placements_to_yaml
from stretto.plan.tables.uniform import uniform
from stretto.train.recommender.clicks import ClickData


def place(config: RecommenderConfig, data: ClickData) -> Placements:
    """The placement of each table that is stored.

    Raises:
        StrettoError: one that does not fit, or tables that fit nowhere.
    """
    given = given_placements(config, data.tables)
    return given if given is not None else _planned(config, data)


def _planned(config: RecommenderConfig, data: ClickData) -> Placements:
    stored, layout = physical_tables(data.tables), config.layout
    return uniform(
        stored,
        "table",
        layout.ranks,
        layout.ranks_per_node,
        config.tables.place or "device",
        config.tables.cache,
    )


def to_json(placements: Placements) -> dict[str, dict[str, Any]]:
    """As ranks tell each other, and people are told."""
    return {name: {**asdict(each), "ranks": list(each.ranks)} for name, each in placements.items()}


def from_json(facts: Mapping[str, Mapping[str, Any]]) -> Placements:
    """What `to_json` was given."""
    found = dict[str, TablePlacement]()
    for name, each in facts.items():
        given: dict[str, Any] = {**each, "ranks": tuple(each["ranks"])}
        found[name] = TablePlacement(**given)
    return found


def file_text(config: RecommenderConfig, placements: Placements) -> str:
    """The placement as a file that `tables.placement` takes."""
    layout = config.layout
    about = "Where the tables of this run are; tables.placement takes this file, edited or not."
    return placements_to_yaml(placements, layout.ranks, layout.ranks_per_node, about)
