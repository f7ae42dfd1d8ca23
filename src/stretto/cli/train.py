"""`stretto train`: train a language model or a recommender."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app, print_error, say_no
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from stretto.layout.layout import Layout
    from stretto.recommender.config.load import AnyConfig
    from stretto.recommender.config.schema import RecommenderConfig
    from stretto.run.config.schema import TrainConfig
    from stretto.run.train.launch import Result


_QUALITY = ("auc", "logloss", "entropy", "best_entropy", "best_auc", "calibration")


def _recommender_facts(config: RecommenderConfig, outcome: dict[str, Any]) -> dict[str, Any]:
    """A recommender's run as `--json` prints it; None where something was not measured."""
    quality: dict[str, Any] = outcome.get("quality") or {}
    return {
        "steps": outcome.get("step"),
        "loss": outcome.get("loss"),
        "samples_per_s": outcome.get("samples_per_s"),
        **{name: quality.get(name) for name in _QUALITY},
        "run_dir": str(config.run.folder),
        "placement": outcome.get("placement"),
    }


def _report_recommender(config: RecommenderConfig, outcome: dict[str, Any], run: str, out: TextIO) -> None:
    """Print speed, quality, the run's folder, and commands to try next."""
    from stretto.recommender.train.report import ClickEval, quality_text

    speed, quality = outcome.get("samples_per_s"), outcome.get("quality")
    print(file=out)
    if speed is not None:
        print(f"speed: {speed:,.0f} samples/s (median of the last steps)", file=out)
    if quality is not None:
        text = quality_text(ClickEval(**quality))
        print(f"on {quality['samples']:,} held-out samples: {text}", file=out)
    folder, first = config.run.folder, outcome["checkpoint"]
    table = next(iter(outcome.get("placement") or {"C1": None}))
    rows = [
        (f"stretto verify {run} --layouts all", "prove every placement equal to one process"),
        (f"stretto train {run} {_other(config)}", "train with another placement"),
        (f"stretto checkpoint export {first} --table {table} --out {table}.npy", "one table as an array"),
    ]
    width = max(len(command) for command, _ in rows)
    held = "config.yaml, placement.yaml, metrics.jsonl, eval.jsonl, checkpoints/"
    print(f"run folder: {folder}  ({held})\nnext:", file=out)
    for command, what in rows:
        print(f"  {command:{width}}  # {what}", file=out)


def _other(config: RecommenderConfig) -> str:
    """An override that changes the placement."""
    return "tables.placement=column" if config.tables.placement == "row" else "tables.placement=row"


RANK_0_FIRST_S = 2.0

app = command_app()


@app.command(epilog="Example: stretto train configs/quickstart.yaml layout.dp=1 optim.lr=3e-4 --resume auto")
def train(
    path: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A YAML file; docs/config.md has every field.")
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
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on which local ranks meet; 0: any.")] = 0,
    as_json: Json = False,
) -> None:
    """Train a language model or a recommender, on local ranks that it starts or as one rank under torchrun.

    Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 finish the step and save; the exit code is then 130 or 75,
    and the same command with --resume auto continues. A third Ctrl-C ends it at once.
    """
    with exit_on_signal():
        words = [*(overrides or []), *(["metrics.trace=3"] if trace else [])]
        words += [f"train.restarts={restarts}"] if restarts is not None else []
        _train(path, words, resume, ranks, port=port, as_json=as_json)


@contextmanager
def exit_on_signal() -> Generator[None]:
    """Exit with code 75 on SIGTERM or SIGUSR until training has something to save."""
    from stretto.run.launch.slurm import SAVED

    def end(*_: object) -> None:
        raise SystemExit(SAVED)

    before = dict[int, Any]()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _train(
    path: str,
    words: Sequence[str],
    resume: str | None,
    ranks: int | None,
    *,
    port: int,
    as_json: bool,
) -> None:
    from stretto.cli.jobs import for_ranks
    from stretto.recommender.config.load import load_config
    from stretto.run.train.launch import exit_code, under_torchrun

    requested = load_config(path, [*words, *([f"checkpoint.resume={resume}"] if resume else [])])
    if under_torchrun():
        requested, result = _join(requested, ranks, as_json)
        started = requested
    else:
        requested = for_ranks(requested, ranks, as_json)
        started, result = _launch(path, words, requested, as_json, port)

    if os.environ.get("RANK", "0") == "0":
        again = _again(path, words, requested, started)
        _report(config=started, result=result, again=again, command=_command(path, words), as_json=as_json)
    raise typer.Exit(exit_code(result))


def _launch(
    path: str, words: Sequence[str], requested: AnyConfig, quiet: bool, port: int
) -> tuple[AnyConfig, Result]:
    """Train on local ranks; returns the config with the run's final name, and the result."""
    from stretto.cli.jobs import job_type
    from stretto.cli.output import print_failure
    from stretto.engine.checkpoint.folder import checkpoints
    from stretto.run.launch.local import RankFailed
    from stretto.run.train.launch import free_name, run_job

    started = free_name(requested)
    try:
        return started, run_job(job_type(started), started, quiet, port)
    except RankFailed as error:
        saved = checkpoints(started.run.folder / "checkpoints")
        go_on = f"to go on from {saved[0].name}: {_again(path, words, requested, started)}" if saved else None
        print_failure(error.failure, go_on)
        raise say_no() from None


def _join(config: AnyConfig, ranks: int | None, quiet: bool) -> tuple[AnyConfig, Result]:
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
            time.sleep(RANK_0_FIRST_S)
            raise StrettoError(f"rank {rank}: {error.message}", hint=error.hint) from None
        raise
    except (TrainingFailed, CollectiveError, OffloadError) as error:
        if rank:
            time.sleep(RANK_0_FIRST_S)
        print_error(f"rank {rank}: {error}" if rank else str(error), None)
        raise say_no() from None


def _command(path: str, words: Sequence[str]) -> str:
    """The config and its overrides quoted for a shell, without the run's name, which exists by now."""
    from shlex import join

    return join([path, *(word for word in words if not word.startswith(("run.name=", "metrics.trace=")))])


def _again(path: str, words: Sequence[str], requested: AnyConfig, started: AnyConfig) -> str:
    """The command that resumes the run."""
    from shlex import join

    kept = [word for word in words if not word.startswith(("run.name=", "checkpoint.resume="))]
    renamed = len(kept) < len(words) or started.run.name != requested.run.name
    name = [f"run.name={started.run.name}"] if renamed else []
    return join(["stretto", "train", path, *kept, *name, "--resume", "auto"])


def _report(config: AnyConfig, result: Result, again: str, command: str, as_json: bool) -> None:
    """Print how the run ended and what to do next; `command` is the config with its overrides."""
    import json

    from stretto.run.config.schema import TrainConfig

    out = sys.stderr if as_json else sys.stdout
    outcome: dict[str, Any] = result.outcome or {}
    language = isinstance(config, TrainConfig)
    if result.stopped:
        print(f"stopped; newest checkpoint: {_newest(config, outcome) or 'none'}", file=out)
        print(f"to go on: {again}", file=out)
    elif language:
        if config.sample.tokens and _writes_text(config):
            _write_sample(config, Path(outcome["checkpoint"]), out)
        _print_next(command, config, out)
    else:
        _report_recommender(config, outcome, command, out)
    if as_json:
        facts = _facts(config, outcome) if language else _recommender_facts(config, outcome)
        common = {
            "stopped": result.stopped,
            "checkpoint": _newest(config, outcome),
            "restarts": result.restarts,
            "warning": outcome.get("warning"),
        }
        print(json.dumps({**facts, **common}))
    if outcome.get("warning") is not None:  # last, so that it is not overlooked
        print(f"warning: {outcome['warning']}", file=out)


def _newest(config: AnyConfig, outcome: dict[str, Any]) -> str | None:
    """The run's newest checkpoint, also where its ranks did not come to name it."""
    from stretto.run.train.restarts import newest_checkpoint

    known = outcome.get("checkpoint") or newest_checkpoint(config.run.folder)
    return None if known is None else str(known)


def _facts(config: TrainConfig, outcome: dict[str, Any]) -> dict[str, Any]:
    """A language model's run as `--json` prints it."""
    return {
        "steps": outcome.get("step"),
        "loss": outcome.get("loss"),
        "tokens_per_s": outcome.get("tokens_per_s"),
        "run_dir": str(config.run.folder),
        "layout": config.layout.to_layout().describe(),
    }


def _writes_text(config: TrainConfig) -> bool:
    """Whether the model goes on from a text, and the run has the tokenizer; tokens of a Megatron dataset may
    come without.
    """
    return not config.shape().encoder_layers and (config.run.folder / "tokenizer.json").is_file()


def _write_sample(config: TrainConfig, checkpoint: Path, out: TextIO) -> None:
    from stretto.run.generate.text import Sampling, Wording, Writer

    sample = config.sample
    print(f"\nwhat it writes now:\n\n{sample.prompt}", end="", file=out, flush=True)
    sampling = Sampling(
        tokens=sample.tokens, temperature=sample.temperature, top_k=sample.top_k, seed=config.train.seed
    )
    wording = Wording.load(checkpoint)
    writer = Writer.load(checkpoint, wording, check=False)
    for piece in writer.stream(wording.prompt(sample.prompt), sampling):
        print(piece, end="", file=out, flush=True)
    print("\n", file=out)


def _laid_out(command: str, config: TrainConfig, other: Layout) -> str:
    """The command from the first step under another layout, which cuts its stages by itself."""
    from shlex import join, split

    sizes = {"tp": other.tp, "dp": other.dp, "pp": other.pp}
    cuts = {"stages": config.layout.stages, "encoder_pp": config.layout.encoder_pp}
    names = tuple(f"layout.{name}=" for name in (*sizes, *cuts))
    words = [word for word in split(command) if not word.startswith(names)]
    words += [f"layout.{axis}={size}" for axis, size in sizes.items()]
    words += [f"layout.{name}=null" for name, cut in cuts.items() if cut is not None]
    return join([*words, *["checkpoint.resume=never"] * (config.checkpoint.resume == "auto")])


def _print_next(command: str, config: TrainConfig, out: TextIO) -> None:
    """Print the run's folder, and commands to try next."""
    from shlex import quote

    from stretto.verify.language.cases import every_layout

    folder, trained = config.run.folder, config.layout.to_layout()
    layouts = [case.layout for case in every_layout(config, trained.world)]
    others = [one for one in layouts if (one.tp, one.pp) != (trained.tp, trained.pp)]
    rows = [(f"stretto verify {command} --layouts all", "prove every layout equal to one process")]
    if _writes_text(config):
        text = f"stretto generate {folder} --prompt {quote(config.sample.prompt)}"
        rows.insert(0, (text, "more text from this model"))
    if others:
        rows.append((f"stretto train {_laid_out(command, config, others[0])}", "the same on another layout"))
    width = max(len(each) for each, _ in rows)
    print(f"run folder: {folder}  (config.yaml, metrics.jsonl, checkpoints/)\nnext:", file=out)
    for each, what in rows:
        print(f"  {each:{width}}  # {what}", file=out)
