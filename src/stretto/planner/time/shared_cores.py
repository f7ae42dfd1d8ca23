"""Ranks that share the cores of a CPU: the work of all of them, and the least time that it takes.

Where there are more ranks than cores, another rank computes while one waits, and communication has no idle
core to hide on: each message costs CPU time of sender and receiver. A step then takes the work of all ranks
over the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import fsum

from stretto.job.chain import layer_of
from stretto.job.flops import Recompute
from stretto.job.job import Job
from stretto.planner.assumptions import Assumptions
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.counts.rank_parameters import reached_by_backward, trained_share
from stretto.planner.counts.traffic import Message, block_traffic, layer_traffic
from stretto.planner.machines.cluster import Cluster, NodeGroup, group_of
from stretto.planner.machines.device import Device, Precision
from stretto.planner.memory.ranks import largest_message
from stretto.planner.time.collectives import collective_seconds
from stretto.planner.time.data_parallel import DataTime
from stretto.planner.time.kernels import kernel_times
from stretto.program.action import Action, ActionKind
from stretto.program.program import Program

_BACK = {ActionKind.B, ActionKind.I}


@dataclass(frozen=True)
class SharedReplay:
    """All compute actions of a program on shared cores, in seconds.

    Attributes:
        makespan: until they are done.
        spans: start and end of each, on its share of a core.
    """

    makespan: float
    spans: Mapping[Action, tuple[float, float]]

    def busy(self, order: Sequence[Action], kinds: Collection[ActionKind] = tuple(ActionKind)) -> float:
        """Seconds in which a rank with these actions has one of these kinds under way."""
        spans = (self.spans[a] for a in order if a in self.spans and a.kind in kinds)
        return fsum(end - start for start, end in spans)


@dataclass(frozen=True)
class SharedStep:
    """A step of ranks that share cores, in seconds; afterwards gradients are reduced and weights updated.

    Attributes:
        data: seconds of reductions and gathers.
        update: seconds of the optimiser.
    """

    compute: SharedReplay
    data: float
    update: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.compute.makespan + self.data + self.update


def shared_replay(
    program: Program, seconds: Callable[[Action], float], processes: int, cores: int
) -> SharedReplay:
    """The compute actions of a program, each on its share of the cores.

    A rank that waits for an input leaves its share of the cores to the others. Where fewer ranks can work
    than there are cores, as while a pipeline fills and drains, some cores idle.

    Args:
        seconds: returns the seconds of an action on one core.
        processes: processes that compute at once if one pipeline rank does.
        cores: cores that all of them share.
    """
    orders = [[a for a in order if a.kind.is_compute] for order in program.orders]
    positions = [0] * len(orders)
    done = set[Action]()
    running: dict[int, float] = {}
    spans = dict[Action, tuple[float, float]]()
    now = 0.0
    while True:
        for rank, order in enumerate(orders):
            if (
                rank not in running
                and positions[rank] < len(order)
                and _ready(program, order[positions[rank]], done)
            ):
                running[rank] = seconds(order[positions[rank]])
                spans[order[positions[rank]]] = (now, now)
        if not running:
            assert all(n == len(order) for n, order in zip(positions, orders, strict=True)), "a standstill"
            return SharedReplay(now, spans)
        rate = min(1.0, cores / (processes * len(running)))
        step = min(running.values())
        now += step / rate
        for rank in list(running):
            running[rank] -= step
            if running[rank] <= 1e-12:
                del running[rank]
                action = orders[rank][positions[rank]]
                spans[action] = (spans[action][0], now)
                done.add(action)
                positions[rank] += 1


def _ready(program: Program, action: Action, done: set[Action]) -> bool:
    """True if the input that an action takes from another stage has arrived."""
    stage, kind, mb = action
    if kind is ActionKind.F:
        return program.is_first(stage) or Action(stage - 1, ActionKind.F, mb) in done
    if kind in _BACK and not program.is_last(stage):
        return any(Action(stage + 1, back, mb) in done for back in _BACK)
    return True


_FORWARD = 1 / 3  # the forward's share of a block's host code outside its kernels
# Host code that each round of ring attention adds, over that of a block: attention to a block of keys and the
# rescaling of its sums, forward and backward. Measured on two cores with four ranks: 0.2 to 0.5 ms a round
# where a block takes 1.0 ms.
_ROUND = 0.25
Mode = Callable[[int], Recompute]
# share of a microbatch's work on a stage, by action
_PARTS = {ActionKind.F: 1 / 3, ActionKind.B: 2 / 3, ActionKind.I: 1 / 3, ActionKind.W: 1 / 3}


def shared_step(
    job: Job,
    cluster: Cluster,
    assumptions: Assumptions,
    precision: Precision,
    program: Program,
    stages: Sequence[range],
    data: Sequence[DataTime],
    mode: Mode,
    each: bool,
) -> SharedStep | None:
    """The shortest step if ranks share cores, or None if each rank has its own device.

    Args:
        mode: recomputation of a layer.
        each: gradients are reduced with each microbatch.
    """
    if cluster.computing is None:
        return None
    stage_of = [stages[s % program.depth] for s in range(program.stages)]
    layer_of_job = partial(layer_seconds, job, cluster, assumptions, precision)
    once = [
        fsum(
            layer_of_job(layer, mode(layer), layer >= reached_by_backward(job.shape, stage, job.trained))
            for layer in stage
        )
        for stage in stage_of
    ]
    actions = sum(a.kind.is_compute for order in program.orders for a in order)
    every = _seconds_of(cluster.device, "action") + _messages(job, cluster, program) / actions
    replicas = job.layout.world // job.layout.pp
    node_ranks = min(job.layout.world, cluster.node)
    processes = max(1, replicas * node_ranks // job.layout.world)
    cores = min(node_ranks, cluster.computing)

    def seconds(action: Action) -> float:
        return every + _PARTS.get(action.kind, 0.0) * once[action.stage]

    stage_data = [data[s % program.depth] for s in range(program.stages)]
    talk = fsum(_data_seconds(job, program, s, share, each) for s, share in enumerate(stage_data))
    update = fsum(program.updates(s) * share.update for s, share in enumerate(stage_data))
    return SharedStep(
        compute=shared_replay(program, seconds, processes, cores),
        data=talk * processes / cores,
        update=update * processes / cores,
    )


def beside_kernels(device: Device, blocks: int) -> tuple[float, float]:
    """Seconds of host code outside the kernels of the forward and of the backward of a stage with a number of
    blocks; 0 if the host runs ahead of the device.
    """
    layer, action = (_seconds_of(device, name) for name in ("layer", "action"))
    return action + _FORWARD * layer * blocks, action + (1 - _FORWARD) * layer * blocks


def _seconds_of(device: Device, name: str) -> float:
    seconds = device.kernels.get(name)
    return seconds if isinstance(seconds, float) else 0.0


def _data_seconds(job: Job, program: Program, stage: int, share: DataTime, each: bool) -> float:
    """Seconds of one rank for the reductions and gathers of one of its stages."""
    forwards = sum(a.stage == stage and a.kind is ActionKind.F for order in program.orders for a in order)
    gathers = job.dp.gathers(job.layout.pp)
    # gathers by layers happen in each forward and backward, gathers by stages as the program says
    unshards = sum(
        a.stage == stage and a.kind is ActionKind.UNSHARD for order in program.orders for a in order
    )
    updates = program.updates(stage)
    times = 2 * forwards if gathers == "layer" else unshards if gathers else updates
    return share.reduce * (forwards if each else updates) + share.gather * times


def layer_seconds(
    job: Job,
    cluster: Cluster,
    assumptions: Assumptions,
    precision: Precision,
    layer: int,
    mode: Recompute,
    reached: bool = True,
) -> float:
    """Core seconds of one rank for one layer and one microbatch, forward and backward: kernels, host code
    beside them, and communication.

    Args:
        reached: the backward reaches the layer.
    """
    chain_layer = layer_of(job.shape, layer)
    kind, compute = chain_layer.kind, replace(ComputeConfig.of(job).for_layer(chain_layer), recompute=mode)
    device, software = cluster.device, assumptions.software
    work = kernel_times(chain_layer.shape, kind, compute, device, precision, software=software)
    again = {"none": 0.0, "selective": work.core, "full": work.forward}[mode]
    host_code = _seconds_of(cluster.device, "layer") if kind == "block" else 0.0
    if mode == "full":
        host_code *= 1 + _FORWARD  # the forward is repeated
    if compute.cp > 1 and compute.context == "ring":
        host_code *= 1 + _ROUND * compute.cp
    talk = fsum(_seconds(m, job, cluster) for m in layer_traffic(kind, chain_layer.shape, compute))
    if kind == "block" and compute.cp > 1:  # ranks do not send equally much
        each = [block_traffic(chain_layer.shape, compute, index) for index in range(compute.cp)]
        talk = fsum(_seconds(m, job, cluster) for messages in each for m in messages) / compute.cp
    if job.trained.freeze:
        if not reached:
            return work.forward + (host_code + talk) * _FORWARD
        work = replace(work, weight=work.weight * trained_share(job.shape, layer, job.trained))
    return work.forward + work.back + work.weight + again + host_code + talk


def _seconds(message: Message, job: Job, cluster: Cluster) -> float:
    group = group_of(job.layout, message.axis, cluster.node)
    return message.times * collective_seconds(cluster, message.kind, message.size, group)


def _messages(job: Job, cluster: Cluster, program: Program) -> float:
    """Seconds of both ends of all messages of a program between the stages of one pipeline. A measured row of
    `send` is that of a rank that sends one message and receives another.
    """
    compute = ComputeConfig.of(job)
    size = largest_message(job.shape, compute)
    hops_per_direction = sum(
        program.placement[s] != program.placement[s + 1]
        for s in range(program.stages - 1)
        if s // program.depth == (s + 1) // program.depth
    )
    copies = max(1, program.stages // program.depth)
    hops = 2 * program.microbatches * hops_per_direction / copies
    return hops * collective_seconds(cluster, "send", size, NodeGroup(job.layout.pp, job.layout.pp))
