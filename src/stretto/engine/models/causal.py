"""Causal attention, softmax(q k^T) v, for all model families: windows, soft-capped scores, sinks."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from stretto.engine import flex
from stretto.engine.device import on_accelerator
from stretto.engine.documents import DocumentStarts, Packing
from stretto.engine.kernels import (
    Band,
    MemoryEfficient,
    NaiveAttention,
    ScoreOptions,
    add_sinks,
    kernel_for,
    rows,
    sinks_gradient,
)
from stretto.job.attention import AttentionKernel


def dropout(probability: float) -> nn.Module:
    """Return dropout, or the identity if its probability is 0."""
    return nn.Dropout(probability) if probability > 0.0 else nn.Identity()


class CausalAttention(nn.Module):
    """softmax(scale q k^T) v, in which a position attends to itself and to earlier positions.

    The fused kernels do not store probabilities, and draw dropout masks that no other layout could repeat.
    With dropout, or if `explicit`, the probabilities are therefore stored.

    Args:
        probability: probability of dropping an attention probability in training.
        explicit: store the probabilities, as the published memory formulas assume.
        window: number of positions that a query attends to, including its own; by default all (Beltagy et al.
            2020, Longformer, section 3.1).
        softcap: scores become softcap tanh(scores / softcap) (Gemma 2, section 2; Bello et al. 2016, section
            5.1); by default they are not capped.
        scale: factor of the scores; by default 1 / sqrt(d).

    Attributes:
        packing: documents of the samples; a position attends only to its own document.
        kernel: training kernel if probabilities are not stored: "sdpa", torch's fused kernels, with the
            formula in tiles for cases that none of them supports; "flex", FlexAttention; "auto",
            FlexAttention instead of the tiles, on accelerators on which it trains.
    """

    def __init__(
        self,
        probability: float,
        explicit: bool = False,
        *,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.drop = dropout(probability)
        self.explicit = explicit
        self.window = window
        self.softcap = softcap
        self.scale = scale
        self.packing = Packing()
        self.kernel: AttentionKernel = "auto"

    def extra_repr(self) -> str:
        options = {"window": self.window, "softcap": self.softcap, "scale": self.scale}
        return ", ".join(f"{name}={value:g}" for name, value in options.items() if value is not None)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attend with q [b, heads, n, d] to k [b, kv_heads, m, d] and v [b, kv_heads, m, dv].

        The queries are at the last n of the m positions. Query head i uses key head i // (heads / kv_heads)
        (Ainslie et al. 2023, section 2.2). Returns [b, heads, n, dv].

        Args:
            sinks: [heads], an additional score in each softmax, whose value vector is zero (Xiao et al. 2023,
                section 3.2, "learnable sink token"; gpt-oss).
        """
        dropping = self.training and not isinstance(self.drop, nn.Identity)
        scores = self.scores(q.shape[-1])
        documents = self.packing.documents
        if self.explicit or dropping:
            different_documents = None if documents is None else documents.differ(q.shape[2], q.device)
            return weigh(self.drop(causal_probabilities(q, k, scores, sinks, different_documents)), v)
        if self._by_flex(q, k, v, sinks):
            return _by_flex(q, k, v, sinks, scores=scores, documents=documents)
        if documents is not None:
            return _attend(q, k, v, sinks, scores=scores, documents=documents)
        n, m = q.shape[2], k.shape[2]
        causal = n == m and (self.window is None or self.window >= m)
        narrow = v.shape[-1] != q.shape[-1] and q.device.type == "cpu"  # torch's fused kernel takes no such v
        if not causal or self.softcap is not None or sinks is not None or narrow:
            return _attend(q, k, v, sinks, scores=scores)
        return sdpa(by_position(q), k, separate(v, q), scale=scores.scale, causal=True)

    def _by_flex(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> bool:
        """True if FlexAttention computes this; only in training, since it is compiled for each shape and
        prompts vary in length.

        Raises:
            StrettoError: the configured kernel is FlexAttention, which does not train on this device.
        """
        if self.kernel not in ("auto", "flex") or not self.training or q.shape[2] != k.shape[2]:
            return False
        if self.kernel == "auto":
            able = on_accelerator(q.device) and not torch.compiler.is_compiling()
            if not able or not self._written_out(q, v, sinks):
                return False
        group = q.shape[1] // k.shape[1]
        refusal = flex.refusal(q.device, q.dtype, group=group, d=q.shape[-1], dv=v.shape[-1])
        if refusal is not None and self.kernel == "flex":
            raise flex.does_not_train(q.device, refusal)
        return refusal is None

    def _written_out(self, q: Tensor, v: Tensor, sinks: Tensor | None) -> bool:
        """True if this attention is computed by the formula in tiles, or by one kernel call per document."""
        scores = self.scores(q.shape[-1])
        narrowed = scores.window is not None and scores.window < q.shape[2]
        different_documents = narrowed or self.packing.documents is not None
        if scores.softcap is None and sinks is None and not different_documents:
            return False
        kernel = kernel_for(q, v, scores)
        return isinstance(kernel, NaiveAttention) or (
            different_documents and isinstance(kernel, MemoryEfficient)
        )

    def scores(self, d: int) -> ScoreOptions:
        """Return the scale, cap and window of the scores, for keys of d features."""
        return ScoreOptions(d**-0.5 if self.scale is None else self.scale, self.softcap, self.window)


def choose_kernel(model: nn.Module, kernel: AttentionKernel) -> None:
    """Set the kernel of all attention in `model`; "explicit" stores the probabilities, as the published
    memory formulas assume.
    """
    for module in model.modules():
        if isinstance(getattr(module, "explicit", None), bool):
            cast(Any, module).explicit = kernel == "explicit"
        if isinstance(module, CausalAttention):
            module.kernel = kernel


def causal_probabilities(
    q: Tensor,
    k: Tensor,
    scores: ScoreOptions,
    sinks: Tensor | None = None,
    different_documents: Tensor | None = None,
) -> Tensor:
    """Return the attention probabilities [b, heads, n, m] of q [b, heads, n, d] and k [b, kv_heads, m, d].

    Args:
        different_documents: bool, broadcastable to the result; True hides a key, in addition to causality and
            window.
    """
    products = (_by_key_head(q, k) @ k.contiguous().transpose(-2, -1)).view(*q.shape[:-1], k.shape[-2])
    scale = scores.scale
    if scores.softcap is not None:
        products, scale = torch.tanh(products * (scale / scores.softcap)), scores.softcap
    return cast(Tensor, _CausalSoftmax.apply(products, scale, scores.window, sinks, different_documents))


def weigh(probabilities: Tensor, v: Tensor) -> Tensor:
    """Weight values [b, kv_heads, m, d] by probabilities [b, heads, n, m] and sum; return [b, heads, n,
    d].
    """
    sums = _by_key_head(probabilities, v) @ v.contiguous()
    return sums.view(*probabilities.shape[:-1], v.shape[-1])


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
) -> Tensor:
    """Call torch's scaled_dot_product_attention with q [b, heads, n, d], k [b, kv_heads, m, d] and
    v [b, kv_heads, m, dv]; return [b, heads, n, dv].

    Grouped key heads are repeated if torch would otherwise store all scores: the memory-efficient CUDA
    kernel, which float32 and masks need, and all fused AMD kernels lack grouped heads.
    """
    call: dict[str, Any] = {"attn_mask": mask, "is_causal": causal, "scale": scale}
    grouped = k.shape[1] < q.shape[1]
    if grouped and not torch.compiler.is_compiling() and not _is_fused(q, k, v, call, grouped):
        wide_k, wide_v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        if _is_fused(q, wide_k, wide_v, call, grouped=False):
            k, v = wide_k, wide_v
            grouped = False
    return F.scaled_dot_product_attention(q, k, v, **call, enable_gqa=grouped)


def _is_fused(q: Tensor, k: Tensor, v: Tensor, call: dict[str, Any], grouped: bool) -> bool:
    """True if torch would choose a fused kernel for this call."""
    choice = torch._fused_sdp_choice(q, k, v, **call, enable_gqa=grouped)
    return SDPBackend(choice) != SDPBackend.MATH


def by_position(q: Tensor) -> Tensor:
    """Return q [b, heads, s, d] with positions outermost in memory.

    The fused kernels save their result in the layout of q, so `merge_heads` then need not copy it.
    """
    return q if q.stride(1) <= q.stride(2) else q.transpose(1, 2).contiguous().transpose(1, 2)


def separate(v: Tensor, q: Tensor) -> Tensor:
    """Return v, copied if it alone would keep the fused qkv product alive for the backward.

    Rotary queries and keys are new tensors; v is a view of the product.
    """
    if torch.compiler.is_compiling():  # the compiler decides what is saved
        return v
    alone = v.untyped_storage()._cdata != q.untyped_storage()._cdata
    return v.contiguous() if alone and v.requires_grad else v


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *,
    scores: ScoreOptions,
    documents: DocumentStarts | None = None,
) -> Tensor:
    """Compute `CausalAttention` without the keys that are outside the window of every query."""
    first = 0 if scores.window is None else max(0, k.shape[2] - q.shape[2] - scores.window + 1)
    if first:
        k, v = k[:, :, first:], v[:, :, first:]
    kind = q.device.type
    if not torch.is_autocast_enabled(kind):
        return cast(Tensor, _Attention.apply(q, k, separate(v, q), sinks, scores, documents))
    q, k, v = (t.to(torch.get_autocast_dtype(kind)) for t in (q, k, v))
    with torch.autocast(kind, enabled=False):
        return cast(Tensor, _Attention.apply(q, k, v, sinks, scores, documents))


def _by_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *,
    scores: ScoreOptions,
    documents: DocumentStarts | None,
) -> Tensor:
    """Compute `CausalAttention` with FlexAttention."""
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        q, k, v = (t.to(torch.get_autocast_dtype(kind)) for t in (q, k, v))
    q, v = by_position(rows(q)), separate(rows(v), q)
    with torch.autocast(kind, enabled=False):
        return flex.attend(q, rows(k), v, scores, sinks=sinks, documents=documents)


class _Attention(torch.autograd.Function):
    """Causal attention by a kernel; saves q, k, v, the output, and the log-sum-exp of the scores."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        scores: ScoreOptions,
        documents: DocumentStarts | None,
    ) -> Tensor:
        ctx.scores, ctx.documents = scores, documents
        q = by_position(rows(q))
        k, v = rows(k), rows(v)
        kernel = kernel_for(q, v, scores)
        if documents is None:
            y, lse = kernel.forward(q, k, v, _band(q, k, scores))
        else:
            y, lse = documents.forward(kernel, q, k, v, scores.window)
        if sinks is not None:
            y, lse = add_sinks(y, lse, sinks)
        y = by_position(y.to(q.dtype))
        ctx.save_for_backward(q, k, v, y, lse, sinks)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        q, k, v, y, lse, sinks = ctx.saved_tensors
        scores, documents = ctx.scores, ctx.documents
        kernel, dy = kernel_for(q, v, scores), rows(grads[0])
        tensors = {"dy": dy, "q": q, "k": k, "v": v, "y": y, "lse": lse}
        if documents is None:
            dq, dk, dv = kernel.backward(**tensors, band=_band(q, k, scores))
        else:
            dq, dk, dv = documents.backward(kernel, **tensors, window=scores.window)
        d_sinks = sinks_gradient(dy, y, lse, sinks) if ctx.needs_input_grad[3] else None
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None, None


def _band(q: Tensor, k: Tensor, scores: ScoreOptions) -> Band:
    return Band(k.shape[2] - q.shape[2], scores.window)


def _by_key_head(x: Tensor, k: Tensor) -> Tensor:
    """View [b, heads, s, n] as [b, kv_heads, heads / kv_heads s, n]: the rows of all heads of a key head."""
    return x.contiguous().view(x.shape[0], k.shape[1], -1, x.shape[-1])


class _CausalSoftmax(torch.autograd.Function):
    """Causal softmax(scale * scores) [b, heads, n, m] with sinks; saves only its result for the backward, in
    the scores' type, and the sinks' probabilities.
    """

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        scale: float,
        window: int | None,
        sinks: Tensor | None,
        different_documents: Tensor | None,
    ) -> Tensor:
        n, m = scores.shape[-2:]
        hidden = Band(m - n, window).mask(n, m, scores.device).logical_not_()
        if different_documents is not None:
            hidden = hidden | different_documents
        exact = torch.float64 if scores.dtype == torch.float64 else torch.float32
        scaled = scores * scale if scores.dtype == exact else scores.to(exact).mul_(scale)
        scaled.masked_fill_(hidden, float("-inf"))
        if sinks is None:
            probabilities, sink_probabilities = scaled.softmax(-1), None
        else:
            sink = sinks.to(exact).view(-1, 1).expand(scaled.shape[:-1])
            total = torch.logaddexp(scaled.logsumexp(-1), sink)
            probabilities, sink_probabilities = scaled.sub_(total.unsqueeze(-1)).exp_(), (sink - total).exp_()
        del scaled
        ctx.scale = scale
        ctx.save_for_backward(probabilities := probabilities.to(scores.dtype), sink_probabilities, sinks)
        return probabilities

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        p, sink_probabilities, sinks = ctx.saved_tensors
        weighted = grads[0] * p
        through = weighted.sum(-1, keepdim=True)
        d_sinks = (
            None
            if sinks is None
            else (sink_probabilities * through.squeeze(-1)).sum((0, 2)).neg_().to(sinks.dtype)
        )
        return weighted.sub_(p * through).mul_(ctx.scale), None, None, d_sinks, None
