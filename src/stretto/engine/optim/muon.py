"""Muon (Jordan et al. 2024; scaled as in Liu et al. 2025, Muon is Scalable for LLM Training, section 2.2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.engine.optim.base import FragmentOptimizer, Group, Moving, member_shape
from stretto.engine.optim.exchange import Exchange
from stretto.engine.parallel.fragment import Fragment

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: steepest at 0; values end in about [0.7, 1.2]
SMALLEST = 1e-7  # norm that is divided by
RMS = 0.2  # of an update's elements, about AdamW's (Liu et al. 2025, equation 4)


class Muon(FragmentOptimizer):
    """Matrices of blocks by orthogonalised momentum, all else by the `rest`, an optimiser of torch's.

    With momentum b and Nesterov's look ahead, m <- b m + (1 - b) g and

        w <- (1 - lr decay) w - 0.2 lr sqrt(max(rows, columns)) orthogonal((1 - b) g + b m)

    Each expert of a stack is a matrix of its own. Every matrix is brought together on one rank of its
    holders, made orthogonal there and sent back: two all-to-alls a step for each group of holders. Ranks that
    are no holders of one tensor together, such as data-parallel ranks without sharded states, do the same
    work.

    States: `momentum_buffer`, of the fragment's shape, or those of `rest`.
    """

    def __init__(
        self,
        groups: list[Group],
        fragments: Iterable[Fragment],
        lr: float,
        momentum: float,
        rest: torch.optim.Optimizer | None,
    ) -> None:
        super().__init__(groups, fragments, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})
        self.rest = rest
        if rest is not None:  # one optimiser to the outside: its groups and its states are these
            self.param_groups += rest.param_groups
            rest.state = self.state
        self._exchanges: dict[tuple[int, ...], Exchange] = {}

    def new_state(self, fragment: Fragment) -> dict[str, Tensor]:
        """The momentum."""
        return {"momentum_buffer": torch.zeros_like(fragment.parameter)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore
        """One update. Collective over the holders."""
        by_holders: dict[ProcessGroup | None, list[Moving]] = {}
        for moving in self.begin():
            by_holders.setdefault(moving[1].holders, []).append(moving)
        for together in by_holders.values():
            self._update(together)
        if self.rest is not None:
            self.rest.step()

    def _update(self, moving: Sequence[Moving]) -> None:
        updates = [_direction(group, gradient, state) for group, _, gradient, state in moving]
        fragments = [fragment for _, fragment, _, _ in moving]
        key = tuple(map(id, fragments))
        if key not in self._exchanges:
            self._exchanges[key] = Exchange(fragments)
        exchange = self._exchanges[key]
        matrices = exchange.gather(updates)
        exchange.scatter({at: orthogonal(matrix) for at, matrix in matrices.items()}, updates)
        for (group, fragment, _, _), update in zip(moving, updates, strict=True):
            lr = group["lr"]
            fragment.parameter.mul_(1.0 - lr * group["weight_decay"])
            fragment.parameter.add_(update, alpha=-RMS * lr * sqrt(max(member_shape(fragment))))


def _direction(group: Group, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
    momentum: float = group["momentum"]
    state["momentum_buffer"].lerp_(gradient, 1.0 - momentum)
    return gradient.lerp(state["momentum_buffer"], momentum)


def orthogonal(matrix: Tensor) -> Tensor:
    """About U V^T of the matrix U S V^T, by five Newton-Schulz iterations in its own type: singular values
    between those of rounding and the largest come out between 0.7 and 1.2.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=SMALLEST)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
