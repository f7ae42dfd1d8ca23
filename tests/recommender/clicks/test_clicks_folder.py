"""Click folders: what is written is what is gathered, in an order that is a function, and damage is seen."""

from __future__ import annotations

import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.recommender.clicks import counting
from stretto.recommender.clicks.batch import ClickBatch
from stretto.recommender.clicks.counting import lookup_histogram, sample_runs
from stretto.recommender.clicks.folder import ClickFolder, ClickSamples
from stretto.recommender.clicks.index import CategoricalFeature
from stretto.recommender.clicks.writer import ClickWriter
from stretto.run.data.permutation import positions

ROWS = (7, 1000, 50)


class Log:
    """Random samples, and the slow way to a batch of them."""

    def __init__(
        self, samples: int, hots: tuple[int | None, ...] = (1, 1, 1), weighted: bool = False
    ) -> None:
        random = np.random.default_rng(samples)
        self.features = [
            CategoricalFeature(f"C{i}", rows, hot)
            for i, (rows, hot) in enumerate(zip(ROWS, hots, strict=True))
        ]
        self.dense = random.random((samples, 2), dtype=np.float32)
        self.labels = random.integers(0, 2, samples)

        def some(feature: CategoricalFeature) -> np.ndarray:
            hot = int(random.integers(0, 4)) if feature.hot is None else feature.hot
            return random.integers(0, feature.rows or 0, hot)

        self.ids = [[some(feature) for feature in self.features] for _ in range(samples)]
        self.weighted = weighted
        self.lengths = np.array([[len(ids_of) for ids_of in sample] for sample in self.ids])
        self.weights = random.random(int(self.lengths.sum()), dtype=np.float32)

    def write(self, path: Path, chunk: int = 10, **more: Any) -> ClickFolder:
        writer = ClickWriter(path, self.features, ["I0", "I1"], weighted=self.weighted, **more)
        with writer:
            for start in range(0, len(self.labels), chunk):
                self.add(writer, start, start + chunk)
            return writer.commit()

    def add(self, writer: ClickWriter, start: int, stop: int) -> None:
        span, before = slice(start, stop), int(self.lengths[:start].sum())
        ids = np.concatenate([np.concatenate(sample) for sample in self.ids[span]])
        weights = self.weights[before : before + len(ids)] if self.weighted else None
        writer.add(self.dense[span], self.labels[span], ids, self.lengths[span], weights)

    def check(self, batch: ClickBatch, samples: list[int]) -> None:
        """That the batch is of these samples."""
        assert batch.dense.dtype == batch.labels.dtype == torch.float32
        assert np.array_equal(batch.dense.numpy(), self.dense[samples])
        assert batch.labels.tolist() == self.labels[samples].tolist()
        assert np.array_equal(batch.ids.lengths.numpy(), self.lengths[samples].T)
        wanted = [int(i) for f in range(3) for s in samples for i in self.ids[s][f]]
        assert batch.ids.ids.tolist() == wanted
        assert batch.ids.ids.dtype == torch.int64
        if self.weighted:
            first = np.concatenate([[0], np.cumsum(self.lengths)])
            at = [
                int(first[3 * s + f]) + k
                for f in range(3)
                for s in samples
                for k in range(len(self.ids[s][f]))
            ]
            assert batch.ids.weights is not None
            assert batch.ids.weights.tolist() == self.weights[at].tolist()
        else:
            assert batch.ids.weights is None


@pytest.mark.parametrize("hots", [(1, 1, 1), (2, 1, 3), (None, 1, None), (0, 1, 2)])
@pytest.mark.parametrize("weighted", [False, True])
def test_what_is_written_is_gathered(tmp_path: Path, hots: tuple[int | None, ...], weighted: bool):
    log = Log(57, hots, weighted)
    folder = log.write(tmp_path / "clicks")
    log.check(folder.arrays.gather(np.arange(57)), list(range(57)))
    samples = [5, 5, 56, 0, 31]
    batch = folder.arrays.gather(np.array(samples))
    log.check(batch, samples)
    assert batch.ids.hot == (None if None in hots else hots)
    log.check(batch.part(1, 3), samples[1:3])
    log.check(folder.arrays.gather(np.zeros(0, np.int64)), [])
    assert (folder.samples, folder.numbers, folder.features) == (57, ["I0", "I1"], log.features)
    assert folder.base_rate == log.labels.mean()
    assert folder.table_rows() == {"C0": 7, "C1": 1000, "C2": 50}
    assert folder.transform is None
    folder.verify()
    assert pickle.loads(pickle.dumps(folder)).index == folder.index
    for i, feature in enumerate(folder.features):
        popularity = folder.popularity()[feature.name]
        looked = np.concatenate([sample[i] for sample in log.ids])
        assert popularity.hot == len(looked) / 57
        assert (popularity.ids, popularity.lookups) == (len(np.unique(looked)), len(looked))


@pytest.mark.parametrize("hots", [(2, 1, 3), (None, 1, None)])
def test_batches_can_be_written(tmp_path: Path, hots: tuple[int | None, ...]):
    log = Log(40, hots, weighted=True)
    folder = log.write(tmp_path / "a")
    with ClickWriter(tmp_path / "b", log.features, ["I0", "I1"], weighted=True) as writer:
        for start in range(0, 40, 8):
            writer.add_batch(folder.arrays.gather(np.arange(start, start + 8)))
        other = writer.commit()
    assert {n: s.crc32 for n, s in other.index.files.items()} == {
        n: s.crc32 for n, s in folder.index.files.items()
    }


def test_how_it_is_chunked_does_not_count(tmp_path: Path):
    log = Log(57, (None, 1, None), weighted=True)
    large_chunks, other = log.write(tmp_path / "a", 57), log.write(tmp_path / "b", 3)
    assert large_chunks.index == other.index


@pytest.mark.parametrize("hots", [(2, 1, 3), (None, 1, None)])
def test_a_stopped_writer_goes_on(tmp_path: Path, hots: tuple[int | None, ...]):
    log = Log(60, hots, weighted=True)
    uninterrupted = log.write(tmp_path / "whole", chunk=10, key="k" * 16)

    def write(first: int, stop: int) -> ClickFolder | None:
        writer = ClickWriter(
            tmp_path / "parts", log.features, ["I0", "I1"], weighted=True, key="k" * 16, resume=True
        )
        with writer:
            assert (writer.cursor or {"at": 0})["at"] == first
            for start in range(first, 60, 10):
                log.add(writer, start, start + 10)
                if start + 10 == stop:
                    writer.save({"at": stop})
                    log.add(writer, 0, 60)  # not saved: to be forgotten
                    raise KeyboardInterrupt
            return writer.commit()

    for first, stop in ((0, 20), (20, 30)):
        with pytest.raises(KeyboardInterrupt):
            write(first, stop)
        assert not (tmp_path / "parts").exists()
    done = write(30, 0)
    assert done is not None
    assert done.index == uninterrupted.index
    assert not list(tmp_path.glob(".*"))


def test_two_processes_do_not_write_one_folder(tmp_path: Path):
    log = Log(10)
    with ClickWriter(tmp_path / "x", log.features, ["I0", "I1"], key="k", resume=True) as writer:
        writer.save({})
        again = ClickWriter(tmp_path / "x", log.features, ["I0", "I1"], key="k", resume=True)
        with pytest.raises(StrettoError, match="another process is building it"), again:
            pass
        other = ClickWriter(tmp_path / "x", log.features, ["I0", "I1"], key="other", resume=True)
        with other:
            assert other.cursor is None
        log.add(writer, 0, 10)
        assert writer.commit().samples == 10


def test_what_another_build_left_is_removed(tmp_path: Path):
    log = Log(10)
    with ClickWriter(tmp_path / "x", log.features, ["I0", "I1"], key="old", resume=True) as writer:
        writer.save({})
    assert [path.name for path in tmp_path.iterdir()] == [".x.old.build"]
    log.write(tmp_path / "x", key="new", resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_what_was_left_and_is_damaged_is_begun_anew(tmp_path: Path):
    log = Log(20)

    def writer() -> ClickWriter:
        return ClickWriter(tmp_path / "x", log.features, ["I0", "I1"], key="k", resume=True)

    with writer() as first:
        log.add(first, 0, 10)
        first.save({"at": 10})
    (tmp_path / ".x.k.build/ids.bin").write_bytes(b"short")
    with pytest.raises(StrettoError, match="shorter than when it was saved"), writer():
        pass
    for damage in (b"{", b'{"state": "{}", "crc32": 1}', b"[]"):
        with writer() as second:
            assert second.cursor is None
            log.add(second, 0, 10)
            second.save({"at": 10})
        (tmp_path / ".x.k.build/state.json").write_bytes(damage)
    with writer() as third:
        assert third.cursor is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": [7, 0, 0]}, "id 7: the feature has 7 rows"),
        ({"ids": [0, -1, 0]}, "id -1: the feature has 1000 rows"),
        ({"labels": [2]}, "neither 0 nor 1"),
        ({"dense": [[0, np.nan]]}, "not finite"),
    ],
)
def test_bad_samples_are_refused(tmp_path: Path, change: dict[str, Any], message: str):
    sample = {"dense": [[0, 0]], "labels": [1], "ids": [0, 0, 0]} | change
    with ClickWriter(tmp_path / "x", Log(1).features, ["I0", "I1"]) as writer:
        with pytest.raises(StrettoError, match=message):
            writer.add(*(np.array(sample[name]) for name in ("dense", "labels", "ids")))
        with pytest.raises(StrettoError, match="no samples"):
            writer.commit()
    assert not list(tmp_path.iterdir())


def test_ids_without_bound_are_wide(tmp_path: Path):
    with ClickWriter(tmp_path / "x", [CategoricalFeature("C1", None)], []) as writer:
        writer.add(np.zeros((2, 0), np.float32), np.array([0, 1]), np.array([0, 2**62]))
        folder = writer.commit()
    assert folder.index.dtype == "int64"
    assert folder.arrays.gather(np.array([1])).ids.ids.tolist() == [2**62]
    assert folder.table_rows() == {"C1": None}


def test_batches_follow_the_order_and_go_on(tmp_path: Path):
    log = Log(50)
    folder = log.write(tmp_path / "x")
    train = ClickSamples(folder, "train", seed=3, held_out=0.2)
    assert len(train) == 40
    order = [positions(np.arange(40), 40, 3, epoch).tolist() for epoch in (0, 1, 2)]
    assert sorted(order[0]) == sorted(order[1]) == list(range(40))
    assert order[0] != order[1]
    log.check(train.batch(30, 70), order[0][30:] + order[1] + order[2][:20])
    log.check(train.batch(30, 70, (8, 12)), order[0][38:] + order[1][:2])
    valid = ClickSamples(folder, "valid", held_out=0.2, shuffle=False)
    log.check(valid.batch(0, 12), [*range(40, 50), 40, 41])
    assert len(ClickSamples(folder, "all", block=4)) == 50


def test_the_last_part_is_held_out(tmp_path: Path):
    log = Log(50)
    with ClickWriter(tmp_path / "x", log.features, ["I0", "I1"]) as writer:
        for start, stop in ((0, 20), (20, 35), (35, 50)):
            writer.mark(f"day_{start}")
            log.add(writer, start, stop)
        folder = writer.commit()
    assert folder.index.parts == [("day_0", 20), ("day_20", 15), ("day_35", 15)]
    assert ClickSamples(folder, "train", held_out="last-part").range == range(35)
    assert ClickSamples(folder, "valid", held_out="last-part").range == range(35, 50)


@pytest.mark.parametrize(
    ("split", "more", "message"),
    [
        ("tran", {}, "split 'tran'"),
        ("train", {"held_out": "last-part"}, "no samples for 'train'"),
        ("valid", {"held_out": 0.0}, "no samples for 'valid'"),
        ("valid", {"held_out": 1.0}, "held out: 1.0"),
        ("train", {"block": -1}, "block -1"),
    ],
)
def test_bad_splits_are_refused(tmp_path: Path, split: str, more: dict[str, Any], message: str):
    folder = Log(5).write(tmp_path / "x")
    with pytest.raises(StrettoError, match=message):
        ClickSamples(folder, split, **more)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=300).filter(any))
def test_buckets_hold_all_lookups_the_popular_first(counts: list[int]):
    counted = lookup_histogram(np.array(counts), 1.0)
    assert sum(n for n, _ in counted.buckets) == counted.ids == sum(c > 0 for c in counts)
    assert sum(share for _, share in counted.buckets) == pytest.approx(1)
    assert counted.lookups == sum(counts)
    each = [share / n for n, share in counted.buckets]
    assert each == sorted(each, reverse=True)
    assert counted.buckets[0] == (1, max(counts) / sum(counts))


@given(st.integers(1, 10**6), st.integers(1, 10**5))
def test_runs_of_samples_are_spread_and_few(samples: int, wanted: int):
    runs = sample_runs(samples, wanted)
    assert sum(map(len, runs)) <= wanted
    assert runs
    assert all(0 <= run.start < run.stop <= samples for run in runs)
    assert samples > wanted or sum(map(len, runs)) == samples


def test_of_a_long_log_a_part_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import stretto.recommender.clicks.writer as writing

    monkeypatch.setattr(writing, "COUNTED", 300)
    folder = Log(500).write(tmp_path / "x")
    assert all(90 <= each.lookups <= 100 for each in folder.popularity().values())
    assert counting.COUNTED > 300


def rewrite(path: Path, **change: Any) -> None:
    body = json.loads(path.read_text()) | change
    del body["crc32"]
    crc = zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    path.write_text(json.dumps(body | {"crc32": crc}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 51}, "contradicts"),
        ({"samples": 0}, "contradicts"),
        ({"positives": 51}, "field 'positives'"),
        ({"parts": [["all", 3]]}, "field 'parts'"),
        ({"dtype": "float8"}, "field 'dtype'"),
        ({"version": 2}, "the click folder has version 2, written by a newer Stretto"),
        ({"format": "stretto-tokens"}, "format 'stretto-tokens'"),
        ({"features": [{"rows": 1}]}, "missing or wrong"),
        ({"popularity": {}}, "field 'popularity'"),
        ({"files": {}}, "'files' is wrong"),
    ],
)
def test_an_index_that_contradicts_is_refused(tmp_path: Path, change: dict[str, Any], message: str):
    Log(50).write(tmp_path / "x")
    rewrite(tmp_path / "x/index.json", **change)
    with pytest.raises(StrettoError, match=message):
        ClickFolder(tmp_path / "x")


@pytest.mark.parametrize(
    "name", ["dense.bin", "labels.bin", "ids.bin", "lengths.bin", "offsets.bin", "index.json"]
)
def test_damage_is_seen(tmp_path: Path, name: str):
    Log(50, (None, 1, 1)).write(tmp_path / "x")
    path = tmp_path / "x" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(StrettoError, match="corrupt"):
        ClickFolder(tmp_path / "x")
    path.write_bytes(data[:-1])
    with pytest.raises(StrettoError, match=r"truncated|corrupt"):
        ClickFolder(tmp_path / "x")
    path.unlink()
    with pytest.raises(StrettoError, match=r"missing|not a click folder"):
        ClickFolder(tmp_path / "x")
