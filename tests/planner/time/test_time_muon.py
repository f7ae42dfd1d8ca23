"""Time of Muon: the products that the optimiser makes, shared by the ranks that hold the matrices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stretto.engine.optim.muon import orthogonal
from stretto.job.data_parallel import DataParallelSettings
from stretto.job.optimiser import Optimiser
from stretto.job.presets import preset
from stretto.layout.layout import Layout
from stretto.planner.counts.rank_parameters import Parameter
from stretto.planner.estimate import estimate
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.machines.cluster import NodeGroup
from stretto.planner.search.task import job_to_plan
from stretto.planner.time.data_parallel import muon_seconds, products

CLUSTER = find_cluster("h100:8")


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_products_are_those_of_the_optimiser(shape: tuple[int, int]) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonal(torch.randn(shape))
    assert sum(2 * m * n * k for m, n, k in products(*shape)) == counter.get_total_flops()


def matrix(rows: int, columns: int, tp: int = 1) -> Parameter:
    return Parameter("blocks.0.mlp.up.weight", rows * columns // tp, (rows, columns))


def test_holders_share_the_work() -> None:
    """Equally, or the costliest matrix goes to a rank of its own; and matrices are exchanged."""
    small, large = matrix(1024, 1024), matrix(4096, 4096)
    one_rank = NodeGroup(1, 1)
    alone = muon_seconds(CLUSTER, [small], one_rank, 8)
    assert muon_seconds(CLUSTER, [small] * 8, one_rank, 8) == pytest.approx(8 * alone)
    shared = muon_seconds(CLUSTER, [small] * 8, NodeGroup(8, 8), 8)
    assert alone < shared < 2 * alone
    most = muon_seconds(CLUSTER, [large], one_rank, 8)
    assert muon_seconds(CLUSTER, [large, small], NodeGroup(8, 8), 8) > most


def test_tensor_parallel_ranks_are_holders_too() -> None:
    unsplit = muon_seconds(CLUSTER, [matrix(2048, 2048)] * 8, NodeGroup(1, 1), 8)
    split = muon_seconds(CLUSTER, [matrix(2048, 2048, tp=4)] * 8, NodeGroup(1, 1), 8)
    assert unsplit / 4 < split < unsplit / 2


def test_what_adamw_updates_takes_no_products() -> None:
    others = [
        Parameter("embed.tok.weight", 64 * 64, (64, 64)),
        Parameter("blocks.0.norm1.weight", 64, (64,)),
        Parameter("blocks.0.mlp.router.gate.weight", 64 * 8, (8, 64)),
    ]
    assert muon_seconds(CLUSTER, others, NodeGroup(1, 1), 8) == 0


def test_experts_are_matrices_of_their_own() -> None:
    """A rank with 2 of 8 experts orthogonalises these two, and no tensor-parallel ranks help."""
    name = "blocks.0.mlp.experts.up"
    stack = Parameter(name, 2 * 1024 * 512, (8, 1024, 512), expert=True)
    two = muon_seconds(CLUSTER, [matrix(1024, 512)] * 2, NodeGroup(1, 1), 8)
    assert muon_seconds(CLUSTER, [stack], NodeGroup(1, 1), 8) == pytest.approx(two)


def test_a_step_pays_for_them() -> None:
    """Without sharded states every replica repeats the work."""
    job = replace(
        job_to_plan(shape=preset("llama3-8b"), global_batch=64, sequence=4096),
        layout=Layout(tp=2, dp=4),
        optimiser=Optimiser(name="muon"),
    )
    repeated = estimate(job, CLUSTER).parts["optimiser"]
    shared = estimate(replace(job, dp=DataParallelSettings(mode="zero1")), CLUSTER).parts["optimiser"]
    adamw = estimate(replace(job, optimiser=Optimiser()), CLUSTER).parts["optimiser"]
    assert repeated > 3 * shared > 3 * adamw
