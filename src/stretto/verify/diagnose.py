"""What a difference looks like: the usual bugs of parallel training leave a mark each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import isfinite
from statistics import median

TOLERANCE = 1e-9
_SAME = 1e-6  # factors this close are one factor


def diagnose(
    loss: float,
    reference_loss: float,
    gradient_errors: Mapping[str, float],
    ratios: Mapping[str, float],
    norm_error: float,
    weight_errors: Mapping[str, float],
    microbatches: int,
    tied: Collection[str],
) -> str | None:
    """One sentence on the likeliest cause; None when all is equal.

    Args:
        gradient_errors, weight_errors: relative, by parameter.
        ratios: ours over reference, by parameter.
        microbatches: in the global batch.
        tied: names of parameters that several stages share.
    """
    wrong = [name for name, error in gradient_errors.items() if not error <= TOLERANCE]
    loss_ratio = loss / reference_loss if reference_loss else 1.0
    if abs(loss_ratio - 1.0) > TOLERANCE:
        return _wrong_loss(loss_ratio, microbatches)
    if wrong and set(wrong) <= set(tied):
        return (
            f"only the tied parameter {', '.join(wrong)} is wrong: its gradient is not summed over the stages that share it"
        )
    if wrong:
        return _wrong_gradients(wrong, ratios, len(gradient_errors))
    if not norm_error <= TOLERANCE:
        return (
            "gradients are equal but their norm is not, so clipping is wrong: a shard is left out of the norm, or a"
            " replicated or tied parameter is counted more than once"
        )
    off = [name for name, error in weight_errors.items() if not error <= TOLERANCE]
    if off:
        return f"gradients and norm are equal but updated weights are not ({off[0]}): the optimiser differs"
    return None


def _wrong_loss(ratio: float, microbatches: int) -> str:
    if not isfinite(ratio):
        return "the loss is not finite"
    missing = round((1.0 - ratio) * microbatches)
    if 0 < missing < microbatches and abs((1.0 - ratio) * microbatches - missing) < 0.2:
        return (
            f"the loss is {ratio:.4f} of the reference, about {missing} of {microbatches} microbatches short:"
            " a microbatch is dropped"
        )
    return f"the loss is {ratio:.6g} times the reference: wrong data, a wrong scale of the loss, or a wrong forward"


def _wrong_gradients(wrong: list[str], ratios: Mapping[str, float], parameters: int) -> str:
    factors = [ratios[name] for name in wrong if isfinite(ratios[name])]
    middle = median(factors) if factors else float("nan")
    same = len(factors) == len(wrong) and all(abs(f / middle - 1.0) < _SAME for f in factors if middle)
    where = "every gradient" if len(wrong) > 0.9 * parameters else f"the gradient of {', '.join(wrong[:4])}"
    if same and abs(middle - 1.0) > _SAME:
        return f"{where} is {middle:.6g} times the reference: wrong gradient scale"
    return f"{where} differs in direction, not only in scale: a reduction is missing or a shard is misplaced"
