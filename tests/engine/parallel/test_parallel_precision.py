"""Types of weights, gradients and masters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stretto.engine.parallel.precision import gradient_dtype, master_dtype, weight_dtype

KEEP = ("*norm*", "*router*")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_have_16_bits_but_for_those_kept(dtype: torch.dtype) -> None:
    assert weight_dtype("blocks.0.attn.qkv.weight", dtype, KEEP) == dtype
    assert weight_dtype("blocks.0.norm1.weight", dtype, KEEP) == torch.float32
    assert weight_dtype("blocks.0.norm1.weight", dtype, ()) == dtype
    assert master_dtype(dtype) == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_types_are_for_all(dtype: torch.dtype) -> None:
    assert weight_dtype("blocks.0.norm1.weight", dtype, KEEP) == dtype
    assert master_dtype(dtype) == dtype


def test_gradients_have_the_type_asked_for_or_that_of_what_is_there() -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    assert gradient_dtype(parameter) == torch.bfloat16
    parameter.grad_dtype = torch.float32
    assert gradient_dtype(parameter) == torch.float32
    parameter.grad_dtype = None  # any
    parameter.grad = torch.zeros(3, dtype=torch.float64)
    assert gradient_dtype(parameter) == torch.float64
