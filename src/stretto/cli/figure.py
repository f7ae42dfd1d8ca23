"""`stretto figure`: predictions over the published points of a paper's figure or table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.options import Json
from stretto.cli.output import check_writable, command_app, fitting_table, report, write_bytes, write_text
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.planner.table.published import Comparison, Point

app = command_app()


@app.command(epilog="Example: stretto figure zb-5 --out zb-5.svg --html zb-5.html")
def figure(
    name: Annotated[
        str | None, typer.Argument(metavar="[FIGURE]", help="A name that --list shows, such as zb-5.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the figures.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the picture here, as .svg or .png.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with the picture and a table here.")] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write the published table with columns of predictions here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict every run of a published figure or table, and compare with what was measured.

    The measurements ship with Stretto (docs/tables in a clone), so that the stated errors can be repeated.
    """
    from stretto.planner.table.published import compare, find_figure

    if listed or name is None:
        if out or html or csv or not listed:
            raise StrettoError("name a figure", hint="stretto figure --list shows them, as in zb-5")
        report(listing(), as_json, _list)
        return
    if out is not None and out.suffix not in (".svg", ".png"):
        raise StrettoError(f"--out is {out}", hint="a name that ends in .svg or .png; --html for a page")
    check_writable(out, html, csv)
    comparison = compare(find_figure(name))
    written = _write(comparison, out, html, csv)
    report(facts(comparison) if as_json else {}, as_json, lambda to: _show(to, comparison, written))


def _write(comparison: Comparison, out: Path | None, html: Path | None, csv: Path | None) -> list[Path]:
    from stretto.view.figure import figure_html, figure_svg
    from stretto.view.svg import png_of

    if out is not None:
        svg = figure_svg(comparison)
        if out.suffix == ".png":
            write_bytes(out, png_of(svg))
        else:
            write_text(out, svg)
    if html is not None:
        write_text(html, figure_html(comparison))
    if csv is not None:
        from stretto.cli.predict import written

        write_text(csv, written(comparison.rows))
    return [path for path in (out, html, csv) if path is not None]


def listing() -> dict[str, Any]:
    """The figures as the command's JSON."""
    from stretto.planner.table.published import FIGURES

    return {
        "figures": [
            {"name": one.name, "title": one.title, "table": f"{one.table}.csv", "fitted": one.fitted}
            for one in FIGURES.values()
        ],
    }


def _list(to: Console) -> None:
    from stretto.planner.table.published import FIGURES

    for one in FIGURES.values():
        fitted = "constants were fitted on its runs" if one.fitted else "no constant was fitted on its runs"
        to.print(f"{one.name:14} {one.title}; {fitted}")


def facts(comparison: Comparison) -> dict[str, Any]:
    """A figure as the command's JSON."""
    figure = comparison.figure
    return {
        "figure": figure.name,
        "title": figure.title,
        "source": comparison.source,
        "measure": figure.measure,
        "fitted": figure.fitted,
        "points": [vars(point) for point in comparison.points],
        **comparison.scores.facts(),
    }


def _show(to: Console, comparison: Comparison, written: list[Path]) -> None:
    from stretto.view.figure import summary_line

    to.print(comparison.figure.title)
    to.print(f"{comparison.figure.measure}; error: of the step time")
    rows = [_row(point) for point in comparison.points]
    rows = [row if any(one.panel for one in comparison.points) else {**row, "model": ""} for row in rows]
    shown = [name for name in rows[0] if any(row[name] for row in rows)]
    to.print(
        fitting_table(
            to,
            [{name: row[name] for name in shown} for row in rows],
            left=("model", "at", "series", "layout", _STRIP),
            optional=("layout", _STRIP, "interval"),
        ),
        soft_wrap=True,
    )
    to.print(summary_line(comparison))
    to.print(f"source: {comparison.source}")
    for path in written:
        to.print(f"wrote {path}", soft_wrap=True)


_WORST = 20  # percent at the ends of a strip
_STRIP = f"-{_WORST}%  0  +{_WORST}%"


def _row(point: Point) -> dict[str, str]:
    return {
        "model": point.panel,
        "at": point.at,
        "series": point.series,
        "layout": point.layout,
        "published": f"{point.published:.3g}",
        "predicted": f"{point.predicted:.3g}",
        "interval": f"{point.low:.3g}-{point.high:.3g}",
        "error": f"{100 * point.error:+.1f}%",
        _STRIP: _strip(100 * point.error),
    }


def _strip(percent: float) -> str:
    """The error as a place between the two ends; at an end: that much or more."""
    half = len(_STRIP) // 2
    at = half + max(-half, min(half, round(percent / _WORST * half)))
    cells = ["."] * (2 * half + 1)
    cells[half] = "|"
    cells[at] = "*"
    return "".join(cells)
