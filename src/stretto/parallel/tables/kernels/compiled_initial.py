"""Initial values of tables, compiled by numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from stretto.parallel.tables.kernels.compiled import jit


@jit(inline=True, exact=True)
def _mixed(x: Any) -> Any:
    """As `initial._mixed`."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@jit(exact=True)
def initial(out: Any, rows: Any, columns: Any, key: Any, bound: Any) -> None:
    """As `initial.initial_rows`, bit by bit. columns: [width], mixed; all whole numbers uint64."""
    width = np.uint64(len(columns))
    for i in range(np.uint64(len(rows))):
        own, at = _mixed((rows[i] + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key), i * width
        for j in range(width):
            bits = _mixed(own ^ columns[j]) >> np.uint64(11)
            out[at + j] = (np.float64(bits) * 2.0**-52 - 1.0) * bound
