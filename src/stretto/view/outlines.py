"""Groups of a layout as SVG: for each set of axes a small grid in which every group is outlined."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from stretto.layout import Layout
from stretto.view import colours
from stretto.view.exchanges import RECEIVERS, Exchange
from stretto.view.svg import element, words

_WIDE, _HIGH = 34.0, 30.0  # a rank's cell
_GAP, _PAD = 6.0, 6.0
_LABEL, _HEAD = 62.0, 40.0
_BETWEEN = 34.0  # from one panel to the next
_MOST_NODES, _MOST_CELLS = 8, 16  # of a panel, and of a line in it

Place = tuple[float, float]


def outlines(
    layout: Layout, shown: Sequence[Exchange], *, ranks_per_node: int, left: float, top: float, width: float
) -> tuple[list[str], float, float]:
    """A panel for each of `shown`, beside one another within `width` where they fit.

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
        words("Groups", left, top + 22, 14, font_weight="bold"),
        words(f"one colour each, numbered; {note}", left + 64, top + 22, 11, class_="quiet"),
    ]
    y = top + 32
    for start in range(0, len(panels), columns):
        line = panels[start : start + columns]
        for column, panel in enumerate(line):
            parts += panel.drawn(left + column * (wide + _BETWEEN), y)
        y += max(panel.height for panel in line) + 8
    right = left + max(min(columns, len(panels)) * (wide + _BETWEEN) - _BETWEEN, 64 + 5.6 * (len(note) + 25))
    return parts, y, right


class _Panel:
    """The groups over one set of axes; of many nodes those that hold the first ranks of the first group."""

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
        one = self.exchange
        groups = "1 group" if one.count == 1 else f"{one.count:,} groups"
        return f"{one.axes}: {groups} of {one.size:,}, {one.links}"

    @property
    def about(self) -> str:
        sends, said = self.exchange.sends, self.exchange.note or self.exchange.brief
        return said or ", ".join(f"{send.what} {RECEIVERS[send.to]}" for send in sends)

    @property
    def _box(self) -> float:
        """Height of a node."""
        lines = -(-min(self.each, self.end - self.offset) // self.across)
        return 2 * _PAD + lines * (_HIGH + _GAP) - _GAP

    def _ranks(self, node: int) -> range:
        first = self.offset + node * self.each
        return range(first, min(first + self.each, self.end))

    def drawn(self, left: float, top: float) -> list[str]:
        parts = [
            words(self.title, left, top + 14, 12.5, font_weight="bold"),
            words(self.about, left, top + 30, 11, class_="quiet"),
        ]
        places = dict[int, Place]()  # the upper left corner of each rank's cell
        for row, node in enumerate(self.nodes):
            y = top + _HEAD + row * (self._box + 6)
            parts.append(words(f"node {node}", left, y + self._box / 2 + 4, 11, class_="quiet"))
            wide = 2 * _PAD + self.across * (self.cell + _GAP) - _GAP
            box = {"x": left + _LABEL - 4, "y": y, "width": wide, "height": self._box, "rx": 5}
            parts.append(element("rect", class_="box", **box))
            for place, rank in enumerate(self._ranks(node)):
                line, column = divmod(place, self.across)
                x = left + _LABEL - 4 + _PAD + column * (self.cell + _GAP)
                places[rank] = (x, y + _PAD + line * (_HIGH + _GAP))
        parts += [*self._outlines(places), *self._links(places)]
        for rank, (x, y) in places.items():
            middle = {"text_anchor": "middle"}
            parts.append(words(str(rank), x + self.cell / 2, y + 14, 12, **middle))
            group = words(f"g{self.number[rank]}", x + self.cell / 2, y + 25, 9, class_="quiet", **middle)
            parts.append(group)
        if self.left_out:
            y = top + self.height - 4
            text = f"{self.left_out:,} more nodes are not drawn"
            parts.append(words(text, left + _LABEL, y, 11, class_="quiet"))
        return parts

    def _outlines(self, places: dict[int, Place]) -> list[str]:
        """A box round each run of neighbours of one group."""
        runs = list[list[int]]()
        for rank, (_, y) in places.items():
            last = runs[-1][-1] if runs else None
            same = last is not None and last == rank - 1 and self.number[last] == self.number[rank]
            if same and last is not None and places[last][1] == y:
                runs[-1].append(rank)
            else:
                runs.append([rank])
        parts = list[str]()
        for run in runs:
            number = self.number[run[0]]
            colour = colours.hexed(colours.GROUPS[number % len(colours.GROUPS)])
            (x, y), wide = places[run[0]], len(run) * (self.cell + _GAP) - _GAP
            box = {"x": x - 1, "y": y - 1, "width": wide + 2, "height": _HIGH + 2, "rx": 5}
            look = {"fill": colour, "fill_opacity": 0.16, "stroke": colour, "stroke_width": 2}
            parts.append(element("rect", class_="group", **box, **look))
        return parts

    def _links(self, places: dict[int, Place]) -> list[str]:
        """Lines along the first group, as far as it is drawn."""
        parts = list[str]()
        colour = colours.hexed(colours.GROUPS[0])
        step = _HIGH + _GAP + 2 * _PAD + 7  # farther apart, a line would cross a cell
        for one, other in pairwise(rank for rank in self.first if rank in places):
            inside = (one - self.offset) // self.each == (other - self.offset) // self.each
            (x0, y0), (x1, y1) = places[one], places[other]
            look = {"stroke": colour, "stroke_width": 2.5, "fill": "none", "class_": "link"}
            if not inside:
                look["stroke_dasharray"] = "5 4"
            if y0 == y1 and other == one + 1:
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
