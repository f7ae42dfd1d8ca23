"""Ids without bound through a whole run: rows given and taken back, saved, and taken up by other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recommender_job import config_of
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.train.clicks import prepare_clicks
from stretto.recommender.train.job import PRELOAD, train_recommender_rank
from stretto.recommender.train.placement import place
from stretto.run.launch.local import prepare, run_ranks
from stretto.run.launch.stop import StopRequest
from stretto.run.train.metrics import read_lines

pytestmark = pytest.mark.apart

TABLES = (
    "model.tables=[{name: A, rows: 300, ids: hash, admit: 3, evict_every: 2, hot: 3, pooling: mean},"
    " {name: B, rows: 300, ids: quotient-remainder},"
    " {name: C, rows: 300, ids: hash, evict: age, max_age: 1, evict_every: 1, hot: 2}]"
)


def train(config: RecommenderConfig) -> dict[str, Any]:
    prepare(PRELOAD)
    data = prepare_clicks(config, quiet=True)
    ready = (data, place(config, data))
    return run_ranks(config.layout.ranks, train_recommender_rank, config, ready, StopRequest(), True)[0]


def losses(config: RecommenderConfig) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_lines(config.run.folder / "metrics.jsonl")}


def test_a_checkpoint_has_counted_no_id_of_the_step_to_come(tmp_path: Path) -> None:
    """Ids of the next batch are on their way when a step is saved. The rest of the run, placed otherwise and
    from there, must be as the first run's.
    """
    first = config_of(tmp_path / "a", TABLES, "tables.placement=row", "layout.ranks=2", "checkpoint.every=3")
    uninterrupted = train(first)
    saved = first.run.folder / "checkpoints" / "step-00000003"
    assert saved.is_dir()
    again = config_of(
        tmp_path / "b", TABLES, "tables.placement=column", "layout.ranks=2", f"checkpoint.resume={saved}"
    )
    outcome = train(again)
    rest = {step: loss for step, loss in losses(first).items() if step > 3}
    assert losses(again) == pytest.approx(rest, rel=1e-9)
    assert outcome["quality"]["logloss"] == pytest.approx(uninterrupted["quality"]["logloss"], rel=1e-9)
