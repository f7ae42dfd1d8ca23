"""The kernels of a layer: how long one rank computes for one microbatch, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import fsum

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
# more with experts: scores, top-k, sorting, permuting and two exchanges; assumed
_EXPERTS = 80
# more for each expert, whose two linears have a product each in Transformer Engine
# (2.9, pytorch/module/grouped_linear.py), and in 8 bits with current scaling six kernels for maximum, scale
# and cast of its rows and of its weights; two more are assumed for what Python does for each weight
_PRODUCTS, _CASTS = 2, 14
# Bytes of an element of the experts' outputs that their biases move, forward and backward: a product with the
# token's probability in 32 bits, a sum, and a cast of all experts' together; backward a cast, and a product
# and a sum for each factor (Megatron-LM of 2025, core/transformer/moe/experts.py, `TEGroupedMLP._apply_bias`)
_BIASED = 28.0, 40.0
# more with dropout in stored scores, which has a generator of its own (megatron/mpu/random.py, fork)
_FORKED = 4
_ADAPTER = 4  # more of each low-rank adapter: dropout, two products, and the sum
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


# kernels alone, each as fast as the constants of `time.operators` say
IDEAL = SoftwareAssumptions(imbalance=1.0, grouped=1.0)


@lru_cache(maxsize=4096)
def kernel_times(
    shape: ModelShape,
    kind: str,
    compute: ComputeConfig,
    device: Device,
    precision: Precision,
    software: SoftwareAssumptions = IDEAL,
) -> KernelTimes:
    """The kernels of a layer under a software profile: `kind` is that of `job.chain`. Measured devices were
    measured within a program, so that only the choice of attention kernel is left to the profile.
    """
    layer = _LayerKernels(shape, compute, device, precision, software)
    kinds = {"block": layer.block, "head": layer.head, "between": layer.between, "embed": layer.embed}
    times, alone = kinds[kind](), 1.0 if device.kernels else software.slower(device)
    return times if alone == 1.0 else times.scaled(alone)


def kernels_back(work: KernelTimes) -> float:
    """Number of kernels that a backward launches."""
    return _BACK * work.kernels


@lru_cache(maxsize=4096)
def attention_linears(shape: ModelShape, tp: int) -> tuple[tuple[int, int], ...]:
    """(output, input) features on one of `tp` ranks of the linears around attention. Projections down to
    latent vectors are whole on every rank.
    """
    linears: list[tuple[int, int]] = []
    for name, sizes in block_shapes(shape).items():
        # keys and values of cross-attention are of the memory's tokens
        around = name.startswith(("attn.", "cross.")) and not name.startswith("cross.kv")
        if around and len(sizes) == 2 and not is_adapter(name):
            rows, columns = sizes
            if name.startswith(("attn.proj", "cross.proj")):
                columns //= tp
            elif "_down" not in name:
                rows //= tp
            linears.append((rows, columns))
    return tuple(linears)


Seconds = tuple[float, float, float]  # of forward, input gradient and weight gradient
Linears = tuple[tuple[int, int], ...]  # (output, input) features of each


@lru_cache(maxsize=16384)
def _products(
    device: Device, linears: Linears, tokens: int, precision: Precision, batch: int, casts: float
) -> Seconds:
    def product(m: int, n: int, k: int) -> float:
        return matmul_seconds(device=device, m=m, n=n, k=k, precision=precision, batch=batch, casts=casts)

    forward = back = weight = 0.0
    for n, k in linears:
        slower = 1.0 / alignment(device, precision, n, k)
        forward += slower * product(tokens, n, k)
        back += slower * product(tokens, k, n)
        weight += slower * product(n, k, tokens)
    return forward, back, weight


class _LayerKernels:
    """The kernels of one layer on one rank."""

    def __init__(
        self,
        shape: ModelShape,
        compute: ComputeConfig,
        device: Device,
        precision: Precision,
        software: SoftwareAssumptions,
    ) -> None:
        self.shape = shape
        self.compute = compute
        self.device = device
        self.precision: Precision = precision
        self.exact: Precision = unscaled(precision)
        self.software = software
        self.passes, self.loss = (1.0, 1.0) if device.kernels else (software.passes, software.loss)
        self.stream = float(compute.element * compute.shard * shape.hidden)
        # softmax of stored scores is one kernel with scale and mask
        matrices = compute.batch * shape.heads // compute.tp
        self.fused_softmax = compute.attention != "explicit" or (
            software.softmax and matrices % _MATRICES == 0
        )
        # FlexAttention computes attention if it was asked for, and soft-capped scores on accelerators, except
        # in a ring, whose rounds take other kernels. That it trains on the device is assumed
        ring = compute.cp > 1 and compute.context == "ring"
        capped = shape.attention.softcap is not None
        wanted = compute.attention == "flex"
        wanted = wanted or (compute.attention == "auto" and capped and not shape.dropout)
        self.flex = wanted and compute.framework == STRETTO and chip(device) != "cpu" and not ring
        # one kernel computes softmax(q k^T) v. Stretto's soft-capped scores are written out, in tiles, if
        # FlexAttention does not cap them
        self.fused = compute.attention != "explicit" and (
            not (capped and compute.framework == STRETTO) or self.flex
        )

    def products(
        self,
        linears: Linears,
        tokens: int,
        precision: Precision,
        batch: int = 1,
        casts: float = 1.0,
        trained: bool | None = None,
    ) -> Seconds:
        """Linears with these (output, input) features, `batch` of each in one call. Beside adapters, linears
        are frozen and have no gradients of weights.
        """
        trained = self.shape.lora is None if trained is None else trained

        forward, back, weight = _products(
            self.device, linears, tokens, precision=precision, batch=batch, casts=casts
        )
        if (
            trained and self.software.serial
        ):  # the sum is read and written, in 32 bits if it persists beside .grad
            size = 10.0 if self.compute.framework.lasting_gradients else 6.0
            weight += pass_seconds(self.device, "add", size * batch * sum(n * k for n, k in linears))
        return forward, back, weight if trained else 0.0

    def linears(self, linears: Linears, tokens: int) -> Seconds:
        """Linears whose inputs norms and activations cast to 8 bits, as far as the software does."""
        return self.products(linears, tokens, self.precision, casts=self.software.casts)

    def adapters(self) -> list[Seconds]:
        """Low-rank adapters, each of two narrow products and of a pass that adds their result to that of the
        linear, or the gradient of their input to its.
        """
        shape, compute = self.shape, self.compute
        each = list[Seconds]()

        def added(width: int) -> float:
            return pass_seconds(self.device, "add", 3.0 * compute.element * compute.tokens * width)

        shapes = {} if shape.lora is None else block_shapes(shape)
        for name in (name for name in shapes if name.endswith(".A.weight")):
            module, (rank, inputs) = name.partition(".lora.")[0], shapes[name]
            outputs = shapes[name.removesuffix("A.weight") + "B.weight"][0]
            if module.endswith((".proj", ".down")):
                inputs //= compute.tp
            elif "_down" not in module:
                outputs //= compute.tp
            narrow = (rank, inputs), (outputs, rank)
            forward, back, weight = self.products(narrow, compute.tokens, self.exact, trained=True)
            each.append((forward + added(outputs), back + added(inputs), weight))
        return each

    def block(self) -> KernelTimes:
        shape, compute = self.shape, self.compute
        adapters = self.adapters()
        parts = [self.linears(attention_linears(shape, compute.tp), compute.tokens), self.mlp(), *adapters]
        if shape.encoder_layers:  # keys and values of the encoder's tokens
            keys_and_values = 2 * compute.kv_heads(shape) * shape.head_dim, shape.hidden
            parts.append(self.linears((keys_and_values,), compute.for_memory.tokens))
        forward, back, weight = (fsum(part[index] for part in parts) for index in range(3))
        core, core_back = self.core(backward=False), self.core(backward=True)
        passes, passes_back = (self.passes * seconds for seconds in self.block_passes())
        explicit = compute.attention == "explicit"
        return KernelTimes(
            forward=forward + core + passes,
            back=back + core_back + passes_back,
            weight=weight,
            core=core,
            core_back=core_back,
            products=back,
            kernels=_KERNELS["block"]
            + _ADAPTER * len(adapters)
            + (_UNFUSED if explicit else 0)
            + (0 if self.fused_softmax else _UNFUSED_SOFTMAX)
            + (_FORKED if explicit and shape.dropout else 0)
            + self.expert_kernels
            + (_CROSS if shape.encoder_layers else 0)
            + (_ROUND * (compute.cp - 1) if compute.context == "ring" else 0),
        )

    @property
    def expert_kernels(self) -> int:
        """Kernels that a forward launches for routing, and for the casts and products of each expert."""
        moe, scaled = self.shape.moe, self.precision != self.exact
        experts = 0 if moe is None else max(1, moe.experts // self.compute.ep)
        each = _PRODUCTS + (_CASTS if scaled else 0)
        return (_EXPERTS if experts else 0) + each * experts

    def mlp(self) -> Seconds:
        """The MLP's products; of a mixture of experts on the rank with the most tokens."""
        shape = self.shape
        compute = self.compute
        moe = self.shape.moe
        up = 2 if shape.gated else 1

        def dense(ffn: int, ranks: int) -> Linears:
            return (up * ffn // ranks, shape.hidden), (shape.hidden, ffn // ranks)

        if moe is None:
            return self.linears(dense(shape.ffn, compute.tp), compute.tokens)
        slices, local_experts = compute.expert_shards, max(1, moe.experts // compute.ep)
        rows = -(-compute.tokens * moe.top_k * slices // (compute.tp * local_experts))
        # rows of experts are cast expert by expert, in kernels of their own
        routed = self.products(dense(shape.expert_ffn, slices), rows, self.precision, local_experts)
        imbalance = self.software.imbalance / self.software.grouped
        products = [tuple(imbalance * seconds for seconds in routed)]
        if moe.shared_ffn:
            products.append(self.linears(dense(moe.shared_ffn, compute.tp), compute.tokens))
        products.append(self.products(((moe.experts, shape.hidden),), compute.shard, self.exact))
        # tokens are sorted by expert, gathered, and put back in order
        moved = compute.element * compute.tokens * moe.top_k * shape.hidden * slices / compute.tp
        passes = passes_back = 4 * pass_seconds(self.device, "copy", 2 * moved)
        if shape.bias:  # of each expert, added beside the products in 32 bits
            passes += pass_seconds(self.device, "add", _BIASED[0] * moved / compute.element)
            passes_back += pass_seconds(self.device, "add", _BIASED[1] * moved / compute.element)
        forward, back, weight = (fsum(product[index] for product in products) for index in range(3))
        return forward + passes, back + passes_back, weight

    def core(self, backward: bool) -> float:
        """softmax(q k^T) v on one rank, or its backward; never in 8 bits."""
        shape, compute = self.shape, self.compute
        rows, heads = compute.tokens // compute.batch, shape.heads // compute.tp
        keys, causal = rows * compute.cp, self.software.causal and shape.attention.causal

        def attention(queries: int, keys: int, heads: int, causal: bool) -> float:
            return attention_seconds(
                device=self.device,
                batch=compute.batch,
                queries=queries,
                keys=keys,
                heads=heads,
                head_dim=shape.head_dim,
                precision=self.exact,
                causal=causal,
                flash=self.fused,
                backward=backward,
                fused_softmax=self.fused_softmax,
            )

        if compute.cp > 1 and compute.context == "ulysses":
            seconds = attention(keys, keys, max(1, heads // compute.cp), causal)
        elif compute.cp > 1 and causal and self.fused:
            # in a ring whose ranks hold an early and a late part of the sequence each, a rank attends to its
            # own keys with a mask, and then to half of every other rank's without one; each of these rounds
            # ends with a sum, rescaled in 32 bits, of its result and those before it. Shorter blocks run at
            # lower rates, so that the ranks together take longer than one with the whole sequence
            rescaled = pass_seconds(self.device, "add", 3 * 4.0 * compute.tokens * heads * shape.head_dim)
            ring = attention(rows, rows, heads, True) + (compute.cp - 1) * (
                attention(rows, max(1, rows // 2), heads, False) + rescaled
            )
            seconds = max(ring, attention(keys, keys, heads, causal) / compute.cp)
        else:
            seconds = attention(rows, keys, heads, causal)
        if shape.encoder_layers:
            seconds += attention(rows, compute.for_memory.tokens // compute.batch, heads, False)
        if self.fused:
            seconds /= self.software.fused(self.device) * (flex_speed(backward) if self.flex else 1.0)
        elif compute.attention != "explicit" and causal:  # tiles skip the keys that none of their queries see
            seconds /= 2
        if shape.latent is not None:  # values are narrower than queries and keys
            seconds *= (shape.head_dim + shape.value_dim) / (2 * shape.head_dim)
        if shape.attention.window is not None:
            all_positions = AttentionShape().mean_context(keys, causal)
            seconds *= min(1.0, shape.attention.mean_context(keys, causal) / all_positions)
        return seconds

    def block_passes(self) -> tuple[float, float]:
        """The memory-bound operations between a block's products, forward and backward."""
        shape = self.shape
        compute = self.compute
        device = self.device
        stream = self.stream
        e, moe = compute.element, self.shape.moe
        inner = (
            shape.ffn / compute.tp
            if moe is None
            else (shape.expert_ffn * moe.top_k + moe.shared_ffn) / compute.tp
        )
        wide = e * compute.tokens * inner
        mask = compute.shard * shape.hidden if shape.dropout else 0
        branches = 3 if shape.encoder_layers else 2
        norms = 4 if shape.block_norms == "sandwich" else branches
        added = branches * pass_seconds(device, "add", 3 * stream + mask)
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

    def head(self) -> KernelTimes:
        shape = self.shape
        compute = self.compute
        device = self.device
        n = compute.vocabulary_rows(shape)
        k = shape.hidden
        chunk = compute.loss_chunk_tokens(shape)
        times = compute.tokens / (chunk or compute.tokens)
        products = self.products(((n, k),), chunk or compute.tokens, self.exact)
        forward, back, weight = (times * seconds for seconds in products)
        logits = float(compute.tokens * n)
        # cast to 32 bits; maximum, sum of exponentials and target; then the gradient, cast to 16 bits
        loss = pass_seconds(device, "loss", (compute.element + 4) * logits)
        loss += 2 * pass_seconds(device, "loss", 4 * logits)
        loss_back = pass_seconds(device, "loss", (8 + compute.element) * logits)
        norm = pass_seconds(device, "norm", 2 * self.stream)
        if shape.logit_softcap:  # quotient, tanh and product; in the backward product and derivative
            loss += 3 * pass_seconds(device, "loss", 2 * compute.element * logits)
            loss_back += pass_seconds(device, "loss", 5 * compute.element * logits)
        if chunk:  # all in the backward; each chunk but the first reads the gradient of the weight again
            again = (times - 1) * pass_seconds(device, "reduce", 8.0 * n * k) if weight else 0.0
            back = forward + back + weight + again + self.loss * (loss + loss_back) + self.passes * 1.5 * norm
            return KernelTimes(forward=self.passes * norm, back=back, weight=0.0, kernels=_KERNELS["head"])
        return KernelTimes(
            forward=forward + self.loss * loss + self.passes * norm,
            back=back + self.loss * loss_back + self.passes * 1.5 * norm,
            weight=weight,
            products=back,
            kernels=_KERNELS["head"],
        )

    def embed(self) -> KernelTimes:
        size = float(self.compute.element * self.compute.tokens * self.shape.hidden)
        forward = pass_seconds(self.device, "embedding", 2 * size)
        if self.shape.dropout:
            forward += pass_seconds(self.device, "dropout", 2 * size)
        weight = 2 * pass_seconds(self.device, "embedding", 2 * size) if self.shape.lora is None else 0.0
        return KernelTimes(forward=forward, back=0.0, weight=weight, kernels=_KERNELS["embed"])

    def between(self) -> KernelTimes:
        """The encoder's last norm, and the embedding of the decoder's tokens."""
        embedding, tokens = self.embed(), self.compute.for_memory.shard
        stream = float(self.compute.element * tokens * self.shape.hidden) * self.shape.last_norm
        return replace(
            embedding,
            forward=embedding.forward + self.passes * pass_seconds(self.device, "norm", 2 * stream),
            back=self.passes * pass_seconds(self.device, "norm", 3 * stream),
            kernels=_KERNELS["between"],
        )
