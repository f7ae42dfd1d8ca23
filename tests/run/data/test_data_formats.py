"""Formats by content and name, packed files, and rows that cannot be read."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.run.config.data import ReadOptions
from stretto.run.data import unpacking
from stretto.run.data.build import build, build_megatron
from stretto.run.data.corpus import find_corpus
from stretto.run.data.readers import array_elements, read_documents, read_rows
from stretto.run.data.row_errors import RowErrors

TEXTS = ["one\ntwo", "drei ü", 'with "marks", commas\tand tabs', "語"]
ROWS: list[dict[str, Any]] = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
ARRAY = json.dumps(ROWS, indent=2)


def table(delimiter: str, rows: list[list[Any]]) -> str:
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter).writerows(rows)
    return file.getvalue()


CELLS = [["id", "text"], *([i, text] for i, text in enumerate(TEXTS))]


def texts(path: Path, **reading: Any) -> list[str]:
    pieces = read_documents(
        path, path.name, ReadOptions(**reading), RowErrors(on_error=reading.get("on_error", "stop"))
    )
    return [piece.text for piece in pieces if not piece.blank]


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


@pytest.mark.parametrize("packing", ["", *PACK])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", LINES),
        ("a.jsonl", LINES),
        ("a.ndjson", LINES),
        ("a.json", ARRAY),
        ("a.jsonl", ARRAY),
        ("a.csv", table(",", CELLS)),
        ("a.tsv", table("\t", CELLS)),
        ("a.csv", LINES),
    ],
)
def test_rows_are_documents_whatever_the_name(tmp_path: Path, name: str, content: str, packing: str):
    path = tmp_path / (name + packing)
    path.write_bytes(PACK.get(packing, bytes)(content.encode()))
    assert texts(path) == TEXTS
    assert [file.path for file in find_corpus(tmp_path).files] == [path]


def test_the_packing_is_that_of_the_content(tmp_path: Path):
    (tmp_path / "a.txt.gz").write_text("not packed")
    (tmp_path / "b.txt").write_bytes(lzma.compress(b"packed"))
    assert texts(tmp_path / "a.txt.gz") == ["not packed"]
    assert texts(tmp_path / "b.txt") == ["packed"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", LINES, "every line is a JSON object"),
        ("a", LINES, "every line is a JSON object"),
        ("a.txt", LINES[: LINES.index("\n")], "every line is a JSON object"),
        ("a.txt", json.dumps({"text": "long " * 40_000}), "every line is a JSON object"),
        ("a.txt", ARRAY, "a JSON array of objects"),
        ("a.json", json.dumps(ROWS[0], indent=2), "neither lines that are JSON objects nor a JSON array"),
        ("a.json", "prose", "neither lines that are JSON objects nor a JSON array"),
        ("a.txt", table(",", CELLS), "rows of columns, one of them 'text', but it is not named .csv"),
        ("a.txt", table("\t", CELLS), "rows of columns, one of them 'text', but it is not named .tsv"),
    ],
)
def test_what_may_be_read_in_two_ways_is_asked_about(tmp_path: Path, name: str, content: str, message: str):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(StrettoError, match=message) as caught:
        texts(path)
    assert "data.format=" in str(caught.value.hint)
    assert "--input-format" in str(caught.value.hint)
    assert "".join(texts(path, input_format="text")) == content
    if content == LINES:
        assert texts(path, input_format="jsonl") == TEXTS


@pytest.mark.parametrize(
    "text", ["{", "{}", "{x}\n{y}", "[1, 2]", "a,b\n1,2", "text, of a kind", "{\n 1: 2}\n"]
)
def test_text_that_resembles_rows_is_text(tmp_path: Path, text: str):
    (tmp_path / "a.txt").write_text(text)
    assert texts(tmp_path / "a.txt") == [text]


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        ("text".encode("utf-16"), "UTF-16 text, by its byte-order mark", "iconv -f UTF-16 -t"),
        ("text".encode("utf-32"), "UTF-32 text, by its byte-order mark", "iconv -f UTF-32 -t"),
        ("some text".encode("utf-16-le"), "UTF-16LE text without", "iconv -f UTF-16LE"),
        ("some text".encode("utf-16-be"), "UTF-16BE text without", "iconv -f UTF-16BE"),
        ("日本語".encode("iso-2022-jp"), "ISO-2022-JP text", "iconv -f ISO-2022-JP"),
        ('<?xml encoding="GBK"?>语言'.encode("gbk"), "not UTF-8 at byte 22.*GBK, as it says", "iconv -f GBK"),
        ("语言模型".encode("gbk"), r"not UTF-8 at byte 0 \(0xd3\)", "find out its encoding"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a PNG image, not text", "convert"),
        (b"PK\x03\x04\x14\0\0\0", "a zip archive, not text", "unpack"),
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "a PDF document, not text", "convert"),
        (b"SQLite format 3\0\x10\0", "an SQLite database", "convert"),
        (b"a" * 257 + b"ustar\0" + b"0" * 20, "a tar archive", "unpack"),
        (gzip.compress(gzip.compress(b"x", mtime=0), mtime=0), "packed with gzip, packed again", "unpack"),
        (b"abc\0\xff\xfe\x80def", "binary data", "name files of text"),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_what_is_no_text_is_called_what_it_is(
    tmp_path: Path, content: bytes, message: str, hint: str, name: str
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StrettoError, match=message) as caught:
        texts(tmp_path / name)
    assert hint in str(caught.value.hint)
    assert ("iconv" in str(caught.value.hint)) == ("iconv" in hint)


@pytest.mark.parametrize("packing", PACK)
def test_damage_of_a_packed_file_is_an_error(tmp_path: Path, packing: str):
    data = PACK[packing](LINES.encode() * 50)
    path = tmp_path / f"a.jsonl{packing}"
    path.write_bytes(data + data)
    assert len(texts(path)) == 400
    for damaged in (data[:-1], data[: len(data) // 2], data + b"more", data + data[:-20]):
        path.write_bytes(damaged)
        with pytest.raises(StrettoError, match=r"damaged \w+ file"):
            texts(path)


def test_zstd_without_its_package_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.txt.zst").write_bytes(b"\x28\xb5\x2f\xfd" + b"\0" * 20)
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(StrettoError, match="packed with zstd, which takes the package zstandard") as caught:
        texts(tmp_path / "a.txt.zst")
    assert caught.value.hint == "pip install 'stretto[zstd]'"


@given(
    st.binary(max_size=3000), st.sampled_from([".gz", ".bz2", ".xz"]), st.integers(1, 3), st.integers(1, 700)
)
def test_packed_files_are_unpacked(data: bytes, packing: str, streams: int, read: int):
    file = io.BytesIO(PACK[packing](data) * streams)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpacking, "_READ", read)
        assert unpacking.unpacked("x", file)[0].read() == data * streams


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(JSON, max_size=6), st.integers(1, 9), st.sampled_from([None, 1, "\t"]))
def test_arrays_are_read_by_element(rows: list[Any], size: int, indent: int | str | None):
    text = json.dumps(rows, indent=indent) + "\n"
    blocks = [text[i : i + size] for i in range(0, len(text), size)]
    assert list(array_elements("x", blocks)) == rows
    for bad in (text[:-2], text + "1", text.replace("]", ",]")):
        with pytest.raises(StrettoError):
            list(array_elements("x", [bad]))


def test_an_object_around_an_array_is_refused_with_what_is_read() -> None:
    with pytest.raises(StrettoError, match="x: not an array of JSON objects") as raised:
        list(array_elements("x", ['{"data": [{"text": "a"}]}']))
    assert raised.value.hint == "write one object a line, or an array"


def test_a_mistake_in_an_array_is_reported_before_the_rest_is_read() -> None:
    def blocks() -> Iterator[str]:
        yield '[{"text": oops}, '
        for number in range(1000):
            assert number < 10, "a large file would be read into memory"
            yield '{"text": "x"}, ' * 1000

    with pytest.raises(StrettoError, match="element 1: not JSON"):
        list(array_elements("x", blocks()))


BAD = {
    "not JSON": b'{"text": ',
    "no object": b'["text"]',
    "without the field": b'{"body": "x"}',
    "whose field is no text": b'{"text": 3}',
    "not UTF-8": b'{"text": "caf\xe9"}',
    "not Unicode": b'{"text": "\\ud800"}',
}
GOOD = [json.dumps({"text": f"line {i}"}).encode() for i in range(100)]


@pytest.mark.parametrize("kind", BAD)
def test_bad_rows_stop_or_are_counted(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([*GOOD[:41], BAD[kind], *GOOD[41:]]))
    with pytest.raises(StrettoError, match="line 42"):
        build(path, tmp_path / "out", vocab=300)
    assert not (tmp_path / "out").exists()
    skipping = ReadOptions(on_error="skip")
    folder = build(path, tmp_path / "out", vocab=300, reading=skipping)
    assert folder.index.documents == 100
    assert folder.index.bad_rows is not None
    assert (folder.index.bad_rows["rows"], folder.index.bad_rows["skipped"]) == (101, {kind: 1})
    assert f"{path}, line 42" in folder.index.bad_rows["examples"][0]
    for _ in range(2):  # built, and found again
        printed = capsys.readouterr().err
        assert f"1 of 101 rows left out (1 {kind}); the first: {path}, line 42" in printed
        build(path, tmp_path / "out", vocab=300, reading=skipping)
    build_megatron(path, tmp_path / "m", vocab=300, reading=skipping)
    assert "line 42" in capsys.readouterr().err


def test_skipping_has_a_bound(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    bad = [b"{" for _ in range(11)]
    path.write_bytes(b"\n".join([*bad[:10], *GOOD[:90]]))
    assert len(texts(path, on_error="skip")) == 90
    path.write_bytes(b"\n".join([*GOOD[:89], *bad]))
    with pytest.raises(StrettoError, match=r"11 of 100 rows .* \(11 not JSON\), more than 10%"):
        texts(path, on_error="skip")
    # a file whose rows are other ones is not lost among many that are right
    path.write_bytes(b"\n".join(GOOD * 5))
    (tmp_path / "b.jsonl").write_bytes(b'{"body": "x"}\n' * 3)
    with pytest.raises(StrettoError, match="3 of 3 rows"):
        list(find_corpus(tmp_path, ReadOptions(on_error="skip")).pieces())


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("id,body\n1,x\n", "line 1: no field 'text'"),
        ("text,text\n1,x\n", "line 1: 2 columns 'text'"),
        ("id;text\n1;x\n", "line 1: ';' separates cells, where ',' must"),
        ('id,text\n1,"open\n' + "2,x\n" * 40, "line 2: a quotation mark that is not closed"),
    ],
)
def test_a_table_that_cannot_be_read_stops(tmp_path: Path, content: str, message: str, on_error: str):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(StrettoError, match=message):
        texts(tmp_path / "a.csv", on_error=on_error)


@pytest.mark.parametrize("bad", [b"1,x,y", b'1,"x"y', b"1,caf\xe9", b'1,"a\ncaf\xe9"', b"1"])
def test_bad_rows_of_tables(tmp_path: Path, bad: bytes):
    path = tmp_path / "a.csv"
    path.write_bytes(b"\n".join([b"id,text", *[b"1,x"] * 15, bad, b'2,"y\ny"', b"", b"3,z"]))
    cells = ": 1 cell for 2 names" if bad == b"1" else ""
    with pytest.raises(StrettoError, match=rf"line 1[78]{cells}"):
        texts(path)
    errors = RowErrors(on_error="skip")
    pieces = list(read_documents(path, "a", ReadOptions(on_error="skip"), errors))
    assert [piece.text for piece in pieces] == ["x"] * 15 + ["y\ny", "", "z"]
    assert errors.counts.total() == 1


@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), min_size=1), min_size=1
    )
)
@settings(max_examples=50)
def test_tables_and_lines_hold_the_same_texts(tmp_path_factory: pytest.TempPathFactory, rows: list[str]):
    folder = tmp_path_factory.getbasetemp()
    (folder / "t.csv").write_bytes(
        table(",", [["n", "text"], *([i, row] for i, row in enumerate(rows))]).encode()
    )
    (folder / "t.json").write_bytes("".join(json.dumps({"text": row}) + "\n" for row in rows).encode())
    assert texts(folder / "t.csv") == texts(folder / "t.json")


def test_conversations_are_rows_of_json(tmp_path: Path):
    rows = [{"messages": [{"role": "user", "content": "x"}]}]
    for name, content in (("a.json", json.dumps(rows)), ("a.json.gz", json.dumps(rows[0]) + "\n")):
        path = tmp_path / name
        path.write_bytes(PACK.get(path.suffix, bytes)(content.encode()))
        assert [row for _, row in read_rows(path, ReadOptions(), RowErrors())] == rows
    (tmp_path / "a.csv").write_text("messages,text\n1,2\n")
    with pytest.raises(StrettoError, match="conversations are read from JSON lines"):
        list(read_rows(tmp_path / "a.csv", ReadOptions(), RowErrors()))
