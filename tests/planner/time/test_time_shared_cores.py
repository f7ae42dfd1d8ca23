"""Ranks that share the cores of a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stretto.job.data_parallel import DataParallelSettings, Precision
from stretto.job.job import Job, Recompute
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout
from stretto.planner.estimate import estimate
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.machines.cluster import Cluster

SHAPE = ModelShape(family="gpt", layers=8, hidden=256, heads=4, vocab=4096, sequence=128)
TALK = {
    kind: [[n, n, size, n * 1e-3 + size / 1e9] for n in (2, 4) for size in (4096, 2**20)]
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send")
}
KERNELS = {"launch": 1e-6, "matmul": {"fp32": [[512, 1024, 256, 1, 2.0 * 512 * 1024 * 256 / 5e10]]}}
FREE = {kind: [[n, n, 4096, 1e-12] for n in (2, 4)] for kind in TALK}


def machine(cores: int = 2, tables: dict[str, Any] = TALK, **kernels: float) -> Cluster:
    cpu = find_cluster("cpu")
    device = replace(cpu.device, kernels={**KERNELS, **kernels})
    return replace(cpu, device=device, computing=cores, tables=tables)


def seconds(layout: Layout, cluster: Cluster, **more: Any) -> float:
    defaults: dict[str, Any] = {"precision": Precision(dtype="float32")}
    job = Job(
        shape=SHAPE,
        layout=layout,
        global_batch=32,
        micro_batch=more.pop("micro", 4),
        sequence=128,
        **(defaults | more),
    )
    return estimate(job, cluster, memory=False).seconds


def test_twice_the_cores_take_half_the_time() -> None:
    layout = Layout(dp=4)
    assert seconds(layout, machine(1)) == pytest.approx(2 * seconds(layout, machine(2)))


def test_more_cores_than_ranks_do_not_help() -> None:
    assert seconds(Layout(), machine(1)) == pytest.approx(seconds(Layout(), machine(8)))


def test_shared_cores_hide_no_communication() -> None:
    base = seconds(Layout(dp=4), machine(tables=FREE))
    for layout in (Layout(tp=4), Layout(dp=4), Layout(pp=4), Layout(cp=4)):
        assert seconds(layout, machine()) > seconds(layout, machine(tables=FREE))
    assert seconds(Layout(dp=4), machine(tables=FREE), recompute=Recompute("full")) > 1.2 * base


def test_messages_between_stages_cost_both_ends() -> None:
    """A row of `send` is of a rank that sends one and receives one; a hop has two ends."""
    slow = {**FREE, "send": [[2, 2, 4096, 0.01]]}
    size = 4 * 4 * 128 * 256
    row = 0.01 * size / 4096  # at the rate of the largest that was measured
    hops = 2 * 8 * 3  # both ways, for 8 microbatches, over the 3 borders of 4 stages
    more = seconds(Layout(pp=4), machine(1, slow)) - seconds(Layout(pp=4), machine(1, FREE))
    assert more == pytest.approx(hops * row, rel=0.01)


def test_host_code_counts_by_block_and_by_action() -> None:
    plain = seconds(Layout(dp=4), machine(1, FREE), micro=1)
    blocks, actions = 32 * 8, 32 * 2
    layered = seconds(Layout(dp=4), machine(1, FREE, layer=0.01), micro=1)
    assert layered - plain == pytest.approx(blocks * 0.01, rel=0.01)
    acting = seconds(Layout(dp=4), machine(1, FREE, action=0.01), micro=1)
    assert acting - plain == pytest.approx(actions * 0.01, rel=0.01)


def test_small_microbatches_cost_more() -> None:
    times = [seconds(Layout(tp=4), machine(layer=1e-3, action=1e-3), micro=micro) for micro in (1, 4, 8)]
    assert times == sorted(times, reverse=True)


def test_sharded_parameters_are_gathered_by_every_microbatch() -> None:
    ddp, zero3 = (
        seconds(Layout(dp=4), machine(), dp=DataParallelSettings(mode=mode)) for mode in ("ddp", "zero3")
    )
    assert zero3 > ddp


def test_a_single_rank_pays_for_host_code_too() -> None:
    plain, more = (seconds(Layout(), machine(2, FREE, layer=layer)) for layer in (1e-9, 0.01))
    assert more - plain == pytest.approx(8 * 8 * 0.01, rel=0.01)
