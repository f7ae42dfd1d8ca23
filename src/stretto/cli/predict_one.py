"""One layout for `stretto predict`: from words or a config to a job; its estimate as JSON and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stretto.errors import StrettoError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from stretto.planner.estimate import Estimate
    from stretto.planner.execution import Running
    from stretto.planner.machines.cluster import Cluster
    from stretto.planner.memory.fits import Bytes
    from stretto.planner.table.row import Row
    from stretto.spec.job import Job
    from stretto.spec.shape import ModelShape

GIB = 2**30
_BAR = 40  # characters of a whole step
# what words of a layout may name; the model and the cluster are options
_FIELDS = ("layout", "batch", "memory", "software")
_ALSO = ("dropout", "gpus", "node_size", "network", "network_gbs")


def spoken(words: Sequence[str], model: str, cluster: str) -> Row:
    """The layout that words say, as `tp=8 pp=4 batch=512`.

    Raises:
        StrettoError: a word that is none, a job that is not legal, or degrees that do not fit the cluster.
    """
    from stretto.planner.machines.catalogue import find_cluster
    from stretto.planner.table.row import read_row

    cells = _cells(words)
    shape, machine = model_named(model), find_cluster(cluster)
    cells.setdefault("seq", str(shape.sequence))
    if machine.devices is not None:
        cells.setdefault("gpus", str(machine.devices))
    return read_row({**cells, "model": model}, machine, shape)


def _cells(words: Sequence[str]) -> dict[str, str]:
    from stretto.planner.table.columns import SECTIONS, column

    fields = {*_ALSO, *(one.name for section in _FIELDS for one in SECTIONS[section])}
    cells = dict[str, str]()
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise StrettoError(f"{word!r} is no key=value", hint="as in tp=8 pp=4 micro=1 batch=512")
        name = column(key).name
        if name not in fields:
            raise StrettoError(f"{key} is no field of a layout", hint="--model and --cluster are options")
        if name in cells:
            raise StrettoError(f"{key} is given twice", hint="name every field at most once")
        cells[name] = value
    return cells


def model_named(name: str) -> ModelShape:
    """A model by its published name, in any usual spelling, or by its config.json.

    Raises:
        StrettoError: no such model.
    """
    from stretto.spec.presets import find_shape

    return find_shape(name)


def configured(config: str, overrides: Sequence[str], cluster: str) -> tuple[Job, Cluster, Running]:
    """The job of a config on a cluster.

    Raises:
        StrettoError: a config that does not load, a job that is not legal, a cluster with fewer devices.
    """
    from stretto.cli.jobs import load_language
    from stretto.planner.machines.catalogue import find_cluster
    from stretto.run.config.check import job_of
    from stretto.run.config.job import running_of
    from stretto.spec.rules import problems

    found = load_language(config, overrides)
    job = job_of(found)
    wrong = problems(job)
    if wrong:
        raise wrong[0]
    return job, find_cluster(cluster).sized(job.layout.world), running_of(found)


# ------------------------------------------------------------------ JSON


def facts(found: Estimate, defaults: Mapping[str, str]) -> dict[str, Any]:
    """An estimate as one JSON object."""
    job, held = found.job, found.memory
    return {
        "layout": str(job.layout),
        "gpus": job.layout.world,
        "schedule": job.schedule,
        "options": dict(job.options),
        "micro_batch": job.micro_batch,
        "global_batch": job.global_batch,
        "sequence": job.sequence,
        "recompute": job.recompute.mode,
        "zero": job.dp.mode,
        "step_time_s": found.seconds,
        "low": found.low,
        "high": found.high,
        "tokens_per_s": found.tokens_per_s,
        "tokens_per_s_per_gpu": found.tokens_per_s / job.layout.world,
        "tflops_per_gpu": found.tflops_per_gpu,
        "mfu": found.mfu,
        "hfu": found.hfu,
        "bubble": found.bubble,
        "parts": dict(found.parts),
        "dominant": found.dominant,
        "memory_gib": None if held is None else held.allocated.mid / GIB,
        "memory": None
        if held is None
        else {
            "allocated": _interval(held.allocated),
            "reserved": _interval(held.reserved),
            "device": _interval(held.device),
            "capacity_gib": held.capacity / GIB if held.capacity < float("inf") else None,
        },
        "verdict": None if held is None else held.verdict,
        "defaults": dict(defaults),
    }


def _interval(held: Bytes) -> dict[str, float]:
    return {"low_gib": held.low / GIB, "gib": held.mid / GIB, "high_gib": held.high / GIB}


# ------------------------------------------------------------------ text


def show(to: Console, found: Estimate, defaults: Mapping[str, str]) -> None:
    """Time, rates, memory, and where the time goes."""
    job = found.job
    machine = f"{job.layout.world} x {found.cluster.device.name} ({found.cluster.name})"
    batch = f"{job.microbatches} microbatches of {job.micro_batch} x {job.sequence} tokens"
    to.print(f"{job.layout} on {machine}, {job.schedule}{_options(job.options)}, {batch}", soft_wrap=True)
    table = plain_table("", "predicted", "")
    table.add_row("step time", _seconds(found.seconds), f"{_seconds(found.low)} to {_seconds(found.high)}")
    table.add_row(
        "tokens/s", f"{found.tokens_per_s:,.0f}", f"{found.tokens_per_s / job.layout.world:,.0f} a device"
    )
    table.add_row("TFLOP/s a device", f"{found.tflops_per_gpu:.1f}", "model FLOPs, attention in full")
    table.add_row("MFU", f"{100 * found.mfu:.1f}%", f"HFU {100 * found.hfu:.1f}%")
    table.add_row("bubble", f"{100 * found.bubble:.1f}%", "")
    if found.memory is not None:
        for name in ("allocated", "reserved", "device"):
            held: Bytes = getattr(found.memory, name)
            table.add_row(
                f"memory, {name}",
                f"{held.mid / GIB:.1f} GiB",
                f"{held.low / GIB:.1f} to {held.high / GIB:.1f}",
            )
        capacity = found.memory.capacity
        whole = "" if capacity == float("inf") else f"of {capacity / GIB:.1f} GiB"
        table.add_row("", found.memory.verdict, whole)
    to.print(table, soft_wrap=True)
    to.print()
    _bars(to, found)
    if defaults:
        told = "; ".join(f"{name}={value}" for name, value in defaults.items())
        to.print(f"taken, since it was not given: {told}", soft_wrap=True)


def plain_table(*names: str, left: int = 0) -> Table:
    """A table without lines; the first column and the last `left` ones are text, the others numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold")
    for at, name in enumerate(names):
        text = at == 0 or at >= len(names) - left
        justify = "left" if text else "right"
        table.add_column(
            name, justify=justify, no_wrap=True, min_width=None if at == 0 else max(9, len(name))
        )
    return table


def _bars(to: Console, found: Estimate) -> None:
    """A bar a part, the longest first."""
    table = plain_table("where the time goes", "s", "", "", left=1)
    for name, seconds in sorted(found.parts.items(), key=lambda part: -part[1]):
        share = seconds / found.seconds
        if share >= 0.0005:
            table.add_row(name, f"{seconds:.3g}", f"{100 * share:.1f}%", "█" * max(1, round(share * _BAR)))
    to.print(table, soft_wrap=True)


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 100 else f"{value:,.0f} s"


def _options(options: Mapping[str, Any]) -> str:
    told = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
    return f" ({told})" if told else ""
