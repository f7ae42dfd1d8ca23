"""Training in 16 bits: overflows are skipped and counted on all ranks; the loss scale is resumed."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.engine.checkpoint.read import read_whole
from stretto.engine.models.weights import initial_values
from stretto.run.train.metrics import read_lines
from tiny_job import EIGHT, job
from train_runs import at_step, keep_notes, same, tensors, train

SCALE = 2.0**24  # too much for any model's first steps
HALF = ("layout.dp=2", "dp.mode=zero2", "checkpoint.every=3", "checkpoint.keep=9")


def test_overflows_are_skipped_and_the_scale_is_resumed(tmp_path: Path):
    half = (
        *HALF,
        EIGHT,
        "train.dtype=float16",
        f"precision.loss_scale={SCALE}",
        "precision.loss_scale_steps=1",
    )
    straight = job(tmp_path, *half, "run.name=straight")
    notes = tmp_path / "notes"
    train(straight, keep_notes(str(notes)))
    rows = list(read_lines(straight.run.folder / "metrics.jsonl"))
    assert len(rows) == 6
    scale, skipped = SCALE, 0
    for row in rows:
        assert isfinite(row["loss"])
        if isfinite(float(row["grad_norm"])):
            scale = min(SCALE, 2 * scale)
        else:
            scale, skipped = scale / 2, skipped + 1
        assert (row["loss_scale"], row["skipped"]) == (scale, skipped)
    assert 0 < skipped < 6
    assert notes.read_text().count("gradients overflow, no update") == skipped

    middle = straight.run.folder / "checkpoints" / "step-00000003"
    resumed = job(tmp_path, *half, f"checkpoint.resume={middle}", "run.name=resumed")
    train(resumed)
    again = list(read_lines(resumed.run.folder / "metrics.jsonl"))
    repeated = [(row["step"], row["loss"], row["loss_scale"], row["skipped"]) for row in again]
    assert repeated == [(row["step"], row["loss"], row["loss_scale"], row["skipped"]) for row in rows[3:]]
    assert same(tensors(straight, 6), tensors(resumed, 6))


def test_checkpoints_of_16_bit_weights_have_the_masters(tmp_path: Path):
    config = job(tmp_path, *HALF, "train.dtype=bfloat16", "train.steps=3")
    train(config)
    weights, _ = read_whole(config.run.folder / "checkpoints" / "step-00000003")
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    up = weights["blocks.0.mlp.up.weight"]
    assert not torch.equal(up, up.bfloat16().float())


def test_float16_clips_the_gradients_without_their_loss_scale(tmp_path: Path):
    """Clipped SGD moves the weights by rate x clip, and by the same with another loss scale: both are powers
    of two, so all that differs is what float16 cannot hold.
    """
    clip = 0.01
    sgd = ("layout.dp=2", "train.dtype=float16", "optim.name=sgd", "optim.lr=1", "optim.weight_decay=0")
    runs = [
        job(tmp_path, *sgd, f"optim.clip={clip}", "train.steps=3", f"precision.loss_scale={scale}", name)
        for scale, name in ((1024.0, "run.name=low"), (8192.0, "run.name=high"))
    ]
    for config in runs:
        train(config)
    rows = list(read_lines(runs[0].run.folder / "metrics.jsonl"))
    assert all(float(row["grad_norm"]) > 10 * clip for row in rows), "every step is clipped"
    low, high = ({k: v for k, v in tensors(config, 3).items() if k.startswith("model.")} for config in runs)
    moved = 0.0
    for name, weight in low.items():
        torch.testing.assert_close(weight, high[name], rtol=0, atol=1e-5)
        first = initial_values(name.removeprefix("model."), tuple(weight.shape), 1, runs[0].shape())
        moved += float((weight - first).square().sum())
    longest = clip * sum(float(row["lr"]) for row in rows)
    assert 0.7 * longest < moved**0.5 < 1.001 * longest


def see_what_is_summed(trainer: Any) -> None:
    """Raise where gradients that are to be summed in float32 are sent in the weights' type."""
    from stretto.engine.parallel.data import reduction

    for name in ("start_sum", "start_scatter_sum"):
        inner = getattr(reduction, name)

        def summed(x: Any, *rest: Any, inner: Any = inner) -> Any:
            assert x.dtype == torch.float32, f"summed in {x.dtype}"
            trainer.summed = True
            return inner(x, *rest)

        setattr(reduction, name, summed)


def see_that_some_was(trainer: Any) -> None:
    assert trainer.summed


@pytest.mark.parametrize("mode", ["ddp", "zero3"])
def test_gradients_of_16_bits_are_summed_over_ranks_in_float32(tmp_path: Path, mode: str) -> None:
    config = job(tmp_path, "layout.dp=2", f"dp.mode={mode}", "train.dtype=bfloat16", "train.steps=3")
    train(config, at_step(2, 1, see_what_is_summed), at_step(3, 1, see_that_some_was))
