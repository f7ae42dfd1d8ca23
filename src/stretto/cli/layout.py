"""`stretto layout`: the position of every rank on each axis, and the process groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.output import Json, check_writable, command_app, report, write_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from stretto.layout import Layout
    from stretto.planner.machines.cluster import Cluster
    from stretto.view.exchanges import Exchange

app = command_app()


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
    svg: Annotated[Path | None, typer.Option(help="Write the picture here.")] = None,
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

    check_writable(svg, html)
    described = Layout.fill(world, tp=tp, cp=cp, ep=ep, dp=dp, pp=pp, order=order, expert_tp=expert_tp)
    encoder = _check_encoder(encoder_pp, described)
    machine = None
    if cluster is not None:
        from stretto.planner.machines.catalogue import find_cluster

        machine = find_cluster(cluster).sized(world)
    node = ranks_per_node or (machine.node if machine else 8)
    listed = tuple(axes.strip() for axes in groups.split(",")) if groups is not None else ()
    communicating = exchanges(described, node, listed, encoder_pp=encoder)
    if svg is not None:
        from stretto.view.grid import grid_svg

        write_text(svg, grid_svg(described, ranks_per_node=node, groups=communicating, encoder_pp=encoder))
    if html is not None:
        from stretto.view.layout_page import layout_page

        page = layout_page(described, communicating, ranks_per_node=node, cluster=machine, encoder_pp=encoder)
        write_text(html, page)

    def text(to: Console) -> None:
        _show(to, described, node, communicating, encoder)
        if machine is not None:
            inside, between = link_text(machine.inner), link_text(machine.outer)
            to.print(f"\n{machine.name}: inside a node {inside}; between nodes {between}", soft_wrap=True)
        for axes in dict.fromkeys(listed):
            _list(to, described, axes, node)
        for path in filter(None, (svg, html)):
            to.print(f"\nwrote {path}" if path is (svg or html) else f"wrote {path}", soft_wrap=True)

    known = facts(described, communicating, node, machine, listed) if as_json else {}
    if known and encoder_pp is not None:
        known["encoder_pp"] = encoder_pp
    report(known, as_json, text)


def _check_encoder(encoder_pp: int | None, layout: Layout) -> int:
    """The pipeline ranks of the encoder; 0: there is none."""
    if encoder_pp is None or encoder_pp < layout.pp:
        return encoder_pp or 0
    from stretto.errors import StrettoError

    raise StrettoError(
        f"--encoder-pp {encoder_pp} leaves none of the {layout.pp} pipeline ranks to the decoder",
        hint=f"--encoder-pp {layout.pp - 1}, or more --pp" if layout.pp > 1 else "--pp 2, or more",
    )


def facts(
    layout: Layout,
    exchanges: Sequence[Exchange],
    ranks_per_node: int,
    cluster: Cluster | None,
    listed: Sequence[str],
) -> dict[str, Any]:
    """The layout as the command's JSON; `coordinates` has one entry per rank.

    Args:
        listed: axes of further groups to list, as in "tp-pp".
    """
    axes = [axis for axis in layout.order.split("-") if axis != "ep" or layout.ep > 1]
    coordinates = [layout.coordinates(rank) for rank in range(layout.world)]
    record: dict[str, Any] = {
        "world": layout.world,
        "layout": str(layout),
        "sizes": layout.sizes,
        "order": layout.order,
        "coordinates": coordinates,
        "groups": {axis: layout.groups(axis) for axis in dict.fromkeys([*axes, *listed])},
        "ranks_per_node": ranks_per_node,
        "exchanges": [asdict(each) | {"links": each.links} for each in exchanges],
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
    return record


def _show(
    to: Console, layout: Layout, ranks_per_node: int, exchanges: Sequence[Exchange], encoder_pp: int
) -> None:
    from stretto.view.grid import grid

    ranks = f"{layout.world} ranks" if layout.world > 1 else "1 rank"
    to.print(f"[bold]{layout}[/]: {ranks}, order {layout.order} (fastest first)\n")
    drawn = grid(layout, width=to.width, ranks_per_node=ranks_per_node, encoder_pp=encoder_pp)
    to.print(drawn, soft_wrap=True)
    if exchanges:
        to.print()
        to.print(_groups(layout, to.width, exchanges), soft_wrap=True)


def _groups(layout: Layout, width: int, exchanges: Sequence[Exchange]) -> Text:
    """One line per axis: size and number of its groups, where they run, and the first of them."""
    from rich.text import Text

    name = max(8, *(len(each.axes) for each in exchanges))
    links = max(13, *(len(each.links) for each in exchanges))
    lines = [Text(f"{'groups':<{name}}{'size':>6}{'number':>8}  {'links':<{links}}", style="bold")]
    for each in exchanges:
        line = f"{each.axes:<{name}}{each.size:>6}{each.count:>8}  {each.links:<{links}}  "
        lines.append(Text(line + _some_groups(layout.groups(each.axes), width - len(line))))
    return Text("\n").join(lines)


_MOST_LISTED = 64  # groups on the terminal


def _list(to: Console, layout: Layout, axes: str, ranks_per_node: int) -> None:
    """Every group over the axes on a line, with the number of its nodes."""
    groups = layout.groups(axes)
    many = "1 group" if len(groups) == 1 else f"{len(groups)} groups"
    to.print(f"\n[bold]{axes}[/]: {many} of {len(groups[0])}", soft_wrap=True)
    for number, ranks in enumerate(groups[:_MOST_LISTED]):
        on = len({(rank - layout.offset) // ranks_per_node for rank in ranks})
        nodes = "1 node" if on == 1 else f"{on} nodes"
        shown = ", ".join(map(str, ranks if len(ranks) <= 64 else [*ranks[:63], "...", ranks[-1]]))
        to.print(f"{number:>4}  {nodes:<9} [{shown}]", soft_wrap=True, markup=False)
    if len(groups) > _MOST_LISTED:
        to.print(f"... {len(groups) - _MOST_LISTED} more groups; --json has them all", soft_wrap=True)


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
