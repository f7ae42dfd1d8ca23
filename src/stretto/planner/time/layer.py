"""How long one rank takes for one layer and one microbatch, by action and by part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from stretto.layout.layout import Layout
from stretto.planner.assumptions import SoftwareProfile
from stretto.planner.counts.activations import ComputeConfig
from stretto.planner.counts.traffic import Message, Phase, block_traffic, embedding_traffic, head_traffic
from stretto.planner.machines.cluster import Cluster, Group, group_of
from stretto.planner.machines.device import Device, Precision
from stretto.planner.time.collectives import collective_seconds
from stretto.planner.time.operators import (
    alignment,
    attention_seconds,
    matmul_seconds,
    pass_seconds,
    unscaled,
)
from stretto.spec.attention import AttentionShape
from stretto.spec.flops import attention_flops, block_flops, recomputed_flops
from stretto.spec.framework import STRETTO, Operator
from stretto.spec.lora import is_adapter
from stretto.spec.parameters import block_shapes
from stretto.spec.shape import ModelShape

# Kernels that a forward launches, counted in the published code of Megatron with its fused kernels:
# two norms, four products, and the operations between them.
_KERNELS = {"block": 16, "head": 12, "embed": 5}
_UNFUSED = 8  # more with unfused attention
# more with experts: scores, top-k, sorting, permuting and two exchanges, and a few for each group of experts
_EXPERTS = 80
_COUNTED = 0.5  # share of a forward's launches that follow the counts of tokens
# more with dropout in stored scores, which has a generator of its own (megatron/mpu/random.py, fork)
_FORKED = 4
# more in a recomputed forward: the states of random numbers are saved, set back, and set again
_CHECKPOINT = 12
_ROUND = 4  # more in each further round of ring attention: the kernel, the sum, send and receive
_APART = 8  # more with a softmax in separate operations
# Megatron's fused softmax takes a number of matrices of scores that its blocks of four warps divide
# (megatron/fused_kernels/scaled_upper_triang_masked_softmax.h, is_kernel_available)
_MATRICES = 4
_BACK = 2.0  # a backward launches twice as many
_AHEAD = 4  # sharpness of the transition between layers bound by the host and by kernels


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
    loss: float = 1.0,
    casts: float = 1.0,
    experts: float = 1.0,
    softmax: bool = True,
) -> KernelTimes:
    """The kernels of a layer: `kind` is "embed", "block" or "head".

    Args:
        causal: fused attention skips what is masked.
        attention: speed of fused attention over that of `attention_seconds`.
        alone: factor on the time of all kernels.
        passes: bytes of the operations between products over those of fused kernels.
        loss: the same of the loss.
        casts: share of the casts to 8 bits that are kernels of their own.
        experts: time of the products of routed experts over that of even rows in one product each.
        softmax: scale, mask and softmax of stored scores are one kernel, where it takes their number.
    """
    if kind == "block":
        times = _block(
            shape=shape,
            how=how,
            device=device,
            precision=precision,
            kernel=(causal, attention, softmax),
            passes=passes,
            casts=casts,
            experts=experts,
        )
    elif kind == "head":
        times = _head(shape=shape, how=how, device=device, precision=precision, passes=passes, loss=loss)
    else:
        times = _embed(shape, how, device)
    return times if alone == 1.0 else times.scaled(alone)


Kernel = tuple[bool, float, bool]  # causal, the speed, and whether softmax is fused


def _block(
    shape: ModelShape,
    how: ComputeConfig,
    device: Device,
    precision: Precision,
    kernel: Kernel,
    passes: float,
    casts: float,
    experts: float,
) -> KernelTimes:
    attention = _products(device, attention_linears(shape, how), how.tokens, precision, casts=casts)
    mlp = _mlp(shape=shape, how=how, device=device, precision=precision, casts=casts, experts=experts)
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
        kernels=_KERNELS["block"]
        + (_UNFUSED if how.attention == "explicit" else 0)
        + (0 if _fused_softmax(shape, how, kernel) else _APART)
        + (_FORKED if how.attention == "explicit" and shape.dropout else 0)
        + (0 if shape.moe is None else _EXPERTS)
        + (_ROUND * (how.cp - 1) if how.context == "ring" else 0),
    )


def _fused_softmax(shape: ModelShape, how: ComputeConfig, kernel: Kernel) -> bool:
    """Whether the softmax of stored scores runs as one kernel with scale and mask."""
    *_, fused = kernel
    return how.attention == "flash" or (fused and how.batch * shape.heads // how.tp % _MATRICES == 0)


def attention_linears(shape: ModelShape, how: ComputeConfig) -> list[tuple[int, int]]:
    """(output, input) features on one rank of the linears around attention. Projections down to latent
    vectors are whole on every rank.
    """
    linears: list[tuple[int, int]] = []
    for name, sizes in block_shapes(shape).items():
        if name.startswith("attn.") and len(sizes) == 2 and not is_adapter(name):
            rows, columns = sizes
            if name.startswith("attn.proj"):
                columns //= how.tp
            elif "_down" not in name:
                rows //= how.tp
            linears.append((rows, columns))
    return linears


def _products(
    device: Device,
    linears: list[tuple[int, int]],
    tokens: int,
    precision: Precision,
    batch: int = 1,
    casts: float = 1.0,
) -> tuple[float, float, float]:
    """Seconds of forward, input gradient and weight gradient of linears."""

    def product(m: int, n: int, k: int) -> float:
        return matmul_seconds(device=device, m=m, n=n, k=k, precision=precision, batch=batch, casts=casts)

    forward = back = weight = 0.0
    for n, k in linears:
        slower = 1.0 / alignment(device, precision, n, k)
        forward += slower * product(tokens, n, k)
        back += slower * product(tokens, k, n)
        weight += slower * product(n, k, tokens)
    return forward, back, weight


def _mlp(
    shape: ModelShape,
    how: ComputeConfig,
    device: Device,
    precision: Precision,
    casts: float,
    experts: float,
) -> tuple[float, float, float]:
    """Seconds of the MLP's products; of a mixture of experts on the rank with the most tokens."""
    up = 2 if shape.gated else 1

    def dense(ffn: int, split: int) -> list[tuple[int, int]]:
        return [(up * ffn // split, shape.hidden), (shape.hidden, ffn // split)]

    if shape.moe is None:
        return _products(device, dense(shape.ffn, how.tp), how.tokens, precision, casts=casts)
    moe, split = shape.moe, how.expert_shards
    here = max(1, moe.experts // how.ep)
    rows = max(1, how.tokens * moe.top_k * split // (how.tp * here))
    # rows of experts are cast expert by expert, in kernels of their own
    routed = _products(device, dense(shape.expert_ffn, split), rows, precision, here)
    products = [tuple(experts * seconds for seconds in routed)]
    if moe.shared_ffn:
        products.append(_products(device, dense(moe.shared_ffn, how.tp), how.tokens, precision, casts=casts))
    exact = unscaled(precision)
    products.append(_products(device, [(moe.experts, shape.hidden)], how.shard, exact))
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
    rows, (causal, speed, _) = how.tokens // how.batch, kernel
    exact = unscaled(precision)
    heads = shape.heads // how.tp
    keys = rows * how.cp
    fused = _fused_attention(shape, how)

    def attention(queries: int, keys: int, heads: int, causal: bool) -> float:
        return attention_seconds(
            device=device,
            batch=how.batch,
            queries=queries,
            keys=keys,
            heads=heads,
            head_dim=shape.head_dim,
            precision=exact,
            causal=causal,
            flash=fused,
            backward=backward,
            fused_softmax=_fused_softmax(shape, how, kernel),
        )

    if how.cp > 1 and how.context == "ulysses":
        seconds = attention(keys, keys, max(1, heads // how.cp), causal)
    elif how.cp > 1 and causal and fused:
        seconds = max(
            _ring_attention(shape=shape, how=how, device=device, attention=attention),
            attention(keys, keys, heads, causal) / how.cp,
        )
    else:
        seconds = attention(rows, keys, heads, causal)
    if fused:
        seconds /= speed
    elif how.attention == "flash" and causal:  # tiles skip the keys that none of their queries sees
        seconds /= 2
    if shape.latent is not None:  # values are narrower than queries and keys
        seconds *= (shape.head_dim + shape.value_dim) / (2 * shape.head_dim)
    if shape.attention.window is not None:
        whole = AttentionShape().seen(keys, causal)
        seconds *= min(1.0, shape.attention.seen(keys, causal) / whole)
    return seconds


def _fused_attention(shape: ModelShape, how: ComputeConfig) -> bool:
    """Whether one kernel computes softmax(q k^T) v. None of Stretto's knows soft-capped scores, which are
    computed in tiles whose scores are written out.
    """
    written_out = shape.attention.softcap is not None and how.framework == STRETTO
    return how.attention == "flash" and not written_out


def _ring_attention(
    shape: ModelShape, how: ComputeConfig, device: Device, attention: Callable[[int, int, int, bool], float]
) -> float:
    """Seconds of causal attention in a ring whose ranks hold an early and a late part of the sequence each.

    A rank attends to its own keys with a mask, and then to half of every other rank's without one; each of
    these rounds ends with a sum, rescaled in 32 bits, of its result and those before it. Shorter blocks run
    at lower rates, so that the ranks together take longer than one with the whole sequence.
    """
    rows, heads = how.tokens // how.batch, shape.heads // how.tp
    rounds = how.cp - 1
    rescaled = pass_seconds(device, "add", 3 * 4.0 * how.tokens * heads * shape.head_dim)
    return attention(rows, rows, heads, True) + rounds * (
        attention(rows, max(1, rows // 2), heads, False) + rescaled
    )


def _between(shape: ModelShape, how: ComputeConfig, device: Device) -> tuple[float, float]:
    """Seconds of the memory-bound operations between products, forward and backward."""
    e, h = how.element, shape.hidden
    stream = float(e * how.shard * h)
    moe = shape.moe
    inner = shape.ffn / how.tp if moe is None else (shape.expert_ffn * moe.top_k + moe.shared_ffn) / how.tp
    wide = e * how.tokens * inner
    mask = how.shard * h if shape.dropout else 0
    norms = 4 if shape.block_norms == "sandwich" else 2
    added = 2 * pass_seconds(device, "add", 3 * stream + mask)
    forward = norms * pass_seconds(device, "norm", 2 * stream) + added
    back = norms * pass_seconds(device, "norm", 3 * stream) + added
    if shape.gated:
        forward += pass_seconds(device, "gated", 3 * wide)
        back += pass_seconds(device, "gated", 5 * wide)
    else:
        forward += pass_seconds(device, "gelu", 2 * wide)
        back += pass_seconds(device, "gelu", 3 * wide)
    if shape.rotary:
        turned = e * how.tokens * (shape.attention_width + shape.kv_width) / how.tp
        forward += pass_seconds(device, "rope", 2 * turned)
        back += pass_seconds(device, "rope", 2 * turned)
    return forward, back


def _head(
    shape: ModelShape,
    how: ComputeConfig,
    device: Device,
    precision: Precision,
    passes: float,
    loss: float,
) -> KernelTimes:
    exact = unscaled(precision)
    n, k = how.vocabulary_rows(shape), shape.hidden
    forward, back, weight = _products(device, [(n, k)], how.tokens, exact)
    logits = float(how.tokens * n)
    stream = float(how.element * how.shard * k)
    # cast to 32 bits; maximum, sum of exponentials and target; then the gradient, cast to 16 bits
    passed = pass_seconds(device, "loss", (how.element + 4) * logits) + 2 * pass_seconds(
        device, "loss", 4 * logits
    )
    passed_back = pass_seconds(device, "loss", (8 + how.element) * logits)
    norm = pass_seconds(device, "norm", 2 * stream)
    if shape.logit_softcap:  # quotient, tanh and product; in the backward the product and tanh's derivative
        passed += 3 * pass_seconds(device, "loss", 2 * how.element * logits)
        passed_back += pass_seconds(device, "loss", 5 * how.element * logits)
    return KernelTimes(
        forward=forward + loss * passed + passes * norm,
        back=back + loss * passed_back + passes * 1.5 * norm,
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


Parts = Mapping[str, float]  # seconds by "compute", "host", "tensor", "context", "expert", "offload"

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
    talk = [(m, _seconds(m, shape, layout, cluster, software)) for m in _TRAFFIC[kind](shape, how)]
    again = _again(work, shape, kind, how)
    host, host_back = software.host * work.kernels, software.host * kernels_back(work)
    blocking = software.blocking if how.tp > 1 else 0.0
    # the host waits for the numbers of tokens before it launches the products of experts
    counted = max(blocking, _COUNTED) if kind == "block" and shape.moe is not None else blocking
    again_host = host + _CHECKPOINT * software.host
    # I and W share the launch overhead of a backward by their kernels' time
    late = _launched(work.back + work.weight, host_back, blocking) - (work.back + work.weight)
    share = late / (work.back + work.weight) if work.back + work.weight else 0.0
    waits = {
        "F": _launched(work.forward, host, counted) - work.forward,
        "R": _launched(again, again_host, counted) - again if how.recompute == "full" else 0.0,
        "I": share * work.back,
        "W": share * work.weight,
    }
    kernels = {"F": work.forward, "R": again, "I": work.back, "W": work.weight}
    cores = {"F": work.core, "R": work.core, "I": work.core_back, "W": 0.0}

    moved = _moved_input(shape, kind, how) / cluster.host.link

    def phase(name: Phase) -> Parts:
        parts = _phase(
            compute=kernels[name],
            host=waits[name],
            core=cores[name],
            messages=[(message, taken) for message, taken in talk if message.phase == name],
            slowdown=software.slowdown,
        )
        return {**parts, "offload": moved} if moved and name in "FR" else parts

    return LayerTime(
        F=phase("F"), R=phase("R"), I=phase("I"), W=phase("W"), saved=_saved(work, talk, software)
    )


def _waited(message: Message, shape: ModelShape, group: Group, software: SoftwareProfile) -> float:
    """The share of a collective's time that nothing hides or saves: tp's may be pipelined with the products
    before or after them; an exchange of tokens may overlap with other microbatches, and send a token once to
    each node instead of to each of its experts there.
    """
    if message.axis == "tp" and message.kind in ("all-gather", "reduce-scatter"):
        return 1.0 - software.pipelined
    if message.kind != "all-to-all" or message.axis != "ep" or shape.moe is None:
        return 1.0
    once = 1.0
    if software.dispatch_once and group.nodes > 1:
        copies = shape.moe.top_k
        once = group.nodes * (1.0 - (1.0 - 1.0 / group.nodes) ** copies) / copies
    return once * (1.0 - software.exchanged)


def _launched(kernels: float, host: float, blocking: float) -> float:
    """Seconds of kernels and of the host that launches them ahead. Near equality both count, since short
    kernels wait for the host while long ones let it run ahead; `blocking` of the shorter one counts in full.
    """
    if not host:
        return kernels
    return (kernels**_AHEAD + host**_AHEAD) ** (1 / _AHEAD) + blocking * min(kernels, host)


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
        alone=1.0 if measured else software.slower(device),
        passes=1.0 if measured else software.passes,
        loss=1.0 if measured else software.loss,
        casts=software.casts,
        experts=software.imbalance / software.grouped,
        softmax=software.softmax,
    )


def _moved_input(shape: ModelShape, kind: str, how: ComputeConfig) -> float:
    """Bytes of a block's input that the forward copies to host memory, and recomputation back; both wait."""
    if kind != "block" or how.recompute != "full" or not how.framework.inputs_on_host:
        return 0.0
    return how.element * how.shard * shape.hidden / (how.tp if how.shard_inputs else 1)


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


def _seconds(
    message: Message, shape: ModelShape, layout: Layout, cluster: Cluster, software: SoftwareProfile
) -> float:
    group = group_of(layout, message.axis, cluster.node)
    once = collective_seconds(cluster, message.kind, message.size, group)
    return message.count * once * _waited(message, shape, group, software)


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
    beside = defaultdict[str, float](float)
    for message, taken in messages:
        (beside if message.beside else parts)[_AXES[message.axis]] += taken
    for name, taken in beside.items():
        parts[name] += exposed_seconds(taken, core, slowdown)
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
