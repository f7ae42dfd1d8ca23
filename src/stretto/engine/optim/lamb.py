"""LAMB (You et al. 2019, Large Batch Optimization for Deep Learning, algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.engine.optim.base import FragmentOptimizer, Group, Moving, add_adam_steps, count
from stretto.engine.optim.whole import member_squares, subtract_scaled, sum_over_holders
from stretto.engine.parallel.fragment import Fragment


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
        return {"step": count(p.device), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore
        """One update. Collective over the holders."""
        moving = self.begin()
        fragments = [fragment for _, fragment, _, _ in moving]
        directions = _directions(moving)
        weights = member_squares(fragments, [f.parameter for f in fragments])
        lengths = member_squares(fragments, directions)
        squares = [torch.stack(both) for both in zip(weights, lengths, strict=True)]
        sum_over_holders(zip(fragments, squares, strict=True))
        for (group, fragment, _, _), direction, both in zip(moving, directions, squares, strict=True):
            weight, length = both.sqrt()
            ratio = torch.where((weight > 0) & (length > 0), weight / length, 1.0)
            subtract_scaled(fragment, direction, group["lr"] * ratio)


def _directions(moving: Sequence[Moving]) -> list[Tensor]:
    """Of each fragment Adam's step plus decay, before the learning rate."""
    together: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
    directions = list[Tensor]()
    for at, (group, fragment, gradient, _) in enumerate(moving):
        directions.append(fragment.parameter * group["weight_decay"])
        together.setdefault((id(group), gradient.dtype, gradient.device), []).append(at)
    for places in together.values():
        states = [moving[at][3] for at in places]
        add_adam_steps(
            group=moving[places[0]][0],
            into=[directions[at] for at in places],
            gradients=[moving[at][2] for at in places],
            first=[state["exp_avg"] for state in states],
            second=[state["exp_avg_sq"] for state in states],
            steps=[state["step"] for state in states],
        )
    return directions
