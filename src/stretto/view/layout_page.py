"""A layout as one HTML page: the grid of ranks, each rank's groups and messages, and the rank arithmetic."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import TYPE_CHECKING, Any

from stretto.layout import Layout, RankGrid
from stretto.view import colours
from stretto.view.exchanges import Exchange, link_text
from stretto.view.grid import LETTERS, WORDS, shown_axes, stacks, stages_text
from stretto.view.html import plain_html

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
<p class="quiet">As in Megatron-LM's RankGenerator: every axis has a stride, a mask says which axes vary
inside a group, and each group is counted out by its mask and strides. The fastest axis is the first. Tick
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
    """The page; it loads nothing, and its size does not grow with the number of ranks.

    Args:
        groups: those that can be chosen by a button.
        cluster: names the links.
        encoder_pp: the first pipeline ranks, which hold an encoder; 0: there is none.
    """
    facts = _data(layout, groups, ranks_per_node, cluster)
    facts["encoder"] = encoder_pp
    about = _about(layout, ranks_per_node, cluster)
    parts = {
        "first": str(layout.offset),
        "last": str(layout.offset + layout.world - 1),
        "about": escape(f"{about}."),
        "stages": _stages(layout, encoder_pp),
        "inside": escape(_beside(facts["links"]["inside"])),
        "between": escape(_beside(facts["links"]["between"])),
        "data": json.dumps(facts, separators=(",", ":")).replace("<", "\\u003c"),
    }
    head = f'<p class="name" aria-hidden="true">Layout {escape(str(layout))}</p>\n<p>{escape(about)}</p>\n'
    return plain_html(f"Layout {layout}", head + _BODY.format(**parts), "page_layout")


def _about(layout: Layout, ranks_per_node: int, cluster: Cluster | None) -> str:
    nodes = -(-layout.world // ranks_per_node)
    ranks = "1 rank" if layout.world == 1 else f"{layout.world:,} ranks"
    on = f"{nodes:,} nodes of {ranks_per_node}" if nodes > 1 else "1 node"
    machine = f" ({cluster.name})" if cluster is not None else ""
    return f"{ranks} on {on}{machine}, order {layout.order} (fastest first)"


def _beside(text: str) -> str:
    return f": {text}" if text else ""


def _stages(layout: Layout, encoder_pp: int) -> str:
    """The legend of the stages' colours."""
    if encoder_pp:
        return "</li><li>".join(
            f'<i style="background:{colours.hexed(colours.of_stage(ranks[0], layout.pp))}"></i> {stack}: '
            f"{stages_text(ranks)}"
            for stack, ranks in stacks(layout, encoder_pp)
        )
    ends = [colours.hexed(colours.of_stage(stage, layout.pp)) for stage in (0, layout.pp - 1)]
    swatches = "".join(f'<i style="background:{colour}"></i>' for colour in dict.fromkeys(ends))
    return f"{swatches} stages 0 to {layout.pp - 1}" if layout.pp > 1 else f"{swatches} one stage"


def _data(
    layout: Layout, groups: Sequence[Exchange], ranks_per_node: int, cluster: Cluster | None
) -> dict[str, Any]:
    """What the page's script draws and counts with."""
    experts = layout.ep > 1 or layout.expert_tp is not None
    grids = {"dense layers": layout.grid} | ({"expert layers": layout.expert_grid} if experts else {})
    links = cluster and {"inside": link_text(cluster.inner), "between": link_text(cluster.outer)}
    return {
        "world": layout.world,
        "offset": layout.offset,
        "node": ranks_per_node,
        "stages": [colours.hexed(colours.of_stage(stage, layout.pp)) for stage in range(layout.pp)],
        "outlines": [colours.hexed(colour) for colour in colours.GROUPS],
        "letters": [[axis, LETTERS[axis], WORDS[axis]] for axis in shown_axes(layout)],
        "grids": [{"name": name, "axes": list(grid.sizes.items())} for name, grid in grids.items()],
        "groups": [_group(layout, each, list(grids.values())) for each in groups],
        "links": links or {"inside": "", "between": ""},
    }


def _group(layout: Layout, exchange: Exchange, grids: Sequence[RankGrid]) -> Mapping[str, Any]:
    """The groups over some axes, with the grid and the mask that give their ranks."""
    grid, names = layout.grid_of(exchange.axes)
    mask = names.split("-") if names else []
    return {**asdict(exchange), "links": exchange.links, "grid": grids.index(grid), "mask": mask}
