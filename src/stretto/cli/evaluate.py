"""`stretto evaluate`: a language model's loss on held-out text, or a recommender's quality on clicks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.output import Json, command_app
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.recommender.config.load import AnyConfig
    from stretto.run.evaluate.job import Request
    from stretto.run.evaluate.trained import Trained
    from stretto.run.train.job import Result

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
            raise StrettoError("recommenders come next")
    if os.environ.get("RANK", "0") == "0":
        _report(trained, result, as_json)
    if result.stopped:
        from stretto.run.train.job import exit_code

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
    from stretto.run.data.dataset import ALL, SPLITS, check_split
    from stretto.run.evaluate.job import Request

    split = split or ("test" if data is None else ALL)
    check_split(split, (*SPLITS, ALL))
    return Request(trained=trained, split=split, data=data, limit=limit)


def _report(trained: Trained, result: Result, as_json: bool) -> None:
    """Append the numbers to the run's file, and print them."""
    import json

    from stretto.run.train.metrics import number

    if result.stopped or result.outcome is None:
        print("stopped: nothing was evaluated to its end", file=sys.stderr)
        return
    facts: dict[str, Any] = {name: value for name, value in result.outcome.items() if name != "stopped"}
    path = trained.append(facts)
    if as_json:
        where = {"checkpoint": str(trained.checkpoint), "written": None if path is None else str(path)}
        print(json.dumps({**facts, **where}))
        return
    tokens, seconds = facts["tokens"], facts["seconds"]
    parts = [f"loss {number(facts['loss'], 6)} nats/token", f"perplexity {number(facts['perplexity'], 4)}"]
    if facts["bits_per_byte"] is not None:
        parts.append(f"bits/byte {number(facts['bits_per_byte'], 4)}")
    print(" | ".join(parts))
    rest = f"{tokens:,} tokens in {seconds:.1f} s ({tokens / seconds:,.0f} tokens/s)"
    print(rest if path is None else f"{rest}; added to {path}")
