"""How long operations take that are bound by memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

from stretto.cost.machine.device import Device
from stretto.cost.time.constants import bandwidth
from stretto.cost.time.measured import along_line

# classes of operations that are bound by memory, each with an effective bandwidth of its own
PassKind = Literal[
    "add",
    "norm",
    "rope",
    "gated",
    "gelu",
    "softmax",
    "dropout",
    "copy",
    "embedding",
    "loss",
    "adam",
    "reduce",
]


@lru_cache(maxsize=65536)
def pass_seconds(device: Device, kind: PassKind, size: float) -> float:
    """Time of an operation that is bound by memory and reads and writes `size` bytes in all."""
    tables: Any = device.kernels.get("passes")
    if tables:
        rows = tables.get(kind) or tables.get("copy") or next(iter(tables.values()))
        return along_line([(float(size), float(seconds)) for size, seconds in rows], size)
    rate, fixed = bandwidth(device, kind)
    return size / rate + fixed
