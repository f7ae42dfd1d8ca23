"""Timelines as SVG pictures in the style of papers: a row per rank, blocks numbered by microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from stretto.program.action import ActionKind
from stretto.view import colours
from stretto.view.panel import (
    NAMES,
    Panel,
    TimelineBlock,
    Window,
    all_kinds,
    figures_table,
    headline,
    highest_peak,
    peak,
    shades,
    ticks,
)
from stretto.view.panel import panel as panel_of
from stretto.view.svg import element, page, text_line

if TYPE_CHECKING:
    from stretto.program.replay import Timeline


LEFT, ROW = 72, 28
_RIGHT = 24
_HEAD = 62
_GAP = 6
_CURVE = 16
_BETWEEN = 14
_PHASE = 19  # height of a line of phases
_WIDTH = 920.0
_WIDEST = 6000.0
_NARROWEST_BLOCK = 15.0

_HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" class="idle"/><path d="M0 0V6" class="hatch" stroke-width="1.5"/></pattern>'
)


def panels_svg(panels: Sequence[Panel], about: str, table: Sequence[Sequence[str]] = ()) -> str:
    """Draw all panels in one picture.

    Args:
        panels: at least one.
        about: description for screen readers.
        table: rows of text below the panels; the first is the header.
    """
    end = max(panel.end for panel in panels)
    drawn = [block for panel in panels for block in panel.blocks]
    lengths = [block.end - block.start for block in drawn if not block.is_mark]
    # pixels per unit of time: wider than the default if numbers would not fit into blocks
    if not lengths or end <= 0:
        scale = 1.0
    else:
        scale = min(max(_WIDTH / end, _NARROWEST_BLOCK / min(lengths)), max(_WIDEST, _WIDTH) / end)
    peak_held, left = highest_peak(panels), left_of(panels)
    parts: list[str] = []
    y = 0.0
    for panel in panels:
        parts += _panel(panel, left, y, scale, peak_held)
        low = y + _HEAD + len(panel.rows) * _pitch(panel)
        if panel.window is not None:
            parts += _window(panel.window, left, y + _HEAD, _pitch(panel), scale)
            low += 2 * _PHASE + 4
        if len(panels) > 1:  # mark the end of this panel
            x = left + panel.end * scale
            path = f"M{x:.2f} {y + _HEAD - 4:g}V{low:g}"
            parts.append(element("path", d=path, class_="line", stroke_dasharray="3 3"))
        y = low + _BETWEEN
    bottom = y - _BETWEEN
    parts += _axis(end, scale, left, bottom, panels[0].unit)
    key, right = _legend(panels, left, bottom + 46)
    extra, low, wide = _table(table, left, bottom + 80)
    width = max(left + end * scale, right, wide) + _RIGHT
    return page(
        width=width,
        height=low if table else bottom + 66,
        title=panels[0].title,
        about=about,
        parts=parts + key + extra,
        definitions=_HATCH,
    )


def left_of(panels: Sequence[Panel]) -> int:
    """Return the width of the row labels, in pixels."""
    longest = max(len(row.label) for panel in panels for row in panel.rows)
    return max(LEFT, int(22 + 6.6 * longest))


def _pitch(panel: Panel) -> int:
    """Return the distance between rows."""
    return ROW + _GAP + (_CURVE + 4 if any(row.curve for row in panel.rows) else 0)


def _panel(panel: Panel, left: int, y: float, scale: float, peak_held: float) -> list[str]:
    parts = [
        text_line(panel.title, left, y + 28, 17, font_weight="bold"),
        text_line(panel.line, left, y + 48, 12.5, class_="quiet"),
    ]
    by_row = {row: list(drawn) for row, drawn in groupby(panel.blocks, key=lambda block: block.row)}
    pitch = _pitch(panel)
    for i, row in enumerate(panel.rows):
        body = [text_line(row.label, -10, ROW / 2 + 4, 12, text_anchor="end")]
        body.append(element("rect", width=panel.end * scale, height=ROW, fill="url(#hatch)"))
        body += _blocks(by_row.get(i, []), scale, panel.chunks)
        if row.curve:
            # draw the memory curve below its row, and its maximum at the left
            base = ROW + 4 + _CURVE
            unit = _CURVE / peak_held if peak_held else 0.0
            path = f"M{row.curve[0][0] * scale:.4g} {base}"
            for time, value in row.curve:
                path += f"H{time * scale:.5g}V{base - value * unit:.4g}"
            path += f"V{base}Z"
            label = text_line(
                f"holds {peak(row.curve):.3g}", -10, base - 2, 10, text_anchor="end", class_="quiet"
            )
            ground = element("path", d=f"M0 {base}H{row.curve[-1][0] * scale:.5g}", class_="base")
            body += [element("path", d=path, class_="held"), ground, label]
        position = f"translate({left} {y + _HEAD + i * pitch:g})"
        parts.append(element("g", "".join(body), class_="row", transform=position))
    return parts


def _window(window: Window, left: int, top: float, pitch: float, scale: float) -> list[str]:
    """Draw a dashed line at the end of a step on each rank, and steps and phases below the rows."""
    parts: list[str] = []
    low = top + len(window.ends[0]) * pitch + 4
    for ends in window.ends:
        path = ""
        for row, end in enumerate(ends):
            x, y = left + end * scale, top + row * pitch - 3
            path += f"V{y:g}H{x:.2f}" if path else f"M{x:.2f} {y:g}"
        parts.append(element("path", d=f"{path}V{low:g}", **_STEP))
    for line, phases in enumerate((window.steps, window.phases)):
        for phase in phases:
            x, right = left + phase.start * scale + 1, left + phase.end * scale - 1
            parts += _bracket(phase.name, x, right, low + line * _PHASE)
    return parts


# visible on light and dark backgrounds
_STEP = {"fill": "none", "stroke": "#e5534b", "stroke_width": 1.6, "stroke_dasharray": "5 3"}


def _bracket(name: str, x: float, right: float, y: float) -> list[str]:
    """Draw a bracket, with its name in the middle if it fits."""
    half = 3.1 * len(name) + 4
    middle = (x + right) / 2
    shown = right - x > 2 * half + 8
    across = f"H{middle - half:.2f}M{middle + half:.2f} {y + 5:g}" if shown else ""
    path = f"M{x:.2f} {y:g}v10m0 -5{across}H{right:.2f}m0 -5v10"
    parts = [element("path", d=path, class_="line", fill="none")]
    return [*parts, text_line(name, middle, y + 9, 11, text_anchor="middle")] if shown else parts


def _blocks(drawn: Iterable[TimelineBlock], scale: float, chunks: int) -> list[str]:
    """Draw the blocks of a row, and their numbers in a group that sets the text style once."""
    shapes: list[str] = []
    labels: list[str] = []
    for block in drawn:
        colour = colours.of_kind(block.kind, block.chunk, chunks)
        x, width = block.start * scale, (block.end - block.start) * scale
        if block.is_mark:
            shapes.append(element("path", d=f"M{x:.2f} -3v{ROW + 6}", class_="mark"))
            continue
        # a gap of one pixel separates adjacent blocks of one colour; thin blocks have a smaller one
        inner = max(width - 1, width * 0.8)
        height = ROW / block.lanes - (1 if block.lanes > 1 else 0)
        y = block.lane * ROW / block.lanes
        offset = {"y": y} if y else {}
        shape = {"width": inner, "height": height, "rx": min(2.5, inner / 4)}
        shapes.append(element("rect", x=x, **offset, **shape, fill=colours.hexed(colour)))
        if block.paired and block.lanes == 1:  # one line under both, open between pairs
            start, end = (x + 2, x + width) if block.kind is ActionKind.F else (x - 1, x + width - 3)
            shapes.append(element("path", d=f"M{start:.2f} {ROW + 2}H{end:.2f}", class_="pair"))
        size = min(13.0, 0.9 * height, inner / (0.62 * max(1, len(block.label))))
        if block.label and size >= 6:
            small = {"font_size": size} if size < 13 else {}
            ink = {"class_": "light"} if colours.text_on(colour) == "#ffffff" else {}
            middle = y + height / 2 + 0.36 * size
            labels.append(element("text", block.label, x=x + inner / 2, y=middle, **small, **ink))
    return [*shapes, element("g", "".join(labels), class_="numbers")] if labels else shapes


def _axis(end: float, scale: float, left: int, top: float, unit: str) -> list[str]:
    parts = [element("path", d=f"M{left} {top + 2:g}H{left + end * scale:.2f}", class_="line")]
    for time in ticks(end, max(2, int(end * scale // 70))):
        x = left + time * scale
        parts.append(element("path", d=f"M{x:.2f} {top + 2:g}v5", class_="line"))
        parts.append(text_line(f"{time:g}", x, top + 20, 11, text_anchor="middle", class_="quiet"))
    name = f"time, {unit}" if unit else "time"
    parts.append(text_line(name, left - 10, top + 20, 11, text_anchor="end", class_="quiet"))
    return parts


def _legend(panels: Sequence[Panel], left: int, y: float) -> tuple[list[str], float]:
    """Draw swatches of all kinds, idle time and memory; return them and their right edge."""
    x, parts = float(left), list[str]()
    chunks = max(panel.chunks for panel in panels)
    for kind in all_kinds(panels):
        for chunk in range(chunks) if chunks <= 4 else (0, chunks - 1):
            fill = colours.hexed(colours.of_kind(kind, chunk, chunks))
            parts.append(element("rect", x=x, y=y - 10, width=14, height=12, rx=2, fill=fill))
            x += 16
        name = f"{kind} {NAMES[kind]}"
        parts.append(text_line(name, x + 4, y, 12))
        x += 24 + 6.3 * len(name)
    if note := shades(panels):
        parts.append(text_line(f"({note})", x - 8, y, 12, class_="quiet"))
        x += 12 + 5.8 * len(note)
    for fill, name in (("url(#hatch)", "bubble"), ("", "activations held")):
        look = {"fill": fill} if fill else {"class_": "held"}
        parts.append(element("rect", x=x, y=y - 10, width=14, height=12, rx=2, **look))
        parts.append(text_line(name, x + 20, y, 12))
        x += 40 + 6.3 * len(name)
        if not any(row.curve for panel in panels for row in panel.rows):
            break
    if any(panel.window for panel in panels):
        parts.append(element("path", d=f"M{x + 7:g} {y - 12:g}v16", **_STEP))
        parts.append(text_line("end of a step", x + 14, y, 12))
        x += 14 + 6.3 * len("end of a step") + 20
    return parts, x - 20


def _table(rows: Sequence[Sequence[str]], left: int, y: float) -> tuple[list[str], float, float]:
    """Draw rows of text in columns, the first left-aligned; return them, their lower and right edges."""
    parts: list[str] = []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for i, row in enumerate(rows):
        x = float(left)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            edge = {} if column == 0 else {"text_anchor": "end"}
            look = {"class_": "quiet"} if i == 0 else {}
            x += 0 if column == 0 else 6.8 * width + 26
            parts.append(text_line(cell, x, y, 12, **edge, **look))
            x += 6.8 * width if column == 0 else 0
        y += 20
    return parts, y, left + sum(6.8 * width + 26 for width in widths)


def timeline_svg(timeline: Timeline) -> str:
    """Draw the timeline with rank labels, each rank's activations, time axis, legend and figures."""
    about = f"Pipeline timeline of schedule {timeline.program.name}: {headline(timeline)}."
    return panels_svg([panel_of(timeline)], about)


def compare_svg(timelines: Sequence[Timeline]) -> str:
    """Draw the timelines stacked on one time axis, and a table of their figures."""
    about = "Pipeline timelines on one time axis. " + " ".join(
        f"{timeline.program.name}: {headline(timeline)}." for timeline in timelines
    )
    return panels_svg([panel_of(timeline) for timeline in timelines], about, figures_table(timelines))
