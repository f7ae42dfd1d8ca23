"""`stretto compare`: run or predict every combination of settings of a config, side by side."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app, report, say_no, write_text
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.recommender.config.load import AnyConfig
    from stretto.run.compare.combinations import Combination
    from stretto.run.compare.comparison import Comparison
    from stretto.run.compare.result import Result
    from stretto.spec.job import Job

app = command_app()

# fields that a comparison sets itself, and what to use instead
_SET_HERE = {
    "train.steps": "--steps and --warmup say how long each runs",
    "run.name": "--out names the folder",
    "run.dir": "--out names the folder",
    "checkpoint.every": "no checkpoint is kept",
    "checkpoint.resume": "what is done is not run again, unless with --again",
}
_INTERRUPTED = 130


@app.command(
    epilog="Example: stretto compare configs/quickstart.yaml layout.pp=1,2 dp.mode=ddp,zero1 --steps 20 "
    "--html compare.html"
)
def compare(
    path: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, as `stretto train` takes it.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[a.b=c,d ...]",
            help="Fields to override; one with several values is varied. A value with a comma goes in "
            "brackets or quotes, as in layout.stages=[3,3],[2,4].",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure in each run.")] = 20,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before them that do not count.")] = 3,
    predict: Annotated[bool, typer.Option("--predict", help="Predict every combination, run none.")] = False,
    cluster: Annotated[
        str | None,
        typer.Option(help="With --predict: a cluster, as `stretto predict` takes it; default: this machine."),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="The combination that others are compared with, as in 'tp=1 mode=ddp'; default: the first."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most combinations to accept.")] = 24,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results; default: compare-NAME in run.dir.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also run what has a result in the folder.")] = False,
    memory: Annotated[
        bool,
        typer.Option(help="On the CPU, also measure memory, in two further steps on random tokens."),
    ] = True,
    html: Annotated[Path | None, typer.Option(help="Write a page with pictures here.")] = None,
    as_json: Json = False,
) -> None:
    """Train every combination of settings for some steps, one after another, and compare them.

    Shows step time (median and quartiles), tokens/s, memory, traffic and loss, measured beside predicted,
    fastest first, and whether layouts that compute the same have the same loss. A run that fails is a row
    with its error; settings that do not go together are listed with the reason.

    Each result is kept in a file and not run again, so an interrupted comparison goes on where it was.
    Recommenders are run too, without predictions, traffic and measured memory.

    Exit code 1: a run failed, or nothing could be predicted.
    """
    from stretto.run.compare.combinations import combinations, matching, short_names

    combined = combinations(overrides or [])
    _check_options(combined, limit, cluster, predict=predict)
    names = short_names(combined)
    base = names[0 if baseline is None else matching(baseline, combined, names)]
    total = None if predict else warmup + steps
    candidates = [_candidate(path, name, one, total) for name, one in zip(names, combined, strict=True)]
    legal = [one for one in candidates if one.config is not None]
    if not legal:
        raise StrettoError(f"no combination can run; {names[0]}: {candidates[0].waiting.error}")
    stopped = False
    if predict:
        results = [_predicted(one, cluster) for one in legal]
        what = f"predicted on {cluster or 'this machine'}"
    else:
        results, stopped = _run(path, legal, out, (warmup, steps), memory=memory, again=again)
        what = f"median of {steps} steps after {warmup}, one run each"
    comparison = _compared(f"{path}: {what}", candidates, results, base)
    _publish(comparison, html, as_json=as_json)
    if stopped:
        raise typer.Exit(_INTERRUPTED)
    if not comparison.ranked or any(one.status == "failed" for one in results):
        raise say_no()


def _check_options(
    combined: Sequence[Combination], limit: int, cluster: str | None, *, predict: bool
) -> None:
    if cluster is not None and not predict:
        raise StrettoError("--cluster is for predictions, and runs are on this machine", hint="add --predict")
    if len(combined) > limit:
        raise StrettoError(
            f"there are {len(combined)} combinations, more than --limit {limit}",
            hint=f"vary fewer fields, or --limit {len(combined)}",
        )
    if not predict:
        for field, _ in combined[0].settings:
            if field in _SET_HERE:
                raise StrettoError(f"compare sets {field} itself", hint=_SET_HERE[field])


# ------------------------------------------------------------------ combinations as jobs


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A combination as a job.

    Attributes:
        waiting: its result, with nothing but the reason where it is refused.
        config: None where it is refused.
        words: overrides, with those that a comparison sets.
        job: of a language model.
    """

    waiting: Result
    config: AnyConfig | None = None
    words: Sequence[str] = ()
    job: Job | None = None


def _candidate(path: str, name: str, one: Combination, total: int | None) -> Candidate:
    """The combination checked as a job of `total` steps here; None: as one that is only predicted."""
    from stretto.run.compare.result import Result, fingerprint
    from stretto.run.config.load import plain_values
    from stretto.run.config.required import check_required

    waiting = Result(name=name, words=one.words, status="refused")
    words = one.words
    try:
        if total is not None:
            words = [*words, *_short_run(path, words, total)]
        config = _load(path, words)
        job = _checked(config, here=total is not None)
    except StrettoError as error:
        reason = error.message + (f" ({error.hint})" if error.hint else "")
        reason += f", and {more} more problem{'s' * (more > 1)}" if (more := len(error.others)) else ""
        return Candidate(waiting=replace(waiting, error=reason))
    if total is not None:
        check_required(config)
    key = fingerprint(plain_values(config), total)
    return Candidate(waiting=replace(waiting, fingerprint=key), config=config, words=words, job=job)


def _load(path: str, words: Sequence[str]) -> AnyConfig:
    from stretto.recommender.config.load import load_config

    return load_config(path, words)


def _short_run(path: str, words: Sequence[str], total: int) -> list[str]:
    """What a short run that is only measured sets: its length, and nothing beside training."""
    from stretto.run.config.schema import TrainConfig

    config = _load(path, words)
    settings = {
        "train.steps": total,
        "eval.every": "null",
        "checkpoint.every": "null",
        "checkpoint.resume": "never",
        "metrics.tensorboard": "false",
        "metrics.tensorboard_dir": "null",
    }
    if isinstance(config, TrainConfig):
        settings |= {"sample.tokens": 0, "metrics.trace": 0}
    if "run.dir" in config.required:
        settings["run.dir"] = "runs"
    return [f"{field}={value}" for field, value in settings.items()]


def _checked(config: AnyConfig, *, here: bool) -> Job | None:
    """The job of a language model that is legal, and, to be run `here`, fits this machine.

    Raises:
        StrettoError: it is not.
    """
    from stretto.cli.jobs import check_job, ranks_of
    from stretto.run.config.job import job_of
    from stretto.run.config.schema import TrainConfig
    from stretto.spec.rules import problems

    if here:
        from stretto.run.launch.local import check_ranks

        check_job(config)
        check_ranks(ranks_of(config)[0])
    if not isinstance(config, TrainConfig):
        if not here:
            raise StrettoError(
                "the step of a recommender is not predicted", hint="run it, or use `stretto plan`"
            )
        return None
    job = job_of(config)
    if wrong := problems(job):
        raise wrong[0]
    return job


def _counted(result: Result, job: Job) -> Result:
    """The result with what the planner counts: the fullest rank's memory, and bytes that a rank sends."""
    from stretto.planner.memory.job import memory_of
    from stretto.planner.memory.ranks import rank_memory
    from stretto.planner.rank_step.counts import bytes_sent

    held = memory_of(job)
    memory = result.predicted_memory or max(rank.total for rank in rank_memory(held))
    return replace(result, predicted_memory=memory, traffic=bytes_sent(job, held))


# ------------------------------------------------------------------ predictions and runs


def _predicted(candidate: Candidate, cluster: str | None) -> Result:
    from stretto.planner.estimate import estimate
    from stretto.planner.machines.catalogue import find_cluster
    from stretto.run.train.prediction import predict

    job, config = candidate.job, candidate.config
    assert job is not None
    assert config is not None
    try:
        if cluster is None:
            made = predict(job, config.train)
        else:
            made = estimate(job, find_cluster(cluster).sized(job.layout.world))
    except StrettoError as error:
        return replace(candidate.waiting, error=error.message)
    return _counted(
        replace(
            candidate.waiting,
            status="predicted",
            predicted=made.seconds,
            low=made.low,
            high=made.high,
            speed=made.tokens_per_s,
            verdict=None if made.memory is None else made.memory.verdict,
        ),
        job,
    )


def _run(
    path: str,
    legal: Sequence[Candidate],
    out: Path | None,
    length: tuple[int, int],
    *,
    memory: bool,
    again: bool,
) -> tuple[list[Result], bool]:
    """Run all candidates; `length` is the steps of the warm-up and those after it."""
    from stretto.run.compare.runs import Run, Runs

    first = legal[0].config
    assert first is not None
    folder = out or Path(first.run.dir) / f"compare-{first.run.name}"
    runs = [Run(waiting=one.waiting, words=one.words, language=one.job is not None) for one in legal]
    settings = Runs(path=path, folder=folder, warmup=length[0], steps=length[1], memory=memory, again=again)
    with _sigterm_as_interrupt():
        results, stopped = settings.all(runs, _say)
    counted = [
        _counted(result, one.job) if one.job is not None and result.status == "done" else result
        for result, one in zip(results, legal, strict=True)
    ]
    return counted, stopped


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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


def _compared(
    title: str, candidates: Sequence[Candidate], results: Sequence[Result], baseline: str
) -> Comparison:
    from stretto.run.compare.comparison import Comparison
    from stretto.run.compare.result import mathematics
    from stretto.run.config.schema import TrainConfig

    by_name = {one.name: one for one in results}
    kinds = {
        one.waiting.fingerprint: mathematics(one.config, one.job)
        for one in candidates
        if isinstance(one.config, TrainConfig) and one.job is not None
    }
    return Comparison(
        title=title,
        results=[by_name.get(one.waiting.name, one.waiting) for one in candidates],
        baseline=baseline,
        kinds=kinds,
    )


def _publish(comparison: Comparison, html: Path | None, *, as_json: bool) -> None:
    """Write the page, and print the table or the JSON."""
    from stretto.cli.compare_tables import facts, page, show

    if html is not None:
        write_text(html, page(comparison))
    report(facts(comparison) if as_json else {}, as_json, lambda to: show(to, comparison, html))
