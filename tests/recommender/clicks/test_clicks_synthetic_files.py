from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stretto.errors import StrettoError
from stretto.recommender.clicks.build import Settings, build
from stretto.recommender.clicks.folder import ClickFolder, ClickSamples
from stretto.recommender.clicks.synthetic import files as synthetic_files
from stretto.recommender.clicks.synthetic import log as synthetic_log
from stretto.recommender.clicks.synthetic.files import METADATA, write
from stretto.recommender.clicks.synthetic.log import SyntheticLog
from stretto.recommender.clicks.synthetic.spec import SyntheticFeature, SyntheticSpec, geometric_features
from stretto.recommender.clicks.synthetic.truth import MISSING
from stretto.recommender.clicks.writer import ClickWriter

SPEC = SyntheticSpec(features=geometric_features(26, 5, 300), samples=600, valid=0.25, seed=2)
VARYING = (
    SyntheticFeature(name="a", rows=50, hot=2.5, varying=True),
    SyntheticFeature(name="b", rows=9),
    SyntheticFeature(name="c", rows=20, hot=3),
)


@pytest.fixture(autouse=True)
def _few_samples_for_the_bias(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(synthetic_log, "_BIAS_SAMPLES", 500)


def content(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.iterdir()}


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, features=VARYING, dense=2)])
def test_a_folder_holds_what_the_stream_gives(tmp_path: Path, spec: SyntheticSpec):
    written = write(spec, tmp_path / "clicks")
    folder, log = ClickFolder(tmp_path / "clicks"), SyntheticLog(spec)
    samples = ClickSamples(folder, "all", shuffle=False).batch(0, 600)
    expected = log.batch(0, 600)
    assert torch.equal(samples.dense, expected.dense)
    assert torch.equal(samples.labels, expected.labels)
    assert torch.equal(samples.ids.ids, expected.ids.ids)
    assert torch.equal(samples.ids.lengths, expected.ids.lengths)
    assert folder.index.parts == [("train", 450), ("valid", 150)]
    assert folder.table_rows() == {feature.name: feature.rows for feature in spec.features}
    assert written.best == folder.index.extra["best"]
    assert written.best["valid"] == log.best("valid").as_dict()
    assert written.best["train"]["samples"] == 450
    assert written.bytes == sum(
        len(data) for name, data in content(folder.path).items() if name != "index.json"
    )


def test_a_folder_of_the_same_spec_is_kept(tmp_path: Path):
    first = write(SPEC, tmp_path / "clicks")
    again = write(SPEC, tmp_path / "clicks")
    assert (first.reused, again.reused) == (False, True)
    assert replace(again, reused=False) == first
    other = write(replace(SPEC, seed=3), tmp_path / "clicks")
    assert not other.reused
    assert other.best != first.best


def test_a_writing_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(synthetic_log, "CHUNK_IDS", 26 * 50)
    write(SPEC, tmp_path / "whole")
    monkeypatch.setattr(synthetic_files, "SAVED", 100)

    class Killed(BaseException):
        pass

    for stop in (270, 430, 520):

        def report(done: int, total: int, stop: int = stop) -> None:
            assert total == 600
            if done >= stop:
                raise Killed

        with pytest.raises(Killed):
            write(SPEC, tmp_path / "stopped", report=report)
        assert not (tmp_path / "stopped").exists()
    written = list[int]()
    real = ClickWriter.add

    def count(writer: ClickWriter, dense: Any, labels: Any, *ids: Any) -> None:
        written.append(len(labels))
        real(writer, dense, labels, *ids)

    monkeypatch.setattr(ClickWriter, "add", count)
    resumed = write(SPEC, tmp_path / "stopped")
    assert sum(written) < 200
    assert content(tmp_path / "stopped") == content(tmp_path / "whole")
    assert resumed.best == write(SPEC, tmp_path / "whole").best


def test_text_is_read_back_as_the_same_samples(tmp_path: Path):
    written = write(SPEC, tmp_path / "text", "criteo")
    assert sorted(each.name for each in (tmp_path / "text").iterdir()) == [METADATA, "train.txt", "valid.txt"]
    log = SyntheticLog(SPEC)
    assert written.best == {part: log.best(part).as_dict() for part in ("train", "valid")}
    folder = build(tmp_path / "text", tmp_path / "clicks", Settings(threshold=1, split="share"))
    assert folder.index.parts == [("train.txt", 450), ("valid.txt", 150)]
    assert folder.index.lines["malformed"] == 0
    samples, expected = ClickSamples(folder, "all", shuffle=False).batch(0, 600), log.batch(0, 600)
    assert torch.equal(samples.labels, expected.labels)
    torch.testing.assert_close(samples.dense, expected.dense, rtol=1e-6, atol=0)
    assert (samples.dense < 0).any(), "no -1 in the second column"
    read_ids, expected_ids = samples.ids.ids.view(26, 600), expected.ids.ids.view(26, 600)
    for column, other in zip(read_ids.tolist(), expected_ids.tolist(), strict=True):
        pairs = set(zip(column, other, strict=True))
        assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


def test_text_is_of_criteos_kind(tmp_path: Path):
    write(SPEC, tmp_path / "text", "criteo")
    log = SyntheticLog(SPEC)
    clicks = log.clicks(0, 450)
    raw = log.raw_numbers(clicks)
    lines = (tmp_path / "text" / "train.txt").read_text().splitlines()
    empty = np.zeros(26)
    for line, label, numbers in zip(lines, clicks.labels, raw, strict=True):
        fields = line.split("\t")
        assert len(fields) == 40
        assert fields[0] == str(int(label))
        assert fields[1:14] == ["" if value == MISSING else str(value) for value in numbers]
        assert all(not field or (len(field) == 8 and int(field, 16) >= 0) for field in fields[14:])
        empty += [not field for field in fields[14:]]
    assert (empty[0::4] > 0).all()
    assert empty.sum() == empty[0::4].sum()


def test_text_is_kept_or_replaced_and_nothing_else_is(tmp_path: Path):
    first = write(SPEC, tmp_path / "text", "criteo")
    assert write(SPEC, tmp_path / "text", "criteo").reused
    with (tmp_path / "text" / "valid.txt").open("ab") as file:
        file.write(b"more")
    with pytest.raises(StrettoError, match="exists already"):
        write(SPEC, tmp_path / "text", "criteo")
    assert first.bytes > 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    for form in ("folder", "criteo"):
        with pytest.raises(StrettoError, match="exists already"):
            write(SPEC, tmp_path / "mine", form)
    assert (tmp_path / "mine" / "notes").read_text() == "keep"
    other = write(replace(SPEC, seed=9), tmp_path / "other", "criteo")
    assert not write(SPEC, tmp_path / "other", "criteo").reused
    assert write(SPEC, tmp_path / "other", "criteo").best != other.best


@pytest.mark.parametrize(
    ("spec", "form", "error"),
    [
        (SPEC, "criteoo", "format 'criteoo'"),
        (replace(SPEC, dense=12), "criteo", "12 numbers and 26 features"),
        (replace(SPEC, features=geometric_features(25, 5, 9)), "criteo", "13 numbers and 25 features"),
        (replace(SPEC, features=geometric_features(26, 5, 9, hot=2)), "criteo", "up to 2 ids"),
    ],
)
def test_what_is_refused(tmp_path: Path, spec: SyntheticSpec, form: str, error: str):
    with pytest.raises(StrettoError, match=error):
        write(spec, tmp_path / "out", form)
    assert not (tmp_path / "out").exists()
