"""From the measurements of ranks to the file of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import hypot, log
from pathlib import Path
from typing import Any

import pytest

from stretto.job.data_parallel import Precision
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.estimate import Estimate, estimate
from stretto.planner.machines.catalogue import find_cluster, find_device
from stretto.planner.machines.cluster import Cluster, NodeGroup
from stretto.planner.machines.describe import save_cluster
from stretto.planner.time.collectives import collective_seconds
from stretto.planner.time.kernels import kernel_times
from stretto.planner.time.operators import attention_seconds, matmul_seconds, pass_seconds
from stretto.run.calibrate.host import TYPICAL, HostOverhead, host_of
from stretto.run.calibrate.kernels import merged
from stretto.run.calibrate.profile import PARTS, Measured, merge_ranks, profile, spread_of, take_part

GFLOPS = 50e9


def measurements(slow: float = 1.0) -> Measured:
    """A machine of 50 GFLOP/s a core and 10 GB/s, with messages of 0.1 ms and 2 GB/s."""
    sizes = [(128, 256, 256), (512, 1024, 256), (512, 256, 1024)]
    sends = [[2, 2, size, slow * (1e-4 + size / 2e9)] for size in (4096, 2**20)]
    return Measured(
        launch=2e-6,
        matmul={"fp32": [[m, n, k, 1, slow * 2 * m * n * k / GFLOPS] for m, n, k in sizes]},
        passes={kind: [[1e5, slow * 1e-5], [1e7, slow * 1e-3]] for kind in ("copy", "norm", "add", "adam")},
        attention=[[4, 128, 128, 4, 64, 1, back, slow * (1 + 1.5 * back) * 1e-3] for back in (0, 1)],
        collectives={"send": sends, "all-reduce": [[4, 4, 4096, slow * 2e-3], [4, 4, 2**20, slow * 4e-3]]},
        steps=[[1, 2, 0.010], [1, 10, 0.030], [5, 2, 0.020], [5, 10, 0.120]],
        memory=8 * 2**30,
    )


def test_a_profile_holds_the_measurements(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    cluster = profile(measurements(), 4)
    save_cluster(cluster, path)
    read = find_cluster(path, 4)
    device = read.device
    assert (read.node, read.nodes, read.computing) == (4, 1, cluster.computing)
    assert matmul_seconds(device, 512, 1024, 256, "fp32") == pytest.approx(2 * 512 * 1024 * 256 / GFLOPS)
    assert pass_seconds(device, "copy", 1e7) == pytest.approx(1e-3)
    assert attention_seconds(
        device=device, batch=4, queries=128, keys=128, heads=4, head_dim=64, precision="fp32", backward=True
    ) == pytest.approx(2.5e-3)
    assert collective_seconds(read, "all-reduce", 4096, NodeGroup(4, 4)) == pytest.approx(2e-3)
    assert device.sustained["fp32"] == pytest.approx(GFLOPS / 1e12)
    assert device.memory == pytest.approx(2 * 2**30)
    assert dict(device.kernels).keys() == {"launch", "matmul", "passes", "attention", "layer", "action"}


def test_the_link_is_fitted_to_message_times() -> None:
    link = profile(measurements(), 4).inner
    assert link.bandwidth == pytest.approx(2e9)
    assert link.latency == pytest.approx(1e-4)


def test_a_rank_that_was_disturbed_does_not_count() -> None:
    both = merge_ranks([measurements(), measurements(slow=7.0), measurements()])
    assert both.matmul == {"fp32": sorted(measurements().matmul["fp32"])}
    assert both.collectives["send"] == measurements().collectives["send"]


def test_products_of_equal_sizes_are_one_row() -> None:
    assert merged([[2, 2, 2, 1, 4.0], [1, 1, 1, 1, 1.0], [2, 2, 2, 1, 2.0]]) == [
        [1, 1, 1, 1, 1.0],
        [2, 2, 2, 1, 3.0],
    ]


def test_host_time_is_step_time_without_kernels() -> None:
    device = profile(measurements(), 4).device
    shape = ModelShape(family="gpt", layers=1, hidden=32, heads=2, vocab=260, sequence=8)

    def kernels(kind: str) -> float:
        work = kernel_times(shape, kind, ComputeConfig(batch=1, sequence=8, element=4), device, "fp32")
        return work.forward + work.back + work.weight

    ends = kernels("embed") + kernels("head")
    layer, action, once = 1e-3, 4e-4, 5e-3
    steps = [
        [blocks, m, once + m * (2 * action + ends + blocks * (layer + kernels("block")))]
        for blocks in (1, 5)
        for m in (2, 10)
    ]
    host = host_of(steps, device)
    assert host is not None
    assert host_of(steps[:3], device) is None
    assert host.layer == pytest.approx(layer)
    assert host.action == pytest.approx(action)


def test_less_than_kernels_take_is_nothing_beside_them() -> None:
    steps = [[blocks, microbatches, 0.01] for blocks in (1.0, 5.0) for microbatches in (2.0, 10.0)]
    assert host_of(steps, find_device("cpu")) == HostOverhead(0, 0)


def step_of(cluster: Cluster) -> Estimate:
    shape = ModelShape(family="gpt", layers=4, hidden=256, heads=4, vocab=4096, sequence=128)
    job = Job(
        shape=shape,
        layout=Layout(dp=4),
        global_batch=32,
        micro_batch=4,
        sequence=128,
        precision=Precision(dtype="float32"),
    )
    return estimate(job, cluster.sized(4), memory=False)


@pytest.mark.parametrize(
    ("slow", "others", "spread"),
    [(1.0, 0.0, 0.0), (1.5, 0.6, 0.0), (1.9, 0.95, 0.1), (1.35, 0.0, 0.35), (0.8, 0.0, 0.3)],
)
def test_a_profile_of_a_busy_machine_holds_the_quiet_one(slow: float, others: float, spread: float) -> None:
    """Other processes lengthened all rows, or repetitions differed: the interval says as much."""
    measured = measurements(slow)
    measured.spread = dict.fromkeys(PARTS, spread)
    busy, quiet = profile(measured, 4, others=others), profile(measurements(), 4)
    assert step_of(busy).low <= step_of(quiet).seconds <= step_of(busy).high
    assert ("other processes used" in busy.notes) == (others > 0)
    assert busy.spread == pytest.approx(spread_of(measured, quick=False, others=others, host=True))


def test_the_interval_is_as_wide_as_before_where_nothing_varied(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    quiet = profile(measurements(), 4)
    assert quiet.spread == {}
    assert 1.05 < step_of(quiet).high / step_of(quiet).seconds < 1.2
    measured = measurements()
    measured.spread, measured.missing = {"collectives": 0.2}, {"attention": 0.4, "layers": 0.0}
    save_cluster(profile(measured, 4, others=0.5), path)
    read = find_cluster(path)
    assert read.spread["kernels"] == pytest.approx(hypot(0.5 * 0.4, log(1.5)), abs=1e-4)
    assert read.spread["network"] == pytest.approx(hypot(0.2, log(2)), abs=1e-4)
    assert read.spread["host"] == pytest.approx(log(1.5), abs=1e-4)
    assert "no time for 40% of attention; other processes used 50% of the cores" in read.notes
    assert step_of(read).widths["kernels"] > 3 * step_of(quiet).widths["kernels"]


def test_what_was_not_measured_is_named_and_widens_the_interval() -> None:
    """Attention, collectives and the host's own time, and most products."""
    measured = measurements()
    measured.attention, measured.collectives, measured.steps = [], {}, measured.steps[:2]
    measured.missing = {"products": 0.75, "attention": 1.0, "collectives": 1.0, "layers": 0.5}
    cluster = profile(measured, 4)
    assert "no time for 75% of products, attention, collectives, 50% of layers" in cluster.notes
    assert cluster.spread == {"kernels": 0.5, "host": 0.25, "network": 0.5}
    assert "attention" not in cluster.device.kernels
    assert cluster.device.kernels["layer"] == TYPICAL.layer
    measured.missing = {}
    assert profile(measured, 4).spread == {"kernels": 0.25}  # since the host's time is a typical one
    assert step_of(cluster).low <= step_of(profile(measurements(), 4)).seconds <= step_of(cluster).high


class Clock:
    """Measurements that take a second each, of a machine that slows down by half after some of them."""

    def __init__(self, slower_after: int = 10**6) -> None:
        self.time, self.slower_after, self.order = 0.0, slower_after, list[int]()

    def measurements(self, count: int) -> list[tuple[str, Callable[[list[list[float]]], None]]]:
        def measure(into: list[list[float]], size: int) -> None:
            self.time += 1.0
            self.order.append(size)
            into.append([size, 1e-3 * size * (1.5 if len(self.order) > self.slower_after else 1.0)])

        return [(f"of {size}", partial(measure, size=size)) for size in range(1, count + 1)]


@pytest.mark.parametrize(
    ("seconds", "sizes", "missing"),
    [(99.0, 8, 0.0), (3.5, 4, 0.5), (-1.0, 1, 0.875)],
)
def test_a_part_ends_in_its_time(seconds: float, sizes: int, missing: float) -> None:
    clock, rows, shown = Clock(), list[list[float]](), list[str]()
    spread, left = take_part(
        clock.measurements(8), rows, lambda: clock.time > seconds, shown.append, needed=True
    )
    assert clock.order[:sizes] == [1, 5, 3, 7, 2, 4, 6, 8][:sizes]
    assert sorted(row[0] for row in rows) == sorted(clock.order[:sizes])
    assert left == missing
    assert clock.time <= max(0.0, seconds) + 1  # one measurement longer
    assert spread == (0.0 if seconds > 8 else 0.3)  # nothing was repeated
    assert shown[:2] == ["of 1", "of 5"][:sizes]


def test_the_spread_is_what_repetitions_differ_by() -> None:
    clock, rows = Clock(slower_after=6), dict[str, list[list[float]]]()

    def of_kind(measure: Callable[[list[list[float]]], None]) -> Callable[[Any], None]:
        return lambda into: measure(into.setdefault("copy", []))

    some = [(name, of_kind(measure)) for name, measure in clock.measurements(6)]
    spread, _ = take_part(some, rows, lambda: False, lambda _: None)
    assert [row[0] for row in rows["copy"]] == [1, 5, 3, 2, 4, 6]
    assert clock.order[6:] == [1, 3, 4]
    assert spread == pytest.approx(1.46 * log(1.5))
