"""Fits the software's part of a step: the host time to launch a kernel and an action, and the slowdown of
kernels within a step compared with kernels alone. Fitted on the runs that planning_split.yaml names: half
of vTrain's single-node runs, whose layers are so small that the host dominates, and tables of Korthikanti
et al. 2022 and Narayanan et al. 2021, whose layers are so large that kernels do.

    python benchmarks/fit_steps.py --tables ../shared/tables [--write]

Prints the constants and the errors on both; `--write` stores them in planner/data/software.yaml.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from math import log
from pathlib import Path
from statistics import mean

import yaml
from planning import HERE, TABLES, is_fitted
from published import adapted

from stretto.planner.assumptions import SoftwareProfile, software_profile
from stretto.planner.estimate import estimate
from stretto.planner.table.predicting import Predicted
from stretto.planner.table.row import Row, read_row

SMALL, LARGE = "vtrain_single_node_a100", ("korthikanti_2022_a100", "megatron_sc21_a100")
EVERY = 4  # use one in EVERY of the small runs' half: they differ little


def fitted_rows(folder: Path, table: str, every: int = 1) -> list[Row]:
    """The rows of a table used for fitting."""
    split = yaml.safe_load((HERE / "planning_split.yaml").read_text(encoding="utf-8"))
    kept: list[Row] = []
    for cells, refused in adapted(folder, table):
        if refused:
            continue  # scored by planning.py
        row = read_row(cells)
        if row.measured.seconds is not None and is_fitted(
            split, table, Predicted(number=0, cells=cells, row=row)
        ):
            kept.append(row)
    return kept[::every]


def errors(rows: Iterable[Row], software: SoftwareProfile) -> list[float]:
    """Logarithms of the ratio of predicted to measured seconds."""
    logs: list[float] = []
    for row in rows:
        assumptions = replace(row.assumptions, software=software)
        seconds = estimate(row.job, row.cluster, assumptions, memory=False).seconds
        assert row.measured.seconds is not None
        logs.append(log(seconds / row.measured.seconds))
    return logs


def fit(small: list[Row], large: list[Row], software: SoftwareProfile) -> SoftwareProfile:
    """Host and action from the small runs, `alone` from the mean of the large ones, alternately."""
    for _ in range(3):
        bias = mean(errors(large, software))
        software = replace(software, alone=round(software.alone * (1 - bias), 3))

        @lru_cache
        def loss(host: float, action: float, plain: SoftwareProfile = software) -> float:
            tried = replace(plain, host=host * 1e-6, action=action * 1e-6)
            return mean(abs(error) for error in errors(small, tried))

        best = min(
            ((host, action) for host in range(24, 42, 2) for action in range(0, 3500, 500)),
            key=lambda at: loss(*at),
        )
        finer = ((best[0] + h, best[1] + a) for h in (-1, 0, 1) for a in (-250, 0, 250))
        host, action = min(((h, max(0, a)) for h, a in finer), key=lambda at: loss(*at))
        software = replace(software, host=host * 1e-6, action=action * 1e-6)
    return software


def fit_sharded(rows: list[Row], software: SoftwareProfile) -> SoftwareProfile:
    """The speed of ZeRO-3's collectives at the time, from Narayanan et al. 2021, table 2."""
    tried = [replace(software, sharded=round(0.05 * at, 2)) for at in range(1, 21)]
    return min(tried, key=lambda one: mean(abs(error) for error in errors(rows, one)))


def write(software: SoftwareProfile) -> None:
    """Write the constants to the data file: `alone` for all programs, the others for the first."""
    path = Path(str(files("stretto.planner").joinpath("data/software.yaml")))
    text = re.sub(r"alone: .*", f"alone: {software.alone:g}", path.read_text(encoding="utf-8"))
    text = re.sub(r"(unfused:\n  host: ).*", rf"\g<1>{software.host:.3e}", text)
    text = re.sub(r"(\n  action: ).*", rf"\g<1>{software.action:.3e}", text)
    text = re.sub(r"(\n  sharded: ).*", rf"\g<1>{software.sharded:g}", text)
    path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tables", type=Path, default=TABLES)
    parser.add_argument("--write", action="store_true", help="into software.yaml")
    options = parser.parse_args()
    small = fitted_rows(options.tables, SMALL, EVERY)
    large = [row for table in LARGE for row in fitted_rows(options.tables, table)]
    sharded = [row for row in large if row.job.dp.mode == "zero3"]
    large = [row for row in large if row not in sharded]
    software = fit_sharded(sharded, fit(small, large, software_profile("unfused")))
    constants = {name: getattr(software, name) for name in ("host", "action", "alone", "sharded")}
    print(", ".join(f"{name} {value:.3g}" for name, value in constants.items()))
    for name, rows in ((SMALL, fitted_rows(options.tables, SMALL)), (" and ".join(LARGE), large)):
        logs = errors(rows, software)
        size, bias = 100 * mean(map(abs, logs)), 100 * mean(logs)
        print(f"{name}: {len(rows)} rows, mean error {size:.1f}%, bias {bias:+.1f}%")
    if options.write:
        write(software)


if __name__ == "__main__":
    main()
