"""Auxiliary losses of layers, and the statistics that layers report.

A pipeline passes one tensor from stage to stage and computes one loss at its end. An auxiliary loss bypasses
both: its gradient is injected at the layer in the backward (as in Megatron-core), and its value is only
reported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from stretto.errors import StrettoError


class Auxiliary:
    """Losses and statistics of a rank's mixture-of-experts layers; one object for each rank.

    Everything is counted in the backward, which runs once for each microbatch even if the forward is
    recomputed. Each rank counts its part of the tokens: the model's values are the sums over all ranks.

    Attributes:
        scale: gradient of the losses of the current microbatch, such as 1 / tokens of the global batch; set
            before each forward.
        losses: balance loss and z-loss of the step, before scaling, summed over tokens like the
            cross-entropy; [2], float64.
        loads: for each layer, the number of times that each expert was chosen in this step; [experts],
            float64.
        dropped: choices dropped because they exceed an expert's capacity; a float64 scalar.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.scale: float | Tensor = 1.0
        self._device = torch.device(device)
        self.reset()

    def reset(self) -> None:
        """Reset all counts at the start of a step."""
        self.losses = torch.zeros(2, dtype=torch.float64, device=self._device)
        self.loads = dict[str, Tensor]()
        self.dropped = torch.zeros((), dtype=torch.float64, device=self._device)

    def add(self, name: str, losses: Tensor, load: Tensor, dropped: Tensor) -> None:
        """Add the statistics of layer `name` for a microbatch."""
        self.losses += losses
        self.dropped += dropped
        load = load.double()
        self.loads[name] = self.loads[name] + load if name in self.loads else load

    def table(self, layers: int, experts: int) -> Tensor:
        """Return `loads` of this step by block, zero for blocks of other ranks: [layers, experts]."""
        table = torch.zeros(layers, experts, dtype=torch.float64, device=self._device)
        for name, load in self.loads.items():
            table[int(name.split(".")[1])] += load  # blocks.3.mlp
        return table


class Reporting(nn.Module):
    """A layer with auxiliary losses.

    Attributes:
        auxiliary: the object that it reports them to; `bind_auxiliary` sets it.
        name: the layer's name in the model.
    """

    auxiliary: Auxiliary | None = None
    name: str = ""

    def bound(self) -> Auxiliary:
        """Return `auxiliary`.

        Raises:
            StrettoError: it is not set.
        """
        if self.auxiliary is None:
            raise StrettoError(
                f"{type(self).__name__} has auxiliary losses, but nothing to report them to",
                hint="call bind_auxiliary(model, Auxiliary()) after parallelize",
            )
        return self.auxiliary


def bind_auxiliary(model: nn.Module, auxiliary: Auxiliary) -> None:
    """Make every layer of `model` with auxiliary losses report to `auxiliary`."""
    for name, module in model.named_modules():
        if isinstance(module, Reporting):
            module.auxiliary, module.name = auxiliary, name


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, losses: Tensor, scale: float | Tensor, report: Callable[[], None]
    ) -> Tensor:
        ctx.gradient = torch.ones_like(losses) * scale
        ctx.report = report
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None]:
        ctx.report()
        return grads[0], ctx.gradient, None, None


def inject(y: Tensor, losses: Tensor, scale: float | Tensor, report: Callable[[], None]) -> Tensor:
    """Return y unchanged; its backward also injects the gradient of scale * losses.sum().

    Args:
        losses: losses of any shape, with their graph.
        report: called in the backward.
    """
    return cast(Tensor, _Inject.apply(y, losses, scale, report))
