"""`stretto score` and `stretto evaluate` of a recommender: the model's own forward, sample by sample."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from clicks_logs import log_lines, slow_vocabulary
from recommender_job import config_of
from stretto.cli.main import run
from stretto.recommender.clicks.build import Settings, build
from stretto.recommender.clicks.criteo import parse
from stretto.recommender.clicks.transform import ClickTransform
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.serve.log import RawLog
from stretto.recommender.train.clicks import prepare_clicks
from stretto.recommender.train.engine import Recommender
from stretto.recommender.train.evaluate import Quality
from stretto.recommender.train.job import RECOMMENDER
from stretto.recommender.train.placement import place
from stretto.recommender.train.task import load_weights
from stretto.run.train.launch import run_job
from stretto.run.train.metrics import read_lines

LINES = log_lines(700, ids=30)
NEW = log_lines(150, seed=5, ids=40)  # a quarter of the ids are new


def job(folder: Path, *overrides: str) -> RecommenderConfig:
    return config_of(
        folder,
        *("model.tables=null", "model.dense=13", f"data.source={folder / 'log'}", "data.threshold=2"),
        *(f"data.cache={folder / 'cache'}", "data.valid=0.2", "eval.batches=1000", *overrides),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a Criteo log, and new logs."""
    folder = tmp_path_factory.mktemp("score")
    (folder / "log").write_text("\n".join(LINES) + "\n")
    (folder / "new").write_text("\n".join(NEW) + "\n")
    (folder / "bare").write_text("".join(line.partition("\t")[2] + "\n" for line in NEW))
    run_job(RECOMMENDER, job(folder), quiet=True)
    return folder


@pytest.fixture(scope="module")
def forward(folder: Path) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Probabilities and labels of the new log, by the model in one process."""
    config = job(folder, "layout.ranks=1", "tables.placement=table")
    data = prepare_clicks(config, quiet=True)
    model = Recommender(config, data.tables, place(config, data), fresh=False)
    load_weights(model, folder / "runs/tiny/checkpoints/step-00000006", 6)
    transform = ClickTransform.load(folder / "runs/tiny")
    batch = transform.batch(parse((folder / "new").read_bytes()).chunk)
    return model.predict(batch).sigmoid().numpy(), batch.labels.double().numpy()


def scored(capfd: pytest.CaptureFixture[str], folder: Path, *arguments: object) -> dict[str, Any]:
    assert run(["score", str(folder / "runs/tiny"), *map(str, arguments), "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def read(path: Path) -> NDArray[np.float64]:
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        return parquet.read_table(path)["probability"].to_numpy()
    return np.array([float(line) for line in path.read_text().splitlines()])


@pytest.mark.parametrize(
    ("log", "out", "layout"),
    [
        ("new", "a.csv", ("layout.ranks=1",)),
        ("bare", "a.npy", ("layout.ranks=2", "tables.placement=column")),
        ("new", "a.parquet", ("layout.ranks=3", "tables.placement=row", "batch.global_size=7")),
    ],
)
def test_probabilities_are_the_models_in_the_order_of_the_log(
    folder: Path,
    forward: tuple[NDArray[np.float64], NDArray[np.float64]],
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    log: str,
    out: str,
    layout: tuple[str, ...],
) -> None:
    report = scored(capfd, folder, folder / log, "--out", tmp_path / out, *layout)
    probabilities = read(tmp_path / out)
    assert probabilities.dtype == np.float64
    np.testing.assert_allclose(probabilities, forward[0], rtol=1e-12)
    assert (report["rows"], report["malformed"]) == (len(NEW), 0)
    assert {path.name for path in tmp_path.iterdir()} == {out}
    if log == "bare":
        assert "logloss" not in report
        return
    p, labels = forward
    logloss = -np.mean(np.log(np.where(labels == 1, p, 1 - p)))
    assert report["logloss"] == pytest.approx(logloss, rel=1e-9)
    pairs = p[labels == 1][:, None] - p[labels == 0]
    assert report["auc"] == pytest.approx(np.mean((pairs > 0) + 0.5 * (pairs == 0)), rel=1e-12)


def test_ids_that_training_did_not_see_are_counted(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    columns = list(zip(*(line.split("\t")[14:] for line in LINES), strict=True))
    vocabulary = [set(v) for v in slow_vocabulary(columns, 2)]
    new = [(value, ids) for line in NEW for value, ids in zip(line.split("\t")[14:], vocabulary, strict=True)]
    report = scored(capfd, folder, folder / "new", "layout.ranks=1")
    assert report["ids"] == sum(bool(value) for value, _ in new)
    assert report["unknown_ids"] == sum(bool(value) and value not in ids for value, ids in new)
    assert report["unknown_ids"] > 0.1 * report["ids"]


def test_a_malformed_line_ends_it_or_has_no_probability(
    folder: Path,
    forward: tuple[NDArray[np.float64], NDArray[np.float64]],
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    lines = [*NEW]
    broken = [0, 7, 8, 64, 149]
    for at in broken:
        lines[at] = "none"
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    out = tmp_path / "out.csv"
    assert run(["score", str(folder / "runs/tiny"), str(tmp_path / "log"), "--out", str(out)]) == 2
    message = capfd.readouterr().err
    assert f"{tmp_path / 'log'}, line 1: 1 column, not 40" in message
    assert "--on-error nan" in message
    assert {path.name for path in tmp_path.iterdir()} == {"log"}, "nothing is left of a pass that failed"
    options = ("--out", out, "--on-error", "nan", "batch.global_size=8")
    report = scored(capfd, folder, tmp_path / "log", *options)
    assert (report["rows"], report["malformed"]) == (145, 5)
    wanted = forward[0].copy()
    wanted[broken] = np.nan
    np.testing.assert_allclose(read(out), wanted, rtol=1e-12)


def test_a_click_folder_must_be_of_the_runs_transform(
    folder: Path,
    forward: tuple[NDArray[np.float64], NDArray[np.float64]],
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    clicks = prepare_clicks(job(folder), quiet=True).path
    assert clicks is not None
    both = [scored(capfd, folder, source, "layout.ranks=1") for source in (clicks, folder / "log")]
    for name in ("rows", "ids", "unknown_ids"):
        assert both[0][name] == both[1][name]
    assert both[0]["auc"] == pytest.approx(both[1]["auc"], rel=1e-12)
    assert both[0]["logloss"] == pytest.approx(both[1]["logloss"], rel=1e-12)
    build(folder / "new", tmp_path / "own", Settings(threshold=2))
    assert run(["score", str(folder / "runs/tiny"), str(tmp_path / "own")]) == 2
    assert "another transform made them" in capfd.readouterr().err


def test_columns_by_name_with_and_without_labels(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log, bare = tmp_path / "log.csv", tmp_path / "bare.csv"
    rows = [f"{i % 2},{i},{'abc'[i % 3]}" for i in range(60)]
    log.write_text("clicked,age,item\n" + "\n".join(rows) + "\n")
    bare.write_text("item,age\n" + "".join("{2},{1}\n".format(*row.split(",")) for row in rows))
    columns = "data.columns={label: clicked, numbers: [age], features: [item]}"
    sources = (f"data.source={log}", f"data.cache={tmp_path / 'cache'}", "batch.global_size=9")
    run_job(
        RECOMMENDER, config_of(tmp_path, *sources, columns, "model.tables=null", "model.dense=1"), quiet=True
    )
    reports = [
        scored(capfd, tmp_path, each, "--out", tmp_path / f"{each.stem}.npy", "layout.ranks=1")
        for each in (log, bare)
    ]
    assert ["auc" in each for each in reports] == [True, False]
    assert np.array_equal(np.load(tmp_path / "log.npy"), np.load(tmp_path / "bare.npy"))


def test_parts_of_a_log_are_a_batch_at_most(folder: Path) -> None:
    transform = ClickTransform.load(folder / "runs/tiny")
    log = RawLog([str(folder / "new")], transform, job(folder).data, "fatal")
    full = transform.batch(parse((folder / "new").read_bytes()).chunk)
    parts = [list(log.parts(16, rank, 3)) for rank in range(3)]
    labels = [
        batch.labels for at in zip(*parts, strict=True) for part in at if (batch := part.batch) is not None
    ]
    assert all(len(part.good) <= 16 for part in parts[0])
    assert np.array_equal(np.concatenate(labels), full.labels)
    assert parts[0][-1].done == log.total


def test_evaluate_reads_the_whole_split(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trained = list(read_lines(folder / "runs/tiny/eval.jsonl"))[-1]
    results = list[dict[str, Any]]()
    one_rank = "layout.ranks=1"
    for options in (
        (),
        (one_rank, "batch.global_size=50"),
        (one_rank, "--split", "all"),
        (one_rank, "--limit", "1"),
    ):
        assert run(["evaluate", str(folder / "runs/tiny"), *options, "--json"]) == 0
        results.append(json.loads(capfd.readouterr().out))
    full, alone, everything, first = results
    for report in (full, alone):
        assert (report["split"], report["samples"], report["step"]) == ("valid", 140, 6)
        for name in ("auc", "logloss", "entropy", "calibration"):
            assert report[name] == pytest.approx(trained[name], rel=1e-12)
    assert (everything["samples"], first["samples"]) == (700, 33)
    lines = list(read_lines(folder / "runs/tiny/eval.jsonl"))
    assert [line["split"] for line in lines[-4:]] == ["valid", "valid", "all", "valid"]


def test_evaluate_on_another_log(
    folder: Path,
    forward: tuple[NDArray[np.float64], NDArray[np.float64]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    command = ["evaluate", str(folder / "runs/tiny"), "--data"]
    assert run([*command, str(folder / "new"), "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    import torch

    quality = Quality()
    p, labels = (torch.from_numpy(each) for each in forward)
    quality.add(p.logit(), labels)
    wanted = quality.result()
    assert (report["split"], report["rows"]) == ("all", 150)
    assert report["logloss"] == pytest.approx(wanted.logloss, rel=1e-9)
    assert report["calibration"] == pytest.approx(wanted.calibration, rel=1e-9)
    assert run([*command, str(folder / "bare")]) == 2
    assert "has no labels to compare with" in capfd.readouterr().err


def test_the_run_keeps_the_transform(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """So that new clicks are scored where the log of training is gone."""
    moved = tmp_path / "runs"
    shutil.copytree(folder / "runs", moved)
    gone = tmp_path / "gone"
    overrides = (f"data.source={gone}", f"data.cache={gone}")
    report = scored(capfd, tmp_path, folder / "new", *overrides)
    assert report["rows"] == 150
    assert run(["evaluate", str(moved / "tiny"), *overrides]) == 2
    assert "there is no such file" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("new", "--out", "x.bin"), "--out x.bin: the suffix says what to write"),
        (("new", "--out", "none/x.csv"), "there is no folder none"),
        (("new", "--out", "-", "--json"), "both write to stdout"),
        (("new", "--on-error", "nann"), "did you mean 'nan'?"),
        (("absent",), "there is no such file or folder"),
        (("layout.ranks=1",), "no log is named"),
        (("log.csv",), "no column"),
    ],
)
def test_what_cannot_be_scored_says_why(
    folder: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    (folder / "log.csv").write_text("label,x\n1,2\n")
    typed = [str(folder / word) if word in ("new", "absent", "log.csv") else word for word in arguments]
    assert run(["score", str(folder / "runs/tiny"), *typed]) == 2
    assert message in capfd.readouterr().err


@pytest.mark.slow
def test_stdout_has_the_probabilities_and_nothing_else(
    folder: Path, forward: tuple[NDArray[np.float64], NDArray[np.float64]]
) -> None:
    """In a process of its own: ranks write to the stdout that their server was started with."""
    command = [sys.executable, "-c", "from stretto.cli.main import main; main()"]
    arguments = ["score", str(folder / "runs/tiny"), str(folder / "bare")]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
    out, err = done.stdout, done.stderr
    np.testing.assert_allclose([float(line) for line in out.splitlines()], forward[0], rtol=1e-12)
    assert "of the ids unknown to training" in err
    assert "150 rows in " in err
