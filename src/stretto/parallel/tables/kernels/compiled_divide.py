"""Rows by the part of a table that has them, compiled by numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from stretto.parallel.tables.kernels.compiled import jit

_U = np.uint64


@jit(exact=True)
def divide(rows: Any, offsets: Any, parts: Any, order: Any, own: Any, lengths: Any, starts: Any) -> None:
    """As `plain.divide`: fills order and own [n], lengths [parts * bags] and starts [parts], the latter two
    of zeros. All whole numbers uint64.
    """
    bags = _U(len(offsets) - 1)
    for bag in range(bags):
        for i in range(offsets[bag], offsets[bag + _U(1)]):
            lengths[(rows[i] % parts) * bags + bag] += _U(1)
    at = _U(0)
    for part in range(parts):
        starts[part] = at
        for bag in range(bags):
            at += lengths[part * bags + bag]
    for i in range(_U(len(rows))):
        quotient = rows[i] // parts
        part = rows[i] - quotient * parts
        at = starts[part]
        order[at], own[at] = i, quotient
        starts[part] = at + _U(1)
