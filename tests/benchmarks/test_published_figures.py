"""The published tables and the figures made of them: numbers, pictures, pages, and the script."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from figure import run  # pyright: ignore[reportMissingImports]
from published import adapted  # pyright: ignore[reportMissingImports]
from published.figure_page import figure_html, figure_svg  # pyright: ignore[reportMissingImports]
from published.figures import FIGURES, Comparison, compare, find_figure  # pyright: ignore[reportMissingImports]
from published.rows import read_row  # pyright: ignore[reportMissingImports]

from pages import ROOT
from stretto.cli import main
from stretto.errors import StrettoError
from stretto.planner.run_scores import read_table
from stretto.planner.runs import read_run
from stretto.view import colours

TABLES = ROOT.parent / "shared" / "tables"
needs_tables = pytest.mark.skipif(not TABLES.exists(), reason=f"no measured tables at {TABLES}")
# the table that one here was taken from, and words of the rows' source there
ORIGIN = {
    "sc21_table_1": ("megatron_sc21_a100", "Table 1"),
    "sc21_table_2": ("megatron_sc21_a100", "Table 2"),
    "korthikanti_table_5": ("korthikanti_2022_a100", "Table 5"),
    "zb_table_4": ("zero_bubble_a100", "Tables 3-5"),
}
SVG = "{http://www.w3.org/2000/svg}"


@cache
def compared(name: str) -> Comparison:
    return compare(FIGURES[name])


def test_every_table_has_a_figure() -> None:
    tables = {path.stem for path in (ROOT / "benchmarks/published/tables").glob("*.csv")}
    assert tables == {figure.table for figure in FIGURES.values()}


@pytest.mark.parametrize("panel", ["1.5B, 8 GPUs", "6.2B, 8 GPUs", "14.6B, 16 GPUs", "28.3B, 32 GPUs"])
def test_interleaving_is_predicted_to_pay_off_with_few_microbatches(panel: str) -> None:
    """Measured, 7 to 13% faster than 1F1B."""
    points = [point for point in compared("zb-5").points if point.panel == panel]
    few = min({point.at for point in points}, key=int)
    plain, interleaved = (
        next(point for point in points if (point.series, point.at) == (series, few))
        for series in ("1F1B", "1F1B-I")
    )
    assert interleaved.published > 1.06 * plain.published
    assert interleaved.predicted > 1.01 * plain.predicted


@pytest.mark.parametrize(
    ("name", "rows"), [("sc21-1", 10), ("sc21-10", 12), ("korthikanti-5", 8), ("zb-5", 48)]
)
def test_points_are_the_numbers_that_the_paper_prints(name: str, rows: int) -> None:
    comparison = compared(name)
    assert len(comparison.points) == rows
    assert {row.cells["source"] for row in comparison.rows} == {comparison.source}
    assert all(row.cells["x_table"] and row.cells["x_licence"] for row in comparison.rows)
    for point, row in zip(comparison.points, comparison.rows, strict=True):
        cells = row.cells
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
    points = [point for point in compared("korthikanti-5").points if point.series.startswith("selective")]
    assert [point.published for point in points] == pytest.approx([41.5, 51.4, 56.0, 56.3], abs=0.2)


def test_what_was_fitted_is_said() -> None:
    split = yaml.safe_load((ROOT / "benchmarks/planning_split.yaml").read_text(encoding="utf-8"))
    for figure in FIGURES.values():
        table, origin = ORIGIN[figure.table]
        assert figure.fitted == (origin in split["runs"].get(table, {}).get("match", [])), figure.name


@needs_tables
@pytest.mark.parametrize("name", ORIGIN)
def test_plain_rows_are_those_of_the_measured_tables(name: str) -> None:
    """The product reads the same jobs, clusters, software and times as the benchmark's adapters."""
    table, origin = ORIGIN[name]
    rows = [read_row(cells) for cells, why in adapted(TABLES, table) if not why and origin in cells["source"]]
    plain = [read_run(cells) for cells in read_table(ROOT / f"benchmarks/published/tables/{name}.csv")]
    assert [(row.job, vars(row.cluster), row.assumptions) for row in plain] == [
        (row.job, vars(row.cluster), row.assumptions) for row in rows
    ]
    assert [row.measured.seconds for row in plain] == [row.measured.seconds for row in rows]
    assert [row.measured.memory for row in plain] == [row.measured.memory for row in rows]


def test_figures_by_name() -> None:
    assert find_figure("zb-5") == FIGURES["zb-5"]
    with pytest.raises(StrettoError, match="does not print"):
        find_figure("sc21-13")
    with pytest.raises(StrettoError, match="no figure 'zb5'") as error:
        find_figure("zb5")
    assert "'zb-5'" in (error.value.hint or "")


# ------------------------------------------------------------------ pictures and pages


def height_of(mark: ElementTree.Element) -> float:
    """The vertical middle of a circle, or of the outline of a square or diamond."""
    if mark.tag == f"{SVG}circle":
        return float(mark.attrib["cy"])
    heights = [float(corner.split()[1].rstrip("Z")) for corner in mark.attrib["d"][1:].split("L")]
    return (min(heights) + max(heights)) / 2


@pytest.mark.parametrize("name", FIGURES)
def test_every_run_is_a_hollow_and_a_filled_mark(name: str) -> None:
    comparison = compared(name)
    drawn = ElementTree.fromstring(figure_svg(comparison))
    groups = [group for group in drawn.iter(f"{SVG}g") if group.find(f"{SVG}title") is not None]
    assert len(groups) == len(comparison.points)
    shapes: dict[str, set[str]] = {}
    by_about = {(point.series, point.at, f"{point.published:.4g}"): point for point in comparison.points}
    for group in groups:
        title, _, published, predicted, *_ = group
        match = re.match(r"(.*), ([\w.]+): published ([\d.]+), ", title.text or "")
        assert match is not None
        point = by_about[(match[1], match[2], match[3])]
        assert published.attrib["class"] == "hollow"
        assert "class" not in predicted.attrib
        shapes.setdefault(point.series, set()).add(
            published.tag + str(published.attrib.get("d", "").count("L"))
        )
        # faster is higher
        if abs(point.error) > 0.005:  # the marks differ in shape
            assert (height_of(published) < height_of(predicted)) == (point.published > point.predicted)
    # each series has one shape of its own, so that colour is not needed
    assert all(len(each) == 1 for each in shapes.values())
    outlines = {next(iter(each)) for each in shapes.values()}
    assert len(outlines) >= min(3, len(shapes))  # squares and diamonds both have four corners


@pytest.mark.parametrize("ground", [(255, 255, 255), (13, 17, 23)])
def test_series_read_on_light_and_dark(ground: colours.Rgb) -> None:
    for colour in colours.SERIES:
        light, dark = sorted((colours.luminance(colour), colours.luminance(ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3, colour


def test_the_page_has_every_run_in_a_table() -> None:
    comparison = compared("korthikanti-5")
    page = figure_html(comparison)
    assert not re.search(r'(?:src|href)="|@import|url\((?!#)', page)
    assert comparison.source in page
    rows = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", page)]
    assert [row[6] for row in rows[1:]] == [f"{100 * point.error:+.1f}%" for point in comparison.points]


# ------------------------------------------------------------------ the script


def test_a_figure_is_drawn_and_its_table_can_be_predicted_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg, html, csv = tmp_path / "f.svg", tmp_path / "f.html", tmp_path / "f.csv"
    run(["korthikanti-5", "--out", str(svg), "--html", str(html), "--csv", str(csv)])
    text = " ".join(capsys.readouterr().out.split())
    assert "Korthikanti et al. 2022, table 5" in text
    assert "8 runs, step time: MAPE " in text
    assert "constants were fitted on these runs" in text
    assert svg.read_text(encoding="utf-8").startswith("<svg")
    assert "<table>" in html.read_text(encoding="utf-8")
    run(["korthikanti-5", "--json"])
    figure = json.loads(capsys.readouterr().out)
    assert main.run(["predict", "--table", str(csv), "--no-memory", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert figure["error"] == again["error"]
    errors = [row["error"] for row in again["rows"]]
    assert [point["error"] for point in figure["points"]] == pytest.approx(errors, rel=1e-9)


def test_the_list_names_every_figure_and_what_was_fitted(capsys: pytest.CaptureFixture[str]) -> None:
    run(["--list"])
    printed = capsys.readouterr().out.split()
    assert {"sc21-1", "sc21-10", "korthikanti-5", "zb-5"} <= {*printed}
    assert "no constant was fitted on its runs" in " ".join(printed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a figure"),
        (["zb-6"], "did you mean 'zb-5'"),
        (["sc21-13"], "tensor against pipeline parallelism, 162.2 B parameters on 64 GPUs) is a plot whose"),
        (["sc21-15"], "stretto predict --table"),
        (["zb-5", "--out", "picture.pdf"], "ends in .svg or .png"),
        (["korthikanti-5", "--html", "/nowhere/page.html"], "cannot write"),
    ],
)
def test_mistakes_are_errors(arguments: list[str], message: str) -> None:
    with pytest.raises(StrettoError) as error:
        run(arguments)
    assert message in str(error.value)
