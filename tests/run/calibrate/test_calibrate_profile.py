"""From the measurements of ranks to the file of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.job.shape import ModelShape
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.machines.catalogue import find_cluster, find_device
from stretto.planner.machines.cluster import NodeGroup
from stretto.planner.machines.describe import save_cluster
from stretto.planner.time.collectives import collective_seconds
from stretto.planner.time.kernels import kernel_times
from stretto.planner.time.operators import attention_seconds, matmul_seconds, pass_seconds
from stretto.run.calibrate.host import HostOverhead, host_of
from stretto.run.calibrate.kernels import merged
from stretto.run.calibrate.profile import Measured, merge_ranks, profile

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
        steps={(1, 2): 0.010, (1, 10): 0.030, (5, 2): 0.020, (5, 10): 0.120},
        memory=8 * 2**30,
    )


def test_a_profile_holds_the_measurements(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    made = profile(measurements(), 4)
    save_cluster(made, path)
    read = find_cluster(path, 4)
    device = read.device
    assert (read.node, read.nodes, read.computing) == (4, 1, made.computing)
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
    steps = {
        (blocks, m): once + m * (2 * action + ends + blocks * (layer + kernels("block")))
        for blocks in (1, 5)
        for m in (2, 10)
    }
    host = host_of(steps, device)
    assert host.layer == pytest.approx(layer)
    assert host.action == pytest.approx(action)


def test_less_than_kernels_take_is_nothing_beside_them() -> None:
    assert host_of(
        dict.fromkeys(((1, 2), (1, 10), (5, 2), (5, 10)), 0.01), find_device("cpu")
    ) == HostOverhead(0, 0)
