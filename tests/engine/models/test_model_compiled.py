"""Blocks whose parts are compiled compute what they compute otherwise, and like blocks share graphs.

Most tests take `aot_eager`, which traces and differentiates as inductor does, and generates no code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.engine.compiler import Compiler
from stretto.engine.models.build import build
from stretto.engine.models.compiled import _exact, compile_blocks
from stretto.engine.models.language import LanguageModel
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.recompute import recompute_blocks
from stretto.engine.parallel.tensor.linear import (
    AccumulatesOwnGradients,
    DeferredGradient,
    convert_linears,
    run_deferred,
)
from stretto.job.attention import AttentionShape
from stretto.job.experts import ExpertShape
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout

LLAMA = ModelShape(
    family="llama",
    layers=2,
    hidden=16,
    heads=4,
    kv_heads=2,
    ffn=24,
    vocab=32,
    sequence=8,
    attention=AttentionShape(norm="head"),
)
EXPERTS = replace(LLAMA, attention=AttentionShape(), moe=ExpertShape(experts=4, top_k=2))
SANDWICH = replace(LLAMA, block_norms="sandwich", norm="rms1p", mlp="geglu")


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    aot_compiler = Compiler("aot_eager")
    yield aot_compiler
    aot_compiler.close()


def models(shape: ModelShape, compiler: Compiler) -> tuple[LanguageModel, LanguageModel]:
    """The model twice, with the same weights in float64; the second one compiled."""
    torch.manual_seed(0)
    plain, compiled = build(shape).double(), build(shape).double()
    compiled.load_state_dict(plain.state_dict())
    compile_blocks(compiled, compiler)
    return plain, compiled


def gradients(model: LanguageModel) -> dict[str, Tensor]:
    ids = torch.arange(16).view(2, 8) % model.shape.vocab
    model.zero_grad()
    (model.loss(model(ids), ids.roll(1)) + model.auxiliary()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "shape",
    [pytest.param(LLAMA, marks=pytest.mark.slow), EXPERTS, pytest.param(SANDWICH, marks=pytest.mark.slow)],
    ids=["llama", "experts", "sandwich"],
)
def test_gradients_are_those_of_the_plain_model_and_layers_share_graphs(
    shape: ModelShape, compiler: Compiler
) -> None:
    plain, compiled = models(replace(shape, layers=4), compiler)
    expected, got = gradients(plain), gradients(compiled)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-12, atol=1e-14, msg=name)
    expected_graphs = {"normed": 1, "add_and_norm": 1, "rotate_heads": 1, "activate": 1}
    expected_graphs |= {"add_normed": 1} if shape is SANDWICH else {}
    assert compiler.graphs == expected_graphs, "one for all four layers"
    gradients(compiled)
    assert compiler.graphs == expected_graphs, "nothing is compiled again"


def test_weight_gradients_are_deferred_and_blocks_recomputed_as_without(compiler: Compiler) -> None:
    plain, compiled = models(LLAMA, compiler)
    expected = gradients(plain)
    recompute_blocks([*compiled.blocks], ["full", "selective"], Mesh(Layout()))
    assert convert_linears(compiled)
    queue = list[DeferredGradient]()
    for module in compiled.modules():
        if isinstance(module, AccumulatesOwnGradients):
            module.queue = queue
    got = gradients(compiled)
    assert compiled.blocks[0].get_parameter("attn.qkv.weight").grad is None, "left to W"
    assert not torch.equal(got["blocks.0.norm1.weight"], torch.zeros(16)), "I has it"
    run_deferred(queue)
    for name, gradient in expected.items():
        torch.testing.assert_close(compiled.get_parameter(name).grad, gradient, rtol=1e-12, atol=1e-14)
    # the recomputed block runs without gradients first
    assert set(compiler.graphs.values()) == {2}


def test_gradients_of_16_bit_norms_are_not_rounded_to_16_bits() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    wide = _exact(weight)
    assert wide is not None
    assert wide.dtype == torch.float32
    (wide * torch.full((4,), 1.0 + 2**-12)).sum().backward()
    gradient: Any = weight.grad
    assert gradient.dtype == torch.float32
    assert gradient.tolist() == [1.0 + 2**-12] * 4
