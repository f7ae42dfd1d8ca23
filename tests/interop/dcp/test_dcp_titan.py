"""torchtitan's names and layouts, of every kind of model that it shares with us."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import titan_models as titan
import torch

from stretto.engine.checkpoint.read import read_whole
from stretto.engine.checkpoint.save import save
from stretto.engine.models.build import build
from stretto.engine.parallel.fragment import ShardPlacement
from stretto.errors import StrettoError
from stretto.job.attention import AttentionShape, LatentShape, RopeScaling
from stretto.job.experts import ExpertShape
from stretto.job.parameters import parameter_shapes
from stretto.job.presets import preset
from stretto.job.shape import ModelShape, shape_to_record
from stretto_interop.checkpoints.dcp.reader import read_dcp_index
from stretto_interop.checkpoints.dcp.titan import VERSIONS, DcpImport, export_dcp, is_trained, rules, trained

SIZES: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 4, "ffn": 24, "vocab": 31, "sequence": 12}
LATENT = LatentShape(kv_rank=6, rope_dim=4, value_dim=5, q_rank=10)
EXPERTS = ExpertShape(experts=4, top_k=2, ffn=12)
SHAPES = {
    "llama3": ModelShape(family="llama", kv_heads=2, **SIZES),
    "llama3.1": ModelShape(
        family="llama", rope=RopeScaling(type="llama3", factor=8.0, original_positions=4), **SIZES
    ),
    "qwen3": ModelShape(family="qwen3", kv_heads=2, head_dim=8, tied=True, **SIZES),
    "qwen3 experts": ModelShape(family="qwen3_moe", kv_heads=2, moe=EXPERTS, **SIZES),
    "deepseek": ModelShape(
        family="deepseek_v3",
        head_dim=10,
        attention=AttentionShape(latent=LATENT, interleaved=True),
        moe=replace(EXPERTS, shared_ffn=12, dense_layers=1, correction=True, score="sigmoid"),
        **SIZES,
    ),
    "deepseek without ranks of queries": ModelShape(
        family="deepseek_v2",
        head_dim=10,
        attention=AttentionShape(latent=replace(LATENT, q_rank=None), interleaved=True),
        **SIZES,
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_theirs_cover_ours_exactly_once(name: str) -> None:
    """Numbers put into their tensors come back from ours, each once, in the model and in the states."""
    shape = SHAPES[name]
    ruled = {rule.parameter: rule for rule in rules(shape)}
    assert ruled.keys() == parameter_shapes(shape).keys()
    for rule in ruled.values():
        assert rule.shape == parameter_shapes(shape)[rule.parameter]
        for parts in (rule.parts, (rule.fused,) if rule.fused else rule.parts):
            full = torch.zeros(rule.shape, dtype=torch.int64)
            first = 1
            for part in parts:
                assert part is not None
                size = int(torch.Size(part.shape).numel())
                part_values = torch.arange(first, first + size).reshape(part.shape)
                for mine, other in part.views:
                    mine(full).copy_(other(part_values))
                first += size
            assert torch.equal(full.flatten().sort()[0], torch.arange(1, first)), rule.parameter


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_model_comes_back_bit_for_bit(tmp_path: Path, name: str, version: str) -> None:
    shape = SHAPES[name]
    stream = torch.Generator().manual_seed(0)
    tensors: dict[str, Any] = {}
    for name_in_stretto, sizes in parameter_shapes(shape).items():
        states = ("optim.exp_avg", "optim.exp_avg_sq") if is_trained(name_in_stretto) else ()
        kinds = ("model", *states)
        for kind in kinds:
            full = f"{kind}.{name_in_stretto}"
            tensors[full] = (torch.rand(sizes, generator=stream), ShardPlacement.unsharded(full, sizes))
    path = save(tmp_path / "run", 5, tensors, {"model": shape_to_record(shape)})
    done = export_dcp(path, tmp_path / "out", version)
    assert done.step == 5
    assert done.notes == ["no config of the run is in it: settings of AdamW are the usual ones"]
    names = read_dcp_index(tmp_path / "out").tensors
    expected = {part.name(version) for rule in rules(shape) for part in rule.parts}
    states = {part.name(version) for rule in rules(shape) for part in trained(rule, version)}
    assert expected <= names.keys()
    assert {f"optimizer.state.{state}.exp_avg" for state in states} <= names.keys()
    with DcpImport(tmp_path / "out", shape) as opened:
        after, _ = read_whole(opened.write(tmp_path / "back"), "")
    assert after.keys() == tensors.keys()
    assert all(torch.equal(after[full], tensor) for full, (tensor, _) in tensors.items())


@pytest.mark.parametrize("kind", ["fused", "apart", "old"])
def test_qwen_turns_halves(tmp_path: Path, kind: str) -> None:
    shape = SHAPES["qwen3"]
    torch.manual_seed(0)
    model = titan.Titan(shape, kind).double()
    optimiser = titan.adamw(model, lr=1e-2)
    titan.train(model, optimiser, titan.batches(shape, 2))
    with DcpImport(titan.write(tmp_path / "dcp", model, optimiser, 2), shape) as opened:
        weights, _ = read_whole(opened.write(tmp_path / "run"))
    stretto_model = build(shape).double()
    stretto_model.tie()
    stretto_model.load_state_dict(weights, strict=False)
    tokens = titan.batches(shape, 1, seed=3)[0][0]
    assert torch.allclose(stretto_model(tokens), model(tokens), atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention": AttentionShape(sinks=True)}, "model.attention.sinks True"),
        ({"attention": AttentionShape(window=4)}, "model.attention.window 4"),
        ({"attention": AttentionShape(norm="all")}, "model.attention.norm 'all'"),
        ({"attention": AttentionShape(qkv_bias=True)}, "model.attention.qkv_bias True"),
        ({"logit_softcap": 30.0}, "model.logit_softcap 30.0"),
        ({"norm": "rms1p"}, "model.norm 'rms1p'"),
        ({"rope": RopeScaling(type="linear", factor=2.0)}, "model.rope.type 'linear'"),
        ({"moe": EXPERTS}, "model.attention.norm of a model with experts None"),
    ],
)
def test_what_torchtitan_does_not_compute_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StrettoError, match="has no counterpart in torchtitan") as caught:
        list(rules(replace(SHAPES["llama3"], **change)))
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize("name", ["llama3.1-405b", "qwen3-8b", "qwen3-235b-a22b"])
def test_published_models_have_names(name: str) -> None:
    shape = preset(name)
    assert sum(1 for _ in rules(shape)) == len(parameter_shapes(shape))
