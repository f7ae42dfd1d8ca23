"""Fits the software's part of a step to measured runs: what the host costs, and how much slower kernels and
collectives are within a step than alone. `planner/assumptions.py` describes each constant.

    python benchmarks/fit_steps.py --tables ../shared/tables [--write]

Fits to the rows that planning_split.yaml names, so that all others stay unseen; leave_one_out.py refits to
all rows of all tables but one. The mean logarithmic error of each table counts equally, so that a table of
hundreds of small runs does not outweigh one of a few large ones; where no row depends on a constant, it
stays at its prior. The step is linearised in the logarithms of the constants (one prediction of every row
for each), the linear model is minimised, and the two are repeated. `--write` stores the constants in
planner/data/software.yaml.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from fitting import TABLES, Column
from planning import HERE, is_fitted
from published import adapted
from published.rows import read_row
from published.software import EARLY

from stretto.errors import StrettoError
from stretto.planner.assumptions import SoftwareAssumptions, software_profiles
from stretto.planner.estimate import estimate
from stretto.planner.run_scores import PredictedRow
from stretto.planner.runs import RunRecord

MOST = 60  # rows of a table that a fit uses, evenly spaced: the others differ little


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A constant that runs determine.

    Attributes:
        profiles: the software profiles that have it; empty: all of them.
        prior: its value where no run says anything, from before any of these runs was looked at.
        spread: standard deviation of the prior's logarithm.
        low, high: bounds.
    """

    profiles: tuple[str, ...]
    prior: float
    spread: float
    low: float
    high: float


# Priors: a kernel launched from Python costs 10 to 40 us of the host in this code (Megatron's layer counts 16
# kernels where PyTorch launches two to three times as many operations); kernels on Hopper are as much slower
# within a step as Llama 3 405B on 8,192 and 16,384 H100 needs (arXiv 2407.21783, table 4); the rest are round
# figures.
CONSTANTS: Mapping[str, Constant] = {
    "host": Constant(profiles=EARLY, prior=25e-6, spread=0.5, low=5e-6, high=80e-6),
    "action": Constant(profiles=EARLY, prior=1e-3, spread=0.7, low=1e-4, high=5e-3),
    "blocking": Constant(profiles=(), prior=0.1, spread=1.0, low=0.02, high=1.0),
    "alone": Constant(profiles=(), prior=1.05, spread=0.05, low=0.95, high=1.25),
    "alone_hopper": Constant(profiles=(), prior=1.18, spread=0.05, low=0.95, high=1.35),
    "sharded": Constant(profiles=EARLY, prior=0.3, spread=1.0, low=0.05, high=1.0),
}
Values = Mapping[str, float]
PENALTY = 0.004  # of a constant one standard deviation from its prior, in mean error


def applied(profile: str, software: SoftwareAssumptions, values: Values) -> SoftwareAssumptions:
    """A profile with the fitted constants that it has."""
    mine = {n: v for n, v in values.items() if not CONSTANTS[n].profiles or profile in CONSTANTS[n].profiles}
    return replace(software, **mine)


TimedRow = tuple[Mapping[str, str], RunRecord]  # its cells, and the run that they describe


def timed_rows(folder: Path, table: str) -> list[TimedRow]:
    """The rows of a table with a measured time that can be predicted."""
    rows = list[TimedRow]()
    for cells, refused in adapted(folder, table):
        if refused:
            continue
        try:
            run = read_row(cells)
        except StrettoError:
            continue  # reported by planning.py
        if run.measured.seconds is not None:
            rows.append((cells, run))
    return rows


def chosen_rows(rows: Sequence[TimedRow]) -> list[RunRecord]:
    """At most `MOST` runs, evenly spaced, without those whose replay takes longest."""
    quick = [run for _, run in rows if run.job.layout.pp * (run.job.microbatches or 1) < 20_000]
    return [quick[int(at)] for at in np.linspace(0, len(quick) - 1, min(MOST, len(quick)))]


def profile_name(row: RunRecord) -> str:
    """The name of the software profile of a row, which may state its kernel of attention beside it."""
    software = row.assumptions.software
    stated = {name: getattr(software, name) for name in ("attention", "hopper", "ahead", "serial", "spread")}
    return next(n for n, profile in software_profiles().items() if replace(profile, **stated) == software)


def with_constants(row: RunRecord, values: Values) -> RunRecord:
    """The row run by software with these constants."""
    software = applied(profile_name(row), row.assumptions.software, values)
    return replace(row, assumptions=replace(row.assumptions, software=software))


def log_errors(rows: Sequence[RunRecord], values: Values) -> Column:
    """Logarithms of the ratio of predicted to measured seconds."""
    predictions = dict[object, float]()  # rows that repeat a job share its prediction
    logs = list[float]()
    for row in (with_constants(row, values) for row in rows):
        key = (row.group, row.repeat)
        if key not in predictions:
            predictions[key] = estimate(row.job, row.cluster, row.assumptions, memory=False).seconds
        logs.append(np.log(predictions[key] / (row.measured.seconds or np.nan)))
    return np.array(logs)


@dataclass
class Linear:
    """Errors of a table's rows, linear in the logarithms of the constants around a point."""

    at: Column
    errors: Column
    slopes: np.ndarray[tuple[int, int], np.dtype[np.float64]]

    def __call__(self, point: Column) -> Column:
        return self.errors + self.slopes @ (point - self.at)


STEP = 0.15  # of a constant's logarithm, for its slope; `alone` is so narrow that it takes a third


def linearised(rows: Sequence[RunRecord], point: Column) -> Linear:
    """One prediction of every row at the point, and one for each constant."""
    base = log_errors(rows, values_at(point))
    slopes = np.zeros((len(rows), len(point)))
    for i, name in enumerate(CONSTANTS):
        step = STEP / 3 if name.startswith("alone") else STEP
        moved = point.copy()
        moved[i] += step if point[i] + step <= np.log(CONSTANTS[name].high) else -step
        slopes[:, i] = (log_errors(rows, values_at(moved)) - base) / (moved[i] - point[i])
    return Linear(point.copy(), base, slopes)


def values_at(point: Column) -> dict[str, float]:
    return {name: float(f"{np.exp(x):.4g}") for name, x in zip(CONSTANTS, point, strict=True)}


def point_of(values: Values) -> Column:
    return np.log([values[name] for name in CONSTANTS])


def minimised(tables: Sequence[Linear], start: Column) -> Column:
    """The point with the least mean error over tables, by coordinates, within the bounds."""
    prior = np.log([c.prior for c in CONSTANTS.values()])
    spread = np.array([c.spread for c in CONSTANTS.values()])
    low, high = (np.log([getattr(c, end) for c in CONSTANTS.values()]) for end in ("low", "high"))

    def loss(point: Column) -> float:
        wrong = float(np.mean([np.abs(table(point)).mean() for table in tables]))
        return wrong + PENALTY * float((((point - prior) / spread) ** 2).sum())

    point, best = start.copy(), loss(start)
    size = 0.2
    while size > 0.002:
        moved = False
        for i in range(len(point)):
            for sign in (1.0, -1.0):
                other = point.copy()
                # steps beyond half the prior's spread overshoot narrow constants
                other[i] = np.clip(point[i] + sign * min(size, spread[i] / 2), low[i], high[i])
                if (value := loss(other)) < best - 1e-7:
                    point, best, moved = other, value, True
        size *= 1.0 if moved else 0.5
    return point


def shipped() -> dict[str, float]:
    """The constants in the data file, or their priors where it has none."""
    profiles = software_profiles()
    return {
        name: getattr(profiles["unfused"], name) or constant.prior for name, constant in CONSTANTS.items()
    }


def write(values: Values) -> None:
    """Write the constants into the data file."""
    path = Path(str(files("stretto.planner").joinpath("data/software.yaml")))
    lines, profile = list[str](), ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if re.match(r"\w+:", line):
            profile = line.rstrip(":")
        match = re.match(r"  (\w+): ", line)
        name = match[1] if match else ""
        if name in CONSTANTS and (not CONSTANTS[name].profiles or profile in CONSTANTS[name].profiles):
            line = f"  {name}: {values[name]:.4g}"
        lines.append(line)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def fit(tables: Mapping[str, Sequence[RunRecord]], start: Values, rounds: int = 2) -> dict[str, float]:
    """The constants for the rows of these tables."""
    point = point_of(start)
    for _ in range(rounds):
        point = minimised([linearised(rows, point) for rows in tables.values()], point)
    return values_at(point)


def fits(split: dict[str, Any], table: str, row: TimedRow) -> bool:
    """Whether planning_split.yaml names the row."""
    return is_fitted(split, table, PredictedRow(number=0, cells=row[0], run=row[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tables", type=Path, default=TABLES)
    parser.add_argument("--write", action="store_true", help="into software.yaml")
    options = parser.parse_args()
    split = yaml.safe_load((HERE / "planning_split.yaml").read_text(encoding="utf-8"))
    tables = {
        name: chosen_rows([row for row in timed_rows(options.tables, name) if fits(split, name, row)])
        for name in split["runs"]
    }
    values = fit(tables, shipped())
    print(yaml.safe_dump(values, sort_keys=False).strip())
    for name, rows in tables.items():
        logs = log_errors(rows, values)
        size, bias = 100 * np.abs(logs).mean(), 100 * logs.mean()
        print(f"{name}: {len(rows)} rows, mean error {size:.1f}%, bias {bias:+.1f}%")
    if options.write:
        write(values)


if __name__ == "__main__":
    main()
