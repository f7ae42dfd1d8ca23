"""Clusters described in YAML: their fields, what is refused, and that a saved one reads back equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from stretto.errors import StrettoError
from stretto.planner.machines.catalogue import clusters, find_cluster
from stretto.planner.machines.cluster import Cluster
from stretto.planner.machines.describe import save_cluster

DESCRIPTION = """\
device:
  name: ours
  tflops: {bf16: 100, fp32: 10}
  sustained: {bf16: 80}
  memory_gib: 24
  bandwidth_gbs: 500
  kernels:
    launch: 4e-6
    matmul: {bf16: [[128, 128, 128, 1, 1.0e-5]]}
    passes: {add: [[1048576, 1.0e-5]]}
    attention: [[1, 64, 64, 8, 64, 1, 0, 2.0e-5]]
node: 4
nodes: 2
inner: {kind: ours, bandwidth_gbs: 20, latency_us: 3, sharp: true}
outer: {bandwidth_gbs: 2, latency_us: 0}
computing: 3
price: 1.5
correction: 1.1
tables:
  all-reduce: [[4, 4, 1024, 1.0e-4]]
notes: two boxes
"""


def written(tmp_path: Path, text: str) -> str:
    file = tmp_path / "box.yaml"
    file.write_text(text)
    return str(file)


def test_every_field_is_read(tmp_path: Path) -> None:
    cluster = find_cluster(written(tmp_path, DESCRIPTION))
    assert cluster.name == "box"
    assert cluster.device.memory == 24 * 2**30
    assert cluster.device.bandwidth == 500e9
    assert cluster.device.kernels["launch"] == 4e-6
    assert (cluster.node, cluster.nodes, cluster.computing, cluster.price) == (4, 2, 3, 1.5)
    assert (cluster.inner.bandwidth, cluster.inner.latency, cluster.inner.sharp) == (20e9, 3e-6, True)
    assert cluster.outer.latency == 0
    assert cluster.tables == {"all-reduce": [[4, 4, 1024, 1e-4]]}
    assert find_cluster(written(tmp_path, DESCRIPTION) + ":6").devices == 6
    with pytest.raises(StrettoError, match="has 8 devices, not 16"):
        find_cluster(written(tmp_path, DESCRIPTION), 16)


def test_like_takes_the_values_of_a_known_cluster(tmp_path: Path) -> None:
    text = "like: dgx-h100\nnodes: 3\nouter: {bandwidth_gbs: 12.5}\ndevice: {like: h100, price: 2}\n"
    listed, described = find_cluster("dgx-h100"), find_cluster(written(tmp_path, text))
    assert described.inner == listed.inner
    assert described.outer == replace(listed.outer, bandwidth=12.5e9)
    assert described.devices == 24
    assert (described.device.price, described.device.memory) == (2.0, listed.device.memory)


def flat_values(cluster: Cluster) -> dict[str, object]:
    """All values of a cluster that a file stores, flat; aliases of a device belong to the catalogue."""
    fields = asdict(cluster)
    for name in ("aliases", "pattern", "unless"):
        del fields["device"][name]
    return dict(leaves("", fields))


def leaves(path: str, value: Any) -> Iterator[tuple[str, object]]:
    """Every number and text in nested mappings and lists."""
    if isinstance(value, dict | list):
        inner = (
            cast(dict[Any, Any], value).items()
            if isinstance(value, dict)
            else enumerate(cast(list[Any], value))
        )
        for key, item in inner:
            yield from leaves(f"{path}.{key}", item)
    else:
        yield path, value


def test_a_saved_cluster_reads_back_equal(tmp_path: Path) -> None:
    file = tmp_path / "saved.yaml"
    described = find_cluster(written(tmp_path, DESCRIPTION))
    for cluster in (*clusters(), described, find_cluster("h100", 64)):
        save_cluster(cluster, file)
        assert flat_values(find_cluster(file)) == pytest.approx(flat_values(cluster)), cluster.name
    with pytest.raises(StrettoError, match="cannot write"):
        save_cluster(described, tmp_path / "no" / "such.yaml")


@pytest.mark.parametrize(
    ("was", "now", "message", "hint"),
    [
        ("node: 4", "nod: 4", "box.yaml:1: node is missing", "'nod'"),
        ("price: 1.5", "prise: 1.5", "box.yaml:17: there is no field 'prise'", "'price'"),
        ("node: 4", "node: 0", "box.yaml:12: node is 0, must be a number of at least 1", None),
        ("node: 4", "node: 1.5", "node is 1.5, must be a whole number", None),
        ("node: 4", "node: [4]", "node is [4], must be a number", None),
        ("node: 4\n", "", "node is missing", None),
        ("node: 4", "node: 4\nnode: 8", "box.yaml:13: node is there twice", None),
        ("  memory_gib: 24", "  memory_gb: 24", "memory_gib is missing", None),
        ("bandwidth_gbs: 500", "bandwidth_gbs: fast", "device.bandwidth_gbs is 'fast'", None),
        ("bandwidth_gbs: 500", "bandwidth_gbs: .inf", "device.bandwidth_gbs is '.inf'", None),
        ("bandwidth_gbs: 20", "bandwidth_gbs: -1", "inner.bandwidth_gbs is -1", None),
        ("sharp: true", "sharp: maybe", "inner.sharp is 'maybe', must be true or false", None),
        ("sharp: true", "shape: true", "there is no field 'shape' in inner", "'sharp'"),
        ("{bf16: 100, fp32: 10}", "{bf17: 100}", "there is no field 'bf17' in device.tflops", "'bf16'"),
        ("{bf16: 100, fp32: 10}", "{}", "device.tflops has no peak at all", "bf16"),
        ("all-reduce:", "all-reduces:", "tables has 'all-reduces', which is not one of", None),
        ("[[4, 4, 1024, 1.0e-4]]", "[[4, 4, 1024]]", "row 1 must be 4 numbers", None),
        ("[[4, 4, 1024, 1.0e-4]]", "[[4, 4, 1024, 0]]", "row 1 must be 4 numbers", None),
        ("nodes: 2", "nodes: two", "nodes is 'two'", None),
        ("node: 4", "node: {", "this is not YAML", None),
    ],
)
def test_invalid_fields_are_refused_with_their_line(
    tmp_path: Path, was: str, now: str, message: str, hint: str | None
) -> None:
    assert was in DESCRIPTION
    with pytest.raises(StrettoError) as caught:
        find_cluster(written(tmp_path, DESCRIPTION.replace(was, now, 1)))
    assert message in caught.value.message
    assert hint is None or hint in (caught.value.hint or "")


def test_files_without_a_mapping_are_refused(tmp_path: Path) -> None:
    for text, message in (
        ("", "is empty"),
        ("- 1\n", "must be a mapping"),
        ("device: H9000\nnode: 8\n", "'H9000'"),
    ):
        with pytest.raises(StrettoError, match=message):
            find_cluster(written(tmp_path, text))
    with pytest.raises(StrettoError, match="cannot read"):
        find_cluster(tmp_path / "none.yaml")


def test_one_node_needs_no_link_between_nodes(tmp_path: Path) -> None:
    text = "device: h100\nnode: 8\ninner: {bandwidth_gbs: 450, latency_us: 5}\n"
    assert find_cluster(written(tmp_path, text + "nodes: 1\n")).devices == 8
    with pytest.raises(StrettoError, match="outer is missing"):
        find_cluster(written(tmp_path, text))
