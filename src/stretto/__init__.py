"""Stretto: plan, draw, prove and run hybrid-parallel training."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.layout import Layout

__version__ = "0.1.0"

_HOMES = {"Layout": "stretto.layout"}

__all__ = ["Layout", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
