"""`stretto evaluate`: a language model's loss on held-out text, or a recommender's quality on clicks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stretto.recommender.config.load import AnyConfig
    from stretto.recommender.serve.job import Request as ClickRequest
    from stretto.run.evaluate.job import Request
    from stretto.run.evaluate.trained import Trained
    from stretto.run.train.launch import Result

app = command_app()


@app.command(
    epilog="Example: stretto evaluate runs/quickstart --split test layout.tp=2 layout.pp=1 layout.dp=1"
)
def evaluate(
    path: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A run's folder (its newest checkpoint), or a checkpoint."),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [a.b=c ...]",
            help="A config in place of the one that the checkpoint was made with; fields to override, as "
            "layout.tp=2.",
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="train, valid, test or all. Default: test; with --data, all; for a recommender, valid.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Other text (or clicks) than the run's, as data.source; the run's tokenizer encodes it.",
        ),
    ] = None,
    checkpoint: Annotated[
        int | None, typer.Option(metavar="STEP", min=0, help="The run's checkpoint of this step.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Only the first N global batches.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on which local ranks meet; 0: any.")] = 0,
    as_json: Json = False,
) -> None:
    """Evaluate a checkpoint on a whole split, each token or sample once, under any layout.

    A language model gives loss (nats a token), perplexity and bits per byte; a recommender AUC, logloss,
    normalised entropy and calibration. The result is added to the run's eval.jsonl.
    """
    from stretto.cli.output import failures_reported
    from stretto.run.config.schema import TrainConfig
    from stretto.run.evaluate.job import evaluation_config, run_evaluation
    from stretto.run.evaluate.trained import find_trained

    trained = find_trained(path, checkpoint)
    config = configured(trained, words or [])
    with failures_reported():
        if isinstance(config, TrainConfig):
            request = _request(trained, split, data, limit)
            result = run_evaluation(evaluation_config(config, request), request, as_json, port)
        else:
            from stretto.recommender.serve.job import run_pass

            clicks = _clicks(trained, split, data, limit)
            result = run_pass(config, clicks, as_json, port)
    if os.environ.get("RANK", "0") == "0":
        _report(trained, result, data, as_json)
    if result.stopped:
        from stretto.run.train.launch import exit_code

        raise typer.Exit(exit_code(result))


def configured(trained: Trained, words: Sequence[str]) -> AnyConfig:
    """The config of a checkpoint, or the one that is the first of the words, with the other words as
    overrides.

    Raises:
        StrettoError: a word that is neither.
    """
    from stretto.recommender.config.load import load_config, parse_config

    files, overrides = [w for w in words if "=" not in w], [w for w in words if "=" in w]
    if len(files) > 1 or (files and words[0] != files[0]):
        raise StrettoError(
            f"{files[-1]} is neither a config after the run's name nor an override",
            hint="overrides are like layout.tp=2, optim.lr=3e-4",
        )
    if files:
        return load_config(files[0], overrides)
    text, source = trained.config_text()
    return parse_config(text, source, overrides)


def _request(trained: Trained, split: str | None, data: str | None, limit: int | None) -> Request:
    """What to evaluate of a language model: by default the run's test split, or all of other text."""
    from stretto.run.data.split import ALL, SPLITS, check_split
    from stretto.run.evaluate.job import Request

    split = split or ("test" if data is None else ALL)
    check_split(split, (*SPLITS, ALL))
    return Request(trained=trained, split=split, data=data, limit=limit)


def _clicks(trained: Trained, split: str | None, data: str | None, limit: int | None) -> ClickRequest:
    """What to evaluate of a recommender: by default the run's held-out split, or all of another log."""
    from stretto.recommender.clicks.samples import SPLITS
    from stretto.recommender.serve.job import Request
    from stretto.run.data.split import check_split

    if data is not None and (split not in (None, "all") or limit is not None):
        raise StrettoError("--data is read whole: a log has no splits", hint="leave --split and --limit out")
    check_split(split or "valid", SPLITS)
    log = None if data is None else (data,)
    return Request(trained=trained, split=split or "valid", log=log, limit=limit, labelled=log is not None)


def _report(trained: Trained, result: Result, data: str | None, as_json: bool) -> None:
    """Append the numbers to the run's file, and print them."""
    import json

    if result.stopped or result.outcome is None:
        print("stopped: nothing was evaluated to its end", file=sys.stderr)
        return
    facts: dict[str, Any] = {name: value for name, value in result.outcome.items() if name != "stopped"}
    facts = {"step": trained.step, "split": "all", "data": data} | facts
    path = trained.append(facts)
    if as_json:
        where = {"checkpoint": str(trained.checkpoint), "written": None if path is None else str(path)}
        print(json.dumps({**facts, **where}))
        return
    numbers, unit, count = text_numbers(facts) if "tokens" in facts else click_numbers(facts)
    seconds = facts["seconds"]
    rest = f"{count:,} {unit} in {seconds:.1f} s ({count / seconds:,.0f} {unit}/s)"
    print(numbers)
    print(rest if path is None else f"{rest}; added to {path}")


def text_numbers(facts: Mapping[str, Any]) -> tuple[str, str, int]:
    """A language model's numbers on a line, what they are means of, and how many."""
    from stretto.run.train.metrics import number

    parts = [f"loss {number(facts['loss'], 6)} nats/token", f"perplexity {number(facts['perplexity'], 4)}"]
    if facts["bits_per_byte"] is not None:
        parts.append(f"bits/byte {number(facts['bits_per_byte'], 4)}")
    return " | ".join(parts), "tokens", facts["tokens"]


def click_numbers(facts: Mapping[str, Any]) -> tuple[str, str, int]:
    """A recommender's numbers on a line, what they are of, and how many."""
    parts = [
        f"{label} {facts[name]:.6f}"
        for name, label in (
            ("auc", "AUC"),
            ("logloss", "logloss"),
            ("entropy", "entropy"),
            ("calibration", "calibration"),
        )
        if facts.get(name) is not None
    ]
    if facts.get("auc_error"):
        parts[0] += f" +- {facts['auc_error']:.2g}"
    if facts.get("best_entropy") is not None:
        parts.append(f"best possible entropy {facts['best_entropy']:.6f}")
    if facts.get("ids"):
        parts.append(f"{facts['unknown_ids'] / facts['ids']:.2%} of the ids unknown to training")
    return " | ".join(parts), "samples", facts["samples"] if "samples" in facts else facts["rows"]
