"""Optimisers of embedding tables: sparse updates of the rows that a step looked up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, ClassVar

import torch
from torch import Tensor

from stretto.errors import StrettoError
from stretto.recommender.stores.store import StateSpec


class TableRule:
    """An update rule. Its states start at zero, and its weights have the dtype of the job unless
    `weight_dtype` is another.

    Attributes:
        row_statistic: True if the update needs the mean square of a row's gradient over all columns of the
            table, including those of other column-wise shards.
    """

    name: ClassVar[str]
    row_statistic: ClassVar[bool] = False

    def state_specs(self, dtype: torch.dtype) -> dict[str, StateSpec]:
        """The states of a table of this dtype, by name."""
        return {}

    def weight_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which rows are stored and looked up in a job of `dtype`."""
        return dtype

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """Convert values [rows, width] to the stored tensors: `weight`, and states that are part of it."""
        return {"weight": values}

    def decode(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Convert stored rows to values [rows, width]; the inverse of `encode`."""
        return rows["weight"]

    @torch.no_grad()
    def apply(
        self,
        weight: Tensor,
        states: dict[str, Tensor],
        slots: Tensor,
        gradient: Tensor,
        lr: float,
        mean_square: Tensor | None = None,
    ) -> None:
        """Update the rows at `slots` [u], each once, in place by their summed gradient [u, width].

        Args:
            mean_square: [u], with `row_statistic` the mean square of the gradient over all columns of the
                table; None if `gradient` has all columns.
        """
        rows = {name: state[slots] for name, state in states.items()}
        direction = self.direction(rows, gradient, mean_square)
        for name, state in states.items():
            state[slots] = rows[name]
        weight.index_add_(0, slots, direction, alpha=-lr)

    def direction(self, states: dict[str, Tensor], gradient: Tensor, mean_square: Tensor | None) -> Tensor:
        """Return the descent direction [u, width]; updates the states of the rows, by name, in place."""
        return gradient


# which 16-bit word of a float32 is the upper half in memory
_UPPER = 1 if sys.byteorder == "little" else 0


def split_halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split into (upper bfloat16, lower int16), both of the shape of `values`, rounded to float32 first."""
    pairs = values.to(torch.float32).contiguous().view(torch.int16).unflatten(-1, (-1, 2))
    upper, lower = pairs[..., _UPPER], pairs[..., 1 - _UPPER]
    return upper.contiguous().view(torch.bfloat16), lower.contiguous()


def join_halves(upper: Tensor, lower: Tensor) -> Tensor:
    """Join the halves of `split_halves` to float32, exactly."""
    pair = [lower, lower]
    pair[_UPPER] = upper.contiguous().view(torch.int16)
    return torch.stack(pair, -1).flatten(-2).view(torch.float32)


@dataclass(frozen=True)
class Sgd(TableRule):
    """w -= lr g."""

    name = "sgd"


@dataclass(frozen=True)
class Adagrad(TableRule):
    """G += g^2, w -= lr g / (sqrt(G) + eps), element by element (Duchi et al. 2011); eps as in PyTorch."""

    eps: float = 1e-10
    name = "adagrad"

    def state_specs(self, dtype: torch.dtype) -> dict[str, StateSpec]:
        return {"sum": StateSpec(False, dtype)}

    def direction(self, states: dict[str, Tensor], gradient: Tensor, mean_square: Tensor | None) -> Tensor:
        total = states["sum"].addcmul_(gradient, gradient)
        return gradient / total.sqrt().add_(self.eps)


@dataclass(frozen=True)
class RowwiseAdagrad(TableRule):
    """Adagrad with one state per row: G += mean_d g_d^2, w -= lr g / (sqrt(G) + eps).

    The mean is over all columns of the table (Gupta, Bengio and Weston 2014, "Training highly multiclass
    classifiers", JMLR 15); eps as in FBGEMM.
    """

    eps: float = 1e-8
    name = "rowwise_adagrad"
    row_statistic = True

    def state_specs(self, dtype: torch.dtype) -> dict[str, StateSpec]:
        return {"sum": StateSpec(True, dtype)}

    def direction(self, states: dict[str, Tensor], gradient: Tensor, mean_square: Tensor | None) -> Tensor:
        total = states["sum"].add_(gradient.square().mean(1) if mean_square is None else mean_square)
        return gradient / total.sqrt().add_(self.eps).unsqueeze(1)


@dataclass(frozen=True)
class LazyAdam(TableRule):
    """Adam on the rows of a step only: moments of other rows neither decay nor move them.

    Each row runs Adam (Kingma and Ba 2015, algorithm 1) on its own gradients. Bias correction uses the row's
    number of updates, the state `count`, while PyTorch's SparseAdam uses the global step: a row that first
    occurs late is corrected like one that occurs at once.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    name = "lazy_adam"

    def state_specs(self, dtype: torch.dtype) -> dict[str, StateSpec]:
        return {
            "first": StateSpec(False, dtype),
            "second": StateSpec(False, dtype),
            "count": StateSpec(True, torch.int32),
        }

    def direction(self, states: dict[str, Tensor], gradient: Tensor, mean_square: Tensor | None) -> Tensor:
        step = states["count"].add_(1).to(torch.float64).unsqueeze(1)
        first = states["first"].lerp_(gradient, 1 - self.beta1)
        second = states["second"].mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        first_correction = (1 - self.beta1**step).to(gradient.dtype)
        second_correction = (1 - self.beta2**step).sqrt_().to(gradient.dtype)
        return (first / first_correction).div_(second.sqrt().div_(second_correction).add_(self.eps))


@dataclass(frozen=True)
class SplitSgd(TableRule):
    """float32 SGD whose weight is a bfloat16, with the remaining 16 bits as a state (Kalamkar et al. 2020,
    arXiv 2005.04680): lookups read half the bytes, and no bit is lost.

    The two halves together are exactly the float32 weight: the upper one is truncated, not rounded.
    """

    name = "split_sgd"

    def state_specs(self, dtype: torch.dtype) -> dict[str, StateSpec]:
        return {"low": StateSpec(False, torch.int16)}

    def weight_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        weight, low = split_halves(values)
        return {"weight": weight, "low": low}

    def decode(self, rows: Mapping[str, Tensor]) -> Tensor:
        return join_halves(rows["weight"], rows["low"])

    @torch.no_grad()
    def apply(
        self,
        weight: Tensor,
        states: dict[str, Tensor],
        slots: Tensor,
        gradient: Tensor,
        lr: float,
        mean_square: Tensor | None = None,
    ) -> None:
        """As `TableRule.apply`; with a float64 `gradient` the result is rounded to float32 once."""
        values = join_halves(weight[slots], states["low"][slots]).to(gradient.dtype)
        weight[slots], states["low"][slots] = split_halves(values.add_(gradient, alpha=-lr))


RULES: Mapping[str, Callable[..., TableRule]] = {
    rule.name: rule for rule in (Sgd, Adagrad, RowwiseAdagrad, LazyAdam, SplitSgd)
}


def options_of(name: str) -> tuple[str, ...]:
    """Return the options of a rule, other than the learning rate, such as `eps` or `beta1`.

    Raises:
        StrettoError: no rule has that name.
    """
    return tuple(field.name for field in fields(_find_rule(name)))


def build_rule(name: str, **options: float) -> TableRule:
    """Return the rule `sgd`, `adagrad`, `rowwise_adagrad`, `lazy_adam` or `split_sgd`.

    Args:
        options: as named by `options_of`. `eps`: added to the root, above 0 (default: Adagrad 1e-10, others
            1e-8). `beta1`, `beta2`: decay rates of lazy Adam, in [0, 1) (default: 0.9, 0.999).

    Raises:
        StrettoError: no such rule, an option that it does not have, or a value out of range.
    """
    rule, names = _find_rule(name), options_of(name)
    for option, value in options.items():
        if option not in names:
            raise StrettoError(
                f"rule {name} has no option {option}",
                hint=f"its options: {', '.join(names)}" if names else "it has none",
            )
        if option == "eps" and not value > 0:
            raise StrettoError(f"rule {name}: eps is {value}", hint="above 0, such as 1e-8")
        if option.startswith("beta") and not 0 <= value < 1:
            raise StrettoError(f"rule {name}: {option} is {value}", hint="at least 0 and below 1")
    return rule(**options)


def _find_rule(name: str) -> Any:
    if name not in RULES:
        close = get_close_matches(name, RULES, 1)
        raise StrettoError(
            f"no table optimiser {name!r}",
            hint=(f"did you mean {close[0]}? " if close else "") + f"allowed are {', '.join(RULES)}",
        )
    return RULES[name]
