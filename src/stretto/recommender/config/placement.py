"""Table placements set in the config of a job: a file, a mapping, or one split for all tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from stretto.errors import StrettoError, nearest
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.placement import (
    Placements,
    TablePlacement,
    TableSpec,
    check_placements,
    physical_tables,
)
from stretto.recommender.planner.placement_file import read_placements
from stretto.recommender.planner.uniform import UNIFORM, uniform

AUTO = "auto"


def configured_placements(config: RecommenderConfig, tables: Sequence[TableSpec]) -> Placements | None:
    """The placement of each stored table, or None if the placement is to be planned.

    Args:
        tables: one for each feature. The two tables of a quotient-remainder feature are placed alike under
            the name of the feature, or each under its name.

    Raises:
        StrettoError: no such file or table, or a placement that does not fit the table or the ranks.
    """
    placement = config.tables.placement
    layout = config.layout
    stored = physical_tables(tables)
    if placement == AUTO:
        return None
    if isinstance(placement, str) and placement in UNIFORM:
        place, cache = config.tables.place or "device", config.tables.cache
        return uniform(
            tables=stored,
            split=placement,
            world=layout.ranks,
            ranks_per_node=layout.ranks_per_node,
            place=place,
            cache=cache,
        )
    if isinstance(placement, str):
        path = Path(placement).expanduser()
        if not path.is_file():
            raise StrettoError(
                f"tables.placement is {placement}: there is no such file", hint=_meant(placement)
            )
        placements = read_placements(path, layout.ranks, layout.ranks_per_node)
    else:
        placements = read_placements(placement, layout.ranks, layout.ranks_per_node)
    placed = _of_stored(placements, tables)
    check_placements(stored, placed, layout.ranks)
    return placed


def _of_stored(placements: Mapping[str, TablePlacement], tables: Sequence[TableSpec]) -> Placements:
    """Placements by the names of stored tables; unknown names are kept, for `check_placements` to report."""
    placed = dict(placements)
    for table in tables:
        names = [stored.name for stored in physical_tables([table])]
        if names != [table.name] and table.name in placed:
            for name in names:
                placed.setdefault(name, placed[table.name])
            del placed[table.name]
    return placed


def _meant(name: str) -> str:
    near = nearest(name, (AUTO, *UNIFORM))
    return f"did you mean {near}?" if near else f"{AUTO}, {', '.join(UNIFORM)}, a YAML file, or a mapping"
