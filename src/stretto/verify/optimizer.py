"""The updates of a reference: by torch's own optimisers, and where torch has none in float64, by the paper's
formula written out. Nothing here is shared with the optimisers that a proof judges, but for a class of the
user's, which alone describes its rule: the reference then is that class on whole parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from stretto.engine.optim.build import build_optimizer
from stretto.job.optimiser import Optimiser

State = dict[str, Any]
Rule = Callable[[Tensor, Tensor, State, float, float], None]
"""Updates a tensor, given its gradient, states with the number of this update, rate and weight decay."""

_EPSILONS = (torch.finfo(torch.float32).eps, 1e-3)  # of Adafactor, in float64 too


class ReferenceOptimizer:
    """One process's optimiser, with states of the parameters' type. Each matrix or vector of a stack, such as
    an expert's, is a tensor by itself.

    Args:
        named: parameters of the plain model, which are updated in place.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], optimiser: Optimiser) -> None:
        self._parameters = [
            (name, p, [nn.Parameter(member) for member in members(name, p.detach())]) for name, p in named
        ]
        self._of_user: torch.optim.Optimizer | None = None
        if optimiser.user_defined:
            named = [(name, p) for name, p, _ in self._parameters]
            self._parameters, self._of_user = [], build_optimizer(named, optimiser)
        formula, self._states = _formula(optimiser), dict[nn.Parameter, State]()
        self._by_formula = list[tuple[nn.Parameter, Rule, float]]()
        by_torch: dict[float, list[nn.Parameter]] = {}
        for name, p, parts in self._parameters:
            decay = optimiser.weight_decay if decays(name, p, optimiser.no_decay) else 0.0
            if formula is not None and (optimiser.name != "muon" or is_orthogonalised(name, p)):
                self._by_formula += [(part, formula, decay) for part in parts]
            else:
                by_torch.setdefault(decay, []).extend(parts)
        self._by_torch = [(_torch(parts, decay, optimiser), decay) for decay, parts in by_torch.items()]
        self._coupled = optimiser.name == "sgd"  # torch's decay would go into the momentum

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update all parameters that have a gradient, and empty the gradients."""
        if self._of_user is not None:
            for group in self._of_user.param_groups:
                group["lr"] = rate
            self._of_user.step()
            self._of_user.zero_grad()
        for name, p, parts in self._parameters:
            gradients = [None] * len(parts) if p.grad is None else members(name, p.grad)
            for part, gradient in zip(parts, gradients, strict=True):
                part.grad = gradient
            p.grad = None
        for optimizer, decay in self._by_torch:
            for group in optimizer.param_groups:
                group["lr"] = rate
                for part in group["params"] if self._coupled else ():
                    if part.grad is not None:
                        part.mul_(1 - rate * decay)
            optimizer.step()
        for part, rule, decay in self._by_formula:
            if part.grad is not None:
                state = self._states.setdefault(part, {"updates": 0})
                state["updates"] += 1
                rule(part, part.grad, state, rate, decay)


def members(name: str, tensor: Tensor) -> list[Tensor]:
    """The matrices that a weight stacks, or the vectors of a bias, as views."""
    dims = 1 if name.endswith("bias") else 2
    return [tensor] if tensor.dim() <= dims else list(tensor.view(-1, *tensor.shape[-dims:]).unbind())


def decays(name: str, tensor: Tensor, exempt: Iterable[str]) -> bool:
    """True if weight decay applies: to matrices and stacks of them that no pattern of names exempts."""
    matrix = tensor.dim() > 1 and not name.endswith("bias")
    return matrix and not any(fnmatchcase(name, pattern) for pattern in exempt)


def is_orthogonalised(name: str, tensor: Tensor) -> bool:
    """True if Muon updates a parameter: a matrix of a block that multiplies activations, but no router."""
    first, *path = name.split(".")
    in_block = first in ("blocks", "encoder") and "router" not in path and "relative" not in path
    return in_block and tensor.dim() > 1 and not name.endswith("bias")


def _torch(parts: list[nn.Parameter], decay: float, optimiser: Optimiser) -> torch.optim.Optimizer:
    if optimiser.name == "sgd":
        return torch.optim.SGD(parts, lr=optimiser.lr, momentum=optimiser.momentum, foreach=False)
    if optimiser.name == "adafactor":
        return torch.optim.Adafactor(parts, lr=optimiser.lr, weight_decay=decay, eps=_EPSILONS, foreach=False)
    return torch.optim.AdamW(
        parts, lr=optimiser.lr, betas=optimiser.betas, eps=optimiser.eps, weight_decay=decay, foreach=False
    )


def _formula(optimiser: Optimiser) -> Rule | None:
    """The written-out update rule; None if torch.optim has it."""
    if optimiser.name == "lamb":
        return partial(_lamb, optimiser)
    return partial(_muon, optimiser) if optimiser.name == "muon" else None


def _lamb(optimiser: Optimiser, w: Tensor, g: Tensor, state: State, rate: float, decay: float) -> None:
    """You et al. 2019, algorithm 2, with phi(z) = z and a ratio of 1 where either norm is 0."""
    (b1, b2), number = optimiser.betas, state["updates"]
    state["m"] = m = b1 * state.get("m", torch.zeros_like(g)) + (1 - b1) * g
    state["v"] = v = b2 * state.get("v", torch.zeros_like(g)) + (1 - b2) * g**2
    update = m / (1 - b1**number) / ((v / (1 - b2**number)).sqrt() + optimiser.eps) + decay * w
    above, below = float(w.norm()), float(update.norm())
    w -= rate * (above / below if above > 0 and below > 0 else 1.0) * update


def _muon(optimiser: Optimiser, w: Tensor, g: Tensor, state: State, rate: float, decay: float) -> None:
    """Jordan et al. 2024 with Nesterov's momentum, scaled as in Liu et al. 2025, equation 4."""
    b = optimiser.momentum or 0.95
    state["m"] = m = b * state.get("m", torch.zeros_like(g)) + (1 - b) * g
    x = (1 - b) * g + b * m
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):  # of the singular values: s <- 3.4445 s - 4.775 s^3 + 2.0315 s^5
        right = x.T @ x
        x = 3.4445 * x - 4.7750 * (x @ right) + 2.0315 * (x @ right @ right)
    w.copy_((1 - rate * decay) * w - 0.2 * sqrt(max(w.shape)) * rate * x)
