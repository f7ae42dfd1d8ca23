"""A bit that flips between two updates is found, whatever holds it, and named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from planted_numbers import flip
from stretto.engine.parallel.memory_check import MemoryCheck

CPU = torch.device("cpu")


def new_tensors() -> dict[str, Tensor]:
    away = torch.ones(1000)
    away.untyped_storage().resize_(0)
    return {"a": torch.randn(4, 3).bfloat16(), "away": away, "b": torch.zeros(9), "none": torch.ones(0)}


@pytest.mark.parametrize(("name", "element", "bit"), [("a", 7, 0), ("b", 0, 31), ("b", 8, 3)])
def test_a_flipped_bit_is_found_and_named(name: str, element: int, bit: int) -> None:
    check, tensors = MemoryCheck(), new_tensors()
    check.begin(tensors)
    assert float(check.changed(CPU)) == 0
    assert check.first() is None
    flip(tensors[name], element, bit)
    assert float(check.changed(CPU)) == 1
    assert check.first() == name


def test_nothing_is_checked_before_it_begins_and_after_it_ends() -> None:
    check, tensors = MemoryCheck(), new_tensors()
    assert check.changed(CPU) == 0
    check.begin(tensors)
    check.end()
    flip(tensors["a"], 0, 0)
    assert check.changed(CPU) == 0
    check.begin(tensors)  # from here on that is right
    assert float(check.changed(CPU)) == 0
