"""`stretto layout`: the position of every rank on each axis, and the process groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.options import Json, Picture
from stretto.cli.output import check_writable, command_app
from stretto.cli.report import CommandReport
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from rich.text import Text

    from stretto.layout import Layout
    from stretto.planner.machines.cluster import Cluster
    from stretto.view.exchanges import Exchange

app = command_app()

_SEND_KEYS = {"content": "what", "collective": "how"}  # of a message in JSON
_LISTED = 64  # groups on the terminal, and ranks of a group


@app.command(
    epilog="Example: stretto layout --world 16 --tp 2 --pp 4 --groups tp-pp --svg grid.svg --html page.html"
)
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
    encoder_pp: Annotated[
        int | None,
        typer.Option(
            min=1, help="The first pipeline ranks, which hold the encoder; the others hold the decoder."
        ),
    ] = None,
    order: Annotated[str, typer.Option(help="Order of the axes, fastest-varying first.")] = "tp-cp-ep-dp-pp",
    groups: Annotated[
        str | None,
        typer.Option(help="List the groups over these axes, as in tp-pp; several with commas."),
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks of a node; default: the cluster's, else 8.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Name the links of this cluster, as in dgx-h100; `stretto catalogue`.")
    ] = None,
    svg: Picture = None,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write a page here: click a rank for its groups, messages and links; the rank arithmetic "
            "step by step."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show which rank holds which stage, shard and replica, the process groups, and what they send."""
    from stretto.layout import Layout
    from stretto.view.exchanges import exchanges, link_text
    from stretto.view.grid import grid, grid_svg

    check_writable(svg, html)
    layout = Layout.fill(world, tp=tp, cp=cp, ep=ep, dp=dp, pp=pp, order=order, expert_tp=expert_tp)
    if encoder_pp is not None and encoder_pp >= layout.pp:
        raise StrettoError(
            f"--encoder-pp {encoder_pp} leaves none of the {layout.pp} pipeline ranks to the decoder",
            hint=f"--encoder-pp {layout.pp - 1}, or more --pp" if layout.pp > 1 else "--pp 2, or more",
        )
    encoder = encoder_pp or 0
    machine = None
    if cluster is not None:
        from stretto.planner.machines.catalogue import find_cluster

        machine = find_cluster(cluster).sized(world)
    node = ranks_per_node or (machine.node if machine else 8)
    listed = tuple(axes.strip() for axes in groups.split(",")) if groups is not None else ()
    messages = exchanges(layout, node, listed, encoder_pp=encoder)

    report = CommandReport(lambda: _record(layout, messages, node, machine, listed, encoder_pp=encoder))
    report.draw(
        lambda to: (
            f"[bold]{layout}[/]: {world} rank{'s' * (world > 1)}, order {layout.order} (fastest first)\n"
        )
    )
    report.draw(lambda to: grid(layout, width=to.width, ranks_per_node=node, encoder_pp=encoder))
    if messages:
        report.line()
        report.draw(lambda to: _group_lines(layout, to.width, messages))
    if machine is not None:
        inner, outer = link_text(machine.inner), link_text(machine.outer)
        report.line(f"\n{machine.name}: inside a node {inner}; between nodes {outer}")
    for axes in dict.fromkeys(listed):
        ranks_of_groups = layout.groups(axes)
        count = len(ranks_of_groups)
        report.line(f"\n{axes}: {count} group{'s' * (count > 1)} of {len(ranks_of_groups[0])}")
        for number, ranks in enumerate(ranks_of_groups[:_LISTED]):
            nodes = len({(rank - layout.offset) // node for rank in ranks})
            shown = ranks if len(ranks) <= _LISTED else [*ranks[: _LISTED - 1], "...", ranks[-1]]
            on = f"{nodes} node{'s' * (nodes > 1)}"
            report.line(f"{number:>4}  {on:<9} [{', '.join(map(str, shown))}]")
        if count > _LISTED:
            report.line(f"... {count - _LISTED} more groups; --json has them all")
    if svg or html:
        report.line()
    if svg is not None:
        picture = grid_svg(layout, ranks_per_node=node, groups=messages, encoder_pp=encoder)
        report.write(svg, picture)
    if html is not None:
        from stretto.view.page import recorded_page
        from stretto.web.layouts import layout_record

        record = layout_record(layout, messages, ranks_per_node=node, cluster=machine, encoder_pp=encoder)
        report.write(html, recorded_page(f"Layout {layout}", "layout", {"layout": record}))
    report.print(as_json)


def _record(
    layout: Layout,
    exchanges: Sequence[Exchange],
    ranks_per_node: int,
    cluster: Cluster | None,
    listed: Sequence[str],
    *,
    encoder_pp: int,
) -> dict[str, Any]:
    """The layout as JSON; `coordinates` has one entry per rank.

    Args:
        listed: axes of further groups to list, as in "tp-pp".
        encoder_pp: pipeline ranks of an encoder.
    """
    axes = [axis for axis in layout.order.split("-") if axis != "ep" or layout.ep > 1]
    record: dict[str, Any] = {
        "world": layout.world,
        "layout": str(layout),
        "sizes": layout.sizes,
        "order": layout.order,
        "coordinates": [layout.coordinates(rank) for rank in range(layout.world)],
        "groups": {axis: layout.groups(axis) for axis in dict.fromkeys([*axes, *listed])},
        "ranks_per_node": ranks_per_node,
        "exchanges": [
            asdict(each)
            | {"links": each.links}
            | {"sends": [{_SEND_KEYS.get(key, key): v for key, v in asdict(s).items()} for s in each.sends]}
            for each in exchanges
        ],
    }
    if cluster is not None:
        links = {"inside": asdict(cluster.inner), "between": asdict(cluster.outer)}
        record["cluster"] = {"name": cluster.name, "links": links}
    if layout.ep > 1:
        grid = layout.expert_grid
        record["expert"] = {
            "sizes": dict(grid.sizes),
            "coordinates": [grid.coordinates(rank) for rank in range(layout.world)],
            "groups": {axis: grid.groups(axis) for axis in grid.sizes},
        }
    if encoder_pp:
        record["encoder_pp"] = encoder_pp
    return record


def _group_lines(layout: Layout, width: int, exchanges: Sequence[Exchange]) -> Text:
    """One line per axis: size and number of its groups, their links, and as many of them as fit, each
    shortened to its first and last ranks if it is long.
    """
    from rich.text import Text

    name = max(8, *(len(each.axes) for each in exchanges))
    links = max(13, *(len(each.links) for each in exchanges))
    lines = [Text(f"{'groups':<{name}}{'size':>6}{'number':>8}  {'links':<{links}}", style="bold")]
    for each in exchanges:
        line = f"{each.axes:<{name}}{each.size:>6}{each.count:>8}  {each.links:<{links}}  "
        begin, groups = len(line), layout.groups(each.axes)
        for index, group in enumerate(groups):
            shown = [*map(str, group[:4]), "...", str(group[-1])] if len(group) > 8 else list(map(str, group))
            word = f"[{', '.join(shown)}] "
            more = "" if index == len(groups) - 1 else "..."
            if index and len(line) + len(word) + len(more) > width:
                line += "..."
                break
            line += word
        lines.append(Text(line if len(line) == begin else line.rstrip()))
    return Text("\n").join(lines)
