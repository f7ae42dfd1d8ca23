"""`stretto data clicks` and `synth-clicks`: click folders from logs or from a synthetic model."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from stretto.cli.options import Json, check_choice, grouped
from stretto.cli.output import stage_progress
from stretto.cli.report import CommandReport, number, text
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.recommender.clicks.build import ClickBuildProgress, OnError, Settings, Split
    from stretto.recommender.clicks.folder import ClickFolder
    from stretto.recommender.clicks.synthetic.files import Report

CLICKS_EXAMPLE = "Example: stretto data clicks day_0.gz day_1.gz --out clicks --threshold 10"


@dataclass(frozen=True, kw_only=True)
class ClicksOptions:
    """Options of `stretto data clicks`."""

    sources: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE", help="Files (also .gz), folders or globs, in order of time."),
    ]
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.")]
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="NAME", help="criteo, parquet or csv.  [default: by file name]"),
    ] = None
    threshold: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Ids that occur fewer times than this share one row of their table.  [default: 10]",
        ),
    ] = None
    rows: Annotated[
        int | None,
        typer.Option(
            "--hash", metavar="ROWS", help="No vocabulary: hash ids into this many rows per feature."
        ),
    ] = None
    raw: Annotated[
        bool, typer.Option("--raw", help="No vocabulary: keep ids as they are, for tables with `ids: hash`.")
    ] = False
    flags: Annotated[
        bool, typer.Option("--missing-flags", help="Add a column for each number: 1 where it was missing.")
    ] = False
    on_error: Annotated[
        str, typer.Option(metavar="POLICY", help="Malformed lines: skip (at most 1% of all) or fatal.")
    ] = "skip"
    label: Annotated[str, typer.Option(metavar="NAME", help="Parquet and CSV: the column of the label.")] = (
        "label"
    )
    numbers: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Parquet and CSV: columns of numbers.  [default: I1, I2, ...]"),
    ] = None
    features: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Parquet and CSV: columns of ids.  [default: C1, C2, ...]"),
    ] = None
    split: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What training holds out: named, the files that are named valid, val, dev, eval, test, "
            "...; or share, a share of the log, whatever its files are named.",
        ),
    ] = "named"
    force: Annotated[bool, typer.Option("--force", help="Replace the clicks of another source in DIR.")] = (
        False
    )
    as_json: Json = False


@grouped(ClicksOptions)
def clicks(options: ClicksOptions) -> None:
    """Read a click log (Criteo, Parquet, CSV) into a folder that a recommender trains on.

    A folder already built from the same files and settings is kept; a build that was stopped continues where
    it was.
    """
    from stretto.recommender.clicks.build import build
    from stretto.recommender.clicks.tabular import ColumnNames

    settings = _settings(options)

    def names(text: str | None) -> tuple[str, ...] | None:
        return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())

    def described(at: ClickBuildProgress) -> tuple[str, int]:
        malformed = f", {at.malformed} malformed" if at.malformed else ""
        return f"{at.stage}: {at.lines:,} lines{malformed}", at.bytes

    columns = ColumnNames(options.label, names(options.numbers), names(options.features))
    try:
        with stage_progress(options.as_json, described) as progress:
            folder = build(
                options.sources,
                options.out,
                settings,
                form=options.form,
                columns=columns,
                replace=options.force,
                progress=progress,
            )
    except KeyboardInterrupt:
        print("stopped: the same command continues where it was", file=sys.stderr)
        raise
    clicks_report(folder).print(options.as_json)


def clicks_report(folder: ClickFolder, **more: Any) -> CommandReport:
    """Report the contents of a click folder."""
    index, popularity = folder.index, folder.popularity()
    malformed: list[tuple[str, int, str]] = index.extra.get("malformed", [])
    values: dict[str, Any] = {
        "samples": folder.samples,
        "base_rate": folder.base_rate,
        "path": str(folder.path),
        "numbers": len(folder.numbers),
    }
    features: list[dict[str, Any]] = [
        {
            "name": feature.name,
            "rows": feature.rows,
            "hot": popularity[feature.name].hot,
            "ids": popularity[feature.name].ids,
            "most_popular": max((share / n for n, share in popularity[feature.name].buckets), default=0),
        }
        for feature in folder.features
    ]
    parts = [[name, samples] for name, samples in index.parts]
    held_out = [name for name, _ in index.parts[len(index.parts) - index.held_parts :]]
    sizes = {"bytes": sum(sums.bytes for sums in index.files.values()), "lines": index.lines}
    extra = {name: value for name, value in index.extra.items() if name not in ("malformed", "unread")}
    record = {**values, "features": features, "parts": parts, "held_out": held_out, **sizes}
    record |= {"malformed": malformed, "source": index.source, "notes": folder.notes(), **extra, **more}
    report = CommandReport(record)
    by_name = f"{', '.join(held_out[-8:])} (by name)"
    shown = {
        **values,
        "parts": ", ".join(f"{name} {samples:,}" for name, samples in parts[-4:]),
        "held out": by_name
        if held_out
        else "no file by its name: training holds out the last share of the log (data.valid)",
        **sizes,
        "source": " ".join(index.source[:8]),
        **extra,
        **more,
    }
    rows = [row for name, value in shown.items() for row in _rows(name, value)]
    for name, value in rows:
        report.value(name, value, indent=max(len(name) for name, _ in rows) + 2)
    report.lines(folder.notes())
    report.lines(f"malformed: {name}, line {line}: {reason}" for name, line, reason in malformed)
    report.table(
        [
            text("feature"),
            number("rows", ","),
            number("ids a sample", ".4g"),
            number("ids seen", ","),
            number("most popular", ".1%"),
        ],
        [[f["name"], f["rows"] or "any", f["hot"], f["ids"], f["most_popular"]] for f in features],
    )
    return report


def _rows(name: str, value: Any) -> list[tuple[str, str]]:
    """Return the labelled texts of a value: one for plain values, and one for each nested group."""
    if not isinstance(value, dict):
        is_real = type(value) is float
        return [(name, f"{value:,}" if type(value) is int else f"{value:.5g}" if is_real else str(value))]
    group = cast(dict[str, Any], value)
    plain = [(key, _rows("", item)[0][1]) for key, item in group.items() if not isinstance(item, dict)]
    rows = [(name, ", ".join(f"{key} {item}" for key, item in plain))] if plain else []
    nested = [(f"{name} {key}", item) for key, item in group.items() if isinstance(item, dict)]
    return rows + [row for label, item in nested for row in _rows(label, item)]


def _settings(options: ClicksOptions) -> Settings:
    from stretto.recommender.clicks.build import Settings

    threshold, rows = options.threshold, options.rows
    if sum((threshold is not None, rows is not None, options.raw)) > 1:
        raise StrettoError(
            "--threshold, --hash and --raw exclude each other: each maps ids to rows in its own way",
            hint="choose one",
        )
    check_choice("--on-error", options.on_error, ("skip", "fatal"))
    check_choice("--split", options.split, ("named", "share"))
    return Settings(
        kind="raw" if options.raw else "hash" if rows is not None else "vocabulary",
        threshold=10 if threshold is None else threshold,
        rows=rows,
        flags=options.flags,
        on_error=cast("OnError", options.on_error),
        split=cast("Split", options.split),
    )


# ------------------------------------------------------------------ synthetic logs

SYNTH_EXAMPLE = "Example: stretto data synth-clicks --out clicks --samples 1e6 --rows 1e3:1e5"


@dataclass(frozen=True, kw_only=True)
class SynthOptions:
    """Options of `stretto data synth-clicks`."""

    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.")]
    samples: Annotated[
        str, typer.Option(metavar="N", help="Samples, held-out ones included; 1e6 may be written.")
    ] = "1e6"
    features: Annotated[int, typer.Option(metavar="N", help="Categorical features.")] = 26
    rows: Annotated[
        str,
        typer.Option(
            metavar="LOW:HIGH", help="Ids per feature, geometrically from the first feature to the last."
        ),
    ] = "1e3:1e5"
    hot: Annotated[float, typer.Option(metavar="N", help="Ids per sample and feature.")] = 1.0
    varying: Annotated[
        bool, typer.Option("--varying", help="Vary the ids per sample from 0 to twice --hot.")
    ] = False
    skew: Annotated[
        float, typer.Option(metavar="S", help="The k-th most popular id occurs in proportion to 1 / k^S.")
    ] = 1.05
    dense: Annotated[int, typer.Option(metavar="N", help="Dense features.")] = 13
    base_rate: Annotated[float, typer.Option(metavar="P", help="Share of samples that are clicked.")] = 0.25
    strength: Annotated[
        float,
        typer.Option(
            metavar="S", help="Standard deviation of the true logit: 0 is pure noise, 3 has hardly any."
        ),
    ] = 1.5
    valid: Annotated[float, typer.Option(metavar="P", help="Share of samples held out: the last ones.")] = 0.1
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the random numbers.")] = 0
    form: Annotated[
        str,
        typer.Option("--format", metavar="NAME", help="folder, or criteo: text files in Criteo's format."),
    ] = "folder"
    as_json: Json = False


@grouped(SynthOptions)
def synth_clicks(options: SynthOptions) -> None:
    """Make a synthetic click log whose true click probabilities and lowest reachable entropy are known.

    A log already made at DIR with the same settings is kept. A click folder that was stopped is continued.
    """
    from stretto.recommender.clicks.synthetic.files import write
    from stretto.recommender.clicks.synthetic.spec import SyntheticSpec, geometric_features

    low, _, high = options.rows.partition(":")
    spec = SyntheticSpec(
        features=geometric_features(
            options.features,
            integer(low, "--rows"),
            integer(high or low, "--rows"),
            hot=options.hot,
            skew=options.skew,
            varying=options.varying,
        ),
        samples=integer(options.samples, "--samples"),
        valid=options.valid,
        dense=options.dense,
        base_rate=options.base_rate,
        strength=options.strength,
        seed=options.seed,
    )
    with _sample_progress(options.as_json) as progress:
        written = write(spec, options.out, options.form, progress)
    parts = written.best
    clicked = sum(part["base_rate"] * part["samples"] for part in parts.values()) / written.samples
    report = CommandReport(
        {
            "path": str(written.path),
            "format": written.form,
            "samples": written.samples,
            "bytes": written.bytes,
            "base_rate": clicked,
            "best": parts,
            "kept": written.reused,
        }
    )
    report.line(
        f"{written.path}: {written.samples:,} samples, {clicked:.2%} clicked, {written.bytes / 1e6:,.1f} MB"
        f"{', written earlier' if written.reused else ''}"
    )
    metrics = ("entropy", "logloss", "auc")
    report.table(
        [
            text("best possible"),
            number("samples", ","),
            *(number(title, ".4f") for title in ("entropy", "log-loss", "AUC")),
        ],
        [
            [name, part["samples"], *("-" if part[key] is None else part[key] for key in metrics)]
            for name, part in parts.items()
        ],
    )
    report.print(options.as_json)


def integer(text: str, option: str) -> int:
    """Return a whole number, which may be written as 1e6.

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
    """Show a progress bar if stdout is a terminal."""
    if as_json or not sys.stdout.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("samples"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("samples", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
