"""The gradient norm of the whole model under any layout, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stretto.engine.optim.whole import sendable
from stretto.engine.parallel.collectives import all_sum
from stretto.engine.parallel.fragment import Fragment, Placed


class GradientNorm:
    """Norm over every axis: each element of the plain model counts once.

    Args:
        fragments: this rank's; pieces that are not owned are left out here.
        groups: for the axes over which parameters are spread (`Placed.over`), all ranks that hold different
            parts of one copy of them, or None when this rank has it all: of dense parameters, spread over
            "tp", the ranks of tp and pp, and those that share gradients; of experts those of expert_tp, ep
            and pp, and those that share gradients. Every rank gives the same axes.
    """

    def __init__(self, fragments: Iterable[Fragment], groups: Mapping[str, ProcessGroup | None]) -> None:
        self.groups = dict(groups)
        self._parts: dict[str, list[tuple[Fragment, Placed | None]]] = {over: [] for over in groups}
        for fragment in fragments:
            placed = fragment.counted
            if all(p.owned for p in placed.pieces):  # padding has no gradient: the tensor can be taken whole
                self._parts[placed.over].append((fragment, None))
            elif any(p.owned for p in placed.pieces):
                self._parts[placed.over].append((fragment, placed))

    @torch.no_grad()
    def __call__(self, scale: float = 1.0) -> Tensor:
        """The norm, a float64 scalar tensor, the same on every rank.

        Args:
            scale: the loss scale, by which gradients are too large; the norm is that of unscaled gradients.
        """
        total = torch.zeros((), dtype=torch.float64)
        for over, group in self.groups.items():
            # float64 on all ranks: one without gradients could not know their dtype
            square = _square(self._parts[over])
            if group is not None:
                square = all_sum(sendable(square, group), group)
            total = square + total.to(square.device)
        return total.sqrt() / scale


def _square(parts: Sequence[tuple[Fragment, Placed | None]]) -> Tensor:
    """The sum of squares of the elements that this rank owns, float64, on the gradients' device."""
    views: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for fragment, placed in parts:
        gradient = fragment.gradient if fragment.gradient is not None else fragment.parameter.grad
        if gradient is None:
            continue
        views_owned = (
            [gradient] if placed is None else [p.of_local(gradient) for p in placed.pieces if p.owned]
        )
        views.setdefault((gradient.dtype, gradient.device), []).extend(views_owned)
    total = torch.zeros((), dtype=torch.float64)
    for (dtype, device), same in views.items():  # norms of 16-bit gradients are computed in float32
        norms = torch._foreach_norm(same, 2, torch.promote_types(dtype, torch.float32))
        # squared in float64: float32 would overflow from a norm of 2e19 on
        total = torch.stack(norms).double().square().sum() + total.to(device)
    return total


def fragments_of(parameters: Mapping[str, nn.Parameter], places: Mapping[str, Placed]) -> list[Fragment]:
    """Parameters of this rank that are not sharded over data-parallel ranks, by plain name; their gradients
    are read when the norm is computed.
    """
    return [
        Fragment(name=name, parameter=parameter, placed=places[name])
        for name, parameter in parameters.items()
    ]


def ratio(norm: Tensor, largest: float | None, scale: float = 1.0) -> float:
    """The factor of all gradients: largest / norm where the norm is larger, as in
    torch.nn.utils.clip_grad_norm_, times 1 / scale.

    Args:
        norm: of the unscaled gradients.
        largest: None: only the scale.
        scale: the loss scale, by which gradients are too large.
    """
    return (1.0 if largest is None else min(1.0, float(largest / (norm + 1e-6)))) / scale


@torch.no_grad()
def clip(gradients: Sequence[Tensor], norm: Tensor, largest: float | None, scale: float = 1.0) -> None:
    """Scale all gradients by largest / norm where the norm is larger, the rule of
    torch.nn.utils.clip_grad_norm_, and by 1 / scale, in one pass.

    Args:
        norm: of the unscaled gradients.
        largest: None: only the scale.
        scale: the loss scale, by which gradients are too large.
    """
    ratio = torch.ones_like(norm) if largest is None else largest / (norm + 1e-6)
    if norm.device.type == "cpu" and float(ratio) >= 1.0:  # reading it costs nothing here and saves a pass
        if scale == 1.0:
            return
        ratio = torch.ones_like(ratio)
    if gradients:
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in gradients:
            alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, dtype), same in alike.items():
            torch._foreach_mul_(same, (ratio.clamp(max=1.0) / scale).to(device, dtype))
