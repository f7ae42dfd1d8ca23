from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from stretto.parallel.norm import LeanRMSNorm, lean_norms


@pytest.mark.parametrize("size", [(2, 5, 8), (7, 8), (3, 0, 8)])
@pytest.mark.parametrize("affine", [True, False])
def test_equals_torchs(size: tuple[int, ...], affine: bool):
    plain = nn.RMSNorm(8, eps=1e-5, elementwise_affine=affine, dtype=torch.float64)
    if affine:
        nn.init.normal_(plain.weight)
    ours = copy.deepcopy(plain)
    lean_norms(ours)
    assert type(ours) is LeanRMSNorm
    results = list[list[torch.Tensor]]()
    for module in (plain, ours):
        x = torch.randn(
            size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        ).requires_grad_()
        y = module(x)
        y.backward(torch.sin(torch.arange(y.numel(), dtype=torch.float64)).view(size))
        results.append([y.detach(), *(t.grad for t in (x, *module.parameters()) if t.grad is not None)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_gradients_are_exact():
    norm = LeanRMSNorm(6, dtype=torch.float64)
    x, w = torch.randn(3, 6, dtype=torch.float64, requires_grad=True), norm.weight
    assert torch.autograd.gradcheck(lambda x, w: torch.func.functional_call(norm, {"weight": w}, x), (x, w))


def test_half_precision_rounds_once():
    norm = LeanRMSNorm(64, dtype=torch.bfloat16)
    x = torch.randn(4, 64).bfloat16()
    exact = nn.RMSNorm(64, eps=torch.finfo(torch.bfloat16).eps)(x.float())
    assert torch.equal(norm(x), exact.bfloat16())


def test_only_norms_over_one_dimension_change():
    model = nn.Sequential(nn.RMSNorm(4), nn.RMSNorm([2, 4]), nn.LayerNorm(4))
    lean_norms(model)
    assert [type(m) for m in model] == [LeanRMSNorm, nn.RMSNorm, nn.LayerNorm]
