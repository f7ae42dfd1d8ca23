"""`stretto plan` for a recommender: the placement of its tables, and predicted samples per second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cli import interop
from stretto.cli.options import check_choice
from stretto.cli.output import say_no
from stretto.cli.report import CommandReport
from stretto.errors import StrettoError, counted, nearest

if TYPE_CHECKING:
    from stretto.cli.plan_options import PlanOptions
    from stretto.planner.machines.cluster import Cluster
    from stretto.recommender.config.schema import RecommenderConfig
    from stretto.recommender.placement import Split
    from stretto.recommender.planner.job import TableJob
    from stretto.recommender.planner.place import TablePlan


GIB = 2**30
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
_LANGUAGE_OPTIONS = (
    "sequence",
    "target_sequence",
    "max_gpus",
    "html",
    "row",
    "asynchronous",
    "wide",
    "software",
    "what_if",
)
_PARTS = {  # of a step
    "lookup": "rows read and summed by their owners",
    "exchange": "sums and gradients between ranks, as far as the bottom network does not hide them",
    "network": "dense layers, forward and backward",
    "update": "rows updated by their owners",
    "reduce": "dense gradients and rows of copied tables, as far as updates do not hide them",
    "fetch": "rows and ids of the next batch, as far as the step does not hide them",
    "program": "host overhead beside kernels",
}


def plan_recommender(options: PlanOptions, config: RecommenderConfig | None) -> None:
    """Place the tables, or price a placement file, and report the result.

    Args:
        config: the recommender's config, or None if `--model` names it.
    """
    from stretto.recommender.planner.place import SPLITS, DoesNotFit, place_tables, price_tables
    from stretto.recommender.planner.placement_file import placements_to_yaml, read_placements

    for name in _LANGUAGE_OPTIONS:
        if getattr(options, name):
            option = name.replace("_", "-")
            raise StrettoError(
                f"--{option} is for language models, not for a recommender", hint="leave it out"
            )
    target = options.emit or options.target
    interop.check_trains_recommenders(target)
    fixes = _fixes(options.fix or [])
    model, job = _table_job(options, config, fixes)
    work = job.work
    try:
        if options.placement is not None:
            plan = price_tables(job, read_placements(options.placement, work.ranks, work.local))
        else:
            splits: list[Split] = [split for split in SPLITS if split in fixes.get("split", SPLITS)]
            plan = place_tables(job, splits, None if target is None else interop.emit.holds)
    except DoesNotFit as error:
        if not options.as_json:
            raise
        report = CommandReport({"model": model, "fits": False, "error": error.message, "hint": error.hint})
        report.print(options.as_json)
        raise say_no() from None

    emitted = None
    if options.emit is not None:
        emitted = interop.emit.emitted_tables(model, plan, config, fixes.get("wire"))
        if options.output is not None or not options.as_json:
            interop.print_emitted(emitted, options.output)
    report = CommandReport(
        lambda: _record(model, plan, options.write) | ({} if emitted is None else {"emitted": emitted})
    )
    if emitted is None or options.output is not None:
        _add_placement(report, model, plan)
    if options.write is not None:
        about = (
            f"{model} on {work.ranks} x {work.cluster.device.name}, {work.batch} samples a step\n"
            f"predicted: {plan.samples_per_s:,.0f} samples/s; tables.placement takes this file, also edited"
        )
        placements = placements_to_yaml(plan.placements, work.ranks, work.local, about, plan.explanations)
        note = f": train with tables.placement={options.write}, or edit it and pass it to --placement"
        report.line()
        report.write(options.write, placements, note=note)
    report.print(options.as_json)
    if plan.over:
        raise say_no()


# ---------------------------------------------------------------------- the report


def _record(model: str, plan: TablePlan, write: Path | None) -> dict[str, Any]:
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
                "gib": _size(plan, index) / GIB,
                "why": plan.explanations[table.name],
            }
            for index, (table, popularity, placement, option) in enumerate(
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
        "written": None if write is None else str(write),
    }


def _size(plan: TablePlan, index: int) -> float:
    """Bytes of one copy of a table with its optimizer states."""
    table = plan.job.tables[index]
    return table.rows * sum(plan.job.work.row_bytes(table.dim))


def _add_placement(report: CommandReport, model: str, plan: TablePlan) -> None:
    from stretto.recommender.view import RankTables, placement_text

    job, work = plan.job, plan.job.work
    device = f"{work.ranks} x {work.cluster.device.name} ({work.cluster.name})"
    report.line(
        f"{model} on {device}, {work.batch:,} samples a step, {job.precision}, tables: {work.optimizer}"
    )
    uniform = sum(popularity.source == "uniform" for popularity in job.popularity)
    if uniform:
        report.line(f"no popularity of ids is known for {counted(uniform, 'table')}: taken as uniform")
    report.line(f"\n{plan.samples_per_s:,.0f} samples/s, {1e3 * plan.seconds:.3g} ms a step:")
    for name, seconds in sorted(plan.step.parts.items(), key=lambda part: -part[1]):
        if seconds > 0:
            report.line(f"  {name:<9} {1e3 * seconds:8.3f} ms  {_PARTS[name]}")
    placement = placement_text(
        job.tables,
        plan.placements,
        work.ranks,
        bytes_of={table.name: _size(plan, index) for index, table in enumerate(job.tables)},
        load_of={
            table.name: sum(part.lookup + part.update for part in option.parts)
            for table, option in zip(job.tables, plan.options, strict=True)
        },
        ranks=[
            RankTables(
                load.lookup + load.update, {"device": load.device, "cpu": load.host, "disk": load.disk}
            )
            for load in plan.ranks
        ],
        room=job.limits.by_place(),
    )
    report.line(f"\n{placement}")
    report.lines(f"\ndoes not fit: {problem}" for problem in plan.over)


# ---------------------------------------------------------------------- options


def _table_job(
    options: PlanOptions, config: RecommenderConfig | None, fixes: Mapping[str, tuple[str, ...]]
) -> tuple[str, TableJob]:
    """The model's name, and the planning job."""
    from stretto.recommender.planner.job import table_job
    from stretto.recommender.planner.network_times import network_of
    from stretto.recommender.shape import dlrm_preset, table_specs

    arguments = _arguments(fixes, options.precision)
    if config is None:
        model = options.model
        assert model is not None
        if options.batch is None:
            raise StrettoError("--batch is missing", hint=f"as in --model {model} --batch 65536")
        shape = dlrm_preset(model)
        cluster, ranks = _cluster(options.cluster, None)
        network = network_of(shape)
        job = table_job(table_specs(shape), cluster, ranks, options.batch, network=network, **arguments)
        return model.lower(), job
    cluster, ranks = _cluster(options.cluster, config.layout.ranks)
    job = configured_job(config, cluster, ranks, options.batch, **arguments)
    return Path(options.config).stem if options.config else config.run.name, job


def configured_job(
    config: RecommenderConfig, cluster: Cluster, ranks: int, batch: int | None = None, **arguments: Any
) -> TableJob:
    """Return the placement problem of a config, whose click log is not read.

    Args:
        batch: samples of a step instead of the config's.
        arguments: of `table_job`, instead of what the config says.
    """
    from stretto.recommender.placement import physical_tables
    from stretto.recommender.planner.job import table_job
    from stretto.recommender.planner.network_times import network_of
    from stretto.recommender.planner.table_times import program_of

    tables, element = config.tables, 8 if config.train.dtype == "float64" else 4
    configured: dict[str, Any] = {
        "optimizer": config.optim.tables.name,
        "weight_bytes": element,
        "wire_bytes": 2 if element == 4 and tables.wire != "float32" else element,
        "ranks_per_node": config.layout.ranks_per_node,
        "places": None if tables.place is None else [tables.place],
        "device_bytes": tables.device_gib and tables.device_gib * GIB,
        "host_bytes": tables.host_gib and tables.host_gib * GIB,
    }
    if not tables.overlap:
        configured["program"] = replace(program_of("stretto"), prefetch=False, overlap=False)
    specs = config.table_specs()
    configured["network"] = network_of(config.shape(specs))
    size = batch or config.batch.global_size
    return table_job(physical_tables(specs), cluster, ranks, size, **(configured | arguments))


def _cluster(name: str | None, ranks: int | None) -> tuple[Cluster, int]:
    """The cluster and the number of ranks: that of the name (:N), else of the config, else one node."""
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
    cluster.sized(ranks_used)  # raises if it has fewer devices
    return cluster, ranks_used


def _fixes(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    fixes = dict[str, tuple[str, ...]]()
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise StrettoError(f"--fix {text!r} is not NAME=VALUE", hint="as in --fix split=row,data")
        if name not in _FIXES:
            similar = nearest(name, _FIXES)
            hint = f"did you mean {similar!r}? " * bool(similar) + f"for a recommender: {', '.join(_FIXES)}"
            raise StrettoError(f"--fix {text!r}: there is no choice {name!r}", hint=hint)
        fixes[name] = tuple(value.strip() for value in values.split(","))
    return fixes


def _arguments(fixes: Mapping[str, tuple[str, ...]], precision: str | None) -> dict[str, Any]:
    """Arguments of `table_job` from the command's options."""
    from stretto.recommender.placement import PLACES, SPLITS

    arguments = dict[str, Any]()
    for name, allowed in (("split", SPLITS), ("place", PLACES), ("wire", _BYTES), ("weight", _BYTES)):
        for value in fixes.get(name, ()):
            check_choice(f"--fix {name}", value, allowed)
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
            arguments[argument] = _positive(name, fixes[name][0]) * GIB
    if "ranks_per_node" in fixes:
        arguments["ranks_per_node"] = max(1, int(_positive("ranks_per_node", fixes["ranks_per_node"][0])))
    if precision is not None:
        check_choice("--precision", precision, ("bf16", "fp16", "tf32", "fp32"))
        arguments["precision"] = precision
    return arguments


def _positive(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise StrettoError(f"--fix {name}={text} is no number above 0", hint=f"as in --fix {name}=4")
    return value
