"""Types of weights, of their gradients, and of what the optimiser works on (Micikevicius et al. 2018, "Mixed
precision training", section 3.1).

With 16 bits, modules hold and multiply 16-bit weights, but for a few parameters whose values are more exact
than their cost; gradients are added up in float32, and an optimiser updates float32 masters.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from stretto.spec.parameters import kept

HALVES = (torch.bfloat16, torch.float16)


def weight_dtype(name: str, dtype: torch.dtype, patterns: Iterable[str]) -> torch.dtype:
    """The type in which a module holds the parameter of that plain name.

    Args:
        dtype: of training.
        patterns: names that stay in float32 where training has 16 bits.
    """
    return torch.float32 if dtype in HALVES and kept(name, patterns) else dtype


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which the optimiser holds weights and states, from that of training: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The type in which a parameter's gradient is added up: that of the gradient that is there, else the one
    that was asked for by `parameter.grad_dtype`, else the parameter's.
    """
    if parameter.grad is not None:
        return parameter.grad.dtype
    return parameter.grad_dtype or parameter.dtype


__all__ = ["HALVES", "gradient_dtype", "kept", "master_dtype", "weight_dtype"]
