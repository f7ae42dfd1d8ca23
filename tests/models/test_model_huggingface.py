"""Hugging Face's own models, built from a configuration, with the same weights: the independent witness."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from model_shapes import SHAPES
from torch import Tensor

from stretto.cost.parameters import count_parameters
from stretto.cost.presets import preset
from stretto.cost.shape import ModelShape
from stretto.errors import StrettoError
from stretto.models import LanguageModel, build, initialise
from stretto.models.huggingface import from_huggingface, to_huggingface
from stretto.models.huggingface_config import config_to_huggingface
from stretto.models.weights import load_weights, weights_of

ALL = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
KINDS: dict[str, Any] = {
    "gpt": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
}


def their_model(shape: ModelShape) -> Any:
    config_class, model_class = KINDS[shape.family]
    ids = {"bos_token_id": 0, "eos_token_id": 1}
    config = config_class.from_dict(json.loads(json.dumps(config_to_huggingface(shape) | ids)))
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


def pair(shape: ModelShape) -> tuple[LanguageModel, Any]:
    ours, theirs = randomised(shape), their_model(shape)
    result = theirs.load_state_dict(to_huggingface(weights_of(ours), shape), strict=False)
    assert set(result.missing_keys) <= ({"lm_head.weight"} if shape.tied else set())
    assert not result.unexpected_keys
    theirs.tie_weights()
    return ours, theirs.eval()


def batch(shape: ModelShape) -> Tensor:
    return torch.randint(0, shape.vocab, (3, 16), generator=torch.Generator().manual_seed(4))


@ALL
def test_same_logits(shape: ModelShape):
    ours, theirs = pair(shape)
    ids = batch(shape)
    logits = theirs(ids).logits
    assert logits.std() > 0.1
    torch.testing.assert_close(ours(ids), logits, rtol=1e-5, atol=1e-5)


@ALL
def test_same_loss_and_gradients(shape: ModelShape):
    ours, theirs = pair(shape)
    ids = batch(shape)
    targets = torch.cat([ids[:, 1:], torch.full((3, 1), -100)], dim=1)
    count = (targets != -100).sum()
    loss = ours.loss(ours(ids), targets) / count
    loss.backward()
    their_loss = theirs(ids, labels=ids).loss
    their_loss.backward()
    torch.testing.assert_close(loss, their_loss, rtol=1e-5, atol=0)
    theirs_by_name = {name: p.grad for name, p in theirs.named_parameters()}
    expected = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    for name, grad in to_huggingface(expected, shape).items():
        if shape.family == "gpt" and not shape.bias and name.endswith("bias"):
            continue  # theirs has a bias that ours has not
        largest = theirs_by_name[name].abs().max().item()
        torch.testing.assert_close(grad, theirs_by_name[name], rtol=1e-4, atol=1e-5 * largest, msg=name)


@ALL
def test_there_and_back(shape: ModelShape):
    weights = weights_of(randomised(shape))
    there = to_huggingface(weights, shape)
    if shape.family == "gpt" and not shape.bias:
        there = {name: w for name, w in there.items() if not name.endswith("bias")}
    assert all(tensor.is_contiguous() for tensor in there.values())
    back = from_huggingface(there, shape)
    assert list(back) == list(weights)
    assert all(torch.equal(back[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("name", ["gpt", "gpt-untied", "llama-grouped", "llama-one-kv-head"])
def test_import_of_their_initial_model(name: str):
    """From their state dict, tied head and all, as a user has it."""
    shape = SHAPES[name]
    theirs, ours = their_model(shape).eval(), build(shape)
    load_weights(ours, from_huggingface(theirs.state_dict(), shape))
    ids = batch(shape)
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)


def test_import_of_files_as_published():
    """GPT-2's file has names without their first part, and masks; Llama 2's has rotary frequencies."""
    gpt, llama = SHAPES["gpt"], SHAPES["llama"]
    weights = weights_of(randomised(gpt))
    bare = {name.removeprefix("transformer."): w for name, w in to_huggingface(weights, gpt).items()}
    found = from_huggingface(bare | {"h.0.attn.bias": torch.ones(1, 1, 24, 24)}, gpt)
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    weights = weights_of(randomised(llama))
    full = to_huggingface(weights, llama)
    full["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    assert set(from_huggingface(full, llama)) == set(weights)


@pytest.mark.parametrize("name", ["gpt2", "llama2-7b", "llama3-70b", "llama3.2-1b"])
def test_presets_have_the_parameters_of_theirs(name: str):
    with torch.device("meta"):
        theirs = their_model(preset(name))
    theirs.tie_weights()
    assert sum(p.numel() for p in theirs.parameters()) == count_parameters(preset(name)).total


def test_weights_that_do_not_fit_are_named():
    shape = SHAPES["llama-grouped"]
    model = build(shape)
    initialise(model, 0)
    full = to_huggingface(weights_of(model), shape)
    lacking = {name: w for name, w in full.items() if name != "lm_head.weight"}
    with pytest.raises(StrettoError, match=r"'lm_head\.weight' is missing"):
        from_huggingface(lacking, shape)
    with pytest.raises(StrettoError, match=r"'layers\.2\.mlp\.up_proj\.weight' has no place"):
        from_huggingface(full | {"model.layers.2.mlp.up_proj.weight": torch.ones(1)}, shape)
    with pytest.raises(StrettoError, match=r"k_proj.weight' is \[64, 64\], but \[16, 64\]"):
        from_huggingface(full | {"model.layers.0.self_attn.k_proj.weight": torch.ones(64, 64)}, shape)


def test_untied_head_is_not_lost():
    shape = SHAPES["gpt"]
    full = to_huggingface(weights_of(build(shape)), shape)
    with pytest.raises(StrettoError, match="differs from the embedding"):
        from_huggingface(full | {"lm_head.weight": torch.ones(67, 32)}, shape)


@pytest.mark.parametrize("change", [{"kv_heads": 2}, {"head_dim": 16}])
def test_shapes_that_gpt2_cannot_have(change: dict[str, int]):
    shape = ModelShape(family="gpt", layers=1, hidden=32, heads=4, vocab=9, sequence=8, **change)
    with pytest.raises(StrettoError, match=next(iter(change))):
        to_huggingface(weights_of(build(shape)), shape)
