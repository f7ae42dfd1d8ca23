"""Claim: predictions hold on runs of models and GPUs that no constant was fitted on.

Predicts every table of measured runs and reports errors, bias, regret and concordance, compared with a
two-line model whose one constant is fitted to the very same rows (stretto.planner.run_scores), and with
the noise between repeated measurements. `planning_split.yaml` lists the rows used for fitting. Then prints
the published tables of Narayanan et al. 2021 (table 1) and Korthikanti et al. 2022 (table 5), row by row.

    python benchmarks/planning.py --tables ../shared/tables [--csv rows.csv] [--memory] [--only nemo]

The output is Markdown, as in docs/evidence/prediction-errors.md.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import yaml
from published import ADAPTERS, predictions

from stretto.planner.estimate import NOISE, PARTS
from stretto.planner.run_scores import PredictedRow, Scores, TableScores, added_columns, summary

HERE = Path(__file__).parent
TABLES = HERE.parent.parent / "shared" / "tables"


def is_fitted(split: dict[str, Any], table: str, row: PredictedRow) -> bool:
    """Whether the row was used for fitting."""
    rule = split["runs"].get(table)
    if rule is None:
        return False
    if rule.get("half"):
        group = ":".join(row.cells.get(name, "") for name in rule["half"])
        return hashlib.sha256(group.encode()).digest()[0] % 2 == 0
    return any(word in row.cells.get("source", "") for word in rule["match"])


# ------------------------------------------------------------------ markdown


def percent(value: float | None, sign: bool = False) -> str:
    return "" if value is None else f"{100 * value:{'+' if sign else ''}.1f}%"


def with_baseline(model: float | None, plain: float | None, sign: bool = False) -> str:
    """A score, with the baseline's in parentheses."""
    return "" if model is None else f"{percent(model, sign)} ({percent(plain, sign)})"


def line(name: str, rows: Sequence[PredictedRow]) -> str:
    totals = summary(rows)
    model, plain = totals.model, totals.baseline
    if model is None or plain is None:
        return f"| {name} | 0 | | | | | | | |"
    cells = (
        name,
        str(model.rows),
        with_baseline(model.mape, plain.mape),
        with_baseline(model.median, plain.median),
        with_baseline(model.bias, plain.bias, sign=True),
        percent(model.worst, sign=True),
        percent(model.coverage),
        f"{model.groups}: {with_baseline(model.regret, plain.regret)}" if model.groups else "",
        with_baseline(model.concordance, plain.concordance),
    )
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| rows | n | MAPE | median | bias | worst | in interval | groups: regret | concordance |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def by(rows: Iterable[PredictedRow], key: Callable[[PredictedRow], str]) -> dict[str, list[PredictedRow]]:
    groups: dict[str, list[PredictedRow]] = {}
    for row in rows:
        if row.run is not None:
            groups.setdefault(key(row), []).append(row)
    return dict(sorted(groups.items()))


def family(row: PredictedRow) -> str:
    assert row.run is not None
    name = row.cells.get("model", "").lower()
    return next((f for f in ("llama", "nemotron", "mpt", "mixtral", "qwen") if f in name), "gpt")


def hardware(row: PredictedRow) -> str:
    assert row.run is not None
    return row.run.cluster.device.name


def table_of_scores(tables: dict[str, list[PredictedRow]], split: dict[str, Any]) -> str:
    fitted = {t: [o for o in rows if is_fitted(split, t, o)] for t, rows in tables.items()}
    never = {t: [o for o in rows if not is_fitted(split, t, o)] for t, rows in tables.items()}
    every = [row for rows in never.values() for row in rows]
    lines = [
        "In parentheses: the two-line baseline model on the same rows.",
        "",
        "Rows used for fitting:",
        "",
        HEAD,
    ]
    lines += [line(table, rows) for table, rows in fitted.items() if rows]
    lines += ["", "Rows never used for fitting:", "", HEAD]
    lines += [line(table, rows) for table, rows in never.items() if summary(rows).model]
    lines += [line("all", every)]
    for title, key in (("By model family", family), ("By GPU", hardware)):
        lines += ["", f"{title}, rows never used for fitting:", "", HEAD]
        lines += [line(name, rows) for name, rows in by(every, key).items() if summary(rows).model]
    lines += ["", f"Repeated measurements of the same runs differ by {percent(NOISE)} (median of 69)."]
    return "\n".join(lines)


def published(title: str, rows: Iterable[PredictedRow]) -> str:
    lines = [
        title,
        "",
        "| model | layout | measured s | predicted s | error | dominant |",
        "|---|---|---|---|---|---|",
    ]
    errors = list[float]()
    for row in rows:
        if row.run is None or row.estimate is None or row.run.measured.seconds is None:
            continue
        job, measured = row.run.job, row.run.measured.seconds
        error = row.estimate.seconds / measured - 1
        errors.append(error)
        how = f"{job.layout}, {job.schedule}, {job.recompute.mode}"
        lines.append(
            f"| {row.cells['params_b']}B | {how} | {measured:.2f} | {row.estimate.seconds:.2f} | "
            f"{percent(error, sign=True)} | {row.estimate.dominant} |"
        )
    mean = sum(map(abs, errors)) / max(1, len(errors))
    return "\n".join([*lines, "", f"Mean error {percent(mean)}."])


def memory_scores(tables: dict[str, list[PredictedRow]]) -> str:
    lines = [
        "| table | rows with memory | MAPE | bias | ran out of memory; predicted fits / tight / does not fit "
        "| ran; predicted not to fit |",
        "|---|---|---|---|---|---|",
    ]
    for table, rows in tables.items():
        memory = summary(rows).memory
        failed = " / ".join(str(n) for n in memory.out_of_memory.values())
        lines.append(
            f"| {table} | {memory.rows} | {percent(memory.mape)} | {percent(memory.bias, sign=True)} "
            f"| {failed} | {memory.ran_does_not_fit} of {memory.ran} |"
        )
    return "\n".join(lines)


def refusals(tables: dict[str, list[PredictedRow]]) -> str:
    lines = ["Refused rows:", ""]
    for table, rows in tables.items():
        for why, count in summary(rows).refused.items():
            lines.append(f"- {table}: {count} x {why}")
    return "\n".join(lines)


# ------------------------------------------------------------------ files


def write_rows(path: Path, tables: dict[str, list[PredictedRow]], split: dict[str, Any]) -> None:
    """One line per row: prediction and its parts, measurement, and whether the row was used for fitting."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer: csv.DictWriter[str] | None = None
        for table, rows in tables.items():
            for row in rows:
                parts = {} if row.estimate is None else row.estimate.parts
                cells = {
                    "table": table,
                    "number": row.number,
                    "fitted": int(is_fitted(split, table, row)),
                    "name": row.name,
                    **_job(row),
                    **added_columns(row),
                    **{f"part_{name}": parts.get(name, 0.0) for name in PARTS},
                    "notes": row.cells.get("notes", ""),
                }
                writer = writer or _writer(file, cells)
                writer.writerow(cells)


def _job(row: PredictedRow) -> dict[str, Any]:
    if row.run is None:
        return dict.fromkeys(
            ("gpu", "gpus", "layers", "hidden", "sequence", "microbatches", "micro", "schedule")
        )
    job = row.run.job
    return {
        "gpu": row.run.cluster.device.name,
        "gpus": job.layout.world,
        "layers": job.shape.layers,
        "hidden": job.shape.hidden,
        "sequence": job.sequence,
        "microbatches": job.microbatches,
        "micro": job.micro_batch,
        "schedule": job.schedule,
    }


def _writer(file: Any, cells: dict[str, Any]) -> csv.DictWriter[str]:
    writer = csv.DictWriter(file, list(cells))
    writer.writeheader()
    return writer


def summary_of(scores: Scores | None) -> str:
    return "" if scores is None else f"MAPE {percent(scores.mape)}, bias {percent(scores.bias, sign=True)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tables", type=Path, default=TABLES, help="folder of the measured tables")
    parser.add_argument("--csv", type=Path, help="write a line a row")
    parser.add_argument("--memory", action="store_true", help="predict memory too, which takes longer")
    parser.add_argument("--only", default="", help="tables whose name has this")
    args = parser.parse_args()
    split = yaml.safe_load((HERE / "planning_split.yaml").read_text(encoding="utf-8"))
    tables = dict[str, list[PredictedRow]]()
    for table in ADAPTERS:
        path = args.tables / f"{table}.csv"
        if args.only not in table or not path.exists():
            continue
        start = perf_counter()
        tables[table] = predictions(args.tables, table, args.memory)
        totals: TableScores = summary(tables[table])
        took = perf_counter() - start
        print(
            f"{table}: {len(tables[table])} rows, {took:.1f} s, {summary_of(totals.model)}", file=sys.stderr
        )
    if args.csv:
        write_rows(args.csv, tables, split)
    print(table_of_scores(tables, split))
    for table, word, title in (
        ("megatron_sc21_a100", "Table 1", "Narayanan et al. 2021, table 1:"),
        ("korthikanti_2022_a100", "Table 5", "Korthikanti et al. 2022, table 5:"),
    ):
        if table in tables:
            print(f"\n{published(title, (o for o in tables[table] if word in o.cells['source']))}")
    if args.memory:
        print(f"\n{memory_scores(tables)}")
    print(f"\n{refusals(tables)}")


if __name__ == "__main__":
    main()
