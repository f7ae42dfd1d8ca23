"""The cluster of a row: its device in its usual node, with the row's nodes, islands and network."""

from __future__ import annotations

from dataclasses import replace

from stretto.errors import StrettoError
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.machines.cluster import Cluster, Link
from stretto.planner.machines.names import normalised, parse_name
from stretto.planner.machines.networks import GBIT, parse_network
from stretto.planner.table.cells import Cells

# between islands of a node, by the month in which the device could be had: PCIe, per device
_PCIE = (("2022-09", Link(63e9, 10e-6, "PCIe 5")), ("2020-05", Link(31e9, 10e-6, "PCIe 4")))
_PCIE_3 = Link(15.7e9, 10e-6, "PCIe 3")
_BRIDGES = {"a100": 300e9, "h100": 300e9, "a800": 200e9, "h800": 200e9}  # bytes/s of a card's NVLink bridges
_BRIDGE = 56e9


def row_cluster(cells: Cells, cluster: Cluster | None) -> Cluster:
    """The row's cluster, or the one in its place, with the row's nodes and network.

    Raises:
        StrettoError: no device, or one that is not known; or a network without kind and speed.
    """
    name = cells.word("gpu")
    if cluster is None and name is None:
        raise StrettoError("the row has no GPU", hint="fill in gpu, as in A100-80GB-SXM")
    known = cluster or _of_any_size(name or "")
    if cluster is None and normalised(name or "") not in (
        normalised(known.device.name),
        normalised(known.name),
    ):
        cells.report("gpu", f"{known.device.name}, {known.name}", f"read from {name!r}")
    node = cells.whole("node_size")
    if node is None and cells.whole("nodes") and cells.whole("gpus") is None:
        node = device_count(cells)
    if node not in (None, known.node):
        outer = replace(known.outer, bandwidth=known.outer.bandwidth * known.node / node)
        known = replace(known, node=node, outer=outer)
    return _networked(cells, known)


def device_count(cells: Cells) -> int | None:
    """How many devices the name of the GPU counts, as in "8xH100"; None: it counts none."""
    name = cells.word("gpu") or ""
    return None if name.endswith((".yaml", ".yml")) or ":" in name else parse_name(name).count


def _of_any_size(name: str) -> Cluster:
    """The cluster of that name, without the size that the name may count: "8xH100" is a kind of node."""
    known = find_cluster(name)
    if known.nodes != 1 or parse_name(name).count is None or name.endswith((".yaml", ".yml")) or ":" in name:
        return known
    return replace(known, nodes=None, node=find_cluster(known.name).node)


def _networked(cells: Cells, cluster: Cluster) -> Cluster:
    """The cluster with the row's network. Words that name none are no reason to refuse what was measured."""
    text = cells.text("network")
    if text:
        try:
            network = parse_network(text)
        except StrettoError as error:
            if not cells.measured:
                raise
            network = None
            cells.report("network", cluster.outer.kind, f"the cluster's: {error.message}")
        if network is not None:
            outer = network.link(cluster)
            cluster = replace(cluster, outer=outer)
            if text.lower() != outer.kind.lower():
                cells.report(
                    "network",
                    f"{outer.kind}, {outer.bandwidth / 1e9:g} GB/s a device",
                    f"read from {text!r}, {cluster.node} devices a node",
                )
    speed, whole = cells.number("network_gbs"), cells.number("node_gbits")
    if speed is not None and whole is not None:
        raise StrettoError("network_gbs and node_gbits are both there", hint="leave one of them empty")
    if whole is not None:
        speed = whole * GBIT / cluster.node / 1e9
    return cluster if speed is None else replace(cluster, outer=replace(cluster.outer, bandwidth=speed * 1e9))


def sized_cluster(cells: Cells, cluster: Cluster, devices: int) -> Cluster:
    """The cluster with so many devices; islands that are smaller than a node take the place of nodes, joined
    by PCIe, and beyond the node by the slower of PCIe and the network.

    Raises:
        StrettoError: it has fewer devices, or islands do not divide a node.
    """
    island = cells.whole("island")
    if island is None or island >= cluster.node:
        return cluster.sized(devices)
    if cluster.node % island:
        raise StrettoError(
            f"island is {island}, which does not divide nodes of {cluster.node}", hint="fill in node_size"
        )
    device = cluster.device
    between = next((link for month, link in _PCIE if device.released >= month), _PCIE_3)
    inner = cluster.inner
    if inner.kind.startswith("PCIe"):  # cards with bridges
        between = inner
        inner = Link(_BRIDGES.get(device.name.split("-")[0], _BRIDGE), 5e-6, "NVLink 3")
    one_node = devices <= cluster.node
    outer = between if one_node or between.bandwidth < cluster.outer.bandwidth else cluster.outer
    nodes = None if cluster.nodes is None else cluster.nodes * cluster.node // island
    return replace(cluster, node=island, nodes=nodes, inner=inner, outer=outer).sized(devices)
