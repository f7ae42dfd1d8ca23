"""Checkpoints as torchtitan writes them become ours: the same logits, and the optimiser goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import titan_models as titan
import torch

from stretto.engine.checkpoint.manifest import read_manifest
from stretto.engine.checkpoint.read import read_whole
from stretto.engine.models.build import build
from stretto.job.shape import ModelShape
from stretto.run.config import TrainConfig
from stretto.run.data.dataset import WindowSamples
from stretto.run.data.token_folder import TokenFolder
from stretto_interop.checkpoints.dcp.titan import DcpImport
from texts import open_tokens
from tiny_job import LLAMA, job
from train_runs import tensors, train

SHAPE = ModelShape(family="llama", layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=31, sequence=12)
KINDS = ("fused", "apart", "old")
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def trained(
    shape: ModelShape, kind: str = "fused", dtype: torch.dtype = torch.float32
) -> tuple[titan.Titan, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = titan.Titan(shape, kind).to(dtype)
    optimiser = titan.adamw(model, **SETTINGS)
    titan.train(model, optimiser, titan.batches(shape, 3))
    return model, optimiser


def imported(source: Path, run: Path, shape: ModelShape = SHAPE, *, states: bool = True) -> Path:
    with DcpImport(source, shape, states=states) as opened:
        return opened.write(run)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_an_imported_model_gives_the_same_logits(tmp_path: Path, kind: str, tied: bool) -> None:
    shape = replace(SHAPE, tied=tied)
    model, optimiser = trained(shape, kind, torch.float64)
    source = titan.write(tmp_path / "dcp", model, optimiser, step=3)
    path = imported(source, tmp_path / "run", shape)
    weights, loaded = read_whole(path)
    stretto_model = build(shape)
    stretto_model.double().tie()
    stretto_model.load_state_dict(weights, strict=False)
    tokens = titan.batches(shape, 1, seed=5)[0][0]
    assert torch.allclose(stretto_model(tokens), model(tokens), atol=1e-12)
    assert (loaded.step, loaded.meta["updates"], loaded.meta["tokens"]) == (3, 3, 3000)
    states, _ = read_whole(path, "optim.")
    assert states.keys() == {f"{m}.{name}" for m in ("exp_avg", "exp_avg_sq") for name in weights}
    norm = model.get_parameter("layers.0.attention_norm.weight")
    assert torch.equal(states["exp_avg_sq.blocks.0.norm1.weight"], optimiser.state[norm]["exp_avg_sq"])


def test_only_weights(tmp_path: Path) -> None:
    model, optimiser = trained(SHAPE)
    with_states = titan.write(tmp_path / "whole", model, optimiser, step=3)
    alone = titan.write(tmp_path / "alone", model)
    weights_only = imported(with_states, tmp_path / "one", states=False)
    other = imported(alone, tmp_path / "other")
    assert [path.name for path in (weights_only, other)] == ["step-00000000"] * 2
    assert read_manifest(weights_only).meta.keys() == {"model", "imported"}
    first, second = read_whole(weights_only, "")[0], read_whole(other, "")[0]
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("kind", "layout"), [("fused", "layout.tp=2"), ("old", "layout.dp=1")])
def test_training_goes_on_as_it_would_have_there(tmp_path: Path, kind: str, layout: str) -> None:
    """After three plain steps and the checkpoint, a fourth step here gives the same weights and states as a
    fourth plain step on the same samples.
    """
    fixed = ("optim.clip=null", "optim.betas=[0.9, 0.95]", "optim.rate={schedule: constant}")
    config = job(tmp_path, layout, *fixed, "run.name=on", "train.steps=4", model=LLAMA)
    shape = config.shape()
    model, optimiser = trained(shape, kind)
    there = titan.write(tmp_path / "there" / "step-3", model, optimiser, step=3)
    run = imported(there.parent, tmp_path / "imported", shape)
    config = job(
        tmp_path,
        *(layout, *fixed, "run.name=on", "train.steps=4", f"checkpoint.resume={run}"),
        model=LLAMA,
    )
    assert train(config)["step"] == 4
    titan.train(model, optimiser, [first_batch(config)])
    titan.write(tmp_path / "there" / "step-4", model, optimiser, step=4)
    imported(there.parent, tmp_path / "next", shape)
    stretto_tensors, titan_tensors = (
        tensors(config, 4),
        read_whole(tmp_path / "next/checkpoints/step-00000004", "")[0],
    )
    assert stretto_tensors.keys() == titan_tensors.keys()
    before = read_whole(run, "")[0]
    for name, tensor in stretto_tensors.items():
        moved = (titan_tensors[name] - before[name]).abs().max()
        assert (tensor - titan_tensors[name]).abs().max() < 1e-3 * moved, name


def first_batch(config: TrainConfig) -> tuple[torch.Tensor, torch.Tensor]:
    folder = open_tokens(config)
    assert isinstance(folder, TokenFolder)
    samples = WindowSamples(folder, "train", config.data.sequence, config.train.seed, ratio=config.data.split)
    batch = samples.batch(range(config.batch.global_size))
    return batch.inputs, batch.targets
