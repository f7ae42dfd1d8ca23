"""Timelines in a terminal: a row per rank, blocks coloured by kind and numbered by microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from stretto.program.action import ActionKind
from stretto.view import colours
from stretto.view.kind_colours import of_kind
from stretto.view.panel import NAMES, Block, Panel, Phase, all_kinds, panel, ticks

if TYPE_CHECKING:
    from stretto.program.replay import Timeline

_IDLE = "·"


def timeline_text(timeline: Timeline, *, width: int, colour: bool) -> Text:
    """The timeline within `width` columns.

    With colour a block is its microbatch's number on its kind's colour, neighbours in two shades; without,
    it is kind and number, as in `F0-B0--`, after the stage where a rank holds several. Blocks too narrow for
    that lose the number; blocks that run at once share their columns. What takes no time is not shown. Of a
    timeline with more blocks than columns the beginning is shown, and a line says up to when.
    """
    return panels_text([panel(timeline)], width=width, colour=colour)


def compare_text(timelines: Sequence[Timeline], *, width: int, colour: bool) -> Text:
    """The timelines stacked on one time axis, each under its name."""
    return panels_text([panel(timeline) for timeline in timelines], width=width, colour=colour)


def panels_text(panels: Sequence[Panel], *, width: int, colour: bool) -> Text:
    """Any panels within `width` columns; with their titles where there are several."""
    end = max(each.end for each in panels)
    margin = max(len(row.label) for each in panels for row in each.rows) + 2
    scale = _scale(panels, end, width - margin, colour)
    columns = min(round(end * scale), width - margin)
    lines = list[Text]()
    for each in panels:
        if len(panels) > 1:
            lines.append(Text(f"{each.title}: {each.line}"[:width], style="bold" if colour else ""))
        lines += _rows(each, margin, scale, columns, colour)
        if each.window is not None:
            for phases in (each.window.steps, each.window.phases):
                lines.append(_phases(phases, margin, scale)[:width])
        if len(panels) > 1:
            lines.append(Text(""))
    lines.append(_axis(min(end, columns / scale), scale, margin))
    lines.append(_legend(panels, margin, colour))
    if round(end * scale) > columns:
        lines.append(Text(f"{'':{margin}}the first {columns / scale:.4g} of {end:g}: the rest does not fit"))
    return Text("\n").join(lines)


def _scale(panels: Sequence[Panel], end: float, room: int, colour: bool) -> float:
    """Columns per unit of time: a whole number for the shortest block if possible, no more than needed, and
    at least one for nine blocks of ten. With less, rounding would draw bursts that are not in the schedule.
    """
    drawn = [(b, each.chunks > 1) for each in panels for b in each.blocks if not b.is_mark]
    if not drawn or end <= 0:
        return 1.0
    label = max(len(block.label if colour else _name(block, staged)) for block, staged in drawn) + 1
    durations = sorted((block.end - block.start) / block.lanes for block, _ in drawn)
    shortest, common = durations[0], durations[len(durations) // 10]
    columns = min(room / end * shortest, float(label))
    return int(columns) / shortest if columns >= 1 else max(room / end, 1 / common)


def _rows(panel: Panel, margin: int, scale: float, columns: int, colour: bool) -> list[Text]:
    rows = list[Text]()
    by_row: list[list[Block]] = [[] for _ in panel.rows]
    for block in panel.blocks:
        if not block.is_mark:
            by_row[block.row].append(block)
    for at, label in enumerate(panel.rows):
        row = Text(label.label.ljust(margin))
        _row(
            row=row,
            blocks=by_row[at],
            scale=scale,
            length=min(round(panel.end * scale), columns),
            chunks=panel.chunks,
            colour=colour,
        )
        rows.append(row)
    return rows


def _row(row: Text, blocks: Iterable[Block], scale: float, length: int, chunks: int, colour: bool) -> None:
    """Append one rank's blocks."""
    at = 0
    for first, last, block in sorted(((*_span(block), block) for block in blocks), key=lambda each: each[:2]):
        start, end = max(at, round(first * scale)), min(round(last * scale), length)
        if end <= start:
            continue
        row.append(_IDLE * (start - at), "dim" if colour else "")
        if colour:
            row.append(_numbered(block.label, end - start), _style(block, chunks))
        else:
            row.append(_plain(block, end - start, chunks > 1))
        at = end
    row.append(_IDLE * (length - at), "dim" if colour else "")


def _span(block: Block) -> tuple[float, float]:
    """The time over which a block is shown: its share where several run at once."""
    part = (block.end - block.start) / block.lanes
    start = block.start + block.lane * part
    return start, start + part


def _numbered(label: str, width: int) -> str:
    return label.center(width) if len(label) <= width else " " * width


def _name(block: Block, staged: bool) -> str:
    return f"{block.stage if staged else ''}{_letter(block.kind)}{block.label}"


def _letter(kind: ActionKind) -> str:
    return "R" if kind is ActionKind.RECOMPUTE else str(kind)


def _plain(block: Block, width: int, staged: bool) -> str:
    label = _name(block, staged)
    return (label if len(label) <= width else _letter(block.kind)[:width]).ljust(width, "-")


def _style(block: Block, chunks: int) -> str:
    base = of_kind(block.kind, block.chunk, chunks)
    odd = bool(block.label) and int(block.label) % 2 == 1
    shade = colours.mix(base, (255, 255, 255), 0.16) if odd else base
    return f"{colours.text_on(shade)} on {colours.hexed(shade)}"


def _phases(phases: Sequence[Phase], margin: int, scale: float) -> Text:
    """The names between bars, where there is room for them."""
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


def _legend(panels: Sequence[Panel], margin: int, colour: bool) -> Text:
    line = Text(" " * margin)
    shown = {block.kind for each in panels for block in each.blocks if not block.is_mark}
    for kind in (kind for kind in all_kinds(panels) if kind in shown):
        shade = of_kind(kind)
        style = f"{colours.text_on(shade)} on {colours.hexed(shade)}" if colour else ""
        line.append(f" {_letter(kind)} " if colour else _letter(kind), style)
        line.append(f" {NAMES[kind]}   ")
    line.append(f"{_IDLE} idle")
    return line
