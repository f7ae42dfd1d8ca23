"""From files to a click folder: against plain Python, stopped and gone on with, malformed lines by policy."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from clicks_logs import log_lines, slow_dense, slow_row, slow_vocabulary
from stretto.errors import StrettoError
from stretto.recommender.clicks import build as building
from stretto.recommender.clicks import criteo, raw
from stretto.recommender.clicks.build import ClickBuildProgress, Settings, build
from stretto.recommender.clicks.folder import ClickFolder, ClickSamples
from stretto.recommender.clicks.index import _crc32
from stretto.recommender.clicks.synthetic.files import write
from stretto.recommender.clicks.synthetic.spec import SyntheticFeature, SyntheticSpec
from stretto.recommender.clicks.tabular import ColumnNames, ParquetReader


@pytest.fixture
def days(tmp_path: Path) -> list[Path]:
    """Three days, one of them packed, with lines that end in two ways."""
    folder = tmp_path / "days"
    folder.mkdir()
    paths = [folder / "day_2", folder / "day_10.gz", folder / "day_11"]
    for day, path in enumerate(paths):
        data = ("\r\n" if day == 2 else "\n").join(log_lines(300, seed=day)).encode()
        path.write_bytes(gzip.compress(data) if path.suffix else data)
    return paths


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, often saved; the machine will not lose its power."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(raw, "BLOCK", 7000)
    blocks = raw.line_blocks
    monkeypatch.setattr(criteo, "line_blocks", lambda path, start, line: blocks(path, start, line, 7000))
    monkeypatch.setattr(building, "COUNTED_LINES", 60)
    monkeypatch.setattr(building, "WRITTEN_LINES", 60)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("threshold", [1, 4])
def test_against_plain_python(days: list[Path], tmp_path: Path, threshold: int):
    folder = build(days[0].parent, tmp_path / "out", Settings(threshold=threshold))
    fields = [line.split("\t") for day in range(3) for line in log_lines(300, seed=day)]
    vocabularies = slow_vocabulary([[f[14 + i] for f in fields] for i in range(26)], threshold)
    batch = folder.arrays.gather(np.arange(900))
    assert batch.labels.tolist() == [int(f[0]) for f in fields]
    rows = [[slow_row(vocabulary, f[14 + i]) for f in fields] for i, vocabulary in enumerate(vocabularies)]
    assert batch.ids.ids.reshape(26, 900).tolist() == rows
    dense = [[slow_dense(n) for n in f[1:14]] for f in fields]
    np.testing.assert_allclose(batch.dense.numpy(), dense, rtol=1e-6)
    assert folder.index.parts == [("day_2", 300), ("day_10.gz", 300), ("day_11", 300)]
    assert folder.index.lines == {"read": 900, "kept": 900, "blank": 0, "malformed": 0}
    assert list(folder.table_rows().values()) == [len(vocabulary) + 2 for vocabulary in vocabularies]
    for i, name in enumerate(folder.table_rows()):
        popularity = folder.popularity()[name]
        counts = sorted(np.unique(rows[i], return_counts=True)[1].tolist(), reverse=True)
        assert (popularity.hot, popularity.lookups, popularity.ids) == (1, 900, len(counts))
        assert popularity.buckets[0] == (1, counts[0] / 900)


@pytest.mark.parametrize(
    "settings", [Settings(kind="hash", rows=40), Settings(kind="raw"), Settings(flags=True)]
)
def test_what_serves_is_what_made_the_folder(days: list[Path], tmp_path: Path, settings: Settings):
    folder = build(days, tmp_path / "out", settings)
    lines = [line for day in range(3) for line in log_lines(300, seed=day)]
    served = "\n".join(line[2:] for line in lines).encode()
    transform = ClickFolder(tmp_path / "out").transform
    assert transform is not None
    batch = transform.batch(criteo.parse(served, labelled=False).chunk)
    stored = folder.arrays.gather(np.arange(900))
    assert batch.ids.ids.equal(stored.ids.ids)
    assert batch.dense.equal(stored.dense)
    assert folder.numbers == transform.numbers


@pytest.mark.parametrize(
    "settings", [Settings(threshold=2), Settings(kind="hash", rows=9), Settings(kind="raw")]
)
def test_lists_of_parquet_are_jagged(tmp_path: Path, settings: Settings):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = {
        "label": [0, 1, 1, 0, 1] * 8,
        "C1": [7, 7, None, 9, 8] * 8,
        "C2": [["a", "b"], [], None, ["a", None, "c"], ["b"]] * 8,
        "I1": [1.0, None, 2.0, 3.0, 4.0] * 8,
    }
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table(rows), path)
    folder = build(path, tmp_path / "out", settings)
    assert [feature.hot for feature in folder.features] == [1, None]
    stored = folder.arrays.gather(np.arange(40))
    assert stored.ids.lengths.tolist() == [[1] * 40, [2, 0, 0, 3, 1] * 8]
    if settings.kind == "vocabulary":  # of ids as frequent, 8 is before 9; a and b stand by their keys
        a, b = stored.ids.ids[40:42].tolist()
        assert {a, b} == {2, 3}
        assert stored.ids.ids.tolist() == [2, 2, 0, 4, 3] * 8 + [a, b, a, 0, 4, b] * 8
    assert folder.popularity()["C2"].hot == 6 / 5
    transform = ClickFolder(tmp_path / "out").transform
    assert transform is not None
    (piece,) = ParquetReader(path, ColumnNames()).read(path)
    served = transform.batch(piece.parsed.chunk)
    assert served.ids.ids.equal(stored.ids.ids)
    assert served.ids.lengths.equal(stored.ids.lengths)
    assert served.labels.equal(stored.labels)


@pytest.mark.parametrize("settings", [Settings(threshold=2), Settings(kind="hash", rows=40)])
def test_stopped_anywhere_it_goes_on_to_the_same_bytes(days: list[Path], tmp_path: Path, settings: Settings):
    seen = list[ClickBuildProgress]()
    build(days, tmp_path / "whole", settings, progress=seen.append)
    uninterrupted, stops = content(tmp_path / "whole"), len(seen)
    assert len({at.stage for at in seen}) == (2 if settings.kind == "vocabulary" else 1)
    assert stops > 20
    polls, least = 0, 0

    def stop(at: ClickBuildProgress) -> None:
        nonlocal polls
        polls += 1
        if polls == least:
            raise KeyboardInterrupt

    for first in range(1, stops, 9):
        polls, least = 0, first
        with pytest.raises(KeyboardInterrupt):
            build(days, tmp_path / "out", settings, progress=stop)
        assert not (tmp_path / "out").exists()
        polls, least = 0, -1
        build(days, tmp_path / "out", settings, progress=stop)
        assert polls < stops or first == 1
        assert content(tmp_path / "out") == uninterrupted
        for path in (tmp_path / "out").iterdir():
            path.unlink()
        (tmp_path / "out").rmdir()
    assert {path.name for path in tmp_path.iterdir()} == {"days", "whole"}


def test_stopped_again_and_again_it_ends(days: list[Path], tmp_path: Path):
    build(days, tmp_path / "whole", Settings(threshold=2))
    lives = 0
    while not (tmp_path / "out").exists():
        polls = 0

        def stop(at: ClickBuildProgress) -> None:
            nonlocal polls
            polls += 1
            if polls == 5:
                raise KeyboardInterrupt

        lives += 1
        assert lives < 60
        try:
            build(days, tmp_path / "out", Settings(threshold=2), progress=stop)
        except KeyboardInterrupt:
            continue
    assert lives > 5
    assert content(tmp_path / "out") == content(tmp_path / "whole")


KILLED = """
import sys, time
from stretto.recommender.clicks import build as building, criteo, raw
blocks = raw.line_blocks
criteo.line_blocks = lambda path, start, line: blocks(path, start, line, 7000)
building.COUNTED_LINES = building.WRITTEN_LINES = 60
def told(at):
    print(at.stage, at.lines, flush=True)
    time.sleep(0.01)
building.build(sys.argv[2:], sys.argv[1], building.Settings(threshold=2), progress=told)
"""


def test_killed_it_goes_on_to_the_same_bytes(days: list[Path], tmp_path: Path):
    build(days, tmp_path / "whole", Settings(threshold=2))
    command = [sys.executable, "-c", KILLED, str(tmp_path / "out"), *map(str, days)]
    for stage in ("count ids", "write samples"):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
            assert process.stdout
            for line in process.stdout:
                if line.startswith(stage) and int(line.split()[-1]) > 500:
                    process.send_signal(signal.SIGKILL)
                    break
        assert not (tmp_path / "out").exists()
    (left,) = tmp_path.glob(".out.*.build")
    assert (left / "state.json").exists()
    seen = list[ClickBuildProgress]()
    build(days, tmp_path / "out", Settings(threshold=2), progress=seen.append)
    assert {at.stage for at in seen} == {"write samples"}
    assert seen[0].lines > 400
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_it_is_kept_until_something_changes(days: list[Path], tmp_path: Path):
    seen = list[ClickBuildProgress]()
    first = build(days, tmp_path / "out", progress=seen.append).index.key
    seen.clear()
    assert build(days, tmp_path / "out", progress=seen.append).index.key == first
    assert not seen
    keys = {first, build(days, tmp_path / "out", Settings(threshold=3)).index.key}
    keys.add(build(days[:2], tmp_path / "out", replace=True).index.key)
    time.sleep(0.01)
    os.utime(days[0])
    keys.add(build(days, tmp_path / "out", replace=True).index.key)
    assert len(keys) == 4


def spoilt(path: Path, lines: list[str], at: int, line: str) -> Path:
    path.write_text("\n".join([*lines[:at], line, *lines[at:]]))
    return path


def test_a_malformed_line_is_skipped_and_told(tmp_path: Path):
    lines = log_lines(300)
    path = spoilt(tmp_path / "log", lines, 200, "1\tx")
    folder = build(path, tmp_path / "out")
    assert folder.index.lines == {"read": 301, "kept": 300, "blank": 0, "malformed": 1}
    assert folder.index.extra["malformed"] == [[str(path), 201, "2 columns, not 40"]]
    (tmp_path / "clean").write_text("\n".join(lines))
    clean = build(tmp_path / "clean", tmp_path / "other")
    assert (tmp_path / "out/ids.bin").read_bytes() == (tmp_path / "other/ids.bin").read_bytes()
    assert clean.popularity() == folder.popularity()


@pytest.mark.parametrize("kind", ["vocabulary", "raw"])
def test_a_malformed_line_is_fatal_where_it_shall_be(tmp_path: Path, kind: str):
    path = spoilt(tmp_path / "log", log_lines(300), 200, "2" + log_lines(1)[0][1:])
    with pytest.raises(StrettoError, match=f"{path}, line 201: label '2', not 0 or 1"):
        build(path, tmp_path / "out", Settings(kind=kind, on_error="fatal"))  # pyright: ignore[reportArgumentType]
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_too_many_malformed_lines_are_fatal(tmp_path: Path):
    lines = log_lines(300)
    (tmp_path / "log").write_text("\n".join(lines + ["x"] * 101))
    with pytest.raises(
        StrettoError, match=r"101 of 401 lines are malformed; the first: .*line 301: 1 column,"
    ) as caught:
        build(tmp_path / "log", tmp_path / "out")
    assert "100 are left out, or 1% of all if more" in str(caught.value.hint)
    (tmp_path / "log").write_text("x\ny\n")
    with pytest.raises(StrettoError, match=r"no samples: .*line 1: 1 column,"):
        build(tmp_path / "log", tmp_path / "out")
    (tmp_path / "log").write_text("\n\n")
    with pytest.raises(StrettoError, match="log: no samples"):
        build(tmp_path / "log", tmp_path / "out")


def test_only_a_click_folder_is_replaced(days: list[Path], tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").touch()
    with pytest.raises(StrettoError, match=r"other files \(thesis.tex\)"):
        build(days, tmp_path / "out")
    with pytest.raises(StrettoError, match="is a file"):
        build(days, tmp_path / "out/thesis.tex")


def test_a_damaged_gzip_file_is_told(days: list[Path], tmp_path: Path):
    days[1].write_bytes(days[1].read_bytes()[:-2000])
    with pytest.raises(StrettoError, match=r"day_10.gz: damaged gzip"):
        build(days, tmp_path / "out")


def test_a_log_of_any_length_takes_the_same_memory(tmp_path: Path):
    """Three times the lines, no more memory: measured on what numpy and Python allocate."""
    import tracemalloc

    peaks = list[int]()
    for times in (3, 9):
        (tmp_path / "log").write_text("\n".join(log_lines(300) * times))
        tracemalloc.start()
        build(tmp_path / "log", tmp_path / f"out{times}", Settings(kind="hash", rows=100))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0] + 1e6


def test_files_that_are_named_so_are_held_out_and_in_no_vocabulary(tmp_path: Path):
    lines = log_lines(90, seed=5)
    for name, part in (("valid", lines[:30]), ("train", lines[30:]), ("empty", [])):
        (tmp_path / f"{name}.txt").write_text("\n".join(part) or "\n")
    sources = [tmp_path / f"{name}.txt" for name in ("valid", "train", "empty")]
    folder = build(sources, tmp_path / "named", Settings(threshold=1))
    assert folder.index.parts == [("train.txt", 60), ("empty.txt", 0), ("valid.txt", 30)]
    assert folder.index.held_parts == 1
    train, valid = (
        ClickSamples(folder, split, held_out="named", shuffle=False) for split in ("train", "valid")
    )
    labels = [int(line[0]) for line in lines]
    assert train.batch(0, 60).labels.tolist() == labels[30:]
    assert valid.batch(0, 30).labels.tolist() == labels[:30]
    rows = [len(column) for column in slow_vocabulary(list(zip(*fields(lines[30:]), strict=True))[14:], 1)]
    assert [feature.rows for feature in folder.features] == [2 + many for many in rows]
    mixed = build(sources, tmp_path / "share", Settings(threshold=1, split="share"))
    assert [name for name, _ in mixed.index.parts] == ["valid.txt", "train.txt", "empty.txt"]
    assert mixed.index.held_parts == 0
    assert build(sources[:1], tmp_path / "alone", Settings(threshold=1)).index.held_parts == 0


def fields(lines: list[str]) -> list[list[str]]:
    return [line.split("\t") for line in lines]


def test_a_folder_from_before_named_parts_is_read(days: list[Path], tmp_path: Path):
    index = build(days[0], tmp_path / "out", Settings(kind="raw")).index
    body = json.loads(index.to_bytes())
    del body["crc32"], body["held_parts"]
    (tmp_path / "out" / "index.json").write_text(json.dumps({**body, "crc32": _crc32(body)}))
    assert ClickFolder(tmp_path / "out").index == index


def test_the_clicks_of_another_source_are_replaced_only_if_asked_for(days: list[Path], tmp_path: Path):
    first = build(days[:1], tmp_path / "out", Settings(kind="raw")).index.key
    with pytest.raises(StrettoError, match=r"out: holds the clicks of .*day_2") as caught:
        build(days[1:], tmp_path / "out", Settings(kind="raw"))
    assert "--force" in str(caught.value.hint)
    with pytest.raises(StrettoError, match="holds the clicks of"):
        write(SyntheticSpec(features=(SyntheticFeature(name="C1", rows=5),), samples=10), tmp_path / "out")
    assert ClickFolder(tmp_path / "out").index.key == first
    other = build(days[1:], tmp_path / "out", Settings(kind="raw"), replace=True)
    assert other.index.key != first


def test_a_folder_stands_for_all_files_below_it(tmp_path: Path):
    for name in ("valid/part_0", "train/part_10", "train/part_9", ".old/part_0"):
        (tmp_path / "log" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "log" / name).write_text("\n".join(log_lines(3)))
    index = build(tmp_path / "log", tmp_path / "out", Settings(kind="raw")).index
    assert index.parts == [("part_9", 3), ("part_10", 3), ("part_0", 3)]
    assert index.held_parts == 1
