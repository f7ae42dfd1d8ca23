"""Devices and clusters from the fields of a file, and a cluster written back to a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import yaml

from stretto.errors import StrettoError
from stretto.planner.machines.cluster import Cluster, Collective, HostMachine, NetworkLink
from stretto.planner.machines.device import Device, Precision
from stretto.planner.machines.networks import parse_network
from stretto.planner.machines.reading import Fields
from stretto.versions import PROFILE

GIB = 2**30
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
FindDevice = Callable[[str], Device]
FindCluster = Callable[[str], Cluster]

# measurements of a device or a cluster, and the numbers in each of their rows
ROWS = {"matmul": 5, "passes": 2, "attention": 8}
SECONDS = ("launch", "layer", "action")
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
COLLECTIVE_ROW = 4
UNCERTAIN = ("kernels", "network", "host")
_HOST_UNITS = {
    "memory_gib": GIB * 1.0,
    "bandwidth_gbs": 1e9,
    "link_gbs": 1e9,
    "disk_gib": GIB * 1.0,
    "disk_gbs": 1e9,
}


def device_of(fields: Fields, name: str | None, find: FindDevice) -> Device:
    """A device from its description; `like` names a device of the catalogue whose values are the defaults.

    Raises:
        StrettoError: an unknown field, or a value that breaks a rule; with the line.
    """
    like = find(fields.text("like")) if "like" in fields else None
    fallback = name or (like.name if like else None)
    price = fields.number("price") if "price" in fields else like.price if like else None
    device = Device(
        name=fields.text("name", fallback),
        tflops=fields.numbers("tflops", PRECISIONS) or (like.tflops if like else {}),
        memory=fields.number("memory_gib", like.memory / GIB if like else None) * GIB,
        bandwidth=fields.number("bandwidth_gbs", like.bandwidth / 1e9 if like else None) * 1e9,
        sustained=fields.numbers("sustained", PRECISIONS) or (like.sustained if like else {}),
        aliases=fields.texts("aliases"),
        pattern=fields.text("driver") if "driver" in fields else None,
        unless=fields.text("unless", "MIG"),
        kernels=_kernels(fields, "kernels") or (like.kernels if like else {}),
        released=fields.text("released") if "released" in fields else like.released if like else "",
        price=price,
        notes=" ".join(fields.text("notes", "(none)").split()) if "notes" in fields else "",
    )
    if not device.tflops:
        raise fields.wrong("tflops", "has no peak at all", "as in tflops: {bf16: 989}")
    fields.finish(("like", "name", "released", "price", "driver", "notes"))
    return device


def cluster_of(fields: Fields, name: str, find: FindDevice, find_cluster: FindCluster) -> Cluster:
    """A cluster from its description; `like` names a cluster of the catalogue whose values are the defaults.

    Raises:
        StrettoError: an unknown field, or a value that breaks a rule; with the line.
    """
    like = find_cluster(fields.text("like")) if "like" in fields else None
    fields.texts("aliases")
    device = like.device if like and "device" not in fields else _device(fields, find)
    nodes = fields.integer("nodes") if "nodes" in fields else like.nodes if like else None
    computing = like.computing if like else None
    if "computing" in fields:
        cores = fields.plain("computing") == "cores"
        computing = (os.cpu_count() or 1) if cores else fields.integer("computing")
    cluster = Cluster(
        name=fields.text("name", name),
        device=device,
        node=fields.integer("node", like.node if like else None),
        inner=_link(fields, "inner", like.inner if like else None),
        outer=NetworkLink(1e9, 1e-4, "none"),
        nodes=nodes,
        computing=computing,
        tables=_tables(fields, "tables") or (like.tables if like else {}),
        price=fields.number("price") if "price" in fields else like.price if like else None,
        correction=fields.number("correction", like.correction if like else 1.0),
        spread=fields.numbers("spread", UNCERTAIN) or (like.spread if like else {}),
        notes=" ".join(fields.text("notes").split()) if "notes" in fields else "",
        host=_host(fields, like.host if like else HostMachine()),
    )
    cluster = replace(cluster, outer=_outer(fields, like, cluster))
    fields.finish(("like", "name", "nodes", "computing", "price", "notes", "host"))
    return cluster


def _outer(fields: Fields, like: Cluster | None, cluster: Cluster) -> NetworkLink:
    """The link between nodes: described, or in words as "8x200 Gb/s RoCE", of a node's cards."""
    default = like.outer if like else None
    if "outer" not in fields or fields.is_mapping("outer"):
        return _link(fields, "outer", default, cluster.nodes == 1)
    network = parse_network(fields.text("outer"))
    if network is None or (network.rate is None and default is None):
        raise fields.wrong("outer", "gives no speed", "as in 8x200 Gb/s RoCE")
    return network.link(cluster if default is None else replace(cluster, outer=default))


def save_cluster(cluster: Cluster, path: Path) -> None:
    """Write a file that `find_cluster` reads as the same cluster, its device described in full.

    Raises:
        StrettoError: the file cannot be written.
    """
    device = cluster.device
    described = {
        "name": device.name,
        "tflops": dict(device.tflops),
        "sustained": dict(device.sustained),
        "memory_gib": device.memory / GIB,
        "bandwidth_gbs": device.bandwidth / 1e9,
        "kernels": _flat(device.kernels),
        "released": device.released,
        "price": device.price,
        "notes": device.notes,
    }
    values = {
        "version": PROFILE.version,
        "name": cluster.name,
        "device": _without_empty(described),
        "node": cluster.node,
        "nodes": cluster.nodes,
        "inner": _without_empty(_link_values(cluster.inner)),
        "outer": _without_empty(_link_values(cluster.outer)),
        "computing": cluster.computing,
        "price": cluster.price,
        "correction": cluster.correction,
        "spread": dict(cluster.spread),
        "notes": cluster.notes,
        "host": _host_values(cluster.host),
        "tables": _flat(cluster.tables),
    }
    text = yaml.safe_dump(
        _without_empty(values), sort_keys=False, default_flow_style=None, width=110, allow_unicode=True
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StrettoError(
            f"cannot write {path}: {error.strerror}", hint="name a file in a folder that exists"
        ) from None


def _device(fields: Fields, find: FindDevice) -> Device:
    if fields.is_mapping("device"):
        return device_of(fields.inside("device"), None, find)
    name = fields.text("device")
    try:
        return find(name)
    except StrettoError as error:
        raise fields.wrong("device", f"{name!r} is not known", error.hint) from None


def _link(fields: Fields, key: str, like: NetworkLink | None, spare: bool = False) -> NetworkLink:
    """A link; with `spare` there is only one node, so that a link between nodes may be missing."""
    if key not in fields:
        if like is None and not spare:
            raise fields.wrong(key, "is missing", "as in {bandwidth_gbs: 25, latency_us: 15}")
        return like or NetworkLink(1e9, 1e-4, "none")
    inner = fields.inside(key)
    link = NetworkLink(
        bandwidth=inner.number("bandwidth_gbs", like.bandwidth / 1e9 if like else None) * 1e9,
        latency=inner.number("latency_us", like.latency * 1e6 if like else None, minimum=0.0) / 1e6,
        kind=inner.text("kind", like.kind if like else "unknown"),
        sharp=inner.flag("sharp"),
    )
    inner.finish()
    return link


def _host(fields: Fields, like: HostMachine) -> HostMachine:
    if "host" not in fields:
        return like
    inner, default = fields.inside("host"), _host_values(like)
    values = {name: inner.number(name, default[name]) * unit for name, unit in _HOST_UNITS.items()}
    host = HostMachine(
        memory=values["memory_gib"],
        bandwidth=values["bandwidth_gbs"],
        link=values["link_gbs"],
        disk=values["disk_gib"],
        disk_bandwidth=values["disk_gbs"],
    )
    inner.finish()
    return host


def _host_values(host: HostMachine) -> dict[str, float]:
    values = (host.memory, host.bandwidth, host.link, host.disk, host.disk_bandwidth)
    return {name: value / unit for (name, unit), value in zip(_HOST_UNITS.items(), values, strict=True)}


def _link_values(link: NetworkLink) -> dict[str, Any]:
    return {
        "kind": link.kind,
        "bandwidth_gbs": link.bandwidth / 1e9,
        "latency_us": round(link.latency * 1e6, 6),
        "sharp": link.sharp,
    }


def _kernels(fields: Fields, key: str) -> dict[str, object]:
    """Measured kernels: see `Device.kernels`."""
    if key not in fields:
        return {}
    tables = _mapping(fields, key, fields.plain(key), (*SECONDS, *ROWS))
    for kind, rows in tables.items():
        if kind in SECONDS:
            tables[kind] = fields.inside(key).number(kind)
        elif kind == "attention":
            _rows(fields, f"{key}.{kind}", rows, ROWS[kind])
        else:
            named = _mapping(fields, f"{key}.{kind}", rows, PRECISIONS if kind == "matmul" else None)
            for inner, table in named.items():
                _rows(fields, f"{key}.{kind}.{inner}", table, ROWS[kind])
    return tables


def _tables(fields: Fields, key: str) -> dict[str, object]:
    """Measured collectives: see `Cluster.tables`."""
    if key not in fields:
        return {}
    tables = _mapping(fields, key, fields.plain(key), COLLECTIVES)
    for kind, rows in tables.items():
        _rows(fields, f"{key}.{kind}", rows, COLLECTIVE_ROW)
    return tables


def _mapping(fields: Fields, name: str, value: object, allowed: tuple[str, ...] | None) -> dict[str, object]:
    if not isinstance(value, dict):
        raise fields.wrong(name, "must be a mapping")
    mapping = cast(dict[str, object], value)
    for key in mapping:
        if allowed is not None and key not in allowed:
            raise fields.wrong(name, f"has {key!r}, which is not one of {', '.join(allowed)}")
    return mapping


def _rows(fields: Fields, name: str, rows: object, width: int) -> None:
    """Rows of this many numbers, none below 0, the last of them, which is seconds, above 0."""
    if not isinstance(rows, list) or not rows:
        raise fields.wrong(name, "must be a list of rows")
    for i, row in enumerate(cast(list[object], rows), start=1):
        numbers = cast(list[object], row) if isinstance(row, list) else []
        real = [n for n in numbers if isinstance(n, int | float) and n >= 0]
        if len(real) != width or len(numbers) != width or not real[-1] > 0:
            raise fields.wrong(name, f"row {i} must be {width} numbers, the last of them seconds above 0")


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    """Without empty values."""
    return {key: value for key, value in values.items() if value not in (None, "", {}, ())}


def _flat(value: Any) -> Any:
    """As plain lists and dictionaries."""
    if isinstance(value, dict):
        return {key: _flat(item) for key, item in cast(dict[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_flat(item) for item in cast(list[Any], value)]
    return value
