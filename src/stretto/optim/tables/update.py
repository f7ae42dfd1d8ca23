"""One update of a store's rows: compiled as one pass where it can be, else sum first and then apply."""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.optim.tables.rule import TableRule
from stretto.optim.tables.rules import Adagrad, LazyAdam, RowwiseAdagrad, Sgd, SplitSgd
from stretto.parallel.tables.kernels.face import Kernels
from stretto.parallel.tables.kernels.fast import CompiledKernels
from stretto.parallel.tables.kernels.plain import Grouped

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
    total = kernels.segment_sum(gradient.to(_of_gradient(weight, gradient)), offsets, grouped, scale)
    rule.apply(weight, states, grouped.rows, total if factor == 1 else total.mul_(factor), lr, mean_square)


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
