"""`stretto data clicks`: a click log to a click folder, and what a click folder holds."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from stretto.cli.output import Json, report
from stretto.errors import StrettoError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.recommender.clicks.build import Progress, Report, Settings
    from stretto.recommender.clicks.folder import ClickFolder

EXAMPLE = "Example: stretto data clicks day_0.gz day_1.gz --out clicks --threshold 10"


def clicks(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE", help="Files, folders, globs, in the order of time; .gz too."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to make.")],
    form: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="NAME", help="criteo, parquet or csv.  [default: by the files' names]"
        ),
    ] = None,
    threshold: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Ids seen fewer times than this share one row of their table.  [default: 10]"
        ),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option("--hash", metavar="ROWS", help="No vocabulary: hash ids into so many rows a feature."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="No vocabulary: keep ids as they are, for tables with `ids: hash`.")
    ] = False,
    flags: Annotated[
        bool, typer.Option("--missing-flags", help="A column more for each number: 1 where it was missing.")
    ] = False,
    on_error: Annotated[
        str, typer.Option(metavar="POLICY", help="A malformed line: skip (at most 1% of all) or fatal.")
    ] = "skip",
    label: Annotated[
        str, typer.Option(metavar="NAME", help="Parquet and CSV: the column of the label.")
    ] = "label",
    numbers: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Parquet and CSV: columns of numbers.  [default: I1, I2, ...]"),
    ] = None,
    features: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Parquet and CSV: columns of ids.  [default: C1, C2, ...]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Read a click log (Criteo, Parquet, CSV) into a folder that a recommender trains on.

    A folder that is there already, from the same files and settings, is kept; a build that was stopped goes
    on where it was.
    """
    from stretto.recommender.clicks.build import build
    from stretto.recommender.clicks.tabular import Named

    settings = _settings(threshold, rows, raw, flags, on_error)
    named = Named(label, _split(numbers), _split(features))
    try:
        with _progress(as_json) as progress:
            folder = build(sources, out, settings, form=form, named=named, progress=progress)
    except KeyboardInterrupt:
        print("stopped: the same command goes on where it was", file=sys.stderr)
        raise
    show(folder, as_json)


def show(folder: ClickFolder, as_json: bool, **more: Any) -> None:
    """What a click folder holds."""
    index = folder.index
    facts: dict[str, Any] = {
        "samples": folder.samples,
        "base_rate": folder.base_rate,
        "path": str(folder.path),
        "numbers": len(folder.numbers),
        "features": [
            {
                "name": feature.name,
                "rows": feature.rows,
                "hot": folder.popularity()[feature.name].hot,
                "ids": folder.popularity()[feature.name].ids,
                "most_popular": max(
                    (share / n for n, share in folder.popularity()[feature.name].buckets), default=0
                ),
            }
            for feature in folder.features
        ],
        "parts": [[name, samples] for name, samples in index.parts],
        "bytes": sum(sums.bytes for sums in index.files.values()),
        "lines": index.lines,
        "malformed": index.extra.get("malformed", []),
        "source": index.source,
        **{name: value for name, value in index.extra.items() if name != "malformed"},
        **more,
    }
    report(facts, as_json, lambda console: _table(facts, console))


def _table(facts: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    rows = Table(show_header=False, box=None)
    for name, value in facts.items():
        if name == "parts":
            rows.add_row(name, ", ".join(f"{part} {samples:,}" for part, samples in value[-4:]))
        elif isinstance(value, dict):
            for words, told in _facts_of(name, cast(dict[str, Any], value)):
                rows.add_row(words, told)
        elif name == "source":
            rows.add_row(name, " ".join(value[:8]))
        elif name not in ("features", "malformed"):
            rows.add_row(name, _told(value))
    console.print(rows)
    for name, line, why in facts["malformed"]:
        console.print(f"malformed: {name}, line {line}: {why}", markup=False)
    tables = Table("feature", "rows", "ids a sample", "ids seen", "most popular", box=None)
    for each in facts["features"]:
        rows_of = "any" if each["rows"] is None else f"{each['rows']:,}"
        tables.add_row(
            each["name"], rows_of, f"{each['hot']:.4g}", f"{each['ids']:,}", f"{each['most_popular']:.1%}"
        )
    console.print(tables)


def _facts_of(name: str, facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of a table: one for what is plain, and one for each group of facts."""
    plain = {key: value for key, value in facts.items() if not isinstance(value, dict)}
    found = [(name, ", ".join(f"{key} {_told(value)}" for key, value in plain.items()))] if plain else []
    for key, value in facts.items():
        if isinstance(value, dict):
            found += _facts_of(f"{name} {key}", cast(dict[str, Any], value))
    return found


def _told(value: Any) -> str:
    return f"{value:,}" if type(value) is int else f"{value:.5g}" if type(value) is float else str(value)


def _settings(threshold: int | None, rows: int | None, raw: bool, flags: bool, on_error: str) -> Settings:
    from stretto.recommender.clicks.build import OnError, Settings

    if sum((threshold is not None, rows is not None, raw)) > 1:
        raise StrettoError(
            "--threshold, --hash and --raw are three ways to give ids their rows", hint="choose one"
        )
    policies: dict[str, OnError] = {"skip": "skip", "fatal": "fatal"}
    if on_error not in policies:
        near = nearest(on_error, policies)
        raise StrettoError(
            f"--on-error {on_error}: allowed are skip and fatal",
            hint=f"did you mean {near}?" if near else None,
        )
    kind = "raw" if raw else "hash" if rows is not None else "vocabulary"
    return Settings(
        kind=kind,
        threshold=10 if threshold is None else threshold,
        rows=rows,
        flags=flags,
        on_error=policies[on_error],
    )


def _split(names: str | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(name.strip() for name in names.split(",") if name.strip())


@contextmanager
def _progress(as_json: bool) -> Generator[Report | None]:
    """A bar when stdout is a terminal, a line a stage when not, silence with --json."""
    if as_json:
        yield None
    elif not sys.stdout.isatty():
        yield _Lines()
    else:
        from rich.progress import Progress as Bar

        with Bar(transient=True) as bar:
            task = bar.add_task("read")

            def show_bar(at: Progress) -> None:
                told = f"{at.stage}: {at.lines:,} lines" + (
                    f", {at.malformed} malformed" if at.malformed else ""
                )
                bar.update(task, description=told, completed=at.bytes, total=max(at.total, 1))

            yield show_bar


class _Lines:
    """Says each stage once."""

    def __init__(self) -> None:
        self._stage = ""

    def __call__(self, at: Progress) -> None:
        if at.stage != self._stage:
            self._stage = at.stage
            print(f"{at.stage}: {at.total / 1e6:.1f} MB", flush=True)
