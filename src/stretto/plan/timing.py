"""The time of a step: layers' times on stages, and the job's own program replayed with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from stretto.cost.layers import layer_costs
from stretto.cost.machine.cluster import Cluster, group_of
from stretto.cost.machine.device import Precision
from stretto.cost.time.collectives import collective_seconds
from stretto.cost.time.layer import LayerTime, layer_time
from stretto.cost.time.operators import pass_seconds
from stretto.layout.cut import cut
from stretto.plan.job import Job
from stretto.plan.running import Running, computing
from stretto.simulate import Costs, simulate
from stretto.simulate.timeline import Timeline


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, in parts of the busiest pipeline rank."""

    seconds: float
    parts: Mapping[str, float]
    bubble: float
    timeline: Timeline


def step_time(job: Job, cluster: Cluster, running: Running, precision: Precision) -> StepTime:
    """The step of a job, replayed."""
    program = job.program()
    stages = cut(layer_costs(job.shape, job.sequence), program.depth)
    times = [[_layer(job, cluster, running, precision, layer) for layer in stage] for stage in stages]
    per_stage = [
        (
            sum(t.total("F") for t in stage),
            sum(t.total("I") + t.total("R") for t in stage),
            sum(t.total("W") for t in stage),
        )
        for stage in times
    ]
    how = computing(job, running)
    link = (
        cluster.inner
        if job.layout.pp > 1 and group_of(job.layout, "pp", cluster.node).nodes == 1
        else cluster.outer
    )
    update = _update(job, cluster, len(stages))
    costs = Costs(
        per_stage=per_stage,
        hop=link.latency,
        message_bytes=how.element * how.shard * job.shape.hidden,
        bandwidth=0.8 * link.bandwidth,
        reduce=_reduce(job, cluster, len(stages)),
        reduce_overlaps=running.overlap,
        update=update,
    )
    line = simulate(program, costs)
    m = program.microbatches
    busiest = max(
        range(program.ranks),
        key=lambda rank: sum(sum(per_stage[s % program.depth]) for s in program.stages_of(rank)),
    )
    parts: dict[str, float] = defaultdict(float)
    for s in program.stages_of(busiest):
        for t in times[s % program.depth]:
            for phase in (t.F, t.I, t.W):
                for name, value in phase.items():
                    parts[name] += m * value
            parts["recompute"] += m * t.total("R")
    parts["optimiser"] = update
    parts["bubble"] = max(0.0, line.makespan - sum(parts.values()))
    return StepTime(line.makespan, dict(parts), line.bubble.rate, line)


def _layer(job: Job, cluster: Cluster, running: Running, precision: Precision, layer: int) -> LayerTime:
    kind = "embed" if layer == 0 else "head" if layer > job.shape.layers else "block"
    mode = job.recompute.mode
    how = replace(computing(job, running), recompute="none" if mode == "auto" else mode)
    return layer_time(job.shape, kind, how, job.layout, cluster, precision, running.causal)


def _parameters(job: Job) -> float:
    from stretto.cost.parameters import count_parameters

    return count_parameters(job.shape).total / (job.layout.tp * job.layout.pp)


def _reduce(job: Job, cluster: Cluster, stages: int) -> float:
    group = group_of(job.layout, "cp-dp", cluster.node)
    kind = "all-reduce" if job.dp.mode in ("server", "ddp") else "reduce-scatter"
    return collective_seconds(cluster, kind, 4 * _parameters(job), group)


def _update(job: Job, cluster: Cluster, stages: int) -> float:
    sizes = job.dp.sizes(job.copies)
    return pass_seconds(cluster.device, "adam", 30 * _parameters(job) / sizes.states)
