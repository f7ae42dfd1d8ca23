"""Bad steps of recommenders: no rank applies them, with and without clipping, wherever tables lie."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from planted_numbers import flip
from recommender_job import config_of
from stretto.engine.checkpoint.read import read_whole
from stretto.engine.parallel.control import this_rank
from stretto.errors import StrettoError
from stretto.recommender.config.check import check
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.train.clicks import prepare_clicks
from stretto.recommender.train.job import PRELOAD, train_recommender_rank
from stretto.recommender.train.placement import place
from stretto.run.launch.local import RankFailed, prepare, run_ranks
from stretto.run.launch.stop import StopRequest
from stretto.run.train.metrics import read_lines
from train_runs import around_step

pytestmark = pytest.mark.apart

Plan = tuple[int, int | None, str]  # step from 1, rank or None for all, what


def train(config: RecommenderConfig, *plans: Plan) -> dict[str, Any]:
    prepare(PRELOAD)
    data = prepare_clicks(config, quiet=True)
    return run_ranks(config.layout.ranks, planted, plans, config, (data, place(config, data)))[0]


def planted(plans: tuple[Plan, ...], config: RecommenderConfig, ready: Any) -> dict[str, Any]:
    left = list(plans)

    def wrapped(inner: Any, self: Any, stop: Any) -> Any:
        for plan in list(left):
            step, rank, target = plan
            if self.progress.step + 1 == step and rank in (None, this_rank()):
                left.remove(plan)
                spoil(self, target)
        return inner(self, stop)

    around_step(wrapped)
    with StopRequest() as stop:
        return train_recommender_rank(config, ready, stop, True)


def spoil(trainer: Any, target: str) -> None:
    recommender = trainer.task.recommender
    if target == "weight":
        with torch.no_grad():
            next(recommender.net.parameters()).view(-1)[0] = float("nan")
    elif target == "row gradient":  # of this rank's lookups; the dense networks' are finite
        inner = recommender._on_vector_gradient

        def spoiled(lookups: Any, vectors: torch.Tensor) -> None:
            recommender._on_vector_gradient = inner
            vectors.grad.view(-1)[0] = float("inf")
            inner(lookups, vectors)

        recommender._on_vector_gradient = spoiled
    elif target == "bit of a row":
        flip(recommender.tables.pools[0].store.weight, 3, 12)
    elif target == "dense gradient":
        parameter = list(recommender.net.parameters())[-1]
        handle = parameter.register_hook(lambda gradient: (handle.remove(), gradient * float("nan"))[1])
    else:
        guard, inner = trainer.guard, trainer.guard.spike

        def decreed(loss: float, norm: float | None) -> str:
            guard.spike = inner
            return "by decree"

        guard.config = replace(guard.config, on_spike="skip")
        guard.spike = decreed


def tensors(config: RecommenderConfig, step: int) -> dict[str, bytes]:
    """Every file of a checkpoint that holds tensors, bit by bit."""
    folder = config.run.folder / "checkpoints" / f"step-{step:08d}"
    files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.safetensors")}
    assert files, read_whole
    return files


SKIP = (
    *("guard.on_nonfinite=skip", "checkpoint.every=6", "eval.every=null"),
    "optim.rate.decay_steps=6",
)


@pytest.mark.parametrize(
    ("overrides", "target"),
    [
        (("tables.placement=row",), "row gradient"),
        (("tables.placement=data", "optim.clip=1.0"), "dense gradient"),
        pytest.param(("tables.placement=data",), "row gradient", marks=pytest.mark.slow),
    ],
)
def test_a_skipped_step_changes_no_row_and_no_weight(
    tmp_path: Path, overrides: tuple[str, ...], target: str
) -> None:
    spoiled = config_of(tmp_path, *SKIP, *overrides)
    plain = config_of(tmp_path / "plain", *SKIP, *overrides)
    train(spoiled, (3, 1, target))
    train(plain, (3, None, "no update"))
    assert tensors(spoiled, 6) == tensors(plain, 6)
    rows = list(read_lines(spoiled.run.folder / "metrics.jsonl"))
    assert [row["bad"] is not None for row in rows] == [False, False, True, False, False, False]
    (event,) = read_lines(spoiled.run.folder / "guard.jsonl")
    assert event["samples"] == [66, 99]
    assert event["reason"].endswith("on rank 1")


def test_a_stopped_step_changes_nothing_and_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"step 3: a gradient is not finite, first that of the rows"):
        train(config_of(tmp_path), (3, 1, "row gradient"))


def test_a_rollback_restores_a_bad_weight_and_resumes_alike(tmp_path: Path) -> None:
    back = (*SKIP, "guard.on_nonfinite=rollback", "checkpoint.every=2", "checkpoint.keep=9")
    uninterrupted, parts = config_of(tmp_path, *back), config_of(tmp_path / "parts", *back)
    train(uninterrupted, (4, 1, "weight"))
    train(config_of(tmp_path / "parts", *back, "train.steps=4"), (4, 1, "weight"))
    train(config_of(tmp_path / "parts", *back, "checkpoint.resume=auto"))
    assert tensors(uninterrupted, 6) == tensors(parts, 6)
    manifest = json.loads((uninterrupted.run.folder / "checkpoints/step-00000006/manifest.json").read_text())
    assert manifest["meta"]["skipped"] == [[66, 132]]
    assert manifest["meta"]["samples"] == 8 * 33


def test_a_row_that_changes_by_itself_is_undone(tmp_path: Path) -> None:
    back = (*SKIP, "tables.placement=row", "guard.check_memory=1", "guard.on_mismatch=rollback")
    back = (*back, "checkpoint.every=2", "checkpoint.keep=9")
    plain, flipped = config_of(tmp_path / "plain", *back), config_of(tmp_path, *back)
    train(plain)
    train(flipped, (6, 1, "bit of a row"))
    assert tensors(plain, 6) == tensors(flipped, 6)
    (event,) = read_lines(flipped.run.folder / "guard.jsonl")
    assert event["reason"].startswith("weights of pool 0, tables ")
    assert "on rank 1 has changed since the update" in event["reason"]


def test_a_run_that_goes_on_behind_a_skipped_step_has_the_same_bits(tmp_path: Path) -> None:
    uninterrupted, parts = config_of(tmp_path, *SKIP), config_of(tmp_path / "parts", *SKIP)
    train(uninterrupted, (2, 0, "row gradient"))
    train(config_of(tmp_path / "parts", *SKIP, "train.steps=3"), (2, 0, "row gradient"))
    train(config_of(tmp_path / "parts", *SKIP, "checkpoint.resume=auto"))
    assert tensors(uninterrupted, 6) == tensors(parts, 6)


def test_a_rollback_cannot_take_back_new_ids(tmp_path: Path) -> None:
    hashed = '{"rows": 40, "ids": "hash"}'
    with pytest.raises(StrettoError, match="cannot be taken back"):
        check(
            config_of(
                tmp_path,
                f'model.tables=[{hashed}, {{"rows": 60}}]',
                "guard.on_nonfinite=rollback",
            )
        )
