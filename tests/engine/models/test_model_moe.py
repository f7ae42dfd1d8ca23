"""The layer of experts against one MLP a token, its gradients, capacity at its edges, and whole models."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_shapes import EXPERTS, ROUTERS, SHAPES
from torch import Tensor, nn

from stretto.engine.models import LanguageModel, build, initial_values, initialise
from stretto.engine.models.generate import stream
from stretto.engine.models.mlp import MLP
from stretto.engine.models.moe import MoE, feed_forward
from stretto.job.experts import ExpertShape
from stretto.job.parameters import count_parameters, parameter_shapes
from stretto.job.shape import ModelShape

EVERY = {**EXPERTS, **ROUTERS}
ALL = pytest.mark.parametrize("shape", EVERY.values(), ids=EVERY)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sigmoid": {"score": "sigmoid", "normalise": False, "z": 0.01},
    "shared": {"shared_ffn": 7, "top_k": 3},
    "probs": {"capacity": 0.6},
    "position": {"capacity": 0.6, "drop": "position"},
}


def small(family: Any, **moe: Any) -> ModelShape:
    experts = ExpertShape(**{"experts": 4, "top_k": 2, "balance": 0.1, **moe})
    return ModelShape(
        family=family, layers=1, hidden=6, heads=1, ffn=5, vocab=9, sequence=8, bias=True, moe=experts
    )


def layer(shape: ModelShape) -> MoE:
    """A block's experts, in float64, every weight random."""
    results = build(shape).double().get_submodule("blocks.0.mlp")
    assert isinstance(results, MoE)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in results.parameters():
            parameter.normal_(std=0.5, generator=generator)
    return results


def tokens(*sizes: int, seed: int = 3) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_expert(moe: MoE, e: int, x: Tensor) -> Tensor:
    """x through one expert, from the stacked tensors by their documented meaning."""
    experts = moe.experts
    if hasattr(experts, "gate_up"):
        gate, up = (experts.gate_up[e] @ x + experts.gate_up_bias[e]).chunk(2)
        inner = gate * torch.sigmoid(gate) * up
    else:
        y = experts.up[e] @ x + experts.up_bias[e]
        inner = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    return experts.down[e] @ inner + experts.down_bias[e]


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("case", CASES)
def test_a_layer_equals_its_experts_applied_token_by_token(family: str, case: str) -> None:
    moe, x = layer(small(family, **CASES[case])), tokens(2, 8, 6)
    router = moe.router
    chosen = router.choose(x @ router.gate.weight.t())
    within_capacity = router.keep(chosen.experts, chosen.weights)
    assert bool(within_capacity.all()) == (moe.router.moe.capacity is None)
    expected = torch.zeros_like(x)
    for b in range(2):
        for s in range(8):
            for e, w, stays in zip(
                chosen.experts[b, s].tolist(), chosen.weights[b, s], within_capacity[b, s], strict=True
            ):
                expected[b, s] += w * stays * one_expert(moe, e, x[b, s])
    if moe.shared is not None:
        expected = expected + moe.shared(x)
    torch.testing.assert_close(moe(x), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_output_and_losses(family: str, case: str) -> None:
    moe, x = layer(small(family, **CASES[case])), tokens(2, 5, 6).requires_grad_()
    names = [name for name, _ in moe.named_parameters()]

    def outputs(x: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        y: Tensor = torch.func.functional_call(moe, dict(zip(names, parameters, strict=True)), (x,))
        return y, moe.auxiliary

    assert torch.autograd.gradcheck(outputs, (x, *moe.parameters()), fast_mode=True)


def test_auxiliary_losses_depend_on_the_router_only() -> None:
    moe, x = layer(small("llama", z=0.1, shared_ffn=3)), tokens(2, 8, 6)
    moe(x)
    moe.auxiliary.backward()
    touched = {name for name, p in moe.named_parameters() if p.grad is not None}
    assert touched == {"router.gate.weight"}
    logits = x @ moe.router.gate.weight.t()
    squares = 0.1 * logits.exp().sum(-1).log().square().sum()
    scores = logits.softmax(-1)
    share = F.one_hot(scores.topk(2).indices, 4).double().mean((1, 2))  # [b, e], sums to one
    balance = 0.1 * 8 * 4 * (share * scores.mean(1)).sum()
    torch.testing.assert_close(moe.auxiliary, squares + balance, rtol=1e-12, atol=0)


def test_losses_of_samples_add_up() -> None:
    """So that they do not depend on how a batch is cut into microbatches."""
    moe, x = layer(small("gpt", z=0.1, capacity=0.5)), tokens(3, 8, 6)
    together, results = moe(x), moe.auxiliary
    apart, parts = zip(*((moe(sample[None]), moe.auxiliary) for sample in x), strict=True)
    torch.testing.assert_close(torch.cat(apart), together, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.stack(parts).sum(), results, rtol=1e-12, atol=0)


def test_a_capacity_for_all_tokens_drops_none() -> None:
    roomy, free = layer(small("llama", capacity=4.0)), layer(small("llama"))
    x = tokens(2, 8, 6)
    assert torch.equal(roomy(x), free(x))


@pytest.mark.parametrize("drop", ["probs", "position"])
def test_tokens_beyond_all_capacities_add_nothing(drop: str) -> None:
    """Equal tokens all choose alike, so the first ones fill their experts and the others get nothing."""
    moe = layer(small("llama", capacity=0.5, drop=drop))  # ceil(0.5 * 8 * 2 / 4) = 2 of 8
    x = tokens(1, 1, 6).expand(1, 8, 6).clone().requires_grad_()
    y = moe(x)
    assert (y[0, :2] != 0).all()
    assert torch.equal(y[0, 2:], torch.zeros(6, 6, dtype=torch.float64))
    y.sum().backward()
    assert x.grad is not None
    assert (x.grad[0, :2] != 0).all()
    assert (x.grad[0, 2:] == 0).all()
    moe.eval()
    assert (moe(x) != 0).all()


def test_all_choices_dropped() -> None:
    moe, x = layer(small("gpt")), tokens(4, 6).requires_grad_()
    chosen = moe.router.choose(moe.router.logits(x))
    y = moe._mix(x, chosen, torch.zeros(4, 2, dtype=torch.bool))
    assert torch.equal(y, torch.zeros_like(x))
    y.sum().backward()
    for tensor in (x, *moe.experts.parameters(), moe.router.gate.weight):
        assert tensor.grad is not None
        assert (tensor.grad == 0).all()


def test_an_expert_without_tokens_gets_no_gradient() -> None:
    moe = layer(small("llama", top_k=1, balance=0.0))
    with torch.no_grad():
        moe.router.gate.weight[:, 0] = torch.tensor([0.0, 0.0, -1e4, 0.0])
    x = tokens(2, 8, 6)
    x[..., 0] = 1.0  # so that no token chooses expert 2
    moe(x).sum().backward()
    for name, parameter in moe.experts.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad[2] == 0).all(), name
        assert (parameter.grad[[0, 1, 3]] != 0).any(), name


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_one_expert_is_the_mlp(family: Any) -> None:
    shape = small(family, experts=1, top_k=1)
    moe, mlp = layer(shape), build(replace(shape, moe=None)).double().get_submodule("blocks.0.mlp")
    for name, parameter in moe.experts.named_parameters():
        kind = "bias" if name.endswith("_bias") else "weight"
        linear = mlp.get_submodule(name.removesuffix("_bias"))
        getattr(linear, kind).data = parameter.detach()[0]
    x = tokens(2, 8, 6)
    torch.testing.assert_close(moe(x), mlp(x), rtol=1e-13, atol=1e-14)


def test_evaluation_has_no_auxiliary_loss() -> None:
    moe = layer(small("gpt", z=0.1)).eval()
    moe(tokens(2, 8, 6))
    assert moe.auxiliary.item() == 0
    assert moe.auxiliary.dtype == torch.float64


def test_dropout_applies_to_the_sum_of_all_experts() -> None:
    shape = replace(small("gpt", shared_ffn=4), dropout=0.3)
    results = [name for name, module in build(shape).named_modules() if isinstance(module, nn.Dropout)]
    assert [name for name in results if ".mlp" in name] == ["blocks.0.mlp.drop"]


def test_half_precision_and_autocast() -> None:
    x = tokens(2, 8, 6).float()
    moe = layer(small("llama")).float()
    exact = moe(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = moe(x)
    assert moe.auxiliary.dtype == torch.float32
    torch.testing.assert_close(y.float(), exact, rtol=0.1, atol=0.1)
    y.float().sum().backward()
    half = moe.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert moe.auxiliary.dtype == torch.float32


def test_a_layer_can_be_copied_after_a_forward() -> None:
    moe, x = layer(small("llama")), tokens(1, 8, 6)
    y = moe(x)
    other = copy.deepcopy(moe)
    assert torch.equal(other.auxiliary, moe.auxiliary)
    assert not other.auxiliary.requires_grad
    assert torch.equal(other(x), y)


# whole models


def initialised(shape: ModelShape) -> LanguageModel:
    model = build(shape).double()
    initialise(model, 0)
    return model


def some_ids(shape: ModelShape, rows: int = 2, length: int = 12) -> Tensor:
    return torch.randint(0, shape.vocab, (rows, length), generator=torch.Generator().manual_seed(1))


@ALL
def test_parameters_are_those_that_were_counted(shape: ModelShape) -> None:
    model = build(shape)
    results = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert list(results.items()) == list(parameter_shapes(shape).items())
    assert sum(p.numel() for p in model.parameters()) == count_parameters(shape).total


@ALL
def test_active_parameters_are_those_that_one_token_uses(shape: ModelShape) -> None:
    assert shape.moe is not None
    model = initialised(replace(shape, tied=False, moe=replace(shape.moe, capacity=None)))
    touched = 0
    model(torch.zeros(1, 1, dtype=torch.int64)).sum().backward()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # a correction, of which each token meets every number
            touched += parameter.numel()
            continue
        assert parameter.grad is not None
        per_expert = ".experts." in name
        used = (parameter.grad != 0).flatten(1).any(1).sum().item() if per_expert else len(parameter)
        touched += used * parameter[0].numel()
    assert touched == count_parameters(model.shape).active


@ALL
def test_gradients_are_those_of_finite_differences(shape: ModelShape) -> None:
    model, ids = initialised(shape), some_ids(shape, 1, 6)
    targets = some_ids(shape, 1, 6).flip(1)

    def loss() -> Tensor:
        return model.loss(model(ids), targets) + model.auxiliary()

    loss().backward()
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert name.endswith("router.correction")
            continue
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
def test_auxiliary_is_the_sum_over_blocks(shape: ModelShape) -> None:
    model, ids = initialised(shape), some_ids(shape)
    assert model.auxiliary().item() == 0
    x, each = ids, torch.zeros((), dtype=torch.float64)
    for _, module in model.layers():
        x = module(x)
        for moe in module.modules():
            each = each + moe.auxiliary if isinstance(moe, MoE) else each
    model(ids)
    assert each.item() > 0
    torch.testing.assert_close(model.auxiliary(), each, rtol=1e-14, atol=0)
    model.eval()(ids)
    assert model.auxiliary().item() == 0


def test_without_experts_there_is_no_auxiliary_loss() -> None:
    model = initialised(SHAPES["gpt"])
    model(some_ids(model.shape))
    assert model.auxiliary().item() == 0
    assert type(feed_forward(model.shape)) is MLP


@ALL
def test_no_position_sees_a_later_one(shape: ModelShape) -> None:
    """But that `probs` lets a later token take an earlier one's place, which is why it is for training."""
    model, ids = initialised(shape), some_ids(shape)
    before = model(ids)
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % shape.vocab
    after = model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=1e-12, atol=1e-14)
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


@ALL
def test_a_model_leaves_the_meta_device_layer_by_layer(shape: ModelShape) -> None:
    with torch.device("meta"):
        model = build(shape).double()
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    for _, module in model.layers():
        module.to_empty(device="cpu")
    initialise(model, 0)
    ids = some_ids(shape)
    assert torch.equal(model(ids), initialised(shape)(ids))
    assert model.auxiliary().item() > 0


@ALL
def test_the_state_dict_holds_parameters_only(shape: ModelShape) -> None:
    model = build(shape)
    model(some_ids(shape))
    extra = {"head.out.weight"} if shape.tied else set[str]()
    assert set(model.state_dict()) == set(parameter_shapes(shape)) | extra


def test_initial_values_of_experts() -> None:
    shape = replace(EXPERTS["llama-experts"], layers=8)
    narrow = ("experts.down", "shared.down.weight")
    wide = ("router.gate.weight", "experts.gate_up", "shared.gate_up.weight")
    for name in narrow + wide:
        values = initial_values(f"blocks.1.mlp.{name}", (4, 100, 200), 0, shape)
        std = 0.02 / 4 if name in narrow else 0.02
        assert values.std().item() == pytest.approx(std, rel=0.02), name
    for name in ("experts.gate_up_bias", "experts.down_bias"):
        assert (initial_values(f"blocks.1.mlp.{name}", (4, 100), 0, shape) == 0).all()


@ALL
def test_generation_in_a_batch_equals_row_by_row(shape: ModelShape) -> None:
    """A token at a time and in a batch, as if each row were alone: no capacity is applied."""
    model, prompts = initialised(shape), some_ids(shape, 3, 4)
    together = torch.stack(list(stream(model, prompts, 5, temperature=0.0)), dim=1)
    alone = [torch.stack(list(stream(model, row[None], 5, temperature=0.0)), dim=1) for row in prompts]
    assert torch.equal(together, torch.cat(alone))
    assert model.training
