"""The transform against one in plain Python, saved and loaded; vocabularies and counts against dicts."""

from __future__ import annotations

import json
from collections import Counter as Bag
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from clicks_logs import log_lines, slow_dense, slow_row, slow_vocabulary
from stretto.errors import StrettoError
from stretto.recommender.clicks import counting
from stretto.recommender.clicks.counting import IdCounter
from stretto.recommender.clicks.criteo import COLUMNS, parse
from stretto.recommender.clicks.raw import Columns, RawChunk, mix, text_keys, unmix
from stretto.recommender.clicks.transform import ClickTransform, Vocabulary

KEYS = arrays.arrays(np.uint64, st.integers(0, 60), elements=st.integers(0, 2**64 - 1) | st.integers(0, 9))
ONE_COLUMN = Columns((), ("C1",), ("hex",), (False,))


def one_column(keys: np.ndarray, missing: np.ndarray | None = None) -> RawChunk:
    """A chunk of one feature and no numbers."""
    missing = np.zeros(len(keys), bool) if missing is None else missing
    return RawChunk(columns=ONE_COLUMN, numbers=np.zeros((len(keys), 0)), keys=keys, missing=missing)


def of_log(lines: list[str], threshold: int, tmp_path: Path) -> ClickTransform:
    chunk = parse("\n".join(lines).encode()).chunk
    counter = IdCounter(tmp_path, 26)
    counter.add(chunk)
    vocabularies = {n: Vocabulary(counter.counts(i, threshold).keys) for i, n in enumerate(COLUMNS.features)}
    return ClickTransform(columns=COLUMNS, kind="vocabulary", threshold=threshold, vocabularies=vocabularies)


@given(KEYS)
def test_mixing_can_be_undone(keys: np.ndarray):
    assert np.array_equal(unmix(mix(keys)), keys)


@given(KEYS, KEYS)
def test_a_vocabulary_is_a_dictionary(keys: np.ndarray, looked_up: np.ndarray):
    keys = np.array(list(dict.fromkeys(keys.tolist())), np.uint64)
    rows = {key: row for row, key in enumerate(keys.tolist(), 2)}
    looked_up = np.concatenate([looked_up, keys])
    assert Vocabulary(keys).lookup(looked_up).tolist() == [rows.get(key, 1) for key in looked_up.tolist()]
    assert Vocabulary(keys).rows == len(rows) + 2


def test_a_large_vocabulary_of_crowded_keys():
    keys = np.random.default_rng(0).permutation(np.arange(40_000, dtype=np.uint64))
    looked_up = np.arange(80_000, dtype=np.uint64)
    wanted = np.ones(80_000, np.int64)
    wanted[keys] = np.arange(40_000) + 2
    assert np.array_equal(Vocabulary(keys).lookup(looked_up), wanted)


@given(st.lists(st.tuples(KEYS, st.booleans()), max_size=4), st.integers(1, 4))
def test_counts_in_runs_are_counts(tmp_path_factory: pytest.TempPathFactory, parts: list, threshold: int):
    folder = tmp_path_factory.mktemp("runs")
    counter, wanted, gone = IdCounter(folder, 1), Bag[int](), 0
    for keys, flush in parts:
        missing = keys == 3
        counter.add(one_column(keys, missing))
        wanted.update(keys[~missing].tolist())
        gone += int(missing.sum())
        if flush:
            counter.flush()
            counter = IdCounter(folder, 1, counter.runs, counter.missing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "MERGED", 8)
        counted = counter.counts(0, threshold)
    often = sorted((-n, key) for key, n in wanted.items() if n >= threshold)
    assert counted.keys.tolist() == [key for _, key in often]
    assert counted.counts.tolist() == [-n for n, _ in often]
    assert counted.rare == sum(n for n in wanted.values() if n < threshold)
    assert counted.missing == gone
    assert int(counted.by_row().sum()) == sum(len(keys) for keys, _ in parts)


def test_counts_beyond_the_memory_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(counting, "IN_MEMORY", 100)
    counter = IdCounter(tmp_path, 1)
    for start in range(10):
        counter.add(one_column(np.arange(start, start + 60, dtype=np.uint64)))
    assert len(counter.runs) == 5
    assert int(counter.counts(0, 1).counts.sum()) == 600
    counting.remove_runs(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("threshold", [1, 2, 5])
def test_against_plain_python(tmp_path: Path, threshold: int):
    lines = log_lines(400)
    fields = [line.split("\t") for line in lines]
    vocabularies = slow_vocabulary([[f[14 + i] for f in fields] for i in range(26)], threshold)
    transform = of_log(lines, threshold, tmp_path)
    others = log_lines(100, seed=1, ids=400)  # served: with ids that were never seen
    done = transform.apply(parse("\n".join(lines + others).encode()).chunk)
    ids, fields = done.ids.reshape(-1, 26), fields + [line.split("\t") for line in others]
    for sample, row in enumerate(fields):
        wanted = [
            slow_row(vocabulary, value) for vocabulary, value in zip(vocabularies, row[14:], strict=True)
        ]
        assert ids[sample].tolist() == wanted
        np.testing.assert_allclose(done.dense[sample], [slow_dense(n) for n in row[1:14]], rtol=1e-6)
    assert [f.rows for f in transform.features] == [len(vocabulary) + 2 for vocabulary in vocabularies]
    assert (done.dense < 0).any()


@pytest.mark.parametrize("kind", ["vocabulary", "hash", "raw"])
@pytest.mark.parametrize("flags", [False, True])
def test_saved_and_loaded_it_serves_the_same(tmp_path: Path, kind: str, flags: bool):
    lines = log_lines(100)
    vocabularies = of_log(lines, 3, tmp_path).vocabularies if kind == "vocabulary" else {}
    transform = ClickTransform(
        columns=COLUMNS,
        kind=kind,
        rows=50 if kind == "hash" else None,
        flags=flags,
        threshold=3,
        vocabularies=vocabularies,  # pyright: ignore[reportArgumentType]
    )
    for name, content in transform.to_files().items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.tobytes())
    loaded = ClickTransform.load(tmp_path)
    raw = parse("\n".join(line[2:] for line in lines).encode(), labelled=False).chunk
    first, second = transform.apply(raw), loaded.apply(raw)
    assert np.array_equal(first.ids, second.ids)
    assert np.array_equal(first.dense, second.dense)
    assert (loaded.numbers, loaded.features) == (transform.numbers, transform.features)
    assert first.dense.shape == (100, len(loaded.numbers))
    batch = loaded.batch(raw)
    assert batch.ids.hot == (1,) * 26
    assert np.array_equal(batch.ids.ids.numpy().reshape(26, 100).T.reshape(-1), first.ids)
    assert not batch.labels.any()


def test_missing_numbers_have_flags():
    raw = parse("\n".join(log_lines(50)).encode()).chunk
    dense = ClickTransform(columns=COLUMNS, kind="hash", rows=10, flags=True).apply(raw).dense
    assert np.array_equal(dense[:, 13:], np.isnan(raw.numbers).astype(np.float32))
    assert not dense[:, :13][np.isnan(raw.numbers)].any()


@given(KEYS, st.integers(2, 20))
def test_hashed_and_raw_ids_are_in_range(keys: np.ndarray, rows: int):
    missing = keys % 3 == 0
    hashed = ClickTransform(columns=ONE_COLUMN, kind="hash", rows=rows).apply(one_column(keys, missing)).ids
    raw = ClickTransform(columns=ONE_COLUMN, kind="raw").apply(one_column(keys, missing)).ids
    assert ((hashed == 0) == missing).all()
    assert ((raw == 0) == missing).all()
    assert (hashed < rows).all()
    assert (raw >= 0).all()
    small = ~missing & (keys < 1 << 32)
    assert np.array_equal(raw[small], keys[small].astype(np.int64) + 1)


def test_hashing_spreads_even_ids_evenly():
    ids = (
        ClickTransform(columns=ONE_COLUMN, kind="hash", rows=101)
        .apply(one_column(np.arange(0, 10**6, 100, dtype=np.uint64)))
        .ids
    )
    counts = np.bincount(ids, minlength=101)[1:]
    assert counts.min() > 60
    assert counts.max() < 145


def test_texts_have_keys_of_their_own():
    assert len(set(text_keys([str(i) for i in range(1000)]).tolist())) == 1000
    assert text_keys(["a"]).tolist() == [int.from_bytes(bytes.fromhex("40f89e395b66422f"), "little")]


def damage(folder: Path, name: str, body: dict[str, object] | None) -> None:
    path = folder / name
    if body is None:
        path.unlink()
    elif name == "transform.json":
        path.write_text(json.dumps(json.loads(path.read_text()) | body))
    else:
        path.write_bytes(path.read_bytes()[:-8] + b"12345678")


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("transform.json", None, "transform.json: cannot be read"),
        ("vocabulary.bin", None, "vocabulary.bin: cannot be read"),
        ("vocabulary.bin", {}, "vocabulary.bin is damaged"),
        ("transform.json", {"version": 9}, "has version 9, written by a newer Stretto"),
        ("transform.json", {"kind": "magic"}, "kind 'magic'"),
        ("transform.json", {"columns": {}}, "missing or wrong"),
        ("transform.json", {"sizes": [3]}, "missing or wrong"),
    ],
)
def test_a_damaged_one_is_refused(tmp_path: Path, name: str, body: dict[str, object] | None, message: str):
    files = of_log(log_lines(50), 1, tmp_path).to_files()
    for each, content in files.items():
        (tmp_path / each).write_bytes(content if isinstance(content, bytes) else content.tobytes())
    ClickTransform.load(tmp_path)
    damage(tmp_path, name, body)
    with pytest.raises(StrettoError, match=message):
        ClickTransform.load(tmp_path)


def test_other_columns_are_refused():
    with pytest.raises(StrettoError, match="13 numbers and 26 features"):
        ClickTransform(columns=COLUMNS, kind="raw").apply(one_column(np.zeros(1, np.uint64)))
    with pytest.raises(StrettoError, match="hash into 1 rows"):
        ClickTransform(columns=ONE_COLUMN, kind="hash", rows=1)
    with pytest.raises(StrettoError, match="threshold 0"):
        ClickTransform(columns=ONE_COLUMN, kind="vocabulary", threshold=0)
