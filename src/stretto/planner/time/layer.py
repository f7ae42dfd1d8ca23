"""Time of one layer and one microbatch on one rank, by action and by part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import fsum

from stretto.job.flops import attention_flops, block_flops, recomputed_flops
from stretto.job.framework import Operator
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout
from stretto.planner.assumptions import SoftwareAssumptions
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.counts.traffic import Message, Phase, layer_traffic
from stretto.planner.machines.cluster import Cluster, NodeGroup, group_of
from stretto.planner.machines.device import Precision
from stretto.planner.time.collectives import collective_seconds
from stretto.planner.time.kernels import KernelTimes, kernel_times, kernels_back

_LAUNCHES_AFTER_COUNTS = 0.5  # share of a forward's launches that follow the counts of tokens
# more in a recomputed forward: the states of random numbers are saved, set back, and set again
_CHECKPOINT_LAUNCHES = 12
_LAUNCH_SHARPNESS = 4  # sharpness of the transition between layers bound by the host and by kernels


Parts = Mapping[str, float]  # seconds by "compute", "host", "tensor", "context", "expert", "offload"

_AXES = {
    "tp": "tensor",
    "cp": "context",
    "ep": "expert",
    "expert_tp": "expert",
    "expert_tp-ep": "expert",
    "tp-cp": "expert",
}


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """Seconds of one layer for one microbatch: forward, recomputation, input gradient, weight gradient.

    Attributes:
        saved: seconds by which an unsplit backward is shorter than I and W, since its collectives overlap
            with its products.
    """

    F: Parts
    R: Parts
    I: Parts
    W: Parts
    saved: Parts = field(default_factory=dict[str, float])

    def partly_trained(self, reached: bool, share: float) -> LayerTime:
        """The time if parameters are frozen.

        Args:
            reached: the backward reaches the layer.
            share: share of its weights that are trained.
        """
        if not reached:
            return LayerTime(F=self.F, R={}, I={}, W={})
        weights, saved = ({n: share * t for n, t in parts.items()} for parts in (self.W, self.saved))
        return replace(self, W=weights, saved=saved)

    def total(self, phase: Phase) -> float:
        """Seconds of one action."""
        return fsum(getattr(self, phase).values())


@lru_cache(maxsize=4096)
def layer_time(
    shape: ModelShape,
    kind: str,
    compute: ComputeConfig,
    layout: Layout,
    cluster: Cluster,
    precision: Precision = "bf16",
    software: SoftwareAssumptions | None = None,
) -> LayerTime:
    """Time of a layer: `kind` is that of `job.chain`."""
    software = software or SoftwareAssumptions()
    work = kernel_times(shape, kind, compute, cluster.device, precision, software=software)
    messages = layer_traffic(kind, shape, compute)
    groups = {axis: group_of(layout, axis, cluster.node) for axis in {message.axis for message in messages}}
    talk = [(m, _seconds(m, shape, groups[m.axis], cluster, software)) for m in messages]
    again = _again(work, shape, kind, compute)
    host, host_back = software.host * work.kernels, software.host * kernels_back(work)
    blocking = (software.blocking if software.ahead else 1.0) if compute.tp > 1 else 0.0
    # the host waits for the numbers of tokens before it launches the products of experts
    counted = max(blocking, _LAUNCHES_AFTER_COUNTS) if kind == "block" and shape.moe is not None else blocking
    again_host = host + _CHECKPOINT_LAUNCHES * software.host
    # I and W share the launch overhead of a backward by their kernels' time
    late = _launched(work.back + work.weight, host_back, blocking) - (work.back + work.weight)
    share = late / (work.back + work.weight) if work.back + work.weight else 0.0
    waits = {
        "F": _launched(work.forward, host, counted) - work.forward,
        "R": _launched(again, again_host, counted) - again if compute.recompute == "full" else 0.0,
        "I": share * work.back,
        "W": share * work.weight,
    }
    kernels = {"F": work.forward, "R": again, "I": work.back, "W": work.weight}
    cores = {"F": work.core, "R": work.core, "I": work.core_back, "W": 0.0}

    # a block's input that the forward copies to host memory, and recomputation back; both wait
    moved = 0.0
    if kind == "block" and compute.recompute == "full" and compute.framework.inputs_on_host:
        shards = compute.tp if compute.shard_inputs else 1
        moved = compute.element * compute.shard * shape.hidden / shards / cluster.host.link

    def phase(name: Phase) -> Parts:
        parts = _phase(
            compute=kernels[name],
            host=waits[name],
            core=cores[name],
            messages=[(message, taken) for message, taken in talk if message.phase == name],
            slowdown=software.slowdown,
        )
        return {**parts, "offload": moved} if moved and name in "FR" else parts

    # an unsplit backward hides reductions of input gradients behind products of weight gradients, and gathers
    # of inputs behind products of input gradients; the slowdown of overlapping computation reduces that
    over_tp = [(message, taken) for message, taken in talk if message.axis == "tp"]
    sums = fsum(t for m, t in over_tp if m.phase == "I" and m.kind in ("all-reduce", "reduce-scatter"))
    gathers = fsum(t for m, t in over_tp if m.phase == "W")
    hidden = min(sums, work.weight) + min(gathers, work.products)
    saved = {"tensor": hidden * (2.0 - software.slowdown)} if hidden and not software.serial else {}
    return LayerTime(F=phase("F"), R=phase("R"), I=phase("I"), W=phase("W"), saved=saved)


def _waited(message: Message, shape: ModelShape, group: NodeGroup, software: SoftwareAssumptions) -> float:
    """The share of a collective's time that nothing hides or saves: tp's may be pipelined with the products
    before or after them; an exchange of tokens may overlap with other microbatches, and send a token once to
    each node instead of to each of its experts there. A token's experts are in the nodes of `top_groups` of
    the groups of experts.
    """
    if message.axis == "tp" and message.kind in ("all-gather", "reduce-scatter"):
        return 1.0 - software.pipelined
    if message.kind != "all-to-all" or message.axis != "ep" or shape.moe is None:
        return 1.0
    once = 1.0
    if software.dispatch_once and group.nodes > 1:
        copies, nodes = shape.moe.top_k, group.nodes * shape.moe.top_groups / shape.moe.groups
        once = max(1.0, nodes * (1.0 - max(0.0, 1.0 - 1.0 / nodes) ** copies)) / copies
    return once * (1.0 - software.exchanged)


def _launched(kernels: float, host: float, blocking: float) -> float:
    """Seconds of kernels and of the host that launches them ahead. Near equality both count, since short
    kernels wait for the host while long ones let it run ahead; `blocking` of the shorter one counts in full.
    """
    if not host:
        return kernels
    return (kernels**_LAUNCH_SHARPNESS + host**_LAUNCH_SHARPNESS) ** (1 / _LAUNCH_SHARPNESS) + blocking * min(
        kernels, host
    )


def _again(work: KernelTimes, shape: ModelShape, kind: str, compute: ComputeConfig) -> float:
    """Seconds of what a block repeats in its backward: of its linears, their share of the FLOPs."""
    if compute.recompute != "selective":
        return work.forward if compute.recompute == "full" else 0.0
    core = work.core if compute.repeats("core_attn") else 0.0
    operators: list[Operator] = [
        operator for operator in compute.framework.operators if operator != "core_attn"
    ]
    if not operators or kind != "block":
        return core
    linears = block_flops(shape, compute.sequence) - attention_flops(shape, compute.sequence)
    share = recomputed_flops(shape, compute.sequence, "selective", operators) / linears
    return core + share * (work.forward - work.core)


def _seconds(
    message: Message, shape: ModelShape, group: NodeGroup, cluster: Cluster, software: SoftwareAssumptions
) -> float:
    once = collective_seconds(cluster, message.kind, message.size, group)
    return message.times * once * _waited(message, shape, group, software)


def exposed_seconds(talk: float, busy: float, slowdown: float) -> float:
    """By how many seconds `busy` seconds of computation are longer with `talk` seconds of communication at
    the same time: what computation does not hide, and the slowdown while both run.
    """
    return max(0.0, talk - busy) + (slowdown - 1.0) * min(talk, busy)


def _phase(
    compute: float, host: float, core: float, messages: list[tuple[Message, float]], slowdown: float
) -> Parts:
    """Parts of one action. Communication that overlaps with attention counts as far as attention does not
    hide it, or is slowed by it.
    """
    parts = defaultdict[str, float](float, compute=compute)
    if host:
        parts["host"] = host
    overlapped = defaultdict[str, float](float)
    for message, taken in messages:
        (overlapped if message.overlaps else parts)[_AXES[message.axis]] += taken
    for name, taken in overlapped.items():
        parts[name] += exposed_seconds(taken, core, slowdown)
    return dict(parts)
