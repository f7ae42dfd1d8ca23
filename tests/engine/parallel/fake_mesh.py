"""A rank's tensor-parallel coordinates without ranks: enough to build modules, not to run them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class FakeMesh:
    tp: int = 1
    rank: int = 0
    device: str = "cpu"
    grouped: bool = False  # groups are represented by the names of their axes

    def size(self, axis: str) -> int:
        return self.tp if axis in ("tp", "expert_tp") else 1

    def index(self, axis: str) -> int:
        return self.rank if axis in ("tp", "expert_tp") else 0

    def group(self, axes: str) -> Any:
        return axes if self.size(axes) > 1 and self.grouped else None

    def split(self, axis: str, parts: int) -> Any:
        return (axis, parts)
