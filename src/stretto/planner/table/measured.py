"""What was measured in a row: seconds of a step, by whichever column there is, and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from stretto.planner.estimate import precision_of
from stretto.planner.machines.cluster import Cluster
from stretto.planner.table.cells import Cells
from stretto.spec.flops import hardware_flops_per_token, model_flops_per_token
from stretto.spec.job import Job

MemoryKind = Literal["allocated", "reserved", "device"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a row says of its run.

    Attributes:
        seconds: of a step; None: no column gives them.
        by: the column they come from, and which FLOPs it counts.
        memory: bytes of the fullest device; None: not recorded.
        kind: what the memory counts.
        out_of_memory: the run failed for lack of memory.
    """

    seconds: float | None
    by: str
    memory: float | None
    kind: MemoryKind
    out_of_memory: bool


def measured_of(cells: Cells, job: Job, cluster: Cluster) -> Measured:
    """Seconds of a step from iter_time_s, else from tokens a second, else from TFLOP/s, MFU or HFU."""
    failed, memory = cells.flag("oom"), cells.number("peak_mem_gib")
    kind = cells.word("memory_count") or "allocated"
    if memory is not None:
        cells.either("memory_count", kind)
    seconds, by = (None, "") if failed else _seconds(cells, job, cluster)
    return Measured(
        seconds=seconds,
        by=by,
        memory=memory and memory * 2**30,
        kind=cast(MemoryKind, kind),
        out_of_memory=failed,
    )


def _seconds(cells: Cells, job: Job, cluster: Cluster) -> tuple[float | None, str]:
    seconds = cells.number("iter_time_s")
    if seconds is not None:
        return seconds, "iter_time_s"
    devices, tokens = job.layout.world, job.global_batch * job.sequence
    rate = cells.number("tokens_per_s_per_gpu")
    if rate is not None:
        return tokens / (rate * devices), "tokens_per_s_per_gpu"
    mode = job.recompute.mode
    flops = {
        "model": tokens * model_flops_per_token(job.shape, job.sequence),
        "hardware": tokens
        * hardware_flops_per_token(job.shape, job.sequence, "none" if mode == "auto" else mode),
    }
    tflops, mfu, hfu = (cells.number(name) for name in ("tflops_per_gpu", "mfu_pct", "hfu_pct"))
    if tflops is not None:
        count = cells.either("flops_count", "model", "hardware, where recomputation is counted")
        return flops[count] / (tflops * 1e12 * devices), f"tflops_per_gpu ({count} FLOPs)"
    peak = cluster.device.peak(precision_of(job)) * devices
    if mfu is not None:
        return flops["model"] / (mfu / 100 * peak), "mfu_pct"
    if hfu is not None:
        return flops["hardware"] / (hfu / 100 * peak), "hfu_pct"
    return None, ""
