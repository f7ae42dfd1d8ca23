"""`stretto catalogue`: the devices, clusters and models that planning knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app, report

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from stretto.planner.machines.cluster import Cluster, Link
    from stretto.planner.machines.device import Device
    from stretto.recommender.shape import DlrmShape
    from stretto.spec.shape import ModelShape


Facts = Mapping[str, Any]


def devices(entries: Sequence[Facts]) -> Table:
    """One row per device."""
    rows = [
        (
            f["name"],
            _peak(f["tflops"], "bf16", "fp16", "fp32"),
            _peak(f["sustained_tflops"], "bf16", "fp16", "fp32"),
            _peak(f["tflops"], "fp8"),
            f"{f['memory_gib']:g}",
            f"{f['bandwidth_gbs']:g}",
            "" if f["price"] is None else f"{f['price']:.2f}",
        )
        for f in entries
    ]
    titles = ("device", "16-bit TFLOP/s", "sustained", "8-bit", "GiB", "memory GB/s", "$/h")
    return _table(titles, rows)


def clusters(entries: Sequence[Facts]) -> Table:
    """One row per cluster."""
    rows = [(f["name"], f["device"], str(f["node"]), _link(f["inner"]), _link(f["outer"])) for f in entries]
    return _table(("cluster", "device", "a node", "inside a node, GB/s", "between nodes, GB/s"), rows, 2)


def models(entries: Sequence[Facts]) -> Table:
    """One row per model."""
    rows: list[tuple[str, ...]] = []
    for f in entries:
        shape, moe = f["shape"], f["shape"]["moe"]
        active = "" if f["active_parameters"] == f["parameters"] else _billions(f["active_parameters"])
        experts = f"{moe['top_k']} of {moe['experts']}" if moe else ""
        sizes = [str(shape[name]) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")]
        built = "trains" if f["trains_here"] else "plans"
        rows.append((f["name"], _billions(f["parameters"]), active, *sizes, experts, built))
    titles = (
        "model",
        "parameters",
        "active",
        "layers",
        "hidden",
        "heads",
        "kv",
        "ffn",
        "vocab",
        "experts",
        "",
    )
    return _table(titles, rows)


def recommenders(entries: Sequence[Facts]) -> Table:
    """One row per recommender."""
    rows = [
        (
            f["name"],
            _billions(f["parameters"]),
            f"{f['dense_parameters'] / 1e6:.2f} M",
            str(len(f["shape"]["tables"])),
            f"{f['lookups_per_sample']:g}",
            str(f["shape"]["interaction"]),
        )
        for f in entries
    ]
    titles = ("recommender", "parameters", "dense", "tables", "ids a sample", "interaction")
    return _table(titles, rows)


TABLES: dict[str, Callable[[Sequence[Facts]], Table]] = {
    "devices": devices,
    "clusters": clusters,
    "models": models,
    "recommenders": recommenders,
}


def in_full(kind: str, facts: Facts) -> Table:
    """One entry in full, one row per property."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(kind, f"[bold]{facts['name']}[/]")
    for name, value in facts.items():
        text = _text(value)
        if name != "name" and text:
            table.add_row(name.replace("_", " "), text)
    return table


def _text(value: object) -> str:
    """A value as text; "" where it is unknown."""
    if value is None:
        return ""
    if isinstance(value, dict):
        items = [(str(k), _text(v)) for k, v in cast(dict[str, object], value).items()]
        return ", ".join(f"{name} {text}" for name, text in items if text)
    if isinstance(value, list | tuple):
        items = [_text(item) for item in cast(Sequence[object], value)]
        return "; ".join(items[:8]) + (f"; and {len(items) - 8} more" if len(items) > 8 else "")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if value >= 100_000 else str(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> Table:
    """A table whose first `names` columns are text and whose others are numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, title in enumerate(titles):
        table.add_column(title, justify="left" if i < names else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _peak(tflops: Mapping[str, float], *formats: str) -> str:
    return next((f"{tflops[name]:g}" for name in formats if name in tflops), "")


def _link(link: Facts) -> str:
    return f"{link['kind']} {link['bandwidth_gbs']:g}"


def _billions(number: int) -> str:
    return f"{number / 1e9:.2f} B"


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
    if name is not None:
        entry = one(name)
        report(entry, as_json, lambda to: _show_one(to, entry))
        return
    lists = everything(only)
    report(lists, as_json, lambda to: _show_lists(to, lists))


def everything(only: Kind | None = None) -> dict[str, Any]:
    """The command's JSON: a list for each kind, with one object per entry."""
    from stretto.planner.machines.catalogue import clusters, entries
    from stretto.recommender.shape import DLRM_PRESETS
    from stretto.spec.presets import PRESETS, preset

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
    """Everything known by that name: a model, a device with its usual cluster, or a cluster.

    Raises:
        StrettoError: nothing has that name; the hint names the nearest that exists.
    """
    from stretto.errors import StrettoError, UnknownName, nearest
    from stretto.planner.machines.catalogue import SOURCES, clusters, entries, find_cluster, find_device
    from stretto.recommender.shape import DLRM_PRESETS
    from stretto.spec.presets import PRESETS, find_shape

    if name.lower() in DLRM_PRESETS:
        return {"recommender": dlrm_facts(name.lower(), DLRM_PRESETS[name.lower()])}
    try:
        return {"model": model_facts(name, find_shape(name)) | {"sources": _model_sources(name)}}
    except UnknownName:
        facts: dict[str, Any] = {}
    with suppress(StrettoError):
        facts["device"] = device_facts(find_device(name)) | {"sources": SOURCES}
    try:
        cluster = find_cluster(name)
    except StrettoError as error:
        if name.endswith((".yaml", ".yml")) or facts:
            raise
        known = [*PRESETS, *DLRM_PRESETS, *(e.device.name for e in entries()), *(c.name for c in clusters())]
        near = nearest(name.lower(), known)
        hint = f"did you mean {near!r}?" if near else error.hint
        raise StrettoError(f"no device, cluster or model is known as {name!r}", hint=hint) from None
    sources = {} if name.endswith((".yaml", ".yml")) else {"sources": SOURCES}
    described = {"device": device_facts(cluster.device) | sources, **facts}
    return {**described, "cluster": cluster_facts(cluster) | sources}


def _model_sources(name: str) -> str:
    from stretto.spec.presets_data import SOURCES

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
    from stretto.spec.flops import model_flops_per_token
    from stretto.spec.parameters import count_parameters
    from stretto.spec.shape import shape_to_record

    count = count_parameters(shape)
    return {
        "name": name,
        "parameters": count.total,
        "active_parameters": count.active,
        "embedding_parameters": count.embedding + count.output,
        "model_flops_per_token": model_flops_per_token(shape, shape.pretraining_sequence),
        "model_flops_per_token_causal": model_flops_per_token(shape, shape.pretraining_sequence, causal=True),
        "trains_here": not shape.unbuilt,
        "not_built_yet": list(shape.unbuilt),
        "shape": shape_to_record(shape),
    }


def dlrm_facts(name: str, shape: DlrmShape) -> dict[str, Any]:
    """A recommender in plain values."""
    from dataclasses import asdict

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


def _show_lists(to: Console, lists: dict[str, Any]) -> None:

    for i, (kind, entries) in enumerate(lists.items()):
        if i:
            to.print()
        to.print(TABLES[kind](entries))


def _show_one(to: Console, facts: dict[str, Any]) -> None:

    for i, (kind, values) in enumerate(facts.items()):
        if i:
            to.print()
        to.print(in_full(kind, values))
