"""`stretto catalogue`: the devices, clusters and models that planning knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app
from stretto.cli.report import CommandReport, Record, number, text
from stretto.errors import StrettoError, UnknownName, nearest

if TYPE_CHECKING:
    from rich.table import Table

    from stretto.job.shape import ModelShape
    from stretto.planner.machines.cluster import Cluster, NetworkLink
    from stretto.planner.machines.device import Device
    from stretto.recommender.shape import DlrmShape


app = command_app()

Kind = Literal["devices", "clusters", "models", "recommenders"]


@app.command(epilog="Example: stretto catalogue h100")
def catalogue(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Show one in full, with sources: a device, cluster or model in any usual spelling, a "
            "cluster's YAML file, or a model's config.json."
        ),
    ] = None,
    only: Annotated[Kind | None, typer.Option(help="Print one of the lists only.")] = None,
    as_json: Json = False,
) -> None:
    """List the devices, clusters and models that planning knows, or show one in full.

    Describe your own cluster in a YAML file: `like: dgx-h100` and what differs (`node`, `nodes`, `inner`,
    `outer`, `price`, `device` by name or described), or everything; `stretto calibrate` writes one for this
    machine.
    """
    record = entries_named(name) if name is not None else entry_lists(only)
    report = CommandReport(record)
    for index, (kind, entries) in enumerate(record.items()):
        if index:
            report.line()
        if name is None:
            _add_list(report, kind, entries)
        else:
            report.draw(lambda _, kind=kind, entry=entries: _properties(kind, entry))
    report.print(as_json)


# ------------------------------------------------------------------ JSON


def entry_lists(only: Kind | None = None) -> dict[str, Any]:
    """The entries of every kind, or of one."""
    from stretto.job.presets import PRESETS, preset
    from stretto.planner.machines.catalogue import clusters, entries
    from stretto.recommender.shape import DLRM_PRESETS

    lists = {
        "devices": lambda: [_device_record(entry.device) for entry in entries()],
        "clusters": lambda: [_cluster_record(cluster) for cluster in clusters()],
        "models": lambda: [_model_record(name, preset(name)) for name in PRESETS],
        "recommenders": lambda: [_recommender_record(name, shape) for name, shape in DLRM_PRESETS.items()],
    }
    return {kind: entries_of_kind() for kind, entries_of_kind in lists.items() if only in (None, kind)}


def entries_named(name: str) -> dict[str, Any]:
    """All entries of that name: a model, a device with its default cluster, or a cluster.

    Raises:
        StrettoError: no entry has that name; the hint names the nearest that exists.
    """
    from stretto.job.presets import PRESETS, find_shape
    from stretto.job.presets_data import SOURCES as MODEL_SOURCES
    from stretto.planner.machines.catalogue import SOURCES, clusters, entries, find_cluster, find_device
    from stretto.recommender.shape import DLRM_PRESETS

    if name.lower() in DLRM_PRESETS:
        return {"recommender": _recommender_record(name.lower(), DLRM_PRESETS[name.lower()])}
    try:
        sources = name if "/" in name or name.endswith(".json") else MODEL_SOURCES
        return {"model": _model_record(name, find_shape(name)) | {"sources": sources}}
    except UnknownName:
        device: dict[str, Any] = {}
    with suppress(StrettoError):
        device["device"] = _device_record(find_device(name)) | {"sources": SOURCES}
    is_file = name.endswith((".yaml", ".yml"))
    try:
        cluster = find_cluster(name)
    except StrettoError as error:
        if is_file or device:
            raise
        names = [*PRESETS, *DLRM_PRESETS, *(e.device.name for e in entries()), *(c.name for c in clusters())]
        similar = nearest(name.lower(), names)
        hint = f"did you mean {similar!r}?" if similar else error.hint
        raise StrettoError(f"no device, cluster or model is known as {name!r}", hint=hint) from None
    of_file = {} if is_file else {"sources": SOURCES}
    described = {"device": _device_record(cluster.device) | of_file, **device}
    return {**described, "cluster": _cluster_record(cluster) | of_file}


def _device_record(device: Device) -> dict[str, Any]:
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


def _cluster_record(cluster: Cluster) -> dict[str, Any]:
    """A cluster in plain values; GB/s of one device in one direction, microseconds."""
    return {
        "name": cluster.name,
        "device": cluster.device.name,
        "node": cluster.node,
        "nodes": cluster.nodes,
        "inner": _link_record(cluster.inner),
        "outer": _link_record(cluster.outer),
        "computing": cluster.computing,
        "price": cluster.device.price if cluster.price is None else cluster.price,
        "correction": cluster.correction,
        "measured": sorted(cluster.tables),
        "notes": cluster.notes,
    }


def _link_record(link: NetworkLink) -> dict[str, Any]:
    return {
        "kind": link.kind,
        "bandwidth_gbs": round(link.bandwidth / 1e9, 4),
        "latency_us": round(link.latency * 1e6, 4),
        "sharp": link.sharp,
    }


def _model_record(name: str, shape: ModelShape) -> dict[str, Any]:
    """A model in plain values; parameters to the integer, FLOPs of a token by both conventions."""
    from stretto.job.flops import model_flops_per_token
    from stretto.job.parameters import count_parameters
    from stretto.job.shape import shape_to_record

    count = count_parameters(shape)
    return {
        "name": name,
        "parameters": count.total,
        "active_parameters": count.active,
        "embedding_parameters": count.embedding + count.output,
        "model_flops_per_token": model_flops_per_token(shape, shape.pretraining_sequence),
        "model_flops_per_token_causal": model_flops_per_token(shape, shape.pretraining_sequence, causal=True),
        "trains_here": not shape.unsupported_parts,
        "not_built_yet": list(shape.unsupported_parts),
        "shape": shape_to_record(shape),
    }


def _recommender_record(name: str, shape: DlrmShape) -> dict[str, Any]:
    from stretto.recommender.shape import count_dlrm, dlrm_flops_per_sample

    count = count_dlrm(shape)
    return {
        "name": name,
        "parameters": count.total,
        "dense_parameters": count.dense,
        "model_flops_per_sample": 3 * dlrm_flops_per_sample(shape),
        "lookups_per_sample": shape.lookups,
        "shape": asdict(shape),
    }


# ------------------------------------------------------------------ text


def _add_list(report: CommandReport, kind: str, entries: Sequence[Record]) -> None:
    """Add one list as a table with a row per entry."""
    if kind == "devices":
        columns = [
            text("device"),
            number("16-bit TFLOP/s", "g"),
            number("sustained", "g"),
            number("8-bit", "g"),
        ]
        columns += [number("GiB", "g"), number("memory GB/s", "g"), number("$/h", ".2f")]
        half = ("bf16", "fp16", "fp32")
        rows = [
            (
                entry["name"],
                _peak(entry["tflops"], half),
                _peak(entry["sustained_tflops"], half),
                _peak(entry["tflops"], ("fp8",)),
                *(entry[name] for name in ("memory_gib", "bandwidth_gbs", "price")),
            )
            for entry in entries
        ]
    elif kind == "clusters":
        columns = [text("cluster"), text("device"), number("a node")]
        columns += [number("inside a node, GB/s"), number("between nodes, GB/s")]
        rows = [
            (
                *(entry[name] for name in ("name", "device", "node")),
                *(f"{entry[name]['kind']} {entry[name]['bandwidth_gbs']:g}" for name in ("inner", "outer")),
            )
            for entry in entries
        ]
    elif kind == "models":
        sizes = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
        columns = [text("model"), number("parameters", _billions), number("active", _billions)]
        columns += [*(number(name.removesuffix("_heads")) for name in sizes), number("experts"), number("")]
        rows = [
            (
                entry["name"],
                entry["parameters"],
                None if entry["active_parameters"] == entry["parameters"] else entry["active_parameters"],
                *(str(shape[name]) for name in sizes),
                f"{moe['top_k']} of {moe['experts']}" if (moe := shape["moe"]) else None,
                "trains" if entry["trains_here"] else "plans",
            )
            for entry in entries
            for shape in [entry["shape"]]
        ]
    else:
        columns = [text("recommender"), number("parameters", _billions), number("dense")]
        columns += [number("tables"), number("ids a sample", "g"), number("interaction")]
        rows = [
            (
                entry["name"],
                entry["parameters"],
                f"{entry['dense_parameters'] / 1e6:.2f} M",
                len(entry["shape"]["tables"]),
                entry["lookups_per_sample"],
                str(entry["shape"]["interaction"]),
            )
            for entry in entries
        ]
    report.table(columns, rows)


def _peak(tflops: Mapping[str, float], dtypes: Sequence[str]) -> float | None:
    return next((tflops[dtype] for dtype in dtypes if dtype in tflops), None)


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} B"


def _properties(kind: str, entry: Record) -> Table:
    """One entry in full, one row per property."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(kind, f"[bold]{entry['name']}[/]")
    for name, value in entry.items():
        shown = _value_text(value)
        if name != "name" and shown:
            table.add_row(name.replace("_", " "), shown)
    return table


def _value_text(value: object) -> str:
    """A value as text; "" if it is unknown."""
    if value is None:
        return ""
    if isinstance(value, dict):
        items = [(str(k), _value_text(v)) for k, v in cast(dict[str, object], value).items()]
        return ", ".join(f"{name} {text}" for name, text in items if text)
    if isinstance(value, list | tuple):
        items = [_value_text(item) for item in cast(Sequence[object], value)]
        return "; ".join(items[:8]) + (f"; and {len(items) - 8} more" if len(items) > 8 else "")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if value >= 100_000 else str(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
