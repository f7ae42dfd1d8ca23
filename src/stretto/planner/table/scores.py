"""How far predictions are off: errors of time, regret of the layout picked, order of pairs; and a baseline.

The baseline is a model of two lines, FLOPs at one efficiency, lengthened by the fill and drain of the
pipeline:

seconds = hardware FLOPs / (efficiency * devices * peak) * (1 + (p - 1) / (m v))

Its one constant is fitted to the very rows that it is scored on, an advantage over any model whose constants
come from elsewhere. A model that does not beat it has not understood the runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from stretto.planner.estimate import precision_of
from stretto.planner.machines.cluster import Cluster
from stretto.spec.flops import hardware_flops_per_token
from stretto.spec.job import Job


def at_peak(job: Job, cluster: Cluster) -> float:
    """Seconds of a step at an efficiency of 1."""
    mode = job.recompute.mode
    tokens = job.global_batch * job.sequence
    flops = tokens * hardware_flops_per_token(
        job.shape, job.sequence, "none" if mode == "auto" else mode, operators=job.framework.operators
    )
    microbatches = job.microbatches or 1
    bubble = (job.layout.pp - 1) / (microbatches * int(job.options.get("chunks") or 1))
    return flops / (job.layout.world * cluster.device.peak(precision_of(job))) * (1 + bubble)


def fit_efficiency(ideal: Sequence[float], measured: Sequence[float]) -> float:
    """The efficiency with the least mean of |predicted / measured - 1|, a weighted median.

    With ratios r = ideal / measured, the mean of |r / e - 1| is least where 1 / e is the median of 1 / r with
    weights r.
    """
    ratios = sorted(a / b for a, b in zip(ideal, measured, strict=True))
    half, passed = sum(ratios) / 2, 0.0
    for ratio in reversed(ratios):  # 1 / r from the smallest on
        passed += ratio
        if passed >= half:
            return ratio
    return 1.0


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measured run with its prediction.

    Attributes:
        name: of the run, for people.
        group: equal for layouts that are alternatives: same model, GPUs and batch.
        layout: equal for measurements of one layout.
        low, high: the predicted interval; None: there is none.
    """

    name: str
    predicted: float
    measured: float
    group: Hashable = None
    layout: Hashable = None
    low: float | None = None
    high: float | None = None

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of many points; shares and errors as fractions.

    Attributes:
        mape: mean of the absolute errors; `median` is their median.
        bias: mean error; above 0: times are predicted too long.
        worst: the largest error, with its sign, of the row `worst_row`.
        coverage: share of measured times inside the predicted interval; None: there are no intervals.
        groups: number of groups with more than one layout, where a choice exists.
        regret: by which fraction the layout predicted best is slower than the one measured best, mean over
            groups; `regret_worst`: in the worst group. A layout's time is the mean of its measurements.
        concordance: share of pairs of layouts of a group that are predicted in their measured order; equal
            predictions count half.
    """

    rows: int
    mape: float
    median: float
    bias: float
    worst: float
    worst_row: str
    coverage: float | None
    groups: int
    regret: float | None
    regret_worst: float | None
    concordance: float | None

    def facts(self) -> dict[str, Any]:
        """The scores as JSON has them."""
        return asdict(self)


def scores(points: Sequence[Point]) -> Scores | None:
    """The scores of these points; None if there are none."""
    if not points:
        return None
    errors = [point.error for point in points]
    worst = max(points, key=lambda point: abs(point.error))
    known = [p.low <= p.measured <= p.high for p in points if p.low is not None and p.high is not None]
    groups = [layouts for layouts in layouts_by_group(points) if len(layouts) > 1]
    regrets = [regret(layouts) for layouts in groups]
    pairs = [concordant(layouts) for layouts in groups]
    compared = sum(count for _, count in pairs)
    return Scores(
        rows=len(points),
        mape=mean(map(abs, errors)),
        median=median(map(abs, errors)),
        bias=mean(errors),
        worst=worst.error,
        worst_row=worst.name,
        coverage=mean(known) if known else None,
        groups=len(groups),
        regret=mean(regrets) if regrets else None,
        regret_worst=max(regrets) if regrets else None,
        concordance=sum(right for right, _ in pairs) / compared if compared else None,
    )


Layouts = Sequence[tuple[float, float]]  # (predicted, measured) of each


def layouts_by_group(points: Sequence[Point]) -> list[Layouts]:
    """The layouts of each group, each with the means of its predictions and of its measurements."""
    groups: dict[Hashable, dict[Hashable, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        groups[point.group][point.layout].append(point)
    return [
        [(mean(p.predicted for p in same), mean(p.measured for p in same)) for same in group.values()]
        for group in groups.values()
    ]


def regret(layouts: Layouts) -> float:
    """Measured time of the layout predicted best, over the least measured time, minus 1. Among equal
    predictions the mean counts, since the prediction does not distinguish them.
    """
    least = min(predicted for predicted, _ in layouts)
    picked = mean(measured for predicted, measured in layouts if predicted <= least * (1 + 1e-9))
    return picked / min(measured for _, measured in layouts) - 1


def concordant(layouts: Layouts) -> tuple[float, int]:
    """Number of pairs predicted in the measured order, and of pairs with different measured times."""
    right, count = 0.0, 0
    for i, (predicted, measured) in enumerate(layouts):
        for other, then in layouts[:i]:
            if measured == then:
                continue
            count += 1
            same = abs(predicted - other) <= 1e-9 * predicted
            right += 0.5 if same else float((predicted < other) == (measured < then))
    return right, count
