"""The verdict on one layout and, where it differs, the likeliest cause: each usual bug leaves its mark."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isfinite, prod
from statistics import median

from stretto.verify.compare import Comparison, Quantity

TOLERANCE = 1e-9
FACTOR_TOLERANCE = 1e-6  # factors this close are one factor
_SHARING = 2  # stages that share a tied parameter: the embedding's and the head's
_PART_TOLERANCE = 0.15  # what is left of a sum is about its part
_SHOWN = 4  # parameters that are named


@dataclass(frozen=True)
class Sum:
    """A sum that makes a gradient whole: over how many holders, who they are, and what the sum is called."""

    holders: int
    who: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One step of a layout beside the reference.

    microbatches: in the global batch.
    sums: which gradients of all parameters but experts' go through.
    tied: names of parameters that several layers share.
    misplaced: what is wrong with who holds a parameter, by name.
    tp: tensor-parallel ranks.
    experts: names of parameters that lie on the ranks of experts.
    expert_copies: ranks that hold the same experts.
    expert_square: their part of the reference's squared norm.
    recompute: which part of a forward runs again.
    weights: those that modules compute with.
    masters: the values that optimisers updated.
    updated_here: of the weights, those that the optimiser of the same rank updates; None where all are equal.
    shards: what gradients are summed over with a part of the sum kept on each rank.
    """

    loss: float
    reference_loss: float
    gradients: Comparison
    norm: float
    reference_norm: float
    weights: Comparison
    microbatches: int
    sums: Sequence[Sum]
    tied: Collection[str]
    misplaced: Mapping[str, str]
    tp: int = 1
    experts: Collection[str] = ()
    expert_copies: int = 1
    expert_square: float = 0.0
    recompute: str = "none"
    masters: Comparison | None = None
    updated_here: Comparison | None = None
    shards: Sequence[Sum] = ()


def diagnose(evidence: Evidence) -> str | None:
    """One sentence on the likeliest cause of a difference; None where all is equal."""
    ratio = evidence.loss / evidence.reference_loss if evidence.reference_loss else 1.0
    if not abs(ratio - 1.0) <= TOLERANCE:
        return _loss(ratio, evidence.microbatches)
    wrong = above(evidence.gradients.errors)
    if wrong and set(wrong) <= set(evidence.tied):
        return f"only the gradient of the tied parameter {listing(wrong)} is wrong: {_tied(wrong, evidence)}"
    if wrong:
        return _gradients(wrong, evidence)
    ratio = evidence.norm / evidence.reference_norm if evidence.reference_norm else 1.0
    if not abs(ratio - 1.0) <= TOLERANCE:
        return _norm(ratio, evidence)
    if sentence := _weights(evidence):
        return sentence
    if evidence.misplaced:
        name, reason = next(iter(evidence.misplaced.items()))
        return f"numbers are equal, but of {name} {reason}, so checkpoints would be wrong"
    return None


def _weights(evidence: Evidence) -> str | None:
    off = above(evidence.weights.errors)
    masters = above(evidence.masters.errors) if evidence.masters is not None else off
    if masters:
        return (
            f"gradients and norm are equal but the updated {listing(masters)} are not: the optimiser differs"
        )
    if not off:
        return None
    ranks = evidence.weights.ranks
    location = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_SHOWN]))}"
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    if all(name.endswith("router.correction") for name in off):
        return (
            f"all else is equal, but {location}{more} moved {listing(off)} by other loads than those of the "
            "step: they are not summed over all ranks and microbatches, or the correction is missing"
        )
    message = (
        f"what optimisers updated is equal, but {location}{more} would compute with other {listing(off)}: "
    )
    if evidence.updated_here is not None and not above(evidence.updated_here.errors):
        return f"{message}of what others have updated it has older values, so they do not come"
    return (
        f"{message}updated values are not copied into the weights, or older ones that were gathered are kept"
    )


def times(ratio: float) -> str:
    """A ratio in words, with as many digits as it takes to tell it from one."""
    digits = 6
    while digits < 16 and abs(float(f"{ratio:.{digits}g}") - ratio) > 0.01 * abs(ratio - 1.0):
        digits += 1
    return f"{ratio:.{digits}g} times"


def above(errors: Mapping[str, float], bounds: Mapping[str, float] | None = None) -> list[str]:
    """Names with an error above their bound, by default the tolerance; the worst first."""
    bounds = bounds or {}
    names = [name for name, error in errors.items() if not error <= bounds.get(name, TOLERANCE)]
    return sorted(names, key=lambda name: -errors[name])


def listing(names: Sequence[str]) -> str:
    """The first names, each once, and how many more there are."""
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - _SHOWN} more" if len(distinct) > _SHOWN else ""
    return ", ".join(distinct[:_SHOWN]) + more


def _loss(ratio: float, microbatches: int) -> str:
    if not isfinite(ratio):
        return "the loss is not finite"
    short = (1.0 - ratio) * microbatches
    missing = round(short)
    # microbatches differ in their losses, so a dropped one never leaves an exact fraction
    if 0 < missing < microbatches and FACTOR_TOLERANCE < abs(short - missing) < 0.2:
        return (
            f"the loss is {ratio:.4f} of the reference, about {missing} of {microbatches} microbatches "
            "short: a microbatch is dropped"
        )
    for factor in (ratio, 1.0 / ratio):
        if factor > 1.5 and abs(factor - round(factor)) < FACTOR_TOLERANCE:
            return f"the loss is {times(ratio)} the reference: wrong scale of the loss"
    return f"the loss is {times(ratio)} the reference: wrong data or a wrong forward"


_SINGLE = 1e-5  # a larger error is none of rounding to float32
_ROUNDED = "as if something were computed or sent in float32"


def routed(factors: tuple[float, float] | None) -> str:
    """Why the output of experts differs.

    Args:
        factors: the smallest and the largest ratio of a token's output to the plain model's; None where a
            token's differs by no factor.
    """
    if factors is None:
        return "tokens go to other experts, or their outputs are summed with other weights or with none"
    smallest, largest = factors
    return (
        f"each token's is {smallest:.4g} to {largest:.4g} times the plain model's, so the routing weights of "
        "a token do not sum to what they should, as if not normalised"
    )


def _tied(wrong: list[str], evidence: Evidence) -> str:
    over = f"over the {_SHARING} stages that share it"
    factor = evidence.gradients.factor(wrong, FACTOR_TOLERANCE)
    if factor is not None:
        twice, mean = (
            abs(factor / _SHARING - 1.0) < FACTOR_TOLERANCE,
            abs(factor * _SHARING - 1.0) < FACTOR_TOLERANCE,
        )
        cause = f"summed twice {over}" if twice else f"averaged {over}" if mean else "wrong gradient scale"
        return f"it is {times(factor)} the reference, {cause}"
    ratio = evidence.gradients.ratio(wrong, FACTOR_TOLERANCE)
    if ratio is not None and abs(ratio * _SHARING - 1.0) < FACTOR_TOLERANCE:
        return f"it is not summed {over}"
    return "it is not the sum over the stages that share it"


def _gradients(wrong: list[str], evidence: Evidence) -> str:
    if router := _router(wrong, evidence):
        return (
            f"the gradient of {router} is wrong, and those of its experts and of all that comes later are "
            "right: the gradient of the routing weights is dropped or wrong"
        )
    experts = [name for name in wrong if name in evidence.experts]
    dense = [name for name in wrong if name not in evidence.experts]
    if experts and dense and _ratio(wrong, evidence) is None:  # two sums, or one that spoils all before it
        return f"{_dense(dense, evidence)}; {_expert(experts, evidence)}"
    return _dense(wrong, evidence) if dense else _expert(experts, evidence)


def _router(wrong: list[str], evidence: Evidence) -> str | None:
    """The router where the backward goes wrong: its experts are right, and all that comes later."""
    order = list(evidence.gradients.errors)
    routers = [name for name in wrong if ".router." in name]
    sums = [Sum(evidence.tp, "", ""), *evidence.sums]
    if not routers or not evidence.experts or _scale_or_sum("", wrong, evidence, sums) is not None:
        return None
    last = max(routers, key=order.index)
    block = last.partition(".router.")[0]
    experts = [name for name in evidence.experts if name.startswith(f"{block}.")]
    later = [name for name in wrong if order.index(name) > order.index(last)]
    return last if experts and not later and not set(experts) & set(wrong) else None


def _ratio(names: Sequence[str], evidence: Evidence) -> float | None:
    """The one ratio of all these gradients; None where they have none in common."""
    return evidence.gradients.ratio(names, FACTOR_TOLERANCE)


def _dense(wrong: list[str], evidence: Evidence) -> str:
    sums = [reduction for reduction in evidence.sums if reduction.holders > 1]
    every = len(wrong) > 0.9 * len(evidence.gradients.errors)
    if not every and evidence.tp > 1:
        sums.insert(0, Sum(evidence.tp, "tensor-parallel ranks", _OVER_TP))
    subject = "every gradient" if every else f"the gradient of {listing(wrong)}"
    again = f", or what runs again (recompute={evidence.recompute}) is not what ran, as with other dropout"
    if sentence := _scale_or_sum(subject, wrong, evidence, sums):
        return sentence
    if (largest := max(evidence.gradients.errors[name] for name in wrong)) < _SINGLE:
        return f"{subject} is off by {largest:.1e} of its largest value, {_ROUNDED}"
    return (
        f"{subject} differs in direction, not only in scale: {_lost(wrong, evidence)}"
        f"{again if evidence.recompute != 'none' else ''}"
    )


def _lost(wrong: Sequence[str], evidence: Evidence) -> str:
    """What is missing where it cannot be seen exactly: the other ranks' parts of a shard's sum are gone, and
    what is left is about as large as its part of the tokens.
    """
    ratio = median(evidence.gradients.ratios[name] for name in wrong)
    for count in range(1, len(evidence.shards) + 1):
        sums = [
            " and ".join(f"the {reduction.holders} {reduction.who}" for reduction in combination)
            for combination in combinations(evidence.shards, count)
            if abs(ratio * prod(reduction.holders for reduction in combination) - 1.0) < _PART_TOLERANCE
        ]
        if sums:
            return f"about {ratio:.2f} of it is there, as if it were not summed over {' or '.join(sums)}"
    return "a reduction is missing or a shard is misplaced"


_OVER_TP = "the sum over tp of what ranks compute from their own tokens or heads"


def _expert(wrong: list[str], evidence: Evidence) -> str:
    subject = f"the gradient of experts alone, {listing(wrong)},"
    sums = [Sum(evidence.expert_copies, "ranks that hold the same experts", "the reduction over expert_dp")]
    return _scale_or_sum(
        subject, wrong, evidence, [reduction for reduction in sums if reduction.holders > 1]
    ) or (
        f"{subject} differs in direction: it is summed over ranks that hold other experts (expert_dp is not "
        "dp), or tokens go to the wrong experts"
    )


def _scale_or_sum(subject: str, wrong: list[str], evidence: Evidence, sums: Sequence[Sum]) -> str | None:
    """What one factor of all these gradients says; None where they have none."""
    ratio = _ratio(wrong, evidence)
    if ratio is None:
        return None
    if evidence.gradients.factor(wrong, FACTOR_TOLERANCE) is not None:
        mean = next(
            (reduction for reduction in sums if abs(ratio * reduction.holders - 1.0) < FACTOR_TOLERANCE), None
        )
        twice = next(
            (reduction for reduction in sums if abs(ratio / reduction.holders - 1.0) < FACTOR_TOLERANCE), None
        )
        as_if = f", as if averaged over the {mean.holders} {mean.who}" if mean else ""
        as_if = f", as if summed twice over the {twice.holders} {twice.who}" if twice else as_if
        return f"{subject} is {times(ratio)} the reference: wrong gradient scale{as_if}"
    missing = _missing(1.0 / ratio, sums)
    if not missing:
        return None
    description = " or ".join(
        " and ".join(reduction.name for reduction in combination) for combination in missing
    )
    whose = f"the {missing[0][0].holders} {missing[0][0].who}"
    if len(missing[0]) > 1 or len(missing) > 1:
        whose = f"its {round(1.0 / ratio)} holders"
    are = "are" if len(missing[-1]) > 1 else "is"
    return f"{subject} differs between {whose}, and their sum is the reference: {description} {are} missing"


def _missing(holders: float, sums: Sequence[Sum]) -> list[tuple[Sum, ...]]:
    """Which sums together have so many holders; as few as do."""
    for count in range(1, len(sums) + 1):
        matching = [
            combination
            for combination in combinations(sums, count)
            if abs(prod(reduction.holders for reduction in combination) / holders - 1.0) < FACTOR_TOLERANCE
        ]
        if matching:
            return matching
    return []


def _norm(ratio: float, evidence: Evidence) -> str:
    message = f"gradients are equal but their norm is {times(ratio)} the reference, so clipping is wrong"
    if evidence.misplaced:
        name, reason = next(iter(evidence.misplaced.items()))
        others = f", and of {len(evidence.misplaced) - 1} more" if len(evidence.misplaced) > 1 else ""
        return f"{message}: of {name} {reason}{others}"
    count = round(ratio**2)
    if count > 1 and abs(ratio**2 - count) < FACTOR_TOLERANCE * count:
        return f"{message}: every element is counted {count} times, as if copies of shards were parts"
    if evidence.expert_square:
        counted = 1.0 + (ratio**2 - 1.0) / evidence.expert_square
        if counted > 1.5 and abs(counted - round(counted)) < FACTOR_TOLERANCE * counted:
            return f"{message}: experts are counted {round(counted)} times, on ranks of ep, tp or dp alike"
        if -FACTOR_TOLERANCE < counted < 1.0:
            return f"{message}, as if {counted:.0%} of the experts were counted: the sum over ep is missing"
    return f"{message}: a shard is left out, or a replicated or tied parameter counted more than once"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One layout against the reference: largest relative errors over all steps, and where they are.

    Asynchronous schedules have no gradients and no norm of a step: these are None, and `updates` says after
    how many delayed updates the weights were compared.
    """

    layout: str
    loss_error: float
    grad_error: float | None
    worst_gradient: str | None
    norm_error: float | None
    weight_error: float
    worst_weight: str
    diagnosis: str | None
    seconds: float = 0.0
    updates: int | None = None
    tolerance: float = TOLERANCE
    same_as: str | None = None  # the layout that was run, where the program is the same action by action

    @property
    def equal(self) -> bool:
        """Everything within the tolerance, and nothing held in a wrong place."""
        errors = (self.loss_error, self.grad_error, self.norm_error, self.weight_error)
        return self.diagnosis is None and all(e <= self.tolerance for e in errors if e is not None)


@dataclass(frozen=True, kw_only=True)
class Rounded:
    """A layout in the job's own types, compared with one process in them.

    Attributes:
        quantities: loss, gradients, norm and, but for adaptive updates of 16-bit training, the optimiser's
            weights, each where it is farthest from the float64 reference, in units of what it may be.
        diagnosis: None if all is within its bounds.
    """

    layout: str
    dtype: str
    quantities: Sequence[Quantity]
    diagnosis: str | None

    @property
    def equal(self) -> bool:
        """True if everything is within its bounds."""
        return self.diagnosis is None and all(quantity.equal for quantity in self.quantities)
