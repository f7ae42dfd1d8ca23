"""Norms of the residual stream, of heads and of narrow vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.job.shape import ModelShape


class RMSNorm1p(nn.Module):
    """RMSNorm whose gain is 1 + weight (Gemma), computed in float32 for 16-bit inputs, in which 1 + a small
    weight would round to 1.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., width]; return the input's dtype."""
        exact = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(exact), (self.width,), 1.0 + self.weight.to(exact), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps:g}"


def norm(shape: ModelShape, width: int) -> nn.Module:
    """Return the model's kind of norm, over `width` features."""
    if shape.norm == "layer":
        return nn.LayerNorm(width, eps=shape.norm_eps, bias=shape.norm_bias)
    kind = RMSNorm1p if shape.norm == "rms1p" else nn.RMSNorm
    return kind(width, eps=shape.norm_eps)
