"""Published measurements in `tables`, and the figures that compare predictions with them.

The tables are CSV in the columns of `stretto predict --table`. Their columns `x_panel`, `x_series` and `x_at`
place a row in its figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import StrettoError, nearest
from stretto.planner.estimate import Estimate
from stretto.planner.run_scores import PredictedRow, TableScores, predict_rows, read_table, summary
from stretto.planner.runs import read_run

TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure or table of a paper whose numbers are printed.

    Attributes:
        name: on the command line: the paper and the number of its figure or table.
        table: the file, without `.csv`.
        title: the paper, which of its figures or tables, and what that compares.
        measure: the quantity on the vertical axis, with its unit; larger is faster.
        across: the quantity on the horizontal axis.
        work: of an estimate, the measure times the seconds of a step.
        fitted: constants of the predictions were fitted on these rows, so the errors are no test.
    """

    name: str
    table: str
    title: str
    measure: str
    across: str
    work: Callable[[Estimate], float]
    fitted: bool


def _hardware_tflops(estimate: Estimate) -> float:
    assert estimate.hfu is not None  # of GPUs
    assert estimate.mfu is not None
    return estimate.tflops_per_gpu * estimate.hfu / estimate.mfu * estimate.seconds


FIGURES: Mapping[str, Figure] = {
    figure.name: figure
    for figure in (
        Figure(
            name="sc21-1",
            table="sc21_table_1",
            title="Narayanan et al. 2021, table 1: GPT from 1.7 B to 1 T parameters on 32 to 3072 GPUs",
            measure="TFLOP/s per GPU, recomputation counted",
            across="parameters",
            work=_hardware_tflops,
            fitted=True,
        ),
        Figure(
            name="sc21-10",
            table="sc21_table_2",
            title="Narayanan et al. 2021, figure 10 (numbers of table 2): PTD-P and ZeRO-3",
            measure="TFLOP/s per GPU, recomputation counted",
            across="GPUs",
            work=_hardware_tflops,
            fitted=True,
        ),
        Figure(
            name="korthikanti-5",
            table="korthikanti_table_5",
            title="Korthikanti et al. 2022, table 5: full and selective recomputation",
            measure="model FLOPs utilization, %, from the step time",
            across="parameters",
            work=lambda estimate: 100 * (estimate.mfu or 0.0) * estimate.seconds,
            fitted=True,
        ),
        Figure(
            name="zb-5",
            table="zb_table_4",
            title="Qi et al. 2024 (Zero Bubble), figure 5 (numbers of table 4): schedules",
            measure="samples per GPU and second",
            across="microbatches",
            work=lambda estimate: estimate.job.global_batch / estimate.job.layout.world,
            fitted=False,
        ),
    )
}
# figures of Narayanan et al. 2021 that people ask for, and whose values the paper does not print
PLOTS: Mapping[str, str] = {
    "sc21-13": "tensor against pipeline parallelism, 162.2 B parameters on 64 GPUs",
    "sc21-14": "pipeline against data parallelism, 5.9 B parameters on 64 GPUs",
    "sc21-15": "tensor against data parallelism, 5.9 B parameters on 64 GPUs",
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """A published measurement beside its prediction, in the figure's measure.

    Attributes:
        panel, series, at: where the figure shows it.
        layout: parallel degrees and schedule, in words.
        low, high: the interval that contains the measurement nine times out of ten.
        error: predicted over published seconds of a step, minus 1.
    """

    panel: str
    series: str
    at: str
    layout: str
    published: float
    predicted: float
    low: float
    high: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A figure with all of its points.

    Attributes:
        source: the paper.
        rows: the table's rows with their predictions.
        scores: of the predicted step times.
    """

    figure: Figure
    source: str
    rows: Sequence[PredictedRow]
    points: Sequence[Point]
    scores: TableScores


def find_figure(name: str) -> Figure:
    """Return the figure of that name.

    Raises:
        StrettoError: no such figure, or one whose measurements are not printed.
    """
    if name in PLOTS:
        raise StrettoError(
            f"figure {name} ({PLOTS[name]}) is a plot whose values the paper does not print",
            hint="sc21-1 and sc21-10 are its tables; stretto predict --table predicts layouts of your own",
        )
    if name not in FIGURES:
        near = nearest(name, FIGURES)
        listed = f"one of {', '.join(FIGURES)}"
        raise StrettoError(
            f"there is no figure {name!r}", hint=f"did you mean {near!r}? {listed}" if near else listed
        )
    return FIGURES[name]


def compare(figure: Figure) -> Comparison:
    """Predict every row of the figure's table.

    Raises:
        StrettoError: a row that cannot be predicted; the tables here have none.
    """
    rows = list(predict_rows(read_table(TABLES / f"{figure.table}.csv"), read_run, memory=False))
    return Comparison(
        figure=figure,
        source=rows[0].cells["source"],
        rows=rows,
        points=[_point(figure, row) for row in rows],
        scores=summary(rows),
    )


def _point(figure: Figure, row: PredictedRow) -> Point:
    if row.estimate is None or row.run is None or row.run.measured.seconds is None:
        raise StrettoError(f"{figure.table}.csv, row {row.number}: {row.refused or 'no measured time'}")
    estimate, measured = row.estimate, row.run.measured.seconds
    work, job = figure.work(estimate), row.run.job
    chunks = job.options.get("chunks")
    schedule = f", {job.schedule}{f' x{chunks}' if chunks else ''}" if job.layout.pp > 1 else ""
    return Point(
        panel=row.cells.get("x_panel", ""),
        series=row.cells["x_series"],
        at=row.cells["x_at"],
        layout=f"{job.layout}{schedule}",
        published=work / measured,
        predicted=work / estimate.seconds,
        low=work / estimate.high,
        high=work / estimate.low,
        error=estimate.seconds / measured - 1,
    )
