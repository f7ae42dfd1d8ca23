"""Rotary positions (Su et al. 2021, RoFormer, section 3.2).

Queries and keys are turned by an angle that grows with their position.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Turns feature i together with feature i + d/2, the half-split order of published Llama weights.

    Holds no tensors: its tables are made when first used, so leaving the meta device needs no care.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.positions: Tensor | None = None  # of the s rows, int64; None: 0 to s - 1
        self._kept: tuple[object, tuple[Tensor, Tensor]] | None = None  # tables of given positions

    def forward(self, x: Tensor) -> Tensor:
        """x [b, heads, s, head_dim], turned by its positions."""
        at = self.positions
        cos, sin = _tables_for(x, self.theta) if at is None else self._tables_at(x, at)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _tables_at(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The tables' rows for given positions."""
        key = (id(positions), x.dtype, x.device)
        if self._kept is None or self._kept[0] != key:
            length = int(positions.max()) + 1
            cos, sin = _cached_tables(length, self.head_dim, self.theta, x.device, x.dtype)
            self._kept = key, (cos[positions], sin[positions])
        return self._kept[1]


def rotary_tables(
    length: int, head_dim: int, theta: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [length, head_dim / 2] of position * theta^(-2i / head_dim), rounded to `dtype` last."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    with torch.inference_mode(False), torch.no_grad():
        even = torch.arange(0, head_dim, 2, device=device, dtype=exact)
        positions = torch.arange(length, device=device, dtype=exact)
        angles = torch.outer(positions, 1.0 / theta ** (even / head_dim))
        return angles.cos().to(dtype), angles.sin().to(dtype)


_cached_tables = lru_cache(maxsize=8)(rotary_tables)  # all layers of a model share one entry


def _tables_for(x: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    """The tables for x; kept between calls unless x is no real tensor (traced or fake)."""
    length, head_dim = x.shape[-2:]
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return rotary_tables(length, head_dim, theta, x.device, x.dtype)
    kept = 1 << (length - 1).bit_length()  # generation grows by one token: no new table each time
    cos, sin = _cached_tables(kept, head_dim, theta, x.device, x.dtype)
    return cos[:length], sin[:length]
