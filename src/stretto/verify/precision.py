"""A short second pass in the types that the job trains in, where the first proof is in float64.

The float64 reference is the truth here too. One process that trains in the job's types is off by rounding;
ranks that do the same sums in another order are off by errors of the same distribution, and may be off by a
multiple (`compare.rounding_bounds`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite

from stretto.engine.parallel.control import gather_json
from stretto.run.launch.failure import TrainingFailed
from stretto.verify.compare import rounding_bounds, worst_quantities, worst_quantity
from stretto.verify.evidence import Verdict

STEPS = 2
_MULTIPLE = 32.0
"""The bound of errors, in those of one process: four times that of a user's model, since tensor-parallel
sums, chunks and recomputation change the order of more sums; a wrong type is off by thousands."""
Errors = dict[str, dict[str, float]]
"""Relative errors of a step, by quantity and name. Those of weights are root mean squares: rounding of a
gradient near 0 may change a whole step of a single element."""


def prove_rounded(
    layout: str,
    dtype: str,
    eps: float,
    alone: Sequence[Errors] | None,
    train: Callable[[], tuple[Sequence[Errors], Sequence[str]]],
) -> Verdict:
    """Compare ranks in the job's own types with one process in them. Collective.

    Args:
        eps: machine epsilon of the coarsest type.
        alone: on rank 0, the errors of one process; None on the others.
        train: makes the steps on the ranks; returns their errors, and what is wrong with types in words.
    """
    limits: list[Errors] = gather_json(None if alone is None else list(alone))[0]
    try:
        errors, marks = train()
    except TrainingFailed as failed:
        return Verdict(layout=layout, dtype=dtype, quantities=(), diagnosis=str(failed))
    marks = list(marks)
    if not all(isfinite(error) for step in limits for named in step.values() for error in named.values()):
        marks.append(f"one process cannot be trained in {dtype}: its numbers are not finite")
    worst = worst_quantities(
        [worst_quantity(name, named, _bounds(name, step_limits[name], eps)) for name, named in step.items()]
        for step, step_limits in zip(errors, limits, strict=True)
    )
    marks += [
        f"{quantity.name}{f' of {quantity.worst}' if quantity.worst else ''}: the error is "
        f"{quantity.error:.1e}, {quantity.error_in_bounds:.3g} times what rounding may do: something is "
        "computed, kept or sent in a smaller type, or the code for this type is wrong"
        for quantity in worst
        if not quantity.equal
    ]
    return Verdict(layout=layout, dtype=dtype, quantities=worst, diagnosis=next(iter(marks), None))


def _bounds(quantity: str, errors: Mapping[str, float], eps: float) -> dict[str, float]:
    """Return the bounds of a quantity's errors. Those of weights are larger: Adam turns the rounding of a
    gradient near 0 into a part of a step that rounding does not bound.
    """
    bounds = rounding_bounds(errors, eps, _MULTIPLE)
    return {n: max(bound, eps**0.5) for n, bound in bounds.items()} if quantity == "weights" else bounds
