"""The likeliest cause of a difference of a parallel model from the plain one: each bug leaves its mark.

Where a mark is exact (the sum over some ranks is the reference), it is tested on the values themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, log2
from typing import Literal

import torch
from torch import Tensor, nn

from stretto.engine.parallel.control import gather_json
from stretto.verify.axes import Axes, combined, gathered, missing_over
from stretto.verify.compare import Comparison, relative
from stretto.verify.diagnose import FACTOR_TOLERANCE, TOLERANCE, above, listing, times
from stretto.verify.outputs import Outputs, beside_rows, search

Reduction = Literal["mean", "sum", "same"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step of a parallel model beside the plain one's. What decides between sentences is the same on all
    ranks.

    losses, norms: of every rank, None where it has none.
    loss: that of the ranks together.
    bounds: what errors may be, by quantity and name; TOLERANCE for other names.
    updated: whether every rank's optimiser made a step.
    gradients, weights, states, buffers: relative errors by name.
    actual, expected: full gradients, this rank's and the plain model's.
    share_gradients: computes the plain model's gradients of this rank's share of the batch.
    clip: largest gradient norm in the plain model's step; None: no clipping.
    modules: the plain model's, by path.
    initial: the plain model's values before the first step, by name.
    outputs, expected_outputs: of modules in the first forward, this rank's and the plain model's.
    close: factors this close are one factor.
    """

    axes: Axes
    losses: Sequence[float | None]
    loss: float
    reference_loss: float
    norms: Sequence[float | None]
    norm: float | None
    reference_norm: float
    bounds: Mapping[str, Mapping[str, float]]
    updated: bool
    tied: Collection[str]
    gradients: Comparison
    weights: Comparison
    states: Comparison | None
    buffers: Comparison | None
    actual: Mapping[str, Sequence[Tensor]]
    expected: Mapping[str, Tensor]
    share_gradients: Callable[[], Mapping[str, Tensor]] | None
    clip: float | None
    modules: Mapping[str, nn.Module]
    initial: Mapping[str, Tensor]
    outputs: Outputs
    expected_outputs: Outputs
    close: float = FACTOR_TOLERANCE

    def bound(self, quantity: str, name: str = "") -> float:
        """What the error of a quantity may be."""
        return self.bounds[quantity].get(name, TOLERANCE)


@dataclass(frozen=True)
class Cause:
    """The likeliest cause, and the first module whose output differs, if one does."""

    sentence: str
    module: str | None = None


def explain(case: Case) -> Cause | None:
    """The likeliest cause; None where all is equal. Collective."""
    if not relative(case.loss, case.reference_loss) <= case.bound("loss"):
        return _Forward(case).cause()
    wrong = above(case.gradients.errors, case.bounds["gradients"])
    if wrong:
        return Cause(_gradients(case, wrong))
    if case.norm is not None and not relative(case.norm, case.reference_norm) <= case.bound("norm"):
        return Cause(_norm(case, case.norm))
    if not case.updated:
        return Cause("losses and gradients are equal, but the optimizer made no step on some rank")
    for quantity, comparison in (("states", case.states), ("weights", case.weights)):
        if comparison is not None and (off := above(comparison.errors, case.bounds[quantity])):
            return Cause(_update(case, quantity, off))
    if case.buffers is not None and (off := above(case.buffers.errors, case.bounds["buffers"])):
        return Cause(_buffers(case, off))
    return None


# ------------------------------------------------------------------ loss


class _Forward:
    """Why the loss differs."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.ratio = case.loss / case.reference_loss if case.reference_loss else float("nan")

    def cause(self) -> Cause:
        if not isfinite(self.case.loss):
            return Cause("the loss is not finite", self._search()[0])
        module, compared = self._search()
        if module is None:
            return Cause(self._combination(compared))
        message = f"the loss is {times(self.ratio)} the reference"
        return Cause(f"{message}; the first output that differs is {module}'s{self._module(module)}", module)

    def _search(self) -> tuple[str | None, int]:
        case = self.case
        tolerance = TOLERANCE if case.close <= FACTOR_TOLERANCE else case.close
        return search(case.outputs, case.expected_outputs, beside_rows, tolerance)

    def _combination(self, compared: int) -> str:
        """The outputs are right: how ranks put their losses together is not."""
        case = self.case
        right = "every output that was compared is the plain model's, but " if compared else ""
        losses = [None if loss is None else torch.tensor([loss]).double() for loss in case.losses]
        reference = torch.tensor([case.reference_loss]).double()
        if missing := missing_over(losses, reference, case.axes, case.close):
            label, operation = missing
            return (
                f"{right}the losses of {label} differ, and their {operation} is the reference: the loss that "
                "the step returns is not reduced over them"
            )
        if label := case.axes.of_size(self.ratio, case.close):
            return f"{right}the loss is {times(self.ratio)} the reference, as if summed over {label}"
        if label := case.axes.of_size(1.0 / self.ratio, case.close):
            return (
                f"{right}the loss is {times(self.ratio)} the reference, as if not summed over {label}, or "
                "divided by their number twice"
            )
        ranks = [f"{loss:.6g}" for loss in case.losses if loss is not None]
        if compared and len({*ranks}) > 1:
            return (
                f"{right}the mean of the ranks' losses ({', '.join(ranks[:8])}) is {times(self.ratio)} the "
                "reference: means over unequal numbers of tokens are averaged; sum them, and divide by the "
                "number of tokens of the global batch"
            )
        return f"{right}the loss is {times(self.ratio)} the reference: other samples, or another loss"

    def _module(self, name: str) -> str:
        """What is wrong with the output of a module."""
        case, module = self.case, self.case.modules.get(name)
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return (
                ": it normalises by the samples of one rank; convert it with "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm"
            )
        expected = case.expected_outputs[name]
        actual = case.outputs.get(name)
        shapes = _shapes(actual)
        if len({*filter(None, shapes)}) != 1:
            return ""
        shape = next(filter(None, shapes))
        values = gathered(None if actual is None else actual.to("cpu", torch.float64), shape)
        aligned = [value for value in values if value is not None]
        if case.axes.over and (label := _summed(case, values, expected)):
            return f": the outputs of {label} sum to the plain model's, so their all-reduce is missing"
        bias = case.initial.get(f"{name}.bias")
        if bias is not None and aligned and bias.shape == aligned[0].shape[-1:]:
            more = next(
                (n for n in range(2, len(values) + 1) if _has_bias(aligned[0], expected, bias, n)), None
            )
            if more:
                return f": its bias is added {more} times, once on each rank that has a part of its input"
        if all(value is None or bool((value - aligned[0]).abs().max() <= case.close) for value in values):
            ratio = _tensor_ratio(aligned[0], expected)
            if ratio is not None and (label := case.axes.of_size(ratio, case.close)):
                return f": it is {times(ratio)} the plain model's, as if summed over copies on {label}"
        return ""


def _summed(case: Case, values: Sequence[Tensor | None], expected: Tensor) -> str | None:
    """The ranks whose outputs sum to the plain model's."""
    size = float(expected.abs().max()) * case.close
    for label, groups in case.axes.over:
        sums = combined(values, groups, mean=False)
        pairs = [beside_rows(tensor, expected) for tensor in sums if tensor is not None]
        if all(pair is not None and bool((pair[0] - pair[1]).abs().max() <= size) for pair in pairs):
            return label
    return None


def _has_bias(actual: Tensor, expected: Tensor, bias: Tensor, count: int) -> bool:
    pair = beside_rows(actual - (count - 1) * bias, expected)
    return pair is not None and bool(
        (pair[0] - pair[1]).abs().max() <= FACTOR_TOLERANCE * float(expected.abs().max())
    )


def _tensor_ratio(actual: Tensor, expected: Tensor) -> float | None:
    """The factor between two tensors of one shape; None where there is none."""
    if actual.shape != expected.shape:
        return None
    ratio = float((actual * expected).sum() / expected.square().sum())
    return (
        ratio
        if bool((actual - ratio * expected).abs().max() <= FACTOR_TOLERANCE * float(expected.abs().max()))
        else None
    )


def _shapes(output: Tensor | None) -> list[tuple[int, ...] | None]:
    shapes: list[list[int] | None] = gather_json(None if output is None else list(output.shape))
    return [None if shape is None else tuple(shape) for shape in shapes]


# ------------------------------------------------------------------ gradients


def _gradients(case: Case, wrong: list[str]) -> str:
    if set(wrong) <= set(case.tied):
        return _tied(case, wrong)
    every = len(wrong) > 0.9 * len(case.gradients.errors)
    subject = "every gradient" if every else f"the gradient of {listing(wrong)}"
    ratio = case.gradients.factor(wrong, case.close)
    if ratio is not None:
        scale, norm = _scale(case, ratio), case.reference_norm
        if every and ratio < 1.0 and case.clip is None:
            scale += f" (or clipping by code of the step's own: then give clip={ratio * norm:.4g})"
        elif every and case.clip is not None and abs(ratio * case.clip / norm - 1.0) < _CLIPPING:
            scale = f"as if the step did not clip to a norm of {case.clip:g}"
        return f"{subject} is {times(ratio)} the reference: {scale}"
    name = max(wrong, key=lambda parameter: case.gradients.errors[parameter])
    if missing := _missing(case, name):
        label, operation = missing
        return (
            f"{subject} differs between {label}, and their {operation} is the reference: the reduction over "
            "them is missing"
        )
    if reason := _unequal_counts(case, name):
        return f"{subject} differs in direction: {reason}"
    if all(case.gradients.ratios[name] == 0.0 for name in wrong):
        return f"{subject} is zero or missing: nothing of the loss reaches it"
    down_to = _right_down_to(case, wrong)
    values = gathered(*_gradient_of(case, name))
    if every and not _disagree(values):
        return (
            f"{subject} differs in direction, and is the same on every rank: it is averaged over ranks with "
            "unequal numbers of tokens, or some rank's part is left out"
        )
    return (
        f"{subject} differs in direction, not only in scale: a reduction is missing or a shard is misplaced"
        f"{down_to}"
    )


def _gradient_of(case: Case, name: str) -> tuple[Tensor | None, tuple[int, ...]]:
    gradients = case.actual.get(name)
    return (gradients[0] if gradients else None), tuple(case.expected[name].shape)


def _missing(case: Case, name: str) -> tuple[str, str] | None:
    return missing_over(gathered(*_gradient_of(case, name)), case.expected[name], case.axes, case.close)


def _disagree(values: Sequence[Tensor | None]) -> bool:
    present = [value for value in values if value is not None]
    return any(not torch.equal(value, present[0]) for value in present[1:])


def _tied(case: Case, wrong: list[str]) -> str:
    message = f"only the gradient of the tied {listing(wrong)} is wrong: it is"
    ratio = case.gradients.factor(wrong, case.close)
    holders = _holders(case, wrong[0])
    over = f"over the {holders} places that share it"
    if ratio is not None and holders > 1:
        if abs(ratio / holders - 1.0) < case.close:
            return f"{message} {times(ratio)} the reference, summed twice {over}"
        if abs(ratio * holders - 1.0) < case.close:
            return f"{message} {times(ratio)} the reference, averaged {over}"
    if ratio is not None:
        return f"{message} {times(ratio)} the reference: {_scale(case, ratio)}"
    local = case.actual.get(wrong[0], ())
    values = gathered(*_gradient_of(case, wrong[0]))
    copies = [value for value in values if value is not None]
    parts = copies if len(copies) > 1 else list(local)
    expected = case.expected[wrong[0]]
    off = (torch.stack(parts).sum(0) - expected).abs().max() if parts else torch.tensor(torch.inf)
    if len(parts) > 1 and bool(off <= case.close * float(expected.abs().max())):
        return f"{message} not summed {over}"
    return f"{message} not the sum over the places that share it"


def _holders(case: Case, name: str) -> int:
    copies = [value for value in gathered(*_gradient_of(case, name)) if value is not None]
    return max(len(copies), len(case.actual.get(name, ())))


def _scale(case: Case, ratio: float) -> str:
    """What a factor of gradients says."""
    if label := case.axes.of_size(ratio, case.close):
        return f"wrong gradient scale, as if summed over {label} where the mean is due, or summed twice"
    if label := case.axes.of_size(1.0 / ratio, case.close):
        return f"wrong gradient scale, as if averaged over {label} where the sum is due, or averaged twice"
    if scale := _loss_scale(ratio):
        used = "clipped" if case.clip is not None else "used"
        return f"as if gradients were {used} before the loss scale of {scale:g} was undone"
    if scale := _loss_scale(1.0 / ratio):
        return f"as if gradients were clipped before the loss scale of {scale:g} was undone"
    return "wrong gradient scale"


_CLIPPING = 1e-4  # above what torch's clipping adds to a norm
_LEAST_SCALE = 2.0**6  # a smaller power of two may be a number of ranks


def _loss_scale(ratio: float) -> float | None:
    """The loss scale that a ratio is: scaling is by powers of two."""
    if not ratio >= _LEAST_SCALE * (1.0 - FACTOR_TOLERANCE):
        return None
    scale = 2.0 ** round(log2(ratio))
    return scale if abs(ratio / scale - 1.0) < 1e-4 else None


def _unequal_counts(case: Case, name: str) -> str | None:
    """Whether the ranks' gradients are averaged though their shares differ in tokens."""
    if case.share_gradients is None:
        return None
    gradient, shape = _gradient_of(case, name)
    shares = [value for value in gathered(case.share_gradients().get(name), shape) if value is not None]
    values = [value for value in gathered(gradient, shape) if value is not None]
    if not shares or not values:
        return None
    mean = torch.stack(shares).mean(0)
    size = case.close * float(mean.abs().max())
    if all(bool((value - mean).abs().max() <= size) for value in values):
        return (
            "it is the mean of what each rank's share gives alone, and the shares have unequal numbers of "
            "tokens: sum the losses, and divide by the number of tokens of the global batch"
        )
    return None


def _right_down_to(case: Case, wrong: Collection[str]) -> str:
    """Up to where the backward is right: what the forward uses later has right gradients."""
    order = [*case.expected_outputs]
    at = {path: number for number, path in enumerate(order)}
    last = max(
        (at[path] for name in wrong if (path := name.rpartition(".")[0]) in at),
        default=len(order),
    )
    right = [
        path
        for path in order[last + 1 :]
        if any(name.rpartition(".")[0] == path for name in case.gradients.errors)
    ]
    return f"; the backward is right down to {right[0]}" if right else ""


# ------------------------------------------------------------------ norm, update, buffers


def _norm(case: Case, norm: float) -> str:
    ratio = norm / case.reference_norm if case.reference_norm else float("nan")
    message = f"gradients are equal but their norm is {times(ratio)} the reference, so clipping is wrong"
    squares = [
        None if rank_norm is None else torch.tensor([rank_norm**2]).double() for rank_norm in case.norms
    ]
    reference = torch.tensor([case.reference_norm**2]).double()
    if missing := missing_over(squares, reference, case.axes, case.close):
        label, operation = missing
        if operation == "sum":
            return (
                f"{message}: each rank's is over its own shards only, its square is not summed over {label}"
            )
    if scale := _loss_scale(ratio):
        return f"{message}: it is taken before the loss scale of {scale:g} is undone"
    if label := case.axes.of_size(ratio**2, case.close):
        return f"{message}: every element is counted once on each of {label}, as if copies were parts"
    if label := case.axes.of_size(1.0 / ratio**2, case.close):
        return f"{message}: its square is not summed over {label}"
    return f"{message}: a shard is left out, or a replicated or tied parameter counted more than once"


def _update(case: Case, quantity: str, off: list[str]) -> str:
    ranks = case.weights.ranks if quantity == "weights" else ()
    location = f" (on ranks {', '.join(map(str, ranks[:4]))})" if 0 < len(ranks) < len(case.losses) else ""
    if quantity == "states":
        message = f"gradients and norm are equal but the optimizer's {listing(off)} are not"
    else:
        message = f"gradients and norm are equal but the updated {listing(off)} are not{location}"
    if location:
        return f"{message}: updated weights do not reach these ranks"
    return f"{message}: the optimizer differs"


def _buffers(case: Case, off: list[str]) -> str:
    modules = {name: case.modules.get(name.rpartition(".")[0]) for name in off}
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in modules.values()):
        return (
            f"weights are equal but the buffers {listing(off)} are not: each rank keeps statistics of its "
            "own samples; convert with torch.nn.SyncBatchNorm.convert_sync_batchnorm"
        )
    return f"weights are equal but the buffers {listing(off)} are not: ranks do not keep them alike"
