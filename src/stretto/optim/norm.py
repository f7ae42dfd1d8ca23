"""The gradient norm of the whole model, and clipping by it, whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stretto.parallel.collectives import all_sum
from stretto.parallel.placed import Placed


class GradientNorm:
    """Norm over every axis: each element of the plain model counts once.

    Args:
        parameters: this rank's parameters by plain name.
        places: where each lies in the plain model; pieces that are not owned are left out here.
        group: all ranks that hold different parts of one replica (tp and pp); None when this rank has it all.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        places: Mapping[str, Placed],
        group: ProcessGroup | None,
    ) -> None:
        self.group = group
        self._device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self._parts: list[tuple[nn.Parameter, Placed | None]] = []
        for name, parameter in parameters.items():
            pieces = places[name].pieces
            if all(p.owned for p in pieces):  # padding has no gradient, so the tensor can be taken whole
                self._parts.append((parameter, None))
            elif any(p.owned for p in pieces):
                self._parts.append((parameter, places[name]))

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """The norm, a float64 scalar tensor, the same on every rank."""
        views = list[Tensor]()
        for parameter, placed in self._parts:
            if parameter.grad is None:
                continue
            if placed is None:
                views.append(parameter.grad)
            else:
                views.extend(p.of_local(parameter.grad) for p in placed.pieces if p.owned)
        if views:
            square = torch.stack(torch._foreach_norm(views)).square().sum()
        else:
            square = torch.zeros((), device=self._device)
        # float64, since ranks must agree on a type and this one may hold nothing that tells it
        return all_sum(square.double(), self.group).sqrt()


@torch.no_grad()
def clip(gradients: Sequence[Tensor], norm: Tensor, largest: float) -> None:
    """Scale all gradients by largest / norm where the norm is larger; the rule of
    torch.nn.utils.clip_grad_norm_.
    """
    ratio = largest / (norm + 1e-6)
    if norm.device.type == "cpu" and float(ratio) >= 1.0:  # reading it costs nothing here and saves a pass
        return
    if gradients:
        torch._foreach_mul_(list(gradients), ratio.clamp(max=1.0).to(gradients[0].dtype))
