from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from model_shapes import SHAPES
from torch import Tensor

from stretto.engine.models import build, initialise
from stretto.engine.models.cache import KeyValueCache
from stretto.engine.models.generate import stream
from stretto.engine.models.language import LanguageModel
from stretto.job.attention import AttentionShape, LatentShape, RopeScaling
from stretto.job.experts import ExpertShape
from stretto.job.shape import ModelShape

BASE = ModelShape(family="llama", layers=3, hidden=32, heads=4, kv_heads=2, ffn=40, vocab=61, sequence=64)
LATENT = LatentShape(kv_rank=12, rope_dim=4, value_dim=6, q_rank=10)
FAMILIES = {
    "gpt": SHAPES["gpt"],
    "llama": BASE,
    "llama3 rope": replace(BASE, rope=RopeScaling(type="llama3", factor=4.0, original_positions=16)),
    "window": replace(BASE, attention=AttentionShape(window=5)),
    "windows and sinks": replace(BASE, attention=AttentionShape(window=5, full_every=2, sinks=True)),
    "capped": replace(BASE, attention=AttentionShape(window=4, full_every=3, softcap=2.0, norm="head")),
    "latent": replace(BASE, kv_heads=4, attention=AttentionShape(latent=LATENT)),
    "experts": replace(BASE, moe=ExpertShape(experts=4, shared_ffn=8, capacity=1.0)),
}


def model_of(shape: ModelShape) -> LanguageModel:
    model = build(shape)
    initialise(model, 3)
    return model.double().eval()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("cuts", [[7] + [1] * 13, [1] * 20, [3, 9, 1, 7]])
@torch.no_grad()
def test_logits_are_those_of_the_whole(name: str, cuts: list[int]):
    model = model_of(FAMILIES[name])
    ids = torch.randint(0, model.shape.vocab, (3, 20), generator=torch.Generator().manual_seed(1))
    cache = KeyValueCache(model)
    logits = torch.cat([cache.forward(part) for part in ids.split(cuts, dim=1)], dim=1)
    assert (logits - model(ids)).abs().max() < 1e-12
    assert cache.length == 20
    with pytest.raises(IndexError):
        cache.forward(torch.full((3, 1), model.shape.vocab + 1))
    assert torch.equal(model(ids), model(ids)), "nothing stays behind in the modules"
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_without_a_cache_also_beyond_the_models_positions(name: str):
    model = model_of(replace(FAMILIES[name], sequence=12))
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])

    def text(cache: bool) -> Tensor:
        rows = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
        return torch.stack(list(stream(model, ids, 20, generator=rows, cache=cache, top_p=0.9)))

    assert torch.equal(text(True), text(False))


def test_only_new_tokens_are_computed():
    model = model_of(BASE)
    seen = list[int]()
    handle = model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    list(stream(model, torch.tensor([[1, 2, 3, 4]]), 4, temperature=0.0))
    dynamic = RopeScaling(type="dynamic", factor=2.0, original_positions=4)
    list(
        stream(model_of(replace(BASE, rope=dynamic)), torch.tensor([[1, 2]]), 2)
    )  # no cache: see `cacheable`
    handle.remove()
    assert seen == [4, 1, 1, 1]


def test_rows_with_generators_of_their_own_do_not_depend_on_each_other():
    model = model_of(BASE)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    both = torch.stack(
        list(stream(model, ids, 8, generator=[torch.Generator().manual_seed(s) for s in (5, 6)]))
    )
    for row, seed in enumerate((5, 6)):
        generator = torch.Generator().manual_seed(seed)
        alone = torch.stack(list(stream(model, ids[row : row + 1], 8, generator=generator)))
        assert torch.equal(both[:, row], alone[:, 0])


def test_a_window_keeps_no_more_than_it_needs():
    model = model_of(replace(BASE, attention=AttentionShape(window=4)))
    cache = KeyValueCache(model)
    with torch.no_grad():
        for _ in range(60):
            cache.forward(torch.tensor([[1]]))
    assert {layer_cache._keys.shape[2] for layer_cache in cache._caches} == {8}


def test_greedy_tokens_are_those_of_transformers():
    import transformers

    from stretto.engine.models.huggingface import from_huggingface

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=BASE.norm_eps,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,
    )
    transformers_model = transformers.LlamaForCausalLM(config).double().eval()
    stretto_model = build(BASE).double()
    stretto_model.load_state_dict(from_huggingface(transformers_model.state_dict(), BASE))
    ids = torch.tensor([[1, 2, 3, 4], [9, 8, 7, 6]])
    want = transformers_model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
    )
    tokens = torch.stack(list(stream(stretto_model, ids, 24, temperature=0.0)), dim=1)
    assert torch.equal(tokens, want[:, 4:])
    assert len(set(tokens[0].tolist())) > 3
