"""Stretto: plan, draw, prove and run hybrid-parallel training."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stretto.layout import Layout

# Eager, for each has the name of the room it lives in: once that room has been imported, the attribute would
# be the room and `__getattr__` never asked. Neither imports torch.
from stretto.program import schedule
from stretto.program.replay import simulate

if TYPE_CHECKING:
    from stretto.engine.optim.data_parallel import data_parallel
    from stretto.engine.parallel.parallelize import parallelize
    from stretto.engine.pipeline import Pipeline

__version__ = "0.1.0"

__all__ = ["Layout", "Pipeline", "__version__", "data_parallel", "parallelize", "schedule", "simulate"]

_NEED_TORCH = {
    "Pipeline": "stretto.engine.pipeline",
    "data_parallel": "stretto.engine.optim.data_parallel",
    "parallelize": "stretto.engine.parallel.parallelize",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    return getattr(import_module(_NEED_TORCH[name]), name)
