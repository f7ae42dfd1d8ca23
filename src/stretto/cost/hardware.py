"""Peak speed of accelerators by the name that their driver gives, for model FLOPs utilisation.

The vendors' figures for dense matrices, in TFLOPs, as listed with their pages in the accelerator tables of
stas00/ml-engineering and in the device files of cli99/llm-analysis; RTX 4090 from NVIDIA's Ada white paper.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
Peaks = dict[Precision, float]


@dataclass(frozen=True)
class Accelerator:
    """One kind of device, as a program sees it."""

    name: str
    pattern: str  # in the driver's name, whatever the case
    tflops: Peaks
    unless: str = "MIG"  # and this not: a slice or a slower card of the same chip


# No figure is better than a wrong one: PCIe and NVL cards have the same chip's name and run slower.
_SLOWER = "MIG|PCIe|NVL"
_HOPPER: Peaks = {"fp32": 67, "tf32": 494.5, "fp16": 989, "bf16": 989, "fp8": 1979}
_BLACKWELL: Peaks = {"fp32": 80, "tf32": 1125, "fp16": 2250, "bf16": 2250, "fp8": 4500}
_GRACE_BLACKWELL: Peaks = {"fp32": 80, "tf32": 1250, "fp16": 2500, "bf16": 2500, "fp8": 5000}

ACCELERATORS: tuple[Accelerator, ...] = (
    Accelerator("V100 SXM", r"\bV100-SXM", {"fp16": 125}),
    Accelerator("A100", r"\bA100\b", {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}),
    Accelerator("H100 SXM", r"\bH100\b", _HOPPER, _SLOWER),
    Accelerator("H200 SXM", r"\bH200\b", _HOPPER, _SLOWER),
    Accelerator("B200 SXM", r"\bB200\b", _BLACKWELL),
    Accelerator("B300 SXM", r"\bB300\b", _BLACKWELL),
    Accelerator("GB200", r"\bGB200\b", _GRACE_BLACKWELL),
    Accelerator("GB300", r"\bGB300\b", _GRACE_BLACKWELL),
    Accelerator(
        "RTX 4090",
        r"\bRTX 4090\b",
        {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2, "fp8": 330.3},
        r"Laptop|4090 D\b",
    ),
    # a module shows as two devices, each half of 383 and 47.9
    Accelerator("MI250X, one of two dies", r"\bMI250X\b", {"fp32": 23.95, "fp16": 191.5, "bf16": 191.5}),
    Accelerator(
        "MI300X",
        r"\bMI300X\b",
        {"fp32": 163.4, "tf32": 653.7, "fp16": 1307, "bf16": 1307, "fp8": 2610},
    ),
    Accelerator(
        "MI325X",
        r"\bMI325X\b",
        {"fp32": 163.4, "tf32": 653.7, "fp16": 1300, "bf16": 1300, "fp8": 2610},
    ),
    Accelerator("MI355X", r"\bMI355X\b", {"fp32": 157.3, "fp16": 2500, "bf16": 2500, "fp8": 5000}),
)


def find_accelerator(device_name: str) -> Accelerator | None:
    """The accelerator behind a driver's device name, as "NVIDIA H100 80GB HBM3"; None if not known."""
    for known in ACCELERATORS:
        if _has(device_name, known.pattern) and not _has(device_name, known.unless):
            return known
    return None


def peak_tflops(device_name: str, precision: Precision) -> float | None:
    """Dense peak in TFLOPs of one device for matrix products at that precision; None if not known."""
    found = find_accelerator(device_name)
    return None if found is None else found.tflops.get(precision)


def _has(text: str, pattern: str) -> bool:
    return re.search(pattern, text, re.IGNORECASE) is not None
