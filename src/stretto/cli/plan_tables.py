"""`stretto plan` for a recommender: the placement of its tables, and predicted samples per second."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.recommender.planner.place import TablePlan
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stretto.cli import interop
from stretto.cli.output import report, say_no, write_text
from stretto.errors import StrettoError, nearest

if TYPE_CHECKING:
    from stretto.planner.machines.cluster import Cluster
    from stretto.recommender.config.schema import RecommenderConfig
    from stretto.recommender.placement import Split
    from stretto.recommender.planner.job import TableJob


GIB = 2**30


def facts(model: str, plan: TablePlan, written: Path | None) -> dict[str, Any]:
    """The plan as the command's JSON."""
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
                "popularity": popularity.source,
                "split": placement.split,
                "ranks": list(placement.ranks),
                "place": placement.place,
                "cache": None if placement.place == "device" else placement.cache,
                "ships": "rows" if option.rows_shipped else "sums",
                "gib": _size(plan, i) / GIB,
                "why": plan.why[table.name],
            }
            for i, (table, popularity, placement, option) in enumerate(
                zip(job.tables, job.popularity, plan.placements.values(), plan.options, strict=True)
            )
        ],
        "loads": [
            {
                "rank": rank,
                "lookup_s": load.lookup,
                "update_s": load.update,
                "fetch_s": load.fetch,
                "sent_bytes": load.sent,
                "device_gib": load.device / GIB,
                "host_gib": load.host / GIB,
                "disk_gib": load.disk / GIB,
            }
            for rank, load in enumerate(plan.ranks)
        ],
        "limits_gib": {name: value / GIB for name, value in vars(job.limits).items()},
        "written": None if written is None else str(written),
    }


def _size(plan: TablePlan, i: int) -> float:
    """Bytes of one copy of a table with its optimizer states."""
    table = plan.job.tables[i]
    return table.rows * sum(plan.job.work.row_bytes(table.dim))


def show(to: Console, model: str, plan: TablePlan, written: Path | None) -> None:
    """Print the plan."""
    from stretto.recommender.view import RankTables, placement_text

    job, work = plan.job, plan.job.work
    device = f"{work.ranks} x {work.cluster.device.name} ({work.cluster.name})"
    to.print(f"{model} on {device}, {work.batch:,} samples a step, {job.precision}, tables: {work.optimizer}")
    uniform = sum(popularity.source == "uniform" for popularity in job.popularity)
    if uniform:
        to.print(f"no popularity of ids is known for {uniform} tables: taken as uniform")
    to.print(f"\n{plan.samples_per_s:,.0f} samples/s, {1e3 * plan.seconds:.3g} ms a step:")
    parts = sorted(plan.step.parts.items(), key=lambda part: -part[1])
    for name, seconds in parts:
        if seconds > 0:
            to.print(f"  {name:<9} {1e3 * seconds:8.3f} ms  {_PART_NAMES[name]}")
    to.print("")
    ranks = [
        RankTables(load.lookup + load.update, {"device": load.device, "cpu": load.host, "disk": load.disk})
        for load in plan.ranks
    ]
    sizes = {table.name: _size(plan, i) for i, table in enumerate(job.tables)}
    times = {
        table.name: sum(part.lookup + part.update for part in option.parts)
        for table, option in zip(job.tables, plan.options, strict=True)
    }
    room = job.limits.by_place()
    to.print(
        placement_text(
            job.tables,
            plan.placements,
            work.ranks,
            bytes_of=sizes,
            load_of=times,
            ranks=ranks,
            room=room,
        ),
        markup=False,
        soft_wrap=True,
    )
    for line in plan.over:
        to.print(f"\ndoes not fit: {line}")
    if written is not None:
        to.print(
            f"\nwrote {written}: train with tables.placement={written}, or edit it and pass it to --placement"
        )


_PART_NAMES = {
    "lookup": "rows read and summed by their owners",
    "exchange": "sums and gradients between ranks, as far as the bottom network does not hide them",
    "network": "dense layers, forward and backward",
    "update": "rows updated by their owners",
    "reduce": "dense gradients and rows of copied tables, as far as updates do not hide them",
    "fetch": "rows and ids of the next batch, as far as the step does not hide them",
    "program": "host overhead beside kernels",
}


_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp64": 8}
_FIXES = (
    "split",
    "place",
    "optimizer",
    "program",
    "wire",
    "weight",
    "ranks_per_node",
    "device_gib",
    "host_gib",
)
_FIX_LIST = ", ".join(_FIXES)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `stretto plan` that recommenders share with language models; None where not set."""

    model: str | None
    cluster: str | None
    batch: int | None
    fix: Sequence[str]
    precision: str | None
    placement: Path | None
    write: Path | None
    emit: str | None
    output: Path | None


def plan_tables(
    name: str | None,
    job: RecommenderConfig | None,
    options: PlanOptions,
    others: Mapping[str, object],
    as_json: bool,
) -> None:
    """Place the tables, or price a placement file, and report the result.

    Args:
        name: the job's name; None without a config.
        job: the config's job; None where `--model` names the recommender.
        others: options that only language models have, those that were placement.
    """
    from stretto.recommender.planner.place import SPLITS, DoesNotFit, place_tables, price_tables
    from stretto.recommender.planner.placement_file import placements_to_yaml, read_placements

    for name, value in others.items():
        if value:
            raise StrettoError(f"--{name} is for language models, not for a recommender", hint="leave it out")
    interop.check_trains_recommenders(options.emit)
    fixes = _fixes(options.fix)
    model, tables = _job(name, job, options, fixes)
    work = tables.work
    try:
        if options.placement is not None:
            plan = price_tables(tables, read_placements(options.placement, work.ranks, work.local))
        else:
            fixed = fixes.get("split")
            splits: list[Split] = [split for split in SPLITS if fixed is None or split in fixed]
            plan = place_tables(tables, splits, None if options.emit is None else interop.emit.holds)
    except DoesNotFit as error:
        if not as_json:
            raise
        report(
            {"model": model, "fits": False, "error": error.message, "hint": error.hint}, True, lambda _: None
        )
        raise say_no() from None
    if options.write is not None:
        about = (
            f"{model} on {work.ranks} x {work.cluster.device.name}, {work.batch} samples a step\n"
            f"predicted: {plan.samples_per_s:,.0f} samples/s; tables.placement takes this file, also edited"
        )
        text = placements_to_yaml(plan.placements, work.ranks, work.local, about, plan.why)
        write_text(options.write, text)
    emitted = (
        None if options.emit is None else interop.emit.emitted_tables(model, plan, job, fixes.get("wire"))
    )
    record = facts(model, plan, options.write)
    if emitted is None:
        report(record, as_json, lambda to: show(to, model, plan, options.write))
    else:
        if options.output is not None or not as_json:
            interop.print_emitted(emitted, options.output)
        shown = options.output is not None
        report(
            {**record, "emitted": emitted},
            as_json,
            lambda to: show(to, model, plan, options.write) if shown else None,
        )
    if plan.over:
        raise say_no()


# ---------------------------------------------------------------------- options


def _job(
    name: str | None,
    job: RecommenderConfig | None,
    options: PlanOptions,
    fixes: Mapping[str, tuple[str, ...]],
) -> tuple[str, TableJob]:
    """The model's name, and the planning job."""
    from stretto.recommender.placement import physical_tables
    from stretto.recommender.planner.job import table_job
    from stretto.recommender.planner.network_times import network_of
    from stretto.recommender.planner.table_times import program_of
    from stretto.recommender.shape import dlrm_preset, table_specs

    known = _known(fixes, options.precision)
    if job is None:
        assert options.model is not None
        if options.batch is None:
            raise StrettoError("--batch is missing", hint=f"as in --model {options.model} --batch 65536")
        shape = dlrm_preset(options.model)
        cluster, ranks = _cluster(options.cluster, None)
        network, tables = network_of(shape), table_specs(shape)
        return options.model.lower(), table_job(
            tables, cluster, ranks, options.batch, network=network, **known
        )
    cluster, ranks = _cluster(options.cluster, job.layout.ranks)
    specs = job.table_specs()
    usual: dict[str, Any] = {
        "optimizer": job.optim.tables.name,
        "weight_bytes": 8 if job.train.dtype == "float64" else 4,
        "wire_bytes": 8 if job.train.dtype == "float64" else 4 if job.tables.wire == "float32" else 2,
        "ranks_per_node": job.layout.ranks_per_node,
        "places": None if job.tables.place is None else [job.tables.place],
        "device_bytes": job.tables.device_gib and job.tables.device_gib * GIB,
        "host_bytes": job.tables.host_gib and job.tables.host_gib * GIB,
    }
    if not job.tables.overlap:
        usual["program"] = replace(program_of("stretto"), ahead=False, beside=False)
    batch = options.batch or job.batch.global_size
    network = network_of(job.shape(specs))
    return name or job.run.name, table_job(
        physical_tables(specs), cluster, ranks, batch, network=network, **(usual | known)
    )


def _cluster(name: str | None, ranks: int | None) -> tuple[Cluster, int]:
    """The cluster and the number of ranks: the name's (:N), else the config's, else one node."""
    from stretto.planner.machines.catalogue import find_cluster

    if name is None:
        if ranks is None:
            raise StrettoError("--cluster is missing", hint="as in --cluster dgx-a100, or dgx-a100:16")
        name = "here"
    plain, colon, size = name.rpartition(":")
    cluster = find_cluster(plain if colon and size.isdigit() else name)
    ranks_used = int(size) if colon and size.isdigit() else ranks or cluster.devices or cluster.node
    if ranks_used < 1:
        raise StrettoError(f"--cluster {name!r} has no device", hint="as in dgx-a100:8")
    cluster.sized(ranks_used)  # raises where it has fewer devices
    return cluster, ranks_used


def _fixes(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    fixes = dict[str, tuple[str, ...]]()
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise StrettoError(f"--fix {text!r} is not NAME=VALUE", hint="as in --fix split=row,data")
        if name not in _FIXES:
            near = nearest(name, _FIXES)
            hint = f"did you mean {near!r}? " * bool(near) + f"for a recommender: {_FIX_LIST}"
            raise StrettoError(f"--fix {text!r}: there is no choice {name!r}", hint=hint)
        fixes[name] = tuple(value.strip() for value in values.split(","))
    return fixes


def _known(fixes: Mapping[str, tuple[str, ...]], precision: str | None) -> dict[str, Any]:
    """Arguments of `table_job` from the command's options."""
    from stretto.recommender.placement import PLACES, SPLITS

    arguments = dict[str, Any]()
    for name, allowed in (("split", SPLITS), ("place", PLACES), ("wire", _BYTES), ("weight", _BYTES)):
        for value in fixes.get(name, ()):
            if value not in allowed:
                near = nearest(value, allowed)
                hint = f"did you mean {near!r}?" if near else ", ".join(allowed)
                raise StrettoError(f"--fix {name}={value} is none of {', '.join(allowed)}", hint=hint)
    if "place" in fixes:
        arguments["places"] = [place for place in PLACES if place in fixes["place"]]
    for name in ("wire", "weight"):
        if name in fixes:
            arguments[f"{name}_bytes"] = _BYTES[fixes[name][0]]
    for name in ("optimizer", "program"):
        if name in fixes:
            arguments[name] = fixes[name][0]
    for name, argument in (("device_gib", "device_bytes"), ("host_gib", "host_bytes")):
        if name in fixes:
            arguments[argument] = _number(name, fixes[name][0]) * GIB
    if "ranks_per_node" in fixes:
        arguments["ranks_per_node"] = max(1, int(_number("ranks_per_node", fixes["ranks_per_node"][0])))
    if precision is not None:
        if precision not in ("bf16", "fp16", "tf32", "fp32"):
            raise StrettoError(f"--precision is {precision!r}", hint="one of bf16, fp16, tf32, fp32")
        arguments["precision"] = precision
    return arguments


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise StrettoError(f"--fix {name}={text} is no number above 0", hint=f"as in --fix {name}=4")
    return value
