"""What a plan is about and how its layouts differ, in the words that text and page share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

from stretto.planner.assumptions import software_profiles
from stretto.planner.estimate import PARTS
from stretto.spec.parameters import count_parameters

if TYPE_CHECKING:
    from stretto.planner.assumptions import Assumptions
    from stretto.planner.machines.cluster import Cluster, Link
    from stretto.planner.search.ranking import Plan, Ranked
    from stretto.spec.job import Job

GIB = 2**30
_SMALL = 0.003  # share of the first layout's step below which a difference is not shown


def setting(job: Job, cluster: Cluster, assumptions: Assumptions, model: str) -> dict[str, str]:
    """What a plan is for, by name: model, batch, cluster, node, network, software."""
    size = count_parameters(job.shape).total
    count = f"{size / 1e9:.3g} B" if size >= 1e9 else f"{size / 1e6:.3g} M"
    devices = cluster.devices or cluster.node
    nodes = cluster.nodes or -(-devices // cluster.node)
    shape = f"{nodes} nodes of {cluster.node} devices" if nodes > 1 else f"1 node of {devices} devices"
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


def _link(link: Link) -> str:
    return f"{link.kind} {link.bandwidth / 1e9:.4g} GB/s".strip()


def counts(plan: Plan) -> str:
    """How much of the space was examined, and how certain the first is."""
    text = f"{plan.candidates:,} candidates, {plan.replayed:,} replayed, {plan.feasible:,} fit"
    text += f", {plan.seconds:.1f} s"
    if not plan.complete:
        text += ", cut short by the time limit"
    if plan.ranking and 0 < plan.gap < inf:
        text += f"; one that was not examined could be up to {1 + plan.gap:.2f}x as fast"
    return text


def doubts_text(widths: Mapping[str, float]) -> str:
    """How uncertain a step is, by source, as a share of it: the largest first."""
    known = sorted(widths.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {100 * width:.0f}%" for name, width in known if width >= 0.005)


def differences(ranking: Sequence[Ranked]) -> list[tuple[str, ...]]:
    """The seconds that each layout needs more than the first, by part: a table that begins with its header.

    Parts that differ nowhere by much are summed as the rest.
    """
    first, *others = (one.estimate for one in ranking)
    large = [
        name
        for name in PARTS
        if any(
            abs(one.parts.get(name, 0.0) - first.parts.get(name, 0.0)) > _SMALL * first.seconds
            for one in others
        )
    ]
    rows: list[tuple[str, ...]] = [("", "layout", "step", *large, "rest")]
    digits = 3 if first.seconds >= 1 else 5
    for place, (ranked, one) in enumerate(zip(ranking[1:], others, strict=True), 2):
        changes = [one.parts.get(name, 0.0) - first.parts.get(name, 0.0) for name in large]
        whole = one.seconds - first.seconds
        cells = [_change(change, digits) for change in (whole, *changes, whole - sum(changes))]
        rows.append((str(place), ranked.layout, *cells))
    return rows


def _change(seconds: float, digits: int) -> str:
    return "0" if round(seconds, digits) == 0 else f"{seconds:+.{digits}f}"
