"""FLOPs of operators against the products of their shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stretto.run.dryrun.fake import operator_flops

aten: Any = torch.ops.aten


def zeros(*sizes: int) -> torch.Tensor:
    return torch.zeros(*sizes)


def test_products() -> None:
    a, b = zeros(3, 5), zeros(5, 7)
    assert operator_flops(aten.mm.default, (a, b)) == ("products", 2 * 3 * 5 * 7)
    assert operator_flops(aten.addmm.default, (zeros(7), a, b)) == ("products", 2 * 3 * 5 * 7)
    assert operator_flops(aten.add.Tensor, (a, a)) is None


def test_batches_are_attention_but_for_mixing_experts() -> None:
    x, y = zeros(2, 3, 5), zeros(2, 5, 7)
    assert operator_flops(aten.bmm.default, (x, y)) == ("attention", 2 * 2 * 3 * 5 * 7)
    mixed = operator_flops(aten.bmm.default, (zeros(4, 1, 2), zeros(4, 2, 8)))
    assert mixed == ("products", 2 * 4 * 2 * 8)


def test_groups_count_rows_once() -> None:
    x, w = zeros(6, 8), zeros(3, 8, 4)
    assert operator_flops(aten._grouped_mm.default, (x, w)) == ("products", 2 * 6 * 8 * 4)


def test_fused_attention_is_all_pairs_with_every_query_head() -> None:
    q, k = zeros(2, 4, 6, 8), zeros(2, 2, 6, 8)
    counted = operator_flops(aten._scaled_dot_product_flash_attention_for_cpu.default, (q, k, k))
    assert counted == ("attention", 2 * (2 * 2 * 4 * 6 * 6 * 8))


@pytest.mark.parametrize("func", ["mm", "addmm", "bmm"])
def test_as_torch_counts(func: str) -> None:
    shapes = {"mm": [(3, 4), (4, 5)], "addmm": [(3, 5), (3, 4), (4, 5)], "bmm": [(2, 3, 4), (2, 4, 5)]}
    tensors = tuple(zeros(*shape) for shape in shapes[func])
    with FlopCounterMode(display=False) as counter:
        getattr(torch, func)(*tensors)
    counted = operator_flops(getattr(aten, func).default, tensors)
    assert counted is not None
    assert counted[1] == counter.get_total_flops()
