"""Hugging Face's own models, built from a configuration, with the same weights: the independent witness."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_shapes import EXPERTS, SHAPES
from safetensors.torch import load_file, save_file
from torch import Tensor

from stretto.engine.checkpoint.huggingface.exporting import export_huggingface
from stretto.engine.checkpoint.huggingface.importing import import_huggingface
from stretto.engine.checkpoint.read import read_whole, shape_of
from stretto.engine.checkpoint.save import save
from stretto.engine.models import LanguageModel, build, initialise
from stretto.engine.models.huggingface import from_huggingface, to_huggingface
from stretto.engine.parallel.fragment import ShardPlacement
from stretto.errors import StrettoError
from stretto.job.huggingface import config_to_huggingface, differences, shape_from_huggingface
from stretto.job.parameters import count_parameters
from stretto.job.presets import preset
from stretto.job.shape import ModelShape, shape_to_record

EXCHANGED = SHAPES | {"mixtral": EXPERTS["mixtral"]}
ALL = pytest.mark.parametrize("shape", EXCHANGED.values(), ids=EXCHANGED)
KINDS: dict[str, Any] = {
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
}


def their_model(shape: ModelShape) -> Any:
    written = config_to_huggingface(shape)
    config_class, model_class = KINDS[written["model_type"]]
    ids = {"bos_token_id": 0, "eos_token_id": 1}
    config = config_class.from_dict(json.loads(json.dumps(written | ids)))
    config._experts_implementation = "eager"  # their loop, which takes every type
    return model_class(config)


def randomised(shape: ModelShape) -> LanguageModel:
    """Every weight random, biases and gains too, so that none can be swapped or lost unseen."""
    model = build(shape)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter += 1
    return model


def stacked(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """`from_pretrained` stacks the experts of a block of Mixtral's files in two tensors."""
    results: dict[str, Tensor] = {}
    linears: dict[str, dict[str, list[Tensor]]] = {}
    for name, weight in weights.items():
        block, inside, rest = name.partition(".block_sparse_moe.")
        if not inside:
            results[name] = weight
        elif rest == "gate.weight":
            results[f"{block}.mlp.gate.weight"] = weight
        else:
            _, _, linear, _ = rest.split(".")
            linears.setdefault(block, {}).setdefault(linear, []).append(weight)
    for block, parts in linears.items():
        w1, w2, w3 = (torch.stack(parts[name]) for name in ("w1", "w2", "w3"))
        results[f"{block}.mlp.experts.gate_up_proj"] = torch.cat([w1, w3], dim=1)
        results[f"{block}.mlp.experts.down_proj"] = w2
    return results


def pair(shape: ModelShape) -> tuple[LanguageModel, Any]:
    stretto_model, transformers_model = randomised(shape), their_model(shape)
    written = to_huggingface(dict(stretto_model.named_parameters()), shape)
    result = transformers_model.load_state_dict(stacked(written) if shape.moe else written, strict=False)
    assert set(result.missing_keys) <= ({"lm_head.weight"} if shape.tied else set())
    assert not result.unexpected_keys
    transformers_model.tie_weights()
    return stretto_model, transformers_model.eval()


def batch(shape: ModelShape) -> Tensor:
    return torch.randint(0, shape.vocab, (3, 16), generator=torch.Generator().manual_seed(4))


@ALL
def test_logits_equal_transformers(shape: ModelShape):
    stretto_model, transformers_model = pair(shape)
    ids = batch(shape)
    logits = transformers_model(ids).logits
    assert logits.std() > 0.1
    torch.testing.assert_close(stretto_model(ids), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt", "llama-grouped", "mixtral"])
def test_logits_equal_transformers_in_float64(name: str, monkeypatch: pytest.MonkeyPatch):
    """Theirs take rotary angles, norms and router in float32 whatever the type: here what they call so is
    float64.
    """
    for alias in ("float32", "float"):
        monkeypatch.setattr(torch, alias, torch.float64)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    shape = EXCHANGED[name]
    stretto_model, transformers_model = pair(shape)
    ids = batch(shape)
    expected = transformers_model.double()(ids).logits
    assert expected.dtype == torch.float64
    torch.testing.assert_close(stretto_model.double()(ids), expected, rtol=1e-10, atol=1e-10)


@ALL
def test_loss_and_gradients_equal_transformers(shape: ModelShape):
    stretto_model, transformers_model = pair(shape)
    ids = batch(shape)
    targets = torch.cat([ids[:, 1:], torch.full((3, 1), -100)], dim=1)
    count = (targets != -100).sum()
    loss = stretto_model.loss(stretto_model(ids), targets) / count
    loss.backward()
    their_loss = transformers_model(ids, labels=ids).loss
    their_loss.backward()
    torch.testing.assert_close(loss, their_loss, rtol=1e-5, atol=0)
    theirs_by_name = {name: p.grad for name, p in transformers_model.named_parameters()}
    expected = {name: p.grad for name, p in stretto_model.named_parameters() if p.grad is not None}
    written = to_huggingface(expected, shape)
    for name, grad in (stacked(written) if shape.moe else written).items():
        if shape.family == "gpt" and not shape.bias and name.endswith("bias"):
            continue  # theirs has a bias that ours has not
        largest = theirs_by_name[name].abs().max().item()
        torch.testing.assert_close(grad, theirs_by_name[name], rtol=1e-4, atol=1e-5 * largest, msg=name)


@ALL
def test_there_and_back(shape: ModelShape):
    weights = dict(randomised(shape).named_parameters())
    there = to_huggingface(weights, shape)
    assert all(tensor.is_contiguous() for tensor in there.values())
    back = from_huggingface(there, shape)
    assert list(back) == list(weights)
    assert all(torch.equal(back[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("name", ["gpt", "gpt-untied", "llama-grouped", "llama-one-kv-head", "mixtral"])
def test_import_of_their_initial_model(name: str):
    """From their state dict, tied head and all, as a user has it."""
    shape = EXCHANGED[name]
    transformers_model, stretto_model = their_model(shape).eval(), build(shape)
    stretto_model.load_state_dict(from_huggingface(transformers_model.state_dict(), shape), strict=False)
    ids = batch(shape)
    torch.testing.assert_close(stretto_model(ids), transformers_model(ids).logits, rtol=1e-5, atol=1e-5)


def test_import_of_files_as_published():
    """GPT-2's file has names without their first part, and masks; Llama 2's has rotary frequencies."""
    gpt, llama = SHAPES["gpt"], SHAPES["llama"]
    weights = dict(randomised(gpt).named_parameters())
    bare = {name.removeprefix("transformer."): w for name, w in to_huggingface(weights, gpt).items()}
    results = from_huggingface(bare | {"h.0.attn.bias": torch.ones(1, 1, 24, 24)}, gpt)
    assert all(torch.equal(results[name], weight) for name, weight in weights.items())
    weights = dict(randomised(llama).named_parameters())
    full = to_huggingface(weights, llama)
    full["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    assert set(from_huggingface(full, llama)) == set(weights)


@pytest.mark.parametrize("name", ["gpt2", "llama2-7b", "llama3-70b", "llama3.2-1b", "mixtral-8x7b"])
def test_presets_have_the_parameters_of_theirs(name: str):
    with torch.device("meta"):
        transformers_model = their_model(preset(name))
    transformers_model.tie_weights()
    assert sum(p.numel() for p in transformers_model.parameters()) == count_parameters(preset(name)).total


def test_weights_that_do_not_fit_are_named():
    shape = SHAPES["llama-grouped"]
    model = build(shape)
    initialise(model, 0)
    full = to_huggingface(dict(model.named_parameters()), shape)
    lacking = {name: w for name, w in full.items() if name != "lm_head.weight"}
    with pytest.raises(StrettoError, match=r"'lm_head\.weight' is missing"):
        from_huggingface(lacking, shape)
    with pytest.raises(StrettoError, match=r"'model\.layers\.2\.mlp\.up_proj\.weight' has no place"):
        from_huggingface(full | {"model.layers.2.mlp.up_proj.weight": torch.ones(1)}, shape)
    with pytest.raises(StrettoError, match=r"k_proj.weight' is \[64, 64\], but \[16, 64\]"):
        from_huggingface(full | {"model.layers.0.self_attn.k_proj.weight": torch.ones(64, 64)}, shape)


def test_an_untied_head_is_exported():
    shape = SHAPES["gpt"]
    full = to_huggingface(dict(build(shape).named_parameters()), shape)
    with pytest.raises(StrettoError, match="differs from the embedding"):
        from_huggingface(full | {"lm_head.weight": torch.ones(67, 32)}, shape)


@pytest.mark.parametrize("change", [{"kv_heads": 2}, {"head_dim": 16}])
def test_shapes_that_gpt2_cannot_have(change: dict[str, Any]):
    shape = ModelShape(family="gpt", layers=1, hidden=32, heads=4, vocab=9, sequence=8, **change)
    with pytest.raises(StrettoError, match=next(iter(change))):
        to_huggingface(dict(build(shape).named_parameters()), shape)


def test_expert_weights_have_the_names_of_published_files(tmp_path: Path):
    """Exports equal the files of save_pretrained, and from_pretrained reads them."""
    shape = EXPERTS["mixtral"]
    stretto_model, transformers_model = pair(shape)
    transformers_model.save_pretrained(tmp_path / "theirs")
    saved = load_file(tmp_path / "theirs" / "model.safetensors")
    written = to_huggingface(dict(stretto_model.named_parameters()), shape)
    assert saved.keys() == written.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in written.items())
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in written
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert not differences(shape_from_huggingface(config), shape)
    (tmp_path / "ours").mkdir()
    save_file(written, tmp_path / "ours" / "model.safetensors", {"format": "pt"})
    (tmp_path / "ours" / "config.json").write_text(json.dumps(config_to_huggingface(shape)))
    loaded = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "ours")
    for name, weight in transformers_model.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name


def test_expert_blocks_survive_a_round_trip_through_a_checkpoint(tmp_path: Path):
    shape = replace(EXPERTS["mixtral"], norm_eps=1e-6)
    weights = dict(randomised(shape).named_parameters())
    places = {
        f"model.{n}": (w, ShardPlacement.unsharded(f"model.{n}", tuple(w.shape))) for n, w in weights.items()
    }
    saved = save(tmp_path / "run" / "checkpoints", 7, places, {"model": shape_to_record(shape)})
    export_huggingface(saved, tmp_path / "out", shard_bytes=20_000)
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    back, loaded = read_whole(import_huggingface(tmp_path / "out", tmp_path / "again"))
    assert all(torch.equal(back[name], weight) for name, weight in weights.items())
    assert not differences(shape_of(tmp_path, loaded.meta), shape)


@pytest.mark.parametrize("name", ["llama-experts", "gpt-experts", "gpt-capacity"])
def test_experts_that_mixtral_cannot_have(name: str):
    shape = EXPERTS[name]
    with pytest.raises(StrettoError, match="no counterpart in"):
        to_huggingface(dict(build(shape).named_parameters()), shape)
    with pytest.raises(StrettoError, match="no counterpart in"):
        config_to_huggingface(shape)


def test_experts_of_another_size_are_named():
    shape = EXPERTS["mixtral"]
    transformers_weights = their_model(shape).state_dict()
    narrow = transformers_weights | {"model.layers.1.mlp.experts.down_proj": torch.ones(4, 32, 39)}
    with pytest.raises(StrettoError, match=r"down_proj' is \[4, 32, 39\], but \[4, 32, 40\]"):
        from_huggingface(narrow, shape)
    fewer = {
        name: w
        for name, w in transformers_weights.items()
        if name != "model.layers.0.mlp.experts.gate_up_proj"
    }
    with pytest.raises(StrettoError, match=r"layers\.0\.block_sparse_moe\.experts\.0\.w1.* is missing"):
        from_huggingface(fewer, shape)
