"""A recommender's run on real ranks: the same whatever places tables, stopped, resumed, damaged, failing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recommender_job import config_of, folder_of
from stretto.engine.parallel.control import this_rank
from stretto.errors import StrettoError
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.serve.job import ScoringJob, run_pass
from stretto.recommender.train.clicks import prepare_clicks
from stretto.recommender.train.job import PRELOAD, RECOMMENDER, train_recommender_rank
from stretto.recommender.train.placement import place
from stretto.run.evaluate.trained import find_trained
from stretto.run.launch.local import RankFailed, prepare, run_ranks
from stretto.run.launch.stop import StopRequest
from stretto.run.train.launch import run_job, unused_run
from stretto.run.train.metrics import read_lines
from train_runs import around_step

pytestmark = pytest.mark.apart

Hook = tuple[int, int | None, Callable[..., None], tuple[Any, ...]]


def train(config: RecommenderConfig, *hooks: Hook) -> dict[str, Any]:
    """Run the job with hooks before steps on ranks: (step, rank or None for all, act, what it is given)."""
    prepare(PRELOAD)
    data = prepare_clicks(config, quiet=True)
    ready = (data, place(config, data))
    return run_ranks(config.layout.ranks, hooked, hooks, config, ready, stoppable=True)[0]


def hooked(hooks: tuple[Hook, ...], config: RecommenderConfig, ready: Any) -> dict[str, Any]:
    def wrapped(inner: Any, self: Any, stop: Any) -> Any:
        for step, rank, act, arguments in hooks:
            if self.progress.step + 1 == step and rank in (None, this_rank()):
                act(self, *arguments)
        return inner(self, stop)

    around_step(wrapped)
    with StopRequest() as stop:
        return train_recommender_rank(config, ready, stop, True)


def send_self(_: Any, number: int) -> None:
    os.kill(os.getpid(), number)


def fail(_: Any) -> None:
    raise KeyError("planted")


def spoil(trainer: Any) -> None:
    next(iter(trainer.task.recommender.net.parameters())).data.fill_(float("nan"))


def spoil_after(trainer: Any) -> None:
    update = trainer.task.recommender.update

    def spoiled(*arguments: Any) -> None:
        update(*arguments)
        spoil(trainer)

    trainer.task.recommender.update = spoiled


def keep_samples(trainer: Any, path: str) -> None:
    read = trainer.task.source.batch

    def batch(first: int, count: int, part: tuple[int, int]) -> Any:
        with open(f"{path}.{this_rank()}", "a", encoding="utf-8") as file:
            file.write(json.dumps([first + part[0], first + part[1]]) + "\n")
        return read(first, count, part)

    trainer.task.source.batch = batch


def keep_notes(trainer: Any, path: str) -> None:
    def note(text: str) -> None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text + "\n")

    trainer.log = trainer.task.log = note


def losses(config: RecommenderConfig) -> list[float]:
    """Loss of every step, each of which must be there once."""
    rows = list(read_lines(config.run.folder / "metrics.jsonl"))
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[RecommenderConfig, dict[str, Any]]:
    """A run of one process that nothing disturbs."""
    config = config_of(tmp_path_factory.mktemp("whole"), "layout.ranks=1", "tables.placement=table")
    return config, train(config)


def test_a_run_leaves_its_numbers_and_what_it_was(finished: tuple[RecommenderConfig, dict[str, Any]]) -> None:
    config, outcome = finished
    folder = config.run.folder
    assert (outcome["step"], outcome["stopped"]) == (6, False)
    assert outcome["loss"] == losses(config)[-1]
    assert outcome["samples_per_s"] > 0
    evals = list(read_lines(folder / "eval.jsonl"))
    assert [row["step"] for row in evals] == [3, 6]
    assert evals[-1]["samples"] == 66
    assert evals[-1]["best_entropy"] < evals[-1]["entropy"]
    assert outcome["quality"]["auc"] == evals[-1]["auc"]
    assert outcome["placement"]["C1"]["split"] == "table"
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000006",
    ]
    assert "split: table" in (folder / "placement.yaml").read_text()
    assert "family: dlrm" in (folder / "config.yaml").read_text()


def test_a_run_that_is_done_is_left_as_it_is(finished: tuple[RecommenderConfig, dict[str, Any]]) -> None:
    config = config_of(finished[0].run.folder.parent.parent, "layout.ranks=1", "checkpoint.resume=auto")
    before = losses(finished[0])
    outcome = train(config)
    assert (outcome["step"], outcome["samples_per_s"], outcome["quality"]) == (6, None, None)
    assert outcome["loss"] == finished[1]["loss"]
    assert losses(config) == before


@pytest.mark.parametrize(
    "placement", ["row", "auto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("column", "data"))]
)
def test_placements_and_ranks_change_nothing(
    placement: str, finished: tuple[RecommenderConfig, dict[str, Any]], tmp_path: Path
) -> None:
    config = config_of(tmp_path, f"tables.placement={placement}", "layout.ranks=2")
    outcome = train(config)
    assert losses(config) == pytest.approx(losses(finished[0]), rel=1e-9)
    assert outcome["quality"]["logloss"] == pytest.approx(finished[1]["quality"]["logloss"], rel=1e-9)
    assert outcome["quality"]["best_entropy"] == finished[1]["quality"]["best_entropy"]


def test_a_click_folder_is_read_ahead_and_seen_alike_by_all_ranks(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "clicks")
    overrides = ["model.tables=null", "model.dense=3", f"data.source={source}", "train.steps=11"]
    one_rank, two = (config_of(tmp_path / name, *overrides, f"layout.ranks={name}") for name in ("1", "2"))
    quality = [train(config)["quality"] for config in (one_rank, two)]
    assert losses(two) == pytest.approx(losses(one_rank), rel=1e-9)
    assert quality[1]["auc"] == pytest.approx(quality[0]["auc"], abs=1e-12)
    assert (quality[0]["samples"], quality[0]["best_entropy"]) == (30, None)


def test_a_second_epoch_is_shown_and_warned_of_once(tmp_path: Path) -> None:
    overrides = ["layout.ranks=1", "data.synthetic.samples=110", "batch.global_size=33", "train.steps=8"]
    config = config_of(tmp_path, *overrides)  # 99 training samples: three steps are an epoch
    notes = tmp_path / "notes"
    train(config, (1, None, keep_notes, (str(notes),)))
    rows = read_lines(config.run.folder / "metrics.jsonl")
    assert [row["epoch"] for row in rows] == pytest.approx([step / 3 for step in range(1, 9)])
    warnings = [line for line in notes.read_text().splitlines() if "second epoch" in line]
    assert [line.partition(" of")[0] for line in warnings] == ["warning: step 4 begins a second epoch"]


def test_a_stopped_run_goes_on_with_other_ranks_and_placements(
    finished: tuple[RecommenderConfig, dict[str, Any]], tmp_path: Path
) -> None:
    first = config_of(tmp_path, "tables.placement=row", "layout.ranks=2")
    seen = str(tmp_path / "seen")
    outcome = train(first, (1, None, keep_samples, (seen,)), (3, 1, send_self, (signal.SIGTERM,)))
    assert (outcome["step"], outcome["stopped"]) == (3, True)
    assert outcome["checkpoint"].endswith("step-00000003")
    assert unused_run("never", first.run).name == "tiny-2"
    again = config_of(tmp_path, "tables.placement=column", "layout.ranks=3", "checkpoint.resume=auto")
    assert unused_run("auto", again.run).name == "tiny"
    assert train(again)["step"] == 6
    assert losses(again) == pytest.approx(losses(finished[0]), rel=1e-9)
    parts = sorted(
        tuple(json.loads(line)) for r in (0, 1) for line in Path(f"{seen}.{r}").read_text().splitlines()
    )
    assert [stop for _, stop in parts[:-1]] == [start for start, _ in parts[1:]]  # no gap, nothing twice


def test_a_damaged_checkpoint_is_passed_over(
    finished: tuple[RecommenderConfig, dict[str, Any]], tmp_path: Path
) -> None:
    config = config_of(tmp_path, "train.steps=4", "layout.ranks=1", "optim.rate.schedule=constant")
    train(config)
    newest = config.run.folder / "checkpoints" / "step-00000004"
    file = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    again = config_of(tmp_path, "layout.ranks=1", "optim.rate.schedule=constant", "checkpoint.resume=auto")
    assert train(again)["step"] == 6
    fresh = config_of(tmp_path / "fresh", "layout.ranks=1", "optim.rate.schedule=constant")
    train(fresh)
    assert losses(again) == pytest.approx(losses(fresh), rel=1e-12)


def test_another_model_or_optimiser_is_refused_before_ranks_start(
    finished: tuple[RecommenderConfig, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = finished[0].run.folder
    monkeypatch.setattr(
        "stretto.run.train.launch.run_ranks", lambda *_, **__: pytest.fail("ranks were started")
    )
    for override, says in (
        ("model.bottom=[8, 8]", "of another model: its bottom is [16, 8]"),
        ("model.tables=[{rows: 41}, {rows: 60, hot: 2}]", "its rows of table C1 is 40, the config's is 41"),
        ("model.tables=[{rows: 40}]", "its tables is 2 (C1, C2...)"),
        ("optim.tables.name=sgd", "its optim.tables.name is rowwise_adagrad"),
        ("optim.dense.name=sgd", "its optim.dense.name is adamw"),
    ):
        config = config_of(folder.parent.parent, override, f"checkpoint.resume={folder}", "layout.ranks=1")
        with pytest.raises(StrettoError) as caught:
            run_job(RECOMMENDER, config, quiet=True)
        assert says in caught.value.message


def test_tables_whose_rows_are_of_other_ids_are_not_resumed(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"

    def job(ids: str, *more: str) -> RecommenderConfig:
        log.write_text("label,I1,C1\n" + "".join(f"1,2,{i}\n0,,{i}\n" for i in ids))
        names = [f"data.source={log}", f"data.cache={tmp_path / 'cache'}", "data.threshold=1"]
        small = [
            "model.tables=null",
            "model.dense=1",
            "batch.global_size=4",
            "train.steps=2",
            "eval.every=null",
        ]
        return config_of(tmp_path, *names, *small, "layout.ranks=1", *more)

    first = job("abcdef")
    train(first)
    again = job("uvwxyz", f"checkpoint.resume={first.run.folder}", "train.steps=3")  # as many ids, and others
    with pytest.raises(StrettoError, match="rows belong to other ids than those of"):
        run_job(RECOMMENDER, again, quiet=True)
    with pytest.raises(StrettoError, match="rows belong to other ids"):
        run_pass(ScoringJob(training=again, trained=find_trained(first.run.folder, None)), quiet=True)


def test_a_loss_that_is_not_finite_names_the_step_and_the_rank(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        train(config_of(tmp_path), (4, 1, spoil, ()))
    assert "step 4: the loss on rank 1 is not finite" in caught.value.failure.message
    assert [path.name for path in (tmp_path / "runs/tiny/checkpoints").iterdir()] == ["step-00000002"]


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        train(config_of(tmp_path, "train.steps=1"), (1, None, spoil_after, ()))
    assert (
        "after step 1: weights are not finite; first bottom.0.weight on all ranks"
        in caught.value.failure.message
    )
    assert not (tmp_path / "runs/tiny/checkpoints").exists()


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        train(config_of(tmp_path), (3, 1, fail, ()))
    assert caught.value.rank == 1
    assert "planted" in caught.value.failure.message


def test_as_ranks_of_torchrun_they_make_all_ready_themselves(
    finished: tuple[RecommenderConfig, dict[str, Any]], tmp_path: Path
) -> None:
    config = config_of(tmp_path, "layout.ranks=2", "tables.placement=auto")
    prepare(PRELOAD)
    assert run_ranks(2, joined, config)[0] == 6
    assert losses(config) == pytest.approx(losses(finished[0]), rel=1e-9)


def joined(config: RecommenderConfig) -> int:
    outcome = run_job(RECOMMENDER, config, quiet=True).outcome
    assert outcome is not None
    return outcome["step"]
