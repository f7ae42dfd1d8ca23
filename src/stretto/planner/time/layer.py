"""How long one rank takes for one layer and one microbatch, by action and by part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from stretto.layout.layout import Layout
from stretto.planner.assumptions import SoftwareProfile
from stretto.planner.counts.activations import ComputeConfig
from stretto.planner.counts.traffic import Message, Phase, block_traffic, embedding_traffic, head_traffic
from stretto.planner.machines.cluster import Cluster, group_of
from stretto.planner.machines.device import Device, Precision
from stretto.planner.time.collectives import collective_seconds
from stretto.planner.time.operators import attention_seconds, matmul_seconds, pass_seconds
from stretto.spec.attention import PLAIN
from stretto.spec.flops import attention_flops, block_flops, recomputed_flops
from stretto.spec.framework import Operator
from stretto.spec.parameters import block_shapes
from stretto.spec.shape import ModelShape

# Kernels that a forward launches, counted in the published code of Megatron with its fused kernels:
# two norms, four products, and the operations between them.
_KERNELS = {"block": 16, "head": 12, "embed": 5}
_UNFUSED = 8  # more with unfused attention
_BACK = 2.0  # a backward launches twice as many


@dataclass(frozen=True, kw_only=True)
class KernelTimes:
    """Seconds of a layer's kernels, without launch overhead.

    Attributes:
        forward, back, weight: of forward, input gradient and weight gradient.
        core: of the forward of softmax(q k^T) v, which selective recomputation repeats.
        core_back: of its backward.
        products: of the products of the input gradients, which can hide communication.
        kernels: number of kernels that a forward launches.
    """

    forward: float
    back: float
    weight: float
    core: float = 0.0
    core_back: float = 0.0
    products: float = 0.0
    kernels: int = 0

    def scaled(self, factor: float) -> KernelTimes:
        """All seconds times a factor."""
        return replace(
            self,
            forward=factor * self.forward,
            back=factor * self.back,
            weight=factor * self.weight,
            core=factor * self.core,
            core_back=factor * self.core_back,
            products=factor * self.products,
        )


@lru_cache(maxsize=4096)
def kernel_times(
    shape: ModelShape,
    kind: str,
    how: ComputeConfig,
    device: Device,
    precision: Precision,
    causal: bool = True,
    attention: float = 1.0,
    alone: float = 1.0,
    passes: float = 1.0,
) -> KernelTimes:
    """The kernels of a layer: `kind` is "embed", "block" or "head".

    Args:
        causal: fused attention skips what is masked.
        attention: speed of fused attention over that of `attention_seconds`.
        alone: factor on the time of all kernels.
        passes: bytes of the operations between products over those of fused kernels.
    """
    if kind == "block":
        times = _block(
            shape=shape,
            how=how,
            device=device,
            precision=precision,
            kernel=(causal, attention),
            passes=passes,
        )
    elif kind == "head":
        times = _head(shape, how, device, precision, passes)
    else:
        times = _embed(shape, how, device)
    return times if alone == 1.0 else times.scaled(alone)


Kernel = tuple[bool, float]  # causal, and the speed


def _block(
    shape: ModelShape, how: ComputeConfig, device: Device, precision: Precision, kernel: Kernel, passes: float
) -> KernelTimes:
    attention = _products(device, _attention_linears(shape, how), how.tokens, precision)
    mlp = _mlp(shape, how, device, precision)
    core, core_back = (
        _core(shape=shape, how=how, device=device, precision=precision, kernel=kernel, backward=backward)
        for backward in (False, True)
    )
    between, between_back = (passes * seconds for seconds in _between(shape, how, device))
    forward, back, weight = (attention[at] + mlp[at] for at in range(3))
    return KernelTimes(
        forward=forward + core + between,
        back=back + core_back + between_back,
        weight=weight,
        core=core,
        core_back=core_back,
        products=back,
        kernels=_KERNELS["block"] + (_UNFUSED if how.attention == "explicit" else 0),
    )


def _attention_linears(shape: ModelShape, how: ComputeConfig) -> list[tuple[int, int]]:
    """(output, input) features on one rank of the linears around attention. Projections down to latent
    vectors are whole on every rank.
    """
    linears: list[tuple[int, int]] = []
    for name, sizes in block_shapes(shape).items():
        if name.startswith("attn.") and len(sizes) == 2:
            rows, columns = sizes
            if name.startswith("attn.proj"):
                columns //= how.tp
            elif "_down" not in name:
                rows //= how.tp
            linears.append((rows, columns))
    return linears


def _products(
    device: Device, linears: list[tuple[int, int]], tokens: int, precision: Precision, batch: int = 1
) -> tuple[float, float, float]:
    """Seconds of forward, input gradient and weight gradient of linears."""
    forward = back = weight = 0.0
    for n, k in linears:
        forward += matmul_seconds(device=device, m=tokens, n=n, k=k, precision=precision, batch=batch)
        back += matmul_seconds(device=device, m=tokens, n=k, k=n, precision=precision, batch=batch)
        weight += matmul_seconds(device=device, m=n, n=k, k=tokens, precision=precision, batch=batch)
    return forward, back, weight


def _mlp(
    shape: ModelShape, how: ComputeConfig, device: Device, precision: Precision
) -> tuple[float, float, float]:
    """Seconds of the MLP's products, of a mixture of experts under even routing."""
    up = 2 if shape.gated else 1

    def dense(ffn: int, split: int) -> list[tuple[int, int]]:
        return [(up * ffn // split, shape.hidden), (shape.hidden, ffn // split)]

    if shape.moe is None:
        return _products(device, dense(shape.ffn, how.tp), how.tokens, precision)
    moe, split = shape.moe, how.expert_shards
    here = max(1, moe.experts // how.ep)
    rows = max(1, how.tokens * moe.top_k * split // (how.tp * here))
    products = [_products(device, dense(shape.expert_ffn, split), rows, precision, here)]
    if moe.shared_ffn:
        products.append(_products(device, dense(moe.shared_ffn, how.tp), how.tokens, precision))
    products.append(_products(device, [(moe.experts, shape.hidden)], how.shard, precision))
    # tokens are sorted by expert, gathered, and put back in order
    moved = how.element * how.tokens * moe.top_k * shape.hidden * split / how.tp
    passes = 4 * pass_seconds(device, "copy", 2 * moved)
    forward, back, weight = (sum(product[at] for product in products) for at in range(3))
    return forward + passes, back + passes, weight


def _core(
    shape: ModelShape,
    how: ComputeConfig,
    device: Device,
    precision: Precision,
    kernel: Kernel,
    backward: bool,
) -> float:
    """Seconds of softmax(q k^T) v on one rank, or of its backward; never in 8 bits."""
    rows, (causal, speed) = how.tokens // how.batch, kernel
    exact: Precision = "bf16" if precision == "fp8" else precision
    heads = shape.heads // how.tp
    queries = rows
    keys = rows * how.cp
    if how.cp > 1 and how.context == "ulysses":
        heads, queries = max(1, heads // how.cp), keys
    seconds = attention_seconds(
        device=device,
        batch=how.batch,
        queries=queries,
        keys=keys,
        heads=heads,
        head_dim=shape.head_dim,
        precision=exact,
        causal=causal,
        flash=how.attention == "flash",
        backward=backward,
    )
    if how.attention == "flash":
        seconds /= speed
    # in a ring the causal work is shared evenly, though a rank's queries and keys differ in number
    ring = how.cp > 1 and how.context != "ulysses" and causal and how.attention == "flash"
    if shape.latent is not None:  # values are narrower than queries and keys
        seconds *= (shape.head_dim + shape.value_dim) / (2 * shape.head_dim)
    if shape.special.window is not None:
        whole = PLAIN.seen(keys, causal)
        seconds *= min(1.0, shape.special.seen(keys, causal) / whole)
    return seconds / 2 if ring else seconds


def _between(shape: ModelShape, how: ComputeConfig, device: Device) -> tuple[float, float]:
    """Seconds of the memory-bound operations between products, forward and backward."""
    e, h = how.element, shape.hidden
    stream = float(e * how.shard * h)
    moe = shape.moe
    inner = shape.ffn / how.tp if moe is None else (shape.expert_ffn * moe.top_k + moe.shared_ffn) / how.tp
    wide = e * how.tokens * inner
    mask = how.shard * h if shape.dropout else 0
    forward = 2 * pass_seconds(device, "norm", 2 * stream) + 2 * pass_seconds(
        device, "add", 3 * stream + mask
    )
    back = 2 * pass_seconds(device, "norm", 3 * stream) + 2 * pass_seconds(device, "add", 3 * stream + mask)
    if shape.gated:
        forward += pass_seconds(device, "gated", 3 * wide)
        back += pass_seconds(device, "gated", 5 * wide)
    else:
        forward += pass_seconds(device, "gelu", 2 * wide)
        back += pass_seconds(device, "gelu", 3 * wide)
    if shape.family == "llama":
        turned = e * how.tokens * (shape.attention_width + shape.kv_width) / how.tp
        forward += pass_seconds(device, "rope", 2 * turned)
        back += pass_seconds(device, "rope", 2 * turned)
    return forward, back


def _head(
    shape: ModelShape, how: ComputeConfig, device: Device, precision: Precision, passes: float
) -> KernelTimes:
    exact: Precision = "bf16" if precision == "fp8" else precision
    n, k = how.vocabulary_rows(shape), shape.hidden
    forward, back, weight = _products(device, [(n, k)], how.tokens, exact)
    logits = float(how.tokens * n)
    stream = float(how.element * how.shard * k)
    # cast to 32 bits; maximum, sum of exponentials and target; then the gradient, cast to 16 bits
    loss = pass_seconds(device, "loss", (how.element + 4) * logits) + 2 * pass_seconds(
        device, "loss", 4 * logits
    )
    loss_back = pass_seconds(device, "loss", (8 + how.element) * logits)
    norm = pass_seconds(device, "norm", 2 * stream)
    return KernelTimes(
        forward=forward + passes * (loss + norm),
        back=back + passes * (loss_back + 1.5 * norm),
        weight=weight,
        products=back,
        kernels=_KERNELS["head"],
    )


def _embed(shape: ModelShape, how: ComputeConfig, device: Device) -> KernelTimes:
    size = float(how.element * how.tokens * shape.hidden)
    forward = pass_seconds(device, "embedding", 2 * size)
    if shape.dropout:
        forward += pass_seconds(device, "dropout", 2 * size)
    return KernelTimes(
        forward=forward,
        back=0.0,
        weight=2 * pass_seconds(device, "embedding", 2 * size),
        kernels=_KERNELS["embed"],
    )


def kernels_back(work: KernelTimes) -> float:
    """Number of kernels that a backward launches."""
    return _BACK * work.kernels


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


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """Seconds of one layer for one microbatch: forward, recomputation, input gradient, weight gradient.

    Attributes:
        saved: by how much an unsplit backward is shorter than I and W, since its collectives overlap with its
            products.
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
    how: ComputeConfig,
    layout: Layout,
    cluster: Cluster,
    precision: Precision = "bf16",
    software: SoftwareProfile | None = None,
) -> LayerTime:
    """Time of a layer: `kind` is "embed", "block" or "head"."""
    software = software or SoftwareProfile()
    work = kernel_times_of(
        shape=shape, kind=kind, how=how, device=cluster.device, precision=precision, software=software
    )
    talk = [(m, _seconds(m, layout, cluster)) for m in _TRAFFIC[kind](shape, how)]
    again = _again(work, shape, kind, how)
    host, host_back = software.host * work.kernels, software.host * kernels_back(work)
    # I and W share the launch overhead of a backward by their kernels' time
    both = max(work.back + work.weight, host_back)
    share = both / (work.back + work.weight) if work.back + work.weight else 0.0
    repeated = max(again, host) if how.recompute == "full" else again
    return LayerTime(
        F=_phase(max(work.forward, host), work.core, "F", talk),
        R=_phase(repeated, work.core, "R", talk),
        I=_phase(work.back * share, work.core_back, "I", talk),
        W=_phase(work.weight * share, 0.0, "W", talk),
        saved=_saved(work, talk, software),
    )


def kernel_times_of(
    shape: ModelShape,
    kind: str,
    how: ComputeConfig,
    device: Device,
    precision: Precision,
    software: SoftwareProfile,
) -> KernelTimes:
    """The kernels of a layer under a software profile. Measured devices were measured within a program, so
    that only the choice of attention kernel is left to the profile.
    """
    measured = bool(device.kernels)
    return kernel_times(
        shape=shape,
        kind=kind,
        how=how,
        device=device,
        precision=precision,
        causal=software.causal,
        attention=software.fused(device),
        alone=1.0 if measured else software.alone,
        passes=1.0 if measured else software.passes,
    )


def _again(work: KernelTimes, shape: ModelShape, kind: str, how: ComputeConfig) -> float:
    """Seconds of what a block repeats in its backward: of its linears, their share of the FLOPs."""
    if how.recompute != "selective":
        return work.forward if how.recompute == "full" else 0.0
    core = work.core if how.repeats("core_attn") else 0.0
    rest: list[Operator] = [operator for operator in how.framework.operators if operator != "core_attn"]
    if not rest or kind != "block":
        return core
    linears = block_flops(shape, how.sequence) - attention_flops(shape, how.sequence)
    share = recomputed_flops(shape, how.sequence, "selective", rest) / linears
    return core + share * (work.forward - work.core)


def _seconds(message: Message, layout: Layout, cluster: Cluster) -> float:
    group = group_of(layout, message.axis, cluster.node)
    return message.count * collective_seconds(cluster, message.kind, message.size, group)


def _phase(seconds: float, core: float, phase: str, talk: list[tuple[Message, float]]) -> dict[str, float]:
    """Parts of one action. Of communication that overlaps with attention, only what exceeds attention's time
    counts.
    """
    parts = defaultdict[str, float](float, compute=seconds)
    beside = defaultdict[str, float](float)
    for message, taken in talk:
        if message.phase == phase:
            (beside if message.beside else parts)[_AXES[message.axis]] += taken
    for name, taken in beside.items():
        parts[name] += max(0.0, taken - core)
    return dict(parts)


def _saved(
    work: KernelTimes, talk: list[tuple[Message, float]], software: SoftwareProfile
) -> dict[str, float]:
    """What an unsplit backward hides: reductions of input gradients behind products of weight gradients,
    gathers of inputs behind products of input gradients.
    """
    sums = sum(t for m, t in talk if m.axis == "tp" and m.phase == "I" and m.kind in _SUMS)
    gathers = sum(t for m, t in talk if m.axis == "tp" and m.phase == "W")
    hidden = min(sums, work.weight) + min(gathers, work.products)
    # the slowdown of overlapping computation reduces what is saved
    return {"tensor": software.hidden * hidden * (2.0 - software.slowdown)} if hidden else {}


_SUMS = ("all-reduce", "reduce-scatter")
