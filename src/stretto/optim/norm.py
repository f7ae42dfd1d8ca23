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
        groups: for the axes over which parameters are spread (`Placed.over`), all ranks that hold different
            parts of one copy of them, or None when this rank has it all: of dense parameters, spread over
            "tp", the ranks of tp and pp; of experts those of expert_tp, ep and pp. Every rank gives the same
            axes.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        places: Mapping[str, Placed],
        groups: Mapping[str, ProcessGroup | None],
    ) -> None:
        self.groups = dict(groups)
        self._device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self._parts: dict[str, list[tuple[nn.Parameter, Placed | None]]] = {over: [] for over in groups}
        for name, parameter in parameters.items():
            placed = places[name]
            if all(p.owned for p in placed.pieces):  # padding has no gradient: the tensor can be taken whole
                self._parts[placed.over].append((parameter, None))
            elif any(p.owned for p in placed.pieces):
                self._parts[placed.over].append((parameter, placed))

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """The norm, a float64 scalar tensor, the same on every rank."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for over, group in self.groups.items():
            # float64, since ranks must agree on a type and this one may hold nothing that tells it
            total += all_sum(self._square(self._parts[over]).double(), group)
        return total.sqrt()

    def _square(self, parts: Sequence[tuple[nn.Parameter, Placed | None]]) -> Tensor:
        """The squares of what this rank owns, added up."""
        views = list[Tensor]()
        for parameter, placed in parts:
            if parameter.grad is None:
                continue
            if placed is None:
                views.append(parameter.grad)
            else:
                views.extend(p.of_local(parameter.grad) for p in placed.pieces if p.owned)
        if not views:
            return torch.zeros((), device=self._device)
        return torch.stack(torch._foreach_norm(views)).square().sum()


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
