"""Lookups, grouping and sums against loops that one can read, for every choice of kernels."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.recommender.tables.kernels.cpu import CompiledKernels, kernels_for
from stretto.recommender.tables.kernels.plain import Kernels

CHOICES: dict[str, Kernels] = {"plain": Kernels(), "compiled": CompiledKernels()}


@dataclass
class Case:
    weight: Tensor
    rows: Tensor
    offsets: Tensor
    scale: Tensor | None
    gradient: Tensor


@st.composite
def cases(draw: st.DrawFn) -> Case:
    slots, width = draw(st.integers(1, 30)), draw(st.sampled_from([1, 2, 3, 8, 16, 17, 64]))
    lengths = draw(st.lists(st.sampled_from([0, 1, 1, 2, 5]), min_size=0, max_size=40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    count = sum(lengths)
    most = draw(st.sampled_from([1, slots]))  # all of one row, too
    rows = torch.randint(0, most, (count,), generator=generator)
    offsets = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    scale = numbers(count) if draw(st.booleans()) else None
    return Case(numbers(slots, width), rows, offsets, scale, numbers(len(lengths), width))


def looked_up(case: Case) -> Tensor:
    out = torch.zeros(len(case.offsets) - 1, case.weight.shape[1], dtype=torch.float64)
    for bag in range(len(out)):
        for k in range(int(case.offsets[bag]), int(case.offsets[bag + 1])):
            out[bag] += case.weight[case.rows[k]] * (1.0 if case.scale is None else case.scale[k])
    return out


def gradients(case: Case) -> dict[int, Tensor]:
    """Of each row that was looked up, what the sums' gradient makes of it."""
    by_row = dict[int, Tensor]()
    for bag in range(len(case.offsets) - 1):
        for k in range(int(case.offsets[bag]), int(case.offsets[bag + 1])):
            scaled = case.gradient[bag] * (1.0 if case.scale is None else case.scale[k])
            row = int(case.rows[k])
            by_row[row] = by_row[row] + scaled if row in by_row else scaled
    return by_row


@pytest.mark.parametrize("choice", CHOICES)
@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_a_bag_is_the_sum_of_its_rows(choice: str, case: Case) -> None:
    got = CHOICES[choice].lookup(case.weight, case.rows, case.offsets, case.scale)
    torch.testing.assert_close(got, looked_up(case), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("choice", CHOICES)
@given(case=cases())
@settings(max_examples=30, deadline=None)
def test_float32_is_close_and_bfloat16_sums_in_float32(choice: str, case: Case) -> None:
    kernels, want = CHOICES[choice], looked_up(case)
    scale = None if case.scale is None else case.scale.float()
    got = kernels.lookup(case.weight.float(), case.rows, case.offsets, scale)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    narrow = case.weight.bfloat16()
    case.weight = narrow.double()
    want = looked_up(case)
    got = kernels.lookup(narrow, case.rows, case.offsets, scale)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    wide = kernels.lookup(narrow, case.rows, case.offsets, case.scale, torch.float64)
    torch.testing.assert_close(wide, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("choice", CHOICES)
@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_the_gradient_of_a_row_is_the_sum_over_its_lookups(choice: str, case: Case) -> None:
    kernels, want = CHOICES[choice], gradients(case)
    grouped = kernels.group(case.rows)
    assert grouped.rows.tolist() == sorted(want)
    for i, row in enumerate(sorted(want)):
        lookups = grouped.order[grouped.starts[i] : grouped.starts[i + 1]].tolist()
        assert lookups == [k for k, other in enumerate(case.rows.tolist()) if other == row]
    assert grouped.starts[-1] == len(case.rows)
    got = kernels.segment_sum(case.gradient, case.offsets, grouped, case.scale)
    assert got.shape == (len(want), case.weight.shape[1])
    squares = kernels.squares(case.gradient, case.offsets, grouped, case.scale)
    for i, row in enumerate(sorted(want)):
        torch.testing.assert_close(got[i], want[row], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(squares[i], want[row].square().sum(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("least", [0, 7, (1 << 40) - 3])
@pytest.mark.parametrize("apart", [1, 255, 1 << 11, 1 << 22, (1 << 32) - 1, 1 << 32, 1 << 50])
def test_rows_of_any_size_are_grouped_as_torch_sorts_them(least: int, apart: int) -> None:
    rows = least + torch.randint(0, apart + 1, (3000,))
    rows[17], rows[18], rows[1000] = least + apart, least, least + apart
    got, want = CompiledKernels().group(rows), Kernels().group(rows)
    for name in ("rows", "order", "starts"):
        assert torch.equal(getattr(got, name), getattr(want, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_row_that_is_not_there_is_refused(choice: str, dtype: torch.dtype) -> None:
    weight, offsets = torch.ones(5, 16, dtype=dtype), torch.tensor([0, 1, 2])
    for wrong in (5, -1, 1 << 40):
        with pytest.raises((IndexError, RuntimeError)):
            CHOICES[choice].lookup(weight, torch.tensor([0, wrong]), offsets)


def test_offsets_that_do_not_fit_are_refused() -> None:
    kernels, weight, rows = CompiledKernels(), torch.ones(5, 16, dtype=torch.float64), torch.tensor([0, 1])
    grouped = kernels.group(rows)
    for offsets in ([0, 1], [0, 3], [1, 2]):
        with pytest.raises(IndexError, match="offsets"):
            kernels.lookup(weight, rows, torch.tensor(offsets))
        with pytest.raises(IndexError, match="offsets"):
            kernels.segment_sum(torch.ones(1, 16), torch.tensor(offsets), grouped)
    with pytest.raises(IndexError, match="bags"):
        kernels.segment_sum(torch.ones(3, 16), torch.tensor([0, 1, 2]), grouped)


def test_results_do_not_depend_on_threads() -> None:
    torch.manual_seed(0)
    weight = torch.randn(5000, 12, dtype=torch.float64)
    rows, offsets = torch.randint(0, 5000, (30000,)), torch.arange(0, 30001, 3)
    gradient, kernels = torch.randn(10000, 12, dtype=torch.float64), CompiledKernels()
    results = list[list[Tensor]]()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            grouped = kernels.group(rows)
            results.append(
                [
                    kernels.lookup(weight, rows, offsets),
                    kernels.segment_sum(gradient, offsets, grouped),
                    kernels.squares(gradient, offsets, grouped),
                ]
            )
            with pytest.raises(IndexError):
                kernels.lookup(weight, rows.clone().index_fill_(0, torch.tensor([29999]), 5000), offsets)
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_what_a_device_and_a_type_get(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(kernels_for("cpu", torch.float32), CompiledKernels)
    assert type(kernels_for("cuda", torch.float32)) is Kernels
    assert type(kernels_for("cpu", torch.float16)) is Kernels
    monkeypatch.setattr("stretto.engine.loops.has_numba", lambda: False)
    assert type(kernels_for("cpu", torch.float32)) is Kernels


def test_without_a_folder_for_what_is_compiled_it_is_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from numba.core.caching import FunctionCache

    from stretto.engine.loops import jit

    def twice(x: int) -> int:
        return x + x

    monkeypatch.setattr(FunctionCache._impl_class, "_locator_classes", [])
    assert jit(twice)(4) == 8


@pytest.mark.parametrize("choice", CHOICES)
def test_gradients_of_16_bits_are_summed_in_32(choice: str) -> None:
    kernels, rows = CHOICES[choice], torch.zeros(3000, dtype=torch.int64)
    gradient, offsets = torch.full((3000, 2), 1.0, dtype=torch.bfloat16), torch.arange(3001)
    grouped = kernels.group(rows)
    assert kernels.segment_sum(gradient, offsets, grouped).tolist() == [[3000, 3000]]
    assert kernels.squares(gradient, offsets, grouped).tolist() == [2 * 3000**2]
