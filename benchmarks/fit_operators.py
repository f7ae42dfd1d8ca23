"""Fits the constants of matrix products and of passes over memory to measured operations of A100 and H100.

    python benchmarks/fit_operators.py --tables ../shared/tables

Rows come from gemm_op_times_vidur.csv (microsoft/vidur, data/profiling/compute: linear layers and the
operations between them, of eight models, tp 1 to 8, 128 to 32768 tokens). Prints the errors in sample, of
each model with constants from the others, of each chip with constants from the other, and of a single
constant efficiency, and writes operators_fitted.yaml. Products of 1024 tokens and more count twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from fitting import DATA, Column, column, descend, errors, read, rounded, summary, tables_and_write

from stretto.planner.time.operators import LARGEST, LEVEL, MIDDLE, SPLITS, SUM_BYTES, SUM_SECONDS, TILES

CHIPS = {  # vendor's peak, FLOP/s; highest measured, FLOP/s; device memory, bytes/s; multiprocessors
    "a100": (312e12, 271.2e12, 2039e9, 108),
    "h100": (989e12, 794.5e12, 3350e9, 132),
}
NAMES = ("compute", "memory", "fixed_us", "tile", "wave", "prologue", "droop")
START = np.array([0.93, 0.75, 6.0, 0.1, 0.4, 80.0, 0.02])
BOUNDS = np.array(
    [[0.3, 1.2], [0.3, 1.0], [1.0, 12.0], [0.01, 0.6], [0.05, 1.0], [5.0, 300.0], [0.001, 0.06]]
)
PASSES = {
    "add": "add",
    "norm_served": "input_layernorm",
    "rope": "attn_rope",
    "gated": "mlp_act",
    "embedding": "emb",
}


@dataclass
class Rows:
    """Measured operations in columns."""

    m: Column
    n: Column
    k: Column
    seconds: Column
    model: np.ndarray[Any, Any]
    op: np.ndarray[Any, Any]

    def where(self, chosen: np.ndarray[Any, Any]) -> Rows:
        return Rows(*(getattr(self, f)[chosen] for f in ("m", "n", "k", "seconds", "model", "op")))

    @property
    def many(self) -> np.ndarray[Any, Any]:
        """1024 tokens and more."""
        return self.m >= 1024


def load(tables: Path, chip: str, kind: str) -> Rows:
    """The rows of a chip: kind is "gemm" or "memory" (there n counts reads and writes of [m, k])."""
    rows = [r for r in read(tables, "gemm_op_times_vidur") if r["gpu"].lower() == chip and r["kind"] == kind]
    return Rows(
        column(rows, "m_tokens"),
        column(rows, "n_or_rw_factor"),
        column(rows, "k_or_width"),
        column(rows, "time_ms", 1e-3),
        np.array([r["model"] for r in rows]),
        np.array([r["op"] for r in rows]),
    )


class Predictor:
    """`stretto.planner.time.operators` on whole columns; a test compares the two."""

    def __init__(self, rows: Rows, chip: str) -> None:
        _, self.sustained, self.bandwidth, self.units = CHIPS[chip]
        self.rows, m, n, k = rows, rows.m, rows.n, rows.k
        self.moved = 2 * (m * k + k * n + m * n)
        self.large = np.clip((m + n) * k / MIDDLE, *LEVEL)
        each = [(tile, split) for tile in TILES for split in SPLITS]
        area = [a * b for (a, b), _ in each]
        self.area = np.array(area, float)[:, None]
        self.split = np.array([split for _, split in each], float)[:, None]
        tiles = np.array([np.ceil(m / a) * np.ceil(n / b) * split for (a, b), split in each])
        self.waves = tiles / self.units
        self.gap = np.ceil(self.waves) - self.waves
        self.sums = np.where(self.split > 1, SUM_BYTES * self.split * (m * n)[None], 0.0)
        self.extra = np.where(self.split > 1, SUM_SECONDS, 0.0)

    def __call__(self, at: Column) -> Column:
        compute, memory, fixed, tile, wave, prologue, droop = at
        reached = memory * self.bandwidth
        rate = compute * self.sustained / self.units * (self.area / LARGEST) ** tile
        wave_seconds = 2 * self.area * (self.rows.k[None] / self.split + prologue) / rate
        work = (self.waves + wave * self.gap) * wave_seconds + self.sums / reached + self.extra
        best = work.min(axis=0) * self.large**droop
        return (best**6 + (self.moved / reached) ** 6) ** (1 / 6) + fixed * 1e-6


def objective(rows: Rows, chip: str) -> Any:
    """Mean errors over all rows, and over those of 1024 tokens and more."""
    predict = Predictor(rows, chip)

    def mean(at: Column) -> float:
        wrong = errors(predict(at), rows.seconds)
        return float(wrong.mean() + wrong[rows.many].mean())

    return mean


def left_out(rows: Rows, chip: str, at: Column) -> tuple[Column, np.ndarray[Any, Any]]:
    """Errors of each model with constants from the others, and which rows have 1024 tokens or more."""
    wrong, many = [], []
    for model in np.unique(rows.model):
        others, this = rows.where(rows.model != model), rows.where(rows.model == model)
        best, _ = descend(objective(others, chip), at, BOUNDS, rounds=10, step=0.05)
        wrong.append(errors(Predictor(this, chip)(best), this.seconds))
        many.append(this.many)
    return np.concatenate(wrong), np.concatenate(many)


def constant_efficiency(rows: Rows, chip: str) -> Column:
    """Errors of FLOPs divided by the best single rate."""
    flops = 2 * rows.m * rows.n * rows.k
    rates = np.linspace(0.3, 0.9, 61)[:, None] * CHIPS[chip][0]
    wrong = errors(flops / rates, rows.seconds)
    return wrong[wrong[:, rows.many].mean(axis=1).argmin()]


def fit_products(tables: Path) -> dict[str, dict[str, float]]:
    """Constants by chip, and their mean for chips without measurements."""
    rows = {chip: load(tables, chip, "gemm") for chip in CHIPS}
    columns: dict[str, Column] = {}
    for chip, these in rows.items():
        columns[chip], _ = descend(objective(these, chip), START, BOUNDS)
        wrong = errors(Predictor(these, chip)(columns[chip]), these.seconds)
        out, many = left_out(these, chip, columns[chip])
        flat = constant_efficiency(these, chip)
        print(f"products, {chip}: {rounded(dict(zip(NAMES, columns[chip], strict=True)))}")
        for name, all_of, big in (
            ("fitted", wrong, these.many),
            ("each model by the others", out, many),
            ("one constant efficiency", flat, these.many),
        ):
            print(summary(f"  {name}, from 128 tokens", all_of))
            print(summary(f"  {name}, from 1024 tokens", all_of[big]))
        for op in np.unique(these.op):
            print(summary(f"  {op}, from 1024 tokens", wrong[these.many & (these.op == op)]))
    for chip, other in (("a100", "h100"), ("h100", "a100")):
        wrong = errors(Predictor(rows[chip], chip)(columns[other]), rows[chip].seconds)
        print(summary(f"{chip} by {other}'s constants, from 1024 tokens", wrong[rows[chip].many]))
    entries = {chip: rounded(dict(zip(NAMES, at, strict=True))) for chip, at in columns.items()}
    mean = rounded({name: float(np.mean([entries[chip][name] for chip in CHIPS])) for name in NAMES})
    return {"default": mean, **entries}


def fit_passes(tables: Path) -> dict[str, dict[str, dict[str, float]]]:
    """The share of the memory bandwidth and the fixed microseconds, by class and chip."""
    entries: dict[str, dict[str, dict[str, float]]] = {}
    bounds = np.array([[0.02, 2.0], [0.5, 20.0]])
    for chip in CHIPS:
        every = load(tables, chip, "memory")
        bandwidth = CHIPS[chip][2]
        for kind, op in [*PASSES.items(), ("gelu", "mlp_act")]:
            # the activation of phi-2 alone is a GELU; its additions are two, its norm is no RMS norm
            plain = (every.model == "phi-2") if kind == "gelu" else (every.model != "phi-2")
            rows = every.where((every.op == op) & plain)
            moved = 2 * rows.m * rows.k * rows.n

            def predict(at: Column, moved: Column = moved, bandwidth: float = bandwidth) -> Column:
                return moved / (at[0] * bandwidth) + at[1] * 1e-6

            def mean(at: Column, rows: Rows = rows, predict: Any = predict) -> float:
                return float(errors(predict(at), rows.seconds).mean())

            best, _ = descend(mean, np.array([0.5, 4.0]), bounds)
            wrong = errors(predict(best), rows.seconds)
            print(summary(f"{kind}, {chip}: {best[0]:.3f} of bandwidth, {best[1]:.1f} us", wrong))
            entries.setdefault(kind, {})[chip] = rounded({"share": best[0], "fixed_us": best[1]})
    for kind, by_chip in entries.items():
        names = ("share", "fixed_us")
        middle = rounded({name: float(np.mean([by_chip[c][name] for c in CHIPS])) for name in names})
        entries[kind] = {"default": middle, **by_chip}
    return entries


HEAD = """\
# Written by benchmarks/fit_operators.py from all rows of gemm_op_times_vidur.csv (microsoft/vidur
# data/profiling/compute), models of 2.7B to 72B, tp 1 to 8, 128 to 32768 tokens. default: the mean of the
# chips. compute: over the highest rate measured. norm_served: RMS norm of a server, not for training.
"""


def main() -> None:
    tables, write = tables_and_write(__doc__)
    fitted = {"products": fit_products(tables), "passes": fit_passes(tables)}
    if write:
        text = HEAD + yaml.safe_dump(fitted, sort_keys=False, default_flow_style=None, width=120)
        (DATA / "operators_fitted.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
