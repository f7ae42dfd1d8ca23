"""Initial values of tables: the same for every shard, and as random as they should be."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.recommender.tables.initial import initial_rows
from stretto.recommender.tables.kernels.plain import Kernels

ROWS, DIM = 500, 12


def full_table(seed: int = 3, name: str = "C1", dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return initial_rows(
        seed=seed,
        name=name,
        rows_of_table=ROWS,
        rows=torch.arange(ROWS),
        start=0,
        stop=DIM,
        dim=DIM,
        dtype=dtype,
    )


@given(
    modulus=st.integers(1, 7), residue=st.integers(0, 6), start=st.integers(0, DIM), size=st.integers(0, DIM)
)
def test_a_shard_has_what_the_plain_table_has(modulus: int, residue: int, start: int, size: int) -> None:
    rows, stop = torch.arange(residue, ROWS, modulus), min(DIM, start + size)
    got = initial_rows(
        seed=3, name="C1", rows_of_table=ROWS, rows=rows, start=start, stop=stop, dim=DIM, dtype=torch.float64
    )
    assert torch.equal(got, full_table()[rows, start:stop])


def test_as_by_hand_in_python() -> None:
    """SplitMix64's output function in whole numbers, as an independent reading of the definition."""

    def mixed(x: int) -> int:
        x &= (1 << 64) - 1
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        x = (x ^ x >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        return x ^ x >> 31

    golden = 0x9E3779B97F4A7C15
    key = int.from_bytes(hashlib.sha256(b"7:users").digest()[:8], "big")
    rows = [0, 1, 2**40, 2**63 - 1]
    got = initial_rows(
        seed=7,
        name="users",
        rows_of_table=100,
        rows=torch.tensor(rows),
        start=0,
        stop=5,
        dim=5,
        dtype=torch.float64,
    )
    for i, row in enumerate(rows):
        for column in range(5):
            bits = mixed(mixed((row + 1) * golden + key) ^ mixed((column + 1) * golden))
            assert got[i, column].item() == pytest.approx(((bits >> 11) / 2**52 - 1) * 0.1, abs=1e-17)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_numba_or_without_to_the_last_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randint(0, 1 << 62, (9000,))
    compiled = initial_rows(
        seed=1, name="ids", rows_of_table=977, rows=rows, start=3, stop=20, dim=24, dtype=dtype
    )
    monkeypatch.setattr("stretto.recommender.tables.initial.kernels_for", lambda *_: Kernels())
    assert torch.equal(
        compiled,
        initial_rows(seed=1, name="ids", rows_of_table=977, rows=rows, start=3, stop=20, dim=24, dtype=dtype),
    )


def test_a_float32_is_the_float64_cast() -> None:
    assert torch.equal(full_table(dtype=torch.float32), full_table().float())


def test_values_are_uniform_and_of_nothing_else() -> None:
    rows = 20000
    values = (
        initial_rows(
            seed=0,
            name="C2",
            rows_of_table=rows,
            rows=torch.arange(rows),
            start=0,
            stop=DIM,
            dim=DIM,
            dtype=torch.float64,
        )
        * rows**0.5
    )
    assert -1 <= values.min() < -0.9999
    assert 0.9999 < values.max() < 1
    shares = torch.histc(values, 20, -1, 1) / values.numel()
    assert (shares - 0.05).abs().max() < 5 * (0.05 * 0.95 / values.numel()) ** 0.5
    between = torch.corrcoef(values.T).fill_diagonal_(0).abs().max()
    assert between < 5 / rows**0.5
    after = (values[1:] * values[:-1]).mean(0).abs().max() * 3
    assert after < 5 / rows**0.5


def test_seed_and_name_make_other_values() -> None:
    assert not (full_table() == full_table(seed=4)).any()
    assert not (full_table() == full_table(name="C2")).any()
    assert full_table().unique().numel() == ROWS * DIM


def test_many_rows_are_as_few() -> None:
    """More than are worked on at once."""
    rows = torch.randint(0, 1 << 62, (70000,))
    many = initial_rows(
        seed=1, name="ids", rows_of_table=10, rows=rows, start=0, stop=8, dim=8, dtype=torch.float32
    )
    some = torch.tensor([0, 32767, 32768, 32769, 69999])
    assert torch.equal(
        many[some],
        initial_rows(
            seed=1, name="ids", rows_of_table=10, rows=rows[some], start=0, stop=8, dim=8, dtype=torch.float32
        ),
    )


def test_columns_that_a_table_lacks_are_refused() -> None:
    for start, stop in ((-1, 3), (4, 3), (0, DIM + 1)):
        with pytest.raises(ValueError, match="columns"):
            initial_rows(
                seed=0,
                name="C1",
                rows_of_table=ROWS,
                rows=torch.arange(3),
                start=start,
                stop=stop,
                dim=DIM,
                dtype=torch.float32,
            )
