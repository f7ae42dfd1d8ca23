"""What would make a plan faster: its search again with another network, cards, nodes, batch, precision or
software, and the resource that binds its first layout.

Each search has little work (`work_of`) and may miss a faster layout, so the layouts of the plan are priced
with the change too: no answer is worse than to keep the best of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from stretto.errors import StrettoError
from stretto.job.job import Job
from stretto.job.rules import problems
from stretto.planner.assumptions import software_profile
from stretto.planner.estimate import Estimate, estimate
from stretto.planner.machines.catalogue import find_device
from stretto.planner.machines.cluster import Cluster
from stretto.planner.memory.short_step import short_step_fit
from stretto.planner.search.branch import Progress
from stretto.planner.search.ranking import TIE, Plan, Ranked
from stretto.planner.search.search import search
from stretto.planner.search.task import SearchTask

_FEWEST, _SHARE = 0.5, 1 / 8  # seconds of work of each search, and its share of the plan's
_REPRICED = 3  # layouts of the ranking that are priced with each change
_CARDS = {"96 GB": "h100-96gb-sxm", "141 GB": "h200-141gb-sxm"}  # whose memory is taken
_ALIKE = 0.05  # relative difference of memory up to which cards are alike
_FASTEST, _DEFAULT = "tuned", "today"  # software


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of what was planned for.

    Attributes:
        name: the change in words.
        task: the search with the change, or None if it is impossible.
        reason: why it is impossible.
        resource: the resource that the change is about, if the gain shows that it binds.
    """

    name: str
    task: SearchTask | None = None
    reason: str = ""
    resource: str | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The best layout that was found with a change.

    Attributes:
        best: the layout, or None if the change is impossible or nothing was found that fits.
        gain: tokens per second (of a device, if the objective is tokens per dollar) over those of the plan's
            first layout, minus 1; None if either does not exist.
        unchanged: the gain of the layout without the change: above 0, the plan's search has missed it.
        reason: why there is no layout.
    """

    change: Change
    best: Ranked | None = None
    gain: float | None = None
    unchanged: float = 0.0
    reason: str = ""


def work_of(task: SearchTask) -> float:
    """Return the seconds of work (`planner.search.work`) of the search with each change of a task."""
    return max(_FEWEST, _SHARE * (task.seconds or 0.0))


def changes(task: SearchTask) -> Iterator[Change]:
    """Yield the changes whose effect is of interest: of the network between nodes, the memory of cards, the
    number of nodes, the batch, 8-bit products, and the software.
    """
    cluster, job = task.cluster, task.job
    batch = task.global_batch
    reason = "all devices are in one node" * ((cluster.nodes or 1) == 1)
    if cluster.tables:
        reason = "collectives were measured on this cluster, and measurements are not scaled"
    for name, factor in (("twice", 2.0), ("half", 0.5)):
        link = replace(cluster.outer, bandwidth=factor * cluster.outer.bandwidth)
        scaled = None if reason else replace(task, cluster=replace(cluster, outer=link))
        yield Change(name=f"{name} the network between nodes", task=scaled, reason=reason)
    for name, model in _CARDS.items():
        memory, device = find_device(model).memory, cluster.device
        if device.memory < inf and cluster.computing is None and abs(device.memory / memory - 1) > _ALIKE:
            cards = replace(task, cluster=replace(cluster, device=replace(device, memory=memory)))
            more = device.memory < memory
            yield Change(name=f"{name} cards", task=cards, resource="device memory" if more else None)
    devices = task.devices + cluster.node
    # if the devices divide the batch, so do the devices of one more node
    size = batch if batch % task.devices else max(1, round(batch / devices)) * devices
    name = "one more node" + f", batch {size}" * (size != batch)
    grown = replace(cluster, nodes=None, last=None).sized(devices)
    yield Change(name=name, task=replace(task, cluster=grown, job=replace(job, global_batch=size)))
    for name, size in (("half", batch // 2), ("twice", 2 * batch)):
        odd = name == "half" and batch % 2 == 1
        resized = None if odd else replace(task, job=replace(job, global_batch=size))
        reason = f"{batch} samples are odd" * odd
        yield Change(name=f"{name} the batch", task=resized, reason=reason)
    if job.precision.fp8 == "none":
        kinds = [replace(job, precision=replace(job.precision, fp8=kind)) for kind in ("tensor", "row")]
        refuse = task.refusals or (lambda _: ())
        eight = next((k for k in kinds if all(p.field != "precision.fp8" for p in refuse(k))), kinds[0])
        has = "fp8" in cluster.device.tflops
        reason = f"{cluster.device.name} has no 8-bit products" * (not has)
        yield Change(name="fp8", task=replace(task, job=eight) if has else None, reason=reason)
    software = _DEFAULT if task.assumptions.software == software_profile(_FASTEST) else _FASTEST
    assumptions = replace(task.assumptions, software=software_profile(software))
    yield Change(name=f"{software} software", task=replace(task, assumptions=assumptions))


def answer(change: Change, plan: Plan, task: SearchTask, progress: Progress | None = None) -> Answer:
    """Search with a change, and compare with the plan.

    Args:
        task: the plan's, without the change.
    """
    if change.task is None:
        return Answer(change=change, reason=change.reason)
    reason, layouts = f"nothing was found within {work_of(task):g} s of work", list[Ranked]()
    try:
        result = search(replace(change.task, seconds=work_of(task), top=1), progress)
    except StrettoError as error:
        reason = error.message
    else:
        layouts += result.ranking
        if result.nearest is not None:
            reason = f"nothing was found that fits: {result.nearest.layout} {result.nearest.reason}"
    plain = (ranked for each in plan.baselines.values() for ranked in (each.fastest, each.safe))
    planned = (*plan.ranking[:_REPRICED], plan.safe, *plain)
    for ranked in {ranked.layout: ranked for ranked in planned if ranked is not None}.values():
        if (price := _price(ranked.estimate.job, change.task)) is not None:
            sizes = (price.job.layout.describe(), *ranked.layout.split(", ")[1:])
            layouts.append(replace(ranked, estimate=price, layout=", ".join(sizes)))
    best = max(layouts, key=lambda ranked: _rate(ranked.estimate, task), default=None)
    if best is None or not plan.ranking:
        return Answer(change=change, best=best, reason="" if best else reason)
    first = plan.ranking[0]
    planned_rate, highest = _rate(first.estimate, task), _rate(best.estimate, task)
    for ranked in layouts:  # the plan's first, unless another is better by more than a tie
        if ranked.layout == first.layout and highest <= _rate(ranked.estimate, task) * (1 + TIE):
            best = ranked
    before = _price(best.estimate.job, task)
    unchanged = 0.0 if before is None else _rate(before, task) / planned_rate - 1
    gain = _rate(best.estimate, task) / planned_rate - 1
    return Answer(change=change, best=best, gain=gain, unchanged=max(0.0, unchanged))


def _rate(estimate: Estimate, task: SearchTask) -> float:
    """Return what the task's objective prefers: tokens per second, or those of one device."""
    devices = estimate.job.layout.world if task.objective == "tokens_per_dollar" else 1
    return estimate.tokens_per_s / devices


def _price(job: Job, task: SearchTask) -> Estimate | None:
    """Return the estimate of a layout for another task, with as many copies as its devices need, or None if
    it is not legal there or does not fit.
    """
    layout, devices = job.layout, task.devices
    if task.smaller and layout.world < devices:
        devices = layout.world
    if layout.dp * devices % layout.world:
        return None
    layout = replace(layout, dp=layout.dp * devices // layout.world)
    if layout.dp not in task.fixed.get("dp", (layout.dp,)):
        return None
    job = replace(job, layout=layout, global_batch=task.global_batch, precision=task.job.precision)
    if not job.microbatches or problems(job) or (task.refusals is not None and task.refusals(job)):
        return None
    fit = short_step_fit(job, task.cluster, task.assumptions)
    if not fit.likely:
        return None
    cluster = task.cluster.sized(devices)
    return replace(estimate(job, cluster, task.assumptions, memory=False), memory=fit)


def binding(plan: Plan, task: SearchTask, answers: Sequence[Answer]) -> dict[str, float]:
    """Return by how much the first layout's step would be shorter, as a share of it, for each resource, the
    largest first: with compute, the bandwidth of device memory, the network within nodes and the network
    between them each twice as fast; without a bubble; without waiting for the host; and, with any layout,
    with the largest cards among the answers. What was measured instead of modelled is left out.
    """
    first = plan.ranking[0].estimate
    cluster, device = task.cluster, task.cluster.device
    twice = dict[str, Cluster]()
    if not device.kernels:
        rates = {name: 2 * rate for name, rate in device.tflops.items()}
        sustained = {name: 2 * rate for name, rate in device.sustained.items()}
        twice["compute"] = replace(cluster, device=replace(device, tflops=rates, sustained=sustained))
        quick = replace(device, bandwidth=2 * device.bandwidth)
        twice["memory bandwidth"] = replace(cluster, device=quick)
    if not cluster.tables:
        link = replace(cluster.inner, bandwidth=2 * cluster.inner.bandwidth)
        twice["network within a node"] = replace(cluster, inner=link)
        link = replace(cluster.outer, bandwidth=2 * cluster.outer.bandwidth)
        twice["network between nodes"] = replace(cluster, outer=link)
    shares = {"bubble": first.bubble, "host": first.parts["host"] / first.seconds}
    for name, faster in twice.items():
        machine = faster.sized(first.job.layout.world)
        step = estimate(first.job, machine, task.assumptions, memory=False)
        shares[name] = 1 - step.seconds / first.seconds
    for item in answers:
        if item.change.resource is not None and item.gain is not None:
            saved = 1 - 1 / (1 + item.gain)
            shares[item.change.resource] = max(shares.get(item.change.resource, 0.0), saved)
    return dict(sorted(shares.items(), key=lambda share: -share[1]))
