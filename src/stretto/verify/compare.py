"""A step of one process, and the relative errors of ranks' tensors against it, combined over all ranks.

Errors are relative: the largest difference over the largest reference value of the parameter. If that value
is almost zero compared with the others of the model, it may be rounding alone, for example of a gradient that
cancels in exact arithmetic; another order of summation changes all of its digits. The difference is then
measured against FLOOR times the model's largest value: with a tolerance of 1e-9, that allows for a few units
in the last place of the largest value, and no more. Half of a gradient that is 1e12 times smaller than the
largest is still an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.engine.device import carrier
from stretto.engine.parallel.control import gather_json, world_size
from stretto.engine.parallel.fragment import ShardPlacement

TOLERANCE = 1e-9
FLOOR = 1e-6
_NOISE = 0.05  # share of an error that a factor may leave
NOTHING = 1e-10  # smaller errors are not explained

MULTIPLE = 8.0
"""In a type below float64, how many times one process's own rounding error that of ranks may be. Both sum the
same numbers in other orders, so that their errors are of one distribution; each is the largest of many, and
ranks round a few times more, in what they exchange. TTrace (arXiv 2506.09280) too takes its thresholds from
the rounding error that a trusted implementation has in this type, as the machine's epsilon alone says nothing
about how errors grow through layers."""

Pairs = list[tuple[Tensor, Tensor]]  # pieces of one parameter, and the reference's values of each
Box = tuple[list[int], list[int], bool]  # its start and end in the plain tensor; True if it is owned
Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A step of one process: full tensors by plain name, in float64 on the CPU.

    A step of several updates has no norm (NaN) and no gradients.

    Attributes:
        loss: mean over the global batch.
        norm: of all gradients together, before clipping.
        gradients: before clipping; none for parameters that get none.
        weights: after the update, tables included.
        states: of optimisers after the update, as NAME.STATE.
        buffers: of modules.
        lookups: how often each row of a table was looked up, [rows].
        outputs: of the forward: the pooled vectors of each feature, [samples, dim].
        logits: of a batch that is scored after the update.
    """

    loss: float
    norm: float
    gradients: Tensors
    weights: Tensors
    states: Tensors = field(default_factory=Tensors)
    buffers: Tensors = field(default_factory=Tensors)
    lookups: Tensors = field(default_factory=Tensors)
    outputs: Tensors = field(default_factory=Tensors)
    logits: Tensors = field(default_factory=Tensors)
    _scales: dict[str, dict[str, float]] = field(
        init=False, repr=False, default_factory=dict[str, dict[str, float]]
    )

    def scales(self, quantity: str) -> dict[str, float]:
        """Return the scale of each tensor's differences; states are measured within their kind."""
        if quantity not in self._scales:
            kinds = dict[str, Tensors]()
            tensors: Tensors = getattr(self, quantity)
            for name, tensor in tensors.items():
                kinds.setdefault(name.rpartition(".")[2] if quantity == "states" else "", {})[name] = tensor
            self._scales[quantity] = {
                name: size or 1.0 for kind in kinds.values() for name, size in scales_of(kind).items()
            }
        return self._scales[quantity]

    def compare(self, quantity: str, pairs: Mapping[str, Pairs]) -> Comparison:
        """Compare the pieces that each rank holds of a quantity's tensors with them. Collective."""
        return compare_pairs(
            {name: pairs.get(name, []) for name in self.scales(quantity)}, self.scales(quantity)
        )

    def compare_placed(
        self, quantity: str, actual: Mapping[str, Tensor], places: Mapping[str, ShardPlacement]
    ) -> Comparison:
        """Compare every copy of every tensor on this rank with a quantity's tensors. Collective."""
        return self.compare(quantity, placed_pairs(actual, places, getattr(self, quantity)))


@dataclass(frozen=True)
class Comparison:
    """Errors of tensors over all parameters and ranks.

    errors: relative error of each parameter, by name.
    ratios: best factor c for which actual = c * reference, by name; of the mean if several
        ranks hold it.
    residuals: relative error that is left when the reference is multiplied by c.
    ranks: ranks that hold a tensor that differs.
    """

    errors: dict[str, float]
    ratios: dict[str, float]
    residuals: dict[str, float]
    ranks: tuple[int, ...] = ()

    @property
    def worst(self) -> str:
        """Name of the parameter with the largest error."""
        return max(self.errors, key=self.errors.__getitem__)

    @property
    def error(self) -> float:
        """The largest error."""
        return self.errors[self.worst]

    def quantity(self, name: str, bound: float) -> Quantity:
        """Return the largest error as a quantity."""
        return Quantity(name, self.error, bound, self.worst)

    def ratio(self, names: Sequence[str], close: float) -> float | None:
        """Return the ratio of all these parameters, or None if they differ in it."""
        middle = median(self.ratios[name] for name in names)
        if not isfinite(middle) or middle == 0:
            return None
        allowed = min(close, _NOISE * abs(middle - 1.0))
        uniform = all(abs(self.ratios[name] / middle - 1.0) <= allowed for name in names)
        return middle if uniform else None

    def factor(self, names: Sequence[str], close: float) -> float | None:
        """Return the factor that explains the errors of all these parameters but for noise, or None."""
        explained = all(self.residuals[name] <= min(close, _NOISE * self.errors[name]) for name in names)
        return self.ratio(names, close) if explained else None


@dataclass(frozen=True)
class Quantity:
    """A quantity that is compared, over all steps.

    error: the largest relative difference from the plain model; None if it was not compared.
    bound: largest error that counts as equal.
    worst: the parameter or state that is farthest off; None for a number.
    """

    name: str
    error: float | None
    bound: float
    worst: str | None = None

    @property
    def equal(self) -> bool:
        """True if it is within its bound."""
        return self.error is None or self.error <= self.bound

    @property
    def error_in_bounds(self) -> float:
        """The error in units of its bound."""
        return (self.error or 0.0) / self.bound


def worst_quantity(
    name: str, errors: Mapping[str, float], bounds: Mapping[str, float], default: float = TOLERANCE
) -> Quantity:
    """Return the quantity where its error is largest in units of its bound, which is `default` for names
    without one. The name of a number is "".
    """
    if not errors:
        return Quantity(name, None, default)
    worst = max(errors, key=lambda parameter: errors[parameter] / bounds.get(parameter, default))
    return Quantity(name, errors[worst], bounds.get(worst, default), worst or None)


def worst_quantities(steps: Iterable[Sequence[Quantity]]) -> list[Quantity]:
    """Return each quantity at the step where its error is largest in units of its bound, in the order of the
    first step.
    """
    worst = dict[str, Quantity]()
    for quantity in (quantity for step in steps for quantity in step):
        previous = worst.setdefault(quantity.name, quantity)
        if quantity.error is not None and (
            previous.error is None or quantity.error_in_bounds > previous.error_in_bounds
        ):
            worst[quantity.name] = quantity
    return list(worst.values())


def rounding_bounds(errors: Mapping[str, float], eps: float, multiple: float = MULTIPLE) -> dict[str, float]:
    """Return the largest errors that rounding explains in a type of this epsilon: a multiple of those of one
    process. Each of these counts at least as the median and as the unit roundoff, since it may be small by
    chance.
    """
    floor = max(eps / 2, median(errors.values()) if errors else 0.0)
    return {name: multiple * max(error, floor) for name, error in errors.items()}


def compare(
    actual: Mapping[str, Tensor], places: Mapping[str, ShardPlacement], reference: Mapping[str, Tensor]
) -> Comparison:
    """Compare every copy of every tensor on this rank with the full tensors of the reference. Collective."""
    return compare_pairs(placed_pairs(actual, places, reference), scales_of(reference))


def compare_pairs(of: Mapping[str, Pairs], scales: Mapping[str, float]) -> Comparison:
    """Compare pieces with the reference's values of them. Collective: all ranks give the same names in one
    order.

    Args:
        scales: what differences of each name are measured against.
    """
    sizes, pairs = [scales[name] for name in of], list(of.values())
    local_errors = _errors(pairs, sizes, torch.ones(len(pairs), dtype=torch.float64))
    errors = _largest(local_errors)
    ranks: tuple[int, ...] = ()
    if bool((errors <= NOTHING).all()):  # the same on every rank; there is nothing to explain
        ratios, residuals = torch.ones_like(errors), errors
    else:
        ratios = _ratios(pairs)
        residuals = _largest(_errors(pairs, sizes, ratios))
        ranks = tuple(
            rank for rank, equal in enumerate(gather_json(bool((local_errors <= NOTHING).all()))) if not equal
        )
    rows = [dict(zip(of, row.tolist(), strict=True)) for row in (errors, ratios, residuals)]
    return Comparison(rows[0], rows[1], rows[2], ranks)


def scales_of(reference: Mapping[str, Tensor]) -> dict[str, float]:
    """Return what each parameter's differences are measured against."""
    sizes = {name: float(t.abs().max()) if t.numel() else 0.0 for name, t in reference.items()}
    floor = FLOOR * max(sizes.values(), default=0.0)
    return {name: max(size, floor) for name, size in sizes.items()}


def _errors(pairs: Sequence[Pairs], sizes: Sequence[float], factors: Tensor) -> Tensor:
    """Largest |value - factor * expected| on this rank, over each parameter's scale; infinite for NaN."""
    errors = torch.zeros(len(pairs), dtype=torch.float64)
    for at, pieces in enumerate(pairs):
        for value, expected in pieces:
            difference = torch.sub(value, expected, alpha=float(factors[at]))
            error = torch.linalg.vector_norm(difference, torch.inf).double() / sizes[at]
            errors[at] = torch.maximum(errors[at], torch.nan_to_num(error, nan=torch.inf))
    return errors


def _largest(errors: Tensor) -> Tensor:
    """Return the largest of all ranks' errors. Collective."""
    errors = errors.clone()
    largest(errors)
    return errors


def largest(tensor: Tensor) -> None:
    """Make each element the largest of all ranks'. Collective."""
    _reduce(tensor, dist.ReduceOp.MAX)


def mean_errors(of: Mapping[str, Pairs]) -> dict[str, float]:
    """Return the root mean square of each parameter's differences over that of its values, on all ranks that
    hold it. Collective.
    """
    squares = torch.zeros(2, len(of), dtype=torch.float64)
    for at, pieces in enumerate(of.values()):
        for value, expected in pieces:
            squares[0, at] += (value.double() - expected).square().sum()
            squares[1, at] += expected.square().sum()
    _reduce(squares, dist.ReduceOp.SUM)
    means = (squares[0] / torch.where(squares[1] > 0, squares[1], 1.0)).sqrt()
    return dict(zip(of, means.tolist(), strict=True))


def _ratios(pairs: Sequence[Pairs]) -> Tensor:
    """The best factor of each parameter, over all ranks that hold it."""
    products = torch.zeros(2, len(pairs), dtype=torch.float64)
    for at, pieces in enumerate(pairs):
        for value, expected in pieces:
            products[0, at] += (value * expected).sum()
            products[1, at] += (expected * expected).sum()
    _reduce(products, dist.ReduceOp.SUM)
    return torch.where(products[1] > 0, products[0] / products[1], 1.0)


def placed_pairs(
    actual: Mapping[str, Tensor], places: Mapping[str, ShardPlacement], reference: Mapping[str, Tensor]
) -> dict[str, Pairs]:
    """Return the pieces on this rank of each tensor, with the reference's values of each."""
    pairs: dict[str, Pairs] = {name: [] for name in reference}
    for name in reference.keys() & actual.keys():
        pieces = [(p.of_local(actual[name]), p.of_full(reference[name])) for p in places[name].pieces]
        pairs[name] = [pair for pair in pieces if pair[0].numel()]
    return pairs


def misplaced(
    actual: Mapping[str, Tensor],
    places: Mapping[str, ShardPlacement],
    reference: Mapping[str, Tensor],
    copies: Callable[[str], int],
) -> dict[str, str]:
    """Return parameters of which ranks hold or count a wrong part, each with what is wrong. Collective.

    Every element must be held in each copy of the parameters, and owned (counted in the norm, written to
    checkpoints) once in it.

    Args:
        copies: number of copies of the parameters that are split over these axes (`ShardPlacement.over`).
    """
    spread: list[dict[str, str]] = gather_json({name: placed.over for name, placed in places.items()})
    over = {name: axes for rank in spread for name, axes in rank.items()}
    local = {
        name: [
            (list(p.offsets), [start + size for start, size in zip(p.offsets, p.sizes, strict=True)], p.owned)
            for p in places[name].pieces
        ]
        for name in reference
        if name in actual
    }
    everywhere: list[dict[str, list[Box]]] = gather_json(local)
    wrong = dict[str, str]()
    for name, full in reference.items():
        boxes = [box for rank in everywhere for box in rank.get(name, ())]
        holders, owned = _counts(boxes, tuple(full.shape))
        replicas = copies(over.get(name, "tp"))
        if int(holders.min()) < replicas:
            wrong[name] = "a part of it is on no rank"
        elif (maximum := int(owned.max())) > replicas:
            wrong[name] = f"a part of it is counted {maximum / replicas:g} times"
        elif int(owned.min()) < replicas:
            wrong[name] = "a part of it is not counted"
    return wrong


def _counts(boxes: Sequence[Box], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Count the boxes, and the owned boxes, that contain each cell of the grid made by all their edges."""
    edges = [
        sorted({0, size, *(min(at, size) for box in boxes for at in (box[0][dim], box[1][dim]))})
        for dim, size in enumerate(shape)
    ]
    cells = [len(at) - 1 for at in edges]
    holders, owned = torch.zeros(cells, dtype=torch.int32), torch.zeros(cells, dtype=torch.int32)
    for starts, ends, counted in boxes:
        region = tuple(
            slice(at.index(min(start, size)), at.index(min(end, size)))
            for at, start, end, size in zip(edges, starts, ends, shape, strict=True)
        )
        holders[region] += 1
        owned[region] += int(counted)
    return holders, owned


def relative(actual: float, reference: float) -> float:
    """|actual - reference| / |reference|; infinite if actual is NaN."""
    if actual != actual:
        return float("inf")
    return abs(actual - reference) / abs(reference) if reference else abs(actual)


def share(tensor: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """Return rank 0's float64 tensor of this shape on all ranks. Collective."""
    if tensor is None:
        tensor = torch.empty(shape, dtype=torch.float64)
    if world_size() == 1:
        return tensor
    sent = tensor.contiguous().to(carrier())
    dist.broadcast(sent, 0)
    return sent.to(tensor.device)


def _reduce(tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> None:
    if world_size() > 1:
        sent = tensor.to(carrier())
        dist.all_reduce(sent, operation)
        tensor.copy_(sent)
