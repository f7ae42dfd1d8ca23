"""A process group that writes down what it is asked to reduce, and does it."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class CountingGroup:
    """Stands in for a ProcessGroup; `log` takes one entry, ("reduce", elements), for each all-reduce."""

    def __init__(self, group: Any, log: list[Any] | None = None) -> None:
        self.group = group
        self.log: list[Any] = [] if log is None else log

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        self.log.append(("reduce", sum(t.numel() for t in tensors)))
        return self.group.allreduce(tensors, options)

    def size(self) -> int:
        return self.group.size()

    def rank(self) -> int:
        return self.group.rank()

    @property
    def elements(self) -> int:
        """Numbers given to collectives so far."""
        return sum(entry[1] for entry in self.log if entry[0] == "reduce")
