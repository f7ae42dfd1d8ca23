"""Tables of published runs, converted to the columns of `stretto predict --table` by one adapter per table.

The adapters hold what a source states only in prose, or leaves to its year and its software.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from published import bigscience, megatron, mosaicml, nemo
from published.rows import predict_rows
from stretto.errors import StrettoError
from stretto.planner.run_scores import PredictedRow

Cells = dict[str, str]
ADAPTERS: Mapping[str, Callable[[Cells], Cells]] = {
    "korthikanti_2022_a100": megatron.korthikanti,
    "megatron_sc21_a100": megatron.narayanan,
    "vtrain_single_node_a100": megatron.vtrain,
    "mosaicml_llm_foundry_a100": mosaicml.adapt,
    "zero_bubble_a100": megatron.zero_bubble,
    "bigscience_v100": bigscience.adapt,
    "nemo_legacy_h100_b200": nemo.adapt,
}


def adapted(folder: Path, table: str) -> list[tuple[Cells, str]]:
    """Return the rows of a table in the columns of `predict`, each with the reason for refusing it, or ""."""
    with (folder / f"{table}.csv").open(encoding="utf-8", newline="") as file:
        return [_adapted(ADAPTERS[table], row) for row in csv.DictReader(file)]


def _adapted(adapter: Callable[[Cells], Cells], row: Cells) -> tuple[Cells, str]:
    try:
        return adapter(row), ""
    except StrettoError as error:
        return row, error.message


def predictions(folder: Path, table: str, memory: bool = False) -> list[PredictedRow]:
    """Return all rows of a table with their predictions."""
    rows = adapted(folder, table)
    predicted = predict_rows([cells for cells, why in rows if not why], memory=memory)
    return [
        PredictedRow(number=number, cells=cells, refused=why)
        if why
        else replace(next(predicted), number=number)
        for number, (cells, why) in enumerate(rows, 1)
    ]
