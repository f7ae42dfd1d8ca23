"""Quotient-remainder embeddings: an id's vector is the product of a row of each of two small tables.

Shi et al. 2020 (arXiv 1909.02107, section 3.1): with m rows of the remainder table, id = q m + r, and no two
ids share both rows. All arithmetic is in integers: a quotient computed in floats would be one too large near
multiples, above 2^24 in float32 and above 2^53 in float64.
"""

from __future__ import annotations

from torch import Tensor


def rows_of(ids: Tensor, rows: int, divisor: int) -> tuple[Tensor, Tensor]:
    """Return rows [n] of the quotient and the remainder table, for ids [n] (int64, 0 or more) mod `rows`."""
    remainders = ids % rows
    quotient = remainders.div(divisor, rounding_mode="floor")
    return quotient, remainders - quotient * divisor


def initial_rows_of_table(rows: int) -> float:
    """Return `rows_of_table` for `initial_rows`, for both tables that replace one of `rows` rows.

    A plain table of `rows` rows is initially uniform within a = sqrt(1 / rows), with variance a^2 / 3. The
    product of two independent values, uniform within b, has mean zero and variance (b^2 / 3)^2. Both are
    equal for b = (3 / rows)^(1/4), the bound of a plain table of sqrt(rows / 3) rows.
    """
    return (rows / 3) ** 0.5


def combine(quotient_rows: Tensor, remainder_rows: Tensor) -> Tensor:
    """Return vectors [n, dim] of n ids from their rows of both tables."""
    return quotient_rows * remainder_rows


def combine_backward(
    gradient: Tensor, quotient_rows: Tensor, remainder_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients [n, dim] of both arguments of `combine` from that of its result."""
    return gradient * remainder_rows, gradient * quotient_rows
