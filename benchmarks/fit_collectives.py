"""Fits the constants of collectives, by kind of link, to measured ones.

    python benchmarks/fit_collectives.py --tables ../shared/tables

Rows come from comm_collectives_measured.csv (VIA-Research/vTrain trace, A100 and V100;
stas00/ml-engineering network, A100, H200, B200) and comm_vidur_measured.csv (microsoft/vidur
data/profiling/network), from 256 KiB on, since calls with less take either ten or sixty microseconds
there. Prints the errors in sample and held out (every second size, predicted with constants from the
others), compared with a model of one latency and one bandwidth per link, and writes
collectives_fitted.yaml.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from fitting import DATA, Column, descend, errors, read, rounded, summary, tables_and_write

LEAST, LARGE = 2**18, 2**20
NAMES = ("base_us", "step_us", "pipe_ns", "share", "fewer")
START = np.array([25.0, 2.0, 6.0, 0.8, 0.15])
BOUNDS = np.array([[5.0, 80.0], [0.05, 15.0], [0.1, 30.0], [0.2, 1.2], [0.001, 0.6]])
# bandwidth of the vendor, bytes/s, and the latency that the catalogue gives such links, seconds
LINKS = {
    "NVLink 2": (150e9, 7e-6),
    "NVLink 3": (300e9, 5e-6),
    "NVLink 4": (450e9, 5e-6),
    "NVLink 5": (900e9, 5e-6),
    "PCIe 4": (31e9, 10e-6),
    "PCIe 5": (63e9, 10e-6),
    "InfiniBand": (50e9, 15e-6),
    "EFA": (50e9, 25e-6),
}


@dataclass(frozen=True)
class Row:
    """One measured collective. `ring`: with reductions in the switch turned off."""

    system: str
    kind: str
    ranks: int
    local: int
    size: float
    seconds: float
    ring: bool = False


def load(tables: Path) -> list[Row]:
    """All rows of both tables with at least LEAST bytes."""
    rows: list[Row] = []
    for r in read(tables, "comm_collectives_measured"):
        if r["time_us_out_of_place"] and "all-reduce" in r["notes"]:
            ranks, off = int(r["n_gpus"]), "NVLS off" in r["notes"]
            seconds = float(r["time_us_out_of_place"]) * 1e-6
            rows.append(Row(r["gpu"], "all-reduce", ranks, min(ranks, 8), float(r["bytes"]), seconds, off))
    for r in read(tables, "comm_vidur_measured"):
        rows.append(
            Row(
                r["system"],
                r["collective"].replace("_", "-"),
                int(r["ranks"]),
                int(r["devices_per_node"]),
                float(r["bytes"]),
                float(r["time_ms"]) * 1e-3,
            )
        )
    return [row for row in rows if row.size >= LEAST]


def sums(rows: list[Row], systems: tuple[str, ...], ranks: range, ring: bool | None = None) -> list[Row]:
    """All-reduces inside a node of systems whose names begin with the prefixes."""
    return [
        row
        for row in rows
        if row.kind == "all-reduce"
        and row.system.startswith(systems)
        and row.ranks in ranks
        and row.local == row.ranks
        and ring in (None, row.ring)
    ]


def ring_seconds(at: Column, ranks: Column, size: Column, bandwidth: float) -> Column:
    """The formula of `stretto.planner.time.collectives` for an all-reduce inside a node."""
    base, step, pipe, share, fewer = at
    passed = 2 * (ranks - 1) / ranks * size / ((share - fewer / ranks) * bandwidth)
    return (base + 2 * (ranks - 1) * step) * 1e-6 + pipe * 1e-9 * np.sqrt(size) + passed


def columns(rows: list[Row]) -> tuple[Column, Column, Column]:
    """Ranks, bytes, seconds."""
    return (
        np.array([float(r.ranks) for r in rows]),
        np.array([r.size for r in rows]),
        np.array([r.seconds for r in rows]),
    )


def fitted(
    name: str,
    rows: list[Row],
    predict: Callable[[Column, Column, Column], Column],
    start: Column,
    bounds: Column,
) -> Column:
    """The constants for these rows; prints the errors in sample and held out (every second size)."""

    def by(chosen: list[Row]) -> Column:
        ranks, size, seconds = columns(chosen)
        return descend(lambda at: float(errors(predict(at, ranks, size), seconds).mean()), start, bounds)[0]

    def wrong(at: Column, chosen: list[Row]) -> Column:
        ranks, size, seconds = columns(chosen)
        return errors(predict(at, ranks, size), seconds)

    best = by(rows)
    sizes = sorted({r.size for r in rows})
    every_second = [r for r in rows if sizes.index(r.size) % 2]
    print(summary(f"{name}, fitted", wrong(best, rows), 70))
    if every_second:
        at = by([r for r in rows if r not in every_second])
        print(summary(f"{name}, every second size by the others", wrong(at, every_second), 70))
        large = [r for r in every_second if r.size >= LARGE]
        print(summary(f"{name}, every second size by the others, from 1 MiB", wrong(at, large), 70))
    odd = [r for r in rows if r.ranks in (3, 5, 6, 7)]
    if odd and len(odd) < len(rows) and len(start) < 10:
        at = by([r for r in rows if r not in odd])
        print(summary(f"{name}, 3, 5, 6 and 7 ranks by 2, 4 and 8", wrong(at, odd), 70))
    return best


def rings(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Constants of rings inside nodes."""
    chosen = {
        "NVLink 3": sums(rows, ("A100-80GB", "a100_dgx"), range(2, 9))
        + sums(rows, ("a100_pair",), range(2, 3)),
        "NVLink 4": sums(rows, ("h100_dgx",), range(2, 5)) + sums(rows, ("H200",), range(4, 9), ring=True),
    }
    entries: dict[str, dict[str, float]] = {}
    bounds = BOUNDS.copy()
    for kind, these in chosen.items():
        bandwidth, latency = LINKS[kind]

        def predict(at: Column, n: Column, size: Column, bandwidth: float = bandwidth) -> Column:
            return ring_seconds(at, n, size, bandwidth)

        def plain(at: Column, n: Column, size: Column, bandwidth: float = bandwidth) -> Column:
            return ring_seconds(np.array([at[0], 0, 0, at[1], 0]), n, size, bandwidth)

        best = fitted(f"{kind}: all-reduce", these, predict, START, bounds)
        fitted(f"{kind}: one latency, one bandwidth", these, plain, START[[0, 3]], BOUNDS[[0, 3]])
        entries[kind] = _entry(best, latency)
        # two numbers of ranks and few sizes cannot tell steps from the rest: as many microseconds as before
        bounds[1] = best[1], best[1]
    # what is known of the next generation's rings is how large ones run
    large = sums(rows, ("B200",), range(4, 9), ring=True)
    ranks, size, seconds = columns(large)
    passed = 2 * (ranks - 1) / ranks * size / seconds
    entries["NVLink 5"] = {
        **entries["NVLink 4"],
        "share": float(f"{np.median(passed) / 900e9:.4g}"),
        "fewer": 0.0,
    }
    return entries


def _entry(at: Column, latency: float) -> dict[str, float]:
    base, step, pipe, share, fewer = at
    return rounded(
        {"base_us": base, "step": step * 1e-6 / latency, "pipe_ns": pipe, "share": share, "fewer": fewer}
    )


def cube_mesh(rows: list[Row]) -> dict[str, Any]:
    """The eight V100 of a DGX-1, whose links favour rings of some numbers of ranks."""
    these = sums(rows, ("V100",), range(2, 9))
    bandwidth, latency = LINKS["NVLink 2"]

    def predict(at: Column, n: Column, size: Column) -> Column:
        passed = 2 * (n - 1) / n * size / (at[n.astype(int) + 1] * bandwidth)
        return (at[0] + 2 * (n - 1) * at[1]) * 1e-6 + at[2] * 1e-9 * np.sqrt(size) + passed

    start = np.array([25.0, 3.0, 0.5, 0.15, 0.3, 0.57, 0.25, 0.31, 0.58, 0.9])
    bounds = np.array([[5, 80], [0.05, 15], [0.001, 30], *[[0.05, 1.0]] * 7], float)
    best = fitted("NVLink 2 (DGX-1): all-reduce", these, predict, start, bounds)
    entry = _entry(np.array([*best[:3], 0.85, 0.1]), latency)
    shares = {ranks: float(f"{best[ranks + 1]:.4g}") for ranks in range(2, 9)}
    return {**entry, "wired": 8, "by_ranks": shares}


def in_switch(rows: list[Row], kind: str, system: str, least: int) -> dict[str, float]:
    """All-reduce in the switch, from a minimum number of ranks on."""
    bandwidth = LINKS[kind][0]

    def predict(at: Column, n: Column, size: Column) -> Column:
        return at[0] * 1e-6 + at[1] * 1e-9 * np.sqrt(size) + size / (at[2] * bandwidth)

    these = sums(rows, (system,), range(least, 9), ring=False)
    bounds = np.array([[5.0, 80.0], [0.1, 30.0], [0.2, 1.2]])
    best = fitted(f"{kind}: in the switch", these, predict, np.array([35.0, 8.0, 0.6]), bounds)
    return {"ranks": least, **rounded({"base_us": best[0], "pipe_ns": best[1], "share": best[2]})}


def host_bus(rows: list[Row]) -> dict[str, float]:
    """Four cards on PCIe with peer-to-peer access, bridged in pairs."""
    entries: list[dict[str, float]] = []
    for kind, system in (("PCIe 4", "a100_pairwise"), ("PCIe 5", "h100_pairwise")):
        bandwidth, latency = LINKS[kind]

        def predict(at: Column, n: Column, size: Column, bandwidth: float = bandwidth) -> Column:
            return ring_seconds(np.array([at[0], 2.0, at[1], at[2], 0]), n, size, bandwidth)

        these = sums(rows, (system,), range(4, 5))
        at = fitted(f"{kind}: all-reduce", these, predict, START[[0, 2, 3]], BOUNDS[[0, 2, 3]])
        entries.append(_entry(np.array([at[0], 2.0, at[1], at[2], 0.0]), latency))
    return rounded({name: float(np.mean([entry[name] for entry in entries])) for name in entries[0]})


def sends(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Messages between two ranks: seconds beyond the link's latency, and the share of its bandwidth."""
    entries: dict[str, dict[str, float]] = {}
    for kind, system, local in (
        ("NVLink 3", "a100_dgx", 2),
        ("NVLink 4", "h100_dgx", 2),
        ("InfiniBand", "h100_dgx", 1),
    ):
        bandwidth, latency = LINKS[kind]

        def predict(
            at: Column, n: Column, size: Column, bandwidth: float = bandwidth, latency: float = latency
        ) -> Column:
            return latency + at[0] * 1e-6 + size / (at[1] * bandwidth)

        these = [r for r in rows if r.kind == "send-recv" and r.system == system and r.local == local]
        bounds = np.array([[0.5, 30.0], [0.3, 1.0]])
        best = fitted(f"{kind}: send", these, predict, np.array([3.0, 0.8]), bounds)
        entries[kind] = rounded({"send_us": best[0], "send_share": best[1]})
    return entries


def network(rows: list[Row]) -> dict[str, float]:
    """Four nodes of eight B200: limited by the network, which all cards use simultaneously."""
    bandwidth, latency = LINKS["EFA"]
    these = [r for r in rows if r.system.startswith("B200") and r.ranks == 32 and r.size >= 2**20]

    def predict(at: Column, n: Column, size: Column) -> Column:
        # between four nodes a tree is two deep; inside nodes there are seven steps
        fixed = 1e-6 * (30.0 + 2 * 2 * at[0] + 2 * 7 * 1.5) + at[1] * 1e-9 * np.sqrt(size)
        return fixed + 2 * (n - 1) / n * size / (8 * at[2] * bandwidth)

    bounds = np.array([[5.0, 150.0], [0.1, 60.0], [0.5, 1.0]])
    best = fitted("EFA: all-reduce of four nodes", these, predict, np.array([50.0, 20.0, 0.93]), bounds)
    return rounded({"step": best[0] * 1e-6 / latency, "pipe_ns": best[1], "share": best[2], "fewer": 0.0})


HEAD = """\
# Written by benchmarks/fit_collectives.py from comm_collectives_measured.csv (VIA-Research/vTrain trace and
# stas00/ml-engineering network) and comm_vidur_measured.csv (microsoft/vidur data/profiling/network), rows of
# 256 KiB and more. NVLink 2: as a DGX-1 is wired; its share elsewhere is that of other NVLinks. NVLink 5:
# rings of 8 GiB alone, the rest as NVLink 4. PCIe: four cards with peer to peer.
"""


def main() -> None:
    tables, write = tables_and_write(__doc__)
    links = fit(tables)
    if write:
        text = HEAD + yaml.safe_dump({"links": links}, sort_keys=False, default_flow_style=None, width=110)
        (DATA / "collectives_fitted.yaml").write_text(text, encoding="utf-8")


def fit(tables: Path) -> dict[str, dict[str, Any]]:
    """All entries by kind of link."""
    rows = load(tables)
    links: dict[str, dict[str, Any]] = {"NVLink 2": cube_mesh(rows), **rings(rows), "PCIe": host_bus(rows)}
    links["NVLink 4"]["switch"] = in_switch(rows, "NVLink 4", "H200", 5)
    links["NVLink 5"]["switch"] = in_switch(rows, "NVLink 5", "B200", 6)
    links["EFA"] = network(rows)
    for kind, entry in sends(rows).items():
        links.setdefault(kind, {}).update(entry)
    links["NVLink 5"].update({name: links["NVLink 4"][name] for name in ("send_us", "send_share")})
    return links


if __name__ == "__main__":
    main()
