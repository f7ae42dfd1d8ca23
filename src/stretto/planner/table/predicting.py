"""Tables of measured runs: reading the file, predicting each row, and summarising the errors."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError
from stretto.planner.assumptions import Assumptions
from stretto.planner.estimate import NOISE, Estimate, estimate
from stretto.planner.machines.cluster import Cluster
from stretto.planner.memory.fits import Fit, fit
from stretto.planner.memory.short_step import short_step_memory
from stretto.planner.table.columns import USER_PREFIX, column
from stretto.planner.table.row import Row, read_row
from stretto.planner.table.scores import Point, Scores, at_peak, fit_efficiency, scores
from stretto.spec.job import Job
from stretto.spec.shape import ModelShape

GIB = 2**30
_HINT = 100  # characters of a hint that is kept beside a refusal


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A row of a table: its cells, their meaning, and the prediction or the reason why there is none.

    Attributes:
        number: of the row, from 1.
        refused: why there is no prediction.
    """

    number: int
    cells: Mapping[str, str]
    row: Row | None = None
    estimate: Estimate | None = None
    refused: str = ""

    @property
    def name(self) -> str:
        """Model and layout, for people."""
        model = self.cells.get("model", "")
        if self.row is None:
            return f"row {self.number}: {model}"
        job = self.row.job
        sizes = f"{job.shape.layers}x{job.shape.hidden}"
        return f"row {self.number}: {model} {sizes} {job.layout} {self.row.hardware}".replace("  ", " ")


def predict_rows(
    rows: Iterable[Mapping[str, str]],
    cluster: Cluster | None = None,
    shape: ModelShape | None = None,
    memory: bool = True,
    first: int = 1,
) -> Iterator[Predicted]:
    """Each row with its prediction, or with the reason why there is none.

    Args:
        first: the number of the first row.
    """
    known: dict[object, Estimate] = {}
    for number, cells in enumerate(rows, first):
        try:
            row = read_row(cells, cluster, shape)
            yield Predicted(number=number, cells=cells, row=row, estimate=_estimate(row, memory, known))
        except StrettoError as error:
            brief = error.hint is not None and len(error.hint) <= _HINT
            why = f"{error.message}; {error.hint}" if brief else error.message
            yield Predicted(number=number, cells=cells, refused=why)
        except (ArithmeticError, AssertionError, IndexError, KeyError, TypeError, ValueError) as error:
            # a row that breaks an assumption of the model must not stop the others; it is reported as such
            yield Predicted(number=number, cells=cells, refused=f"unforeseen {type(error).__name__}: {error}")


def _estimate(row: Row, memory: bool, known: dict[object, Estimate]) -> Estimate:
    """The estimate of a row, with memory of a short step; rows that repeat one job share it."""
    key = (row.group, row.repeat)
    if key not in known:
        known[key] = short_step_estimate(row.job, row.cluster, row.assumptions, memory)
    return known[key]


def short_step_estimate(
    job: Job, cluster: Cluster, assumptions: Assumptions, memory: bool = True
) -> Estimate:
    """An estimate whose memory is counted on a short step, of the ranks that may be the fullest.

    Raises:
        StrettoError: the job has no program.
    """
    result = estimate(job, cluster, assumptions, memory=False)
    if not memory:
        return result
    return replace(result, memory=fit(short_step_memory(job), cluster.device, assumptions.reserve))


# ------------------------------------------------------------------ columns


def columns(one: Predicted) -> dict[str, Any]:
    """The columns added to a row: numbers and texts, None where there is no value."""
    added: dict[str, Any] = {**dict.fromkeys(ADDED), "defaults": "", "refused": one.refused}
    if one.estimate is not None and one.row is not None:
        added |= {name: value(one, one.estimate, one.row) for name, value in ADDED.items()}
    return added


def _gib(kind: str) -> Callable[[Predicted, Estimate, Row], float | None]:
    return lambda one, estimate, row: estimate.memory and _of_kind(estimate.memory, kind) / GIB


ADDED: Mapping[str, Callable[[Predicted, Estimate, Row], Any]] = {
    "predicted_step_time_s": lambda one, estimate, row: estimate.seconds,
    "predicted_low_s": lambda one, estimate, row: estimate.low,
    "predicted_high_s": lambda one, estimate, row: estimate.high,
    "predicted_tokens_per_s_per_gpu": lambda one, estimate, row: estimate.tokens_per_s / row.job.layout.world,
    "predicted_tflops_per_gpu": lambda one, estimate, row: estimate.tflops_per_gpu,
    "predicted_mfu": lambda one, estimate, row: estimate.mfu,
    "predicted_hfu": lambda one, estimate, row: estimate.hfu,
    "predicted_memory_allocated_gib": _gib("allocated"),
    "predicted_memory_reserved_gib": _gib("reserved"),
    "predicted_memory_device_gib": _gib("device"),
    "verdict": lambda one, estimate, row: estimate.memory and estimate.memory.verdict,
    "bubble": lambda one, estimate, row: estimate.bubble,
    "dominant": lambda one, estimate, row: estimate.dominant,
    "measured_step_time_s": lambda one, estimate, row: row.measured.seconds,
    "measured_by": lambda one, estimate, row: row.measured.by or None,
    "error_pct": lambda one, estimate, row: _percent(
        row.measured.seconds and estimate.seconds / row.measured.seconds - 1
    ),
    "memory_error_pct": lambda one, estimate, row: _percent(memory_error(one)),
    "defaults": lambda one, estimate, row: "; ".join(
        f"{name}={value}" for name, value in row.defaults.items()
    ),
    "refused": lambda one, estimate, row: "",
}


def _percent(part: float | None) -> float | None:
    return None if part is None else 100 * part


def memory_error(one: Predicted) -> float | None:
    """Predicted over recorded memory, minus 1, of the kind that was recorded."""
    if one.row is None or one.estimate is None or one.estimate.memory is None:
        return None
    measured = one.row.measured
    if measured.memory is None:
        return None
    return _of_kind(one.estimate.memory, measured.kind) / measured.memory - 1


def _of_kind(held: Fit, kind: str) -> float:
    return {"allocated": held.allocated, "reserved": held.reserved, "device": held.device}[kind].mid


# ------------------------------------------------------------------ scores


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Predicted beside recorded memory.

    Attributes:
        rows: number of rows with recorded memory.
        out_of_memory: rows that ran out of memory, by the verdict predicted for them.
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
class Summary:
    """All scores of a table."""

    model: Scores | None
    baseline: Scores | None
    efficiency: float | None
    memory: Memory
    refused: Mapping[str, int]

    def facts(self) -> dict[str, Any]:
        """The summary as JSON has it."""
        return {
            "error": None if self.model is None else self.model.facts(),
            "baseline": None
            if self.baseline is None
            else {**self.baseline.facts(), "efficiency": self.efficiency},
            "noise": NOISE,
            "memory": asdict(self.memory),
            "refused": dict(self.refused),
        }


def summary(rows: Sequence[Predicted]) -> Summary:
    """The scores of predicted rows, beside those of the baseline on the same rows."""
    timed = list(_timed(rows))
    points = [point for point, _ in timed]
    ideal = [at_peak(one.row.job, one.row.cluster) for _, one in timed if one.row]
    efficiency = fit_efficiency(ideal, [point.measured for point in points]) if points else None
    plain = [
        replace(point, predicted=seconds / efficiency, low=None, high=None)
        for point, seconds in zip(points, ideal, strict=True)
        if efficiency
    ]
    refused: dict[str, int] = {}
    for one in rows:
        if one.refused:
            refused[one.refused] = refused.get(one.refused, 0) + 1
    return Summary(
        model=scores(points),
        baseline=scores(plain),
        efficiency=efficiency,
        memory=_memory(rows),
        refused=refused,
    )


def _timed(rows: Iterable[Predicted]) -> Iterator[tuple[Point, Predicted]]:
    """Rows with a measured time."""
    for predicted in rows:
        if predicted.row is None or predicted.estimate is None or predicted.row.measured.seconds is None:
            continue
        result, row = predicted.estimate, predicted.row
        point = Point(
            name=predicted.name,
            predicted=result.seconds,
            measured=row.measured.seconds or 0.0,
            group=row.group,
            layout=row.repeat,
            low=result.low,
            high=result.high,
        )
        yield point, predicted


def _memory(rows: Sequence[Predicted]) -> Memory:
    errors = [error for error in map(memory_error, rows) if error is not None]
    failed = {"fits": 0, "tight": 0, "does not fit": 0}
    ran = refused = 0
    for one in rows:
        if one.row is None or one.estimate is None or one.estimate.memory is None:
            continue
        verdict = one.estimate.memory.verdict
        if one.row.measured.out_of_memory:
            failed[verdict] += 1
        elif one.row.measured.seconds is not None:
            ran += 1
            refused += verdict == "does not fit"
    return Memory(
        rows=len(errors),
        mape=sum(map(abs, errors)) / len(errors) if errors else None,
        bias=sum(errors) / len(errors) if errors else None,
        worst=max(errors, key=abs) if errors else None,
        out_of_memory=failed,
        ran=ran,
        ran_does_not_fit=refused,
    )


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a line of column names, without the columns of an earlier prediction.

    Raises:
        StrettoError: the file cannot be read or is empty, has an unknown column or one twice, or a row that
            is longer than the line of names.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(_rows(path, csv.reader(file)))
    except OSError as error:
        raise StrettoError(f"cannot read {path}: {error.strerror}", hint="check the file's name") from None
    except (UnicodeDecodeError, csv.Error):
        raise StrettoError(f"cannot read {path}: it is no CSV in UTF-8", hint="save it as CSV") from None
    if not rows:
        raise StrettoError(f"{path} has no rows", hint="a line of column names, then one line a run")
    return rows


def _rows(path: Path, lines: Iterator[list[str]]) -> Iterator[dict[str, str]]:
    header = next(lines, [])
    names = dict[str, str]()
    for name in header:
        try:
            known = name if name.startswith(USER_PREFIX) or name in ADDED else column(name).name
        except StrettoError as error:
            raise StrettoError(f"{path}: {error.message}", hint=error.hint) from None
        if known in names:
            raise StrettoError(f"{path}: {names[known]!r} and {name!r} are one column", hint="keep one")
        names[known] = name
    for number, cells in enumerate((cells for cells in lines if cells), 1):
        if len(cells) > len(header):
            raise StrettoError(
                f"{path}, row {number}: {len(cells)} cells for {len(header)} columns",
                hint="put cells with commas in quotes",
            )
        cells += [""] * (len(header) - len(cells))
        yield {name: cell for name, cell in zip(header, cells, strict=True) if name not in ADDED}
