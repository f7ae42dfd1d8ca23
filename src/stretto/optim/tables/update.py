"""One update of a store's rows: compiled as one pass where it can be, else sum first and then apply.

Neither way makes anything of the size of all rows that a batch saw times their width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stretto.optim.tables.rule import TableRule
from stretto.optim.tables.rules import Adagrad, LazyAdam, RowwiseAdagrad, Sgd, SplitSgd
from stretto.parallel.tables.kernels import plain
from stretto.parallel.tables.kernels.face import Kernels
from stretto.parallel.tables.kernels.fast import CompiledKernels
from stretto.parallel.tables.kernels.plain import Grouped

_AT_ONCE = 4096  # rows, without compiled kernels

# of a compiled rule: its numbers beside the rate, and its states, in the compiled function's order
_COMPILED: dict[type, tuple[tuple[str, ...], tuple[str, ...]]] = {
    Sgd: ((), ()),
    Adagrad: (("eps",), ("sum",)),
    RowwiseAdagrad: (("eps",), ("sum",)),
    LazyAdam: (("beta1", "beta2", "eps"), ("first", "second", "count")),
    SplitSgd: ((), ("low",)),
}


@torch.no_grad()
def update(
    rule: TableRule,
    kernels: Kernels,
    weight: Tensor,
    states: dict[str, Tensor],
    slots: Tensor,
    offsets: Tensor,
    gradient: Tensor,
    lr: float,
    scale: Tensor | None = None,
    *,
    grouped: Grouped | None = None,
    mean_square: Tensor | None = None,
    factor: float = 1.0,
) -> None:
    """Update in place the rows that were looked up, each once, by its summed gradient.

    Args:
        slots, offsets, scale: as the lookup had them: [n], [bags + 1], [n].
        gradient: [bags, width], of what the lookup returned.
        grouped: `kernels.group(slots)`, where it is known already.
        mean_square: [u], of the whole rows in the order of `grouped.rows`, where this store has a part of
            their columns and the rule has a `row_statistic`; already times `factor` squared.
        factor: of all gradients, as clipping wants.
    """
    if not len(slots):
        return
    grouped = kernels.group(slots) if grouped is None else grouped
    if _is_compiled(rule, kernels, weight, states):
        assert isinstance(kernels, CompiledKernels)
        names, kept = _COMPILED[type(rule)]
        kernels.update(
            rule.name,
            (float(lr), float(factor), *(float(getattr(rule, name)) for name in names)),
            weight,
            [states[name] for name in kept],
            grouped,
            offsets,
            gradient.to(_of_gradient(weight, gradient)),
            scale,
            mean_square,
        )
        return
    gradient = gradient.to(_of_gradient(weight, gradient))
    bags = plain.bags_of(offsets)
    for first, part in _parts(grouped):
        total = plain.segment_sum(gradient, offsets, part, scale, bags).mul_(factor)
        means = None if mean_square is None else mean_square[first : first + len(part.rows)]
        rule.apply(weight, states, part.rows, total, lr, means)


def _parts(grouped: Grouped) -> Iterator[tuple[int, Grouped]]:
    """Some rows after others, with the number of the first: on a CPU as many as caches hold sums of."""
    if grouped.rows.device.type != "cpu" or len(grouped.rows) <= _AT_ONCE:
        yield 0, grouped
        return
    for first in range(0, len(grouped.rows), _AT_ONCE):
        starts = grouped.starts[first : first + _AT_ONCE + 1]
        own = slice(int(starts[0]), int(starts[-1]))
        yield (
            first,
            Grouped(grouped.rows[first : first + _AT_ONCE], grouped.order[own], starts - starts[0]),
        )


def _of_gradient(weight: Tensor, gradient: Tensor) -> torch.dtype:
    """The weight's type; of a split weight float32, or float64 where gradients are."""
    if weight.dtype != torch.bfloat16:
        return weight.dtype
    return torch.float64 if gradient.dtype == torch.float64 else torch.float32


def _is_compiled(rule: TableRule, kernels: Kernels, weight: Tensor, states: dict[str, Tensor]) -> bool:
    """Exactly these rules (one that derives from them may do something else), in memory in one run."""
    wanted = (torch.bfloat16,) if type(rule) is SplitSgd else (torch.float32, torch.float64)
    return (
        isinstance(kernels, CompiledKernels)
        and type(rule) in _COMPILED
        and weight.dtype in wanted
        and all(
            tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in (weight, *states.values())
        )
    )
