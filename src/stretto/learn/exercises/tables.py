"""Grades `tables`: embedding tables placed on ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from stretto.errors import StrettoError
from stretto.learn.checks import Check, at_most
from stretto.planner.machines.catalogue import find_cluster
from stretto.recommender.placement import TablePlacement, TableSpec
from stretto.recommender.planner.job import table_job
from stretto.recommender.planner.options import option_of
from stretto.recommender.planner.place import place_tables, price_tables

RANKS = 1
TEMPLATE = '''def place(tables: list[dict], ranks: int, memory: float) -> dict[str, list[int]]:
    """Return the ranks of each table by its name: one for a whole table, 2, 4, ... for equal parts of its
    columns, each at most once.

    Args:
        tables: {"name": text, "parts": {1: (bytes, seconds), 2: (bytes, seconds), ...}} each; `parts` has the
            bytes and the seconds of each part by the number of equal parts that the table is split into.
        ranks: number of ranks.
        memory: bytes for tables on each rank.
    """
    raise NotImplementedError
'''


def checks(reader: Mapping[str, Any], random: Random) -> Iterator[Check]:
    """Compare the busiest rank of placements, with less and less memory, with the planner's."""
    for ranks, spare in ((4, 2.0), (8, 1.5), (8, 1.25)):
        specs = [
            TableSpec(
                name=f"table{index}",
                rows=int(10 ** random.uniform(4.0, 7.0)),
                dim=random.choice((32, 64, 128)),
                hot=float(random.randint(1, 20)),
            )
            for index in range(random.randint(3 * ranks, 4 * ranks))
        ]
        specs.append(TableSpec(name="users", rows=random.randint(30, 50) * 10**6, dim=128, hot=40.0))
        cluster = find_cluster(f"dgx-a100-80gb:{ranks}")
        job = table_job(specs, cluster, ranks, 65536, places=("device",))
        busy_seconds = job.balance().busy_seconds
        rows: list[dict[str, Any]] = [{"name": spec.name, "parts": {}} for spec in specs]
        for row, spec, popularity in zip(rows, specs, job.popularity, strict=True):
            for count in (1, 2, 4, 8)[: 3 + (ranks == 8)]:
                split = TablePlacement("column" if count > 1 else "table", tuple(range(count)))
                load = option_of(spec, popularity, job.work, split).parts[0]
                row["parts"][count] = load.device, busy_seconds(load)
        memory = spare * sum(row["parts"][1][0] for row in rows) / ranks
        job = replace(job, limits=replace(job.limits, device=memory))
        case = f"{len(specs)} tables on {ranks} ranks of {memory / 2**30:.1f} GiB"
        placement = reader["place"](rows, ranks, memory)
        try:
            placements = {
                name: TablePlacement("column" if len(chosen) > 1 else "table", tuple(chosen))
                for name, chosen in placement.items()
            }
            priced = price_tables(job, placements)
        except (StrettoError, AttributeError, TypeError) as error:
            yield Check(f"{case}: a placement", str(error))
            return
        yield Check(f"{case}: a placement")
        yield Check(f"{case}: memory", "; ".join(priced.over) or None)
        planned = place_tables(job, ("table", "column"))
        seconds, best = ([busy_seconds(load) for load in each.ranks] for each in (priced, planned))
        yield at_most(
            f"{case}: time",
            1e6 * max(seconds),
            1.1e6 * max(best),
            f"rank {seconds.index(max(seconds))} is busy for {{actual}} us, on average a rank for "
            f"{1e6 * sum(seconds) / ranks:.0f}; 10% above the planner's busiest are {{limit}}",
        )
