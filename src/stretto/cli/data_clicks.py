"""`stretto data clicks` and `synth-clicks`: click folders from logs or from a synthetic model."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from stretto.cli.options import Json
from stretto.cli.output import report, stage_progress
from stretto.errors import StrettoError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.recommender.clicks.build import Progress, Settings
    from stretto.recommender.clicks.folder import ClickFolder
    from stretto.recommender.clicks.synthetic.files import Report, Written

CLICKS_EXAMPLE = "Example: stretto data clicks day_0.gz day_1.gz --out clicks --threshold 10"


def clicks(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE", help="Files (also .gz), folders or globs, in order of time."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.")],
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="NAME", help="criteo, parquet or csv.  [default: by file name]"),
    ] = None,
    threshold: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Ids that occur fewer times than this share one row of their table.  [default: 10]",
        ),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            "--hash", metavar="ROWS", help="No vocabulary: hash ids into this many rows per feature."
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="No vocabulary: keep ids as they are, for tables with `ids: hash`.")
    ] = False,
    flags: Annotated[
        bool, typer.Option("--missing-flags", help="Add a column for each number: 1 where it was missing.")
    ] = False,
    on_error: Annotated[
        str, typer.Option(metavar="POLICY", help="Malformed lines: skip (at most 1% of all) or fatal.")
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
    split: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What training holds out: named, the files that are named valid, val, dev, eval, test, "
            "...; or share, a share of the log, whatever its files are named.",
        ),
    ] = "named",
    force: Annotated[
        bool, typer.Option("--force", help="Replace the clicks of another source in DIR.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Read a click log (Criteo, Parquet, CSV) into a folder that a recommender trains on.

    A folder already built from the same files and settings is kept; a build that was stopped continues where
    it was.
    """
    from stretto.recommender.clicks.build import build
    from stretto.recommender.clicks.tabular import Named

    settings = _settings(threshold, rows, raw=raw, flags=flags, on_error=on_error, split=split)
    named = Named(label, _split(numbers), _split(features))
    try:
        with stage_progress(as_json, _described) as progress:
            folder = build(sources, out, settings, form=form, named=named, replace=force, progress=progress)
    except KeyboardInterrupt:
        print("stopped: the same command continues where it was", file=sys.stderr)
        raise
    show(folder, as_json)


def show(folder: ClickFolder, as_json: bool, **more: Any) -> None:
    """Print what a click folder holds."""
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
        "held_out": [name for name, _ in index.parts[len(index.parts) - index.held_parts :]],
        "bytes": sum(sums.bytes for sums in index.files.values()),
        "lines": index.lines,
        "malformed": index.extra.get("malformed", []),
        "source": index.source,
        "notes": folder.notes(),
        **{name: value for name, value in index.extra.items() if name not in ("malformed", "unread")},
        **more,
    }
    report(facts, as_json, lambda console: _table(facts, console))


def _table(facts: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    rows = Table(show_header=False, box=None)
    for name, value in facts.items():
        if name == "parts":
            rows.add_row(name, ", ".join(f"{part} {samples:,}" for part, samples in value[-4:]))
        elif name == "held_out":
            no = "no file by its name: training holds out the last share of the log (data.valid)"
            rows.add_row("held out", f"{', '.join(value[-8:])} (by name)" if value else no)
        elif isinstance(value, dict):
            for words, text in _facts_of(name, cast(dict[str, Any], value)):
                rows.add_row(words, text)
        elif name == "source":
            rows.add_row(name, " ".join(value[:8]))
        elif name not in ("features", "malformed", "notes"):
            rows.add_row(name, _number_text(value))
    console.print(rows)
    for note in facts["notes"]:
        console.print(note, markup=False, soft_wrap=True)
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
    """Rows of a table: one for plain values, and one for each nested group."""
    plain = {key: value for key, value in facts.items() if not isinstance(value, dict)}
    lines = (
        [(name, ", ".join(f"{key} {_number_text(value)}" for key, value in plain.items()))] if plain else []
    )
    for key, value in facts.items():
        if isinstance(value, dict):
            lines += _facts_of(f"{name} {key}", cast(dict[str, Any], value))
    return lines


def _number_text(value: Any) -> str:
    return f"{value:,}" if type(value) is int else f"{value:.5g}" if type(value) is float else str(value)


def _settings(
    threshold: int | None, rows: int | None, raw: bool, flags: bool, on_error: str, split: str
) -> Settings:
    from stretto.recommender.clicks.build import OnError, Settings, Split

    if sum((threshold is not None, rows is not None, raw)) > 1:
        raise StrettoError(
            "--threshold, --hash and --raw exclude each other: each maps ids to rows in its own way",
            hint="choose one",
        )
    policies: dict[str, OnError] = {"skip": "skip", "fatal": "fatal"}
    splits: dict[str, Split] = {"named": "named", "share": "share"}
    for option, value, allowed in (("--on-error", on_error, policies), ("--split", split, splits)):
        if value not in allowed:
            near = nearest(value, allowed)
            raise StrettoError(
                f"{option} {value}: allowed are {' and '.join(allowed)}",
                hint=f"did you mean {near}?" if near else None,
            )
    kind = "raw" if raw else "hash" if rows is not None else "vocabulary"
    return Settings(
        kind=kind,
        threshold=10 if threshold is None else threshold,
        rows=rows,
        flags=flags,
        on_error=policies[on_error],
        split=splits[split],
    )


def _split(names: str | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(name.strip() for name in names.split(",") if name.strip())


def _described(at: Progress) -> tuple[str, int]:
    malformed = f", {at.malformed} malformed" if at.malformed else ""
    return f"{at.stage}: {at.lines:,} lines{malformed}", at.bytes


# ------------------------------------------------------------------ synthetic logs

SYNTH_EXAMPLE = "Example: stretto data synth-clicks --out clicks --samples 1e6 --rows 1e3:1e5"


def synth_clicks(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.")],
    samples: Annotated[
        str, typer.Option(metavar="N", help="Samples, held-out ones included; 1e6 may be written.")
    ] = "1e6",
    features: Annotated[int, typer.Option(metavar="N", help="Categorical features.")] = 26,
    rows: Annotated[
        str,
        typer.Option(
            metavar="LOW:HIGH", help="Ids per feature, geometrically from the first feature to the last."
        ),
    ] = "1e3:1e5",
    hot: Annotated[float, typer.Option(metavar="N", help="Ids per sample and feature.")] = 1.0,
    varying: Annotated[
        bool, typer.Option("--varying", help="Vary the ids per sample from 0 to twice --hot.")
    ] = False,
    skew: Annotated[
        float, typer.Option(metavar="S", help="The k-th most popular id occurs in proportion to 1 / k^S.")
    ] = 1.05,
    dense: Annotated[int, typer.Option(metavar="N", help="Dense features.")] = 13,
    base_rate: Annotated[float, typer.Option(metavar="P", help="Share of samples that are clicked.")] = 0.25,
    strength: Annotated[
        float,
        typer.Option(
            metavar="S", help="Standard deviation of the true logit: 0 is pure noise, 3 has hardly any."
        ),
    ] = 1.5,
    valid: Annotated[
        float, typer.Option(metavar="P", help="Share of samples held out: the last ones.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the random numbers.")] = 0,
    form: Annotated[
        str,
        typer.Option("--format", metavar="NAME", help="folder, or criteo: text files in Criteo's format."),
    ] = "folder",
    as_json: Json = False,
) -> None:
    """Make a synthetic click log whose true click probabilities and lowest reachable entropy are known.

    A log already made at DIR with the same settings is kept. A click folder that was stopped is continued.
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
    with _sample_progress(as_json) as progress:
        written = write(spec, out, form, progress)
    _show_synthetic(written, as_json)


def _show_synthetic(written: Written, as_json: bool) -> None:
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
    """A whole number, which may be written as 1e6.

    Raises:
        StrettoError: anything else.
    """
    try:
        value = float(text)
        if value == int(value):
            return int(text) if text.strip().isdigit() else int(value)
    except (ValueError, OverflowError):
        pass
    example = "LOW:HIGH, as 1e3:1e5" if option == "--rows" else "a whole number, as 1000000 or 1e6"
    raise StrettoError(f"{option}: {text!r} is not a whole number", hint=example)


@contextmanager
def _sample_progress(as_json: bool) -> Generator[Report | None]:
    """A progress bar where stdout is a terminal, otherwise nothing."""
    if as_json or not sys.stdout.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("samples"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("samples", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
