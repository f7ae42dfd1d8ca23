"""How long one operation takes on one device: products, passes over memory, attention.

Each is physics with few constants, which `benchmarks/fit_operators.py` fits to measured operations; what was
measured on the device itself (`Device.kernels`) stands in their place.
"""

from __future__ import annotations

from stretto.cost.time.attention import attention_seconds
from stretto.cost.time.passes import PassKind, pass_seconds
from stretto.cost.time.products import matmul_seconds

__all__ = ["PassKind", "attention_seconds", "matmul_seconds", "pass_seconds"]
