"""Pieces of a recommender's run without ranks: parts of batches, clicks, placements, what is told."""

from __future__ import annotations

import json
import math
from io import StringIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recommender_job import config_of, folder_of
from stretto.errors import StrettoError
from stretto.recommender.clicks.batch import ClickBatch
from stretto.recommender.clicks.synthetic.files import write
from stretto.recommender.clicks.synthetic.log import SyntheticClicks
from stretto.recommender.clicks.synthetic.spec import SyntheticFeature, SyntheticSpec
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.placement import TablePlacement
from stretto.recommender.planner.placement_file import read_placements
from stretto.recommender.train.clicks import (
    ClickData,
    check_held_out,
    prepare_clicks,
    rank_slice,
    synthetic_spec,
)
from stretto.recommender.train.engine import Recommender
from stretto.recommender.train.evaluate import ClickEvaluation
from stretto.recommender.train.placement import file_text, from_json, place, to_json
from stretto.recommender.train.report import SAMPLES, ClickEval, ClickStep, banner, eval_line, step_line
from stretto.recommender.train.resume import changed_clicks
from stretto.run.train.metrics import Metrics, read_lines


@given(st.integers(0, 1000), st.integers(1, 40))
def test_parts_tile_a_batch_as_evenly_as_they_go(count: int, world: int) -> None:
    parts = [rank_slice(count, rank, world) for rank in range(world)]
    assert [i for start, stop in parts for i in range(start, stop)] == list(range(count))
    sizes = [stop - start for start, stop in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_synthetic_clicks_are_of_the_models_tables(tmp_path: Path) -> None:
    config = config_of(tmp_path, "model.tables=[{rows: 7, hot: 2}, {rows: 11, pooling: mean}]")
    data = prepare_clicks(config)
    assert (data.samples, data.held_out) == (2000, 200)
    batch = data.open("train").batch(0, 50, (10, 30))
    assert batch.dense.shape == (20, 13)
    assert batch.ids.counts() == [40, 20]
    assert int(batch.ids.ids[:40].max()) < 7
    assert int(batch.ids.ids[40:].max()) < 11
    expected = data.open("train").batch(0, 50).part(10, 30)
    assert torch.equal(expected.ids.ids, batch.ids.ids)
    assert torch.equal(expected.labels, batch.labels)
    json.dumps(data.identity)


def test_a_click_folder_gives_rows_names_and_ids_of_a_sample(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "clicks")
    config = config_of(tmp_path, "model.tables=null", f"data.source={source}", "model.dense=3")
    data = prepare_clicks(config)
    assert [(t.name, t.rows) for t in data.tables] == [("user", 50), ("tags", 9)]
    assert data.tables[1].hot == pytest.approx(1.5, abs=0.2)
    assert (data.samples, data.held_out) == (300, 30)
    train, valid = (data.open(split) for split in ("train", "valid"))
    assert (len(train), len(valid)) == (270, 30)
    again = data.open("valid").batch(0, 30)
    assert torch.equal(valid.batch(0, 30).dense, again.dense)
    with pytest.raises(StrettoError, match="has 3 numbers a sample"):
        prepare_clicks(config_of(tmp_path, "model.tables=null", f"data.source={source}"))
    with pytest.raises(StrettoError, match="2 categorical features"):
        prepare_clicks(
            config_of(
                tmp_path,
                "model.rows=[4]",
                "model.tables=null",
                f"data.source={source}",
                "model.dense=3",
            )
        )


def criteo_lines(samples: int) -> str:
    rng = np.random.default_rng(1)
    numbers = rng.integers(-2, 90, (samples, 13))
    categories = rng.integers(0, 30, (samples, 26))
    lines = [
        "\t".join([str(i % 2), *map(str, numbers[i]), *(f"{word:08x}" for word in categories[i])])
        for i in range(samples)
    ]
    return "\n".join(lines) + "\n"


def test_a_token_folder_is_refused_as_such(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    folder.mkdir()
    for name in ("index.json", "tokens.bin"):
        (folder / name).write_text("{}")
    with pytest.raises(StrettoError, match="tokens: a token folder, which is the data of a language model"):
        prepare_clicks(config_of(tmp_path, "model.tables=null", f"data.source={folder}"), quiet=True)


def test_files_of_a_log_become_a_folder_once(tmp_path: Path) -> None:
    log = tmp_path / "day_0"
    log.write_text(criteo_lines(400))
    names = [
        f"data.source={log}",
        f"data.cache={tmp_path / 'cache'}",
        "model.tables=null",
        "data.threshold=2",
    ]
    config = config_of(tmp_path, *names)
    data = prepare_clicks(config, quiet=True)
    assert data.path is not None
    assert data.path.parent == tmp_path / "cache"
    assert (len(data.tables), data.samples) == (26, 400)
    modified = (data.path / "index.json").stat().st_mtime_ns
    assert prepare_clicks(config, quiet=True).path == data.path
    assert (data.path / "index.json").stat().st_mtime_ns == modified
    other = prepare_clicks(config_of(tmp_path, *names, "data.hash_rows=20"), quiet=True)
    assert other.path != data.path
    assert {table.rows for table in other.tables} == {20}


def test_files_may_keep_ids_as_they_are_and_say_which_numbers_were_missing(tmp_path: Path) -> None:
    log = tmp_path / "day_0"
    log.write_text("1\t" + "\t".join(["", *["3"] * 12, "ffffffff", *["0000000a"] * 25]) + "\n")
    names = [f"data.source={log}", f"data.cache={tmp_path / 'cache'}", "data.valid=0", "eval.every=null"]
    tables = "model.tables=[" + ", ".join(["{rows: 5, ids: hash}"] * 26) + "]"
    config = config_of(tmp_path, *names, tables, "data.raw=true", "data.missing_flags=true", "model.dense=26")
    batch = prepare_clicks(config, quiet=True).open("train").batch(0, 1)
    assert batch.ids.ids.tolist() == [2**32, *[11] * 25]
    assert batch.dense[0, 13:].tolist() == [1.0, *[0.0] * 12]


def test_columns_of_a_log_have_any_names(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("clicked,age,item\n1,30,a\n0,40,b\n1,,a\n")
    names = [f"data.source={log}", f"data.cache={tmp_path / 'cache'}", "data.valid=0", "eval.every=null"]
    columns = "data.columns={label: clicked, numbers: [age], features: [item]}"
    config = config_of(tmp_path, *names, columns, "data.threshold=1", "model.tables=null", "model.dense=1")
    data = prepare_clicks(config, quiet=True)
    assert [(t.name, t.rows) for t in data.tables] == [("item", 4)]
    assert data.samples == 3


def csv_log(folder: Path, **parts: str) -> str:
    """A log of files with two samples of each id, as a value of data.source."""
    folder.mkdir()
    for name, ids in parts.items():
        (folder / f"{name}.csv").write_text("label,I1,C1\n" + "".join(f"1,2,{i}\n0,,{i}\n" for i in ids))
    return f"data.source={folder}"


def test_files_named_valid_are_never_trained_on(tmp_path: Path) -> None:
    names = [csv_log(tmp_path / "log", valid="ab", train="bcd"), f"data.cache={tmp_path / 'cache'}"]
    names += ["data.threshold=1", "model.tables=null", "model.dense=1"]
    config = config_of(tmp_path, *names)
    data = prepare_clicks(config, quiet=True)
    assert (data.samples, data.held_out) == (10, 4)
    assert data.notes == ("held out: valid.csv (by name; data.valid is not used)",)
    train, valid = (data.open(split) for split in ("train", "valid"))
    seen = [set(part.batch(0, len(part)).ids.ids.tolist()) for part in (train, valid)]
    assert [len(part) for part in (train, valid)] == [6, 4]
    assert seen == [
        {2, 3, 4},
        {1, 3},
    ]  # b, c and d have rows; a, which only valid.csv has, is of the rare ones
    shared = prepare_clicks(config_of(tmp_path, *names, "data.split=share", "data.valid=0.2"), quiet=True)
    assert (shared.path != data.path, shared.held_out) == (True, 2)
    assert shared.notes == ("held out: the last 0.2 of the log (data.valid)",)
    last = prepare_clicks(config_of(tmp_path, *names, "data.split=last-part"), quiet=True)
    assert (last.held_out, last.notes) == (4, ("held out: valid.csv (the last file)",))
    assert "held out: valid.csv" in banner(config, data, place(config, data))


def test_tables_with_fewer_rows_than_ids_are_listed(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "clicks")
    names = ["model.tables=null", f"data.source={source}", "model.dense=3"]
    (note,) = prepare_clicks(config_of(tmp_path, *names)).notes
    assert note == "held out: the last 0.1 of the log (data.valid): no file is held out by its name"
    _, note = prepare_clicks(config_of(tmp_path, *names, "model.max_rows=20")).notes
    assert note == "tables with fewer rows than ids, which share rows modulo: user 20 for 50"


def test_what_changes_the_samples_of_a_resumed_run_is_named(tmp_path: Path) -> None:
    names = [csv_log(tmp_path / "log", train="abcd", valid="ab"), f"data.cache={tmp_path / 'cache'}"]
    names += ["data.threshold=1", "model.tables=null", "model.dense=1"]

    def same(*more: str) -> dict[str, Any]:
        return prepare_clicks(config_of(tmp_path, *names, *more), quiet=True).identity

    before = same()
    assert changed_clicks(before, same()) is None
    folder = f"data.source={prepare_clicks(config_of(tmp_path, *names), quiet=True).path}"
    assert changed_clicks(before, same(folder)) is None
    assert "the held-out samples" in str(changed_clicks(before, same(folder, "data.split=share")))
    assert "the order of the samples" in str(changed_clicks(before, same("data.shuffle=false")))
    assert "the order of the samples" in str(changed_clicks(before, same("data.block=2")))
    assert changed_clicks(before, {**before, "samples": 1}) == "the clicks"
    older = {name: before[name] for name in ("samples", "positives", "crc32")}
    assert changed_clicks(older, same("data.block=2")) is None
    assert same("data.threshold=4")["transform"] != before["transform"]


def test_a_part_without_samples_is_told(tmp_path: Path) -> None:
    config = config_of(tmp_path, "data.synthetic.samples=9", "data.valid=0.01")
    with pytest.raises(StrettoError, match="none is held out"):
        check_held_out(prepare_clicks(config), evaluates=config.eval.every is not None)


class Constant:
    """A model that says the same of every sample."""

    def predict(self, batch: ClickBatch) -> torch.Tensor:
        return torch.full((batch.samples,), -1.0)


def evaluation(config: RecommenderConfig, data: ClickData) -> ClickEvaluation:
    return ClickEvaluation(
        data, cast("Recommender", Constant()), batch=config.batch.global_size, limit=config.eval.batches
    )


def test_an_evaluation_knows_the_best_on_its_very_samples(tmp_path: Path) -> None:
    config = config_of(tmp_path, "eval.batches=1000", "batch.global_size=7")
    data = prepare_clicks(config)
    record = evaluation(config, data).run(5)
    best = SyntheticClicks(synthetic_spec(config.data, config.model.numbers, data.tables), "valid").best()
    assert (record.step, record.samples, record.auc) == (5, 200, 0.5)
    assert (record.best_entropy, record.best_auc) == (pytest.approx(best.entropy), best.auc)
    p = 1 / (1 + math.e)
    rate = record.positives / 200
    assert record.logloss == pytest.approx(-rate * math.log(p) - (1 - rate) * math.log(1 - p))
    fewer = config_of(tmp_path, "eval.batches=3", "batch.global_size=7")
    assert evaluation(fewer, data).run(0).samples == 21


def test_a_folder_of_synthetic_clicks_says_the_best_where_all_of_it_is_seen(tmp_path: Path) -> None:
    spec = SyntheticSpec(
        features=(SyntheticFeature(name="C1", rows=30), SyntheticFeature(name="C2", rows=9, hot=2)),
        samples=400,
    )
    write(spec, tmp_path / "clicks")
    overrides = ["model.tables=null", f"data.source={tmp_path / 'clicks'}", "batch.global_size=10"]
    for batches, expected in ((4, SyntheticClicks(spec, "valid").best().entropy), (3, None)):
        config = config_of(tmp_path, *overrides, f"eval.batches={batches}")
        data = prepare_clicks(config)
        assert evaluation(config, data).run(1).best_entropy == expected


def test_the_plan_places_every_table_and_its_file_is_taken_back(tmp_path: Path) -> None:
    tables = "model.tables=[{rows: 700}, {rows: 11, ids: hash}, {rows: 90, ids: quotient-remainder}]"
    config = config_of(tmp_path, tables, "tables.placement=auto", "layout.ranks=3")
    data = prepare_clicks(config)
    placed = place(config, data)
    assert list(placed) == ["C1", "C2", "C3.quotient", "C3.remainder"]
    assert from_json(json.loads(json.dumps(to_json(placed)))) == placed
    path = tmp_path / "placement.yaml"
    path.write_text(file_text(config.layout, placed))
    assert read_placements(path, 3) == placed
    assert place(config_of(tmp_path, tables, f"tables.placement={path}", "layout.ranks=3"), data) == placed


def test_a_plan_that_has_no_room_says_so(tmp_path: Path) -> None:
    rows = ["model.tables=null", "model.rows=[100000000, 5]", "tables.place=device"]
    config = config_of(tmp_path, *rows, "tables.placement=auto", "tables.device_gib=0.5")
    with pytest.raises(StrettoError, match=r"table C1 .* does not fit"):
        place(config, prepare_clicks(config))


def test_the_banner_says_what_is_trained_and_where_tables_lie(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    data = prepare_clicks(config)
    text = banner(config, data, {"C1": TablePlacement("row", (0, 1)), "C2": TablePlacement("table", (1,))})
    assert "2 tables" in text
    assert "2.00 k samples, 200 of them held out" in text.replace("2 k", "2.00 k")
    assert any(line.split()[:5] == ["C1", "40", "8", "row", "all"] for line in text.splitlines())
    assert any(line.split()[:5] == ["C2", "60", "8", "table", "1"] for line in text.splitlines())


def test_records_are_told_in_a_line() -> None:
    step = ClickStep(
        step=10,
        loss=0.5,
        grad_norm=1.25,
        lr=1e-3,
        lr_tables=2e-2,
        samples=20480,
        epoch=0.4213,
        samples_per_s=81234.4,
        step_time_s=0.02,
    )
    assert step_line(step, 300) == (
        "step 10/300 | epoch 0.42 | loss 0.5000 | grad_norm 1.250 | lr 1.0e-03, of tables 2.0e-02 | "
        "0.02 s/step | samples/s 81234"
    )
    record = ClickEval(
        step=10,
        auc=0.75,
        logloss=0.48,
        entropy=0.85,
        calibration=1.01,
        samples=100,
        positives=20,
        seconds=0.5,
        auc_error=0.0,
        best_auc=0.8,
        best_logloss=0.4,
        best_entropy=0.8,
    )
    assert record.gap == pytest.approx(0.0625)
    best = "(best possible 0.8000, 6.2% above it)"
    line = f"eval 10/300 | AUC 0.7500 | logloss 0.4800 | entropy 0.8500 {best} | calibration 1.010"
    assert eval_line(record, 300) == line
    nothing = ClickEval(
        step=1, auc=None, logloss=0.1, entropy=None, calibration=None, samples=3, positives=0, seconds=0.1
    )
    assert eval_line(nothing, 2) == "eval 1/2 | AUC none | logloss 0.1000 | entropy none"
    assert nothing.as_dict()["gap"] is None


def test_numbers_go_to_the_files_and_the_terminal(tmp_path: Path) -> None:
    out = StringIO()
    with Metrics(tmp_path, steps=4, every=2, out=out, log_format=SAMPLES) as metrics:
        for step in range(1, 5):
            metrics.step(
                ClickStep(
                    step=step,
                    loss=0.5,
                    grad_norm=None,
                    lr=1e-3,
                    lr_tables=2e-2,
                    samples=10 * step,
                    epoch=step / 4,
                    samples_per_s=1e4,
                    step_time_s=0.1,
                )
            )
        metrics.evaluation(
            ClickEval(
                step=4,
                auc=0.7,
                logloss=0.5,
                entropy=0.9,
                calibration=1.0,
                samples=10,
                positives=3,
                seconds=0.1,
            )
        )
    assert [line.split(" |")[0] for line in out.getvalue().splitlines()] == [
        *("step 1/4", "step 2/4", "step 4/4", "eval 4/4"),
    ]
    assert [row["samples"] for row in read_lines(tmp_path / "metrics.jsonl")] == [10, 20, 30, 40]
    assert next(read_lines(tmp_path / "eval.jsonl"))["auc"] == 0.7


def test_tables_are_placed_by_the_planner_when_nothing_overlaps(tmp_path: Path) -> None:
    config = config_of(tmp_path, "tables.placement=auto", "tables.overlap=false")
    assert place(config, prepare_clicks(config)).keys() == {"C1", "C2"}
