"""LAMB (You et al. 2019, Large Batch Optimization for Deep Learning, algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from stretto.optim.base import FragmentOptimizer, Group, count
from stretto.optim.whole import member_squares, subtract_scaled, sum_over_holders
from stretto.parallel.fragment import Fragment


class Lamb(FragmentOptimizer):
    """Adam's direction plus decay, of each tensor scaled to the norm of its weights:

        r = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps),  w <- w - lr |w| / |r + decay w| (r + decay w)

    with the paper's phi the identity; where either norm is 0 the ratio is 1. Each expert of a stack is a
    tensor of its own. One all-reduce a step for each group of holders. Between the norms and the update the
    direction is held: as much memory as the fragments.
    """

    def __init__(
        self,
        groups: list[Group],
        fragments: Iterable[Fragment],
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, fragments, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def new_state(self, fragment: Fragment) -> dict[str, Tensor]:
        """First and second moments."""
        p = fragment.parameter
        return {"step": count(), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore
        """One update. Collective over the holders."""
        moving = self.begin()
        fragments = [fragment for _, fragment, _, _ in moving]
        directions = [_direction(group, f, gradient, state) for group, f, gradient, state in moving]
        weights = member_squares(fragments, [f.parameter for f in fragments])
        lengths = member_squares(fragments, directions)
        squares = [torch.stack(both) for both in zip(weights, lengths, strict=True)]
        sum_over_holders(zip(fragments, squares, strict=True))
        for (group, fragment, _, _), direction, both in zip(moving, directions, squares, strict=True):
            weight, length = both.sqrt()
            ratio = torch.where((weight > 0) & (length > 0), weight / length, 1.0)
            subtract_scaled(fragment, direction, group["lr"] * ratio)


def _direction(group: Group, fragment: Fragment, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Adam's step plus decay, before the learning rate."""
    (beta1, beta2), step = group["betas"], float(state["step"])
    first, second = state["exp_avg"], state["exp_avg_sq"]
    first.lerp_(gradient, 1.0 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    root = second.sqrt().mul_((1.0 - beta2**step) ** -0.5).add_(group["eps"])
    direction = torch.div(first, root, out=root).mul_(1.0 / (1.0 - beta1**step))
    return (
        direction.add_(fragment.parameter, alpha=group["weight_decay"])
        if group["weight_decay"]
        else direction
    )
