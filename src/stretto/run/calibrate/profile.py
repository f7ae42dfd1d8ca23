"""From what ranks measured to a cluster of this machine, as `find_cluster` reads it from a file."""

from __future__ import annotations

import os
from datetime import date
from typing import Any

from stretto.errors import StrettoError
from stretto.planner.machines.catalogue import find_cluster, known_by_driver, machine_name
from stretto.planner.machines.cluster import Cluster, Link
from stretto.planner.machines.device import Device, Precision
from stretto.run.calibrate.host import host_of
from stretto.run.calibrate.measure import Measured, measure_rank, together
from stretto.run.launch.local import RANKS_PER_CORE, check_ranks, run_ranks

USUAL_RANKS = 4  # on a CPU


def calibrate(ranks: int | None = None, quick: bool = False, quiet: bool = False) -> Cluster:
    """Measure this machine: its GPUs with NCCL, or its CPU with gloo and one thread a rank.

    Args:
        ranks: local ranks; None: one a GPU, or four on a CPU.
        quick: fewer shapes and sizes, a few seconds in all.
        quiet: show no progress.

    Raises:
        StrettoError: more ranks than there are GPUs, or than the cores can bear.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = ranks or gpus or USUAL_RANKS
    if gpus and count > gpus:
        raise StrettoError(f"{count} ranks, but there are {gpus} GPUs here", hint=f"--ranks {gpus}")
    check_ranks(count)
    found = together(run_ranks(count, measure_rank, "cuda" if gpus else "cpu", quick, quiet))
    return profile(found, count)


def profile(found: Measured, ranks: int) -> Cluster:
    """The cluster that this machine is, with all that was measured."""
    device = _device(found, ranks)
    cpu = found.driver is None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Cluster(
        name=machine_name(),
        device=device,
        node=max(ranks, RANKS_PER_CORE * (os.cpu_count() or 1)) if cpu else ranks,
        inner=_link(found, find_cluster("cpu") if cpu else None),
        outer=Link(1e9, 1e-4, "none"),
        nodes=1,
        computing=cores if cpu else None,
        tables=found.talks,
        notes=f"measured by `stretto calibrate` on {date.today()} with {ranks} ranks",
    )


def _device(found: Measured, ranks: int) -> Device:
    """A device of this machine; what cannot be measured comes from the catalogue."""
    known = known_by_driver(found.driver) if found.driver else None
    peaks: dict[Precision, float] = {p: _best(rows) for p, rows in found.matmul.items()}
    kernels: dict[str, Any] = {"launch": found.launch, "matmul": found.matmul, "passes": found.passes}
    kernels["attention"] = found.attention
    bandwidth = max(size / seconds for size, seconds in found.passes["copy"])
    device = Device(
        name=known.name if known else f"{'gpu' if found.driver else 'cpu'}-{machine_name()}",
        tflops=known.tflops if known else peaks,
        memory=found.memory if found.driver else found.memory / ranks,
        bandwidth=known.bandwidth if known else bandwidth,
        sustained=peaks,
        kernels=kernels,
        notes=found.driver or f"one core; memory is the machine's by {ranks} ranks",
    )
    if found.steps:
        host = host_of(found.steps, device)
        kernels |= {"layer": max(host.layer, 1e-9), "action": max(host.action, 1e-9)}
    return device


def _best(rows: list[list[float]]) -> float:
    """TFLOP/s of the fastest product."""
    return max(2e-12 * m * n * k * batch / seconds for m, n, k, batch, seconds in rows)


def _link(found: Measured, usual: Cluster | None) -> Link:
    """Latency and bandwidth of a message, from the smallest and the largest that were sent."""
    kind = "gloo" if found.driver is None else "NCCL"
    rows = sorted(found.talks.get("send", []))
    rows = [row for row in rows if row[0] == rows[0][0]]  # of the smallest groups
    if len(rows) < 2:
        return usual.inner if usual else Link(20e9, 1e-5, kind)
    (*_, small, first), (*_, large, last) = rows[0], rows[-1]
    bandwidth = (large - small) / max(last - first, 1e-9)
    return Link(bandwidth, max(0.0, first - small / bandwidth), kind)
