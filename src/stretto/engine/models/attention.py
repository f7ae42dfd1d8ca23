"""Causal self-attention between two linears, with what models add to it: rotary positions, norms of queries
and keys, and sinks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stretto.engine.models.causal import CausalAttention, dropout
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
    """Multi-head or grouped-query causal self-attention. `heads` and `kv_heads` count the heads that the
    linears hold here, which are fewer under tensor parallelism.
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
        self.core = CausalAttention(
            shape.dropout, window=special.window, softcap=special.softcap, scale=shape.attention_scale
        )
        self.proj = nn.Linear(shape.attention_width, shape.hidden, bias=shape.proj_bias)
        self.drop = dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, hidden] to [b, s, hidden]."""
        q, k, v = split_heads(self.qkv(x), self.heads, self.kv_heads, self.head_dim)
        q, k = self.rotary(self.q_norm(q)), self.rotary(self.k_norm(k))
        y = self.core(q, k, v) if self.sinks is None else self.core(q, k, v, self.sinks)
        return self.drop(self.proj(merge_heads(y)))
