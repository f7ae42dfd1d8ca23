"""Rules of tables by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.errors import StrettoError
from stretto.recommender.stores.store import StateSpec


class TableRule(Protocol):
    """A rule. Its states begin as zeros.

    Attributes:
        row_statistic: it needs the mean of a row's squared gradient over all columns of the table, wherever
            they are.
    """

    name: str
    row_statistic: bool

    def state_specs(self, dtype: torch.dtype) -> dict[str, StateSpec]:
        """The states that a table of this type has."""
        ...

    def weight_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type that rows are looked up in, where the job's is `dtype`."""
        ...

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """`weight`, and states that are part of it, for rows of these values [rows, width]."""
        ...

    def decode(self, rows: Mapping[str, Tensor]) -> Tensor:
        """The values [rows, width] of rows and their states."""
        ...

    def apply(
        self,
        weight: Tensor,
        states: dict[str, Tensor],
        slots: Tensor,
        gradient: Tensor,
        lr: float,
        mean_square: Tensor | None = None,
    ) -> None:
        """Update the rows at `slots` [u], each once, by their summed gradient [u, width], in place.

        Args:
            mean_square: [u], with `row_statistic`: of the whole row; None: `gradient` is the whole row.
        """
        ...


# where the upper half of a float32 lies in memory
_UPPER = 1 if sys.byteorder == "little" else 0


def halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """(upper bfloat16, lower int16), both shaped as `values` (rounded to float32 where they are float64)."""
    words = values.to(torch.float32).contiguous().view(torch.int16).unflatten(-1, (-1, 2))
    upper, lower = words[..., _UPPER], words[..., 1 - _UPPER]
    return upper.contiguous().view(torch.bfloat16), lower.contiguous()


def glue(upper: Tensor, lower: Tensor) -> Tensor:
    """The float32 of both halves, exactly."""
    words = [lower, lower]
    words[_UPPER], words[1 - _UPPER] = upper.contiguous().view(torch.int16), lower
    return torch.stack(words, -1).flatten(-2).view(torch.float32)


class _Plain:
    """What rules share whose weights are in the job's type."""

    row_statistic = False

    def weight_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        return {"weight": values}

    def decode(self, rows: Mapping[str, Tensor]) -> Tensor:
        return rows["weight"]


@dataclass(frozen=True)
class Sgd(_Plain):
    """w -= lr g."""

    name = "sgd"

    def state_specs(self, dtype: torch.dtype) -> dict[str, StateSpec]:
        return {}

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
        weight.index_add_(0, slots, gradient, alpha=-lr)


@dataclass(frozen=True)
class Adagrad(_Plain):
    """G += g^2, w -= lr g / (sqrt(G) + eps), of each element (Duchi et al. 2011), with torch's eps."""

    eps: float = 1e-10
    name = "adagrad"

    def state_specs(self, dtype: torch.dtype) -> dict[str, StateSpec]:
        return {"sum": StateSpec(False, dtype)}

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
        total = states["sum"][slots].addcmul_(gradient, gradient)
        states["sum"][slots] = total
        weight.index_add_(0, slots, gradient / total.sqrt_().add_(self.eps), alpha=-lr)


@dataclass(frozen=True)
class RowwiseAdagrad(_Plain):
    """Adagrad with one number for a row: G += mean_d g_d^2, w -= lr g / (sqrt(G) + eps).

    The mean is over all columns of the table (Gupta, Bengio and Weston 2014, "Training highly multiclass
    classifiers", JMLR 15); eps as in FBGEMM.
    """

    eps: float = 1e-8
    name = "rowwise_adagrad"
    row_statistic = True

    def state_specs(self, dtype: torch.dtype) -> dict[str, StateSpec]:
        return {"sum": StateSpec(True, dtype)}

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
        if mean_square is None:
            mean_square = gradient.square().mean(1)
        total = states["sum"][slots].add_(mean_square)
        states["sum"][slots] = total
        weight.index_add_(0, slots, gradient / total.sqrt_().add_(self.eps).unsqueeze(1), alpha=-lr)


@dataclass(frozen=True)
class LazyAdam(_Plain):
    """Adam of the rows seen alone: moments of the others neither decay nor move them.

    Each row is Adam (Kingma and Ba 2015, algorithm 1) on the gradients that this row got: the correction of
    its moments' bias takes the row's own number of updates, a state `count`, where torch's SparseAdam takes
    the step of all. So a row that is first seen late is corrected as one that is seen at once, and what a row
    becomes depends on its own gradients only.
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
        count = states["count"][slots].add_(1)
        states["count"][slots] = count
        first = states["first"][slots].lerp_(gradient, 1 - self.beta1)
        states["first"][slots] = first
        second = states["second"][slots].mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        states["second"][slots] = second
        step = count.to(torch.float64).unsqueeze(1)
        of_first = (1 - self.beta1**step).to(gradient.dtype)
        of_second = (1 - self.beta2**step).sqrt_().to(gradient.dtype)
        second.sqrt_().div_(of_second).add_(self.eps)
        weight.index_add_(0, slots, first.div_(of_first).div_(second), alpha=-lr)


@dataclass(frozen=True)
class SplitSgd:
    """SGD in float32 whose weight is a bfloat16, and the 16 bits that a bfloat16 lacks a state (Kalamkar et
    al. 2020, arXiv 2005.04680): lookups read half the bytes, and no bit is lost.

    Both halves together are the float32, exactly: the weight is its upper half, cut off, not rounded.
    """

    name = "split_sgd"
    row_statistic = False

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
        """`gradient` is float32, or float64: then the difference is rounded once, to float32."""
        values = glue(weight[slots], states["low"][slots]).to(gradient.dtype)
        weight[slots], states["low"][slots] = halves(values.add_(gradient, alpha=-lr))


RULES: Mapping[str, Callable[..., TableRule]] = {
    rule.name: rule for rule in (Sgd, Adagrad, RowwiseAdagrad, LazyAdam, SplitSgd)
}


def options_of(name: str) -> tuple[str, ...]:
    """What can be set of a rule, beside the rate: `eps`, or `beta1`, `beta2`, `eps`, or nothing.

    Raises:
        StrettoError: no rule has that name.
    """
    return tuple(field.name for field in fields(_rule(name)))


def build_rule(name: str, **options: float) -> TableRule:
    """The rule `sgd`, `adagrad`, `rowwise_adagrad`, `lazy_adam` or `split_sgd`.

    Args:
        options: as `options_of` names them. `eps`: added to the root, above 0 (Adagrad 1e-10, others 1e-8).
            `beta1`, `beta2`: of lazy Adam, at least 0 and below 1 (0.9, 0.999).

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
            f"no rule for tables is called {name!r}",
            hint=(f"perhaps {near[0]}; " if near else "") + f"known: {', '.join(RULES)}",
        )
    return RULES[name]
