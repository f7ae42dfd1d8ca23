"""Attention modules: linears, rotary positions, relative position biases, query and key norms, and sinks."""

from __future__ import annotations

from functools import lru_cache
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.engine.documents import Packing
from stretto.engine.models.causal import CausalAttention, dropout, sdpa, weigh
from stretto.engine.models.norms import norm
from stretto.engine.models.rotary import Rotary
from stretto.job.shape import ModelShape


class FullAttention(nn.Module):
    """softmax(scale q k^T + bias) v over all keys, or if `causal` over those up to the query's position.

    Padding of the encoder's tokens is hidden. torch's fused kernels are used unless dropout is active or the
    probabilities must be stored.

    Args:
        probability: probability of dropping an attention probability in training.
        explicit: store the probabilities, as the published memory formulas assume.
        causal: a query attends to no later key.
        scale: factor of the scores; by default 1 / sqrt(d).

    Attributes:
        packing: has the number of real tokens of each encoder sample.
    """

    def __init__(
        self, probability: float, explicit: bool = False, *, causal: bool = False, scale: float | None = None
    ) -> None:
        super().__init__()
        self.drop = dropout(probability)
        self.explicit = explicit
        self.causal = causal
        self.scale = scale
        self.packing = Packing()

    def extra_repr(self) -> str:
        return f"causal={self.causal}" + ("" if self.scale is None else f", scale={self.scale:g}")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attend with q [b, heads, n, d] to k and v [b, kv_heads, m, d]; return [b, heads, n, d].

        If `causal`, the queries are at the last n of the m positions.

        Args:
            bias: added to the scores, [heads, n, m].
        """
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        dropping = self.training and not isinstance(self.drop, nn.Identity)
        written_out = self.explicit or dropping
        if self.causal and bias is None and q.shape[2] == k.shape[2] and not written_out:
            return sdpa(q, k, v, scale=scale, causal=True)
        hidden = self._hidden(q, k)
        if written_out:
            exact = torch.promote_types(q.dtype, torch.float32)
            keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            scores = (q @ keys.transpose(-2, -1)).to(exact) * scale
            if bias is not None:
                scores = scores + bias.to(exact)
            if hidden is not None:
                scores = scores.masked_fill(hidden, float("-inf"))
            return weigh(self.drop(scores.softmax(-1).to(q.dtype)), v)
        if bias is None:
            mask = None if hidden is None else ~hidden
        else:
            mask = bias.to(q.dtype).unsqueeze(0)
            mask = mask if hidden is None else mask.masked_fill(hidden, float("-inf"))
        return sdpa(q, k, v, scale=scale, mask=mask)

    def _hidden(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Return bool, broadcastable to [b, heads, n, m], True for keys hidden from a query; None if
        none is.
        """
        n, m = q.shape[2], k.shape[2]
        if self.causal:
            return torch.ones(n, m, dtype=torch.bool, device=q.device).triu_(m - n + 1)
        lengths = self.packing.lengths
        if lengths is None:
            return None
        return torch.arange(m, device=q.device) >= lengths.to(q.device).view(-1, 1, 1, 1)


def distance_buckets(
    n: int, device: torch.device, *, causal: bool, buckets: int, max_distance: int
) -> Tensor:
    """Return the bucket of every pair of n positions, int64 [n, n]: queries by rows, keys by columns.

    Half of the buckets are for one distance each, the others for ranges that grow with the distance; all
    distances from `max_distance` share the last (Raffel et al. 2020, section 2.1, and their code). If not
    `causal`, half of all buckets are for keys after the query.
    """
    positions = torch.arange(n, device=device)
    distance = positions - positions.unsqueeze(1)
    if causal:
        first, distance = torch.zeros_like(distance), distance.neg().clamp(min=0)
    else:
        buckets //= 2
        first, distance = (distance > 0).long() * buckets, distance.abs()
    exact = buckets // 2
    # float32, as in published models: rounding decides the bucket of some distances
    growth = torch.log(distance.clamp(min=1).float() / exact) / log(max_distance / exact)
    ranges = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
    return first + torch.where(distance < exact, distance, ranges)


@lru_cache(maxsize=4)
def cached_buckets(n: int, device: torch.device, *, causal: bool, buckets: int, max_distance: int) -> Tensor:
    """Cache `distance_buckets`; all layers of a stack share the tensor, whether the first runs in inference
    mode or not.
    """
    with torch.inference_mode(False), torch.no_grad():
        return distance_buckets(n, device, causal=causal, buckets=buckets, max_distance=max_distance)


def split_heads(qkv: Tensor, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split features [b, s, (heads + 2 kv_heads) head_dim], ordered [q; k; v], into heads.

    Returns q [b, heads, s, head_dim], and k and v [b, kv_heads, s, head_dim].
    """
    widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    q, k, v = (part.unflatten(-1, (-1, head_dim)).transpose(1, 2) for part in qkv.split(widths, dim=-1))
    return q, k, v


def merge_heads(x: Tensor) -> Tensor:
    """Merge [b, heads, s, head_dim] into [b, s, heads head_dim]."""
    return x.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Multi-head or grouped-query self-attention.

    `heads` and `kv_heads` count the local heads, which are fewer under tensor parallelism; `relative` has a
    row per local head.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        special = shape.attention
        self.heads = shape.heads
        self.kv_heads = shape.kv_heads
        self.head_dim = shape.head_dim
        self.qkv = nn.Linear(shape.hidden, shape.attention_width + 2 * shape.kv_width, bias=shape.qkv_bias)
        normed = special.norm is not None
        self.q_norm = norm(shape, shape.head_dim) if normed else nn.Identity()
        self.k_norm = norm(shape, shape.head_dim) if normed else nn.Identity()
        self.rotary = Rotary.of(shape) if shape.rotary else nn.Identity()
        self.sinks = nn.Parameter(torch.zeros(shape.heads)) if special.sinks else None
        self.causal, self.max_distance = special.causal, special.max_distance
        self.relative = nn.Parameter(torch.zeros(shape.heads, special.buckets)) if shape.relative else None
        if special.causal and not shape.relative:
            self.core = CausalAttention(
                shape.dropout, window=special.window, softcap=special.softcap, scale=shape.attention_scale
            )
        else:
            self.core = FullAttention(shape.dropout, causal=special.causal, scale=shape.attention_scale)
        self.proj = nn.Linear(shape.attention_width, shape.hidden, bias=shape.proj_bias)
        self.drop = dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, s, hidden] to [b, s, hidden]."""
        q, k, v = self.to_heads(self.qkv(x))
        extra = self.sinks if self.relative is None else self._bias(self.relative, q)
        y = self.core(q, k, v) if extra is None else self.core(q, k, v, extra)
        return self.drop(self.proj(merge_heads(y)))

    def to_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split features [b, s, ...] into queries, keys and values, normalised and rotated for `core`."""
        q, k, v = split_heads(qkv, self.heads, self.kv_heads, self.head_dim)
        return self.rotary(self.q_norm(q)), self.rotary(self.k_norm(k)), v

    def _bias(self, relative: Tensor, q: Tensor) -> Tensor:
        """Return the bias [heads, n, n] of the scores of queries [b, heads, n, d], by distance of the key."""
        shared = type(q) is Tensor and not torch.compiler.is_compiling()  # neither fake nor traced
        buckets = (cached_buckets if shared else distance_buckets)(
            q.shape[2],
            q.device,
            causal=self.causal,
            buckets=relative.shape[1],
            max_distance=self.max_distance,
        )
        return F.embedding(buckets, relative.t()).permute(2, 0, 1)


class CrossAttention(nn.Module):
    """A decoder's attention to the encoder's output; `heads` and `kv_heads` as in `SelfAttention`."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.kv_heads = shape.kv_heads
        self.head_dim = shape.head_dim
        self.q = nn.Linear(shape.hidden, shape.attention_width, bias=shape.qkv_bias)
        self.kv = nn.Linear(shape.hidden, 2 * shape.kv_width, bias=shape.qkv_bias)
        self.core = FullAttention(shape.dropout, scale=shape.attention_scale)
        self.proj = nn.Linear(shape.attention_width, shape.hidden, bias=shape.proj_bias)
        self.drop = dropout(shape.dropout)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Attend from tokens x [b, s, hidden] to the encoder's output [b, m, hidden]; return [b, s,
        hidden].
        """
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q(x), *self.kv(memory).chunk(2, dim=-1))
        )
        return self.drop(self.proj(merge_heads(self.core(q, k, v))))
