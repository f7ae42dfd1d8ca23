from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from stretto.engine.parallel.tensor.norm import (
    MemoryEfficientLayerNorm,
    MemoryEfficientRMSNorm,
    _LayerNorm,
    use_memory_efficient_norms,
)


@pytest.mark.parametrize("size", [(2, 5, 8), (7, 8), (3, 0, 8)])
@pytest.mark.parametrize("affine", [True, False])
def test_our_rms_norm_equals_torchs(size: tuple[int, ...], affine: bool):
    plain = nn.RMSNorm(8, eps=1e-5, elementwise_affine=affine, dtype=torch.float64)
    if affine:
        nn.init.normal_(plain.weight)
    efficient = copy.deepcopy(plain)
    use_memory_efficient_norms(efficient)
    assert type(efficient) is MemoryEfficientRMSNorm
    results = list[list[torch.Tensor]]()
    for module in (plain, efficient):
        x = torch.randn(
            size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        ).requires_grad_()
        y = module(x)
        y.backward(torch.sin(torch.arange(y.numel(), dtype=torch.float64)).view(size))
        results.append([y.detach(), *(t.grad for t in (x, *module.parameters()) if t.grad is not None)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_gradients_are_exact():
    norm = MemoryEfficientRMSNorm(6, dtype=torch.float64)
    x, w = torch.randn(3, 6, dtype=torch.float64, requires_grad=True), norm.weight
    assert torch.autograd.gradcheck(lambda x, w: torch.func.functional_call(norm, {"weight": w}, x), (x, w))


def test_half_precision_rounds_once():
    norm = MemoryEfficientRMSNorm(64, dtype=torch.bfloat16)
    x = torch.randn(4, 64).bfloat16()
    exact = nn.RMSNorm(64, eps=torch.finfo(torch.bfloat16).eps)(x.float())
    assert torch.equal(norm(x), exact.bfloat16())


def test_only_norms_over_one_dimension_change():
    model = nn.Sequential(nn.RMSNorm(4), nn.RMSNorm([2, 4]), nn.LayerNorm(4), nn.LayerNorm([2, 4]))
    use_memory_efficient_norms(model)
    assert [type(m) for m in model] == [
        MemoryEfficientRMSNorm,
        nn.RMSNorm,
        MemoryEfficientLayerNorm,
        nn.LayerNorm,
    ]


def layer_norm(norm: nn.LayerNorm, x: torch.Tensor, on_device: bool) -> torch.Tensor:
    """Our own, as CPUs compute it or as other devices do."""
    with pytest.MonkeyPatch.context() as patch:
        if on_device:
            patch.setattr(torch.Tensor, "is_cpu", False)
        return _LayerNorm.apply(x, norm.weight, norm.bias, norm.eps)


@pytest.mark.parametrize("size", [(2, 5, 8), (7, 8)])
@pytest.mark.parametrize(("affine", "bias"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("on_device", [False, True])
def test_our_layer_norm_equals_torchs(size: tuple[int, ...], affine: bool, bias: bool, on_device: bool):
    plain = nn.LayerNorm(8, elementwise_affine=affine, bias=bias, dtype=torch.float64)
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    efficient = copy.deepcopy(plain)
    results = list[list[torch.Tensor]]()
    for module in (plain, efficient):
        x = torch.linspace(-1, 2, torch.Size(size).numel(), dtype=torch.float64).mul(9).sin()
        x = x.view(size).requires_grad_()
        y = module(x) if module is plain else layer_norm(module, x, on_device)
        y.backward(torch.cos(torch.arange(y.numel(), dtype=torch.float64)).view(size))
        results.append([y.detach(), *(t.grad for t in (x, *module.parameters()) if t.grad is not None)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm], ids=["layer", "rms"])
@pytest.mark.parametrize("on_device", [False, True])
def test_float32_weights_beside_16_bits(kind: type[nn.Module], dtype: torch.dtype, on_device: bool):
    """Results equal those of the input in float64, rounded once; weight gradients are not rounded."""
    torch.manual_seed(0)
    exact = kind(64, eps=1e-5)
    for parameter in exact.parameters():
        nn.init.normal_(parameter)
    norm = copy.deepcopy(exact)
    use_memory_efficient_norms(norm)
    exact.double()
    x, dy = torch.randn(4, 512, 64).to(dtype), torch.randn(4, 512, 64).to(dtype)
    here, there = x.clone().requires_grad_(), x.double().requires_grad_()
    y = layer_norm(norm, here, True) if on_device and kind is nn.LayerNorm else norm(here)
    y.backward(dy)
    wanted = exact(there)
    wanted.backward(dy.double())
    assert y.dtype == here.grad.dtype == dtype
    half = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(y.double(), wanted, rtol=1.01 * half, atol=1e-6)
    torch.testing.assert_close(here.grad.double(), there.grad, rtol=1.01 * half, atol=1e-6)
    for weight, reference in zip(norm.parameters(), exact.parameters(), strict=True):
        assert weight.grad.dtype == torch.float32
        torch.testing.assert_close(weight.grad.double(), reference.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("norm", [MemoryEfficientRMSNorm, MemoryEfficientLayerNorm])
def test_gradients_of_16_bit_weights_can_be_float32(norm: type[nn.Module]):
    module = norm(16, eps=1e-5, dtype=torch.bfloat16)
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32
    module(torch.randn(64, 16).bfloat16()).sum().backward()
    assert module.weight.grad.dtype == torch.float32
    assert not torch.equal(module.weight.grad, module.weight.grad.bfloat16().float()), "rounded on the way"
