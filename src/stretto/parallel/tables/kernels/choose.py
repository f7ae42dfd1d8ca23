"""Which kernels a device has."""

from __future__ import annotations

import torch

from stretto.parallel.tables.kernels.face import Kernels
from stretto.parallel.tables.kernels.plain import PlainKernels


def kernels_for(device: torch.device | str, dtype: torch.dtype | None = None) -> Kernels:
    """The fastest that work there, all of them equal."""
    return PlainKernels()
