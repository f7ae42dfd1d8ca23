"""A block's computation between its matrix products, as functions of tensors and constants, which
`stretto.engine.models.compiled` compiles. Modules compute the same one operation after another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.engine.models.language import added
from stretto.engine.models.norms import RMSNorm1p
from stretto.engine.models.rotary import rotate
from stretto.errors import StrettoError

Weights = tuple[Tensor | None, Tensor | None]  # of a norm: gain and bias


class NormKind(NamedTuple):
    """The constants of a norm over the last dimension."""

    name: str
    eps: float | None

    @classmethod
    def of(cls, norm: nn.Module) -> NormKind:
        """Return the kind of a module."""
        if isinstance(norm, nn.LayerNorm):
            return cls("layer", norm.eps)
        if isinstance(norm, RMSNorm1p):
            return cls("rms1p", norm.eps)
        if isinstance(norm, nn.RMSNorm):
            return cls("rms", norm.eps)
        raise StrettoError(f"a norm of type {type(norm).__name__} cannot be compiled")


def normed(x: Tensor, weights: Weights, kind: NormKind) -> Tensor:
    """x [..., n], normalised over its last dimension in float32 at least; in x's type."""
    exact = torch.promote_types(x.dtype, torch.float32)
    gain, bias = (None if t is None else t.to(exact) for t in weights)
    if kind.name == "layer":
        assert kind.eps is not None
        return F.layer_norm(x.to(exact), x.shape[-1:], gain, bias, kind.eps).to(x.dtype)
    eps = torch.finfo(x.dtype).eps if kind.eps is None else kind.eps
    wide = x.to(exact)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if gain is not None:
        y = y * (1.0 + gain if kind.name == "rms1p" else gain)
    return y.to(x.dtype)


def add_and_norm(
    x: Tensor, y: Tensor, after: Weights, after_kind: NormKind | None, norm: Weights, kind: NormKind
) -> tuple[Tensor, Tensor]:
    """The residual stream x plus what a layer adds to it, y, first normalised if `after_kind`; and the sum,
    normalised.
    """
    total = added(x, y if after_kind is None else normed(y, after, after_kind))
    return total, normed(total, norm, kind)


def add_normed(x: Tensor, y: Tensor, after: Weights, kind: NormKind) -> Tensor:
    """The residual stream x plus the normalised y."""
    return added(x, normed(y, after, kind))


class HeadSizes(NamedTuple):
    """Sizes of the heads in features [q; k; v]; `interleaved` if rotary pairs are neighbours."""

    heads: int
    kv_heads: int
    head_dim: int
    interleaved: bool


def rotate_heads(
    qkv: Tensor,
    sizes: HeadSizes,
    tables: tuple[Tensor, Tensor] | None,
    q_norm: Weights,
    q_kind: NormKind | None,
    k_norm: Weights,
    k_kind: NormKind | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [b, heads, s, d], keys and values [b, kv_heads, s, d] of features qkv [b, s, (heads + 2
    kv_heads) d]: normalised, then rotated, each in memory of its own.

    Args:
        tables: cos and sin, [s, d / 2] or [b, 1, s, d / 2]; None without rotary positions.
    """
    widths = [sizes.heads * sizes.head_dim, *[sizes.kv_heads * sizes.head_dim] * 2]
    q, k, v = (part.unflatten(-1, (-1, sizes.head_dim)) for part in qkv.split(widths, dim=-1))
    q = q if q_kind is None else normed(q, q_norm, q_kind)
    k = k if k_kind is None else normed(k, k_norm, k_kind)
    if tables is not None:
        # positions before heads, as in qkv
        cos, sin = (t.unsqueeze(1) if t.dim() == 2 else t.transpose(1, 2) for t in tables)
        q, k = (rotate(t, cos, sin, sizes.interleaved) for t in (q, k))
    # the attention kernels keep the order of positions and heads in memory of q, and copy v if it is a view
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2).contiguous()
