"""A timeline in a terminal: a row a rank, blocks coloured by kind and numbered by microbatch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.text import Text

from stretto.view import colours
from stretto.view.blocks import NAMES, Block, blocks, chunks, ticks

if TYPE_CHECKING:
    from stretto.simulate import Timeline

_IDLE = "·"


def timeline_text(timeline: Timeline, *, width: int, colour: bool) -> Text:
    """The timeline within `width` columns.

    With colour a block is its microbatch's number on its kind's colour, neighbours in two shades; without,
    it is kind and number, as in `F0-B0--`, after the stage where a rank holds several. Blocks too narrow for
    that lose the number.
    """
    program, drawn = timeline.program, blocks(timeline)
    margin = len(f"rank {program.ranks - 1}") + 2
    scale = _scale(drawn, timeline.makespan, width - margin, colour, chunks(program) > 1)
    length = round(timeline.makespan * scale)
    rows = list[Text]()
    for rank in range(program.ranks):
        row = Text(f"rank {rank}".ljust(margin))
        own = (block for block in drawn if block.rank == rank)
        _row(row, own, scale, length, chunks(program), colour)
        rows.append(row)
    rows.append(_axis(timeline.makespan, scale, margin, length))
    rows.append(_legend(drawn, margin, colour))
    return Text("\n").join(rows)


def _scale(drawn: list[Block], makespan: float, room: int, colour: bool, staged: bool) -> float:
    """Columns a unit of time: whole ones for the shortest block where there is room, no more than needed."""
    if not drawn or makespan <= 0:
        return 1.0
    label = max(len(block.label if colour else _name(block, staged)) for block in drawn) + 1
    shortest = min(block.end - block.start for block in drawn)
    columns = min(room / makespan * shortest, float(label))
    return (int(columns) if columns >= 1 else columns) / shortest


def _row(row: Text, own: Iterable[Block], scale: float, length: int, chunks: int, colour: bool) -> None:
    """Append one rank's blocks."""
    at = 0
    for block in sorted(own, key=lambda block: block.start):
        start, end = max(at, round(block.start * scale)), round(block.end * scale)
        if end <= start:
            continue
        row.append(_IDLE * (start - at), "dim" if colour else "")
        if colour:
            row.append(_numbered(block.label, end - start), _style(block, chunks))
        else:
            row.append(_plain(block, end - start, chunks > 1))
        at = end
    row.append(_IDLE * (length - at), "dim" if colour else "")


def _numbered(label: str, width: int) -> str:
    return label.center(width) if len(label) <= width else " " * width


def _name(block: Block, staged: bool) -> str:
    return f"{block.stage if staged else ''}{block.kind}{block.label}"


def _plain(block: Block, width: int, staged: bool) -> str:
    label = _name(block, staged)
    return (label if len(label) <= width else block.kind[:width]).ljust(width, "-")


def _style(block: Block, chunks: int) -> str:
    base = colours.of_kind(block.kind, block.chunk, chunks)
    odd = bool(block.label) and int(block.label) % 2 == 1
    shade = colours.mix(base, (255, 255, 255), 0.16) if odd else base
    return f"{colours.text_on(shade)} on {colours.hexed(shade)}"


def _axis(makespan: float, scale: float, margin: int, length: int) -> Text:
    line = " " * (margin - 1) + "0"
    for time in ticks(makespan, max(1, length // 12))[1:]:
        mark = f"{time:g}"
        line = line.ljust(margin - 1 + round(time * scale) - len(mark) + 1) + mark
    return Text(line, style="dim")


def _legend(drawn: list[Block], margin: int, colour: bool) -> Text:
    line = Text(" " * margin)
    for kind in (kind for kind in NAMES if any(block.kind is kind for block in drawn)):
        shade = colours.of_kind(kind)
        style = f"{colours.text_on(shade)} on {colours.hexed(shade)}" if colour else ""
        line.append(f" {kind} " if colour else str(kind), style)
        line.append(f" {NAMES[kind]}   ")
    line.append(f"{_IDLE} idle")
    return line
