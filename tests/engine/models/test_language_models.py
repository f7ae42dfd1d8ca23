from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from model_shapes import SHAPES
from torch import nn

from stretto.engine.models import CrossEntropy, LanguageModel, build, initialise
from stretto.errors import StrettoError
from stretto.job.parameters import count_parameters, parameter_shapes
from stretto.job.shape import ModelShape

ALL = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def initialised(shape: ModelShape, dtype: torch.dtype = torch.float32) -> LanguageModel:
    model = build(shape).to(dtype)
    initialise(model, 0)
    return model


def some_ids(shape: ModelShape, rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(0, shape.vocab, (rows, length), generator=torch.Generator().manual_seed(1))


@ALL
def test_parameters_are_those_that_were_counted(shape: ModelShape):
    model = build(shape)
    results = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert list(results.items()) == list(parameter_shapes(shape).items())
    assert sum(p.numel() for p in model.parameters()) == count_parameters(shape).total


@ALL
def test_layers_in_a_row_are_the_model(shape: ModelShape):
    model, ids = initialised(shape), some_ids(shape)
    x = ids
    for name, layer in model.layers():
        assert model.get_submodule(name) is layer
        x = layer(x)
    assert x.shape == (*ids.shape, shape.vocab)
    assert torch.equal(x, model(ids))


@ALL
def test_starts_at_the_loss_of_guessing(shape: ModelShape):
    model, ids = initialised(shape), some_ids(shape)
    loss = model.loss(model(ids), torch.flip(ids, dims=[1])) / ids.numel()
    assert loss.item() == pytest.approx(math.log(shape.vocab), rel=0.03)


@ALL
def test_no_position_sees_a_later_one(shape: ModelShape):
    model, ids = initialised(shape, torch.float64), some_ids(shape)
    before = model(ids)
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % shape.vocab
    after = model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


@ALL
def test_gradients_are_those_of_finite_differences(shape: ModelShape):
    model, ids = initialised(shape, torch.float64), some_ids(shape, 1, 6)
    targets = some_ids(shape, 1, 6).flip(1)

    def loss() -> torch.Tensor:
        return model.loss(model(ids), targets)

    loss().backward()
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        way = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        assert parameter.grad is not None
        with torch.no_grad():
            parameter += 1e-5 * way
            above = loss()
            parameter -= 2e-5 * way
            below = loss()
            parameter += 1e-5 * way
        slope = (parameter.grad * way).sum()
        assert slope.item() == pytest.approx(((above - below) / 2e-5).item(), rel=1e-5, abs=1e-7), name


@ALL
def test_a_model_leaves_the_meta_device_layer_by_layer(shape: ModelShape):
    with torch.device("meta"):
        model = build(shape)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    for _, layer in model.layers():
        layer.to_empty(device="cpu")
    initialise(model, 0)
    ids = some_ids(shape)
    assert torch.equal(model(ids), initialised(shape)(ids))


@ALL
def test_the_state_dict_holds_parameters_only(shape: ModelShape):
    extra = {"head.out.weight"} if shape.tied else set()
    assert set(build(shape).state_dict()) == set(parameter_shapes(shape)) | extra


@pytest.mark.parametrize("name", ["gpt", "llama-one-kv-head"])
def test_tied_head_gathers_both_gradients(name: str):
    shape = SHAPES[name]
    tied, ids = initialised(shape, torch.float64), some_ids(shape)
    assert tied.head.out.weight is tied.get_parameter("embed.tok.weight")
    apart = build(replace(shape, tied=False)).double()
    apart.load_state_dict(tied.state_dict())
    for model in (tied, apart):
        model.loss(model(ids), ids).backward()
    both = apart.get_parameter("embed.tok.weight").grad
    head = apart.head.out.weight.grad
    assert both is not None
    assert head is not None
    torch.testing.assert_close(tied.head.out.weight.grad, both + head, rtol=1e-12, atol=0)


def test_names_that_plans_match():
    gpt, llama = build(SHAPES["gpt"]), build(SHAPES["llama-grouped"])
    for name in ("embed.tok", "embed.pos"):
        assert isinstance(gpt.get_submodule(name), nn.Embedding)
    linears = ("attn.qkv", "attn.proj", "mlp.up", "mlp.down")
    assert all(isinstance(gpt.get_submodule(f"blocks.1.{name}"), nn.Linear) for name in linears)
    linears = ("attn.qkv", "attn.proj", "mlp.gate_up", "mlp.down")
    assert all(isinstance(llama.get_submodule(f"blocks.1.{name}"), nn.Linear) for name in linears)
    for model in (gpt, llama):
        for name in (
            "blocks.0.norm1",
            "blocks.0.norm2",
            "blocks.0.attn.core",
            "head.norm",
            "head.out",
            "loss",
        ):
            model.get_submodule(name)


def test_dropout_modules_are_there_when_there_is_any():
    names = ("embed.drop", "blocks.0.attn.core.drop", "blocks.0.attn.drop", "blocks.0.mlp.drop")
    without, with_some = build(SHAPES["gpt"]), build(replace(SHAPES["gpt"], dropout=0.1))
    for name in names:
        assert isinstance(without.get_submodule(name), nn.Identity)
        assert isinstance(with_some.get_submodule(name), nn.Dropout)


def test_dropout_acts_in_training_only():
    model = initialised(replace(SHAPES["gpt"], dropout=0.2))
    ids = some_ids(model.shape)
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))
    assert torch.equal(model(ids), initialised(SHAPES["gpt"])(ids))


@pytest.mark.parametrize("name", ["gpt", "llama-grouped"])
def test_attention_follows_its_own_numbers_of_heads(name: str):
    """Tensor parallelism requires this: with the rows of some heads, attention gives their part of the
    sum.
    """
    shape = SHAPES[name]
    attention = initialised(shape, torch.float64).get_submodule("blocks.0.attn")
    x = torch.randn(2, 5, shape.hidden, dtype=torch.float64)
    output = attention(x) - (attention.proj.bias if shape.bias else 0)
    parts = torch.zeros_like(output)
    d = shape.head_dim
    q, k, v = (range(start, start + n * d) for start, n in _starts(shape))
    weight, bias, out = attention.qkv.weight, attention.qkv.bias, attention.proj.weight
    for half in range(2):
        rows = [i for block in (q, k, v) for i in _half(block, half)]
        attention.heads, attention.kv_heads = shape.heads // 2, shape.kv_heads // 2
        attention.qkv = nn.Linear(shape.hidden, len(rows), bias=shape.bias, dtype=torch.float64)
        attention.proj = nn.Linear(len(q) // 2, shape.hidden, bias=False, dtype=torch.float64)
        with torch.no_grad():
            attention.qkv.weight.copy_(weight[rows])
            if shape.bias:
                attention.qkv.bias.copy_(bias[rows])
            attention.proj.weight.copy_(out[:, _half(q, half)])
        parts = parts + attention(x)
    torch.testing.assert_close(parts, output, rtol=1e-12, atol=1e-14)


def _starts(shape: ModelShape) -> list[tuple[int, int]]:
    k = shape.attention_width
    return [(0, shape.heads), (k, shape.kv_heads), (k + shape.kv_width, shape.kv_heads)]


def _half(block: range, half: int) -> list[int]:
    n = len(block) // 2
    return list(block[half * n : (half + 1) * n])


def test_more_tokens_than_positions():
    model = build(SHAPES["gpt"])
    with pytest.raises(StrettoError, match="25 tokens in a row, but the model has 24"):
        model(torch.zeros(1, 25, dtype=torch.int64))


def test_loss_sums_over_tokens_and_skips_the_ignored():
    logits = torch.randn(2, 3, 7)
    targets = torch.tensor([[1, -100, 3], [-100, 5, 6]])
    terms = [-logits[b, s].log_softmax(-1)[targets[b, s]] for b, s in ((0, 0), (0, 2), (1, 1), (1, 2))]
    loss = CrossEntropy()(logits, targets)
    assert loss.shape == ()
    torch.testing.assert_close(loss, torch.stack(terms).sum())
    assert CrossEntropy()(logits, torch.full_like(targets, -100)).item() == 0


@pytest.mark.parametrize(
    ("inputs", "summed"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_loss_is_summed_in_at_least_float32(inputs: torch.dtype, summed: torch.dtype):
    logits = torch.randn(2, 3, 7).to(inputs)
    loss = CrossEntropy()(logits, torch.ones(2, 3, dtype=torch.int64))
    assert loss.dtype == summed
    exact = -logits.double().log_softmax(-1)[..., 1].sum()
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)


@pytest.mark.parametrize("name", [pytest.param("gpt", marks=pytest.mark.slow), "llama-grouped"])
def test_compiles_as_one_graph(name: str):
    model, ids = initialised(SHAPES[name]), some_ids(SHAPES[name])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids), model(ids))
