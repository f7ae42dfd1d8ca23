"""Floating-point operations of torch's operators, from the shapes that they are given.

Matrix products only, 2mnk for [m, k] times [k, n], as in `cost.flops`. A fused attention kernel counts as if
it looked at every pair of its queries and keys, also where it leaves out what is masked; its backward is five
products where the forward is two.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Literal

import torch

Kind = Literal["products", "attention"]
_aten: Any = torch.ops.aten


def _mm(a: Any, b: Any) -> int:
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]


def _bmm(a: Any, b: Any) -> int:
    return 2 * prod(a.shape) * b.shape[2]


def _pairs(q: Any, k: Any) -> int:
    """One product of scores: q [b, heads, n, d], k [b, kv_heads, m, d]."""
    return 2 * prod(q.shape) * k.shape[2]


def _grouped(x: Any, w: Any) -> int:
    """Rows sorted by group times a matrix for each group, or both cut into groups."""
    if w.dim() == 3:
        return 2 * prod(x.shape) * w.shape[2]
    return 2 * prod(x.shape) * w.shape[1]


_MATRICES: dict[Any, Callable[..., int]] = {
    _aten.mm: lambda a, b, *_: _mm(a, b),
    _aten.addmm: lambda _, a, b, *__: _mm(a, b),
    _aten.addmm_: lambda _, a, b, *__: _mm(a, b),
    _aten._scaled_mm: lambda a, b, *_: _mm(a, b),
    _aten._grouped_mm: lambda x, w, *_: _grouped(x, w),
}
_BATCHES: dict[Any, Callable[..., int]] = {
    _aten.bmm: lambda a, b, *_: _bmm(a, b),
    _aten.baddbmm: lambda _, a, b, *__: _bmm(a, b),
}
_ATTENTION: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_: 2 * _pairs(q, k),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda _, q, k, *__: 5 * _pairs(q, k),
    _aten._scaled_dot_product_flash_attention: lambda q, k, *_: 2 * _pairs(q, k),
    _aten._scaled_dot_product_flash_attention_backward: lambda _, q, k, *__: 5 * _pairs(q, k),
    _aten._scaled_dot_product_efficient_attention: lambda q, k, *_: 2 * _pairs(q, k),
    _aten._scaled_dot_product_efficient_attention_backward: lambda _, q, k, *__: 5 * _pairs(q, k),
}


def operator_flops(func: Any, args: tuple[Any, ...]) -> tuple[Kind, int] | None:
    """The kind and number of operations of one call; None of an operator that multiplies no matrices.

    Batched products are attention's, but for those with rows of one, which mix what experts give.
    """
    packet = func.overloadpacket
    if (count := _MATRICES.get(packet)) is not None:
        return "products", count(*args)
    if (count := _ATTENTION.get(packet)) is not None:
        return "attention", count(*args)
    if (count := _BATCHES.get(packet)) is not None:
        rows = args[0 if packet is _aten.bmm else 1].shape[1]
        return "products" if rows == 1 else "attention", count(*args)
    return None
