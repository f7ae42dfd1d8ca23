"""Race step functions against one another on the same ranks, in turn, and compare them round by round.

A shared machine's speed can drift by half within seconds, so only ratios of neighbouring steps are
reported: in every round each contestant runs once, in a random order, and the ratio to the reference is
taken within the round.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import random
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from stretto.run.launch.local import run_ranks

Step = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """One contestant over all rounds."""

    name: str
    median_ms: float
    best_ms: float
    cpu_ms: float  # summed over ranks, median
    speedup: float  # reference time over its own, median over rounds: above 1 is faster than the reference
    low: float  # quartiles of that ratio
    high: float


def barrier() -> None:
    """Meet the other ranks, if any."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def race(
    contestants: Mapping[str, Step],
    reference: str,
    rounds: int = 15,
    warmup: int = 3,
    inner: int = 1,
) -> list[Timing]:
    """Time every contestant's step on all ranks; a step may do its work on some of them only.

    Args:
        inner: steps per measurement.
    """
    return compare(laps(contestants, rounds, warmup, inner), reference)


@dataclass(frozen=True)
class Laps:
    """Milliseconds of a step by contestant and round: wall time, and CPU time summed over ranks."""

    walls: dict[str, list[float]]
    cpus: dict[str, list[float]]


def laps(contestants: Mapping[str, Step], rounds: int, warmup: int = 3, inner: int = 1) -> Laps:
    """The times that `race` compares, for comparison with several references."""
    walls: dict[str, list[float]] = {name: [] for name in contestants}
    cpus: dict[str, list[float]] = {name: [] for name in contestants}
    draw = random.Random(0)
    for at in range(warmup + rounds):
        names = list(contestants)
        draw.shuffle(names)
        for name in names:
            step = contestants[name]
            barrier()
            cpu, start = time.process_time(), time.perf_counter()
            for _ in range(inner):
                step()
            barrier()
            wall, spent = time.perf_counter() - start, time.process_time() - cpu
            if at >= warmup:
                walls[name].append(wall / inner * 1e3)
                cpus[name].append(_total(spent) / inner * 1e3)
    return Laps(walls, cpus)


def compare(laps: Laps, reference: str) -> list[Timing]:
    """Every contestant compared with one of them."""
    return [_timing(name, laps.walls, laps.cpus, reference) for name in laps.walls]


def _total(value: float) -> float:
    if not dist.is_initialized():
        return value
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor)


def _timing(
    name: str, walls: Mapping[str, list[float]], cpus: Mapping[str, list[float]], reference: str
) -> Timing:
    ratios = sorted(r / w for r, w in zip(walls[reference], walls[name], strict=True))
    n = len(ratios)
    return Timing(
        name,
        median(walls[name]),
        min(walls[name]),
        median(cpus[name]),
        median(ratios),
        ratios[n // 4],
        ratios[-1 - n // 4],
    )


def table(title: str, timings: list[Timing], reference: str) -> str:
    """The result as Markdown."""
    rows = [
        f"### {title}",
        "",
        f"| | ms, median | ms, best | CPU ms, all ranks | speed over {reference} (quartiles) |",
        "|---|---|---|---|---|",
    ]
    rows += [
        f"| {t.name} | {t.median_ms:.1f} | {t.best_ms:.1f} | {t.cpu_ms:.1f} "
        f"| {t.speedup:.2f} ({t.low:.2f} to {t.high:.2f}) |"
        for t in timings
    ]
    return "\n".join(rows)


def where() -> str:
    """Date, machine and commit, for the record."""
    here = Path(__file__).parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    ).stdout.strip()
    machine = f"{os.cpu_count()} cores {_processor()}"
    return f"{date.today()}, {machine}, torch {torch.__version__}, commit {commit}"


def _processor() -> str:
    """The processor's model as the kernel names it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def arguments(description: str | None, rounds: int = 15, **defaults: int | str) -> argparse.Namespace:
    """Command line: rounds, the file to append results to, and options typed by their defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--out", type=Path, help="append the result as one JSON line")
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser.parse_args()


def report(title: str, timings: list[Timing], reference: str, out: Path | None) -> None:
    """Print the table, and append it to the requested file."""
    print(table(title, timings, reference), flush=True)
    print(f"\n{where()}\n", flush=True)
    if out is not None:
        with out.open("a") as file:
            rows = [asdict(t) for t in timings]
            file.write(
                json.dumps({"title": title, "reference": reference, "where": where(), "rows": rows}) + "\n"
            )


_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of glibc's mallopt


def growth(make: Callable[[], Step], steps: int = 2) -> int:
    """Growth of this process at the peak of a step, in bytes, over its size before `make`.

    Resident memory, so whatever a system allocates is in it, seen by torch or not: run each contestant in
    processes of its own. Tensors get and give back pages of their own, lest a peak is that of a free list.

    Args:
        steps: before the one that is looked at: they make what stays.
    """
    libc = ctypes.CDLL(None)
    for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
        libc.mallopt(option, 1 << 16)
    before = _resident("VmRSS")
    step = make()
    for _ in range(steps):
        step()
    gc.collect()
    barrier()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current size
    step()
    peak = _resident("VmHWM")
    barrier()
    return peak - before


def _resident(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run on local gloo ranks with one thread each."""
    os.environ["OMP_NUM_THREADS"] = "1"
    return run_ranks(ranks, _ready, function, arguments)


def _ready(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        return function(*arguments)
    finally:
        dist.destroy_process_group()
