"""Times of products: bounds, order, fits to measurements, measured devices."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stretto.planner.machines.catalogue import entries, find_device
from stretto.planner.machines.device import Device
from stretto.planner.time.constants import constants, products, sustained
from stretto.planner.time.operators import matmul_seconds, pass_seconds

TABLES = Path(__file__).parents[4] / "shared" / "tables"
needs_tables = pytest.mark.skipif(not TABLES.exists(), reason=f"no measured tables at {TABLES}")
CHIPS = ("a100", "h100")


@cache
def script() -> ModuleType:
    """benchmarks/fit_operators.py."""
    np = pytest.importorskip("numpy")
    assert np
    sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
    try:
        import fit_operators  # pyright: ignore[reportMissingImports]
    finally:
        sys.path.pop(0)
    return fit_operators


def device_of(chip: str) -> Device:
    return find_device({"a100": "a100-80gb-sxm", "h100": "h100-80gb-sxm"}[chip])


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "tf32", "fp8"])
def test_no_product_is_faster_than_the_device(chip: str, precision: Any) -> None:
    device = device_of(chip)
    width = {"fp8": 1, "fp32": 4, "tf32": 4}.get(precision, 2)
    for m in (1, 7, 128, 1000, 16384, 10**6):
        for n, k in ((64, 64), (64, 100000), (100000, 64), (4096, 4096), (28672, 8192)):
            seconds = matmul_seconds(device, m, n, k, precision)
            assert seconds > 2 * m * n * k / device.peak(precision)
            assert seconds > width * (m * k + k * n + m * n) / device.bandwidth
            assert seconds < 1e-3 or seconds < 100 * max(
                2 * m * n * k / device.peak(precision), 2 * (m * k + k * n + m * n) / device.bandwidth
            )


@pytest.mark.parametrize("name", [entry.device.name for entry in entries()])
def test_more_work_takes_no_less_time(name: str) -> None:
    device = find_device(name)
    sizes = (1, 63, 64, 65, 200, 512, 1000, 1024, 1025, 4096, 5000, 40000, 10**6)
    for side in range(3):
        for fixed in (64, 1280, 8192):
            shapes = [tuple(size if at == side else fixed for at in range(3)) for size in sizes]
            times = [matmul_seconds(device, *shape) for shape in shapes]
            assert all(0 < before <= after for before, after in pairwise(times))
    batches = [
        matmul_seconds(device=device, m=256, n=1024, k=1024, precision="bf16", batch=batch)
        for batch in (1, 2, 8, 9, 64)
    ]
    assert all(before < after for before, after in pairwise(batches))


def test_one_call_for_all_experts_is_faster_than_one_for_each() -> None:
    device = device_of("h100")
    together = matmul_seconds(device=device, m=512, n=1408, k=2048, precision="bf16", batch=64)
    assert together < 0.8 * 64 * matmul_seconds(device, 512, 1408, 2048)
    # but never faster than their arithmetic
    assert together > 64 * 2 * 512 * 1408 * 2048 / sustained(device, "bf16")


def test_a_long_inner_dimension_is_split_where_the_result_is_small() -> None:
    """The gradient of a small weight from many tokens: few tiles, but not few multiprocessors."""
    device = device_of("a100")
    fitted = products(device)
    few = matmul_seconds(device, 512, 512, 65536)
    # 8 to 16 of the largest tiles on 108 multiprocessors, one after another
    alone = 2 * 512 * 512 * 65536 / (fitted.compute * sustained(device, "bf16") * 16 / 108)
    assert few < 0.6 * alone


def test_8_bits_are_faster_in_large_products_only() -> None:
    device = device_of("h100")
    large, small = (16384, 12288, 4096), (256, 1024, 1024)
    assert matmul_seconds(device, *large, "fp8") < 0.75 * matmul_seconds(device, *large, "bf16")
    assert matmul_seconds(device, *small, "fp8") > matmul_seconds(device, *small, "bf16")
    # without its own units for 8 bits, a device gains nothing by them
    assert matmul_seconds(device_of("a100"), *large, "fp8") > matmul_seconds(
        device_of("a100"), *large, "bf16"
    )


def test_measured_peaks_and_related_chips_are_used() -> None:
    base = find_device("a100-80gb-sxm")
    slower = replace(base, sustained={"bf16": base.sustained["bf16"] / 2})
    shape = (8192, 8192, 8192)
    assert matmul_seconds(slower, *shape) == pytest.approx(2 * matmul_seconds(base, *shape), rel=0.01)
    assert products(find_device("h800")) == products(find_device("h100"))
    unknown = replace(base, name="new-chip", sustained={})
    assert products(unknown).compute == constants("operators")["products"]["default"]["compute"]
    assert sustained(unknown, "bf16") == pytest.approx(0.78 * 312e12)


# hidden size, microbatch, layers of a stage, milliseconds of its weight gradients: Qi et al. 2024, "Zero
# Bubble Pipeline Parallelism", appendix, profiled on A100; sequence 1024
WEIGHT_GRADIENTS = ((2304, 6, 3, 9.33), (6144, 1, 2, 8.11))


@pytest.mark.parametrize(("hidden", "batch", "layers", "measured"), WEIGHT_GRADIENTS)
def test_weight_gradients_of_stages_take_as_long_as_published(
    hidden: int, batch: int, layers: int, measured: float
) -> None:
    """Held-out products of another program, weight gradients."""
    linears = ((3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden))
    each = (matmul_seconds(device_of("a100"), n, k, batch * 1024, "fp16") for n, k in linears)
    assert 1e3 * layers * sum(each) == pytest.approx(measured, rel=0.08)


TABLE = {"fp32": [[128, 256, 256, 1, 100e-6], [512, 1024, 256, 1, 1100e-6], [512, 256, 1024, 4, 5100e-6]]}


def test_measured_rows_replace_the_constants() -> None:
    base = find_device("cpu")
    device = replace(base, kernels={"launch": 10e-6, "matmul": TABLE})
    for m, n, k, batch, seconds in TABLE["fp32"]:
        assert matmul_seconds(device, *(int(x) for x in (m, n, k)), "fp32", int(batch)) == pytest.approx(
            seconds
        )
    # beyond the table at the rates of the nearest
    far = matmul_seconds(device, 8192, 4096, 4096, "fp32") / (2 * 8192 * 4096 * 4096)
    rates = [(s - 10e-6) / (2 * m * n * k * b) for m, n, k, b, s in TABLE["fp32"]]
    assert min(rates) < far < max(rates)
    # another precision by the ratio of the peaks
    ratio = base.peak("fp32") / base.peak("bf16")
    assert matmul_seconds(device, 128, 256, 256, "bf16") - 10e-6 == pytest.approx(90e-6 * ratio)


def test_a_single_measured_row_suffices() -> None:
    device = replace(find_device("cpu"), kernels={"matmul": {"fp32": [[64, 64, 64, 1, 1e-5]]}})
    assert matmul_seconds(device, 128, 64, 64, "fp32") == pytest.approx(2e-5)


def test_passes_by_class_bandwidth_and_table() -> None:
    a100, h100 = device_of("a100"), device_of("h100")
    assert (
        pass_seconds(a100, "add", 1e9)
        < pass_seconds(a100, "gated", 1e9)
        < pass_seconds(a100, "embedding", 1e9)
    )
    assert pass_seconds(h100, "softmax", 1e9) == pytest.approx(
        pass_seconds(a100, "softmax", 1e9) * a100.bandwidth / h100.bandwidth, rel=0.01
    )
    # hardly less for a few bytes than for none
    assert pass_seconds(a100, "norm", 1.0) == pytest.approx(pass_seconds(a100, "norm", 1e4), rel=0.01)
    rows = {"copy": [[1e3, 1e-6], [1e6, 1e-4], [1e9, 0.2]], "norm": [[1e6, 3e-4]]}
    device = replace(a100, kernels={"passes": rows})
    assert pass_seconds(device, "copy", 10.0) == pytest.approx(1e-6)
    assert pass_seconds(device, "copy", 1e6) == pytest.approx(1e-4)
    assert 1e-4 < pass_seconds(device, "copy", 1e8) < 0.2
    assert pass_seconds(device, "copy", 1e10) == pytest.approx(2.0)
    assert pass_seconds(device, "norm", 4e6) == pytest.approx(1.2e-3)
    assert pass_seconds(device, "gelu", 1e6) == pass_seconds(device, "copy", 1e6)


@needs_tables
@pytest.mark.parametrize("chip", CHIPS)
def test_the_fit_computes_what_the_model_does(chip: str) -> None:
    fit = script()
    rows = fit.load(TABLES, chip, "gemm")
    rows = rows.where(range(0, len(rows.m), 97))
    entry = constants("operators")["products"][chip]
    predicted = fit.Predictor(rows, chip)([entry[name] for name in fit.NAMES])
    for m, n, k, seconds in zip(rows.m, rows.n, rows.k, predicted, strict=True):
        assert matmul_seconds(device_of(chip), int(m), int(n), int(k)) == pytest.approx(seconds, rel=1e-6)


@needs_tables
@pytest.mark.parametrize(("chip", "most"), [("a100", 5.2), ("h100", 6.7)])
def test_held_out_models_are_predicted(chip: str, most: float) -> None:
    fit = script()
    rows = fit.load(TABLES, chip, "gemm")
    entry = constants("operators")["products"][chip]
    wrong, many = fit.left_out(rows, chip, fit.np.array([entry[name] for name in fit.NAMES]))
    assert wrong[many].mean() < most
    assert wrong[many].mean() < 0.8 * fit.constant_efficiency(rows, chip)[rows.many].mean()


@needs_tables
@pytest.mark.parametrize("chip", CHIPS)
def test_the_stored_constants_are_the_fitted_ones(chip: str) -> None:
    """Each stored constant is a local optimum of the fit."""
    fit = script()
    rows = fit.load(TABLES, chip, "gemm")
    entry = constants("operators")["products"][chip]
    at = fit.np.array([entry[name] for name in fit.NAMES])
    mean = fit.objective(rows, chip)
    _, best = fit.descend(mean, at, fit.BOUNDS, rounds=5, step=0.03)
    assert mean(at) - best < 0.02  # percent
    for i in (0, 2, 4):
        other = at.copy()
        other[i] *= 1.15
        assert mean(other) > mean(at) + 0.02


@needs_tables
def test_the_stored_passes_are_the_fitted_ones(capsys: pytest.CaptureFixture[str]) -> None:
    predicted = script().fit_passes(TABLES)
    stored = constants("operators")["passes"]
    assert {kind: stored[kind] for kind in predicted} == predicted
    assert "rope" in capsys.readouterr().out
