"""The kernels of a layer: how long one rank computes for one microbatch, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from stretto.job.attention import AttentionShape
from stretto.job.framework import STRETTO
from stretto.job.lora import is_adapter
from stretto.job.parameters import block_shapes
from stretto.job.shape import ModelShape
from stretto.planner.assumptions import SoftwareAssumptions
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.machines.device import Device, Precision
from stretto.planner.time.constants import chip, flex_speed
from stretto.planner.time.operators import (
    alignment,
    attention_seconds,
    matmul_seconds,
    pass_seconds,
    unscaled,
)

# Kernels that a forward launches, counted in the published code of Megatron with its fused kernels:
# two norms, four products, and the operations between them.
_KERNELS = {"block": 16, "head": 12, "embed": 5, "between": 6}
_CROSS = 8  # more with attention to an encoder's output: a norm, four products, attention, two sums
_UNFUSED = 8  # more with unfused attention
# more with experts: scores, top-k, sorting, permuting and two exchanges, and a few for each group of experts
_EXPERTS = 80
# more with dropout in stored scores, which has a generator of its own (megatron/mpu/random.py, fork)
_FORKED = 4
_ROUND = 4  # more in each further round of ring attention: the kernel, the sum, send and receive
_UNFUSED_SOFTMAX = 8  # more with a softmax in separate operations
# Megatron's fused softmax takes a number of matrices of scores that its blocks of four warps divide
# (megatron/fused_kernels/scaled_upper_triang_masked_softmax.h, is_kernel_available)
_MATRICES = 4
_BACK = 2.0  # a backward launches twice as many


@dataclass(frozen=True, kw_only=True)
class KernelTimes:
    """Seconds of a layer's kernels, without launch overhead.

    Attributes:
        forward, back, weight: seconds of forward, input gradient and weight gradient.
        core: seconds of the forward of softmax(q k^T) v, which selective recomputation repeats.
        core_back: seconds of its backward.
        products: seconds of the products of input gradients, which can hide communication.
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
    compute: ComputeConfig,
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
    """The kernels of a layer: `kind` is that of `job.chain`.

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
            compute=compute,
            device=device,
            precision=precision,
            kernel=(causal, attention, softmax),
            passes=passes,
            casts=casts,
            experts=experts,
        )
    elif kind == "head":
        times = _head(
            shape=shape, compute=compute, device=device, precision=precision, passes=passes, loss=loss
        )
    elif kind == "between":
        # the encoder's last norm, and the embedding of the decoder's tokens
        embedding = _embed(shape, compute, device)
        stream = float(compute.element * compute.of_memory.shard * shape.hidden) * shape.last_norm
        times = replace(
            embedding,
            forward=embedding.forward + passes * pass_seconds(device, "norm", 2 * stream),
            back=passes * pass_seconds(device, "norm", 3 * stream),
            kernels=_KERNELS["between"],
        )
    else:
        times = _embed(shape, compute, device)
    return times if alone == 1.0 else times.scaled(alone)


Kernel = tuple[bool, float, bool]  # causal, the speed, and whether softmax is fused


def _block(
    shape: ModelShape,
    compute: ComputeConfig,
    device: Device,
    precision: Precision,
    kernel: Kernel,
    passes: float,
    casts: float,
    experts: float,
) -> KernelTimes:
    attention = _products(device, attention_linears(shape, compute), compute.tokens, precision, casts=casts)
    mlp = _mlp(shape=shape, compute=compute, device=device, precision=precision, casts=casts, experts=experts)
    core, core_back = (
        _core(
            shape=shape, compute=compute, device=device, precision=precision, kernel=kernel, backward=backward
        )
        for backward in (False, True)
    )
    between, between_back = (passes * seconds for seconds in _between(shape, compute, device))
    parts = [attention, mlp]
    if shape.encoder_layers:  # keys and values of the encoder's tokens
        linears, tokens = (
            [(2 * compute.kv_heads(shape) * shape.head_dim, shape.hidden)],
            compute.of_memory.tokens,
        )
        parts.append(_products(device, linears, tokens, precision, casts=casts))
    forward, back, weight = (sum(part[at] for part in parts) for at in range(3))
    return KernelTimes(
        forward=forward + core + between,
        back=back + core_back + between_back,
        weight=weight,
        core=core,
        core_back=core_back,
        products=back,
        kernels=_KERNELS["block"]
        + (_UNFUSED if compute.attention == "explicit" else 0)
        + (0 if _fused_softmax(shape, compute, kernel) else _UNFUSED_SOFTMAX)
        + (_FORKED if compute.attention == "explicit" and shape.dropout else 0)
        + (0 if shape.moe is None else _EXPERTS)
        + (_CROSS if shape.encoder_layers else 0)
        + (_ROUND * (compute.cp - 1) if compute.context == "ring" else 0),
    )


def _fused_softmax(shape: ModelShape, compute: ComputeConfig, kernel: Kernel) -> bool:
    """True if the softmax of stored scores runs as one kernel with scale and mask."""
    *_, fused = kernel
    return compute.attention != "explicit" or (
        fused and compute.batch * shape.heads // compute.tp % _MATRICES == 0
    )


def attention_linears(shape: ModelShape, compute: ComputeConfig) -> list[tuple[int, int]]:
    """(output, input) features on one rank of the linears around attention. Projections down to latent
    vectors are whole on every rank.
    """
    linears: list[tuple[int, int]] = []
    for name, sizes in block_shapes(shape).items():
        around = name.startswith(("attn.", "cross.")) and not name.startswith(
            "cross.kv"
        )  # of the memory's tokens
        if around and len(sizes) == 2 and not is_adapter(name):
            rows, columns = sizes
            if name.startswith(("attn.proj", "cross.proj")):
                columns //= compute.tp
            elif "_down" not in name:
                rows //= compute.tp
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
    compute: ComputeConfig,
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
        return _products(device, dense(shape.ffn, compute.tp), compute.tokens, precision, casts=casts)
    moe, split = shape.moe, compute.expert_shards
    local_experts = max(1, moe.experts // compute.ep)
    rows = max(1, compute.tokens * moe.top_k * split // (compute.tp * local_experts))
    # rows of experts are cast expert by expert, in kernels of their own
    routed = _products(device, dense(shape.expert_ffn, split), rows, precision, local_experts)
    products = [tuple(experts * seconds for seconds in routed)]
    if moe.shared_ffn:
        products.append(
            _products(device, dense(moe.shared_ffn, compute.tp), compute.tokens, precision, casts=casts)
        )
    exact = unscaled(precision)
    products.append(_products(device, [(moe.experts, shape.hidden)], compute.shard, exact))
    # tokens are sorted by expert, gathered, and put back in order
    moved = compute.element * compute.tokens * moe.top_k * shape.hidden * split / compute.tp
    passes = 4 * pass_seconds(device, "copy", 2 * moved)
    forward, back, weight = (sum(product[at] for product in products) for at in range(3))
    return forward + passes, back + passes, weight


def _core(
    shape: ModelShape,
    compute: ComputeConfig,
    device: Device,
    precision: Precision,
    kernel: Kernel,
    backward: bool,
) -> float:
    """Seconds of softmax(q k^T) v on one rank, or of its backward; never in 8 bits."""
    rows, (causal, speed, _) = compute.tokens // compute.batch, kernel
    causal = causal and shape.attention.causal
    exact = unscaled(precision)
    heads = shape.heads // compute.tp
    keys = rows * compute.cp
    # true if one kernel computes softmax(q k^T) v. Stretto's soft-capped scores are written out, in tiles,
    # where FlexAttention does not cap them
    capped = shape.attention.softcap is not None and compute.framework == STRETTO
    fused = compute.attention != "explicit" and (not capped or _by_flex(shape, compute, device))

    def attention(queries: int, keys: int, heads: int, causal: bool) -> float:
        return attention_seconds(
            device=device,
            batch=compute.batch,
            queries=queries,
            keys=keys,
            heads=heads,
            head_dim=shape.head_dim,
            precision=exact,
            causal=causal,
            flash=fused,
            backward=backward,
            fused_softmax=_fused_softmax(shape, compute, kernel),
        )

    if compute.cp > 1 and compute.context == "ulysses":
        seconds = attention(keys, keys, max(1, heads // compute.cp), causal)
    elif compute.cp > 1 and causal and fused:
        seconds = max(
            _ring_attention(shape=shape, compute=compute, device=device, attention=attention),
            attention(keys, keys, heads, causal) / compute.cp,
        )
    else:
        seconds = attention(rows, keys, heads, causal)
    if shape.encoder_layers:
        seconds += attention(rows, compute.of_memory.tokens // compute.batch, heads, False)
    if fused:
        seconds /= speed * (flex_speed(backward) if _by_flex(shape, compute, device) else 1.0)
    elif compute.attention != "explicit" and causal:  # tiles skip the keys that none of their queries sees
        seconds /= 2
    if shape.latent is not None:  # values are narrower than queries and keys
        seconds *= (shape.head_dim + shape.value_dim) / (2 * shape.head_dim)
    if shape.attention.window is not None:
        all_positions = AttentionShape().mean_context(keys, causal)
        seconds *= min(1.0, shape.attention.mean_context(keys, causal) / all_positions)
    return seconds


def _by_flex(shape: ModelShape, compute: ComputeConfig, device: Device) -> bool:
    """True if FlexAttention computes it: where it was asked for, and soft-capped scores on accelerators, but
    in a ring, whose rounds take other kernels. That it trains on the device is assumed.
    """
    if (
        compute.framework != STRETTO
        or chip(device) == "cpu"
        or (compute.cp > 1 and compute.context == "ring")
    ):
        return False
    capped = shape.attention.softcap is not None and not shape.dropout
    return compute.attention == "flex" or (compute.attention == "auto" and capped)


def _ring_attention(
    shape: ModelShape,
    compute: ComputeConfig,
    device: Device,
    attention: Callable[[int, int, int, bool], float],
) -> float:
    """Seconds of causal attention in a ring whose ranks hold an early and a late part of the sequence each.

    A rank attends to its own keys with a mask, and then to half of every other rank's without one; each of
    these rounds ends with a sum, rescaled in 32 bits, of its result and those before it. Shorter blocks run
    at lower rates, so that the ranks together take longer than one with the whole sequence.
    """
    rows, heads = compute.tokens // compute.batch, shape.heads // compute.tp
    rounds = compute.cp - 1
    rescaled = pass_seconds(device, "add", 3 * 4.0 * compute.tokens * heads * shape.head_dim)
    return attention(rows, rows, heads, True) + rounds * (
        attention(rows, max(1, rows // 2), heads, False) + rescaled
    )


def _between(shape: ModelShape, compute: ComputeConfig, device: Device) -> tuple[float, float]:
    """Seconds of the memory-bound operations between products, forward and backward."""
    e, h = compute.element, shape.hidden
    stream = float(e * compute.shard * h)
    moe = shape.moe
    inner = (
        shape.ffn / compute.tp
        if moe is None
        else (shape.expert_ffn * moe.top_k + moe.shared_ffn) / compute.tp
    )
    wide = e * compute.tokens * inner
    mask = compute.shard * h if shape.dropout else 0
    parts = 3 if shape.encoder_layers else 2
    norms = 4 if shape.block_norms == "sandwich" else parts
    added = parts * pass_seconds(device, "add", 3 * stream + mask)
    forward = norms * pass_seconds(device, "norm", 2 * stream) + added
    back = norms * pass_seconds(device, "norm", 3 * stream) + added
    if shape.gated:
        forward += pass_seconds(device, "gated", 3 * wide)
        back += pass_seconds(device, "gated", 5 * wide)
    else:
        forward += pass_seconds(device, "gelu", 2 * wide)
        back += pass_seconds(device, "gelu", 3 * wide)
    if shape.rotary:
        turned = e * compute.tokens * (shape.attention_width + shape.kv_width) / compute.tp
        forward += pass_seconds(device, "rope", 2 * turned)
        back += pass_seconds(device, "rope", 2 * turned)
    return forward, back


def _head(
    shape: ModelShape,
    compute: ComputeConfig,
    device: Device,
    precision: Precision,
    passes: float,
    loss: float,
) -> KernelTimes:
    exact = unscaled(precision)
    n, k = compute.vocabulary_rows(shape), shape.hidden
    chunk = compute.loss_chunk_tokens(shape)
    times = compute.tokens / (chunk or compute.tokens)
    forward, back, weight = (
        times * seconds for seconds in _products(device, [(n, k)], chunk or compute.tokens, exact)
    )
    logits = float(compute.tokens * n)
    stream = float(compute.element * compute.shard * k)
    # cast to 32 bits; maximum, sum of exponentials and target; then the gradient, cast to 16 bits
    passed = pass_seconds(device, "loss", (compute.element + 4) * logits) + 2 * pass_seconds(
        device, "loss", 4 * logits
    )
    passed_back = pass_seconds(device, "loss", (8 + compute.element) * logits)
    norm = pass_seconds(device, "norm", 2 * stream)
    if shape.logit_softcap:  # quotient, tanh and product; in the backward the product and tanh's derivative
        passed += 3 * pass_seconds(device, "loss", 2 * compute.element * logits)
        passed_back += pass_seconds(device, "loss", 5 * compute.element * logits)
    if chunk:  # all in the backward; each chunk but the first reads the gradient of the weight again
        again = (times - 1) * pass_seconds(device, "reduce", 8.0 * n * k)
        return KernelTimes(
            forward=passes * norm,
            back=forward + back + weight + again + loss * (passed + passed_back) + passes * 1.5 * norm,
            weight=0.0,
            kernels=_KERNELS["head"],
        )
    return KernelTimes(
        forward=forward + loss * passed + passes * norm,
        back=back + loss * passed_back + passes * 1.5 * norm,
        weight=weight,
        products=back,
        kernels=_KERNELS["head"],
    )


def _embed(shape: ModelShape, compute: ComputeConfig, device: Device) -> KernelTimes:
    size = float(compute.element * compute.tokens * shape.hidden)
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


def kernel_times_of(
    shape: ModelShape,
    kind: str,
    compute: ComputeConfig,
    device: Device,
    precision: Precision,
    software: SoftwareAssumptions,
) -> KernelTimes:
    """The kernels of a layer under a software profile. Measured devices were measured within a program, so
    that only the choice of attention kernel is left to the profile.
    """
    measured = bool(device.kernels)
    return kernel_times(
        shape=shape,
        kind=kind,
        compute=compute,
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
