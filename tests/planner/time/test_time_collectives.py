"""Times of collectives: by algorithm and level, measured collectives, measured clusters."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from stretto.planner.machines.catalogue import clusters, find_cluster
from stretto.planner.machines.cluster import Cluster, Collective, NetworkLink, NodeGroup
from stretto.planner.machines.networks import parse_network
from stretto.planner.time.collectives import collective_seconds
from stretto.planner.time.constants import constants

TABLES = Path(__file__).parents[4] / "shared" / "tables"
needs_tables = pytest.mark.skipif(not TABLES.exists(), reason=f"no measured tables at {TABLES}")
KINDS: tuple[Collective, ...] = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "broadcast",
    "send",
)
GIB = 2.0**30
# cluster, systems of the tables that are such
SYSTEMS = {
    "dgx-a100-80gb": ("A100-80GB", "a100_dgx"),
    "dgx-1-v100-32gb": ("V100",),
    "dgx-h100": ("h100_dgx",),
    "dgx-h200": ("H200",),
    "aws-p6-b200": ("B200",),
}


@cache
def script() -> ModuleType:
    """benchmarks/fit_collectives.py."""
    pytest.importorskip("numpy")
    sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
    try:
        import fit_collectives  # pyright: ignore[reportMissingImports]
    finally:
        sys.path.pop(0)
    return fit_collectives


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [cluster.name for cluster in clusters()])
def test_more_bytes_take_longer_and_no_bytes_no_time(name: str, kind: Collective) -> None:
    cluster = find_cluster(name)
    for group in (NodeGroup(2, 2), NodeGroup(8, 8), NodeGroup(8, 1), NodeGroup(32, 8), NodeGroup(1024, 4)):
        group = group._replace(local=min(group.local, cluster.node))
        times = [collective_seconds(cluster, kind, 2.0**e, group) for e in (1, 10, 18, 20, 24, 30, 34)]
        assert all(0 < before < after for before, after in pairwise(times))
        assert collective_seconds(cluster, kind, 0.0, group) == 0
        # nothing is faster than a rank's own links
        fastest = max(cluster.inner.bandwidth, cluster.outer.bandwidth)
        assert times[-1] > 2.0**34 * (0.4 if group.ranks == 2 else 0.8) / (fastest * group.local)
    assert collective_seconds(cluster, kind, GIB, NodeGroup(1, 1)) == 0


def test_reduce_scatter_and_all_gather_make_an_all_reduce() -> None:
    cluster = find_cluster("dgx-a100-80gb")
    for group in (NodeGroup(8, 8), NodeGroup(16, 8), NodeGroup(4, 1)):
        times = {kind: collective_seconds(cluster, kind, GIB, group) for kind in KINDS}
        assert times["reduce-scatter"] == times["all-gather"]
        assert times["all-reduce"] == pytest.approx(2 * times["all-gather"], rel=0.05)


def test_all_cards_of_a_node_carry_a_ring_over_nodes() -> None:
    """4 GiB on four nodes of eight B200: 22.05 ms (stas00/ml-engineering network)."""
    cluster = find_cluster("aws-p6-b200")
    all_cards = collective_seconds(cluster, "all-reduce", 4 * GIB, NodeGroup(32, 8))
    assert all_cards == pytest.approx(22.05e-3, rel=0.05)
    one_each = collective_seconds(cluster, "all-reduce", 4 * GIB, NodeGroup(4, 1))
    assert one_each > 5 * all_cards
    # eight groups of one rank a node, each with an eighth, load the cards alike, and wait for one another
    eighth = collective_seconds(cluster, "all-reduce", GIB / 2, NodeGroup(4, 1))
    assert all_cards < eighth < all_cards / 0.7
    alone = collective_seconds(replace(cluster, node=1), "all-reduce", GIB / 2, NodeGroup(4, 1))
    assert 0.7 * all_cards < alone < all_cards


def test_trees_speed_up_small_all_reduces_over_many_nodes() -> None:
    cluster = find_cluster("dgx-a100-80gb")
    few, many = (collective_seconds(cluster, "all-reduce", 2.0**16, NodeGroup(8 * n, 8)) for n in (4, 128))
    assert many < 4 * few
    ring = [collective_seconds(cluster, "all-gather", 2.0**16, NodeGroup(8 * n, 8)) for n in (4, 128)]
    assert ring[1] > 15 * ring[0]


def test_the_switch_reduces_from_some_ranks_on() -> None:
    sharp = find_cluster("dgx-h200")
    plain = replace(sharp, inner=replace(sharp.inner, sharp=False))
    for ranks, faster in ((4, 1.0), (8, 1.29)):  # of the same table, 8 GiB
        times = [
            collective_seconds(c, "all-reduce", 8 * GIB, NodeGroup(ranks, ranks)) for c in (plain, sharp)
        ]
        assert times[0] / times[1] == pytest.approx(faster, rel=0.03)
    gathers = [collective_seconds(c, "all-gather", GIB, NodeGroup(8, 8)) for c in (plain, sharp)]
    assert gathers[0] == gathers[1]


def test_the_wiring_of_a_node_counts() -> None:
    """Meshes give two ranks one link; a DGX-1 favours four ranks over five; consumer cards have no peers."""
    mesh, switch = find_cluster("mi300x-node"), find_cluster("dgx-h100")
    for cluster, least, most in ((mesh, 4, 7), (switch, 0.8, 1.2)):
        two, eight = (
            collective_seconds(cluster, "all-gather", GIB, NodeGroup(n, n)) / ((n - 1) / n) for n in (2, 8)
        )
        assert least < two / eight < most
    four, five = (
        collective_seconds(find_cluster("dgx-1-v100-32gb"), "all-reduce", GIB, NodeGroup(n, n))
        for n in (4, 5)
    )
    assert five > 2 * four
    cards = find_cluster("workstation-4090")
    others = replace(cards, device=find_cluster("a100-80gb-pcie-node").device)
    slow, fast = (collective_seconds(c, "all-reduce", GIB, NodeGroup(4, 4)) for c in (cards, others))
    assert slow > 2 * fast


def test_all_to_all_between_nodes_uses_the_network() -> None:
    cluster = find_cluster("dgx-h100")
    inside, across = (
        collective_seconds(cluster, "all-to-all", GIB, g) for g in (NodeGroup(8, 8), NodeGroup(16, 8))
    )
    assert across > 3 * inside
    assert across > GIB / 2 / cluster.outer.bandwidth


def test_published_collectives_between_nodes_of_h100() -> None:
    """GB/s of large reduce-scatters by nodes (NVIDIA/nccl issue 1229), microseconds of two ranks on two nodes
    (NVIDIA/nccl-tests issue 232), an all-to-all at N/(N-1) of a card's rate (issue 130).
    """
    cluster = find_cluster("dgx-h100")
    for nodes, rate in ((4, 360), (8, 345), (16, 320), (32, 300), (64, 280), (128, 260)):
        ranks = 8 * nodes
        seconds = collective_seconds(cluster, "reduce-scatter", 8 * GIB, NodeGroup(ranks, 8))
        assert 8 * GIB * (ranks - 1) / ranks / seconds / 1e9 == pytest.approx(rate, rel=0.06)
    for mib, micros in ((2, 113.2), (4, 154.4), (8, 231.4), (16, 420.5), (32, 812.3)):
        alone = replace(cluster, node=1)
        seconds = collective_seconds(alone, "all-reduce", mib * 2.0**20, NodeGroup(2, 1))
        assert seconds * 1e6 == pytest.approx(micros, rel=0.2 if mib < 4 else 0.1)
    for nodes in (2, 4, 16):
        seconds = collective_seconds(cluster, "all-to-all", GIB, NodeGroup(8 * nodes, 8))
        card = GIB * (nodes - 1) / nodes / seconds
        assert 0.85 < card / cluster.outer.bandwidth < 0.95


def test_unknown_links_use_their_bandwidth_and_latency() -> None:
    base = find_cluster("dgx-a100-80gb")
    slow = replace(base, inner=NetworkLink(1e9, 1e-3, "string between cans"))
    assert collective_seconds(slow, "all-gather", GIB, NodeGroup(2, 2)) == pytest.approx(
        GIB / 2 / 0.75e9, rel=0.02
    )
    assert collective_seconds(slow, "all-reduce", 1.0, NodeGroup(8, 8)) > 14 * 0.4e-3


def cluster_with(tables: dict[str, object]) -> Cluster:
    return replace(find_cluster("cpu"), tables=tables)


def test_measured_collectives_replace_the_model() -> None:
    rows = [[4, 4, 1e3, 1e-4], [4, 4, 1e6, 1e-3], [2, 2, 1e3, 6e-5], [2, 2, 1e6, 7e-4]]
    cluster = cluster_with({"all-reduce": rows, "send": [[2, 2, 1e3, 2e-5]]})
    for ranks, local, size, seconds in rows:
        group = NodeGroup(int(ranks), int(local))
        assert collective_seconds(cluster, "all-reduce", size, group) == pytest.approx(seconds)
    assert 1e-4 < collective_seconds(cluster, "all-reduce", 1e5, NodeGroup(4, 4)) < 1e-3
    # larger at the last rate, smaller at the first time
    assert collective_seconds(cluster, "all-reduce", 1e7, NodeGroup(4, 4)) == pytest.approx(1e-2)
    assert collective_seconds(cluster, "all-reduce", 10, NodeGroup(4, 4)) == pytest.approx(1e-4)
    # more ranks: more steps, a little more that each passes on
    eight = collective_seconds(cluster, "all-reduce", 1e6, NodeGroup(8, 8))
    assert eight == pytest.approx(1e-4 * 7 / 3 + 9e-4 * (7 / 8) / (3 / 4))
    # half an all-reduce where that is all there is
    assert collective_seconds(cluster, "all-gather", 1e6, NodeGroup(4, 4)) == pytest.approx(5e-4)
    assert collective_seconds(cluster, "send", 1e3, NodeGroup(2, 2)) == pytest.approx(2e-5)
    assert collective_seconds(cluster, "send", 2e3, NodeGroup(2, 2)) == pytest.approx(4e-5)
    # it says nothing of what is between nodes
    plain = find_cluster("cpu")
    assert collective_seconds(cluster, "all-reduce", 1e6, NodeGroup(4, 1)) == pytest.approx(
        collective_seconds(plain, "all-reduce", 1e6, NodeGroup(4, 1))
    )


@needs_tables
def test_measured_collectives() -> None:
    """All rows of 1 MiB and more on known clusters, by link; without those of one anomalous network."""
    rows = [row for row in script().load(TABLES) if not row.ring and row.size >= 2**20]
    for name, most in (
        ("dgx-a100-80gb", 7),
        ("dgx-1-v100-32gb", 4),
        ("dgx-h100", 15),
        ("dgx-h200", 4),
        ("aws-p6-b200", 9),
    ):
        wrong: list[float] = []
        cluster = find_cluster(name)
        for row in rows:
            inside = row.local == row.ranks or name == "aws-p6-b200"
            if row.system.startswith(SYSTEMS[name]) and inside:
                kind: Collective = "send" if row.kind == "send-recv" else "all-reduce"
                predicted = collective_seconds(cluster, kind, row.size, NodeGroup(row.ranks, row.local))
                wrong.append(100 * abs(predicted / row.seconds - 1))
        assert len(wrong) > 10
        assert sum(wrong) / len(wrong) < most, name


@needs_tables
def test_held_out_sizes_are_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 1 MiB and more, inside nodes: every second size by constants of the others, within a tenth."""
    fitted = script().fit(TABLES)
    lines = [line for line in capsys.readouterr().out.splitlines() if "by the others, from 1 MiB" in line]
    count = wrong = 0.0
    for line in lines:
        if "one latency" in line or "EFA" in line or "InfiniBand" in line:
            continue
        mean, rows = float(line.split("MiB")[1].split("%")[0]), int(line.split()[-2])
        count, wrong = count + rows, wrong + mean * rows
    assert count > 150
    assert wrong / count < 10
    stored = constants("collectives")["links"]
    assert {kind: {**stored[kind], **entry} for kind, entry in fitted.items()} == {
        k: stored[k] for k in fitted
    }


def test_rings_over_hundreds_of_nodes_lose_more_to_collisions_on_hashed_paths() -> None:
    """ECMP's hashed flows cost a 22 B model 30% on 512 GPUs (Dong et al. 2024, "C4"); over any number of
    nodes a ring keeps 0.3 of its cards.
    """
    hashed = parse_network("8x200 Gb/s RoCE")
    assert hashed is not None
    adaptive = find_cluster("dgx-a100-80gb")
    roce = replace(adaptive, outer=hashed.link(adaptive))
    rates = list[list[float]]()
    for cluster in (adaptive, roce):
        times = [
            collective_seconds(cluster, "all-gather", 64 * GIB, NodeGroup(8 * n, 8)) for n in (2, 64, 512)
        ]
        rates.append([64 * GIB / seconds / (8 * cluster.outer.bandwidth) for seconds in times])
    assert rates[0][0] == pytest.approx(rates[1][0], rel=0.02)
    assert rates[1][1] / rates[0][1] == pytest.approx(0.7, abs=0.06)
    assert 0.28 < rates[1][2] < 0.31
