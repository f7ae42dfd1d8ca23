"""How long one rank takes for one layer and one microbatch, action by action and part by part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from stretto.cost.activations import Computing
from stretto.cost.machine.cluster import Cluster, group_of
from stretto.cost.machine.device import Device, Precision
from stretto.cost.shape import ModelShape
from stretto.cost.time.collectives import collective_seconds
from stretto.cost.time.habits import Habits
from stretto.cost.time.work import Work, kernels_back, layer_work
from stretto.cost.traffic import Message, Phase, block_traffic, embedding_traffic, head_traffic
from stretto.layout.layout import Layout

Parts = Mapping[str, float]  # seconds by "compute", "tensor", "context", "expert"

_AXES = {
    "tp": "tensor",
    "cp": "context",
    "ep": "expert",
    "expert_tp": "expert",
    "expert_tp-ep": "expert",
    "tp-cp": "expert",
}
_TRAFFIC = {"embed": embedding_traffic, "block": block_traffic, "head": head_traffic}


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer for one microbatch: forward, forward again, input gradient, weight gradient.

    `saved`: by how much a backward that is not split is shorter than I and W, since its collectives run
    beside its products.
    """

    F: Parts
    R: Parts
    I: Parts
    W: Parts
    saved: Parts = field(default_factory=dict[str, float])

    def total(self, phase: Phase) -> float:
        """Seconds of one action."""
        return sum(getattr(self, phase).values())


@lru_cache(maxsize=4096)
def layer_time(
    shape: ModelShape,
    kind: str,
    how: Computing,
    layout: Layout,
    cluster: Cluster,
    precision: Precision = "bf16",
    habits: Habits | None = None,
) -> LayerTime:
    """Time of a layer: `kind` is "embed", "block" or "head"."""
    habits = habits or Habits()
    work = work_of(shape, kind, how, cluster.device, precision, habits)
    talk = [(m, _seconds(m, layout, cluster)) for m in _TRAFFIC[kind](shape, how)]
    again = _again(work, how)
    host, host_back = habits.host * work.kernels, habits.host * kernels_back(work)
    # a backward's kernels are its input gradients' and its weights'
    both = max(work.back + work.weight, host_back)
    share = both / (work.back + work.weight) if work.back + work.weight else 0.0
    repeated = max(again, host) if how.recompute == "full" else again
    return LayerTime(
        _phase(max(work.forward, host), work.core, "F", talk),
        _phase(repeated, work.core, "R", talk),
        _phase(work.back * share, work.core_back, "I", talk),
        _phase(work.weight * share, 0.0, "W", talk),
        _saved(work, talk, habits),
    )


def work_of(
    shape: ModelShape, kind: str, how: Computing, device: Device, precision: Precision, habits: Habits
) -> Work:
    """The work of a layer as a program runs it. A device that was measured was measured in use."""
    if device.kernels:
        return layer_work(shape, kind, how, device, precision, habits.causal, habits.fused(device))
    speed = habits.fused(device)
    return layer_work(
        *(shape, kind, how, device, precision), habits.causal, speed, habits.alone, habits.passes
    )


def _again(work: Work, how: Computing) -> float:
    return {"none": 0.0, "selective": work.core, "full": work.forward}[how.recompute]


def _seconds(message: Message, layout: Layout, cluster: Cluster) -> float:
    group = group_of(layout, message.axis, cluster.node)
    return message.count * collective_seconds(cluster, message.kind, message.size, group)


def _phase(seconds: float, core: float, phase: str, talk: list[tuple[Message, float]]) -> dict[str, float]:
    """Parts of one action; what is communicated beside attention counts by how much it is longer."""
    parts = defaultdict[str, float](float, compute=seconds)
    beside = defaultdict[str, float](float)
    for message, taken in talk:
        if message.phase == phase:
            (beside if message.beside else parts)[_AXES[message.axis]] += taken
    for name, taken in beside.items():
        parts[name] += max(0.0, taken - core)
    return dict(parts)


def _saved(work: Work, talk: list[tuple[Message, float]], habits: Habits) -> dict[str, float]:
    """What a whole backward hides: sums of input gradients behind products of weight gradients, inputs that
    are gathered again behind products of input gradients.
    """
    sums = sum(t for m, t in talk if m.axis == "tp" and m.phase == "I" and m.kind in _SUMS)
    gathers = sum(t for m, t in talk if m.axis == "tp" and m.phase == "W")
    hidden = min(sums, work.weight) + min(gathers, work.products)
    # what runs beside communication is slower by as much
    return {"tensor": habits.hidden * hidden * (2.0 - habits.slowdown)} if hidden else {}


_SUMS = ("all-reduce", "reduce-scatter")
