"""Measure this machine with local ranks, and describe it as a cluster that `find_cluster` reads."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from statistics import median
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from stretto.engine.device import (
    backend_for,
    device_count,
    device_kind,
    model_name,
    rank_device,
    total_memory,
)
from stretto.errors import StrettoError
from stretto.job.devices import AUTO, HOST
from stretto.planner.machines.catalogue import find_cluster, known_by_driver, machine_name
from stretto.planner.machines.cluster import Cluster, NetworkLink
from stretto.planner.machines.device import Device, Precision
from stretto.run.calibrate.collectives import CollectiveTimer, collective_times
from stretto.run.calibrate.host import host_of, small_steps
from stretto.run.calibrate.kernels import attention, merged, passes, products
from stretto.run.calibrate.stopwatch import Stopwatch
from stretto.run.launch.local import RANKS_PER_CORE, check_ranks, run_ranks

_WIDTH = 78


class ProgressLine:
    """Progress on stderr, in a `with`; only one rank prints it."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._terminal = quiet, sys.stderr.isatty()
        self._part, self._begun = "", time.monotonic()

    def show(self, part: str, measurement: str) -> None:
        """Show the part and the measurement that begin now."""
        if self._quiet:
            return
        if self._terminal:
            text = f"{time.monotonic() - self._begun:4.0f} s  {part}: {measurement}"
            print(f"\r{text[:_WIDTH]:{_WIDTH}}", end="", file=sys.stderr, flush=True)
        elif part != self._part:
            print(f"measuring {part}", file=sys.stderr, flush=True)
        self._part = part

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal and not self._quiet:
            print(f"\r{'':{_WIDTH}}\r", end="", file=sys.stderr, flush=True)


Rows = list[list[float]]

# seconds after which a part starts no further measurement, however slow the machine
LIMITS = {"products": 45.0, "passes": 25.0, "attention": 15.0, "collectives": 50.0}
_BUDGET, _COLLECTIVE_BUDGET = 0.08, 0.25  # seconds for one row


@dataclass(kw_only=True)
class Measured:
    """What one rank measured.

    Attributes:
        matmul: rows by precision.
        passes: rows by kind.
        collectives: rows by kind.
        steps: seconds of small models' steps, by blocks and microbatches; empty on accelerators.
        kind: of the device.
        driver: the vendor's name of the accelerator; None on a CPU.
        backend: the communication library.
    """

    launch: float = 0.0
    matmul: dict[Any, Rows] = field(default_factory=dict[Any, Rows])
    passes: dict[str, Rows] = field(default_factory=dict[str, Rows])
    attention: Rows = field(default_factory=Rows)
    collectives: dict[str, Rows] = field(default_factory=dict[str, Rows])
    steps: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    memory: float = 0.0
    kind: str = HOST
    driver: str | None = None
    backend: str = "gloo"


def measure_rank(kind: str, quick: bool, quiet: bool) -> Measured:
    """Measure as one of the ranks that RANK and WORLD_SIZE describe. Collective over all ranks."""
    torch.set_num_threads(1)
    device = rank_device(kind)
    dist.init_process_group(backend_for(kind))
    try:
        with ProgressLine(quiet or dist.get_rank() > 0) as bar:
            measured = Measured(kind=device.type, backend=dist.get_backend())
            watch = Stopwatch(device, _BUDGET / (4 if quick else 1))
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            timer = CollectiveTimer(
                device, cores if device.type == "cpu" else None, _COLLECTIVE_BUDGET / (4 if quick else 1)
            )
            _part("products", products(watch, device, quick), measured.matmul, device, bar)
            _part("passes", passes(watch, device, quick), measured.passes, device, bar)
            _part("attention", attention(watch, device, quick), measured.attention, device, bar)
            x = torch.ones(1, device=device)
            measured.launch = watch.seconds(lambda: x.add_(1.0))
            if dist.get_world_size() > 1:
                _part("collectives", collective_times(timer, quick), measured.collectives, device, bar)
            if device.type == "cpu":
                bar.show("layers", "small models")
                measured.steps = small_steps(watch)
                measured.memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
            else:
                measured.memory, measured.driver = total_memory(device), model_name(device)
            return measured
    finally:
        dist.destroy_process_group()


def _part(
    name: str,
    measurements: Iterator[tuple[str, Callable[[Any], None]]],
    into: Any,
    device: torch.device,
    bar: ProgressLine,
) -> None:
    """All ranks take the same measurements in step, until they are done or the part's time is over."""
    begun = time.monotonic()
    for title, measure in measurements:
        late = torch.tensor([float(time.monotonic() - begun > LIMITS[name])], device=device)
        dist.all_reduce(late)
        if late:
            return
        bar.show(name, title)
        measure(into)


def merge_ranks(ranks: list[Measured]) -> Measured:
    """The measurements of all ranks as one: the median of each row, and the mean of equal products."""
    first = ranks[0]
    return Measured(
        launch=median(rank.launch for rank in ranks),
        matmul={p: merged(_median([rank.matmul[p] for rank in ranks])) for p in first.matmul},
        passes=_medians([rank.passes for rank in ranks]),
        attention=_median([rank.attention for rank in ranks]),
        collectives={
            kind: sorted(rows) for kind, rows in _medians([rank.collectives for rank in ranks]).items()
        },
        steps={key: median(rank.steps[key] for rank in ranks) for key in first.steps},
        memory=first.memory,
        kind=first.kind,
        driver=first.driver,
        backend=first.backend,
    )


def _medians(ranks: Sequence[Mapping[str, Rows]]) -> dict[str, Rows]:
    return {kind: _median([rank[kind] for rank in ranks]) for kind in ranks[0]}


def _median(ranks: list[Rows]) -> Rows:
    """Rows that have the same sizes on all ranks, with the median of their seconds."""
    return [[*row[:-1], median(rank[index][-1] for rank in ranks)] for index, row in enumerate(ranks[0])]


DEFAULT_RANKS = 4  # on a CPU


def calibrate(
    ranks: int | None = None, quick: bool = False, quiet: bool = False, device: str = AUTO
) -> Cluster:
    """Measure this machine: its accelerators with their communication library, or its CPU with gloo and one
    thread a rank.

    Args:
        ranks: local ranks; None: one per accelerator, or four on a CPU.
        quick: fewer shapes and sizes, a few seconds in all.
        quiet: show no progress.
        device: its kind; `auto`: the accelerator that torch sees, else the CPU.

    Raises:
        StrettoError: no such device, more ranks than accelerators, or too many for the cores.
    """
    kind = device_kind(device)
    backend_for(kind)
    devices = 0 if kind == HOST else device_count(kind)
    count = ranks or devices or DEFAULT_RANKS
    if devices and count > devices:
        raise StrettoError(
            f"{count} ranks, but there are {devices} devices of kind {kind} here", hint=f"--ranks {devices}"
        )
    check_ranks(count)
    measured = merge_ranks(run_ranks(count, measure_rank, kind, quick, quiet))
    return profile(measured, count)


def profile(measured: Measured, ranks: int) -> Cluster:
    """This machine as a cluster, with all measured rows."""
    catalogued = known_by_driver(measured.driver) if measured.driver else None
    peaks: dict[Precision, float] = {
        p: max(2e-12 * m * n * k * batch / seconds for m, n, k, batch, seconds in rows)
        for p, rows in measured.matmul.items()
    }
    kernels: dict[str, Any] = {
        "launch": measured.launch,
        "matmul": measured.matmul,
        "passes": measured.passes,
    }
    kernels["attention"] = measured.attention
    bandwidth = max(size / seconds for size, seconds in measured.passes["copy"])
    device = Device(
        name=catalogued.name if catalogued else f"{measured.kind}-{machine_name()}",
        tflops=catalogued.tflops if catalogued else peaks,
        memory=measured.memory if measured.driver else measured.memory / ranks,
        bandwidth=catalogued.bandwidth if catalogued else bandwidth,
        sustained=peaks,
        kernels=kernels,
        notes=measured.driver or f"one core; memory is the machine's by {ranks} ranks",
    )
    if measured.steps:
        host = host_of(measured.steps, device)
        kernels |= {"layer": max(host.layer, 1e-9), "action": max(host.action, 1e-9)}
    cpu = measured.driver is None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Cluster(
        name=machine_name(),
        device=device,
        node=max(ranks, RANKS_PER_CORE * (os.cpu_count() or 1)) if cpu else ranks,
        inner=_link(measured, find_cluster("cpu") if cpu else None),
        outer=NetworkLink(1e9, 1e-4, "none"),
        nodes=1,
        computing=cores if cpu else None,
        tables=measured.collectives,
        notes=f"measured by `stretto calibrate` on {date.today()} with {ranks} ranks",
    )


def _link(measured: Measured, reference: Cluster | None) -> NetworkLink:
    """Latency and bandwidth of messages, from the smallest and the largest measured."""
    kind = measured.backend
    rows = sorted(measured.collectives.get("send", []))
    rows = [row for row in rows if row[0] == rows[0][0]]  # of the smallest groups
    if len(rows) < 2:
        return reference.inner if reference else NetworkLink(20e9, 1e-5, kind)
    (*_, small, first), (*_, large, last) = rows[0], rows[-1]
    bandwidth = (large - small) / max(last - first, 1e-9)
    return NetworkLink(bandwidth, max(0.0, first - small / bandwidth), kind)
