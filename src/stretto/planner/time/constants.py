"""The constants of the time model, by chip and by kind of link, read once from `data/`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from stretto.planner.machines.device import Device, Precision
from stretto.planner.machines.reading import shipped


@dataclass(frozen=True, kw_only=True)
class Products:
    """Constants of matrix products on a chip; `operators_*.yaml` say on which measurements each constant was
    fitted.

    Attributes:
        units: multiprocessors, each of which computes one tile of the result at a time.
        compute: rate of the largest tile over the rate that large products sustain.
        memory: share of the device memory's bandwidth that a product reaches.
        fixed: seconds of a product of no size.
        tile: exponent by which smaller tiles are slower.
        wave: share of the last, partly filled wave that counts as full.
        prologue: extra elements of the inner dimension whose time each tile adds.
        droop: exponent by which products with larger operands are slower.
    """

    units: int
    compute: float
    memory: float
    fixed: float
    tile: float
    wave: float
    prologue: float
    droop: float


@dataclass(frozen=True)
class Flash:
    """Constants of fused attention on a chip.

    Attributes:
        forward, backward: by head_dim, the share of the vendor's peak that long sequences reach.
        ramp, causal_ramp: number of keys at which half of that share is reached, without and with a causal
            mask.
    """

    forward: Mapping[int, float]
    backward: Mapping[int, float]
    ramp: float
    causal_ramp: float


@cache
def constants(name: str) -> dict[str, Any]:
    """The constants of "operators" or of "collectives". Chosen and fitted ones are in a file each, and are
    merged here, entry by entry.
    """
    both: dict[str, Any] = {}
    for part in ("chosen", "fitted"):
        both = _merged(both, shipped("stretto.planner.time", f"{name}_{part}"))
    return both


def _merged(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in other.items():
        nested = isinstance(value, dict) and key in base
        merged[key] = _merged(base[key], value) if nested else value
    return merged


@cache
def chip(device: Device) -> str:
    """The chip of a device: the first word of its name, or "cpu" if that is the last."""
    tokens = device.name.lower().split("-")
    return "cpu" if tokens[-1] == "cpu" else tokens[0]


def _entry(table: Mapping[str, Any], device: Device) -> dict[str, Any]:
    """The entry of a device's chip, or of the chip that stands in for it, over the defaults of the table."""
    alike: Mapping[str, str] = constants("operators")["alike"]
    name = chip(device)
    entry = table.get(name) or table.get(alike.get(name, "")) or {}
    return {**table["default"], **entry}


def is_fitted(device: Device) -> bool:
    """True if matrix products were measured on the device's chip, or on one that stands in for it."""
    alike: Mapping[str, str] = constants("operators")["alike"]
    table = constants("operators")["products"]
    return chip(device) in table or alike.get(chip(device), "") in table


def flex_speed(backward: bool) -> float:
    """Speed of FlexAttention over that of other fused attention."""
    return constants("operators")["flex"]["backward" if backward else "forward"]


@cache
def products(device: Device) -> Products:
    """The constants of matrix products on a device."""
    entry = _entry(constants("operators")["products"], device)
    units: Mapping[str, int] = constants("operators")["units"]
    return Products(
        units=units.get(chip(device), units["default"]),
        compute=entry["compute"],
        memory=entry["memory"],
        fixed=entry["fixed_us"] * 1e-6,
        tile=entry["tile"],
        wave=entry["wave"],
        prologue=entry["prologue"],
        droop=entry["droop"],
    )


@cache
def sustained(device: Device, precision: Precision) -> float:
    """FLOP/s that large matrix products sustain: measured, else a usual share of the vendor's peak."""
    if precision in device.sustained:
        return device.sustained[precision] * 1e12
    shares = _entry(constants("operators")["sustained"], device)
    return shares[precision] * device.peak(precision)


@cache
def bandwidth(device: Device, kind: str) -> tuple[float, float]:
    """Bytes/s and fixed seconds of a class of memory-bound operations."""
    entry = _entry(constants("operators")["passes"][kind], device)
    return entry["share"] * device.bandwidth, entry["fixed_us"] * 1e-6


@cache
def flash_of(device: Device) -> Flash:
    """The constants of fused attention on a device."""
    entry = _entry(constants("operators")["flash"], device)
    return Flash(entry["forward"], entry["backward"], entry["ramp"], entry["causal_ramp"])
