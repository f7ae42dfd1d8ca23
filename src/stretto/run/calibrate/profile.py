"""Measure this machine with local ranks, and describe it as a cluster that `find_cluster` reads."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from math import hypot, log, log1p
from statistics import fmean, median
from types import TracebackType
from typing import Any, Self, cast

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
from stretto.run.calibrate.host import TYPICAL, host_of, small_steps
from stretto.run.calibrate.kernels import attention, merged, passes, products
from stretto.run.calibrate.stopwatch import Stopwatch
from stretto.run.launch.local import RANKS_PER_CORE, check_ranks, run_ranks
from stretto.run.watch.machine import BUSY, OtherProcesses, core_count

_WIDTH = 78


class ProgressLine:
    """Progress on stderr, in a `with`; only one rank prints it.

    Args:
        end: when measuring ends, by the monotonic clock.
    """

    def __init__(self, quiet: bool, end: float) -> None:
        self._quiet, self._terminal = quiet, sys.stderr.isatty()
        self._part, self._end = "", end

    def show(self, part: str, measurement: str) -> None:
        """Show the part and the measurement that begin now."""
        if self._quiet:
            return
        if self._terminal:
            remaining = max(0.0, self._end - time.monotonic())
            text = f"at most {remaining:.0f} s left  {part}: {measurement}"
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

SECONDS = 180.0  # for a calibration, start of the ranks included
# parts in their order, with their shares of the time: what a part does not need, the next ones have; and the
# source of uncertainty (`planner.estimate.SOURCES`) that they belong to
PARTS = {
    "products": (0.3, "kernels"),
    "passes": (0.15, "kernels"),
    "collectives": (0.3, "network"),
    "attention": (0.1, "kernels"),
    "layers": (0.15, "host"),
}
_NEEDED = ("products", "passes")  # without any of these there is no profile
_BUDGET, _COLLECTIVE_BUDGET = 0.08, 0.25  # seconds for one row
_MEASURING = 0.4  # share of the time that is for measuring, however long the ranks take to start
_REPEATED = 3  # measurements of a part that are taken again at its end
# Half width that holds nine of ten measurements, over the mean difference between two of them (normal
# distribution: 1.645 / 1.128); and of a part that was not repeated.
_NINE_OF_TEN, _UNREPEATED = 1.46, 0.3
_ABSENT = 0.5  # half width if a part is missing; in proportion if some of it is
_TYPICAL_HOST = 0.25  # half width of kernels if the host's time is a typical one
_MOST_BUSY = 0.98  # share of the cores
_COARSE = 0.15  # half width for fewer shapes and sizes: the quickstart's step changed by a tenth


@dataclass(kw_only=True)
class Measured:
    """What one rank measured.

    Attributes:
        matmul: rows by precision.
        passes: rows by kind.
        collectives: rows by kind.
        steps: rows of small models; empty on accelerators.
        spread: by part, the half width within which a repeated measurement lies.
        missing: by part, the share of its measurements for which there was no time.
        kind: of the device.
        driver: the vendor's name of the accelerator; None on a CPU.
        backend: the communication library.
    """

    launch: float = 0.0
    matmul: dict[Any, Rows] = field(default_factory=dict[Any, Rows])
    passes: dict[str, Rows] = field(default_factory=dict[str, Rows])
    attention: Rows = field(default_factory=Rows)
    collectives: dict[str, Rows] = field(default_factory=dict[str, Rows])
    steps: Rows = field(default_factory=Rows)
    spread: dict[str, float] = field(default_factory=dict[str, float])
    missing: dict[str, float] = field(default_factory=dict[str, float])
    memory: float = 0.0
    kind: str = HOST
    driver: str | None = None
    backend: str = "gloo"


def measure_rank(kind: str, quick: bool, quiet: bool, end: float, seconds: float) -> Measured:
    """Measure as one of the ranks that RANK and WORLD_SIZE describe. Collective over all ranks.

    Args:
        end: when to end, by the machine's monotonic clock.
        seconds: of measuring at any rate, if the ranks started late.
    """
    torch.set_num_threads(1)
    device = rank_device(kind)
    dist.init_process_group(backend_for(kind))
    try:
        with ProgressLine(quiet or dist.get_rank() > 0, end) as bar:
            measured = Measured(kind=device.type, backend=dist.get_backend())
            cpu, less = device.type == "cpu", 4 if quick else 1
            watch = Stopwatch(device, _BUDGET / less)
            timer = CollectiveTimer(device, core_count() if cpu else None, _COLLECTIVE_BUDGET / less)
            parts: dict[str, tuple[Any, Any]] = {
                "products": (products(watch, device, quick), measured.matmul),
                "passes": (passes(watch, device, quick), measured.passes),
                "collectives": (
                    collective_times(timer, quick) if dist.get_world_size() > 1 else (),
                    measured.collectives,
                ),
                "attention": (attention(watch, device, quick), measured.attention),
                "layers": (small_steps(watch, quick) if cpu else (), measured.steps),
            }
            start, until = time.monotonic(), 0.0
            end = max(end, start + seconds)
            for name, (share, _) in PARTS.items():
                until += share
                measurements, into = parts[name]

                def late(until: float = start + until * (end - start)) -> bool:
                    """Whether a rank has no time left; the same on all ranks."""
                    passed = torch.tensor([float(time.monotonic() > until)], device=device)
                    dist.all_reduce(passed)
                    return bool(passed)

                measured.spread[name], measured.missing[name] = take_part(
                    list(measurements), into, late, partial(bar.show, name), needed=name in _NEEDED
                )
            x = torch.ones(1, device=device)
            measured.launch = watch.seconds(lambda: x.add_(1.0))
            if cpu:
                measured.memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
            else:
                measured.memory, measured.driver = total_memory(device), model_name(device)
            return measured
    finally:
        dist.destroy_process_group()


def take_part(
    measurements: Sequence[tuple[str, Callable[[Any], None]]],
    into: Any,
    late: Callable[[], bool],
    show: Callable[[str], None],
    needed: bool = False,
) -> tuple[float, float]:
    """Take measurements until it is late, every fourth first, so that those that are taken are of all sizes;
    then take a few again.

    Args:
        into: a list of rows, or a dictionary of lists.
        late: True from when no further measurement may begin.
        needed: one is taken in any case.

    Returns:
        The half width within which nine of ten repetitions lie, as a share; and the share of the measurements
        that is missing.
    """
    taken = list[tuple[Callable[[Any], None], float]]()
    for title, measure in (*measurements[::4], *measurements[2::4], *measurements[1::2]):
        if late() and (taken or not needed):
            break
        show(title)
        rows: Any = type(into)()
        measure(rows)
        taken.append((measure, _total(rows)))
        if isinstance(into, dict):
            for kind, table in rows.items():
                cast("dict[Any, Rows]", into).setdefault(kind, []).extend(table)
        else:
            into.extend(rows)
    differences = list[float]()
    for measure, before in taken[:: max(1, len(taken) // _REPEATED)]:
        if late():
            break
        show("again")
        rows = type(into)()
        measure(rows)
        differences.append(abs(log(_total(rows) / before)))
    spread = _NINE_OF_TEN * fmean(differences) if differences else _UNREPEATED
    missing = 1.0 - len(taken) / len(measurements) if measurements else 0.0
    return (spread if measurements else 0.0), missing


def _total(rows: Any) -> float:
    """Return the seconds of all rows of a measurement."""
    tables: Any = rows.values() if isinstance(rows, dict) else [rows]
    return sum(row[-1] for table in tables for row in table)


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
        steps=_median([rank.steps for rank in ranks]),
        spread={part: median(rank.spread[part] for rank in ranks) for part in first.spread},
        missing=first.missing,
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
    ranks: int | None = None,
    quick: bool = False,
    quiet: bool = False,
    device: str = AUTO,
    seconds: float = SECONDS,
) -> Cluster:
    """Measure this machine: its accelerators with their communication library, or its CPU with gloo and one
    thread a rank.

    Args:
        ranks: local ranks; None: one per accelerator, or four on a CPU.
        quick: fewer shapes and sizes, a few seconds in all.
        quiet: show no progress.
        device: its kind; `auto`: the accelerator that torch sees, else the CPU.
        seconds: after which no further measurement begins; what is missing makes intervals wider.

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
    end = time.monotonic() + seconds
    with OtherProcesses() as others:
        measured = merge_ranks(
            run_ranks(count, partial(measure_rank, kind, quick, quiet, end=end, seconds=_MEASURING * seconds))
        )
    return profile(measured, count, quick=quick, others=others.share or 0.0)


def profile(measured: Measured, ranks: int, *, quick: bool = False, others: float = 0.0) -> Cluster:
    """This machine as a cluster, with all measured rows.

    Args:
        quick: of fewer shapes and sizes.
        others: share of the cores that other processes used meanwhile.
    """
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
    if measured.attention:
        kernels["attention"] = measured.attention
    copies = measured.passes.get("copy") or [row for rows in measured.passes.values() for row in rows]
    bandwidth = max(size / seconds for size, seconds in copies)
    device = Device(
        name=catalogued.name if catalogued else f"{measured.kind}-{machine_name()}",
        tflops=catalogued.tflops if catalogued else peaks,
        memory=measured.memory if measured.driver else measured.memory / ranks,
        bandwidth=catalogued.bandwidth if catalogued else bandwidth,
        sustained=peaks,
        kernels=kernels,
        notes=measured.driver or f"one core; memory is the machine's by {ranks} ranks",
    )
    cpu = measured.driver is None
    measured_host = host_of(measured.steps, device) if cpu else None
    if cpu:
        host = measured_host or TYPICAL
        kernels |= {"layer": max(host.layer, 1e-9), "action": max(host.action, 1e-9)}
    left_out = [
        f"{missing:.0%} of {part}" if missing < 1 else part
        for part, missing in measured.missing.items()
        if missing
    ]
    notes = f"measured by `stretto calibrate` on {date.today()} with {ranks} ranks"
    notes += f"; no time for {', '.join(left_out)}" if left_out else ""
    notes += f"; other processes used {others:.0%} of the cores" if others >= BUSY else ""
    return Cluster(
        name=machine_name(),
        device=device,
        node=max(ranks, RANKS_PER_CORE * (os.cpu_count() or 1)) if cpu else ranks,
        inner=_link(measured, find_cluster("cpu") if cpu else None),
        outer=NetworkLink(1e9, 1e-4, "none"),
        nodes=1,
        computing=core_count() if cpu else None,
        tables={kind: rows for kind, rows in measured.collectives.items() if rows},
        spread=spread_of(measured, quick, others, host=measured_host is not None or not cpu),
        notes=notes,
    )


def spread_of(measured: Measured, quick: bool, others: float, host: bool) -> dict[str, float]:
    """Return the half width that the measurements of each source of uncertainty add, for `Cluster.spread`.

    Other processes lengthen the time of a collective, most of which is waiting for a core, at most as they
    take cores from it; and CPU time, as they use caches and the other halves of cores, by less.

    Args:
        host: the host's own time was measured. A step of ranks that share cores has it among the kernels.
    """
    load = {"kernels": log1p(others), "host": log1p(others), "network": -log1p(-min(others, _MOST_BUSY))}
    widths = dict[str, float]()
    for source, busy in load.items():
        parts = [part for part, (_, its_source) in PARTS.items() if its_source == source]
        varied = max(measured.spread.get(part, 0.0) for part in parts)
        absent = max(_ABSENT * measured.missing.get(part, 0.0) for part in parts)
        if source == "kernels" and not host:
            absent = max(absent, _TYPICAL_HOST)
        widths[source] = round(hypot(varied, absent, busy, _COARSE if quick else 0.0), 4)
    return {source: width for source, width in widths.items() if width > 0}


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
