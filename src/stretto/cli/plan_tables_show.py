"""What `stretto plan` says of a recommender: JSON, and text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.plan.tables.place import TablePlan

GIB = 2**30


def facts(model: str, plan: TablePlan, written: Path | None) -> dict[str, Any]:
    """All of the plan."""
    job, work = plan.job, plan.job.work
    return {
        "model": model,
        "cluster": work.cluster.name,
        "device": work.cluster.device.name,
        "ranks": work.ranks,
        "batch": work.batch,
        "precision": job.precision,
        "optimizer": work.optimizer,
        "fits": not plan.over,
        "over": list(plan.over),
        "samples_per_s": plan.samples_per_s,
        "step_time_s": plan.seconds,
        "parts": dict(plan.step.parts),
        "tables": [
            {
                "name": table.name,
                "rows": table.rows,
                "dim": table.dim,
                "ids_per_sample": table.hot,
                "popularity": popularity.said,
                "split": given.split,
                "ranks": list(given.ranks),
                "place": given.place,
                "cache": None if given.place == "device" else given.cache,
                "ships": "rows" if option.rows_shipped else "sums",
                "gib": _size(plan, i) / GIB,
                "why": plan.why[table.name],
            }
            for i, (table, popularity, given, option) in enumerate(
                zip(job.tables, job.popularity, plan.placements.values(), plan.options, strict=True)
            )
        ],
        "loads": [
            {
                "rank": load.rank,
                "lookup_s": load.lookup,
                "update_s": load.update,
                "fetch_s": load.fetch,
                "sent_bytes": load.sent,
                "device_gib": load.device / GIB,
                "host_gib": load.host / GIB,
                "disk_gib": load.disk / GIB,
            }
            for load in plan.ranks
        ],
        "limits_gib": {name: value / GIB for name, value in vars(job.limits).items()},
        "written": None if written is None else str(written),
    }


def _size(plan: TablePlan, i: int) -> float:
    """Bytes of a table with its states, once."""
    table = plan.job.tables[i]
    return table.rows * sum(plan.job.work.row_bytes(table.dim))


def show(to: Console, model: str, plan: TablePlan, written: Path | None) -> None:
    """The plan as text."""
    from stretto.view.tables import RankTables, placement_text

    job, work = plan.job, plan.job.work
    device = f"{work.ranks} x {work.cluster.device.name} ({work.cluster.name})"
    to.print(f"{model} on {device}, {work.batch:,} samples a step, {job.precision}, tables: {work.optimizer}")
    to.print(f"\n{plan.samples_per_s:,.0f} samples/s, {1e3 * plan.seconds:.3g} ms a step:")
    parts = sorted(plan.step.parts.items(), key=lambda part: -part[1])
    for name, seconds in parts:
        if seconds > 0:
            to.print(f"  {name:<9} {1e3 * seconds:8.3f} ms  {_SAID[name]}")
    to.print("")
    ranks = [
        RankTables(load.lookup + load.update, {"device": load.device, "cpu": load.host, "disk": load.disk})
        for load in plan.ranks
    ]
    sizes = {table.name: _size(plan, i) for i, table in enumerate(job.tables)}
    times = {
        table.name: sum(part[0] + part[1] for part in option.parts)
        for table, option in zip(job.tables, plan.options, strict=True)
    }
    room = {"device": job.limits.device, "cpu": job.limits.host, "disk": job.limits.disk}
    to.print(
        placement_text(
            *(job.tables, plan.placements, work.ranks),
            bytes_of=sizes,
            load_of=times,
            ranks=ranks,
            room=room,
        ),
        markup=False,
        soft_wrap=True,
    )
    uniform = sum(popularity.said == "uniform" for popularity in job.popularity)
    if uniform:
        to.print(f"\nof {uniform} tables no popularity is known: all their ids count as equally popular")
    for line in plan.over:
        to.print(f"\ndoes not fit: {line}")
    if written is not None:
        to.print(
            f"\nwritten: {written}: train with tables.placement={written}, or edit and price it: --placement"
        )


_SAID = {
    "lookup": "rows read and summed by their owners",
    "exchange": "sums and gradients between ranks, what the bottom network does not hide",
    "network": "dense layers, forward and backward",
    "update": "rows updated by their owners",
    "reduce": "dense gradients and copied tables' rows, what updates do not hide",
    "fetch": "rows and ids of the next batch, what the step does not hide",
    "program": "the program beside its kernels",
}
