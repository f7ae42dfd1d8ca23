"""Attention with its linears, rotary positions, biases by distance, norms of queries and keys, and sinks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.engine.models.causal import CausalAttention, dropout
from stretto.engine.models.full import FullAttention, cached_buckets, distance_buckets
from stretto.engine.models.norms import norm
from stretto.engine.models.rotary import Rotary
from stretto.spec.shape import ModelShape


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
    """Multi-head or grouped-query self-attention. `heads` and `kv_heads` count the local heads, which are
    fewer under tensor parallelism, and `relative` has a row for each of them.
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
        """[b, s, hidden] to [b, s, hidden]."""
        q, k, v = self.to_heads(self.qkv(x))
        extra = self.sinks if self.relative is None else self._bias(self.relative, q)
        y = self.core(q, k, v) if extra is None else self.core(q, k, v, extra)
        return self.drop(self.proj(merge_heads(y)))

    def to_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features [b, s, ...] to queries, keys and values as `core` takes them."""
        q, k, v = split_heads(qkv, self.heads, self.kv_heads, self.head_dim)
        return self.rotary(self.q_norm(q)), self.rotary(self.k_norm(k)), v

    def _bias(self, relative: Tensor, q: Tensor) -> Tensor:
        """Bias [heads, n, n] of the scores of queries [b, heads, n, d], by the distance of their keys."""
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
        """Tokens x [b, s, hidden] and the encoder's output [b, m, hidden] to [b, s, hidden]."""
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q(x), *self.kv(memory).chunk(2, dim=-1))
        )
        return self.drop(self.proj(merge_heads(self.core(q, k, v))))
