"""AdamW (Loshchilov and Hutter 2019, algorithm 2) whose moments are kept in 16 bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from stretto.engine.optim.base import FragmentOptimizer, Group, add_adam_steps, count
from stretto.engine.parallel.fragment import Fragment

CHUNK = 1 << 16  # elements that are widened at a time: they stay in the cache


class NarrowAdamW(FragmentOptimizer):
    """AdamW with both moments in bfloat16, computed with in the parameter's type.

    Rounded to the nearest, not at random: the same on every layout without a random number for each element,
    and enough while a step changes a moment by more than the half of its last bit, 2^-9 of it. So betas end
    at 0.99: above, a moment would forget nothing.
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
        first, second = (torch.zeros_like(p, dtype=torch.bfloat16) for _ in range(2))
        return {"step": count(p.device), "exp_avg": first, "exp_avg_sq": second}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore
        """One update."""
        for group, fragment, gradient, state in self.begin():
            fragment.parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
            parts = (fragment.parameter, gradient, state["exp_avg"], state["exp_avg_sq"])
            for weight, gradient_chunk, *narrow in zip(
                *(t.reshape(-1).split(CHUNK) for t in parts), strict=True
            ):
                first, second = (moment.to(weight.dtype) for moment in narrow)
                add_adam_steps(
                    group=group,
                    into=[weight],
                    gradients=[gradient_chunk],
                    first=[first],
                    second=[second],
                    steps=[state["step"]],
                    factor=-group["lr"],
                )
                for moment, wide in zip(narrow, (first, second), strict=True):
                    moment.copy_(wide)
