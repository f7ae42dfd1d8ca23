"""How long matrix products take: tiles in waves over the multiprocessors, or bytes, whichever is longer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from stretto.cost.machine.device import Device, Precision
from stretto.cost.time.constants import Products, bandwidth, products, sustained
from stretto.cost.time.measured import rate_near

# Tiles of the result that libraries choose from, and into how many parts they split a long inner dimension.
TILES = ((128, 256), (256, 128), (128, 128), (64, 256), (256, 64), (128, 64), (64, 128), (64, 64))
SPLITS = (1, 2, 4, 8)
LARGEST = 128 * 256
# Operands of this many elements in all are neither slowed nor sped up by their size; the law is level beyond
# what was measured.
MIDDLE = 2.0**26
LEVEL = (2.0**-4, 2.0**3)
# A split costs the sums of its parts, in 32 bits, written and read, and a kernel of its own.
SUM_BYTES, SUM_SECONDS = 8.0, 3e-6
_SHARP = 6  # of the bend between bound by memory and bound by arithmetic
_WIDTHS: dict[Precision, int] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


@lru_cache(maxsize=65536)
def matmul_seconds(
    device: Device, m: int, n: int, k: int, precision: Precision = "bf16", batch: int = 1
) -> float:
    """Time of `batch` products [m, k] times [k, n], in one call.

    In 8 bits the operands are cast from 16 bits first, each in a pass that reads and writes it.
    """
    rows = _measured(device, precision)
    if rows is not None:
        return _from_table(device, rows, m, n, k, precision, batch)
    how = products(device)
    reached = how.memory * device.bandwidth
    width = _WIDTHS[precision]
    # the result of a product in 8 bits is of 16
    moved = batch * (width * (m * k + k * n) + max(width, 2) * m * n) / reached
    rate = how.compute * sustained(device, precision) / how.units
    work = _tiled(how, m, n, k, batch, rate, reached)
    seconds = (work**_SHARP + moved**_SHARP) ** (1 / _SHARP) + how.fixed
    return seconds + _casts(device, m, n, k, batch) if precision == "fp8" else seconds


def _tiled(how: Products, m: int, n: int, k: int, batch: int, rate: float, reached: float) -> float:
    """Seconds of the arithmetic with the best tile and split, `rate` being one multiprocessor's FLOP/s."""
    best = float("inf")
    for rows, columns in TILES:
        tiles = batch * -(-m // rows) * -(-n // columns)
        one = 2.0 * rows * columns / (rate * (rows * columns / LARGEST) ** how.tile)
        for split in SPLITS:
            waves = tiles * split / how.units
            part = one * (k / split + how.prologue)
            if waves * part >= best:
                break  # further splits only add prologues
            waves += (-(-tiles * split // how.units) - waves) * how.wave
            seconds = waves * part
            if split > 1:
                seconds += SUM_BYTES * split * batch * m * n / reached + SUM_SECONDS
            best = min(best, seconds)
    large = min(max((m + n) * k / MIDDLE, LEVEL[0]), LEVEL[1])
    return best * large**how.droop


def _casts(device: Device, m: int, n: int, k: int, batch: int) -> float:
    rate, fixed = bandwidth(device, "copy")
    return 3.0 * batch * (m * k + k * n) / rate + 2 * fixed


def _measured(device: Device, precision: Precision) -> tuple[Sequence[Sequence[float]], float] | None:
    """Rows of this device in that precision, or in another one, and what they are to be divided by."""
    tables: Any = device.kernels.get("matmul")
    if not tables:
        return None
    if tables.get(precision):
        return tables[precision], 1.0
    for other, rows in tables.items():
        if rows:
            return rows, device.peak(precision) / device.peak(other)
    return None


def _from_table(
    device: Device,
    table: tuple[Sequence[Sequence[float]], float],
    m: int,
    n: int,
    k: int,
    precision: Precision,
    batch: int,
) -> float:
    rows, faster = table
    launch = float(device.kernels.get("launch", 0.0))  # pyright: ignore[reportArgumentType]
    known = [((a, b, c, e), 2.0 * a * b * c * e, seconds) for a, b, c, e, seconds in rows]
    rate = rate_near(known, (float(m), float(n), float(k), float(batch)), launch)
    return 2.0 * m * n * k * batch / (rate * faster) + launch
