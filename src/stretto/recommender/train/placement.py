"""The placements of a job's tables: as configured, or planned for its ranks and this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from stretto.job.devices import HOST
from stretto.planner.machines.catalogue import cluster_here
from stretto.recommender.config.placement import configured_placements
from stretto.recommender.config.schema import RecommenderConfig, RecommenderLayout
from stretto.recommender.placement import Placements, TablePlacement, TableSpec, physical_tables
from stretto.recommender.planner.job import TableJob, table_job
from stretto.recommender.planner.network_times import network_of
from stretto.recommender.planner.place import place_tables
from stretto.recommender.planner.placement_file import placements_to_yaml
from stretto.recommender.planner.table_times import program_of
from stretto.recommender.popularity import Popularity, measured
from stretto.recommender.train.clicks import ClickData
from stretto.run.train.prediction import local_device_kind

_WIRE = {"float32": 4, "float16": 2, "bfloat16": 2}
_OF_MEMORY = 0.7  # share of memory for tables


def place(config: RecommenderConfig, data: ClickData) -> Placements:
    """Return the placement of each table that is stored: the configured one, or the planner's for ranks on
    this kind of machine.

    Raises:
        StrettoError: a placement does not fit, or tables fit nowhere.
    """
    configured = configured_placements(config.tables, config.layout, data.tables)
    return place_tables(placement_job(config, data)).placements if configured is None else configured


def placement_job(config: RecommenderConfig, data: ClickData) -> TableJob:
    """Return the job's placement problem on ranks on this kind of machine."""
    layout, settings = config.layout, config.tables
    dtype, program = config.train.dtype, program_of("stretto")
    stored, element = physical_tables(data.tables), 8 if dtype == "float64" else 4
    kind = local_device_kind(config.train.device)
    shared = _memory(layout.ranks) if kind == HOST else None  # on CPUs, devices and host are one
    device_bytes, host_bytes = (
        None if gib is None else gib * 2**30 for gib in (settings.device_gib, settings.host_gib)
    )
    return table_job(
        stored,
        cluster_here(device=kind),
        layout.ranks,
        config.batch.global_size,
        network=network_of(config.shape(data.tables)),
        optimizer=config.optim.tables.name,
        weight_bytes=element,
        wire_bytes=element if dtype == "float64" else _WIRE[settings.wire],
        popularity=_popularity(stored, data),
        ranks_per_node=layout.ranks_per_node or layout.ranks,
        device_bytes=device_bytes or shared,
        host_bytes=host_bytes or _memory(layout.ranks),
        places=None if settings.place is None else [settings.place],
        program=program if settings.overlap else replace(program, prefetch=False, overlap=False),
    )


def _popularity(stored: Sequence[TableSpec], data: ClickData) -> dict[str, Popularity]:
    """Return the measured popularity of tables that have a row for every id of the log."""
    popularity = dict[str, Popularity]()
    for table in stored:
        lookups = data.popularity.get(table.name)
        if lookups is not None and lookups.buckets and sum(ids for ids, _ in lookups.buckets) <= table.rows:
            popularity[table.name] = measured(table.rows, lookups.hot, lookups.buckets)
    return popularity


def _memory(ranks: int) -> float:
    """Return the bytes of this machine's memory that a rank may use for tables."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks)
    return _OF_MEMORY * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / local_ranks


def to_json(placements: Placements) -> dict[str, dict[str, Any]]:
    """Placements as JSON."""
    return {name: {**asdict(each), "ranks": list(each.ranks)} for name, each in placements.items()}


def from_json(record: Mapping[str, Mapping[str, Any]]) -> Placements:
    """The inverse of `to_json`."""
    placements = dict[str, TablePlacement]()
    for name, each in record.items():
        fields: dict[str, Any] = {**each, "ranks": tuple(each["ranks"])}
        placements[name] = TablePlacement(**fields)
    return placements


def file_text(layout: RecommenderLayout, placements: Placements) -> str:
    """Return the placement as a file that `tables.placement` takes."""
    about = "Where the tables of this run are; tables.placement takes this file, edited or not."
    return placements_to_yaml(placements, layout.ranks, layout.ranks_per_node, about)
