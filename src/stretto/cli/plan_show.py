"""What `stretto plan` says: JSON, tables, and how far the search is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from stretto.planner.memory.fits import Fit
    from stretto.planner.search.ranking import Plan, Ranked
    from stretto.planner.search.task import Task

GIB = 2**30
_BAR = 12  # characters of a full device


@contextmanager
def watching() -> Generator[Callable[[int, int, int], None] | None]:
    """A line that tells how far the search is, where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status("searching") as status:
        yield lambda replayed, weighed, found: status.update(
            f"searching: {replayed} replayed, {weighed} weighed, {found} layouts found"
        )


# ------------------------------------------------------------------ JSON


def facts(plan: Plan, written: Path | None) -> dict[str, Any]:
    """All of the plan."""
    return {
        "candidates": plan.candidates,
        "replayed": plan.replayed,
        "feasible": plan.feasible,
        "seconds": plan.seconds,
        "gap": None if plan.gap == inf else plan.gap,
        "widened": plan.widened,
        "objective": plan.objective,
        "ranking": [_entry(one) for one in plan.ranking],
        "rejected": {
            name: {"count": one.count, "example": one.example} for name, one in plan.rejected.items()
        },
        "nearest": None if plan.nearest is None else _entry(plan.nearest),
        "written": str(written) if written and plan.ranking else None,
    }


def _entry(one: Ranked) -> dict[str, Any]:
    made, job = one.estimate, one.estimate.job
    sizes = dict(job.layout.sizes)
    return {
        "layout": one.words,
        "sizes": sizes,
        "gpus": job.layout.world,
        "micro_batch": job.micro_batch,
        "microbatches": job.microbatches,
        "schedule": job.schedule,
        "options": dict(job.options),
        "sequence_parallel": job.sequence_parallel,
        "context": job.context,
        "dp": {"mode": job.dp.mode, **job.dp.shards, "offload": job.dp.offload},
        "recompute": {"mode": job.recompute.mode, "blocks": job.recompute.blocks},
        "step_time_s": made.seconds,
        "low": made.low,
        "high": made.high,
        "tokens_per_s": made.tokens_per_s,
        "tokens_per_dollar": one.tokens_per_dollar,
        "tflops_per_gpu": made.tflops_per_gpu,
        "mfu": made.mfu,
        "bubble": made.bubble,
        "dominant": made.dominant,
        "parts": dict(made.parts),
        "why": one.why,
        **_memory(made.memory),
    }


def _memory(fit: Fit | None) -> dict[str, Any]:
    if fit is None:
        return {"memory_gib": None, "verdict": None}
    return {
        "memory_gib": fit.device.mid / GIB,
        "memory_low_gib": fit.device.low / GIB,
        "memory_high_gib": fit.device.high / GIB,
        "allocated_gib": fit.allocated.mid / GIB,
        "capacity_gib": None if fit.capacity == inf else fit.capacity / GIB,
        "verdict": fit.verdict,
    }


# ------------------------------------------------------------------ text


def show(to: Console, plan: Plan, task: Task, written: Path | None) -> None:
    """The ranking as a table, then the reasons."""
    name, devices = task.cluster.device.name, task.devices
    to.print(
        f"{devices} x {name}, batch {task.global_batch} x {task.sequence} tokens: "
        f"{plan.candidates:,} candidates, {plan.replayed} replayed, {plan.feasible} weighed that fit, "
        f"{plan.seconds:.1f} s",
        soft_wrap=True,
    )
    if plan.widened:
        to.print("nothing fits before ZeRO 2 and 3 beside a pipeline and offload are tried: they were")
    if not plan.ranking:
        _nothing(to, plan)
    else:
        to.print(_table(plan), soft_wrap=True)
        for place, one in enumerate(plan.ranking, 1):
            to.print(f"{place:>2}. {one.words}", soft_wrap=True)
            to.print(f"    {one.why}", soft_wrap=True)
        if plan.gap:
            to.print(f"nothing that was not looked at is faster by more than {100 * plan.gap:.1f}%")
    for reason, one in plan.rejected.items():
        to.print(f"turned down by {reason}: {one.count:,}, as {one.example}", soft_wrap=True)
    if written and plan.ranking:
        to.print(f"wrote {written}: stretto train {written}", soft_wrap=True)


def _nothing(to: Console, plan: Plan) -> None:
    to.print(
        "nothing fits" if plan.gap < inf else "nothing was found that fits; not all was looked at in time"
    )
    if plan.nearest is not None:
        to.print(f"nearest: {plan.nearest.words}: {plan.nearest.why}", soft_wrap=True)


def _table(plan: Plan) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    dollars = plan.objective == "tokens_per_dollar"
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    columns = [
        "",
        "step s",
        "interval",
        "tokens/s",
        "TFLOP/s",
        "MFU",
        "bubble",
        "memory GiB",
        "",
        "most beside",
    ]
    for column in (*columns, *(["tokens/$"] if dollars else [])):
        table.add_column(column, justify="left" if column in ("", "most beside") else "right")
    for place, one in enumerate(plan.ranking, 1):
        made, fit = one.estimate, one.estimate.memory
        row = [
            str(place),
            f"{made.seconds:.4g}",
            f"{made.low:.3g}-{made.high:.3g}",
            f"{made.tokens_per_s:,.0f}",
            f"{made.tflops_per_gpu:.1f}",
            f"{100 * made.mfu:.1f}%",
            f"{100 * made.bubble:.1f}%",
            "" if fit is None else f"{fit.device.mid / GIB:.1f}",
            "" if fit is None else _bar(fit),
            made.dominant,
        ]
        if dollars:
            row.append("" if one.tokens_per_dollar is None else f"{one.tokens_per_dollar:,.0f}")
        table.add_row(*row)
    return table


def _bar(fit: Fit) -> str:
    """How full the device is."""
    if fit.capacity == inf:
        return ""
    full = min(_BAR, round(_BAR * fit.device.mid / fit.capacity))
    return "#" * full + "." * (_BAR - full) + (" tight" if fit.verdict == "tight" else "")
