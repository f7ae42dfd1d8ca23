"""The device grid in a terminal: a row a node, a cell a rank, coloured by pipeline stage."""

from __future__ import annotations

from textwrap import wrap

from rich.text import Text

from stretto.layout import Layout
from stretto.view import colours
from stretto.view.cells import Cell, cell, legend, nodes, some


def grid(layout: Layout, *, width: int, ranks_per_node: int = 8, most_nodes: int = 16) -> Text:
    """Which rank holds which stage, shard and replica, within `width` columns.

    A node takes several lines where its ranks do not fit beside one another. Of more nodes than `most_nodes`
    the first few and the last are shown, and below them the ranks of every stage.
    """
    rows = nodes(layout, ranks_per_node)
    numbered, left_out = some(rows, most_nodes if len(rows) <= most_nodes else 4)
    shown = {rank: cell(layout, rank) for _, row in numbered for rank in row}
    number = max(len(str(rank)) for rank in shown)
    wide = max(len(_label(each, number)) for each in shown.values()) + 1
    margin = len(f"node {numbered[-1][0]}") + 2
    per_line = _per_line(ranks_per_node, (width - margin) // wide)
    lines = list[Text]()
    for node, row in numbered:
        if left_out and node == numbered[-1][0]:
            lines.append(Text(" " * margin + f"... {left_out} more nodes ...", style="dim"))
        for start in range(0, len(row), per_line):
            line = Text((f"node {node}" if start == 0 else "").ljust(margin))
            for rank in row[start : start + per_line]:
                line.append(_label(shown[rank], number).ljust(wide - 1), _style(layout, shown[rank].stage))
                line.append(" ")
            line.rstrip()
            lines.append(line)
    if names := legend(layout):
        indent = " " * margin
        wrapped = wrap(f"rank, then {names}", width, initial_indent=indent, subsequent_indent=indent)
        lines += [Text(line, style="dim") for line in wrapped]
    if left_out and layout.pp > 1:
        lines += [Text(), *_stages(layout, width)]
    return Text("\n").join(lines)


def _label(shown: Cell, number: int) -> str:
    return f"{shown.rank:>{number}} {shown.place}".rstrip()


def _style(layout: Layout, stage: int) -> str:
    if layout.pp == 1:
        return ""
    colour = colours.of_stage(stage, layout.pp)
    return f"{colours.text_on(colour)} on {colours.hexed(colour)}"


def _per_line(ranks: int, fitting: int) -> int:
    """The largest half, quarter, ... of a node's ranks that fits on a line."""
    while ranks > max(1, fitting):
        ranks = (ranks + 1) // 2
    return ranks


def _stages(layout: Layout, width: int, most: int = 32) -> list[Text]:
    """A line a stage: the runs of ranks that hold it."""
    others = "-".join(axis for axis in layout.grid.sizes if axis != "pp")
    lines = list[Text]()
    for stage, ranks in enumerate(layout.groups(others)[:most]):
        line = Text()
        line.append(f" stage {stage:<3} ", _style(layout, stage))
        line.append(f" ranks {_runs(sorted(ranks), width - 20)}")
        lines.append(line)
    if layout.pp > most:
        lines.append(Text(f"... {layout.pp - most} more stages ...", style="dim"))
    return lines


def _runs(ranks: list[int], room: int) -> str:
    """Ranks as runs, "0-7, 64-71"; as many as fit."""
    starts = [at for at in range(len(ranks)) if at == 0 or ranks[at] != ranks[at - 1] + 1]
    text = ""
    for start, end in zip(starts, [*starts[1:], len(ranks)], strict=True):
        run = f"{ranks[start]}-{ranks[end - 1]}" if end - start > 1 else str(ranks[start])
        if text and len(text) + len(run) + 7 > room:
            return text + ", ..."
        text += f", {run}" if text else run
    return text
