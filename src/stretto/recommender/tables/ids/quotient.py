"""Two small tables for one large one: an id's vector is the product of a row of each.

Shi et al. 2020 (arXiv 1909.02107, section 3.1): with m rows of the remainder's table, id = q m + r, and no
two ids have both rows in common. All arithmetic is of integers: a quotient that went through floats would be
one too large near multiples, above 2^24 in float32 and above 2^53 in float64.
"""

from __future__ import annotations

from torch import Tensor


def rows_of(ids: Tensor, rows: int, divisor: int) -> tuple[Tensor, Tensor]:
    """Rows [n] of the quotient's table and of the remainder's, of ids [n] (int64, 0 or more) mod `rows`."""
    remainders = ids % rows
    quotient = remainders.div(divisor, rounding_mode="floor")
    return quotient, remainders - quotient * divisor


def initial_rows_of_table(rows: int) -> float:
    """`rows_of_table` for `initial_rows`, of both tables that stand for one of `rows` rows.

    A plain table of `rows` rows begins uniform within a = sqrt(1 / rows), of variance a^2 / 3. The product of
    two independent values, uniform within b, has mean zero and variance (b^2 / 3)^2. They are equal for b =
    (3 / rows)^(1/4), the bound of a plain table of sqrt(rows / 3) rows.
    """
    return (rows / 3) ** 0.5


def combine(quotient_rows: Tensor, remainder_rows: Tensor) -> Tensor:
    """Vectors [n, dim] of n ids from their rows of both tables."""
    return quotient_rows * remainder_rows


def combine_backward(
    gradient: Tensor, quotient_rows: Tensor, remainder_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of both arguments of `combine`, [n, dim] each, from that of what it returned."""
    return gradient * remainder_rows, gradient * quotient_rows
