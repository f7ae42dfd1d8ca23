"""Rows of measured runs: reading the file, predicting each row, and how far the predictions are off.

Errors of time, the regret of the layout picked, the order of pairs; and a baseline of two lines: FLOPs at one
efficiency, lengthened by the fill and drain of the pipeline:

seconds = hardware FLOPs / (efficiency * devices * peak) * (1 + (p - 1) / (m v))

Its one constant is fitted to the very rows that it is scored on, an advantage over any model whose constants
come from elsewhere. A model that does not beat it has not understood the runs.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from stretto.errors import StrettoError
from stretto.job.flops import hardware_flops_per_token
from stretto.job.job import Job
from stretto.planner.assumptions import Assumptions
from stretto.planner.columns import USER_PREFIX, column_name
from stretto.planner.estimate import NOISE, Estimate, estimate, precision_of
from stretto.planner.machines.cluster import Cluster
from stretto.planner.memory.fits import Fit
from stretto.planner.memory.short_step import short_step_fit
from stretto.planner.runs import RunRecord

GIB = 2**30
_HINT = 100  # characters of a hint that stays with a refusal

# ------------------------------------------------------------------ the file


def read_table(path: Path, column_name: Callable[[str], str] = column_name) -> list[dict[str, str]]:
    """Return the rows of a CSV file with a line of column names, without columns of an earlier prediction.

    Args:
        column_name: the name of a column by its spelling.

    Raises:
        StrettoError: the file cannot be read or is empty, has an unknown column or one twice, or a row that
            is longer than the line of names.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header, *lines = [*csv.reader(file)] or [[]]
    except OSError as error:
        raise StrettoError(f"cannot read {path}: {error.strerror}", hint="check the file's name") from None
    except (UnicodeDecodeError, csv.Error):
        raise StrettoError(f"cannot read {path}: it is no CSV in UTF-8", hint="save it as CSV") from None
    names = dict[str, str]()
    for spelling in header:
        try:
            copied = spelling.startswith(USER_PREFIX) or spelling in ADDED
            name = spelling if copied else column_name(spelling)
        except StrettoError as error:
            raise StrettoError(f"{path}: {error.message}", hint=error.hint) from None
        if name in names:
            raise StrettoError(f"{path}: {names[name]!r} and {spelling!r} are one column", hint="keep one")
        names[name] = spelling
    rows = list[dict[str, str]]()
    for cells in filter(None, lines):
        if len(cells) > len(header):
            raise StrettoError(
                f"{path}, row {len(rows) + 1}: {len(cells)} cells for {len(header)} columns",
                hint="put cells with commas in quotes",
            )
        cells += [""] * (len(header) - len(cells))
        rows.append({name: cell for name, cell in zip(header, cells, strict=True) if name not in ADDED})
    if not rows:
        raise StrettoError(f"{path} has no rows", hint="a line of column names, then one line a run")
    return rows


# ------------------------------------------------------------------ predictions


@dataclass(frozen=True, kw_only=True)
class PredictedRow:
    """A row of a table: its cells, the run that they describe, and the prediction or why none was made.

    Attributes:
        number: index of the row, from 1.
        refused: the reason why no prediction was made.
    """

    number: int
    cells: Mapping[str, str]
    run: RunRecord | None = None
    estimate: Estimate | None = None
    refused: str = ""

    @property
    def name(self) -> str:
        """Model and layout, for display."""
        model = self.cells.get("model", "")
        if self.run is None:
            return f"row {self.number}: {model}"
        job = self.run.job
        text = f"row {self.number}: {model} {job.shape.layers}x{job.shape.hidden} {job.layout} "
        return (text + self.run.cluster.device.name).replace("  ", " ")


def predict_rows(
    rows: Iterable[Mapping[str, str]],
    read: Callable[[Mapping[str, str]], RunRecord],
    memory: bool = True,
    start: int = 1,
) -> Iterator[PredictedRow]:
    """Yield each row with its prediction, or with the reason why none was made.

    Args:
        read: returns the run of a row, or raises StrettoError.
        start: the number of the first row.
    """
    estimates: dict[object, Estimate] = {}  # rows that repeat one job share it
    for number, cells in enumerate(rows, start):
        try:
            run = read(cells)
            key = (run.group, run.repeat)
            if key not in estimates:
                estimates[key] = short_step_estimate(run.job, run.cluster, run.assumptions, memory)
            yield PredictedRow(number=number, cells=cells, run=run, estimate=estimates[key])
        except StrettoError as error:
            brief = error.hint is not None and len(error.hint) <= _HINT
            reason = f"{error.message}; {error.hint}" if brief else error.message
            yield PredictedRow(number=number, cells=cells, refused=reason)
        except (ArithmeticError, AssertionError, IndexError, KeyError, TypeError, ValueError) as error:
            # a row that breaks an assumption of the model must not stop the others; it is reported as such
            yield PredictedRow(
                number=number, cells=cells, refused=f"unforeseen {type(error).__name__}: {error}"
            )


def short_step_estimate(
    job: Job, cluster: Cluster, assumptions: Assumptions, memory: bool = True
) -> Estimate:
    """Return an estimate whose memory is counted on a short step.

    Raises:
        StrettoError: the job has no program.
    """
    result = estimate(job, cluster, assumptions, memory=False)
    if not memory:
        return result
    return replace(result, memory=short_step_fit(job, cluster, assumptions))


def added_columns(row: PredictedRow) -> dict[str, Any]:
    """Return the columns added to a row: numbers and texts, None without a value."""
    added: dict[str, Any] = {**dict.fromkeys(ADDED), "defaults": "", "refused": row.refused}
    if row.estimate is not None and row.run is not None:
        added |= {name: value(row, row.estimate, row.run) for name, value in ADDED.items()}
    return added


def _gib(kind: str) -> Callable[[PredictedRow, Estimate, RunRecord], float | None]:
    return lambda row, estimate, run: estimate.memory and _memory(estimate.memory, kind) / GIB


def _memory(fit: Fit, kind: str) -> float:
    return {"allocated": fit.allocated, "reserved": fit.reserved, "device": fit.device}[kind].mid


def time_error(row: PredictedRow) -> float | None:
    """Return predicted over measured seconds, minus 1."""
    if row.run is None or row.estimate is None or row.run.measured.seconds is None:
        return None
    return row.estimate.seconds / row.run.measured.seconds - 1


def memory_error(row: PredictedRow) -> float | None:
    """Return predicted over recorded memory, minus 1, of the kind that was recorded."""
    if row.run is None or row.estimate is None or row.estimate.memory is None:
        return None
    measured = row.run.measured
    if measured.memory is None:
        return None
    return _memory(row.estimate.memory, measured.kind) / measured.memory - 1


def _percent(part: float | None) -> float | None:
    return None if part is None else 100 * part


ADDED: Mapping[str, Callable[[PredictedRow, Estimate, RunRecord], Any]] = {
    "predicted_step_time_s": lambda row, estimate, run: estimate.seconds,
    "predicted_low_s": lambda row, estimate, run: estimate.low,
    "predicted_high_s": lambda row, estimate, run: estimate.high,
    "predicted_tokens_per_s_per_gpu": lambda row, estimate, run: estimate.tokens_per_s / run.job.layout.world,
    "predicted_tflops_per_gpu": lambda row, estimate, run: estimate.tflops_per_gpu,
    "predicted_mfu": lambda row, estimate, run: estimate.mfu,
    "predicted_hfu": lambda row, estimate, run: estimate.hfu,
    "predicted_memory_allocated_gib": _gib("allocated"),
    "predicted_memory_reserved_gib": _gib("reserved"),
    "predicted_memory_device_gib": _gib("device"),
    "verdict": lambda row, estimate, run: estimate.memory and estimate.memory.verdict,
    "bubble": lambda row, estimate, run: estimate.bubble,
    "dominant": lambda row, estimate, run: estimate.dominant,
    "measured_step_time_s": lambda row, estimate, run: run.measured.seconds,
    "measured_by": lambda row, estimate, run: run.measured.by or None,
    "error_pct": lambda row, estimate, run: _percent(time_error(row)),
    "memory_error_pct": lambda row, estimate, run: _percent(memory_error(row)),
    "defaults": lambda row, estimate, run: "; ".join(f"{name}={v}" for name, v in run.defaults.items()),
    "refused": lambda row, estimate, run: "",
}

# ------------------------------------------------------------------ scores


def at_peak(job: Job, cluster: Cluster) -> float:
    """Return the seconds of a step at an efficiency of 1."""
    mode = job.recompute.mode
    tokens = job.global_batch * job.sequence
    flops = tokens * hardware_flops_per_token(
        job.shape, job.sequence, "none" if mode == "auto" else mode, operators=job.framework.operators
    )
    microbatches = job.microbatches or 1
    bubble = (job.layout.pp - 1) / (microbatches * int(job.options.get("chunks") or 1))
    return flops / (job.layout.world * cluster.device.peak(precision_of(job))) * (1 + bubble)


def fit_efficiency(ideal: Sequence[float], measured: Sequence[float]) -> float:
    """Return the efficiency with the least mean of |predicted / measured - 1|, a weighted median.

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
class MeasuredPoint:
    """One measured run with its prediction.

    Attributes:
        name: the run, for display.
        group: equal for layouts that are alternatives: same model, GPUs and batch.
        layout: equal for measurements of one layout.
        low, high: the predicted interval, or None without one.
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
        coverage: share of measured times inside the predicted interval, or None without intervals.
        groups: number of groups with more than one layout, in which a choice exists.
        regret: the fraction by which the layout predicted best is slower than the one measured best, mean
            over groups. A layout's time is the mean of its measurements.
        regret_worst: the same in the worst group.
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


def scores(points: Sequence[MeasuredPoint]) -> Scores | None:
    """Return the scores of these points, or None without points."""
    if not points:
        return None
    errors = [point.error for point in points]
    worst = max(points, key=lambda point: abs(point.error))
    covered = [p.low <= p.measured <= p.high for p in points if p.low is not None and p.high is not None]
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
        coverage=mean(covered) if covered else None,
        groups=len(groups),
        regret=mean(regrets) if regrets else None,
        regret_worst=max(regrets) if regrets else None,
        concordance=sum(right for right, _ in pairs) / compared if compared else None,
    )


Layouts = Sequence[tuple[float, float]]  # (predicted, measured) of each


def layouts_by_group(points: Sequence[MeasuredPoint]) -> list[Layouts]:
    """Return the layouts of each group, each with the means of its predictions and of its measurements."""
    groups: dict[Hashable, dict[Hashable, list[MeasuredPoint]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        groups[point.group][point.layout].append(point)
    return [
        [(mean(p.predicted for p in points), mean(p.measured for p in points)) for points in group.values()]
        for group in groups.values()
    ]


def regret(layouts: Layouts) -> float:
    """Return the measured time of the layout predicted best, over the least measured time, minus 1.
    Among equal predictions the mean counts, since the prediction does not distinguish them.
    """
    fastest = min(predicted for predicted, _ in layouts)
    picked = mean(measured for predicted, measured in layouts if predicted <= fastest * (1 + 1e-9))
    return picked / min(measured for _, measured in layouts) - 1


def concordant(layouts: Layouts) -> tuple[float, int]:
    """Return the number of pairs that are predicted in the measured order, and of pairs whose measured times
    differ.
    """
    right, count = 0.0, 0
    for i, (predicted, measured) in enumerate(layouts):
        for other, then in layouts[:i]:
            if measured == then:
                continue
            count += 1
            equal = abs(predicted - other) <= 1e-9 * predicted
            right += 0.5 if equal else float((predicted < other) == (measured < then))
    return right, count


@dataclass(frozen=True, kw_only=True)
class MemoryScores:
    """Predicted against recorded memory.

    Attributes:
        rows: number of rows with recorded memory.
        mape, bias, worst: errors as fractions, or None without such rows.
        out_of_memory: rows that ran out of memory, by the verdict predicted for them.
        ran: rows that ran.
        ran_does_not_fit: rows that ran although the verdict is that they do not fit.
    """

    rows: int
    mape: float | None
    bias: float | None
    worst: float | None
    out_of_memory: Mapping[str, int]
    ran: int
    ran_does_not_fit: int


@dataclass(frozen=True, kw_only=True)
class TableScores:
    """All scores of a table.

    Attributes:
        model, baseline: scores of the predictions and of the two-line model; None without measured rows.
        efficiency: the constant of the two-line model.
        refused: number of rows by the reason for refusing them.
    """

    model: Scores | None
    baseline: Scores | None
    efficiency: float | None
    memory: MemoryScores
    refused: Mapping[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as JSON has it."""
        baseline = self.baseline and {**asdict(self.baseline), "efficiency": self.efficiency}
        return {
            "error": self.model and asdict(self.model),
            "baseline": baseline,
            "noise": NOISE,
            "memory": asdict(self.memory),
            "refused": dict(self.refused),
        }


def summary(rows: Sequence[PredictedRow]) -> TableScores:
    """Return the scores of predicted rows, and those of the baseline on the same rows."""
    points, ideal = list[MeasuredPoint](), list[float]()
    for row in rows:
        if row.run is None or row.estimate is None or row.run.measured.seconds is None:
            continue
        ideal.append(at_peak(row.run.job, row.run.cluster))
        points.append(
            MeasuredPoint(
                name=row.name,
                predicted=row.estimate.seconds,
                measured=row.run.measured.seconds,
                group=row.run.group,
                layout=row.run.repeat,
                low=row.estimate.low,
                high=row.estimate.high,
            )
        )
    efficiency = fit_efficiency(ideal, [point.measured for point in points]) if points else None
    baseline = [
        replace(point, predicted=seconds / efficiency, low=None, high=None)
        for point, seconds in zip(points, ideal, strict=True)
        if efficiency
    ]
    refused: dict[str, int] = {}
    for row in rows:
        if row.refused:
            refused[row.refused] = refused.get(row.refused, 0) + 1
    return TableScores(
        model=scores(points),
        baseline=scores(baseline),
        efficiency=efficiency,
        memory=_memory_scores(rows),
        refused=refused,
    )


def _memory_scores(rows: Sequence[PredictedRow]) -> MemoryScores:
    errors = [error for error in map(memory_error, rows) if error is not None]
    failed = {"fits": 0, "tight": 0, "does not fit": 0}
    ran = refused = 0
    for row in rows:
        if row.run is None or row.estimate is None or row.estimate.memory is None:
            continue
        verdict = row.estimate.memory.verdict
        if row.run.measured.out_of_memory:
            failed[verdict] += 1
        elif row.run.measured.seconds is not None:
            ran += 1
            refused += verdict == "does not fit"
    return MemoryScores(
        rows=len(errors),
        mape=sum(map(abs, errors)) / len(errors) if errors else None,
        bias=sum(errors) / len(errors) if errors else None,
        worst=max(errors, key=abs) if errors else None,
        out_of_memory=failed,
        ran=ran,
        ran_does_not_fit=refused,
    )
