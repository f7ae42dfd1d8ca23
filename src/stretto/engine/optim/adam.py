"""Optimisers on Adam's moments: AdamW with moments in 16 bits (Loshchilov and Hutter 2019, algorithm 2), and
LAMB (You et al. 2019, Large Batch Optimization for Deep Learning, algorithm 2).

AdamW with moments in the weights' type is torch's fused one; see `build`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from stretto.engine.optim.base import FragmentOptimizer, Group, TensorGroup, count, rounds
from stretto.engine.optim.tensor_sums import member_squares, round_robin, subtract_scaled
from stretto.engine.parallel.fragment import ParameterFragment

CHUNK = 1 << 16  # elements whose moments are widened at a time, which fit the CPU's cache


class _Adam(FragmentOptimizer):
    """States of every fragment: `exp_avg` and `exp_avg_sq`, of its shape, and `step` on its device.

    Attributes:
        moments: dtype of the moments, or None for the parameter's.
    """

    moments: torch.dtype | None = None

    def __init__(
        self,
        groups: list[Group],
        fragments: Iterable[ParameterFragment],
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, fragments, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def new_state(self, fragment: ParameterFragment) -> dict[str, Tensor]:
        """Return zero first and second moments."""
        p = fragment.parameter
        first, second = (torch.zeros_like(p, dtype=self.moments) for _ in range(2))
        return {"step": count(p.device), "exp_avg": first, "exp_avg_sq": second}


class NarrowAdamW(_Adam):
    """AdamW with both moments stored in bfloat16 and updated in the parameter's type.

    They are rounded to nearest, not stochastically, which needs no random numbers and gives the same result
    under every layout. This suffices while a step changes a moment by more than half a unit in the last
    place, 2^-9 of it, so the betas may be at most 0.99: above that, rounding would discard the decay.
    """

    moments = torch.bfloat16

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore
        """Run one update."""
        for batch in self.begin():
            group = batch.group
            for fragment, gradient, state in batch:
                fragment.parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                parts = (fragment.parameter, gradient, state["exp_avg"], state["exp_avg_sq"])
                for weight, gradient_chunk, *narrow in zip(
                    *(t.reshape(-1).split(CHUNK) for t in parts), strict=True
                ):
                    first, second = (moment.to(weight.dtype) for moment in narrow)
                    _add_adam_steps(
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


class Lamb(_Adam):
    """Adam's direction plus weight decay, scaled for each tensor by the norm of its weights:

        r = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps),  w <- w - lr |w| / |r + decay w| (r + decay w)

    The paper's phi is the identity; if either norm is 0 the ratio is 1. Each expert of a stack counts as a
    tensor. Each group of holders has one all-reduce per step. The directions are stored between norms and
    update, which takes as much memory as the fragments (without holders, on a CPU, as those of a batch).
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore
        """Run one update. Collective over the holders."""
        for batches in rounds(self.begin()):
            round_robin(batches, [self._update(batch, self.scratch(batch)) for batch in batches])

    @staticmethod
    def _update(batch: TensorGroup, directions: list[Tensor]) -> Iterator[Tensor]:
        """Run the update of one batch, for `round_robin`; `directions` is memory for Adam's step plus
        decay.
        """
        for direction, parameter in zip(directions, batch.parameters, strict=True):
            torch.mul(parameter, batch.group["weight_decay"], out=direction)
        _add_adam_steps(
            group=batch.group,
            into=directions,
            gradients=batch.gradients,
            first=batch.state("exp_avg"),
            second=batch.state("exp_avg_sq"),
            steps=batch.state("step"),
        )
        squares = torch.stack([member_squares(batch, tensors) for tensors in (batch.parameters, directions)])
        yield squares
        weight, length = squares.sqrt_()
        ratio = torch.where((weight > 0) & (length > 0), weight / length, 1.0)
        subtract_scaled(batch, directions, batch.group["lr"] * ratio)


def _add_adam_steps(
    group: Group,
    into: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    steps: list[Tensor],
    factor: float = 1.0,
) -> None:
    """Update the moments and add factor x m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps), in one pass over
    memory: torch's fused AdamW, without decay, applied to `into` in place of weights.

    Args:
        group: parameter group with `betas` and `eps`.
        into, gradients, first, second: tensors of one type on one device; not empty.
        steps: t of each tensor, on that device.
    """
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        into,
        gradients,
        first,
        second,
        [],
        steps,
        lr=-factor,
        beta1=beta1,
        beta2=beta2,
        weight_decay=0.0,
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
