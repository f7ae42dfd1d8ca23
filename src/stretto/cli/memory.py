"""`stretto memory`: the memory of every rank of a job, by tensor and by kind."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.options import ConfigFile, Json, Overrides
from stretto.cli.output import command_app, memory_size
from stretto.cli.report import Cell, CommandReport, number, size, text
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.job.job import Job
    from stretto.layout.shards import Mode
    from stretto.planner.memory.ranks import MemoryJob, RankMemory
    from stretto.recommender.config.schema import RecommenderConfig
    from stretto.run.train.memory_measured import MeasuredMemory


app = command_app()

_KINDS = ("weights", "gradients", "optimizer", "activations", "ends", "messages", "transient", "batch")
# shown if some rank has any: 16-bit weights' masters, transiently gathered tensors, offloaded ones
_RARE_KINDS = ("masters", "gathered", "open", "versions", "saving", "host", "disk")


@app.command(epilog="Example: stretto memory configs/llama-1b-64gpu.yaml layout.sequence_parallel=true")
def memory(
    path: ConfigFile,
    overrides: Overrides = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Also measure, and count the bytes sent: train two steps on local ranks, on random tokens.",
        ),
    ] = False,
    modes: Annotated[
        bool,
        typer.Option(
            "--modes",
            help="Compare what each data-parallel mode keeps on a rank, and the ZeRO paper's count.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Predict the memory of every rank, by tensor and by kind.

    Lists a block's tensors with their formulas, then weights, gradients, optimizer states, activations in
    flight, embedding and head, messages and temporaries at each rank's fullest moment.

    Only the process's tensors are counted. A GPU needs more for its context, the libraries' buffers and
    allocator fragmentation, several GiB in all.

    Of a recommender, the memory of tables on each rank is predicted, and measured with all other tensors on
    the job's clicks.
    """
    from stretto.job.rules import problems
    from stretto.planner.memory.job import memory_of
    from stretto.recommender.config.load import load_config
    from stretto.run.config.job import job_of
    from stretto.run.config.schema import TrainConfig

    config = load_config(path, overrides or [])
    if not isinstance(config, TrainConfig):
        if modes:
            raise StrettoError("--modes is for language models: a recommender's networks are copied")
        _recommender_report(config, measure).print(as_json)
        return
    job = job_of(config)
    if modes:
        _mode_report(job).print(as_json)
        return
    if wrong := problems(job):  # files and devices, which may be elsewhere, are not checked
        raise wrong[0]
    if not measure:
        _rank_report(memory_of(job, separate_gradients=False), None).print(as_json)
        return
    from stretto.engine.parallel.tensor.matmul import ONEDNN
    from stretto.run.launch.local import check_ranks, run_ranks
    from stretto.run.train.memory_measured import measure_rank

    job = replace(job, async_save=False)  # the steps save nothing
    check_ranks(job.layout.world)
    train = config.train
    rank_settings = (train.device, train.threads, train.backend)
    measured = run_ranks(job.layout.world, measure_rank, job, *rank_settings, threads=train.threads)
    # the steps drain; oneDNN forms weight gradients in a buffer of their own
    separate_gradients = ONEDNN and job.precision.dtype == "float32"
    predicted = memory_of(job, job.program(), separate_gradients=separate_gradients)
    _rank_report(predicted, measured).print(as_json)


def _rank_report(predicted: MemoryJob, measured: Sequence[MeasuredMemory] | None) -> CommandReport:
    """The memory of every rank, beside what was measured."""
    from stretto.planner.counts.published_activations import published_formula
    from stretto.planner.memory.alternatives import memory_suggestions
    from stretto.planner.memory.layer import layer_saved, total
    from stretto.planner.memory.ranks import rank_memory, rank_record

    ranks = rank_memory(predicted)
    fullest = max(ranks, key=lambda rank: rank.total)
    # blocks may differ in recomputation: most have this
    recompute = max(predicted.modes, key=predicted.modes.count, default=predicted.compute.recompute)
    compute = replace(predicted.compute, recompute=recompute)
    saved = layer_saved("block", predicted.shape, compute)
    published = published_formula(predicted.shape, compute)
    settings = memory_suggestions(predicted)
    compared = [_measured_record(rank, ranks[rank.pipeline]) for rank in measured or ()]

    report = CommandReport(
        {
            "block": [{"name": t.name, "bytes": t.bytes, "formula": t.formula} for t in saved],
            "published": None if published is None else asdict(published),
            "modes": list(predicted.modes),
            "ranks": [rank_record(rank) for rank in ranks],
            "fullest": ranks.index(fullest),
            "advice": [asdict(setting) for setting in settings],
            "measured": None if measured is None else compared,
        }
    )
    rows: list[tuple[Cell, ...]] = [(tensor.name, tensor.bytes, tensor.formula) for tensor in saved]
    rows += [(), ("sum", total(saved), "")]
    if published is not None:
        rows.append((published.source, round(published.bytes), published.formula))
    report.table([text("one block keeps"), number("bytes", ","), text("formula")], rows)
    report.line()
    # ranks that differ in other axes only hold the same
    report.table(
        [text("rank"), *map(size, (*_KINDS, "total")), number("in flight")],
        [
            (
                rank.rank,
                *(getattr(rank, kind) for kind in _KINDS),
                rank.total,
                " ".join(map(str, rank.flights.values())),
            )
            for rank in ranks
        ],
    )
    if rare := [kind for kind in _RARE_KINDS if any(getattr(rank, kind) for rank in ranks)]:
        report.table(
            [text("rank"), *map(size, rare)],
            [(rank.rank, *(getattr(rank, kind) for kind in rare)) for rank in ranks],
        )
    flights = ", ".join(
        f"stage {stage}: {count} x {memory_size(fullest.stages[stage])}"
        for stage, count in fullest.flights.items()
    )
    report.line(
        f"fullest: pipeline rank {fullest.rank} during {fullest.at}; microbatches in flight there: {flights}"
    )
    for setting in settings:
        if setting.cheaper:
            report.line(
                f"{setting.setting} saves {memory_size(setting.saved)} of {memory_size(fullest.total)}"
            )
    if measured is not None:
        columns = [text("rank"), number("pipeline rank"), size("measured"), size("predicted")]
        columns += [number("difference", "+.2%"), size("between actions"), size("predicted")]
        names = ("rank", "pipeline", "peak", "predicted_peak", "error", "held", "predicted_held")
        report.line()
        report.table(columns, [[rank[name] for name in names] for rank in compared])
    return report


def _recommender_report(config: RecommenderConfig, measure: bool) -> CommandReport:
    """The memory of tables on every rank, and the bytes sent in a step, beside what was measured."""
    from stretto.recommender.config.check import check_tables
    from stretto.recommender.planner.place import price_tables
    from stretto.recommender.train.clicks import prepare_clicks
    from stretto.recommender.train.placement import place, placement_job
    from stretto.run.launch.local import check_ranks, run_ranks

    clicks = prepare_clicks(config, quiet=True)
    for problem in check_tables(config, list(clicks.tables)):
        raise problem
    placements = place(config, clicks)
    plan = price_tables(placement_job(config, clicks), placements)
    measured: Sequence[MeasuredMemory | None] = [None] * config.layout.ranks
    if measure:
        from stretto.recommender.train.measured import measure_recommender_rank

        check_ranks(config.layout.ranks)
        arguments = (config, clicks, placements)
        threads = config.train.threads
        measured = run_ranks(config.layout.ranks, measure_recommender_rank, *arguments, threads=threads)
    tables = [round(load.device) for load in plan.ranks]
    report = CommandReport(
        {
            "ranks": [
                {
                    "rank": rank,
                    "tables": round(load.device),
                    "host": round(load.host),
                    "disk": round(load.disk),
                }
                for rank, load in enumerate(plan.ranks)
            ],
            "predicted": {"seconds": plan.seconds, "sent": round(plan.sent)},
            "measured": [
                {"rank": each.rank, "peak": each.peak, "kinds": each.kinds, "sent": each.sent}
                for each in measured
                if each is not None
            ]
            or None,
        }
    )
    columns = [text("rank"), *map(size, ("tables, predicted", "in host memory", "in files"))]
    columns += [size("tables, measured"), size("all, measured"), size("sent, measured")]
    report.table(
        columns,
        [
            [
                rank,
                tables[rank],
                round(load.host) or None,
                round(load.disk) or None,
                each and each.kinds.get("tables", 0),
                each and each.peak,
                each and each.sent,
            ]
            for rank, (load, each) in enumerate(zip(plan.ranks, measured, strict=True))
        ],
        drop_empty=True,
    )
    report.line(
        f"predicted: {plan.seconds:.3g} s a step, {memory_size(round(plan.sent))} sent by the busiest rank"
    )
    return report


def _measured_record(measured: MeasuredMemory, predicted: RankMemory) -> dict[str, Any]:
    return {
        "rank": measured.rank,
        "pipeline": measured.pipeline,
        "peak": measured.peak,
        "held": measured.between_actions,
        "kinds": measured.kinds,
        "sent": measured.sent,
        "predicted_peak": predicted.total,
        "predicted_held": predicted.between_actions,
        "error": predicted.total / measured.peak - 1,
    }


def _mode_report(job: Job) -> CommandReport:
    """The memory in every data-parallel mode that is legal on the job's layout.

    Raises:
        StrettoError: the job is not legal in any mode.
    """
    from stretto.job.data_parallel import MODES, DataParallelSettings
    from stretto.job.rules import problems
    from stretto.planner.memory.alternatives import compare_modes
    from stretto.planner.memory.job import memory_of

    # shard sizes and the moments of reductions belong to the job's own mode
    jobs: dict[Mode, Job] = {
        mode: replace(job, dp=DataParallelSettings(mode=mode, offload=job.dp.offload, path=job.dp.path))
        for mode in MODES
    }
    jobs[job.dp.mode] = job
    wrong = {mode: problems(variant) for mode, variant in jobs.items()}
    legal: list[Mode] = [mode for mode in MODES if not wrong[mode]]
    if not legal:
        raise wrong["ddp"][0]
    compared = compare_modes(legal, lambda mode: memory_of(jobs[mode]))
    refused: dict[Mode, str] = {mode: wrong[mode][0].message for mode in MODES if wrong[mode]}

    report = CommandReport(
        {
            "copies": job.copies,
            "modes": [{**asdict(row), "states": row.states} for row in compared],
            "refused": refused,
        }
    )
    offloaded = [kind for kind in ("host", "disk") if any(getattr(row, kind) for row in compared)]
    kinds = ["weights", "gradients", "masters", "optimizer", "states", *offloaded, "peak"]
    report.table(
        [text("mode"), *map(size, kinds), size("ZeRO paper")],
        [
            (
                row.mode,
                *(getattr(row, kind) for kind in kinds),
                None if row.published is None else round(row.published),
            )
            for row in compared
        ],
    )
    ranks = f"{job.copies} ranks have" if job.copies > 1 else "one rank has"
    report.line(f"on the fullest rank; {ranks} the same parameters")
    wider = "" if job.precision.half else "; the weights here are wider"
    report.line(
        "the paper counts 2 + 2 + 12 bytes a parameter: 16-bit weights and gradients, AdamW in 32 bits"
        + wider
    )
    report.lines(f"{mode}: {reason}" for mode, reason in refused.items())
    return report
