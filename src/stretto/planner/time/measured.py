"""Interpolation of times measured on this machine, between and beyond the measured sizes.

`stretto calibrate` writes the rows; if there are any, they replace the constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import exp, fsum, log

Row = Sequence[float]


def interpolate(rows: Sequence[tuple[float, float]], size: float) -> float:
    """Seconds at `size` from rows of (size, seconds).

    Between two rows linear in the logarithms; below the first row its time, which is overhead; beyond the
    last row at its rate.
    """
    rows = sorted(rows)
    if size <= rows[0][0]:
        return rows[0][1]
    for (low, before), (high, after) in pairwise(rows):
        if low < size <= high:
            return before * (after / before) ** (log(size / low) / log(high / low))
    return rows[-1][1] * size / rows[-1][0]


def nearest_rate(
    rows: Sequence[tuple[tuple[float, ...], float, float]], sizes: tuple[float, ...], launch: float = 0.0
) -> float:
    """Work per second of a shape, from rows of (shape, work, seconds): the geometric mean of the rates of the
    four nearest rows in the logarithms of their sizes, weighted by the inverse square of the distance.

    Args:
        launch: seconds of launch overhead in every row, which are subtracted.
    """
    neighbours = sorted(
        (_distance(shape, sizes), work / _working(seconds, launch)) for shape, work, seconds in rows
    )[:4]
    if neighbours[0][0] < 1e-9:
        return neighbours[0][1]
    weights = [1.0 / distance for distance, _ in neighbours]
    mean = fsum(w * log(rate) for w, (_, rate) in zip(weights, neighbours, strict=True)) / fsum(weights)
    return exp(mean)


def _distance(shape: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Square of the distance in the logarithms of sizes; sizes below one count as one."""
    return fsum(log(max(a, 1.0) / max(b, 1.0)) ** 2 for a, b in zip(shape, other, strict=True))


def _working(seconds: float, launch: float) -> float:
    # noise may leave less than the launch overhead: a tenth of the row counts as work at least
    return max(seconds - launch, 0.1 * seconds)
