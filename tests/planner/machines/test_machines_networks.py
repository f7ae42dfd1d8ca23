"""Networks between nodes in the words of papers."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.errors import StrettoError
from stretto.planner.machines.catalogue import clusters, find_cluster
from stretto.planner.machines.networks import LATENCIES, parse_network


@pytest.mark.parametrize(
    ("text", "kind", "gbs"),
    [
        # cards of a node, and the rate of one
        ("8x200 Gb/s RoCE", "RoCE", 25),
        ("4x100G", "InfiniBand HDR", 6.25),
        ("Omni-Path 4 x 100 Gb/s", "Omni-Path", 6.25),
        ("8x NDR InfiniBand", "InfiniBand NDR", 50),
        ("RoCEv2 200Gbps x 8", "RoCE", 25),
        ("8x CX-6 200 Gbps", "InfiniBand HDR", 25),
        # of a node
        ("800 Gbit a node", "InfiniBand HDR", 12.5),
        ("800 Gbps InfiniBand per node", "InfiniBand XDR", 12.5),
        ("1600 Gbps node-node interconnect (RoCE)", "RoCE", 25),
        ("4× HDR (800 Gb/s)", "InfiniBand HDR", 12.5),
        ("3,200 Gbps EFA", "EFA", 50),
        ("3.2 Tbps RoCEv2", "RoCE", 50),
        ("100GbE", "Ethernet", 1.5625),
        # of a device
        ("100 Gbps/GPU", "InfiniBand HDR", 12.5),
        ("25 GB/s per GPU InfiniBand", "InfiniBand HDR", 25),
        ("HDR100", "InfiniBand HDR", 12.5),
        # stated neither per device nor per node: the usual rate of a device, and another one
        ("InfiniBand 200 Gbps", "InfiniBand HDR", 25),
        ("InfiniBand 100 Gbps", "InfiniBand EDR", 1.5625),
        # kinds alone
        ("RoCE", "RoCE", 25),
        ("InfiniBand HDR", "InfiniBand HDR", 25),
        ("IB EDR", "InfiniBand EDR", 12.5),
        # links inside the node beside it
        ("NVLink 900 GB/s + 8x400G IB", "InfiniBand NDR", 50),
        ("PCIe 4.0, 100Gb Ethernet", "Ethernet", 1.5625),
    ],
)
def test_networks_in_words(text: str, kind: str, gbs: float) -> None:
    network = parse_network(text)
    assert network is not None
    link = network.link(find_cluster("dgx-a100-80gb"))
    assert (link.kind, link.bandwidth) == (kind, pytest.approx(gbs * 1e9))


@pytest.mark.parametrize("text", ["none", "NVLink only", "single node", "NVSwitch"])
def test_a_text_may_say_that_there_is_no_network(text: str) -> None:
    assert parse_network(text) is None


def test_what_is_no_network_is_refused() -> None:
    with pytest.raises(StrettoError, match="'pigeon' names no kind and no speed") as caught:
        parse_network("pigeon")
    assert "InfiniBand HDR" in (caught.value.hint or "")


def test_every_kind_of_the_catalogue_has_a_latency() -> None:
    assert {cluster.outer.kind for cluster in clusters()} <= LATENCIES.keys()


def test_a_cluster_file_takes_a_network_in_words(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("like: dgx-h100\nouter: 8x200 Gb/s RoCE\n")
    cluster = find_cluster(path)
    assert (cluster.outer.kind, cluster.outer.bandwidth, cluster.node) == ("RoCE", 25e9, 8)
    path.write_text("like: dgx-h100\nnode: 4\nouter: 400 Gbit a node\n")
    assert find_cluster(path).outer.bandwidth == 12.5e9
    path.write_text("device: h100\nnode: 8\ninner: {bandwidth_gbs: 450, latency_us: 5}\nouter: RoCE\n")
    with pytest.raises(StrettoError, match=r"mine\.yaml:4: outer gives no speed"):
        find_cluster(path)
