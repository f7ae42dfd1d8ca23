"""Models in 16 bits, as training makes them: float32 for what is kept, and for all gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from stretto.engine.parallel.precision import weight_dtype

KEEP = ("*norm*", "*router*")


def to_halves(
    model: nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    keep: Sequence[str] = KEEP,
    gradients: torch.dtype = torch.float32,
) -> None:
    """Convert every parameter to its type, in place, by its name in the plain model."""
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(weight_dtype(name, dtype, keep))
        parameter.grad_dtype = gradients
