"""Types of weights, gradients and masters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stretto.engine.parallel.precision import gradient_dtype, master_dtype, weight_dtype

KEEP = ("*norm*", "*router*")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_have_16_bits_except_those_kept_in_float32(dtype: torch.dtype) -> None:
    assert weight_dtype("blocks.0.attn.qkv.weight", dtype, KEEP) == dtype
    assert weight_dtype("blocks.0.norm1.weight", dtype, KEEP) == torch.float32
    assert weight_dtype("blocks.0.norm1.weight", dtype, ()) == dtype
    assert master_dtype(dtype) == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_dtypes_apply_to_all_parameters(dtype: torch.dtype) -> None:
    assert weight_dtype("blocks.0.norm1.weight", dtype, KEEP) == dtype
    assert master_dtype(dtype) == dtype


def test_gradients_have_grad_dtype_or_the_existing_dtype() -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    assert gradient_dtype(parameter) == torch.bfloat16
    parameter.grad_dtype = torch.float32
    assert gradient_dtype(parameter) == torch.float32
    parameter.grad_dtype = None  # any
    parameter.grad = torch.zeros(3, dtype=torch.float64)
    assert gradient_dtype(parameter) == torch.float64
