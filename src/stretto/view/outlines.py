"""Groups of a layout as SVG: for each set of axes a small grid in which every group is outlined."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from stretto.layout import Layout
from stretto.view import colours
from stretto.view.exchanges import RECEIVERS, Exchange
from stretto.view.svg import element, text_line

_WIDE, _HIGH = 34.0, 30.0  # a rank's cell
_GAP, _PAD = 6.0, 6.0
_LABEL, _HEAD = 62.0, 40.0
_BETWEEN = 34.0  # distance between panels
_MOST_NODES, _MOST_CELLS = 8, 16  # nodes of a panel, cells of a line

Corner = tuple[float, float]  # upper left corner of a rank's cell


def outlines(
    layout: Layout, shown: Sequence[Exchange], *, ranks_per_node: int, left: float, top: float, width: float
) -> tuple[list[str], float, float]:
    """Draw a panel for each of `shown`, with as many per line as fit into `width`.

    Returns:
        The parts, their lower edge, and their right edge.
    """
    if not shown:
        return [], top, left
    panels = [_Panel(layout, exchange, ranks_per_node) for exchange in shown]
    wide = max(panel.width for panel in panels)
    columns = max(1, int((width + _BETWEEN) // (wide + _BETWEEN)))
    note = "a line joins the ranks of the first group: solid inside a node, dashed between nodes"
    parts = [
        text_line("Groups", left, top + 22, 14, font_weight="bold"),
        text_line(f"one colour each, numbered; {note}", left + 64, top + 22, 11, class_="quiet"),
    ]
    y = top + 32
    for start in range(0, len(panels), columns):
        line = panels[start : start + columns]
        for column, panel in enumerate(line):
            parts += panel.draw(left + column * (wide + _BETWEEN), y)
        y += max(panel.height for panel in line) + 8
    right = left + max(min(columns, len(panels)) * (wide + _BETWEEN) - _BETWEEN, 64 + 5.6 * (len(note) + 25))
    return parts, y, right


class _Panel:
    """The groups over one set of axes; of many nodes, those with the first ranks of the first group."""

    def __init__(self, layout: Layout, exchange: Exchange, ranks_per_node: int) -> None:
        groups = layout.groups(exchange.axes)
        self.exchange, self.first = exchange, groups[0]
        self.each = ranks_per_node
        self.offset, self.end = layout.offset, layout.offset + layout.world
        nodes = -(-layout.world // ranks_per_node)
        self.nodes = list(range(nodes))
        if nodes > _MOST_NODES:
            holding = dict.fromkeys((rank - layout.offset) // ranks_per_node for rank in groups[0])
            self.nodes = sorted(list(dict.fromkeys([*holding, *self.nodes]))[:_MOST_NODES])
        self.left_out = nodes - len(self.nodes)
        visible = {rank for node in self.nodes for rank in self._ranks(node)}
        self.number = {rank: n for n, group in enumerate(groups) for rank in group if rank in visible}
        longest = max(len(str(self.end - 1)), 1 + len(str(len(groups) - 1)))
        self.cell = max(_WIDE, 7.2 * longest + 8)
        self.across = min(ranks_per_node, layout.world)
        while self.across > _MOST_CELLS:
            self.across = (self.across + 1) // 2
        texts = max(6.9 * len(self.title), 5.6 * len(self.about))
        self.width = max(_LABEL + 2 * _PAD + self.across * (self.cell + _GAP) - _GAP, texts)
        self.height = _HEAD + len(self.nodes) * (self._box + 6) + (16 if self.left_out else 0)

    @property
    def title(self) -> str:
        exchange = self.exchange
        groups = "1 group" if exchange.count == 1 else f"{exchange.count:,} groups"
        return f"{exchange.axes}: {groups} of {exchange.size:,}, {exchange.links}"

    @property
    def about(self) -> str:
        sends = (f"{send.content} {RECEIVERS[send.to]}" for send in self.exchange.sends)
        return self.exchange.note or self.exchange.brief or ", ".join(sends)

    @property
    def _box(self) -> float:
        """Height of a node."""
        lines = -(-min(self.each, self.end - self.offset) // self.across)
        return 2 * _PAD + lines * (_HIGH + _GAP) - _GAP

    def _ranks(self, node: int) -> range:
        first = self.offset + node * self.each
        return range(first, min(first + self.each, self.end))

    def draw(self, left: float, top: float) -> list[str]:
        parts = [
            text_line(self.title, left, top + 14, 12.5, font_weight="bold"),
            text_line(self.about, left, top + 30, 11, class_="quiet"),
        ]
        corners = dict[int, Corner]()
        for row, node in enumerate(self.nodes):
            y = top + _HEAD + row * (self._box + 6)
            parts.append(text_line(f"node {node}", left, y + self._box / 2 + 4, 11, class_="quiet"))
            wide = 2 * _PAD + self.across * (self.cell + _GAP) - _GAP
            box = {"x": left + _LABEL - 4, "y": y, "width": wide, "height": self._box, "rx": 5}
            parts.append(element("rect", class_="box", **box))
            for i, rank in enumerate(self._ranks(node)):
                line, column = divmod(i, self.across)
                x = left + _LABEL - 4 + _PAD + column * (self.cell + _GAP)
                corners[rank] = (x, y + _PAD + line * (_HIGH + _GAP))
        parts += [*self._outlines(corners), *self._links(corners)]
        for rank, (x, y) in corners.items():
            middle = {"text_anchor": "middle"}
            parts.append(text_line(str(rank), x + self.cell / 2, y + 14, 12, **middle))
            group = text_line(f"g{self.number[rank]}", x + self.cell / 2, y + 25, 9, class_="quiet", **middle)
            parts.append(group)
        if self.left_out:
            y = top + self.height - 4
            text = f"{self.left_out:,} more nodes are not drawn"
            parts.append(text_line(text, left + _LABEL, y, 11, class_="quiet"))
        return parts

    def _outlines(self, corners: dict[int, Corner]) -> list[str]:
        """Draw a box around each run of adjacent ranks of one group."""
        runs = list[list[int]]()
        for rank, (_, y) in corners.items():
            last = runs[-1][-1] if runs else None
            adjacent = last is not None and last == rank - 1 and self.number[last] == self.number[rank]
            if adjacent and last is not None and corners[last][1] == y:
                runs[-1].append(rank)
            else:
                runs.append([rank])
        parts = list[str]()
        for run in runs:
            number = self.number[run[0]]
            colour = colours.hexed(colours.GROUPS[number % len(colours.GROUPS)])
            (x, y), wide = corners[run[0]], len(run) * (self.cell + _GAP) - _GAP
            box = {"x": x - 1, "y": y - 1, "width": wide + 2, "height": _HIGH + 2, "rx": 5}
            look = {"fill": colour, "fill_opacity": 0.16, "stroke": colour, "stroke_width": 2}
            parts.append(element("rect", class_="group", **box, **look))
        return parts

    def _links(self, corners: dict[int, Corner]) -> list[str]:
        """Draw lines between the ranks of the first group that are drawn."""
        parts = list[str]()
        colour = colours.hexed(colours.GROUPS[0])
        step = _HIGH + _GAP + 2 * _PAD + 7  # farther apart, a line would cross a cell
        for rank, other in pairwise(rank for rank in self.first if rank in corners):
            inside = (rank - self.offset) // self.each == (other - self.offset) // self.each
            (x0, y0), (x1, y1) = corners[rank], corners[other]
            look = {"stroke": colour, "stroke_width": 2.5, "fill": "none", "class_": "link"}
            if not inside:
                look["stroke_dasharray"] = "5 4"
            if y0 == y1 and other == rank + 1:
                continue  # in one box
            low, high = y0 + _HIGH + 1, y1 - 1
            gap = x1 - _GAP / 2
            if y0 == y1:  # over the cells between them
                start, end = x0 + self.cell - 6, x1 + 6
                path = f"M{start:g} {high:g}Q{(start + end) / 2:g} {high - 7:g} {end:g} {high:g}"
            elif y1 - y0 < step:
                path = f"M{x0 + self.cell / 2:g} {low:g}L{x1 + self.cell / 2:g} {high:g}"
            else:
                path = f"M{x0 + 6:g} {low:g}L{gap:g} {low + 4:g}L{gap:g} {high - 4:g}L{x1 + 6:g} {high:g}"
            parts.append(element("path", d=path, **look))
        return parts
