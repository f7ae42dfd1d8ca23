from __future__ import annotations

import pytest

from stretto.planner.machines.catalogue import peak_tflops
from stretto.planner.machines.device import Precision


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA A100 80GB PCIe", "bf16", 312),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "bf16", 2500),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("AMD Instinct MI300X", "bf16", 1307),
        ("AMD Instinct MI250X", "bf16", 191.5),
    ],
)
def test_known_devices(device: str, precision: Precision, peak: float):
    assert peak_tflops(device, precision) == peak


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        "",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GH200 480GB",
        "Tesla V100-PCIE-16GB",
        "NVIDIA RTX A1000",
    ],
)
def test_unknown_devices_have_no_peak(device: str):
    assert peak_tflops(device, "bf16") is None
    assert peak_tflops(device, "fp16") is None


def test_a_precision_that_a_device_lacks_has_no_peak():
    assert peak_tflops("Tesla V100-SXM2-32GB", "bf16") is None
