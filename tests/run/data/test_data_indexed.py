from __future__ import annotations

import contextlib
import json
import pickle
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from stretto.errors import StrettoError
from stretto.run.data import token_folder as indexed
from stretto.run.data.boundaries import Boundaries
from stretto.run.data.checksum import FileSums
from stretto.run.data.token_folder import Index, TokenFolder, TokenWriter, _crc32, parse_index
from stretto.run.data.tokenizer import END_OF_TEXT, Tokenizer


def word_tokenizer(vocab: int) -> Tokenizer:
    """A tokenizer of `vocab` ids; the end of text is id 0."""
    table = {END_OF_TEXT: 0, **{f"w{i}": i for i in range(1, vocab)}}
    return Tokenizer(tokenizers.Tokenizer(models.WordLevel(table, unk_token="w1")), Boundaries(0))


def make(
    path: Path, documents: list[list[int]], vocab: int = 1000, chunk: int = 64, key: str = ""
) -> TokenFolder:
    with TokenWriter(path, word_tokenizer(vocab), key=key, source=["s"], chunk=chunk) as writer:
        for document in documents:
            writer.add(document, ends=True)
        writer.commit()
    return TokenFolder(path)


DOCUMENTS = [[i + 1] * (i % 7 + 1) for i in range(100)]


@given(st.lists(st.lists(st.integers(0, 999), max_size=60), min_size=1, max_size=60), st.integers(1, 9))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], cut: int
):
    path = tmp_path_factory.mktemp("t") / "tokens"
    with TokenWriter(path, word_tokenizer(1000), chunk=64) as writer:
        for document in documents:
            for start in range(0, len(document), cut):
                writer.add(document[start : start + cut], ends=False)
            writer.add([], ends=True)
        writer.commit()
    folder = TokenFolder(path)
    folder.verify()
    read = [folder.tokens[a:b].tolist() for a, b in pairwise(folder.offsets.tolist())]
    assert read == [[*document, 0] for document in documents]
    assert (folder.index.documents, folder.index.tokens) == (len(documents), sum(map(len, read)))


@pytest.mark.parametrize(("vocab", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_dtype_follows_the_vocabulary(tmp_path: Path, vocab: int, dtype: str):
    folder = make(tmp_path / "t", [[vocab - 1, 1], [2]], vocab)
    assert folder.index.dtype == folder.tokens.dtype.name == dtype
    assert folder.tokens.tolist() == [vocab - 1, 1, 0, 2, 0]
    assert (tmp_path / "t" / "tokens.bin").stat().st_size == 5 * folder.tokens.dtype.itemsize


def test_the_bytes_are_little_endian(tmp_path: Path):
    make(tmp_path / "t", [[258]])
    assert (tmp_path / "t" / "tokens.bin").read_bytes() == b"\x02\x01\x00\x00"
    assert (tmp_path / "t" / "documents.bin").read_bytes() == b"\0" * 8 + b"\x02" + b"\0" * 7


def test_a_folder_goes_to_another_process_by_its_path(tmp_path: Path):
    folder = make(tmp_path / "t", [[1] * 100_000])
    data = pickle.dumps(folder)
    assert len(data) < 1000
    assert pickle.loads(data).tokens.tolist() == folder.tokens.tolist()


def test_the_map_is_read_only(tmp_path: Path):
    with pytest.raises(ValueError, match="read-only"):
        make(tmp_path / "t", DOCUMENTS).tokens[0] = 1


def test_ids_outside_the_vocabulary_are_not_written(tmp_path: Path):
    for bad in ([1000], [5, -1]):
        with pytest.raises(StrettoError, match="the vocabulary has 1000"):
            make(tmp_path / "t", [bad])
    assert list(tmp_path.iterdir()) == []


def damage(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "tokenizer.json"])
def test_damaged_files(tmp_path: Path, name: str):
    path = tmp_path / "t"
    size = make(path, DOCUMENTS) and (path / name).stat().st_size
    undamaged = (path / name).read_bytes()
    damage(path / name, 70, bytes([undamaged[70] ^ 1]))
    with pytest.raises(StrettoError, match=rf"{name}: corrupt in chunk 1 of \d+ \(bytes 64 to 128\)"):
        TokenFolder(path)
    (path / name).write_bytes(undamaged[:-1])
    with pytest.raises(StrettoError, match=rf"{name}: truncated: {size - 1} bytes, {size} were written"):
        TokenFolder(path)
    (path / name).write_bytes(undamaged + b"\0")
    with pytest.raises(StrettoError, match=f"{name}: too long"):
        TokenFolder(path)
    (path / name).unlink()
    with pytest.raises(StrettoError, match=f"{name}: missing"):
        TokenFolder(path)
    (path / name).write_bytes(undamaged)
    TokenFolder(path).verify()


def test_large_files_are_checked_at_both_ends_when_opened_and_whole_by_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(indexed, "CHECKED_WHOLE", 100)
    path = tmp_path / "t"
    size = len(make(path, DOCUMENTS).tokens) * 2
    undamaged = (path / "tokens.bin").read_bytes()
    for at in (0, size - 1):
        damage(path / "tokens.bin", at, bytes([undamaged[at] ^ 1]))
        with pytest.raises(StrettoError, match="corrupt in chunk"):
            TokenFolder(path)
        (path / "tokens.bin").write_bytes(undamaged)
    damage(path / "tokens.bin", size // 2, b"\x77")
    folder = TokenFolder(path)
    with pytest.raises(StrettoError, match="corrupt in chunk"):
        folder.verify()


def rewrite(path: Path, **changes: Any) -> None:
    """Change fields of the index, its checksum made right again."""
    body = json.loads((path / "index.json").read_bytes()) | changes
    body.pop("crc32")
    (path / "index.json").write_text(json.dumps({**body, "crc32": _crc32(body)}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 4}, "the token folder has version 4, written by a newer Stretto"),
        ({"version": 3}, "'named_splits' is not dict"),
        ({"version": 3, "named_splits": {"train": [1, "a"]}}, "'named_splits' contradicts"),
        ({"version": 2}, "'trained' is not int"),
        ({"version": 2, "trained": 3}, "'trained'"),
        ({"version": "1"}, "version of the token folder is '1', must be"),
        ({"format": "other"}, "format 'other', not 'stretto-tokens'"),
        ({"dtype": "float32"}, "dtype 'float32'; allowed are uint16, uint32"),
        ({"vocab": 65537}, "vocab 65537 does not fit uint16"),
        ({"vocab": 50}, "token 245 is 50, outside the vocabulary of 50"),
        ({"endoftext": 1000}, "'endoftext'"),
        ({"tokens": 400}, r"'files\.tokens\.bin\.bytes'"),
        ({"documents": 0}, "'documents'"),
        ({"documents": 3}, r"'files\.documents\.bin\.bytes'"),
        ({"chunk": 128}, "crc32"),
        ({"chunk": 0}, "'chunk'"),
        ({"tokens": True}, "'tokens' is not int"),
        ({"key": None}, "'key' is not str"),
        ({"files": {}}, "'files'"),
        ({"files": {"tokens.bin": 3}}, "no sums"),
    ],
)
def test_an_index_that_is_wrong(tmp_path: Path, changes: dict[str, Any], message: str):
    make(tmp_path / "t", DOCUMENTS)
    rewrite(tmp_path / "t", **changes)
    with pytest.raises(StrettoError, match=message) as caught:
        TokenFolder(tmp_path / "t")
    assert caught.value.hint


def test_a_change_in_the_index_alone_is_detected(tmp_path: Path):
    make(tmp_path / "t", DOCUMENTS)
    index = tmp_path / "t" / "index.json"
    index.write_text(index.read_text().replace('"vocab": 1000', '"vocab": 2000'))
    with pytest.raises(StrettoError, match="its own checksum"):
        TokenFolder(tmp_path / "t")


def test_boundaries_that_run_backwards(tmp_path: Path):
    path = tmp_path / "t"
    index = make(path, DOCUMENTS, chunk=1 << 20).index
    offsets = np.fromfile(path / "documents.bin", dtype="<i8")
    for at, value, message in (
        (5, offsets[4], "boundary 5 is not after boundary 4"),
        (0, 1, "does not span"),
        (100, 9, "boundary 100 is not after boundary 99"),
    ):
        changed = offsets.copy()
        changed[at] = value
        (path / "documents.bin").write_bytes(changed.tobytes())
        files = {n: {"bytes": s.bytes, "crc32": s.crc32} for n, s in index.files.items()}
        files["documents.bin"]["crc32"] = [zlib.crc32(changed.tobytes())]
        rewrite(path, files=files)
        with pytest.raises(StrettoError, match=message):
            TokenFolder(path)


def test_not_a_token_folder(tmp_path: Path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(StrettoError, match="not a token folder"):
            TokenFolder(path)


def test_another_tokenizer_is_refused(tmp_path: Path):
    folder = make(tmp_path / "t", DOCUMENTS)
    assert folder.tokenizer().vocab_size == 1000
    rewrite(tmp_path / "t", tokenizer="0" * 32)
    with pytest.raises(StrettoError, match="not the tokenizer"):
        TokenFolder(tmp_path / "t").tokenizer()


FILES = {"tokens.bin": FileSums(8, [1]), "documents.bin": FileSums(16, [2])}
GOOD = Index(
    dtype="uint16",
    tokens=4,
    documents=1,
    vocab=10,
    endoftext=0,
    tokenizer="t",
    key="k",
    source=["s"],
    skipped=0,
    chunk=64,
    files=FILES,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


def test_the_index_comes_back():
    assert parse_index(GOOD.to_bytes(), Path("i")) == GOOD


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_break_the_index_reader(data: bytes):
    with pytest.raises(StrettoError):
        parse_index(data, Path("i"))


@given(st.integers(0, len(GOOD.to_bytes()) - 1), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_means_the_same(at: int, flip: int):
    data = bytearray(GOOD.to_bytes())
    data[at] ^= flip
    with contextlib.suppress(StrettoError):
        assert parse_index(bytes(data), Path("i")) == GOOD


@given(st.sampled_from([*json.loads(GOOD.to_bytes())]), JSON)
def test_no_value_of_a_field_breaks_the_reader(name: str, value: Any):
    body = json.loads(GOOD.to_bytes()) | {name: value}
    if name != "crc32":
        body.pop("crc32")
        body["crc32"] = _crc32(body)
    try:
        parsed = parse_index(json.dumps(body).encode(), Path("i"))
    except StrettoError:
        return
    assert parsed.to_bytes()
