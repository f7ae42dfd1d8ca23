"""The catalogue as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from rich.table import Table

Facts = Mapping[str, Any]


def devices(entries: Sequence[Facts]) -> Table:
    """One row a device."""
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
    """One row a cluster."""
    rows = [(f["name"], f["device"], str(f["node"]), _link(f["inner"]), _link(f["outer"])) for f in entries]
    return _table(("cluster", "device", "a node", "inside a node, GB/s", "between nodes, GB/s"), rows, 2)


def models(entries: Sequence[Facts]) -> Table:
    """One row a model."""
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
    """One row a recommender."""
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
    """One thing, a row a fact."""
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
    """A fact as a person reads it; what is not known is left out."""
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
    """Columns of numbers after so many of names."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, title in enumerate(titles):
        table.add_column(title, justify="left" if i < names else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _peak(tflops: Mapping[str, float], *wanted: str) -> str:
    return next((f"{tflops[name]:g}" for name in wanted if name in tflops), "")


def _link(link: Facts) -> str:
    return f"{link['kind']} {link['bandwidth_gbs']:g}"


def _billions(number: int) -> str:
    return f"{number / 1e9:.2f} B"
