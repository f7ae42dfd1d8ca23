"""Checkpoints of ours become torchtitan's: torch loads them into its models, and every bit comes back."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import titan_models as titan
import torch
import torch.distributed.checkpoint as dcp

from stretto.engine.checkpoint.read import read_whole
from stretto.engine.checkpoint.save import save
from stretto.engine.models.weights import initial_values
from stretto.engine.parallel.fragment import ShardPlacement, TensorBox
from stretto.errors import StrettoError
from stretto.job.parameters import parameter_shapes
from stretto.job.shape import ModelShape, shape_to_record
from stretto_interop.checkpoints.dcp.titan import DcpImport, export_dcp

SHAPE = ModelShape(family="llama", layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=31, sequence=12)
OPTIM = {
    "name": "adamw",
    "lr": 1e-2,
    "betas": [0.8, 0.9],
    "eps": 1e-7,
    "weight_decay": 0.05,
    "no_decay": ["embed.*"],
    "rate": {"schedule": "linear", "warmup": 2, "min_ratio": 0.0},
}
META: dict[str, Any] = {"updates": 6, "tokens": 500, "config": {"optim": OPTIM, "train": {"steps": 10}}}
STATES = ("exp_avg", "exp_avg_sq")


def in_two(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, ShardPlacement]:
    """The tensor in two pieces, as sharded layouts leave them."""
    half, tail = tensor.shape[0] // 2, tuple(tensor.shape[1:])
    zeros = (0,) * len(tail)
    rest = tensor.shape[0] - half
    pieces = (
        TensorBox(offsets=(0, *zeros), sizes=(half, *tail), local=(rest, *zeros)),
        TensorBox(offsets=(half, *zeros), sizes=(rest, *tail), local=(0, *zeros)),
    )
    return torch.cat([tensor[half:], tensor[:half]]), ShardPlacement(name, tuple(tensor.shape), pieces)


def written(folder: Path, shape: ModelShape = SHAPE, meta: dict[str, Any] = META) -> Path:
    tensors: dict[str, Any] = {}
    for seed, prefix in enumerate(("model", *(f"optim.{state}" for state in STATES))):
        for name, sizes in parameter_shapes(shape).items():
            values = initial_values(name, sizes, seed, shape)
            tensors[f"{prefix}.{name}"] = in_two(name, values + torch.rand(sizes))
    return save(folder, 7, tensors, {**meta, "model": shape_to_record(shape)})


def loaded(
    folder: Path, shape: ModelShape, kind: str
) -> tuple[titan.Titan, torch.optim.AdamW, dict[str, Any]]:
    """What torchtitan has after loading the folder: live state of its model and optimiser, filled in."""
    model = titan.Titan(shape, kind)
    optimiser = titan.adamw(model, lr=5.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, partial(float))
    titan.train(model, optimiser, titan.batches(shape, 1, seed=9))
    state = titan.state_of(model, optimiser, step=1)
    del state["dataloader"]
    if kind == "old":
        state["lr_scheduler"] = schedule.state_dict()
        state["lr_scheduler"] |= {"base_lrs": [5.0], "_last_lr": [5.0], "lr_lambdas": [{}]}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    weights = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    model.load_state_dict(weights)
    return model, optimiser, state


@pytest.mark.parametrize(
    ("version", "kind", "tied"),
    [
        ("0.3", "fused", False),
        ("0.2", "old", True),
        pytest.param("0.3", "fused", True, marks=pytest.mark.slow),
        pytest.param("0.2", "old", False, marks=pytest.mark.slow),
    ],
)
def test_torch_loads_what_is_exported(tmp_path: Path, version: str, kind: str, tied: bool) -> None:
    shape = replace(SHAPE, tied=tied)
    path, out = written(tmp_path / "run", shape), tmp_path / "out"
    seen: list[tuple[int, int]] = []
    done = export_dcp(path, out, version, lambda *bytes_so_far: seen.append(bytes_so_far))
    assert [file.name for file in done.files] == [".metadata", "__0_0.distcp"]
    assert (done.step, done.notes, seen[-1][0]) == (7, [], seen[-1][1])
    model, optimiser, state = loaded(out, shape, kind)
    assert state["train_state"] == {"step": 7, "ntokens_seen": 500}
    assert state["lr_scheduler"]["last_epoch"] == 6
    group = state["optimizer"]
    name = "layers.0.feed_forward.w1.weight"
    assert group[f"param_groups.{name}.lr"] == pytest.approx(1e-2 * (1 - (6 - 2) / 8))
    options = {key: group[f"param_groups.{name}.{key}"] for key in ("initial_lr", "betas", "eps", "fused")}
    assert options == {"initial_lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-7, "fused": True}
    decays = {key: group[f"param_groups.{key}.weight_decay"] for key in (name, "norm.weight")}
    assert decays == {name: 0.05, "norm.weight": 0.0}
    assert group["param_groups.tok_embeddings.weight.weight_decay"] == 0.0
    assert all(group[f"state.{name}.step"] == 6 for name, _ in model.named_parameters())
    # back again, from what torch has in memory now
    titan.write(tmp_path / "back", model, optimiser, step=7)
    with DcpImport(tmp_path / "back", shape) as opened:
        again = opened.write(tmp_path / "again")
    before, after = read_whole(path, "")[0], read_whole(again, "")[0]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_settings_of_the_optimiser_come_back(tmp_path: Path) -> None:
    export_dcp(written(tmp_path / "run"), tmp_path / "out")
    with DcpImport(tmp_path / "out", SHAPE) as opened:
        optimiser = opened.optimiser
    assert optimiser is not None
    assert (optimiser.lr, optimiser.betas, optimiser.eps) == (1e-2, (0.8, 0.9), 1e-7)
    assert (optimiser.weight_decay, optimiser.no_decay) == (0.05, ("embed.tok.weight",))
    assert (opened.step, opened.updates, opened.tokens, opened.notes) == (7, 6, 500, [])


def test_without_adamw_the_model_alone_is_exported(tmp_path: Path) -> None:
    muon = {**META, "config": {"optim": {"name": "muon"}}}
    done = export_dcp(written(tmp_path / "run", meta=muon), tmp_path / "out")
    assert done.step is None
    assert "states of muon are left out" in done.notes[0]
    with DcpImport(tmp_path / "out", SHAPE) as opened:
        assert (opened.optimiser, opened.step) == (None, 0)


def test_models_with_more_than_torchtitan_has_are_refused(tmp_path: Path) -> None:
    tensors = {f"model.{n}": in_two(n, torch.rand(s)) for n, s in parameter_shapes(SHAPE).items()}
    adapter = {"model.blocks.0.attn.proj.lora_A": in_two("a", torch.rand(2, 16))}
    path = save(tmp_path / "run", 7, tensors | adapter, {"model": shape_to_record(SHAPE)})
    with pytest.raises(StrettoError, match=r"model.blocks.0.attn.proj.lora_A, one of 1 tensors"):
        export_dcp(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_exports_overwrite_nothing_and_leave_nothing_half_written(tmp_path: Path) -> None:
    path, out = written(tmp_path / "run"), tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    with pytest.raises(StrettoError, match="is not empty"):
        export_dcp(path, out)
    shard = path / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    with pytest.raises(StrettoError, match="damaged"):
        export_dcp(path, tmp_path / "new")
    assert not (tmp_path / "new").exists()
