"""Texts of a plan that terminal and page share: its setting, its search, and how layouts differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum, inf
from typing import TYPE_CHECKING

from stretto.job.parameters import count_parameters
from stretto.planner.assumptions import software_profiles
from stretto.planner.estimate import PARTS

if TYPE_CHECKING:
    from stretto.job.job import Job
    from stretto.planner.assumptions import Assumptions
    from stretto.planner.machines.cluster import Cluster, NetworkLink
    from stretto.planner.search.ranking import Plan, Ranked

GIB = 2**30
_SMALL = 0.003  # share of the first layout's step below which a difference is not shown


def plan_setting(job: Job, cluster: Cluster, assumptions: Assumptions, model: str) -> dict[str, str]:
    """Return the setting of a plan by name: model, batch, cluster, node, network, software."""
    size = count_parameters(job.shape).total
    count = f"{size / 1e9:.3g} B" if size >= 1e9 else f"{size / 1e6:.3g} M"
    devices = cluster.devices or cluster.node
    nodes = cluster.nodes or -(-devices // cluster.node)
    shape = f"{nodes} nodes of {cluster.node} devices" if nodes > 1 else f"1 node of {devices} devices"
    if cluster.last is not None:
        shape += f", {cluster.last} in the last"
    memory = cluster.device.memory
    room = "" if memory == float("inf") else f", {memory / GIB:.1f} GiB each"
    software = [name for name, profile in software_profiles().items() if profile == assumptions.software]
    return {
        "model": f"{model}: {count} parameters, {job.shape.layers} layers of width {job.shape.hidden}",
        "batch": f"{job.global_batch} x {job.sequence} tokens, {job.precision.dtype}",
        "cluster": f"{devices} x {cluster.device.name} ({cluster.name}){room}",
        "node": f"{shape}, {_link(cluster.inner)} inside a node" if devices > 1 else "1 device",
        "network": f"{_link(cluster.outer)} per device between nodes" if nodes > 1 else "none: one node",
        "software": software[0] if software else "custom",
    }


def _link(link: NetworkLink) -> str:
    return f"{link.kind} {link.bandwidth / 1e9:.4g} GB/s".strip()


def search_text(plan: Plan) -> str:
    """Return as text the number of examined candidates, and a bound on the speed of the others."""
    text = f"{plan.candidates:,} candidates, {plan.replayed:,} replayed, {plan.feasible:,} fit"
    text += f", {plan.seconds:.1f} s"
    if not plan.complete:
        text += ", cut short by its limit"
    if plan.ranking and 0.005 <= plan.gap < inf:
        text += f"; one that was not examined could be up to {1 + plan.gap:.2f}x as fast"
    elif plan.ranking and not plan.complete and not plan.gap:
        text += "; the fastest is proved, the others may not be the next"
    return text


def mfu_text(mfu: float | None) -> str:
    """Return a utilisation as text; "-" if there is no peak to compare with."""
    return "-" if mfu is None else f"{mfu:.1%}"


def uncertainty_text(widths: Mapping[str, float]) -> str:
    """Return as text the uncertainty of a step by source, as a share of it, the largest first."""
    ordered = sorted(widths.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {100 * width:.0f}%" for name, width in ordered if width >= 0.005)


def differences(ranking: Sequence[Ranked]) -> list[tuple[str, ...]]:
    """Return a table, header first, of the seconds that each layout needs more than the first, by part.

    Parts with only small differences are summed in the last column.
    """
    best = ranking[0].estimate
    changes = [
        {name: ranked.estimate.parts.get(name, 0.0) - best.parts.get(name, 0.0) for name in PARTS}
        for ranked in ranking[1:]
    ]
    large = [name for name in PARTS if any(abs(change[name]) > _SMALL * best.seconds for change in changes)]
    rows: list[tuple[str, ...]] = [("", "layout", "step", *large, "rest")]
    digits = 3 if best.seconds >= 1 else 5
    for rank, (ranked, change) in enumerate(zip(ranking[1:], changes, strict=True), 2):
        step, parts = ranked.estimate.seconds - best.seconds, [change[name] for name in large]
        cells = (
            "0" if round(seconds, digits) == 0 else f"{seconds:+.{digits}f}"
            for seconds in (step, *parts, step - fsum(parts))
        )
        rows.append((str(rank), ranked.layout, *cells))
    return rows
