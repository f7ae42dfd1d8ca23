"""Timelines in a terminal: a row per rank, blocks coloured by kind and numbered by microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import ceil, floor
from typing import TYPE_CHECKING

from rich.text import Text

from stretto.program.action import ActionKind
from stretto.view import colours
from stretto.view.panel import NAMES, Panel, Phase, TimelineBlock, all_kinds, count, ticks
from stretto.view.panel import panel as panel_of

if TYPE_CHECKING:
    from stretto.program.replay import Timeline

_IDLE, _CUT = "·", "⋯"
_NARROWEST = 16  # columns of a timeline in the narrowest terminal


def timelines_text(
    timelines: Sequence[Timeline],
    *,
    width: int,
    colour: bool,
    start: float = 0.0,
    end: float | None = None,
) -> Text:
    """Draw timelines within `width` columns on one time axis, from `start` to `end`; several with titles.

    With colour a block is the microbatch's number on the kind's colour, in alternating shades. Without colour
    it is kind and number, such as `F0-B0--`, preceded by the stage if a rank has several. Blocks that are too
    narrow lose the number; blocks that run at the same time share their columns.

    A column is no longer than actions are, but those of the shortest 5% of the work: in longer columns, the
    letter of what fills most of each would show bursts that the schedule does not have. If the columns
    do not all fit, both ends are drawn, and a line reports the times between them. Actions shorter than a
    column are counted below.
    """
    panels = [panel_of(timeline) for timeline in timelines]
    last = max(panel.end for panel in panels)
    end = last if end is None else min(end, last)
    margin = max(len(row.label) for panel in panels for row in panel.rows) + 2
    room = max(width - margin, _NARROWEST)
    scale = _scale(panels, end - start, room, colour)
    parts = _visible(_column(start, scale), _column(end, scale), room)
    lines, undrawn = list[Text](), 0
    for panel in panels:
        if len(panels) > 1:
            lines.append(Text(f"{panel.title}: {panel.line}"[:width], style="bold" if colour else ""))
        by_row: list[list[TimelineBlock]] = [[] for _ in panel.rows]
        for block in panel.blocks:
            if not block.is_mark:
                by_row[block.row].append(block)
        for row, blocks in zip(panel.rows, by_row, strict=True):
            lines.append(Text(row.label.ljust(margin)))
            spans = _spans(blocks, scale)
            undrawn += sum(first == stop for first, stop, _ in spans)
            for i, columns in enumerate(parts):
                lines[-1].append(_CUT * (i > 0), "dim" if colour else "")
                shown = range(columns.start, max(columns.start, min(columns.stop, _column(panel.end, scale))))
                _append_blocks(lines[-1], spans, shown, chunks=panel.chunks, colour=colour)
        if panel.window is not None:
            for phases in (panel.window.steps, panel.window.phases):
                *drawn, final = (_phases(phases, columns, scale) for columns in parts)
                line = "".join(part[:-1] + _CUT for part in drawn) + final
                lines.append(Text((" " * margin + line)[:width], style="dim"))
        if len(panels) > 1:
            lines.append(Text(""))
    lines.append(_axis(parts, scale, margin))
    lines.append(Text(" " * margin))
    kinds = {block.kind for panel in panels for block in panel.blocks if not block.is_mark}
    for kind in [kind for kind in all_kinds(panels) if kind in kinds]:
        shade = colours.of_kind(kind)
        style = f"{colours.text_on(shade)} on {colours.hexed(shade)}" if colour else ""
        item = Text.assemble((f" {_letter(kind)} " if colour else _letter(kind), style), f" {NAMES[kind]}   ")
        if lines[-1].cell_len + len(item) + len(f"{_IDLE} idle") > width:  # for the last item, too
            lines.append(Text(" " * margin))
        lines[-1].append_text(item)
    lines[-1].append(f"{_IDLE} idle")
    edges = (edge * scale for panel in panels for block in panel.blocks for edge in (block.start, block.end))
    rounded = any(abs(edge - round(edge)) > 1e-6 for edge in edges)
    if len(parts) > 1 or rounded:
        cut_from, cut_to = (f"{column / scale:.4g}" for column in (parts[0].stop, parts[-1].start))
        cut = f"{_CUT} leaves out {cut_from} to {cut_to} (--from, --to); " if len(parts) > 1 else ""
        note = f"{cut}1 column = {1 / scale:.4g}{', edges rounded' * rounded}"
        lines.append(Text(" " * margin + note))
    if undrawn:
        actions = count(undrawn, "action")
        lines.append(Text(f"{'':{margin}}{actions} shorter than half a column, not drawn"))
    return Text("\n").join(lines)


def _scale(panels: Sequence[Panel], duration: float, room: int, colour: bool) -> float:
    """Return columns per unit of time.

    The shortest block has an integer number of columns if possible, up to the width of its label; otherwise
    the shortest of those that take 95% of the work has at least one.
    """
    drawn = [(block, panel.chunks > 1) for panel in panels for block in panel.blocks if not block.is_mark]
    if not drawn or duration <= 0:
        return 1.0
    label = max(len(block.label if colour else _name(block, staged)) for block, staged in drawn) + 1
    durations = sorted((block.end - block.start) / block.lanes for block, _ in drawn)
    columns = min(room / duration * durations[0], float(label))
    if columns >= 1:
        return int(columns) / durations[0]
    enough = 0.05 * sum(durations)
    length = next(d for d, total in zip(durations, accumulate(durations), strict=True) if total > enough)
    return max(room / duration, 1 / length)


def _column(time: float, scale: float) -> int:
    """Return the column whose left edge is nearest; `round` would give equal blocks 0 and 2 columns."""
    return floor(time * scale + 0.5 + 1e-9)


def _visible(first: int, stop: int, room: int) -> list[range]:
    """Return all columns if there is room for them, otherwise the first and the last, with one between."""
    if stop - first <= room:
        return [range(first, stop)]
    return [range(first, first + ceil((room - 1) / 2)), range(stop - (room - 1) // 2, stop)]


def _spans(blocks: Iterable[TimelineBlock], scale: float) -> list[tuple[int, int, TimelineBlock]]:
    """Return first column, end and block, by time; blocks that run at the same time divide their columns."""
    times = list[tuple[float, float, TimelineBlock]]()
    for block in blocks:
        share = (block.end - block.start) / block.lanes
        begin = block.start + block.lane * share
        times.append((begin, begin + share, block))
    spans, column = list[tuple[int, int, TimelineBlock]](), 0
    for begin, finish, block in sorted(times, key=lambda each: each[:2]):
        first = max(column, _column(begin, scale))
        column = max(first, _column(finish, scale))
        spans.append((first, column, block))
    return spans


def _append_blocks(
    row: Text,
    spans: Iterable[tuple[int, int, TimelineBlock]],
    columns: range,
    *,
    chunks: int,
    colour: bool,
) -> None:
    """Append what of a rank's blocks is in these columns to its row."""
    column = columns.start
    for first, stop, block in spans:
        start, end = max(column, first), min(stop, columns.stop)
        if end <= start:
            continue
        width = end - start
        row.append(_IDLE * (start - column), "dim" if colour else "")
        if colour:
            base = colours.of_kind(block.kind, block.chunk, chunks)
            odd = bool(block.label) and int(block.label) % 2 == 1
            shade = colours.mix(base, (255, 255, 255), 0.16) if odd else base
            label = block.label.center(width) if len(block.label) <= width else " " * width
            row.append(label, f"{colours.text_on(shade)} on {colours.hexed(shade)}")
        else:
            label = _name(block, chunks > 1)
            row.append((label if len(label) <= width else _letter(block.kind)[:width]).ljust(width, "-"))
        column = end
    row.append(_IDLE * (columns.stop - column), "dim" if colour else "")


def _name(block: TimelineBlock, staged: bool) -> str:
    return f"{block.stage if staged else ''}{_letter(block.kind)}{block.label}"


def _letter(kind: ActionKind) -> str:
    return "R" if kind is ActionKind.RECOMPUTE else str(kind)


def _phases(phases: Sequence[Phase], columns: range, scale: float) -> str:
    """Draw the phases in these columns between bars, with their names if they fit."""
    line = [" "] * (len(columns) + 1)  # the last bar stands behind the last column
    for phase in phases:
        start, end = (_column(time, scale) - columns.start for time in (phase.start, phase.end))
        room = range(max(start + 1, 0), min(end, len(columns)))
        if len(phase.name) <= len(room):
            line[room.start : room.stop] = phase.name.center(len(room))
        for bar in (start, end):
            if 0 <= bar < len(line):
                line[bar] = "|"
    return "".join(line)


def _axis(parts: Sequence[range], scale: float, margin: int) -> Text:
    """Draw round times; a time's last digit stands in the column that ends then."""
    columns = sum(map(len, parts))
    step = [*ticks(columns / scale, max(2, columns // 12)), 0.0][1]
    line, offset = "", margin
    for part in parts:
        times = {part.start / scale} if part is parts[0] else set[float]()
        if step:
            first, last = (floor(column / scale / step + 1e-9) for column in (part.start, part.stop))
            times |= {step * i for i in range(first + 1, last + 1)}
        for time in sorted(times):
            mark = f"{time:.4g}"
            place = offset + _column(time, scale) - part.start - len(mark)
            if place > len(line) or not line:
                line = line.ljust(place) + mark
        offset += len(part) + 1
    return Text(line, style="dim")
