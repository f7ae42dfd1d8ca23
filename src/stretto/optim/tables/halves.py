"""A float32 as two 16-bit halves, of which the upper is a bfloat16."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

# where the upper half of a float32 lies in memory
_UPPER = 1 if sys.byteorder == "little" else 0


def halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """(upper bfloat16, lower int16), both shaped as `values` (rounded to float32 where they are float64)."""
    words = values.to(torch.float32).contiguous().view(torch.int16).unflatten(-1, (-1, 2))
    upper, lower = words[..., _UPPER], words[..., 1 - _UPPER]
    return upper.contiguous().view(torch.bfloat16), lower.contiguous()


def glue(upper: Tensor, lower: Tensor) -> Tensor:
    """The float32 of both halves, exactly."""
    words = [lower, lower]
    words[_UPPER], words[1 - _UPPER] = upper.contiguous().view(torch.int16), lower
    return torch.stack(words, -1).flatten(-2).view(torch.float32)
