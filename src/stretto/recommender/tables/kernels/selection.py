"""Selects the kernels for a device: compiled ones where numba is installed, else torch operations."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from stretto.recommender.tables.kernels.fast import CompiledKernels
from stretto.recommender.tables.kernels.plain import Kernels, PlainKernels


def kernels_for(device: torch.device | str, dtype: torch.dtype | None = None) -> Kernels:
    """The fastest for tables of `dtype` that are there. All give the same results, but for rounding.

    On the CPU those that numba compiles, in float32 and float64; without numba, on other devices and in other
    types torch's operations.
    """
    if torch.device(device).type == "cpu" and dtype in (None, torch.float32, torch.float64) and _has_numba():
        return CompiledKernels()
    return PlainKernels()


@cache
def _has_numba() -> bool:
    return find_spec("numba") is not None
