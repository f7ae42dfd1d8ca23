"""A comparison as one HTML page: a table, and bars of measured and predicted values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from stretto.view.html import plain_html, table_html
from stretto.view.svg import element, text_line

_WIDTH = 900.0
_LEFT_EDGE, _RIGHT_EDGE = 8.0, 892.0  # of the bars, px
_ROW, _STEP = 20.0, 44.0  # height of a bar, and distance between bars


@dataclass(frozen=True, kw_only=True)
class ComparisonBar:
    """One combination in a figure; all values in the figure's unit.

    Attributes:
        value: measured value, or None if it is only predicted.
        low, high: ends of the whisker.
        text: the values as text.
    """

    name: str
    value: float | None
    text: str
    low: float | None = None
    high: float | None = None
    predicted: float | None = None


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Bars on one scale that begins at 0.

    Attributes:
        span: meaning of the whiskers, such as "all runs".
    """

    title: str
    bars: Sequence[ComparisonBar]
    span: str = "all runs"


def compare_page(
    *,
    title: str,
    lines: Sequence[str],
    figures: Sequence[Figure],
    table: Sequence[Sequence[str]],
    others: Sequence[str],
) -> str:
    """Return the page; it loads nothing.

    Args:
        lines: text above the table.
        table: rows of text; the first is the header.
        others: combinations without figures, with the reason.
    """
    body = [f"<h2>{escape(title)}</h2>", _lines(lines), table_html(table, "Fastest first; * is the baseline")]
    body += [_figure(figure) for figure in figures if figure.bars]
    if others:
        body += ["<h2>Without figures</h2>", _lines(others)]
    return plain_html(title, "\n".join(part for part in body if part), "page_compare")


def _lines(lines: Sequence[str]) -> str:
    return "".join(f'<p class="said">{escape(line)}</p>' for line in lines)


def _figure(figure: Figure) -> str:
    """Draw a bar for each measured value, a diamond for each prediction, and whiskers."""
    ends = [end for bar in figure.bars for end in (bar.value, bar.high, bar.predicted) if end]
    scale = (_RIGHT_EDGE - _LEFT_EDGE) / max(ends, default=1.0)
    parts = [part for i, bar in enumerate(figure.bars) for part in _bar(bar, i * _STEP + 20, scale)]
    height = len(figure.bars) * _STEP + 8
    drawing = element(
        "svg",
        "\n".join(parts),
        viewBox=f"0 0 {_WIDTH:g} {height:g}",
        width=_WIDTH,
        height=height,
        role="img",
        aria_label=figure.title,
    )
    return f"<h2>{escape(figure.title)}</h2>{_key(figure)}<div class='figure'>{drawing}</div>"


def _bar(bar: ComparisonBar, top: float, scale: float) -> list[str]:
    middle = top + _ROW / 2
    parts = [
        text_line(bar.name, _LEFT_EDGE, top - 5, 12, font_weight="bold"),
        text_line(bar.text, _RIGHT_EDGE, top - 5, 12, class_="quiet", text_anchor="end"),
        element("rect", x=_LEFT_EDGE, y=top, width=_RIGHT_EDGE - _LEFT_EDGE, height=_ROW, class_="idle"),
    ]
    if bar.value is not None:
        parts.append(
            element("rect", x=_LEFT_EDGE, y=top, width=bar.value * scale, height=_ROW, class_="measured")
        )
    if bar.low is not None and bar.high is not None:
        low, high = _LEFT_EDGE + bar.low * scale, _LEFT_EDGE + bar.high * scale
        path = (
            f"M{low:.1f} {middle - 4:.1f}v8M{low:.1f} {middle:.1f}H{high:.1f}M{high:.1f} {middle - 4:.1f}v8"
        )
        parts.append(element("path", d=path, class_="range"))
    if bar.predicted is not None:
        x = _LEFT_EDGE + bar.predicted * scale
        path = f"M{x:.1f} {top - 1:.1f}l6 {_ROW / 2 + 1:g}l-6 {_ROW / 2 + 1:g}l-6 {-_ROW / 2 - 1:g}z"
        parts.append(element("path", d=path, class_="predicted"))
    return parts


def _key(figure: Figure) -> str:
    bars = figure.bars
    items = [
        ("&#x25AC; measured", any(bar.value is not None for bar in bars)),
        (f"|&#x2014;| {figure.span}", any(bar.low is not None for bar in bars)),
        ("&#x25C7; predicted", any(bar.predicted is not None for bar in bars)),
    ]
    return f'<ul class="key">{"".join(f"<li>{text}</li>" for text, shown in items if shown)}</ul>'
