"""Predictions drawn over the published points of a paper's figure, as SVG and as a page.

Published points are large and hollow, predictions small and filled, with their interval; series differ in
shape and dash as well as in colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from published.figures import Comparison, Point
from stretto.view import colours
from stretto.view.page import FRONT
from stretto.view.panel import ticks
from stretto.view.svg import element, page, text_line

_WIDTH = 980.0
_MARGIN = 16.0
_GAP = 28.0  # between panels
_LEFT = 46.0  # the next two: around the plot of a panel
_ABOVE = 44.0
_BELOW = 44.0
_TALL, _LOW = 330.0, 200.0  # heights of a plot: alone in its row, and beside another
_LABEL = 36.0  # pixels that the label of an error needs
_STYLE = """
.grid { stroke: #d1d9e0; stroke-width: 0.75; fill: none; }
.axis { stroke: #59636e; fill: none; }
.hollow { fill: #ffffff; }
@media (prefers-color-scheme: dark) {
.grid { stroke: #3d444d; }
.axis { stroke: #9198a1; }
.hollow { fill: #0d1117; }
}"""
_DASHES = ("none", "7 4", "2 3", "9 3 2 3")


@dataclass(frozen=True, kw_only=True)
class _Plot:
    """A panel's place, and the ranges of its axes."""

    left: float
    top: float
    width: float
    height: float
    places: Sequence[str]
    low: float
    high: float

    def x(self, at: str, shift: float = 0.0) -> float:
        pitch = self.width / len(self.places)
        return self.left + (self.places.index(at) + 0.5 + shift) * pitch

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - (value - self.low) / (self.high - self.low))


def figure_svg(comparison: Comparison) -> str:
    """Return the figure as an SVG document, light and dark by the reader's setting."""
    figure, points = comparison.figure, comparison.points
    panels = list(dict.fromkeys(point.panel for point in points))
    series = list(dict.fromkeys(point.series for point in points))
    legend, top = _legend(series, 74.0)
    columns = min(2, len(panels))
    width = (_WIDTH - 2 * _MARGIN - (columns - 1) * _GAP) / columns
    height = _TALL if columns == 1 else _LOW
    panel_height = height + _ABOVE + _BELOW
    parts = [
        text_line(figure.title, _MARGIN, 28, 16, font_weight="bold"),
        text_line(summary_line(comparison), _MARGIN, 48, 12, class_="quiet"),
        *legend,
    ]
    for place, name in enumerate(panels):
        mine = [point for point in points if point.panel == name]
        low, high = _range(mine)
        plot = _Plot(
            left=_MARGIN + place % columns * (width + _GAP) + _LEFT,
            top=top + place // columns * panel_height + _ABOVE,
            width=width - _LEFT,
            height=height,
            places=_places(mine),
            low=low,
            high=high,
        )
        parts += _panel(plot, name, mine, series, comparison)
    bottom = top + -(-len(panels) // columns) * panel_height
    about = f"{len(points)} published measurements and their predictions; {summary_line(comparison)}"
    return page(
        width=_WIDTH,
        height=bottom + 6,
        title=figure.title,
        about=about,
        parts=parts,
        definitions=element("style", _STYLE),
    )


def summary_line(comparison: Comparison) -> str:
    """Return the scores of the predicted step times in one line, and whether they are a test."""
    scores, plain = comparison.scores.model, comparison.scores.baseline
    assert scores is not None
    assert plain is not None
    inside = (
        "" if scores.coverage is None else f", {round(scores.coverage * scores.rows)} inside the interval"
    )
    fitted = (
        "constants were fitted on these runs"
        if comparison.figure.fitted
        else "no constant was fitted on them"
    )
    return (
        f"{scores.rows} runs, step time: MAPE {100 * scores.mape:.1f}% (two-line baseline "
        f"{100 * plain.mape:.1f}%), bias {100 * scores.bias:+.1f}%, worst {100 * scores.worst:+.1f}%"
        f"{inside}; {fitted}"
    )


def _places(points: Sequence[Point]) -> list[str]:
    """Return the positions on the horizontal axis: numbers in their order, others as they come."""
    names = list(dict.fromkeys(point.at for point in points))
    return sorted(names, key=float) if all(name.isdigit() for name in names) else names


def _range(points: Sequence[Point]) -> tuple[float, float]:
    """Return the ends of the vertical axis: from 0, unless all values are in its upper part."""
    least = min(min(point.low, point.published) for point in points)
    most = max(max(point.high, point.published) for point in points)
    return (0.0 if least < 0.3 * most else least - 0.08 * (most - least)), most + 0.1 * (most - least)


def _panel(
    plot: _Plot, name: str, points: Sequence[Point], series: Sequence[str], comparison: Comparison
) -> list[str]:
    figure = comparison.figure
    right, low = plot.left + plot.width, plot.top + plot.height
    mape = sum(abs(point.error) for point in points) / len(points)
    parts = [
        text_line(
            f"{name}: MAPE {100 * mape:.1f}%" if name else "",
            plot.left - 34,
            plot.top - 26,
            13,
            font_weight="bold",
        ),
        text_line(figure.measure, plot.left - 34, plot.top - 9, 11, class_="quiet"),
        text_line(figure.across, (plot.left + right) / 2, low + 34, 11, class_="quiet", text_anchor="middle"),
    ]
    for value in ticks(plot.high, int(plot.height / 45 * plot.high / (plot.high - plot.low))):
        if value >= plot.low:
            y = plot.y(value)
            parts.append(element("path", d=f"M{plot.left} {y:.1f}H{right}", class_="grid"))
            parts.append(text_line(f"{value:g}", plot.left - 6, y + 4, 11, class_="quiet", text_anchor="end"))
    for at in plot.places:
        parts.append(text_line(at, plot.x(at), low + 16, 11, text_anchor="middle"))
    parts.append(element("path", d=f"M{plot.left} {low}H{right}", class_="axis"))
    shown = [name for name in series if any(point.series == name for point in points)]
    for number, label in enumerate(shown):
        shift = (number - (len(shown) - 1) / 2) / (len(shown) + 0.6)
        mine = sorted((p for p in points if p.series == label), key=lambda p: plot.places.index(p.at))
        parts += _series(plot, mine, shift=shift, look=series.index(label), many=len(shown))
    return parts


def _series(plot: _Plot, points: Sequence[Point], *, shift: float, look: int, many: int) -> list[str]:
    """Return one series: the line of its predictions, then each published point under its prediction."""
    colour = colours.hexed(colours.SERIES[look])
    line = "L".join(f"{plot.x(p.at, shift):.1f} {plot.y(p.predicted):.1f}" for p in points)
    parts = [
        element(
            "path", d=f"M{line}", fill="none", stroke=colour, stroke_width=1.2, stroke_dasharray=_DASHES[look]
        )
    ]
    labelled = plot.width / len(plot.places) / (many + 0.6) >= _LABEL
    for point in points:
        x = plot.x(point.at, shift)
        y = plot.y(point.predicted)
        about = (
            f"{point.series}, {point.at}: published {point.published:.4g}, predicted {point.predicted:.4g} "
            f"({point.low:.4g} to {point.high:.4g}), step time {100 * point.error:+.1f}%"
        )
        high, low = plot.y(point.high), plot.y(point.low)
        marks = [
            element("title", escape(about)),
            element("path", d=f"M{x - 4:.1f} {high:.1f}h8m-4 0V{low:.1f}m-4 0h8", fill="none", stroke=colour),
            _shape(look, x, plot.y(point.published), 6.5, class_="hollow", stroke=colour, stroke_width=1.8),
            _shape(look, x, y, 3.2, fill=colour),
        ]
        if labelled:
            label = f"{100 * point.error:+.1f}%"
            marks.append(text_line(label, x, high - 5, 10.5, text_anchor="middle"))
        parts.append(element("g", "".join(marks)))
    return parts


def _shape(look: int, x: float, y: float, r: float, **attributes: str | float) -> str:
    """Circle, square, triangle or diamond, of about equal area."""
    if look == 0:
        return element("circle", cx=x, cy=y, r=r, **attributes)
    square = 0.89 * r
    wide, high = 1.2 * r, 1.3 * r
    outlines = {
        1: [(-square, -square), (square, -square), (square, square), (-square, square)],
        2: [(0.0, -high), (wide, 0.8 * r), (-wide, 0.8 * r)],
        3: [(0.0, -high), (wide, 0.0), (0.0, high), (-wide, 0.0)],
    }
    corners = "L".join(f"{x + right:.2f} {y + down:.2f}" for right, down in outlines[look])
    return element("path", d=f"M{corners}Z", **attributes)


def _legend(series: Sequence[str], top: float) -> tuple[list[str], float]:
    """Return the series with their shapes, what hollow and filled mean; and the lower edge."""
    parts = list[str]()
    x = _MARGIN + 8
    for look, name in enumerate(series):
        colour = colours.hexed(colours.SERIES[look])
        dash = _DASHES[look]
        parts.append(
            element(
                "path", d=f"M{x - 8:.1f} {top}h34", stroke=colour, stroke_width=1.2, stroke_dasharray=dash
            )
        )
        parts.append(_shape(look, x + 2, top, 6.5, class_="hollow", stroke=colour, stroke_width=1.8))
        parts.append(_shape(look, x + 18, top, 3.2, fill=colour))
        parts.append(text_line(name, x + 32, top + 4, 12))
        x += 52 + 6.4 * len(name)
    note = "large and hollow: published; small and filled: predicted, the bar holds nine measurements of ten"
    parts.append(text_line(note, _MARGIN, top + 26, 11, class_="quiet"))
    return parts, top + 34


# ------------------------------------------------------------------ page


def figure_html(comparison: Comparison) -> str:
    """Return a page with the figure and every point in a table; it loads nothing."""
    figure = comparison.figure
    rows = [("at", "series", "layout", "published", "predicted", "interval", "error of the step time")]
    for point in comparison.points:
        place = f"{point.panel}, {point.at}" if point.panel else point.at
        rows.append(
            (
                place,
                point.series,
                point.layout,
                f"{point.published:.4g}",
                f"{point.predicted:.4g}",
                f"{point.low:.4g} to {point.high:.4g}",
                f"{100 * point.error:+.1f}%",
            )
        )
    command = f"python benchmarks/figure.py {figure.name} --html page.html --csv rows.csv"
    body = [
        f'<div class="figure">{figure_svg(comparison)}</div>',
        f"<p>Source: {escape(comparison.source)}. Numbers are quoted with their citation.</p>",
        f"<p>Repeat it: <code>{command}</code></p>",
        f"<table><caption>{escape(figure.measure)}, by {escape(figure.across)}</caption>",
        *(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows),
        "</table>",
    ]
    style = (FRONT / "style.css").read_text(encoding="utf-8")
    head = f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(figure.title)}</title>'
    return "\n".join([head, f"<style>{style}</style>", "<main>", *body, "</main>", ""])
