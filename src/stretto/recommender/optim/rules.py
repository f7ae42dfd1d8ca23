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
    """An update rule. Its states start at zero, and its weights are kept in the dtype of the job unless
    `weight_dtype` says otherwise.

    Attributes:
        row_statistic: whether the update needs the mean square of a row's gradient over all columns of the
            table, also those of other column shards.
    """

    name: ClassVar[str]
    row_statistic: ClassVar[bool] = False

    def state_specs(self, dtype: torch.dtype) -> dict[str, StateSpec]:
        """The states of a table of this dtype, by name."""
        return {}

    def weight_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which rows are stored and looked up, in a job of `dtype`."""
        return dtype

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """What is stored for rows of these values [rows, width]: `weight`, and the states that are part of
        it.
        """
        return {"weight": values}

    def decode(self, rows: Mapping[str, Tensor]) -> Tensor:
        """The values [rows, width] of stored rows; the inverse of `encode`."""
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
        """Updates in place the rows at `slots` [u], each once, by their summed gradient [u, width].

        Args:
            mean_square: [u], with `row_statistic`: of the gradient of the whole row; None: `gradient` is of
                whole rows.
        """
        rows = {name: state[slots] for name, state in states.items()}
        direction = self._direction(rows, gradient, mean_square)
        for name, state in states.items():
            state[slots] = rows[name]
        weight.index_add_(0, slots, direction, alpha=-lr)

    def _direction(self, states: dict[str, Tensor], gradient: Tensor, mean_square: Tensor | None) -> Tensor:
        """The descent direction [u, width]; updates the states of the rows, by name, in place."""
        return gradient


# which 16-bit word of a float32 is the upper half in memory
_UPPER = 1 if sys.byteorder == "little" else 0


def halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """(upper bfloat16, lower int16) of `values`, both of its shape; float64 is rounded to float32 first."""
    words = values.to(torch.float32).contiguous().view(torch.int16).unflatten(-1, (-1, 2))
    upper, lower = words[..., _UPPER], words[..., 1 - _UPPER]
    return upper.contiguous().view(torch.bfloat16), lower.contiguous()


def glue(upper: Tensor, lower: Tensor) -> Tensor:
    """The float32 of both halves, exactly."""
    words = [lower, lower]
    words[_UPPER], words[1 - _UPPER] = upper.contiguous().view(torch.int16), lower
    return torch.stack(words, -1).flatten(-2).view(torch.float32)


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

    def _direction(self, states: dict[str, Tensor], gradient: Tensor, mean_square: Tensor | None) -> Tensor:
        total = states["sum"].addcmul_(gradient, gradient)
        return gradient / total.sqrt().add_(self.eps)


@dataclass(frozen=True)
class RowwiseAdagrad(TableRule):
    """Adagrad with one state a row: G += mean_d g_d^2, w -= lr g / (sqrt(G) + eps).

    The mean is over all columns of the table (Gupta, Bengio and Weston 2014, "Training highly multiclass
    classifiers", JMLR 15); eps as in FBGEMM.
    """

    eps: float = 1e-8
    name = "rowwise_adagrad"
    row_statistic = True

    def state_specs(self, dtype: torch.dtype) -> dict[str, StateSpec]:
        return {"sum": StateSpec(True, dtype)}

    def _direction(self, states: dict[str, Tensor], gradient: Tensor, mean_square: Tensor | None) -> Tensor:
        total = states["sum"].add_(gradient.square().mean(1) if mean_square is None else mean_square)
        return gradient / total.sqrt().add_(self.eps).unsqueeze(1)


@dataclass(frozen=True)
class LazyAdam(TableRule):
    """Adam on the rows of a step only: the moments of the other rows do not decay, and do not move them.

    Each row runs Adam (Kingma and Ba 2015, algorithm 1) on its own gradients: bias correction uses the row's
    own number of updates, the state `count`, where PyTorch's SparseAdam uses the global step. A row first
    seen late is thus corrected like one seen at once.
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

    def _direction(self, states: dict[str, Tensor], gradient: Tensor, mean_square: Tensor | None) -> Tensor:
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
        weight, low = halves(values)
        return {"weight": weight, "low": low}

    def decode(self, rows: Mapping[str, Tensor]) -> Tensor:
        return glue(rows["weight"], rows["low"])

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
        """`gradient` is float32, or float64, in which case the result is rounded to float32 once."""
        values = glue(weight[slots], states["low"][slots]).to(gradient.dtype)
        weight[slots], states["low"][slots] = halves(values.add_(gradient, alpha=-lr))


RULES: Mapping[str, Callable[..., TableRule]] = {
    rule.name: rule for rule in (Sgd, Adagrad, RowwiseAdagrad, LazyAdam, SplitSgd)
}


def options_of(name: str) -> tuple[str, ...]:
    """The options of a rule beside the learning rate: `eps`; `beta1`, `beta2`, `eps`; or none.

    Raises:
        StrettoError: no rule has that name.
    """
    return tuple(field.name for field in fields(_rule(name)))


def build_rule(name: str, **options: float) -> TableRule:
    """The rule `sgd`, `adagrad`, `rowwise_adagrad`, `lazy_adam` or `split_sgd`.

    Args:
        options: as named by `options_of`. `eps`: added to the root, above 0 (default: Adagrad 1e-10, others
            1e-8). `beta1`, `beta2`: of lazy Adam, in [0, 1) (default: 0.9, 0.999).

    Raises:
        StrettoError: no such rule, an option that it does not have, or a value out of range.
    """
    rule, known = _rule(name), options_of(name)
    for option, value in options.items():
        if option not in known:
            raise StrettoError(
                f"rule {name} has no option {option}",
                hint=f"its options: {', '.join(known)}" if known else "it has none",
            )
        if option == "eps" and not value > 0:
            raise StrettoError(f"rule {name}: eps is {value}", hint="above 0, as 1e-8")
        if option.startswith("beta") and not 0 <= value < 1:
            raise StrettoError(f"rule {name}: {option} is {value}", hint="at least 0 and below 1")
    return rule(**options)


def _rule(name: str) -> Any:
    if name not in RULES:
        near = get_close_matches(name, RULES, 1)
        raise StrettoError(
            f"there is no table optimiser {name!r}",
            hint=(f"perhaps {near[0]}; " if near else "") + f"known: {', '.join(RULES)}",
        )
    return RULES[name]
