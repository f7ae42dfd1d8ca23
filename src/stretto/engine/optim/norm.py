"""The gradient norm of the full model under any layout, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.engine.device import moved
from stretto.engine.optim.tensor_sums import sendable
from stretto.engine.parallel.collectives import all_sum
from stretto.engine.parallel.fragment import ParameterFragment, ShardPlacement


class GradientNorm:
    """The 2-norm over all ranks: each element of the plain model counts once.

    Args:
        fragments: this rank's fragments; boxes that another rank owns do not count, unless they are not
            finite, which makes the norm NaN.
        groups: for each `ShardPlacement.over` in the model, the ranks that together hold one copy of those
            parameters, or None if this rank holds all of them: for dense parameters, split over "tp", the
            ranks of tp and pp; for experts those of expert_tp, ep and pp; each times the ranks that share
            gradients. The keys are the same on every rank.
    """

    def __init__(
        self, fragments: Iterable[ParameterFragment], groups: Mapping[str, ProcessGroup | None]
    ) -> None:
        self.groups = dict(groups)
        self._parts: dict[str, list[tuple[ParameterFragment, ShardPlacement | None]]] = {
            over: [] for over in groups
        }
        self._copies: dict[str, list[tuple[ParameterFragment, ShardPlacement | None]]] = {
            over: [] for over in groups
        }
        for fragment in fragments:
            placed = fragment.counted
            if all(p.owned for p in placed.pieces):  # the gradient of padding is zero: use the full tensor
                self._parts[placed.over].append((fragment, None))
                continue
            if any(p.owned for p in placed.pieces):
                self._parts[placed.over].append((fragment, placed))
            self._copies[placed.over].append((fragment, None))

    @torch.no_grad()
    def __call__(self, scale: float = 1.0) -> Tensor:
        """Return the norm of the unscaled gradients: a float64 scalar tensor, the same on every rank.
        Collective.

        Args:
            scale: the loss scale, by which the gradients are multiplied.
        """
        total: Tensor | None = None
        for over, group in self.groups.items():
            # float64 on all ranks: a rank without gradients could not know the others' dtype
            square = _square(self._parts[over])
            if self._copies[over]:
                square = square + 0.0 * _square(self._copies[over])
            if group is not None:
                square = all_sum(sendable(square, group), group)
            total = square if total is None else square + moved(total, square.device)
        assert total is not None, "no parameters"
        return total.sqrt() / scale


def _square(parts: Sequence[tuple[ParameterFragment, ShardPlacement | None]]) -> Tensor:
    """Return the sum of squares of the elements that this rank owns, float64, on the gradients' device."""
    views: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for fragment, placed in parts:
        gradient = fragment.gradient if fragment.gradient is not None else fragment.parameter.grad
        if gradient is None:
            continue
        views_owned = (
            [gradient] if placed is None else [p.of_local(gradient) for p in placed.pieces if p.owned]
        )
        views.setdefault((gradient.dtype, gradient.device), []).extend(views_owned)
    total: Tensor | None = None
    for (dtype, device), gradients in views.items():  # norms of 16-bit gradients are computed in float32
        norms = torch._foreach_norm(gradients, 2, torch.promote_types(dtype, torch.float32))
        # squared in float64: float32 would overflow above a norm of 2e19
        square = torch.stack(norms).double().square().sum()
        total = square if total is None else square + moved(total, device)
    return torch.zeros((), dtype=torch.float64) if total is None else total


@torch.no_grad()
def finite(tensors: Sequence[Tensor]) -> Tensor:
    """True if all elements are finite, from their norms, in one memory-bound pass. Numbers above 1e19, whose
    square overflows float32, count as infinite. The host waits for the device when it reads the result.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            alike.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    flag = torch.tensor(True)
    for (dtype, device), gradients in alike.items():
        norms = torch._foreach_norm(gradients, 2, torch.promote_types(dtype, torch.float32))
        flag = torch.stack(norms).isfinite().all() & moved(flag, device)
    return flag


def ratio(norm: float, largest: float | None, scale: float = 1.0) -> float:
    """Return the factor that clips and unscales all gradients: min(1, largest / (norm + 1e-6)) / scale, the
    rule of torch.nn.utils.clip_grad_norm_.

    Args:
        norm: norm of the unscaled gradients.
        largest: norm to clip to, or None for no clipping.
        scale: the loss scale, by which the gradients are multiplied.
    """
    return (1.0 if largest is None else min(1.0, largest / (norm + 1e-6))) / scale


@torch.no_grad()
def clip(gradients: Sequence[Tensor], norm: Tensor, largest: float | None, scale: float = 1.0) -> None:
    """Multiply all gradients by `ratio`, with the same arguments, in place and in one pass."""
    ratio = torch.ones_like(norm) if largest is None else largest / (norm + 1e-6)
    if norm.device.type == "cpu" and float(ratio) >= 1.0:  # reading it is free on CPUs and saves a pass
        if scale == 1.0:
            return
        ratio = torch.ones_like(ratio)
    if gradients:
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in gradients:
            alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, dtype), gradients in alike.items():
            torch._foreach_mul_(gradients, (ratio.clamp(max=1.0) / scale).to(device, dtype))
