"""Matrix products of linear layers, by the faster of two libraries on CPUs.

Torch's x86 builds multiply float32 with MKL, which uses at most AVX2 on CPUs that are not Intel's; oneDNN
uses all instructions of the CPU. On an AVX-512 AMD EPYC oneDNN takes 0.45 to 0.65 of MKL's time for the
shapes of a small transformer (`benchmarks/matmul.py`). The choice depends on machine and sizes only, so runs
are bitwise reproducible.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn import functional

from stretto.engine.parallel.precision import HALVES

_Wide = Literal["sum", "product"]


def _prefers_onednn() -> bool:
    """True if oneDNN is available and likely to be faster than torch's BLAS."""
    has = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    wide = torch.backends.mkl.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return has and wide and not _is_intel()


def _is_intel() -> bool:
    cpu_info = Path("/proc/cpuinfo")
    return not cpu_info.is_file() or "GenuineIntel" in cpu_info.read_text(errors="replace")


ONEDNN = _prefers_onednn()


SMALL = 2**18  # multiplications below which a call of oneDNN costs more (10 us) than it saves


def _applies(x: Tensor, rows: int) -> bool:
    return ONEDNN and x.numel() * rows >= SMALL and x.dtype is torch.float32 and x.device.type == "cpu"


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None, then: str = "none") -> Tensor:
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, then, [], ""))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weight^T + bias; x [..., in], weight [out, in]. Not differentiable."""
    return _onednn(x, weight, bias) if _applies(x, weight.shape[0]) else functional.linear(x, weight, bias)


def linear_rectified(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return max(0, x weight^T + bias), in one pass if oneDNN applies. Not differentiable."""
    if _applies(x, weight.shape[0]):
        return _onednn(x, weight, bias, "relu")
    return functional.linear(x, weight, bias).relu_()


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """Return dy weight; dy [..., out], weight [out, in]."""
    return _onednn(dy, weight.t(), None) if _applies(dy, weight.shape[1]) else dy @ weight


def product(
    a: Tensor, b: Tensor, *, factor: float = 1.0, add: Tensor | None = None, weight: float = 1.0
) -> Tensor:
    """Return factor a b + weight add; a [..., n, k], b [..., k, m], with at most one batch dimension. Not
    differentiable.
    """
    if a.dim() == 2 and _applies(a, b.shape[1]):
        result = _onednn(a, b.t(), None)
        result = result if factor == 1.0 else result.mul_(factor)
        return result if add is None else result.add_(add, alpha=weight)
    if add is None:
        result = a @ b
        return result if factor == 1.0 else result.mul_(factor)
    fused = torch.addmm if a.dim() == 2 else torch.baddbmm
    return fused(add, a, b, beta=weight, alpha=factor)


def add_weight_gradient(grad: Tensor | None, dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return grad + dy^T x: in place if `grad` exists, else a new tensor of `dtype`; dy [n, out], x [n, in],
    grad [out, in].

    For 16-bit factors and a float32 gradient, the product is computed and added in float32 if the device
    supports it, else computed in 16 bits (summed in float32, rounded once) and then added.
    """
    if _applies(x, dy.shape[1]):
        product = _onednn(dy.t(), x.t(), None)
    elif grad is not None and grad.dtype == x.dtype:
        return grad.addmm_(dy.t(), x)
    elif x.dtype in HALVES and dtype == torch.float32:
        wide = _wide(x.device, x.dtype)
        if grad is not None and wide == "sum":
            return _wide_sum(grad, dy.t(), x)
        product = dy.t() @ x if wide is None else _wide_product(dy.t(), x)
    else:
        product = dy.t() @ x
    return product.to(dtype) if grad is None else grad.add_(product)


def _wide_sum(grad: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute grad += a b, with a float32 grad and 16-bit factors."""
    return cast(Tensor, torch.ops.aten.addmm.dtype_out(grad, a, b, torch.float32, out=grad))


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a b in float32, of 16-bit factors."""
    return cast(Tensor, torch.ops.aten.mm.dtype(a, b, torch.float32))


@cache
def _wide(device: torch.device, dtype: torch.dtype) -> _Wide | None:
    """Return the float32 result of 16-bit factors that a device supports: by trial, since CUDA versions
    differ.
    """
    if device.type == "cpu":
        return None
    factors, grad = torch.ones(16, 16, dtype=dtype, device=device), torch.zeros(16, 16, device=device)
    ways: dict[_Wide, Callable[[], Tensor]] = {
        "sum": lambda: _wide_sum(grad, factors, factors),
        "product": lambda: _wide_product(factors, factors),
    }
    for way, run in ways.items():
        try:
            product = run()
        except (RuntimeError, AttributeError):
            continue
        if product.dtype == torch.float32 and bool((product == 16).all()):
            return way
    return None
