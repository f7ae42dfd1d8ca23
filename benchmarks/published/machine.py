"""The cluster of a row: its device in its usual node, with the row's nodes, islands and network."""

from __future__ import annotations

from dataclasses import replace

from published.cells import SpelledCells
from stretto.errors import StrettoError
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.machines.cluster import Cluster, NetworkLink
from stretto.planner.machines.names import normalised, parse_name
from stretto.planner.machines.networks import GBIT, parse_network
from stretto.planner.runs import cluster_of

# between islands of a node, by the month in which the device could be had: PCIe, per device
_PCIE = (("2022-09", NetworkLink(63e9, 10e-6, "PCIe 5")), ("2020-05", NetworkLink(31e9, 10e-6, "PCIe 4")))
_PCIE_3 = NetworkLink(15.7e9, 10e-6, "PCIe 3")
_BRIDGES = {"a100": 300e9, "h100": 300e9, "a800": 200e9, "h800": 200e9}  # bytes/s of a card's NVLink bridges
_BRIDGE = 56e9


def row_cluster(cells: SpelledCells, cluster: Cluster | None) -> Cluster:
    """Return the row's cluster, of any size, or the one in its place, with the row's nodes and network.

    Raises:
        StrettoError: no device, or an unknown one; or a network without kind and speed.
    """
    name = cells.get("gpu", str)
    count = None
    if name is not None and not name.endswith((".yaml", ".yml")) and ":" not in name:
        count = parse_name(name).count  # as in "8xH100", a kind of node
    if cluster is None and name is not None:
        cluster = find_cluster(name)
        if cluster.nodes == 1 and count is not None:
            cluster = replace(cluster, nodes=None, node=find_cluster(cluster.name).node)
        if normalised(name) not in (normalised(cluster.device.name), normalised(cluster.name)):
            cells.report("gpu", f"{cluster.device.name}, {cluster.name}", f"read from {name!r}")
    nodes, gpus, text = cells.get("nodes", int), cells.get("gpus", int), cells.text("network")
    if nodes and gpus is None and count is not None:
        cells.values.setdefault("node_size", count)
    if text and cells.ran:
        try:
            parse_network(text)
        except StrettoError as error:  # words that name none are no reason to refuse what was measured
            kind = cluster.outer.kind if cluster is not None else ""
            cells.fill("network", kind, f"the cluster's: {error.message}")
            del cells.values["network"]
    gbits = cells.get("node_gbits", float)
    if gbits is not None and "network_gbs" in cells.values:
        raise StrettoError("network_gbs and node_gbits are both there", hint="leave one of them empty")
    node_size = cells.get("node_size", int)
    machine = cluster_of(cells, cluster)
    if gbits is not None:
        machine = replace(machine, outer=replace(machine.outer, bandwidth=gbits * GBIT / machine.node))
    for column in ("node_size", "network", "network_gbs"):  # the cluster has them now
        cells.values.pop(column, None)
    if nodes is None:
        if gpus is None and count:
            cells.fill("gpus", count, "of gpu")
    elif gpus is None:
        cells.fill("gpus", nodes * machine.node, f"{nodes} nodes of {machine.node}")
    elif node_size and not (nodes - 1) * machine.node < gpus <= nodes * machine.node:
        raise StrettoError(
            f"{gpus} GPUs are not on {nodes} nodes of {machine.node}", hint="leave gpus or nodes empty"
        )
    return machine


def sized_cluster(cells: SpelledCells, cluster: Cluster, devices: int) -> Cluster:
    """Return the cluster with this number of devices; islands that are smaller than a node take the place of
    nodes, joined by PCIe, and beyond the node by the slower of PCIe and the network.

    Raises:
        StrettoError: it has fewer devices, or islands do not divide a node.
    """
    island = cells.get("island", int)
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
        inner = NetworkLink(_BRIDGES.get(device.name.split("-")[0], _BRIDGE), 5e-6, "NVLink 3")
    one_node = devices <= cluster.node
    outer = between if one_node or between.bandwidth < cluster.outer.bandwidth else cluster.outer
    nodes = None if cluster.nodes is None else cluster.nodes * cluster.node // island
    return replace(cluster, node=island, nodes=nodes, inner=inner, outer=outer).sized(devices)
