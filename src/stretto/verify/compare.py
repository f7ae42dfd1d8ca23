"""How far this rank's tensors are from the reference, brought together over all ranks.

Errors are relative: the largest difference over the largest reference value of the parameter. Where a parameter's reference is
all but zero beside the rest of the model (the bias of attention keys has no gradient in exact arithmetic), the difference
is measured against FLOOR times the model's largest value instead: below that it is rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.parallel.placed import Placed

FLOOR = 1e-6


@dataclass(frozen=True)
class Comparison:
    """Over all parameters and ranks.

    errors: relative error of each parameter, by name.
    ratios: best factor c for which ours = c * reference, by name; how a wrong scale shows.
    """

    errors: dict[str, float]
    ratios: dict[str, float]

    @property
    def worst(self) -> str:
        """Name of the parameter with the largest error."""
        return max(self.errors, key=lambda name: _order(self.errors[name]))

    @property
    def error(self) -> float:
        """The largest error."""
        return self.errors[self.worst]


def _order(error: float) -> float:
    return float("inf") if error != error else error


def compare(
    ours: Mapping[str, Tensor], places: Mapping[str, Placed], reference: Mapping[str, Tensor], replicas: int
) -> Comparison:
    """Compare this rank's local tensors, every copy of them, with the whole tensors of the reference. Collective.

    `replicas` is the number of data-parallel copies, each of which must hold every element as its own once.
    """
    largest = max(float(t.abs().max()) for t in reference.values())
    errors = torch.zeros(len(reference), dtype=torch.float64)
    products = torch.zeros(3, len(reference), dtype=torch.float64)
    for at, (name, whole) in enumerate(reference.items()):
        if name not in ours:
            continue
        scale = max(float(whole.abs().max()), FLOOR * largest)
        for piece in places[name].pieces:
            here, there = piece.of_local(ours[name]), piece.of_full(whole)
            if not here.numel():
                continue
            error = (here - there).abs().max() / scale
            errors[at] = torch.maximum(errors[at], error if error == error else torch.tensor(torch.inf))
            if piece.owned:
                products[0, at] += (here * there).sum()
                products[1, at] += (there * there).sum()
                products[2, at] += there.numel()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(errors, dist.ReduceOp.MAX)
        dist.all_reduce(products)
    held = products[2] / replicas
    for at, whole in enumerate(reference.values()):
        if held[at] != whole.numel():  # a part that no rank holds is as wrong as can be
            errors[at] = torch.inf
    ratios = torch.where(products[1] > 0, products[0] / products[1], 1.0)
    return Comparison(
        dict(zip(reference, errors.tolist(), strict=True)), dict(zip(reference, ratios.tolist(), strict=True))
    )


def relative(ours: float, reference: float) -> float:
    """|ours - reference| / |reference|."""
    return abs(ours - reference) / abs(reference) if reference else abs(ours)
