"""`stretto predict`: time and memory of one layout, or of every row of a table, and how far off that was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.cli.face import Json, command_app, report, say_no
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.planner.estimate import Estimate

app = command_app()


@app.command(
    epilog="Example: stretto predict --model llama3-70b --cluster dgx-h100:512 tp=8 pp=4 micro=1 batch=512 "
    "schedule=interleaved chunks=5 recompute=selective zero=1"
)
def predict(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [key=value ...]",
            help="A config with overrides, or fields of a layout, by the names of a table's columns: tp, cp, "
            "ep, pp, dp, micro, batch, seq, schedule, chunks, group, recompute, zero, sp, precision, "
            "attention, software, offload, ...",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="A model by name, or its config.json.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="A cluster or device by name, with :N for N devices, or a YAML file.")
    ] = None,
    table: Annotated[
        Path | None, typer.Option(help="A CSV file: a run a row, in the columns of --table-columns.")
    ] = None,
    table_columns: Annotated[bool, typer.Option(help="Print the columns of a table (Markdown).")] = False,
    out: Annotated[Path | None, typer.Option(help="Where to write the table with what is predicted.")] = None,
    memory: Annotated[bool, typer.Option(help="Predict memory too.")] = True,
    as_json: Json = False,
) -> None:
    """Predict a step's time, with an interval, and the memory of the fullest rank.

    With --table: of every row, and where measured columns exist how far off that is, beside a model of two
    lines and the noise of measuring twice. What a row leaves open takes a default, which is told. Exit code
    1: the layout does not fit the device.
    """
    given = words or []
    if table_columns:
        from stretto.planner.table.file import reference

        text = reference()
        report({"columns": text}, as_json, lambda _: print(text, end=""))
        return
    if table is not None:
        if given:
            raise StrettoError(
                f"--table has its layouts in its rows, not in {given[0]!r}", hint="leave out one of both"
            )
        from stretto.cli.predict_table import predict_table

        predict_table(table=table, out=out, cluster=cluster, model=model, memory=memory, as_json=as_json)
        return
    if out is not None:
        raise StrettoError("--out is for a table", hint="add --table FILE.csv, or print with --json")
    from stretto.cli.predict_one import facts, show

    found, defaults = _one(given, model, cluster, memory)
    row = facts(found, defaults)
    report({"rows": [row], "error": None}, as_json, lambda to: show(to, found, defaults))
    if found.memory is not None and found.memory.verdict == "does not fit":
        raise say_no()


def _is_config(word: str, model: str | None) -> bool:
    """Whether the first word names a config; without a model it has to."""
    named = word.endswith((".yaml", ".yml")) or Path(word).is_file()
    return "=" not in word and (named or model is None)


def _one(
    words: list[str], model: str | None, cluster: str | None, memory: bool
) -> tuple[Estimate, dict[str, str]]:
    """The estimate of one layout, and the defaults that were taken."""
    from stretto.planner.estimate import estimate

    if cluster is None:
        raise StrettoError("there is no cluster", hint="add --cluster dgx-a100-80gb:64, or another")
    if words and _is_config(words[0], model):
        if model is not None:
            raise StrettoError(
                f"the model is that of {words[0]}, not {model!r}", hint="leave out --model, or the config"
            )
        from stretto.cli.predict_one import configured

        job, machine, running = configured(words[0], words[1:], cluster)
        return estimate(job, machine, running, memory=memory), {}
    if model is None:
        raise StrettoError("there is no model", hint="add --model llama3-8b, a config, or --table FILE.csv")
    from stretto.cli.predict_one import spoken

    row = spoken(words, model, cluster)
    return estimate(row.job, row.cluster, row.running, memory=memory), dict(row.defaults)
