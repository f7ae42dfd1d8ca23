"""The device grid, as text and SVG: a row per node, a cell per rank, coloured by pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

from rich.text import Text

from stretto.layout import Layout
from stretto.layout.ranges import rank_ranges
from stretto.view import colours
from stretto.view.exchanges import Exchange
from stretto.view.outlines import outlines
from stretto.view.svg import element, page, text_line

LETTERS = {"pp": "p", "tp": "t", "cp": "c", "ep": "e", "dp": "d"}
AXIS_NAMES = {"pp": "stage", "tp": "shard", "cp": "context part", "ep": "expert part", "dp": "replica"}


@dataclass(frozen=True)
class Cell:
    """One rank, its pipeline stage, and its coordinates as text, such as "p3 t1 d0"."""

    rank: int
    stage: int
    coordinates: str


def shown_axes(layout: Layout) -> list[str]:
    """Return the axes with more than one rank, the pipeline first."""
    return [axis for axis in LETTERS if layout.sizes[axis] > 1]


def cell(layout: Layout, rank: int) -> Cell:
    """Return the cell of `rank`."""
    position = layout.coordinates(rank)
    if layout.ep > 1:
        position["ep"] = layout.expert_grid.coordinates(rank)["ep"]
    letters = " ".join(f"{LETTERS[axis]}{position[axis]}" for axis in shown_axes(layout))
    return Cell(rank, position["pp"], letters)


def stacks(layout: Layout, encoder_pp: int) -> list[tuple[str, range]]:
    """Return the pipeline ranks of encoder and decoder; empty without an encoder."""
    if not encoder_pp:
        return []
    return [("encoder", range(encoder_pp)), ("decoder", range(encoder_pp, layout.pp))]


def stages_text(stages: range) -> str:
    """Return text such as "stages 0 to 3", or "stage 0"."""
    return f"stages {stages[0]} to {stages[-1]}" if len(stages) > 1 else f"stage {stages[0]}"


def legend(layout: Layout, encoder_pp: int = 0) -> str:
    """Return the meaning of the letters, "p stage, t shard, d replica", and the stages of the encoder."""
    letters = [f"{LETTERS[axis]} {AXIS_NAMES[axis]}" for axis in shown_axes(layout)]
    stages = [f"{stack}: {stages_text(ranks)}" for stack, ranks in stacks(layout, encoder_pp)]
    return "; ".join(filter(None, (", ".join(letters), ", ".join(stages))))


def nodes(layout: Layout, ranks_per_node: int) -> list[range]:
    """Return the ranks of each node."""
    end = layout.offset + layout.world
    starts = range(layout.offset, end, ranks_per_node)
    return [range(start, min(start + ranks_per_node, end)) for start in starts]


def shown_rows(rows: list[range], limit: int) -> tuple[list[tuple[int, range]], int]:
    """Return at most `limit` numbered rows including the last, and the number left out before it."""
    numbered = list(enumerate(rows))
    if len(rows) <= limit:
        return numbered, 0
    return [*numbered[: limit - 1], numbered[-1]], len(rows) - limit


_GAP = 4
_PAD = 6
_MARGIN = 16
_TOP = 62


def grid_svg(
    layout: Layout,
    *,
    ranks_per_node: int = 8,
    most_nodes: int = 128,
    groups: Sequence[Exchange] = (),
    encoder_pp: int = 0,
) -> str:
    """Draw the grid as SVG, with outlined groups below; of many nodes only the first and the last are drawn.

    Args:
        encoder_pp: number of pipeline ranks of the encoder, which are the first.
    """
    rows, left_out = shown_rows(nodes(layout, ranks_per_node), most_nodes)
    last = cell(layout, layout.offset + layout.world - 1)
    wide = max(46.0, 6.2 * max(len(last.coordinates), 2 + len(str(last.rank))) + 12)
    high, longest = 38, max(len(row) for _, row in rows)
    across = _per_line(longest, 16)
    box = (
        2 * _PAD + across * (wide + _GAP) - _GAP,
        2 * _PAD + -(-longest // across) * (high + _GAP) - _GAP,
    )
    columns = max(1, min(len(rows), int(940 // (box[0] + 70))))
    text = f"{layout.world} ranks, order {layout.order} (fastest first)"
    if names := legend(layout, encoder_pp):
        text += f"; in each cell the rank, then {names}"
    parts = [
        text_line(str(layout), _MARGIN, 26, 16, font_weight="bold"),
        text_line(text, _MARGIN, 46, 12, class_="quiet"),
    ]
    for i, (node, row) in enumerate(rows):
        left = _MARGIN + i % columns * (box[0] + 70)
        top = _TOP + i // columns * (box[1] + 10)
        note = f"node {node}" if not left_out or node < rows[-1][0] else f"... node {node}"
        parts.append(text_line(note, left, top + box[1] / 2 + 4, 11, class_="quiet"))
        parts += _node(layout, row, left=left + 58, top=top, cell_size=(wide, high), box=box)
    lines = -(-len(rows) // columns)
    bottom = _TOP + lines * (box[1] + 10)
    key, bottom = _stages(layout, bottom, encoder_pp)
    inner = max(columns * (box[0] + 70) - 12, 6.2 * len(text))
    drawn, bottom, right = outlines(
        layout, groups, ranks_per_node=ranks_per_node, left=_MARGIN, top=bottom, width=max(inner, 940)
    )
    width = _MARGIN + max(_MARGIN + inner, right)
    about = f"{layout.world} ranks in nodes of {ranks_per_node}, coloured by pipeline stage"
    if groups:
        about += f"; then the groups over {', '.join(group.axes for group in groups)}, each outlined"
    return page(width, bottom + 8, f"Layout {layout}", about, parts + key + drawn)


def _node(
    layout: Layout,
    row: range,
    *,
    left: float,
    top: float,
    cell_size: tuple[float, float],
    box: tuple[float, float],
) -> list[str]:
    parts = [element("rect", x=left, y=top, width=box[0], height=box[1], rx=5, class_="box")]
    wide, high = cell_size
    across = round((box[0] - 2 * _PAD + _GAP) / (wide + _GAP))
    for i, rank in enumerate(row):
        line, column = divmod(i, across)
        shown = cell(layout, rank)
        colour = colours.of_stage(shown.stage, layout.pp)
        ink = {"style": f"fill:{colours.text_on(colour)}", "text_anchor": "middle"}
        x, y = left + _PAD + column * (wide + _GAP), top + _PAD + line * (high + _GAP)
        parts.append(element("rect", x=x, y=y, width=wide, height=high, rx=3, fill=colours.hexed(colour)))
        parts.append(text_line(str(rank), x + wide / 2, y + 16, 13, font_weight="bold", **ink))
        if shown.coordinates:
            parts.append(text_line(shown.coordinates, x + wide / 2, y + 31, 10.5, **ink))
    return parts


def _stages(layout: Layout, top: float, encoder_pp: int) -> tuple[list[str], float]:
    """Draw a legend of the stages' colours (of many, the first and last); return it and its lower edge.

    Brackets below mark the stages of encoder and decoder.
    """
    if layout.pp == 1:
        return [], top
    stages = list(range(layout.pp)) if layout.pp <= 12 else [*range(6), *range(layout.pp - 5, layout.pp)]
    parts = [text_line("stage", _MARGIN, top + 16, 11, class_="quiet")]
    for i, stage in enumerate(stages):
        x = _MARGIN + 44 + i * 44
        colour = colours.hexed(colours.of_stage(stage, layout.pp))
        parts.append(element("rect", x=x, y=top + 6, width=14, height=12, rx=2, fill=colour))
        parts.append(text_line(str(stage), x + 18, top + 16, 11))
    if not encoder_pp:
        return parts, top + 26
    for stack, ranks in stacks(layout, encoder_pp):
        positions = [i for i, stage in enumerate(stages) if stage in ranks]
        left, right = _MARGIN + 44 + positions[0] * 44, _MARGIN + 44 + positions[-1] * 44 + 32
        parts.append(element("path", d=f"M{left:g} {top + 22:g}v4H{right:g}v-4", fill="none", class_="line"))
        parts.append(text_line(stack, left, top + 38, 11, class_="quiet"))
    return parts, top + 48


def grid(
    layout: Layout, *, width: int, ranks_per_node: int = 8, most_nodes: int = 16, encoder_pp: int = 0
) -> Text:
    """Draw the grid as text within `width` columns.

    A node has several lines if its ranks do not fit on one. Of more nodes than `most_nodes` the first few and
    the last are shown, followed by the ranks of every stage.
    """
    rows = nodes(layout, ranks_per_node)
    numbered, left_out = shown_rows(rows, most_nodes if len(rows) <= most_nodes else 4)
    shown = {rank: cell(layout, rank) for _, row in numbered for rank in row}
    digits = max(len(str(rank)) for rank in shown)
    labels = {rank: f"{rank:>{digits}} {cell.coordinates}".rstrip() for rank, cell in shown.items()}
    wide = max(map(len, labels.values())) + 1
    margin = len(f"node {numbered[-1][0]}") + 2
    per_line = _per_line(ranks_per_node, (width - margin) // wide)
    lines = list[Text]()
    for node, row in numbered:
        if left_out and node == numbered[-1][0]:
            lines.append(Text(" " * margin + f"... {left_out} more nodes ...", style="dim"))
        for start in range(0, len(row), per_line):
            line = Text((f"node {node}" if start == 0 else "").ljust(margin))
            for rank in row[start : start + per_line]:
                line.append(labels[rank].ljust(wide - 1), _style(layout, shown[rank].stage))
                line.append(" ")
            line.rstrip()
            lines.append(line)
    if names := legend(layout, encoder_pp):
        indent = " " * margin
        wrapped = wrap(f"rank, then {names}", width, initial_indent=indent, subsequent_indent=indent)
        lines += [Text(line, style="dim") for line in wrapped]
    if left_out and layout.pp > 1:
        lines += [Text(), *_stage_labels(layout, width)]
    return Text("\n").join(lines)


def _style(layout: Layout, stage: int) -> str:
    if layout.pp == 1:
        return ""
    colour = colours.of_stage(stage, layout.pp)
    return f"{colours.text_on(colour)} on {colours.hexed(colour)}"


def _per_line(ranks: int, fitting: int) -> int:
    """Return the largest half, quarter, ... of a node's ranks that fits on a line."""
    while ranks > max(1, fitting):
        ranks = (ranks + 1) // 2
    return ranks


def _stage_labels(layout: Layout, width: int, limit: int = 32) -> list[Text]:
    """Return a line per stage with its ranks as ranges."""
    others = "-".join(axis for axis in layout.grid.sizes if axis != "pp")
    lines = list[Text]()
    for stage, ranks in enumerate(layout.groups(others)[:limit]):
        text = ""  # such as "0-7, 64-71", cut to the width
        for part in rank_ranges(sorted(ranks)):
            if text and len(text) + len(part) + 7 > width - 20:
                text += ", ..."
                break
            text += f", {part}" if text else part
        line = Text()
        line.append(f" stage {stage:<3} ", _style(layout, stage))
        line.append(f" ranks {text}")
        lines.append(line)
    if layout.pp > limit:
        lines.append(Text(f"... {layout.pp - limit} more stages ...", style="dim"))
    return lines
