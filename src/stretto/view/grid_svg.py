"""The device grid as an SVG picture: a box a node, a cell a rank, coloured by pipeline stage."""

from __future__ import annotations

from stretto.layout import Layout
from stretto.view import colours
from stretto.view.cells import cell, legend, nodes, some
from stretto.view.svg import element, page, words

_GAP, _PAD, _MARGIN, _TOP = 4, 6, 16, 62


def grid_svg(layout: Layout, *, ranks_per_node: int = 8, most_nodes: int = 128) -> str:
    """Which rank holds which stage, shard and replica; of many nodes the first and the last."""
    rows, left_out = some(nodes(layout, ranks_per_node), most_nodes)
    wide, high = _cell_size(layout), 38
    across = max(len(row) for _, row in rows)
    box = (2 * _PAD + across * (wide + _GAP) - _GAP, 2 * _PAD + high)
    columns = max(1, min(len(rows), int(940 // (box[0] + 70))))
    text = _about(layout)
    parts = [
        words(str(layout), _MARGIN, 26, 16, font_weight="bold"),
        words(text, _MARGIN, 46, 12, class_="quiet"),
    ]
    for place, (node, row) in enumerate(rows):
        left = _MARGIN + place % columns * (box[0] + 70)
        top = _TOP + place // columns * (box[1] + 10)
        note = f"node {node}" if not left_out or node < rows[-1][0] else f"... node {node}"
        parts.append(words(note, left, top + box[1] / 2 + 4, 11, class_="quiet"))
        parts += _node(layout, row, left + 58, top, wide, high, box)
    lines = -(-len(rows) // columns)
    bottom = _TOP + lines * (box[1] + 10)
    key, bottom = _stages(layout, bottom)
    width = 2 * _MARGIN + max(columns * (box[0] + 70) - 12, 6.2 * len(text))
    about = f"{layout.world} ranks in nodes of {ranks_per_node}, coloured by pipeline stage"
    return page(width, bottom + 8, f"Layout {layout}", about, parts + key)


def _cell_size(layout: Layout) -> float:
    last = cell(layout, layout.offset + layout.world - 1)
    return max(46.0, 6.2 * max(len(last.place), 2 + len(str(last.rank))) + 12)


def _about(layout: Layout) -> str:
    text = f"{layout.world} ranks, order {layout.order} (fastest first)"
    return text + (f"; in each cell the rank, then {names}" if (names := legend(layout)) else "")


def _node(
    layout: Layout, row: range, left: float, top: float, wide: float, high: float, box: tuple[float, float]
) -> list[str]:
    parts = [element("rect", x=left, y=top, width=box[0], height=box[1], rx=5, class_="box")]
    for column, rank in enumerate(row):
        shown = cell(layout, rank)
        colour = colours.of_stage(shown.stage, layout.pp)
        ink = {"style": f"fill:{colours.text_on(colour)}", "text_anchor": "middle"}
        x, y = left + _PAD + column * (wide + _GAP), top + _PAD
        parts.append(element("rect", x=x, y=y, width=wide, height=high, rx=3, fill=colours.hexed(colour)))
        parts.append(words(str(rank), x + wide / 2, y + 16, 13, font_weight="bold", **ink))
        if shown.place:
            parts.append(words(shown.place, x + wide / 2, y + 31, 10.5, **ink))
    return parts


def _stages(layout: Layout, top: float) -> tuple[list[str], float]:
    """A key of the stages' colours, the first and last ones of many, and where the picture ends below it."""
    if layout.pp == 1:
        return [], top
    stages = list(range(layout.pp)) if layout.pp <= 12 else [*range(6), *range(layout.pp - 5, layout.pp)]
    parts = [words("stage", _MARGIN, top + 16, 11, class_="quiet")]
    for place, stage in enumerate(stages):
        x = _MARGIN + 44 + place * 44
        colour = colours.hexed(colours.of_stage(stage, layout.pp))
        parts.append(element("rect", x=x, y=top + 6, width=14, height=12, rx=2, fill=colour))
        parts.append(words(str(stage), x + 18, top + 16, 11))
    return parts, top + 26
