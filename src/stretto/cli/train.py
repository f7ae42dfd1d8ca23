"""`stretto train`: train a language model or a recommender."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shlex import join, quote, split
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from stretto.cli.options import Json, Port
from stretto.cli.output import command_app, print_error, print_failure, say_no
from stretto.cli.report import CommandReport
from stretto.errors import Problem, StrettoError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from stretto.recommender.config.load import AnyConfig
    from stretto.run.config.schema import SampleConfig, TrainConfig
    from stretto.run.train.launch import Result

_QUALITY = ("auc", "logloss", "entropy", "best_entropy", "best_auc", "calibration")
_RANK_0_FIRST_S = 2.0

app = command_app()


@app.command(epilog="Example: stretto train configs/quickstart.yaml layout.dp=1 optim.lr=3e-4 --resume auto")
def train(
    path: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A YAML file; docs/reference/config.md has every field.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c ...]", help="Fields to override, as optim.lr=3e-4.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="auto: resume from the run's newest intact checkpoint, if any; or a checkpoint's path."
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Train on so many ranks, by the config's section elastic.")
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(min=0, help="Start local ranks again after a failure, at most so often."),
    ] = None,
    trace: Annotated[
        bool,
        typer.Option("--trace", help="Record the third step of every rank, and compare it with the replay."),
    ] = False,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST:LAST",
            help="Record these steps of every rank with torch's profiler, for Perfetto: 10:13, or one step.",
        ),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe/--no-probe",
            help="Measure this machine's CPUs for ten seconds before its first training of over a minute.",
        ),
    ] = True,
    port: Port = 0,
    as_json: Json = False,
) -> None:
    """Train a language model or a recommender, on local ranks that it starts or as one rank under torchrun.

    Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 finish the step and save; the exit code is then 130 or 75,
    and the same command with --resume auto continues. A third Ctrl-C ends it at once.
    """
    from stretto.cli.jobs import for_ranks
    from stretto.recommender.config.load import load_config
    from stretto.run.config.load import is_example
    from stretto.run.train.launch import exit_code, stopped_run, under_torchrun, unused_run

    fields = [*(overrides or []), *(["metrics.trace=3"] if trace else [])]
    if profile is not None:
        if not re.fullmatch(r"\d+(:\d+)?", profile):
            raise Problem("--profile", profile, "it is a step, or the first and the last", "--profile 10:13")
        fields += [f"metrics.profile=[{profile.replace(':', ',')}]"]
    fields += [f"train.restarts={restarts}"] if restarts is not None else []
    with exit_on_signal():
        config = load_config(path, [*fields, *([f"checkpoint.resume={resume}"] if resume else [])])
        name = config.run.name
        if under_torchrun():
            config, result = _train_as_rank(config, ranks, as_json)
            resume_command = _resume_command(path, fields, name, config.run.name)
        else:
            if is_example(path) and not as_json:
                print(f"config {path}: comes with the package; a copy to change: stretto init {path}")
            config = for_ranks(config, ranks, as_json)
            config = replace(config, run=unused_run(config.checkpoint.resume, config.run))
            if (former := stopped_run(config.run, name, config.train.steps)) is not None:
                continued = _resume_command(path, fields, name, former.name)
                print(f"{former.folder} has steps left; to continue it: {continued}", file=sys.stderr)
            resume_command = _resume_command(path, fields, name, config.run.name)
            result = _train_locally(config, resume_command, as_json, port, probe)
        if os.environ.get("RANK", "0") == "0":
            _report(config, result, resume_command, job_arguments(path, fields), as_json)
        raise typer.Exit(exit_code(result))


@contextmanager
def exit_on_signal() -> Generator[None]:
    """Exit with code 75 on SIGTERM or SIGUSR until training has something to save."""
    from stretto.run.launch.stop import SAVED

    def end(*_: object) -> None:
        raise SystemExit(SAVED)

    handlers = dict[int, Any]()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            handlers[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _train_locally(config: AnyConfig, resume_command: str, quiet: bool, port: int, probed: bool) -> Result:
    """Train on local ranks; the error of a failed one ends with the command that resumes the run."""
    from stretto.cli.jobs import job_type
    from stretto.engine.checkpoint.folder import checkpoints
    from stretto.run.config.schema import TrainConfig
    from stretto.run.launch.local import RankFailed
    from stretto.run.train.launch import run_job

    job = job_type(config)
    if probed and isinstance(config, TrainConfig) and config.model.build is None:
        from stretto.run.calibrate.probe import probe
        from stretto.run.config.job import job_of

        announce, train = job.print_start, config.train

        def print_start(*start: Any) -> None:
            job = job_of(config)
            probe(job, steps=train.steps, device=train.device, threads=train.threads, quiet=quiet)
            announce(*start)

        job = replace(job, print_start=print_start)
    try:
        return run_job(job, config, quiet, port)
    except RankFailed as error:
        saved = checkpoints(config.run.folder / "checkpoints")
        hint = f"to continue from {saved[0].name}: {resume_command}" if saved else None
        print_failure(error.failure, hint)
        raise say_no() from None


def _train_as_rank(config: AnyConfig, ranks: int | None, quiet: bool) -> tuple[AnyConfig, Result]:
    """Train as one rank under torchrun; returns the config for as many ranks as there are, and the result.

    An error that all ranks meet is printed once: rank 0 prints first, and torchrun then ends the others.
    """
    from stretto.cli.jobs import for_ranks, job_type
    from stretto.engine.offload.scratch import OffloadError
    from stretto.engine.parallel.control import CollectiveError
    from stretto.run.launch.failure import TrainingFailed
    from stretto.run.launch.rendezvous import RendezvousInfo
    from stretto.run.train.launch import run_job

    rank = RendezvousInfo.of(os.environ).rank
    try:
        config = for_ranks(config, ranks, quiet)
        return config, run_job(job_type(config), config, quiet)
    except StrettoError as error:
        if rank:
            time.sleep(_RANK_0_FIRST_S)
            raise StrettoError(f"rank {rank}: {error.message}", hint=error.hint) from None
        raise
    except (TrainingFailed, CollectiveError, OffloadError) as error:
        if rank:
            time.sleep(_RANK_0_FIRST_S)
        print_error(f"rank {rank}: {error}" if rank else str(error), None)
        raise say_no() from None


# ------------------------------------------------------------------ the report


def job_arguments(path: str, fields: Sequence[str]) -> str:
    """The config and its overrides quoted for a shell, without the run's name, which is in use by now."""
    once = ("run.name=", "metrics.trace=", "metrics.profile")
    return join([path, *(field for field in fields if not field.startswith(once))])


def _resume_command(path: str, fields: Sequence[str], requested_name: str, name: str) -> str:
    """The command that resumes the run."""
    passed_on = [field for field in fields if not field.startswith(("run.name=", "checkpoint.resume="))]
    renamed = len(passed_on) < len(fields) or name != requested_name
    run_name = [f"run.name={name}"] if renamed else []
    return join(["stretto", "train", path, *passed_on, *run_name, "--resume", "auto"])


def _report(config: AnyConfig, result: Result, resume_command: str, arguments: str, as_json: bool) -> None:
    """Print how the run ended and what to do next.

    Args:
        arguments: the config and its overrides, for a shell.
    """
    from stretto.run.config.schema import TrainConfig
    from stretto.run.train.restarts import newest_checkpoint

    outcome: dict[str, Any] = result.outcome or {}
    # a run that was stopped may not have named its checkpoint
    checkpoint = outcome.get("checkpoint") or newest_checkpoint(config.run.folder)
    checkpoint = None if checkpoint is None else str(checkpoint)
    record: dict[str, Any] = {"steps": outcome.get("step"), "loss": outcome.get("loss")}
    if isinstance(config, TrainConfig):
        record["tokens_per_s"] = outcome.get("tokens_per_s")
        record |= {"run_dir": str(config.run.folder), "layout": config.layout.to_layout().describe()}
    else:
        quality: dict[str, Any] = outcome.get("quality") or {}
        record["samples_per_s"] = outcome.get("samples_per_s")
        record |= {name: quality.get(name) for name in _QUALITY}
        record |= {"run_dir": str(config.run.folder), "placement": outcome.get("placement")}
    record |= {"stopped": result.stopped, "checkpoint": checkpoint, "restarts": result.restarts}
    report = CommandReport({**record, "warning": outcome.get("warning")})
    if result.stopped:
        report.line(f"stopped; newest checkpoint: {checkpoint or 'none'}\nto continue: {resume_command}")
    elif isinstance(config, TrainConfig):
        # tokens of a Megatron dataset may come without a tokenizer, and a model from a file has no cache
        generates = config.model.build is None and not config.shape().encoder_layers
        writes = generates and (config.run.folder / "tokenizer.json").is_file()
        if writes and config.sample.tokens:
            out = sys.stderr if as_json else sys.stdout
            _stream_sample(config.sample, config.train.seed, Path(outcome["checkpoint"]), out)
        files = "config.yaml, metrics.jsonl, checkpoints/"
        _add_next(report, f"{config.run.folder}  ({files})", next_commands(config, arguments, writes))
    else:
        _add_quality(report, outcome)
        files = "config.yaml, placement.yaml, metrics.jsonl, eval.jsonl, checkpoints/"
        table = next(iter(outcome.get("placement") or {"C1": None}))
        other = "column" if config.tables.placement == "row" else "row"
        export = f"stretto checkpoint export {outcome['checkpoint']} --table {table} --out {table}.npy"
        commands = {
            f"stretto verify {arguments} --layouts all": "prove every placement equal to one process",
            f"stretto train {arguments} tables.placement={other}": "train with another placement",
            export: "one table as an array",
        }
        _add_next(report, f"{config.run.folder}  ({files})", commands)
    profiles = config.run.folder / "profile"
    if config.metrics.profile is not None and profiles.is_dir():
        report.line(f"profile: {profiles}, a file per rank; open them in https://ui.perfetto.dev")
    if outcome.get("warning") is not None:  # last, so that it is not overlooked
        report.line(f"warning: {outcome['warning']}")
    report.print(as_json, sys.stderr if as_json else None)


def _add_quality(report: CommandReport, outcome: dict[str, Any]) -> None:
    """Add a recommender's speed, and its quality on held-out samples."""
    from stretto.recommender.train.report import ClickEval, quality_text

    speed, quality = outcome.get("samples_per_s"), outcome.get("quality")
    report.line()
    if speed is not None:
        report.line(f"speed: {speed:,.0f} samples/s (median of the last steps)")
    if quality is not None:
        report.line(f"on {quality['samples']:,} held-out samples: {quality_text(ClickEval(**quality))}")


def _add_next(report: CommandReport, folder: str, commands: Mapping[str, str]) -> None:
    """Add the run's folder, and commands to try next, by what each does."""
    width = max(map(len, commands))
    report.line(f"run folder: {folder}\nnext:")
    report.lines(f"  {command:{width}}  # {purpose}" for command, purpose in commands.items())


def next_commands(config: TrainConfig, arguments: str, writes: bool) -> dict[str, str]:
    """Return commands to try after the training of a language model, with the purpose of each.

    Args:
        arguments: the config and its overrides, for a shell.
        writes: the model continues texts, and its tokenizer is there.
    """
    from stretto.verify.language.cases import every_layout

    trained = config.layout.to_layout()
    commands = dict[str, str]()
    if writes:
        command = f"stretto generate {config.run.folder} --prompt {quote(config.sample.prompt)}"
        commands[command] = "more text from this model"
    if config.model.build is None:
        commands[f"stretto verify {arguments} --layouts all"] = "prove every layout equal to one process"
    else:
        commands[f"stretto verify {arguments}"] = "prove this layout equal to one process"
    layouts = [case.layout for case in every_layout(config, trained.world)]
    other = next((layout for layout in layouts if (layout.tp, layout.pp) != (trained.tp, trained.pp)), None)
    if other is not None:  # trained from the first step, with stages cut by default
        sizes = {"tp": other.tp, "dp": other.dp, "pp": other.pp}
        cuts = {"stages": config.layout.stages, "encoder_pp": config.layout.encoder_pp}
        replaced = tuple(f"layout.{name}=" for name in (*sizes, *cuts))
        fields = [field for field in split(arguments) if not field.startswith(replaced)]
        fields += [f"layout.{axis}={size}" for axis, size in sizes.items()]
        fields += [f"layout.{name}=null" for name, cut in cuts.items() if cut is not None]
        fields += ["checkpoint.resume=never"] * (config.checkpoint.resume == "auto")
        commands[f"stretto train {join(fields)}"] = "the same on another layout"
    return commands


def _stream_sample(sample: SampleConfig, seed: int, checkpoint: Path, out: TextIO) -> None:
    """Print a text that the trained model writes, as it is generated."""
    from stretto.run.generate.text import Sampling, Wording, Writer

    print(f"\nwhat it writes now:\n\n{sample.prompt}", end="", file=out, flush=True)
    sampling = Sampling(tokens=sample.tokens, temperature=sample.temperature, top_k=sample.top_k, seed=seed)
    wording = Wording.load(checkpoint)
    writer = Writer.load(checkpoint, wording, check=False)
    for piece in writer.stream(wording.prompt(sample.prompt), sampling):
        print(piece, end="", file=out, flush=True)
    print("\n", file=out)
