"""Ids to rows by arithmetic."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.recommender.placement import TableSpec, divisor_of, physical_tables
from stretto.recommender.tables.ids.quotient import (
    combine,
    combine_backward,
    initial_rows_of_table,
    rows_of,
)
from stretto.recommender.tables.initial import initial_rows
from stretto.recommender.tables.splitmix import mix, owner

IDS = st.lists(st.one_of(st.integers(0, 100), st.integers(0, 2**63 - 1)), min_size=1, max_size=20)


@given(IDS, st.integers(1, 2**40), st.integers(1, 2**20))
def test_quotient_and_remainder_are_of_whole_numbers(ids: list[int], rows: int, divisor: int) -> None:
    quotient, remainder = rows_of(torch.tensor(ids), rows, divisor)
    assert quotient.tolist() == [i % rows // divisor for i in ids]
    assert remainder.tolist() == [i % rows % divisor for i in ids]


@pytest.mark.parametrize("row_id", [33_554_435, 2**53 + 1, 2**62 - 1])
def test_quotients_that_floats_get_wrong(row_id: int) -> None:
    quotient, remainder = rows_of(torch.tensor([row_id]), 2**63 - 1, 3)
    assert (quotient.item(), remainder.item()) == divmod(row_id, 3)


@given(st.integers(1, 2000), st.one_of(st.none(), st.integers(1, 3000)))
def test_no_two_ids_share_both_rows(rows: int, divisor: int | None) -> None:
    spec = TableSpec(name="C1", rows=rows, dim=4, ids="quotient-remainder", divisor=divisor)
    first, second = physical_tables([spec])
    quotient, remainder = rows_of(torch.arange(rows), rows, divisor_of(spec))
    assert 0 <= int(quotient.min()) <= int(quotient.max()) < first.rows
    assert 0 <= int(remainder.min()) <= int(remainder.max()) < second.rows
    assert len(set(zip(quotient.tolist(), remainder.tolist(), strict=True))) == rows


def test_the_gradient_of_a_product() -> None:
    rows = [torch.randn(7, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    gradient = torch.randn(7, 3, dtype=torch.float64)
    expected = torch.autograd.grad(combine(*rows), rows, gradient)
    gradients = combine_backward(gradient, *(each.detach() for each in rows))
    for computed, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(computed, other, rtol=0, atol=0)


def test_products_begin_as_wide_as_a_plain_table() -> None:
    rows, every = 30_000, torch.arange(4000)
    spread = initial_rows_of_table(rows)
    assert spread**-0.5 == pytest.approx((3 / rows) ** 0.25)
    parts = [
        initial_rows(
            seed=0,
            name=f"C1.{part}",
            rows_of_table=spread,
            rows=every,
            start=0,
            stop=64,
            dim=64,
            dtype=torch.float64,
        )  # pyright: ignore[reportArgumentType]
        for part in ("quotient", "remainder")
    ]
    plain = initial_rows(
        seed=0, name="C1", rows_of_table=rows, rows=every, start=0, stop=64, dim=64, dtype=torch.float64
    )
    product = combine(parts[0], parts[1])
    # 256,000 values: the deviation's own is 1/sqrt(2 n) of it for even values, about twice that for products
    assert float(product.std() / plain.std()) == pytest.approx(1, abs=0.015)
    assert abs(float(product.mean())) < 5 * float(plain.std()) / product.numel() ** 0.5


def test_mixing_is_splitmix64() -> None:
    # Its first numbers from the state 0, as published with its reference code.
    states = torch.tensor([0, 0x9E3779B97F4A7C15 - 2**64])
    assert [value % 2**64 for value in mix(states).tolist()] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 8])
def test_owners_share_any_ids_evenly(parts: int) -> None:
    for step in (1, 8, 1 << 20):
        ids = torch.arange(40_000) * step
        part = owner(ids, parts)
        counts = torch.bincount(part, minlength=parts).double()
        assert len(counts) == parts
        # chi-square of parts - 1 degrees: its mean and ten deviations
        chi = float(((counts - 40_000 / parts) ** 2).sum() / (40_000 / parts))
        assert chi < parts + 10 * (2 * parts) ** 0.5
        # what the shard's own map takes of the mixed bits is not settled by who has the id
        low = mix(ids[part == 0]) & 7
        assert float(torch.bincount(low, minlength=8).max()) < 1.3 * len(low) / 8
