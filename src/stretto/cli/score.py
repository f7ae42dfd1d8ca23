"""`stretto score`: probabilities of a trained recommender for new clicks."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, cast

import typer

from stretto.cli.options import CheckpointStep, Json, Port, TrainedRun, check_choice
from stretto.cli.output import command_app
from stretto.cli.report import CommandReport
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.recommender.serve.log import OnError

app = command_app()


@app.command(epilog="Example: stretto score runs/dlrm day_23.gz --out clicks.parquet")
def score(
    path: TrainedRun,
    log: Annotated[
        list[str],
        typer.Argument(
            metavar="LOG... [a.b=c ...]",
            help="Files of a click log in order (also .gz, folders, globs), or one click folder; and fields "
            "to override, as layout.ranks=2.",
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Where to write: .csv or .txt (a number a line), .npy, .parquet, or - for stdout.  "
            "[default: -; with --json nowhere]",
        ),
    ] = None,
    on_error: Annotated[
        str,
        typer.Option(metavar="POLICY", help="Malformed lines: fatal, or nan in place of their probability."),
    ] = "fatal",
    checkpoint: CheckpointStep = None,
    port: Port = 0,
    as_json: Json = False,
) -> None:
    """Predict the probability of a click for every sample of a log, in its order.

    Lines are transformed as the run's own log was; labels are optional, and with them the summary has AUC and
    logloss. The log is streamed: its size does not matter. The summary goes to stderr where the
    probabilities go to stdout.
    """
    from stretto.cli.evaluate import click_quality, configured
    from stretto.cli.output import failures_reported
    from stretto.recommender.serve.job import ScoringJob, run_pass
    from stretto.recommender.serve.output import STDOUT, check_output
    from stretto.run.config.schema import TrainConfig
    from stretto.run.evaluate.trained import find_trained
    from stretto.run.train.launch import exit_code

    check_choice("--on-error", on_error, ("fatal", "nan"))
    if as_json and out == STDOUT:
        raise StrettoError("--out - and --json both write to stdout", hint="give --out a file")
    out = out or (None if as_json else STDOUT)
    if out is not None:
        check_output(out)
    sources = [source for source in log if "=" not in source or os.path.exists(source)]
    if not sources:
        raise StrettoError("no log is named", hint="name the files of a click log, or a click folder")
    trained = find_trained(path, checkpoint)
    config = configured(trained, [field for field in log if field not in sources])
    if isinstance(config, TrainConfig):
        raise StrettoError(
            f"{trained.checkpoint} is of a language model, and score is for recommenders",
            hint="stretto evaluate gives its loss",
        )
    job = ScoringJob(
        training=config,
        trained=trained,
        log=tuple(sources),
        out=out,
        on_error=cast("OnError", on_error),
    )
    with failures_reported():
        result = run_pass(job, as_json, port)
    if os.environ.get("RANK", "0") == "0":
        outcome = result.outcome or {"stopped": True}
        if outcome["stopped"]:
            print("stopped: not all samples were scored", file=sys.stderr)
        else:
            results = {name: value for name, value in outcome.items() if name != "stopped"}
            report = CommandReport({**results, "out": out, "checkpoint": str(trained.checkpoint)})
            if quality := click_quality(results):
                report.line(quality)
            speed = f"{results['rows']:,} rows in {results['seconds']:.1f} s "
            speed += f"({results['rows_per_s']:,.0f} rows/s)"
            if results["malformed"]:
                speed += f", {results['malformed']:,} malformed lines without a probability"
            report.line(speed if out == STDOUT else f"{speed}, written to {out}")
            report.print(as_json, sys.stderr if out == STDOUT else None)
    raise typer.Exit(exit_code(result))
