"""Devices and clusters by every spelling that tables, drivers and people use."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from stretto.errors import StrettoError
from stretto.planner.machines.catalogue import clusters, entries, find_cluster, find_device
from stretto.planner.machines.device import Precision
from stretto.planner.machines.names import normalised, parse_name

TABLES = Path(__file__).parents[3] / "../shared/tables"


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("A100-80GB-SXM", "a100-80gb-sxm"),
        ("A100-80GB SXM", "a100-80gb-sxm"),
        ("a100_80gb", "a100-80gb-sxm"),
        ("A100", "a100-80gb-sxm"),
        ("a100_40gb", "a100-40gb-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb-sxm"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("V100-32GB", "v100-32gb-sxm"),
        ("Tesla V100-SXM2-16GB", "v100-16gb-sxm"),
        ("h100_80gb", "h100-80gb-sxm"),
        ("H100-80GB-HBM3", "h100-80gb-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-sxm"),
        ("8xH100", "h100-80gb-sxm"),
        ("H100x8", "h100-80gb-sxm"),
        ("H100 NVL", "h100-94gb-nvl"),
        ("H100-96GB SXM (HBM2e, 500 W)", "h100-96gb-sxm"),
        ("H800", "h800-80gb-sxm"),
        ("NVIDIA H200", "h200-141gb-sxm"),
        ("B200 SXM", "b200-180gb-sxm"),
        ("GB200 (per GPU)", "gb200-186gb"),
        ("AMD Instinct MI300X", "mi300x"),
        ("MI325X", "mi325x"),
        ("MI250X", "mi250x-gcd"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("TPU v5p", "tpu-v5p"),
        ("tpu_v4", "tpu-v4"),
        ("v5e-256", "tpu-v5e"),
        ("TPU v4-128", "tpu-v4"),
        ("910B", "ascend-910b"),
        ("Ascend 910B-class", "ascend-910b"),
        ("Huawei Ascend 910B3 NPU", "ascend-910b"),
        ("H100-class", "h100-80gb-sxm"),
        ("H100-SXM5-80GB", "h100-80gb-sxm"),
        ("NVIDIA A100 Tensor Core GPU 80GB SXM4 (400 W)", "a100-80gb-sxm"),
        ("A100 (40GB)", "a100-40gb-sxm"),
        ("A100 (PCIe)", "a100-80gb-pcie"),
        ("A100 40GB PCIe 4.0", "a100-40gb-pcie"),
        ("H100 80GB, NVLink 900 GB/s", "h100-80gb-sxm"),
        ("H800 (NVLink 400 GB/s)", "h800-80gb-sxm"),
        ("1024 NVIDIA A100", "a100-80gb-sxm"),
        ("64 H100", "h100-80gb-sxm"),
        ("NVIDIA GH200 Grace Hopper Superchip", "gh200-96gb"),
    ],
)
def test_spellings_of_devices(spelling: str, name: str) -> None:
    assert find_device(spelling).name == name


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("A100(DGX-A100)", "dgx-a100-80gb"),
        ("V100-32GB(DGX-2)", "dgx-2-v100-32gb"),
        ("dgx-a100", "dgx-a100-80gb"),
        ("AWS p4d.24xlarge", "aws-p4d"),
        ("p5", "aws-p5"),
        ("GB200 NVL72", "gb200-nvl72"),
        ("Jean Zay", "jean-zay-v100-32gb"),
        ("b200", "dgx-b200"),
    ],
)
def test_spellings_of_clusters(spelling: str, name: str) -> None:
    assert find_cluster(spelling).name == name


def test_a_system_in_brackets_takes_the_device_that_is_named() -> None:
    cluster = find_cluster("A100-40GB(DGX-A100)")
    assert (cluster.name, cluster.device.name) == ("dgx-a100-80gb", "a100-40gb-sxm")
    assert find_cluster("H100 (DGX-2)").name == "dgx-h100"  # which is no system of it


@pytest.mark.parametrize(
    "spelling",
    [
        "H2O",
        "A100 MIG",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "A100, MIG 1g",
        "RTX 4090 Laptop",
        "GH2000",
        "A1000",
        "H100-40GB",
    ],
)
def test_unknown_devices_are_not_mistaken_for_known_ones(spelling: str) -> None:
    with pytest.raises(StrettoError, match="is not known"):
        find_device(spelling)


def test_every_accelerator_has_a_date() -> None:
    """Before which no run of it is; a year later is what a run of no date is taken for."""
    for entry in entries():
        dated = bool(re.fullmatch(r"20[12]\d-(0[1-9]|1[0-2])", entry.device.released))
        assert dated != entry.device.name.endswith("cpu"), entry.device.name


def test_errors_name_the_nearest_device() -> None:
    with pytest.raises(StrettoError) as caught:
        find_device("A100-60GB")
    assert "a100-40gb-sxm" in (caught.value.hint or "")
    with pytest.raises(StrettoError) as caught:
        find_cluster("dgx-h10")
    assert "dgx-h100" in (caught.value.hint or "")


def test_a_size_after_the_name_sets_the_devices() -> None:
    assert find_cluster("dgx-a100-80gb").devices is None
    assert find_cluster("dgx-a100-80gb:1024").devices == 1024
    assert find_cluster("h100", 64).nodes == 8
    assert find_cluster("h100:64", 16).devices == 16
    assert (find_cluster("8xA100").node, find_cluster("8xA100").nodes) == (8, 1)
    part = find_cluster("h100:4")
    assert (part.node, part.nodes) == (4, 1)
    for devices, nodes, last in ((12, 2, 4), (16, 2, None), (2048, 256, None), (8, 1, None)):
        cluster = find_cluster("h100", devices)
        assert (cluster.devices, cluster.nodes, cluster.last) == (devices, nodes, last)
    assert find_cluster("gb200-nvl72:2048").devices == 2048
    for wrong in ("h100:many", "h100:0"):
        with pytest.raises(StrettoError):
            find_cluster(wrong)
    with pytest.raises(StrettoError, match="has 4 devices, not 8"):
        part.sized(8)


def test_no_two_names_are_spelt_alike() -> None:
    devices = [normalised(n) for e in entries() for n in (e.device.name, *e.device.aliases)]
    assert len(set(devices)) == len(devices)
    assert {cluster.device for cluster in clusters()} == {entry.device for entry in entries()}
    for entry in entries():
        assert find_device(entry.device.name) is entry.device
        assert find_cluster(entry.device.name).device is entry.device


def test_a_name_is_parsed_into_its_parts() -> None:
    spoken = parse_name("16x NVIDIA A100-SXM4-80GB (DGX)")
    assert (spoken.count, spoken.gb, spoken.aside) == (16, 80, "dgx")
    assert spoken.tokens == ("a100", "sxm4")


@pytest.mark.skipif(not TABLES.is_dir(), reason=f"no measured tables at {TABLES}")
def test_every_device_of_the_tables_is_known() -> None:
    spelling: set[str] = set()
    for path in TABLES.glob("*.csv"):
        for row in csv.DictReader(path.read_text().splitlines()):
            spelling.add(row.get("gpu") or "")
    missing = [name for name in sorted(spelling - {""}) if not find_cluster(name)]
    assert not missing
    assert len(spelling) > 10


@pytest.mark.skipif(not TABLES.is_dir(), reason=f"no measured tables at {TABLES}")
def test_figures_are_those_of_the_table_of_hardware() -> None:
    """Peaks and bandwidths of every accelerator that the catalogue has; its MI250X is half a module."""
    checked = 0
    for row in csv.DictReader((TABLES / "hardware.csv").read_text().splitlines()):
        try:
            device = find_device(row["accelerator"])
        except StrettoError:
            continue
        parts = 2 if device.name == "mi250x-gcd" else 1
        low = "high claim" not in row["accelerator"]
        fields: tuple[tuple[str, Precision], ...] = (
            ("bf16_dense_tflops", "bf16"),
            ("fp8_dense_tflops", "fp8"),
            ("fp32_tflops", "fp32"),
        )
        for field, precision in fields:
            if row[field] and low and precision in device.tflops:
                assert device.tflops[precision] * parts == float(row[field]), (device.name, field)
                checked += 1
        if row["mem_bw_gbps"] and low:
            assert device.bandwidth * parts == float(row["mem_bw_gbps"]) * 1e9, device.name
        if row["measured_matmul_bf16_tflops"]:
            assert device.sustained["bf16"] == float(row["measured_matmul_bf16_tflops"]), device.name
        if row["memory_gb_vendor"]:
            assert 0.88 < device.memory * parts / (float(row["memory_gb_vendor"]) * 2**30) <= 1.0, device.name
    assert checked > 30
