from __future__ import annotations

import multiprocessing
import os
import re
from itertools import pairwise
from pathlib import Path

import pytest

from stretto.errors import StrettoError
from stretto.run.config.data import ReadOptions
from stretto.run.data import build as building
from stretto.run.data import token_folder as indexed
from stretto.run.data.build import BuildProgress, build, cache_dir
from stretto.run.data.split import splits_of
from stretto.run.data.token_folder import TokenFolder
from stretto.run.data.token_source import TokenSource
from stretto.run.data.tokenizer import Tokenizer

TEXT = Path(building.__file__).read_text() * 3


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(6):
        (folder / f"{i}.txt").write_text(f"document {i}\n" + TEXT[i * 500 :])
    return folder


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "stretto"


def read(folder: TokenFolder) -> set[str]:
    tokenizer = folder.tokenizer()
    return {tokenizer.decode(folder.tokens[a:b].tolist()) for a, b in pairwise(folder.offsets[:].tolist())}


def test_the_documents_are_in_the_folder(source: Path, private_cache: Path):
    folder = build(source, vocab=300)
    assert read(folder) == {path.read_text() for path in source.iterdir()}
    assert folder.path.is_relative_to(private_cache)
    assert (folder.index.documents, folder.index.vocab, folder.index.source) == (6, 300, [str(source)])
    ends = folder.offsets[1:] - 1
    assert (folder.tokens[ends] == folder.index.endoftext).all()
    assert int((folder.tokens[:] == folder.index.endoftext).sum()) == 6


NAMED = {
    "train": ["train.txt", "notes/a.txt", "notes/valid.txt"],
    "valid": ["val.txt"],
    "test": ["test/b.txt"],
}


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """Texts that tell their split; what lies in a folder without such a name is training text."""
    for split, names in NAMED.items():
        for name in names:
            path = tmp_path / "named" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{split} " * 60)
    return tmp_path / "named"


def splits_in(source: TokenSource, ratio: str | None) -> dict[str, set[str]]:
    """The words of each split."""
    tokenizer = source.tokenizer()
    texts = {
        name: tokenizer.decode(source.tokens[run.start : run.stop].tolist())
        for name, run in splits_of(source, ratio).items()
    }
    return {name: {*re.findall("train|valid|test", text)} for name, text in texts.items()}


def test_files_that_are_named_train_valid_and_test_are_kept_apart(named: Path):
    folder = build(named, vocab=300, by_name=True)
    assert splits_in(folder, None) == {name: {name} for name in NAMED}
    assert {*folder.named_splits["train"][1].split(", ")} == {"train.txt", "notes"}
    assert [folder.named_splits[name][1] for name in ("valid", "test")] == ["val.txt", "test"]
    assert len(splits_in(folder, "1,8,1")["valid"]) > 1  # a ratio outweighs names
    assert not build(named, vocab=300).named_splits
    (named / "val.txt").unlink()
    folder = build(named, vocab=300, by_name=True)
    assert splits_in(folder, None) == {"train": {"train"}, "valid": {"test"}, "test": {"test"}}
    (named / "train.txt").rename(named / "more.txt")  # held-out names alone may mean anything
    assert not build(named, vocab=300, by_name=True).named_splits


def test_a_second_build_reads_the_first_and_a_change_makes_another(source: Path, tmp_path: Path):
    reports: list[BuildProgress] = []
    first = build(source, vocab=300, progress=reports.append)
    assert {p.stage for p in reports} == {"train tokenizer", "encode"}
    assert (reports[-1].documents, reports[-1].tokens) == (6, first.index.tokens)
    assert reports[-1].characters == reports[-1].total == sum(p.stat().st_size for p in source.iterdir())
    reports.clear()
    assert build(source, vocab=300, progress=reports.append).path == first.path
    assert reports == []
    others = [
        build(source, vocab=301).path,
        build(source, vocab=300, reading=ReadOptions(text_field="body")).path,
    ]
    (source / "0.txt").write_text(TEXT)
    others.append(build(source, vocab=300).path)
    assert build(source, vocab=300, cache=tmp_path / "elsewhere").path.parent.parent == tmp_path / "elsewhere"
    assert len({first.path, *others}) == 4


def test_the_same_files_elsewhere_give_the_same_tokens(source: Path, tmp_path: Path):
    other = tmp_path / "moved"
    other.mkdir()
    for path in sorted(source.iterdir(), reverse=True):
        (other / path.name).write_bytes(path.read_bytes())
    first, two = build(source, vocab=300), build(other, vocab=300)
    assert first.path != two.path
    assert first.tokens[:].tolist() == two.tokens[:].tolist()
    assert first.index.tokenizer == two.index.tokenizer


def test_batch_and_piece_sizes_do_not_show(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    full = build(source, tmp_path / "a", vocab=300)
    monkeypatch.setattr("stretto.run.data.tokenizer._BATCH_CHARACTERS", 1000)
    monkeypatch.setattr("stretto.run.data.readers.PIECE", 800)
    monkeypatch.setattr(indexed, "_BUFFERED", 2)
    parts = build(source, tmp_path / "b", vocab=300, tokenizer=tmp_path / "a")
    assert parts.tokens[:].tolist() == full.tokens[:].tolist()
    assert parts.offsets[:].tolist() == full.offsets[:].tolist()


def test_a_configured_tokenizer_is_used(source: Path, tmp_path: Path):
    tokenizer = Tokenizer.train([TEXT], 333)
    tokenizer.save(tmp_path / "mine.json")
    folder = build(source, tokenizer=tmp_path / "mine.json")
    assert folder.index.vocab == 333
    assert folder.index.tokenizer == tokenizer.fingerprint == folder.tokenizer().fingerprint


def test_out_is_kept_or_replaced(source: Path, tmp_path: Path):
    out = tmp_path / "out"
    build(source, out, vocab=300)
    inode = out.stat().st_ino
    build(source, out, vocab=300)
    assert out.stat().st_ino == inode
    assert build(source, out, vocab=310).index.vocab == 310
    other = tmp_path / "texts" / "0.txt"
    with pytest.raises(StrettoError, match=f"holds the tokens of {source}") as caught:
        build(other, out, vocab=300)
    assert "--force" in str(caught.value.hint)
    assert TokenFolder(out).index.source == [str(source)]
    assert build(other, out, vocab=300, replace=True).index.source == [str(other)]
    assert sorted(os.listdir(tmp_path)) == ["out", "texts"]


def test_blank_documents_are_counted(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n\n{"text": "  "}\n{"text": "two"}\n   \n')
    (tmp_path / "blank.txt").write_text(" \n")
    index = build(tmp_path, tmp_path / "out", vocab=300).index
    assert (index.documents, index.blank, index.skipped) == (2, 4, 0)


def test_a_damaged_folder_is_built_again(source: Path):
    folder = build(source, vocab=300)
    tokens = folder.tokens[:].tolist()
    for name in ("tokens.bin", "index.json"):
        # not in place: the open folder maps the old file
        (folder.path / name).unlink()
        (folder.path / name).write_bytes(b"")
        folder = build(source, vocab=300)
        assert folder.tokens[:].tolist() == tokens


def test_tokens_of_an_unknown_source_are_not_replaced(source: Path, tmp_path: Path):
    out = tmp_path / "out"
    build(source, out, vocab=300)
    (out / "index.json").write_bytes(b"{")
    with pytest.raises(StrettoError, match=r"whose tokens .* is not known") as caught:
        build(source, out, vocab=300)
    assert "--force" in str(caught.value.hint)
    assert build(source, out, vocab=300, replace=True).index.documents == 6


def test_other_files_are_never_removed(source: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(StrettoError, match=r"other files \(thesis\.tex\)"):
        build(source, tmp_path / "out", vocab=300)
    with pytest.raises(StrettoError, match="is a file"):
        build(source, tmp_path / "out" / "thesis.tex", vocab=300)


@pytest.mark.parametrize("text", [b" \n\t\n", b"caf\xe9"])
def test_a_build_that_fails_leaves_nothing(tmp_path: Path, text: bytes):
    (tmp_path / "a.txt").write_bytes(text)
    Tokenizer.train([TEXT], 300).save(tmp_path / "mine.json")
    for tokenizer in (None, tmp_path / "mine.json"):
        with pytest.raises(StrettoError, match=r"no text|not UTF-8"):
            build(tmp_path / "a.txt", tmp_path / "out", vocab=300, tokenizer=tokenizer)
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "mine.json"]


def test_a_full_disk_is_an_error(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stretto.run.data.checksum.SummedFile.write", full)
    with pytest.raises(StrettoError, match="out: cannot be written: No space left"):
        build(source, tmp_path / "out", vocab=300)
    assert sorted(os.listdir(tmp_path)) == ["texts"]


def build_in_process(source: Path, out: Path, start: object) -> None:
    start.wait()  # type: ignore[attr-defined]
    build(source, out, vocab=300).verify()


def test_builders_at_once_agree(source: Path, tmp_path: Path):
    context = multiprocessing.get_context("forkserver")
    start = context.Barrier(2)
    processes = [
        context.Process(target=build_in_process, args=(source, tmp_path / "out", start)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    TokenFolder(tmp_path / "out").verify()
    assert sorted(os.listdir(tmp_path)) == ["out", "texts"]


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/x/y")
    assert cache_dir() == Path("/x/y/stretto")
    for unset in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        monkeypatch.setenv("HOME", "/h")
        assert cache_dir() == Path("/h/.cache/stretto")
