"""`stretto data synth-clicks`: a synthetic click log, with the best that a model can reach on it."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.output import Json, report
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.recommender.clicks.synthetic.files import Report, Written

EXAMPLE = "Example: stretto data synth-clicks --out clicks --samples 1e6 --rows 1e3:1e5"


def synth_clicks(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to make.")],
    samples: Annotated[
        str, typer.Option(metavar="N", help="Samples, held-out ones included; 1e6 may be written.")
    ] = "1e6",
    features: Annotated[int, typer.Option(metavar="N", help="Categorical features.")] = 26,
    rows: Annotated[
        str,
        typer.Option(metavar="LOW:HIGH", help="Ids of the features, from the first feature's to the last's."),
    ] = "1e3:1e5",
    hot: Annotated[float, typer.Option(metavar="N", help="Ids of a sample, of each feature.")] = 1.0,
    varying: Annotated[
        bool, typer.Option("--varying", help="Their number varies from sample to sample, from 0 to 2 N.")
    ] = False,
    skew: Annotated[
        float, typer.Option(metavar="S", help="The k-th most popular id is as popular as 1 / k^S.")
    ] = 1.05,
    dense: Annotated[int, typer.Option(metavar="N", help="Numbers of a sample.")] = 13,
    base_rate: Annotated[
        float, typer.Option(metavar="P", help="Part of the samples that is clicked.")
    ] = 0.25,
    strength: Annotated[
        float,
        typer.Option(metavar="S", help="Standard deviation of the true logit: 0 is noise, 3 nearly none."),
    ] = 1.5,
    valid: Annotated[float, typer.Option(metavar="P", help="Part that is held out: the last samples.")] = 0.1,
    seed: Annotated[int, typer.Option(metavar="N", help="Another seed, another log.")] = 0,
    form: Annotated[
        str, typer.Option("--format", metavar="NAME", help="folder, or criteo: text as Criteo's logs are.")
    ] = "folder",
    as_json: Json = False,
) -> None:
    """Make a click log of any size, whose true click probabilities and best possible entropy are known.

    What is at DIR already, of the same settings, is kept. A click folder that was stopped goes on.
    """
    from stretto.recommender.clicks.synthetic.files import write
    from stretto.recommender.clicks.synthetic.spec import SyntheticSpec, spread

    low, high = _range(rows)
    spec = SyntheticSpec(
        features=spread(features, low, high, hot=hot, skew=skew, varying=varying),
        samples=_whole(samples, "--samples"),
        valid=valid,
        dense=dense,
        base_rate=base_rate,
        strength=strength,
        seed=seed,
    )
    with _progress(as_json) as progress:
        written = write(spec, out, form, progress)
    _show(written, as_json)


def _show(written: Written, as_json: bool) -> None:
    parts = written.best
    facts: dict[str, Any] = {
        "path": str(written.path),
        "format": written.form,
        "samples": written.samples,
        "bytes": written.bytes,
        "base_rate": sum(part["base_rate"] * part["samples"] for part in parts.values()) / written.samples,
        "best": parts,
        "kept": written.kept,
    }

    def text(console: Console) -> None:
        from rich.table import Table

        console.print(
            f"{written.path}: {written.samples:,} samples, {facts['base_rate']:.2%} clicked, "
            f"{written.bytes / 1e6:,.1f} MB{', there already' if written.kept else ''}",
            markup=False,
        )
        table = Table("best possible", "samples", "entropy", "log-loss", "AUC", box=None)
        for name, part in parts.items():
            numbers = [
                "-" if part[key] is None else f"{part[key]:.4f}" for key in ("entropy", "logloss", "auc")
            ]
            table.add_row(name, f"{part['samples']:,}", *numbers)
        console.print(table)

    report(facts, as_json, text)


def _range(text: str) -> tuple[int, int]:
    """LOW:HIGH, or one number for both."""
    low, _, high = text.partition(":")
    return _whole(low, "--rows"), _whole(high or low, "--rows")


def _whole(text: str, option: str) -> int:
    """A whole number; 1e6 is one.

    Raises:
        StrettoError: it is none.
    """
    try:
        value = float(text)
        if value == int(value):
            return int(text) if text.strip().isdigit() else int(value)
    except (ValueError, OverflowError):
        pass
    wanted = "LOW:HIGH, as 1e3:1e5" if option == "--rows" else "a whole number, as 1000000 or 1e6"
    raise StrettoError(f"{option}: {text!r} is no whole number", hint=wanted)


@contextmanager
def _progress(as_json: bool) -> Generator[Report | None]:
    """A bar when stdout is a terminal, else silence."""
    if as_json or not sys.stdout.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("samples"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("samples", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
