"""Timelines in a terminal: a row per rank, blocks coloured by kind and numbered by microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from stretto.program.action import ActionKind
from stretto.view import colours
from stretto.view.panel import NAMES, Panel, Phase, TimelineBlock, all_kinds, ticks
from stretto.view.panel import panel as panel_of

if TYPE_CHECKING:
    from stretto.program.replay import Timeline

_IDLE = "·"


def timeline_text(timeline: Timeline, *, width: int, colour: bool) -> Text:
    """Draw the timeline within `width` columns.

    With colour a block is the microbatch's number on the kind's colour, in alternating shades. Without colour
    it is kind and number, such as `F0-B0--`, preceded by the stage if a rank has several. Blocks that are too
    narrow lose the number; blocks that run at the same time share their columns. Actions of zero duration are
    not shown. A timeline with more blocks than columns is cut, with a note of the time shown.
    """
    return panels_text([panel_of(timeline)], width=width, colour=colour)


def compare_text(timelines: Sequence[Timeline], *, width: int, colour: bool) -> Text:
    """Draw the timelines stacked on one time axis, each below its name."""
    return panels_text([panel_of(timeline) for timeline in timelines], width=width, colour=colour)


def panels_text(panels: Sequence[Panel], *, width: int, colour: bool) -> Text:
    """Draw panels within `width` columns, with their titles if there are several."""
    end = max(panel.end for panel in panels)
    margin = max(len(row.label) for panel in panels for row in panel.rows) + 2
    scale = _scale(panels, end, width - margin, colour)
    columns = min(round(end * scale), width - margin)
    lines = list[Text]()
    for panel in panels:
        if len(panels) > 1:
            lines.append(Text(f"{panel.title}: {panel.line}"[:width], style="bold" if colour else ""))
        by_row: list[list[TimelineBlock]] = [[] for _ in panel.rows]
        for block in panel.blocks:
            if not block.is_mark:
                by_row[block.row].append(block)
        length = min(round(panel.end * scale), columns)
        for row, blocks in zip(panel.rows, by_row, strict=True):
            lines.append(Text(row.label.ljust(margin)))
            _append_blocks(lines[-1], blocks, scale, length=length, chunks=panel.chunks, colour=colour)
        if panel.window is not None:
            for phases in (panel.window.steps, panel.window.phases):
                lines.append(_phases(phases, margin, scale)[:width])
        if len(panels) > 1:
            lines.append(Text(""))
    lines.append(_axis(min(end, columns / scale), scale, margin))
    line = Text(" " * margin)
    shown = {block.kind for panel in panels for block in panel.blocks if not block.is_mark}
    for kind in (kind for kind in all_kinds(panels) if kind in shown):
        shade = colours.of_kind(kind)
        style = f"{colours.text_on(shade)} on {colours.hexed(shade)}" if colour else ""
        line.append(f" {_letter(kind)} " if colour else _letter(kind), style)
        line.append(f" {NAMES[kind]}   ")
    line.append(f"{_IDLE} idle")
    lines.append(line)
    if round(end * scale) > columns:
        lines.append(Text(f"{'':{margin}}the first {columns / scale:.4g} of {end:g}: the rest does not fit"))
    return Text("\n").join(lines)


def _scale(panels: Sequence[Panel], end: float, room: int, colour: bool) -> float:
    """Return columns per unit of time.

    The shortest block has an integer number of columns if possible, up to the width of its label. At least
    nine of ten blocks have one column: with fewer, rounding would show bursts that the schedule does not
    have.
    """
    drawn = [(block, panel.chunks > 1) for panel in panels for block in panel.blocks if not block.is_mark]
    if not drawn or end <= 0:
        return 1.0
    label = max(len(block.label if colour else _name(block, staged)) for block, staged in drawn) + 1
    durations = sorted((block.end - block.start) / block.lanes for block, _ in drawn)
    shortest, common = durations[0], durations[len(durations) // 10]
    columns = min(room / end * shortest, float(label))
    return int(columns) / shortest if columns >= 1 else max(room / end, 1 / common)


def _append_blocks(
    row: Text, blocks: Iterable[TimelineBlock], scale: float, *, length: int, chunks: int, colour: bool
) -> None:
    """Append the blocks of one rank to its row; blocks that run at the same time share its columns."""
    spans = list[tuple[float, float, TimelineBlock]]()
    for block in blocks:
        part = (block.end - block.start) / block.lanes
        begin = block.start + block.lane * part
        spans.append((begin, begin + part, block))
    column = 0
    for begin, finish, block in sorted(spans, key=lambda span: span[:2]):
        start, end = max(column, round(begin * scale)), min(round(finish * scale), length)
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
    row.append(_IDLE * (length - column), "dim" if colour else "")


def _name(block: TimelineBlock, staged: bool) -> str:
    return f"{block.stage if staged else ''}{_letter(block.kind)}{block.label}"


def _letter(kind: ActionKind) -> str:
    return "R" if kind is ActionKind.RECOMPUTE else str(kind)


def _phases(phases: Sequence[Phase], margin: int, scale: float) -> Text:
    """Draw the phases' names between bars, if they fit."""
    line = ""
    for phase in phases:
        start, end = (margin + round(time * scale) for time in (phase.start, phase.end))
        room = end - start - 1
        line = line.ljust(start) + "|" + (phase.name if len(phase.name) <= room else "").center(room)
    return Text(line + "|", style="dim")


def _axis(end: float, scale: float, margin: int) -> Text:
    line = " " * (margin - 1) + "0"
    for time in ticks(end, max(1, round(end * scale) // 12))[1:]:
        mark = f"{time:g}"
        line = line.ljust(margin - 1 + round(time * scale) - len(mark) + 1) + mark
    return Text(line, style="dim")
