"""The time of a step: times of stages, and the job's program replayed with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, floor, fsum

from stretto.job.chain import blocks_among, layer_of
from stretto.job.flops import Recompute
from stretto.job.job import Job
from stretto.job.reduction import reduction
from stretto.planner.assumptions import Assumptions
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.counts.rank_parameters import reached_by_backward, trained_share
from stretto.planner.machines.cluster import Cluster, NetworkLink, group_of
from stretto.planner.machines.device import Precision
from stretto.planner.memory.ranks import largest_message
from stretto.planner.time.data_parallel import DataTime, data_time
from stretto.planner.time.layer import exposed_seconds, layer_time
from stretto.planner.time.shared_cores import SharedStep, beside_kernels, shared_step
from stretto.program.action import ActionKind
from stretto.program.program import Program
from stretto.program.replay import Costs, simulate
from stretto.program.replay.timeline import Timeline

_LINK_SHARE = 0.8  # share of a link's bandwidth that one message reaches


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage for one microbatch, by part.

    Attributes:
        F, I, W: forward, input gradient (with recomputation), weight gradient; exposed reductions and gathers
            of every microbatch are in F and I, under "data".
    """

    F: Mapping[str, float]
    I: Mapping[str, float]
    W: Mapping[str, float]

    @property
    def times(self) -> tuple[float, float, float]:
        """Seconds of the three actions."""
        return fsum(self.F.values()), fsum(self.I.values()), fsum(self.W.values())


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A step, in seconds; that of an asynchronous schedule has its share of filling and draining.

    Attributes:
        parts: seconds of the busiest pipeline rank by the names of `PARTS`; they add up to `seconds`.
        forward, backward: the parts within the busiest rank's forwards and backwards.
        timeline: the replay of one step's program.
    """

    seconds: float
    parts: Mapping[str, float]
    forward: Mapping[str, float]
    backward: Mapping[str, float]
    timeline: Timeline


def step_time(
    job: Job,
    cluster: Cluster,
    assumptions: Assumptions,
    precision: Precision,
    modes: Sequence[Recompute] | None = None,
    stages: Sequence[range] | None = None,
) -> StepTime:
    """The step of a job, replayed.

    An asynchronous schedule does not drain between steps: its step is the mean over a window of
    `job.steps_between_drains` steps, of which the first fills the pipeline and the last drains it.

    Args:
        modes: recomputation of each block, or None for the job's, with `auto` taken as none.
        stages: the layers of each stage, or None for the job's.
    """
    step_program, window = job.program(), job.window
    layers = stages or job.stages(step_program.depth)

    def replayed(program: Program) -> StepTime:
        return _Replay(
            job, cluster, assumptions, program, precision=precision, modes=modes, stages=layers
        ).step()

    single_step = replayed(step_program)
    if window is None:
        return single_step
    return _mean_of_window(job, single_step, lambda steps: replayed(window(steps)))


_FILLING_MICROBATCHES = 4  # microbatches for each rank, after which every rank is in its steady state


def _mean_of_window(job: Job, single_step: StepTime, times: Callable[[int], StepTime]) -> StepTime:
    """The mean step of `job.steps_between_drains` steps without a drain.

    Once the pipeline is full, every further step takes equally long: from a short window and one of twice its
    steps follow those of any length.

    Args:
        single_step: a window of one step.
        times: replays this many steps.
    """
    ranks, length = single_step.timeline.program.ranks, max(1.0, job.steps_between_drains)
    steps = min(
        floor(length), ceil(_FILLING_MICROBATCHES * ranks / single_step.timeline.program.microbatches)
    )
    short, long = single_step if steps == 1 else times(steps), times(2 * steps)
    more = (length - steps) / steps  # windows of steady state

    def mean(first: float, both: float) -> float:
        return (first + more * (both - first)) / length

    def means(first: Mapping[str, float], both: Mapping[str, float]) -> dict[str, float]:
        names = {**first, **both}
        return {name: mean(first.get(name, 0.0), both.get(name, 0.0)) for name in names}

    parts = means(short.parts, long.parts)
    parts["bubble"] = max(0.0, parts["bubble"])  # rounding
    return StepTime(
        seconds=mean(short.seconds, long.seconds),
        parts=parts,
        forward=means(short.forward, long.forward),
        backward=means(short.backward, long.backward),
        timeline=single_step.timeline,
    )


def stage_time(
    job: Job,
    cluster: Cluster,
    assumptions: Assumptions,
    precision: Precision,
    stage: Sequence[int],
    unsplit: bool,
    modes: Sequence[Recompute] | None = None,
    data: DataTime | None = None,
    each: bool = False,
) -> StageTime:
    """One stage for one microbatch.

    Args:
        unsplit: backwards are not split, and hide communication behind their products.
        data: data-parallel times of the stage, or None without other replicas.
        each: gradients are reduced with each microbatch.
    """
    phases = [defaultdict[str, float](float) for _ in range(3)]
    forward, back, weight = phases
    blocks = len(blocks_among(job.shape, stage))
    host, host_back = beside_kernels(cluster.device, blocks)
    if assumptions.software.action or host:
        forward["other"], back["other"] = (
            assumptions.software.action + host,
            assumptions.software.action + host_back,
        )
    for layer in stage:
        mode = _mode(job, layer, modes)
        chain_layer = layer_of(job.shape, layer)
        time = layer_time(
            shape=chain_layer.shape,
            kind=chain_layer.kind,
            compute=replace(ComputeConfig.of(job).for_layer(chain_layer), recompute=mode),
            layout=job.layout,
            cluster=cluster,
            precision=precision,
            software=assumptions.software,
        )
        if job.trained.freeze:
            reached = layer >= reached_by_backward(job.shape, stage, job.trained)
            time = time.partly_trained(reached, trained_share(job.shape, layer, job.trained))
        for parts, phase in zip(phases, (time.F, time.I, time.W), strict=True):
            for name, seconds in phase.items():
                parts[name] += seconds
        back["recompute"] += time.total("R")
        if unsplit:
            for name, seconds in time.saved.items():
                back[name] -= min(seconds, back[name])
    if data is not None:  # what waits for weights gathered by layers, and gradients of each microbatch
        slowdown = assumptions.software.slowdown
        gather = data.gather if job.dp.gathers(job.layout.pp) == "layer" else 0.0
        if gather:
            computation = fsum(forward.values()) if assumptions.overlap else 0.0
            forward["data"] += exposed_seconds(gather, computation, slowdown)
        if gather or each:
            busy = fsum(back.values()) + fsum(weight.values()) if assumptions.overlap else 0.0
            back["data"] += exposed_seconds(gather + (data.reduce if each else 0.0), busy, slowdown)
    return StageTime(*(dict(parts) for parts in phases))


def _mode(job: Job, layer: int, modes: Sequence[Recompute] | None) -> Recompute:
    if (block := layer_of(job.shape, layer).block) is None:
        return "none"
    if modes is not None:
        return modes[block]
    mode = job.recompute.mode
    return "none" if mode == "auto" else mode


def hop_link(job: Job, cluster: Cluster) -> NetworkLink:
    """The link between neighbouring pipeline ranks; the one between nodes if any of them are on
    different nodes.
    """
    within = job.layout.pp == 1 or group_of(job.layout, "pp", cluster.node).nodes == 1
    return cluster.inner if within else cluster.outer


def message_costs(
    job: Job, cluster: Cluster, program: Program, size: float
) -> tuple[float, float | dict[tuple[int, int], float]]:
    """Latency and bytes/s of messages of this many bytes between stages, as `program.replay` takes them. If
    only some neighbouring pipeline ranks are on different nodes, the rate is by pair of ranks, and for those
    between nodes includes their longer latency.
    """
    link, group = hop_link(job, cluster), group_of(job.layout, "pp", cluster.node)
    if group.nodes == 1 or group.local == 1 or not size:
        return link.latency, _LINK_SHARE * link.bandwidth
    rates = dict[tuple[int, int], float]()
    for source, destination in pairwise(program.placement):
        inside = source // group.local == destination // group.local
        late = 0.0 if inside else cluster.outer.latency - cluster.inner.latency
        bandwidth = _LINK_SHARE * (cluster.inner if inside else cluster.outer).bandwidth
        rate = size / max(size / bandwidth + late, 1e-12)
        rates[source, destination] = rates[destination, source] = rate
    return cluster.inner.latency, rates


class _Replay:
    """The replay of a program, of one step or of a window.

    Attributes:
        times: seconds of each stage for one microbatch.
        data: data-parallel times of each stage.
        each: gradients are reduced with each microbatch.
    """

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        assumptions: Assumptions,
        program: Program,
        *,
        precision: Precision,
        modes: Sequence[Recompute] | None,
        stages: Sequence[range],
    ) -> None:
        self.job = job
        self.cluster = cluster
        self.assumptions = assumptions
        self.program = program
        self.data = [data_time(job, assumptions, cluster, stage) for stage in stages]
        self.each = reduction(program, job.dp.mode, job.dp.reduce) == "microbatch"
        W = ActionKind.W  # a member of an enum is slow to reach on Python 3.11
        split = any(kind is W for order in program.orders for _, kind, _ in order)
        options = {"unsplit": not split, "each": self.each}
        self.times = [
            stage_time(job, cluster, assumptions, precision, stage, modes=modes, data=data, **options)
            for stage, data in zip(stages, self.data, strict=True)
        ]
        self.shared = shared_step(
            job,
            cluster,
            assumptions,
            precision,
            program,
            stages=stages,
            data=self.data,
            mode=lambda layer: _mode(job, layer, modes),
            each=self.each,
        )

    def step(self) -> StepTime:
        """The step, on ranks with their own devices or on shared cores, whichever takes longer."""
        job = self.job
        program = self.program
        data = self.data
        ranks = range(self.program.ranks)
        compute = ComputeConfig.of(job)
        scattered = self.assumptions.software.scattered and not compute.sequence_parallel
        by_stage = job.dp.gathers(job.layout.pp) == "stage"
        # seconds for which an update within the step waits until the stage's new weights are gathered
        gathered = [0.0 if job.dp.mode == "zero3" else stage.gather for stage in data]
        updates = [stage.update + gather for stage, gather in zip(data, gathered, strict=True)]
        size = largest_message(job.shape, compute) / (compute.tp if scattered else 1)
        hop, bandwidth = message_costs(job, self.cluster, program, size)
        costs = Costs(
            per_stage=[stage.times for stage in self.times],
            hop=hop,
            message_bytes=size,
            bandwidth=bandwidth,
            blocking=self.assumptions.blocking,
            unshard=[stage.gather if by_stage else 0.0 for stage in data],
            reduce=[stage.reduce for stage in data] if program.versions else 0.0,
            update=updates if program.versions else 0.0,
        )
        line = simulate(program, costs)
        ends = [self._reduced_at(line, rank) for rank in ranks]
        update = 0.0 if program.versions else max(self._sum(rank, "update") for rank in ranks)
        away = max(self._sum(rank, "away") for rank in ranks)
        gather = 0.0
        if job.dp.mode != "zero3" and not program.versions:
            gather = max(self._late_weights(rank) for rank in ranks)
        seconds = max(line.makespan, *ends) + update + gather
        if self.shared is not None and self.shared.seconds > max(seconds, away + update):
            return self._on_shared_cores(self.shared, line)
        busiest = max(ranks, key=lambda rank: line.work[rank])
        phases = self._phases(busiest)
        shares = _total(phases)
        shares["data"] += max(0.0, max(ends) - line.makespan) + gather
        shares["optimiser"] = update
        if program.versions:
            shares["optimiser"] = self._sum(busiest, "update")
            shares["data"] += fsum(program.updates(s) * gathered[s] for s in program.stages_of(busiest))
        shares["bubble"] = max(0.0, seconds - fsum(shares.values()))
        if away and away + update > seconds:
            shares["offload"] = away + update - seconds
        return StepTime(
            seconds=max(seconds, away + update if away else 0.0),
            parts=shares,
            forward=phases[0],
            backward=phases[1],
            timeline=line,
        )

    def _on_shared_cores(self, shared: SharedStep, line: Timeline) -> StepTime:
        """The step if ranks share cores: actions last longer while other ranks compute too."""
        replay, orders = shared.compute, self.program.orders
        busiest = max(range(self.program.ranks), key=lambda rank: replay.busy(orders[rank]))
        order = orders[busiest]

        def scaled(phase: Mapping[str, float], *kinds: ActionKind) -> dict[str, float]:
            # time of reductions and gathers on the cores is in `shared.data`
            parts = {name: taken for name, taken in phase.items() if name != "data"}
            total, seconds = fsum(parts.values()), replay.busy(order, kinds)
            return {name: seconds * taken / total for name, taken in parts.items()}

        phases = self._phases(busiest)
        forward = scaled(phases[0], ActionKind.F)
        backward = scaled(phases[1], ActionKind.B, ActionKind.I, ActionKind.W)
        bubble = replay.makespan - replay.busy(order)
        shares = _total((forward, backward))
        shares |= {"data": shared.data, "optimiser": shared.update, "bubble": bubble}
        spans = list[list[tuple[float, float]]]()
        for order_of_rank in orders:
            spans.append([])
            for action in order_of_rank:  # one without a span takes no time when the one before it ends
                last = spans[-1][-1][1] if spans[-1] else 0.0
                spans[-1].append(replay.spans.get(action, (last, last)))
        timeline = replace(
            line,
            starts=tuple([start for start, _ in each] for each in spans),
            ends=tuple([end for _, end in each] for each in spans),
            work=tuple(replay.busy(order) for order in orders),
            tail=(),
        )
        return StepTime(
            seconds=shared.seconds, parts=shares, forward=forward, backward=backward, timeline=timeline
        )

    def _sum(self, rank: int, name: str) -> float:
        """A sum of data-parallel times over the stages of a rank, for each of their updates."""
        program, data = self.program, self.data
        return fsum(
            program.updates(s) * getattr(data[s % program.depth], name) for s in program.stages_of(rank)
        )

    def _reduced_at(self, line: Timeline, rank: int) -> float:
        """The time at which the gradients of a rank are reduced. If overlap is allowed, each stage's
        reduction starts with its last backward and overlaps with what follows; those of one rank run one
        after another.
        """
        program, ends = self.program, line.ends[rank]
        done = max(ends, default=0.0)
        if program.versions or self.each:
            return done
        if not self.assumptions.overlap:
            return done + self._sum(rank, "reduce")
        actions = zip(program.orders[rank], ends, strict=True)
        B, W = ActionKind.B, ActionKind.W
        last = {stage: end for (stage, kind, _), end in actions if kind is B or kind is W}
        free = 0.0
        for stage, end in sorted(last.items(), key=lambda item: item[1]):
            _, back, weight = self.times[stage % program.depth].times
            # units are reduced as the last backward completes them
            taken = self.data[stage % program.depth].reduce
            slower = (self.assumptions.software.slowdown - 1.0) * min(taken, back + weight)
            free = max(max(free, end - back - weight) + taken, end + slower)
        return max(done, free)

    def _late_weights(self, rank: int) -> float:
        """Seconds by which gathered weights arrive late for the first forwards that use them."""
        gather, program = self._sum(rank, "gather"), self.program
        if not self.assumptions.overlap:
            return gather
        return max(
            0.0, gather - fsum(self.times[s % program.depth].times[0] for s in program.stages_of(rank))
        )

    def _phases(self, rank: int) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds of a rank's forwards and of its backwards in a step, by part."""
        forward, backward = defaultdict[str, float](float), defaultdict[str, float](float)
        names = {ActionKind.F: "F", ActionKind.B: "IW", ActionKind.I: "I", ActionKind.W: "W"}
        for stage, kind, _ in self.program.orders[rank]:
            for phase in names.get(kind, ""):
                parts = forward if phase == "F" else backward
                for name, taken in getattr(self.times[stage % self.program.depth], phase).items():
                    parts[name] += taken
        return forward, backward


def _total(phases: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sum of the phases, by part."""
    parts = defaultdict[str, float](float)
    for phase in phases:
        for name, taken in phase.items():
            parts[name] += taken
    return parts
