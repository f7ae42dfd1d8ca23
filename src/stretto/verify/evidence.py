"""A step of several ranks beside the same step of one process, and the verdict on several steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import TYPE_CHECKING

from stretto.verify.compare import TOLERANCE, Comparison, Quantity, relative, worst_quantity

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stretto.recommender.placement import TableSpec
    from stretto.verify.axes import Axes
    from stretto.verify.outputs import Outputs

FACTOR_TOLERANCE = 1e-6  # factors this close are one factor
_SHOWN = 4  # parameters that are named


@dataclass(frozen=True)
class Sum:
    """A sum over ranks that a gradient goes through: their number, who they are, and the sum's name."""

    holders: int
    who: str
    name: str = ""


@dataclass(frozen=True)
class NormPart:
    """Parameters whose part of the norm can be counted wrongly.

    Attributes:
        who: the parameters, in words.
        share: their part of the reference's squared norm.
        over: the axis that the part is summed over.
    """

    who: str
    share: float
    over: str | None = None


@dataclass(frozen=True)
class WrongShard:
    """A shard of a table that differs."""

    name: str
    part: int
    parts: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class TableMarks:
    """What wrong rows of a recommender's tables have in common.

    Attributes:
        names: of the stored tables; all other parameters are dense.
        features: the table of each feature.
        vectors: what was looked up and pooled, by feature; None if the step did not record it.
        moves: by how much the step has changed rows; hash tables are left out.
        duplicates_lost: tables in which only rows that were looked up more than once are wrong.
        local_statistic: tables whose row statistic covers each shard's own columns only.
        wrong_shards: shards with rows that differ.
    """

    names: Collection[str]
    features: Sequence[TableSpec] = ()
    vectors: Comparison | None = None
    moves: Comparison | None = None
    duplicates_lost: Collection[str] = ()
    local_statistic: Collection[str] = ()
    wrong_shards: Sequence[WrongShard] = ()


@dataclass(frozen=True, kw_only=True)
class RankValues:
    """What single ranks computed in a step, so that a mark is tested on the values themselves.

    Attributes:
        losses, norms: of every rank; None if it has none.
        actual, expected: full gradients of this rank and of the plain model.
        share_gradients: computes the plain model's gradients of this rank's share of the batch.
        modules: of the plain model, by path.
        initial: the plain model's values before the first step, by name.
        outputs, expected_outputs: of modules in the first forward, on this rank and in the plain model.
    """

    axes: Axes
    losses: Sequence[float | None]
    norms: Sequence[float | None]
    actual: Mapping[str, Sequence[Tensor]]
    expected: Mapping[str, Tensor]
    share_gradients: Callable[[], Mapping[str, Tensor]] | None
    modules: Mapping[str, nn.Module]
    initial: Mapping[str, Tensor]
    outputs: Outputs
    expected_outputs: Outputs


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A step of several ranks beside one process. What decides between causes is the same on all ranks.

    Quantities that were not compared are None. A task leaves out what its ranks do not have.

    Attributes:
        initial: parameters that begin with other values.
        loss: of all ranks together.
        masters: the values that optimisers updated, if modules compute with others.
        updated_here: those of the weights that the optimiser of the same rank updates; None if all are equal.
        logits: without an update, after the step.
        bounds: what errors may be, by quantity and name; TOLERANCE for all others.
        close: largest relative difference between factors that count as one.
        updated: True if the optimiser of every rank made a step.
        clip: the largest norm that the step leaves; None if gradients are compared before it matters.
        kinds: parameters by what they are, in words such as "table".
        tied: parameters that several layers share.
        misplaced: what is wrong with who holds a parameter.
        microbatches: in the global batch.
        sums: what the gradients of all but experts go through.
        shards: sums of gradients of which each rank keeps a part.
        tp: number of tensor-parallel ranks.
        experts: parameters of routed experts.
        expert_copies: ranks that hold the same experts.
        norm_parts: parameters whose part of the norm can be counted wrongly.
        recompute: which part of a forward runs again.
    """

    initial: Sequence[str] = ()
    loss: float | None
    reference_loss: float
    gradients: Comparison | None
    norm: float | None
    reference_norm: float
    masters: Comparison | None = None
    weights: Comparison
    updated_here: Comparison | None = None
    states: Comparison | None = None
    buffers: Comparison | None = None
    logits: Comparison | None = None
    bounds: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    close: float = FACTOR_TOLERANCE
    updated: bool = True
    clip: float | None = None
    kinds: Mapping[str, Collection[str]] = field(default_factory=dict[str, Collection[str]])
    tied: Collection[str] = ()
    misplaced: Mapping[str, str] = field(default_factory=dict[str, str])
    microbatches: int = 1
    sums: Sequence[Sum] = ()
    shards: Sequence[Sum] = ()
    tp: int = 1
    experts: Collection[str] = ()
    expert_copies: int = 1
    norm_parts: Sequence[NormPart] = ()
    recompute: str = "none"
    tables: TableMarks | None = None
    values: RankValues | None = None

    def errors(self, quantity: str) -> Mapping[str, float]:
        """Return the relative errors of a quantity by name ("" for a number); none if it was not compared."""
        if quantity in ("loss", "norm"):
            value: float | None = getattr(self, quantity)
            reference: float = getattr(self, f"reference_{quantity}")
            return {} if value is None else {"": relative(value, reference)}
        comparison: Comparison | None = getattr(self, quantity)
        return {} if comparison is None else comparison.errors

    def quantities(self, *names: str) -> list[Quantity]:
        """Return these quantities, each where it is farthest off."""
        return [worst_quantity(name, self.errors(name), self.bounds.get(name, {})) for name in names]


@dataclass(frozen=True)
class Cause:
    """The likeliest cause of a difference, and the first module whose output differs, if one does."""

    sentence: str
    module: str | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A layout or placement beside one process.

    Attributes:
        quantities: each at the step and name where it is farthest off; gradients and norm of an asynchronous
            schedule have no error.
        diagnosis: the likeliest cause of a difference; None if there is none.
        updates: delayed updates after which the weights of an asynchronous schedule were compared.
        same_as: the layout that was run, if its program is the same action by action.
        placement: where each table lies.
    """

    layout: str
    quantities: Sequence[Quantity]
    diagnosis: str | None
    dtype: str = "float64"
    seconds: float = 0.0
    updates: int | None = None
    same_as: str | None = None
    placement: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def equal(self) -> bool:
        """True if everything is within its bounds and lies in its place."""
        return self.diagnosis is None and all(quantity.equal for quantity in self.quantities)

    def __getitem__(self, name: str) -> Quantity:
        """Return a quantity by its name."""
        absent = Quantity(name, None, TOLERANCE)
        return next((quantity for quantity in self.quantities if quantity.name == name), absent)

    def error(self, name: str) -> float:
        """Return the error of a quantity; NaN if it was not compared."""
        error = self[name].error
        return nan if error is None else error


# ---------------------------------------------------------------------- words


def times(ratio: float) -> str:
    """Return a ratio in words, with enough digits to tell it from one."""
    digits = 6
    while digits < 16 and abs(float(f"{ratio:.{digits}g}") - ratio) > 0.01 * abs(ratio - 1.0):
        digits += 1
    return f"{ratio:.{digits}g} times"


def above(errors: Mapping[str, float], bounds: Mapping[str, float] | None = None) -> list[str]:
    """Return the names with an error above their bound, by default TOLERANCE; the worst first."""
    bounds = bounds or {}
    names = [name for name, error in errors.items() if not error <= bounds.get(name, TOLERANCE)]
    return sorted(names, key=lambda name: -errors[name])


def listing(names: Sequence[str]) -> str:
    """Return the first names, without repetitions, and the number of the others."""
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - _SHOWN} more" if len(distinct) > _SHOWN else ""
    return ", ".join(distinct[:_SHOWN]) + more
