"""Table placements set in the config of a job: a file, a mapping, or one split for all tables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from stretto.errors import StrettoError, nearest
from stretto.recommender.config.schema import RecommenderLayout, TablesConfig
from stretto.recommender.placement import (
    Placements,
    TableSpec,
    check_placements,
    physical_tables,
)
from stretto.recommender.planner.placement_file import read_placements
from stretto.recommender.planner.uniform import UNIFORM, uniform

AUTO = "auto"


def configured_placements(
    settings: TablesConfig, layout: RecommenderLayout, tables: Sequence[TableSpec]
) -> Placements | None:
    """Return the placement of each stored table, or None if the placement is to be planned.

    Args:
        tables: one for each feature. The two tables of a quotient-remainder feature are placed alike under
            the name of the feature, or each under its name.

    Raises:
        StrettoError: no such file or table, or a placement that does not fit the table or the ranks.
    """
    placement, stored = settings.placement, physical_tables(tables)
    if placement == AUTO:
        return None
    if isinstance(placement, str) and placement in UNIFORM:
        return uniform(
            tables=stored,
            split=placement,
            world=layout.ranks,
            ranks_per_node=layout.ranks_per_node,
            place=settings.place or "device",
            cache=settings.cache,
        )
    if isinstance(placement, str):
        path = Path(placement).expanduser()
        if not os.path.isfile(path):
            similar = nearest(placement, (AUTO, *UNIFORM))
            others = f"{AUTO}, {', '.join(UNIFORM)}, a YAML file, or a mapping"
            hint = f"did you mean {similar}?" if similar else others
            raise StrettoError(f"tables.placement is {placement}: there is no such file", hint=hint)
        placements = read_placements(path, layout.ranks, layout.ranks_per_node)
    else:
        placements = read_placements(placement, layout.ranks, layout.ranks_per_node)
    placed = dict(placements)
    for table in tables:
        names = [physical.name for physical in physical_tables([table])]
        if names != [table.name] and table.name in placed:
            for name in names:
                placed.setdefault(name, placed[table.name])
            del placed[table.name]
    check_placements(stored, placed, layout.ranks)  # reports unknown names
    return placed
