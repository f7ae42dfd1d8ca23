"""Fits the costs of a recommender's step other than kernels and exchanges, by program, to a few named rows.

    python benchmarks/fit_tables.py --tables ../shared/tables [--write]

`host`: seconds per step; `passes`: bytes between products; `slower`: factor of products on CPUs;
`host_row`: seconds per row that the host looks up and updates; `each_id`: seconds per id on a device.
`--write` stores them in recommender/planner/data/tables_fitted.yaml.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from math import log
from pathlib import Path
from statistics import mean

from dlrm_rows import Run, read_runs

from stretto.recommender.planner.table_times import program_of

TABLES = Path(__file__).parent.parent.parent / "shared" / "tables"

# The rows of dlrm.csv used to fit each program's constants, counted from 1 after the header.
PLAN: tuple[tuple[str, tuple[str, ...], tuple[int, ...]], ...] = (
    # the small model on one A100, the large one on eight, TF32 and AMP
    ("nvidia-tf2", ("host", "passes"), (16, 17, 18, 19)),
    # the 113B model on one A100 with tables on the CPU, and on CPUs alone: one constant each
    ("nvidia-tf2", ("host_row",), (37,)),
    ("tensorflow-cpu", ("slower",), (36,)),
    ("nvidia-pytorch", ("host", "passes"), (44, 45)),
    ("torchrec", ("host",), (5, 9)),
    ("merlin", ("host", "each_id"), (54, 56)),
    ("sok", ("host", "passes"), (70, 71)),
)
FITTED = frozenset(row for _, _, rows in PLAN for row in rows)
GRIDS: Mapping[str, Sequence[float]] = {
    "host": [0.25e-3 * i for i in range(49)],
    "passes": [0.2 * i for i in range(2, 21)],
    "each_id": [0.25e-9 * i for i in range(25)],
    "slower": [1.08**i for i in range(60)],
    "host_row": [1e-8 * 1.08**i for i in range(70)],
}


def fit(runs: Mapping[int, Run]) -> dict[str, dict[str, float]]:
    """The constants with the smallest mean logarithmic error, by program."""
    fitted = dict[str, dict[str, float]]()
    for name, fields, rows in PLAN:
        program_before = replace(program_of(name), **fitted.get(name, {}))
        best, least = dict[str, float](), float("inf")
        for values in itertools.product(*(GRIDS[field] for field in fields)):
            tried = dict(zip(fields, values, strict=True))
            program = replace(program_before, **tried)
            error = mean(abs(log(runs[row].predicted(program) / runs[row].measured)) for row in rows)
            if error < least - 1e-9:
                best, least = tried, error
        fitted.setdefault(name, {}).update(best)
        print(
            name, {key: float(f"{value:.3g}") for key, value in best.items()}, f"{least:.1%} on rows {rows}"
        )
    return fitted


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", type=Path, default=TABLES)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    runs, _ = read_runs(args.tables / "dlrm.csv")
    constants = fit({run.number: run for run in runs})
    if args.write:
        lines = [
            "# Written by benchmarks/fit_tables.py from measured rows that it names; fields: tables.yaml."
        ]
        for name, values in constants.items():
            entries = ", ".join(f"{key}: {format(value, '.4e')}" for key, value in values.items())
            lines.append(f"{name}: {{{entries}}}")
        path = Path(str(files("stretto.recommender.planner").joinpath("data/tables_fitted.yaml")))
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
