"""Causal self-attention: the linears around it, rotary positions (Su et al. 2021, RoFormer, section 3.2), and
softmax(q k^T / sqrt(d)) v.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.spec.shape import ModelShape


class Rotary(nn.Module):
    """Rotates the pairs of features (i, i + d/2), the half-split order of published Llama weights, by angles
    that grow with the position.

    Holds no tensors: its tables are made at first use, so it needs no care when a model leaves the meta
    device.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.positions: Tensor | None = None  # of the s rows, int64; None: 0 to s - 1
        self._rows: tuple[object, tuple[Tensor, Tensor]] | None = None  # of the tables, at `positions`

    def forward(self, x: Tensor) -> Tensor:
        """x [b, heads, s, head_dim], rotated by its positions."""
        at = self.positions
        cos, sin = _tables_for(x, self.theta) if at is None else self._tables_at(x, at)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _tables_at(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The tables' rows at these positions."""
        key = (id(positions), x.dtype, x.device)
        if self._rows is None or self._rows[0] != key:
            length = int(positions.max()) + 1
            cos, sin = _cached_tables(length, self.head_dim, self.theta, x.device, x.dtype)
            self._rows = key, (cos[positions], sin[positions])
        return self._rows[1]


def rotary_tables(
    length: int, head_dim: int, theta: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i / head_dim), each [length, head_dim / 2], rounded to `dtype` only
    at the end.
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    with torch.inference_mode(False), torch.no_grad():
        even = torch.arange(0, head_dim, 2, device=device, dtype=exact)
        positions = torch.arange(length, device=device, dtype=exact)
        angles = torch.outer(positions, 1.0 / theta ** (even / head_dim))
        return angles.cos().to(dtype), angles.sin().to(dtype)


_cached_tables = lru_cache(maxsize=8)(rotary_tables)  # all layers of a model share one entry


def _tables_for(x: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    """The tables for x; cached between calls unless x is a traced or fake tensor."""
    length, head_dim = x.shape[-2:]
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return rotary_tables(length, head_dim, theta, x.device, x.dtype)
    rows = 1 << (length - 1).bit_length()  # a power of two, so that generation needs no new table each token
    cos, sin = _cached_tables(rows, head_dim, theta, x.device, x.dtype)
    return cos[:length], sin[:length]


def dropout(probability: float) -> nn.Module:
    """Dropout, or the identity where its probability is 0."""
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


class SelfAttention(nn.Module):
    """Multi-head or grouped-query causal self-attention between two linears. `heads` and `kv_heads` count the
    heads that the linears hold here, which are fewer under tensor parallelism.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.kv_heads = shape.kv_heads
        self.head_dim = shape.head_dim
        self.qkv = nn.Linear(shape.hidden, shape.attention_width + 2 * shape.kv_width, bias=shape.bias)
        self.core = CausalAttention(shape.dropout)
        self.proj = nn.Linear(shape.attention_width, shape.hidden, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, hidden] to [b, s, hidden]."""
        q, k, v = split_heads(self.qkv(x), self.heads, self.kv_heads, self.head_dim)
        return self.proj(merge_heads(self.core(*self.with_positions(q, k), v)))

    def with_positions(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys with their positions, for models that encode these in the attention."""
        return q, k


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v, where a position sees itself and all positions before it.

    The fused kernels do not store probabilities, and draw dropout inside, where no other layout could repeat
    it. So with dropout, or if `explicit`, the probabilities are computed explicitly.
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
        q, v = by_position(q), separate(v, q)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def make_explicit(model: nn.Module) -> None:
    """Let all attention in `model` store its probabilities, as the published memory formulas assume."""
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
    """q [b, heads, s, d] with positions outermost in memory. The fused kernels save their result and lay it
    out like q, so `merge_heads` then need not copy it.
    """
    return q if q.stride(1) <= q.stride(2) else q.transpose(1, 2).contiguous().transpose(1, 2)


def separate(v: Tensor, q: Tensor) -> Tensor:
    """v, copied if it alone would keep the fused product of q, k and v alive for the backward: rotary queries
    and keys are new tensors, v is a view of the product.
    """
    if torch.compiler.is_compiling():  # the compiler decides what is saved
        return v
    alone = v.untyped_storage()._cdata != q.untyped_storage()._cdata
    return v.contiguous() if alone and v.requires_grad else v


def _by_key_head(x: Tensor, k: Tensor) -> Tensor:
    """[b, heads, s, n] to [b, kv_heads, heads / kv_heads s, n]: the rows of all heads that share a
    key head.
    """
    return x.contiguous().view(x.shape[0], k.shape[1], -1, x.shape[-1])


class _CausalSoftmax(torch.autograd.Function):
    """Causal softmax(scale * scores) [..., s, s]; saves only its result for the backward, in the
    scores' type.
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
