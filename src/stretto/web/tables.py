"""Answers about embedding tables: where they lie, and how busy and how full each rank is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from stretto.planner.machines.catalogue import clusters
from stretto.recommender.planner.job import table_job
from stretto.recommender.planner.network_times import network_of
from stretto.recommender.planner.place import place_tables, price_tables
from stretto.recommender.planner.uniform import UNIFORM, uniform
from stretto.recommender.shape import DLRM_PRESETS, dlrm_preset, table_specs
from stretto.web.question_job import named_cluster

Question = Mapping[str, Any]
HYBRID = "hybrid"  # of all splits the fastest for each table, as `stretto plan` searches


def list_table_names(question: Question) -> dict[str, Any]:
    """Recommenders and clusters by name, and the splits: that of each table or one for all."""
    names = [cluster.name for cluster in clusters()]
    return {"models": [*DLRM_PRESETS], "clusters": names, "splits": [HYBRID, *UNIFORM]}


def place(question: Question) -> dict[str, Any]:
    """Place the tables of a recommender, and price the step.

    Args:
        question: `model` and `cluster` by name, `ranks`, `batch` of all ranks, and `split`.

    Returns:
        The step in seconds; of each rank, by split, the bytes of its parts of tables with their optimiser
        states, and its seconds of lookups, updates and messages; of each table the same of its largest part.

    Raises:
        StrettoError: unknown names, more ranks than the cluster has, or a table that fits nowhere.
    """
    shape, ranks = dlrm_preset(question["model"]), question["ranks"]
    cluster = named_cluster(question["cluster"])
    cluster.sized(ranks)
    job = table_job(table_specs(shape), cluster, ranks, question["batch"], network=network_of(shape))
    if question["split"] == HYBRID:
        plan = place_tables(job)
    else:
        plan = price_tables(job, uniform(job.tables, question["split"], ranks, job.work.local))
    busy = job.balance().busy_seconds
    loads = [
        {"seconds": defaultdict[str, float](float), "bytes": defaultdict[str, float](float)}
        for _ in range(ranks)
    ]
    tables = list[dict[str, Any]]()
    for table, placement, option in zip(job.tables, plan.placements.values(), plan.options, strict=True):
        parts = option.parts if placement.ranks else option.parts * ranks  # one for all copies
        for rank, part in zip(placement.ranks or range(ranks), parts, strict=True):
            loads[rank]["seconds"][placement.split] += busy(part)
            loads[rank]["bytes"][placement.split] += part.device
        tables.append(
            {
                "name": table.name,
                "rows": table.rows,
                "dim": table.dim,
                "split": placement.split,
                "ranks": list(placement.ranks),
                "place": placement.place,
                "bytes": max(part.stored for part in parts),
                "seconds": max(map(busy, parts)),
            }
        )
    return {
        "seconds": plan.seconds,
        "samples_per_s": plan.samples_per_s,
        "over": list(plan.over),
        "room": job.limits.device,
        "ranks": loads,
        "tables": tables,
    }
