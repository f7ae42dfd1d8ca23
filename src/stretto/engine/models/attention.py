"""Causal attention from queries, keys and values; what comes before and after belongs to the model."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def dropout(probability: float) -> nn.Module:
    """Dropout where there is any, else nothing."""
    return nn.Dropout(probability) if probability > 0.0 else nn.Identity()


def split_heads(qkv: Tensor, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut features [b, s, (heads + 2 kv_heads) head_dim], ordered [q; k; v], into heads.

    Returns q [b, heads, s, head_dim], and k and v [b, kv_heads, s, head_dim].
    """
    widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    q, k, v = (part.unflatten(-1, (-1, head_dim)).transpose(1, 2) for part in qkv.split(widths, dim=-1))
    return q, k, v


def merge_heads(x: Tensor) -> Tensor:
    """[b, heads, s, head_dim] to [b, s, heads head_dim]."""
    return x.transpose(1, 2).flatten(2)


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v, where a position sees itself and what came before it.

    The fused kernels keep no probabilities, and draw their dropout inside, where no other layout could repeat
    it: with dropout, or where `explicit` asks for it, the probabilities are formed.
    """

    def __init__(self, probability: float, explicit: bool = False) -> None:
        super().__init__()
        self.drop = dropout(probability)
        self.explicit = explicit

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b, heads, s, d], k and v [b, kv_heads, s, d] to [b, heads, s, d].

        Query head i uses key head i // (heads / kv_heads) (Ainslie et al. 2023, section 2.2).
        """
        dropping = self.training and not isinstance(self.drop, nn.Identity)
        if self.explicit or dropping:
            return weigh(self.drop(causal_probabilities(q, k)), v)
        grouped = k.shape[1] < q.shape[1]
        q, v = by_position(q), of_its_own(v, q)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def make_explicit(model: nn.Module) -> None:
    """Let all attention in `model` form its probabilities, as the published memory formulas count it."""
    for module in model.modules():
        if isinstance(module, CausalAttention):
            module.explicit = True


def causal_probabilities(q: Tensor, k: Tensor) -> Tensor:
    """Attention probabilities [b, heads, s, s] of q [b, heads, s, d] and k [b, kv_heads, s, d]."""
    scores = _by_key_head(q, k) @ k.contiguous().transpose(-2, -1)
    return cast(Tensor, _CausalSoftmax.apply(scores.view(*q.shape[:-1], k.shape[-2]), q.shape[-1] ** -0.5))


def weigh(probabilities: Tensor, v: Tensor) -> Tensor:
    """Sums [b, heads, s, d] of values [b, kv_heads, s, d], weighted by probabilities [b, heads, s, s]."""
    sums = _by_key_head(probabilities, v) @ v.contiguous()
    return sums.view(*probabilities.shape[:-1], v.shape[-1])


def by_position(q: Tensor) -> Tensor:
    """q [b, heads, s, d] in memory by position, then head: the fused kernels give their result, which they
    keep, the order of q, and `merge_heads` then need not copy it.
    """
    return q if q.stride(1) <= q.stride(2) else q.transpose(1, 2).contiguous().transpose(1, 2)


def of_its_own(v: Tensor, q: Tensor) -> Tensor:
    """v in memory that the backward can keep alone: rotary queries and keys have left the fused product of
    all three, which a view of it would hold as a whole.
    """
    if torch.compiler.is_compiling():  # what is kept is the compiler's choice
        return v
    alone = v.untyped_storage()._cdata != q.untyped_storage()._cdata
    return v.contiguous() if alone and v.requires_grad else v


def _by_key_head(x: Tensor, k: Tensor) -> Tensor:
    """[b, heads, s, n] to [b, kv_heads, r, n]: rows of all heads that share a key head, head by head."""
    return x.contiguous().view(x.shape[0], k.shape[1], -1, x.shape[-1])


class _CausalSoftmax(torch.autograd.Function):
    """softmax(scale * scores) [..., s, s] over what is not later; keeps its result for the backward, in the
    scores' type, and nothing else.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: float) -> Tensor:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        exact = torch.float64 if scores.dtype == torch.float64 else torch.float32
        scaled = scores * scale if scores.dtype == exact else scores.to(exact).mul_(scale)
        scaled.masked_fill_(later, float("-inf"))
        probabilities = scaled.softmax(-1)
        del scaled
        ctx.scale = scale
        ctx.save_for_backward(probabilities := probabilities.to(scores.dtype))
        return probabilities

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (p,) = ctx.saved_tensors
        weighted = grads[0] * p
        return weighted.sub_(p * weighted.sum(-1, keepdim=True)).mul_(ctx.scale), None
