"""`stretto score`: probabilities of a trained recommender for new clicks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app
from stretto.errors import StrettoError, nearest

app = command_app()


@app.command(epilog="Example: stretto score runs/dlrm day_23.gz --out clicks.parquet")
def score(
    path: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A run's folder (its newest checkpoint), or a checkpoint."),
    ],
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
    checkpoint: Annotated[
        int | None, typer.Option(metavar="STEP", min=0, help="The run's checkpoint of this step.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on which local ranks meet; 0: any.")] = 0,
    as_json: Json = False,
) -> None:
    """Predict the probability of a click for every sample of a log, in its order.

    Lines are transformed as the run's own log was; labels are optional, and with them the summary has AUC and
    logloss. The log is streamed: its size does not matter. The summary goes to stderr where the
    probabilities go to stdout.
    """
    from stretto.cli.evaluate import configured
    from stretto.cli.output import failures_reported
    from stretto.recommender.serve.job import Request, run_pass
    from stretto.recommender.serve.output import STDOUT, check_output
    from stretto.run.config.schema import TrainConfig
    from stretto.run.evaluate.trained import find_trained
    from stretto.run.train.launch import exit_code

    if on_error not in ("fatal", "nan"):
        near = nearest(on_error, ("fatal", "nan"))
        hint = f"did you mean {near}?" if near else "fatal or nan"
        raise StrettoError(f"--on-error {on_error}: allowed are fatal and nan", hint=hint)
    if as_json and out == STDOUT:
        raise StrettoError("--out - and --json both write to stdout", hint="give --out a file")
    out = out or (None if as_json else STDOUT)
    if out is not None:
        check_output(out)
    sources = [word for word in log if "=" not in word or os.path.exists(word)]
    if not sources:
        raise StrettoError("no log is named", hint="name the files of a click log, or a click folder")
    trained = find_trained(path, checkpoint)
    config = configured(trained, [word for word in log if word not in sources])
    if isinstance(config, TrainConfig):
        raise StrettoError(
            f"{trained.checkpoint} is of a language model, and score is for recommenders",
            hint="stretto evaluate gives its loss",
        )
    request = Request(trained=trained, log=tuple(sources), out=out, on_error=on_error)
    with failures_reported():
        result = run_pass(config, request, as_json, port)
    if os.environ.get("RANK", "0") == "0":
        _report(result.outcome or {"stopped": True}, trained.checkpoint, out, as_json)
    raise typer.Exit(exit_code(result))


def _report(outcome: dict[str, Any], checkpoint: Path, out: str | None, as_json: bool) -> None:
    import json

    from stretto.cli.evaluate import click_numbers

    to = sys.stderr if out == "-" else sys.stdout
    if outcome["stopped"]:
        print("stopped: not all samples were scored", file=sys.stderr)
        return
    facts = {name: value for name, value in outcome.items() if name != "stopped"}
    if as_json:
        print(json.dumps({**facts, "out": out, "checkpoint": str(checkpoint)}))
        return
    rest = f"{facts['rows']:,} rows in {facts['seconds']:.1f} s ({facts['rows_per_s']:,.0f} rows/s)"
    if facts["malformed"]:
        rest += f", {facts['malformed']:,} malformed lines without a probability"
    if out != "-":
        rest += f", written to {out}"
    for line in filter(None, (click_numbers(facts)[0], rest)):
        print(line, file=to)
