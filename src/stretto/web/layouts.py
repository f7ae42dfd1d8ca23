"""Answers about layouts: the groups of ranks, and what a rank sends in a step of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from stretto.errors import StrettoError
from stretto.job.job import Job
from stretto.layout import Layout, RankGrid
from stretto.planner.machines.cluster import Cluster
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import MemoryJob
from stretto.planner.rank_step.counts import GroupTraffic, countable, counts
from stretto.view import colours
from stretto.view.exchanges import Exchange, exchanges, link_text
from stretto.web.question_job import Question, named_cluster, read_job, read_layout

_LISTED = 8  # receivers by number, of more only the first


def show_layout(question: Question) -> dict[str, Any]:
    """The grid of ranks and its groups; the arithmetic of ranks is the page's own."""
    layout = read_layout(question)
    cluster = named_cluster(question["cluster"]).sized(layout.world) if question.get("cluster") else None
    node = question.get("node") or (cluster.node if cluster else 8)
    if not isinstance(node, int) or node < 1:
        raise StrettoError(f"node={node!r} is not allowed", hint="node is an integer of at least 1")
    return layout_record(layout, exchanges(layout, node), ranks_per_node=node, cluster=cluster)


def layout_record(
    layout: Layout,
    groups: Sequence[Exchange],
    *,
    ranks_per_node: int = 8,
    cluster: Cluster | None = None,
    encoder_pp: int = 0,
) -> dict[str, Any]:
    """What the page draws of a layout; its size does not grow with the number of ranks.

    Args:
        groups: groups with a button to select them.
        cluster: cluster whose links are named.
        encoder_pp: number of pipeline ranks of the encoder, which are the first.
    """
    experts = layout.ep > 1 or layout.expert_tp is not None
    grids = [layout.grid, layout.expert_grid] if experts else [layout.grid]
    return {
        "title": str(layout),
        "order": layout.order,
        "world": layout.world,
        "offset": layout.offset,
        "node": ranks_per_node,
        "cluster": cluster.name if cluster else "",
        "links": {
            "inside": link_text(cluster.inner) if cluster else "",
            "between": link_text(cluster.outer) if cluster else "",
        },
        "stages": [colours.hexed(colours.of_stage(stage, layout.pp)) for stage in range(layout.pp)],
        "outlines": [colours.hexed(colour) for colour in colours.GROUPS],
        "grids": [[*grid.sizes.items()] for grid in grids],
        "groups": [_group(layout, group, grids) for group in groups],
        "encoder": encoder_pp,
    }


def _group(layout: Layout, exchange: Exchange, grids: Sequence[RankGrid]) -> Mapping[str, Any]:
    """The groups over some axes, with the grid and the mask that determine their ranks."""
    grid, names = layout.grid_of(exchange.axes)
    mask = names.split("-") if names else []
    return {**asdict(exchange), "links": exchange.links, "grid": grids.index(grid), "mask": mask}


# ------------------------------------------------------------------ bytes of a step


def count_traffic(question: Question) -> dict[str, Any]:
    """What a rank of a job sends in a step: to whom, how often, how many bytes, over which link."""
    rank: int = question.get("rank", 0)
    job, cluster, memory_job = _counted(json.dumps({**question, "rank": 0}, sort_keys=True))
    if not countable(job, memory_job):
        raise StrettoError(
            "the bytes of this job are not counted",
            hint="counted are products of 16 bits or more and schedules that update once a step",
        )
    counted = counts(job, rank, memory_job)
    node = question.get("node") or cluster.node
    rows = [_traffic_record(rank, node, each) for each in counted.traffic if each.sent]
    return {
        "rank": rank,
        "sent": counted.sent,
        "microbatches": job.microbatches,
        "traffic": sorted(rows, key=lambda row: -row["sent"]),
        "links": {"inside": link_text(cluster.inner), "between": link_text(cluster.outer)},
        "bandwidths": {"inside": cluster.inner.bandwidth, "between": cluster.outer.bandwidth},
    }


@lru_cache(maxsize=4)
def _counted(question: str) -> tuple[Job, Cluster, MemoryJob]:
    """The job of a question and its counts of memory, which serve all ranks."""
    run = read_job(json.loads(question))
    return run.job, run.cluster, memory_of(run.job)


def _traffic_record(rank: int, node: int, traffic: GroupTraffic) -> dict[str, Any]:
    """One row; receivers are those of the collective's data, apart by the link to them."""
    others = [other for other in traffic.ranks if other != rank]
    if traffic.kind == "send" and traffic.axes == "cp":  # round the ring
        others = [traffic.ranks[traffic.ranks.index(rank) - 1]]
    inside = [other for other in others if other // node == rank // node]
    between = [other for other in others if other // node != rank // node]
    return {
        "axes": traffic.axes,
        "purpose": traffic.purpose,
        "kind": traffic.kind,
        "calls": traffic.calls,
        "bytes": traffic.bytes,
        "sent": traffic.sent,
        "inside": {"count": len(inside), "ranks": inside[:_LISTED]},
        "between": {"count": len(between), "ranks": between[:_LISTED]},
    }
