"""What of a rank's tensors the allocator and the device make, and the verdict."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from stretto.layout.layout import Layout
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.machines.cluster import HostMachine
from stretto.planner.memory.fits import FREE, FREE_OF_OTHERS, RESERVE, Fit, add_host, fit
from stretto.planner.memory.ranks import RankMemory

GIB = 2**30
DEVICE = find_cluster("a100-80gb:8").device
RANK = RankMemory(
    rank=0,
    weights=0,
    gradients=0,
    optimizer=0,
    activations=0,
    ends=0,
    messages=0,
    transient=0,
    versions=0,
    batch=0,
    between_actions=0,
    at="0F0",
)


def of(gib: float, free: tuple[float, float, float] = FREE) -> Fit:
    return fit([RANK, replace(RANK, activations=int(gib * GIB))], DEVICE, free=free)


VERDICTS = [
    (1.0, "fits"),
    (62.5, "fits"),
    (63.5, "tight"),
    (78.0, "tight"),
    (80.5, "tight"),
    (81.0, "does not fit"),
]


@pytest.mark.parametrize(("gib", "verdict"), VERDICTS)
def test_verdicts(gib: float, verdict: str) -> None:
    assert of(gib).verdict == verdict


def test_the_published_pairs_of_allocated_and_reserved_lie_inside() -> None:
    """MiB: BigScience's logs of Megatron on 16 to 256 V100, and of Megatron with DeepSpeed; the fullest rank
    of each.
    """
    pairs = (
        (26204.6, 30772),
        (22112.8, 26880),
        (24761.8, 30164),
        (22959.5, 27792),
        (22241.1, 26940),
        (19976.1, 23330),
        (17473.3, 21306),
        (18175.4, 19286),
        (26118.2, 28560),
        (26118.2, 28234),
    )
    for allocated, reserved in pairs:
        interval = of(allocated / 1024, FREE_OF_OTHERS).reserved
        assert interval.low <= reserved * 2**20 <= interval.high


def test_a_full_device_makes_the_allocator_give_back() -> None:
    """Free blocks are a seventh of all tensors of other frameworks where there is room; where there is none,
    hardly any.
    """
    roomy, full = (of(gib, FREE_OF_OTHERS) for gib in (40.0, 70.0))
    assert roomy.reserved.mid == pytest.approx(1.15 * 40 * GIB)
    assert full.device.mid == pytest.approx(DEVICE.memory)
    assert full.likely
    assert not of(74.0, FREE_OF_OTHERS).likely
    for free in (FREE, FREE_OF_OTHERS):
        totals = [of(gib / 4, free).device.mid for gib in range(400)]
        assert totals == sorted(totals)


def test_stretto_s_own_jobs_leave_few_free_blocks() -> None:
    assert of(40.0).reserved.mid == pytest.approx(1.04 * 40 * GIB)
    assert of(73.5).likely
    assert not of(74.0).likely


def test_a_reserve_of_the_user_replaces_the_usual_one() -> None:
    memory = fit([replace(RANK, activations=GIB)], DEVICE, reserve=2.0 * GIB)
    assert memory.device.low == pytest.approx(2.97 * GIB)
    assert memory.device.mid == pytest.approx(3.04 * GIB)
    assert of(1.0).device.low == pytest.approx(0.97 * GIB + RESERVE[0])


@pytest.mark.parametrize(
    ("layout", "host"),
    [
        (Layout(dp=2, pp=4), 22),  # all of a step's ranks on one node
        (Layout(dp=4, pp=4), 32),  # two stages a node: the last two
        (Layout(tp=8, dp=2, pp=4), 48),  # one stage on two nodes
    ],
)
def test_a_node_s_host_has_what_all_its_ranks_offload(layout: Layout, host: int) -> None:
    ranks = [replace(RANK, rank=rank, host=gib * GIB) for rank, gib in enumerate((1, 2, 2, 6))]
    cluster = find_cluster("dgx-a100-80gb", layout.world)
    used = add_host(fit(ranks, cluster.device), layout, cluster)
    assert (used.host, used.host_capacity) == (host * GIB, 2015 * GIB)
    assert used.verdict == "fits"
    small = replace(cluster, host=replace(cluster.host, memory=(host - 1) * GIB))
    short = add_host(used, layout, small)
    assert (short.verdict, short.likely, short.missing) == ("does not fit", False, GIB)
    assert short.needed == f"{host} of {host - 1} GiB of a node's host memory"
    unstated = add_host(used, layout, replace(cluster, host=HostMachine(link=1e10)))
    assert (unstated.verdict, unstated.host_capacity) == ("fits", inf)
    assert unstated.host_text == f"{host} GiB of a node's host memory (not stated)"
