"""How far this rank's tensors are from the reference, brought together over all ranks.

Errors are relative: the largest difference over the largest reference value of the parameter. Where a
parameter's reference is all but zero beside the rest of the model (the bias of attention keys has no
gradient in exact arithmetic), the difference is measured against FLOOR times the model's largest value
instead: below that it is rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.parallel.placed import Piece, Placed

FLOOR = 1e-6


@dataclass(frozen=True)
class Comparison:
    """Over all parameters and ranks.

    errors: relative error of each parameter, by name.
    ratios: best factor c for which ours = c * reference, by name; of copies in several replicas, their
        mean's.
    residuals: relative error that is left when the reference is multiplied by c.
    """

    errors: dict[str, float]
    ratios: dict[str, float]
    residuals: dict[str, float]

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
    ours: Mapping[str, Tensor], places: Mapping[str, Placed], reference: Mapping[str, Tensor]
) -> Comparison:
    """Compare every copy of every tensor on this rank with the whole tensors of the reference. Collective."""
    largest = max(float(t.abs().max()) for t in reference.values())
    scales = [max(float(t.abs().max()), FLOOR * largest) for t in reference.values()]
    pairs = [_pairs(ours, places, name, whole) for name, whole in reference.items()]
    products = torch.zeros(2, len(pairs), dtype=torch.float64)
    for at, found in enumerate(pairs):
        for here, there, piece in found:
            if piece.owned:
                products[0, at] += (here * there).sum()
                products[1, at] += (there * there).sum()
    _reduce(products, dist.ReduceOp.SUM)
    ratios = torch.where(products[1] > 0, products[0] / products[1], 1.0)
    errors = torch.zeros(2, len(pairs), dtype=torch.float64)
    for at, found in enumerate(pairs):
        for here, there, _ in found:
            for row, factor in enumerate((1.0, ratios[at])):
                error = (here - factor * there).abs().max() / scales[at]
                errors[row, at] = torch.maximum(errors[row, at], torch.nan_to_num(error, nan=torch.inf))
    _reduce(errors, dist.ReduceOp.MAX)
    return Comparison(
        *(dict(zip(reference, row.tolist(), strict=True)) for row in (errors[0], ratios, errors[1]))
    )


def _pairs(
    ours: Mapping[str, Tensor], places: Mapping[str, Placed], name: str, whole: Tensor
) -> list[tuple[Tensor, Tensor, Piece]]:
    """The pieces held here: ours, the reference's, and the piece."""
    if name not in ours:
        return []
    found = [(p.of_local(ours[name]), p.of_full(whole), p) for p in places[name].pieces]
    return [pair for pair in found if pair[0].numel()]


def misplaced(
    ours: Mapping[str, Tensor], places: Mapping[str, Placed], reference: Mapping[str, Tensor], replicas: int
) -> dict[str, str]:
    """What is wrong with who holds what, by parameter. Collective.

    Every element must be held in each of the `replicas`, and owned (counted in the norm, written to
    checkpoints) once.
    """
    found = dict[str, str]()
    for name, whole in reference.items():
        counts = torch.zeros(2, *whole.shape, dtype=torch.int32)
        for _, there, piece in _pairs(ours, places, name, counts[0]):
            there += 1
            if piece.owned:
                piece.of_full(counts[1]).add_(1)
        _reduce(counts, dist.ReduceOp.SUM)
        least, fewest, most = int(counts[0].min()), int(counts[1].min()), int(counts[1].max())
        if least < replicas:
            found[name] = "a part of it is on no rank"
        elif most > replicas:
            found[name] = f"a part of it is counted {most / replicas:g} times"
        elif fewest < replicas:
            found[name] = "a part of it is not counted"
    return found


def relative(ours: float, reference: float) -> float:
    """|ours - reference| / |reference|; infinite where ours is no number."""
    if ours != ours:
        return float("inf")
    return abs(ours - reference) / abs(reference) if reference else abs(ours)


def _reduce(tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor, operation)
