"""Gradients that several tensor-parallel ranks share in."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed import ProcessGroup

from stretto.parallel.collectives import all_sum


@dataclass(frozen=True)
class PartialGradient:
    """A slice of a parameter whose gradient other ranks share in: summed over `group` once a step."""

    parameter: nn.Parameter
    dim: int
    start: int
    size: int
    group: ProcessGroup

    def sum(self) -> None:
        """Add up what the ranks of the group have."""
        assert self.parameter.grad is not None
        view = self.parameter.grad.narrow(self.dim, self.start, self.size)
        if view.is_contiguous():
            all_sum(view, self.group)
        else:
            view.copy_(all_sum(view.contiguous(), self.group))
