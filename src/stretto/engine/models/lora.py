"""Low-rank adapters of linears (Hu et al. 2021, "LoRA")."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stretto.engine.models.causal import dropout
from stretto.job.lora import PROJECTIONS, LoraShape, projection_rows
from stretto.job.shape import ModelShape


class Adapter(nn.Module):
    """scale B A x, with A [rank, in] and B [out, rank]."""

    def __init__(self, lora: LoraShape, columns: int, rows: int) -> None:
        super().__init__()
        self.scale = lora.scale
        self.drop = dropout(lora.dropout)
        self.A = nn.Linear(columns, lora.rank, bias=False)
        self.B = nn.Linear(lora.rank, rows, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to scale B A x [..., out]."""
        return self.B(self.A(self.drop(x)) * self.scale)  # scales the narrow tensor


class Adapters(nn.Module):
    """The adapters of one linear, each a child module with the name of its projection.

    Attributes:
        projections: all projections of the linear, in the order of its output features.
        rows: local output features of each projection, fewer under tensor parallelism.
    """

    def __init__(self, lora: LoraShape, name: str, linear: nn.Linear, kv_rows: int) -> None:
        """
        Args:
            name: name of the linear in its block.
            kv_rows: output features of the key projection.
        """
        super().__init__()
        self.projections = PROJECTIONS[name]
        self.rows = projection_rows(name, linear.out_features, kv_rows)
        adapted = lora.adapted(name)
        for projection, rows in zip(self.projections, self.rows, strict=True):
            if projection in adapted:
                self.add_module(projection, Adapter(lora, linear.in_features, rows))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the adapters' output for the linear's input x [..., in] to the linear's output y [..., out]."""
        parts = [
            part if (adapter := self._modules.get(name)) is None else part + adapter(x)
            for name, part in zip(self.projections, y.split(list(self.rows), -1), strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class AdaptedLinear(nn.Linear):
    """An nn.Linear with adapters."""

    lora: Adapters

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return self.lora(input, super().forward(input))


def add_adapters(block: nn.Module, shape: ModelShape, lora: LoraShape) -> None:
    """Add adapters to the linears of a block, in place; names of parameters do not change.

    Args:
        shape: shape of this block.
    """
    for name, linear in list(block.named_modules()):
        if type(linear) is nn.Linear and lora.adapted(name):
            linear.lora = Adapters(lora, name, linear, shape.kv_width)
            linear.__class__ = AdaptedLinear
