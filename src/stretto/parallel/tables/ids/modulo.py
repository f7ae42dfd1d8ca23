"""Ids to rows by modulo."""

from __future__ import annotations

from torch import Tensor


def rows_of(ids: Tensor, rows: int) -> Tensor:
    """Rows [n] of ids [n] (int64, non-negative) in a table of `rows` rows: ids that differ by a multiple
    share one.
    """
    return ids % rows
