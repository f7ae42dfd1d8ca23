"""A layout as one HTML page: the grid of ranks, the groups and messages of a rank, and the rank
arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import TYPE_CHECKING, Any

from stretto.layout import Layout, RankGrid
from stretto.view import colours
from stretto.view.exchanges import Exchange, link_text
from stretto.view.grid import AXIS_NAMES, LETTERS, shown_axes, stacks, stages_text
from stretto.view.html import plain_html, script_json

if TYPE_CHECKING:
    from stretto.planner.machines.cluster import Cluster

_BODY = """<div class="bar" role="toolbar" aria-label="Groups">
<span class="quiet">Groups</span><span id="choices" class="choices"></span>
<span class="choices"><label for="rank">rank</label>
<input id="rank" type="number" min="{first}" max="{last}" value="{first}"></span>
<button id="theme" type="button">Light or dark</button>
</div>
<div class="sides">
<section class="ranks" aria-label="Ranks">
<div class="scroll"><div class="chart"><canvas id="grid" tabindex="0"
 role="application" aria-roledescription="grid of ranks"
 aria-label="{about} Arrow keys go from rank to rank."></canvas></div></div>
<p id="left" class="quiet" hidden></p>
<ul class="legend" aria-label="Legend">
<li>{stages}</li><li><i class="inside"></i> message inside a node{inside}</li>
<li><i class="between"></i> between nodes{between}</li>
</ul>
</section>
<section id="facts" aria-label="The chosen rank"></section>
</div>
<section id="arithmetic" aria-labelledby="counted">
<h2 id="counted">How the ranks of a group are counted</h2>
<p class="quiet">As in Megatron-LM's RankGenerator: every axis has a stride, a mask selects the axes that vary
inside a group, and the ranks of a group follow from its mask and strides. The fastest axis is the first. Tick
axes to choose another mask.</p>
<div id="kinds" class="choices"></div>
<div class="wide" id="axes"></div>
<div class="choices"><button id="begin" type="button">Begin</button>
<button id="back" type="button">Back</button><button id="next" type="button">Next</button>
<button id="end" type="button">All</button><span id="step" class="quiet" role="status"></span></div>
<ol id="lines"></ol>
</section>
<div id="tip" class="tip" role="tooltip" hidden></div>
<div id="said" class="unseen" role="status" aria-live="polite"></div>
<noscript>The page is drawn by the script in it, which is switched off.</noscript>
<script id="data" type="application/json">{data}</script>"""


def layout_page(
    layout: Layout,
    groups: Sequence[Exchange],
    *,
    ranks_per_node: int = 8,
    cluster: Cluster | None = None,
    encoder_pp: int = 0,
) -> str:
    """Return the page; it loads no other files, and its size does not grow with the number of ranks.

    Args:
        groups: groups with a button to select them.
        cluster: cluster whose links are named in the legend.
        encoder_pp: number of pipeline ranks of the encoder, which are the first.
    """
    experts = layout.ep > 1 or layout.expert_tp is not None
    grids = {"dense layers": layout.grid} | ({"expert layers": layout.expert_grid} if experts else {})
    inside, between = (link_text(cluster.inner), link_text(cluster.outer)) if cluster else ("", "")
    colour_of = [colours.hexed(colours.of_stage(stage, layout.pp)) for stage in range(layout.pp)]
    data = {
        "world": layout.world,
        "offset": layout.offset,
        "node": ranks_per_node,
        "stages": colour_of,
        "outlines": [colours.hexed(colour) for colour in colours.GROUPS],
        "letters": [[axis, LETTERS[axis], AXIS_NAMES[axis]] for axis in shown_axes(layout)],
        "grids": [{"name": name, "axes": list(grid.sizes.items())} for name, grid in grids.items()],
        "groups": [_group(layout, group, list(grids.values())) for group in groups],
        "links": {"inside": inside, "between": between},
        "encoder": encoder_pp,
    }
    nodes = -(-layout.world // ranks_per_node)
    ranks = "1 rank" if layout.world == 1 else f"{layout.world:,} ranks"
    machine = f" ({cluster.name})" if cluster is not None else ""
    about = (
        f"{ranks} on {f'{nodes:,} nodes of {ranks_per_node}' if nodes > 1 else '1 node'}{machine}, "
        f"order {layout.order} (fastest first)"
    )
    if encoder_pp:
        stages = "</li><li>".join(
            f'<i style="background:{colour_of[stack_ranks[0]]}"></i> {stack}: {stages_text(stack_ranks)}'
            for stack, stack_ranks in stacks(layout, encoder_pp)
        )
    else:
        ends = dict.fromkeys((colour_of[0], colour_of[-1]))
        swatches = "".join(f'<i style="background:{colour}"></i>' for colour in ends)
        stages = f"{swatches} stages 0 to {layout.pp - 1}" if layout.pp > 1 else f"{swatches} one stage"
    parts = {
        "first": str(layout.offset),
        "last": str(layout.offset + layout.world - 1),
        "about": escape(f"{about}."),
        "stages": stages,
        "inside": escape(f": {inside}" if inside else ""),
        "between": escape(f": {between}" if between else ""),
        "data": script_json(data),
    }
    head = f'<p class="name" aria-hidden="true">Layout {escape(str(layout))}</p>\n<p>{escape(about)}</p>\n'
    return plain_html(f"Layout {layout}", head + _BODY.format(**parts), "page_layout")


def _group(layout: Layout, exchange: Exchange, grids: Sequence[RankGrid]) -> Mapping[str, Any]:
    """Return the groups over some axes, with the grid and the mask that determine their ranks."""
    grid, names = layout.grid_of(exchange.axes)
    mask = names.split("-") if names else []
    return {**asdict(exchange), "links": exchange.links, "grid": grids.index(grid), "mask": mask}
