"""A search of layouts as one HTML page: time against memory, parts of the step, memory of ranks, timeline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING

from stretto.errors import StrettoError
from stretto.planner.assumptions import software_profiles
from stretto.planner.estimate import Estimate, precision_of
from stretto.planner.memory.job import memory_of
from stretto.planner.time.step import step_time
from stretto.spec.parameters import count_parameters
from stretto.view import colours
from stretto.view.html import panels_html
from stretto.view.panel import Panel, panel
from stretto.view.plan_charts import FITS, memory_bars, scatter, step_bars

if TYPE_CHECKING:
    from stretto.planner.assumptions import Assumptions
    from stretto.planner.machines.cluster import Cluster, Link
    from stretto.planner.search.ranking import Plan, Ranked
    from stretto.spec.job import Job

_MOST_BLOCKS = 20_000  # of the timeline; more are slow to draw and show nothing new


def plan_page(plan: Plan, model: str) -> str:
    """The page for a model of that name; it loads nothing.

    Raises:
        StrettoError: no layout was timed, so there is nothing to draw.
    """
    first = plan.ranking[0] if plan.ranking else plan.nearest
    if first is None:
        raise StrettoError("no layout was timed, so there is nothing to draw", hint="ask for less at once")
    estimate = first.estimate
    job = estimate.job
    best = plan.ranking[0].words if plan.ranking else None
    drawing, facts = scatter(plan.tried, estimate.cluster.device.memory, best)
    data = json.dumps(facts, separators=(",", ":")).replace("<", "\\u003c")
    above = [
        _lead(plan, first, setting(job, estimate.cluster, plan.assumptions, model)),
        f"<h2>Time against memory</h2>{_verdicts(plan)}<div class='figure'>{drawing}</div>",
        f'<script id="candidates" type="application/json">{data}</script>',
        f"<h2>Where the step goes</h2>{step_bars(plan.ranking or [first])}",
    ]
    if estimate.memory is not None:
        above.append(f"<h2>Memory of every pipeline rank</h2>{memory_bars(estimate.memory)}")
    above.append("<h2>The step of the first, replayed</h2>")
    devices = f"{job.layout.world} x {estimate.cluster.device.name}"
    title = f"Plan of {model}: {devices}, batch {job.global_batch} x {job.sequence}"
    return panels_html(
        [_timeline(estimate, plan.assumptions)], title, _table(plan), "\n".join(above), "page_plan"
    )


def setting(job: Job, cluster: Cluster, assumptions: Assumptions, model: str) -> list[str]:
    """What a plan is for, in two lines: model, batch and precision; devices, nodes, links and software."""
    size = count_parameters(job.shape).total
    count = f"{size / 1e9:.3g} B" if size >= 1e9 else f"{size / 1e6:.3g} M"
    batch = f"batch {job.global_batch} x {job.sequence} tokens, {job.precision.dtype}"
    devices = cluster.devices or cluster.node
    nodes = cluster.nodes or -(-devices // cluster.node)
    shape = f"{nodes} nodes of {cluster.node}" if nodes > 1 else "1 node"
    links = f"{_link(cluster.inner)} inside a node" if devices > 1 else "no links"
    links += f", {_link(cluster.outer)} between nodes" if nodes > 1 else ""
    names = [name for name, profile in software_profiles().items() if profile == assumptions.software]
    software = names[0] if names else "custom"
    return [
        f"{model}: {count} parameters, {batch}",
        f"{devices} x {cluster.device.name} ({cluster.name}): {shape}, {links}; software: {software}",
    ]


def _link(link: Link) -> str:
    return f"{link.kind} {link.bandwidth / 1e9:.4g} GB/s".strip()


def _lead(plan: Plan, first: Ranked, about: Sequence[str]) -> str:
    lines = [
        *about,
        f"{plan.candidates:,} legal candidates, {len(plan.tried):,} timed, of which {plan.feasible:,} "
        f"fit; {plan.replayed:,} replayed, in {plan.seconds:.2g} s.",
        f"First: {first.words}. {first.why}"
        if plan.ranking
        else f"Nothing fits; nearest: {first.words}. {first.why}",
    ]
    rejected = [f"{reason}: {one.count:,}, as {one.example}" for reason, one in plan.rejected.items()]
    if rejected:
        lines.append("Turned down: " + "; ".join(rejected) + ".")
    return "".join(f'<p class="lines">{escape(line)}</p>' for line in lines)


def _verdicts(plan: Plan) -> str:
    """The legend of the points, for verdicts that occur."""
    seen = {one.verdict for one in plan.tried}
    items = [
        f'<li><i style="border-radius:50%;background:{colours.hexed(look[0])}"></i>{name}</li>'
        for name, look in FITS.items()
        if name in seen
    ]
    if "does not fit" in seen:
        items.append("<li>&#x2715; does not fit</li>")
    items.append("<li>&#x25EF; the first</li><li>&#x2014; none is faster with less memory</li>")
    return f'<ul class="key">{"".join(items)}</ul>'


def _timeline(estimate: Estimate, assumptions: Assumptions) -> Panel:
    """The step's program, with fewer microbatches where there are very many."""
    job = estimate.job
    held = memory_of(job) if job.recompute.mode == "auto" or job.recompute.blocks is not None else None
    count, pp = job.microbatches or 1, job.layout.pp
    stages = job.program().stages
    most = max(2 * pp, _MOST_BLOCKS // (3 * stages) // pp * pp)
    short = replace(job, global_batch=job.layout.dp * job.micro_batch * most) if count > most else job
    time = step_time(
        short, estimate.cluster, assumptions, precision_of(job), None if held is None else held.modes
    )
    drawn = panel(time.timeline)
    note = f"; the first {most} of {count} microbatches" if short is not job else ""
    return replace(drawn, title=f"{job.schedule}, {pp} pipeline ranks", line=drawn.line + note, unit="s")


def _table(plan: Plan) -> Sequence[Sequence[str]]:
    rows = [("", "layout", "step s", "tokens/s", "MFU", "memory GiB", "fits", "bubble", "why")]
    for at, one in enumerate(plan.ranking):
        estimate, held = one.estimate, one.estimate.memory
        rows.append(
            (
                str(at + 1),
                one.words,
                f"{estimate.seconds:.4g}",
                f"{estimate.tokens_per_s:,.0f}",
                f"{100 * estimate.mfu:.1f}%",
                "" if held is None else f"{held.device.mid / 2**30:.3g}",
                "" if held is None else held.verdict,
                f"{100 * estimate.bubble:.1f}%",
                one.why,
            )
        )
    return rows if plan.ranking else ()
