"""Parquet and CSV: the same samples as from lists of Python's, with columns by name."""

from __future__ import annotations

import gzip
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.recommender.clicks.files import find_files, open_reader
from stretto.recommender.clicks.raw import RawChunk, text_keys
from stretto.recommender.clicks.tabular import ColumnNames, CsvReader, ParquetReader

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

Rows = dict[str, list[Any]]
ROWS: Rows = {
    "C2": ["a", None, "b", "a", "é"],
    "label": [0, 1, 1, 0, 1],
    "I2": [1.5, None, -2.0, 0.0, 3.0],
    "I10": [1, 2, None, 4, 5],
    "C1": [5, -1, None, 5, 2**40],
    "C3": [[1, 2], [], None, [None, 7], [3]],
}


def key(value: Any) -> int | None:
    if value is None:
        return None
    return int(text_keys([value])[0]) if isinstance(value, str) else value % 2**64


def check(chunk: RawChunk, rows: Rows, features: list[str], numbers: list[str], label: str = "label") -> None:
    """That the chunk is of these rows."""
    at = 0
    assert chunk.columns.features == tuple(features)
    assert chunk.labels is not None
    assert chunk.labels.tolist() == rows[label]
    for i in range(len(rows[label])):
        read = [None if math.isnan(n) else n for n in chunk.numbers[i].tolist()]
        assert read == [rows[name][i] for name in numbers]
        for f, name in enumerate(features):
            many = chunk.columns.lists[f]
            wanted = (rows[name][i] or []) if many else [rows[name][i]]
            span = slice(at, at + len(wanted))
            gone = chunk.missing[span].tolist()
            keys = [None if none else k for k, none in zip(chunk.keys[span].tolist(), gone, strict=True)]
            assert keys == [key(value) for value in wanted]
            assert chunk.lengths is None or chunk.lengths[i, f] == len(wanted)
            at += len(wanted)
    assert at == len(chunk.keys) == len(chunk.missing)


def write_parquet(path: Path, rows: Rows, **more: Any) -> Path:
    parquet.write_table(arrow.table(rows), path, **more)
    return path


@pytest.mark.parametrize("lists", [False, True])
def test_parquet(tmp_path: Path, lists: bool):
    rows = ROWS if lists else {name: each for name, each in ROWS.items() if name != "C3"}
    path = write_parquet(tmp_path / "a.parquet", rows)
    reader = ParquetReader(path, ColumnNames())
    (piece,) = reader.read(path)
    check(piece.parsed.chunk, rows, ["C1", "C2", "C3"] if lists else ["C1", "C2"], ["I2", "I10"])
    assert piece.parsed.chunk.columns.keys[:2] == ("int", "text")
    assert (piece.parsed.lines, piece.parsed.faults) == (5, [])


def test_parquet_of_other_types(tmp_path: Path):
    path = tmp_path / "a.parquet"
    table = arrow.table(
        {
            "clicked": arrow.array([True, False, True]),
            "price": arrow.array([1, 2, 3], arrow.int8()),
            "user": arrow.array(["x", None, "y"]).dictionary_encode(),
            "item": arrow.array([2**64 - 1, 0, None], arrow.uint64()),
            "tags": arrow.array([["p", None], [], ["q"]], arrow.large_list(arrow.large_string())),
        }
    )
    parquet.write_table(table, path)
    reader = ParquetReader(path, ColumnNames("clicked", ("price",), ("user", "item", "tags")))
    (piece,) = reader.read(path)
    rows = {name: each.to_pylist() for name, each in zip(table.column_names, table.columns, strict=True)}
    check(piece.parsed.chunk, rows, ["user", "item", "tags"], ["price"], "clicked")


def test_parquet_goes_on_at_any_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import stretto.recommender.clicks.tabular as reading

    monkeypatch.setattr(reading, "_ROWS", 7)
    rows = {"label": [i % 2 for i in range(50)], "C1": list(range(50))}
    path = write_parquet(tmp_path / "a.parquet", rows, row_group_size=20)
    reader = ParquetReader(path, ColumnNames())
    pieces = list(reader.read(path))
    assert [piece.start for piece in pieces][-1] == 50
    for stop in pieces:
        rest = [
            k for piece in reader.read(path, stop.start, stop.line) for k in piece.parsed.chunk.keys.tolist()
        ]
        assert rest == list(range(stop.start, 50))


def test_bad_rows_are_told(tmp_path: Path):
    rows = {"label": [0, 2, None, 1], "I1": [1.0, 2.0, 3.0, math.inf], "C1": [1, 2, 3, 4]}
    path = write_parquet(tmp_path / "a.parquet", rows)
    (piece,) = ParquetReader(path, ColumnNames()).read(path)
    faults = [(2, "label 2.0, not 0 or 1"), (3, "the label is missing"), (4, "a number is infinite")]
    assert piece.parsed.faults == faults
    assert piece.parsed.chunk.keys.tolist() == [1]


def csv_text(rows: Rows, mark: str = ",") -> str:
    lines = [mark.join(rows)]
    for i in range(len(rows["label"])):
        lines.append(
            mark.join(
                "" if rows[n][i] is None else f'"{rows[n][i]}"' if n == "C2" else str(rows[n][i])
                for n in rows
            )
        )
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("mark", [",", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv(tmp_path: Path, mark: str, end: str):
    rows = {name: each for name, each in ROWS.items() if name != "C3"}
    rows["C1"] = [None if each is None else str(each) for each in rows["C1"]]
    rows["C2"] = ["a,b", None, "b", "a\tb", "é"]
    path = tmp_path / "a.csv.gz"
    path.write_bytes(b"\xef\xbb\xbf" * (mark == ",") + b"")
    path.write_bytes(gzip.compress(csv_text(rows, mark).replace("\n", end).encode("utf-8-sig")))
    reader = CsvReader(path, ColumnNames())
    (piece,) = reader.read(path)
    check(piece.parsed.chunk, rows, ["C1", "C2"], ["I2", "I10"])
    assert (piece.line, piece.parsed.blank) == (7, 0)


def test_csv_faults_and_going_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import stretto.recommender.clicks.tabular as reading

    path = tmp_path / "a.csv"
    path.write_text('label,I1,C1\n0,1,a\n\n1,x,b\n1,2\n3,1,c\n1,inf,d\n,1,e\n1,nan,f\n0,7,g\n1\n0,1,"h\n')
    reader = CsvReader(path, ColumnNames())
    (piece,) = reader.read(path)
    assert piece.parsed.faults == [
        (4, "I1 is 'x', not a number"),
        (5, "2 columns, not 3"),
        (6, "label 3.0, not 0 or 1"),
        (7, "a number is infinite"),
        (8, "the label is missing"),
        (11, "1 column, not 3"),
        (12, "1 column, not 3"),  # a quotation mark that is not closed
    ]
    assert piece.parsed.blank == 1
    assert piece.parsed.chunk.keys.tolist() == text_keys(["a", "f", "g"]).tolist()
    assert np.array_equal(piece.parsed.chunk.numbers[:, 0], [1, np.nan, 7], equal_nan=True)
    monkeypatch.setattr(reading, "_BLOCK", 11)
    pieces = list(reader.read(path))
    assert len(pieces) > 3
    for stop in [0, *range(len(pieces))]:
        rest = list(reader.read(path, pieces[stop].start, pieces[stop].line))
        wanted = [fault for p in pieces[stop + 1 :] for fault in p.parsed.faults]
        assert [fault for p in rest for fault in p.parsed.faults] == wanted


CELL = st.sampled_from(
    ["", "0", "1", "-2.5", "1e3", "nan", "inf", " 1", "1_0", "é", "a b", '"x"', "\r", "\0"]
)
LINE = st.lists(CELL, min_size=3, max_size=3) | st.lists(CELL, max_size=4)
PLAIN = st.tuples(st.sampled_from("01"), st.sampled_from(["", "7", "0.1", "nan"]), st.sampled_from(["", "é"]))


@given(st.lists(PLAIN | st.just([]), max_size=6) | st.lists(LINE, max_size=6), st.booleans(), st.booleans())
def test_the_quick_way_through_a_csv_is_the_slow_one(
    tmp_path_factory: pytest.TempPathFactory, lines: list[list[str]], returns: bool, ends: bool
):
    end = "\r\n" if returns else "\n"
    data = (end.join(",".join(line) for line in lines) + end * ends).encode()
    path = tmp_path_factory.getbasetemp() / "header.csv"
    path.write_text("label,I1,C1\n")
    reader = CsvReader(path, ColumnNames())
    if not data:
        return
    slow = reader._parse_lines(data, 2, ["label", "I1", "C1"], ",")
    quick = reader._parse_with_arrow(data, ["label", "I1", "C1"], ",")
    if quick is None:
        return
    assert (quick.lines, quick.blank, quick.faults) == (slow.lines, slow.blank, slow.faults)
    assert np.array_equal(quick.chunk.numbers, slow.chunk.numbers, equal_nan=True)
    for name in ("keys", "missing", "labels"):
        assert np.array_equal(getattr(quick.chunk, name), getattr(slow.chunk, name))


def test_the_quick_way_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.csv").write_text("label,I1,C1\n1,2,a\n\n0,,\n")
    reader = CsvReader(tmp_path / "a.csv", ColumnNames())
    monkeypatch.setattr(CsvReader, "_parse_lines", None)
    (piece,) = reader.read(tmp_path / "a.csv")
    assert (piece.parsed.chunk.samples, piece.parsed.blank) == (2, 1)


@pytest.mark.parametrize(
    ("columns", "named", "message"),
    [
        (["click", "I1", "C1"], ColumnNames(), "no column 'label'"),
        (["label", "x"], ColumnNames(), "no features"),
        (["label", "C1"], ColumnNames(numbers=("price",)), "no column 'price'"),
        (["label", "C1"], ColumnNames(features=("C1", "C1")), "named twice"),
        (["label", "C1", "I1"], ColumnNames(features=("I1",)), "named twice"),
    ],
)
def test_wrong_columns_are_refused(tmp_path: Path, columns: list[str], named: ColumnNames, message: str):
    (tmp_path / "a.csv").write_text(",".join(columns) + "\n")
    with pytest.raises(StrettoError, match=message):
        CsvReader(tmp_path / "a.csv", named)
    write_parquet(tmp_path / "a.parquet", {name: [1] for name in columns})
    with pytest.raises(StrettoError, match=message):
        ParquetReader(tmp_path / "a.parquet", named)


def test_a_column_that_is_there_twice_is_refused_if_it_is_read(tmp_path: Path):
    (tmp_path / "a.csv").write_text("label,C1,x,x,C1\n1,a,b,c,d\n")
    with pytest.raises(StrettoError, match="2 columns are named 'C1'"):
        CsvReader(tmp_path / "a.csv", ColumnNames())
    reader = CsvReader(tmp_path / "a.csv", ColumnNames(features=("label",), label=None))
    assert reader.unread == ("C1", "x", "x", "C1")


def test_types_that_are_none_of_these_are_refused(tmp_path: Path):
    path = write_parquet(tmp_path / "a.parquet", {"label": [1], "C1": [1.5], "I1": ["x"], "C2": [1]})
    with pytest.raises(StrettoError, match="'C1' is double"):
        ParquetReader(path, ColumnNames())
    with pytest.raises(StrettoError, match="'I1' is string"):
        list(ParquetReader(path, ColumnNames(features=("C2",))).read(path))
    other = write_parquet(tmp_path / "b.parquet", {"label": [1], "C2": ["x"]})
    reader = ParquetReader(path, ColumnNames(features=("C2",), numbers=()))
    with pytest.raises(StrettoError, match="'C2' is string, in the first file it is not"):
        list(reader.read(other))


def test_damaged_files_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1nothing")
    with pytest.raises(StrettoError, match="damaged Parquet"):
        ParquetReader(tmp_path / "a.parquet", ColumnNames())
    (tmp_path / "a.csv").write_bytes(b"label,\xff\n")
    with pytest.raises(StrettoError, match="not UTF-8"):
        CsvReader(tmp_path / "a.csv", ColumnNames())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(StrettoError, match="takes the package pyarrow"):
        ParquetReader(tmp_path / "a.parquet", ColumnNames())


def test_files_come_in_the_order_of_their_numbers(tmp_path: Path):
    for name in ("day_10", "day_2", "day_1", ".hidden"):
        (tmp_path / name).write_text("x")
    names = ["day_1", "day_2", "day_10"]
    assert [file.path.name for file in find_files(tmp_path)] == names
    assert [file.path.name for file in find_files(f"{tmp_path}/day_*")] == names
    paths = [tmp_path / "day_10", tmp_path / "day_2", tmp_path / "day_10"]
    assert [file.path.name for file in find_files(paths)] == ["day_10", "day_2"]


@pytest.mark.parametrize(
    ("names", "form", "message"),
    [
        (["nowhere"], None, "nowhere: no such file"),
        (["a.csv", "a.parquet"], None, "several formats: csv, parquet"),
        (["a.csv"], "criteoo", "format 'criteoo'"),
        (["empty"], None, "empty file"),
        (["none*"], None, "no files"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, names: list[str], form: str | None, message: str):
    for name in ("a.csv", "a.parquet"):
        (tmp_path / name).write_text("label,C1\n")
    (tmp_path / "empty").touch()
    with pytest.raises(StrettoError, match=message):
        open_reader(find_files([tmp_path / name for name in names]), form, ColumnNames())
    with pytest.raises(StrettoError, match="Criteo's format, which has none"):
        open_reader(find_files(tmp_path / "a.csv"), "criteo", ColumnNames("clicked"))
