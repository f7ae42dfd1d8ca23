"""`stretto layout`: the position of every rank on each axis, and the process groups."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.output import Json, command_app, report, write_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from stretto.layout import Layout

app = command_app()


@app.command(epilog="Example: stretto layout --world 16 --tp 2 --pp 4 --svg layout.svg")
def layout(
    world: Annotated[int, typer.Option(min=1, help="Number of ranks.")],
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor parallel ranks.")] = None,
    cp: Annotated[int | None, typer.Option(min=1, help="Context parallel ranks.")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="Expert parallel ranks, out of tp x cp x dp.")] = None,
    dp: Annotated[
        int | None, typer.Option(min=1, help="Data parallel ranks; default: what the other axes leave.")
    ] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline ranks.")] = None,
    expert_tp: Annotated[int | None, typer.Option(min=1, help="Tensor parallel ranks of experts.")] = None,
    order: Annotated[str, typer.Option(help="Order of the axes, fastest-varying first.")] = "tp-cp-ep-dp-pp",
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Ranks drawn as one node.")] = 8,
    svg: Annotated[Path | None, typer.Option(help="Write the picture here.")] = None,
    as_json: Json = False,
) -> None:
    """Show which rank holds which stage, shard and replica, and the process groups."""
    from stretto.layout import Layout

    described = Layout.fill(world, tp=tp, cp=cp, ep=ep, dp=dp, pp=pp, order=order, expert_tp=expert_tp)
    if svg is not None:
        from stretto.view.grid import grid_svg

        write_text(svg, grid_svg(described, ranks_per_node=ranks_per_node))
    report(facts(described) if as_json else {}, as_json, lambda to: _show(to, described, ranks_per_node, svg))


def facts(layout: Layout) -> dict[str, Any]:
    """The layout as the command's JSON; `coordinates` has one entry per rank."""
    axes = [axis for axis in layout.order.split("-") if axis != "ep" or layout.ep > 1]
    coordinates = [layout.coordinates(rank) for rank in range(layout.world)]
    record: dict[str, Any] = {
        "world": layout.world,
        "layout": str(layout),
        "sizes": layout.sizes,
        "order": layout.order,
        "coordinates": coordinates,
        "groups": {axis: layout.groups(axis) for axis in axes},
    }
    if layout.ep > 1:
        grid = layout.expert_grid
        record["expert"] = {
            "sizes": dict(grid.sizes),
            "coordinates": [grid.coordinates(rank) for rank in range(layout.world)],
            "groups": {axis: grid.groups(axis) for axis in grid.sizes},
        }
    return record


def _show(to: Console, layout: Layout, ranks_per_node: int, svg: Path | None) -> None:
    from stretto.view.grid import grid

    ranks = f"{layout.world} ranks" if layout.world > 1 else "1 rank"
    to.print(f"[bold]{layout}[/]: {ranks}, order {layout.order} (fastest first)\n")
    to.print(grid(layout, width=to.width, ranks_per_node=ranks_per_node), soft_wrap=True)
    if layout.world > 1:
        to.print()
        to.print(_groups(layout, to.width), soft_wrap=True)
    if svg is not None:
        to.print(f"\nwrote {svg}", soft_wrap=True)


def _groups(layout: Layout, width: int) -> Text:
    """One line per axis: size and number of its groups, and the first of them."""
    from rich.text import Text

    lines = [Text(f"{'groups':<10}{'size':>6}{'number':>8}", style="bold")]
    named = [(axis, layout.groups(axis)) for axis, size in layout.grid.sizes.items() if size > 1]
    if layout.ep > 1:
        named += [("ep", layout.groups("ep")), ("expert dp", layout.expert_grid.groups("dp"))]
    for axis, groups in named:
        line = f"{axis:<10}{len(groups[0]):>6}{len(groups):>8}  "
        lines.append(Text(line + _some_groups(groups, width - len(line))))
    return Text("\n").join(lines)


def _some_groups(groups: list[list[int]], room: int) -> str:
    """As many groups as fit, each shortened to its first and last ranks where it is long."""
    text = ""
    for number, group in enumerate(groups):
        shown = [*map(str, group[:4]), "...", str(group[-1])] if len(group) > 8 else list(map(str, group))
        word = f"[{', '.join(shown)}] "
        rest = "" if number == len(groups) - 1 else "..."
        if number and len(text) + len(word) + len(rest) > room:
            return text + "..."
        text += word
    return text.rstrip()
