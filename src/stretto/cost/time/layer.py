"""How long one rank takes for one layer and one microbatch, action by action and part by part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from stretto.cost.activations import Computing
from stretto.cost.machine.cluster import Cluster, group_of
from stretto.cost.machine.device import Precision
from stretto.cost.shape import ModelShape
from stretto.cost.time.collectives import collective_seconds
from stretto.cost.time.operators import attention_seconds, matmul_seconds, pass_seconds
from stretto.cost.traffic import Message, Phase, block_traffic, embedding_traffic, head_traffic
from stretto.layout.layout import Layout

Parts = Mapping[str, float]  # seconds by "compute", "tensor", "context", "expert"

_AXES = {"tp": "tensor", "cp": "context", "ep": "expert", "expert_tp": "expert"}


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer for one microbatch: forward, forward again, input gradient, weight gradient."""

    F: Parts
    R: Parts
    I: Parts
    W: Parts

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
    causal: bool = True,
) -> LayerTime:
    """Time of a layer: `kind` is "embed", "block" or "head"."""
    talk = {"embed": embedding_traffic, "block": block_traffic, "head": head_traffic}[kind](shape, how)
    work = _WORK[kind](shape, how, cluster, precision, causal)
    return LayerTime(*(_with(work[phase], talk, phase, layout, cluster) for phase in ("F", "R", "I", "W")))


def _with(
    seconds: float, talk: tuple[Message, ...], phase: str, layout: Layout, cluster: Cluster
) -> dict[str, float]:
    parts = defaultdict[str, float](float, compute=seconds)
    for message in talk:
        if message.phase == phase:
            group = group_of(layout, message.axis, cluster.node)
            taken = message.count * collective_seconds(cluster, message.kind, message.size, group)
            parts[_AXES[message.axis]] += taken
    return dict(parts)


Work = dict[str, float]


def _block(shape: ModelShape, how: Computing, cluster: Cluster, precision: Precision, causal: bool) -> Work:
    device, tokens, shard, tp = cluster.device, how.tokens, how.shard, how.tp
    h, width, e = shape.hidden, shape.attention_width, how.element
    qkv, up = (width + 2 * shape.kv_width) // tp, (2 if shape.gated else 1) * shape.ffn // tp
    pairs = [(qkv, h), (h, width // tp), (up, h), (h, shape.ffn // tp)]
    f = sum(matmul_seconds(device, tokens, n, k, precision) for n, k in pairs)
    i = sum(matmul_seconds(device, tokens, k, n, precision) for n, k in pairs)
    w = sum(matmul_seconds(device, n, k, tokens, precision) for n, k in pairs)
    queries = tokens // how.batch

    def attend(backward: bool) -> float:
        return attention_seconds(
            *(device, how.batch, queries, queries * how.cp, shape.heads // tp, shape.head_dim, precision),
            causal=causal,
            flash=how.attention == "flash",
            backward=backward,
        )

    small = 2 * pass_seconds(device, "norm", 2 * e * shard * h) + 2 * pass_seconds(
        device, "add", 3 * e * shard * h
    )
    inner = shape.ffn // tp * tokens * e
    small += (
        pass_seconds(device, "gated", 3 * inner) if shape.gated else pass_seconds(device, "gelu", 2 * inner)
    )
    core = attend(False)
    again = {"none": 0.0, "selective": core, "full": f + core + small}[how.recompute]
    return {"F": f + core + small, "R": again, "I": i + attend(True) + 1.5 * small, "W": w}


def _head(shape: ModelShape, how: Computing, cluster: Cluster, precision: Precision, causal: bool) -> Work:
    device, n, k = cluster.device, -(-shape.vocab // how.tp), shape.hidden
    loss = pass_seconds(device, "loss", 4 * 4.0 * how.tokens * n)
    one = matmul_seconds(device, how.tokens, n, k, precision)
    return {"F": one + loss, "R": 0.0, "I": one + loss, "W": one}


def _embed(shape: ModelShape, how: Computing, cluster: Cluster, precision: Precision, causal: bool) -> Work:
    one = pass_seconds(cluster.device, "embedding", 2.0 * how.element * how.tokens * shape.hidden)
    return {"F": one, "R": 0.0, "I": 0.0, "W": 2 * one}


_WORK: dict[str, Callable[[ModelShape, Computing, Cluster, Precision, bool], Work]] = {
    "block": _block,
    "head": _head,
    "embed": _embed,
}


def recomputing(how: Computing, mode: str) -> Computing:
    """The same with another mode of recomputation."""
    assert mode in ("none", "selective", "full")
    return replace(how, recompute=mode)
