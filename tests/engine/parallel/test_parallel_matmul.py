"""Both libraries' products beside functional.linear, for every form that a linear layer hands them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stretto.engine.parallel.tensor import matmul

needs_onednn = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch has no oneDNN here"
)
LIBRARIES = [False, pytest.param(True, marks=needs_onednn)]


def forms(*shape: int) -> list[Tensor]:
    """Contiguous, transposed, a slice, and one number expanded (what sum().backward() gives)."""
    torch.manual_seed(0)
    plain = torch.randn(shape)
    turned = torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    cut = torch.randn(*shape[:-1], shape[-1] + 3)[..., 2:-1]
    return [plain, turned, cut, torch.tensor(0.5).expand(shape)]


@pytest.mark.parametrize("onednn", LIBRARIES)
@pytest.mark.parametrize("lead", [(6,), (2, 3), (2, 3, 4)])
def test_products_are_those_of_functional_linear(monkeypatch, onednn, lead):
    monkeypatch.setattr(matmul, "ONEDNN", onednn)
    monkeypatch.setattr(matmul, "SMALL", 0)
    weight, bias = torch.randn(5, 7), torch.randn(5)
    for x in forms(*lead, 7):
        for b in (bias, None):
            torch.testing.assert_close(
                matmul.linear(x, weight, b), functional.linear(x, weight, b), rtol=1e-4, atol=1e-5
            )
    for dy in forms(*lead, 5):
        torch.testing.assert_close(matmul.input_gradient(dy, weight), dy @ weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("onednn", LIBRARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weight_gradients_add_up_in_place(monkeypatch, onednn, dtype):
    monkeypatch.setattr(matmul, "ONEDNN", onednn)
    monkeypatch.setattr(matmul, "SMALL", 0)
    for x, dy in zip(forms(6, 7), forms(6, 5), strict=True):
        x, dy = x.to(dtype), dy.to(dtype)
        first = matmul.add_weight_gradient(None, dy, x, dtype)
        torch.testing.assert_close(first, dy.t() @ x, rtol=1e-4, atol=1e-5)
        there = torch.ones(5, 7, dtype=dtype)
        assert matmul.add_weight_gradient(there, dy, x, dtype) is there
        torch.testing.assert_close(there, 1 + dy.t() @ x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("onednn", LIBRARIES)
def test_16_bit_products_accumulate_in_the_gradients_dtype(monkeypatch, onednn):
    monkeypatch.setattr(matmul, "ONEDNN", onednn)
    monkeypatch.setattr(matmul, "SMALL", 0)
    x, dy = torch.ones(3, 2, dtype=torch.bfloat16), torch.full((3, 4), 0.5, dtype=torch.bfloat16)
    there = torch.full((4, 2), 1024.0)
    assert matmul.add_weight_gradient(there, dy, x, torch.float32) is there
    assert there.unique().tolist() == [1025.5]
    assert matmul.add_weight_gradient(None, dy, x, torch.float32).dtype == torch.float32


@pytest.mark.parametrize("onednn", LIBRARIES)
def test_products_are_scaled_and_added(monkeypatch, onednn):
    monkeypatch.setattr(matmul, "ONEDNN", onednn)
    monkeypatch.setattr(matmul, "SMALL", 0)
    for lead in ((), (2,)):
        for a, b in zip(forms(*lead, 6, 7), forms(*lead, 7, 5), strict=True):
            addend = torch.randn(*lead, 6, 5)
            before = addend.clone()
            wanted = 3 * (a @ b)
            torch.testing.assert_close(matmul.product(a, b, factor=3), wanted, rtol=1e-4, atol=1e-5)
            computed = matmul.product(a, b, factor=3, add=addend, weight=-2)
            torch.testing.assert_close(computed, wanted - 2 * addend, rtol=1e-4, atol=1e-5)
            assert torch.equal(addend, before)
