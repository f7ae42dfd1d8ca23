from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.run.config.data import ReadOptions
from stretto.run.data import readers
from stretto.run.data.corpus import Corpus, find_corpus
from stretto.run.data.row_errors import RowErrors


def names(corpus: Corpus) -> list[str]:
    return [file.name for file in corpus.files]


def texts(corpus: Corpus) -> dict[str, str]:
    by_name: dict[str, str] = {}
    for piece in corpus.pieces():
        by_name[piece.name] = by_name.get(piece.name, "") + piece.text
    return by_name


def write(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def test_the_stdlib_is_large_enough_python_source_without_tests_or_packages():
    corpus = find_corpus("python-stdlib")
    files = names(corpus)
    assert {"json/decoder.py", "argparse.py"} <= set(files)
    assert not [n for n in files if "site-packages" in n or n.startswith("test/") or not n.endswith(".py")]
    assert 8e6 < corpus.size < 30e6


def test_order_is_a_function_of_the_names_alone(tmp_path: Path):
    files: dict[str, str | bytes] = {f"d{i % 3}/f{i}.txt": f"text {i}" for i in range(40)}
    first = find_corpus(write(tmp_path / "here", files))
    second = find_corpus(write(tmp_path / "there" / "deep", dict(reversed(files.items()))))
    assert names(first) == names(second)
    assert names(first) != sorted(names(first))
    assert sorted(names(first)) == sorted(files)
    # a name keeps its place among the others when files come or go
    (tmp_path / "here" / "d0" / "f0.txt").unlink()
    assert names(find_corpus(tmp_path / "here")) == [n for n in names(first) if n != "d0/f0.txt"]


def test_the_order_is_the_same_in_every_version_of_this_program(tmp_path: Path):
    write(tmp_path, dict.fromkeys(("a.txt", "b.txt", "c.txt", "d/e.txt", "d/f.md"), "x"))
    assert names(find_corpus(tmp_path)) == ["c.txt", "a.txt", "d/e.txt", "b.txt", "d/f.md"]


def test_a_directory_leaves_out_hidden_binary_and_empty_files_and_token_folders(tmp_path: Path):
    write(
        tmp_path,
        {
            "a.txt": "a",
            "deep/b.rs": "fn b() {}",
            ".git/c": "c",
            ".hidden": "h",
            "image.png": b"\x89PNG\0\0\0",
            "empty.txt": "",
            "__pycache__/a.pyc": "x",
            "tokens/index.json": "{}",
            "tokens/tokens.bin": "12",
            "tokens/tokenizer.json": "{}",
        },
    )
    corpus = find_corpus(tmp_path)
    assert sorted(names(corpus)) == ["a.txt", "deep/b.rs"]
    assert corpus.skipped == 1


def test_links_of_a_directory_are_followed(tmp_path: Path):
    write(tmp_path, {"a/a.txt": "a", "elsewhere/b.txt": "b", "elsewhere/c/c.txt": "c"})
    (tmp_path / "a" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "c" / "back").symlink_to(tmp_path / "a")
    assert sorted(names(find_corpus(tmp_path / "a"))) == ["a.txt", "linked/b.txt", "linked/c/c.txt"]
    (tmp_path / "a" / "lost.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StrettoError, match=r"lost\.txt: a link to .*nowhere, which does not exist"):
        find_corpus(tmp_path / "a")


def test_a_folder_of_binary_files_says_so(tmp_path: Path):
    write(tmp_path, {"a": b"\0\1" * 50, "b.png": b"\x89PNG\0\0"})
    with pytest.raises(StrettoError, match="holds no text: 2 files look binary"):
        find_corpus(tmp_path)


def test_globs_files_and_directories_together_count_a_file_once(tmp_path: Path):
    write(tmp_path, {"a.txt": "a", "x/b.txt": "b", "x/y/c.txt": "c", "x/d.md": "d"})
    assert sorted(names(find_corpus(f"{tmp_path}/x/**/*.txt"))) == ["b.txt", "y/c.txt"]
    both = find_corpus([f"{tmp_path}/a.txt", f"{tmp_path}/*.txt", str(tmp_path / "x")])
    assert sorted(names(both)) == ["a.txt", "b.txt", "d.md", "y/c.txt"]


def test_jsonl_and_gzip(tmp_path: Path):
    rows = [{"text": "one\ntwo"}, {"body": 1, "text": "drei ü"}, {"text": "  "}]
    lines = "\n\n".join(json.dumps(row) for row in rows) + "\n"
    write(
        tmp_path,
        {"a.jsonl": lines, "b.jsonl.gz": gzip.compress(lines.encode()), "c.txt.gz": gzip.compress(b"c")},
    )
    assert texts(find_corpus(tmp_path)) == {
        "a.jsonl:1": "one\ntwo",
        "a.jsonl:3": "drei ü",
        "b.jsonl.gz:1": "one\ntwo",
        "b.jsonl.gz:3": "drei ü",
        "c.txt.gz": "c",
    }
    other = write(tmp_path / "other", {"a.jsonl": '{"body": "b"}'})
    assert texts(find_corpus(other, ReadOptions(text_field="body"))) == {"a.jsonl:1": "b"}


def test_a_byte_order_mark_is_no_text(tmp_path: Path):
    write(tmp_path, {"a.txt": b"\xef\xbb\xbfa", "b.jsonl": b'\xef\xbb\xbf{"text": "b"}'})
    assert texts(find_corpus(tmp_path)) == {"a.txt": "a", "b.jsonl:1": "b"}


def test_the_training_sample_reaches_all_parts_of_the_corpus(tmp_path: Path):
    write(tmp_path, {"big.txt": "b" * 900_000, "small.txt": "s" * 100_000})
    sample = "".join(find_corpus(tmp_path).sample(200_000))
    assert len(sample) == 200_000
    assert sample.count("b") == 180_000
    assert "".join(find_corpus(tmp_path).sample(10**9)).count("s") == 100_000


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        ({"texts/a.txt": "a"}, "text", "no such file or directory"),
        ({"a.txt": ""}, "a.txt", "empty file"),
        ({"d/a.txt": "", "d/b.png": b"\0"}, "d", "holds no text: 1 file looks binary"),
        ({"d/a.txt": ""}, "d", "holds no text"),
        ({"d/a.txt": "a"}, "d/*.md", "matches no file"),
        ({"d/e/a.txt": "a"}, "d/*", "matches no file"),
    ],
)
def test_bad_sources(tmp_path: Path, files: dict[str, str | bytes], source: str, message: str):
    write(tmp_path, files)
    with pytest.raises(StrettoError, match=message) as caught:
        find_corpus(str(tmp_path / source))
    assert str(tmp_path) in caught.value.message
    assert caught.value.hint


def test_a_misspelt_path_gets_the_nearest_name(tmp_path: Path):
    write(tmp_path, {"shakespeare.txt": "a"})
    with pytest.raises(StrettoError, match=r"did you mean .*shakespeare\.txt"):
        find_corpus(tmp_path / "shakespear.txt")


@pytest.mark.parametrize(
    ("name", "content", "message", "hint"),
    [
        (
            "a.txt",
            b"caf\xe9 au lait",
            r"a\.txt: not UTF-8 at byte 3 \(0xe9\)",
            "find out its encoding",
        ),
        ("a.txt", b"x" * (3 << 20) + b"\xff", r"not UTF-8 at byte 3145728 ", "encoding"),
        ("a.txt", b"cut \xe2\x82", r"not UTF-8 at byte 4 ", "encoding"),
        ("a.txt", "text".encode("utf-16"), r"a\.txt: UTF-16 text", "iconv -f UTF-16 -t UTF-8"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "\xe9"}',
            r"a\.jsonl, line 2: not UTF-8 at byte 24 ",
            "encoding",
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"txt": "b"}',
            r"a\.jsonl, line 2: no field 'text'",
            "data.text_field=txt in a config, or --text-field txt",
        ),
        ("a.jsonl", b'{"text": ["a"]}', r"line 1: field 'text' is not text", "--text-field"),
        ("a.jsonl", b"\n\n{}", r"line 3: no field 'text'", "empty"),
        ("a.jsonl", b'\n{"text": ', r"line 2: not JSON", "one JSON object a line"),
        ("a.jsonl", b"[" * 100_000, r"line 1: not JSON", "one JSON object a line"),
        ("a.jsonl", b'"text"', r"line 1: a JSON str, not an object", "text"),
        ("a.jsonl", b'{"text": "\\ud800"}', r"line 1: .*surrogate", "Unicode"),
        ("a.txt.gz", gzip.compress(b"text" * 999, mtime=0)[:-9], r"damaged gzip", "again"),
    ],
)
def test_unreadable_text_is_named_with_its_place(
    tmp_path: Path, name: str, content: bytes, message: str, hint: str
):
    write(tmp_path, {name: content})
    with pytest.raises(StrettoError, match=message) as caught:
        list(find_corpus(tmp_path / name).pieces())
    assert hint in (caught.value.hint or "")


@given(st.binary(max_size=300), st.sampled_from(["a.txt", "a.jsonl", "a.txt.gz", "a.jsonl.gz"]))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str):
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(data)
    try:
        for piece in readers.read_documents(path, name, ReadOptions(), RowErrors()):
            piece.text.encode()
    except StrettoError:
        pass


def test_a_stdlib_file_that_is_not_utf8_is_skipped_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write(tmp_path, {"a.py": "a = 1", "b.py": b"# caf\xe9", "test/c.py": "c", "site-packages/d.py": "d"})
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))  # pyright: ignore
    corpus = find_corpus("python-stdlib")
    assert texts(corpus) == texts(corpus) == {"a.py": "a = 1"}
    assert corpus.skipped == 1


def test_parquet_without_pyarrow_names_the_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, {"a.parquet": b"PAR1"})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(StrettoError, match=r"stretto\[parquet\]"):
        list(find_corpus(tmp_path).pieces())


def test_parquet(tmp_path: Path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = ["one", None, "drei ü", ""]
    parquet.write_table(arrow.table({"n": [1, 2, 3, 4], "text": rows}), tmp_path / "a.parquet")
    assert texts(find_corpus(tmp_path)) == {"a.parquet:1": "one", "a.parquet:3": "drei ü"}
    for field, message in (("txt", "no field 'txt'"), ("n", "field 'n' is not text")):
        with pytest.raises(StrettoError, match=message):
            list(find_corpus(tmp_path, ReadOptions(text_field=field)).pieces())
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and then nothing of the kind PAR1")
    with pytest.raises(StrettoError, match="damaged Parquet"):
        list(find_corpus(tmp_path).pieces())


def test_tokens_and_clicks_are_no_text(tmp_path: Path):
    write(
        tmp_path,
        {
            "tokens/index.json": "{}",
            "tokens/tokens.bin": "",
            "clicks/index.json": "{}",
            "clicks/labels.bin": "",
            "m.bin": "",
            "m.idx": "",
        },
    )
    for name in ("tokens", "m", "m.bin"):
        with pytest.raises(StrettoError, match=f"{name}: tokens already, not text"):
            find_corpus(tmp_path / name)
    with pytest.raises(StrettoError, match="clicks: a click folder, which is the data of a recommender"):
        find_corpus(tmp_path / "clicks")


def test_an_encoding_that_is_not_certain_is_not_named(tmp_path: Path):
    for text in ("caf\xe9".encode("latin-1"), "语言模型，训练".encode("gbk")):
        (tmp_path / "a.txt").write_bytes(text)
        with pytest.raises(StrettoError, match=r"a\.txt: not UTF-8 at byte") as caught:
            list(find_corpus(tmp_path).pieces())
        assert "iconv" not in str(caught.value.hint)
