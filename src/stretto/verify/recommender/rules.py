"""The updates of tables, by their formulas over whole tables: no rows are picked, no sums are by segment.

Written apart from `optim.tables`, so that no mistake can be in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Table:
    """A stored table in float64.

    Attributes:
        values: [rows, dim].
        states: of the update, [rows, dim] or [rows].
    """

    values: Tensor
    states: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


@dataclass(frozen=True)
class Numbers:
    """What a rule is given beside gradients: the rate of this step, and its constants."""

    lr: float
    eps: float
    beta1: float
    beta2: float


Rule = Callable[
    [Table, Tensor, Tensor, Numbers], None
]  # of a table, its gradient, rows seen [rows] as 0 or 1


def _sgd(table: Table, g: Tensor, seen: Tensor, by: Numbers) -> None:
    table.values -= by.lr * g


def _adagrad(table: Table, g: Tensor, seen: Tensor, by: Numbers) -> None:
    table.states["sum"] += g**2
    table.values -= by.lr * g / (table.states["sum"] ** 0.5 + by.eps)


def _rowwise_adagrad(table: Table, g: Tensor, seen: Tensor, by: Numbers) -> None:
    table.states["sum"] += (g**2).sum(1) / g.shape[1]
    table.values -= by.lr * g / (table.states["sum"] ** 0.5 + by.eps)[:, None]


def _lazy_adam(table: Table, g: Tensor, seen: Tensor, by: Numbers) -> None:
    states, often = table.states, seen[:, None]
    states["count"] += seen
    states["first"] += often * (1 - by.beta1) * (g - states["first"])
    states["second"] += often * (1 - by.beta2) * (g**2 - states["second"])
    updates = states["count"].clamp(min=1)[:, None]  # of rows that were never seen nothing is used
    first = states["first"] / (1 - by.beta1**updates)
    second = states["second"] / (1 - by.beta2**updates)
    table.values -= by.lr * often * first / (second**0.5 + by.eps)


def _split_sgd(table: Table, g: Tensor, seen: Tensor, by: Numbers) -> None:
    table.values = in_float32(table.values - by.lr * g)


RULES: Mapping[str, Rule] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "lazy_adam": _lazy_adam,
    "split_sgd": _split_sgd,
}
_STATES: Mapping[str, Mapping[str, bool]] = {  # by name; whether there is one number for a row
    "adagrad": {"sum": False},
    "rowwise_adagrad": {"sum": True},
    "lazy_adam": {"first": False, "second": False, "count": True},
}


def begin(values: Tensor, rule: str) -> Table:
    """A table with its states at zero."""
    rows, dim = values.shape
    kept = in_float32(values) if rule == "split_sgd" else values
    given = _STATES.get(rule, {}).items()
    return Table(kept, {name: kept.new_zeros(rows if row else (rows, dim)) for name, row in given})


def looked_up(table: Table, rule: str) -> Tensor:
    """What lookups see of the values: of split SGD only the upper 16 bits of each float32."""
    if rule != "split_sgd":
        return table.values.clone()
    bits = table.values.float().view(torch.int32)
    return (bits & -(1 << 16)).view(torch.float32).double()


def in_float32(values: Tensor) -> Tensor:
    """Rounded to float32."""
    return values.float().double()
