"""`stretto catalogue`: the devices, clusters and models that planning knows."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from stretto.cli.face import Json, command_app, report

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.cost.dlrm import DlrmShape
    from stretto.cost.machine.cluster import Cluster, Link
    from stretto.cost.machine.device import Device
    from stretto.cost.shape import ModelShape

app = command_app()

Kind = Literal["devices", "clusters", "models", "recommenders"]


@app.command(epilog="Example: stretto catalogue h100")
def catalogue(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A device, a cluster or a model, however it is spelt, a cluster's YAML file, or a model's "
            "config.json: that one in full, with sources."
        ),
    ] = None,
    only: Annotated[Kind | None, typer.Option(help="One of the lists.")] = None,
    as_json: Json = False,
) -> None:
    """List the devices, clusters and models that planning knows, or show one in full.

    A cluster of your own is a YAML file: `like: dgx-h100` and what differs (`node`, `nodes`, `inner`,
    `outer`, `price`, `device` by name or described), or all of it; `stretto calibrate` writes one of this
    machine.
    """
    if name is not None:
        found = one(name)
        report(found, as_json, lambda to: _show_one(to, found))
        return
    lists = everything(only)
    report(lists, as_json, lambda to: _show_lists(to, lists))


def everything(only: Kind | None = None) -> dict[str, Any]:
    """What the command's JSON says: a list of each kind, one object an entry."""
    from stretto.cost.dlrm import DLRM_PRESETS
    from stretto.cost.machine.catalogue import clusters, entries
    from stretto.cost.presets import PRESETS, preset

    lists: dict[str, Any] = {}
    if only in (None, "devices"):
        lists["devices"] = [device_facts(entry.device) for entry in entries()]
    if only in (None, "clusters"):
        lists["clusters"] = [cluster_facts(cluster) for cluster in clusters()]
    if only in (None, "models"):
        lists["models"] = [model_facts(name, preset(name)) for name in PRESETS]
    if only in (None, "recommenders"):
        lists["recommenders"] = [dlrm_facts(name, shape) for name, shape in DLRM_PRESETS.items()]
    return lists


def one(name: str) -> dict[str, Any]:
    """All facts of what goes by that name: a model's, a device's and its usual cluster's, or a cluster's.

    Raises:
        StrettoError: nothing goes by that name; names the nearest of all.
    """
    from stretto.cost.dlrm import DLRM_PRESETS
    from stretto.cost.machine.catalogue import SOURCES, clusters, entries, find_cluster, find_device
    from stretto.cost.presets import PRESETS, find_shape
    from stretto.errors import StrettoError, nearest

    if name.lower() in DLRM_PRESETS:
        return {"recommender": dlrm_facts(name.lower(), DLRM_PRESETS[name.lower()])}
    try:
        return {"model": model_facts(name, find_shape(name)) | {"sources": _model_sources(name)}}
    except StrettoError as error:
        if "is not known" not in error.message:  # a file, or a model of another kind
            raise
    found: dict[str, Any] = {}
    with suppress(StrettoError):
        found["device"] = device_facts(find_device(name)) | {"sources": SOURCES}
    try:
        cluster = find_cluster(name)
    except StrettoError as error:
        if name.endswith((".yaml", ".yml")) or found:
            raise
        known = [*PRESETS, *DLRM_PRESETS, *(e.device.name for e in entries()), *(c.name for c in clusters())]
        near = nearest(name.lower(), known)
        hint = f"did you mean {near!r}?" if near else error.hint
        raise StrettoError(f"no device, cluster or model is known as {name!r}", hint=hint) from None
    own = {} if name.endswith((".yaml", ".yml")) else {"sources": SOURCES}
    described = {"device": device_facts(cluster.device) | own, **found}
    return {**described, "cluster": cluster_facts(cluster) | own}


def _model_sources(name: str) -> str:
    from stretto.cost.presets_data import SOURCES

    return name if "/" in name or name.endswith(".json") else SOURCES


def device_facts(device: Device) -> dict[str, Any]:
    """A device in plain values; GiB as a program sees them, GB/s, dollars an hour."""
    return {
        "name": device.name,
        "tflops": dict(device.tflops),
        "sustained_tflops": dict(device.sustained),
        "memory_gib": round(device.memory / 2**30, 2),
        "bandwidth_gbs": device.bandwidth / 1e9,
        "price": device.price,
        "measured": sorted(device.kernels),
        "notes": device.notes,
    }


def cluster_facts(cluster: Cluster) -> dict[str, Any]:
    """A cluster in plain values; GB/s of one device in one direction, microseconds."""
    return {
        "name": cluster.name,
        "device": cluster.device.name,
        "node": cluster.node,
        "nodes": cluster.nodes,
        "inner": _link_facts(cluster.inner),
        "outer": _link_facts(cluster.outer),
        "computing": cluster.computing,
        "price": cluster.device.price if cluster.price is None else cluster.price,
        "correction": cluster.correction,
        "measured": sorted(cluster.tables),
        "notes": cluster.notes,
    }


def _link_facts(link: Link) -> dict[str, Any]:
    return {
        "kind": link.kind,
        "bandwidth_gbs": round(link.bandwidth / 1e9, 4),
        "latency_us": round(link.latency * 1e6, 4),
        "sharp": link.sharp,
    }


def model_facts(name: str, shape: ModelShape) -> dict[str, Any]:
    """A model in plain values; parameters to the integer, FLOPs of a token by both conventions."""
    from stretto.cost.flops import model_flops_per_token
    from stretto.cost.parameters import count_parameters
    from stretto.cost.record import shape_to_record

    count = count_parameters(shape)
    return {
        "name": name,
        "parameters": count.total,
        "active_parameters": count.active,
        "embedding_parameters": count.embedding + count.output,
        "model_flops_per_token": model_flops_per_token(shape, shape.sequence),
        "model_flops_per_token_causal": model_flops_per_token(shape, shape.sequence, causal=True),
        "trains_here": not shape.unbuilt,
        "not_built_yet": list(shape.unbuilt),
        "shape": shape_to_record(shape),
    }


def dlrm_facts(name: str, shape: DlrmShape) -> dict[str, Any]:
    """A recommender in plain values."""
    from dataclasses import asdict

    from stretto.cost.dlrm import count_dlrm, dlrm_flops_per_sample

    count = count_dlrm(shape)
    return {
        "name": name,
        "parameters": count.total,
        "dense_parameters": count.dense,
        "model_flops_per_sample": 3 * dlrm_flops_per_sample(shape),
        "lookups_per_sample": shape.lookups,
        "shape": asdict(shape),
    }


def _show_lists(to: Console, lists: dict[str, Any]) -> None:
    from stretto.cli.catalogue_show import TABLES

    for i, (kind, entries) in enumerate(lists.items()):
        if i:
            to.print()
        to.print(TABLES[kind](entries))


def _show_one(to: Console, facts: dict[str, Any]) -> None:
    from stretto.cli.catalogue_show import in_full

    for i, (kind, values) in enumerate(facts.items()):
        if i:
            to.print()
        to.print(in_full(kind, values))
