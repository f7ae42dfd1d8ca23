"""Predictions over the published points of a paper's figure or table.

    python benchmarks/figure.py --list
    python benchmarks/figure.py zb-5 --out zb-5.svg --html zb-5.html --csv rows.csv

Predicts every run of the table (published/tables), and compares with what was measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from published.figure_page import figure_html, figure_svg, summary_line
from published.figures import FIGURES, Comparison, Point, compare, find_figure
from rich.console import Console

from stretto.cli.output import check_writable, print_error, write_file
from stretto.cli.predict import table_csv
from stretto.cli.report import ColumnStyle, CommandReport
from stretto.errors import StrettoError
from stretto.view.svg import png_of


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """Return a figure as `--json` prints it."""
    figure = comparison.figure
    return {
        "figure": figure.name,
        "title": figure.title,
        "source": comparison.source,
        "measure": figure.measure,
        "fitted": figure.fitted,
        "points": [vars(point) for point in comparison.points],
        **comparison.scores.as_dict(),
    }


def show(to: Console, comparison: Comparison) -> None:
    """Print every point beside its prediction, and the scores."""
    rows = [_row(point) for point in comparison.points]
    texts = ("model", "at", "series", "layout", _STRIP)
    report = CommandReport({})
    report.line(comparison.figure.title)
    report.line(f"{comparison.figure.measure}; error: of the step time")
    report.table(
        [ColumnStyle(name, left=name in texts) for name in rows[0]],
        [list(row.values()) for row in rows],
        optional=("layout", _STRIP, "interval"),
        drop_empty=True,
    )
    report.line(summary_line(comparison))
    report.line(f"source: {comparison.source}")
    report.render(to)


_WORST = 20  # percent at the ends of a strip
_STRIP = f"-{_WORST}%  0  +{_WORST}%"


def _row(point: Point) -> dict[str, str]:
    half = len(_STRIP) // 2
    position = half + max(-half, min(half, round(100 * point.error / _WORST * half)))
    cells = ["."] * (2 * half + 1)
    cells[half] = "|"
    cells[position] = "*"  # at an end: that much or more
    return {
        "model": point.panel,
        "at": point.at,
        "series": point.series,
        "layout": point.layout,
        "published": f"{point.published:.3g}",
        "predicted": f"{point.predicted:.3g}",
        "interval": f"{point.low:.3g}-{point.high:.3g}",
        "error": f"{100 * point.error:+.1f}%",
        _STRIP: "".join(cells),
    }


def run(arguments: list[str] | None = None) -> None:
    """Predict the figure that the arguments name, and write what they ask for.

    Raises:
        StrettoError: no such figure, or a file that cannot be written.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("name", nargs="?", metavar="FIGURE", help="a name that --list shows, such as zb-5")
    parser.add_argument("--list", action="store_true", help="list the figures")
    parser.add_argument("--out", type=Path, help="write the picture here, as .svg or .png")
    parser.add_argument("--html", type=Path, help="write a page with the picture and a table here")
    parser.add_argument("--csv", type=Path, help="write the published table with predictions here")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if options.list:
        for figure in FIGURES.values():
            fitted = (
                "constants were fitted on its runs" if figure.fitted else "no constant was fitted on its runs"
            )
            print(f"{figure.name:14} {figure.title}; {fitted}")
        return
    if options.name is None:
        raise StrettoError("name a figure", hint="--list shows them, as in zb-5")
    if options.out is not None and options.out.suffix not in (".svg", ".png"):
        raise StrettoError(
            f"--out is {options.out}", hint="a name that ends in .svg or .png; --html for a page"
        )
    check_writable(options.out, options.html, options.csv)
    comparison = compare(find_figure(options.name))
    if options.out is not None:
        svg = figure_svg(comparison)
        if options.out.suffix == ".png":
            write_file(options.out, png_of(svg))
        else:
            write_file(options.out, svg)
    if options.html is not None:
        write_file(options.html, figure_html(comparison))
    if options.csv is not None:
        write_file(options.csv, table_csv(comparison.rows))
    if options.json:
        print(json.dumps(as_dict(comparison), indent=2))
    else:
        show(Console(highlight=False), comparison)


if __name__ == "__main__":
    try:
        run()
    except StrettoError as error:
        print_error(error.message, error.hint)
        sys.exit(2)
