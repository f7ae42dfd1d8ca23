"""Lets modules of `transformers` compute in float64 what they would in float32, whatever their weights."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch


class _Wide:
    """The package torch, whose float32 is float64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


def in_float64(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Within the test, `torch.float32` is float64 in these modules, and `x.float()` everywhere."""
    for module in modules:
        monkeypatch.setattr(module, "torch", _Wide())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
