"""The published tables that ship with the package, and the figures made of them."""

from __future__ import annotations

import re
import sys
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from stretto.errors import StrettoError
from stretto.planner.table.predicting import read_table
from stretto.planner.table.published import FIGURES, Comparison, compare, find_figure
from stretto.planner.table.row import read_row

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "src/stretto/planner/data/published"
TABLES = ROOT.parent / "shared" / "tables"
needs_tables = pytest.mark.skipif(not TABLES.exists(), reason=f"no measured tables at {TABLES}")
# the table that a shipped one was taken from, and words of the rows' source there
ORIGIN = {
    "sc21_table_1": ("megatron_sc21_a100", "Table 1"),
    "sc21_table_2": ("megatron_sc21_a100", "Table 2"),
    "korthikanti_table_5": ("korthikanti_2022_a100", "Table 5"),
    "zb_table_4": ("zero_bubble_a100", "Tables 3-5"),
}


@cache
def compared(name: str) -> Comparison:
    return compare(FIGURES[name])


@cache
def published() -> ModuleType:
    """benchmarks/published."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import published  # pyright: ignore[reportMissingImports]
    finally:
        sys.path.pop(0)
    return published


def test_every_table_has_a_figure_and_docs_show_the_same_files() -> None:
    tables = {path.stem for path in SHIPPED.glob("*.csv")}
    assert tables == {figure.table for figure in FIGURES.values()}
    assert (ROOT / "docs/tables").resolve() == SHIPPED.resolve()
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = shipped["tool"]["setuptools"]["package-data"]["stretto"]
    package = ROOT / "src/stretto"
    assert set(SHIPPED.iterdir()) <= {path for pattern in patterns for path in package.glob(pattern)}
    assert all((files("stretto.planner") / "data/published" / f"{name}.csv").is_file() for name in tables)


@pytest.mark.parametrize(
    ("name", "rows"), [("sc21-1", 10), ("sc21-10", 12), ("korthikanti-5", 8), ("zb-5", 48)]
)
def test_points_are_the_numbers_that_the_paper_prints(name: str, rows: int) -> None:
    comparison = compared(name)
    assert len(comparison.points) == rows
    assert {one.cells["source"] for one in comparison.rows} == {comparison.source}
    assert all(one.cells["x_table"] and one.cells["x_licence"] for one in comparison.rows)
    for point, one in zip(comparison.points, comparison.rows, strict=True):
        cells = one.cells
        if name.startswith("sc21"):
            assert point.published == pytest.approx(float(cells["tflops_per_gpu"]), rel=1e-9)
        elif name == "zb-5":
            printed = re.search(r"printed: ([\d.]+) samples", cells["notes"])
            assert printed is not None
            assert point.published == pytest.approx(float(printed[1]), rel=2e-3)
        assert point.predicted == pytest.approx(point.published / (1 + point.error))
        assert point.low < point.predicted < point.high
    errors = [abs(point.error) for point in comparison.points]
    assert comparison.scores.model is not None
    assert comparison.scores.model.mape == pytest.approx(sum(errors) / rows)


def test_korthikanti_s_utilization_is_the_one_of_the_paper() -> None:
    """Table 5 prints 41.5, 51.4, 56.0 and 56.3% for selective recomputation."""
    points = [one for one in compared("korthikanti-5").points if one.series.startswith("selective")]
    assert [one.published for one in points] == pytest.approx([41.5, 51.4, 56.0, 56.3], abs=0.2)


def test_what_was_fitted_is_said() -> None:
    split = yaml.safe_load((ROOT / "benchmarks/planning_split.yaml").read_text(encoding="utf-8"))
    for figure in FIGURES.values():
        table, words = ORIGIN[figure.table]
        assert figure.fitted == (words in split["runs"].get(table, {}).get("match", [])), figure.name


@needs_tables
@pytest.mark.parametrize("name", ORIGIN)
def test_shipped_rows_are_those_of_the_measured_tables(name: str) -> None:
    """The same jobs, clusters, software and times as the benchmark's adapters read."""
    table, words = ORIGIN[name]
    adapted = [
        read_row(cells)
        for cells, why in published().adapted(TABLES, table)
        if not why and words in cells["source"]
    ]
    shipped = [read_row(cells) for cells in read_table(SHIPPED / f"{name}.csv")]
    assert [(one.job, vars(one.cluster), one.assumptions) for one in shipped] == [
        (one.job, vars(one.cluster), one.assumptions) for one in adapted
    ]
    assert [one.measured.seconds for one in shipped] == [one.measured.seconds for one in adapted]
    assert [one.measured.memory for one in shipped] == [one.measured.memory for one in adapted]


def test_figures_by_name() -> None:
    assert find_figure("zb-5") == FIGURES["zb-5"]
    with pytest.raises(StrettoError, match="does not print"):
        find_figure("sc21-13")
    with pytest.raises(StrettoError, match="no figure 'zb5'") as error:
        find_figure("zb5")
    assert "'zb-5'" in (error.value.hint or "")
