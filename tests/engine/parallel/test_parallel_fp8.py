"""Products in 8 bits: what they round, and that no layout changes what they compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from half_models import to_halves
from ranks import on_ranks
from stretto.engine.models.build import build
from stretto.engine.models.language import LanguageModel
from stretto.engine.models.sharding import sharding_plan
from stretto.engine.parallel.expert.auxiliary import Auxiliary, bind_auxiliary
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.parallelize import parallelize
from stretto.engine.parallel.recompute import recompute_blocks
from stretto.engine.parallel.tensor import fp8
from stretto.engine.parallel.tensor.fp8 import (
    E4M3,
    E5M2,
    Products8,
    Quantised,
    enable_fp8,
    power_of_two,
    product,
)
from stretto.engine.parallel.tensor.linear import (
    AccumulatesOwnGradients,
    AdoptedLinear,
    DeferredGradient,
    FusedLinear,
    run_deferred,
)
from stretto.engine.parallel.tensor.norm import use_memory_efficient_norms
from stretto.engine.parallel.tensor.sequence import SequenceSplit
from stretto.engine.pipeline.shared import PartialGradient, sum_partial
from stretto.errors import StrettoError
from stretto.job.experts import ExpertShape
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout

GPT = ModelShape(family="gpt", layers=2, hidden=16, heads=4, vocab=22, sequence=16)
LLAMA = ModelShape(family="llama", layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=22, sequence=16)
EXPERTS = replace(LLAMA, moe=ExpertShape(experts=4, top_k=2, shared_ffn=16))
LENGTH, BATCH = 16, 2

# ---------------------------------------------------------------------- numbers


def test_scales_are_the_powers_of_two_next_above() -> None:
    least = torch.tensor([1.0, 0.7, 3e-3, 448.0, 1e38, 0.0, 1e-45], dtype=torch.float64)
    scales = power_of_two(least)
    assert torch.equal(scales.frexp().mantissa, torch.full_like(scales, 0.5))
    assert bool((scales > least).all())
    assert bool((scales[:5] <= 2 * least[:5]).all())
    assert power_of_two(torch.tensor([float("inf"), float("nan")])).isnan().all()


@pytest.mark.parametrize(("kind", "error"), [(E4M3, 2**-4), (E5M2, 2**-3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_quantisation_error_is_half_a_unit_in_the_last_place(
    kind: torch.dtype, error: float, dtype: torch.dtype
) -> None:
    """Half a unit in the last place of what is no less than 2^-14 of the largest, whatever that is."""
    torch.manual_seed(0)
    for size in (1.0, 3e4, 1e-3):
        t = (size * (torch.rand(40, 30, dtype=torch.float64) * 0.9 + 0.1)).to(dtype)
        t[3] = 0
        scale = power_of_two(t.abs().amax(1).double() / torch.finfo(kind).max)
        back = Quantised.of(t, scale, kind).dequantised(torch.float64)
        assert bool((back[3] == 0).all())
        assert float(((back - t.double()).abs() / t.double().clamp(min=1e-12)).max()) <= error
        again = back.to(torch.promote_types(dtype, torch.float32))
        repeated = Quantised.of(again, scale, kind).dequantised(torch.float64)
        assert torch.equal(repeated, back), "quantising again changes it"


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_values_that_are_not_finite_propagate(rows: bool, bad: float) -> None:
    x, weight = torch.randn(3, 16), torch.randn(8, 16)
    x[1, 2] = bad
    y = Products8(rows).forward(x, weight, None)
    assert bool(y[1].isnan().all())
    if rows:
        assert bool(y[0].isfinite().all())


def rounded(t: Tensor, kind: torch.dtype, dim: int | None) -> Tensor:
    """t to 8 bits and back, written down plainly."""
    largest = t.abs().amax() if dim is None else t.abs().amax(dim, keepdim=True)
    scale = torch.exp2((largest / torch.finfo(kind).max).log2().floor() + 1)
    return (t / scale).to(kind).to(t.dtype) * scale


@pytest.mark.parametrize("how", ["tensor", "row"])
def test_a_layer_in_8_bits_is_the_emulated_product(how: str) -> None:
    torch.manual_seed(1)
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"up": nn.Linear(12, 20)})])}).double()
    enable_fp8(model, how)
    layer = model.get_submodule("blocks.0.up")
    assert isinstance(layer, AdoptedLinear)
    dim = -1 if how == "row" else None
    x, dy = torch.randn(3, 5, 12).double().requires_grad_(), torch.randn(3, 5, 20).double()
    y = layer(x)
    y.backward(dy)
    weight, bias = layer.weight.detach(), layer.bias
    assert bias is not None
    wanted = rounded(x.detach(), E4M3, dim) @ rounded(weight, E4M3, dim).t() + bias
    torch.testing.assert_close(y, wanted, rtol=1e-13, atol=1e-13)
    dx = rounded(dy, E5M2, dim) @ rounded(weight, E4M3, None if dim is None else 0)
    torch.testing.assert_close(x.grad, dx, rtol=1e-13, atol=1e-13)
    exact = dy.flatten(0, 1).t() @ x.detach().flatten(0, 1)
    torch.testing.assert_close(layer.weight.grad, exact, rtol=1e-13, atol=1e-13)
    plain = x.detach() @ weight.t()
    assert 0.001 < float((y - bias - plain).detach().norm() / plain.norm()) < 0.06, (
        "8 bits are neither exact nor far"
    )


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hardware_gets_the_operands_of_the_emulation(
    rows: bool, kind: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch has the same call for CPUs: with the shapes and scales that devices want."""
    if rows and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 multiplies on CPUs with one scale per tensor only")
    torch.manual_seed(2)
    a, b = torch.randn(5, 32).to(dtype), torch.randn(16, 32).to(dtype)
    make = [(t.float().abs().amax(1) if rows else t.float().abs().amax().view(1)) / 448 for t in (a, b)]
    left, right = (
        Quantised.of(t, power_of_two(s), k) for t, s, k in zip((a, b), make, (kind, E4M3), strict=True)
    )
    emulated = product(left, right, dtype, fast=False)
    monkeypatch.setattr(fp8, "_multiplies", lambda _device: True)
    calls = list[object]()
    inner = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **k: (calls.append(k), inner(*a, **k))[1])
    results = product(left, right, dtype, fast=False)
    assert len(calls) == 1
    assert results.dtype == emulated.dtype == dtype
    coarse = torch.bfloat16 if rows else dtype
    torch.testing.assert_close(results, emulated, rtol=2 * torch.finfo(coarse).eps, atol=1e-3)
    odd = Quantised(right.values[:15], right.scale[:15])
    assert product(left, odd, dtype, fast=False).shape == (5, 15)
    assert len(calls) == 1, "hardware has no matrices of 15 rows"


# ---------------------------------------------------------------------- models


def test_which_layers_multiply_in_8_bits() -> None:
    model = build(EXPERTS)
    enable_fp8(model, "row")
    short = {n for n, m in model.named_modules() if isinstance(m, FusedLinear) and m.products is not None}
    assert short == {
        f"blocks.{i}.{name}"
        for i in range(2)
        for name in ("attn.qkv", "attn.proj", "mlp.shared.gate_up", "mlp.shared.down")
    }
    with pytest.raises(StrettoError, match="tensor, row") as caught:
        enable_fp8(model, "rows")
    assert "'row'" in str(caught.value.hint)
    with pytest.raises(StrettoError, match="no layer"):
        enable_fp8(nn.Sequential(nn.Linear(2, 2)), "row")


@dataclass(frozen=True)
class Case:
    shape: ModelShape
    how: str
    sequence_parallel: bool = False
    context: str = "ring"
    recompute: bool = False
    later: bool = False


def cases(tp: int) -> Iterator[Case]:
    for how in ("tensor", "row"):
        for sp in (False, True) if tp > 1 else (False,):
            yield Case(GPT, how, sp, later=sp)
            yield Case(LLAMA, how, sp, "ulysses", recompute=True)
        yield Case(EXPERTS, how, tp > 1)


def plain_model(shape: ModelShape, spread: float = 3.0) -> LanguageModel:
    """With weights, and so activations, of so many sizes that 8 bits do not hold them with any one scale."""
    torch.manual_seed(5)
    model = build(shape).double()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
            sizes = torch.exp(spread * torch.randn_like(p))
            p *= sizes / sizes.square().mean().sqrt()
    return model


def run(
    model: LanguageModel, batches: list[tuple[Tensor, Tensor]], queue: list[DeferredGradient] | None
) -> Tensor:
    """Two microbatches, the sum of their losses."""
    total = torch.zeros((), dtype=torch.float64)
    for ids, targets in batches:
        loss = model.loss(model(ids), targets)
        (0.1 * loss).backward()
        total += loss.detach()
        if queue is not None:
            with torch.no_grad():
                run_deferred(queue)
    return total


def check(case: Case, mesh: Mesh) -> None:
    plain, sharded = plain_model(case.shape), plain_model(case.shape)
    job = Job(
        shape=case.shape,
        layout=mesh.layout,
        sequence=LENGTH,
        sequence_parallel=case.sequence_parallel,
        context=case.context,
        vocab_multiple=3,
    )
    table = parallelize(sharded, sharding_plan(job), mesh)
    bind_auxiliary(sharded, Auxiliary())
    enable_fp8(plain, case.how)
    enable_fp8(sharded, case.how, mesh)
    sharded.train(case.shape.moe is None)  # in evaluation nothing is added to the loss
    plain.train(case.shape.moe is None)
    if case.recompute:
        recompute_blocks(list(sharded.blocks), ["full"] * case.shape.layers, mesh)
    queue: list[DeferredGradient] | None = [] if case.later else None
    for layer in sharded.modules():
        if isinstance(layer, AccumulatesOwnGradients):
            layer.queue = queue
    torch.manual_seed(12)
    ids, targets = torch.randint(case.shape.vocab, (2, 2, BATCH, LENGTH))
    split = SequenceSplit.of(mesh, LENGTH, case.sequence_parallel)
    there = run(plain, [(ids[i], targets[i]) for i in range(2)], None)
    here = run(
        sharded, [(split.take(ids[i], 1, 0), split.take(targets[i], 1, -100)) for i in range(2)], queue
    )
    dist.all_reduce(here, group=mesh.group("cp")) if mesh.group("cp") is not None else None
    torch.testing.assert_close(here, there, rtol=1e-12, atol=0, msg=lambda m: f"{case}: {m}")
    parameters = dict(sharded.named_parameters())
    sum_partial([PartialGradient(parameters[n], shared) for n, s in table.items() for shared in s.shared])
    for name, parameter in plain.named_parameters():
        grad = parameters[name].grad
        assert grad is not None
        assert parameter.grad is not None
        if mesh.group("cp") is not None:
            dist.all_reduce(grad, group=mesh.group("cp"))
        for piece in table[name].placed.pieces:
            wanted = piece.of_full(parameter.grad)
            wrong = float((piece.of_local(grad) - wanted).abs().max() / parameter.grad.abs().max())
            assert wrong < 1e-11, f"{case}: gradient of {name}: {wrong:.1e}"


def every_case(tp: int, cp: int) -> None:
    mesh = Mesh(Layout(tp=tp, cp=cp))
    for case in cases(tp):
        check(case, mesh)
    mesh.close()


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_every_layout_computes_the_same_in_8_bits(tp: int, cp: int) -> None:
    on_ranks(tp * cp, every_case, tp, cp)


@pytest.mark.parametrize("how", ["tensor", "row"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_8_bits_with_16_bit_weights(how: str, dtype: torch.dtype) -> None:
    """Loss and gradients stay within what 8 bits lose."""
    exact, short = plain_model(LLAMA, 0.0), plain_model(LLAMA, 0.0)
    parallelize(short, sharding_plan(Job(shape=LLAMA)), Mesh(Layout()))
    use_memory_efficient_norms(short)
    to_halves(short, dtype)
    enable_fp8(short, how)
    ids, targets = torch.randint(LLAMA.vocab, (2, 2, LENGTH), generator=torch.Generator().manual_seed(3))
    losses = [model.loss(model(ids), targets) for model in (exact, short)]
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=0.02)
    results = [torch.cat([p.grad.double().flatten() for p in model.parameters()]) for model in (exact, short)]
    assert all(p.grad.dtype == torch.float32 for p in short.parameters())
    error = float((results[1] - results[0]).norm() / results[0].norm())
    assert 0.01 < error < 0.15, error
