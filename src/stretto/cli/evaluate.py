"""`stretto evaluate`: a language model's loss on held-out text, or a recommender's quality on clicks."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.options import CheckpointStep, Json, Port, TrainedRun
from stretto.cli.output import command_app
from stretto.cli.report import CommandReport
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stretto.recommender.config.load import AnyConfig
    from stretto.run.evaluate.trained import Trained

app = command_app()


@app.command(
    epilog="Example: stretto evaluate runs/quickstart --split test layout.tp=2 layout.pp=1 layout.dp=1"
)
def evaluate(
    path: TrainedRun,
    fields: Annotated[
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
    checkpoint: CheckpointStep = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Only the first N global batches.")
    ] = None,
    port: Port = 0,
    as_json: Json = False,
) -> None:
    """Evaluate a checkpoint on a whole split, each token or sample once, under any layout.

    A language model gives loss (nats a token), perplexity and bits per byte; a recommender AUC, logloss,
    normalised entropy and calibration. The result is added to the run's eval.jsonl.
    """
    from stretto.cli.output import failures_reported
    from stretto.run.config.schema import TrainConfig
    from stretto.run.data.split import ALL, SPLITS, check_split
    from stretto.run.evaluate.job import EvaluationJob, evaluation_config, run_evaluation
    from stretto.run.evaluate.trained import find_trained

    trained = find_trained(path, checkpoint)
    config = configured(trained, fields or [])
    with failures_reported():
        if isinstance(config, TrainConfig):
            split = split or ("test" if data is None else ALL)
            check_split(split, (*SPLITS, ALL), "--split")
            job = EvaluationJob(
                config=evaluation_config(config, trained, data),
                trained=trained,
                split=split,
                text=data,
                limit=limit,
            )
            result = run_evaluation(job, as_json, port)
        else:
            from stretto.recommender.clicks import folder
            from stretto.recommender.serve.job import ScoringJob, run_pass

            if data is not None and (split not in (None, "all") or limit is not None):
                raise StrettoError(
                    "--data is read whole: a log has no splits", hint="leave --split and --limit out"
                )
            split = split or "valid"
            check_split(split, folder.SPLITS, "--split")
            log = None if data is None else (data,)
            clicks = ScoringJob(
                training=config, trained=trained, split=split, log=log, limit=limit, labelled=log is not None
            )
            result = run_pass(clicks, as_json, port)
    if os.environ.get("RANK", "0") == "0":
        if result.stopped or result.outcome is None:
            print("stopped: nothing was evaluated to its end", file=sys.stderr)
        else:
            _report(trained, result.outcome, data).print(as_json)
    if result.stopped:
        from stretto.run.train.launch import exit_code

        raise typer.Exit(exit_code(result))


def configured(trained: Trained, fields: Sequence[str]) -> AnyConfig:
    """Return the checkpoint's config, or the one that is named first, with the others as overrides.

    Raises:
        StrettoError: one is neither the first nor an override.
    """
    from stretto.recommender.config.load import load_config, parse_config

    files, overrides = [f for f in fields if "=" not in f], [f for f in fields if "=" in f]
    if len(files) > 1 or (files and fields[0] != files[0]):
        raise StrettoError(
            f"{files[-1]} is neither a config after the run's name nor an override",
            hint="overrides are like layout.tp=2, optim.lr=3e-4",
        )
    if files:
        return load_config(files[0], overrides)
    text, source = trained.config_text()
    return parse_config(text, source, overrides)


def _report(trained: Trained, outcome: Mapping[str, Any], data: str | None) -> CommandReport:
    """Append the results to the run's file, and report them."""
    results: dict[str, Any] = {"step": trained.step, "split": "all", "data": data}
    results |= {name: value for name, value in outcome.items() if name != "stopped"}
    path = trained.append(results)
    written = {"checkpoint": str(trained.checkpoint), "written": None if path is None else str(path)}
    report = CommandReport({**results, **written})
    if "tokens" in results:
        from stretto.run.train.metrics import number

        count, unit = results["tokens"], "tokens"
        parts = [
            f"loss {number(results['loss'], 6)} nats/token",
            f"perplexity {number(results['perplexity'], 4)}",
        ]
        if results["bits_per_byte"] is not None:
            parts.append(f"bits/byte {number(results['bits_per_byte'], 4)}")
        report.line(" | ".join(parts))
    else:
        count, unit = results["samples"] if "samples" in results else results["rows"], "samples"
        report.line(click_quality(results))
    seconds = results["seconds"]
    added = "" if path is None else f"; added to {path}"
    report.line(f"{count:,} {unit} in {seconds:.1f} s ({count / seconds:,.0f} {unit}/s){added}")
    return report


def click_quality(results: Mapping[str, Any]) -> str:
    """A recommender's quality on a line; empty if the clicks have no labels."""
    labels = {"auc": "AUC", "logloss": "logloss", "entropy": "entropy", "calibration": "calibration"}
    parts = [
        f"{label} {results[name]:.6f}" for name, label in labels.items() if results.get(name) is not None
    ]
    if results.get("auc_error"):
        parts[0] += f" +- {results['auc_error']:.2g}"
    if results.get("best_entropy") is not None:
        parts.append(f"best possible entropy {results['best_entropy']:.6f}")
    if results.get("ids"):
        parts.append(f"{results['unknown_ids'] / results['ids']:.2%} of the ids unknown to training")
    return " | ".join(parts)
