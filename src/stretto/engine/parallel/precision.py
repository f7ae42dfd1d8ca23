"""Dtypes of weights, gradients and masters (Micikevicius et al. 2018, "Mixed precision training", section
3.1).

In 16-bit training, modules hold and multiply 16-bit weights, except for a few small parameters that stay in
float32; gradients accumulate in float32, and the optimiser updates float32 masters.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from stretto.job.parameters import stays_float32

HALVES = (torch.bfloat16, torch.float16)


def weight_dtype(name: str, dtype: torch.dtype, patterns: Iterable[str]) -> torch.dtype:
    """Return the dtype of a module's parameter `name`.

    Args:
        dtype: dtype of training.
        patterns: name patterns of parameters that stay in float32 in 16-bit training.
    """
    return torch.float32 if dtype in HALVES and stays_float32(name, patterns) else dtype


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the optimiser's weights and states: that of training, but at least float32."""
    return torch.promote_types(dtype, torch.float32)


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which a parameter's gradient accumulates: that of `parameter.grad` if it is set,
    else `parameter.grad_dtype`, else the parameter's.
    """
    if parameter.grad is not None:
        return parameter.grad.dtype
    return parameter.grad_dtype or parameter.dtype


__all__ = ["HALVES", "gradient_dtype", "master_dtype", "stays_float32", "weight_dtype"]
