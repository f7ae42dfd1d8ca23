from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from stretto.engine.models.rotary import Rotary


@settings(deadline=None, max_examples=30)
@given(half=st.integers(1, 6), length=st.integers(2, 20), theta=st.sampled_from([100.0, 10000.0, 500000.0]))
def test_rotary_rotates_pairs_by_position_times_frequency(half: int, length: int, theta: float):
    x = torch.randn(1, 2, length, 2 * half, dtype=torch.float64)
    turned = Rotary(2 * half, theta)(x)
    frequency = torch.tensor([theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    want = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(turned, torch.cat([want.real, want.imag], -1), rtol=1e-12, atol=1e-12)


def test_products_depend_on_the_distance_only():
    rotary = Rotary(8, 10000.0)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 1, 12, 8)
    products = rotary(q)[0, 0] @ rotary(k)[0, 0].T
    for distance in range(-11, 12):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-10, atol=1e-12)


def test_rotary_tables_made_in_inference_mode_serve_training():
    rotary = Rotary(14, 777.0)
    with torch.inference_mode():
        rotary(torch.randn(1, 1, 5, 14))
    x = torch.randn(1, 1, 5, 14, requires_grad=True)
    rotary(x).sum().backward()
    assert x.grad is not None


def test_fake_tensors_leave_nothing_behind():
    rotary = Rotary(18, 555.0)
    with FakeTensorMode():
        assert rotary(torch.randn(1, 1, 5, 18)).shape == (1, 1, 5, 18)
    assert type(rotary(torch.randn(1, 1, 5, 18))) is torch.Tensor
    with FakeTensorMode():
        assert rotary(torch.randn(1, 1, 5, 18)).shape == (1, 1, 5, 18)


def test_rotary_tables_are_rounded_last():
    x = torch.zeros(1, 1, 64, 8, dtype=torch.bfloat16)
    x[..., :4] = 1
    turned = Rotary(8, 10000.0)(x)
    exact = Rotary(8, 10000.0)(x.double())
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned, exact.bfloat16(), rtol=0, atol=0)
