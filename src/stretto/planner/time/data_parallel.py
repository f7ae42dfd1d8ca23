"""Time of the data-parallel work of a stage: reducing gradients, updating, gathering weights, moving
offloaded states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import fsum, prod

from stretto.job.chain import block_kinds
from stretto.job.finetune import ALL_TRAINED, TrainedParameters
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout
from stretto.layout.shards import ShardSizes
from stretto.planner.assumptions import Assumptions
from stretto.planner.counts.compute import ELEMENT_BYTES, ComputeConfig
from stretto.planner.counts.rank_parameters import Parameter, Shares, layer_parameters
from stretto.planner.machines.cluster import Cluster, Collective, NodeGroup, group_of
from stretto.planner.machines.device import Device
from stretto.planner.time.collectives import collective_seconds
from stretto.planner.time.operators import matmul_seconds, pass_seconds

_NEWTON_SCHULZ_STEPS = 5
_MASTER = 4  # bytes of an element of a momentum and a direction, which matrices are made of
_WAYS = 2  # directions to the rank that orthogonalises, and back


def muon_seconds(cluster: Cluster, parameters: Iterable[Parameter], states: NodeGroup, node: int) -> float:
    """Seconds of Muon's update of a stage's matrices on one rank.

    Args:
        parameters: parameters as a rank holds them, all dense or all of experts.
        states: data-parallel ranks that share the optimiser's states.
        node: ranks of a node.
    """
    work: dict[int, list[float]] = {}  # by tensor-parallel holders
    moved: dict[int, float] = {}
    for parameter in parameters:
        if not parameter.by_muon:
            continue
        *many, rows, columns = parameter.matrices
        shares = max(1, round(prod(many) * rows * columns / parameter.elements))
        # experts of a stack are spread whole over ranks first
        split = shares if not many else max(1, shares // many[0])
        local_matrices = max(1, prod(many) * split // shares)
        work.setdefault(split, []).extend([_orthogonal(cluster.device, rows, columns)] * local_matrices)
        moved[split] = moved.get(split, 0.0) + _MASTER * parameter.elements / states.ranks
    seconds = 0.0
    for split, matrices in work.items():
        holders = split * states.ranks
        seconds += max(max(matrices), fsum(matrices) / holders)
        group = NodeGroup(holders, min(holders, node, split * states.local))
        seconds += _WAYS * collective_seconds(cluster, "all-to-all", moved[split], group)
    return seconds


def products(rows: int, columns: int) -> list[tuple[int, int, int]]:
    """The products of one matrix's update, each [m, k] times [k, n]: (m, n, k)."""
    short, long = sorted((rows, columns))
    return _NEWTON_SCHULZ_STEPS * [(short, short, long), (short, short, short), (short, long, short)]


@lru_cache(maxsize=4096)
def _orthogonal(device: Device, rows: int, columns: int) -> float:
    """Seconds to orthogonalise one matrix in float32."""
    return fsum(matmul_seconds(device, m, n, k, "fp32") for m, n, k in products(rows, columns))


_ADAM = 24  # bytes read and written of an element's master and two moments
_NORM = 12  # bytes of its gradient, for norm, scale and clip


@dataclass(frozen=True)
class Elements:
    """Parameters of a stage on one rank, before data-parallel ranks shard them: those that are trained, and
    frozen ones.
    """

    dense: int
    expert: int
    frozen_dense: int = 0
    frozen_expert: int = 0

    def __add__(self, other: Elements) -> Elements:
        return Elements(
            self.dense + other.dense,
            self.expert + other.expert,
            self.frozen_dense + other.frozen_dense,
            self.frozen_expert + other.frozen_expert,
        )


@dataclass(frozen=True)
class DataTime:
    """Seconds of one stage.

    Attributes:
        reduce: one reduction of its gradients.
        gather: one gather of its weights.
        update: the optimiser, on this rank's shard.
        away: fetching states from the host and putting them back.
    """

    reduce: float
    gather: float
    update: float
    away: float = 0.0


@lru_cache(maxsize=4096)
def stage_elements(
    shape: ModelShape, layers: tuple[int, ...], shares: Shares, trained: TrainedParameters = ALL_TRAINED
) -> Elements:
    """The parameters of these layers; a tied one is counted once."""
    parameters = {p.name: p for layer in layers for p in layer_parameters(shape, layer, shares)}
    counts = Counter[tuple[bool, bool]]()
    for parameter in parameters.values():
        counts[trained(parameter.name), parameter.expert] += parameter.elements
    return Elements(counts[True, False], counts[True, True], counts[False, False], counts[False, True])


def data_time(job: Job, assumptions: Assumptions, cluster: Cluster, layers: range) -> DataTime:
    """The data-parallel times of the stage with these layers."""
    alike = tuple(layers) if job.trained.freeze else _alike(job.shape, layers)
    sharding = _Sharding.of(job)
    time = _data_time(
        shape=job.shape,
        layers=alike,
        shares=Shares.of(ComputeConfig.of(job)),
        trained=job.trained,
        layout=job.layout,
        sharding=sharding,
        cluster=cluster,
    )
    speed = assumptions.software.sharded
    if sharding.mode != "zero3" or speed == 1.0:
        return time
    return replace(time, reduce=time.reduce / speed, gather=time.gather / speed)


def _alike(shape: ModelShape, layers: range) -> tuple[int, ...]:
    """Layers that cost as much as these, chosen so that stages of equal cost have equal cache keys."""
    if len(block_kinds(shape)) > 1:
        return tuple(layers)
    ends = tuple(layer for layer in layers if layer in (0, shape.layers + 1))
    return tuple(sorted({*ends, *range(1, len(layers) - len(ends) + 1)}))


@dataclass(frozen=True, kw_only=True)
class _Sharding:
    """The settings of data parallelism and precision on which these times depend."""

    mode: str
    sizes: ShardSizes
    weight: int
    gradient: int
    moment: int
    offload: str
    muon: bool

    @classmethod
    def of(cls, job: Job) -> _Sharding:
        weight = ELEMENT_BYTES[job.precision.dtype]
        gradient = 2 if weight == 2 and job.precision.gradients == "same" else max(4, weight)
        return cls(
            mode=job.dp.mode,
            sizes=job.dp.sizes(job.copies),
            weight=weight,
            gradient=gradient,
            moment=job.optimiser.moment_bytes or 4,
            offload=job.dp.offload,
            muon=job.optimiser.name == "muon",
        )


@lru_cache(maxsize=16384)
def _data_time(
    shape: ModelShape,
    layers: tuple[int, ...],
    shares: Shares,
    trained: TrainedParameters,
    layout: Layout,
    sharding: _Sharding,
    cluster: Cluster,
) -> DataTime:
    elements = stage_elements(shape, layers, shares, trained)
    dense, expert = group_of(layout, "cp-dp", cluster.node), group_of(layout, "expert_dp", cluster.node)
    reduce = gather = shard_elements = orthogonal = 0.0
    for count, frozen, group, of_experts in (
        (elements.dense, elements.frozen_dense, dense, False),
        (elements.expert, elements.frozen_expert, expert, True),
    ):
        sizes = sharding.sizes.for_copies(group.ranks)
        moved = count + (frozen if sharding.mode == "zero3" else 0)
        if moved:
            gather += _gather(cluster, sharding, moved * sharding.weight, group, sizes)
        if not count:
            continue
        reduce += _reduce(cluster, sharding, count * sharding.gradient, group, sizes)
        shard_elements += count / sizes.states
        if sharding.muon:
            several = (layer_parameters(shape, layer, shares) for layer in layers)
            updated = (p for each in several for p in each if p.expert == of_experts and trained(p.name))
            orthogonal += muon_seconds(cluster, updated, part_of(group, sizes.states), cluster.node)
    extra = 2 if sharding.weight == 2 else 0
    passes = _ADAM + _NORM + sharding.gradient + extra
    away = 2 * 12 * shard_elements / cluster.host.link if sharding.offload != "none" else 0.0
    update = pass_seconds(cluster.device, "adam", passes * shard_elements) + orthogonal
    return DataTime(reduce, gather, update, away)


def _reduce(cluster: Cluster, sharding: _Sharding, size: float, group: NodeGroup, sizes: ShardSizes) -> float:
    """Seconds to reduce gradients to the ranks with their states; if several ranks hold equal shards, an
    all-reduce between these follows.
    """
    if sharding.mode in ("server", "ddp") or sizes.states == 1:
        return collective_seconds(cluster, "all-reduce", size, group)
    inner = part_of(group, sizes.states)
    seconds = collective_seconds(cluster, "reduce-scatter", size, inner)
    if sizes.states < group.ranks:
        outer = across(group, sizes.states)
        seconds += collective_seconds(cluster, "all-reduce", size / sizes.states, outer)
    return seconds


def _gather(cluster: Cluster, sharding: _Sharding, size: float, group: NodeGroup, sizes: ShardSizes) -> float:
    kind: Collective = "all-gather"
    if sharding.mode == "zero3":
        return collective_seconds(cluster, kind, size, part_of(group, sizes.parameters))
    if sharding.mode == "server":
        return collective_seconds(cluster, "broadcast", size, group)
    return collective_seconds(cluster, kind, size, part_of(group, sizes.states)) if sizes.states > 1 else 0.0


def part_of(group: NodeGroup, ranks: int) -> NodeGroup:
    """The group of the first `ranks` ranks of a group."""
    return NodeGroup(ranks, min(ranks, group.local))


def across(group: NodeGroup, ranks: int) -> NodeGroup:
    """The group of ranks of a group that are `ranks` apart."""
    count = max(1, group.ranks // ranks)
    return NodeGroup(count, max(1, min(count, group.local // ranks)))
