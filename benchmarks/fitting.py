"""Shared by the fits: reading tables, searching constants, errors.

Needs numpy. The tables of measured operations are not part of the repository: `--tables DIR`.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]
DATA = Path(__file__).parents[1] / "src/stretto/planner/time/data"
TABLES = Path(__file__).parents[2] / "shared/tables"


def tables_and_write(doc: str | None) -> tuple[Path, bool]:
    """The folder of tables, and whether the constants' file is to be written."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=TABLES)
    parser.add_argument("--dry", action="store_true", help="only print, leave the file of constants as it is")
    args = parser.parse_args()
    return args.tables, not args.dry


def read(tables: Path, name: str) -> list[dict[str, str]]:
    """The rows of a table."""
    with (tables / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def column(rows: list[dict[str, str]], name: str, factor: float = 1.0) -> Column:
    """One column as numbers."""
    return np.array([float(row[name]) * factor for row in rows])


def descend(
    objective: Callable[[Column], float],
    start: Column,
    bounds: Column,
    rounds: int = 60,
    step: float = 0.1,
) -> tuple[Column, float]:
    """Minimise the objective by changing one constant at a time, with adaptive factors.

    `bounds`: [constants, 2], lowest and highest.
    """
    best, at = objective(start), start.copy()
    steps = np.full(len(start), step)
    for _ in range(rounds):
        for i in range(len(start)):
            for sign in (1.0, -1.0):
                other = at.copy()
                other[i] = np.clip(at[i] * np.exp(sign * steps[i]), *bounds[i])
                value = objective(other)
                if value < best - 1e-9:
                    at, best = other, value
                    steps[i] *= 1.3
                    break
            else:
                steps[i] *= 0.5
        if steps.max() < 1e-3:
            break
    return at, best


def errors(predicted: Column, measured: Column) -> Column:
    """|predicted / measured - 1| in percent."""
    return 100 * np.abs(predicted / measured - 1)


def summary(name: str, wrong: Column, width: int = 44) -> str:
    """One line: mean and median of errors."""
    return f"{name:{width}} {wrong.mean():6.2f}% mean {np.median(wrong):6.2f}% median {len(wrong):6d} rows"


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    """Rounded to four digits, as in the data files."""
    return {name: float(f"{value:.4g}") for name, value in values.items()}
