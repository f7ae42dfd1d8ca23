"""Checkpoints of ours become Megatron's: torch loads the tensors in its layout, and every bit comes back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import megatron_models as megatron
from stretto.engine.checkpoint.read import read_whole
from stretto.engine.checkpoint.save import save
from stretto.engine.models.build import build
from stretto.engine.models.weights import initial_values
from stretto.engine.parallel.fragment import ShardPlacement
from stretto.errors import StrettoError
from stretto.job.experts import ExpertShape
from stretto.job.parameters import parameter_shapes
from stretto.job.presets import preset
from stretto.job.shape import ModelShape, shape_to_record
from stretto_interop.checkpoints.megatron.common import find_iteration, read_common
from stretto_interop.checkpoints.megatron.exporting import export_megatron
from stretto_interop.checkpoints.megatron.importing import MegatronImport
from stretto_interop.checkpoints.megatron.names import rules
from stretto_interop.frameworks.megatron.framework import read_saved, saved_arguments

SIZES: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 32, "sequence": 12}
GPT = ModelShape(family="gpt", **SIZES)
LLAMA = ModelShape(family="llama", kv_heads=2, ffn=24, **SIZES)
MOE = replace(LLAMA, moe=ExpertShape(experts=4, top_k=2, shared_ffn=8))
LATE = replace(LLAMA, moe=ExpertShape(experts=4, top_k=2, dense_layers=1))
STATES = ("exp_avg", "exp_avg_sq")
OPTIM = {
    "name": "adamw",
    "lr": 1e-2,
    "betas": [0.8, 0.9],
    "eps": 1e-7,
    "weight_decay": 0.05,
    "rate": {"schedule": "linear", "warmup": 2, "min_ratio": 0.0},
}


def written(folder: Path, shape: ModelShape, dtype: str = "float32", *, states: bool = True) -> Path:
    tensors: dict[str, Any] = {}
    prefixes = ("model", *(f"optim.{state}" for state in STATES))
    for seed, prefix in enumerate(prefixes if states else prefixes[:1]):
        for name, sizes in parameter_shapes(shape).items():
            if prefix == "model" or not name.endswith("correction"):
                values = initial_values(name, sizes, seed, shape) + torch.rand(sizes)
                tensors[f"{prefix}.{name}"] = (values, ShardPlacement.unsharded(name, sizes))
    config = {
        "optim": OPTIM,
        "train": {"steps": 10, "dtype": dtype},
        "batch": {"global_size": 4},
        "data": {"sequence": 12},
    }
    meta = {"updates": 6, "samples": 28, "tokens": 336, "config": config, "model": shape_to_record(shape)}
    return save(folder, 7, tensors, meta)


def exported(source: Path, out: Path) -> Path:
    export_megatron(source, out, saved_arguments)
    return out


def loaded(out: Path) -> megatron.Tensors:
    """All tensors of an export, as torch reads them."""
    folder = find_iteration(out)
    index = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in index.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


@pytest.mark.parametrize("shape", [GPT, LLAMA])
def test_the_tensors_are_a_model_in_its_layout(tmp_path: Path, shape: ModelShape) -> None:
    source = written(tmp_path / "run", shape)
    there = loaded(exported(source, tmp_path / "out"))
    native = {name: tensor for name, tensor in there.items() if not name.startswith("optimizer.")}
    for name in [name for name in native if name.startswith("decoder.layers.")]:
        stack = native.pop(name)
        native |= {name.replace("layers.", f"layers.{i}.", 1): layer for i, layer in enumerate(stack)}
    assert native.keys() == megatron.weights(shape).keys()
    model = build(shape)
    model.tie()
    model.load_state_dict(read_whole(source)[0], strict=False)
    tokens = torch.randint(0, shape.vocab, (2, 10), generator=torch.Generator().manual_seed(5))
    wanted = model(tokens)
    assert torch.allclose(
        megatron.forward(shape, native, tokens), wanted, atol=1e-5 * wanted.abs().max().item()
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [GPT, LLAMA])
def test_every_bit_comes_back(tmp_path: Path, shape: ModelShape, dtype: str) -> None:
    source = written(tmp_path / "run", shape, dtype)
    out = exported(source, tmp_path / "out")
    common = read_common(find_iteration(out))
    assert read_saved(common.args, "common.pt").shape == replace(shape, family=shape.family)
    assert common.args["consumed_train_samples"] == 28
    assert common.scheduler["num_steps"] == 24
    assert common.scheduler["lr_decay_style"] == "linear"
    with MegatronImport(out, shape) as opened:
        assert (opened.step, opened.updates, opened.samples) == (7, 6, 28)
        assert opened.optimiser is not None
        settings = opened.optimiser
        assert (settings.lr, settings.betas, settings.eps) == (1e-2, (0.8, 0.9), 1e-7)
        assert settings.weight_decay == 0.05
        path = opened.write(tmp_path / "back")
    reimported, original = read_whole(path, "")[0], read_whole(source, "")[0]
    assert reimported.keys() == original.keys()
    assert all(torch.equal(reimported[name], original[name]) for name in original)
    kinds = {tensor.dtype for name, tensor in loaded(out).items() if not name.startswith("optimizer.")}
    assert kinds == {getattr(torch, dtype)}


def test_float32_weights_of_two_names_are_written_once(tmp_path: Path) -> None:
    out = exported(written(tmp_path / "run", LLAMA), tmp_path / "out")
    there = loaded(out)
    name = "decoder.layers.mlp.linear_fc1.weight"
    for kind in ("param", "fp32_param"):
        assert torch.equal(there[f"optimizer.state.{kind}.{name}"], there[name])
    size = sum(file.stat().st_size for file in find_iteration(out).glob("*.distcp"))
    weights = sum(t.nbytes for name, t in there.items() if not name.startswith("optimizer."))
    objects = len(list(dcp.FileSystemReader(find_iteration(out)).read_metadata().state_dict_metadata))
    assert size < 3 * weights + objects * 2 * 1500  # each archive has a head


@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize("shape", [MOE, LATE])
def test_experts_have_an_optimiser_of_their_own_where_they_are_spread(
    tmp_path: Path, shape: ModelShape, spread: bool
) -> None:
    source = written(tmp_path / "run", shape)
    done = export_megatron(source, tmp_path / "out", saved_arguments, experts_spread=spread)
    size = "above 1, not 1" if spread else "1, not above"
    assert (done.step, done.notes) == (
        7,
        [f"Adam's states are laid out for --expert-model-parallel-size {size}"],
    )
    common = read_common(find_iteration(tmp_path / "out"))
    assert read_saved(common.args, "common.pt").shape.moe == shape.moe
    several = list(common.optimiser.values()) if spread else [common.optimiser]
    groups = [[group["is_expert_parallel"] for group in optimiser["param_groups"]] for optimiser in several]
    assert groups == ([[False, False], [True]] if spread else [[False, False]])
    with MegatronImport(tmp_path / "out", shape) as opened:
        assert (opened.step, opened.updates) == (7, 6)
        reimported, _ = read_whole(opened.write(tmp_path / "back"), "")
    original, _ = read_whole(source, "")
    assert reimported.keys() == original.keys()
    assert all(torch.equal(reimported[name], original[name]) for name in original)


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    source = written(tmp_path / "run", LLAMA, states=False)
    done = export_megatron(source, tmp_path / "out", saved_arguments)
    assert (done.step, done.notes) == (
        None,
        ["the checkpoint has no states of an optimiser: the model alone was written"],
    )
    with pytest.raises(StrettoError, match="is not empty"):
        exported(source, tmp_path / "out")
    scaled = written(tmp_path / "scaled", replace(LLAMA, logit_softcap=30.0))
    with pytest.raises(StrettoError, match=r"model.logit_softcap is 30\.0"):
        exported(scaled, tmp_path / "more")
    assert not (tmp_path / "more").exists()


def test_gpt_oss_is_refused_for_its_sinks_and_its_arguments_are_written() -> None:
    """The arguments of a saved run say the model, from which they come."""
    shape = preset("gpt-oss-20b")
    with pytest.raises(
        StrettoError, match=r"attention\.sinks is true: .*softmax_offset.* has not been tried"
    ):
        list(rules(shape))
    saved = read_saved(saved_arguments(shape), "common.pt").shape
    assert saved == replace(shape, family="llama")
