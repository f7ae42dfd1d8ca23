"""Training in 16 bits: overflows are skipped and counted on all ranks; the loss scale is resumed."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

import torch

from stretto.engine.checkpoint.export import read_whole
from stretto.run.train.metrics import read_lines
from tiny_job import job
from train_runs import keep_notes, same, tensors, train

SCALE = 2.0**24  # too much for any model's first steps
HALF = ("layout.dp=2", "dp.mode=zero2", "checkpoint.every=3", "checkpoint.keep=9")


def test_overflows_are_skipped_and_the_scale_is_resumed(tmp_path: Path):
    half = (*HALF, "train.dtype=float16", f"precision.loss_scale={SCALE}", "precision.loss_scale_steps=1")
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
    """A loss scale is a power of two, so training with another one comes to the same weights, but for what
    float16 cannot hold.
    """
    clipped = ("layout.dp=2", "train.dtype=float16", "optim.name=sgd", "optim.clip=0.01", "train.steps=3")
    runs = [
        job(tmp_path, *clipped, f"precision.loss_scale={scale}", f"run.name=scale-{scale:g}")
        for scale in (1024.0, 8192.0)
    ]
    for config in runs:
        train(config)
        norms = [float(row["grad_norm"]) for row in read_lines(config.run.folder / "metrics.jsonl")]
        assert all(isfinite(norm) and norm > 0.1 for norm in norms), "every step is clipped"
    one, other = (tensors(config, 3) for config in runs)
    for name, weight in one.items():
        torch.testing.assert_close(weight, other[name], rtol=1e-3, atol=1e-6)
