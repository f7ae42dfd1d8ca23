"""What a difference looks like: the usual bugs of parallel training leave a mark each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import isfinite
from statistics import median

from stretto.verify.compare import Comparison

TOLERANCE = 1e-9
_SAME = 1e-6  # factors this close are one factor
_SHOWN = 4  # parameters that are named


@dataclass(frozen=True)
class Evidence:
    """One step of a layout beside the reference.

    microbatches: in the global batch.
    replicas: data-parallel copies.
    copies: of the weights, in bidirectional pipelines.
    tied: names of parameters that several layers share.
    misplaced: what is wrong with who holds a parameter, by name.
    """

    loss: float
    reference_loss: float
    gradients: Comparison
    norm: float
    reference_norm: float
    weights: Comparison
    microbatches: int
    replicas: int
    tied: Collection[str]
    misplaced: Mapping[str, str]
    copies: int = 1


def diagnose(seen: Evidence) -> str | None:
    """One sentence on the likeliest cause; None when all is equal."""
    ratio = seen.loss / seen.reference_loss if seen.reference_loss else 1.0
    if not abs(ratio - 1.0) <= TOLERANCE:
        return _loss(ratio, seen.microbatches)
    wrong = _above(seen.gradients.errors)
    if wrong and set(wrong) <= set(seen.tied):
        return (
            f"only the gradient of the tied parameter {_names(wrong)} is wrong: it is not summed over the "
            "stages that share it"
        )
    if wrong:
        return _gradients(wrong, seen)
    ratio = seen.norm / seen.reference_norm if seen.reference_norm else 1.0
    if not abs(ratio - 1.0) <= TOLERANCE:
        return _norm(ratio, seen.misplaced)
    off = _above(seen.weights.errors)
    if off:
        return f"gradients and norm are equal but the updated {_names(off)} are not: the optimiser differs"
    if seen.misplaced:
        name, why = next(iter(seen.misplaced.items()))
        return f"numbers are equal, but of {name} {why}, so checkpoints would be wrong"
    return None


def _above(errors: Mapping[str, float]) -> list[str]:
    """Names with an error above the tolerance, the worst first."""
    found = [name for name, error in errors.items() if not error <= TOLERANCE]
    return sorted(found, key=lambda name: -errors[name])


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _loss(ratio: float, microbatches: int) -> str:
    if not isfinite(ratio):
        return "the loss is not finite"
    short = (1.0 - ratio) * microbatches
    missing = round(short)
    # microbatches differ in their losses, so a dropped one never leaves an exact fraction
    if 0 < missing < microbatches and _SAME < abs(short - missing) < 0.2:
        return (
            f"the loss is {ratio:.4f} of the reference, about {missing} of {microbatches} microbatches "
            "short: a microbatch is dropped"
        )
    for factor in (ratio, 1.0 / ratio):
        if factor > 1.5 and abs(factor - round(factor)) < _SAME:
            return f"the loss is {ratio:.6g} times the reference: wrong scale of the loss"
    return f"the loss is {ratio:.10g} times the reference: wrong data or a wrong forward"


def _gradients(wrong: list[str], seen: Evidence) -> str:
    ratios = [seen.gradients.ratios[name] for name in wrong]
    middle = median(ratios)
    same = isfinite(middle) and middle != 0 and all(abs(r / middle - 1.0) < _SAME for r in ratios)
    residual = max(seen.gradients.residuals[name] for name in wrong)
    every = len(wrong) > 0.9 * len(seen.gradients.errors)
    where = "every gradient" if every else f"the gradient of {_names(wrong)}"
    averaged = seen.replicas > 1 and abs(middle * seen.replicas - 1.0) < _SAME
    if same and residual <= _SAME:
        mean = f", as if averaged over the {seen.replicas} replicas" if averaged else ""
        return f"{where} is {middle:.6g} times the reference: wrong gradient scale{mean}"
    if same and averaged and seen.copies == 1:
        return (
            f"{where} differs between the {seen.replicas} replicas, and their sum is the reference: the "
            "data-parallel reduction is missing"
        )
    for holders, missing in _sums(seen):
        if same and abs(middle * holders - 1.0) < _SAME:
            return f"{where} differs between the {holders} {missing} is missing"
    return f"{where} differs in direction, not only in scale: a reduction is missing or a shard is misplaced"


def _sums(seen: Evidence) -> list[tuple[int, str]]:
    """Which sums over how many holders may be missing where the weights have copies."""
    r, c = seen.replicas, seen.copies
    if c == 1:
        return []
    own = "copies of the weights, and their sum is the reference: the sum over the copies"
    if r == c:
        return [(c, f"{own} or that over the {r} replicas"), (r * c, f"{own} and that over the replicas")]
    found = [(c, own)]
    if r > 1:
        found.append((r, "replicas, and their sum is the reference: the data-parallel reduction"))
    return found


def _norm(ratio: float, misplaced: Mapping[str, str]) -> str:
    said = f"gradients are equal but their norm is {ratio:.6g} times the reference, so clipping is wrong"
    if misplaced:
        name, why = next(iter(misplaced.items()))
        others = f", and of {len(misplaced) - 1} more" if len(misplaced) > 1 else ""
        return f"{said}: of {name} {why}{others}"
    return f"{said}: a shard is left out, or a replicated or tied parameter counted more than once"
