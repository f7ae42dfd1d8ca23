"""Causal self-attention: the linears around softmax(q k^T) v, and rotary positions (Su et al. 2021, RoFormer,
section 3.2).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

from stretto.engine.models.causal import CausalAttention
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
