"""`stretto compare`: run or predict every combination of settings of a config, side by side."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.options import ConfigFile, Json, Page, grouped
from stretto.cli.output import command_app, memory_size, say_no
from stretto.cli.report import Cell, ColumnStyle, CommandReport, number, size, text
from stretto.errors import PackageMissing, StrettoError, counted

if TYPE_CHECKING:
    from stretto.job.job import Job
    from stretto.recommender.config.load import AnyConfig
    from stretto.run.compare.combinations import Combination
    from stretto.run.compare.result import CombinationResult, RunComparison

app = command_app()

# fields that a comparison sets itself, and what to use instead
_SET_BY_COMPARE = {
    "train.steps": "--steps and --warmup say how long each runs",
    "run.name": "--out names the folder",
    "run.dir": "--out names the folder",
    "checkpoint.every": "no checkpoint is kept",
    "checkpoint.resume": "what is done is not run again, unless with --again",
}
_INTERRUPTED = 130
# columns that a narrow terminal leaves out, in this order
_OPTIONAL = ("pred. sent", "pred. memory", "interval", "error", "sent", "memory", "min-max", "fits")


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of `stretto compare`."""

    path: ConfigFile
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[a.b=c,d ...]",
            help="Fields to override; one with several values is varied. A value with a comma goes in "
            "brackets or quotes, as in layout.stages=[3,3],[2,4].",
        ),
    ] = None
    repeats: Annotated[
        int, typer.Option(min=1, help="Rounds, in each of which every combination is run once.")
    ] = 3
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure in each run.")] = 20
    warmup: Annotated[int, typer.Option(min=0, help="Steps before them that do not count.")] = 3
    predict: Annotated[bool, typer.Option("--predict", help="Predict every combination, run none.")] = False
    cluster: Annotated[
        str | None,
        typer.Option(help="With --predict: a cluster, as `stretto predict` takes it; default: this machine."),
    ] = None
    baseline: Annotated[
        str | None,
        typer.Option(
            help="The combination that others are compared with, as in 'tp=1 mode=ddp'; default: the first."
        ),
    ] = None
    limit: Annotated[int, typer.Option(min=1, help="Most combinations to accept.")] = 24
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results; default: compare-NAME in run.dir.")
    ] = None
    again: Annotated[bool, typer.Option("--again", help="Also run what has a result in the folder.")] = False
    memory: Annotated[
        bool,
        typer.Option(help="Also measure traffic, and memory on the CPU, in two further steps."),
    ] = True
    html: Page = None
    as_json: Json = False


@app.command(
    epilog="Example: stretto compare configs/quickstart.yaml layout.pp=1,2 dp.mode=ddp,zero1 --steps 20 "
    "--html compare.html"
)
@grouped(CompareOptions)
def compare(options: CompareOptions) -> None:
    """Train every combination of settings for some steps, in rounds, and compare them.

    Shows step time (median and range of the rounds), the speed relative to the baseline with its 95%
    interval, tokens/s, memory, traffic and loss, measured beside predicted, fastest first, and whether
    layouts that compute the same have the same loss. A run that fails is a row with its error; settings that
    do not go together are listed with the reason.

    Warns if other processes use the machine. Each result is kept in a file and not run again, so an
    interrupted comparison continues.

    Exit code 1: a run failed, or nothing could be predicted.
    """
    from stretto.run.compare.combinations import combinations, matching, short_names
    from stretto.run.compare.result import RunComparison, mathematics
    from stretto.run.config.schema import TrainConfig

    combined = combinations(options.overrides or [])
    _check_options(options, combined)
    names = short_names(combined)
    baseline = names[0 if options.baseline is None else matching(options.baseline, combined, names)]
    jobs = [_compared_job(options, name, each) for name, each in zip(names, combined, strict=True)]
    legal = [job for job in jobs if job.config is not None]
    if not legal:
        raise StrettoError(f"no combination can run; {names[0]}: {jobs[0].pending.error}")
    stopped = False
    if options.predict:
        results = [_predict(job, options.cluster) for job in legal]
        title = f"predicted on {options.cluster or 'this machine'}"
    else:
        results, stopped = _run(options, legal)
        counts = sorted({len(result.repeats) for result in results if result.repeats}) or [0]
        runs = counted(counts[0], "run") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} runs"
        title = f"median of {runs}, each of {options.steps} steps after {options.warmup}"
    by_name = {result.name: result for result in results}
    comparison = RunComparison(
        title=f"{options.path}: {title}",
        results=[by_name.get(job.pending.name, job.pending) for job in jobs],
        baseline=baseline,
        kinds={
            job.pending.fingerprint: mathematics(job.config, job.job)
            for job in jobs
            if isinstance(job.config, TrainConfig) and job.job is not None
        },
    )
    _report(comparison, options.html).print(options.as_json)
    if stopped:
        raise typer.Exit(_INTERRUPTED)
    if not comparison.ranked or any(result.status == "failed" for result in results):
        raise say_no()


def _check_options(options: CompareOptions, combined: Sequence[Combination]) -> None:
    if options.cluster is not None and not options.predict:
        raise StrettoError("--cluster is for predictions, and runs are on this machine", hint="add --predict")
    if len(combined) > options.limit:
        raise StrettoError(
            f"there are {len(combined)} combinations, more than --limit {options.limit}",
            hint=f"vary fewer fields, or --limit {len(combined)}",
        )
    if not options.predict:
        for field, _ in combined[0].settings:
            if field in _SET_BY_COMPARE:
                raise StrettoError(f"compare sets {field} itself", hint=_SET_BY_COMPARE[field])


# ------------------------------------------------------------------ combinations as jobs


@dataclass(frozen=True, kw_only=True)
class ComparedJob:
    """A combination as a job.

    Attributes:
        pending: its result, with the reason only if it is refused.
        config: None if it is refused.
        overrides: those of the combination, and those that a comparison sets.
        job: the job of a language model, None of a recommender.
    """

    pending: CombinationResult
    config: AnyConfig | None = None
    overrides: Sequence[str] = ()
    job: Job | None = None


def _compared_job(options: CompareOptions, name: str, combination: Combination) -> ComparedJob:
    """Check a combination: to be run, it must fit this machine; to be predicted, it need not."""
    from stretto.cli.jobs import check_job, ranks_of
    from stretto.job.rules import problems
    from stretto.recommender.config.load import load_config
    from stretto.run.compare.result import CombinationResult, fingerprint
    from stretto.run.config.job import job_of
    from stretto.run.config.load import plain_values
    from stretto.run.config.required import check_required
    from stretto.run.config.schema import TrainConfig
    from stretto.run.launch.local import check_ranks

    overrides: Sequence[str] = combination.overrides
    pending = CombinationResult(name=name, overrides=combination.overrides, status="refused")
    steps = None if options.predict else options.warmup + options.steps
    job = None
    try:
        if steps is not None:
            overrides = [*overrides, *_short_run(load_config(options.path, overrides), steps)]
        config = load_config(options.path, overrides)
        if steps is not None:
            check_job(config)
            check_ranks(ranks_of(config)[0])
        if isinstance(config, TrainConfig):
            job = job_of(config)
            if wrong := problems(job):
                raise wrong[0]
    except StrettoError as error:
        reason = error.message + (f" ({error.hint})" if error.hint else "")
        reason += f", and {counted(len(error.others), 'more problem')}" if error.others else ""
        return ComparedJob(pending=replace(pending, error=reason))
    if steps is not None:
        check_required(config)
    pending = replace(pending, fingerprint=fingerprint(plain_values(config), steps, options.warmup))
    return ComparedJob(pending=pending, config=config, overrides=overrides, job=job)


def _short_run(config: AnyConfig, steps: int) -> list[str]:
    """Overrides of a short run that is only measured: its length, and nothing but training."""
    from stretto.run.config.schema import TrainConfig

    settings = {
        "train.steps": steps,
        "eval.every": "null",
        "checkpoint.every": "null",
        "checkpoint.resume": "never",
        "metrics.to": "[]",
        "metrics.tensorboard_dir": "null",
        "metrics.profile": "null",
        "metrics.profile_memory": "[]",
        "metrics.spans": "false",
    }
    if isinstance(config, TrainConfig):
        settings |= {"sample.tokens": 0, "metrics.trace": 0}
    if "run.dir" in config.required:
        settings["run.dir"] = "runs"
    return [f"{field}={value}" for field, value in settings.items()]


# ------------------------------------------------------------------ predictions and runs


def _predict(compared: ComparedJob, cluster: str | None) -> CombinationResult:
    from stretto.cli.plan_recommender import configured_job
    from stretto.planner.estimate import estimate
    from stretto.planner.machines.catalogue import cluster_here, find_cluster
    from stretto.recommender.config.placement import configured_placements
    from stretto.recommender.config.schema import RecommenderConfig
    from stretto.recommender.planner.place import place_tables, price_tables
    from stretto.run.train.prediction import local_device_kind, predict

    job, config = compared.job, compared.config
    assert config is not None
    try:
        if isinstance(config, RecommenderConfig):
            ranks = config.layout.ranks
            if cluster is None:
                machine = cluster_here(device=local_device_kind(config.train.device))
            else:
                machine = find_cluster(cluster).sized(ranks)
            tables = configured_job(config, machine, ranks)
            placements = configured_placements(config.tables, config.layout, config.table_specs())
            plan = place_tables(tables) if placements is None else price_tables(tables, placements)
            return replace(
                compared.pending,
                status="predicted",
                unit="samples/s",
                predicted=plan.seconds,
                predicted_speed=plan.samples_per_s,
                traffic=round(plan.sent),
                verdict="does not fit" if plan.over else "fits",
            )
        assert job is not None
        if cluster is None:
            predicted = predict(job, config.train.device, config.train.threads)
        else:
            predicted = estimate(job, find_cluster(cluster).sized(job.layout.world))
    except StrettoError as error:
        return replace(compared.pending, error=error.message)
    result = replace(
        compared.pending,
        status="predicted",
        predicted=predicted.seconds,
        low=predicted.low,
        high=predicted.high,
        predicted_speed=predicted.tokens_per_s,
        verdict=None if predicted.memory is None else predicted.memory.verdict,
    )
    return _with_counts(result, job)


def _run(options: CompareOptions, legal: Sequence[ComparedJob]) -> tuple[list[CombinationResult], bool]:
    """Run all legal combinations; return their results, and whether Ctrl-C ended them early."""
    from stretto.run.compare.runs import PendingRun, Runner

    if find_spec("torch") is None:  # every run, in a process of its own, would end so
        raise PackageMissing("stretto compare", "torch")
    config = legal[0].config
    assert config is not None
    runner = Runner(
        path=options.path,
        folder=options.out or Path(config.run.dir) / f"compare-{config.run.name}",
        warmup=options.warmup,
        steps=options.steps,
        repeats=options.repeats,
        memory=options.memory,
        again=options.again,
    )
    runs = [PendingRun(pending=each.pending, overrides=each.overrides) for each in legal]
    with _sigterm_as_interrupt():
        results, stopped = runner.run_all(runs, lambda line: print(line, file=sys.stderr, flush=True))
    counted = [
        _with_counts(result, each.job) if each.job is not None and result.status == "done" else result
        for result, each in zip(results, legal, strict=True)
    ]
    return counted, stopped


def _with_counts(result: CombinationResult, job: Job) -> CombinationResult:
    """Add what the planner counts: the fullest rank's memory, and bytes that a rank sends."""
    from stretto.planner.memory.job import memory_of
    from stretto.planner.memory.ranks import rank_memory
    from stretto.planner.rank_step.counts import bytes_sent

    counted = memory_of(job)
    memory = result.predicted_memory or max(rank.total for rank in rank_memory(counted))
    return replace(result, predicted_memory=memory, traffic=bytes_sent(job, counted))


@contextmanager
def _sigterm_as_interrupt() -> Generator[None]:
    """Stop as with Ctrl-C, so that no run outlives the comparison."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ------------------------------------------------------------------ the report


def _report(comparison: RunComparison, html: Path | None) -> CommandReport:
    """The results: fastest first, then those without figures, and whether losses agree."""
    base = comparison.base
    report = CommandReport(
        lambda: {
            "title": comparison.title,
            "baseline": None if base is None else base.name,
            "ranking": [result.name for result in comparison.ranked],
            "results": [comparison.as_record(result) for result in comparison.results],
            "losses": comparison.losses,
            "warnings": comparison.warnings,
        }
    )
    columns, rows = _table(comparison)
    lines = [*comparison.verdicts, *comparison.warnings, *comparison.losses]
    untimed = [f"{result.status}: {result.name}: {result.error}" for result in comparison.untimed]
    report.line(comparison.title)
    if rows:
        report.table(columns, rows, optional=_OPTIONAL, drop_empty=True)
    if base is not None and len(rows) > 1:
        report.line(f"* baseline: {base.name}")
    report.lines([*untimed, *lines])
    if html is not None:
        from stretto.view.page import recorded_page

        cells = [[column.cell(cell) for column, cell in zip(columns, row, strict=True)] for row in rows]
        filled = [index for index in range(len(columns)) if any(row[index] for row in cells)]
        title = f"Comparison of {comparison.title}"
        answer = {
            "title": title,
            "lines": lines,
            "rows": [[line[index] for index in filled] for line in [[c.title for c in columns], *cells]]
            if rows
            else [],
            "figures": _figures(comparison),
            "untimed": untimed,
        }
        page = recorded_page(title, "comparison", {"comparison": answer})
        report.write(html, page)
    return report


def _table(comparison: RunComparison) -> tuple[list[ColumnStyle], list[list[Cell]]]:
    """Columns and rows, fastest first."""
    ranked = comparison.ranked
    samples = any(result.unit == "samples/s" for result in ranked)
    columns = [
        text(""),
        text("combination"),
        number("step s", ".4g"),
        number("min-max"),
        number("pred. s", ".4g"),
        number("interval"),
        number("error", "+.0%"),
        number("speed"),
        number("samples/s" if samples else "tokens/s", ",.0f"),
        size("memory"),
        number("pred. memory"),
        number("fits"),
        size("sent"),
        number("pred. sent"),
        number("loss", ".4f"),
    ]
    rows = list[list[Cell]]()
    for rank, result in enumerate(ranked, 1):
        speedup, measured = comparison.speedup(result), result.status == "done"
        both = result.median is not None and result.predicted is not None
        rows.append(
            [
                f"{rank}{'*' if comparison.base is result else ''}",
                result.name,
                result.median,
                f"{result.fastest:.3g}-{result.slowest:.3g}" if len(result.repeats) > 1 else None,
                result.predicted,
                None
                if measured or result.low is None or result.high is None
                else f"{result.low:.3g}-{result.high:.3g}",
                (result.predicted or 0.0) / (result.median or 1.0) - 1 if both else None,
                None if speedup is None else str(speedup),
                result.speed,
                result.memory,
                _predicted_size(result.predicted_memory, result.memory),
                result.verdict,
                result.sent,
                _predicted_size(result.traffic, result.sent),
                result.loss,
            ]
        )
    return columns, rows


def _predicted_size(predicted: int | None, measured: int | None) -> str | None:
    """Such as "1.25 GiB (-2%)", with the error."""
    if predicted is None:
        return None
    error = f" ({round(predicted / measured - 1, 3) + 0.0:+.1%})" if measured else ""  # no -0.0%
    return memory_size(predicted) + error


def _figures(comparison: RunComparison) -> list[dict[str, Any]]:
    """Bars of step times, memory and traffic, as the page draws them (view/front/recorded.js)."""

    def bar(
        result: CombinationResult,
        value: float | None,
        predicted: float | None,
        show: Callable[[Any], str],
        interval: tuple[float | None, float | None] = (None, None),
    ) -> dict[str, Any]:
        pairs = ((value, "measured"), (predicted, "predicted"))
        return {
            "name": result.name + (" (baseline)" if comparison.base is result else ""),
            "text": ", ".join(f"{show(number)} {kind}" for number, kind in pairs if number is not None),
            "value": value,
            "predicted": predicted,
            "low": interval[0],
            "high": interval[1],
        }

    ranked = comparison.ranked
    measured = any(result.median is not None for result in ranked)
    ranges = [
        (result.low, result.high) if result.median is None else (result.fastest, result.slowest)
        for result in ranked
    ]
    return [
        {
            "title": "Seconds of a step",
            "span": "all runs" if measured else "interval of nine in ten",
            "bars": [
                bar(result, result.median, result.predicted, lambda value: f"{value:.4g} s", interval)
                for result, interval in zip(ranked, ranges, strict=True)
            ],
        },
        {
            "title": "Memory of the fullest rank",
            "span": "",
            "bars": [bar(result, result.memory, result.predicted_memory, memory_size) for result in ranked],
        },
        {
            "title": "Bytes that the busiest rank sends in a step",
            "span": "",
            "bars": [
                bar(result, result.sent, result.traffic, memory_size)
                for result in ranked
                if result.sent is not None or result.traffic is not None
            ],
        },
    ]
