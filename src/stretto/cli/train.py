"""`stretto train`: the main job."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.face import Json, command_app

if TYPE_CHECKING:
    from stretto.config.schema import TrainConfig
    from stretto.train.job import Result

app = command_app()


@app.command(epilog="Example: stretto train configs/quickstart.yaml layout.dp=1 optim.lr=3e-4 --resume auto")
def train(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file; docs/config.md has every field.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c ...]", help="Fields to override, as optim.lr=3e-4.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(help="auto: go on from the run's newest whole checkpoint, if any; or the path of one."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on which local ranks meet; 0: any.")] = 0,
    as_json: Json = False,
) -> None:
    """Train a model. Starts its own local ranks, or joins the job that torchrun has started.

    Ctrl-C and SIGTERM finish the step and save. Exit code 75 means: stopped and saved, start again with --resume auto.
    """
    from stretto.config import load
    from stretto.launch.local import RankFailed
    from stretto.train.job import exit_code, free_name, run_job, under_torchrun

    given = [*(overrides or []), *([f"checkpoint.resume={resume}"] if resume else [])]
    found = load(config, given)
    found = found if under_torchrun() else free_name(found)
    try:
        result = run_job(found, quiet=as_json, port=port)
    except RankFailed as error:
        print(f"{error.traceback}\nerror: rank {error.rank} failed; the job was ended", file=sys.stderr)
        raise typer.Exit(1) from None
    if not under_torchrun() or _is_first():
        _tell(config, found, result, as_json)
    raise typer.Exit(exit_code(result))


def _is_first() -> bool:
    import os

    return os.environ.get("RANK", "0") == "0"


def _tell(path: str, config: TrainConfig, result: Result, as_json: bool) -> None:
    import json

    out = sys.stderr if as_json else sys.stdout
    if result.stopped:
        _tell_stopped(path, config, out)
    elif result.outcome is not None and config.sample.tokens:
        _write_sample(config, str(result.outcome["checkpoint"]), out)
    if not result.stopped and not as_json:
        _tell_next(path, config)
    if as_json:
        outcome: dict[str, Any] = result.outcome or {}
        facts = {
            "steps": outcome.get("step"),
            "loss": outcome.get("loss"),
            "tokens_per_s": outcome.get("tokens_per_s"),
            "run_dir": str(config.run.folder),
            "layout": config.layout.to_layout().describe(),
            "stopped": result.stopped,
            "checkpoint": outcome.get("checkpoint"),
        }
        print(json.dumps(facts))


def _tell_stopped(path: str, config: TrainConfig, out: Any) -> None:
    from stretto.checkpoint.folder import checkpoints

    saved = checkpoints(config.run.folder / "checkpoints")
    print(f"stopped; newest checkpoint: {saved[0] if saved else 'none'}", file=out)
    print(f"to go on: stretto train {path} run.name={config.run.name} --resume auto", file=out)


def _write_sample(config: TrainConfig, checkpoint: str, out: Any) -> None:
    from pathlib import Path

    from stretto.train.text import load_model, load_tokenizer, write

    sample, where = config.sample, Path(checkpoint)
    print("\nwhat it writes now:\n", file=out)
    print(sample.prompt, end="", file=out)
    pieces = write(
        load_model(where),
        load_tokenizer(where),
        sample.prompt,
        sample.tokens,
        sample.temperature,
        sample.top_k,
        config.train.seed,
    )
    for piece in pieces:
        print(piece, end="", file=out, flush=True)
    print(file=out)


def _tell_next(path: str, config: TrainConfig) -> None:
    folder = config.run.folder
    print(f"\nrun folder: {folder}  (config.yaml, metrics.jsonl, checkpoints/)")
    print("next:")
    print(f"  stretto generate {folder} --prompt 'class '   # more text from this model")
    print(f"  stretto verify {path} --layouts all           # prove every layout equal to one process")
    print(f"  stretto train {path} layout.tp=2 layout.pp=1  # another layout")
    print("  stretto schedule interleaved --ranks 4 --microbatches 8 --chunks 2  # see a pipeline")
